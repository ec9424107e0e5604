"""Search in episodes on the host: what a path holds, what it was played in, and what may fail."""

import asyncio
import types
from functools import cache
from typing import NamedTuple

import jax
import numpy as np
import pytest
from tiny import jit, tiny_config

from jrl.collect.host_search import episode_scorer, leaves_played
from jrl.collect.tree_search import plan_of
from jrl.episodes.calls import Calls
from jrl.episodes.chat import PlainFormat
from jrl.episodes.host import ChatOptions, EnvExtras, Feedback, HostEnv, Limits, Reply
from jrl.episodes.play import Device
from jrl.episodes.search import by_path, episode_at, play_search
from jrl.episodes.tree import SEARCHES, Tree, best_first, search_plan
from jrl.episodes.tree_rows import rows_of_tree
from jrl.episodes.world import host_world
from jrl.errors import UserError
from jrl.evaluate.search import right_answers
from jrl.evaluate.searcher import opened
from jrl.models.tokenizer import char_tokenizer
from jrl.models.transformer import transformer
from jrl.sampling.rows import Rows
from jrl.types import Prompt, Search, StopReason

TOKENIZER = char_tokenizer()
P, T, STOPS = 8, 60, (1, 5, 9, 20, 33)
NETWORK = transformer(tiny_config(P + T))
CHAT = PlainFormat(TOKENIZER)
TURNS = 3


class Stops:
    """The tokenizer, whose turns end at more tokens than one."""

    stop_ids = STOPS

    def decode(self, ids, **more):
        return TOKENIZER.decode(ids, **more)


@cache
def params():
    return jax.tree.map(lambda x: 1.5 * x, jit(NETWORK.init)(jax.random.key(0)))


@cache
def rows(slots):
    return Rows(
        NETWORK,
        slots=slots,
        prompt_tokens=P,
        max_new_tokens=T,
        stop_tokens=STOPS,
        chunk=3,
        sampling={"temperature": 1.0},
    )


class Game:
    """Counts what was said in a list of its own, and says the sum; well ended if that is even."""

    def __init__(self, log):
        self.sums, self.log = [], log
        log.append("open")

    def copy(self):
        other = Game(self.log)
        other.sums = [*self.sums]
        return other


def game(log, fails=lambda state, reply: False, **more):
    async def init(prompt, seed):
        return Game(log), [{"role": "user", "content": prompt.text}]

    def step(state, reply):  # sync, in a thread
        if fails(state, reply):
            raise RuntimeError("the board is gone")
        state.sums.append(int(reply.tokens.sum()))
        done = len(state.sums) == TURNS
        total = sum(state.sums)
        answer = [{"role": "user", "content": f"{total}>"}]
        return state, Feedback(answer, 0.0, done, done and total % 2 == 0)

    async def close(state):
        state.log.append("close")

    limits = Limits(turns=TURNS, turn_tokens=6, call_seconds=5)
    return HostEnv(init, step, close, fork=Game.copy, limits=limits)._replace(**more)


PROMPTS = [Prompt(i, f"{i}+{i}=", np.zeros(0, np.int32), None) for i in range(3)]


def many_sixes(paths):
    """Paths by how many sixes they hold."""
    for path in paths:
        assert path.opening.size
        assert path.ends[-1] == len(path.tokens)
    return [float((path.tokens == 6).mean()) for path in paths]


class SearchResult(NamedTuple):
    """Result of a search for a problem."""

    opening: np.ndarray
    success: bool
    tree: Tree
    expansions: int
    turns: int
    sampled_tokens: int
    env_errors: int


def play(env, plan, slots=4, count=3, score=None, chat=CHAT, **device):
    table = rows(slots)
    table.set_weights(params(), 7)
    with Calls() as calls:
        world = host_world(calls, env, chat, Stops())
        played_prompts, seeds = PROMPTS[:count], [11, 12, 13][:count]
        return play_search(
            Device(table, **device),
            world,
            played_prompts,
            seeds,
            plan,
            score or by_path(many_sixes),
        )


def searched(env, name="beam", width=3, slots=4, count=3):
    search = play(env, search_plan(name, width, rounds=8), slots, count)
    results = []
    for i, (root, tree) in enumerate(zip(search.roots, search.trees, strict=True)):
        failed = [e for n in range(1, len(tree.nodes)) if reason_of(e := episode_at(tree, n))]
        success = search.successes()[i]
        results.append(SearchResult(root.opening, success, tree, *search.costs[i], len(failed)))
    return results


def reason_of(episode):
    return "" if episode.ending is None else episode.ending.reason


def turns_of(tree, node):
    return [tree.step(i) for i in tree.path(node)]


@pytest.fixture(scope="module")
def search_results():
    log = []
    results = searched(game(log))
    assert log.count("open") == log.count("close") > 30  # every copy is closed, once
    return results


def replayed(turns):
    """Feedback of a fresh environment to the turns of a path."""
    env = game([])

    async def play():
        state, _ = await env.init(PROMPTS[0], 0)
        feedbacks = []
        for number, turn in enumerate(turns):
            reply = Reply("", "", turn.content, number, False)
            state, feedback = env.step(state, reply)
            feedbacks.append(feedback)
        return feedbacks

    return asyncio.run(play())


def test_every_path_is_an_episode_of_its_own(search_results):
    leaves = 0
    for each in search_results:
        for i, node in enumerate(each.tree.nodes[1:], 1):
            turns = turns_of(each.tree, i)
            feedbacks = replayed(turns)
            answered = CHAT.following(
                feedbacks[-1].messages, closed=turns[-1].content[-1] in STOPS, first=len(turns) == 1
            )
            assert node.done == (len(turns) == TURNS)
            assert turns[-1].answer.tolist() == ([] if node.done else answered)
            assert turns[-1].episode.success == feedbacks[-1].success
            assert 1 <= len(turns[-1].content) <= 6
            leaves += node.done
        assert (each.turns, each.env_errors) == (len(each.tree.nodes) - 1, 0)
        assert each.sampled_tokens == sum(len(n.step.content) for n in each.tree.nodes[1:])
        best = max(each.tree.leaves(), key=lambda i, t=each.tree: t.nodes[i].step.points)
        assert each.success == episode_at(each.tree, best).success
    assert leaves > 8


def test_log_probabilities_are_those_of_the_whole_path(search_results):
    score = jit(NETWORK.hidden)
    for each in search_results:
        for leaf in each.tree.leaves():
            turns = turns_of(each.tree, leaf)
            parts = [np.asarray(each.opening)]
            parts += [x for turn in turns for x in (turn.content, turn.answer)]
            ids = np.concatenate(parts).astype(np.int32)
            tokens = np.zeros((1, P + T), np.int32)
            tokens[0, : len(ids)] = ids
            columns = np.arange(P + T, dtype=np.int32)[None]
            hidden, _ = score(params(), tokens, columns, (columns < len(ids)).astype(np.int32))
            chances = jax.nn.log_softmax(NETWORK.logits(params(), hidden)[0])
            at = len(each.opening)
            for turn in turns:
                positions = np.arange(at, at + len(turn.content))
                total = float(chances[positions - 1, turn.content].sum())
                assert turn.logprob == pytest.approx(total, abs=1e-3)
                at += len(turn.content) + len(turn.answer)


def tokens_of(results):
    return [[n.step.content.tolist() for n in each.tree.nodes[1:]] for each in results]


def test_draws_do_not_depend_on_slots(search_results):
    assert tokens_of(searched(game([]), slots=3)) == tokens_of(search_results)


def test_puct_leaves_preferences_between_turns_of_one_state():
    later_rows = 0
    for each in searched(game([]), "puct", width=3):
        points = {i: float(episode_at(each.tree, i).success) for i in each.tree.leaves()}
        rows = rows_of_tree(each.tree, each.opening.tolist(), points)
        assert rows.paths == []
        siblings = {}
        for i in range(1, len(each.tree.nodes)):
            *before, last = turns_of(each.tree, i)
            past = [x for turn in before for x in (*turn.content.tolist(), *turn.answer.tolist())]
            siblings.setdefault((*each.opening.tolist(), *past), set()).add(tuple(last.content))
        for row in rows.siblings:
            assert {tuple(r) for r in row["responses"]} <= siblings[tuple(row["prompt"])]
            assert len(set(row["scores"])) > 1
            later_rows += len(row["prompt"]) > len(each.opening)
    assert later_rows  # behind an answer, too


def test_best_first_expands_the_likeliest_node_of_any_depth():
    for each in searched(game([]), "best_first", width=2):
        again = Tree()
        for node in each.tree.nodes[1:]:
            if not again.nodes[node.parent].children:
                assert node.parent == best_first()(again)[0]
            again.add(node.parent, node.step)
    assert each.expansions > 3


def test_a_search_stops_where_an_environment_has_verified_an_end():
    """Any path that ended well counts then, whatever the score; nothing is expanded behind it."""
    wins = lambda state, reply: Feedback((), 1.0, True, int(reply.tokens[0]) % 2 == 0)  # noqa: E731
    env = game([])._replace(
        extras=EnvExtras(verified=True), step=lambda state, reply: (state, wins(state, reply))
    )
    results = searched(env, "best_first", width=3)
    for each in results:
        won = [turns_of(each.tree, i)[-1].episode.success for i in each.tree.leaves()]
        assert each.success == any(won)
        assert each.expansions == 1
    assert any(each.success for each in results)
    at_evaluation = play(env, search_plan("best_first", 3, rounds=8), 4, 3)
    run = types.SimpleNamespace(kind=types.SimpleNamespace(plays=True))
    right = right_answers(run, None, [], at_evaluation)
    assert right.tolist() == [each.success for each in results]
    unopened = at_evaluation._replace(trees=[Tree()], verified=False)
    assert right_answers(run, None, [], unopened).tolist() == [False]
    long = game([])._replace(extras=EnvExtras(verified=True))
    for each, full in zip(searched(long, "puct"), searched(game([]), "puct"), strict=True):
        won = [i for i in each.tree.leaves() if turns_of(each.tree, i)[-1].episode.success]
        assert each.success == bool(won)
        assert not won or len(each.tree.nodes) <= max(won) + 3  # the round that won is the last
        assert len(each.tree.nodes) <= len(full.tree.nodes)


def test_a_fault_ends_its_path_alone():
    log = []
    odd = lambda state, reply: int(reply.tokens[0]) % 2 == 1  # noqa: E731
    for each in searched(game(log, fails=odd), "puct"):
        for i in range(1, len(each.tree.nodes)):
            turn = each.tree.step(i)
            reason = reason_of(turn.episode)
            assert bool(reason) == (int(turn.content[0]) % 2 == 1)
            if reason:
                assert "the board is gone" in reason
                assert (each.tree.nodes[i].done, each.tree.nodes[i].visits) == (True, 0)
        assert each.env_errors == sum(bool(reason_of(n.step.episode)) for n in each.tree.nodes[1:])
    assert log.count("open") == log.count("close")

    def refuses(state):
        raise TypeError("cannot copy a socket")

    for each in searched(game([], fork=refuses)):
        assert not each.success
        assert each.env_errors == each.turns == 3


def test_what_cannot_be_searched_is_named():
    async def failing_init(prompt, seed):
        raise OSError("no server")

    with pytest.raises(UserError, match=r"no environment opened: .*no server"):
        opened(play(game([], init=failing_init), search_plan("beam", 3)))


# ---------------------------------------------------------------- contexts and players


def folding_game(log, **more):
    """Ten turns that fill a context of 60 tokens, with room for two summaries."""
    limits = Limits(turns=10, turn_tokens=6, call_seconds=5, contexts=3, summary_tokens=5)

    def step(state, reply):
        state.sums.append(int(reply.tokens.sum()))
        answer = [{"role": "user", "content": f"{sum(state.sums)}>"}]
        return state, Feedback(answer, 1.0, len(state.sums) == 10, True)

    return game(log, limits=limits, chat=ChatOptions(summary="sum"), step=step)._replace(**more)


def contexts_of(episode):
    """The segments of each context."""
    last = max(s.context for s in episode.segments)
    return [[s for s in episode.segments if s.context == c] for c in range(last + 1)]


@pytest.mark.parametrize("name", ["beam", "puct"])
def test_a_search_continues_behind_summaries(name):
    log, plan = [], search_plan(name, 2, rounds=24)
    search = play(folding_game(log), plan, count=2)
    assert log.count("open") == log.count("close")
    episodes = [episode_at(tree, i) for tree in search.trees for i in range(1, len(tree.nodes))]
    folded, score = 0, jit(NETWORK.hidden)
    for episode in episodes:
        *full, _ = contexts = contexts_of(episode)
        for segments, after in zip(full, contexts[1:], strict=True):
            request, summary, repeated = segments[-2], segments[-1], after[0]
            assert TOKENIZER.decode(request.tokens.tolist()).endswith("sum")
            assert (request.drawn, summary.drawn, repeated.drawn) == (False, True, False)
            np.testing.assert_array_equal(repeated.tokens, summary.tokens)
            assert 1 <= len(summary.tokens) <= 5
            assert sum(len(s.tokens) for s in segments) <= T
            folded += 1
    leaves = [episode_at(tree, leaf) for tree in search.trees for leaf in tree.leaves()]
    deep = max(leaves or episodes, key=lambda e: len(e.segments))
    assert deep.at.context > 0
    for segments in contexts_of(deep):  # each was sampled behind the opening and itself alone
        ids = np.concatenate([deep.opening, *(s.tokens for s in segments)]).astype(np.int32)
        tokens = np.zeros((1, P + T), np.int32)
        tokens[0, : len(ids)] = ids
        columns = np.arange(P + T, dtype=np.int32)[None]
        hidden, _ = score(params(), tokens, columns, (columns < len(ids)).astype(np.int32))
        chances = np.asarray(jax.nn.log_softmax(NETWORK.logits(params(), hidden)[0]))
        at = len(deep.opening)
        for segment in segments:
            if segment.drawn:
                positions = np.arange(at, at + len(segment.tokens))
                np.testing.assert_allclose(
                    segment.logprobs, chances[positions - 1, segment.tokens], atol=3e-5
                )
            at += len(segment.tokens)
    again = play(folding_game([]), plan, slots=7, count=2)
    other = [episode_at(tree, i) for tree in again.trees for i in range(1, len(tree.nodes))]
    assert [replies_in(e) for e in other] == [replies_in(e) for e in episodes]
    # Every summary was sampled once, in the node behind whose turn the context was full.
    positions = [e for e in episodes if e.at.context and summarised(e)]
    assert search.counts["summaries"] == len(positions) > 0
    assert folded >= len(positions)


def replies_in(episode):
    return [(s.tokens.tolist(), s.drawn, s.context, s.player) for s in episode.segments]


def summarised(episode):
    """Whether the last turn of an episode is the one that filled a context."""
    last = max(i for i, s in enumerate(episode.segments) if s.drawn)
    following = episode.segments[last + 1 :]
    return bool(following) and following[0].context > episode.segments[last].context


def test_siblings_of_a_new_context_share_what_it_begins_with():
    """Their prompt is the opening, the summary and the answer, and no longer the whole path."""
    search = play(folding_game([]), search_plan("puct", 2, rounds=40), count=2)
    restarts, count = {}, 0
    for tree, root in zip(search.trees, search.roots, strict=True):
        for i in range(1, len(tree.nodes)):
            if tree.step(i).restart is not None:
                begin = [*root.opening.tolist(), *tree.step(i).restart.tolist()]
                restarts[tuple(begin)] = {
                    tuple(tree.step(j).content) for j in tree.nodes[i].children
                }
        ends = [i for i, node in enumerate(tree.nodes) if i and not node.children]
        points = {node: float(n % 2) for n, node in enumerate(ends)}
        for row in rows_of_tree(tree, root.opening.tolist(), points).siblings:
            if (children := restarts.get(tuple(row["prompt"]))) is not None:
                assert {tuple(r) for r in row["responses"]} <= children
                count += 1
            assert len(row["prompt"]) <= P + T
    assert restarts
    assert count


def test_players_take_turns_in_a_search_as_the_environment_says():
    def step(state, reply):
        state.sums.append(int(reply.tokens[0]))
        answer = [{"role": "user", "content": f"{len(state.sums)}>"}]
        # Player 1 keeps the word; after player 0 it is the next one's turn.
        next_player = 1 if reply.tokens[0] % 2 else None
        return state, Feedback(answer, 1.0, len(state.sums) == TURNS, True, next=next_player)

    players_asked = []
    env = game([], step=step)._replace(players=3)
    for slots in (3, 6):
        for tree in play(env, search_plan("beam", 3, rounds=8), slots).trees:
            for leaf in tree.leaves():
                players = [0]
                turns = turns_of(tree, leaf)
                for turn in turns[:-1]:
                    odd = turn.content[0] % 2
                    players.append(1 if odd else (players[-1] + 1) % 3)
                segments = episode_at(tree, leaf).segments
                assert [s.player for s in segments if s.drawn] == players
                players_asked += players
    assert set(players_asked) == {0, 1, 2}


# ---------------------------------------------------------------- groups to train on


G = 5
WORTH = {"reward": 0.5, "success": 2.0}


def grown(env, by="uct", estimate=None, slots=4):
    """The groups of a search for training, and the trees that they are of."""
    plan = plan_of(Search(by, 3, 4), G)
    score = episode_scorer(env.parts, WORTH, estimate)
    search = play(env, plan, slots, score=score)
    return leaves_played(search, plan), search.trees


def paid_game(log, **more):
    """The game, each turn paid by its first id."""
    env = game(log, **more)

    def step(state, reply):
        state, feedback = env.step(state, reply)
        return state, feedback._replace(reward=float(int(reply.tokens[0]) % 3))

    return env._replace(step=step)


@pytest.mark.parametrize("by", ["uct", "best_first"])
def test_a_group_is_the_leaves_of_a_search_and_each_turn_is_trained_once(by):
    log = []
    search, trees = grown(paid_game(log), by)
    assert log.count("open") == log.count("close")
    again = grown(paid_game([]), by, slots=3)[0]
    shared = 0
    for n, (group, tree) in enumerate(zip(search.groups, trees, strict=True)):
        assert [row.member for row in group] == list(range(G))
        nodes_seen = set()
        for row, leaf, other in zip(group, tree.leaves(), again.groups[n], strict=False):
            path = turns_of(tree, leaf)
            parts = [x for turn in path for x in (turn.content, turn.answer) if len(x)]
            for segment, ids, same in zip(row.segments, parts, other.segments, strict=True):
                np.testing.assert_array_equal(segment.tokens, ids)
                np.testing.assert_array_equal(segment.tokens, same.tokens)  # whatever the slots
                node = tree.path(leaf)[segment.turn]
                assert segment.node == node
                assert segment.value == SEARCHES[by].value(tree.nodes[node])
                sampled = any(ids is turn.content for turn in path)
                assert segment.drawn == (sampled and node not in nodes_seen)
                shared += len(ids) * (node in nodes_seen)
                if sampled:
                    assert segment.reward == (float(int(ids[0]) % 3),)
                    assert not segment.drawn or (segment.versions == 7).all()
            nodes_seen |= set(tree.path(leaf))
            assert row.stop == StopReason.DONE
            assert row.metrics["success"] == path[-1].episode.success
        points = {
            leaf: sum(0.5 * (int(turn.content[0]) % 3) for turn in turns_of(tree, leaf))
            + 2.0 * turns_of(tree, leaf)[-1].episode.success
            for leaf in tree.leaves()
        }
        for i, node in enumerate(tree.nodes):
            below = [points[leaf] for leaf in points if i in (0, *tree.path(leaf))]
            assert node.visits == len(below)
            assert not below or node.value == pytest.approx(np.mean(below))
    assert search.counts["tree_shared_tokens"] == shared > 0
    assert search.counts["search_leaves"] == sum(len(tree.leaves()) for tree in trees)
    assert search.counts["env_errors"] == 0


def test_an_answer_is_read_once_however_many_turns_follow_it(monkeypatch):
    read = []
    extend = Rows.extend
    monkeypatch.setattr(
        Rows,
        "extend",
        lambda self, answers: (read.append([*answers.values()]), extend(self, answers))[1],
    )
    _, trees = grown(paid_game([]), "uct", slots=40)  # room for all that is open
    expanded = [n for tree in trees for n in tree.nodes[1:] if n.children]
    assert max(len(n.children) for n in expanded) == 3
    ids = sorted(more.tokens for some in read for more in some)
    assert ids == sorted(n.step.answer.tolist() for n in expanded)
    assert len(read) < len(expanded)  # those of a round together


def test_what_a_value_network_says_of_open_paths_is_backed_up():
    lengths_asked = []

    def estimate(paths):
        lengths_asked.extend(map(len, paths))
        return [float(len(ids)) for ids in paths]

    _, trees = grown(paid_game([]), "puct", estimate)
    unfinished = [n for tree in trees for n in tree.nodes[1:] if not n.done]
    lengths = []
    for node in unfinished:
        turn = node.step
        past = turn.episode.opening.size + turn.episode.past().size - turn.answer.size
        assert node.step.points == past
        lengths.append(past)
    assert sorted(lengths_asked) == sorted(lengths)


def test_failed_members_of_a_search_leave_their_group():
    odd = lambda state, reply: int(reply.tokens[0]) % 2 == 1  # noqa: E731
    search, trees = grown(paid_game([], fails=odd))
    failed = [row for group in search.groups for row in group if not row.alive]
    assert failed
    assert all("the board is gone" in row.reason for row in failed)
    turns = [n.step.episode for tree in trees for n in tree.nodes[1:]]
    assert search.counts["env_errors"] == sum(bool(reason_of(turn)) for turn in turns)
    for group in search.groups:  # what the others went through is trained in one of them
        owners = [s.node for row in group if row.alive for s in row.segments if s.drawn]
        through = {s.node for row in group if row.alive for s in row.segments}
        assert sorted(owners) == sorted(through)

    async def failing_init(prompt, seed):
        if prompt.id == 1:
            raise OSError("no server")
        return Game([]), [{"role": "user", "content": prompt.text}]

    search, trees = grown(paid_game([], init=failing_init))
    assert [sum(row.alive for row in group) for group in search.groups] == [G, 0, G]
    assert [len(group) for group in search.groups] == [G] * 3
    assert "no server" in search.groups[1][0].reason
    assert [len(tree.nodes) > 1 for tree in trees] == [True, False, True]
    assert search.counts["env_errors"] == 1
    search, trees = grown(paid_game([], init=lambda prompt, seed: 1 / 0))
    assert not any(row.alive for group in search.groups for row in group)
    assert {len(tree.nodes) for tree in trees} == {1}
    assert search.counts["env_errors"] == 3
