"""Chat templates: what is malformed, fails, loops or writes too much is refused in one line."""

import json
import resource
import time
import tracemalloc

import chat_templates
import pytest

from jrl.errors import UserError
from jrl.models import chat_template
from jrl.models.chat_template import _is_plain, find_templates, render

TALK = {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": True}
BROKEN = {
    "{% for m in messages %}{{ m.content }}": "line 1: ",
    "{{ messages[0].content ": "line 1: ",
    "{% endfor %}": "line 1: ",
    "{{ 1 / 0 }}": "ZeroDivisionError: ",
    "{{ 1 % 0 }}": "ZeroDivisionError: ",
    "{{ 'a' + 1 }}": "TypeError: ",
    "{{ messages[0].content - 1 }}": "TypeError: ",
    "{{ none.x.y }}": "has no attribute",
    "{{ '%d' | format('a') }}": "TypeError: ",
    "{{ messages | sum }}": "TypeError: ",
    "{{ raise_exception('two\nlines') }}": "two",
    "{{ ''.__class__.__mro__ }}": "is unsafe",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError: ",
}
SLOW = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% set n = namespace(x=0) %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% set n.x = n.x + 1 %}{% endfor %}{% endfor %}",
]
HUGE = [
    "{{ 'x' * 10000000000 }}",
    "{{ 10000000000 * 'x' }}",
    "{{ 9 ** (9 ** (9 ** 9)) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (2000000000, 1) }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ '%2000000000d' | format(1) }}",
    "{{ 'x' | center(10000000000) }}",
    "{{ 'x'.ljust(10000000000) }}",
    "{{ 'x'.zfill(10000000000) }}",
    "{{ 'x\n' | indent(10000000000) }}",
    "{{ ('x\n' * 99999) | indent('y' * 99999) }}",
    "{{ ('x' * 9999).join('y' * 99999) }}",
    "{{ ('y' * 99999) | join('x' * 9999) }}",
    "{{ ('x' * 9999).join(('y' * 99999) | select) }}",
    "{% for a in range(99999) %}" + "x" * 500 + "{{ a }}{% endfor %}",
    "{% set n = namespace(x='xx') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='xx') %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='xx') %}{% for a in range(60) %}"
    "{% set n.x = n.x.replace('x', 'xxxx') %}{% endfor %}",
    "{% set n = namespace(x='xx') %}{% for a in range(60) %}"
    "{% set n.x = n.x | replace('x', 'xxxx') %}{% endfor %}",
    "{% set n = namespace(x='xx') %}{% for a in range(60) %}"
    "{% set n.x = [n.x, n.x] | join %}{% endfor %}",
    "{% set n = namespace(x='xx') %}{% for a in range(60) %}"
    "{% set n.x = ''.join([n.x, n.x, n.x]) %}{% endfor %}",
]


@pytest.mark.parametrize("template", BROKEN)
def test_what_fails_is_one_line_with_the_reason(template):
    with pytest.raises(UserError, match="the chat template of DIR says: ") as raised:
        render(template, TALK, "DIR")
    assert BROKEN[template] in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("template", SLOW)
def test_time_is_bounded(template, monkeypatch):
    monkeypatch.setattr("jrl.models.chat_template.MOST_SECONDS", 0.3)
    begin = time.monotonic()
    with pytest.raises(UserError, match=r"takes longer than 0\.3 s; loop over the messages only"):
        render(template, TALK, "DIR")
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("template", HUGE)
def test_size_is_bounded(template):
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="says: it writes more than 10000000 characters"):
            render(template, TALK, "DIR")
        assert tracemalloc.get_traced_memory()[1] < 2e8
    finally:
        tracemalloc.stop()


WORK = {
    "{{ messages | tojson(indent=10**9) }}": "an indent of at most 16",
    "{{ lipsum(n=10**7) }}": "'lipsum' is undefined",
    "{{ 1 | round(10**9, 'floor') }}": "round to 1000000000 places",
    "{{ ('a' * 9999999) | trim('b' * 9999990 ~ 'a') }}": "with a text of 9999991",
    "{{ ('a' * 9999999).rstrip('b' * 9999990 ~ 'a') }}": "with a text of 9999991",
    "{{ ('a' * 9999999).rfind('ab' ~ 'a' * 4999999) }}": "with a text of 5000001",
    "{{ 12 | round(-10**9) }}": "round to 1000000000 places",
    "{{ [1] | batch(10**9, 'x') | list }}": "a list of more than 100000 items",
    "{{ [1] | slice(10**9) | list }}": "a list of more than 100000 items",
    "{{ [1] * 10**7 }}": "a list of more than 100000 items",
    "{{ ('x' * 10**6) | list | sort }}": "a list of more than 100000 items",
    "{{ ([[1] * 3000] * 3000) | sum(start=[]) }}": "sum of values that are not numbers",
    "{{ '{:>{w[0]}}'.format(1, w=[10**10]) }}": "more than 10000000 characters",
    "{{ ('a' * 9999999).translate({97: 'xy'}) }}": "more than 10000000 characters",
    "{{ ('ä' * 5000000) | urlencode }}": "urlencode of a text of 5000000 characters",
    "{{ ('a.b ' * 2500000) | urlize }}": "urlize of a text of 10000000 characters",
    "{{ ('a ' * 2500000) | title }}": "title of a text of 5000000 characters",
    "{{ ('a,' * 2500000).split(',') | unique | list }}": "split of a text of 5000000 characters",
    "{{ ('a ' * 20000).split() | map('center', 100000) | list | length }}": "it ",
}
"""Work of Python in one step, between two checks of the clock."""


@pytest.mark.parametrize("template", WORK)
def test_single_steps_are_bounded(template):
    begin = time.monotonic()
    with pytest.raises(UserError, match="says: ") as raised:
        render(template, TALK, "DIR")
    assert WORK[template] in str(raised.value)
    assert time.monotonic() - begin < 10


DOUBLES = "{% set n = namespace(x=[1], y=[1], z=(1,)) %}{% for i in range(60) %}"
DOUBLES += "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% set n.z = (n.z, n.z) %}"
DOUBLES += "{% endfor %}"
UNUSUAL = [
    DOUBLES + "{{ n.x | string | length }}",
    DOUBLES + "{{ n.x | tojson | length }}",
    DOUBLES + "{{ n.x == n.y }}",
    DOUBLES + "{{ {n.z: 1} | length }}",
    "{% macro m() %}{% set n.x = varargs %}{% endmacro %}{% set n = namespace(x=1) %}"
    "{% for i in range(60) %}{{ m(n.x, n.x) }}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = namespace(a=n.x, b=n.x) %}"
    "{% endfor %}{{ n.x }}",
    "{{ (1).to_bytes(3000000000, 'big') | length }}",
    "{{ 'a'.encode().ljust(3000000000) | length }}",
    "{{ ('a' * 999999) | wordwrap(1) | length }}",
    "{{ range(100000) | map('string') | join('x' * 40000) | length }}",
    "{{ range(100000) | map(attribute='a', default='x' * 9000) | join }}",
]
"""Much of little in a single step, in forms that no list of ours holds."""


@pytest.mark.parametrize("template", UNUSUAL)
def test_the_system_keeps_the_limits_of_unusual_templates(template, monkeypatch):
    monkeypatch.setattr("jrl.models.chat_template.MOST_SECONDS", 0.5)
    monkeypatch.setattr("jrl.models.template_process._GRACE_SECONDS", 0.5)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reasons = r"takes longer than 0\.5 s|more memory than|more than 10000000 characters"
    with pytest.raises(UserError, match=f"the chat template of DIR says: it .*({reasons})"):
        render(template, TALK, "DIR")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB
    assert render("{{ [messages[0].content] | join }}", TALK, "DIR") == "Hi"  # the next one works


def test_blocks_and_macros_are_bounded():
    for step in ("{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}", "{% set n.x = f(n.x) %}"):
        template = (
            "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x='xx') %}"
            "{% for i in range(60) %}" + step + "{% endfor %}"
        )
        with pytest.raises(UserError, match="more than 10000000 characters"):
            render(template, TALK, "DIR")


def test_lists_are_bounded_by_what_they_hold():
    talk = {"messages": [{"role": "user", "content": "x" * 10_000}]}
    template = (
        "{% set n = namespace(x=messages) %}{% for i in range(16) %}"
        "{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}"
    )
    with pytest.raises(UserError, match="more than 10000000 characters"):
        render(template, talk, "DIR")


@pytest.mark.parametrize("name", ["QWEN", "LLAMA", "MISTRAL", "R1", "GEMMA", "HARMONY"])
def test_templates_of_models_are_rendered_in_this_process(name):
    assert _is_plain(getattr(chat_templates, name))


def test_a_value_that_cannot_be_sent_is_named():
    talk = {**TALK, "tools": [lambda: 1]}
    with pytest.raises(UserError, match="a value cannot be sent to it"):
        render("{{ [messages[0].content] | join }}", talk, "DIR")


def test_chance_is_refused_and_the_clock_is_named(caplog):
    with pytest.raises(UserError, match="uses random numbers"):
        render("{{ [1, 2] | random }}", TALK, "DIR")
    chat_template._warn_of_clock.cache_clear()
    for _ in range(2):
        assert len(render("{{ strftime_now('%Y') }}", TALK, "DIR")) == 4
    assert caplog.text.count("reads the clock") == 1


def test_long_conversations_are_written():
    """A million characters in a thousand messages, put together step by step."""
    talk = {"messages": [{"role": "user", "content": "x" * 1000}] * 1000}
    template = (
        "{% set all = namespace(text='') %}{% for m in messages %}"
        "{% set all.text = all.text + m.content | trim %}{% endfor %}{{ all.text }}"
    )
    assert render(template, talk, "DIR") == "x" * 10**6


def test_usual_operators_work_as_before():
    template = (
        "{{ 'a' * 3 }}{{ 2 * 3 }}{{ 2 ** 5 }}{{ 7 % 4 }}{{ '%s-%05d' % ('x', 3) }}"
        "{{ 'a' ~ 1 ~ [2] }}"
        "{{ ['a', 'b'] | join(', ') }}{{ 'a\nb' | indent(2) }}{{ 'aba' | replace('a', 'c') }}"
        "{{ '%s!' | format('x') }}{{ 'x' | center(5) }}{{ 'x'.rjust(3) }}{{ '{} {}'.format(1, 2) }}"
        "{{ messages | map(attribute='content') | join(' ') }}{{ [1, 2] + [3] }}{{ 1.5 + 1 }}"
    )
    expected = (
        "aaa63" + "23x-00003" + "a1[2]" + "a, b" + "a\n  b" + "cbc" + "x!" + "  x  " + "  x" + "1 2"
        "Hi[1, 2, 3]2.5"
    )
    assert render(template, TALK, "DIR") == expected


@pytest.mark.parametrize(
    "configured", [3, {"a": 1}, [1], [{"name": "x"}], [{"name": 1, "template": ""}]]
)
def test_an_entry_of_another_kind(tmp_path, configured):
    with pytest.raises(UserError, match=r"tokenizer_config\.json: chat_template") as raised:
        find_templates(tmp_path, json.loads(json.dumps(configured)))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tool.jinja"])
def test_a_file_that_is_not_utf_8(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"{{ '\xff' }}")
    with pytest.raises(UserError, match="jinja: not UTF-8 text"):
        find_templates(tmp_path, None)


def test_messages_that_are_too_long_are_not_the_templates_fault():
    talk = {"messages": [{"role": "user", "content": "x" * 11_000_000}]}
    with pytest.raises(UserError, match="^the messages hold more than 10000000 characters"):
        render("{% for m in messages %}{{ m.content }}{% endfor %}", talk, "DIR")
