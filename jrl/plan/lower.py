"""A run without data, tokenizer or weights, and its two programs lowered for a mesh."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.collect.members import is_plain, members_of
from jrl.collect.resharding import ReshardedSampler
from jrl.collect.sources import simple_request
from jrl.config import Config
from jrl.errors import UserError
from jrl.mesh import placed_shapes
from jrl.methods.plan import dry_view
from jrl.setup.frozen import run_shape
from jrl.setup.kinds import kind_of
from jrl.setup.run import Run
from jrl.train import build, programs
from jrl.train.shapes import abstract_batch
from jrl.types.asks import Asks, new_ask


class _Ids(NamedTuple):
    """A stand-in for a tokenizer: one token ends completions."""

    stop_ids: tuple[int, ...] = (0,)


def abstract_run(config: Config, mesh: jax.sharding.Mesh) -> Run:
    """A run whose two programs can be lowered, without data, tokenizer or weights.

    The sizes of the model come from ``model.config``, or from the checkpoint's config.json; the
    prompts' width is the task's, or ``data.max_prompt_tokens``.

    Raises:
      UserError: sizes are missing, or something does not divide over the mesh.
    """
    kind = kind_of(config)
    if config.frozen:
        raise UserError(
            f"frozen policies of other sizes ({', '.join(config.frozen)}) are not supported in a"
            " plan; remove them"
        )
    return build.bare_run(
        config,
        mesh,
        kind=kind,
        model=run_shape(config, kind.task, runs=False),
        tokenizer=_Ids(),
        width=kind.prompt_tokens,
    )


# ---------------------------------------------------------------- the two programs, lowered


def lower_resharding(run: Run) -> Any:
    """The lowered program that reshards weights for the sampler's mesh; None without one."""
    program = programs.train_sampler(run)
    if not isinstance(program, ReshardedSampler):
        return None
    policy = programs.policy_layout(run)  # made on this machine, not on chips that are absent
    with jax.set_mesh(program.mesh):
        return program.weights.lower(policy)


def lower_sampler(run: Run, weights: Any = None) -> Any:
    """The sampler, lowered for the mesh that it samples on; None where the method samples nothing.

    Args:
      run: the run.
      weights: with a mesh of the sampler's own, the shapes of what the compiled resharding makes,
        with their shardings.
    """
    program = programs.train_sampler(run)
    if program is None:
        return None
    key, policy = jax.eval_shape(lambda: jax.random.key(0)), programs.policy_layout(run)
    sampling_params = jax.eval_shape(lambda: run.sampling_params)
    if isinstance(program, ReshardedSampler):
        run, policy, program = run._replace(mesh=program.mesh), weights, program.program
    n = run.config.prompts_at_once
    step, ids = _int(), _int(n)
    if run.config.data.has_solutions:
        request = simple_request(key, {"policy": policy}, step, ids)
        request = request.replace(asks=first_asks(run, n))
        return _lower(run, program, request, sampling_params=sampling_params)
    prompts, lengths = _int(n, run.width), _int(n)
    args = key, policy, prompts, lengths, sampling_params, step, ids
    plain = [ask for ask in first_asks(run, n) if is_plain(ask)]
    # A tree has its members from its program alone.
    trees = run.method.draw.tree is not None
    more = () if trees else (members_of(plain, run.config.sampling.temperature),)
    return _lower(run, program, *args, *more)


def first_asks(run: Run, n: int) -> Asks:
    """The first asks of a step with ``n`` prompts."""
    plan, zeros = run.method.plan, np.zeros(n, np.int32)
    ask = new_ask(zeros, zeros, run.config.sampling.group, tree=plan.tree)
    return plan.first((ask,), dry_view())


def lower_step(run: Run) -> Any:
    """The training step, lowered for the run's mesh."""
    state, shardings = programs.abstract_state(run)
    sampling_params = jax.eval_shape(lambda: run.sampling_params)
    program = programs.train_program(run, shardings)
    return _lower(run, program, state, abstract_batch(run), sampling_params)


def _lower(run: Run, program: Any, *args: Any, **kwargs: Any) -> Any:
    with jax.set_mesh(run.mesh):
        return program.lower(*args, **kwargs)


def outputs(lowered: Any, compiled: Any) -> Any:
    """The shapes of what a program makes, with their shardings."""
    return placed_shapes(lowered.out_info, compiled.output_shardings)


def _int(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
