"""MoPPS, DARS, Scaf-GRPO, PF-PPO and ReMix: their formulas in float64, and runs of each."""

from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrl.collect import plan_tools
from jrl.collect.collector import Collector
from jrl.collect.edit import outcome_of
from jrl.collect.groups import PlacedGroups
from jrl.collect.plan import Setting
from jrl.collect.plan_tools import TaskTools, TextTools
from jrl.collect.sources import epoch_order
from jrl.collect.sources_task import TaskSource, task_rollout
from jrl.collect.sources_text import TextSource
from jrl.errors import UserError
from jrl.mesh import make_mesh
from jrl.methods import all_methods, get_method
from jrl.methods.curriculum import Outcome, Query, Table
from jrl.methods.edit import EditView
from jrl.rewards.pool import CallOutcome, Scores
from jrl.sampling.generate import generate
from jrl.sampling.params import make_sampling_params
from jrl.train.compiled import iterate, make_iteration, pool_table
from jrl.train.loop import policy_weights
from jrl.train.state import init_state
from jrl.train.step import make_step
from jrl.types import SILENT, Prompt, Rollout, StopReason
from jrl.zoo.methods.filters import by_rank
from jrl.zoo.methods.rounds import hard_problems
from jrl.zoo.methods.sampling import _failed, further_members, least_hinted

N, G, STEPS = 3, 4, 4
KEY = jax.random.key(7)
SAMPLING = make_sampling_params(1.0)
MESH = make_mesh({}, jax.devices()[:1])
NAMES = {
    "mopps": {"pool": 16},
    "dars": {"max_group": 7},
    "scaf_grpo": {"levels": 6, "exempt_steps": 1, "hint_tokens": 4},
    "pf_ppo": {},
    "remix": {"replayed": 0.4, "window": 2},
}


def method_of(name):
    """The method's curriculum, plan and edits around an objective that needs no further network."""
    method = get_method(name, **NAMES[name])
    return get_method("grpo").with_(
        plan=method.plan, edits=method.edits, curriculum=method.curriculum
    )


def test_all_five_are_found_by_name():
    assert {*NAMES} <= {*all_methods()}
    assert [get_method(name).lacks for name in NAMES] == [""] * 5
    filled = {name: get_method(name).seams for name in NAMES}
    assert "curriculum" in filled["mopps"]
    assert "plan" in filled["dars"]
    assert {"plan", "edits"} <= {*filled["scaf_grpo"]}
    assert "edits" in filled["pf_ppo"]
    assert "edits" in filled["remix"]


# ---------------------------------------------------------------- formulas, in float64


def test_mopps_updates_its_posteriors_as_the_paper_does():
    curriculum = get_method("mopps", decay=0.8, prior_right=2.0, prior_wrong=3.0).curriculum
    state = curriculum.init(Table(5, 1, jnp.zeros(5, jnp.int32)))
    a, b = np.full(5, 2.0), np.full(5, 3.0)
    rng = np.random.default_rng(0)
    for _ in range(4):
        rows, right = rng.permutation(5)[:2], rng.integers(0, G + 1, 2)
        for row, s in zip(rows, right, strict=True):
            a[row] = 0.8 * a[row] + 0.2 * 2.0 + s
            b[row] = 0.8 * b[row] + 0.2 * 3.0 + G - s
        ones = jnp.ones(3, bool).at[2].set(False)  # the third is padding
        padded = jnp.array([*rows, 0])
        rate = jnp.array([*right / G, 0.7], jnp.float32)
        size, zeros = jnp.full(3, float(G)), jnp.zeros((3, G))
        outcome = Outcome(0, padded, padded * 0, ones, ones, rate, size, zeros, zeros)
        state = curriculum.update(state, outcome)
    np.testing.assert_allclose(state["a"], a, rtol=1e-6)
    np.testing.assert_allclose(state["b"], b, rtol=1e-6)


def test_mopps_takes_the_problems_whose_drawn_rates_are_nearest_to_the_target():
    curriculum = get_method("mopps", target=0.3).curriculum
    state = {"a": jnp.array([1.0, 300, 900, 600, 10]), "b": jnp.array([1e6, 700, 100, 1400, 10])}
    query = Query(KEY, jnp.arange(2), jnp.int32(2), jnp.int32(0), jnp.zeros(5, bool))
    choice, _ = curriculum.choose(state, query)
    assert sorted(choice.row.tolist()) == [1, 3]  # 0.3 and 0.3 but for noise; others are far off
    used = query.replace(used=jnp.array([0, 1, 0, 0, 0], bool))
    assert curriculum.choose(state, used)[0].row.tolist()[0] == 3
    fewer = query.replace(tickets=jnp.arange(1), count=jnp.int32(1))
    assert curriculum.choose(state, fewer)[0].row.tolist() == choice.row.tolist()[:1]


@pytest.mark.parametrize("balance", ["equal", "hard"])
def test_dars_adds_as_many_members_as_the_papers_formula(balance):
    for n in (4, 8, 16):
        for right in range(n + 1):
            a = max(right / n, 0.5 / n)
            s = 2 * np.sqrt(a * (1 - a))
            peak = n * (2 * (1 - a) if balance == "hard" else 1.0)
            expected = int(np.ceil((peak - n * s) / s - 1e-9)) if a < 0.5 else 0
            expected = min(max(expected, 0), 32 - n)
            rate, size = jnp.array([right / n], jnp.float32), jnp.array([n])
            assert further_members(rate, size, 32, balance).tolist() == [expected], (n, right)


def placed(scores, round_=None, members=None):
    """Groups with these scores, as an edit sees them."""
    scores = np.asarray(scores, np.float32)
    members = np.ones(scores.shape, bool) if members is None else np.asarray(members)
    stop = np.where(members, StopReason.STOP_TOKEN, StopReason.ABSENT).astype(np.int32)
    shape = (*scores.shape, 1)
    zeros = np.zeros(scores.shape, np.int32)
    rollout = Rollout(
        np.ones((len(scores), 1), np.int32),
        np.ones(len(scores), np.int32),
        np.zeros(shape, np.int32),
        members.astype(np.int32),
        members[:, :, None],
        np.zeros(shape, np.float32),
        np.zeros(shape, np.int32),
        stop,
        np.zeros(scores.shape, bool),
    )
    labels = {"prompt": np.arange(len(scores), dtype=np.int32)}
    numbers = np.arange(len(scores), dtype=np.int32)
    rounds = zeros if round_ is None else np.broadcast_to(np.asarray(round_, np.int32), zeros.shape)
    ones = np.ones(1, np.float32)
    return PlacedGroups(
        rollout,
        scores[:, :, None],
        ones,
        labels,
        {},
        {},
        numbers,
        numbers,
        zeros,
        zeros == 0,
        rounds,
    )


def view_of(groups):
    keys = jax.random.split(KEY, len(groups.ticket))
    return EditView(jnp.int32(0), KEY, keys, jnp.zeros(len(groups.ticket), bool))


def test_members_that_nobody_judged_are_no_failures():
    groups = placed([[1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    silent = jnp.array([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]], jnp.int32)
    groups = groups.replace(ids=groups.ids | {SILENT: silent}, accuracy_column=0)
    assert groups.judged().sum(axis=1).tolist() == [2, 0, 4]
    assert groups.rate().tolist() == [0.5, 0.0, 0.0]
    table = Table(3, 1, jnp.zeros(3, jnp.int32))
    outcome = outcome_of(groups, groups, None, 0, table)
    assert (outcome.size.tolist(), outcome.live.tolist()) == ([2, 0, 4], [True, False, True])
    (asks,) = get_method("dars").plan.next(groups, SimpleNamespace(group=4))
    assert (np.asarray(asks.count) > 0).tolist() == [False, False, True]
    assert _failed(groups).tolist() == [False, False, True]


def test_scaf_grpo_puts_the_success_in_the_place_of_one_failure():
    groups = placed(
        [[0, 0, 0, 0, 1], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]],
        round_=[0, 0, 0, 1, 2],
        members=[[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 1, 0, 0]],
    )
    members = np.asarray(least_hinted(groups, view_of(groups)).members())
    assert members.tolist() == [
        [False, True, True, False, True],  # the first gives way; a hint that did not help goes, too
        [True, True, True, False, False],
        [True, True, True, False, False],
    ]


@pytest.mark.parametrize("strategy", ["best", "best_worst", "best_random"])
def test_pf_ppo_keeps_members_by_their_rank(strategy):
    rng = np.random.default_rng(1)
    scores = rng.normal(size=(6, 5))
    members = rng.random((6, 5)) < 0.8
    members[0] = [True, False, False, False, False]
    groups = placed(scores, members=members)
    edit = by_rank(strategy)
    left, _ = edit.apply((), groups, view_of(groups))
    members_left = np.asarray(left.members())
    for n in range(6):
        live = [g for g in range(5) if members[n, g]]
        order = sorted(live, key=lambda g: -scores[n, g])
        if strategy == "best_worst":
            assert set(np.flatnonzero(members_left[n])) == {order[0], order[-1]}
        elif strategy == "best":
            assert set(np.flatnonzero(members_left[n])) == {order[0]}
        else:
            assert members_left[n, order[0]]
            assert members_left[n].sum() == min(len(live), 2)


def test_remix_stores_the_groups_of_the_last_steps_alone():
    (edit,) = get_method("remix", window=2, replayed=0.5).edits
    assert edit.extra(6) == 6
    store = edit.init(None, 2)
    for step in range(4):
        groups = placed(np.full((4, 2), float(step)))
        empty = jnp.array([False, False, True, True])
        groups = groups.replace(ticket=np.where(empty, -1, groups.ticket).astype(np.int32))
        view = view_of(groups)._replace(step=jnp.int32(step), extra=empty)
        edited, store = edit.apply(store, groups, view)
        members = np.asarray(edited.members())
        fresh, replayed = np.asarray(edited.score())[:2], np.asarray(edited.score())[2:]
        assert (fresh == step).all()
        stored = {*range(max(step - 2, 0), step)}
        assert members[2:].all() == bool(stored)
        assert not stored or {*replayed.ravel().tolist()} <= {float(s) for s in stored}
    late, _ = edit.apply(store, groups, view._replace(step=jnp.int32(50)))
    assert not np.asarray(late.members())[2:].any()  # reborn: on-policy from here on


# ---------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def network(make_bag, first_letter):
    task = first_letter
    return make_bag(task.vocab_size, 8, task.prompt_tokens + task.completion_tokens + 24)


@pytest.fixture(scope="module")
def draw_by_parts(network, first_letter, quick_jit):
    """The program that draws members and judges them by these parts; all methods share it."""
    options = {"sampling_params": SAMPLING, "task": first_letter, "network": network}
    return cache(lambda *parts: quick_jit(partial(task_rollout, parts=parts, **options)))


@pytest.fixture(scope="module")
def completed(network, quick_jit):
    """The program that completes prompts in text; all methods share it."""
    return quick_jit(partial(generate, network=network, max_new_tokens=3, stop_tokens=(1,)))


def step_and_state(network, method):
    common = {
        "network": network,
        "objective": method.objective,
        "optimizer": optax.sgd(0.3),
    }
    extra = sum(edit.extra(N) for edit in method.edits)
    step = make_step(**common, shown=N + extra)
    return step, partial(init_state, KEY, **common)


def trainer_on_host(network, method, quick_jit):
    """Trains a few steps, with one compiled step however often it is called."""
    step, fresh = step_and_state(network, method)
    compiled = quick_jit(step)

    def train(collector_of, restored_at=None):
        """The batches and the policy; the collector may be made anew on the way."""
        state, cursor = fresh(), 0
        collector, batches = collector_of({}), []
        with jax.set_mesh(MESH):
            for i in range(STEPS):
                if i == restored_at:
                    collector = collector_of(jax.device_get(collector.notes()))
                weights = policy_weights(state)
                batch, groups, cursor = collector.collect(state.key, weights, step=i, cursor=cursor)
                state, metrics = compiled(state, batch, SAMPLING)
                collector.learn(i, jax.device_get(metrics["advantages"]))
                batches.append((jax.device_get(batch), groups))
        return batches, state

    return train


def live_tokens(batch):
    """Tokens of members that are trained on, and whose they are; what is dropped may differ."""
    members = np.asarray(batch.members)
    tokens = np.where(np.asarray(batch.mask), np.asarray(batch.tokens), 0)
    return members, tokens, np.where(members, np.asarray(batch.score()), 0)


def test_problems_of_a_task_are_tested_between_rounds(
    network, first_letter, quick_jit, draw_by_parts
):
    """By members of their own keys, and as a restored run has them."""
    rule, task = hard_problems(2, 6, 0.0, 0.25)._replace(pool=8), first_letter
    method = get_method("grpo").with_(curriculum=rule)
    draw = draw_by_parts("partial")
    tested = []

    def draw_groups(request, **how):
        groups = draw(request, **how)
        if request.stream == "curriculum":
            tested.append((int(request.step), np.asarray(groups.rewards)[..., 0]))
        return groups

    def collector_of(notes):
        order = partial(epoch_order, None)
        setting = Setting(method, N, G, np.ones(1), 0, table=pool_table(8), in_order=order)
        return Collector(TaskSource(task, ("partial",), draw_groups), setting, MESH, notes=notes)

    train_on_host = trainer_on_host(network, method, quick_jit)
    batches, _ = train_on_host(collector_of)
    first = np.concatenate([right for step, right in tested if step == 0])
    assert first.shape == (8, 6)
    hard = np.flatnonzero((first <= 0.25).all(axis=1))  # whose first token nobody guessed
    assert 0 < len(hard) < 8
    assert {step for step, _ in tested} == {0, 2}
    for step, (_, groups) in enumerate(batches[:2]):
        assert groups.counts["hard_problems"] == len(hard)
        expected = hard[(N * step + np.arange(N)) % len(hard)]
        np.testing.assert_array_equal(groups.ids["prompt"], expected)
    again, _ = train_on_host(collector_of, restored_at=3)
    for (one, _), (other, _) in zip(batches, again, strict=True):
        jax.tree.map(np.testing.assert_array_equal, live_tokens(one), live_tokens(other))


@pytest.mark.parametrize("name", NAMES)
def test_a_task_is_trained_alike_on_the_host_and_in_one_program(
    name, network, first_letter, quick_jit, draw_by_parts
):
    method, task = method_of(name), first_letter
    table = pool_table(16) if method.curriculum is not None else None

    def collector_of(notes):
        source = TaskSource(task, ("verify",), draw_by_parts("verify"))
        tools = partial(TaskTools, task)
        setting = Setting(method, N, G, np.ones(1), 0, tools=tools, table=table)
        return Collector(source, setting, MESH, notes=notes)

    train_on_host = trainer_on_host(network, method, quick_jit)
    batches, state = train_on_host(collector_of)
    again, after = train_on_host(collector_of, restored_at=2)
    for (one, _), (other, _) in zip(batches, again, strict=True):
        jax.tree.map(np.testing.assert_array_equal, live_tokens(one), live_tokens(other))
    jax.tree.map(np.testing.assert_array_equal, state.params, after.params)

    step, fresh = step_and_state(network, method)

    def record_step(state, batch, sampling_params):
        state, metrics = step(state, batch, sampling_params)
        return state, metrics | {"batch": batch}

    iteration = make_iteration(
        record_step,
        method=method,
        task=task,
        network=network,
        weights={"verify": 1.0},
        prompts=N,
        group=G,
        accuracy_column=0,
    )
    start = fresh(), iteration.begin(fresh())
    run = quick_jit(partial(iterate, iteration, steps=STEPS))
    scanned, _, curves = run(*start, SAMPLING)
    for i, (batch, _) in enumerate(batches):
        traced = jax.tree.map(lambda x: x[i], curves["batch"])  # noqa: B023
        jax.tree.map(np.testing.assert_array_equal, live_tokens(traced), live_tokens(batch))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), scanned.params, state.params)
    acts(name, batches)


def acts(name, batches):
    """That the method's mechanism shows in what is trained on."""
    members = [np.asarray(batch.members) for batch, _ in batches]
    if name == "mopps":
        rows = [np.asarray(groups.ids["prompt"]) for _, groups in batches]
        assert any((x != np.arange(N) + N * i).any() for i, x in enumerate(rows))
        assert "success_rate" in batches[0][0].prior
    elif name == "dars":
        assert max(m.sum(1).max() for m in members) > G
        for batch, _ in batches:
            mean_scores = np.asarray(batch.score())[:, :G].mean(1)
            more = np.asarray(batch.members).sum(1) > G
            assert (more == (mean_scores < 0.5)).all()
    elif name == "scaf_grpo":
        hinted = [np.asarray(batch.members)[:, G:].any() for batch, _ in batches]
        assert not hinted[0]
        assert any(hinted)
        assert all((m.sum(1) == G).all() for m in members)
    elif name == "pf_ppo":
        assert all((m.sum(1) == 2).all() for m in members)
    else:
        versions = [np.asarray(groups.rollout.versions) for _, groups in batches]
        old = [np.unique(v[v >= 0]) for v in versions]
        assert old[0].tolist() == [0]
        assert all({i - 1, i - 2} & {*versions.tolist()} for i, versions in enumerate(old) if i > 1)
        assert all(versions.min() >= i - 2 for i, versions in enumerate(old))


class Digits:
    """A reward of 1 for completions whose first token is the prompt's, and letters for text."""

    over_batch = by_token = False

    def scores(self, samples, *, group):
        right = [float(len(s.tokens) and s.tokens[0] == s.prompt.tokens[0]) for s in samples]
        return Scores(
            np.array(right, np.float32)[:, None], CallOutcome(np.zeros(len(right), bool), {})
        )

    def decode(self, ids):
        return "".join(chr(97 + i) for i in ids)


@pytest.mark.parametrize("name", NAMES)
def test_text_is_trained_and_resumes_bit_for_bit(name, network, quick_jit, completed):
    method, rng = method_of(name), np.random.default_rng(3)
    prompts = []
    for i in range(8):
        tokens = rng.integers(2, 11, 3).astype(np.int32)
        prompts.append(Prompt(i, f"p{i}", tokens, "", {"hints": ["weak", "strong"]}))

    def hinted(prompt, hint):  # the first two tokens, the hint, the last
        more = {"weak": [2], "weak\nstrong": [2, 3]}[hint]
        return np.array([*prompt.tokens[:2], *more, prompt.tokens[2]], np.int32)

    table = Table(8, 1, np.zeros(8, np.int32)) if method.curriculum is not None else None

    def collector_of(notes):
        source = TextSource(prompts, 4, 5, completed, SAMPLING, Digits(), Digits(), 3)
        offers = {"tools": lambda key: TextTools(prompts, 3, hinted), "contexts": True}
        setting = Setting(method, N, G, np.ones(1), table=table, **offers)
        return Collector(source, setting, MESH, notes=notes)

    train_on_host = trainer_on_host(network, method, quick_jit)
    batches, state = train_on_host(collector_of)
    again, after = train_on_host(collector_of, restored_at=2)
    for (one, _), (other, _) in zip(batches, again, strict=True):
        jax.tree.map(np.testing.assert_array_equal, live_tokens(one), live_tokens(other))
    jax.tree.map(np.testing.assert_array_equal, state.params, after.params)
    if name == "scaf_grpo":
        check_hinted(batches, prompts)
    elif name != "mopps":
        acts(name, batches)


def test_a_hint_has_a_place_in_a_question_of_text_alone(monkeypatch):
    """What a conversation has between its messages must not be told as words of a user."""
    encoded = {}

    def make(run, questions, most=0):
        return [SimpleNamespace(text=f"<u>{q}<a>", tokens=ids_of(f"<u>{q}<a>")) for q in questions]

    def ids_of(text):
        return np.array([encoded.setdefault(c, len(encoded)) for c in text], np.int32)

    monkeypatch.setattr(plan_tools, "question_prompts", make)
    config = SimpleNamespace(sampling=SimpleNamespace(max_new_tokens=4))
    run = SimpleNamespace(network=SimpleNamespace(max_length=99), config=config)
    hinter = plan_tools.Hinter(run)
    (plain,) = make(run, ["1 + 1?"])
    hinted = hinter(Prompt(0, plain.text, plain.tokens, "2", {}), "two")
    assert hinted.tolist() == ids_of("<u>1 + 1?\n\nHint: two<a>").tolist()
    talk = "<u>1 + 1?<a>2<u>And 2 + 2?<a>"
    marks = np.append(ids_of(talk)[:-3], 99).astype(np.int32)  # its marks are tokens of their own
    with pytest.raises(UserError, match="prompt 0 is more than a question of text"):
        hinter(Prompt(0, talk, marks, "4", {}), "four")


@pytest.mark.parametrize(
    ("hints", "told"),
    [
        ([["k1", "k2"], ["s1", "s2"]], ["k1", "k1\nk2", "s1", "s1\ns2"]),  # as the released code
        (["a", "b", "c", "d"], ["a", "a\nb", "a\nb\nc", "a\nb\nc\nd"]),
        (["a", "b"], ["a", "a", "a\nb", "a\nb"]),
        ("a", ["a"] * 4),
    ],
)
def test_a_tier_of_hints_begins_anew(hints, told):
    prompt = Prompt(0, "p", np.ones(1, np.int32), "", {"hints": hints})
    heard = []

    def hinted(prompt, hint):
        heard.append(hint)
        return prompt.tokens

    tools, groups = TextTools([prompt], 3, hinted), SimpleNamespace(row=np.zeros(1, np.int32))
    for level in range(1, 5):
        tools.hints(groups, level, 4)
    assert heard == told
    for none in ([], [[]]):
        empty = TextTools([Prompt(0, "p", prompt.tokens, "", {"hints": none})], 3, hinted)
        with pytest.raises(UserError, match="has no field 'hints'"):
            empty.hints(groups, 1, 4)


def check_hinted(batches, prompts):
    """Hinted members continue what their group's prompts have in common, by the hinted prompt."""
    count = 0
    for batch, groups in batches:
        for n in range(N):
            prompt, rows = groups.subject[n], np.flatnonzero(batch.members[n])
            opening = batch.prompt_tokens[n, : batch.prompt_lengths[n]]
            for g in rows:
                tokens = batch.tokens[n, g, : batch.lengths[n, g]]
                sequence, mask = np.concatenate([opening, tokens]), batch.mask[n, g, : len(tokens)]
                size = len(sequence) - mask.sum()  # of what nobody drew
                assert not mask[: size - len(opening)].any()
                assert mask[size - len(opening) :].all()
                if g < G:
                    assert sequence[:size].tolist() == prompt.tokens.tolist()
                else:
                    assert sequence[:2].tolist() == prompt.tokens[:2].tolist()
                    assert sequence[2] == 2
                    assert sequence[size - 1] == prompt.tokens[2]
                    count += 1
    assert count
