"""Errors of input, before device work: exit code 2, the value, the remedy."""

import json
import pathlib
import shutil

import jax
import pytest
from compilations import compilations
from typer.testing import CliRunner

from jrl.cli.app import app
from jrl.config import load_config
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.run import run as running
from jrl.storage.checkpoints import Checkpoints
from jrl.storage.metrics import read_jsonl
from jrl.train import build

SIZES = {"layers": 1, "embed_dim": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "mlp_dim": 32}
ROWS = [{"question": f"how many {what}?", "answer": "5"} for what in ("eels", "whales", "cows")]
TASK = (
    "data.task=sorting",
    "model.config={layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}",
    *("train.prompts=4", "eval.problems=4"),
)
NIM = ("data.task=", "data.env=nim")
REWARDS = '''
def fails(samples, how="raise"):
    """1 point, until the third prompt."""
    if samples[0].prompt.id < 2:
        return [1.0] * len(samples)
    if how == "raise":
        raise RuntimeError("no idea")
    return {"nan": [float("nan")], "length": [1.0, 1.0], "text": "1"}[how]
'''


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    monkeypatch.setattr(running, "write_report", lambda directory: directory)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A checkpoint with a tokenizer of letters, questions and reward functions; all is right."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    root = tmp_path_factory.mktemp("good")
    words = ["<stop>", *"abcdefghijklmnopqrstuvwxyz? "]
    backend = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    model = ModelConfig(vocab_size=32, max_length=48, **SIZES)
    hf.save(root / "model", model, transformer(model).init(jax.random.key(0)))
    backend.save(str(root / "model" / "tokenizer.json"))
    (root / "model" / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    write_rows(root / "data.jsonl", ROWS)
    (root / "rewards.py").write_text(REWARDS)
    return root


@pytest.fixture
def place(good, tmp_path):
    """A copy of it, to break."""
    shutil.copytree(good, tmp_path / "in")
    return tmp_path / "in"


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def text(place, *changes):
    """The overrides of a run on questions."""
    return [
        f"model.path={json.dumps(str(place / 'model'))}",
        f"data.train={json.dumps(str(place / 'data.jsonl'))}",
        *("data.template=plain", "sampling.group=2", "sampling.max_new_tokens=4"),
        *("data.shuffle=false", "train.prompts=2", "train.steps=2"),
        *("rewards={exact={}}", "reward_pool.workers=0"),
        *changes,
        f"run.dir={json.dumps(str(place.parent / 'run'))}",
    ]


def task(tmp_path, *changes):
    """The overrides of a run on a procedural task."""
    return [*TASK, *changes, f"run.dir={json.dumps(str(tmp_path / 'run'))}"]


def jrl(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


PROGRAMS = {f"jit({n})" for n in ("make", "generate", "task_rollout", "step", "iterate")}


def check_refused(overrides, *parts, command="train"):
    """One message with all of this in it, exit code 2, no program compiled, nothing written."""
    run = pathlib.Path(json.loads(overrides[-1].removeprefix("run.dir=")))
    before = (run.exists(), sorted(run.rglob("*")))
    with compilations() as compiled:
        result = jrl(command, *overrides)
    assert result.exit_code == 2, result.output
    for part in parts:
        assert part in result.stderr
    assert result.stderr.startswith("jrl: error: ")
    assert "Traceback" not in result.output
    assert PROGRAMS.isdisjoint(each.program for each in compiled)
    assert (run.exists(), sorted(run.rglob("*"))) == before
    return result.stderr


# ---------------------------------------------------------------- configuration


SETTINGS = {
    "unknown key": (["sampling.grup=4"], "unknown key sampling.grup", "sampling.group?"),
    "unknown table": (["samplng.group=4"], "samplng", "sampling"),
    "unknown method": (["method=grop"], "method = 'grop'; did you mean 'grpo' or"),
    "unknown coefficient": (["objective.clip_hi=0.3"], "clip_hi", "clip_high"),
    "coefficient": (["objective.clip_high=-1"], "objective.clip_high = -1", "at least 0"),
    "group of one": (
        ["sampling.group=1"],
        *("sampling.group = 1", "'grpo'", "needs at least 2", "reinforce_plus_plus"),
    ),
    "greedy": (["sampling.temperature=0"], "sampling.temperature = 0", "above 0"),
    "unknown task": (["data.task=sortng"], "data.task = 'sortng'; did you mean 'sorting'?"),
    "difficulty": (["data.difficulty=99"], "data.difficulty = 99"),
    "task reward": (["rewards.verfy.weight=1"], "'verfy'; did you mean 'verify'?"),
    "batch": (["mesh.data=3"], "4 prompts cannot be split over", "3 devices", "multiple of 3"),
    "batch, all devices": (["mesh.fsdp=-1"], "4 prompts cannot", "8 devices", "multiple of 8"),
    "devices": (["mesh.tensor=9"], "mesh.tensor = 9 needs 9 devices; there are 8"),
    "heads": (["mesh.tensor=4"], "kv_heads = 2", "mesh.tensor = 4", "a multiple of 4"),
    "model size": (["model.config.heads=3"], "kv_heads = 2", "divisor of model.config.heads = 3"),
    "model key": (["model.config.embed=3"], "model.config.embed", "embed_dim"),
    "no model": (["model.config="], "model.path and model.config are both missing"),
    "vocabulary": (
        ["model.config.vocab_size=5"],
        "model.config.vocab_size = 5; data.task = 'sorting' has 48 ids; remove it",
    ),
    "top-k": (["sampling.top_k=9999"], "sampling.top_k = 9999", "the vocabulary has"),
    "length": (["model.config.max_length=6"], "may reach 12", "the model holds 6"),
    "on the host": (
        ["train.mode=compiled", "method=deepsearch"],
        "frontier",
        "train.mode to 'host'",
    ),
    "resume": (["run.resume=must"], "holds no run", "run.resume = 'must'"),
    "no teacher": (
        ["method=on_policy_distillation"],
        *("method = 'on_policy_distillation'", "'teacher'", "set frozen.teacher = DIR"),
    ),
    "no such teacher": (
        ["method=on_policy_distillation", "frozen.teacher=nowhere"],
        *("frozen.teacher = 'nowhere'", "neither a Hugging Face checkpoint", "nor a run"),
    ),
    "a teacher for nobody": (["frozen.teacher=there"], "frozen.teacher = 'there' is not", "'grpo'"),
    "a reference for nobody": (["frozen.ref=there"], "frozen.ref = 'there' is not read"),
    "an old key": (["model.teacher=there"], "model.teacher = 'there' is no longer a key; set froz"),
    "prompts of a task": (
        ["data.max_prompt_tokens=9"],
        "data.max_prompt_tokens = 9 goes with data.train or data.pairs, not with data.task; remove",
    ),
    "limit of a task": (
        ["sampling.max_new_tokens=9"],
        "does not go with sampling.max_new_tokens = 9: it sets",
    ),
    "option of a task": (["data.dificulty=4"], "data.dificulty = 4", "did you mean 'difficulty'?"),
    "epochs": (["objective.epochs=0"], "epochs = 0", "a whole number of at least 1"),
    "router": (
        ["objective.router_z=0.1"],
        "router_z = 0.1 needs routed experts: the model has none; choose another",
    ),
    "own method": (["method=none.py:f"], "method = 'none.py:f': there is no file none.py"),
    "own task": (["data.task=none.py:f"], "data.task = 'none.py:f': there is no file none.py"),
    "own network": (["model.network=none.py:f"], "model.network = 'none.py:f': there is no file"),
    "unknown env": ([*NIM, "data.env=nin"], "data.env = 'nin'; did you mean 'nim'?"),
    "task and env": (["data.env=nim"], "data.env = 'nim' and data.task are both given; remove one"),
    "option of an env": ([*NIM, "data.heap=2"], "data.heap = 2", "did you mean 'heaps'?"),
    "size of an env": ([*NIM, "data.heaps=9"], "data.heaps = 9; choose an integer from 1 to 4"),
    "reward of an env": (
        [*NIM, "rewards.verify.weight=1"],
        "'verify'; choose from reward, success",
    ),
    "long episodes": (
        [*NIM, "model.config.max_length=9"],
        *("data.env: an episode of 'nim' may reach 34 tokens", "but the model holds 9; lower"),
    ),
    "env without demonstrations": (
        [*NIM, "method=sft"],
        *(
            "data.env = 'nim' does not go with method = 'sft', which reads demonstrations",
            "choose a method",
        ),
    ),
    "own env": ([*NIM, "data.env=none.py:f"], "data.env = 'none.py:f': there is no file none.py"),
    "metric": (["watch.entropi.below=1"], "watch = 'entropi'; did you mean 'entropy'?"),
    "best metric": (["checkpoint.best=-los"], "checkpoint.best = 'los'; did you mean 'loss'"),
    "judge": (["rewards.partial.judge=true"], "accuracy is measured by verify here; remove it"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_cannot_be(name, tmp_path):
    changes, *parts = SETTINGS[name]
    check_refused(task(tmp_path, *changes), *parts)


def test_a_file_that_is_no_configuration(tmp_path):
    (tmp_path / "bad.toml").write_text("seed = 1\n[train\n")
    result = jrl("train", tmp_path / "bad.toml")
    assert result.exit_code == 2
    assert "bad.toml: not valid TOML" in result.stderr
    assert "line 2" in result.stderr


# ---------------------------------------------------------------- model and tokenizer


def test_safetensors_missing(place):
    (place / "model" / "model.safetensors").unlink()
    check_refused(text(place), f"{place / 'model'}", "has neither model.safetensors nor")


def test_safetensors_truncated(place):
    path = place / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    check_refused(text(place), f"{path}", "truncated or not a safetensors file")


def test_a_shard_missing(place):
    path = place / "model" / "model.safetensors"
    path.rename(path.with_name("model-00001-of-00002.safetensors"))
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-2.safetensors"}}
    (place / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    check_refused(text(place), "model-2.safetensors: no such file; the checkpoint is incomplete")


def test_weights_and_config_disagree(place):
    path = place / "model" / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"intermediate_size": 24}))
    check_refused(text(place), "has shape [16, 32], expected [16, 24]", "intermediate_size")
    path.write_text(json.dumps(raw | {"num_hidden_layers": 2}))
    check_refused(text(place), "missing tensors", "layers.1.")
    path.write_text(json.dumps(raw | {"model_type": "mamba", "architectures": ["Mamba"]}))
    check_refused(text(place), "architectures", "Mamba", "Qwen3ForCausalLM")


def test_no_such_directory(place):
    check_refused(text(place, "model.path=nowhere"), "nowhere")


def test_tokenizer_and_vocabulary_disagree(place):
    path = place / "model" / "tokenizer.json"
    raw = json.loads(path.read_text())
    raw["model"]["vocab"] |= {f"<{i}>": i for i in range(29, 40)}
    path.write_text(json.dumps(raw))
    check_refused(
        text(place), "the tokenizer has 40 ids but the model's vocabulary has only 32", "belongs to"
    )


def test_tokenizer_missing(place):
    (place / "model" / "tokenizer.json").unlink()
    check_refused(text(place), "tokenizer.json is missing", "save_pretrained")


def test_no_chat_template(place):
    check_refused(text(place, "data.template=chat"), "no chat template", "set data.template")


# ---------------------------------------------------------------- data


DATA = {
    "empty": ("\n", "the file has no rows"),
    "malformed": ('{"question": "a?", "answer": "1"}\n\n{"question": oops}\n', "line 3: not valid"),
    "not an object": (
        '{"question": "a?", "answer": "1"}\n[1]\n',
        "line 2: must hold a JSON object",
    ),
    "no answer": (
        '{"question": "a?"}\n',
        "line 1: there is no field 'answer'; add it, or name rewards that need none",
    ),
    "empty answer": ('{"question": "a?", "answer": " "}\n', "line 1: answer is empty"),
    "no question": (
        '{"ask": "a?", "answer": "1"}\n',
        "set data.fields.question to one of ask, answer",
    ),
    "empty question": ('{"question": "", "answer": "1"}\n', "line 1: the prompt is empty"),
}


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("name", DATA)
def test_data_that_cannot_be_used(name, split, place):
    content, message = DATA[name]
    (place / "broken.jsonl").write_text(content)
    changed = f"data.{split}={json.dumps(str(place / 'broken.jsonl'))}"
    check_refused(text(place, changed), "broken.jsonl", message)


def test_rows_that_cannot_be_used_may_be_left_out_and_counted(place):
    rows = [ROWS[0], {"question": "no answer?"}, ROWS[1]]
    write_rows(place / "data.jsonl", rows)
    check_refused(text(place), "line 2: there is no field 'answer'", "data.invalid = 'skip'")
    run = build.setup(load_config(None, text(place, "data.invalid=skip")))
    assert [prompt.id for prompt in run.data.prompts["train"]] == [0, 2]
    assert "1 of 3 rows skipped" in str(run.data.counts["train"])


def test_answers_that_the_pattern_does_not_find(place):
    check_refused(
        text(place, "data.answer_pattern=#### (.+)"), "line 1: answer has no match", "####"
    )


def test_solutions_that_are_not_there_or_not_wanted(place):
    check_refused(
        text(place, "data.fields.solution=gold"), "data.fields.solution = 'gold' is not read by"
    )
    config = text(place, "method=sft", "data.fields.solution=gold")
    check_refused(
        config, "line 1: there is no field 'gold'; set data.fields.solution to one of question"
    )


def test_no_such_data(place):
    check_refused(text(place, "data.train=none.jsonl"), "'none.jsonl': there is no such file")
    near = place / "dta.jsonl"
    check_refused(text(place, f"data.train={near}"), "did you mean", "data.jsonl?")
    check_refused(text(place, f"data.train={place}/nowhere/a.jsonl"), "nowhere, which is not there")
    check_refused(text(place, "data.train=none.xlsx"), "'none.xlsx'; name a FILE.jsonl")
    check_refused(text(place, "data.train="), "data.train and data.task are both missing")


def test_a_prompt_over_the_limit_is_named(place):
    check_refused(
        text(place, "data.max_prompt_tokens=14"),
        *("data.jsonl, line 2: the prompt has 16 tokens", "data.max_prompt_tokens is 14"),
        "data.overlong to drop or truncate",
    )


def test_no_prompt_left(place):
    limits = ("data.max_prompt_tokens=3", "data.overlong=drop")
    check_refused(
        text(place, *limits), "all 3 prompts are longer", "the longest has 16", "raise it"
    )


def test_prompts_and_completions_beyond_the_model(place):
    check_refused(text(place, "sampling.max_new_tokens=40"), "sampling.max_new_tokens", "48")


@pytest.mark.parametrize("way", ["drop", "truncate"])
def test_long_prompts_are_counted_and_compile_nothing_more(way, place):
    with compilations() as compiled:
        result = jrl("train", *text(place, "data.max_prompt_tokens=14", f"data.overlong={way}"))
    assert result.exit_code == 0, result.output
    assert {"jit(seeded)", "jit(generate)", "jit(step)"} <= {each.program for each in compiled}
    counts = {"drop": "2 prompts of 3 rows; too long: 1 dropped, 0 truncated; longest 16 tokens"}
    counts["truncate"] = "3 prompts of 3 rows; too long: 0 dropped, 1 truncated; longest 16 tokens"
    assert f"data.train: {counts[way]}" in result.stdout
    first, second = read_jsonl(place.parent / "run" / "metrics.jsonl")[1:]
    assert first["compiles"] == second["compiles"]


# ---------------------------------------------------------------- rewards


def user_reward(place, name="fails", **options):
    table = ", ".join(f"{key}={json.dumps(value)}" for key, value in options.items())
    return f"rewards={{{json.dumps(f'{place}/rewards.py:{name}')}={{{table}}}}}"


def test_rewards_that_are_not_there(place):
    check_refused(
        text(place, "rewards={maht={}}"), "'maht'; did you mean 'math'", "FILE.py:function"
    )
    check_refused(
        text(place, user_reward(place, "fail")), "has no function 'fail'; did you mean 'fails'"
    )
    check_refused(text(place, user_reward(place / "x")), "there is no file ", "x/rewards.py")
    check_refused(
        text(place, user_reward(place, hwo="nan")),
        "hwo = 'nan'",
        "did you mean 'how'?",
    )
    (place / "rewards.py").write_text("import nothing_of_the_kind\n")
    copy = shutil.copy(place / "rewards.py", place / "other.py")
    wrong = f"rewards={{{json.dumps(f'{copy}:f')}={{}}}}"
    check_refused(text(place, wrong), "other.py, line 1: ModuleNotFoundError")


FAILURES = {
    "raise": ("raised RuntimeError: no idea", "line"),
    "nan": ("returned nan; rewards must be finite",),
    "length": ("returned 2 numbers for 1 sample",),
    "text": ("returned str '1'; return a list with one number a sample",),
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_reward_that_fails_is_named_and_what_was_done_is_kept(how, place):
    """The first step is sound; the second meets the third prompt."""
    run = place.parent / "run"
    changes = (user_reward(place, how=how), "checkpoint.every=1")
    result = jrl("train", *text(place, *changes))
    assert result.exit_code == 2, result.output
    for part in FAILURES[how]:
        assert part in result.stderr
    assert "rewards.py:fails" in result.stderr
    assert 'fix the function, or set reward_pool.on_error = "zero"' in result.stderr
    assert "(prompt 2)" in result.stderr
    assert [r["step"] for r in read_jsonl(run / "metrics.jsonl")[1:]] == [1]
    assert Checkpoints(run / "checkpoints", 1).steps() == [1]


def test_a_reward_that_fails_may_be_given_0_and_counted(place):
    changes = (user_reward(place, how="nan"), "reward_pool.on_error=zero")
    assert jrl("train", *text(place, *changes)).exit_code == 0
    first, second = read_jsonl(place.parent / "run" / "metrics.jsonl")[1:]
    assert (first["reward_errors"], first["reward"]) == (0, 1)
    assert second["reward_errors"] == 2  # the third prompt's group; then the first comes again
    assert second["reward"] == 0.5


# ---------------------------------------------------------------- the run directory


def test_a_run_directory_that_holds_another_configuration(tmp_path):
    first = jrl("train", *task(tmp_path, "train.steps=1"))
    assert first.exit_code == 0, first.output
    files = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    check_refused(
        task(tmp_path, "train.steps=1", "seed=1", "optimizer.learning_rate=0.1"),
        *("holds a run with another configuration", "seed = 0 there, 1 now"),
        *("optimizer.learning_rate = 1e-06 there, 0.1 now", "name another directory"),
    )
    check_refused(task(tmp_path, "train.steps=1", "run.resume=never"), "holds a run", "'never'")
    assert files == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    # The other commands take its settings from there and know its checkpoints.
    run = tmp_path / "run"
    for command, *parts in (
        (("eval", run, "--checkpoint", 7), "no checkpoint of step 7", "there are 1"),
        (("convert", run, tmp_path / "out", "--checkpoint", 7), "no checkpoint of step 7"),
        (("sample", run, "--prompt", "hi there"), "prompts of data.task = 'sorting' have up to 6"),
    ):
        result = jrl(*command)
        assert result.exit_code == 2, result.output
        assert all(part in result.stderr for part in parts)
    assert not (tmp_path / "out").exists()


def test_a_run_directory_that_is_a_file(tmp_path):
    (tmp_path / "run").write_text("mine")
    check_refused(task(tmp_path), "is a file; name a directory")
    assert (tmp_path / "run").read_text() == "mine"


def test_a_mistake_leaves_the_directory_free_for_the_next_try(tmp_path):
    """Otherwise the corrected configuration would be refused as another one."""
    check_refused(task(tmp_path, "mesh.tensor=4"), "kv_heads")
    assert not (tmp_path / "run").exists()
    assert jrl("train", *task(tmp_path, "train.steps=0")).exit_code == 0


def test_questions_of_ones_own_are_checked_too(place):
    changes = ("data.max_prompt_tokens=16", f"data.eval={json.dumps(str(place / 'data.jsonl'))}")
    overrides = text(place, *changes)
    long = jrl("sample", *overrides, "--prompt", "how many whales are there in the sea?")
    assert long.exit_code == 2
    assert "prompt 1: the prompt has 37 tokens" in long.stderr
    without = jrl("eval", *text(place))
    assert without.exit_code == 2
    assert "data.eval is missing; name a file of held-out prompts" in without.stderr
