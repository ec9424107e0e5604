"""The commands of README and docs/ are run, block after block, each training run for a step.

Models and data of the Hub come from a small mirror of its cache, files that a page shows are
written as it shows them, and sizes are overridden behind each command. ``test_docs_blocks`` parses
the same commands as they stand; what is not run here is listed in LEFT with the reason.
"""

import contextlib
import json
import re
import shutil
import subprocess

import jax
import pytest
from hub_mirror import add, checkpoint, lines
from test_docs_blocks import ROOT, commands, fenced, indented, name_of
from typer.testing import CliRunner

from jrl.cli.app import app
from jrl.config import load_config
from jrl.run import run as running

LEFT = {  # how a command begins -> what stands for it
    "jrl train configs/search.toml": "test: train/test_host_run.py",
    "jrl train configs/gsm8k_python.toml": "test: train/test_host_run.py",
    "jrl train configs/gsm8k_judged.toml": "test: zoo/methods/test_joint.py",
    "jrl train configs/judge.toml": "test: train/test_text_run.py",
    "jrl train configs/rlhf.toml": "test: rewards/test_text_models.py",
    "jrl train configs/prover.toml": "test: train/test_host_run.py",
    "jrl train configs/gsm8k.toml model.path=DIR data.train=train.jsonl data.env": (
        "test: train/test_host_run.py"
    ),
    "jrl serve": "test: serving/test_http.py",
    "jrl imagine": "test: zoo/tools/test_imagine.py",
    "jrl eval RUN --search beam --width 4 --by model": "test: evaluate/test_search.py",
    "jrl plan configs/pod_8b_v5e.toml": "test: plan/test_plan.py",
    "jrl train configs/tiny.toml log.to": "test: storage/test_sinks.py",
    "jrl convert RUN exported --push": "test: run/test_push.py",
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

TEXT = ["sampling.max_new_tokens=8", "model.dtype=float32"]
SMALL = {  # configuration -> sizes of a run of a step
    "": ["sampling.max_new_tokens=8"],
    "code": TEXT,
    "dialogues": TEXT,
    "dpo": [],
    "gallery/countdown": [],
    "gallery/countdown_sft": ["sampling.group=1"],
    "gallery/distil": ["warmup.steps=1", "warmup.batch=8"],
    "gallery/dpo": ["warmup.steps=1", "warmup.batch=8"],
    "gallery/tools": ["warmup.steps=1", "warmup.batch=8"],
    "gridworld": ["train.prompts=2"],
    "gsm8k": TEXT,
    "intrinsic": TEXT,
    "reward_model": [],
    "rubric": [*TEXT, "rewards.rubric.max_prompt_tokens=200", "rewards.rubric.max_tokens=8"],
    "sql": TEXT,
    "tiny": ["warmup.steps=1", "warmup.batch=8"],
}
SIZES = "model.config={layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}"
WITH_SIZES = ("tiny", "gridworld")
WITH_SIZES += tuple(f"gallery/{name}" for name in ("countdown_sft", "distil", "dpo", "tools"))
ALWAYS = ["train.steps=1", "train.prompts=2", "train.microbatches=1", "sampling.group=4"]
ALWAYS += ["eval.problems=2", "reward_pool.workers=1", "mesh.fsdp=1"]
# A policy of one warm step is hardly ever right, so a search of it may leave no preferences.
SIBLINGS = [{"prompt": [1, 2], "responses": [[3, 4], [5, 6]], "scores": [1.0, 0.0]}] * 4
PAIRS = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "no"} for i in range(9)]
ROWS = [{"question": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(9)]
TALKS = [  # short enough for any run
    {"messages": [{"role": "user", "content": f"{i}+1?"}, {"role": "assistant", "content": "1"}]}
    | {"reward": float(i == 0)}
    for i in range(9)
]
SOLVED = [row | {"answer": f"so #### {row['answer']}"} for row in ROWS]
# A row has what any page's configuration reads of it.
COLUMNS = {
    "input_output": {"inputs": ["2\n"], "outputs": ["4\n"]},
    "schema": "CREATE TABLE t (n); INSERT INTO t VALUES (1);",
    "query": "SELECT n FROM t",
    "rubric": [{"text": "Is right.", "weight": 3}, {"text": "Is short."}],
}


def is_command(words):
    return words[0].rpartition("/")[2] == "jrl"


def left(words):
    """Whether another test stands for a command."""
    return any(" ".join(["jrl", *words[1:]]).startswith(start) for start in LEFT)


GAMES = re.compile(r"env=\"(pgx|navix|jumanji|gymnax)\"")


def needs_of(block):
    """Marks of the libraries of games that a block plays, whose own warnings are none of ours."""
    games = GAMES.findall(block)
    filters = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
    return [pytest.mark.extra("games", *sorted(set(games))), filters] if games else []


BLOCKS = [
    pytest.param(
        page,
        block,
        id=f"{name_of(page)}: {block.strip().splitlines()[0]}"[:90],
        marks=needs_of(block),
    )
    for page in PAGES
    for block in indented(page)
    if re.search(r"^(\S*/)?jrl ", block, flags=re.MULTILINE)
]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A cache of the Hub with the models and data that the pages name."""
    place = tmp_path_factory.mktemp("hub")
    model = checkpoint(place / "DIR", chat=True)
    for name in ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B"):
        add(place / "cache", f"Qwen/{name}", "model", model)
    rows = {f"main/{split}-00000.jsonl": lines(SOLVED) for split in ("train", "test")}
    add(place / "cache", "openai/gsm8k", "dataset", rows)
    return place


@pytest.fixture
def place(hub, tmp_path, monkeypatch):
    """A working directory with everything that a command may name."""
    monkeypatch.setenv("HF_HUB_CACHE", str(hub / "cache"))
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    shutil.copytree(hub / "DIR", tmp_path / "DIR")
    for name in ("pairs", "held", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text(lines(PAIRS))
    for name in ("talks", "imagined"):
        (tmp_path / f"{name}.jsonl").write_text(lines(TALKS))
    (tmp_path / "train.jsonl").write_text(lines([row | COLUMNS for row in SOLVED]))
    rows = "".join(f"{row['question']},{row['answer']}\n" for row in ROWS)
    (tmp_path / "mine.csv").write_text("question,answer\n" + rows)
    return tmp_path


def small(words):
    """A command's words with what makes it short behind them, as pages leave room for."""
    command, *rest = words
    if command == "compare":
        changed = {"--seeds": "2"}
        if not any(word.startswith("objective.") for word in rest):  # which others may read
            changed["--methods"] = "grpo"
        rest = [changed.get(before, word) for before, word in zip(["", *rest], rest, strict=False)]
        return ["compare", *rest, *ALWAYS[1:], *sizes(rest), "--steps", "1"]
    return [command, *rest, *ALWAYS, *sizes(rest)]


def sizes(words):
    path_match = re.fullmatch(r"configs/([\w/]+)\.toml", words[0])
    name = path_match[1] if path_match else ""
    sets_model = any(word.startswith(("model.", "[model")) for word in words)
    with_sizes = name in WITH_SIZES and not sets_model
    return SMALL[name] + [SIZES] * with_sizes


def run(words):
    theirs = GAMES.search(" ".join(words))  # these libraries add arrays of unlike rank
    with jax.numpy_rank_promotion("allow") if theirs else contextlib.nullcontext():
        result = CliRunner().invoke(app, words)
    log = "\n".join([" ".join(words), result.output])
    assert result.exit_code == 0, (log, result.exception)
    return result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "block"),
    [p for p in BLOCKS if not all(map(left, filter(is_command, commands(p.values[1]))))],
)
def test_every_command_of_a_block_runs(page, block, place):
    for _, code in fenced(page):
        if file_name := re.match(r"# (\w+\.py)\n", code):
            (place / file_name[1]).write_text(code)
    for words in filter(is_command, commands(block)):
        if left(words):
            continue
        words = words[1:]
        if "RUN" in words and not (place / "RUN").exists():
            run(small(["train", "configs/tiny.toml", "run.dir=RUN"]))
            shutil.copytree(place / "RUN", place / "OTHER")
        if words[0] in ("train", "compare"):
            if words[1].startswith("runs/"):  # resumed: as long as it was
                assert "training finished" in run(words)
                continue
            output = run(small(words))
            assert "training finished" in output or words[0] == "compare", output
        elif words[0] == "convert":
            source, target = ("RUN", "converted") if words[1] == "RUN" else words[1:]
            run(["convert", source, target])
            assert json.loads((place / target / "config.json").read_text())
        else:
            run([*words, *["eval.problems=2"] * (words[0] == "eval")])
            if "--out" in words:
                (path,) = place.glob("*/siblings.jsonl")
                path.write_text(path.read_text() or lines(SIBLINGS))


LAUNCHES = [
    pytest.param(words, id=f"{page.parent.name}/{page.name}: {words[0]}")
    for page in (ROOT / "docs" / "start.md", ROOT / "tpu_scripts" / "README.md")
    for block in indented(page)
    for words in commands(block)
    if words[0].rpartition("/")[2] in ("launch.sh", "gke.sh") and "--" in words
]


@pytest.mark.parametrize("words", LAUNCHES)
def test_what_launch_lines_start_is_complete(words):
    script, at = words[0].rpartition("/")[2], words.index("--")
    line = [ROOT / "tpu_scripts" / script, *words[1:at], "--dry-run", *words[at:]]
    commands = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    assert all(word in commands for word in words[at + 1 :])
    config = load_config(ROOT / words[at + 1], words[at + 2 :])
    assert config.model.config is None
    assert None not in (config.model.path, config.data.train, config.run.dir)


@pytest.mark.slow
@pytest.mark.parametrize("words", LAUNCHES[:1])
def test_a_launch_line_trains_a_small_model_on_small_data(words, place):
    ours = {"model.path": "DIR", "data.train": "train.jsonl", "run.dir": "RUN"}
    pairs = [word.partition("=") for word in words[words.index("--") + 1 :]]
    overrides = [f"{key}={ours.get(key, value)}" if eq else key for key, eq, value in pairs]
    here = ["sampling.mesh=", "sampling.max_new_tokens=8", "model.dtype=float32"]
    assert "training finished" in run(["train", *overrides, *ALWAYS, *here])


def test_what_is_left_out_is_tested_elsewhere():
    lines = [" ".join(["jrl", *words[1:]]) for p in BLOCKS for words in commands(p.values[1])]
    for start, where in LEFT.items():
        assert any(line.startswith(start) for line in lines), start
        assert (ROOT / "tests" / where.removeprefix("test: ")).is_file()
    assert len(BLOCKS) > 25
