"""Reports on the tokens of a decode call: log-probabilities and alternatives.

They come from the logits of the decode step itself, so that no second pass and no second cache is
needed, and only steps in which a row asked for them pay.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jrl.models import gpu
from jrl.sampling.params import SamplingParams, kept_tokens, scaled_logits
from jrl.types import Array


class TokenReport(struct.PyTreeNode):
    """The report on up to W tokens of each of S rows; column w is step w of the call.

    Attributes:
      alternatives: [S] int32, alternatives that each row asked for; -1 for no report at all.
      logprobs: [S, W] float32, nats, of the tokens drawn; see ``reported_logprobs``.
      top_ids: [S, W, K] int32, the likeliest tokens, the likeliest first.
      top_logprobs: [S, W, K] float32, nats.
    """

    alternatives: Array
    logprobs: Array
    top_ids: Array
    top_logprobs: Array

    @classmethod
    def empty(cls, alternatives: Array, width: int, top: int) -> TokenReport:
        """A report without entries, for ``width`` steps and up to ``top`` alternatives."""
        s = alternatives.shape[0]
        return cls(
            alternatives=alternatives,
            logprobs=jnp.zeros((s, width), jnp.float32),
            top_ids=jnp.zeros((s, width, top), jnp.int32),
            top_logprobs=jnp.zeros((s, width, top), jnp.float32),
        )

    @jax.named_scope("report")
    def with_step(
        self, step: Array, logits: Array, tokens: Array, sampling_params: SamplingParams
    ) -> TokenReport:
        """The report with one more column.

        Args:
          step: [] int32, the column.
          logits: [S, V] float.
          tokens: [S] int32, as drawn.
          sampling_params: one value a row.
        """

        def filled(report: TokenReport) -> TokenReport:
            logprobs = reported_logprobs(logits, sampling_params)
            token_logprob = jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]
            likeliest = lambda: tuple(jax.lax.top_k(logprobs, report.top_ids.shape[2]))  # noqa: E731
            nothing = lambda: (report.top_logprobs[:, 0], report.top_ids[:, 0])  # noqa: E731
            some = jnp.any(report.alternatives > 0)
            # On a GPU there is a report only where a row asked for it, see ``Rows``.
            branches = gpu.branches()
            top_values, ids = jax.lax.cond(some, likeliest, nothing) if branches else likeliest()
            return report.replace(
                logprobs=report.logprobs.at[:, step].set(token_logprob),
                top_ids=report.top_ids.at[:, step].set(ids),
                top_logprobs=report.top_logprobs.at[:, step].set(top_values),
            )

        if not gpu.branches():
            return filled(self)
        return jax.lax.cond(jnp.any(self.alternatives >= 0), filled, lambda report: report, self)


def reported_logprobs(logits: Array, sampling_params: SamplingParams) -> Array:
    """Log-probabilities of all tokens as a reply reports them.

    They are those of the distribution sampled from, except where that is a point mass: a row at
    temperature 0 gets the model's own, without temperature, bias or truncation.

    Args:
      logits: [S, V] float.
      sampling_params: one value a row.

    Returns:
      [S, V] float32, nats; -inf for tokens that truncation leaves out.
    """
    scaled, greedy = scaled_logits(logits, sampling_params)
    # Only where a row may truncate: the search for its threshold goes over the vocabulary often.
    if sampling_params.truncates or sampling_params.floors:
        scaled = jnp.where(kept_tokens(scaled, sampling_params), scaled, -jnp.inf)
    return jax.nn.log_softmax(jnp.where(greedy, logits.astype(jnp.float32), scaled), axis=-1)
