"""The README's code runs, and its commands and files exist."""

import pathlib
import re
import sys
import tomllib

import jax.numpy as jnp
import numpy as np
import pytest
from hub_mirror import add, checkpoint
from typer.main import get_command

from jrl.cli.app import app
from jrl.config import build_config
from jrl.methods import get_method, list_methods
from jrl.models.hf.parse import FAMILIES
from jrl.rewards.columns import form_of
from jrl.run import run as running
from jrl.storage.metrics import CLOCKS

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "configs" / "README.md").read_text()
NAMES = (
    *("own", "runs", "data", "python", "howto", "comparison", "environments"),
    *("start", "concepts", "recipes", "safety", "gallery", "rewards", "serving", "trackers"),
    *("signals", "verifiers", "judges", "reward-models", "reward-recipes", "code"),
)
DOCS = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in NAMES}
OWN, RUNS, DATA, PYTHON, HOWTO, COMPARISON = (
    DOCS[name] for name in ("own", "runs", "data", "python", "howto", "comparison")
)
PAGES = README + GUIDE + "".join(DOCS.values())


def blocks(text):
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


BLOCKS = blocks(OWN)


def numbers(text):
    return [float(number) for number in re.findall(r"\d\.\d+", text)]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A directory with the README's own method in it, as the working directory."""
    (tmp_path / "mine.py").write_text(BLOCKS[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("mine", None)


def test_the_examples_are_short():
    assert len(BLOCKS) == 10
    assert len(BLOCKS[0].splitlines()) < 30


def test_the_example_trains_with_a_method_from_a_file(mine, capsys):
    namespace = {}
    exec(compile(BLOCKS[2], "README.md", "exec"), namespace)
    printed = numbers(capsys.readouterr().out)
    documented = numbers(re.search(r"prints `(accuracy .*?)`", OWN)[1])
    assert printed == pytest.approx(documented, abs=0.1)  # machines round differently
    curves = namespace["curves"]
    assert curves["accuracy_after"] > curves["accuracy_before"] + 0.2
    assert curves["reward"].shape == (100,)
    table = RUNS.partition("| metric |")[2].partition("## ")[0]
    documented_names = {
        name for name in re.findall(r"`([\w/]+)`", table) if re.match(r"[a-z]\w+$", name)
    }
    # metrics.jsonl has the reward parts by name, and the accuracies in summary.json
    unnamed = {"reward_parts", "accuracy_before", "accuracy_after"}
    assert set(curves) - unnamed <= documented_names
    written_by_the_loop = {
        *("kl", "prompts", "reward_failures", "env_failures", "skipped_steps", "rollbacks"),
        *("row_length", "tree_shared_tokens"),  # of episodes, and of trees
        *("search_nodes", "search_leaves", "read_tokens", "reread_tokens", "replayed"),
        *("hard_problems", "written_problems"),
        "confidence",  # a reward part that metrics of evaluations need
    } | CLOCKS
    assert documented_names - set(curves) == written_by_the_loop


def test_the_advantage_of_the_example_is_what_trains(mine):
    from mine import share_of_success

    method = share_of_success(kl_coef=0.01)
    assert method.objective.regularizers  # inherited from GRPO
    scores = jnp.array([[1.0, 0.0, 0.0, 0.0]])

    class Members:
        members = jnp.ones((1, 4), bool)

    advantage = method.objective.advantage
    assert advantage.apply(scores, Members, ())[0].tolist() == [[3.0, -1.0, -1.0, -1.0]]


def test_the_number_of_methods_is_today_s():
    (number,) = re.findall(r"\*\*(\d+) published methods\*\*", README)
    assert int(number) == sum(bool(method["paper"]) for method in list_methods())


def test_every_command_is_listed_and_no_other():
    commands = re.findall(r"^\| `jrl ([a-z-]+)", README, flags=re.MULTILINE)
    assert sorted(commands) == sorted(get_command(app).commands)


@pytest.mark.parametrize("name", ["jrl/", "configs/", "notebooks/", "benchmarks/", "docs/"])
def test_paths_exist(name):
    paths = set(re.findall(rf"`({name}[\w./-]+)`", PAGES)) | {name}
    assert all((ROOT / path).exists() for path in paths), paths


def test_every_page_of_the_docs_is_read_by_these_tests():
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} == set(NAMES)


def test_tables_of_the_how_to_are_configurations():
    tables = re.findall(r"^    (\[.*\]\n(?:    .*\n)+)", HOWTO, flags=re.MULTILINE)
    assert len(tables) == 1
    for table in tables:
        tree = tomllib.loads(table)
        assert build_config(tree).watch["entropy"].action == "stop"


def test_the_comparison_says_what_is_true_of_this_library():
    assert f"| {len(list_methods())}, each with paper, formula and departures" in COMPARISON
    assert "| 56, 700 MB |" in COMPARISON
    assert "56 packages and 700 MB" in README
    ahead, behind = COMPARISON.partition("## Where this library is ahead")[::2]
    rows = [text.count("\n| ") for text in (ahead, behind)]
    assert min(rows) >= 8, "rows both ways"
    assert f"| {len(FAMILIES)} decoders with text" in COMPARISON


def test_it_is_one_screen_of_why_and_short_examples():
    first_screen = README.partition("## Five hops")[0]
    assert len(first_screen.splitlines()) <= 125
    command, python, method, arrays = blocks(README)
    assert len(command.splitlines()) <= 10
    assert len(method.splitlines()) <= 12
    assert len(arrays.splitlines()) <= 10
    assert len([line for line in python.splitlines() if line.strip()]) <= 15


@pytest.fixture
def qwen(tmp_path, monkeypatch):
    """A cache of the Hub that holds a small model of the name in the examples."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    model = checkpoint(tmp_path / "model", chat=True)
    add(tmp_path / "hub", "Qwen/Qwen3-0.6B", "model", model)


def test_the_example_with_values_runs(qwen, capsys):
    """As it stands, two steps of it."""
    code = blocks(README)[1].replace('"train.steps": 50', '"train.steps": 2, "train.prompts": 4')
    namespace = {}
    exec(compile(code, "README.md", "exec"), namespace)
    assert len(namespace["result"].metrics) == 2
    assert "reward = right (right: 1 for a completion that contains the answer)" in (
        capsys.readouterr().out
    )


def test_the_example_with_arrays_runs(capsys):
    namespace = {}
    exec(compile(blocks(README)[3], "README.md", "exec"), namespace)
    assert float(namespace["loss"]) == 0.0  # on-policy, and advantages sum to zero
    assert capsys.readouterr().out.startswith("gspo(clip_high=0.0005)\n")


@pytest.mark.slow
def test_the_example_of_the_docs_runs(qwen, capsys):
    steps = '"train.steps": 2, "train.prompts": 2, "sampling.max_new_tokens": 8'
    (code,) = blocks(PYTHON)
    namespace = {}
    exec(compile(code.replace('"train.steps": 20', steps), "python.md", "exec"), namespace)
    result = namespace["result"]
    assert [record["step"] for record in result.metrics] == [1, 2]
    assert "accuracy_after" in result.summary
    parts = {name for name in result.metrics[0] if name.startswith("reward/")}
    assert parts == {"reward/python:short_and_right", "reward/math"}


def test_the_mixture_of_the_docs_is_one():
    table = re.search(r"^    (\[data\.train\]\n(?:    .*\n)+)", DATA, flags=re.MULTILINE)[1]
    config = build_config(tomllib.loads(table))
    assert config.data.train == {"openai/gsm8k/main": 3.0, "mine.csv": 1.0}


def test_the_rewards_of_the_docs_are_rewards():
    functions = re.findall(r"^    (def right\(.*\n(?:     .*\n)+)", OWN, flags=re.MULTILINE)
    assert len(functions) == 2
    for code, form in zip(functions, ("samples", "columns"), strict=True):
        namespace = {}
        exec(code, namespace)
        assert form_of(namespace["right"], "rewards") == form


def test_the_readmes_method_is_gspo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(blocks(README)[2])
    method, gspo = (get_method(name, kl_coef=0.01) for name in ("mine.py:by_sequence", "gspo"))
    rows = np.random.default_rng(0).normal(size=(4, 7)).astype(np.float32)
    stats = {"logprobs": rows[0], "sampler_logprobs": rows[1], "ref_logprobs": rows[2]}
    live = np.arange(7) < 5
    mine, theirs = (m.objective.surrogate.apply(stats, rows[3], live)[0] for m in (method, gspo))
    np.testing.assert_array_equal(mine, theirs)
    assert np.abs(mine).max() > 0


def test_the_reward_of_the_command_line_is_one():
    namespace = {}
    exec(blocks(README)[0], namespace)
    assert form_of(namespace["right"], "rewards") == "samples"


def test_extras_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    extras_named = {n for g in re.findall(r"'\.\[([\w,]+)\]'", PAGES) for n in g.split(",")}
    assert {"math", "data", "cuda13", "tpu"} <= extras_named
    further = README.partition("Further extras:")[2].partition("Install extras")[0]
    extras_named |= set(re.findall(r"`(\w+)`", further))
    assert extras_named <= set(extras)


def test_make_targets_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(re.findall(r"\bmake (demo|test|dev|install)\b", README)) <= set(targets)
    assert "make demo" in README


def test_it_installs_from_the_checkout_only():
    for command in re.findall(r"pip install ([^`\n]*)", PAGES):
        others = ("tensorboard",)  # which no extra brings
        assert command.startswith(("-e ", *others)) or "google-jetstream" in command, command


def test_the_example_method_is_published():
    assert "grpo" in {method["name"] for method in list_methods()}
