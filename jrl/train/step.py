"""The training step, program 2 of an iteration: score, advantages, loss, gradient, update.

    state, metrics = train_step(state, batch)

``make_step`` returns a pure function; ``compile_step`` is the one place that jits it, with the
state donated and its shardings pinned, so that step 2 runs the executable of step 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jrl.config.features import check_features
from jrl.errors import UserError
from jrl.mesh import replicated
from jrl.methods.schedule import ONCE, AfterView, Schedule, run_due
from jrl.objectives.policy import (
    Pairs,
    combine_terms,
    compute_advantages,
    policy_loss,
    term_counts,
    update_state,
)
from jrl.sampling.params import SamplingParams
from jrl.setup.compiler import compiler_options
from jrl.setup.features import schedule_features
from jrl.train.batch_rows import in_parts, split, undivided
from jrl.train.router import ROUTER, RouterTraining, routed_tokens, router_loss, router_pairs
from jrl.train.score import policies_of, score, shares_prompts
from jrl.train.step_metrics import Metrics, batch_metrics, drift, summarise
from jrl.types import (
    NOTHING,
    Array,
    Batch,
    Network,
    Objective,
    Params,
    Stats,
    TrainState,
    ValueNetwork,
    stream,
)

TrainStep = Callable[[TrainState, Batch, SamplingParams], tuple[TrainState, Metrics]]


class Parts(NamedTuple):
    """Parts of a step; see ``make_step``."""

    network: Network
    objective: Objective
    optimizer: optax.GradientTransformation
    value: ValueNetwork | None
    networks: Mapping[str, Network]
    minibatches: int
    microbatches: int
    schedule: Schedule = ONCE
    router: RouterTraining = ROUTER
    skip: Callable[[Metrics], Array] | None = None


def make_step(
    *,
    network: Network,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    value: ValueNetwork | None = None,
    networks: Mapping[str, Network] = NOTHING,
    schedule: Schedule = ONCE,
    minibatches: int = 1,
    microbatches: int = 1,
    router: RouterTraining = ROUTER,
    skip: Callable[[Metrics], Array] | None = None,
    shown: int = 0,
) -> TrainStep:
    """A training step as a pure function of (state, batch, distribution).

    Args:
      network: the policy; of several, each is trained on the groups of its own player.
      objective: what to maximise.
      optimizer: any optax transformation; sees the gradient of the mean loss.
      value: the value network, when the objective needs values.
      networks: those of frozen policies that are not like the policy, by name.
      schedule: passes over the batch, and what changes the state beside the updates.
      minibatches: optimiser updates an epoch; prompts are dealt to them at random each epoch.
      microbatches: parts that a minibatch's gradient is summed over, to bound memory. The result
        does not depend on it: sums and counts are added up and divided once, in float32.
      router: losses on the routers of a policy with experts, and whether batches must say where
        the sampler sent each token; those that do send the policy's tokens there, too.
      skip: the step's metrics -> [] bool, whether to leave the whole update out, such as
        ``watch.skip_rule``; counted in ``skipped_steps``.
      shown: first groups whose advantages are returned too, for people: "advantages" [shown, G, T]
        float32; 0 for none.

    Returns:
      The step. It returns scalars by name, means over tokens, sequences or updates as named.
      An update whose gradient is not finite is left out and counted in ``skipped_updates``; then
      the objective's own state stays as it was, too.

    Raises:
      UserError: the objective needs values and there is no value network, or reads a policy of
        another vocabulary; when called, a batch that minibatches and microbatches do not divide, or
        one without the routing to replay.
    """
    derived, every = network.extras.derived, optimizer
    stack = network.extras.stack
    if derived is not None and stack is not None:
        network = derived.network
        every = optax.GradientTransformation(jax.vmap(optimizer.init), jax.vmap(optimizer.update))
    check_value(objective, value)
    if schedule.ahead is not None:
        check_value(schedule.ahead.objective, value)
    check_vocabularies(network, networks)
    features = schedule_features(schedule, objective, networks)
    check_features(features | ({} if network.extras.split is None else {"lora": "lora.rank"}))
    splits = minibatches, microbatches
    parts = Parts(network, objective, optimizer, value, networks, *splits, schedule, router, skip)

    passes, after = schedule.epochs * minibatches, schedule.after

    def step(
        state: TrainState, batch: Batch, sampling_params: SamplingParams
    ) -> tuple[TrainState, Metrics]:
        batch = _checked(parts, batch)
        # Of all policies of a stack: what runs before and after a step sees the whole state, the
        # step in between one policy at a time.
        whole = AfterView(every, network, state, batch)
        state = state if stack else run_due(after, "before", state, state.step, whole)
        # What stays fixed during the step (start log-probabilities, advantages) is computed once,
        # before the first update changes the policy.
        scored = complete(parts, state, batch, sampling_params)
        advantages, batch, objective_state, sums = compute_advantages(
            objective, scored, state.method
        )
        key = stream(state.key, "train", state.step)

        def update(carry: tuple[Params, Any], index: Array) -> tuple[tuple[Params, Any], Pairs]:
            rows = _minibatch_rows(key, index, batch.tokens.shape[0], minibatches)
            part = _take_rows(batch, rows), advantages[rows]
            at, noted = _ahead(parts, carry[0], state.frozen, scored, rows, sampling_params)
            grads, sums = _gradient(parts, at, state.frozen, part, objective_state, sampling_params)
            sums |= noted
            before = state.replace(params=carry[0], opt_state=carry[1])
            view = AfterView(optimizer, network, before, part[0])
            return _apply_gradient(parts, view, grads, sums, state.step * passes + index + 1)

        # A scan, so that epochs and minibatches share one copy of the update in the program.
        carry, updates = jax.lax.scan(update, (state.params, state.opt_state), jnp.arange(passes))
        state, metrics = _after_updates(parts, state, carry, objective_state, sums, updates, batch)
        metrics |= {"advantages": advantages[:shown]} if shown else {}
        return state if stack else run_due(after, "step", state, state.step, whole), metrics

    if stack is None:
        return step
    each = stack.step(step)

    def step_of_several(
        state: TrainState, batch: Batch, sampling_params: SamplingParams
    ) -> tuple[TrainState, Metrics]:
        view = AfterView(every, network, state, batch)
        state = run_due(after, "before", state, state.step, view)
        state, metrics = each(state, batch, sampling_params)
        return run_due(after, "step", state, state.step, view), metrics

    return step_of_several


def _after_updates(
    parts: Parts,
    state: TrainState,
    carry: tuple[Params, Any],
    objective_state: Any,
    sums: Pairs,
    updates: Pairs,
    batch: Batch,
) -> tuple[TrainState, Metrics]:
    """The state after the updates of a step, and the step's metrics.

    Args:
      parts: of the step.
      state: before the updates.
      carry: (parameters, the optimiser's state) after the updates.
      objective_state: as ``compute_advantages`` returned it.
      sums: (sum, count) by name, metrics of the advantages.
      updates: (sum [U], count [U]) by name, metrics of the U updates.
      batch: of the step.
    """
    if "logprob_diff" in updates:  # before the first update, when it is rounding alone
        updates["logprob_diff"] = jax.tree.map(lambda x: x[:1], updates["logprob_diff"])
    metrics = batch_metrics(batch) | summarise(sums) | summarise(updates)
    # A tracker must not swallow the NaN that an update was left out for.
    objective_state = update_state(parts.objective, objective_state, metrics)
    sound = metrics["skipped_updates"] == 0
    if parts.skip is not None:
        left_out = parts.skip(metrics)
        metrics["skipped_steps"] = left_out.astype(jnp.float32)
        carry = _choose(left_out, (state.params, state.opt_state), carry)
        sound &= ~left_out
    params, opt_state = carry
    objective_state = _choose(sound, objective_state, state.method)
    new = {"params": params, "opt_state": opt_state, "method": objective_state}
    return state.replace(step=state.step + 1, **new), metrics


def _checked(parts: Parts, batch: Batch) -> Batch:
    """The batch of a step, of the right shapes.

    Raises:
      UserError: minibatches and microbatches do not divide it, or the routing to replay is missing.
    """
    batch = batch.check()
    check_split(batch.tokens.shape[0], parts.minibatches, parts.microbatches)
    if parts.router.replay and batch.routing is None:
        raise UserError(
            "objective.router_replay = true: the batch does not say where its tokens were "
            "sent; sample with models.routing.recording(network, config)"
        )
    if parts.minibatches > 1:  # their prompts are dealt out here, and were packed before
        batch = batch.replace(packing=None)
    return batch


def complete(
    parts: Parts, state: TrainState, batch: Batch, sampling_params: SamplingParams
) -> Batch:
    """The batch with what stays the same during the step: tie-breakers, start statistics."""
    objective = parts.objective
    stats, ids = dict(batch.stats), dict(batch.ids)
    # By step and place in the batch, so that a resumed run breaks ties the same way.
    if "tie_breaker" not in ids:
        ids["tie_breaker"] = draw_tie_breakers(
            stream(state.key, "tie_breaker", state.step), *batch.tokens.shape[:2]
        )
    if "external" in objective.needs:
        stats.setdefault("external", jnp.zeros(batch.tokens.shape, jnp.float32))
    batch = batch.replace(stats=stats, ids=ids)
    # Start statistics have names of their own, since the same numbers of the moving parameters are
    # in the loss beside them.
    renamed = {
        "proximal_logprobs": "logprobs",
        "rollout_values": "values",
        "rollout_entropy": "entropy",
    }
    # The same statistics as in the loss, but of the parameters before the step's first update.
    names = {name: source for name, source in renamed.items() if name in objective.needs}
    frozen = {f"{name}_logprobs" for name in objective.frozen} & objective.needs
    statistics = tuple(s for s in objective.statistics if s.start)
    if not (names or frozen or statistics):
        return batch
    scoring = partial(
        score,
        policies_of(state.params, state.frozen, parts.network),
        sampling_params=sampling_params,
        network=parts.network,
        value=parts.value,
        want=frozenset(names.values()) | frozen,
        statistics=statistics,
        networks=parts.networks,
    )
    scored = in_parts(scoring, batch, parts.minibatches * parts.microbatches)
    start = {name: scored[source] for name, source in names.items()}
    start |= {name: scored[name] for name in {*frozen, *(s.name for s in statistics)}}
    return batch.replace(stats=stats | jax.lax.stop_gradient(start))


def live_statistics(
    parts: Parts, also: frozenset[str] = frozenset()
) -> Callable[[Params, Batch, SamplingParams], Stats]:
    """Function for the statistics that carry gradient, of a batch or a microbatch.

    Args:
      parts: of the step.
      also: further statistics for ``score`` to compute.

    Returns:
      (params, batch, distribution) -> statistics. The params are those being trained and those of
      the frozen policies, by name; the batch is as ``complete`` and the advantage left it.
    """
    return partial(score, **_live(parts, also))


def _live(parts: Parts, also: frozenset[str]) -> dict[str, Any]:
    """Arguments of ``score`` for the statistics that carry gradient."""
    objective = parts.objective
    return {
        "network": parts.network,
        "value": parts.value,
        "want": frozenset({"logprobs", "entropy", "values"} & objective.needs | {"logprobs"})
        | also,
        "statistics": tuple(s for s in objective.statistics if not s.start),
        "networks": parts.networks,
    }


def draw_tie_breakers(key: Array, n: int, g: int) -> Array:
    """[N, G] int32, at least 0: a number of each member that depends on its place alone."""

    def tie_breaker(row: Array, member: Array) -> Array:
        member_key = jax.random.fold_in(jax.random.fold_in(key, row), member)
        return (jax.random.bits(member_key) >> 1).astype(jnp.int32)

    return jax.vmap(jax.vmap(tie_breaker, (None, 0)), (0, None))(jnp.arange(n), jnp.arange(g))


def _gradient(
    parts: Parts,
    params: Params,
    frozen: Params,
    part: tuple[Batch, Array],
    objective_state: Any,
    sampling_params: SamplingParams,
) -> tuple[Params, Pairs]:
    """The gradient of the mean loss over a minibatch, and its metrics as (sum, count) by name."""
    minibatch, advantages = part
    objective, microbatches = parts.objective, parts.microbatches
    # Counts of the whole minibatch, so that each microbatch adds its share of the one mean: a mean
    # of microbatch means would weigh tokens of short microbatches more.
    counts, also = term_counts(objective, minibatch), frozenset({"router"})
    live, shared = live_statistics(parts, also), shares_prompts(**_live(parts, also))

    def loss(params: Params, rows: tuple[Batch, Array]) -> tuple[Array, tuple[Pairs, Stats]]:
        batch, advantages = rows
        scores = live(policies_of(params, frozen, parts.network), batch, sampling_params)
        router = {name: scores.pop(name) for name in [*scores] if name.startswith("router_")}
        stats = batch.stats | scores
        terms, sums = policy_loss(objective, stats, batch, advantages, objective_state)
        terms = {name: (total, counts[name]) for name, (total, _) in terms.items()}
        mean = combine_terms(objective, terms, objective_state)
        if router:
            # By the tokens of the minibatch, for the same reason as the counts above.
            tokens = routed_tokens(minibatch, shared=shared)
            more, router = router_loss(parts.router, router, tokens)
            mean += more
        share = {"loss": (mean, jnp.float32(1 / microbatches))}
        return mean, (drift(stats, batch) | sums | share, router)

    grad = jax.grad(loss, has_aux=True)
    if microbatches == 1:
        grads, (sums, router) = grad(params, (undivided(minibatch), advantages))
        return grads, sums | (router_pairs(router) if router else {})

    def add(total: Any, rows: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, grad(params, rows)), None

    # Strided like ``batch_rows.split``, so that rows and their advantages stay together.
    shape = (-1, microbatches, *advantages.shape[1:])
    split_parts = split(minibatch, microbatches), jnp.moveaxis(advantages.reshape(shape), 1, 0)
    shapes = jax.eval_shape(grad, params, jax.tree.map(lambda x: x[0], split_parts))
    # float32 whatever the parameters are: bfloat16 sums lose small contributions.
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
    total, _ = jax.lax.scan(add, zeros, split_parts)
    grads, (sums, router) = jax.tree.map(lambda x, like: x.astype(like.dtype), total, shapes)
    return grads, sums | (router_pairs(router) if router else {})


def _ahead(
    parts: Parts,
    params: Params,
    frozen: Params,
    batch: Batch,
    rows: Array,
    sampling_params: SamplingParams,
) -> tuple[Params, Pairs]:
    """The parameters at which an update's gradient is taken, and its metric."""
    if (ahead := parts.schedule.ahead) is None:
        return params, {}
    state = ahead.objective.init()
    advantages, batch, _, _ = compute_advantages(ahead.objective, batch, state)
    parts = parts._replace(objective=ahead.objective, router=ROUTER)
    part = _take_rows(batch, rows), advantages[rows]
    grads, sums = _gradient(parts, params, frozen, part, state, sampling_params)
    moved = jax.tree.map(lambda x, g: (x + ahead.size * g).astype(x.dtype), params, grads)
    return moved, {"ahead_loss": sums["loss"]}


def _apply_gradient(
    parts: Parts, view: AfterView, grads: Params, sums: Pairs, done: Array
) -> tuple[tuple[Params, Any], Pairs]:
    """One optimiser update, left out when the gradient is not finite; ``done`` counts it."""
    params, opt_state = view.before.params, view.before.opt_state
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm)
    changes, moments = parts.optimizer.update(grads, opt_state, params)
    state = view.before.replace(params=optax.apply_updates(params, changes), opt_state=moments)
    state = run_due(parts.schedule.after, "update", state, done, view)
    # Selected, not branched: the step stays one program, and no host has to look at the norm.
    new, old = (state.params, state.opt_state), (params, opt_state)
    updated = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
    return updated, sums | {
        "grad_norm": (norm, jnp.float32(1)),
        "skipped_updates": ((~finite).astype(jnp.float32), jnp.float32(0)),
    }


def _choose(first: Array, one: Any, other: Any) -> Any:
    """A whole tree or the other."""
    return jax.tree.map(lambda a, b: jnp.where(first, a, b), one, other)


def compile_step(step: TrainStep, shardings: TrainState, mesh: Mesh) -> TrainStep:
    """The step as one executable: state donated, its shardings pinned on both sides.

    Args:
      step: from ``make_step``.
      shardings: from ``state.state_shardings``.
      mesh: the mesh of the run.

    Returns:
      A function of (state, batch, distribution); call it under ``jax.set_mesh(mesh)``.
    """
    return jax.jit(
        step,
        in_shardings=(shardings, None, replicated(mesh)),
        out_shardings=(shardings, replicated(mesh)),
        donate_argnums=0,
        compiler_options=compiler_options(mesh, training=True),
    )


def check_value(objective: Objective, value: ValueNetwork | None) -> None:
    """Raises UserError when an objective needs values and there is no value network."""
    if value is None and objective.needs & {"values", "rollout_values"}:
        raise UserError(
            "value = None: the objective needs a value network; pass value_head(network) or "
            "value_network(network)"
        )


def check_vocabularies(network: Network, networks: Mapping[str, Network]) -> None:
    """Raises UserError when a frozen policy does not share the policy's vocabulary."""
    for name, other in networks.items():
        if other.vocab_size != network.vocab_size:
            raise UserError(
                f"the frozen policy {name!r} has a vocabulary of {other.vocab_size} and the policy "
                f"one of {network.vocab_size}; choose one with the policy's tokenizer"
            )


def check_split(prompts: int, minibatches: int, microbatches: int) -> None:
    """Raises UserError when a batch of ``prompts`` does not divide as asked."""
    if min(minibatches, microbatches) < 1 or prompts % (minibatches * microbatches):
        raise UserError(
            f"minibatches = {minibatches} times microbatches = {microbatches} does not divide a "
            f"batch of {prompts} prompts; choose divisors of it"
        )


def _minibatch_rows(key: Array, index: Array, n: int, minibatches: int) -> Array:
    """[n / minibatches] int32, the prompts of one update; each epoch shuffles all n of them."""
    if minibatches == 1:
        return jnp.arange(n)
    epoch, part = index // minibatches, index % minibatches
    order = jax.random.permutation(jax.random.fold_in(key, epoch), n)
    return jax.lax.dynamic_slice_in_dim(order, part * (n // minibatches), n // minibatches)


def _take_rows(batch: Batch, rows: Array) -> Batch:
    if rows.shape[0] == batch.tokens.shape[0]:
        return batch
    selected = jax.tree.map(lambda x: x[rows], batch.replace(reward_weights=None))
    return selected.replace(reward_weights=batch.reward_weights)
