"""Completions kept by prompt and trained on again, on groups written by hand."""

import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jrl.train.replay import Recall, check_replay, packed, recalled, unpacked

from jrl.config import load_config
from jrl.errors import UserError
from jrl.methods import get_method
from jrl.methods.base import replay_successes
from jrl.objectives import combine_terms, compute_advantages, policy_loss
from jrl.train import build, programs
from jrl.train.groups import to_batch
from jrl.train.sources import Groups, simple_request
from jrl.types import Branching, Rollout, StopReason

G, P, T = 3, 2, 4
RULE = replay_successes(0.1, each=2, prompts=2)
FIRST = np.zeros((1, 2))


def groups_of(prompts, rewards, *, step=0, openings=None, dead=()):
    """Groups whose arrays all say step, prompt and member; member g has g + 1 tokens."""
    rewards = np.array(rewards, np.float32)
    n = len(prompts)
    lengths = np.tile(np.arange(1, G + 1, dtype=np.int32), (n, 1))
    mask = np.arange(T) < lengths[..., None]
    mark = 100 * step + 10 * np.array(prompts)[:, None, None] + np.arange(G)[None, :, None]
    mark = np.broadcast_to(mark, (n, G, T))
    stop = np.full((n, G), StopReason.STOP_TOKEN, np.int32)
    for place in dead:
        stop[place] = StopReason.FAILED
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


def recall(memory, groups, rule=RULE, order=None):
    order = np.tile(np.arange(2.0), (len(groups.rewards), 1)) if order is None else order
    return recalled(memory, groups, groups.rewards[:, :, 0], rule, order)


def rows(groups, place):
    """All that is known of a member, but for whose place it has, up to its length."""
    length = int(groups.rollout.lengths[place])
    cut = {
        name: getattr(groups.rollout, name)[place][:length].tolist()
        for name in ("tokens", "mask", "sampler_logprobs", "versions")
    }
    cut["turn"] = groups.ids["turn"][place][:length].tolist()
    cut["paid"] = groups.stats["paid"][place][:length].tolist()
    cut["rest"] = (length, int(groups.rollout.stop[place]), int(groups.ids["stratum"][place]))
    return cut | {"reward": groups.rewards[place].tolist()}


def test_a_failed_group_gets_an_earlier_success_as_it_was_drawn():
    solved = groups_of([5], [[0, 0, 1]], step=0)
    memory, same = recall({}, solved)
    assert same.counts == {"replayed": 0.0}
    failed = groups_of([5, 6], [[0, 0, 0], [0, 0, 0]], step=3)
    after, swapped = recall(memory, failed)
    assert swapped.counts == {"replayed": 1.0}
    assert swapped.ids["replayed"].tolist() == [[1, 0, 0], [0, 0, 0]]
    assert rows(swapped, (0, 0)) == rows(solved, (0, 2))
    assert swapped.rollout.versions[0, 0].tolist() == [0, 0, 0, -1]
    assert swapped.rollout.sampler_logprobs[0, 0, 3] == 0
    assert swapped.ids["episode"].tolist() == [[0, 1, 2]] * 2
    for place in [(0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]:
        assert rows(swapped, place) == rows(failed, place)
    swapped.rollout.check()
    assert after == memory  # what is replayed is not kept again
    assert rows(failed, (0, 0))["reward"] == [0]  # the groups drawn stay as they were


def test_the_advantages_and_the_loss_of_the_swapped_group_are_grpos(quick_jit):
    """By hand: points (1, 0, 0), the first drawn with the log-probabilities of its own policy."""
    memory, _ = recall({}, groups_of([5], [[0, 0, 1]]))
    _, swapped = recall(memory, groups_of([5], [[0, 0, 0]], step=3))
    batch = to_batch(
        swapped.rollout, swapped.rewards, np.ones(1, np.float32), swapped.ids, swapped.stats
    )
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


def test_what_is_kept_is_the_newest_of_the_prompts_added_to_lately():
    memory = {}
    for step, (prompt, points) in enumerate([(1, 1), (2, 1), (1, 1), (1, 1), (3, 1), (3, 0)]):
        memory, _ = recall(memory, groups_of([prompt], [[0, points, 0]], step=step))
    kept = {p: [k.row["rollout.versions"][0] for k in every] for p, every in memory.items()}
    assert kept == {1: [2, 3], 3: [4]}
    failed = groups_of([1], [[0, 0, 0]], step=9)
    for order, version in (([0.0, 1.0], 2), ([1.0, 0.0], 3)):
        _, swapped = recall(memory, failed, order=np.array([order]))
        assert swapped.rollout.versions[0, 0, 0] == version


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        (groups_of([5], [[0, 0, 1]], step=3), "somebody succeeded"),
        (groups_of([5], [[0, 0, 0]], step=3, openings=[8]), "it opens otherwise"),
        (groups_of([5], [[0, np.nan, 0]], step=3), "a NaN is to be seen"),
    ],
)
def test_groups_that_are_left_alone(groups, why):
    memory, _ = recall({}, groups_of([5], [[0, 0, 1]]))
    _, same = recall(memory, groups)
    assert same.counts["replayed"] == 0, why
    assert rows(same, (0, 0)) == rows(groups, (0, 0))


def test_a_member_that_failed_to_answer_is_no_success_and_can_be_replaced():
    memory, _ = recall({}, groups_of([5], [[0, 0, 1]], dead=[(0, 2)]))
    assert not memory
    memory, _ = recall({}, groups_of([5], [[0, 0, 1]]))
    _, swapped = recall(memory, groups_of([5], [[0, 0, 1]], step=3, dead=[(0, 0), (0, 2)]))
    assert swapped.counts["replayed"] == 1
    assert swapped.rollout.stop[0].tolist() == [1, 1, StopReason.FAILED]


def test_what_a_checkpoint_holds_is_what_is_kept():
    memory = {}
    for prompts, points in (([1, 2], [[1, 0, 0], [0, 1, 1]]), ([2, 3], [[0, 0, 1], [1, 0, 1]])):
        memory, _ = recall(memory, groups_of(prompts, points), replay_successes(0.1, 8, 8))
    again = unpacked(packed(memory))
    assert list(again) == list(memory) == [1, 2, 3]
    for prompt, every in memory.items():
        for a, b in zip(every, again[prompt], strict=True):
            jax.tree.map(np.testing.assert_array_equal, a, b)
            assert {n: x.dtype for n, x in a.row.items()} == {n: x.dtype for n, x in b.row.items()}


class Script:
    """Prompt 5 is solved at step 0 and never again."""

    def draw(self, request):
        step = int(request.step)
        return groups_of([5], [[0, 0, float(step == 0)]], step=step)

    def finish(self, complete):
        pass

    def notes(self):
        return {}


def asked(step):
    return simple_request(jax.random.key(0), {"policy": None}, np.int32(step), TICKET)


TICKET = np.array([7], np.int32)


def test_a_run_keeps_what_a_whole_step_drew():
    keeper = Recall(RULE, Script(), np.ones(1, np.float32))

    def step(number, fails=False):
        drawn = keeper.draw(asked(number))
        keeper.finish(complete=not fails)
        return drawn

    step(0, fails=True)
    assert keeper.notes() == {}
    step(0)
    (note,) = keeper.notes().values()
    assert note["prompts"].tolist() == [5]
    found = step(1)
    assert found.counts == {"replayed": 1.0, "reward": 0.0}  # the reward is that of the draws
    assert found.rewards[0, :, 0].tolist() == [1, 0, 0]
    resumed = Recall(RULE, Script(), np.ones(1, np.float32), notes=note)
    again = resumed.draw(asked(1))
    jax.tree.map(np.testing.assert_array_equal, again.rollout, found.rollout)


def test_points_are_those_of_the_part_that_says_what_is_right():
    class Paid(Script):
        def draw(self, request):
            found = super().draw(request)
            well_formed = np.ones_like(found.rewards)
            return found._replace(rewards=np.concatenate([found.rewards, well_formed], axis=2))

    weights = np.array([1.0, 0.5], np.float32)
    kept = {}
    for judge in (None, 0):
        keeper = Recall(RULE, Paid(), weights, judge)
        keeper.draw(asked(0))
        keeper.finish(complete=True)
        kept[judge] = len(keeper.notes()["replay"]["prompts"])
    assert kept == {None: 2, 0: 1}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("data.task=chain",), "no problem of a procedural task or an environment on the device"),
        (("data.env=guess_number",), "comes again; give data.train, with data.env"),
    ],
)
def test_runs_in_which_no_prompt_comes_again_are_refused(more, said):
    small = "model.config={layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}"
    config = load_config(None, [small, *more, "method=arpo_replay", "run.dir=unused"])
    with pytest.raises(UserError, match=said):
        programs.check_trainable(build.setup(config))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout_mesh": "a mesh"}, r"which does not go together with \[placement\]; remove it"),
        ({"replays_routing": True}, "together with objective.router_replay"),
        ({"tree": Branching()}, "together with objective.tree"),
        ({"recorded": "sessions"}, "and recorded sessions are there already"),
        ({}, None),
    ],
)
def test_what_does_not_go_together_with_a_replay_is_named(changes, said):
    method = get_method("arpo_replay")
    run = SimpleNamespace(
        method=method._replace(draw=method.draw._replace(tree=changes.get("tree"))),
        config=SimpleNamespace(
            method="arpo_replay",
            data=SimpleNamespace(given=changes.get("recorded"), has_solutions=False),
            replays_routing=changes.get("replays_routing", False),
        ),
        rollout_mesh=changes.get("rollout_mesh"),
    )
    if said is None:
        check_replay(run)
        return
    with pytest.raises(UserError, match=said):
        check_replay(run)


def test_coefficients_reach_the_rule():
    rule = get_method("arpo_replay", above=0.5, each=3, kept_prompts=4).replay
    points, members = np.array([[0.5, 0.4], [0.6, 0.0]]), np.ones((2, 2), bool)
    assert rule.keep(points, members).tolist() == [[False, False], [True, False]]
    assert rule.replace(points, members).tolist() == [[True, False], [False, False]]
    assert (rule.each, rule.prompts) == (3, 4)
    with pytest.raises(UserError, match="each = 0"):
        get_method("arpo_replay", each=0)
