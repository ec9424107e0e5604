"""Tiny policies for tests of sampling and episodes, and the trainer's view of what they sampled."""

from functools import partial

import jax
import jax.numpy as jnp

from jrl.models.config import ModelConfig
from jrl.sampling.params import make_sampling_params, sampling_logprobs

jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
"""``jax.jit`` for programs that take longer to compile than to run."""

SIZES = {"layers": 1, "embed_dim": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp_dim": 16}


def tiny_config(max_length, vocab_size=48):
    """One layer of 16 numbers; the vocabulary is ``char_tokenizer``'s."""
    return ModelConfig(vocab_size=vocab_size, max_length=max_length, **SIZES)


def trainer_logprobs(network, params, rollout):
    """[N, G, T] log-probabilities of a rollout's tokens at temperature 1, each row read at once."""
    width, t = rollout.prompt_tokens.shape[1], rollout.tokens.shape[2]
    at = jnp.arange(width + t)

    def one(prompt, length, tokens):
        row = jnp.where(at < length, jnp.pad(prompt, (0, t)), 0)
        row = jax.lax.dynamic_update_slice(row, tokens, (length,))
        hidden, _ = network.hidden(params, row[None], at[None], jnp.ones((1, width + t), jnp.int32))
        logits = network.logits(params, hidden[0])
        logprobs = sampling_logprobs(logits, make_sampling_params(1.0))
        before = jax.lax.dynamic_slice_in_dim(logprobs, length - 1, t)
        return jnp.take_along_axis(before, tokens[:, None], axis=1)[:, 0]

    each = jax.vmap(lambda prompt, length, group: jax.vmap(partial(one, prompt, length))(group))
    return jit(each)(rollout.prompt_tokens, rollout.prompt_lengths, rollout.tokens)
