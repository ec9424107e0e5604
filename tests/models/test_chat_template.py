"""Chat templates: what is malformed, fails, loops or writes too much is refused in one line."""

import json
import resource
import subprocess
import sys
import time

import pytest

from jrl.errors import UserError
from jrl.models import chat_template
from jrl.models.chat_template import find_templates, render

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


@pytest.mark.parametrize("template", BROKEN)
def test_what_fails_is_one_line_with_the_reason(template):
    with pytest.raises(UserError, match="the chat template of DIR says: ") as raised:
        render(template, TALK, "DIR")
    assert BROKEN[template] in str(raised.value)
    assert "\n" not in str(raised.value)


TIME, MEMORY = "it takes longer than 1 s", "it needs more memory"
DOUBLES = "{% set n = namespace(x=[1], y=[1], s='xx') %}{% for i in range(60) %}"
BEYOND = {
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": TIME,
    "{{ 9 ** (9 ** (9 ** 9)) }}": TIME,
    "{{ ('a' * 9999999) | trim('b' * 9999990 ~ 'a') }}": TIME,
    "{{ (1).to_bytes(3000000000, 'big') | length }}": MEMORY,
    "{{ 'x' | center(10000000000) }}": MEMORY,
    "{{ range(100000) | map('string') | join('x' * 40000) | length }}": MEMORY,
    DOUBLES + "{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}"
    "{{ n.x == n.y }}": TIME,
    DOUBLES + "{% set n.s = n.s ~ n.s %}{% endfor %}": "it ",  # whichever limit is nearer
    DOUBLES + "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | string | length }}": "it ",
    "{% for a in range(99999) %}" + "x" * 500 + "{{ a }}{% endfor %}": "it writes more than",
}
"""Template -> the limit that it exceeds."""


@pytest.mark.parametrize("template", BEYOND)
def test_time_and_memory_are_bounded(template, monkeypatch):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr("jrl.models.chat_template.MOST_SECONDS", 1.0)
        with pytest.raises(UserError) as raised:
            render(template, TALK, "DIR")
    assert "the chat template of DIR says: " + BEYOND[template] in str(raised.value)
    assert time.monotonic() - begin < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB
    assert render("{{ messages[0].content }}", TALK, "DIR") == "Hi"  # the next one works


FORK = """
import os, signal
from jrl.models import template_process
from jrl.models.chat_template import render

talk = {"messages": []}
assert render("{{ 1 }}", talk, "DIR") == "1"
with template_process._lock:  # as another thread would hold it while it renders
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if render("{{ 2 }}", talk, "DIR") == "2" else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert render("{{ 3 }}", talk, "DIR") == "3"
"""


def test_a_fork_has_a_process_of_its_own_whoever_renders():
    """Without JAX, whose threads a fork would leave in a state that no one mends."""
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_value_that_cannot_be_sent_is_named():
    talk = {**TALK, "tools": [lambda: 1]}
    with pytest.raises(UserError, match="a value cannot be sent to it"):
        render("{{ messages[0].content }}", talk, "DIR")


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
    with pytest.raises(UserError, match="^the messages hold more than 10000000 bytes"):
        render("{% for m in messages %}{{ m.content }}{% endfor %}", talk, "DIR")
