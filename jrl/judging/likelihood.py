"""Rewards from the policy's own probability of the reference answer: ``function = "likelihood"``.

    part = make_likelihood(run, "probable")
    points, paid = part(rollout, turns, prompts, weights)

The answer is teacher-forced after what the policy has read so far: its own row's tokens up to the
end of a completion, or up to where its next turn begins, then ``before`` and the answer. Nothing is
sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jrl.config.judge import POLICY
from jrl.config.likelihood import LIKELIHOOD, LikelihoodTable
from jrl.errors import UserError
from jrl.mesh import replicated
from jrl.models.tokenizer import Tokenizer
from jrl.rewards.exact import expected_answer
from jrl.rewards.matching import references
from jrl.rewards.rules import Rules
from jrl.rewards.text_models import over_texts
from jrl.setup.reward_parts import likelihood_of, reward_tables
from jrl.setup.run import Run
from jrl.types import Array, Network, Params, Prompt, Rollout, StopReason


def likelihoods(
    params: Params, tokens: Array, starts: Array, lengths: Array, *, network: Network, most: int
) -> Array:
    """[B] float32: exp of the mean log-probability of the last tokens of each row.

    Args:
      params: of the policy.
      tokens: [B, L] int32, from column 0.
      starts: [B] int32, the column of the first token that counts, at least 1.
      lengths: [B] int32, tokens of each row; more than ``starts``.
      network: the policy.
      most: static, the most tokens that count.
    """
    columns = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    segments = (columns < lengths[:, None]).astype(jnp.int32)
    hidden, _ = network.hidden(params, tokens, columns, segments)
    at = starts[:, None] + jnp.arange(most)[None]  # [B, most]
    counts = at < lengths[:, None]
    at = jnp.minimum(at, tokens.shape[1] - 1)

    def one(row: tuple[Array, ...]) -> Array:
        states, ids, places, count = row
        logprobs = jax.nn.log_softmax(network.logits(params, states[places - 1]), axis=-1)
        each = jnp.take_along_axis(logprobs, ids[places][:, None], axis=1)[:, 0]
        return jnp.exp(jnp.where(count, each, 0).sum() / jnp.maximum(count.sum(), 1))

    # one row's distributions at a time
    return jax.lax.map(one, (hidden, tokens, at, counts))


class Likelihood(NamedTuple):
    """A reward part that is the policy's probability of the answer.

    Attributes:
      table: keys of the part.
      rules: the samples it is computed for, and the value without an opinion.
      weight: of the part, for rewards per token.
      tokenizer: the policy's.
      longest: longest sequence that the policy reads, tokens.
      mesh: of training.
      program: ``likelihoods``, jitted: (params, tokens, starts, lengths) -> [B].
    """

    table: LikelihoodTable
    rules: Rules
    weight: float
    tokenizer: Tokenizer
    longest: int
    mesh: Mesh
    program: Callable[..., Array]

    def __call__(
        self, rollout: Rollout, turns: Any, prompts: Sequence[Prompt], weights: Mapping[str, Params]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Points of N groups of G members, and the rewards at their tokens.

        Args:
          rollout: on the host.
          turns: [N, G, T] int32, the turn of each token; None for completions.
          prompts: N of them.
          weights: that sampled the members, by name; no opinion without the policy's.

        Returns:
          ([N, G] float32, NaN for no opinion; [N, G, T] float32, the weighted points of turns.)
        """
        stop = np.asarray(rollout.stop)
        present = (stop != StopReason.ABORTED) & (stop < StopReason.FAILED)
        absent = 0.0 if self.rules.missing == "zero" else np.nan
        points = np.full(stop.shape, absent, np.float32)
        paid = np.zeros(rollout.tokens.shape, np.float32)
        if POLICY not in weights:
            return points, paid
        before = self.tokenizer.encode(self.table.before)
        texts, places = list[tuple[list[int], int]](), list[tuple[int, int, list[int]]]()
        for i, j in np.argwhere(present).tolist():
            answer = self._answer(prompts[i])
            cuts = self._cuts(rollout, turns, i, j)
            rows = [(*_row(rollout, i, j, cut), *before, *answer) for cut in cuts]
            room = all(len(row) <= self.longest for row in rows)
            if not 0 < len(answer) <= self.table.max_answer_tokens or not room:
                continue
            places.append((i, j, cuts))
            texts += [(list(row), len(row) - len(answer)) for row in rows]
        values = iter(self._values(weights[POLICY], texts))
        for i, j, cuts in places:
            at_cuts = [next(values) for _ in cuts]
            if self.table.by == "completion":
                points[i, j] = at_cuts[0]
                continue
            gains = np.diff(at_cuts)
            points[i, j] = gains.sum()
            for cut, gain in zip(cuts[1:], gains, strict=True):
                sampled = np.flatnonzero(np.asarray(rollout.mask)[i, j, :cut])
                paid[i, j, sampled[-1]] += self.weight * gain
        return points, paid

    def _answer(self, prompt: Prompt) -> list[int]:
        """Tokens of a row's first reference; empty if it has none that can be encoded."""
        if prompt.answer is None or not self.rules.asks_row(prompt.meta):
            return []
        try:
            first = references(prompt.answer, f"rewards.{LIKELIHOOD}")[0]
            return self.tokenizer.encode_plain(expected_answer(first))
        except UserError:
            return []

    def _cuts(self, rollout: Rollout, turns: Any, i: int, j: int) -> list[int]:
        """Cuts at which the answer is scored: tokens of the member before it."""
        length = int(rollout.lengths[i, j])
        if self.table.by == "completion":
            ends = length and int(rollout.tokens[i, j, length - 1]) in self.tokenizer.stop_ids
            return [length - int(bool(ends))]
        sampled = np.flatnonzero(np.asarray(rollout.mask)[i, j, :length])
        turn = np.asarray(turns)[i, j]
        # the first token of each turn: all before it is what the policy answers to
        return [int(t) for k, t in enumerate(sampled) if k == 0 or turn[t] != turn[sampled[k - 1]]]

    def _values(self, params: Params, texts: Sequence[tuple[list[int], int]]) -> list[float]:
        """The likelihoods of texts, (token ids, where the answer begins) each."""
        program, ids = partial(self.program, params), [ids for ids, _ in texts]
        columns = [start for _, start in texts], [len(each) for each in ids]
        how = {"rows": self.table.rows, "longest": self.longest}
        return over_texts(program, ids, *columns, **how, mesh=self.mesh).tolist()


def _row(rollout: Rollout, i: int, j: int, cut: int) -> list[int]:
    """Token ids of a member up to a token, prompt included."""
    opening = np.asarray(rollout.prompt_tokens)[i, : int(rollout.prompt_lengths[i])]
    return [*opening.tolist(), *np.asarray(rollout.tokens)[i, j, :cut].tolist()]


def make_likelihood(run: Run, name: str) -> Likelihood:
    """The part of a run by that name."""
    table, part = likelihood_of(run.config, name), reward_tables(run.config)[name]
    program = partial(likelihoods, network=run.network, most=table.max_answer_tokens)
    return Likelihood(
        table,
        Rules(part.missing, where=part.where),
        run.rewards.weights[name],
        run.tokenizer,
        run.network.max_length,
        run.mesh,
        jax.jit(program, out_shardings=replicated(run.mesh)),
    )
