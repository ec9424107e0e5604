"""A layout of the sampler's own on the devices of training (``[sampling.mesh]``).

    draw = ReshardedSampler(...)
    groups = draw(key, params, ...)     # params as training divides them
    draw.free()                         # before training goes on

Training wants weights divided over many devices, and a batch over all; sampling reads all weights
for every token and sends activations, so that few devices for a copy of the weights are best. Once
a rollout one compiled program makes, from the weights as training divides them, those that the
sampler reads: in its dtype, joined and ordered for decoding, and divided over its own mesh. They
are freed before the next training step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jrl.mesh import replicated
from jrl.types import Array, Network, Params


def weights_program(network: Network, into: Any = None) -> Any:
    """The program that reshards, to be called or lowered under the sampler's mesh.

    Args:
      network: the policy as it samples there.
      into: where its weights shall lie, for a network that does not say so itself; None for the
        library's own decoder, whose ``prepare`` does.

    Returns:
      ``jax.jit`` of ``network.prepare``: the policy's weights, on any mesh over the same devices in
      the same order, to those that ``extend`` reads.
    """

    def prepare(params: Params) -> Any:
        if into is not None:
            params = jax.lax.with_sharding_constraint(params, into)
        return network.prepare(params)

    return jax.jit(prepare)


def drawn_from_prepared(network: Network) -> Network:
    """The network for programs that are given weights that ``weights_program`` has made."""
    return network._replace(prepare=_as_they_are)


def _as_they_are(weights: Any) -> Any:
    return weights


class ReshardedSampler:
    """A sampler on a mesh of its own, called as one on the mesh of training is.

    Args:
      weights: from ``weights_program``.
      program: (key, weights, ...) -> what was drawn, compiled for ``mesh``; of a network from
        ``drawn_from_prepared``.
      mesh: the sampler's.
      back: where results go: the mesh of training.
    """

    def __init__(self, weights: Any, program: Callable[..., Any], mesh: Mesh, back: Mesh) -> None:
        self.weights, self.program, self.mesh = weights, program, mesh
        self._back = back
        self._source: Params = None
        self._held: Any = None

    def __call__(self, key: Array, params: Params, *args: Any, **kwargs: Any) -> Any:
        """What the program draws with these weights; resharded if they are not those held."""
        with jax.set_mesh(self.mesh):
            if self._held is None or self._source is not params:
                self.free()
                self._held, self._source = self.weights(params), params
            key = jax.device_put(key, replicated(self.mesh))
            drawn = self.program(key, self._held, *args, **kwargs)
        return jax.device_put(drawn, replicated(self._back))

    def free(self) -> None:
        """Frees the resharded weights, once the programs that read them are done."""
        kept = {id(leaf) for leaf in jax.tree.leaves(self._source)}
        for leaf in jax.tree.leaves(self._held):
            if id(leaf) not in kept:
                leaf.delete()
        self._held = self._source = None


def freed_after(collect: Callable[..., Any], program: Any) -> Callable[..., Any]:
    """``collect``, after which a sampler with a mesh of its own holds no weights."""
    if not isinstance(program, ReshardedSampler):
        return collect

    def collect_and_free(*args: Any, **kwargs: Any) -> Any:
        try:
            return collect(*args, **kwargs)
        finally:
            program.free()

    return collect_and_free


def free(program: Any) -> None:
    """Frees what a sampler holds of its own, if it has a mesh of its own."""
    if isinstance(program, ReshardedSampler):
        program.free()
