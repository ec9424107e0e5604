"""Collecting groups, with a draw that follows a script instead of sampling."""

import jax
import numpy as np
import pytest

from jrl.collect.collector import Collector
from jrl.collect.groups import to_batch
from jrl.collect.plan import Setting
from jrl.collect.sources import Groups, entries, simple_request
from jrl.collect.sources_task import completion_number
from jrl.collect.sources_text import TextSource
from jrl.judging.host import answer_number
from jrl.mesh import make_mesh
from jrl.methods import get_method, refill
from jrl.methods.curriculum import Curriculum, Selection, Table
from jrl.methods.edit import edit_of
from jrl.objectives.advantages import mean_centred
from jrl.rewards.pool import CallOutcome, Scores
from jrl.train.step_metrics import with_slot_use
from jrl.types import Prompt, Rollout, StopReason

MESH = make_mesh({}, jax.devices()[:1])
KEY = jax.random.key(0)
WEIGHTS = np.array([1.0, 0.5], np.float32)
G, P, T = 3, 2, 4
PLAIN = get_method("grpo")


class Script:
    """Groups whose tokens say which position they are of; good ones have unequal rewards."""

    def __init__(self, good, baseline=False, as_list=False):
        self.good, self.baseline, self.listed = set(good), baseline, as_list
        self.calls = []

    def order(self, tickets):
        return tickets

    def prompts(self, key, rows):
        rows = np.asarray(rows)
        texts = [f"prompt {i}" for i in rows.tolist()]
        return (texts if self.listed else {"id": rows}), texts

    def finish(self, complete):
        assert complete

    def draw(self, request):
        (_, positions), step = entries(request), request.step
        assert positions.dtype == np.int32
        assert step.dtype == np.int32
        self.calls.append((int(step), positions.tolist()))
        n = len(positions)
        baseline = np.zeros((n, G), bool)
        baseline[:, -1] = self.baseline
        rewards = np.zeros((n, G, 2), np.float32)
        rewards[:, 0, 0] = np.isin(positions, list(self.good))
        rewards[:, :, 1] = positions[:, None]
        if self.baseline:
            rewards[:, -1, 0] = 7.0  # a baseline's points are nobody's spread
        ones = np.ones((n, G, T), np.float32)
        rollout = Rollout(
            prompt_tokens=np.repeat(positions[:, None], P, axis=1),
            prompt_lengths=np.full(n, P, np.int32),
            tokens=(ones * positions[:, None, None]).astype(np.int32),
            lengths=np.full((n, G), T, np.int32),
            mask=ones.astype(bool),
            sampler_logprobs=-ones,
            versions=np.full((n, G, T), step, np.int32),
            stop=np.full((n, G), StopReason.LENGTH, np.int32),
            baseline=baseline,
        )
        subject = [f"prompt {i}" for i in positions] if self.listed else {"id": positions}
        rollout, rewards = jax.device_put((rollout, rewards))
        counts = {"timeouts": 1.0, "slot_tokens": 6 + len(self.calls), "slot_steps": 10}
        return Groups(rollout, rewards, subject, counts, {"prompt": positions})


def request_for(prompts):
    """A request for the first prompts, at step 0."""
    tickets = np.arange(prompts, dtype=np.int32)
    return simple_request(KEY, {"policy": None}, np.int32(0), tickets, G)


def collected(script, method, prompts=4, step=3, cursor=100):
    collector = Collector(script, Setting(method, prompts, G, WEIGHTS), MESH)
    batch, groups, cursor = collector.collect(KEY, {"policy": None}, step=step, cursor=cursor)
    return batch.check(), groups, cursor


def editing(changes, method=PLAIN):
    return method.with_(**changes)


def test_without_an_editor_everything_is_kept():
    script = Script(good=())
    batch, groups, cursor = collected(script, PLAIN)
    assert script.calls == [(3, [100, 101, 102, 103])]
    assert cursor == 104
    assert batch.tokens[:, 0, 0].tolist() == [100, 101, 102, 103]
    assert bool(batch.members.all())
    assert bool(batch.mask.all())
    assert bool(batch.truncated.all())
    assert batch.reward_weights.tolist() == [1.0, 0.5]
    assert with_slot_use(groups.counts) == {"timeouts": 1.0, "slot_use": 0.7}
    assert np.array_equal(batch.stats["sampler_logprobs"], groups.rollout.sampler_logprobs)
    assert batch.tokens.sharding.mesh == MESH


@pytest.mark.parametrize("as_list", [False, True])
def test_refilling_until_the_batch_is_full(as_list):
    script = Script(good=[101, 103, 106, 108, 109], as_list=as_list)
    batch, groups, cursor = collected(script, editing(refill(max_rounds=10)))
    assert script.calls == [
        (3, [100, 101, 102, 103]),
        (3, [104, 105, 106, 107]),
        (3, [108, 109, 110, 111]),
    ]
    assert cursor == 112
    expected = [101, 103, 106, 108]  # in the order drawn; one too many is left out
    assert batch.tokens[:, 0, 0].tolist() == expected
    assert batch.prompt_tokens[:, 0].tolist() == expected
    assert np.asarray(batch.rewards)[:, 0, 1].tolist() == expected
    if as_list:
        assert groups.subject == [f"prompt {i}" for i in expected]
    else:
        assert groups.subject["id"].tolist() == expected
    assert groups.rollout.tokens[:, 0, 0].tolist() == expected
    assert bool(batch.members.all())
    assert with_slot_use(groups.counts) == {
        "slot_use": 0.8,  # of all draws: 7, 8 and 9 tokens of 10 slot-steps each
        "reward": pytest.approx(52.888889, rel=1e-6),  # of all 12 groups drawn
        "timeouts": 3.0,
        "rounds": 3.0,
        "groups_kept": pytest.approx(5 / 12),
        "groups_missing": 0.0,
    }


def test_rounds_run_out():
    script = Script(good=[102, 105])
    batch, groups, cursor = collected(script, editing(refill(max_rounds=2)))
    assert len(script.calls) == 2
    assert cursor == 108
    assert batch.tokens[:, 0, 0].tolist()[:2] == [102, 105]
    assert batch.tokens.shape == (4, G, T)
    live = np.array([True, True, False, False])
    assert np.array_equal(batch.members, np.broadcast_to(live[:, None], (4, G)))
    assert np.array_equal(batch.mask, np.broadcast_to(live[:, None, None], (4, G, T)))
    assert groups.counts["groups_missing"] == 2
    assert groups.counts["rounds"] == 2


def test_nothing_is_kept():
    batch, groups, _ = collected(Script(good=()), editing(refill(max_rounds=3)))
    assert not bool(batch.members.any())
    assert not bool(batch.mask.any())
    assert groups.counts["groups_missing"] == 4
    assert groups.counts["groups_kept"] == 0


def test_dropping_without_refilling():
    script = Script(good=[101, 102])
    batch, groups, cursor = collected(script, editing(refill(max_rounds=1)))
    assert len(script.calls) == 1
    assert cursor == 104
    assert batch.tokens[:2, 0, 0].tolist() == [101, 102]
    assert np.asarray(batch.members).any(axis=1).tolist() == [True, True, False, False]
    assert groups.counts["groups_missing"] == 2


def test_enough_at_once_is_one_round():
    script = Script(good=range(100, 104))
    batch, groups, cursor = collected(script, editing(refill()))
    assert len(script.calls) == 1
    assert cursor == 104
    assert groups.counts["rounds"] == 1
    assert groups.counts["groups_kept"] == 1
    assert batch.tokens[:, 0, 0].tolist() == [100, 101, 102, 103]


def test_baselines_do_not_make_a_group_good():
    """The greedy member's reward is another's, but only live members are compared."""
    script = Script(good=[101], baseline=True)
    batch, _, _ = collected(script, editing(refill(max_rounds=1)))
    assert batch.tokens[0, 0, 0] == 101
    assert np.asarray(batch.members).tolist() == [[True, True, False]] + [[False] * 3] * 3
    assert not np.asarray(batch.mask)[:, -1].any()
    assert np.asarray(batch.baseline)[:, -1].all()


def test_an_edit_sees_weighted_scores():
    views = []

    def keep(groups, view):
        views.append((np.asarray(groups.score()), np.asarray(groups.members())))
        return groups

    edits = {"edits": (edit_of(keep),)}
    collected(Script(good=[101], baseline=True), editing(edits), prompts=2)
    scores, members = views[0]
    np.testing.assert_allclose(scores[0], [50.0, 50.0, 57.0])
    np.testing.assert_allclose(scores[1], [51.5, 50.5, 57.5])
    assert members.tolist() == [[True, True, False]] * 2


@pytest.mark.parametrize("changes", [{}, refill(max_rounds=2)])
def test_the_rewards_seam(changes):
    first_tokens = []

    def rewards(groups, view):
        first_tokens.append(groups.rollout.tokens[:, 0, 0].tolist())
        rewards_with_spread = np.array(groups.rewards)
        rewards_with_spread[:, 1, 0] = 5.0  # now every group has a spread
        return groups.replace(rewards=rewards_with_spread)

    method = editing(changes)._replace(rewards=rewards)
    batch, groups, _ = collected(Script(good=()), method)
    # Also before a plan's round, which then draws nothing more.
    assert first_tokens == [[100, 101, 102, 103]] * (1 + bool(changes))
    assert np.asarray(batch.rewards)[:, 1, 0].tolist() == [5.0] * 4
    assert np.asarray(groups.rewards)[:, 1, 0].tolist() == [5.0] * 4
    assert bool(batch.members.all())


def test_a_curriculum_chooses_the_rows_and_learns_from_all_groups_drawn():
    outcomes = []

    def choose(state, query):
        return Selection(2 * query.tickets % 256, prior={"ticket": query.tickets / 1.0}), state

    def update(state, outcome):
        jax.debug.callback(
            lambda rows, rate: outcomes.append((rows, rate)), outcome.row, outcome.rate
        )
        return state

    script = Script(good=[202])
    curriculum = Curriculum(lambda table: np.zeros(1, np.float32), choose, update)
    method = editing(refill(max_rounds=2))._replace(curriculum=curriculum)
    table = Table(256, 1, np.zeros(256, np.int32))
    setting = Setting(method, 2, G, WEIGHTS, accuracy_column=0, table=table)
    collector = Collector(script, setting, MESH)
    batch, _, cursor = collector.collect(KEY, {"policy": None}, step=3, cursor=100)
    assert [[rows for _, rows in script.calls]] == [[[200, 202], [204, 206]]]
    assert cursor == 104
    assert batch.prior["ticket"][0] == 101.0
    collector.learn(3, None)
    jax.effects_barrier()
    ((rows, rate),) = outcomes
    assert rows.tolist() == [200, 202, 204, 206]
    np.testing.assert_allclose(rate, [0, 1 / 3, 0, 0], atol=1e-6)


class Pool:
    """Reward functions that fail for some samples, and have those left out."""

    def __init__(self, points):
        self.points = np.array(points, np.float32).reshape(-1, 1)

    over_batch = by_token = False

    def scores(self, samples, *, group):
        out = np.isnan(self.points[:, 0])
        return Scores(self.points, CallOutcome(out, {"reward_errors": float(out.sum())}))


class Letters:
    def decode(self, ids):
        return "x" * len(ids)


@pytest.mark.parametrize("baseline", [False, True])
def test_completions_without_points_leave_their_group(baseline):
    """And the advantages are those of the group without them; a lost baseline takes the group."""
    nan = np.nan
    sampled_groups = jax.device_get(Script([], baseline=baseline).draw(request_for(2)))
    prompts = [Prompt(i, "?", np.zeros(P, np.int32), "1", {}) for i in range(2)]
    pool = Pool([1.0, nan, 0.5, 0.0, 1.0, nan])
    source = TextSource(prompts, P, None, None, None, pool, Letters())
    groups = source.judge(prompts, prompts, sampled_groups.rollout)
    batch = to_batch(groups.rollout, groups.rewards, np.ones(1, np.float32))
    if baseline:
        assert batch.members.tolist() == [[True, False, False], [False, False, False]]
        assert groups.counts["reward_dropped"] == 4
    else:
        assert batch.members.tolist() == [[True, False, True], [True, True, False]]
        assert groups.counts["reward_dropped"] == 2
        advantage = jax.vmap(mean_centred)(batch.rewards[..., 0], batch.members)
        np.testing.assert_allclose(advantage, [[0.25, 0, -0.25], [-0.5, 0.5, 0]], atol=1e-7)
    assert np.isfinite(groups.rewards).all()
    assert not batch.mask[~batch.members].any()


def test_answers_are_told_apart_by_what_they_say():
    texts = [r"so \boxed{12}", "it is 3 and 12", "#### 12\nbye", "13", "no number", "no  number"]
    numbers = [answer_number(text) for text in texts]
    assert numbers[0] == numbers[1] == numbers[2]
    assert len({*numbers}) == 4
    assert all(0 <= x < 2**31 for x in numbers)


def test_completions_of_tasks_are_told_apart_by_their_tokens():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 12, (4096, 4)).astype(np.int32)
    lengths = rng.integers(0, 5, 4096).astype(np.int32)
    completion_numbers = np.asarray(jax.vmap(completion_number)(tokens, lengths))
    numbers_by_tokens = {}
    for row, length, number in zip(
        tokens.tolist(), lengths.tolist(), completion_numbers.tolist(), strict=True
    ):
        numbers_by_tokens.setdefault(tuple(row[:length]), set()).add(number)
    assert all(len(numbers) == 1 for numbers in numbers_by_tokens.values())
    assert (
        len({n for numbers in numbers_by_tokens.values() for n in numbers})
        == len(numbers_by_tokens)
        > 1000
    )


@pytest.mark.parametrize("lines", [(), (4, 7)])
def test_lines_of_a_text_are_steps_where_a_method_wants_it(lines):
    """By hand, with two ids that end a line; each belongs to the line that it ends."""
    prompts = [Prompt(0, "?", np.zeros(P, np.int32), "1", {})]
    rollout = jax.device_get(Script([]).draw(request_for(1))).rollout
    tokens = np.array([[[5, 4, 4, 6, 7, 5][: rollout.tokens.shape[2]]] * rollout.tokens.shape[1]])
    rollout = rollout.replace(tokens=tokens)
    program = lambda *args: (rollout, np.int32(1))  # noqa: E731
    source = TextSource(prompts, P, None, program, None, None, Letters(), lines=lines)
    ids = source.draw(request_for(1)).ids
    steps = [0, 0, 1, 2, 2, 3][: tokens.shape[2]]
    assert ("step" in ids) == bool(lines)
    assert not lines or ids["step"].tolist() == [[steps] * tokens.shape[1]]


def test_which_methods_have_lines_for_steps():
    levels = [get_method("oreo", level=level).needs.reads for level in ("token", "step")]
    assert ["lines" in needs for needs in levels] == [False, True]
    assert "lines" in get_method("bfs_prover").needs.reads
    assert not get_method("oreo", level="step").lacks
