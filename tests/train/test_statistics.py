"""Statistics of the step: distributions, hidden states, frozen policies, tie-breakers, notes."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrl.errors import UserError
from jrl.methods import get_method
from jrl.methods.schedule import Schedule, average, copies, every, refreshed, restart
from jrl.objectives import aggregates, ratios, transforms
from jrl.sampling.params import make_sampling_params, sampling_logprobs
from jrl.train import score as module
from jrl.train.batch_rows import rows
from jrl.train.score import score
from jrl.train.state import init_state
from jrl.train.step import draw_tie_breakers, make_step
from jrl.train.step_metrics import batch_metrics
from jrl.types import Objective, Statistic, Surrogate, Transform, stream

KEY = jax.random.key(4)
DISTRIBUTIONS = {
    "plain": make_sampling_params(0.7),
    "truncated": make_sampling_params(0.8, top_k=9),
}


def divergence(distributions, token):
    """KL(teacher || policy) over the tokens that both keep, plus a logit, to see all inputs."""
    teacher, policy = distributions["teacher"], distributions["policy"]
    finite = jnp.isfinite(teacher) & jnp.isfinite(policy)
    gap = jnp.where(finite, teacher, 0) - jnp.where(finite, policy, 0)
    return jnp.where(finite, jnp.exp(teacher) * gap, 0).sum() + 0.1 * distributions["logits"][token]


DIVERGENCE = Statistic("divergence", divergence, ("policy", "teacher"))
NORM = Statistic(
    "norm", lambda hidden, mask: jnp.where(mask, jnp.square(hidden).sum(-1), 0), over="hidden"
)


@pytest.fixture(scope="module")
def teacher(make_bag):
    """A policy of another size over the same vocabulary, and its weights."""
    network = make_bag(d=5)
    return network, jax.jit(network.init)(jax.random.key(9))


@pytest.fixture(scope="module")
def batch(make_batch):
    return make_batch(g=3)


@pytest.mark.parametrize("at_once", [19 * 4, 2**24])
@pytest.mark.parametrize("sampling_params", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys())
def test_statistics_of_distributions_against_the_whole_softmax(
    bag, bag_params, teacher, batch, sampling_params, at_once, monkeypatch, quick_jit
):
    other, theirs = teacher
    monkeypatch.setattr(module, "_LOGITS_AT_ONCE", at_once)
    weights = jax.random.normal(KEY, batch.tokens.shape)

    def ours(params):
        stats = score(
            {"policy": params, "teacher": theirs},
            batch,
            sampling_params,
            network=bag,
            value=None,
            want=frozenset({"teacher_logprobs"}),
            statistics=(DIVERGENCE,),
            networks={"teacher": other},
        )
        return (weights * stats["divergence"]).sum(), stats

    def plain(params):
        seq = rows(batch)
        out = {}
        for name, net, tree in (("policy", bag, params), ("teacher", other, theirs)):
            hidden, _ = net.hidden(tree, seq.tokens, seq.positions, seq.segments)
            at = jnp.take_along_axis(hidden, seq.before[:, :, None], axis=1)
            out[name] = net.logits(tree, at).reshape(-1, 19)
        distributions = {name: sampling_logprobs(x, sampling_params) for name, x in out.items()} | {
            "logits": out["policy"]
        }
        divergences = jax.vmap(divergence)(distributions, batch.tokens.reshape(-1))
        return (weights.reshape(-1) * divergences).sum(), (divergences, distributions["teacher"])

    (_, stats), gradient = quick_jit(jax.value_and_grad(ours, has_aux=True))(bag_params)
    (_, (divergences, distributions)), expected = quick_jit(
        jax.value_and_grad(plain, has_aux=True)
    )(bag_params)
    assert set(stats) == {"divergence", "teacher_logprobs"}
    np.testing.assert_allclose(stats["divergence"].reshape(-1), divergences, atol=1e-5)
    picked = np.take_along_axis(
        np.asarray(distributions), np.asarray(batch.tokens).reshape(-1, 1), 1
    )[:, 0]
    finite = np.isfinite(
        picked
    )  # a token that the distribution leaves out is put back to be scored
    scored = np.asarray(stats["teacher_logprobs"]).reshape(-1)
    np.testing.assert_allclose(scored[finite], picked[finite], atol=1e-5)
    assert finite.all() == (not sampling_params.truncates)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
        assert np.abs(a).max() > 1e-3


def test_hidden_states_come_from_before_each_token(bag, bag_params, batch, quick_jit):
    run = partial(score, network=bag, value=None, want=frozenset(), statistics=(NORM,))
    outputs = quick_jit(run)({"policy": bag_params}, batch, DISTRIBUTIONS["plain"])
    assert set(outputs) == {"norm"}
    seq = rows(batch)
    hidden, _ = bag.hidden(bag_params, seq.tokens, seq.positions, seq.segments)
    hidden = np.asarray(hidden, np.float64)
    for b in range(12):
        i, j = divmod(b, 3)
        for t in range(5):
            expected = np.square(hidden[b, int(seq.before[b, t])]).sum()
            expected *= bool(batch.mask[i, j, t])
            assert outputs["norm"][i, j, t] == pytest.approx(expected, rel=1e-5, abs=1e-6)


# ---------------------------------------------------------------- through the step


def total(name, values, batch):
    live = transforms.trained(batch)
    return {name: (jnp.where(live, values, 0).sum(), live.sum(dtype=jnp.float32))}


def watching():
    """A transform that reports the start statistics and the tie-breakers as notes."""

    def apply(values, batch, state):
        notes = total("start_norm", batch.stats["norm_at_start"], batch)
        notes |= total("start_entropy", batch.stats["rollout_entropy"], batch)
        notes |= total("teacher", batch.stats["teacher_logprobs"], batch)
        tie_breakers = batch.ids["tie_breaker"].astype(jnp.float32)
        notes |= {
            "tie-breakers": (tie_breakers.sum(), jnp.float32(1)),
            "loss": (tie_breakers.sum(), jnp.float32(1)),
        }
        return values, batch.replace(notes=batch.notes | notes), state

    return Transform(
        init=lambda: (),
        apply=apply,
        needs=frozenset({"rollout_entropy", "teacher_logprobs"}),
        statistics=(NORM._replace(name="norm_at_start", start=True),),
    )


def taught():
    """Token mean of the divergence from the teacher."""

    def apply(stats, advantages, mask):
        return stats["divergence"], {"gap": stats["divergence"]}

    surrogate = Surrogate(apply, frozenset(), statistics=(DIVERGENCE,))
    return Objective(watching(), surrogate, aggregates.token_mean)


def test_a_step_on_a_teacher(bag, bag_params, teacher, batch, quick_jit):
    """Against the gradient of the whole loss by hand; notes hold what was at the start."""
    other, theirs = teacher
    objective, sampling_params, rate = taught(), DISTRIBUTIONS["plain"], 0.05
    assert objective.frozen == {"teacher"}
    common = {"network": bag, "objective": objective, "optimizer": optax.sgd(rate)}
    state = init_state(KEY, bag_params, **common, frozen={"teacher": theirs, "unread": None})
    assert set(state.frozen) == {"teacher"}
    more = {"networks": {"teacher": other}, "schedule": Schedule(epochs=2), "microbatches": 2}
    step = quick_jit(make_step(**common, **more))
    after, metrics = step(state, batch, sampling_params)

    def loss(params):
        stats = score(
            {"policy": params, "teacher": theirs},
            batch,
            sampling_params,
            network=bag,
            value=None,
            want=frozenset({"entropy", "teacher_logprobs"}),
            statistics=(DIVERGENCE, NORM),
            networks={"teacher": other},
        )
        return jnp.where(batch.mask, stats["divergence"], 0).sum() / batch.mask.sum(), stats

    run = quick_jit(jax.value_and_grad(loss, has_aux=True))
    params, losses, start = bag_params, [], None
    for _ in range(2):
        (value, stats), gradient = run(params)
        start = start or stats
        losses.append(value)
        params = jax.tree.map(lambda p, g: p - rate * g, params, gradient)
    for a, b in zip(jax.tree.leaves(after.params["policy"]), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-4)  # no note replaces it
    assert metrics["gap"] == pytest.approx(np.mean(losses), rel=1e-4)
    live = np.asarray(batch.mask)
    for name, source in (
        ("start_norm", "norm"),
        ("start_entropy", "entropy"),
        ("teacher", "teacher_logprobs"),
    ):
        expected = np.asarray(start[source], np.float64)[live].mean()
        assert metrics[name] == pytest.approx(expected, rel=1e-4), name
    tie_breakers = draw_tie_breakers(stream(state.key, "tie_breaker", 0), 4, 3)
    assert metrics["tie-breakers"] == pytest.approx(
        np.asarray(tie_breakers, np.float64).sum(), rel=1e-5
    )
    # Labels that the batch brings along stay.
    with_ids = batch.replace(ids={"tie_breaker": jnp.ones((4, 3), jnp.int32)})
    assert step(state, with_ids, sampling_params)[1]["tie-breakers"] == 12


def test_a_teacher_that_is_not_there_or_speaks_otherwise(bag, make_bag):
    objective = taught()
    with pytest.raises(UserError, match="that is not there; set frozen.teacher"):
        init_state(KEY, network=bag, objective=objective, optimizer=optax.sgd(1.0))
    with pytest.raises(UserError, match="'teacher' has a vocabulary of 23 and the policy one of 1"):
        make_step(
            network=bag,
            objective=objective,
            optimizer=optax.sgd(1.0),
            networks={"teacher": make_bag(v=23)},
        )


def test_a_tie_breaker_depends_on_its_place_alone():
    tie_breakers = np.asarray(draw_tie_breakers(KEY, 64, 8))
    assert tie_breakers.dtype == np.int32
    assert tie_breakers.min() >= 0
    assert len(set(tie_breakers.ravel().tolist())) == tie_breakers.size
    assert tie_breakers.mean() == pytest.approx(2**30, rel=0.1)
    assert np.array_equal(tie_breakers[:5, :3], draw_tie_breakers(KEY, 5, 3))
    assert not np.array_equal(tie_breakers[:5, :3], draw_tie_breakers(jax.random.key(5), 5, 3))


# ---------------------------------------------------------------- demonstrations in the metrics


def test_demonstrations_are_not_measured_as_draws(bag, bag_params, batch, quick_jit):
    """Their log-probabilities under the sampler mean nothing, and may be anything."""
    method = get_method("grpo")
    external = jnp.zeros(batch.tokens.shape).at[:, 2].set(1)
    strange = jnp.where(external > 0, 7.0, batch.stats["sampler_logprobs"])
    with_demo = batch.replace(stats={"sampler_logprobs": strange, "external": external})
    without = batch.replace(members=batch.members.at[:, 2].set(False))
    common = {"network": bag, "objective": method.objective, "optimizer": optax.sgd(0.1)}
    state = init_state(KEY, bag_params, **common)
    step = quick_jit(make_step(**common))
    ours, theirs = (step(state, b, DISTRIBUTIONS["plain"])[1] for b in (with_demo, without))
    for name in ("logprob_diff", "approx_kl", "entropy", "reward", "reward_std", "length"):
        assert float(ours[name]) == pytest.approx(float(theirs[name]), rel=1e-5), name
    assert ours["completion_tokens"] == int(batch.mask.sum())
    assert theirs["completion_tokens"] < ours["completion_tokens"]
    # Where there is nothing but demonstrations, they are what is measured.
    alone = batch.replace(stats={"external": jnp.ones(batch.tokens.shape)})
    plain = batch.replace(stats={})
    for name, value in batch_metrics(plain).items():
        np.testing.assert_allclose(batch_metrics(alone)[name], value, err_msg=name)


def test_external_is_zero_where_nothing_is_given(bag, bag_params, batch):
    """An objective may read it of any batch."""

    def apply(stats, advantages, mask):
        return stats["logprobs"] * (1 + stats["external"]), {"given": stats["external"]}

    objective = Objective(
        transforms.identity(), Surrogate(apply, frozenset({"external"})), aggregates.token_mean
    )
    common = {"network": bag, "objective": objective, "optimizer": optax.sgd(0.1)}
    _, metrics = make_step(**common)(
        init_state(KEY, bag_params, **common), batch, DISTRIBUTIONS["plain"]
    )
    assert metrics["given"] == 0


# ---------------------------------------------------------------- the reference in time


def steps_of(bag, bag_params, batch, quick_jit, count, *after):
    """The states after each of ``count`` steps with Adam and a falling rate."""
    objective = get_method("grpo", kl_coef=0.1).objective
    rate = optax.linear_schedule(0.05, 0.0, 10)
    common = {"network": bag, "objective": objective, "optimizer": optax.adam(rate)}
    states = [init_state(KEY, bag_params, **common)]
    step = quick_jit(make_step(**common, schedule=Schedule(after=after)))
    for _ in range(count):
        states.append(step(states[-1], batch, DISTRIBUTIONS["plain"])[0])
    return states


def same(a, b):
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


def test_the_reference_is_refreshed(bag, bag_params, batch, quick_jit):
    run = partial(steps_of, bag, bag_params, batch, quick_jit)
    states = run(3, *refreshed(2, moments=True))
    policies, refs = (
        [t[n] for t in trees]
        for n, trees in (
            ("policy", [s.params for s in states]),
            ("ref", [s.frozen for s in states]),
        )
    )
    assert not same(policies[1], policies[0])
    assert same(refs[1], policies[0])
    assert same(refs[2], policies[2])
    assert same(refs[3], policies[2])
    moments, schedule = states[2].opt_state
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(moments))
    assert int(schedule.count) == 2  # the rate keeps falling
    assert int(states[3].opt_state[0].count) == 1
    refreshed_state = run(2, *refreshed(2))[2]
    assert same(refreshed_state.frozen["ref"], refreshed_state.params["policy"])
    assert int(refreshed_state.opt_state[0].count) == 2


def test_rounds_have_an_expert_and_may_begin_anew(bag, bag_params, batch, quick_jit):
    """Rounds of 2 steps, of which the third begins from the first weights, with fresh moments."""
    after = (restart("first", every(4)), copies("expert", every(2)))
    rate = optax.linear_schedule(0.05, 0.0, 10)
    common = {"network": bag, "optimizer": optax.adam(rate)}
    common |= {"objective": get_method("grpo").objective, "schedule": Schedule(after=after)}
    step = quick_jit(make_step(**common))
    states = [init_state(KEY, bag_params, **common)]
    for _ in range(6):
        states.append(step(states[-1], batch, DISTRIBUTIONS["plain"])[0])
    policies = [s.params["policy"] for s in states]
    experts = [s.frozen["expert"] for s in states]
    for i, round_began in enumerate([0, 0, 2, 2, 4, 4, 6]):
        assert same(experts[i], policies[round_began])
        assert same(states[i].frozen["first"], policies[0])
    assert not same(policies[2], policies[0])
    plain = quick_jit(make_step(**common | {"schedule": Schedule()}))
    moments, schedule = states[4].opt_state
    fresh = states[4].replace(
        params=states[0].params, opt_state=(jax.tree.map(jnp.zeros_like, moments), schedule)
    )
    anew = plain(fresh, batch, DISTRIBUTIONS["plain"])[0]
    for a, b in zip(jax.tree.leaves(anew.params), jax.tree.leaves(states[5].params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert [int(s.opt_state[0].count) for s in states] == [0, 1, 2, 3, 4, 1, 2]
    assert int(states[5].opt_state[1].count) == 5  # the rate keeps falling


def test_the_reference_follows_slowly(bag, bag_params, batch, quick_jit):
    states = steps_of(bag, bag_params, batch, quick_jit, 2, average("ref", 0.75))
    for before, after in itertools.pairwise(states):
        old, new = before.frozen["ref"], after.params["policy"]
        expected = jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, old, new)
        for a, b in zip(
            jax.tree.leaves(after.frozen["ref"]), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_allclose(a, b, atol=1e-6)
        assert not same(after.frozen["ref"], old)


def test_a_reference_of_another_shape_cannot_be_renewed(bag, bag_params, make_bag, batch):
    other = make_bag(d=5)
    common = {"network": bag, "optimizer": optax.sgd(0.1)}
    common["objective"] = get_method("grpo", kl_coef=0.1).objective
    state = init_state(KEY, bag_params, **common, frozen={"ref": other.init(KEY)})
    common["schedule"] = Schedule(after=(average("ref", 0.5),))
    step = make_step(**common, networks={"ref": other})
    with pytest.raises(UserError, match="the given one has another shape"):
        jax.eval_shape(step, state, batch, DISTRIBUTIONS["plain"])


# ---------------------------------------------------------------- precision


def test_microbatches_of_bfloat16_weights_add_up_in_float32(bag, bag_params, make_batch):
    """The scan over microbatches carries float32 for every weight."""
    batch = make_batch(n=4)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), bag_params)
    objective = Objective(transforms.identity(), ratios.reinforce(), aggregates.token_mean)
    common = {"network": bag, "objective": objective, "optimizer": optax.sgd(0.5)}
    state = init_state(KEY, half, **common)
    step = make_step(**common, microbatches=4)
    after = jax.eval_shape(step, state, batch, DISTRIBUTIONS["plain"])[0]
    assert {x.dtype for x in jax.tree.leaves(after.params)} == {np.dtype(jnp.bfloat16)}
    assert ":f32[19,8] = add " in str(jax.make_jaxpr(step)(state, batch, DISTRIBUTIONS["plain"]))


def test_a_statistic_of_attention_sees_each_completion_alone(network, params, batch, quick_jit):
    """Attention of each completion token to the one before it, with prompts of any length."""

    def apply(weights, lags, mask):
        return jnp.where(mask, (weights * (lags == 1)[None]).sum((0, 2)), 0)

    previous = Statistic("previous", apply, over="attention", start=True)
    common = {"network": network, "value": None, "want": frozenset()}
    run = quick_jit(
        partial(score, sampling_params=make_sampling_params(), statistics=(previous,), **common)
    )
    got = np.asarray(run({"policy": params}, batch)["previous"])
    attention = quick_jit(network.extras.views.attention)
    n, g, t = batch.tokens.shape
    for i, j in itertools.product(range(n), range(g)):
        start, length = int(batch.prompt_lengths[i]), int(batch.lengths[i, j])
        alone = np.zeros((1, batch.prompt_tokens.shape[1] + t), np.int32)
        both = [*batch.prompt_tokens[i, :start], *batch.tokens[i, j, :length]]
        alone[0, : len(both)] = both
        positions = jnp.arange(alone.shape[1])[None]
        weights = attention(params, alone, positions, (positions < len(both)).astype(jnp.int32))
        paid = np.asarray(weights)[0].sum(0)
        for step in np.flatnonzero(batch.mask[i, j]):
            at = start + step
            np.testing.assert_allclose(got[i, j, step], paid[at, at - 1], atol=1e-5)
    assert np.count_nonzero(got) > n * g
