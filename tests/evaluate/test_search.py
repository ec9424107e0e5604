"""Evaluation by search: what it finds, what it costs, and what it refuses."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jrl.collect.members import demonstration_rollout
from jrl.config import build_config, load_config
from jrl.episodes.search import Path
from jrl.episodes.tree import Step, Tree
from jrl.errors import UserError
from jrl.evaluate import load_policy
from jrl.evaluate.budget import budget_run
from jrl.evaluate.search import right_answers, search_run
from jrl.evaluate.verifiers import REDUCED, _by_values, verifier_of
from jrl.run import run as running
from jrl.run.run import train
from jrl.setup.kinds import kind_of
from jrl.storage.metrics import read_jsonl
from jrl.train import build, programs
from jrl.train.reward_model import model_of
from jrl.types import Prompt, StopReason

TINY = [
    "data.difficulty=3",
    "model.config={layers=1, embed_dim=16, heads=2, kv_heads=1, head_dim=8, mlp_dim=16}",
    "eval.problems=6",
    "warmup.steps=0",
    "mesh.fsdp=1",
]


def tiny(*more):
    return load_config("configs/tiny.toml", [*TINY, *more])


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


@pytest.mark.parametrize(("name", "expansions"), [("best_of_n", 1.0), ("dvts", None)])
def test_a_policy_is_evaluated_with_a_search(name, expansions):
    summary = search_run(tiny(), name, width=2, step_tokens=1)
    assert summary["problems"] == 6
    assert 0 <= summary["accuracy_low"] <= summary["accuracy"] <= summary["accuracy_high"] <= 1
    assert summary["steps"] == 2 * summary["expansions"]
    assert summary["drawn_tokens"] >= summary["steps"]
    assert summary["read_tokens"] > 0
    if expansions:
        assert summary["expansions"] == expansions
    assert search_run(tiny(), name, width=2, step_tokens=1) == summary


def test_a_search_leaves_rows_to_train_on(tmp_path):
    rows = search_run(tiny(), "puct", width=2, step_tokens=1, rounds=9, out=str(tmp_path / "rows"))
    files = {
        name: read_jsonl(tmp_path / "rows" / f"{name}.jsonl") for name in ("siblings", "paths")
    }
    assert {name: len(file_rows) for name, file_rows in files.items()} == {
        n: rows[n] for n in files
    }
    assert files["paths"]
    task = kind_of(tiny()).task
    for row in files["paths"]:
        for response, score, values in zip(
            row["responses"], row["scores"], row["step_values"], strict=True
        ):
            digits = sorted(row["prompt"][:3])  # sorting: digits, then a separator
            assert (response == [*digits, task.stop_id]) == (score == 1)
            assert values[-1] == score


def test_a_run_trains_on_the_rows_of_a_search(tmp_path, monkeypatch):
    """Rows of a policy that is right now and then: preferences of siblings, values of steps."""
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    more = ("warmup={steps=40, learning_rate=1e-2}", "train.steps=0", "eval.problems=16")
    run = tiny(*more, f"run.dir={tmp_path / 'run'}")
    train(run, echo=lambda line: None)
    rows = search_run(run, "puct", width=3, step_tokens=1, rounds=40, out=str(tmp_path))
    assert rows["siblings"] > 2
    for name, method in (("siblings", "mcts_dpo"), ("paths", "prm"), ("paths", "alphamath")):
        pairs = load_config(
            None,
            [
                *("data.task=sorting", TINY[0], TINY[1], f"data.pairs={tmp_path}/{name}.jsonl"),
                *(f"method={method}", "train.steps=3", "train.prompts=2", "checkpoint.every=0"),
                f"run.dir={tmp_path / method}",
            ],
        )
        lines = []
        train(pairs, echo=lines.append)
        assert not [line for line in lines if "the objective alone" in line]
        records = read_jsonl(tmp_path / method / "metrics.jsonl")[1:]
        assert [r["step"] for r in records] == [1, 2, 3]
        assert all(r["grad_norm"] > 0 for r in records)
    verified(run, tmp_path)


def verified(run, root):
    """Searches by what was trained: other answers than by likelihood, and the same ones again."""
    prm = tree_with(run, {"rewards": {"verify": {}, "model": {"path": str(root / "prm")}}})
    few = [f"run.dir={root / 'alphamath'}", "eval.problems=16"]
    alphamath = load_config(root / "alphamath" / "config.toml", few)
    for config, ways in ((prm, ("model", "min")), (alphamath, ("value", "mean"))):
        by = dict(zip(("by", "reduce"), ways, strict=True))
        summary = search_run(config, "beam", width=2, step_tokens=1, **by)
        assert summary["problems"] == 16
        assert search_run(config, "beam", width=2, step_tokens=1, **by) == summary
    values_are_those_behind_tokens(alphamath)
    with jax.set_mesh(build.setup(alphamath, trains=False).mesh):
        _, first = programs.new_policy(build.setup(alphamath, trains=False))
    ratios_are_those_of_the_last_step(alphamath, first)
    ranked = search_run(alphamath, "greedy", width=3, step_tokens=1, by="ratio")
    assert ranked["steps"] == 3 * ranked["expansions"]
    budget = budget_run(prm, completions=4, step_tokens=1, by="model")
    assert {"beam/accuracy", "dvts/accuracy"} <= budget.keys()


def values_are_those_behind_tokens(config):
    run = build.setup(config, trains=False)
    prompt, completion = np.array([[4, 3, 2, 5]], np.int32), np.array([[2, 3, 4, 1]], np.int32)
    with jax.set_mesh(run.mesh):
        model = model_of(config, run.mesh, 1, after=True)
        complete, four = np.ones(1, bool), np.array([4], np.int32)
        demonstration = demonstration_rollout(prompt, four, completion, four, complete, 1)
        values = model.of_tokens(demonstration)[0, 0]
        tokens = np.concatenate([prompt, completion], 1)
        columns, ones = np.arange(8, dtype=np.int32)[None], np.ones((1, 8), np.int32)
        _, params, _ = load_policy(run, None)
        hidden, _ = run.network.hidden(params, tokens, columns, ones)
        head = model.params["value"]
        behind = hidden[0, 4:].astype(np.float32) @ head["weight"] + head["bias"]
    np.testing.assert_allclose(values, behind, atol=1e-5)
    assert np.unique(values.round(6)).size == 4


def tree_with(config, more):
    return build_config(config.model_dump(mode="json", exclude_none=True) | more)


def ratios_are_those_of_the_last_step(config, first):
    """By hand, for two paths of one prompt."""
    run = build.setup(config, trains=False)
    prompts = [Prompt(0, "", np.array([4, 3, 2, 5], np.int32), "")]
    opening = prompts[0].tokens
    paths = [
        Path(opening, np.array([2, 3, 4, 1]), (2, 4), 3, -1.0, True),
        Path(opening, np.array([6, 2]), (2,), 0, -1.0, False),
    ]
    with jax.set_mesh(run.mesh):
        _, params, _ = load_policy(run, None)
        draws, score = verifier_of(config, "ratio", "last")(run, params, None)
        jax.tree.map(np.testing.assert_array_equal, draws, first)
        scores = score(paths)
        for path, points in zip(paths, scores, strict=True):
            tokens = np.concatenate([prompts[0].tokens, path.tokens]).astype(np.int32)[None]
            at = np.arange(tokens.shape[1], dtype=np.int32)[None]
            positions = np.arange(4 + path.begin, 4 + path.ends[-1])
            means = []
            for each in (params, first):
                hidden, _ = run.network.hidden(each, tokens, at, np.ones_like(tokens))
                chances = jax.nn.log_softmax(run.network.logits(each, hidden)[0])
                means.append(float(chances[positions - 1, tokens[0, positions]].mean()))
            assert points == pytest.approx(means[0] - means[1], abs=1e-5)


def test_a_path_is_worth_what_is_said_behind_its_steps():
    class Model:
        """Behind each token the token itself, less ten times the prompt's length."""

        def of_tokens(self, rollout):
            ahead = 10 * rollout.prompt_lengths[:, None, None]
            return rollout.tokens - ahead

    one, two = np.arange(1, 2), np.arange(1, 3)
    paths = [
        Path(one, np.array([5, 3, 9, 4]), (2, 3, 4), 3, -1.0, True),
        Path(two, np.array([7]), (1,), 0, -1.0, False),
        Path(one, np.array([6, 2]), (1, 2), 1, -1.0, False),
    ]
    expected = {"last": [-6, -13, -8], "min": [-7, -13, -8], "mean": [16 / 3 - 10, -13, -6]}
    for name, points in expected.items():
        assert _by_values(Model(), 4, 6, REDUCED[name], paths) == pytest.approx(points)


def test_what_cannot_be_searched_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--out .*file: File exists; name a directory"):
        search_run(tiny(), "beam", out=str(tmp_path / "file"))
    with pytest.raises(UserError, match="search = 'bream'; did you mean 'beam'"):
        search_run(tiny(), "bream")
    with pytest.raises(UserError, match="search = 'mcts' is called 'puct' now"):
        search_run(tiny(), "mcts")
    for by, reduce, message in (
        ("oracle", "last", "--by = 'oracle'"),
        ("model", "last", "--by model: rewards.model is missing"),
        ("model", "first", "--reduce = 'first'"),
        ("value", "last", "method = 'grpo' trains no value network"),
        ("likelihood", "min", "--reduce min is not read with --by likelihood"),
        ("ratio", "mean", "--reduce mean is not read with --by ratio"),
    ):
        with pytest.raises(UserError, match=message):
            search_run(tiny(), "beam", by=by, reduce=reduce)
    env = load_config("configs/gridworld.toml", ["mesh.fsdp=1"])
    with pytest.raises(UserError, match="in an environment on the device are not searched"):
        search_run(env, "beam")


def test_a_path_that_was_cut_is_judged_as_a_completion_that_was_cut(monkeypatch):
    def tree(stop):
        grown, ids = Tree(), np.array([5, 6])
        grown.add(0, Step(ids, done=True, points=0.5, episode=SimpleNamespace(stop=stop)))
        return grown

    def judge(run, problems, prompts, whose, paths, complete):
        assert [path.tolist() for path in paths] == [[5, 6], [5, 6], []]
        return complete.astype(float)

    monkeypatch.setattr("jrl.evaluate.search.points_of", judge)
    trees = [tree(StopReason.STOP_TOKEN), tree(StopReason.LENGTH), Tree()]
    run = SimpleNamespace(kind=SimpleNamespace(plays=False))
    right = right_answers(run, None, [], SimpleNamespace(trees=trees))
    assert right.tolist() == [True, False, False]
