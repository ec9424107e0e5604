"""A layout of the sampler's own on the devices of training (``[sampling.mesh]``).

    sampler = ReshardedSampler(...)
    groups = sampler(key, params, ...)  # params as training divides them
    sampler.free()                      # before training continues

Training wants weights divided over many devices, and a batch over all; sampling reads all weights
for every token and sends activations, so that few devices for a copy of the weights are best. Once
a rollout one compiled program makes, from the weights as training divides them, those that the
sampler reads: in its dtype, joined and ordered for decoding, and divided over its own mesh. They
are freed before the next training step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jrl.collect.sources import drawing
from jrl.mesh import RULES, replicated, tree_shardings
from jrl.models.layers import rounded
from jrl.models.quant import axes_in_8_bits, in_8_bits
from jrl.setup.adapters import trained_network
from jrl.setup.compiler import compiler_options
from jrl.setup.run import Run, policy_network
from jrl.types import Array, Network, Params
from jrl.types.asks import DrawRequest


def weights_program(run: Run, network: Network, mesh: Mesh) -> Any:
    """The program that reshards, to be called or lowered under the sampler's mesh.

    Args:
      run: the run, whose policy is on ``run.mesh``.
      network: the policy as it samples on ``mesh``.
      mesh: the sampler's, over the same devices in the same order.

    Returns:
      ``jax.jit`` of ``network.prepare``: the policy's weights, as training divides them, to those
      that ``extend`` reads.

    Raises:
      UserError: a weight that the mesh does not divide.
    """
    model = run.model
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    axes, short = network.axes(), lambda params: params
    if model is not None and run.config.lora is None:  # rounded before they are sent
        short = partial(rounded, config=model)
        if (kind := run.config.sampling.formats["weights"]) != "same":
            short, axes = partial(in_8_bits, config=model, to=kind), axes_in_8_bits(model, axes)
    # A network of one's own does not say how its prepared weights are divided: as its weights are.
    into = None if model is not None else tree_shardings(mesh, network.axes(), shapes)
    gathered = model is not None and network.extras.gathered
    sent = jax.eval_shape(short, shapes)
    through = stopovers(run.mesh, mesh, axes, sent, gathered=gathered)

    def prepare(params: Params) -> Any:
        leaves, tree = jax.tree.flatten(short(params))
        pairs = zip(leaves, through, strict=True)
        leaves = [x if at is None else with_sharding_constraint(x, at) for x, at in pairs]
        params = jax.tree.unflatten(tree, leaves)
        return network.prepare(params if into is None else with_sharding_constraint(params, into))

    return jax.jit(prepare, compiler_options=compiler_options(mesh))


def stopovers(
    mesh: Mesh, sampler: Mesh, axes: Any, shapes: Any, *, gathered: bool
) -> list[NamedSharding | None]:
    """Between two meshes, the layout of each weight from which nothing but a gather is left.

    First the devices that share an axis of both meshes exchange parts (all-to-all), so that a
    device has nothing of what it will not need; then parts are gathered. From one layout to the
    other in one step XLA gathers every weight whole on every device, and cuts its part out.

    Args:
      mesh: of training.
      sampler: the sampler's, over the same devices in the same order.
      axes: logical axes of the policy's weights.
      shapes: their shapes, a tree like them.
      gathered: whether the sampler's weights are whole along ``fsdp``.

    Returns:
      For each leaf; None where there is no such layout.
    """
    joint, theirs, ours = _joint(mesh, sampler)
    leaves, tree = jax.tree.flatten(shapes)
    if joint is None:
        return [None] * len(leaves)
    names: Any = tree
    layouts: list[NamedSharding | None] = []
    for leaf, logical in zip(leaves, names.flatten_up_to(axes), strict=True):
        # Mesh axes that divide each dimension; what follows is about axes of the joint mesh, of
        # which each of these is a few.
        over = [() if name is None else RULES[name] for name in logical]
        source = [[j for axis in each for j in theirs[axis]] for each in over]
        divided = [[a for a in each if not (gathered and a == "fsdp")] for each in over]
        target = [[j for axis in each for j in ours[axis]] for each in divided]
        used = {j for each in target for j in each}
        between = [
            (*last, *(j for j in first if j not in used))
            for first, last in zip(source, target, strict=True)
        ]
        parts = [math.prod(joint.shape[j] for j in each) for each in between]
        # A dimension that does not divide is sent in one step, as XLA would do it.
        fits = all(size % n == 0 for size, n in zip(leaf.shape, parts, strict=True))
        layouts.append(NamedSharding(joint, PartitionSpec(*between)) if fits else None)
    return layouts


def _joint(
    mesh: Mesh, sampler: Mesh
) -> tuple[Mesh | None, dict[str, list[str]], dict[str, list[str]]]:
    """The mesh of which each axis of two others is some axes, and which; None if there is none."""

    def spans(grid: Mesh) -> dict[str, tuple[int, int]]:
        """For each axis the distance of neighbours along it, and that of its two ends and one."""
        sizes, spans_of = list(grid.shape.items()), {}
        for i, (axis, size) in enumerate(sizes):
            stride = math.prod(n for _, n in sizes[i + 1 :])
            spans_of[axis] = (stride, stride * size)
        return spans_of

    both = spans(mesh), spans(sampler)
    cuts = sorted({cut for each in both for span in each.values() for cut in span})
    pieces = list(itertools.pairwise(cuts))[::-1]  # the outermost first
    if any(high % low for low, high in pieces):
        return None, {}, {}
    axes = [f"part{i}" for i in range(len(pieces))]
    grid = mesh.devices.reshape([high // low for low, high in pieces])
    inside = [
        {
            axis: [n for n, (a, b) in zip(axes, pieces, strict=True) if low <= a and b <= high]
            for axis, (low, high) in each.items()
        }
        for each in both
    ]
    return Mesh(grid, axes, axis_types=(AxisType.Auto,) * len(axes)), inside[0], inside[1]


def drawn_from_prepared(network: Network) -> Network:
    """The network for programs that are given weights that ``weights_program`` has made."""
    return network._replace(prepare=_as_they_are)


def _as_they_are(weights: Any) -> Any:
    return weights


def network_on(run: Run, mesh: Mesh | None) -> Network:
    """The policy as it samples on the sampler's own mesh; None for that of training."""
    if mesh is None or run.model is None:
        return run.network
    return trained_network(run.config, run.model, policy_network(run.config, run.model, mesh))


class ReshardedSampler:
    """A sampler on a mesh of its own, called as one on the mesh of training is.

    Args:
      weights: from ``weights_program``.
      program: (key, weights, ...) or (request) -> what was drawn, compiled for ``mesh``; of a
        network from ``drawn_from_prepared``.
      mesh: the sampler's.
      back: where results go: the mesh of training.
    """

    def __init__(self, weights: Any, program: Callable[..., Any], mesh: Mesh, back: Mesh) -> None:
        self.weights, self.program, self.mesh = weights, program, mesh
        self._back = back
        self._source: Params = None
        self._resharded: Any = None

    def __call__(self, key: Array, params: Params, *args: Any) -> Any:
        """The program's groups with these weights, which are resharded if they are new."""
        with jax.set_mesh(self.mesh):
            weights = self._weights_of(params)
            result = self.program(jax.device_put(key, replicated(self.mesh)), weights, *args)
        return jax.device_put(result, replicated(self._back))

    def draw(self, request: DrawRequest, **more: Any) -> Any:
        """The same of a program that takes a request."""
        with jax.set_mesh(self.mesh):
            name = drawing(request)
            weights = {name: self._weights_of(request.weights[name])}
            key = jax.device_put(request.key, replicated(self.mesh))
            result = self.program(request.replace(key=key, weights=weights), **more)
        return jax.device_put(result, replicated(self._back))

    def _weights_of(self, params: Params) -> Any:
        """The resharded weights, under the sampler's mesh."""
        # By identity: the parameters of a step are new arrays, and comparing numbers would cost as
        # much as sending them.
        if self._resharded is None or self._source is not params:
            self.free()
            # The old copy is freed first: with both there would have to be room for the weights
            # twice.
            self._resharded, self._source = self.weights(params), params
        return self._resharded

    def free(self) -> None:
        """Frees the resharded weights, once the programs that read them are done."""
        sources = {id(leaf) for leaf in jax.tree.leaves(self._source)}
        for leaf in jax.tree.leaves(self._resharded):
            # What the sampler reads as it is, unchanged by resharding, is the policy's own array.
            if id(leaf) not in sources:
                leaf.delete()
        self._resharded = self._source = None
