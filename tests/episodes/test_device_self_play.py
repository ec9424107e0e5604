"""The policy as both players: who drew what, who is paid for what, and rows by player."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import jit

from jrl.collect.device_episodes import episode_rollout
from jrl.collect.groups import counted, to_batch
from jrl.collect.sources import simple_request
from jrl.episodes import get_env
from jrl.episodes.device import paid_points
from jrl.episodes.device_play import play, scripted
from jrl.episodes.device_self_play import rows_of_players
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.sampling.params import make_sampling_params
from jrl.train.compiled import held_out
from jrl.train.score import score
from jrl.types import StopReason

ENV = get_env("nim", heaps=2, most=3, opponent="self")
N, G, KEY, SAMPLING = 4, 6, jax.random.key(3), make_sampling_params()
IDS = jnp.arange(N, dtype=jnp.int32)
NETWORK = transformer(
    ModelConfig(
        vocab_size=ENV.vocab_size,
        layers=1,
        embed_dim=16,
        heads=2,
        kv_heads=1,
        head_dim=8,
        mlp_dim=16,
        max_length=ENV.prompt_tokens + ENV.completion_tokens,
    )
)


@pytest.fixture(scope="module")
def params():
    """Of a policy that always names a heap, then a number, so that games last."""
    initial = jax.device_get(jit(NETWORK.init)(jax.random.key(0)))
    return jax.tree.map(lambda x: 0.1 * x, initial)


@pytest.fixture(scope="module")
def episodes_and_starts(params):
    starts = jax.vmap(lambda i: ENV.generate(jax.random.fold_in(KEY, i), "train"))(IDS)
    ask = jit(partial(play, env=LIKELY, network=NETWORK, group=G))
    episodes, _ = ask(KEY, params, starts, SAMPLING, jnp.int32(5), IDS)
    return jax.device_get((episodes, starts))


def _likely(state, tokens, length, key):
    """The environment with a legal turn in place of most illegal ones, which still count as drawn.

    The text says what was drawn, so that only the record of turns is under test.
    """
    heap = jnp.argmax(state.left) + 2
    number = jnp.minimum(tokens[1] % 2 + 1, state.left.max()) + ENV.tokenizer.encode("0")[0]
    keep = tokens[0] % 4 == 0
    return ENV.step(state, jnp.where(keep, tokens, jnp.stack([heap, number])), length, key)


LIKELY = ENV._replace(step=_likely).check()


def by_hand(row, start, length):
    """The turns of an episode, walked from its tokens: (begin, end, player, rewards, done)."""
    state, at, turns = start, 0, []
    while True:
        end = at + 1 if row[at] == ENV.stop_id else at + 2
        ids = np.zeros(2, np.int32)
        ids[: end - at] = row[at:end]
        mover = int(ENV.mover(state))
        state, turn = STEP(state, jnp.asarray(ids), jnp.int32(end - at), KEY)
        turns.append((at, end, mover, np.asarray(turn.reward), bool(turn.done)))
        if turn.done or len(turns) == ENV.turns:
            assert end == length
            return turns
        at = end + int(turn.count)


STEP = jit(_likely)


def test_turns_alternate_and_both_players_are_paid(episodes_and_starts):
    episodes, starts = episodes_and_starts
    rollout, winners, lengths = episodes.rollout, set(), set()
    for n, g in itertools.product(range(N), range(G)):
        start = jax.tree.map(lambda x, n=n: x[n], starts.state)
        turns = by_hand(rollout.tokens[n, g], start, rollout.lengths[n, g])
        assert [player for _, _, player, _, _ in turns] == [i % 2 for i in range(len(turns))]
        assert episodes.turns[n, g] == len(turns)
        lengths.add(len(turns))
        rewards = turns[-1][3]
        assert turns[-1][4]
        assert sorted(rewards.tolist()) == [0, 1]
        assert np.array_equal(episodes.success[n, g], rewards == 1)
        paid = np.zeros(ENV.completion_tokens)
        for player in range(2):
            turns_of_player = [turn for turn in turns if turn[2] == player]
            if turns_of_player:
                paid[turns_of_player[-1][1] - 1] += rewards[player]
        assert np.array_equal(episodes.paid[n, g], paid)
        for begin, end, player, _, _ in turns:
            assert (episodes.role[n, g, begin:end] == player).all()
            assert rollout.mask[n, g, begin:end].all()
        assert rollout.mask[n, g].sum() == sum(end - begin for begin, end, *_ in turns)
        winners.add(int(np.argmax(rewards)))
    assert winners == {0, 1}
    assert len(lengths) > 2


def test_every_player_is_a_row_in_a_group_of_its_own(episodes_and_starts):
    episodes, _ = episodes_and_starts
    rows = jax.device_get(rows_of_players(episodes, 2))
    live = np.asarray(counted(rows.rollout))
    unmoved = 0
    for n, g in itertools.product(range(N), range(G)):
        sampled = episodes.rollout.mask[n, g]
        masks = rows.rollout.mask[2 * n : 2 * n + 2, g]
        assert np.array_equal(masks.sum(0), sampled)  # no token is of both, and none of nobody
        for player in range(2):
            row, mask = 2 * n + player, masks[player]
            assert (rows.role[row, g][mask] == player).all()
            assert rows.rollout.tokens[row, g].tolist() == episodes.rollout.tokens[n, g].tolist()
            logprobs = np.where(mask, episodes.rollout.sampler_logprobs[n, g], 0)
            assert np.array_equal(rows.rollout.sampler_logprobs[row, g], logprobs)
            assert np.array_equal(rows.rollout.versions[row, g], np.where(mask, 5, -1))
            has_turn = bool(mask.any())
            assert live[row, g] == has_turn
            unmoved += not has_turn
            if has_turn:
                assert rows.paid[row, g].sum() == episodes.success[n, g, player]
                assert rows.success[row, g] == episodes.success[n, g, player]
            else:
                assert rows.rollout.stop[row, g] == StopReason.ABORTED
    assert unmoved  # an illegal first turn leaves the other player without one


def test_the_trainer_scores_each_player_as_it_was_drawn(params):
    groups = jit(
        partial(
            episode_rollout,
            sampling_params=SAMPLING,
            task=LIKELY,
            parts={"reward": 1.0},
            network=NETWORK,
        )
    )(simple_request(KEY, {"policy": params}, jnp.int32(1), IDS, G))
    assert groups.rewards.shape == (2 * N, G, 1)
    assert groups.ids["prompt"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    batch = to_batch(groups.rollout, groups.rewards, jnp.ones(1), groups.ids, groups.stats).check()
    both = np.asarray(groups.rewards)[:, :, 0].reshape(N, 2, G).sum(1)
    live = np.asarray(batch.members).reshape(N, 2, G).all(1)
    assert (both[live] == 1).all()  # one of two that moved won
    assert live.any()
    scored = jit(partial(score, network=NETWORK, value=None, want=frozenset({"logprobs"})))(
        {"policy": params}, batch, SAMPLING
    )
    gap = np.abs(np.asarray(scored["logprobs"] - groups.rollout.sampler_logprobs))
    assert gap[np.asarray(batch.mask)].max() < 1e-5


def test_an_evaluation_plays_one_side_against_a_perfect_player(params):
    ask = jit(partial(held_out, task=LIKELY, network=NETWORK, problems=N, samples=2))
    groups = jax.device_get(ask(KEY, params, SAMPLING))
    assert groups.rewards.shape == (N, 2, 2)
    assert (groups.ids["role"][groups.rollout.mask] == 0).all()
    replies = np.asarray(ENV.tokenizer.encode("ab"))
    tokens, mask = groups.rollout.tokens, groups.rollout.mask
    count = 0
    for n, g in itertools.product(range(N), range(2)):
        turn = groups.ids["turn"][n, g][: groups.rollout.lengths[n, g]]
        for number in range(turn.max()):
            reply = tokens[n, g][: len(turn)][(turn == number) & ~mask[n, g][: len(turn)]]
            assert len(reply) == 6  # heaps, a move, heaps
            assert reply[2] in replies
            count += 1
    assert count


def test_the_solution_plays_both_sides_to_the_end():
    start = ENV.generate(jax.random.key(1), "train")
    tokens, length, rows = jax.device_get(scripted(KEY, start, env=ENV))
    log = jax.tree.map(lambda x: x[0], rows)
    players = np.asarray(log.players)[: int(log.count)]
    assert players.tolist() == [i % 2 for i in range(len(players))]
    assert log.points.sum() == 1
    assert log.success.sum() == 1
    assert bool(log.success[players[-1]])  # the last turn took the last object
    assert ENV.tokenizer.decode(tokens[:length].tolist())[2:4] != "00"


def test_points_stand_at_the_last_turn_of_their_player():
    players, points = jnp.array([0, 1, 2, 1, 0, 0]), jnp.zeros(6)
    reward = jnp.array([1.0, 2.0, 4.0, 8.0])
    assert paid_points(points, players, jnp.int32(3), reward).tolist() == [1, 0, 4, 2, 0, 0]
    assert paid_points(points, players, jnp.int32(0), reward).tolist() == [1, 0, 0, 0, 0, 0]
    one = paid_points(points + 0.5, players, jnp.int32(2), jnp.float32(3.0))
    assert one.tolist() == [0.5, 0.5, 3.5, 0.5, 0.5, 0.5]
