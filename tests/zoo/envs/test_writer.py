"""Tasks written after failed ones: what the model is asked, what is taken of it, and bad input."""

import asyncio

import pytest

from jrl.episodes.check_env import check_env
from jrl.episodes.configured import configured_env
from jrl.episodes.host import EnvError, EnvExtras, HostEnv
from jrl.errors import UserError
from jrl.zoo.envs.writer import ASKS, EXAMPLES, configured_writer, task_writer, tasks_in

FAILED = [f"buy hat {i}" for i in range(30)]


class Model:
    """Writes three tasks at a time, one of them known, one impossible."""

    def __init__(self):
        self.prompts, self.checked = [], []

    def __call__(self, messages):
        (message,) = messages
        text = message["content"]
        if "Is it clear" in text:
            self.checked.append(text)
            return "It flies. [NO]" if "moon" in text else "It is plain. **[YES]**."
        n = len(self.prompts)
        self.prompts.append(text)
        return f"`buy hat 1`\n`buy shoe {n}`\n`go to the moon {n}`\n`buy coat {n}`"


def write(writer, count, seed=0, failed=FAILED):
    return asyncio.run(writer(failed, count, seed))


def test_new_tasks_that_can_be_done_are_taken_until_there_are_enough():
    model = Model()
    tasks = write(task_writer(model, about="In a shop."), 4)
    assert tasks == ["buy shoe 0", "buy coat 0", "buy shoe 1", "buy coat 1"]
    assert len(model.prompts) == 2
    for text, missing in zip(model.prompts, (4, 2), strict=True):
        failures = {f for f in FAILED if f"`{f}`" in text}
        assert len(failures) == EXAMPLES
        assert "In a shop." in text
        assert f"Write {missing} new tasks" in text
    assert all("In a shop." in text for text in model.checked)
    again = Model()
    assert write(task_writer(again, about="In a shop."), 4) == tasks
    assert again.prompts == model.prompts
    other = Model()
    write(task_writer(other), 4, seed=1)
    assert other.prompts[0] != Model()([{"content": ""}])
    assert {f for f in FAILED if f"`{f}`" in other.prompts[0]} != {
        f for f in FAILED if f"`{f}`" in model.prompts[0]
    }


def test_a_model_that_writes_too_little_is_asked_a_few_times():
    model = Model()
    tasks = write(task_writer(model), 100)
    assert len(model.prompts) == ASKS
    assert len(tasks) == 2 * ASKS
    unchecked = Model()
    assert len(write(task_writer(unchecked, check=False), 100)) == 3 * ASKS
    assert not unchecked.checked
    assert write(task_writer(lambda messages: "I would rather not."), 3) == []
    assert write(task_writer(Model()), 2, failed=["one"])


def test_what_is_no_text_is_an_error_of_the_environment():
    with pytest.raises(EnvError, match="the other model said 3, not text"):
        write(task_writer(lambda messages: 3), 2)


@pytest.mark.parametrize(
    ("text", "tasks"),
    [
        ("```text\nbuy\n```", []),
        ("```\n- buy a hat\n- sell  it\n```", ["buy a hat", "sell it"]),
        ("`a b`, `c`\n- d", ["a b", "c"]),
        ("* x y\n2) z", ["x y", "z"]),
        ("` `", []),
        ("", []),
    ],
)
def test_tasks_are_read_from_what_models_write(text, tasks):
    assert tasks_in(text) == tasks


def test_a_configuration_names_the_writer(tmp_path, monkeypatch):
    module = tmp_path / "own.py"
    module.write_text(
        "from jrl.episodes.host import HostEnv\n"
        "def env(): return HostEnv(lambda p, s: (p, []), lambda s, r: (s, {}))\n"
        "def write(failed, count, seed): return failed[:count]\n"
    )
    env = configured_env(f"{module}:env", {"writer": f"{module}:write"})
    assert env.extras.write(["a", "b"], 1, 0) == ["a"]
    assert configured_env(f"{module}:env", {}).extras.write is None
    monkeypatch.setenv("KEY", "k")
    table = {"url": "http://127.0.0.1:9/v1", "model": "m", "key_variable": "KEY", "about": "Here."}
    assert callable(configured_writer({**table, "max_tokens": 9, "temperature": 0.5}))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "data.writer = 3; name a FILE.py:function, or a table"),
        ({"model": "m"}, "data.writer.url is missing"),
        ({"url": "http://x", "model": ""}, "data.writer.model is missing"),
        ({"url": "http://x", "model": "m", "name": 1}, "data.writer.name is not known; choose"),
        ({"url": "http://x", "model": "m", "about": 3}, "data.writer.about = 3; write a text"),
        ({"url": "http://x", "model": "m", "max_tokens": "9"}, "data.writer.max_tokens = '9'; wr"),
        ({"url": "http://x", "model": "m", "check": 1}, "data.writer.check = 1; must be true or"),
        (
            {"url": "http://u", "model": "m", "key_variable": "NONE_1"},
            "data.writer.key_variable names",
        ),
    ],
)
def test_a_writer_that_cannot_be_used_is_named(value, message):
    with pytest.raises(UserError, match=message):
        configured_writer(value)


def test_a_writer_is_a_function():
    with pytest.raises(
        UserError, match=r"env\.extras\.write = 3; must be a function\(failed, count, seed\) or"
    ):
        check_env(HostEnv(print, print, extras=EnvExtras(write=3)))
