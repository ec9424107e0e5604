"""``fit``: rows, a reward function and a model passed as values; metrics and weights come back."""

import json
import math
import pathlib
import pickle
import types
from functools import partial

import numpy as np
import pytest
import tomli_w
from hub_mirror import COMMITS, add, checkpoint, lines
from typer.testing import CliRunner

import jrl
from jrl import entry
from jrl.cli.app import app
from jrl.config import build_config, load_config
from jrl.data.tasks import get_task
from jrl.episodes import get_env
from jrl.errors import UserError
from jrl.methods import variant
from jrl.methods.domains import Positive
from jrl.methods.group_relative import grpo
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.rewards import Sample, make_reward
from jrl.run import run as running
from jrl.train import programs
from jrl.user_code import python_values

ROWS = [{"question": f"{a}+{b}?", "answer": str(a + b), "a": a} for a in (1, 2) for b in (3, 4)]
QUICK = {
    "train.steps": 2,
    "train.prompts": 2,
    "sampling.group": 2,
    "sampling.max_new_tokens": 4,
    "checkpoint.every": 0,
    "reward_pool.workers": 0,  # processes take seconds to start
    "data": {"template": "plain", "max_prompt_tokens": 16},
    "optimizer": {"learning_rate": 1e-2},
}
SIZES = {"layers": 1, "embed_dim": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "mlp_dim": 32}


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("model") / "tiny", chat=True)


def digits(samples):
    """The fraction of a completion that is digits."""
    return [sum(c.isdigit() for c in s.completion) / len(s.tokens) for s in samples]


def in_trl_form(completions, a, **columns):
    assert all(isinstance(number, int) for number in a)
    return [float(len(completion)) for completion in completions]


def test_rows_a_reward_and_a_model_of_the_hub(model, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    add(tmp_path / "hub", "org/tiny", "model", model)
    records, lines = [], []
    result = jrl.fit(
        ROWS,
        digits,
        "org/tiny",
        eval_rows=ROWS[:2],
        config=QUICK,
        on_step=records.append,
        echo=lines.append,
        seed=3,
        log__samples_every=1,
    )
    assert [record["step"] for record in result.metrics] == [1, 2]
    assert [record["reward"] for record in records] == [r["reward"] for r in result.metrics]
    assert result.summary["steps"] == int(result.state.step) == 2
    assert "accuracy_after" in result.summary
    assert result.config.seed == 3
    assert result.config.model.path == f"org/tiny@{COMMITS['first']}"
    assert any("reward = digits (digits: The fraction of a completion" in x for x in lines)
    assert set(result.policy) == set(result.state.params["policy"])
    (first, _second) = result.sample("1+1?")
    assert first["prompt"] == "1+1?"
    assert 1 <= first["length"] <= 4
    assert (result.dir / "samples.jsonl").exists()
    # The saved configuration has the commit, so the directory means the same later; other commands
    # say that the rows were values.
    assert COMMITS["first"] in (result.dir / "config.toml").read_text()
    evaluated = CliRunner().invoke(app, ["eval", str(result.dir)])
    assert evaluated.exit_code == 2
    assert (
        "'python:digits' was passed to the run in Python and is not known here" in evaluated.stderr
    )
    # Its rows are kept, so that what needs no reward works.
    arguments = ["sample", str(result.dir), "--prompt", "1+1?", "-n", "2", "--json"]
    sampled = CliRunner().invoke(app, arguments)
    assert [s["completion"] for s in json.loads(sampled.stdout)] == [
        s["completion"] for s in result.sample("1+1?")
    ]
    exported = CliRunner().invoke(app, ["convert", str(result.dir), "exported"])
    assert exported.exit_code == 0, exported.output
    mine, theirs = result.export("mine"), pathlib.Path("exported")
    name = "model.safetensors"
    assert (mine / name).read_bytes() == (theirs / name).read_bytes()
    assert (tmp_path / "exported" / "tokenizer.json").exists()
    # The same call resumes, also when the branch has moved on; another one is refused.
    add(tmp_path / "hub", "org/tiny", "model", model, commit=COMMITS["second"])
    again = jrl.fit(
        ROWS,
        digits,
        "org/tiny",
        eval_rows=ROWS[:2],
        config=QUICK | {"train.steps": 3, "seed": 3, "log.samples_every": 1},
        dir=result.dir,
        echo=lines.append,
    )
    assert [record["step"] for record in again.metrics] == [1, 2, 3]
    assert any("resuming from step 2" in line for line in lines)
    with pytest.raises(UserError, match=r"(?s)another configuration.*data.train = 'python:rows-"):
        jrl.fit(ROWS[:2], digits, "org/tiny", config=QUICK | {"seed": 3}, dir=result.dir)


def test_a_method_and_an_environment_as_values(tmp_path):
    @variant(grpo, clip_high=0.5)
    def louder(base, gain: Positive = 1.0):
        return base.with_(advantage=scaled_by(base.objective.advantage, gain))

    def scaled_by(advantage, gain):
        def apply(score, batch, state):
            values, batch, state = advantage.apply(score, batch, state)
            return gain * values, batch, state

        return advantage._replace(apply=apply)

    def walk(difficulty: int = 2):
        return get_env("gridworld", size=difficulty)

    how = {"train.steps": 1, "train.prompts": 2, "sampling.group": 4, "eval.problems": 4}
    run = partial(jrl.fit, model=SIZES, env=walk, config=how, echo=lambda line: None)
    plain = run(method=grpo(clip_high=0.5), dir=tmp_path / "plain")
    loud = run(method=louder, dir=tmp_path / "loud", objective__gain=3.0, data__difficulty=2)
    assert loud.config.method == "python:method"
    assert loud.config.data.env == "python:env"
    assert loud.metrics[0]["turns"] == plain.metrics[0]["turns"]
    assert loud.metrics[0]["advantage_std"] == pytest.approx(3 * plain.metrics[0]["advantage_std"])


def test_what_is_no_method_and_no_environment():
    with pytest.raises(UserError, match=r"method = 3; give a name of `jrl methods`, a jrl.methods"):
        jrl.fit(method=3, task="sorting")
    with pytest.raises(UserError, match=r"env = 3; give the name of an environment, or a function"):
        jrl.fit(env=3)


def test_files_named_rewards_and_trl_s_form(model, tmp_path):
    (tmp_path / "rows.jsonl").write_text(lines(ROWS))
    (tmp_path / "more.csv").write_text("question,answer,a\nhow many?,3,7\n")
    (tmp_path / "mine.py").write_text(
        "def length(completions, **columns):\n    return [float(len(c)) for c in completions]\n"
    )
    result = jrl.fit(
        {"rows.jsonl": 4.0, "more.csv": 1.0},
        {"exact": 1.0, "mine.py:length": 0.5},
        model,
        config=QUICK,
        echo=lambda line: None,
        dir="run",
    )
    record = result.metrics[-1]
    total = record["reward/exact"] + 0.5 * record["reward/mine.py:length"]
    assert record["reward"] == pytest.approx(total)
    saved = load_config(tmp_path / "run" / "config.toml")
    assert saved.data.train == {"rows.jsonl": 4.0, "more.csv": 1.0}
    assert CliRunner().invoke(app, ["show-config", "run"]).exit_code == 0


@pytest.mark.slow
def test_a_task_sizes_and_a_network_as_values():
    task = get_task("sorting", difficulty=3)

    def network(vocab_size, max_length):
        return transformer(ModelConfig(vocab_size=vocab_size, max_length=max_length, **SIZES))

    quick = {k: v for k, v in QUICK.items() if not k.startswith(("data", "sampling.max"))}
    quick |= {"eval.problems": 4}
    sized = jrl.fit(model=SIZES, task=task, config=quick, echo=lambda line: None, dir="a")
    from_network = jrl.fit(model=network, task="sorting", data__difficulty=3, config=quick, dir="b")
    assert [r["reward"] for r in sized.metrics] == [r["reward"] for r in from_network.metrics]
    assert sized.sample("213>")[0]["prompt"] == "213>"
    with pytest.raises(
        UserError, match="prompt 1: '21321>' has 6 characters; prompts of data.task"
    ):
        sized.sample("21321>")


BAD = {
    "no rows": ({"rows": []}, "rows is empty"),
    "a row": ({"rows": ["2+2?"]}, "rows, row 1: '2+2?'; a row is a dict"),
    "a column": (
        {"rows": [{"q": "2?", "answer": "2"}]},
        "row 1: there is no field 'question'; set data.fields.question to one of q, answer",
    ),
    "a reward": ({"reward": 3}, "reward = 3; give a function, reward(samples)"),
    "its form": ({"reward": lambda text: 0.0}, "takes (text); write reward(samples)"),
    "its columns": (
        {"reward": lambda completions, level: [0.0]},
        "takes level, and the data has no such column",
    ),
    "its name": ({"reward": "maht"}, "did you mean 'math'"),
    "a model": ({"model": 3}, "model = 3; give a directory"),
    "no model": ({"model": None}, "model.path is missing"),
    "an unknown model": ({"model": "org/none"}, "model.path = 'org/none': there is no such"),
    "a key": ({"config": {"train.stesp": 2}}, "did you mean train.steps?"),
    "a setting": ({"train__stesp": 2}, "did you mean train.steps?"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_said_before_anything_compiles(name, model, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(programs, "new_state", None)  # where the first program is compiled
    changes, message = BAD[name]
    with pytest.raises(UserError) as caught:
        jrl.fit(**{"rows": ROWS, "reward": digits, "model": model, "config": QUICK} | changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_dotted_and_nested_keys_come_together(model):
    config = {"rewards": {f"{__name__}:none": {"weight": 2}}, "rewards.math.judge": True}
    config |= {"train": {"stesp": 1}, "data.train": {"a.csv": 2.0}}
    with pytest.raises(UserError) as caught:  # before anything is read
        jrl.fit(model=model, reward={"math": 0.5}, config=config)
    assert str(caught.value) == "unknown key train.stesp = 1; did you mean train.steps?"
    assert config["rewards"] == {f"{__name__}:none": {"weight": 2}}  # ours is left alone
    config |= {"train": {"steps": 1}, "data.train": {"a.csv": -2.0}}
    with pytest.raises(UserError, match=r"^data\.train\.a\.csv = -2\.0; must be above 0"):
        jrl.fit(model=model, reward={"math": 0.5}, config=config)
    with pytest.raises(UserError, match=r"config\['seed.x'\]: seed is not a table"):
        jrl.fit(model=model, config={"seed": 3, "seed.x": 1})


def test_a_network_may_be_a_value(model):
    network = jrl.transformer(jrl.ModelConfig(vocab_size=80, max_length=64, **SIZES))
    tree, values = {"method": "grpo"}, {}
    entry._set_model(tree, network, values)
    assert tree["model"] == {"network": "python:network"}
    assert values["network"](vocab_size=80, max_length=64) is network
    with pytest.raises(UserError, match="max_length = 64, and prompts .* up to 65 tokens"):
        values["network"](vocab_size=80, max_length=65)
    with pytest.raises(UserError, match=r"config\['method'\] is a value of Python") as caught:
        jrl.fit(rows=ROWS, reward=digits, model=model, config={"method": jrl.get_method("grpo")})
    assert "\n" not in str(caught.value)


def test_train_is_called_with_a_configuration(monkeypatch):
    """``from jrl import train`` gives the package of that name, which trains."""
    from jrl import Config, train
    from jrl.train import build

    with pytest.raises(UserError, match=r"method = 'gropo'; did you mean 'grpo'"):
        train(Config(method="gropo", data={"task": "sorting"}))
    calls = []
    monkeypatch.setattr("jrl.fit", lambda **values: calls.append(values))
    train("configs/tiny.toml", dir="somewhere")
    assert calls == [{"config": "configs/tiny.toml", "dir": "somewhere"}]
    assert build.__name__ == "jrl.train.build"  # it is a package all the same


def test_functions_of_modules_run_in_processes_and_those_of_scripts_here(monkeypatch):
    def inner(samples):
        return [0.0]

    def workers(function, **tree):
        entry._set_rewards(tree, function, {})
        return tree.get("reward_pool", {}).get("workers")

    assert workers(digits) is None  # the default, processes
    assert workers(digits, reward_pool={"workers": 1}) == 1
    for here in (inner, lambda samples: [0.0], math.gcd, types.SimpleNamespace().__class__):
        assert workers(here) == 0
    monkeypatch.setattr(digits, "__module__", "__main__")
    assert workers(digits) == 0


CHOSEN = {
    "train": {"steps": 3},
    "run": {"dir": "~/a"},
    "lora": {"rank": 2, "targets": ["q", "v"]},
    "data": {"template": "plain", "train": {"rows.csv": 1.0}},
    "rewards": {"own.py:f": {"weight": 2.0, "key": "sk-1234567890abcdefgh"}},
    "objective": {"clip": 0.5},
}


def test_a_file_and_a_configuration_say_what_they_set_and_no_more(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "x.toml").write_text(tomli_w.dumps(CHOSEN))
    assert entry._tree("x.toml") == CHOSEN
    config = load_config("x.toml")
    expanded = {**CHOSEN, "run": {"dir": "/home/me/a"}}
    assert entry._tree(config) == expanded
    assert build_config(entry._tree(config)) == config
    tree = entry._tree(config)
    entry._set_rewards(tree, lambda samples: [0.0], {})
    assert tree["reward_pool"] == {"workers": 0}


def test_rewards_may_be_a_list_as_trl_has_it():
    def short(samples):
        return [0.0 for _ in samples]

    tree, values = {}, {}
    entry._set_rewards(tree, [short, "exact"], values)
    assert [name.rpartition(":")[2] for name in tree["rewards"]] == ["short", "exact"]
    with pytest.raises(UserError, match="two rewards are called 'short'; give them as a dict"):
        entry._set_rewards({}, [short, short], {})


@pytest.mark.parametrize("as_file", [True, False])
def test_a_file_of_steps_goes_with_a_task(as_file, monkeypatch, tmp_path):
    (tmp_path / "steps.toml").write_text("rewards = 'verify'\n[train]\nsteps = 3\n")
    config = "steps.toml" if as_file else load_config("steps.toml")
    runs = []

    def stopped(config, **_):
        runs.append(config)
        raise UserError("stopped")

    monkeypatch.setattr(running, "run_config", stopped)
    with pytest.raises(UserError, match="stopped"):
        jrl.fit(task="sorting", reward={"partial": 0.5}, config=config)
    (run,) = runs
    assert (run.data.name, run.train.steps) == ("sorting", 3)
    assert set(run.rewards) == {"verify", "partial"}
    (tmp_path / "steps.toml").write_text("rewards = 3\nmodel = 4\n")
    with pytest.raises(UserError, match="rewards = 3; rewards is a table"):
        jrl.fit(task="sorting", reward="verify", config="steps.toml")
    with pytest.raises(UserError, match="model = 4; model is a table"):
        jrl.fit(task="sorting", model="org/x", config="steps.toml")


@pytest.mark.parametrize("function", [digits, in_trl_form])
def test_functions_that_were_passed_reach_a_process(function):
    with python_values({"mine": function}):
        pickled = pickle.dumps(make_reward("python:mine"))
    fields = {"id": 0, "text": "1", "tokens": [1], "answer": "2", "meta": {"a": 1}, "messages": ()}
    prompt = types.SimpleNamespace(**fields)
    sample = Sample(prompt, "12", np.arange(2), "length")
    assert pickle.loads(pickled)([sample]) == [1.0 if function is digits else 2.0]
