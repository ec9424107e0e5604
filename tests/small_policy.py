"""A small policy, a task and ragged batches for it: fixtures of the tests of training and below."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.data.tasks import Task
from jrl.data.tasks.base import Problem
from jrl.models import replay
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.types import Batch, Network

CONFIG = ModelConfig(
    vocab_size=19,
    layers=1,
    embed_dim=16,
    heads=2,
    kv_heads=1,
    head_dim=8,
    mlp_dim=16,
    max_length=16,
)


@pytest.fixture(scope="session")
def quick_jit():
    """``jax.jit`` for programs that take longer to compile than to run."""
    return partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@pytest.fixture(scope="session")
def network():
    return transformer(CONFIG)


@pytest.fixture(scope="session")
def params(network):
    """Weights large enough that the policy has preferences; copy them where a step is donated."""
    return jax.tree.map(lambda x: 1.5 * x, jax.jit(network.init)(jax.random.key(0)))


def bag_network(v=19, d=8, max_length=16):
    """A policy that sees the mean of what came before: little to compile, everything to train.

    Decoding keeps the tokens and reads them all again.
    """

    def init(key):
        a, b, c = jax.random.split(key, 3)
        return {
            "embed": jax.random.normal(a, (v, d)),
            "mix": jax.random.normal(b, (d, d)),
            "head": jax.random.normal(c, (d, v)),
        }

    def hidden(params, tokens, positions, segments):
        x = params["embed"][tokens]
        same = (segments[:, :, None] == segments[:, None, :]) & (segments != 0)[:, None, :]
        sees = same & (positions[:, :, None] >= positions[:, None, :])
        mean = jnp.einsum("bqk,bkd->bqd", sees / jnp.maximum(sees.sum(2, keepdims=True), 1), x)
        return jnp.tanh(x + mean @ params["mix"]), {}

    return Network(
        vocab_size=v,
        embed_dim=d,
        max_length=max_length,
        init=init,
        axes=lambda: {"embed": ("vocab", "embed"), "mix": ("embed", None), "head": (None, None)},
        hidden=hidden,
        logits=lambda params, hidden: hidden @ params["head"],
        prepare=lambda params: params,
        init_cache=replay.init_cache,
        extend=partial(replay.extend, hidden=hidden),
    )


@pytest.fixture(scope="session")
def make_bag():
    return bag_network


@pytest.fixture(scope="session")
def bag():
    return bag_network()


@pytest.fixture(scope="session")
def bag_params(bag):
    return jax.jit(bag.init)(jax.random.key(0))


@pytest.fixture(scope="session")
def first_letter():
    """A task that costs little to compile: repeat the prompt's first token, then stop.

    Training prompts are made of tokens 2 to 6, held-out ones of 7 to 10.
    """
    stop, p, t = 1, 3, 3

    def generate(key, split):
        a, b = jax.random.split(key)
        low, high = (2, 7) if split == "train" else (7, 11)
        tokens = jax.random.randint(a, (p,), low, high)
        return Problem(tokens, jax.random.randint(b, (), 1, p + 1), tokens[:1])

    def solution(problem):
        return jnp.array([0, stop, 0]).at[0].set(problem.tokens[0]), jnp.int32(2)

    def verify(problem, tokens, length):
        right = (tokens[0] == problem.tokens[0]) & (tokens[1] == stop) & (length == 2)
        return right.astype(jnp.float32)

    def partly(problem, tokens, length):
        return 0.5 * (tokens[0] == problem.tokens[0]) + 0.5 * verify(problem, tokens, length)

    return Task(
        name="first_letter",
        difficulty=1,
        prompt_tokens=p,
        completion_tokens=t,
        vocab_size=11,
        stop_id=stop,
        tokenizer=None,
        generate=generate,
        verify=verify,
        partial=partly,
        solution=solution,
        render=None,
    )


def build(n=4, g=2, p=3, t=5, seed=0, **fields):
    """Ragged prompts and completions with random tokens, also where there are none."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, t + 1, (n, g)).astype(np.int32)
    lengths.flat[:2] = (t, 1)
    ones = np.ones((n, g), bool)
    batch = Batch(
        prompt_tokens=rng.integers(0, 19, (n, p)).astype(np.int32),
        prompt_lengths=((np.arange(n) % p) + 1).astype(np.int32),
        tokens=rng.integers(0, 19, (n, g, t)).astype(np.int32),
        lengths=lengths,
        mask=np.arange(t) < lengths[:, :, None],
        rewards=rng.normal(size=(n, g, 1)).astype(np.float32),
        reward_weights=np.ones(1, np.float32),
        members=ones,
        baseline=~ones,
        truncated=rng.random((n, g)) < 0.4,
        stats={"sampler_logprobs": (-rng.random((n, g, t)) - 1).astype(np.float32)},
    )
    return jax.tree.map(jnp.asarray, batch.replace(**fields)).check()


@pytest.fixture(scope="session")
def make_batch():
    return build


@pytest.fixture
def letters_model(tmp_path):
    """A directory with a tiny checkpoint whose tokens are letters."""
    return save_letters_model(tmp_path)


def save_letters_model(place):
    """As ``letters_model``, in a directory."""
    import dataclasses

    import tokenizers
    from tokenizers import models, pre_tokenizers

    from jrl.models import hf

    words = ["<stop>", *"abcdefghijklmnopqrstuvwxyz?\n "]
    backend = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    config = dataclasses.replace(CONFIG, vocab_size=32, max_length=48)
    hf.save(place / "model", config, transformer(config).init(jax.random.key(0)))
    backend.save(str(place / "model" / "tokenizer.json"))
    (place / "model" / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    return place / "model"
