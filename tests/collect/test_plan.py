"""The groups of a step: the same on the host, in a compiled run and under vmap over seeds."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.collect.edit import edited, learned, mean_sizes, outcome_of
from jrl.collect.groups import batch_of
from jrl.collect.members import numbers, widths
from jrl.collect.plan import (
    Setting,
    StepKey,
    host_rounds,
    new_collected,
    packed,
    sample_step,
    traced_rounds,
    unpacked,
)
from jrl.collect.sources import Groups
from jrl.methods.base import Method
from jrl.methods.curriculum import Curriculum, Selection, Table, put_rows, top_rows
from jrl.methods.edit import Edit, edit_of, fill, fill_groups, of_parts, only, rank
from jrl.methods.plan import Plan, also, more, new
from jrl.methods.stores import group_store, member_store
from jrl.types import Rollout, StopReason, stream
from jrl.types.asks import ASIDE, BASELINE

N, G, T, ROWS = 3, 2, 4, 12
TABLE = Table(ROWS, 2, jnp.arange(ROWS) % 2)
KEY = jax.random.key(3)


def draw_toy(asks, *, key, step):
    """Members whose one reward is 1 with a probability that their problem has."""
    ask, number = asks[0], jnp.asarray(numbers(asks))
    a, w = number.shape
    root = stream(key, "sample", step)

    def member(ticket, row, number):
        key = jax.random.fold_in(jax.random.fold_in(root, ticket), number)
        return jax.random.uniform(key) < (row + 1) / (ROWS + 1), jax.random.bits(key) >> 8

    right, bits = jax.vmap(jax.vmap(member, (None, None, 0)))(
        jnp.asarray(ask.ticket), jnp.asarray(ask.row), number
    )
    is_live = number >= 0
    tokens = (bits[:, :, None] >> jnp.arange(T)[None, None]).astype(jnp.int32) % 7
    mask = jnp.broadcast_to(is_live[:, :, None], tokens.shape)
    rollout = Rollout(
        prompt_tokens=jnp.broadcast_to(jnp.asarray(ask.row)[:, None], (a, 2)).astype(jnp.int32),
        prompt_lengths=jnp.full(a, 2, jnp.int32),
        tokens=jnp.where(mask, tokens, 0),
        lengths=jnp.where(is_live, T, 0).astype(jnp.int32),
        mask=mask,
        sampler_logprobs=jnp.where(mask, -0.5, 0.0),
        versions=jnp.where(mask, step, -1).astype(jnp.int32),
        stop=jnp.where(is_live, StopReason.STOP_TOKEN, StopReason.ABSENT).astype(jnp.int32),
        baseline=jnp.zeros((a, w), bool),
    )
    rewards = jnp.where(is_live, right, 0.0)[:, :, None].astype(jnp.float32)
    counts = {"slot_steps": is_live.sum()}
    return Groups(rollout, rewards, None, counts, {"prompt": jnp.asarray(ask.row, jnp.int32)})


def thompson():
    def choose(state, query):
        rates = jax.random.beta(query.key, state["a"], state["b"])
        rows = top_rows(-jnp.abs(rates - 0.5), query)
        return Selection(rows, prior={"drawn": rates[rows]}), state

    def update(state, o):
        right = o.rate * o.size
        return {
            "a": put_rows(state["a"], o, state["a"][o.row] + right),
            "b": put_rows(state["b"], o, state["b"][o.row] + o.size - right),
        }

    init = lambda table: {n: jnp.ones(table.rows) for n in ("a", "b")}  # noqa: E731
    return Curriculum(init, choose, update)


def mixed(groups):
    return (groups.rate() > 0) & (groups.rate() < 1)


def refill(groups, view):
    missing = view.prompts - (mixed(groups) & groups.live()).sum()
    return (new(missing, view.prompts, view.group),)


def extra(groups, view):
    return (more(groups, jnp.where(groups.rate() < 0.5, 2, 0), 2),)


def both(groups, view):
    return (*refill(groups, view), *extra(groups, view))


def fifo(capacity=8, count=2):
    """Right members wait in a store; the oldest take the places of wrong ones."""

    def apply(store, groups, view):
        right = groups.members() & (groups.success() > 0.5)
        store, rows, hits = store.pop(count)
        first = jnp.arange(groups.use.shape[0]) == 0
        rows = {n: x[None] for n, x in rows.items()}
        wrong = groups.members() & ~right & first[:, None]
        many = {n: jnp.repeat(x, len(first), axis=0) for n, x in rows.items()}
        flags = first[:, None] & hits[None]
        return fill(groups, wrong, many, flags), store.put(groups, right)

    return Edit(member_store(capacity), apply)


def replayed_groups():
    def apply(store, groups, view):
        rows, hits = store.sample(2, view.key)
        live = groups.live() & ~view.extra
        return fill_groups(groups, view.extra, rows, hits), store.put(groups, live)

    return Edit(group_store(2), apply, extra=lambda prompts: 2)


def by_prompt():
    def apply(store, groups, view):
        right = groups.members() & (groups.success() > 0.5)
        rows, hits = store.of_prompt(groups, 1, view.group_keys)
        failed = ~right.any(axis=1, keepdims=True) & (jnp.arange(groups.use.shape[1]) == 0)[None]
        return fill(groups, failed, rows, hits), store.put(groups, right)

    return Edit(member_store(16, 2, 6), apply)


best_and_worst = edit_of(
    lambda groups, view: only(groups, rank(groups.score(), groups.members()) != 1)
)
only_mixed = edit_of(lambda groups, view: only(groups, mixed(groups)[:, None]))


def shaped(groups, view):
    """Points by member, group, batch and step: more where others fail, none where none does."""
    is_sampled = groups.drawn()
    share = jnp.where(is_sampled, groups.rewards[:, :, 0], 0).sum() / is_sampled.sum()
    points = groups.rewards[:, :, 0] * (2 - share) - 0.125 * view.step
    points = jnp.where(groups.rate()[:, None] < 1, points, 0)
    return groups.replace(rewards=points[:, :, None].astype(jnp.float32))


METHODS = {
    "plain": Method(None),
    "thompson": Method(None, curriculum=thompson()),
    "refill": Method(
        None,
        curriculum=thompson(),
        plan=Plan(next=refill, rounds=2, prompts=lambda n: 2 * n),
        edits=(only_mixed,),
    ),
    "members": Method(None, plan=Plan(next=extra, rounds=2, members=lambda g: 4)),
    "all": Method(
        None,
        curriculum=thompson(),
        plan=Plan(
            lambda asks, view: (*asks, also(asks, 1, use=BASELINE), also(asks, 1, use=ASIDE)),
            both,
            rounds=2,
            members=lambda g: 2,
            prompts=lambda n: n,
        ),
        edits=(only_mixed, fifo()),
    ),
    "best_and_worst": Method(None, edits=(best_and_worst,)),
    "fifo": Method(None, curriculum=thompson(), edits=(fifo(),)),
    "groups": Method(None, edits=(replayed_groups(),)),
    "rewards": Method(
        None, rewards=shaped, plan=Plan(next=extra, rounds=2, members=lambda g: 4), edits=(fifo(),)
    ),
    "by_prompt": Method(None, edits=(by_prompt(),)),
}


STEPS = {"by_prompt": ROWS // N + 1}  # until a prompt comes again


def setting_of(method, order=lambda tickets: tickets % ROWS):
    weights = np.ones(1, np.float32)
    return Setting(method, N, G, weights, 0, order, None, TABLE)


def one_step(collected, key, step, setting, rounds, toy=draw_toy):
    draw = partial(toy, key=key, step=step)
    now = StepKey(key, step)
    groups, collected, _ = sample_step(draw, collected, now, setting, rounds)
    trained = groups
    if setting.method.edits or setting.method.plan.next is not None:
        trained, collected, _ = edited(groups, collected, now, setting)
    batch = batch_of(trained)
    size = mean_sizes(batch.tokens * batch.score()[:, :, None], batch.mask)
    if setting.method.curriculum is not None:
        outcome = outcome_of(groups, trained, size, step, TABLE)
        collected = learned(setting.method.curriculum, collected, outcome)
    return collected, batch


def values_of(batch):
    """Members, their rewards and tokens, by place, for comparison."""
    members = np.asarray(batch.members)
    return {
        "members": members,
        "rewards": np.where(members, np.asarray(batch.score()), 0),
        "tokens": np.where(members[:, :, None], np.asarray(batch.tokens), 0),
        "prompt": np.where(members.any(1), np.asarray(batch.prompt_tokens)[:, 0], 0),
    }


draw_toy_jit = jax.jit(draw_toy)


def on_host(method, key, steps, restored_at=None):
    setting = setting_of(method)
    collected = new_collected(setting)
    batches = []
    for step in range(steps):
        if step == restored_at:
            collected = restored(collected, setting)
        now = np.int32(step)
        collected, batch = one_step(collected, key, now, setting, host_rounds, draw_toy_jit)
        batches.append(values_of(batch))
    return batches, collected


def restored(collected, setting):
    return unpacked(new_collected(setting), jax.device_get(packed(collected)))


def compiled(method, steps):
    setting = setting_of(method)

    def run(key):
        shapes = jax.eval_shape(lambda: shapes_of(setting, key))
        collected = new_collected(setting, shapes)

        def body(collected, step):
            return one_step(collected, key, step, setting, traced_rounds)

        return jax.lax.scan(body, collected, jnp.arange(steps))

    return run


def shapes_of(setting, key):
    bare = setting._replace(method=setting.method._replace(edits=()))
    draw = partial(draw_toy, key=key, step=jnp.int32(0))
    collected = new_collected(bare)
    return sample_step(draw, collected, StepKey(key, jnp.int32(0)), bare, traced_rounds)[0]


def assert_same(host, batches, steps):
    for step in range(steps):
        traced = values_of(jax.tree.map(lambda x: x[step], batches))  # noqa: B023
        for name, x in host[step].items():
            y = traced[name]
            n = min(len(x), len(y))
            np.testing.assert_array_equal(x[:n], y[:n], err_msg=f"{name} of step {step}")
            assert not x[n:].any()
            assert not y[n:].any()


@pytest.mark.parametrize("name", METHODS)
def test_host_and_compiled_runs_have_the_same_groups(name):
    steps = STEPS.get(name, 3)
    host, collected = on_host(METHODS[name], KEY, steps)
    after, batches = jax.jit(compiled(METHODS[name], steps))(KEY)
    assert_same(host, batches, steps)
    assert int(after.cursor) == int(collected.cursor)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-6), after.curriculum, collected.curriculum
    )


@pytest.mark.parametrize("name", METHODS)
def test_a_restore_changes_nothing(name):
    steps = STEPS.get(name, 3)
    unbroken, _ = on_host(METHODS[name], KEY, steps)
    resumed, _ = on_host(METHODS[name], KEY, steps, restored_at=steps - 1)
    for one, other in zip(unbroken, resumed, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_seeds_under_vmap_are_runs_of_their_own():
    method, steps = METHODS["all"], 4
    keys = jax.random.split(KEY, 3)
    _, together = jax.jit(jax.vmap(compiled(method, steps)))(keys)
    for i, key in enumerate(keys):
        host, _ = on_host(method, key, steps)
        assert_same(host, jax.tree.map(lambda x: x[i], together), steps)  # noqa: B023


def test_a_thompson_sampler_learns_which_problems_are_half_right():
    """After many steps it chooses problems whose success rate is nearest to a half."""
    run = jax.jit(jax.vmap(compiled(METHODS["thompson"], 60)))
    _, batches = run(jax.random.split(KEY, 4))
    late = np.asarray(batches.prompt_tokens)[:, 40:, :, 0]
    distance = np.abs((late + 1) / (ROWS + 1) - 0.5)
    assert distance.mean() < 0.15 < np.abs((np.arange(ROWS) + 1) / (ROWS + 1) - 0.5).mean()


def test_rewards_are_edited_by_member_group_batch_and_step():
    plain, _ = on_host(METHODS["plain"], KEY, 3)
    edited_too, _ = on_host(Method(None, rewards=shaped), KEY, 3)
    for step, (before, after) in enumerate(zip(plain, edited_too, strict=True)):
        right = before["rewards"].astype(np.float64)
        points = right * (2 - right.mean()) - 0.125 * step
        points = np.where(right.mean(axis=1, keepdims=True) < 1, points, 0)
        np.testing.assert_allclose(after["rewards"], points, atol=1e-6)
        np.testing.assert_array_equal(after["tokens"], before["tokens"])


def test_plans_see_the_rewards_that_the_method_pays():
    rewards_by_step = []

    def next_asks(groups, view):
        rewards_by_step.append(np.asarray(groups.rewards))
        return ()

    doubled = of_parts(lambda parts, rollout: 2 * parts + rollout.lengths[:, :, None])
    method = Method(None, rewards=doubled, plan=Plan(next=next_asks, rounds=1))
    setting, draw = setting_of(method), partial(draw_toy, key=KEY, step=np.int32(0))
    state = new_collected(setting), StepKey(KEY, np.int32(0)), setting, host_rounds
    groups, *_ = sample_step(draw, *state)
    np.testing.assert_array_equal(groups.rewards, rewards_by_step[0])
    assert set(np.unique(rewards_by_step[0])) <= {T, T + 2}


def test_members_are_numbered_over_all_asks():
    setting = setting_of(METHODS["all"])
    collected = new_collected(setting)
    draw = partial(draw_toy, key=KEY, step=np.int32(0))
    groups, *_ = sample_step(draw, collected, StepKey(KEY, np.int32(0)), setting, host_rounds)
    present = groups.rollout.stop != StopReason.ABSENT
    assert groups.use.shape[1] == G + 2 + 2  # the asks of ``first``, and the bound of ``next``
    assert (groups.use[:N, G] == BASELINE).all()
    assert (groups.use[:N, G + 1] == ASIDE).all()
    assert (np.diff(present.astype(int), axis=1) <= 0).all()  # without gaps
    assert not np.asarray(groups.members())[:, G : G + 2].any()


def test_rounds_stop_at_the_first_that_asks_for_nothing():
    calls = []

    def next_asks(groups, view):
        calls.append(int(view.round))
        return (more(groups, jnp.where(view.round == 1, 1, 0), 1),)

    method = Method(None, plan=Plan(next=next_asks, rounds=9, members=lambda g: 9))
    setting = setting_of(method)
    collected = new_collected(setting)
    draw = partial(draw_toy, key=KEY, step=np.int32(0))
    now = StepKey(KEY, np.int32(0))
    groups, _, counts = sample_step(draw, collected, now, setting, host_rounds)
    assert calls == [1, 2]
    assert counts["rounds"] == 2
    assert (groups.sizes() == G + 1).all()


def test_asks_stay_within_the_bounds_of_the_plan():
    greedy = lambda groups, view: (more(groups, 5, 5), new(9, 9, view.group))  # noqa: E731
    plan = Plan(next=greedy, rounds=3, members=lambda g: 3, prompts=lambda n: 4)
    setting = setting_of(Method(None, plan=plan))
    collected = new_collected(setting)
    draw = partial(draw_toy, key=KEY, step=np.int32(0))
    groups, after, _ = sample_step(draw, collected, StepKey(KEY, np.int32(0)), setting, host_rounds)
    assert groups.use.shape == (N + 4, G + 3)
    assert int(after.cursor) == N + 4
    assert widths(()) == 0
