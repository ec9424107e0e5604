"""Constrained decoding in the engine: what a mask allows, and that it changes nothing else."""

import dataclasses
import json
import string
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hub_mirror import byte_tokenizer
from needs_extra import require
from tiny import jit

from jrl.errors import UserError
from jrl.models.config import ModelConfig
from jrl.models.file_tokenizer import FileTokenizer
from jrl.models.tokenizer import CharTokenizer
from jrl.models.transformer import transformer
from jrl.sampling.engine import Engine
from jrl.sampling.grammar import Grammars, mask_words
from jrl.sampling.params import make_sampling_params, sampling_logprobs
from jrl.sampling.request import Request, RequestFeatures
from jrl.types import StopReason

require("serve")

pytestmark = pytest.mark.extra("serve")

TOKENIZER = CharTokenizer(string.printable.replace("\x0b", ""))
NETWORK = transformer(
    ModelConfig(
        vocab_size=103,  # two logits more than the tokenizer has ids
        layers=1,
        embed_dim=16,
        heads=2,
        kv_heads=1,
        head_dim=8,
        mlp_dim=16,
        max_length=80,
    )
)
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", 'b"c']}, "n": {"type": "integer", "maximum": 99}},
    "required": ["kind", "n"],
    "additionalProperties": False,
}
GRAMMAR = "start: %json " + json.dumps(SCHEMA | {"x-guidance": {"whitespace_flexible": False}})


@cache
def grammars():
    return Grammars(TOKENIZER, NETWORK.vocab_size)


@cache
def params():
    return jax.tree.map(lambda x: 2 * x, jit(NETWORK.init)(jax.random.key(0)))


def new_engine(compiles=grammars):
    sizes = {"slots": 3, "prompt_tokens": 8, "max_new_tokens": 60, "stop_tokens": (1,), "chunk": 4}
    features = RequestFeatures(grammars=compiles())
    return Engine(NETWORK, params(), **sizes, tokenizer=TOKENIZER, requests=features)


@pytest.fixture(scope="module")
def engine():
    return new_engine()


def completions(engine, *requests):
    numbers = [engine.submit(request) for request in requests]
    completions_by_row = {(u.request, u.member): u.completion for u in engine.run() if u.completion}
    return [
        completions_by_row[n, m] for n, r in zip(numbers, requests, strict=True) for m in range(r.n)
    ]


FREE = Request((5, 6), 60, seed=3, temperature=0.9, top_k=30)
BOUND = Request((7, 8, 9), 60, seed=6, n=2, temperature=9.0, grammar=GRAMMAR)


def test_every_completion_is_of_the_schema_and_others_are_as_they_were(engine):
    free, *bound = completions(engine, FREE, BOUND)
    (alone,) = completions(engine, FREE)
    assert free.tokens.tolist() == alone.tokens.tolist()
    for each in bound:
        value = json.loads(each.text)
        assert value["kind"] in ("a", 'b"c')
        assert value["n"] <= 99
        assert each.stop is StopReason.STOP_TOKEN
        assert each.tokens[-1] == 1
    assert bound[0].text != bound[1].text
    # One after another instead of side by side, and greedily: every draw is its own.
    again = [*completions(engine, BOUND)]
    assert [x.text for x in again] == [x.text for x in bound]
    (greedy,) = completions(engine, dataclasses.replace(BOUND, n=1, temperature=0.0))
    assert json.loads(greedy.text)


def test_log_probabilities_are_those_of_the_masked_distribution(engine):
    bound, _ = completions(engine, dataclasses.replace(BOUND, temperature=0.8))
    ids = jnp.asarray([[7, 8, 9, *bound.tokens.tolist()]], jnp.int32)
    place = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    hidden = NETWORK.hidden(params(), ids, place, 0 * place + 1)[0]
    logits = NETWORK.logits(params(), hidden)[0, 2:-1]
    constraint, biases = grammars().start(GRAMMAR), []
    for token in bound.tokens.tolist():
        bits = np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")[:103]
        biases.append(np.where(bits, 0.0, -np.inf))
        constraint.push([token])
    distribution = make_sampling_params(0.8).replace(bias=jnp.asarray(np.array(biases)))
    expected = sampling_logprobs(logits, distribution)
    rows = np.arange(len(bound.tokens))
    np.testing.assert_allclose(np.asarray(expected)[rows, bound.tokens], bound.logprobs, atol=1e-5)
    assert (bound.logprobs == 0).sum() > 5  # where the grammar leaves one token


def test_a_length_ends_in_the_middle_and_stop_strings_hold(engine):
    short, stopped = completions(
        engine,
        dataclasses.replace(BOUND, n=1, max_new_tokens=7),
        dataclasses.replace(BOUND, n=1, stop_strings=('"n',)),
    )
    assert (short.stop, short.text) == (StopReason.LENGTH, '{"kind"')
    assert stopped.stop is StopReason.STOP_STRING
    assert stopped.text.startswith('{"kind":')


def test_programs_do_not_depend_on_the_grammar():
    engine = new_engine()
    engine.compile(refresh=False)
    before = engine.executables
    for choices in (["x"], ["yy", "z"]):
        schema = {"enum": choices}
        (completion,) = completions(
            engine, Request((5,), 20, grammar="start: %json " + json.dumps(schema))
        )
        assert json.loads(completion.text) in choices
    assert engine.executables == before


BAD = [
    ('start: %json {"type": "integer", "minimum": 3, "maximum": 2}', "minimum (3) is greater"),
    ('start: %json {"type": "array", "uniqueItems": true}', "uniqueItems"),
    ('start: %json {"type": "string", "pattern": "["}', "unclosed character class"),
    ('start: "ä"', "no token that the grammar allows"),
    ("start: nothing", "nothing"),
]


@pytest.mark.parametrize(("grammar", "message"), BAD)
def test_what_cannot_be_satisfied_is_said_in_one_line(grammar, message):
    with pytest.raises(UserError) as error:
        grammars().check(grammar)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_grammar_that_cannot_go_on_ends_its_completion_alone(engine, caplog):
    free, stuck = completions(engine, FREE, Request((5,), 20, grammar='start: "ab" "ä" "c"'))
    assert (stuck.stop, stuck.text) == (StopReason.ABORTED, "ab")
    assert free.stop is not StopReason.ABORTED
    assert "no token that the grammar allows next" in caplog.text


def test_a_grammar_where_there_is_none_is_refused(engine):
    with pytest.raises(UserError, match="built with RequestFeatures.grammars"):
        new_engine(lambda: None).submit(BOUND)
    with pytest.raises(UserError, match="leave one out"):
        engine.submit(dataclasses.replace(BOUND, stop_tokens=(4,)))


def test_masks_of_a_checkpoints_tokenizer():
    backend = byte_tokenizer()
    backend.add_special_tokens(["<call>"])
    tokenizer = FileTokenizer(
        backend, source="here", stop_ids=(256,), pad_id=256, special={}, templates={}
    )
    compiler = Grammars(tokenizer, 270)
    assert compiler.literal('<call>{"a"') == '<[257]> "{\\"a\\""'
    with pytest.raises(UserError, match="'<end>' is a stop token"):
        compiler.literal("a<end>")
    constraint = compiler.start("start: " + compiler.literal("<call>é"))
    for token in (257, *tokenizer.encode("é")):
        mask = constraint.mask()
        assert mask.shape == (mask_words(270),)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        assert np.flatnonzero(bits).tolist() == [token]
        constraint.push([token])
    assert np.flatnonzero(
        np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")
    ).tolist() == [256]
