"""Episodes that branch behind answers of their environment: trees counted by hand, and faults."""

import asyncio
import random
import threading
from functools import cache

import jax
import numpy as np
import pytest
from tiny import jit, tiny_config, trainer_logprobs

from jrl.collect.groups import to_batch
from jrl.collect.host_episodes import HostEpisodes
from jrl.collect.run_rows import RunRows
from jrl.collect.sources import simple_request
from jrl.episodes.branching import MEASURED_TOKENS, EpisodeBranches
from jrl.episodes.calls import Calls
from jrl.episodes.chat import PlainFormat
from jrl.episodes.groups import play_episodes
from jrl.episodes.host import ChatOptions, Feedback, HostEnv, Limits
from jrl.episodes.play import Device
from jrl.episodes.transcript import RowShape, to_rollout
from jrl.episodes.world import host_world
from jrl.errors import UserError
from jrl.mesh import make_mesh
from jrl.methods import get_method
from jrl.models.tokenizer import char_tokenizer
from jrl.models.transformer import transformer
from jrl.objectives.policy import compute_advantages
from jrl.sampling.row_costs import WaitingPlace
from jrl.sampling.rows import Rows
from jrl.types import Branching, Prompt, StopReason

TOKENIZER = char_tokenizer()
P, T, STOPS = 8, 48, (1, 5, 9, 20, 33)
CONFIG = tiny_config(P + T)
NETWORK = transformer(CONFIG)
EVEN, ENTROPY = Branching("even", 2), Branching("entropy", 2)


@cache
def params():
    return jax.tree.map(lambda x: 1.5 * x, jit(NETWORK.init)(jax.random.key(0)))


@cache
def rows(slots, chunk, at, parked=None):
    return Rows(
        NETWORK,
        slots=slots,
        prompt_tokens=P,
        max_new_tokens=T,
        stop_tokens=STOPS,
        chunk=chunk,
        sampling={"temperature": 1.0},
        suspended=parked,
        measure=EpisodeBranches(Branching(at, 2), 4, 0).measure,
    )


def user(text):
    return [{"role": "user", "content": text}]


async def no_wait():
    return None


def counting_env(
    wait=no_wait,
    turns=3,
    opened=None,
    done=lambda state: False,
    state_of=lambda prompt: 0,
    **fields,
):
    """Answers with the number of tokens said so far, which it keeps in place; four a turn."""
    opened = [] if opened is None else opened

    async def init(prompt, seed):
        await wait()
        opened.append(prompt.id)
        return {"said": 0, "turns": 0, "held": state_of(prompt)}, user(prompt.text)

    async def step(state, reply):
        await wait()
        state["said"] += len(reply.tokens)
        state["turns"] += 1
        return state, Feedback(user(f"{state['said']}>"), float(len(reply.tokens)), done(state))

    async def close(state):
        await wait()
        assert state.pop("said") >= 0  # once for each state
        opened.append("closed")

    limits = Limits(turns=turns, turn_tokens=4)
    return HostEnv(init, step, close, limits=limits)._replace(**fields)


def prompts(count):
    texts = [f"{i}+{i * 7 % 10}=" for i in range(count)]
    return [Prompt(i, t, np.zeros(0, np.int32), None) for i, t in enumerate(texts)]


def play(env, tree=EVEN, count=2, group=4, slots=8, chunk=3, parked=None, **device):
    table = rows(slots, chunk, tree.at, parked)
    table.set_weights(params(), 7)
    played_prompts = prompts(count)
    with Calls() as calls:
        return play_episodes(
            Device(table, **device),
            host_world(calls, env, PlainFormat(TOKENIZER), TOKENIZER),
            played_prompts,
            [5 + p.id for p in played_prompts],
            group=group,
            branches=EpisodeBranches(tree, group, slots),
        )


def turns_of(rollout):
    return [
        [(s.tokens.tolist(), s.drawn, s.reward, s.node) for s in t.segments]
        for group in rollout.groups
        for t in group
    ]


def ids_of(transcript):
    return np.concatenate([s.tokens for s in transcript.segments])


@pytest.fixture(scope="module")
def tree_rollout():
    return play(counting_env())


def test_branches_leave_behind_the_first_answer(tree_rollout):
    """Two roots and a branch of each, at every place that can be left: counted by hand."""
    assert tree_rollout.counts["branches"] == 2 * 2
    assert tree_rollout.counts["env_fork_errors"] == tree_rollout.counts["env_errors"] == 0
    for group in tree_rollout.groups:
        for root, branch in ((0, 2), (1, 3)):
            mine, theirs = group[root].segments, group[branch].segments
            assert [s.drawn for s in mine] == [True, False, True, False, True]
            assert [s.drawn for s in theirs] == [False, False, True, False, True]
            for a, b in zip(mine[:2], theirs[:2], strict=True):
                np.testing.assert_array_equal(a.tokens, b.tokens)
                assert (a.turn, a.step, a.state, a.reward) == (b.turn, b.step, b.state, b.reward)
            assert mine[2].tokens.tolist() != theirs[2].tokens.tolist()
            assert [s.turn for s in theirs] == [0, 0, 1, 1, 2]
        # The shared turn and its answer are a node; what follows is one of each member's own.
        nodes = [[s.node for s in t.segments] for t in group]
        first, second = nodes[0][0], nodes[1][0]
        assert nodes[0][:2] == nodes[2][:2] == [first, first]
        assert nodes[1][:2] == nodes[3][:2] == [second, second]
        assert {first, second} | {n[2] for n in nodes} == set(range(1, 7))
        assert all(n[2:] == [n[2]] * 3 for n in nodes)


def test_the_environment_continues_from_where_it_was(tree_rollout):
    for transcript in (t for group in tree_rollout.groups for t in group):
        total = 0
        for turn, answer in zip(transcript.segments[::2], transcript.segments[1::2], strict=False):
            total += len(turn.tokens)
            reply = TOKENIZER.encode(f"{total}>")
            # Behind the end of the turn, where that was cut.
            assert answer.tokens.tolist()[-len(reply) :] == reply
        assert transcript.points == sum(len(s.tokens) for s in transcript.segments[::2])


def test_each_token_is_trained_once_and_scored_as_it_was_drawn(tree_rollout):
    arrays = to_rollout(tree_rollout.groups, RowShape(4, P, T))
    batch = arrays.rollout.check()
    node, mask = arrays.ids["node"], np.asarray(batch.mask)
    assert mask.sum() == tree_rollout.counts["slot_tokens"]
    for n in range(2):
        for i, t in zip(*np.nonzero(mask[n]), strict=True):
            assert sum(mask[n, j, t] for j in range(4) if node[n, j, t] == node[n, i, t]) == 1
    assert (batch.versions == np.where(mask, 7, -1)).all()
    own_nodes = {(n, i): set(node[n, i][mask[n, i]]) for n in range(2) for i in range(4)}
    shared = sum((node[n, i] > 0).sum() for n in range(2) for i in (2, 3)) - sum(
        np.isin(node[n, i], list(own_nodes[n, i])).sum() for n in range(2) for i in (2, 3)
    )
    assert tree_rollout.counts["tree_shared_tokens"] == shared > 0

    scored = trainer_logprobs(NETWORK, params(), batch)
    assert np.abs(np.where(mask, scored - batch.sampler_logprobs, 0)).max() < 1e-5


def test_a_past_is_read_once(tree_rollout):
    """Openings for the roots, and answers in the row that heard them first."""
    new = sum(
        len(s.tokens)
        for group in tree_rollout.groups
        for i, t in enumerate(group)
        for s in (t.segments if i < 2 else t.segments[2:])
        if s.drawn is False
    )
    openings = sum(len(group[0].opening) for group in tree_rollout.groups)
    read = tree_rollout.counts["read_tokens"] - new
    assert openings <= read <= 2 * openings
    assert tree_rollout.counts["reread_tokens"] == 0


@pytest.mark.parametrize("tree", [EVEN, ENTROPY], ids=["even", "entropy"])
def test_a_tree_depends_on_neither_timing_nor_slots_nor_chunks(tree):
    chance = random.Random(1)

    async def wait():
        await asyncio.sleep(chance.random() * 0.02)

    often = counting_env(turns=4)
    tree_rollout = play(often, tree, group=6)
    assert tree_rollout.counts["branches"] > 0
    assert turns_of(play(counting_env(wait, turns=4), tree, group=6)) == turns_of(tree_rollout)
    assert turns_of(play(often, tree, group=6, slots=6, chunk=5)) == turns_of(tree_rollout)
    assert turns_of(play(often, tree, group=6, choose=lambda _: WaitingPlace.PARKED)) == turns_of(
        tree_rollout
    )
    # Where no copy has room the past is read again, and counted.
    tight = play(often, tree, group=6, slots=6, parked=0, choose=lambda _: WaitingPlace.HELD)
    assert turns_of(tight) == turns_of(tree_rollout)
    assert tight.counts["reread_tokens"] > 0


def test_divided_slots_give_the_same(tree_rollout):
    with jax.set_mesh(make_mesh({"data": 2}, jax.devices()[:2])):
        rows.cache_clear()
        divided = play(counting_env())
        rows.cache_clear()
    assert turns_of(divided) == turns_of(tree_rollout)
    assert divided.counts["branches"] == tree_rollout.counts["branches"]


def test_episodes_are_left_where_the_entropy_rises_by_more_than_the_threshold():
    """Of all turns behind an answer; the entropies by the network, in float64."""

    def entropies(transcript):
        ids = np.concatenate([transcript.opening, ids_of(transcript)])
        at = np.arange(len(ids))[None]
        hidden, _ = NETWORK.hidden(params(), ids[None], at, np.ones_like(at))
        logprobs = np.asarray(jax.nn.log_softmax(NETWORK.logits(params(), hidden[0])), np.float64)
        all_of = -(np.exp(logprobs) * logprobs).sum(1)
        ends = len(transcript.opening) + np.cumsum([len(s.tokens) for s in transcript.segments])
        starts = [len(transcript.opening), *ends[:-1]]
        turns = [(a, b) for a, b in zip(starts, ends, strict=True)][::2]
        return [all_of[a - 1 : b - 1][:MEASURED_TOKENS].mean() for a, b in turns]

    turns_left = set()
    for above in (0.1, 0.3, 0.5):
        tree_rollout = play(counting_env(turns=4), ENTROPY._replace(above=above), count=3)
        left = 0
        for group in tree_rollout.groups:
            for root, branch in ((0, 2), (1, 3)):
                first, *later = entropies(group[root])
                rises = [i + 1 for i, number in enumerate(later) if number - first > above]
                past = [s for s in group[branch].segments if not s.drawn and s.node]
                shared = [s.turn for s in past if s.node == group[root].segments[0].node]
                assert (max(shared) + 1 if shared else None) == (rises[0] if rises else None)
                left += bool(rises)
                turns_left.add(rises[0] if rises else None)
        assert tree_rollout.counts["branches"] == left
    assert len(turns_left) > 2  # none, and at more than one turn


def test_members_that_nobody_left_it_for_begin_by_themselves():
    tree_rollout = play(counting_env(done=lambda state: True))
    assert tree_rollout.counts["branches"] == tree_rollout.counts["tree_shared_tokens"] == 0
    for group in tree_rollout.groups:
        assert [[s.drawn for s in t.segments] for t in group] == [[True]] * 4
        assert len({str(ids_of(t)) for t in group}) > 1
        assert [[s.node for s in t.segments] for t in group] == [[1], [2], [3], [4]]


def test_branches_branch_and_states_are_closed_once_each():
    opened = []
    tree_rollout = play(
        counting_env(turns=6, opened=opened), Branching("even", 1), count=1, group=8
    )
    assert tree_rollout.counts["branches"] == 7
    assert opened == [0, *["closed"] * 8]
    (group,) = tree_rollout.groups
    # 0 is left by 1 and keeps the half of 2..7 that 1 does not get; and so on down.
    first_turns = [next(s.turn for s in t.segments if s.drawn) for t in group]
    assert first_turns[:2] == [0, 1]
    assert sorted(first_turns) == [0, 1, 2, 2, 3, 3, 3, 3]


def test_branches_continue_behind_summaries():
    """A member leaves another one in any context, and is sampled behind that context alone."""
    limits = Limits(turns=9, turn_tokens=4, contexts=4, summary_tokens=24)
    tree_rollout = play(
        counting_env(limits=limits, chat=ChatOptions(summary="sum")),
        Branching("even", 1),
        count=2,
        group=8,
    )
    assert tree_rollout.counts["branches"] == 2 * 7
    assert tree_rollout.counts["summaries"] > 0
    arrays = to_rollout(tree_rollout.groups, RowShape(8, P, T, contexts=4))
    node, mask = arrays.ids["node"], np.asarray(arrays.rollout.mask)
    assert mask.sum() == tree_rollout.counts["slot_tokens"]
    sampled_ids = {
        (n, t, node[n, i, t]) for n in range(2) for i, t in zip(*np.nonzero(mask[n]), strict=True)
    }
    assert len(sampled_ids) == mask.sum()  # each token once
    first = [
        next(s for s in row.segments if s.drawn)
        for group in tree_rollout.groups
        for row in group[1:]
    ]
    assert {s.context for s in first} >= {0, 1}
    score = jit(NETWORK.hidden)
    for row in (row for group in tree_rollout.groups for row in group):
        for context in range(row.segments[-1].context + 1):
            parts = [s for s in row.segments if s.context == context]
            ids = np.concatenate([row.opening, *(s.tokens for s in parts)])
            at, tokens = np.arange(P + T)[None], np.zeros((1, P + T), np.int32)
            tokens[0, : len(ids)] = ids
            hidden, _ = score(params(), tokens, at, np.ones_like(at))
            chances = np.asarray(jax.nn.log_softmax(NETWORK.logits(params(), hidden[0])))
            end = len(row.opening)
            for part in parts:
                if part.drawn:
                    positions = np.arange(end, end + len(part.tokens))
                    np.testing.assert_allclose(
                        part.logprobs, chances[positions - 1, part.tokens], atol=3e-5
                    )
                end += len(part.tokens)


# ---------------------------------------------------------------- faults


def test_a_state_that_cannot_be_copied_ends_its_branch_only():
    opened = []
    tree_rollout = play(
        counting_env(opened=opened, state_of=lambda prompt: prompt.id and threading.Lock())
    )
    complete, branched = tree_rollout.groups
    assert all(t.alive for t in complete)
    assert [t.alive for t in branched] == [True, True, False, False]
    assert all("cannot be copied: TypeError: cannot pickle" in t.reason for t in branched[2:])
    assert tree_rollout.counts["env_fork_errors"] == 2
    assert tree_rollout.counts["env_errors"] == 0
    assert opened.count("closed") == 6
    # Their sources trained on what they drew, and play as if nobody had wanted to leave.
    unbroken = play(counting_env())
    for i in (0, 1):
        np.testing.assert_array_equal(ids_of(branched[i]), ids_of(unbroken.groups[1][i]))
        assert len({s.node for s in branched[i].segments}) == 1


def test_a_member_given_back_by_a_branch_that_ended_begins_by_itself():
    def fork(state):
        raise RuntimeError("no room")

    tree_rollout = play(counting_env(turns=3, fork=fork), Branching("even", 1), count=1, group=6)
    (group,) = tree_rollout.groups
    # The root is asked for a copy at two turns, and what is left of the group opens by itself.
    assert tree_rollout.counts["env_fork_errors"] == 2
    assert sum(t.alive for t in group) == 4
    assert all(t.segments[0].drawn for t in group if t.alive)


def test_what_a_source_that_failed_drew_is_trained_in_the_branch():
    async def step(state, reply):
        state["turns"] += 1
        if state["turns"] == 2 and not state.get("copy"):
            raise RuntimeError("lost")
        return state, Feedback(user("go>"), 1.0)

    env = counting_env(fork=lambda state: {**state, "copy": True})._replace(step=step)
    (group,) = play(env, Branching("even", 1), count=1, group=2).groups
    assert [t.stop == StopReason.FAILED for t in group] == [True, False]
    assert [s.drawn for s in group[1].segments] == [True, False, True, False, True]
    assert len({s.node for s in group[1].segments}) == 1


def test_an_environment_without_copies_is_named():
    with pytest.raises(UserError, match=r"needs HostEnv\.fork"):
        source(counting_env(fork=None))
    with pytest.raises(UserError, match="a tree of sampling.group = 4 members needs a slot"):
        EpisodeBranches(EVEN, 4, 3)


# ---------------------------------------------------------------- training


def source(env, tree=EVEN):
    return HostEpisodes(
        env,
        PlainFormat(TOKENIZER),
        RunRows(rows(8, 3, tree.at)),
        prompts=prompts(4),
        seed=None,
        tokenizer=TOKENIZER,
        weights={"reward": 1.0},
        tree=EpisodeBranches(tree, 4, 0),
    )


def test_a_shared_token_has_the_mean_advantage_of_those_that_go_through_it():
    tree_source = source(counting_env())
    try:
        tickets = np.arange(2, dtype=np.int32)
        groups = tree_source.draw(
            simple_request(jax.random.key(2), {"policy": params()}, 0, tickets, 4)
        )
    finally:
        tree_source.close()
    batch = to_batch(
        groups.rollout, groups.rewards, np.ones(1, np.float32), groups.ids, groups.stats
    )
    objective = get_method("arpo").objective
    advantages = compute_advantages(objective, batch, objective.init())[0]
    advantages, mask = np.asarray(advantages, np.float64), np.asarray(batch.mask)
    scores = np.asarray(groups.rewards, np.float64)[..., 0]
    for n in range(2):
        member_advantages = (scores[n] - scores[n].mean()) / (scores[n].std(ddof=1) + 1e-6)
        for i, t in zip(*np.nonzero(mask[n]), strict=True):
            turn = groups.ids["turn"][n, i, t]
            pair = (
                member_advantages[[i, i + 2]].mean()
                if i < 2 and turn == 0
                else member_advantages[i]
            )
            assert advantages[n, i, t] == pytest.approx(pair, abs=2e-5)


def test_faults_of_every_kind_leave_nothing_open():
    """Environments that fail, hang and refuse copies by chance: every member ends, once."""
    chance, opened, closed = random.Random(3), [], []

    async def fail(share=0.1):  # which calls fail depends on their order, hence on timing
        if chance.random() < share:
            raise RuntimeError("by chance")
        if chance.random() < 0.05:
            await asyncio.sleep(30)

    async def init(prompt, seed):
        await fail()
        opened.append(object())
        return {"turns": 0}, user(prompt.text)

    async def step(state, reply):
        await fail()
        return state, Feedback(user("go>"), 1.0, chance.random() < 0.2)

    async def fork(state):
        await fail(share=0.4)
        opened.append(object())
        return dict(state)

    async def close(state):
        closed.append(state)

    limits = Limits(turns=5, turn_tokens=4, call_seconds=0.3)
    env = HostEnv(init, step, close, limits=limits, fork=fork)
    tree_rollout = play(env, Branching("even", 2), count=10, group=6, slots=6)
    members = [t for group in tree_rollout.groups for t in group]
    assert len(members) == tree_rollout.counts["episodes"] == 60
    dead = [t for t in members if not t.alive]
    counts = tree_rollout.counts
    assert len(dead) == counts["env_errors"] + counts["env_timeouts"] + counts["env_fork_errors"]
    assert all(t.reason for t in dead)
    assert counts["env_fork_errors"] > 0
    assert counts["env_timeouts"] > 0
    assert len(opened) == len(closed)
    arrays = to_rollout(tree_rollout.groups, RowShape(6, P, T))
    node, mask = arrays.ids["node"], np.asarray(arrays.rollout.mask)
    tokens = [
        (n, t, node[n, i, t]) for n in range(10) for i, t in zip(*np.nonzero(mask[n]), strict=True)
    ]
    assert len(set(tokens)) == len(tokens)  # each token once
