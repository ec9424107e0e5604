"""A run's decode slots on the host: which network they sample from, how, and on which mesh.

Episodes, searches and evaluation by search all sample from rows that are made here, so that none of
them plays another policy, another distribution or on another mesh than the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jrl.collect.resharding import drawn_from_prepared, network_on, weights_program
from jrl.mesh import replicated
from jrl.sampling.rows import Rows
from jrl.sampling.slots import Measure
from jrl.setup.placement import sampler_mesh
from jrl.setup.run import Run, sampler_of
from jrl.types import Array, Params, Stack, stream

_SLOTS, _CHUNK = 64, 16
"""Slots where the configuration names none, and the most decode steps between two looks at the
inbox: fewer where slots are idle."""


class RunRows(NamedTuple):
    """Decode slots, and where their weights come from.

    Attributes:
      rows: the slots.
      several: where players are policies of their own, with rows that sample from each.
      mesh: of the sampler's own; None for that in use.
      weights: with such a mesh, (params as training divides them) -> those that ``rows`` read.
    """

    rows: Rows
    several: Stack | None = None
    mesh: Mesh | None = None
    weights: Callable[[Params], Any] | None = None

    @contextlib.contextmanager
    def loaded(self, key: Array, params: Params, version: int) -> Iterator[Array]:
        """Gives the rows weights, and frees them at the end.

        Args:
          key: the run's root key.
          params: the policy's, as training divides them.
          version: of the weights.

        Yields:
          The key, where the rows sample.
        """
        with contextlib.ExitStack() as stack:
            if self.mesh is not None:
                assert self.weights is not None
                stack.enter_context(jax.set_mesh(self.mesh))
                params, key = self.weights(params), jax.device_put(key, replicated(self.mesh))
            self.rows.set_weights(params, version)
            del params  # where they are a copy they are freed with the rows
            stack.callback(self.rows.release)
            yield key

    def policy_of(self, step: int) -> Callable[[int], int] | None:
        """(player) -> which policy of several it is at a step of training; None for one policy."""
        several = self.several
        return None if several is None else partial(several.policy, step=step)


def run_rows(
    run: Run,
    widest: int,
    *,
    stop_tokens: Sequence[int],
    max_new_tokens: int,
    split: str = "train",
    temperature: float | None = None,
    measure: Measure | None = None,
) -> RunRows:
    """The decode slots of a run.

    Args:
      run: to train, or from ``train.programs.as_evaluated``.
      widest: rows that may be of use at a time.
      stop_tokens: ids at which rows stop.
      max_new_tokens: T.
      split: "train", or "eval" for the policy as it is evaluated.
      temperature: None for that of training.
      measure: of the distributions that tokens are sampled from.
    """
    sampling, mesh = run.config.sampling, sampler_mesh(run.config, run.mesh)
    network = network_on(run, mesh)
    network = sampler_of(run, network) if split == "train" else network
    several = network.extras.stack if split == "train" else None
    rows = Rows(
        network if mesh is None else drawn_from_prepared(network),
        slots=min(sampling.slots or _SLOTS, widest),
        prompt_tokens=run.width,
        max_new_tokens=max_new_tokens,
        stop_tokens=stop_tokens,
        chunk=_CHUNK,
        sampling={
            "temperature": sampling.temperature if temperature is None else temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
        },
        measure=measure,
        row_policies=several is not None,
    )
    weights = None if mesh is None else weights_program(run, network, mesh)
    return RunRows(rows, several, mesh, weights)


def completion_ends(run: Run) -> tuple[int, ...]:
    """Ids that end a completion of a run."""
    return tuple(run.kind.stop_tokens(run.tokenizer))


def step_ends(run: Run, *, whole: bool = False) -> tuple[int, ...]:
    """Ids that end a step of a search in text: those that end a completion, or a line.

    Args:
      run: that is searched.
      whole: whether a step is a whole completion.
    """
    ends = completion_ends(run)
    lines = run.kind.step_tokens(run.tokenizer, run.network.vocab_size)
    return ends if whole else (*ends, *(i for i in lines if i not in ends))


# ---------------------------------------------------------------- seeds


def prompt_seeds(key: Any, name: str, step: Any, positions: Any, attempt: int = 0) -> list[int]:
    """A number below 2**64 for each prompt: its raw key, at the first attempt that of ``generate``.

    Args:
      key: the run's root key.
      name: of the stream, "sample" or "eval".
      step: of training.
      positions: [N] int, in the run's order.
      attempt: how often the prompts were drawn in this step before.
    """
    raw = np.asarray(_raw_keys(key, name, step, np.asarray(positions), attempt))
    return [(int(hi) << 32) + int(lo) for hi, lo in raw]


@partial(jax.jit, static_argnums=1)
def _raw_keys(key: Any, name: str, step: Any, positions: Any, attempt: Any) -> Any:
    """[N, 2] uint32."""
    root = stream(key, name, step)
    again = jax.random.key_data(jax.random.fold_in(root, attempt))
    raw = jax.numpy.where(attempt > 0, again, jax.random.key_data(root))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.wrap_key_data(raw), positions)
    return jax.random.key_data(keys)
