"""Chat templates: what is malformed, fails, loops or writes too much is refused in one line."""

import datetime
import enum
import json
import os
import pathlib
import resource
import subprocess
import sys
import time
import types

import numpy as np
import pytest

from jrl.errors import UserError
from jrl.models import chat_template, template_process
from jrl.models.chat_template import find_templates, render, variables_read

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


def test_a_refusal_in_the_templates_own_words_is_short():
    with pytest.raises(UserError) as caught:
        render("{{ raise_exception('x' * 10000000) }}", TALK, "DIR")
    assert len(str(caught.value)) < 600


class Role(enum.StrEnum):
    """Roles, as a user's own module may have them."""

    USER = "user"


def test_a_value_that_cannot_be_sent_is_named(monkeypatch):
    module = types.ModuleType("module_of_a_user")  # the process has no file of that name
    exec("class Own: pass", module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    says = "chat template of DIR says: a value cannot be sent to it"
    for value in (lambda: 1, module.Own()):
        with pytest.raises(UserError, match=says):
            render("{{ messages[0].content }}", {**TALK, "tools": [value]}, "DIR")


def test_values_of_derived_types_are_what_they_hold():
    message = {"role": Role.USER, "n": np.float64(1.5), "x": np.arange(2), "ok": True}
    template = "{% set m = messages[0] %}{{ m.role }} {{ m.n }} {{ m.x }} {{ m.ok }}"
    assert render(template, {"messages": [message]}, "DIR") == "user 1.5 [0, 1] True"


FINDER = """
import importlib.util, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "jrl":
            where = [ROOT + "/jrl"]
            return importlib.util.spec_from_file_location(
                name, where[0] + "/__init__.py", submodule_search_locations=where
            )

sys.path[:] = [path for path in sys.path if path not in ("", ROOT)]
sys.meta_path.append(Finder())
from jrl.models.chat_template import render

print(render("{{ messages[0].content }}", {"messages": [{"content": "Hi"}]}, "DIR"))
"""
"""As ``pip install -e`` brings the library: by a finder, which is no path."""


def test_an_editable_installation_renders_wherever_it_is_called(tmp_path):
    code = f"ROOT = {str(pathlib.Path(chat_template.__file__).parents[2])!r}\n{FINDER}"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("Hi\n", "")


def test_variables_are_read_under_the_same_limits(monkeypatch):
    template = "{% set a = 1 %}{{ a }}{{ b }}{% for m in messages %}{{ m.c }}{% endfor %}"
    assert variables_read(template) == {"b", "messages"}
    assert variables_read("{{ 1") is None
    monkeypatch.setattr("jrl.models.chat_template.MOST_SECONDS", 1.0)
    assert variables_read("{{ 9 ** (9 ** (9 ** 9)) }}") is None  # computed as it is compiled


def test_a_process_that_has_ended_is_replaced_and_one_that_does_not_start_is_no_refusal(
    monkeypatch,
):
    assert render("{{ 1 }}", TALK, "DIR") == "1"
    template_process._process.kill()
    assert render("{{ 2 }}", TALK, "DIR") == "2"
    template_process._end()
    with monkeypatch.context() as patch:
        patch.setattr(template_process, "_PROGRAM", "print('?ImportError: no jinja2')")
        with pytest.raises(RuntimeError, match="does not start: ImportError: no jinja2"):
            render("{{ 3 }}", TALK, "DIR")
    assert render("{{ 4 }}", TALK, "DIR") == "4"


MANY_FILES = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (2000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
from jrl.models.chat_template import render
from jrl.models.template_process import _limit

print(render("{{ 1 }}", {}, "DIR"))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
_limit(resource.RLIMIT_FSIZE, 1 << 30)  # a user of a login node may not raise what the system set
print(resource.getrlimit(resource.RLIMIT_FSIZE) == (1 << 20, 1 << 20))
"""


def test_many_open_files_and_limits_of_the_system():
    done = subprocess.run([sys.executable, "-c", MANY_FILES], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("1\nTrue\n", "")


def test_the_clock_is_that_of_the_caller(monkeypatch):
    monkeypatch.setenv("TZ", "XYZ-13:30")  # ahead of UTC
    template_process._end()
    zone = datetime.timezone(datetime.timedelta(hours=13, minutes=30))
    form = "%d %H:%M"
    before = datetime.datetime.now(zone).strftime(form)
    text = render("{{ strftime_now('%d %H:%M') }}", TALK, "DIR")
    template_process._end()
    assert text in (before, datetime.datetime.now(zone).strftime(form))


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
