"""Whatever stands in overrides, configuration files, tokenizer files and requests: it is taken, or
refused in lines that name what is wrong. Nothing else may come out."""

import json

import hypothesis
import pytest
from fuzzing import QUICK, anything, outcome
from hypothesis import strategies as st

from jrl.config import build_config, describe, dump, load_config
from jrl.models.file_tokenizer import load_tokenizer
from jrl.models.tokenizer import CharTokenizer
from jrl.sampling.request import RequestLimits
from jrl.serving.openai_requests import ACCEPTED, COMMON, NEUTRAL, parse

NAMES = sorted(key.name for key in describe())
OVERRIDES = [
    "seed=\udcff",
    "data.template='{question!r}'",
    "data.template='{question:>9999999999}'",
    "data.template='{question.__class__}'",
    "data.template='{question[0]}'",
    "data.template='{}'",
    "reward_pool.on_error=raise",
    "a=" + "[" * 5000,
    "." * 3000 + "=1",
    "train.steps=" + "9" * 5000,
    "optimizer.learning_rate=nan",
]
"""Overrides that once ended in a traceback, or were taken."""


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda o: repr(o)[:30])
def test_overrides_that_were_found(override):
    message = outcome(load_config, None, ["data.train=a.jsonl", "model.path=x", override])
    assert message
    assert len(message.splitlines()) <= 3
    assert len(message) < 12_000


@hypothesis.given(st.sampled_from(NAMES), st.text(max_size=12) | anything.map(repr))
@QUICK
def test_any_override_is_taken_or_refused(name, text):
    outcome(load_config, None, ["data.task=sorting", f"{name}={text}"])


@hypothesis.given(st.text(max_size=20))
@QUICK
def test_any_text_as_an_override_is_taken_or_refused(text):
    outcome(load_config, None, ["data.task=sorting", text])


@hypothesis.given(st.sampled_from(NAMES), anything)
@QUICK
def test_any_value_in_a_tree_is_taken_or_refused_and_what_is_taken_can_be_written(name, value):
    *tables, last = name.split(".")
    tree = {last: value}
    for table in reversed(tables):
        tree = {table: tree}
    tree = {"data": {"task": "sorting"} | tree.pop("data", {})} | tree
    if not outcome(build_config, tree):
        dump(build_config(tree)).encode()


@hypothesis.given(st.binary(max_size=40))
@QUICK
def test_any_file_is_a_configuration_or_refused(tmp_path, data):
    path = tmp_path / "run.toml"
    path.write_bytes(data)
    outcome(load_config, path)


LIMITS = RequestLimits(
    slots=4,
    prompt_tokens=20,
    max_new_tokens=30,
    vocab_size=48,
    max_length=40,
    stop_tokens=8,
    biases=True,
)


class Talker(CharTokenizer):
    def chat(self, messages, **variables):
        return ";".join(m["content"] for m in messages)


@hypothesis.given(
    st.booleans(),
    st.dictionaries(
        st.sampled_from(sorted(COMMON | ACCEPTED[0] | ACCEPTED[1] | set(NEUTRAL))), anything
    )
    | anything,
)
@QUICK
def test_any_body_is_a_request_or_refused(chat, changes):
    body = changes
    if isinstance(changes, dict):
        sound = {"messages": [{"role": "user", "content": "1"}]} if chat else {"prompt": "1"}
        body = {"model": "m"} | sound | changes

    def ask():
        parse(body, chat=chat, tokenizer=Talker(), limits=LIMITS, model="m")

    outcome(ask)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    import tokenizers
    from tokenizers import models, pre_tokenizers

    directory = tmp_path_factory.mktemp("tokenizer")
    backend = tokenizers.Tokenizer(models.WordLevel({"<end>": 0, "a": 1}, unk_token="<end>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(directory / "tokenizer.json"))
    return directory


FILES = ("tokenizer_config.json", "generation_config.json", "special_tokens_map.json")
KEYS = ("eos_token", "eos_token_id", "pad_token", "bos_token", "chat_template", "added_tokens")


@hypothesis.given(st.sampled_from(FILES), st.dictionaries(st.sampled_from(KEYS), anything))
@QUICK
def test_any_tokenizer_file_is_taken_or_refused(checkpoint, name, content):
    for each in FILES:
        (checkpoint / each).write_text('{"eos_token": "<end>"}')
    (checkpoint / name).write_text(json.dumps(content))

    def read():
        tokenizer = load_tokenizer(checkpoint)
        if tokenizer.templates:
            tokenizer.chat([{"role": "user", "content": "a"}])

    assert "\n" not in outcome(read)


@pytest.mark.parametrize("value", ["2", "<end>", -1, [0, -5], [0, "1"], True, 1.5, {"a": 1}, [[0]]])
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_ids_that_end_a_completion(checkpoint, file, value):
    for each in (*FILES, "config.json"):
        (checkpoint / each).write_text("{}")
    (checkpoint / file).write_text(json.dumps({"eos_token_id": value}))
    message = outcome(load_tokenizer, checkpoint)
    assert message.startswith("eos_token_id = ")
    assert "a whole number from 0 on" in message
    (checkpoint / "config.json").unlink()


def test_what_is_sound_is_taken():
    """So that the tests above do not hold of a parser that refuses all."""
    assert not outcome(load_config, None, ["data.task=sorting", "train.steps=3"])
    body = {"model": "m", "prompt": "1"}
    assert parse(body, chat=False, tokenizer=Talker(), limits=LIMITS, model="m").total == 1
