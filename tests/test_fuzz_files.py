"""Whatever stands in the files of a checkpoint, of data and of a run: it is read, or refused in
lines that name what is wrong. A damaged step of a run is never restored as other values."""

import json
import shutil
import warnings

import hypothesis
import jax
import numpy as np
import pytest
from fuzzing import QUICK, anything, as_json, damaged, edits, outcome, places, replaced, settings
from hypothesis import strategies as st

from jrl.data.datasets import open_dataset
from jrl.data.messages import Wording
from jrl.data.prompts import build_prompts
from jrl.errors import UserError
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.file_tokenizer import load_tokenizer
from jrl.models.transformer import transformer
from jrl.storage.checkpoints import Checkpoints

SIZES = {"layers": 1, "embed_dim": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "mlp_dim": 32}
MODEL = ModelConfig(vocab_size=32, max_length=48, **SIZES)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint with a tokenizer of words."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    directory = tmp_path_factory.mktemp("fuzz") / "model"
    hf.save(directory, MODEL, transformer(MODEL).init(jax.random.key(0)))
    backend = tokenizers.Tokenizer(
        models.BPE({"<end>": 0, "a": 1, "b": 2, "ab": 3, " ": 4}, [("a", "b")])
    )
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("c", "a")])
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"\s+|\w+"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(
        single="<end> $A", special_tokens=[("<end>", 0)]
    )
    backend.add_special_tokens(["<end>"])
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    return directory


def copy_once(checkpoint, directory):
    """A directory of the test's own, of which each example writes one file anew."""
    if not any(directory.iterdir()):
        shutil.copytree(checkpoint, directory, dirs_exist_ok=True)


# ---------------------------------------------------------------- weights


@hypothesis.given(edits)
@settings(100)
def test_any_safetensors_file_is_read_or_refused(checkpoint, tmp_path, changes):
    copy_once(checkpoint, tmp_path)
    content = (checkpoint / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(damaged(content, changes))
    assert "\n" not in outcome(hf.load, tmp_path)


@hypothesis.given(st.data())
@settings(100)
def test_any_header_of_a_safetensors_file_is_read_or_refused(checkpoint, tmp_path, data):
    copy_once(checkpoint, tmp_path)
    content = (checkpoint / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    place = data.draw(st.sampled_from(list(places(header))))
    text = as_json(replaced(header, place, data.draw(anything)))
    damage = len(text).to_bytes(8, "little") + text + content[8 + size :]
    (tmp_path / "model.safetensors").write_bytes(damage)
    assert "\n" not in outcome(hf.load, tmp_path)


NAMES = st.sampled_from(["model.safetensors", "../model.safetensors", "/etc/passwd", "", "x", "."])


@hypothesis.given(
    st.dictionaries(st.sampled_from(["model.embed_tokens.weight", "x"]), NAMES | anything)
    | anything,
    st.sampled_from(["weight_map", "metadata"]),
)
@settings(50)
def test_any_index_file_is_read_or_refused(checkpoint, tmp_path, content, key):
    copy_once(checkpoint, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_bytes(as_json({key: content}))
    assert "\n" not in outcome(hf.load, tmp_path)


@hypothesis.given(st.data())
@settings(100)
def test_any_model_config_is_read_or_refused(checkpoint, tmp_path, data):
    config = json.loads((checkpoint / "config.json").read_text())
    place = data.draw(st.sampled_from(list(places(config))))
    (tmp_path / "config.json").write_bytes(as_json(replaced(config, place, data.draw(anything))))
    outcome(hf.read_config, tmp_path)


# ---------------------------------------------------------------- tokenizers and templates


def use(directory):
    tokenizer = load_tokenizer(directory)
    for text in ("", "ab ba c", "<end>a\u4f60", "a" * 1500):
        ids = tokenizer.encode(text, add_special=True)
        tokenizer.encode_plain(text)
        tokenizer.decode([*ids, 3, 10**6])


@hypothesis.given(st.data())
@settings(100)
def test_any_tokenizer_is_read_or_refused(checkpoint, tmp_path, data):
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    place = data.draw(st.sampled_from(list(places(tokenizer))))
    copy_once(checkpoint, tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(
        as_json(replaced(tokenizer, place, data.draw(anything)))
    )
    assert "\n" not in outcome(use, tmp_path)


PIECES = st.sampled_from(
    [
        *("{{", "}}", "{%", "%}", "{#", "#}", "{%-", "-%}", " for m in messages ", " endfor "),
        *(" if m ", " endif ", " else ", " set x = ", "x", "m", "m.content", "m['role']", "[0]"),
        *("messages", "|", "tojson", "length", "upper", "join(',')", "(", ")", "range(10**9)", "~"),
        *("+", "*", "10**9", "/ 0", "% 0", "'a'", "raise_exception('no')", "namespace(a=1)", ".a"),
        *("macro f(x)", "endmacro", "f(f)", "strftime_now('%Y')", "'%s' % ", "'{0}'.format(", "\n"),
        *("self", "loop.index", "cycler", "lipsum(n=10**9)", "messages[-1]", ".__class__", "''"),
    ]
)


@hypothesis.given(st.lists(PIECES, max_size=12).map(" ".join) | st.text(max_size=30))
@hypothesis.example("{{ lipsum(n=10**9) }}")
@hypothesis.example("{{ 'a' * 10**9 * 10**9 }}")
@hypothesis.example("{% for m in range(10**9) %}{{ messages }}{% endfor %}")
@hypothesis.example("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(f) }}")
@settings(150)
def test_any_chat_template_writes_a_text_or_is_refused(checkpoint, tmp_path, template):
    copy_once(checkpoint, tmp_path)
    config = {"eos_token": "<end>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_bytes(as_json(config))

    def talk():
        text = load_tokenizer(tmp_path).chat([{"role": "user", "content": "a"}])
        assert isinstance(text, str)
        assert len(text) <= 10_000_000

    outcome(talk)


# ---------------------------------------------------------------- rows of data

FIELDS = st.dictionaries(st.sampled_from(["question", "answer", "solution", "x"]), anything)
LINES = st.lists(
    FIELDS.map(as_json) | anything.map(as_json) | st.binary(max_size=12), max_size=4
).map(b"\n".join)
CSV = st.lists(
    st.sampled_from([b"question", b"answer", b",", b'"', b"\n", b"\r", b"\0", b"a", b"\xff", b" "]),
    max_size=14,
).map(b"".join)


@pytest.fixture(scope="module")
def words(checkpoint):
    return load_tokenizer(checkpoint)


@hypothesis.given(
    st.sampled_from(["jsonl", "json", "csv"]),
    LINES | CSV | CSV.map(b"question,answer\n".__add__),
    st.sampled_from([None, r"(\d+)", "(a|b)"]),
    st.sampled_from(["error", "skip"]),
    st.sampled_from(["error", "drop", "truncate"]),
)
@QUICK
def test_any_rows_become_prompts_or_are_refused(tmp_path, words, kind, data, pattern, bad, long):
    path = tmp_path / f"rows.{kind}"
    path.write_bytes(data)

    def build():
        prompts, counts = build_prompts(
            open_dataset(str(path)),
            Wording(words, template="plain"),
            answer_pattern=pattern,
            solution_key="solution" if bad == "skip" else None,
            max_prompt_tokens=4,
            overlong=long,
            invalid=bad,
        )
        assert len(prompts) == counts.used > 0
        assert all(0 < len(prompt.tokens) <= 4 for prompt in prompts)

    outcome(build)


# ---------------------------------------------------------------- steps of a run


STATE = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "step": np.int32(1)}


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Two steps of a run."""
    directory = tmp_path_factory.mktemp("steps") / "checkpoints"
    with Checkpoints(directory, 2) as checkpoints:
        for step in (1, 2):
            state = {"w": STATE["w"] + step, "step": np.int32(step)}
            checkpoints.save(step, state, extra={"cursor": step, "rows": [1, "a"]})
    return directory


@hypothesis.given(st.floats(0, 1, exclude_max=True), edits)
@settings(25)
def test_a_step_that_is_damaged_is_never_restored_as_other_values(steps, tmp_path, which, changes):
    directory = tmp_path / "checkpoints"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(steps, directory)
    files = sorted(path for path in (directory / "00000002").rglob("*") if path.is_file())
    file = files[int(which * len(files))]
    file.write_bytes(damaged(file.read_bytes(), changes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that step 2 was skipped
        state, extra = Checkpoints(directory, 2).restore(STATE)
    step = int(state["step"])
    assert step in (1, 2)
    np.testing.assert_array_equal(state["w"], STATE["w"] + step)
    assert extra == {"cursor": step, "rows": [1, "a"]}


def test_what_is_sound_is_taken(checkpoint, words, steps, tmp_path):
    """So that the tests above do not hold of readers that refuse all."""
    assert hf.load(checkpoint)[0].embed_dim == MODEL.embed_dim
    use(checkpoint)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a b", "answer": 3}\n')
    wording = Wording(words, template="plain")
    assert build_prompts(open_dataset(str(path)), wording, max_prompt_tokens=9)[1].used == 1
    assert Checkpoints(steps, 2).restore(STATE)[1]["cursor"] == 2
    with pytest.raises(UserError):
        hf.load(tmp_path)
