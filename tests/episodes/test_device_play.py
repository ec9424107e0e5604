"""Episodes in one program: every token traced, and the same whatever the slots."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from tiny import jit

from jrl.collect.device_episodes import episode_rollout
from jrl.collect.groups import to_batch
from jrl.collect.sources import simple_request
from jrl.collect.sources_task import task_rollout
from jrl.data.tasks import get_task
from jrl.episodes import Env, Turn, get_env, task_env
from jrl.episodes.device_play import play, scripted
from jrl.errors import UserError
from jrl.mesh import make_mesh, tree_shardings
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.sampling.params import make_sampling_params
from jrl.sampling.sequences import first_members
from jrl.sampling.slot_sizes import SlotPlan
from jrl.train.score import score
from jrl.types import StopReason

KEY, SAMPLING = jax.random.key(3), make_sampling_params(0.9)
N, G, VOCAB, STOP = 3, 4, 12, 1
A, Q, K, P = 3, 4, 5, 5


class Echo(struct.PyTreeNode):
    """The group's number, the sum of all drawn tokens, and turns taken."""

    number: jax.Array
    total: jax.Array
    turns: jax.Array


def echo_env(**changes):
    """An environment that shows whether it was told the truth.

    Its reply has (sum of the turn's tokens mod 5) tokens: the length of the turn, the sum of all
    tokens drawn so far, a random token, the group's number. It pays the length of the turn, and
    ends when a turn's first token is 3, 7 (well) or 11.
    """

    def init(key, split):
        number = jax.random.randint(key, (), 2, VOCAB)
        prompt = jnp.array([number, 2, 3, 0, 0], jnp.int32)
        return Echo(number, jnp.int32(0), jnp.int32(0)), prompt, number % 3 + 1

    def step(state, tokens, length, key):
        total = (state.total + tokens.sum()) % VOCAB
        noise = jax.random.randint(key, (), 0, VOCAB)
        return Echo(state.number, total, state.turns + 1), Turn(
            reply=jnp.stack([length, total, noise, state.number]),
            count=tokens.sum() % (Q + 1),
            reward=length.astype(jnp.float32),
            done=tokens[0] % 4 == 3,
            success=tokens[0] == 7,
            state_id=100 * state.turns + state.total,
        )

    fields = {"name": "echo", "init": init, "step": step, "turns": K, "prompt_tokens": P}
    fields |= {"turn_tokens": A, "reply_tokens": Q, "vocab_size": VOCAB, "stop_id": STOP}
    return Env(**(fields | {"tokenizer": None} | changes))


ENV = echo_env().check()
NETWORK = transformer(
    ModelConfig(
        vocab_size=VOCAB,
        layers=1,
        embed_dim=16,
        heads=2,
        kv_heads=1,
        head_dim=8,
        mlp_dim=16,
        max_length=P + ENV.completion_tokens,
    )
)


@cache
def params():
    return jax.tree.map(lambda x: 1.5 * x, jit(NETWORK.init)(jax.random.key(0)))


def starts(keys=range(N)):
    return jax.vmap(lambda i: ENV.generate(jax.random.fold_in(KEY, i), "train"))(jnp.array([*keys]))


@partial(jit, static_argnames=("slots", "group"))
def _play(params, starts, ids, *members, **sizes):
    args = KEY, params, starts, SAMPLING, jnp.int32(6), ids, *members
    return play(*args, env=ENV, network=NETWORK, **sizes)


def play_device(order=range(N), members=(), **plan):
    ids = jnp.array([*order])
    sizes = {"slots": SlotPlan(**plan)} | ({} if members else {"group": G})
    episodes, steps = _play(params(), starts(order), 10 + ids, *members, **sizes)
    return jax.device_get(episodes), int(steps)


@cache
def complete_play():
    return play_device()


def members():
    return [(n, g) for n in range(N) for g in range(G)]


def replayed(n, g, episodes):
    """One episode walked by hand: (turns as (begin, end, reply), state) from its tokens alone."""
    rollout = episodes.rollout
    tokens, length = rollout.tokens[n, g], rollout.lengths[n, g]
    state, at, turns = jax.tree.map(lambda x: x[n], starts()).state, 0, []
    row_key = jax.random.fold_in(jax.random.fold_in(KEY, 10 + n), g)
    while True:
        end = at
        while end < length and end - at < A and (end == at or tokens[end - 1] != STOP):
            end += 1
        ids = jnp.zeros(A, jnp.int32).at[: end - at].set(tokens[at:end])
        step_key = jax.random.fold_in(row_key, ENV.completion_tokens + len(turns))
        state, turn = ENV.step(state, ids, jnp.int32(end - at), step_key)
        over = bool(turn.done) or len(turns) + 1 == K
        reply = [] if over else np.asarray(turn.reply)[: int(turn.count)].tolist()
        turns.append((at, end, reply, turn))
        at = end + len(reply)
        if over:
            return turns, at


def test_a_row_is_prompt_drawn_reply_drawn():
    episodes, _ = complete_play()
    rollout = episodes.rollout
    kinds = set()
    for n, g in members():
        turns, end = replayed(n, g, episodes)
        assert rollout.lengths[n, g] == end
        assert episodes.turns[n, g] == len(turns)
        mask, paid = np.zeros(ENV.completion_tokens, bool), np.zeros(ENV.completion_tokens)
        for k, (begin, stop, reply, turn) in enumerate(turns):
            mask[begin:stop] = True
            paid[stop - 1] = stop - begin
            assert rollout.tokens[n, g, stop : stop + len(reply)].tolist() == reply
            here = slice(begin, stop + len(reply))
            assert set(episodes.turn[n, g, here].tolist()) == {k}
            assert set(episodes.state[n, g, here].tolist()) == {int(turn.state_id)}
        assert np.array_equal(rollout.mask[n, g], mask)
        assert np.array_equal(episodes.paid[n, g], paid.astype(np.float32))
        last = turns[-1][3]
        assert rollout.stop[n, g] == (StopReason.DONE if last.done else StopReason.TURNS)
        assert episodes.success[n, g] == bool(last.success)
        kinds |= {int(rollout.stop[n, g]), bool(last.success), *(len(t[2]) for t in turns)}
    assert kinds >= {StopReason.DONE, StopReason.TURNS, 0, Q}
    assert (rollout.versions == np.where(rollout.mask, 6, -1)).all()
    assert (rollout.sampler_logprobs[~rollout.mask] == 0).all()
    assert (rollout.sampler_logprobs[rollout.mask] < 0).all()


def test_members_of_a_group_start_in_the_same_state():
    episodes, _ = complete_play()
    assert (episodes.state[:, :, 0] == episodes.state[:, :1, 0]).all()
    assert len({tuple(row) for row in episodes.rollout.tokens[0].tolist()}) > 1


@pytest.mark.parametrize(
    "sizes",
    [
        {"slots": 4, "chunk": 1},
        {"slots": 5, "chunk": 3},
        {"slots": 6, "block": 2, "chunk": 50},
        {"slots": 1, "chunk": 2},
        {"chunk": 1},
        {"shrink": True, "chunk": 2},
    ],
    ids=str,
)
def test_episodes_do_not_depend_on_the_slots(sizes):
    (got, steps), (expected, _) = play_device(**sizes), complete_play()
    assert_same(got, expected)
    assert steps >= expected.rollout.mask.sum()


def played(env, **plan):
    args = KEY, params(), starts(), SAMPLING, jnp.int32(6), 10 + jnp.arange(N)
    episodes, _ = play(*args, env=env, network=NETWORK, slots=SlotPlan(**plan), group=G)
    return jax.device_get(episodes)


def test_episodes_of_one_turn_do_not_depend_on_the_slots():
    """Refilled slots begin at columns of their own, whatever the number of turns."""
    env = echo_env(turns=1, turn_tokens=6).check()
    assert_same(played(env, slots=5, chunk=2), played(env))


def test_every_episode_ends_where_turns_wait_for_the_end_of_a_chunk():
    """A turn of five tokens takes two chunks of four steps: more steps than there are columns."""
    step = echo_env().step
    sizes = {"turns": 6, "turn_tokens": 5, "reply_tokens": 0}
    env = echo_env(**sizes, step=lambda *args: _going_on(step(*args))).check()
    episodes = played(env, chunk=4)
    assert (episodes.rollout.stop != StopReason.RUNNING).all()
    assert (episodes.turns == 6).all()


def _going_on(result):
    state, turn = result
    turn = turn.replace(done=jnp.zeros((), bool), count=jnp.int32(0), reply=turn.reply[:0])
    return state, turn


def assert_same(got, expected):
    mask, rollout = expected.rollout.mask, expected.rollout
    for name in ("lengths", "mask", "versions", "stop"):
        assert np.array_equal(getattr(got.rollout, name), getattr(rollout, name)), name
    present = np.arange(mask.shape[2]) < rollout.lengths[:, :, None]
    for name in ("turn", "state"):
        assert np.array_equal(getattr(got, name)[present], getattr(expected, name)[present]), name
    assert np.array_equal(got.rollout.tokens[present], rollout.tokens[present])
    for name in ("paid", "success", "turns"):
        assert np.array_equal(getattr(got, name), getattr(expected, name)), name
    np.testing.assert_allclose(got.rollout.sampler_logprobs, rollout.sampler_logprobs, atol=1e-5)


def test_episodes_do_not_depend_on_their_neighbours():
    order = [2, 0, 1]
    got, _ = play_device(order, slots=5)
    assert_same(got, jax.tree.map(lambda x: x[order], complete_play()[0]))


def test_a_greedy_member_changes_no_other():
    members = first_members(N, 4)
    temperature = jnp.where(members.number < 3, SAMPLING.temperature, 0.0)
    got, _ = play_device(members=[members.replace(temperature=temperature)])
    three = lambda x: x[:, :3]  # noqa: E731
    prompts = {"prompt_tokens": None, "prompt_lengths": None}
    ours = got._replace(rollout=got.rollout.replace(**prompts))
    theirs = complete_play()[0]._replace(rollout=complete_play()[0].rollout.replace(**prompts))
    assert_same(jax.tree.map(three, ours), jax.tree.map(three, theirs))
    greedy = got.rollout.sampler_logprobs[:, 3]
    assert (greedy == 0).all()
    assert (got.rollout.sampler_logprobs[:, :3] < 0).any()


@pytest.mark.parametrize("sizes", [{"data": 3}, {"data": 1, "tensor": 1, "fsdp": 2}], ids=str)
def test_sharded_play_is_the_same(sizes):
    """Where the devices divide the starts, each plays its own episodes by itself."""
    mesh = make_mesh(sizes, jax.devices()[: sizes["data"] * sizes.get("fsdp", 1)])
    placed = jax.device_put(params(), tree_shardings(mesh, NETWORK.axes(), params()))
    with jax.set_mesh(mesh):
        episodes, _ = _play(placed, starts(), 10 + jnp.arange(N), group=G, slots=4)
    assert_same(jax.device_get(episodes), complete_play()[0])


def test_the_trainer_scores_what_the_sampler_drew():
    rollout = complete_play()[0].rollout
    batch = to_batch(rollout, np.zeros((N, G, 1), np.float32), np.ones(1, np.float32))
    scored = jit(
        partial(score, network=NETWORK, value=None, want=frozenset({"logprobs"})),
    )({"policy": params()}, batch, SAMPLING)
    gap = np.abs(np.asarray(scored["logprobs"]) - rollout.sampler_logprobs)[rollout.mask]
    assert gap.max() < 3e-5


# ---------------------------------------------------------------- a task is the case of one turn


def test_a_task_is_the_environment_of_one_turn():
    task = get_task("sorting", difficulty=3)
    env = task_env(task).check()
    assert env.completion_tokens == task.completion_tokens
    network = transformer(
        ModelConfig(
            vocab_size=task.vocab_size,
            layers=1,
            embed_dim=16,
            heads=2,
            kv_heads=1,
            head_dim=8,
            mlp_dim=16,
            max_length=task.prompt_tokens + task.completion_tokens,
        )
    )
    weights = jit(network.init)(jax.random.key(0))
    common = {"sampling_params": SAMPLING, "network": network}
    ids = jnp.arange(4)
    ask = simple_request(KEY, {"policy": weights}, jnp.int32(2), ids, 3)
    text = jit(partial(task_rollout, task=task, parts=("verify",), **common))(ask)
    play_ = jit(partial(episode_rollout, task=env, parts={"reward": 1.0}, **common))(ask)
    for name in ("prompt_tokens", "tokens", "lengths", "mask", "sampler_logprobs", "versions"):
        left, right = getattr(text.rollout, name), getattr(play_.rollout, name)
        assert np.array_equal(left, right), name
    assert np.array_equal(text.rewards, play_.rewards)
    ended = np.asarray(text.rollout.stop) == StopReason.STOP_TOKEN
    assert np.array_equal(play_.rollout.stop, np.where(ended, StopReason.DONE, StopReason.TURNS))
    left, right = (to_batch(g.rollout, g.rewards, jnp.ones(1)) for g in (text, play_))
    assert np.array_equal(left.truncated, right.truncated)


# ---------------------------------------------------------------- scripted episodes


def test_a_scripted_episode_is_laid_out_as_a_played_one():
    env = get_env("guess_number", numbers=8)
    start = env.generate(jax.random.key(4), "train")
    tokens, length, log = jax.device_get(scripted(jax.random.key(1), start, env=env))
    text = env.tokenizer.decode(tokens[:length].tolist())
    low, high, expected = 0, 7, ""
    while True:
        guess = (low + high) // 2
        expected += str(guess)
        if guess == int(start.state.secret):
            break
        low, high = (guess + 1, high) if guess < start.state.secret else (low, guess - 1)
        expected += ">" if guess < start.state.secret else "<"
    assert text == expected
    mask = np.asarray(log.by_token(env.completion_tokens)["drawn"])[0][:length]
    assert mask.tolist() == [c.isdigit() for c in expected]
    assert bool(log.success)


# ---------------------------------------------------------------- bad environments


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": None}, "environment 'echo': step = None; give a function"),
        ({"turns": 0}, "environment 'echo': turns = 0; give a whole number, at least 1"),
        ({"turn_tokens": 1.5}, "turn_tokens = 1.5; give a whole number"),
        ({"reply_tokens": 3}, r"step: reply is int32\[4\]; declared as int32\[3\]"),
        ({"prompt_tokens": 4}, r"init: prompt is int32\[5\]; declared as int32\[4\]"),
        ({"step": lambda s, t, n, k: (s, t)}, "step returned .*; return .state, jrl.episodes.Turn"),
        (
            {"step": lambda s, t, n, k: (s.number, ENV.step(s, t, n, k)[1])},
            "step returned a state of .* and init one of",
        ),
    ],
)
def test_bad_environments_are_named_in_one_line(changes, message):
    with pytest.raises(UserError, match=message) as error:
        echo_env(**changes).check()
    assert "\n" not in str(error.value)


def test_an_episode_that_does_not_fit_the_model():
    longer = echo_env(turns=K + 1)
    with pytest.raises(UserError, match="data.env: an episode of 'echo' may reach 43 tokens.*36"):
        play(
            KEY,
            params(),
            starts(),
            SAMPLING,
            jnp.int32(0),
            jnp.arange(N),
            env=longer,
            network=NETWORK,
            group=2,
        )
