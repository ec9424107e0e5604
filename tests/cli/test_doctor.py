"""``jrl doctor``: what is here, and everything that a configuration lacks at once."""

import json

import pytest
from hub_mirror import checkpoint, lines
from typer.testing import CliRunner

from jrl.cli import doctor
from jrl.cli.app import app
from jrl.cli.console import print_machine
from jrl.config import load_config
from jrl.errors import UserError
from jrl.run import diagnostics as lacking
from jrl.run import reward_probe as reward_text
from jrl.run.diagnostics import obstacles
from jrl.run.run import train
from jrl.system import extras
from jrl.train.build import setup
from jrl.train.trainable import check_trainable

SIZES = "model.config={layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}"


@pytest.fixture(autouse=True)
def caches(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("JRL_CACHE_DIR", "")


def test_the_machine(tmp_path):
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "blob").write_bytes(b"x" * 2_000_000)
    report = doctor.examine()
    assert "8 x cpu" in report["devices"]
    assert "GiB memory available" in report["host"]
    assert report["hub_cache"] == f"{tmp_path / 'hub'}, 2 MB; offline (HF_HUB_OFFLINE)"
    assert report["compile_cache"] == "off"
    assert report["extra_math"] == "installed" or "pip install" in report["extra_math"]


def test_extras_that_are_missing_come_with_the_line(monkeypatch):
    monkeypatch.setattr(doctor, "missing", lambda requirements: ["some-package"])
    line = doctor.examine()["extra_wandb"]
    assert line == f"missing some-package: {extras.install_line('wandb')}"


def test_a_run_that_lacks_nothing(tmp_path):
    assert obstacles(load_config(None, ["data.task=sorting", SIZES])) == []
    model = checkpoint(tmp_path / "model", chat=True)
    (tmp_path / "a.jsonl").write_text(lines([{"question": "a?", "answer": "1"}]))
    names = [f"model.path={json.dumps(str(model))}", f"data.train={tmp_path / 'a.jsonl'}"]
    assert obstacles(load_config(None, names)) == []


def test_everything_that_is_lacking_is_named_at_once(monkeypatch):
    monkeypatch.setattr(lacking, "missing", lambda requirements: requirements)
    wrong = ["method=grop", "model.path=org/none", "data.train=none.jsonl", "mesh.tensor=64"]
    wrong += ["rewards={maht={}}", "log.to=wandb:mine"]
    problems = obstacles(load_config(None, wrong))
    for part in ("'grop'", "org/none", "none.jsonl", "'maht'", "needs 64 devices", "extra wandb"):
        assert sum(part in line for line in problems) == 1, (part, problems)


def test_rows_templates_and_columns_are_looked_at(tmp_path, monkeypatch):
    model = checkpoint(tmp_path / "model", chat=True)
    (tmp_path / "a.jsonl").write_text(lines([{"question": "a?", "answer": "1"}]))
    (tmp_path / "mine.py").write_text("def f(completions, level):\n    return [0.0]\n")
    names = [f"model.path={json.dumps(str(model))}", f"data.train={tmp_path / 'a.jsonl'}"]
    problems = obstacles(load_config(None, [*names, "data.fields.question=ask"]))
    assert any("ask" in line for line in problems), problems
    reward = f"rewards={{{json.dumps(f'{tmp_path}/mine.py:f')}={{}}}}"
    problems = obstacles(load_config(None, [*names, reward]))
    assert any("takes level, and the data has no such column" in line for line in problems), (
        problems
    )
    monkeypatch.setattr(reward_text, "missing", lambda requirements: requirements)
    problems = obstacles(load_config(None, names))
    assert problems == [reward_text.missing_math(load_config(None, names))]
    assert problems[0].endswith(extras.install_line("math"))
    assert not reward_text.missing_math(load_config(None, [*names, "rewards={exact={}}"]))


APART = {
    "tree.rounds = 2 does not go with": ("tree.kind=branch", "tree.rounds=2"),
    "sampling.temperature = 0": ("sampling.temperature=0",),
    "sampling.group = 1": ("sampling.group=1",),
}


@pytest.mark.parametrize("line", APART)
def test_parts_that_do_not_go_together_are_named_as_the_run_names_them(line, tmp_path):
    model = checkpoint(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text(lines([{"question": "a?", "answer": "1"}]))
    text = (
        "async def episode(policy, prompt):\n    await policy('Name a number.')\n    return 1.0\n"
    )
    (tmp_path / "mine.py").write_text(text)
    config = [f"model.path={json.dumps(str(model))}", f"data.train={tmp_path / 'a.jsonl'}"]
    config += [f"data.env={json.dumps(f'{tmp_path}/mine.py:episode')}", "data.max_prompt_tokens=64"]
    assert obstacles(load_config(None, config)) == []
    config = load_config(None, [*config, *APART[line]])
    with pytest.raises(UserError) as caught:
        check_trainable(setup(config))
    said_by_the_run = str(caught.value).splitlines()
    assert any(each.startswith(line) for each in said_by_the_run)
    assert obstacles(config) == said_by_the_run


def test_features_are_compared_on_other_devices_too():
    wrong = ["data.task=sorting", SIZES, "mesh.tensor=64", "tree.kind=search"]
    wrong += ["rewards.model={path='x'}"]
    problems = obstacles(load_config(None, wrong))
    assert sum("needs 64 devices" in line for line in problems) == 1
    assert sum("does not go with [rewards.model]" in line for line in problems) == 1


def test_a_run_that_is_refused_names_all_that_is_wrong(tmp_path):
    (tmp_path / "mine.py").write_text("def f(samples, level):\n    return [0.0]\n")
    defined, none = (json.dumps(f"{tmp_path}/mine.py:{name}") for name in ("f", "g"))
    wrong = ["data.task=srting", "method=grop", "optimizer.name=adm", "mesh.tensor=64", SIZES]
    config = load_config(None, [*wrong, f"run.dir={tmp_path / 'run'}"])
    with pytest.raises(UserError) as caught:
        train(config, echo=print)
    keys = [line.split(" = ")[0] for line in str(caught.value).splitlines()]
    assert keys[:3] == ["data.task", "method", "optimizer.name"]
    assert keys[3] == "mesh.tensor"
    wrong = ["data.task=sorting", "objective.kl_cof=1", "objective.epochs=0", SIZES]
    wrong += [f"rewards={{{defined}={{}}, {none}={{}}}}", f"run.dir={tmp_path / 'run'}"]
    with pytest.raises(UserError) as caught:
        train(load_config(None, wrong), echo=print)
    error_lines = str(caught.value).splitlines()
    assert len(error_lines) == 4
    for part in ("objective.kl_cof = 1", "epochs = 0", "f(samples, level) needs it", "no function"):
        assert sum(part in line for line in error_lines) == 1, (part, error_lines)
    assert not (tmp_path / "run").exists()


def test_an_error_is_not_said_twice_because_it_counts_otherwise(monkeypatch):
    config = load_config(None, ["data.task=sorting", SIZES])

    def parts(config, *, together):
        assert not together  # a run that failed does not call functions of one's own again
        return ["a.jsonl, 2 rows", "seed = 1"]

    monkeypatch.setattr(lacking, "obstacles", parts)
    error = lacking.with_others(UserError("a.jsonl, 500 rows"), config)
    assert str(error).splitlines() == ["a.jsonl, 500 rows", "seed = 1"]


def test_a_configuration_that_is_wrong_hides_nothing(tmp_path):
    wrong = CliRunner().invoke(app, ["doctor", "sampling.grup=1", "train.stps=2", "--json"])
    report = json.loads(wrong.stdout)
    assert wrong.exit_code == 1
    assert [line.split(" = ")[0] for line in report["lacks"]] == [
        *("unknown key sampling.grup", "unknown key train.stps")
    ]
    assert "cpu" in report["devices"]


def test_the_command_prints_it_and_its_exit_code_says_so():
    good = CliRunner().invoke(app, ["doctor", "data.task=sorting", SIZES])
    assert good.exit_code == 0, good.output
    assert good.stdout.endswith("is missing:\n  nothing\n")
    bad = CliRunner().invoke(app, ["doctor", "data.train=none.jsonl", "--json"])
    assert bad.exit_code == 1
    assert any("none.jsonl" in line for line in json.loads(bad.stdout)["lacks"])
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0


def test_extras_that_are_not_installed_take_one_line(capsys):
    print_machine(
        {
            "jrl": "1",
            "extra_math": "installed",
            "extra_mcp": "missing a: pip install -e '.[mcp]'",
            "extra_wandb": "missing b, c: pip install -e '.[wandb]'",
        }
    )
    assert [line.split(None, 1) for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["jrl", "1"],
        ["extras", "math installed"],
        ["other", "extras  mcp, wandb; pip install -e '.[NAME]' installs one"],
    ]
