"""Held-out judged completions: the loss and the metrics of a method on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jrl.collect.groups import place_batch
from jrl.collect.sources_given import BatchSizes
from jrl.data.pairs import judged_batch
from jrl.evaluate.statistics import wilson
from jrl.mesh import replicated
from jrl.objectives.policy import Pairs, combine_terms, compute_advantages, policy_loss
from jrl.sampling.params import SamplingParams
from jrl.setup.run import Run
from jrl.train.batch_rows import in_parts
from jrl.train.score import policies_of
from jrl.train.step import Parts, complete, live_statistics
from jrl.train.step_metrics import summarise
from jrl.types import Array, Batch, TrainState

Measure = Callable[[TrainState, Batch, SamplingParams], Pairs]
"""(state, batch, distribution) -> (sum, count) by name."""

TERM = "term:"
"""Prefix of the loss's terms among the metrics of a batch."""
SHOWN = ("accuracy", "margin", "chosen_reward", "rejected_reward")
"""Metrics reported for held-out groups beside the loss, if the method has them."""


def make_measure(parts: Parts) -> Measure:
    """The loss and the metrics of a batch as a pure function of (state, batch, distribution).

    Args:
      parts: those of the training step; its optimizer is not read.

    Returns:
      The function. It returns (sum, count) by name, which add up over batches: the terms of the
      loss, their names after ``TERM``, and the surrogate's metrics over tokens, sequences or
      groups. No gradient is computed.
    """
    objective, at_once = parts.objective, parts.minibatches * parts.microbatches

    def measure(state: TrainState, batch: Batch, sampling_params: SamplingParams) -> Pairs:
        batch = complete(parts, state, batch.check(), sampling_params)
        advantages, batch, _, _ = compute_advantages(objective, batch, state.method)
        policies = policies_of(state.params, state.frozen, parts.network)
        scoring = partial(_score, parts, policies, sampling_params)
        stats = batch.stats | in_parts(scoring, batch, at_once)
        terms, sums = policy_loss(objective, stats, batch, advantages, state.method)
        return sums | {TERM + name: pair for name, pair in terms.items()}

    return measure


def _score(
    parts: Parts, params: Any, sampling_params: SamplingParams, batch: Batch
) -> dict[str, Array]:
    return live_statistics(parts)(params, batch, sampling_params)


class JudgedEvaluator:
    """Measures a run's method on its held-out groups, all of them, always the same ones.

    Args:
      run: from ``setup``, with held-out groups.
      sizes: of a batch.
    """

    def __init__(self, run: Run, sizes: BatchSizes) -> None:
        train = run.config.train
        parts = Parts(
            network=run.network,
            objective=run.method.objective,
            optimizer=optax.identity(),
            value=run.value,
            networks=run.networks,
            minibatches=train.minibatches,
            microbatches=train.microbatches,
        )
        everywhere = replicated(run.mesh)
        self.run, self.sizes = run, sizes
        self._measure = jax.jit(make_measure(parts), out_shardings=everywhere)
        self._sampling_params = jax.device_put(run.sampling_params, everywhere)

    def __call__(self, state: TrainState) -> dict[str, float]:
        """Loss, pair_accuracy with its 95 % interval, margin, and pairs, under the run's mesh."""
        judged, size = self.run.data.judged["eval"], self.run.config.train.prompts
        totals: dict[str, Any] = {}
        for start in range(0, len(judged), size):
            part = judged[start : start + size]
            filled = [*part, *(judged[0] for _ in range(size - len(part)))]
            batch: Any = judged_batch(filled, **self.sizes._asdict())
            within = np.arange(size) < len(part)
            batch = batch.replace(
                members=batch.members & within[:, None], mask=batch.mask & within[:, None, None]
            )
            sums = self._measure(state, place_batch(batch, self.run.mesh), self._sampling_params)
            for name, pair in sums.items():
                totals[name] = jax.tree.map(jnp.add, totals.get(name, (0.0, 0.0)), pair)
        # Divided once, as in training: a mean over batches would weigh the pairs of the last one,
        # which is smaller, more.
        terms = {n.removeprefix(TERM): pair for n, pair in totals.items() if n.startswith(TERM)}
        metrics = {"loss": float(combine_terms(self.run.method.objective, terms, state.method))}
        metrics |= {name: float(x) for name, x in summarise(totals).items() if name in SHOWN}
        metrics["pairs"] = float(len(judged))
        if "accuracy" in metrics:  # of pairs; that of a task's problems has the name for itself
            accuracy = metrics["pair_accuracy"] = metrics.pop("accuracy")
            low, high = wilson(accuracy * len(judged), len(judged))
            metrics |= {"pair_accuracy_low": low, "pair_accuracy_high": high}
        return metrics
