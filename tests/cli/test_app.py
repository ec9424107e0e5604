"""The command line: help, errors, exit codes, and what each command passes on."""

import errno
import json
import logging
import os
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jrl.cli import console
from jrl.cli.app import app
from jrl.cli.complete import complete_method
from jrl.cli.console import keys_text
from jrl.config import config_hash, describe, load_config
from jrl.methods import all_methods
from jrl.storage import checkpoints
from jrl.storage.metrics import RunWriter

TINY = str(Path(__file__).parents[2] / "configs" / "tiny.toml")
COMMANDS = [
    "train",
    "eval",
    "sample",
    "convert",
    "serve",
    "report",
    "methods",
    "imagine",
    "show-config",
]


def jrl(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def replace(monkeypatch):
    """Puts a stand-in module with one function in place of the real one."""

    def put(module, **functions):
        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**functions))

    monkeypatch.setenv("JRL_CACHE_DIR", "")
    return put


@pytest.fixture
def run_dir(tmp_path):
    config = load_config(None, [f'run.dir="{tmp_path / "old"}"', "data.task=sorting", "seed=4"])
    RunWriter(config).write(1, {"reward": 0.5})
    (tmp_path / "old").rename(tmp_path / "run")
    return tmp_path / "run"


def test_help_lists_the_commands_and_each_explains_itself():
    result = jrl("--help")
    assert result.exit_code == 0
    assert all(f"  {command}" in result.stdout for command in COMMANDS)
    assert "..." not in result.stdout.partition("Commands:")[2]  # no summary is cut
    for command in COMMANDS:
        text = jrl(command, "--help")
        assert text.exit_code == 0
        assert len(text.stdout.splitlines()) > 8, command


def test_show_config_help_describes_every_key():
    text = " ".join(jrl("show-config", "--help").stdout.split())
    for key in describe():
        assert key.name in text
        assert " ".join(key.text.split()) in text
    assert max(map(len, keys_text().splitlines())) <= 100


def test_help_does_not_import_jax():
    code = (
        "import sys\n"
        "sys.argv = ['jrl', '--help']\n"
        "import jrl.cli.app\n"
        "try:\n    jrl.cli.app.main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print([m for m in ('jax', 'numpy', 'matplotlib', 'orbax', 'flax') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines()[-1] == "[]"


def test_a_mistake_is_one_message_and_exit_code_2():
    result = jrl("show-config", "sampling.grup=4", "train.steps=x")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        "jrl: error: unknown key sampling.grup = 4; did you mean sampling.group?",
        "  train.steps = 'x'; must be a whole number",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("objective.waits=1", "objective.waits = 1: grpo has no such coefficient"),
        ("objective.clip_low=-1", "objective.clip_low = -1; give a number of at least 0"),
        ("objective.epochs=0", "epochs = 0; give a whole number of at least 1"),
        ("method=grop", "method = 'grop'; did you mean 'grpo'"),
    ],
)
def test_show_config_refuses_what_the_method_does(change, message):
    result = jrl("show-config", TINY, change)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "none.toml"], "none.toml: No such file"),
        (["eval", "DIR"], "is not a run directory: it has no config.toml"),
        (["report", "DIR"], "is not a run directory: it has no metrics.jsonl"),
        (["methods", "grop"], "method = 'grop'; did you mean 'grpo' or"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, tmp_path):
    result = jrl(*(tmp_path if a == "DIR" else a for a in arguments))
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_a_fault_of_the_program_keeps_its_traceback(replace):
    def failing_evaluate(config, *, checkpoint):
        raise ZeroDivisionError

    replace("jrl.evaluate", evaluate_run=failing_evaluate)
    assert isinstance(jrl("eval", "seed=1").exception, ZeroDivisionError)


def test_show_config_prints_what_can_be_read_back(tmp_path):
    result = jrl("show-config", TINY, "sampling.group=4")
    assert result.exit_code == 0
    path = tmp_path / "copy.toml"
    path.write_text(result.stdout)
    assert load_config(path) == load_config(TINY, ["sampling.group=4"])
    as_json = json.loads(jrl("show-config", "--json", path).stdout)
    assert as_json["sampling"]["group"] == 4


def test_train_gets_the_configuration_and_its_summary_is_printed(replace, tmp_path):
    configs = []

    def train(config, *, echo):
        configs.append(config)
        echo("a line")
        return {"accuracy_before": 0.25, "accuracy_after": None, "steps": 3, "eval_after": {}}

    replace("jrl.run.run", train=train)
    result = jrl("train", TINY, f'run.dir="{tmp_path}"', "train.steps=3")
    assert result.exit_code == 0, result.output
    assert configs == [load_config(TINY, [f'run.dir="{tmp_path}"', "train.steps=3"])]
    assert result.stdout.splitlines() == [
        f"run directory: {tmp_path}",
        "a line",
        "training finished",
        "  accuracy before  0.25",  # what was not measured has no line
        "  steps            3",
    ]


def test_a_lost_config_toml_is_read_from_the_header(run_dir, replace):
    before = (run_dir / "config.toml").read_text()
    (run_dir / "config.toml").unlink()
    result = jrl("show-config", run_dir, "train.steps=7")
    assert result.exit_code == 0
    assert result.stderr == (
        f"jrl: {run_dir / 'config.toml'} is missing; the configuration is that of the header of"
        " metrics.jsonl\n"
    )
    assert "seed = 4" in result.stdout
    assert "steps = 7" in result.stdout
    assert f'dir = "{run_dir}"' in result.stdout
    (run_dir / "config.toml").write_text(before.replace("seed = 4", "seed = ="))
    result = jrl("show-config", run_dir)
    assert result.exit_code == 2
    assert f"delete {run_dir / 'config.toml'} to use the configuration of" in result.stderr
    (run_dir / "config.toml").unlink()
    (run_dir / "metrics.jsonl").write_text('{"config": {"see')
    assert "it has no config.toml" in jrl("show-config", run_dir).stderr


def test_output_that_cannot_be_written_is_one_line():
    command = [sys.executable, "-m", "jrl", "show-config", TINY]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    message = "jrl: error: standard output: No space left on device; free disk space\n"
    assert (done.returncode, done.stderr) == (4, message)


def test_train_without_run_dir_gets_a_new_one(replace, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directories = []

    def train(config, *, echo):
        Path(config.run.dir).mkdir(parents=True)
        directories.append(config.run.dir)
        return {}

    replace("jrl.run.run", train=train)
    (tmp_path / "my.toml").write_text("seed = 1\n")
    for arguments in (["my.toml"], ["my.toml"], ["method=rloo", "seed=2"]):
        assert jrl("train", *arguments).exit_code == 0
    assert len(set(directories)) == 3
    assert [name.partition("-")[0] for name in directories] == ["runs/my", "runs/my", "runs/rloo"]


def test_ctrl_c_says_what_was_saved_and_ends_with_130(replace, run_dir):
    def train(config, *, echo):
        for step in (5, 20):
            (run_dir / "checkpoints" / str(step) / "state").mkdir(parents=True)
        raise KeyboardInterrupt

    replace("jrl.run.run", train=train)
    result = jrl("train", run_dir)
    assert result.exit_code == 130
    assert f"step 20 is saved; `jrl train {run_dir}` resumes from it" in result.stderr


def test_ctrl_c_elsewhere_ends_with_130(replace):
    def slow(config, *, checkpoint):
        raise KeyboardInterrupt

    replace("jrl.evaluate", evaluate_run=slow)
    result = jrl("eval", "seed=1")
    assert (result.exit_code, result.stderr) == (130, "jrl: stopped\n")


def test_eval_takes_a_run_directory_with_changes(replace, run_dir):
    def evaluate_run(config, *, checkpoint):
        assert config.run.dir == str(run_dir)
        assert (config.seed, config.eval.problems) == (4, 16)
        return {"step": checkpoint, "accuracy": 0.5}

    replace("jrl.evaluate", evaluate_run=evaluate_run)
    result = jrl("eval", run_dir, "eval.problems=16", "--checkpoint", 3, "--json")
    assert json.loads(result.stdout) == {"step": 3, "accuracy": 0.5}


def test_eval_searches_and_writes_rows(replace, run_dir):
    def search_run(config, name, *, width, step_tokens, checkpoint, out, by, reduce):
        assert (name, width, step_tokens, checkpoint, out) == ("puct", 3, 64, None, "rows")
        assert (by, reduce) == ("model", "min")
        return {"step": 1, "accuracy": 0.5, "siblings": 4.0}

    replace("jrl.evaluate.search", search_run=search_run)
    ranked = ("--by", "model", "--reduce", "min")
    command = ("eval", run_dir, "--search", "puct", "--width", 3, "--out", "rows", *ranked)
    result = jrl(*command, "--json")
    assert json.loads(result.stdout)["siblings"] == 4
    result = jrl("eval", run_dir, "--out", "rows")
    assert result.exit_code != 0
    assert "--out rows: only a search writes rows; add --search puct" in result.stderr
    for flag, value in (("--by", "model"), ("--reduce", "min")):
        result = jrl("eval", run_dir, flag, value)
        assert result.exit_code != 0
        assert f"{flag} {value}: only a search ranks paths; add --search beam" in result.stderr


def test_eval_under_a_budget(replace, run_dir):
    def budget_run(config, *, completions, step_tokens, checkpoint, by, reduce):
        assert (completions, step_tokens, checkpoint) == (16, 8, None)
        assert (by, reduce) == ("likelihood", "last")
        return {"step": 1, "accuracy": 0.5, "beam/accuracy": 0.25}

    replace("jrl.evaluate.budget", budget_run=budget_run)
    command = ("eval", run_dir, "--search", "compute_optimal", "--width", 16, "--step-tokens", 8)
    result = jrl(*command, "--json")
    assert json.loads(result.stdout)["beam/accuracy"] == 0.25
    result = jrl(*command, "--out", "rows")
    assert result.exit_code != 0
    assert (
        "--search compute_optimal writes no rows; name one search, or remove --out" in result.stderr
    )


def test_sample_prints_prompts_completions_and_rewards(replace):
    def sample_run(config, *, prompts, count, samples, checkpoint):
        assert (prompts, count, samples, checkpoint) == (["2+2?", "3+3?"], 4, 1, None)
        return [{"prompt": "2+2?", "completion": "4 [b]", "rewards": {"math": 1.0}, "length": 2}]

    replace("jrl.evaluate", sample_run=sample_run)
    result = jrl("sample", "seed=1", "--prompt", "2+2?", "--prompt", "3+3?")
    assert result.stdout.splitlines() == ["--- 2+2?", "4 [b]", "    rewards math 1  length 2"]


def test_sample_answers_a_prompt_once_and_more_often_when_asked(replace):
    sample_counts = []

    def sample_run(config, *, prompts, count, samples, checkpoint):
        sample_counts.append(samples)
        fields = {"prompt": "2?", "completion": "4", "step": 3, "group": 0}
        return [fields | {"member": m} for m in range(samples or 2)]

    replace("jrl.evaluate", sample_run=sample_run)
    one = jrl("sample", "seed=1", "-p", "2?").stdout.splitlines()
    assert one == ["--- 2?", "4", "    step 3"]
    three = jrl("sample", "seed=1", "-p", "2?", "-n", 3).stdout.splitlines()
    assert three[2::3] == [f"    step 3  group 0  member {m}" for m in range(3)]
    jrl("sample", "seed=1", "-p", "2?", "sampling.group=5")
    jrl("sample", "seed=1")
    assert sample_counts == [1, 3, None, None]


def test_sample_shows_an_episode_turn_by_turn_in_the_environment_asked_for(replace):
    turns = [
        {"by": "policy", "text": "call", "tokens": 2, "paid": 0.0},
        {"by": "environment", "text": " 42 ", "tokens": 1, "paid": 0.0},
        {"by": "policy", "text": "42", "tokens": 2, "paid": 1.0},
    ]

    def sample_run(config, *, prompts, count, samples, checkpoint):
        assert config.data.env == "nim"
        return [{"prompt": "6*7?", "completion": "", "turns": turns, "length": 5}]

    replace("jrl.evaluate", sample_run=sample_run)
    result = jrl("sample", "seed=1", "--env", "nim")
    assert result.stdout.splitlines() == [
        "--- 6*7?",
        "[policy] call",
        "[environment] 42",
        "[policy, paid 1] 42",
        "    length 5",
    ]


def test_convert_passes_the_directory_on(replace, tmp_path, run_dir):
    def export_run(config, directory, *, checkpoint, adapters, policy, name):
        assert name is None
        return directory / f"{config.seed}-{checkpoint}-{adapters}-{policy}"

    replace("jrl.run.export", export_run=export_run)
    result = jrl("convert", run_dir, tmp_path / "out", "--checkpoint", 2)
    assert result.stdout == f"{tmp_path / 'out' / '4-2-False-0'}\n"
    result = jrl("convert", run_dir, tmp_path / "out", "--adapters", "--policy", 1)
    assert result.stdout == f"{tmp_path / 'out' / '4-None-True-1'}\n"


def test_report_prints_the_page(run_dir):
    result = jrl("report", run_dir)
    assert result.stdout == f"{run_dir / 'report' / 'index.html'}\n"
    assert (run_dir / "report" / "index.html").exists()


def test_methods_lists_them_for_people_and_for_scripts():
    methods = json.loads(jrl("methods", "--json").stdout)
    assert {"name", "paper", "family"} <= methods[0].keys()
    assert "grpo" in {item["name"] for item in methods}
    lines = jrl("methods", "--all").stdout.splitlines()
    assert lines[0].split() == ["name", "family", "runs", "arxiv", "summary"]
    assert len(lines) == len(methods) + 1  # a row is never wrapped
    for item, line in zip(methods, lines[1:], strict=True):
        assert line.split()[:3] == [
            *(item["name"], item["family"], "partly" if item["unsupported"] else "yes")
        ]
        assert item["summary"] in line
    detail = jrl("methods", "grpo").stdout
    assert "arxiv" in detail
    assert "clip_high" in detail
    spin = " ".join(jrl("methods", "spin").stdout.split())
    assert "Departures: " in spin, "what differs from the paper is said where a method is shown"
    assert "loss = " in jrl("methods", "gkd").stdout


def test_methods_shows_those_used_most_first():
    from jrl.methods import COMMON, all_methods

    lines = jrl("methods").stdout.splitlines()
    heads = [line.removesuffix(":") for line in lines if line.endswith(":")]
    names = [line.split()[0] for line in lines if line.startswith("  ")]
    assert heads == [*COMMON]
    assert names == [name for names in COMMON.values() for name in names]
    assert names[:3] == ["grpo", "dr_grpo", "dapo"]
    for line in lines[:-1]:
        assert line.endswith(":") or line.endswith(all_methods()[line.split()[0]].summary)
    assert f"--all` lists all {len(all_methods())};" in lines[-1]


def test_methods_are_chosen_by_family_and_by_what_runs_as_published():
    everything = json.loads(jrl("methods", "--json").stdout)
    chosen = json.loads(jrl("methods", "--family", "preference", "--complete", "--json").stdout)
    assert chosen == [
        item for item in everything if item["family"] == "preference" and not item["unsupported"]
    ]
    assert 0 < len(chosen) < len(everything)
    wrong = jrl("methods", "--family", "preferences")
    assert (wrong.exit_code, "did you mean 'preference' or" in wrong.stderr) == (2, True)
    for unread in (["--family", "preference"], ["--complete"], ["--all"]):
        both = jrl("methods", "grpo", *unread)
        assert (both.exit_code, f"error: {unread[0]} filters the list" in both.stderr) == (
            2,
            True,
        )


@pytest.mark.parametrize("difficulty", ["\u00b2", "9" * 5000, "-1", "5:5"])
def test_difficulties_that_are_no_number(difficulty):
    wrong = jrl("compare", "configs/tiny.toml", "--task", f"sorting:{difficulty}")
    assert (wrong.exit_code, "write NAME or NAME:DIFFICULTY" in wrong.stderr) == (2, True)


def test_an_unknown_method_names_its_neighbours_alone():
    error = jrl("methods", "gropo").stderr
    assert len(error) < 250
    assert "'grpo'" in error
    assert "`jrl methods` lists them" in error
    assert "none is like it" in jrl("methods", "zzzzzz").stderr


def test_a_method_of_ones_own_is_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from jrl.methods import get_method, variant\n"
        "from jrl.methods.domains import Positive\n"
        "from jrl.methods.group_relative import grpo\n"
        "def plain(scale=2.0):\n    '''A method of mine.'''\n    return get_method('rloo')\n"
        "@variant(grpo, clip_high=0.28)\n"
        "def mine(base, power: Positive = 1.0):\n    '''Another.'''\n    return base\n"
    )
    plain = jrl("methods", "mine.py:plain").stdout
    assert "A method of mine." in plain
    assert "scale  (default 2.0; any)" in plain
    output = jrl("methods", "mine.py:mine").stdout
    assert "clip_high  (default 0.28;" in output
    assert "power  (default 1.0;" in output


def test_short_help():
    assert jrl("-h").stdout == jrl("--help").stdout
    assert jrl("train", "-h").stdout == jrl("train", "--help").stdout


COMPLETED = {
    "jrl train a.toml sampling.te": "sampling.temperature=",
    "jrl train method = gsp": "gspo gspo_token",  # bash takes an equals sign for a word
    "jrl train a.toml train.mode =": "host in_flight packed compiled",
    "jrl train a.toml data.shuffle = t": "true",
    "jrl train a.toml seed = ": "",
    "jrl methods gsp": "gspo gspo_token",
    "jrl methods treer": "treerl",
}


@pytest.mark.parametrize("typed", COMPLETED)
def test_the_shell_completes_keys_values_and_methods(typed):
    words = typed.split(" ")
    environment = {"_JRL_COMPLETE": "complete_bash", "COMP_CWORD": str(len(words) - 1)}
    completed = CliRunner().invoke(
        app, [], env=environment | {"COMP_WORDS": typed}, prog_name="jrl"
    )
    assert completed.stdout.split() == COMPLETED[typed].split()


def test_zsh_completes_the_value_in_its_word():
    environment = {
        "_JRL_COMPLETE": "complete_zsh",
        "_TYPER_COMPLETE_ARGS": "jrl train method=gsp",
    }
    completed = CliRunner().invoke(app, [], env=environment, prog_name="jrl")
    assert '"method=gspo"' in completed.stdout


def test_every_method_is_completed():
    assert complete_method("") == sorted(all_methods())


def test_version():
    result = jrl("--version")
    assert (result.exit_code, result.stdout.count(".")) == (0, 2)


def test_the_run_directory_in_quotes_survives_odd_names(tmp_path):
    odd = tmp_path / 'a "b" \\c'
    config = load_config(None, [f"run.dir={json.dumps(str(odd))}"])
    RunWriter(config)
    settings = json.loads(jrl("show-config", "--json", odd).stdout)
    assert settings["run"]["dir"] == str(odd)
    assert config_hash(load_config(odd / "config.toml")) == config_hash(config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", ""], "RUN = ''; name a configuration file or a run directory"),
        (["train", "  "], "RUN = '  '; name a configuration file or a run directory"),
        (["compare", "data.task=sorting", "--methods", ""], "--methods '': a name is empty"),
        (["compare", "data.task=sorting", "--methods", "grpo,"], "--methods 'grpo,': a name is"),
    ],
)
def test_an_empty_name_is_told_as_it_was_given(arguments, message):
    result = jrl(*arguments)
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr


def test_tables_have_no_empty_rows_and_counts_no_decimals(capsys):
    method = {"name": "m", "family": "f", "state": [], "unsupported": "", "notes": ""}
    method["coefficients"] = []
    console.print_method(method)
    console.print_table("eval", {"problems": 512.0, "tokens": 281.34, "accuracy": 0.5})
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        *("m", "family f", "coefficients, set as objective.NAME=VALUE:"),
        *("eval", "problems 512", "tokens 281.3", "accuracy 0.5"),
    ]


def test_missing_fields_are_all_named_before_jax_is_imported(tmp_path):
    (tmp_path / "a.csv").write_text("task,result\nx,y\n")
    code = (
        "import sys\nfrom jrl.cli.app import main\n"
        "try:\n    main()\nfinally:\n    print('jax' in sys.modules)"
    )
    line = ["train", "model.path=none", f"data.train={tmp_path / 'a.csv'}"]
    done = subprocess.run([sys.executable, "-c", code, *line], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no field 'question' and no field 'answer'" in done.stderr
    assert "data.fields.question and data.fields.answer to one of task, result" in done.stderr
    assert done.stdout.strip() == "False"


def test_an_error_tells_no_secret_of_an_address():
    result = jrl("show-config", "http://me:pw12@host/v1?api_key=pw12.toml")
    assert result.exit_code == 2
    assert "(hidden)" in result.output
    assert "pw12" not in result.output


@pytest.mark.parametrize("number", [errno.EROFS, errno.EEXIST, errno.ENOTDIR])
def test_an_output_that_cannot_be_written_is_one_line(number, replace, run_dir):
    def export_run(config, directory, **options):
        raise OSError(number, os.strerror(number), "out/adapter_config.json")

    replace("jrl.run.export", export_run=export_run)
    result = jrl("convert", run_dir, "out")
    assert result.exit_code == 2
    problem = f"'out/adapter_config.json': {os.strerror(number)}; name another file"
    assert result.stderr.strip() == f"jrl: error: {problem}"


def test_a_file_in_place_of_a_directory_to_write_to(run_dir, tmp_path):
    (tmp_path / "out").write_text("")
    result = jrl("convert", run_dir, tmp_path / "out")
    assert result.exit_code == 2
    assert f"'{tmp_path}/out': Not a directory; name another file" in result.stderr


def test_home_is_expanded_in_directories_to_write_to(monkeypatch, replace, run_dir, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    result = jrl("convert", run_dir, "~/full")
    assert f"{tmp_path}/full exists and is not empty; name a new directory" in result.stderr
    assert load_config(None, ["run.dir=~/a"]).run.dir == f"{tmp_path}/a"

    def compare(config, *, out, **options):
        (out / "comparison.md").write_text("compared")

    replace("jrl.run.compare", compare=compare)
    result = jrl("compare", "data.task=sorting", "--out", "~/full")
    assert result.stdout == "compared\n", result.stderr


def test_a_warning_of_the_library_is_one_line(monkeypatch):
    shown = []

    def warns():
        for file in (checkpoints.__file__, "elsewhere.py"):
            shown.append(warnings.formatwarning("step 2 is\nnot saved", UserWarning, file, 1, ""))

    usual = warnings.formatwarning
    monkeypatch.setattr(app.registered_commands[-1], "callback", warns)
    assert CliRunner().invoke(app, ["show-config"]).exit_code == 0
    assert shown[0] == "jrl: warning: step 2 is not saved\n"
    assert "elsewhere.py:1: UserWarning" in shown[1]
    assert warnings.formatwarning is usual


def test_what_the_library_logs_has_no_secrets(monkeypatch, caplog):
    logger = logging.getLogger("jrl")
    filters = [*logger.filters]

    def warns():
        logger.warning("environment: %d failed: %s", 2, "https://me:abcd1234@host?api_key=abcd1234")

    monkeypatch.setattr(app.registered_commands[-1], "callback", warns)
    assert CliRunner().invoke(app, ["show-config"]).exit_code == 0
    assert caplog.messages == ["environment: 2 failed: https://(hidden)host?api_key=(hidden)"]
    assert logger.filters == filters
