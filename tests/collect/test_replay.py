"""Completions kept by prompt and trained on again, on groups written by hand."""

import math

import jax
import numpy as np
import pytest

from jrl.collect.collector import Collector
from jrl.collect.groups import Origin, batch_of, place
from jrl.collect.plan import Setting
from jrl.collect.sources import Groups
from jrl.config import load_config
from jrl.config.features import check_features
from jrl.errors import UserError
from jrl.mesh import make_mesh
from jrl.methods import get_method
from jrl.methods.edit import EditView
from jrl.methods.replays import replay_successes
from jrl.methods.stores import member_store
from jrl.objectives import combine_terms, compute_advantages, policy_loss
from jrl.setup.features import method_features
from jrl.train import build
from jrl.train.trainable import check_trainable
from jrl.types import SILENT, Rollout, StopReason

G, P, T = 3, 2, 4
RULE = replay_successes(0.1, each=2, prompts=2)
KEY = jax.random.key(3)


def groups_of(prompts, rewards, *, step=0, openings=None, dead=()):
    """Groups whose arrays all say step, prompt and member; member g has g + 1 tokens."""
    rewards = np.array(rewards, np.float32)
    n = len(prompts)
    lengths = np.tile(np.arange(1, G + 1, dtype=np.int32), (n, 1))
    mask = np.arange(T) < lengths[..., None]
    mark = 100 * step + 10 * np.array(prompts)[:, None, None] + np.arange(G)[None, :, None]
    mark = np.broadcast_to(mark, (n, G, T))
    stop = np.full((n, G), StopReason.STOP_TOKEN, np.int32)
    for dead_member in dead:
        stop[dead_member] = StopReason.FAILED
    rollout = Rollout(
        prompt_tokens=np.array(
            [[o, 0] for o in (prompts if openings is None else openings)], np.int32
        ),
        prompt_lengths=np.ones(n, np.int32),
        tokens=np.where(mask, mark, 77).astype(np.int32),
        lengths=lengths,
        mask=mask,
        sampler_logprobs=np.where(mask, -0.01 * mark - 0.1, 0).astype(np.float32),
        versions=np.where(mask, step, -1).astype(np.int32),
        stop=stop,
        baseline=np.zeros((n, G), bool),
    ).check()
    ids = {
        "prompt": np.array(prompts, np.int32),
        "turn": np.where(mask, mark, 0).astype(np.int32),
        "episode": np.tile(np.arange(G, dtype=np.int32), (n, 1)),
        "stratum": mark[:, :, 0].astype(np.int32),
    }
    stats = {"paid": np.where(mask, 0.5, 0).astype(np.float32)}
    return Groups(rollout, rewards[..., None], ["p"] * n, {}, ids, stats)


def empty(rule=RULE):
    return rule.init(None, 1)


def recall(store, groups, rule=RULE, key=KEY, column=None):
    """(what is stored then, the groups with what was replayed in its places)."""
    n = len(groups.rewards)
    numbers = np.arange(n, dtype=np.int32)
    members = np.tile(np.arange(G, dtype=np.int32), (n, 1))
    origin = Origin(numbers, numbers, members, np.zeros(G, np.int32), np.int32(0), {})
    placed = place(groups, origin, np.ones(1, np.float32), column)
    view = EditView(0, key, jax.random.split(key, n), np.zeros(n, bool))
    edited, store = rule.apply(store, placed, view)
    return store, jax.device_get(edited)


def replayed(groups):
    return int(groups.ids["replayed"].sum())


def versions(store):
    """Prompt -> the versions of the completions that are stored, the oldest first."""
    age, prompts = np.asarray(store.slots.age), np.asarray(store.slots.prompt)
    by_prompt = {}
    for slot in np.argsort(age):
        if age[slot] >= 0:
            row = store.rows[int(slot)]
            by_prompt.setdefault(int(prompts[slot]), []).append(int(row["rollout.versions"][0]))
    return by_prompt


def rows(groups, place):
    """All that is known of a member, but for whose place it has, up to its length."""
    length = int(groups.rollout.lengths[place])
    columns = {
        name: getattr(groups.rollout, name)[place][:length].tolist()
        for name in ("tokens", "mask", "sampler_logprobs", "versions")
    }
    columns["turn"] = groups.ids["turn"][place][:length].tolist()
    columns["paid"] = groups.stats["paid"][place][:length].tolist()
    columns["rest"] = (length, int(groups.rollout.stop[place]), int(groups.ids["stratum"][place]))
    return columns | {"reward": groups.rewards[place].tolist()}


def test_a_failed_group_gets_an_earlier_success_as_it_was_drawn():
    solved = groups_of([5], [[0, 0, 1]], step=0)
    store, same = recall(empty(), solved)
    assert replayed(same) == 0
    failed = groups_of([5, 6], [[0, 0, 0], [0, 0, 0]], step=3)
    after, swapped = recall(store, failed)
    assert swapped.ids["replayed"].tolist() == [[1, 0, 0], [0, 0, 0]]
    assert rows(swapped, (0, 0)) == rows(solved, (0, 2))
    assert swapped.rollout.versions[0, 0].tolist() == [0, 0, 0, -1]
    assert swapped.rollout.sampler_logprobs[0, 0, 3] == 0
    assert swapped.ids["episode"].tolist() == [[0, 1, 2]] * 2
    for place_ in [(0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]:
        assert rows(swapped, place_) == rows(failed, place_)
    swapped.rollout.check()
    assert versions(after) == versions(store)  # what is replayed is not stored again
    assert rows(failed, (0, 0))["reward"] == [0]  # the groups drawn stay as they were


def test_a_group_of_which_a_member_was_not_judged_is_left_alone():
    def with_silent(groups, silent):
        return groups._replace(ids=groups.ids | {SILENT: np.array(silent, np.int32)})

    solved = with_silent(groups_of([5, 6], [[0, 0, 1]] * 2, step=0), [[0, 0, 0]] * 2)
    store, _ = recall(empty(), solved, column=0)
    failed = with_silent(groups_of([5, 6], [[0, 0, 0]] * 2, step=3), [[0, 1, 0], [0, 0, 0]])
    _, swapped = recall(store, failed, column=0)
    assert swapped.ids["replayed"].tolist() == [[0, 0, 0], [1, 0, 0]]


def test_the_advantages_and_the_loss_of_the_swapped_group_are_grpos(quick_jit):
    """By hand: points (1, 0, 0), the first drawn with the log-probabilities of its own policy."""
    memory, _ = recall(empty(), groups_of([5], [[0, 0, 1]]))
    _, swapped = recall(memory, groups_of([5], [[0, 0, 0]], step=3))
    batch = batch_of(swapped)
    objective = get_method("arpo_replay").objective
    logprobs = np.where(batch.mask, -0.15, 0).astype(np.float32)

    @quick_jit
    def losses(batch):
        advantages, batch, state, _ = compute_advantages(objective, batch, objective.init())
        terms, _ = policy_loss(objective, {"logprobs": logprobs}, batch, advantages, state)
        return advantages, combine_terms(objective, terms, state)

    advantages, loss = losses(batch)
    deviation = math.sqrt(((2 / 3) ** 2 + 2 * (1 / 3) ** 2) / 2)
    by_hand = [(2 / 3) / (deviation + 1e-6), *[(-1 / 3) / (deviation + 1e-6)] * 2]
    np.testing.assert_allclose(np.asarray(advantages)[0, :, 0], by_hand, rtol=1e-6)
    # Drawn at -0.1 - 0.01 * mark: the success is 52 of step 0, the others 351 and 352 of step 3.
    members = [(52, by_hand[0]), (351, by_hand[1]), (352, by_hand[2])]
    total = 0.0
    for mark, advantage in members:
        ratio = math.exp(-0.15 + 0.1 + 0.01 * mark)
        total -= min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)
    np.testing.assert_allclose(float(loss), total / 3, rtol=1e-5)


def test_what_is_stored_is_the_newest_of_the_prompts_added_to_lately():
    store = empty()
    for step, (prompt, points) in enumerate([(1, 1), (2, 1), (1, 1), (1, 1), (3, 1), (3, 0)]):
        store, _ = recall(store, groups_of([prompt], [[0, points, 0]], step=step))
    assert versions(store) == {1: [2, 3], 3: [4]}
    failed, stored_versions = groups_of([1], [[0, 0, 0]], step=9), set()
    for seed in range(8):
        key = jax.random.key(seed)
        _, swapped = recall(store, failed, key=key)
        draws = jax.random.uniform(jax.random.split(key, 1)[0], (2,))  # of the older and the newer
        version = int(swapped.rollout.versions[0, 0, 0])
        assert version == [2, 3][int(draws[1] < draws[0])]
        stored_versions.add(version)
    assert stored_versions == {2, 3}


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        (groups_of([5], [[0, 0, 1]], step=3), "somebody succeeded"),
        (groups_of([5], [[0, 0, 0]], step=3, openings=[8]), "it opens otherwise"),
        (groups_of([5], [[0, np.nan, 0]], step=3), "a NaN is to be seen"),
    ],
)
def test_groups_that_are_left_alone(groups, why):
    memory, _ = recall(empty(), groups_of([5], [[0, 0, 1]]))
    _, same = recall(memory, groups)
    assert replayed(same) == 0, why
    assert rows(same, (0, 0)) == rows(groups, (0, 0))


def test_a_member_that_failed_to_answer_is_no_success_and_can_be_replaced():
    memory, _ = recall(empty(), groups_of([5], [[0, 0, 1]], dead=[(0, 2)]))
    assert not memory.rows
    memory, _ = recall(empty(), groups_of([5], [[0, 0, 1]]))
    _, swapped = recall(memory, groups_of([5], [[0, 0, 1]], step=3, dead=[(0, 0), (0, 2)]))
    assert replayed(swapped) == 1
    assert swapped.rollout.stop[0].tolist() == [1, 1, StopReason.FAILED]


def test_what_a_checkpoint_holds_is_what_is_stored():
    rule = replay_successes(0.1, 8, 8)
    store = empty(rule)
    for prompts, points in (([1, 2], [[1, 0, 0], [0, 1, 1]]), ([2, 3], [[0, 0, 1], [1, 0, 1]])):
        store, _ = recall(store, groups_of(prompts, points), rule)
    again = empty(rule).unpacked(store.packed())
    assert {*again.rows} == {*store.rows}
    assert len(store.rows) == 6
    jax.tree.map(np.testing.assert_array_equal, again.slots, store.slots)
    for slot, row in store.rows.items():
        jax.tree.map(np.testing.assert_array_equal, dict(row), dict(again.rows[slot]))
        assert {n: x.dtype for n, x in row.items()} == {
            n: x.dtype for n, x in again.rows[slot].items()
        }


def test_a_checkpoint_holds_a_store_that_has_accepted_nothing():
    store, _ = recall(empty(), groups_of([5], [[0, 0, 0]]))
    again = empty().unpacked(store.packed())
    assert not again.rows
    assert again.shapes == store.shapes != {}


class Script:
    """Prompt 5 is solved at step 0 and never again."""

    def __init__(self, fails=False):
        self.fails = fails

    def order(self, tickets):
        return tickets

    def prompts(self, key, rows):
        return ["p"] * len(rows), []

    def draw(self, request):
        if self.fails:
            raise OSError("lost")
        step = int(request.step)
        return groups_of([5], [[0, 0, float(step == 0)]], step=step)

    def finish(self, complete):
        pass

    def notes(self):
        return {}


def collector_of(source, rule=RULE, weights=(1.0,), notes=None, judge=None):
    method = get_method("grpo")._replace(edits=(rule,))
    mesh = make_mesh({}, jax.devices()[:1])
    setting = Setting(method, 1, G, np.array(weights), judge)
    return Collector(source, setting, mesh, notes=notes or {})


def collected(collector, step):
    _, groups, _ = collector.collect(KEY, {"policy": None}, step=step, cursor=step)
    return groups


def test_a_run_stores_what_a_whole_step_drew():
    collector = collector_of(Script(fails=True))
    at_start = collector.notes()
    with pytest.raises(OSError, match="lost"):
        collected(collector, 0)
    jax.tree.map(np.testing.assert_array_equal, collector.notes(), at_start)
    collector.source = Script()
    collected(collector, 0)
    note = jax.device_get(collector.notes())
    first = collected(collector, 1)
    assert first.counts["replayed"] == 1.0
    assert first.counts["reward"] == 0.0  # that of the draws
    assert first.rewards[0, :, 0].tolist() == [1, 0, 0]
    again = collected(collector_of(Script(), notes=note), 1)
    jax.tree.map(np.testing.assert_array_equal, again.rollout, first.rollout)


def test_points_are_those_of_the_part_that_says_what_is_right():
    class Paid(Script):
        def draw(self, request):
            groups = super().draw(request)
            well_formed = np.ones_like(groups.rewards)
            return groups._replace(rewards=np.concatenate([groups.rewards, well_formed], axis=2))

    stored = {}
    for judge in (None, 0):
        collector = collector_of(Paid(), weights=(1.0, 0.5), judge=judge)
        collected(collector, 0)
        stored[judge] = len(collector.collected.edits[0].rows)
    assert stored == {None: 2, 0: 1}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("data.task=chain",), "needs data.train: no problem of a task or of an environment"),
        (
            ("data.env=guess_number",),
            "returns; give it, with data.env = FILE.py:function for",
        ),
    ],
)
def test_runs_in_which_no_prompt_comes_again_are_refused(more, message):
    small = "model.config={layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}"
    config = load_config(None, [small, *more, "method=arpo_replay", "run.dir=unused"])
    with pytest.raises(UserError, match=message):
        check_trainable(build.setup(config))


@pytest.mark.parametrize(
    "other", ["placement", "router replay", "branches", "given completions", "several processes"]
)
def test_what_does_not_go_together_with_a_replay_is_named(other):
    features = method_features(get_method("arpo_replay")) | {"records": "data.train"}
    check_features(features)
    with pytest.raises(UserError, match="stores completions, does not go with X: "):
        check_features(features | {other: "X"})
    with pytest.raises(UserError, match="which stores completions: they belong together; choose"):
        check_features(features | {"several groups": "data.env"})


def test_coefficients_reach_the_rule():
    (rule,) = get_method("arpo_replay", above=0.5, each=3, kept_prompts=4).edits
    assert rule.init == member_store(12, 3, 4)
    store, _ = recall(empty(rule), groups_of([1, 2], [[0.5, 0.4, 0], [0.6, 0, 0]]), rule)
    assert versions(store) == {2: [0]}
    _, swapped = recall(store, groups_of([2, 2], [[0.5, 0.4, 0], [0.6, 0, 0]]), rule)
    assert swapped.ids["replayed"].tolist() == [[1, 0, 0], [0, 0, 0]]
    with pytest.raises(UserError, match="each = 0"):
        get_method("arpo_replay", each=0)


@pytest.mark.parametrize(
    ("method", "share", "stored", "places"),
    [("digirl", 0.5, 2, 1), ("webrl", 0.7, 1, 1), ("digirl", 0.7, 2, 2)],
)
def test_a_share_of_each_group_is_episodes_or_successes_of_before(method, share, stored, places):
    (rule,) = get_method(method, replayed=share).edits
    store, _ = recall(empty(rule), groups_of([5], [[0, 1, 0]], step=0, dead=[(0, 2)]), rule)
    assert sum(len(step_versions) for step_versions in versions(store).values()) == stored
    _, later = recall(store, groups_of([5], [[0, 0, 1]], step=3), rule)
    assert later.ids["replayed"].astype(bool).tolist() == [[g < places for g in range(G)]]
