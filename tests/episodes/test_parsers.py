"""Tool calls of every family: real examples, what is wrong with a call, and that nothing raises."""

import json
import keyword
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jrl.episodes.parsers import PARSERS, Call, Malformed, get_parser
from jrl.episodes.tools import check_call
from jrl.errors import UserError

BAR, LOW = "\uff5c", "\u2581"
ADD = Call("add", {"a": 1, "b": [2, "x"]})
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array"}, "s": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}


def deepseek(words):
    return f"<{BAR}{words.replace(' ', LOW)}{BAR}>"


OPEN, CLOSE, SEP = map(deepseek, ("tool call begin", "tool call end", "tool sep"))
EXAMPLES = [
    ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}\n</tool_call>'),
    (
        "hermes",
        "<think>call <tool_call></think>Sure.<tool_call>"
        '{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": [2, \\"x\\"]}"}</tool_call><|im_end|>',
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n"
        '[2, "x"]\n</parameter>\n</function>\n</tool_call>',
    ),
    ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": [2, "x"]}}<|eom_id|>'),
    ("llama3", '{"name": "add", "parameters": {"a": 1, "b": [2, "x"]}}<|eot_id|>'),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}]</s>'),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2, "x"]}</s>'),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1, "b": [2, "x"]}'),
    ("gemma", 'I add.\n```tool_code\nprint(add(a=1, b=[2, "x"]))\n```'),
    ("gemma", "```tool_code\nadd(a=1, b=(2, 'x'))\n```<end_of_turn>"),
    ("deepseek", f'{OPEN}function{SEP}add\n```json\n{{"a": 1, "b": [2, "x"]}}\n```{CLOSE}'),
    ("deepseek", f'{OPEN}add{SEP}{{"a": 1, "b": [2, "x"]}}{CLOSE}'),
    (
        "gpt_oss",
        "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.add <|constrain|>json<|message|>{"a": 1, "b": [2, "x"]}<|call|>',
    ),
    (
        "gpt_oss",
        "<|start|>assistant to=functions.add<|channel|>commentary json<|message|>"
        '{"a": 1, "b": [2, "x"]}<|call|>',
    ),
]


@pytest.mark.parametrize(("family", "text"), EXAMPLES)
def test_calls_as_the_models_write_them(family, text):
    (call,) = PARSERS[family].parse(text, {"add": SCHEMA})
    assert call._replace(id="") == ADD


def test_the_policys_own_ids_are_read_where_a_format_has_them():
    mistral = PARSERS["mistral"]
    assert mistral.parse('[TOOL_CALLS]f[CALL_ID]abc456789[ARGS]{"a": 1}', {})[0].id == "abc456789"
    call = Call("f", {"a": 1}, "abc456789")
    assert mistral.parse(mistral.render(call), {}) == (call,)
    assert mistral.parse('[TOOL_CALLS][{"name": "f", "id": 7}]', {})[0].id == ""


@pytest.mark.parametrize("family", PARSERS)
def test_words_are_no_call(family):
    for text in ("", "The answer is 7.", "{7} or [1, 2]", "```python\nadd(a=1)\n```"):
        assert PARSERS[family].parse(text, {}) == ()


@pytest.mark.parametrize("between", ["; ", ",", "\n"])
def test_calls_behind_a_tag_are_divided_as_others(between):
    one, two = ('{"name": "%s", "parameters": {}}' % name for name in "ab")  # noqa: UP031
    text = f"<|python_tag|>{one}{between}{two}<|eom_id|>"
    assert [call.name for call in PARSERS["llama3"].parse(text, {"a": {}, "b": {}})] == ["a", "b"]


def test_several_calls_in_order():
    calls = (ADD, Call("sub", {"s": "a < b"}))
    for family, parser in PARSERS.items():
        between = ";" if family == "llama3" else "\n"
        text = between.join(map(parser.render, calls))
        assert parser.parse(text, {"add": SCHEMA, "sub": SCHEMA}) == calls, family


BROKEN = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {', "</tool_call> is missing"),
    ("hermes", "<tool_call>{'name': 'add'}</tool_call>", "not JSON"),
    ("hermes", '<tool_call>{"name": "add", "arguments": NaN}</tool_call>', "NaN is not JSON"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'with a "name"'),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "a JSON object"),
    ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
    ("qwen3_coder", "<tool_call>add(1)</tool_call>", "<function=NAME>"),
    ("qwen3_coder", "<tool_call><function=add>a: 1</function></tool_call>", "not a <parameter"),
    ("llama3", '{"name": "add", "parameters": {"a": 1}', "not JSON"),
    ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1}', "not JSON"),
    ("mistral", '[TOOL_CALLS][{"name": "add"', "not JSON"),
    ("mistral", "[TOOL_CALLS][]", "without a call"),
    ("gemma", "```tool_code\nadd(a=1)", "``` is missing"),
    ("gemma", "```tool_code\nadd(1)\n```", "by name"),
    ("gemma", "```tool_code\nadd(a=open('x'))\n```", "JSON values"),
    ("gemma", "```tool_code\nimport os\n```", "must be one call"),
    ("gemma", "```tool_code\n" + "(" * 5000 + "\n```", "not Python"),
    ("gemma", "```tool_code\nadd(a=" + "-" * 60_000 + "1)\n```", ""),
    ("deepseek", f"{OPEN}add{SEP}{{}}", "is missing"),
    ("deepseek", f"{OPEN}{SEP}{{}}{CLOSE}", "without the name"),
    ("gpt_oss", "<|channel|>commentary to=functions.add<|message|>{", "<|call|> is missing"),
    ("gpt_oss", "<|channel|>commentary to=functions.add", "<|message|> is missing"),
]


@pytest.mark.parametrize(("family", "text", "message"), BROKEN)
def test_broken_structure_is_told(family, text, message):
    (call,) = PARSERS[family].parse(text, {"add": {}})
    assert (type(call), call.kind) == (Malformed, "structure")
    assert message in call.reason
    assert len(call.reason) < 400


CONTENT = [
    (Call("ad", {}), "there is no tool 'ad'; use add"),
    (Call("add", {}), "'a' is a required property"),
    (Call("add", {"a": "1"}), "arguments['a']: '1' is not of type 'integer'"),
    (Call("add", {"a": 1, "z": 2}), "'z' was unexpected"),
]


@pytest.mark.parametrize(("call", "message"), CONTENT)
def test_wrong_content_is_told(call, message):
    mistake = check_call(call, {"add": SCHEMA})
    assert mistake.kind == "content"
    assert message in mistake.reason


def test_right_content_passes():
    call = Call("add", {"a": 1, "s": "x"})
    assert check_call(call, {"add": SCHEMA}) is call


def test_types_come_from_the_schema_where_a_format_has_none():
    call = Call("f", {"text": "1", "number": 1, "free": "1 x"})
    kinds = {"text": {"type": "string"}, "number": {"type": "integer"}}
    coder = PARSERS["qwen3_coder"]
    assert coder.parse(coder.render(call), {"f": {"properties": kinds}}) == (call,)
    assert coder.parse(coder.render(call), {})[0].arguments["text"] == 1


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
names = st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,20}", fullmatch=True).filter(
    lambda name: not keyword.iskeyword(name) and name != "print"
)
MARKS = ["<tool_call>", "</tool_call>", "</think>", "<function=f>", "</function>", "<parameter=a>"]
MARKS += ["</parameter>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "```tool_code\n", "\n```"]
MARKS += [OPEN, CLOSE, SEP, "<|channel|>", "to=functions.f", "<|message|>", "<|call|>", "<|start|>"]
hostile = st.lists(st.sampled_from(MARKS) | st.text(max_size=5), max_size=6).map("".join)


@pytest.mark.parametrize("family", PARSERS)
@settings(max_examples=60, deadline=None)
@given(name=names, arguments=st.dictionaries(names, json_values | hostile, max_size=4))
def test_what_is_rendered_is_read_back(family, name, arguments):
    schemas = {name: {}}
    if family == "qwen3_coder":  # nothing is escaped there, and strings have no quotes
        strings = [value for value in arguments.values() if isinstance(value, str)]
        if any(ends_a_value(value) for value in strings):
            return
        kinds = {k: {"type": "string"} for k, v in arguments.items() if isinstance(v, str)}
        schemas = {name: {"properties": kinds}}
    call, parser = Call(name, arguments), PARSERS[family]
    assert parser.parse(parser.render(call), schemas) == (call,)


def ends_a_value(text):
    """Whether a text spells what ends a parameter of Qwen3-Coder's, which has no escapes."""
    ends = ("</parameter>", "<parameter=", "</function>")
    return any(mark in text for mark in ends) or text != text.strip("\n")


def as_a_model_writes(family, name, arguments):
    """A call whose strings are not escaped more than JSON asks for."""
    body = json.dumps(arguments, ensure_ascii=False)
    return {
        "hermes": f'<tool_call>\n{{"name": "{name}", "arguments": {body}}}\n</tool_call>',
        "llama3": f'{{"name": "{name}", "parameters": {body}}}',
        "mistral": f'[TOOL_CALLS][{{"name": "{name}", "arguments": {body}}}]',
        "deepseek": f"{OPEN}{name}{SEP}{body}{CLOSE}",
        "gpt_oss": f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{body}"
        "<|call|>",
        "gemma": "```tool_code\n"
        + f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"
        + "\n```",
        "qwen3_coder": "\n".join(
            [
                f"<tool_call>\n<function={name}>",
                *(f"<parameter={k}>\n{v}\n</parameter>" for k, v in arguments.items()),
                "</function>\n</tool_call>",
            ]
        ),
    }[family]


@pytest.mark.parametrize("family", PARSERS)
@settings(max_examples=100, deadline=None)
@given(
    name=names, arguments=st.dictionaries(names, hostile, min_size=1, max_size=3), data=st.data()
)
def test_marks_inside_arguments_are_text(family, name, arguments, data):
    if family == "qwen3_coder" and any(map(ends_a_value, arguments.values())):
        return
    schemas = {name: {"properties": {k: {"type": "string"} for k in arguments}}}
    text = as_a_model_writes(family, name, arguments)
    after = data.draw(st.sampled_from(["", "\n\nShall I go on?", "\n\nDone."]))
    assert PARSERS[family].parse(text + after, schemas) == (Call(name, arguments),)


ANSWERS = [
    '{"name": "Ada", "born": 1815}',
    '{"city": "Oslo", "degrees": 3}',
    '{"name": "Ada", "parameters": {"x": 1}}',
    '{"name": "Ada", "parameters": {',
    '{"name": {"first": "Ada"}, "parameters": {}}',
    "{'name': 'add'}",
    '[{"name": "add"}]',
]


@pytest.mark.parametrize("text", ANSWERS)
def test_json_that_names_no_tool_on_offer_is_an_answer(text):
    for family in PARSERS:
        assert PARSERS[family].parse(text, {"add": SCHEMA}) == (), family
    marked = PARSERS["llama3"].parse('<|python_tag|>{"name": "Ada", "parameters": {}}', {"add": {}})
    assert marked == (Call("Ada", {}),)  # a call by its mark, of a tool that there is not


@pytest.mark.parametrize("family", sorted(PARSERS.keys() - {"gpt_oss"}))
def test_thoughts_hold_no_calls_and_arguments_may_hold_their_end(family):
    """gpt-oss thinks in messages of their own."""
    ends = "[/THINK]" if family == "mistral" else "</think>"
    argument = f"a {ends} b" if family != "gemma" else f"a {ends}"
    call, other = (as_a_model_writes(family, "add", {"s": x}) for x in (argument, "no"))
    parse, calls = PARSERS[family].parse, (Call("add", {"s": argument}),)
    schemas = {"add": SCHEMA}
    assert parse(call, schemas) == calls
    assert parse(f"I could:\n{other}\nor not.{ends}No need.", schemas) == ()
    assert parse(f"hm\n{other}{ends}\n{call}", schemas) == calls
    begins = ends.replace("/", "")
    assert parse(f"{call}\n{begins}Or:\n{other}{ends}", schemas) == calls
    for opened in (begins, ""):  # an end that ends nothing is a word
        assert parse(f"{opened}hm\n{ends}\n{call}\nSo {ends} ends it.", schemas) == calls
    assert parse(f"\n{begins}I could:\n{other}\nor", schemas) == ()  # cut in its thought
    assert parse(f"{begins}I could:\n{call}\nor", schemas) == ()


def test_a_mark_in_words_beside_calls_is_a_word():
    hermes, mistral = PARSERS["hermes"].parse, PARSERS["mistral"].parse
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    one = (Call("add", {"a": 1}),)
    assert hermes(f"I use <tool_call> for it.\n{call}\nThat was a <tool_call>.", {}) == one
    assert mistral('[TOOL_CALLS]add[ARGS]{"a": 1}\nSee [TOOL_CALLS] there.', {}) == one
    malformed = "<tool_call>add(1)</tool_call>\n"
    assert [type(x) for x in hermes(malformed + call, {})] == [Malformed, Call]


ONE, TWO = Call("add", {"a": 1}), Call("add", {"a": 2})
SILENT = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}\n{"name": "add", '
     '"arguments": {"a": 2}}</tool_call>', (ONE, TWO)),
    ("hermes", '<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>', (ONE,)),
    ("hermes", '<tool_call>{"name": "add", "arguments": null}</tool_call>', (Call("add", {}),)),
    ("hermes", '<tool_call>{"name": "add", "arguments": ""}</tool_call>', (Call("add", {}),)),
    ("llama3", 'I add.\n\n{"name": "add", "parameters": {"a": 1}}', (ONE,)),
    ("llama3", '{"name": "add", "parameters": {"a": 1}}, {"name": "add", "parameters": {"a": 2}}',
     (ONE, TWO)),
    ("llama3", 'So:\n```json\n{"name": "add", "parameters": {"a": 1}}\n```', ()),
    ("llama3", '{"name": "add", "sum": 7}', ()),
    ("llama3", '{"of": {"name": "add", "a": 1', ()),
    ("mistral", '[TOOL_CALLS]fs/add:it[ARGS]{"a": 1}', (Call("fs/add:it", {"a": 1}),)),
    ("gemma", "```tool_code \r\n[add(a=1), add(a=2)]\r\n```", (ONE, TWO)),
    ("gpt_oss", "<|channel|>final<|message|>Write to=functions.add there.<|return|>", ()),
    ("mistral", '[TOOL_CALLS] {"name": "add", "arguments": {"a": 1}}\n{"name": "add", "arguments": '
     '{"a": 2}}', (ONE, TWO)),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "calls"), SILENT)
def test_no_call_is_lost_and_no_answer_taken(family, text, calls):
    assert PARSERS[family].parse(text, {"add": SCHEMA}) == calls


REFUSED = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "1e999"),
    ("hermes", '<tool_call>{"name": "add", "a": 1}</tool_call>', 'the object "arguments"'),
    ("gemma", "```tool_code\nadd(a=1, a=2)\n```", "there twice"),
]


@pytest.mark.parametrize(("family", "text", "message"), REFUSED)
def test_no_argument_is_lost(family, text, message):
    (call,) = PARSERS[family].parse(text, {"add": SCHEMA})
    assert message in call.reason


TYPED = [
    ("True", {"type": "boolean"}, True),
    ("false", {"type": "boolean"}, False),
    ("None", {"type": ["string", "null"]}, None),
    ("{'a': (1, None)}", {"type": "object"}, {"a": [1, None]}),
    ("['x', true]", {"anyOf": [{"type": "array"}, {"type": "null"}]}, ["x", True]),
    ("True", {"type": "string"}, "True"),
    ("3", {"enum": ["3", "4"]}, "3"),
    ("True", {}, "True"),
    ("maybe", {"type": "boolean"}, "maybe"),
    ("open('x')", {"type": "object"}, "open('x')"),
    ("TRUE", {"type": "boolean"}, True),
    ("{'a': True}", {"$ref": "#/$defs/P"}, {"a": True}),
    ("{'a': None}", {"allOf": [{"$ref": "#/$defs/P"}], "default": {}}, {"a": None}),
    ("None", {"anyOf": [{"$ref": "#/$defs/P"}, {"type": "null"}]}, None),
    ("1", {"$ref": "#/$defs/E"}, "1"),
    ("3", {"const": 3}, 3),
    ("1", {"$ref": "#/$defs/LOOP"}, 1),
]
DEFINED = {
    "P": {"type": "object"},
    "E": {"enum": ["1", "2"]},
    "LOOP": {"$ref": "#/$defs/LOOP"},
}


@pytest.mark.parametrize(("text", "schema", "value"), TYPED)
def test_literals_without_quotes_are_read_by_the_schema(text, schema, value):
    text = (
        f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    )
    (call,) = PARSERS["qwen3_coder"].parse(
        text, {"f": {"properties": {"a": schema}, "$defs": DEFINED}}
    )
    assert call.arguments["a"] == value
    assert type(call.arguments["a"]) is type(value)


def test_a_coder_may_leave_the_opening_tag_out_for_tools_on_offer():
    body = "I write.\n\n<function=add>\n<parameter=a>\n3\n</parameter>\n</function>\n</tool_call>"
    parse = PARSERS["qwen3_coder"].parse
    assert parse(body, {"add": SCHEMA}) == (Call("add", {"a": 3}),)
    assert parse(body, {"other": SCHEMA}) == ()
    unclosed = body.replace("3\n</parameter>", "3\n<parameter=s>\nx")
    assert parse(unclosed, {"add": SCHEMA}) == (Call("add", {"a": 3, "s": "x"}),)


@pytest.mark.parametrize("family", PARSERS)
def test_half_surrogates_do_not_leave(family):
    text = as_a_model_writes(family, "add", {"s": "x"})
    text = text.replace("x", "a\\ud800b") if family != "qwen3_coder" else text
    (call,) = PARSERS[family].parse(text, {"add": SCHEMA})
    call.arguments["s"].encode()
    assert family == "qwen3_coder" or call.arguments["s"] == "a\ufffdb"


def test_reasons_hold_no_addresses():
    for value in ("x", "f(1)", "lambda: 0", "{1: x}", "[*y]"):
        (malformed,) = PARSERS["gemma"].parse(f"```tool_code\nadd(a={value})\n```", {})
        assert "0x" not in malformed.reason
        assert "a" in malformed.reason


def test_what_cannot_be_checked_is_told_without_addresses(monkeypatch):
    why = "it cannot be checked: TypeError('<function f at 0x7f12ab> and <A object at 0x1>')"
    monkeypatch.setattr("jrl.episodes.tools.fault", lambda *parts: why)
    mistake = check_call(Call("add", {}), {"add": SCHEMA})
    assert isinstance(mistake, Malformed)
    assert mistake.reason.endswith("TypeError('an expression and an expression')")


pieces = st.sampled_from(
    [*MARKS, "{", "}", "[", "]", '"', ":", ",", "\\", "name", "f(a=", "1", " "]
)


@pytest.mark.parametrize("family", PARSERS)
@settings(max_examples=150, deadline=None)
@given(st.lists(pieces | st.text(max_size=4), max_size=30).map("".join))
def test_nothing_raises(family, text):
    for call in PARSERS[family].parse(text, {"f": SCHEMA}):
        assert isinstance(call, Call | Malformed)
        if isinstance(call, Call):
            assert isinstance(call.name, str)
            assert isinstance(check_call(call, {"f": SCHEMA}), Call | Malformed)


@pytest.mark.parametrize("family", PARSERS)
def test_long_texts_take_little_time(family):
    begin = time.perf_counter()
    for piece in (*MARKS, " ", "\n", "{", '{"name": ', "<", "["):
        PARSERS[family].parse(piece * (20_000 // len(piece)), {})
        PARSERS[family].parse(f"<tool_call><function=f>{' ' * 20_000}x</function></tool_call>", {})
    spaces = " " * 40_000
    PARSERS[family].parse(f"[TOOL_CALLS]write{spaces}", {})
    PARSERS[family].parse(f"<tool_call><function=f><parameter=a>{spaces}", {})
    PARSERS[family].parse("<|channel|>analysis" * 2_000, {})
    assert time.perf_counter() - begin < 10


HERMES_3 = """{{- "in <tool_call></tool_call> XML tags as follows: <tool_call>
{'name': NAME, 'arguments': ARGUMENTS}
</tool_call>" }}{{- '
<tool_call>
' }}{{- '{' }}{{- '"name": "' }}"""
MARKED = {
    "hermes": (HERMES_3, '{{- \'<tool_call>\\n{"name": "\' }}'),
    "qwen3_coder": ("{{- '<tool_call>\\n<function=' + name + '>' }}{{- '<parameter=' }}",),
    "llama3": ("Environment: ipython {{- '<|python_tag|>' }}",),
    "mistral": ("{{- '[TOOL_CALLS][' }}", "{{ '[TOOL_CALLS]' + name + '[ARGS]' }}"),
    "gemma": ("{{ '<start_of_turn>' + role }}",),
    "deepseek": (f"{{{{ '{OPEN}' + name }}}}",),
    "gpt_oss": ("{{- '<|start|>assistant<|channel|>final' }}",),
}


@pytest.mark.parametrize("family", MARKED)
def test_a_parser_of_another_family_is_refused(family):
    assert set(MARKED) == set(PARSERS)
    for template in MARKED[family]:
        assert get_parser(family, template) is PARSERS[family]
        for other in PARSERS.keys() - {family}:
            message = f"parser = '{other}' does not fit .* chat template is of '{family}'"
            with pytest.raises(UserError, match=message):
                get_parser(other, template)


def test_families_by_name():
    with pytest.raises(UserError, match="did you mean 'hermes'"):
        get_parser("herms")
    # Without a family's marks a template writes no tools, which are then described in words.
    assert get_parser("hermes", "{{ messages }}").name == "hermes"
