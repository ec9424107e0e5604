"""Every block of code in README and the guides is read here, by what it is; none is left over.

Commands are parsed by the command itself, configurations and tables are loaded, scripts for pods
are run with --dry-run, and Python is executed, here or in tests/test_readme.py.
``test_docs_commands`` runs the commands of ``jrl``, with the files that a page shows.
"""

import itertools
import json
import pathlib
import re
import shlex
import subprocess
import tomllib

import click
import pytest
from typer.main import get_command

from jrl.cli.app import app
from jrl.config import build_config, load_config
from jrl.episodes.host import HostEnv
from jrl.run import run as running
from jrl.run.run import train

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name / "README.md" for name in ("configs", "tpu_scripts", "benchmarks")),
    ROOT / "CONTRIBUTING.md",
]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?:\A|^\n)((?:^    .*\n|^\n(?=    ))+)", flags=re.MULTILINE)

SHOWN = (  # what is printed, and a picture in letters
    "training finished",
    "host                                      device",
    "waiting for the rewards of step 12",
    "goal 1 of 2",
)

PYTHON = {  # page -> the test that runs each of its blocks, by the block's first line
    "README.md": {
        "# rewards.py": "test_readme::test_the_reward_of_the_command_line_is_one",
        "from jrl import fit": "test_readme::test_the_example_with_values_runs",
        "# mine.py": "test_readme::test_the_readmes_method_is_gspo",
        "import jax.numpy as jnp": "test_readme::test_the_example_with_arrays_runs",
    },
    "docs/python.md": {"from jrl import fit": "test_readme::test_the_example_of_the_docs_runs"},
    "docs/own.md": {
        "# mine.py": "test_readme::test_the_example_trains_with_a_method_from_a_file",
        "# pull.py": "test_docs_commands::test_every_command_of_a_block_runs",
        "import jax": "test_readme::test_the_example_trains_with_a_method_from_a_file",
        "# again.py": "test_docs_commands::test_every_command_of_a_block_runs",
        "# heavy.py": "test_docs_commands::test_every_command_of_a_block_runs",
        "# doubles.py": "test_docs_commands::test_every_command_of_a_block_runs",
        "# mytask.py": "test_docs_commands::test_every_command_of_a_block_runs",
        "# myenv.py": "test_docs_commands::test_every_command_of_a_block_runs",
        "# mynet.py": "test_docs_blocks::test_the_other_way_to_write_a_module_trains",
        "# plain.py": "test_docs_commands::test_every_command_of_a_block_runs",
    },
    "docs/concepts.md": {
        "import jax.numpy as jnp": "test_docs_blocks::test_what_a_block_prints_is_what_it_says"
    },
    "docs/recipes.md": {
        "from jrl.episodes import Step, Tree, rows_of_tree": (
            "test_docs_blocks::test_what_a_block_prints_is_what_it_says"
        ),
        "# experience.py": "test_docs_blocks::test_the_agent_of_the_recipes_learns_from_its_notes",
    },
    "docs/environments.md": {
        "# debate.py": (
            "train/test_host_run::test_the_coroutine_of_the_guide_is_trained_and_evaluated"
        ),
        "from jrl.zoo import parse_formula, provable, prove_by_parts": (
            "test_docs_blocks::test_what_a_block_prints_is_what_it_says"
        ),
        "from openai import OpenAI": "serving/test_record::test_the_example_of_the_docs_runs",
    },
    "docs/signals.md": {
        "import numpy as np": "test_docs_blocks::test_what_a_block_prints_is_what_it_says"
    },
    "docs/rewards.md": {
        "# steps.py: 1 at the end of each line, and -1 spread over the tokens of an apology": (
            "rewards/test_by_token::test_the_example_of_the_docs_pays_lines_and_apologies"
        )
    },
    "configs/README.md": {
        "# my_env.py: the policy computes with tools; its last turn is scored": (
            "test_docs_blocks::test_the_environment_of_the_guide_is_one"
        )
    },
    "CONTRIBUTING.md": {
        "@variant(grpo, clip_low=3e-4, clip_high=4e-4)": (
            "test_docs_blocks::test_the_method_of_the_guide_is_the_library_s"
        )
    },
}


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def fenced(page):
    return FENCED.findall(page.read_text())


def indented(page):
    """Blocks without their indentation."""
    text = FENCED.sub("", page.read_text())
    blocks = INDENTED.findall(text)
    return [re.sub(r"^    ", "", b, flags=re.MULTILINE).lstrip("\n") for b in blocks]


def commands(block):
    """Its lines as the shell's words, comments left out."""
    joined = block.replace("\\\n", " ")
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


BLOCKS = [(page, block) for page in PAGES for block in indented(page)]
COMMANDS = [
    pytest.param(words, id=f"{name_of(page)}: {' '.join(words)}"[:90])
    for page, block in BLOCKS
    if not block.strip().startswith((*SHOWN, "[", "def "))
    for words in commands(block)
]


def test_blocks_are_found():
    assert len(BLOCKS) > 50
    assert len(COMMANDS) > 70
    assert {name_of(page) for page, _ in BLOCKS} > {"README.md", "docs/start.md", "docs/recipes.md"}


INLINE = [  # in the text
    pytest.param(shlex.split(code), id=f"{name_of(page)}: {code}"[:90])
    for page in PAGES
    for code in re.findall(r"`(jrl [a-z][^`\n]*)`", FENCED.sub("", page.read_text()))
    if not re.search(r"\.\.\.|\u2026|\[NAME\]|\[CONFIG\]", code)
]


def examples():
    """The example at the end of each command's help."""
    for name, command in get_command(app).commands.items():
        _, separator, example = (command.help or "").partition("Example: ")
        assert separator, f"jrl {name} has no example"
        yield pytest.param(shlex.split(example), id=f"--help: {' '.join(example.split())}")


@pytest.mark.parametrize("words", [*COMMANDS, *INLINE, *examples()])
def test_commands(words, tmp_path):
    first, *rest = words
    program = pathlib.PurePath(first).name
    if program == "jrl":
        check_jrl(rest)
    elif program.startswith("python"):
        check_python(rest)
    elif program == "pip":
        check_pip(rest)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in rest if "=" not in word} <= set(targets)
        assert any("=" not in word for word in rest)
    elif program.endswith(".sh"):
        check_script(program, rest)
    elif first == "git":
        address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
        assert rest == ["clone", address["Repository"], "jrl"]
    elif program == "jupyter":
        assert rest[0] == "lab"
        assert (ROOT / rest[1]).is_dir()
    else:
        assert first in (".ci/run", ".venv/bin/pre-commit") or words == ["cd", "jrl"], words


def check_jrl(words):
    name, *rest = words
    command = get_command(app).commands[name]
    if all(word.startswith("-") for word in rest):  # a text that names the command, or an option
        options = {"--help"}.union(*(parameter.opts for parameter in command.params))
        assert set(rest) <= options
        return
    context = click.Context(command, info_name=name)
    command.parse_args(context, list(rest))  # an option that it does not have is an error
    overrides = context.params.get("overrides") or ()
    config = context.params.get("config") or context.params.get("target") or ""
    if "=" in str(config):
        overrides, config = [config, *overrides], ""
    if str(config).isupper() or str(config).startswith("runs/"):
        assert all(re.match(r"[a-z][\w.]*=", word) for word in overrides)
        keys = [word.replace("CONFIG", "") for word in overrides]
        load_config(ROOT / "configs" / "tiny.toml", [k for k in keys if k.startswith("eval.")])
    elif name in ("train", "plan", "compare", "doctor"):
        load_config(ROOT / config if config else None, overrides)


def check_python(words):
    if words[:2] == ["-m", "venv"]:
        return
    if words[0].endswith(".py"):
        assert (ROOT / words[0]).is_file()
        return
    assert words[0] == "-m"
    module = words[1].replace(".", "/")
    assert (ROOT / f"{module}.py").exists() or (ROOT / module / "__main__.py").exists(), words
    source = "".join(p.read_text() for p in (ROOT / "benchmarks").rglob("*.py"))
    for word in words:
        option = word.partition("=")[0]
        assert not option.startswith("--") or f'"{option}"' in source, word


def check_pip(words):
    """From the checkout, with extras that there are; peers have environments of their own."""
    assert words[0] == "install"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = [word for word in words[1:] if not word.startswith(("-", "https:"))]
    for name in names:
        if match := re.fullmatch(r"\.(?:\[([\w,]+)\])?", name):
            assert set((match[1] or "").split(",")) - {""} <= set(extras)
        else:
            assert re.split("[=<>]", name)[0] not in ("jrl", "jrl-lm")


def check_script(program, words):
    script = ROOT / "tpu_scripts" / program
    done = subprocess.run(
        [script, "--dry-run", *words], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if "--" in words:
        config, *overrides = words[words.index("--") + 1 :]
        load_config(ROOT / config, overrides)


@pytest.mark.parametrize(
    "block", [pytest.param(b, id=b.partition("\n")[0]) for _, b in BLOCKS if b.startswith("[")]
)
def test_tables_are_configurations(block):
    tree = tomllib.loads(block)
    # a batch that any mesh divides
    build_config({"data": {"task": "sorting"}, "train": {"prompts": 64}} | tree)


def test_every_block_of_python_has_a_test_that_runs_it():
    blocks, languages = {}, set()
    for page in PAGES:
        for language, code in fenced(page):
            languages.add(language)
            blocks.setdefault(name_of(page), []).append(code.partition("\n")[0])
    assert languages == {"python"}
    assert {page: list(tests) for page, tests in PYTHON.items()} == blocks
    for tests in PYTHON.values():
        for test in tests.values():
            file, _, name = test.partition("::")
            assert f"def {name}(" in (ROOT / "tests" / f"{file}.py").read_text(), test


OWN = ROOT / "docs" / "own.md"
SHORT = (
    *("train.steps=2", "train.prompts=4", "warmup.steps=1", "warmup.batch=8", "eval.problems=8"),
    *("checkpoint.every=0", "log.samples_every=1"),
)


@pytest.mark.slow
def test_the_other_way_to_write_a_module_trains(tmp_path, monkeypatch):
    """NNX, beside the command of the page, which trains the Linen module."""
    (code,) = (code for _, code in fenced(OWN) if code.startswith("# mynet.py"))
    (tmp_path / "mynet.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    network = ["model.network=mynet.py:averages", "model.config={width=16}"]
    chosen = load_config(ROOT / "configs" / "tiny.toml", [*network, *SHORT, "run.dir=run"])
    assert train(chosen, echo=lambda line: None)["steps"] == 2


@pytest.mark.parametrize(
    ("page", "count"),
    [("concepts.md", 2), ("recipes.md", 1), ("environments.md", 1), ("signals.md", 6)],
)
def test_what_a_block_prints_is_what_it_says(page, count, capsys):
    elsewhere = "from openai"  # which takes a server
    codes = [code for _, code in fenced(ROOT / "docs" / page) if not code.startswith(elsewhere)]
    (code,) = (code for code in codes if "\nprint(" in code)
    exec(compile(code, page, "exec"), {})
    expected = [line.rpartition("# ")[2] for line in code.splitlines() if line.startswith("print(")]
    assert capsys.readouterr().out.splitlines() == expected
    assert len(expected) == count


def test_the_agent_of_the_recipes_learns_from_its_notes():
    """A model that is right now and then, and always once it has noted why."""
    codes = [code for _, code in fenced(ROOT / "docs" / "recipes.md")]
    (code,) = (code for code in codes if code.startswith("# experience.py"))
    namespace = {}
    exec(compile(code, "experience.py", "exec"), namespace)
    first_words, tries = [], itertools.count()

    def speak(messages):
        text = messages[0]["content"]
        first_words.append(text.split()[0])
        if text.startswith("Say in"):
            return "It carries." if "42" in text else "It forgets to carry."
        if text.startswith("Attempts"):
            assert "Attempt of 1 points:\nIt carries." in text
            assert "Attempt of 0 points:\nIt forgets to carry." in text
            return 'Carry: [{"do": "add", "text": "Carry the one."}]'
        return "42" if "Carry the one." in text or next(tries) % 2 else "32"

    def judge(attempt, answer):
        return float(attempt == answer)

    problems = [("What is 14 + 28?", "42")]
    assert namespace["learn"](speak, problems, judge, group=4, epochs=3) == {0: "Carry the one."}
    # Four attempts, their summaries and one edit; then groups that say nothing.
    assert first_words == ["What"] * 4 + ["Say"] * 4 + ["Attempts"] + ["What"] * 8
    edit_notes = namespace["edited"]
    notes = {0: "a", 2: "b"}
    edits = [{"do": "modify", "id": 0, "text": "c"}, {"do": "delete", "id": 2}]
    assert edit_notes(notes, json.dumps(edits)) == {0: "c"}
    assert edit_notes(notes, json.dumps([{"do": "add", "text": "d"}])) == {**notes, 3: "d"}
    for nonsense in ("no list", "[1]", '[{"do": "add"}]', "[] and ["):
        assert edit_notes(notes, nonsense) == notes
    assert notes == {0: "a", 2: "b"}


def test_the_environment_of_the_guide_is_one():
    ((_, code),) = fenced(ROOT / "configs" / "README.md")
    namespace = {}
    exec(compile(code, "my_env.py", "exec"), namespace)
    env = namespace["make"](difficulty=3)
    assert isinstance(env, HostEnv)
    assert env.limits.turns == 5


def test_the_method_of_the_guide_is_the_library_s():
    ((_, code),) = fenced(ROOT / "CONTRIBUTING.md")
    source = (ROOT / "jrl" / "methods" / "ratios.py").read_text()
    assert code.splitlines()[0] in source
    assert code.splitlines()[-1] in source
