"""Further mistakes that people make, each refused in one line that names it, before device work.

``test_bad_input.py`` runs commands; here the same readers are called directly, so that many
mistakes take little time.
"""

import contextlib
import contextvars
import json
import pathlib
import shutil
import struct

import jax
import numpy as np
import pytest

from jrl import user_code as user_code
from jrl.config import load_config
from jrl.errors import UserError
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.hf.stored import in_memory
from jrl.models.tokenizer import CharTokenizer
from jrl.models.transformer import transformer
from jrl.rewards import make_reward
from jrl.run.reward_probe import check_reward_columns
from jrl.sampling.request import RequestLimits
from jrl.serving.api_error import ApiError
from jrl.serving.openai_requests import parse
from jrl.storage.metrics import RunWriter, check_run_dir, read_jsonl
from jrl.storage.step_files import what_is_saved
from jrl.system import processes
from jrl.train import build

SIZES = {"layers": 1, "embed_dim": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "mlp_dim": 32}
TASK = (
    "data.task=sorting",
    "model.config={layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}",
)


def check_refused(part, function, *arguments, **keywords):
    """One line, or two, with this in it; anything else that is raised fails the test."""
    with pytest.raises((UserError, ApiError)) as raised:
        function(*arguments, **keywords)
    message = str(raised.value)
    assert part in message
    assert len(message.splitlines()) <= 2
    assert len(message) < 600


# ---------------------------------------------------------------- configurations


CONFIGURATIONS = {
    "run.dir=''": "run.dir = ''; must be a path",
    "run.dir='  '": "run.dir = '  '; must be a path",
    "model.path=''": "model.path = ''; must be a directory or a Hub name",
    "seed=true": "seed = True; must be a whole number",
    f"seed={2**70}": "must be below 4294967296",
    "train.steps=1e3": "train.steps = 1000.0; must be a whole number",
    "optimizer.learning_rate=inf": "optimizer.learning_rate = inf; must be finite",
    "sampling.group=100000000000": "sampling.group = 100000000000; must be at most 1000000",
    "reward_pool.workers=100000": "reward_pool.workers = 100000; must be at most 1024",
    "reward_pool.memory_gib=nan": "reward_pool.memory_gib = nan; must be finite",
    "objective.kl_coef=nan": "objective.kl_coef = nan; must be finite",
    "objective.clip_high=inf": "objective.clip_high = inf; must be finite",
    "model.config.norm_eps=nan": "model.config.norm_eps = nan; must be finite",
    "eval.dtype=float64": "eval.dtype = 'float64'; did you mean 'bfloat16'?",
    "model.network=own.py:f": "model.network = 'own.py:f' does not go with eval.dtype = 'float32'",
    "checkpoint.best=''": "must be a metric's name",
    "checkpoint.best='-'": "must be a metric's name",
    "watch={loss={above=1, below=2}}": "above = 1 is less than below = 2: every value breaks one",
    "watch.loss={}": "watch.loss: needs above, below, grows or falls",
    "watch.loss.least=1": "unknown key watch.loss.least = 1; keys of [watch.loss] are above,",
    "watch.loss.steps=0": "watch.loss.steps = 0; must be at least 1",
    "frozen.ref=[]": "frozen.ref = []; must not be empty",
    "mesh={data=-1, fsdp=-1}": "mesh.data and mesh.fsdp are -1; only one axis",
    "placement={rollout={data=4}}": "placement.rollout = {'data': 4} is no longer a key; set",
    "eval.problems=100000000000": "eval.problems = 100000000000; must be at most 2147483647",
    "model.config.layers=1000000000000": "model.config.layers = 1000000000000; must be at most 2",
    "eval.samples=1000000000": "eval.samples = 1000000000; must be at most 1000000",
    "optimizer.learning_rate=1e300": "= 1e+300; is infinite in float32: must be at most 3.4e38",
    "optimizer.learning_rate=1e-300": "is 0 in float32: must be 0, or at least 1.2e-38",
    "optimizer.b1=1e300": "optimizer.b1 = 1e+300; is infinite in float32",
    "objective.kl_coef=1e300": "objective.kl_coef = 1e+300; is infinite in float32",
    "rewards={verify={weight=1e308}}": "rewards.verify.weight = 1e+308; is infinite in float32",
    "objective=grpo": "objective = 'grpo'; must be a table",
    "train.=1": "override 'train.=1'; write table.key=value",
}


@pytest.mark.parametrize("override", CONFIGURATIONS)
def test_configurations(override):
    more = ["eval.dtype=float32"] if override.startswith("model.network") else []
    check_refused(CONFIGURATIONS[override], load_config, None, [*TASK, *more, override])


MODELS = {
    "model.config.layers=1000000000": "model.config.layers = 1000000000; it must be at most 10000",
    "model.config.head_dim=7": "model.config.head_dim = 7; it must be even",
    "model.config.experts=-1": "model.config.experts = -1; it must be 0 (dense) or more",
    "lora.rank=10000": "lora.rank = 10000; the model's matrices have 16 rows",
    "lora={rank=2, targets=['q', 'q']}": "lora.targets names 'q' twice",
    "sampling.temperature=1e-30": "sampling.temperature = 1e-30; must be 0 (greedy) or",
    "data.difficulty=true": "data.difficulty = True; choose an integer",
}


@pytest.mark.parametrize("override", MODELS)
def test_models_and_tasks(override):
    check_refused(MODELS[override], build.setup, load_config(None, [*TASK, override]))


BUILTINS = {
    "data.task": ["data.task=builtins:max"],
    "data.env": ["data.task=", "data.env=builtins:max"],
    "method": ["method=builtins:max"],
    "model.network": ["model.network=builtins:max"],
    "optimizer.name": ["optimizer.name=builtins:max"],
}


@pytest.mark.parametrize("key", BUILTINS)
def test_functions_whose_arguments_nobody_knows(key):
    config = load_config(None, [*TASK, *BUILTINS[key]])
    check_refused("the arguments of max cannot be read", build.setup, config)
    check_refused("the arguments of max cannot be read", make_reward, "builtins:max")


ROW_ERRORS = {
    b'{"question": "1", "answ': "rows-1.jsonl, line 2: not valid JSON",
    b"\xff\xfe": "rows-1.jsonl, line 2: not UTF-8 text",
    b"[1]": "rows-1.jsonl, line 2: holds [1] and no row",
    b"[" * 100_000: "rows-1.jsonl, line 2: nested too deeply",
}


@pytest.mark.parametrize("line", ROW_ERRORS, ids=lambda line: repr(line[:9]))
def test_rows_of_a_run_from_python_that_are_damaged(line, tmp_path):
    path = tmp_path / "rows-1.jsonl"
    path.write_bytes(b'{"question": "1", "answer": "2"}\n' + line + b"\n")
    check_refused(ROW_ERRORS[line], user_code.remember, tmp_path)
    check_refused(
        "restore the file, or pass the rows again in Python", user_code.remember, tmp_path
    )
    path.write_bytes(b'{"question": "1", "answer": "2"}\n')
    context = contextvars.copy_context()
    context.run(user_code.remember, tmp_path)
    rows = context.run(user_code.python_value, "python:rows-1", "data.train")
    assert rows == [{"question": "1", "answer": "2"}]


def test_options_of_rewards():
    check_refused("weigth", make_reward, "exact", weigth=1)


FILES = {
    b"seed=1\nseed=2\n": "line 2",
    b"seed=1\x00": "not valid TOML",
    "seed=1".encode("utf-16"): "not UTF-8 text",
    b'{"seed": 1}': "not valid TOML",
    b"seed=1979-05-27\n": "must be a whole number",
    b"[[data]]\ntask='sorting'\n": "must be a table",
    b"#" * 10_000_001: "larger than 10000000 bytes, so no configuration",
}


@pytest.mark.parametrize("content", FILES, ids=lambda c: repr(c[:20]))
def test_configuration_files(content, tmp_path):
    (tmp_path / "run.toml").write_bytes(content)
    check_refused(FILES[content], load_config, tmp_path / "run.toml")


def test_run_directories(tmp_path):
    for name in ("a" * 300, "a/" * 3000):
        config = load_config(None, [*TASK, f"run.dir={json.dumps(str(tmp_path / name))}"])
        check_refused("File name too long; name another directory", check_run_dir, config)


@pytest.mark.parametrize("address", ["nonsense", "host:", ":1", "host:port", "host:70000"])
def test_coordinators(address):
    message = f"coordinator = {address!r}; must be HOST:PORT of process 0"
    check_refused(message, processes.start, address, 2, 0)


REWARDS = {
    "import sys; sys.exit()": "line 1: SystemExit",
    "def f(samples): yield 1.0": "the function yields; return a list of numbers",
    "class f: pass": "f is a class; name an object of it",
    "def f(samples, *, a): return [a]": "a is missing",
}


@pytest.mark.parametrize("code", REWARDS)
def test_files_of_rewards(code, tmp_path):
    (tmp_path / "own.py").write_text(code)
    check_refused(REWARDS[code], make_reward, f"{tmp_path}/own.py:f")


PARTS = {
    "data.task": "data.task='{}:f'",
    "method": "method='{}:f'",
    "model.network": "model={{network='{}:f'}}",
    "optimizer.name": "optimizer.name='{}:f'",
}


@pytest.mark.parametrize("key", PARTS)
@pytest.mark.parametrize("raises", [False, True])
def test_functions_that_make_parts(key, raises, tmp_path):
    path = tmp_path / "own.py"
    body = "raise ValueError('no such size')" if raises else "return 5"
    takes = {"model.network": "vocab_size, max_length", "optimizer.name": "rate"}.get(key, "")
    path.write_text(f"def f({takes}):\n    {body}\n")
    message = (
        "own.py, line 2: ValueError: no such size" if raises else "own.py:f' returned 5; return"
    )
    check_refused(message, lambda: build.setup(load_config(None, [*TASK, PARTS[key].format(path)])))


def test_files_of_a_run_that_are_something_else(tmp_path):
    config = load_config(None, [*TASK, f"run.dir={json.dumps(str(tmp_path))}"])
    for name in ("metrics.jsonl", "samples.jsonl", "summary.json"):
        (tmp_path / name).mkdir()
        check_refused(f"{name} is a directory and not a file; move it away", check_run_dir, config)
        (tmp_path / name).rmdir()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'\xff\x00\n{"step": "two"}\n[1]\n{"step": 1}\n' + b"[" * 100_000)
    assert read_jsonl(path) == [{"step": "two"}, {"step": 1}]


def test_garbage_in_the_log_is_left_out_when_a_run_resumes(tmp_path):
    config = load_config(None, [*TASK, f"run.dir={json.dumps(str(tmp_path))}"])
    with contextlib.closing(RunWriter(config)) as writer:
        writer.write(1, {"loss": 1.0})
        writer.write(2, {"loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": "two"}\n{"step": null}\n\xff{"step": 1}\n{"step": 1e999}\n')
    with contextlib.closing(RunWriter(config)) as writer:
        writer.truncate_after(1)
        assert [r["step"] for r in read_jsonl(tmp_path / "metrics.jsonl")[1:]] == [1]
        with pytest.warns(UserWarning, match="metrics.jsonl lacks 4 of the 5 steps up to the"):
            writer.truncate_after(5)


def test_a_directory_of_no_checkpoint_is_not_said_to_be_saved(tmp_path):
    (tmp_path / "checkpoints" / "00000009").mkdir(parents=True)
    assert what_is_saved(tmp_path) == f"no checkpoint is in {tmp_path}"


def test_a_value_that_fills_the_screen_is_cut_in_the_middle(tmp_path):
    from typer.testing import CliRunner

    from jrl.cli.app import app

    result = CliRunner().invoke(app, ["show-config", "seed=" + "[" * 9000])
    assert result.exit_code == 2
    assert len(result.stderr) < 1200
    assert result.stderr.startswith("jrl: error: seed = [[[")
    assert result.stderr.rstrip().endswith("nested too deeply; use fewer levels")


@pytest.mark.parametrize("arguments", [["train"], ["eval"], ["report"], ["train", "data.task="]])
def test_names_that_no_file_has(arguments):
    from typer.testing import CliRunner

    from jrl.cli.app import app

    long = "a" * 5000
    more = [f"model.path={long}", "data.train=x.jsonl"] if len(arguments) > 1 else [long]
    result = CliRunner().invoke(app, [arguments[0], *arguments[1:], *more])
    assert result.exit_code == 2, result.output
    assert len(result.stderr.splitlines()) == 1
    assert len(result.stderr) < 1200
    assert "name another file" in result.stderr


def test_an_export_to_where_nothing_can_be(tmp_path):
    (tmp_path / "file").write_text("")
    model = ModelConfig(vocab_size=32, max_length=48, **SIZES)
    params = transformer(model).init(jax.random.key(0))
    check_refused("x cannot be written", hf.save, tmp_path / "file" / "x", model, params)


def test_what_is_no_file(tmp_path):
    for path in ("/dev/zero", tmp_path):
        check_refused("is not a file; name a TOML file or a run directory", load_config, path)


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbfseed = 7\n[data]\ntask = 'sorting'\n")
    assert load_config(tmp_path / "run.toml").seed == 7


# ---------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A checkpoint with a tokenizer of letters, and questions."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    root = tmp_path_factory.mktemp("good")
    words = ["<stop>", *"abcdefghijklmnopqrstuvwxyz? "]
    backend = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    model = ModelConfig(vocab_size=32, max_length=48, **SIZES)
    hf.save(root / "model", model, jax.device_get(transformer(model).init(jax.random.key(0))))
    backend.save(str(root / "model" / "tokenizer.json"))
    (root / "model" / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    rows = [{"question": f"how many {what}?", "answer": "5"} for what in ("eels", "cows")]
    (root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.fixture
def place(good, tmp_path):
    """A copy of it, to break."""
    shutil.copytree(good, tmp_path / "in")
    return tmp_path / "in"


def overrides(place, *changes, data="data.jsonl"):
    """Of a run on questions."""
    return [
        f"model.path={json.dumps(str(place / 'model'))}",
        f"data.train={json.dumps(str(place / data))}",
        *("data.template=plain", "sampling.group=2", "sampling.max_new_tokens=4"),
        *("rewards={exact={}}", "reward_pool.workers=0", "train.prompts=2"),
        *changes,
    ]


def setup(place, *changes, data="data.jsonl"):
    """Files that such a run reads."""
    build.setup(load_config(None, overrides(place, *changes, data=data)))


def weights(path: pathlib.Path, change):
    """Rewrites a safetensors file by way of its header and data."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + size]), bytearray(raw[8 + size :])
    name = next(key for key in header if key != "__metadata__")
    change(header, name, data)
    header_bytes = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(header_bytes)) + header_bytes + data)


def nan(header, name, data):
    first = header[name]["data_offsets"][0]
    data[first : first + 4] = struct.pack("<f", np.nan)


def infinite(header, name, data):
    last = header[name]["data_offsets"][1]
    data[last - 4 : last] = struct.pack("<f", -np.inf)


TENSORS = {
    "NaN": (nan, "holds numbers that are not finite"),
    "infinity": (infinite, "holds numbers that are not finite"),
    "integers": (lambda h, n, d: h[n].update(dtype="I32"), "has type I32; only F32"),
    "no such type": (lambda h, n, d: h[n].update(dtype="F99"), "not a safetensors file"),
    "negative offsets": (lambda h, n, d: h[n].update(data_offsets=[-4, 100]), "not a safetensors"),
    "far offsets": (lambda h, n, d: h[n].update(data_offsets=[0, 10**12]), "not a safetensors"),
    "negative shape": (lambda h, n, d: h[n].update(shape=[-1, 16]), "not a safetensors file"),
    "no entry": (lambda h, n, d: h.update({n: None}), "not a safetensors file"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_weights(name, place):
    change, message = TENSORS[name]
    weights(place / "model" / "model.safetensors", change)
    check_refused(message, lambda: in_memory(hf.load(place / "model")[1]))


def test_finite_weights_of_every_type_are_taken():
    from jrl.models.hf.stored import is_finite

    for dtype in ("float32", "bfloat16", "float16", "float64"):
        import ml_dtypes

        kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
        largest = np.array([[0.0, -1.5], [65504.0 if dtype == "float16" else 3e38, 1e-30]], kind)
        assert is_finite(largest)
        assert is_finite(largest.T)
        for bad in (np.nan, np.inf, -np.inf):
            with_bad = largest.copy()
            with_bad[1, 0] = bad
            assert not is_finite(with_bad)
            assert not is_finite(with_bad.T)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"
MODEL_FILES = {
    ("model.safetensors", b""): "not a safetensors file",
    ("model.safetensors", b"\xff" * 8 + b"{}"): "not a safetensors file",
    ("model.safetensors", POINTER): "model.safetensors: a Git LFS pointer instead of the file",
    ("tokenizer.json", POINTER): "tokenizer.json: a Git LFS pointer instead of the file",
    ("config.json", POINTER): "config.json: a Git LFS pointer instead of the file; run `git lfs",
    ("tokenizer.json", b"[]"): "tokenizer.json",
    ("tokenizer.json", b"{}"): "tokenizer.json",
    ("config.json", b'{"hidden_size": ' + b"9" * 5000 + b"}"): "config.json: not valid JSON",
    ("config.json", b"[]"): "must hold a JSON object",
    ("config.json", b'{"head_dim": 8, "head_dim": 16}'): "config.json: the key 'head_dim' is there",
    ("tokenizer_config.json", b'{"eos_token": "<nope>"}'): "<nope>",
}


@pytest.mark.parametrize("name", MODEL_FILES, ids=lambda n: f"{n[0]} {n[1][:20]!r}")
def test_files_of_a_checkpoint(name, place):
    (place / "model" / name[0]).write_bytes(name[1])
    check_refused(MODEL_FILES[name], setup, place)


KEYS = {
    '"num_hidden_layers": 1000000000': "num_hidden_layers",
    '"num_attention_heads": 0': "num_attention_heads",
    '"num_key_value_heads": 3': "num_key_value_heads",
    '"head_dim": 7': "head_dim = 7; it must be even",
    '"max_position_embeddings": -1': "max_position_embeddings",
    '"rms_norm_eps": NaN': "rms_norm_eps",
    '"quantization_config": {"quant_method": "gptq"}': "quantization_config is set",
    '"partial_rotary_factor": 0.5': "partial_rotary_factor = 0.5 is not supported",
    '"rope_scaling": {"rope_type": "linear", "factor": 0}': "rope_scaling.factor = 0",
    '"architectures": 7': "architectures = 7",
    '"hidden_act": ["silu"]': "hidden_act",
}


@pytest.mark.parametrize("text", KEYS)
def test_keys_of_config_json(text, place):
    path = place / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | json.loads("{" + text + "}")))
    check_refused(KEYS[text], setup, place)


def test_adapters_without_their_model(place):
    (place / "model" / "config.json").rename(place / "model" / "adapter_config.json")
    check_refused("holds adapters alone: name it as lora.path", setup, place)


def test_two_tokens_with_one_id(place):
    path = place / "model" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["a"] = content["model"]["vocab"]["b"]
    path.write_text(json.dumps(content))
    check_refused("both have id 2 in the vocabulary; the file is damaged", setup, place)


TEMPLATES = {
    "the same for all": "the content of a user message nowhere",
    "{{ cycler }}": "the content of a user message nowhere",
    "": "the content of a user message nowhere",
    "{{ '\\ud800' }}": "writes \\ud800, half of a character",
    "{% include 'x' %}": "the chat template of",
    "{{ messages.append(1) }}": "the chat template of",
    "{{ ''.__class__.__base__.__subclasses__() }}": "the chat template of",
    "{{ messages[5].content }}": "the chat template of",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "the chat template of",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_chat_templates(template, place):
    about = {"eos_token": "<stop>", "chat_template": template}
    (place / "model" / "tokenizer_config.json").write_text(json.dumps(about))
    check_refused(TEMPLATES[template], setup, place, "data.template=chat")


def test_a_chat_template_that_fails_on_a_row_names_the_row(place):
    fails = "{% if 'b' in messages[0].content %}{{ raise_exception('no b') }}{% endif %}"
    about = {"eos_token": "<stop>", "chat_template": fails + "{{ messages[0].content }}"}
    (place / "model" / "tokenizer_config.json").write_text(json.dumps(about))
    rows = [row(b'"1"'), row(b'"1"').replace(b"a?", b"b?"), row(b'"1"')]
    (place / "data.jsonl").write_bytes(b"".join(rows))
    check_refused("data.jsonl, line 2: the chat template of", setup, place, "data.template=chat")


# ---------------------------------------------------------------- data


def row(answer):
    return b'{"question": "a?", "answer": ' + answer + b"}\n"


ROWS = {
    ("d.jsonl", row(b"NaN")): "answer is nan; a reference answer is finite",
    ("d.jsonl", row(b"-Infinity")): "answer is -inf",
    ("d.jsonl", row(b"1e999")): "answer is inf",
    ("d.jsonl", row(b"9" * 5000)): "line 1: not valid JSON",
    ("d.jsonl", b'{"question": "   ", "answer": "1"}\n'): "question is blank",
    (
        "d.jsonl",
        b'{"question": ["a"], "answer": "1"}\n',
    ): "question holds a; a message has role and content, both text",
    ("d.jsonl", row(b'"1"') + b"\x00\n"): "line 2: not valid JSON",
    ("d.jsonl", row(b'"1"').strip() + row(b'"2"')): "line 1: not valid JSON",
    ("d.jsonl", row(b'"1"').decode().encode("utf-16")): "not UTF-8 text",
    ("d.json", b'{"question": "a"}'): "d.json",
    ("d.json", b"[[1]]"): "d.json",
    ("d.json", b"[" * 100_000): "d.json: nested too deeply to be read",
    ("d.jsonl", b'{"question": "a?", "answer": 1, "answer": 2}\n'): "line 1: the key 'answer' is",
    ("d.csv", b"question,answer\n"): "has no rows",
    ("d.jsonl.gz", b"\x1f\x8b\x08"): "not a readable gzip file",
    ("d.txt.gz", b"\x1f\x8b\x08"): "name a FILE.jsonl",
}


@pytest.mark.parametrize("name", ROWS, ids=lambda n: f"{n[0]} {n[1][:40]!r}")
def test_rows(name, place):
    (place / name[0]).write_bytes(name[1])
    check_refused(ROWS[name], setup, place, data=name[0])


@pytest.mark.parametrize("answer", [[["5"]], {"x": 5}])
def test_answers_that_no_text_is_equal_to(answer, place):
    rows = [{"question": "a?", "answer": "1"}, {"question": "b?", "answer": answer}]
    (place / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_config(None, overrides(place, data="d.jsonl"))
    message = f"row 2: the answer is {answer}, and rewards.exact compares text and numbers"
    run = build.setup(config)
    check_refused(message, check_reward_columns, run.config, run.kind, run.data)


# ---------------------------------------------------------------- requests


LIMITS = RequestLimits(
    slots=4,
    prompt_tokens=20,
    max_new_tokens=30,
    vocab_size=48,
    max_length=40,
    stop_tokens=8,
    biases=True,
    reports=True,
)


class Talker(CharTokenizer):
    def chat(self, messages, **variables):
        return ";".join(m["content"] for m in messages)


USER = {"role": "user", "content": "1"}
BODIES = [
    ({"logit_bias": {"9" * 5000: 1}}, "keys are token ids, 0 to 47"),
    ({"logit_bias": {"\u0663": 1}}, "keys are token ids"),
    ({"logit_bias": {"07": 1}}, "keys are token ids"),
    ({"logit_bias": {" 7": 1}}, "keys are token ids"),
    ({"logit_bias": {"3": None}}, "logit_bias['3'] must be a number, not null"),
    ({"stop": "a" * 10**6}, "stop has a string of 1000000 characters; at most 1000"),
    ({"prompt": ["1"] * 10**6}, "1000000 completions at once; this server takes at most 8"),
    ({"prompt": [[1]] * 5, "n": 2}, "10 completions at once"),
    ({"prompt": [[]]}, "prompt is empty"),
    ({"prompt": [[1], ["a"]]}, "prompt must be a string"),
    ({"prompt": [1.0]}, "prompt must be a string"),
    ({"stream_options": {"include_usage": True}}, "stream_options needs stream = true"),
    ({"stream": True, "stream_options": {"nope": 1}}, "unknown parameter 'nope'"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "true or false"),
    ({"best_of": "2"}, "best_of = '2'; must be an integer"),
    ({"best_of": True}, "best_of = True; must be an integer"),
    ({"max_tokens": 1.0}, "max_tokens = 1.0; must be an integer"),
    ({"max_tokens": 10**30}, "must be 1 to"),
    ({"logprobs": True}, "logprobs = True; must be an integer"),
    ({"messages": [USER | {"role": ""}]}, "messages[0].role must be a text"),
    ({"messages": [USER | {"role": ["user"]}]}, "messages[0] must be an object with a role"),
    ({"messages": [USER | {"name": 5}]}, "messages[0].name must be a text"),
    ({"messages": [USER | {"content": None}]}, "messages[0].content must be a string"),
    ({"messages": [USER | {"content": [{"type": "text", "text": 5}]}]}, "text parts"),
    ({"messages": [USER] * 10**4}, "messages has"),
    ({"messages": [None]}, "messages[0] must be an object"),
    ({"messages": [USER], "max_completion_tokens": 3, "max_tokens": 5}, "differ; give one"),
    ({"messages": [USER], "logprobs": True, "top_logprobs": 2.0}, "must be an integer"),
    ({"messages": [USER], "logprobs": "true"}, "logprobs must be true or false"),
    ({"messages": [USER], "seed": -(2**63) - 1}, "seed = -9223372036854775809"),
]


@pytest.mark.parametrize(("changes", "message"), BODIES, ids=lambda x: str(x)[:40])
def test_bodies(changes, message):
    chat = "messages" in changes
    body = {"model": "m"} | ({} if chat else {"prompt": "1"}) | changes
    options = {"tokenizer": Talker(), "limits": LIMITS, "model": "m", "most": 8}
    check_refused(message, parse, body, chat=chat, **options)
