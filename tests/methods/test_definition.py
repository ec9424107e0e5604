"""Every coefficient of every method acts: another valid value changes what the method does.

What a method does is the programs that its parts trace to (``traced``), their first states, and
what its host functions answer. A coefficient that acts only with certain others stands in
``ONLY_WITH``, with them; the method's docstring says so too.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from table import COEFFICIENTS, NAMES

from jrl.collect.groups import PlacedGroups, widened
from jrl.errors import UserError
from jrl.methods import all_methods
from jrl.methods.base import first_draw
from jrl.methods.curriculum import Curriculum, Outcome, Query, Table
from jrl.methods.domains import Choice, Switch
from jrl.methods.edit import EditView
from jrl.methods.plan import StepView
from jrl.rewards.base import Sample
from jrl.types import STATISTICS, Batch, Prompt, Rollout
from jrl.types.asks import Tokens

N, G, T, R, V = 2, 4, 5, 3, 7

# Whatever the method: the estimator and the target of a divergence that is not charged, and the
# bounds of a correction that is not made, are not read.
ANYWHERE = {
    "kl_kind": {"kl_coef": 0.1},
    "kl_target": {"kl_coef": 0.1},
    "correction_cap": {"correction": "tis"},
    "correction_low": {"correction": "tis"},
}
# By method: the coefficients that act with these others alone.
ONLY_WITH = {
    "bfs_prover": {
        ("restart_rounds",): {"round_steps": 3},
        ("each", "kept_prompts"): {"replayed": 0.5},
    },
    "bnpo": {("eps", "ddof"): {"normalise": "group"}},
    "concise_r": {("max_tokens", "length_scale", "correct"): {"stage": "concise"}},
    "confucius3_math": {("target", "entropy_coef", "eps", "ddof"): {"stage": "entropy"}},
    "deepsearch": {("hard", "attempts", "above", "each", "kept_prompts"): {"round_steps": 4}},
    "digirl": {("each", "kept_prompts"): {"replayed": 0.5}},
    "degrpo": {("gamma", "correct"): {"think_token": 1}},
    "gkd": {("tail",): {"top_k": 3}},
    "gpg": {("eps", "ddof"): {"normalise": "std"}},
    "masa": {("imitation_coef", "cutoff"): {"efficient": True}},
    # The first stage is DPO, the second PPO with all of its coefficients.
    "mpo": {tuple(set(all_methods()["ppo"].coefficients) - {"epochs"}): {"stage": "ppo"}},
    "rec": {("ring_low", "ring_high"): {"mask": "ring"}},
    "rl_plus": {
        ("eps", "ddof"): {"normalise": True},
        ("clip_low", "clip_high", "dual_clip"): {"clipped": True},
    },
    "nemotron_cascade": {("lengthen_steps",): {"first_limit": 8}},
    "seed_grpo": {("power",): {"shape": "focal"}},
    "steer_entropy": {("most_weight",): {"falloff": "linear"}},
    "webrl": {
        ("each", "kept_prompts"): {"replayed": 0.5},
        ("low", "high"): {"written": 3},
    },
    "univg_r1": {("power",): {"curve": "power"}},
}


# ---------------------------------------------------------------- what a method does


def everything():
    """A batch with all labels and statistics that anything reads."""
    shape = (N, G, T)
    labels = ("turn", "step", "state", "node", "item", "solution_step")
    by_member = ("tie_breaker", "stratum", "episode", "answer", "pass")
    by_member += (
        "predicted_tokens",
        "predicted_passes",
        "role",
        "outcome",
        "verdicts",
        "verified_steps",
    )
    ids = {name: jnp.zeros(shape, jnp.int32) for name in labels}
    ids |= {name: jnp.zeros((N, G), jnp.int32) for name in by_member}
    ids |= {name: jnp.zeros(N, jnp.int32) for name in ("prompt", "ask", "goal")}
    stats = dict.fromkeys([*STATISTICS, "paid", "node_value", "visits", "step_labels"])
    return Batch(
        prompt_tokens=jnp.zeros((N, 2), jnp.int32),
        prompt_lengths=jnp.ones(N, jnp.int32),
        tokens=jnp.zeros(shape, jnp.int32),
        lengths=jnp.ones((N, G), jnp.int32),
        mask=jnp.ones(shape, bool),
        rewards=jnp.zeros((N, G, R)),
        reward_weights=jnp.ones(R),
        members=jnp.ones((N, G), bool),
        baseline=jnp.zeros((N, G), bool),
        truncated=jnp.zeros((N, G), bool),
        stats={name: jnp.zeros(shape) for name in stats},
        ids=ids,
    )


BATCH = everything()
ROLLOUT = Rollout(
    prompt_tokens=np.zeros((N, 2), int),
    prompt_lengths=np.ones(N, int),
    tokens=np.arange(N * G * T).reshape(N, G, T) % 3,
    lengths=np.full((N, G), T),
    mask=np.ones((N, G, T), bool),
    sampler_logprobs=np.zeros((N, G, T)),
    versions=np.zeros((N, G, T), int),
    stop=np.zeros((N, G), int),
    baseline=np.zeros((N, G), bool),
)


def traced(function, *arguments):
    """The program of a function, as text, with its constants."""
    closed = jax.make_jaxpr(function)(*arguments)
    text = re.sub(r"0x[0-9a-f]+", "", str(closed.jaxpr))
    plain = (
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in map(jnp.asarray, closed.consts)
    )
    return text, tuple(np.asarray(x).tobytes() for x in plain)


def first_state(init):
    return jax.tree.map(lambda x: np.asarray(x).tolist(), init())


def of_statistic(statistic):
    """The program of a statistic, whatever it is over."""
    if statistic.over == "vocabulary":
        names = (*statistic.policies, "logits")
        vocabulary_view = {name: jnp.zeros(V) for name in (*names, "base", "q_target")}
        vocabulary_view |= {
            "q": jnp.zeros((2, V)),
            "v": jnp.zeros(()),
        }  # by a network with token values
        return traced(statistic.apply, vocabulary_view, jnp.int32(0))
    mask = jnp.ones(T, bool)
    if statistic.over == "hidden":
        return traced(statistic.apply, jnp.zeros((T, 3)), mask)
    if statistic.over == "values":
        return traced(statistic.apply, jnp.zeros(8))
    lags = jnp.arange(T)[:, None] - jnp.arange(T + 2)[None] + 2
    return traced(statistic.apply, jnp.zeros((20, T, T + 2)), lags, mask)


def reads(part, shape):
    """The statistics and labels that a part of an objective is given."""
    names = part.needs | {"logprobs"} | {statistic.name for statistic in part.statistics}
    return {name: jnp.zeros(shape) for name in sorted(names)}


def of_advantage(advantage):
    brought = {s.name: jnp.zeros((N, G, T)) for s in advantage.statistics}
    missing = {name: jnp.zeros((N, G, T)) for name in advantage.needs}
    batch = BATCH.replace(stats=missing | BATCH.stats | brought)
    program = traced(advantage.apply, batch.score(), batch, advantage.init())
    statistics = [of_statistic(s) for s in advantage.statistics]
    return sorted(advantage.needs), program, first_state(advantage.init), statistics


def of_surrogate(surrogate):
    shape = (G, T) if surrogate.over == "group" else (T,)
    labels = {name: jnp.zeros(shape, jnp.int32) for name in surrogate.labels}
    program = traced(
        surrogate.apply, reads(surrogate, shape) | labels, jnp.zeros(shape), jnp.ones(shape, bool)
    )
    return sorted(surrogate.needs), program, [of_statistic(s) for s in surrogate.statistics]


def of_aggregate(aggregate):
    rows = jnp.zeros((2, T)), jnp.ones((2, T), bool)
    return None if aggregate is None else traced(aggregate, *rows)


def of_regularizer(regularizer):
    state = regularizer.init()
    value = {regularizer.name: jnp.float32(0)}
    return (
        regularizer.name,
        sorted(regularizer.needs),
        traced(regularizer.value, reads(regularizer, (T,)), jnp.ones(T, bool)),
        traced(regularizer.coef, state),
        traced(regularizer.update, state, value),
        first_state(regularizer.init),
        of_aggregate(regularizer.aggregate),
        [of_statistic(s) for s in regularizer.statistics],
    )


def of_rewards(edit):
    """A method's rewards from one to three parts; it may refuse a number of parts."""
    out = []
    for parts in (1, 2, 3):
        rewards = np.linspace(-2, 2, N * G * parts).reshape(N, G, parts).astype(np.float32)
        groups = placed_groups().replace(rewards=jnp.asarray(rewards), weights=jnp.ones(parts))
        try:
            groups_edited = edit(groups, step_view())
        except UserError:
            out.append(None)
        else:
            out.append([np.asarray(x).tolist() for x in jax.tree.leaves(groups_edited)])
    return out


class Hints:
    """Data that a plan may read."""

    def hints(self, groups, level, levels):
        lengths = jnp.full(N, 7 * level // levels, jnp.int32)
        return {"prefix": Tokens(jnp.zeros((N, 7), jnp.int32), lengths)}

    def samples(self, groups):
        prompts = [Prompt(i, f"q{i}", np.zeros(1, np.int32), "1") for i in range(N)]
        return [[Sample(p, str(j), np.zeros(1), "length") for j in range(G)] for p in prompts]

    def contexts(self, questions, most):
        texts = [np.frombuffer(q.encode()[:200].ljust(200), np.uint8) for q in questions]
        ids = np.array(texts, np.int32)
        return Tokens(ids, np.full(len(ids), 200, np.int32)), np.ones(len(ids), bool)


def placed_groups():
    """Groups as plans and edits see them."""
    rollout = jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), ROLLOUT)
    rollout = rollout.replace(
        mask=jnp.ones((N, G, T), bool),
        sampler_logprobs=jnp.zeros((N, G, T)),
        baseline=jnp.zeros((N, G), bool),
    )
    zeros, numbers = jnp.zeros((N, G), jnp.int32), jnp.arange(N)
    labels = {"prompt": numbers}, {}, {}, numbers, numbers, zeros, zeros == 0, zeros
    rewards = jnp.broadcast_to(jnp.linspace(0, 1 / R, G)[None, :, None], (N, G, R))
    return PlacedGroups(rollout, rewards, jnp.ones(R), *labels)


def step_view():
    """A step as plans and edits of rewards see it."""
    return StepView(jnp.int32(60), jnp.int32(1), jax.random.key(0), N, G, (), (), Hints())


def of_plan(plan):
    view = step_view()
    further = None
    if plan.next is not None:
        try:
            further = traced(lambda groups: plan.next(groups, view), placed_groups())
        except jax.errors.TracerArrayConversionError:  # it reads texts
            views = [view._replace(step=np.int32(step)) for step in range(30)]
            asks = [plan.next(placed_groups(), v) for v in views]
            further = jax.tree.map(lambda x: np.asarray(x).tolist(), asks)
    policies = [(p.name, [p.version(step) for step in range(9)]) for p in plan.policies]
    bounds = plan.rounds, plan.members(8), plan.prompts(8), plan.tokens
    estimate = None if plan.estimate is None else traced(plan.estimate, jnp.zeros(2))
    return first_draw(plan), further, policies, bounds, estimate


def of_edits(edits):
    return [of_edit(edit) for edit in edits]


def of_edit(edit):
    extra = edit.extra(N)
    groups = widened(placed_groups(), N + extra, G)
    keys = jax.random.split(jax.random.key(0), N + extra)
    views = [
        EditView(jnp.int32(step), keys[0], keys, jnp.arange(N + extra) >= N) for step in (9, 70)
    ]
    state = jax.eval_shape(lambda: edit.init(jax.eval_shape(lambda: groups), N))
    programs = [traced(lambda s, g: edit.apply(s, g, view), state, groups) for view in views]  # noqa: B023
    return edit.extra(8), edit.extra(80), str(state), programs


def of_curriculum(curriculum):
    if not isinstance(curriculum, Curriculum):
        return curriculum
    state = curriculum.init(Table(8, 1, jnp.zeros(8, jnp.int32)))
    query = Query(jax.random.key(0), jnp.arange(N), jnp.int32(N), jnp.int32(0), jnp.zeros(8, bool))
    rows, some, scores = jnp.arange(N), jnp.ones(N, bool), jnp.zeros((N, G))
    outcome = Outcome(jnp.int32(0), rows, rows, some, some, rows / N, rows * 1.0, scores, scores)
    first = jax.tree.map(lambda x: np.asarray(x).tolist(), state)
    if curriculum.between is not None:  # it runs on the host, on groups that a run draws
        return first, fingerprint(curriculum)
    programs = traced(curriculum.choose, state, query), traced(curriculum.update, state, outcome)
    return first, programs, curriculum.pool


def of_values(values):
    return values


def of_regularizers(terms):
    return [of_regularizer(term) for term in terms]


def parts_of(method):
    """(what describes it, the part) of all parts of a method."""
    objective = method.objective
    yield of_values, method.needs
    yield fingerprint, method.schedule
    yield of_values, method.network
    yield of_curriculum, method.curriculum
    yield of_plan, method.plan
    yield of_edits, method.edits
    yield of_rewards, method.rewards
    yield of_aggregate, objective.aggregate
    yield of_regularizers, objective.regularizers
    yield of_surrogate, objective.surrogate
    yield of_advantage, objective.advantage


def fingerprint(value):
    """Fingerprint of a part: equal if its code and everything that the code holds are equal."""
    if isinstance(value, functools.partial):
        return fingerprint((value.func, value.args, value.keywords))
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return value.__code__, fingerprint((cells, value.__defaults__, value.__kwdefaults__))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value), fingerprint(vars(value))
    if callable(value) and not isinstance(value, tuple):
        return id(value)  # compiled, or a class: one of each
    if isinstance(value, dict):
        return tuple((name, fingerprint(x)) for name, x in sorted(value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *map(fingerprint, value))
    if isinstance(value, (frozenset, set)):
        return tuple(sorted(map(repr, value)))
    return repr(value) if isinstance(value, (np.ndarray, jax.Array)) else value


DESCRIBED = {}
"""Results of parts by fingerprint, because methods share most parts."""


def described(describe, part, made_of):
    key = describe, made_of
    if key not in DESCRIBED:
        DESCRIBED[key] = describe(part)
    return DESCRIBED[key]


def differ(one, other):
    """Whether two methods do anything differently. Parts made of the same are not traced."""
    for (describe, a), (_, b) in zip(parts_of(one), parts_of(other), strict=True):
        x, y = fingerprint(a), fingerprint(b)
        if x != y and described(describe, a, x) != described(describe, b, y):
            return True
    return False


# ---------------------------------------------------------------- other values


def others(coefficient, at):
    """Valid values of a coefficient that are not the one at hand: all words, or a number."""
    domain = coefficient.domain
    if isinstance(domain, Switch):
        return [[not at]]
    if isinstance(domain, Choice):
        return [[word] for word in domain.words if word != at]
    if at is None:
        numbers = [domain.example, 1, 2, 0.5]
    else:
        numbers = [at * 1.5, at / 2, at + 1, at - 1, at + 0.1, domain.low, domain.high]
    numbers = [round(x) if domain.whole and abs(x) < 1e9 else x for x in numbers]
    return [[x for x in numbers if x in domain and x != at]]


def first_taken(build, context, name, choices):
    """The first value that the method takes beside the others, with the method."""
    for value in choices:
        try:
            return value, build(**context | {name: value})
        except UserError:
            continue
    raise AssertionError(f"{name}: none of {choices} is taken")


QUICK = {"grpo", "gspo", "dapo", "ppo", "rloo", "dpo", "kto", "nft", "gigpo", "bradley_terry"}
"""One method or so of each kind, for the tests that a contributor waits for."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NAMES]
)
def test_every_coefficient_acts(name):
    published = all_methods()[name]
    required = {c.name: c.domain.example for c in published.coefficients.values() if c.required}
    options = required | COEFFICIENTS.get(name, {})
    built = {}

    def build(**changes):
        key = tuple(sorted(changes.items()))
        if key not in built:
            built[key] = published(**options | changes)
        return built[key]

    idle = []
    for coefficient in published.coefficients.values():
        context = ANYWHERE.get(coefficient.name, {})
        context = {k: v for k, v in context.items() if k in published.coefficients}
        for names, also in ONLY_WITH.get(name, {}).items():
            context |= also if coefficient.name in names else {}
        base = build(**context)
        at = (options | context).get(coefficient.name, coefficient.default)
        for choices in others(coefficient, at):
            value, changed = first_taken(build, context, coefficient.name, choices)
            if not differ(base, changed):
                idle.append(f"{coefficient.name} = {value!r}, not {at!r}")
    assert not idle, f"{name}: nothing reads {'; '.join(idle)}"


def test_a_coefficient_that_nothing_reads_is_found():
    grpo, bnpo = all_methods()["grpo"], all_methods()["bnpo"]
    assert differ(grpo(), grpo(eps=1e-4))
    assert not differ(bnpo(), bnpo(eps=1e-4))
    assert not differ(grpo(), grpo(kl_kind="k2"))
