"""All five hops as one program, for tasks and environments that are computed on the device.

    run = make_run(...)                       # run(key, hyperparameters) -> (state, curves)
    state, curves = jax.jit(run)(key, {"learning_rate": 1e-3})
    states, curves = jax.jit(jax.vmap(run, (0, None)))(keys, {"learning_rate": 1e-3})

A whole run is a ``lax.scan`` over iterations, so ``jax.vmap`` trains many seeds or
hyperparameters at once. Where one run keeps the machine busy, as on a CPU, ``jax.lax.map`` over the
keys takes no longer a run than one alone, and compiles sooner (``benchmarks/runs.md``). ``fit`` on
the host calls the same functions and gets the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jrl.collect.device_episodes import on_device, solution_batch
from jrl.collect.edit import edit_counts, edited, learned, mean_sizes, outcome_of
from jrl.collect.groups import PlacedGroups, batch_of, counted, widened
from jrl.collect.plan import (
    CollectState,
    Setting,
    StepKey,
    new_collected,
    sample_step,
    traced_rounds,
)
from jrl.collect.sources import Groups, simple_request
from jrl.config.features import check_features
from jrl.data.tasks import Task
from jrl.episodes import Env
from jrl.methods import get_method
from jrl.methods.base import Method
from jrl.methods.curriculum import Table
from jrl.rewards.combine import Combined
from jrl.rewards.combine import combined as combined_points
from jrl.sampling.params import SamplingParams, make_sampling_params
from jrl.sampling.tree import check_branching
from jrl.setup.adapters import drawn_trees, policy_of
from jrl.setup.features import method_features
from jrl.system.compile_reports import report_traced_run
from jrl.train.hyperparameters import Hyperparameters, choose_hyperparameters, method_with
from jrl.train.state import init_state
from jrl.train.step import TrainStep, check_value, make_step
from jrl.train.step_metrics import Metrics, with_slot_use
from jrl.types import NOTHING, Array, Network, Params, TrainState, ValueNetwork, stream
from jrl.types.asks import Asks, DrawRequest


class Iteration(NamedTuple):
    """One iteration, prompt to gradient, as pure functions of the two records that a run carries.

    Attributes:
      train: the training step; with a curriculum it returns the advantages of all groups.
      setting: the method and the sizes of a step.
      network: the policy as completions are drawn from it.
      rollout: (request, sampling_params=) -> groups.
    """

    train: TrainStep
    setting: Setting
    network: Network
    rollout: Callable[..., Groups]

    def begin(self, state: TrainState) -> CollectState:
        """Initial state of sampling, from the training state at step 0."""
        setting, shapes = self.setting, None
        if edits := setting.method.edits:  # whose stores have the shapes of a step's groups
            bare = setting._replace(method=setting.method._replace(edits=()))
            plain, params = self._replace(setting=bare), make_sampling_params()
            collected = plain.begin(state)
            shapes = jax.eval_shape(lambda s: plain.sample(s, collected, params)[0], state)
            extra = sum(edit.extra(setting.prompts) for edit in edits)
            m, size = shapes.use.shape
            shapes = jax.eval_shape(lambda g: widened(g, m + extra, size), shapes)
        collected = new_collected(setting, shapes)
        return collected.replace(cursor=jnp.asarray(collected.cursor, jnp.int32))

    def sample(
        self, state: TrainState, collected: CollectState, sampling_params: SamplingParams
    ) -> tuple[PlacedGroups, CollectState, dict[str, Any]]:
        """The groups of a step before the edits, what drawing carries, and counts."""
        policies = self.setting.method.plan.policies
        trees = drawn_trees(state, self.network, policies)
        versions = {"policy": state.step}
        versions |= {policy.name: policy.version(state.step) for policy in policies}

        def draw(asks: Asks) -> Groups:
            request = DrawRequest(state.key, trees, versions, state.step, asks)
            return self.rollout(request, sampling_params=sampling_params)

        now = StepKey(state.key, state.step)
        return sample_step(draw, collected, now, self.setting, traced_rounds)

    def step(
        self, state: TrainState, collected: CollectState, sampling_params: SamplingParams
    ) -> tuple[TrainState, CollectState, Metrics]:
        """(state, what drawing carries, metrics) after one iteration."""
        setting, method, done = self.setting, self.setting.method, state.step
        groups, collected, counts = self.sample(state, collected, sampling_params)
        trained, more = groups, {}
        if method.edits or method.plan.next is not None:
            now = StepKey(state.key, done)
            trained, collected, share = edited(groups, collected, now, setting)
            more = edit_counts(groups, trained, share, setting)
        batch = batch_of(trained, sampled=method.draw.samples)
        state, metrics = self.train(state, batch, sampling_params)
        if (curriculum := setting.method.curriculum) is not None:
            assert setting.table is not None
            sizes = mean_sizes(metrics.pop("advantages"), batch.mask)
            outcome = outcome_of(groups, trained, sizes, done, setting.table)
            collected = learned(curriculum, collected, outcome)
        return state, collected, metrics | with_slot_use(counts) | more


def make_iteration(
    step: TrainStep,
    *,
    method: Method,
    task: Task | Env,
    network: Network,
    weights: Mapping[str, float],
    combined: Sequence[Combined] = (),
    prompts: int,
    group: int,
    slots: int = 0,
    chunk: int = 4,
    sampler: Network | None = None,
    accuracy_column: int | None = None,
) -> Iteration:
    """One iteration, prompt to gradient, as pure functions.

    Args:
      step: from ``step.make_step``; with a curriculum its ``shown`` is all groups.
      method: its curriculum, plan and edits are used here.
      task: the procedural task, or the environment.
      network: the policy.
      weights: reward part ("verify", "partial"; "reward", "success" of an environment) -> weight.
      combined: parts made of others, which ``weights`` names, too.
      prompts: N.
      group: G, members drawn from the distribution.
      slots: completions decoded at a time; 0 takes all.
      chunk: decode steps between slot refills.
      sampler: the policy as completions are drawn from it; None for ``network``.
      accuracy_column: of the reward part that defines success; None for the score.

    Raises:
      UserError: the method has work for a host.
    """
    features = method_features(method) | {"compiled": "train.mode = 'compiled'"}
    device = on_device(task)
    check_features(features | device.features(task))
    if (tree := method.draw.tree) is not None:
        tree = check_branching(tree, group, slots)
        method = method._replace(plan=method.plan._replace(tree=tree))
    curriculum = method.curriculum
    setting = Setting(
        method=method,
        prompts=prompts,
        group=group,
        weights=jnp.array(list(weights.values()), jnp.float32),
        accuracy_column=accuracy_column,
        tools=device.tools(task),
        table=None if curriculum is None else pool_table(curriculum.pool),
    )
    drawing = network if sampler is None else sampler
    combined_names = {part.name for part in combined}
    paid = {name: weight for name, weight in weights.items() if name not in combined_names}
    how: dict[str, Any] = {"task": task, "parts": paid, "network": drawing}
    rollout = partial(device.rollout, slots=slots, chunk=chunk, **how)
    if combined:
        rollout = partial(_with_combined, rollout, tuple(paid), tuple(combined), tuple(weights))
    return Iteration(step, setting, drawing, rollout)


def _with_combined(
    rollout: Callable[..., Groups],
    paid: tuple[str, ...],
    combined: tuple[Combined, ...],
    names: tuple[str, ...],
    request: DrawRequest,
    **how: Any,
) -> Groups:
    """The groups of a rollout with all reward parts ``names``, of which it gives those ``paid``."""
    groups = rollout(request, **how)
    points = dict(zip(paid, jnp.moveaxis(groups.rewards, -1, 0), strict=True))
    points = combined_points(combined, points, counted(groups.rollout), (), request.step)
    rewards = jnp.stack([points[name] for name in names], axis=-1)
    # A task has an opinion of everything: a NaN is a fault, and no combination may hide it.
    broken = jnp.isnan(groups.rewards).any(axis=-1, keepdims=True)
    return groups._replace(rewards=jnp.where(broken, jnp.nan, rewards))


def shown_in_compiled(method: Method, prompts: int) -> int:
    """Groups whose advantages a compiled run's step returns: all, for a curriculum, or none."""
    if method.curriculum is None:
        return 0
    return method.batch_groups(prompts)


def pool_table(rows: int) -> Table:
    """The problems of a procedural task that a curriculum chooses from."""
    return Table(rows, 1, jnp.zeros(rows, jnp.int32))


def iterate(
    iteration: Iteration,
    state: TrainState,
    collected: CollectState,
    sampling_params: SamplingParams,
    steps: int,
) -> tuple[TrainState, CollectState, Metrics]:
    """``steps`` iterations as one scan; metrics come back with a leading [steps]."""

    def one(carry: tuple[TrainState, CollectState], _: None) -> tuple[Any, Metrics]:
        state, collected, metrics = iteration.step(*carry, sampling_params)
        return (state, collected), metrics

    (state, collected), metrics = jax.lax.scan(one, (state, collected), length=steps)
    return state, collected, metrics


def warm_start(
    key: Array,
    params: Params,
    *,
    task: Task | Env,
    network: Network,
    steps: int,
    batch: int,
    learning_rate: float,
) -> tuple[Params, Array]:
    """Supervised training on a task's own solutions, before RL.

    Args:
      key: the run's root key.
      params: the policy's; of those of a network with a ``split`` the base is trained, and several
        policies begin with what the first of them learns.
      task: the procedural task, or an environment; its training split is used.
      network: the policy.
      steps: optimiser updates.
      batch: solutions an update.
      learning_rate: of Adam.

    Returns:
      (params, losses [steps] float32, nats a token).
    """
    if (derived := network.extras.derived) is not None:
        how: dict[str, Any] = {"task": task, "steps": steps, "batch": batch}
        how |= {"network": derived.network, "learning_rate": learning_rate}
        if derived.stack is not None:
            whole, losses = warm_start(key, derived.plain(params, 0), **how)
            return derived.start(key, whole), losses
        if derived.split is not None:
            trained, base = derived.split.split(params)
            whole, losses = warm_start(key, derived.split.thaw(base), **how)
            return derived.split.join(trained, derived.split.freeze(whole)), losses
    objective = get_method("sft").objective
    optimizer = optax.adam(learning_rate)
    step = make_step(network=network, objective=objective, optimizer=optimizer)
    state = init_state(
        stream(key, "warmup", 0), params, network=network, objective=objective, optimizer=optimizer
    )
    sampling_params = make_sampling_params()

    # Examples from index 1 on: 0 is the state's own key.
    def update(state: TrainState, index: Array) -> tuple[TrainState, Array]:
        examples = solution_batch(stream(key, "warmup", index), task=task, count=batch)
        state, metrics = step(state, examples, sampling_params)
        return state, metrics["loss"]

    state, losses = jax.lax.scan(update, state, jnp.arange(1, steps + 1))
    return state.params["policy"], losses


def held_out(
    key: Array,
    params: Params,
    sampling_params: SamplingParams,
    *,
    task: Task | Env,
    network: Network,
    problems: int,
    samples: int = 1,
) -> Groups:
    """Completions of held-out problems: the same problems whenever asked with the same key.

    Returns:
      Groups whose first reward part is 1 where a completion is right: "verify", or "success" in
      an environment, with "reward" after it.
    """
    tickets = jnp.arange(problems, dtype=jnp.int32)
    policy = {"policy": params}
    request = simple_request(key, policy, jnp.int32(0), tickets, samples, split="eval")
    device = on_device(task)
    return device.rollout(
        request,
        sampling_params=sampling_params,
        task=task,
        parts=device.eval_parts,
        network=network,
    )


def make_run(
    *,
    method: Method | Callable[..., Method],
    task: Task | Env,
    network: Network,
    optimizer: Callable[..., optax.GradientTransformation],
    steps: int,
    prompts: int,
    group: int,
    weights: Mapping[str, float],
    value: ValueNetwork | None = None,
    frozen: Mapping[str, Params] = NOTHING,
    networks: Mapping[str, Network] = NOTHING,
    splits: Mapping[str, Any] | None = None,
    warmup: Mapping[str, Any] | None = None,
    eval_problems: int = 512,
) -> Callable[[Array, Hyperparameters], tuple[TrainState, Metrics]]:
    """A whole training run as one pure function of (key, hyperparameters).

    Args:
      method: what to train with; or a function of its coefficients, such as
        ``find_method("grpo")``, which may be traced.
      task: the procedural task, or the environment.
      network: the policy, whose weights start at random.
      optimizer: (learning rate, further numbers by name) -> optax transformation, such as
        ``optax.adam`` or what ``make_optimizer`` returns; the numbers may be traced.
      steps: iterations.
      prompts: N, per iteration.
      group: G.
      weights: reward part -> weight.
      value: the value network, for methods that need one.
      frozen: policies that the method reads and does not train, by name, such as "teacher".
      networks: those of them that are not like the policy.
      splits: minibatches and microbatches of ``make_step``.
      warmup: steps, batch and learning_rate of ``warm_start``; None for none.
      eval_problems: held-out problems of the two evaluations.

    Returns:
      run(key, hyperparameters) -> (final state, curves). Hyperparameters are "learning_rate" and,
      when wanted, "temperature" (1 otherwise), "objective.NAME" for coefficients of a method that
      is a function, and "optimizer.NAME"; ``jax.vmap`` sweeps any of them. Curves are every metric
      of the iterations, [steps], with accuracy_before and accuracy_after, [].
    """
    if isinstance(method, Method):
        check_value(method.objective, value)
    accuracy = partial(
        held_out,
        sampling_params=make_sampling_params(0.0),
        task=task,
        network=network,
        problems=eval_problems,
    )

    def begin(key: Array, used: Method, rate: optax.GradientTransformation) -> TrainState:
        state = init_state(
            key,
            network=network,
            objective=used.objective,
            optimizer=rate,
            value=value,
            frozen=frozen,
            schedule=used.schedule,
        )
        if warmup is None:
            return state
        policy = policy_of(state, network)
        policy, _ = warm_start(state.key, policy, task=task, network=network, **warmup)
        return with_policy(state, policy, rate, network=network, unchanged_policies=frozen)

    def one_step(used: Method, rate: optax.GradientTransformation) -> TrainStep:
        return make_step(
            network=network,
            objective=used.objective,
            optimizer=rate,
            value=value,
            networks=networks,
            schedule=used.schedule,
            shown=shown_in_compiled(used, prompts),
            **(splits or {}),
        )

    def run(key: Array, hyperparameters: Hyperparameters) -> tuple[TrainState, Metrics]:
        chosen = choose_hyperparameters(hyperparameters)
        used = method_with(method, chosen.objective)
        rate = optimizer(chosen.learning_rate, **chosen.optimizer)
        state = begin(key, used, rate)
        before = accuracy(state.key, policy_of(state, network)).rewards[..., 0].mean()
        iteration = make_iteration(
            one_step(used, rate),
            method=used,
            task=task,
            network=network,
            weights=weights,
            prompts=prompts,
            group=group,
        )
        collected, params = iteration.begin(state), chosen.sampling_params
        state, _, curves = iterate(iteration, state, collected, params, steps)
        after = accuracy(state.key, policy_of(state, network)).rewards[..., 0].mean()
        report_traced_run(key, hyperparameters)
        return state, curves | {"accuracy_before": before, "accuracy_after": after}

    return run


def with_policy(
    state: TrainState,
    policy: Params,
    optimizer: optax.GradientTransformation,
    *,
    network: Network | None = None,
    unchanged_policies: Collection[str] = (),
) -> TrainState:
    """The state with another policy from step 0: fresh moments, and so are copies of it.

    Args:
      state: at step 0.
      policy: its new tree.
      optimizer: that of the state.
      network: the policy; may be left out where it is one, and the whole of it is trained.
      unchanged_policies: names of frozen policies that keep their own weights.
    """
    frozen = state.frozen
    if network is not None and network.extras.split is not None:
        policy, base = network.extras.split.split(policy)
        frozen = frozen | {"base": base}
    params, init = state.params | {"policy": policy}, optimizer.init
    if network is not None and network.extras.stack is not None:
        init = jax.vmap(init)
    for name in frozen.keys() - {"base", *unchanged_policies}:
        frozen = frozen | {name: jax.tree.map(jnp.copy, policy)}
    return state.replace(params=params, opt_state=init(params), frozen=frozen)
