"""Functions of one's own by name: methods, tasks, rewards and networks from a file."""

import contextvars
import json
import signal

import jax
import pytest

from jrl import user_code as user_code
from jrl.config import load_config
from jrl.data.tasks import get_task
from jrl.errors import UserError
from jrl.methods import find_method, get_method
from jrl.rewards import make_reward
from jrl.run import run as running
from jrl.run.run import train
from jrl.setup.kinds import kind_of
from jrl.setup.objective import method_of
from jrl.storage.metrics import read_jsonl
from jrl.train import build
from jrl.user_code import check_options, keep_rows, load, python_value, remember

MINE = '''
"""A researcher's file: one file with a method, a task, a reward and a network."""

from jrl.data.tasks import sorting
from jrl.methods import get_method, published
from jrl.methods.domains import Positive
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer

loaded = []
loaded.append(1)
NUMBER = 3


def plain(scale=2.0):
    """A method without checks, made of another."""
    method = get_method("reinforce")
    return method.with_(group=int(scale))


def needy(scale):
    return plain(scale)


def wrong():
    return 3


def reversed_digits(difficulty=3, factor=1):
    return sorting(difficulty * factor)._replace(name="reversed_digits")


def score(samples, bonus=0.0):
    return [bonus + len(s.completion) for s in samples]


def no_network(vocab_size, max_length):
    return 3


def unsized(layers):
    return 3


def undecorated(base, power=1.0):
    return base


def network(vocab_size, max_length, layers=1):
    sizes = {"embed_dim": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "mlp_dim": 32}
    config = ModelConfig(vocab_size=vocab_size, max_length=max_length, layers=layers, **sizes)
    return transformer(config)
'''


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


BROKEN = {
    "no file": ("mien.py:plain", "there is no file ", "did you mean ", "mine.py?"),
    "no function": ("mine.py:plane", "mine.py has no function 'plane'; did you mean 'plain'?"),
    "no function callable": ("mine.py:NUMBER", "NUMBER in ", " is 3, not a function"),
    "no module": ("no_such_module:f", "there is no module 'no_such_module'", "FILE.py:function"),
    "no submodule": ("jrl.nothing:f", "there is no module 'jrl.nothing'"),
    "no name": ("mine.py:", "; write FILE.py:function or module:function"),
    "no place": (":plain", "; write FILE.py:function or module:function"),
}


def test_a_file_that_was_edited_is_read_again_by_the_next_run_alone(tmp_path):
    """A run keeps what it began with; a notebook's next one has what was edited."""
    path = tmp_path / "edited.py"
    path.write_text("def f():\n    return 1\n")
    assert load(f"{path}:f", "x")() == 1
    path.write_text("def f():\n    return 2 + 0\n")
    assert load(f"{path}:f", "x")() == 1
    user_code.forget_changed_files()
    assert load(f"{path}:f", "x")() == 2


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_loaded_is_said_in_one_line(name, mine, monkeypatch):
    spec, *parts = BROKEN[name]
    monkeypatch.chdir(mine.parent)
    with pytest.raises(UserError) as caught:
        load(spec, "data.task")
    message = str(caught.value)
    assert message.startswith(f"data.task = {spec!r}")
    assert all(part in message for part in parts), message
    assert "\n" not in message


FAILING = {
    "def f(:\n": "broken.py, line 1: invalid syntax",
    "\n\n1 / 0\n": "broken.py, line 3: ZeroDivisionError: division by zero",
    "import not_there\n": "broken.py, line 1: ModuleNotFoundError: No module named 'not_there'",
    "raise SystemExit('bye')\n": "broken.py, line 1: SystemExit: bye",
}


@pytest.mark.parametrize("text", FAILING)
def test_a_file_that_cannot_be_imported_is_named_with_the_line(text, tmp_path):
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load(f"{path}:f", "method")
    assert FAILING[text] in str(caught.value)
    assert "\n" not in str(caught.value)
    path.write_text("def f():\n    return 5\n")  # mended, and tried again
    assert load(f"{path}:f", "method")() == 5


def test_a_file_that_switches_to_64_bits_is_named(tmp_path):
    switch = "jax.config.update('jax_enable_x64', True)"
    (tmp_path / "wide.py").write_text(f"import jax\n{switch}\ndef f():\n    pass\n")
    (tmp_path / "late.py").write_text(f"import jax\ndef f():\n    {switch}\n")
    try:
        with pytest.raises(UserError, match=r"importing .*wide\.py sets jax_enable_x64, and a run"):
            load(f"{tmp_path}/wide.py:f", "data.env")
        jax.config.update("jax_enable_x64", False)
        late = load(f"{tmp_path}/late.py:f", "data.env")
        with pytest.raises(UserError, match="late: calling f sets jax_enable_x64"):
            user_code.made_by(late, "late")
    finally:
        jax.config.update("jax_enable_x64", False)


def test_a_file_is_imported_once_relative_to_the_working_directory(mine, monkeypatch):
    monkeypatch.chdir(mine.parent)
    relative, absolute = load("mine.py:plain", "method"), load(f"{mine}:plain", "method")
    assert relative is absolute
    assert relative.__globals__["loaded"] == [1]
    assert relative.__module__.startswith("jrl_own_mine_")
    assert load("json:dumps", "rewards") is json.dumps


def test_options_are_those_of_the_function():
    def function(first, a, b=2):
        return first + a + b

    check_options(function, {"a": 1}, "data", first=1)
    with pytest.raises(UserError) as caught:
        check_options(function, {"c": 1}, "data", first=1)
    assert str(caught.value).splitlines() == [
        "data.c = 1: there is no such option; choose from a, b; where a configuration file sets it,"
        " data.c= removes it",
        "data.a is missing: function(first, a, b) needs it; set it, or give the argument a default",
    ]
    check_options(lambda **anything: anything, {"c": 1}, "data")
    with pytest.raises(UserError) as caught:
        check_options(lambda a, b: a, {}, "objective")
    message = "objective.a, objective.b are missing: <lambda>(a, b) needs them; set them"
    assert str(caught.value) == f"{message}, or give the arguments defaults"


def test_a_method_of_ones_own_takes_its_coefficients_and_those_of_every_method(mine):
    spec = f"{mine}:plain"
    assert get_method(spec, scale=4.0).least_group == 4
    assert find_method(spec).coefficients.keys() == {"scale"}
    overrides = ["data.task=sorting", f"method={spec}", "objective.scale=3.0"]
    config = load_config(None, [*overrides, "objective.epochs=2", "sampling.int8=cache"])
    method = method_of(config)
    assert (method.least_group, method.schedule.epochs) == (3, 2)
    assert "sampler_logprobs" in method.objective.surrogate.needs  # corrected, as all are
    with pytest.raises(UserError, match=r"objective.scael = 1: .*did you mean 'scale'"):
        get_method(spec, scael=1)
    with pytest.raises(UserError, match=r"objective.scale is missing: needy\(scale\) needs"):
        get_method(f"{mine}:needy")
    with pytest.raises(UserError, match=r"returned 3; return a jrl.methods.Method"):
        get_method(f"{mine}:wrong")
    with pytest.raises(UserError, match=r"a function of `base` is decorated with @variant"):
        get_method(f"{mine}:undecorated", power=2.0)
    with pytest.raises(UserError, match=r"method = 'grop'; did you mean 'grpo'.*FILE.py:function"):
        get_method("grop")


def test_a_task_of_ones_own_takes_the_further_keys_of_data(mine):
    config = load_config(None, [f"data.task={mine}:reversed_digits", "data.factor=2"])
    task = kind_of(config).task
    assert (task.name, task.difficulty) == ("reversed_digits", 6)
    with pytest.raises(UserError, match=r"data.facter = 2: there is no such option; did you mean"):
        get_task(f"{mine}:reversed_digits", facter=2)
    with pytest.raises(UserError, match=r"data.dificulty = 3: .*did you mean 'difficulty'"):
        get_task("sorting", dificulty=3)
    with pytest.raises(UserError, match=r"returned 3; return a jrl.data.Task"):
        get_task(f"{mine}:wrong")


def test_a_reward_of_ones_own_takes_its_options(mine):
    class Sample:
        completion = "abc"

    assert make_reward(f"{mine}:score", bonus=1.0)([Sample]) == [4.0]
    with pytest.raises(UserError, match=r"rewards\..*mine.py:score.bonsu = 1: .*'bonus'"):
        make_reward(f"{mine}:score", bonsu=1)


RUN = (
    *("train.prompts=4", "sampling.group=4", "train.steps=2", "checkpoint.every=0"),
    *("eval.problems=4", "log.samples_every=1", "optimizer={name='adam', learning_rate=1e-2}"),
)


def test_a_run_of_ones_own_functions(mine, tmp_path, monkeypatch):
    """A method, a task and a network from a file outside the package, resumed with another end."""
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    monkeypatch.chdir(tmp_path)
    overrides = ["method=mine.py:plain", "data.task=mine.py:reversed_digits", "run.dir=run"]
    overrides += ["model.network=mine.py:network", "model.config.layers=2"]
    train(load_config(None, [*RUN, *overrides]), echo=lambda line: None)
    assert [r["step"] for r in read_jsonl(tmp_path / "run" / "metrics.jsonl")[1:]] == [1, 2]
    run = build.setup(load_config(None, [*RUN, *overrides]))
    assert run.model is None
    assert run.network.max_length == run.task.prompt_tokens + run.task.completion_tokens
    assert run.network.vocab_size == run.task.vocab_size


def test_what_a_network_of_ones_own_cannot_have_is_refused(mine):
    base = [*RUN, "data.task=sorting", f"model.network={mine}:network"]

    def error_of(*more):
        with pytest.raises(UserError) as caught:
            build.setup(load_config(None, [*base, *more]))
        return str(caught.value)

    assert "does not go with [lora]: JRL" in error_of("lora.rank=2")
    assert "does not go with sampling.int8 = ['cache']" in error_of("sampling.int8=cache")
    assert "does not go with sampling.float8 = ['weights']" in error_of("sampling.float8=weights")
    assert "model.config.layer = 2: there is no such option; did" in error_of(
        "model.config.layer=2"
    )
    error = error_of(f"model.network={mine}:no_network")
    assert "returned 3; return a jrl.Network, which jrl.linen_network and jrl.nnx_network" in error
    error = error_of(f"model.network={mine}:unsized", "model.config.layers=2")
    assert error.endswith("unsized(layers) must take vocab_size and max_length")
    sizes = ["model.config.width=8", "model.config.depth=2", "model.config.heads=2"]
    error = error_of(*sizes)
    assert error == (
        "[model.config] has width, depth, heads, which network(vocab_size, max_length, layers) does"
        " not take; choose from vocab_size, max_length, layers"
    )
    text = ["data.task=", "data.train=x.jsonl"]
    assert "with text needs model.path, the directory of its tokenizer" in error_of(*text)


def test_an_import_that_blocks_has_a_limit(tmp_path, monkeypatch):
    """Also where the file catches what ends it."""
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import time\ntry:\n    time.sleep(60)\nexcept BaseException:\n    time.sleep(60)\n"
    )
    monkeypatch.setattr(user_code, "IMPORT_SECONDS", 0.2)
    handler = signal.getsignal(signal.SIGALRM)
    with pytest.raises(UserError, match=r"slow.py:f': importing .* took longer than 0 s"):
        user_code.load(f"{slow}:f", "rewards")
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_rows_that_were_passed_are_kept_and_remembered(tmp_path):
    rows = [{"question": "line\u2028break \u00e9?", "n": 1}, {"question": "b"}]
    keep_rows(tmp_path / "python", {"rows-1": rows, "reward": len})
    assert [path.name for path in (tmp_path / "python").iterdir()] == ["rows-1.jsonl"]
    context = contextvars.copy_context()
    context.run(remember, tmp_path / "python")
    assert context.run(python_value, "python:rows-1", "data.train") == rows
    with pytest.raises(UserError, match=r"data.train = 'python:rows-1' was passed"):
        python_value("python:rows-1", "data.train")
    keep_rows(tmp_path / "none", {"reward": len})
    assert not (tmp_path / "none").exists()


def test_an_error_without_a_text_is_one_line_with_its_own(tmp_path):
    """Whether a file raises it as it is imported, or a function as it is called."""
    own = tmp_path / "own.py"
    own.write_text(
        "class Speechless(Exception):\n"
        "    def __str__(self):\n        raise RuntimeError('no words')\n"
        "def make():\n    raise Speechless\n"
    )
    setting = "data.env = 'own.py:make'"
    with pytest.raises(UserError, match=rf"^{setting}: .*own.py, line 5: Speechless: "):
        user_code.made_by(load(f"{own}:make", "data.env"), setting)
    (tmp_path / "loud.py").write_text(own.read_text() + "make()\n")
    with pytest.raises(UserError, match=r"loud.py, line 5: Speechless: "):
        load(f"{tmp_path}/loud.py:make", "data.env")
