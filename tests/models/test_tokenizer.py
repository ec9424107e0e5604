"""The tokenizers: against transformers on the same files, and each way the files can be wrong."""

import base64
import itertools
import json
import threading
import time

import pytest

from jrl.errors import UserError
from jrl.models import tokenizer as tokenizer_module
from jrl.models.file_tokenizer import _growth, load_tokenizer
from jrl.models.tokenizer import char_tokenizer, check_vocab

LINES = [
    "A farmer has 12 sheep and buys 30 more; how many sheep are there now?",
    "The train left at 9:45 and arrived 2 hours later.",
    "Ships, whales and seven small islands: 3 + 4 = 7.",
    "Un caf\u00e9, s'il vous pla\u00eet. \u4f60\u597d",
]
SPECIAL = ["<|begin|>", "<|turn|>", "<|end|>", "<|pad|>", "<|stop|>"]

CHATML = """
{%- if tools %}
    {{- '<|turn|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|turn|>system\\n' + messages[0].content + '<|end|>\\n' }}
{%- endif %}
{%- set state = namespace(last=0) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}
        {%- set state.last = (messages|length - 1) - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- set old = message.role == 'assistant' and loop.index0 < state.last %}
    {%- if old and '</think>' in message.content %}
        {{- '<|turn|>assistant\\n' }}
        {{- message.content.split('</think>')[-1].lstrip('\\n') + '<|end|>\\n' }}
    {%- else %}
        {{- '<|turn|>' + message.role + '\\n' + message.content + '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|turn|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
HEADERS = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|turn|>system<|turn|>\\n\\nToday: " + date_string + "\\n" + system + "<|stop|>" }}
{%- for message in messages %}
    {{- '<|turn|>' + message['role'] + '<|turn|>\\n\\n' + message['content'] | trim + '<|stop|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|turn|>assistant<|turn|>\\n\\n' }}
{%- endif %}
"""
TURNS = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{% set first = messages[0]['content'] + '\\n\\n' %}
{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{% for message in rest %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception("roles must alternate") }}
    {% endif %}
    {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<|turn|>' + role + '\\n' + (first if loop.first else '') }}
    {%- if message['content'] is string %}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable %}
        {% for part in message['content'] %}{{ part['text'] }}{% endfor %}
    {%- endif %}{% if role == 'model' %}{% generation %}{{ '!' }}{% endgeneration %}{% endif %}
{{ '<|end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|turn|>model\\n' }}{% endif %}
"""
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "turns": TURNS}
TALKS = [
    [{"role": "user", "content": "How many?"}],
    [
        {"role": "system", "content": "Be brief. "},
        {"role": "user", "content": " 3 + 4? "},
        {"role": "assistant", "content": "<think>easy</think>\n7"},
        {"role": "user", "content": "caf\u00e9 <b>?"},
    ],
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A directory with a byte-level BPE tokenizer.json."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(LINES, trainer)
    backend.enable_truncation(max_length=4)
    directory = tmp_path_factory.mktemp("trained")
    backend.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def checkpoint(trained, tmp_path):
    """Writes a checkpoint directory: make(tokenizer_config, **other JSON files) -> path."""

    def make(settings=None, **files):
        (tmp_path / "tokenizer.json").write_bytes((trained / "tokenizer.json").read_bytes())
        if settings is None:
            settings = {"eos_token": "<|end|>", "bos_token": {"content": "<|begin|>"}}
        for name, value in {"tokenizer_config": settings, **files}.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(value))
        return tmp_path

    return make


def reference(directory, template=None):
    import transformers

    backend = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"),
        bos_token="<|begin|>",
        eos_token="<|end|>",
        clean_up_tokenization_spaces=False,
    )
    backend.chat_template = template
    return backend


def test_encode_and_decode_agree_with_transformers(checkpoint):
    directory = checkpoint()
    ours, theirs = load_tokenizer(directory), reference(directory)
    for text in [*LINES, "<|turn|>user\nsheep , sheep<|end|>", "", "  two  spaces \n"]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids, skip_special=False) == text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.vocab_size == len(theirs) == 330
    assert ours.encode("<|end|>") == [ours.eos_id] == [theirs.eos_token_id]
    assert ours.decode([ours.eos_id]) == ""


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("talk", TALKS)
def test_chat_agrees_with_transformers(checkpoint, name, talk, monkeypatch):
    template = TEMPLATES[name]
    directory = checkpoint(
        {"eos_token": "<|end|>", "bos_token": "<|begin|>", "chat_template": template}
    )
    ours, theirs = load_tokenizer(directory), reference(directory, template)
    for options in (
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": True, "enable_thinking": False, "date_string": "1 Jan 2020"},
    ):
        expected = theirs.apply_chat_template(talk, tokenize=False, **options)
        assert ours.chat(talk, **options) == expected
        assert "?" in expected
    tools = [{"name": "caf\u00e9 <b>", "arguments": {"b": 1, "a": [2]}}]
    expected = theirs.apply_chat_template(talk, tokenize=False, tools=tools)
    assert ours.chat(talk, tools=tools, add_generation_prompt=False) == expected


def test_chat_ends_with_the_assistants_header_unless_told(checkpoint):
    ours = load_tokenizer(checkpoint({"eos_token": "<|end|>", "chat_template": CHATML}))
    text = ours.chat(TALKS[0])
    assert text == "<|turn|>user\nHow many?<|end|>\n<|turn|>assistant\n"
    assert ours.chat(TALKS[0], enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    ids = ours.encode(text)
    assert ids[0] == ours.encode("<|turn|>")[0]
    assert ids.count(ours.eos_id) == 1


def test_named_templates_and_files(checkpoint):
    templates = [
        {"name": "default", "template": "D{{ messages[0].content }}"},
        {"name": "rag", "template": "R"},
    ]
    directory = checkpoint({"eos_token": "<|end|>", "chat_template": templates})
    ours = load_tokenizer(directory)
    assert ours.chat(TALKS[0]) == "DHow many?"
    assert ours.chat(TALKS[0], template="rag") == "R"
    with pytest.raises(UserError, match="template = 'rug'; did you mean 'rag'"):
        ours.chat(TALKS[0], template="rug")
    (directory / "chat_template.jinja").write_text("F{{ eos_token }}")
    assert load_tokenizer(directory).chat(TALKS[0]) == "F<|end|>"


def test_stop_ids_come_from_every_file(checkpoint):
    eos, pad, stop = SPECIAL.index("<|end|>"), SPECIAL.index("<|pad|>"), SPECIAL.index("<|stop|>")
    assert load_tokenizer(checkpoint()).stop_ids == (eos,)
    assert load_tokenizer(checkpoint()).pad_id == eos
    both = load_tokenizer(
        checkpoint(
            {"eos_token": {"content": "<|end|>"}, "pad_token": "<|pad|>"},
            generation_config={"eos_token_id": [stop, eos]},
            config={"eos_token_id": 77},
        )
    )
    assert both.stop_ids == (eos, stop)
    assert both.pad_id == pad
    assert load_tokenizer(checkpoint({}, generation_config={"eos_token_id": stop})).eos_id == stop


def test_stop_ids_fall_back_to_the_models_config(checkpoint):
    assert load_tokenizer(checkpoint({}, config={"eos_token_id": 3})).stop_ids == (3,)


def test_missing_and_broken_files(checkpoint, tmp_path_factory):
    with pytest.raises(UserError, match=r"tokenizer\.json is missing; write it with"):
        load_tokenizer(tmp_path_factory.mktemp("empty"))
    with pytest.raises(UserError, match="names an end-of-sequence token"):
        load_tokenizer(checkpoint({}))
    with pytest.raises(UserError, match="eos_token = '<none>' .* is not in the vocabulary"):
        load_tokenizer(checkpoint({"eos_token": "<none>"}))
    directory = checkpoint()
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json: not valid JSON"):
        load_tokenizer(directory)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(directory)


BLOB = base64.b64encode((0).to_bytes(4, "little") + b"a\0" + b"x" * 5000).decode()
MULTIPLIERS = {
    "a letter": {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 10_000_000},
    "in steps": {
        "type": "Sequence",
        "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 30}] * 3,
    },
    "before": {"type": "Prepend", "prepend": "b" * 10_000_000},
}


@pytest.mark.parametrize("name", MULTIPLIERS)
def test_a_normalizer_that_multiplies_text_is_refused(checkpoint, name):
    directory = checkpoint()
    content = json.loads((directory / "tokenizer.json").read_text())
    content["normalizer"] = MULTIPLIERS[name]
    (directory / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="its normalizer makes up to .* of one; at most"):
        load_tokenizer(directory)


@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer"])
def test_a_pattern_without_end_in_a_tokenizer_gives_up(checkpoint, part):
    directory = checkpoint()
    content = json.loads((directory / "tokenizer.json").read_text())
    pattern = {"Regex": "(a+)+$"}
    content[part] = {
        "normalizer": {"type": "Replace", "pattern": pattern, "content": "b"},
        "pre_tokenizer": {
            **{"type": "Split", "pattern": pattern},
            **{"behavior": "Isolated", "invert": False},
        },
    }[part]
    (directory / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="cannot be used on .*retry-limit"):
        load_tokenizer(directory).encode("a" * 4000 + "!")


def test_usual_normalizers_are_read(checkpoint):
    directory = checkpoint()
    content = json.loads((directory / "tokenizer.json").read_text())
    steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "NFKC"}]
    steps += [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    content["normalizer"] = {"type": "Sequence", "normalizers": steps}
    (directory / "tokenizer.json").write_text(json.dumps(content))
    load_tokenizer(directory)
    blob = {"type": "Precompiled", "precompiled_charsmap": BLOB}
    assert _growth(blob) == 5000


def test_chat_without_a_template_says_what_to_set(checkpoint):
    for tokenizer in (load_tokenizer(checkpoint()), char_tokenizer()):
        with pytest.raises(UserError, match=r"no chat template; set data\.template"):
            tokenizer.chat(TALKS[0])


def test_a_template_may_refuse_but_not_reach_out(checkpoint):
    config = {"eos_token": "<|end|>", "chat_template": TURNS}
    twice = [TALKS[0][0], TALKS[0][0]]
    with pytest.raises(UserError, match="says: roles must alternate"):
        load_tokenizer(checkpoint(config)).chat(twice)
    config["chat_template"] = "{{ messages.__class__.__mro__ }}"
    with pytest.raises(UserError, match="unsafe"):
        load_tokenizer(checkpoint(config)).chat(twice)
    config["chat_template"] = "{% for %}"
    with pytest.raises(UserError, match="says:"):
        load_tokenizer(checkpoint(config)).chat(twice)


def test_check_vocab_names_both_sizes():
    tokenizer = char_tokenizer()
    check_vocab(tokenizer, 48)
    check_vocab(tokenizer, 64)
    with pytest.raises(UserError, match="48 ids .* only 47"):
        check_vocab(tokenizer, 47)


def test_characters_round_trip():
    tokenizer = char_tokenizer()
    text = tokenizer_module.ALPHABET
    ids = tokenizer.encode(text)
    assert len(ids) == len(set(ids)) == len(text)
    assert min(ids) == 2
    assert max(ids) == tokenizer.vocab_size - 1
    assert tokenizer.decode([*ids, tokenizer.eos_id, tokenizer.pad_id]) == text
    assert tokenizer.decode([1, 0, 999], skip_special=False) == "<stop><pad>\ufffd"
    with pytest.raises(UserError, match=r"character 'A' in '3A'"):
        tokenizer.encode("3A")


def test_a_long_text_is_encoded_without_the_interpreters_lock(tmp_path):
    """Else a server would not answer anybody while it reads one prompt."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<end>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    tokenizer, text = load_tokenizer(tmp_path), "how many sheep are there? " * 20_000
    spans = []

    def encode():
        start = time.monotonic()
        tokenizer.encode(text)
        spans.append((start, time.monotonic()))

    thread, ticks = threading.Thread(target=encode), []
    thread.start()
    while thread.is_alive():
        ticks.append(time.monotonic())
        time.sleep(0.002)
    start, end = spans[0]
    during = [tick for tick in ticks if start < tick < end]
    # The ids become a list under the lock, which takes a small part of the time.
    assert len(during) >= 5
    assert max(b - a for a, b in itertools.pairwise(during)) < 0.7 * (end - start)


@pytest.mark.extra("dev", "transformers")
def test_the_built_in_tokenizer_is_read_back_here_and_by_transformers(tmp_path):
    import transformers

    built_in = char_tokenizer()
    built_in.save(tmp_path)
    text = "50352> is 02355, a?"
    ids = built_in.encode(text)
    read = load_tokenizer(str(tmp_path))
    assert read.encode(text) == ids
    assert (read.vocab_size, read.eos_id, read.pad_id) == (built_in.vocab_size, 1, 0)
    assert read.decode([*ids, 1, 0]) == text
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(text)["input_ids"] == ids
    assert (theirs.eos_token_id, theirs.pad_token_id) == (1, 0)
    assert theirs.decode([*ids, 1, 0], skip_special_tokens=True) == text
    assert transformers.GenerationConfig.from_pretrained(tmp_path).eos_token_id == 1


def test_a_tokenizer_that_gives_up_on_a_text_is_named(tmp_path):
    """The library's error is no ``Exception``, so nothing else would catch it."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    backend = tokenizers.Tokenizer(models.WordLevel({"<end>": 0, "a": 1}, unk_token="<end>"))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("aa") == [0]
    for text in ("a" * 40 + "b", "a" * 2000 + "b"):
        for encode in (tokenizer.encode, tokenizer.encode_plain):
            with pytest.raises(UserError, match=r"tokenizer.json cannot be used on 'aaa.* retry-"):
                encode(text)


def test_a_tokenizer_without_tokens_is_refused(tmp_path):
    import tokenizers

    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
    with pytest.raises(UserError, match="the vocabulary of tokenizer.json is empty"):
        load_tokenizer(tmp_path)
