"""Episodes with environments on the host: their draws, their limits, and every kind of fault."""

import asyncio
import random
import threading
import time
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import jit, tiny_config

from jrl.collect.groups import to_batch
from jrl.episodes.calls import Calls
from jrl.episodes.chat import PlainFormat
from jrl.episodes.groups import play_episodes
from jrl.episodes.host import ChatOptions, Feedback, HostEnv, Limits
from jrl.episodes.play import Device, Scheduler
from jrl.episodes.transcript import RowShape, to_rollout
from jrl.episodes.world import host_world
from jrl.mesh import make_mesh
from jrl.models.tokenizer import char_tokenizer
from jrl.models.transformer import transformer
from jrl.sampling.generate import generate
from jrl.sampling.params import make_sampling_params, sampling_logprobs
from jrl.sampling.row_costs import WaitingPlace
from jrl.sampling.rows import Rows
from jrl.train.score import score
from jrl.types import Prompt, StopReason

TOKENIZER = char_tokenizer()
P, T, STOPS = 8, 40, (1, 5, 9, 20, 33)
CONFIG = tiny_config(P + T)
NETWORK = transformer(CONFIG)
CHAT = PlainFormat(TOKENIZER)


@cache
def params(seed=0):
    return jax.tree.map(lambda x: 1.5 * x, jit(NETWORK.init)(jax.random.key(seed)))


@cache
def rows(slots=4, chunk=3):
    return Rows(
        NETWORK,
        slots=slots,
        prompt_tokens=P,
        max_new_tokens=T,
        stop_tokens=STOPS,
        chunk=chunk,
        sampling={"temperature": 1.0},
    )


def user(text):
    return [{"role": "user", "content": text}]


async def no_wait():
    return None


def counting_env(wait=no_wait, turns=4, opened=None, **limits):
    """Answers with the number of tokens said so far; done when a turn has more than 12."""
    opened = [] if opened is None else opened

    async def init(prompt, seed):
        await wait()
        opened.append(prompt.id)
        return {"said": 0}, user(prompt.text)

    async def step(state, reply):
        await wait()
        token_count = state["said"] + len(reply.tokens)
        done = len(reply.tokens) > 12
        metrics = {"said": float(len(reply.tokens))}
        feedback = Feedback(
            user(f"{token_count}>"), float(len(reply.tokens)), done, done, None, metrics
        )
        return {"said": token_count}, feedback

    async def close(state):
        await wait()
        opened.pop()

    return HostEnv(init, step, close, limits=Limits(turns=turns, **limits))


def prompts(count):
    texts = [f"{i}+{i * 7 % 10}=" for i in range(count)]
    return [Prompt(i, t, np.zeros(0, np.int32), None) for i, t in enumerate(texts)]


def seed_of(prompt):
    hi, lo = np.asarray(jax.random.key_data(jax.random.fold_in(jax.random.key(3), prompt.id)))
    return (int(hi) << 32) + int(lo)


def play(env, count=3, group=4, slots=4, chunk=3, **device):
    table = rows(slots, chunk)
    table.set_weights(params(), 7)
    played_prompts = prompts(count)
    seeds = [seed_of(p) for p in played_prompts]
    with Calls() as calls:
        world = host_world(calls, env, CHAT, TOKENIZER)
        return play_episodes(Device(table, **device), world, played_prompts, seeds, group=group)


def turns_of(rollout):
    """Sampled turns and replies of every member."""
    return [
        [(s.tokens.tolist(), s.drawn, s.reward) for s in t.segments]
        for group in rollout.groups
        for t in group
    ]


@pytest.fixture(scope="module")
def undelayed():
    # No row is read again, whatever earlier tests measured: its rounding would differ.
    return play(counting_env(), choose=lambda wait: WaitingPlace.HELD)


def test_every_episode_is_its_opening_turns_and_answers(undelayed):
    assert {t.stop for g in undelayed.groups for t in g} >= {StopReason.DONE, StopReason.TURNS}
    for i, group in enumerate(undelayed.groups):
        assert len({str(t.segments[0].tokens) for t in group}) > 1
        for j, transcript in enumerate(group):
            assert (transcript.member, transcript.prompt.id) == (j, i)
            assert transcript.opening.tolist() == TOKENIZER.encode(transcript.prompt.text)
            total, turns = 0, transcript.segments[::2]
            for k, turn in enumerate(turns):
                assert turn.drawn
                assert (turn.versions == 7).all()
                assert turn.tokens[-1] in STOPS or transcript.stop == StopReason.LENGTH
                assert not set(turn.tokens[:-1].tolist()) & set(STOPS)
                total += len(turn.tokens)
                assert (turn.turn, turn.step, turn.reward) == (k, k, (len(turn.tokens),))
                if 2 * k + 1 < len(transcript.segments):
                    answer = transcript.segments[2 * k + 1]
                    assert answer.tokens.tolist() == TOKENIZER.encode(f"{total}>")
                    assert not answer.drawn
            assert transcript.metrics["said"] == total
            states = [t.state for t in turns]
            assert len(set(states)) == len(states)
    first = {t.segments[0].state for t in undelayed.groups[0]}
    assert len(first) == 1


def test_the_trainers_log_probabilities_are_the_samplers(undelayed):
    batch = to_rollout(undelayed.groups, RowShape(4, P, T)).rollout.check()
    n, g, t = batch.tokens.shape
    for i in range(n):
        length = int(batch.prompt_lengths[i])
        prompt = np.broadcast_to(batch.prompt_tokens[i, :length], (g, length))
        tokens = np.concatenate([prompt, batch.tokens[i]], axis=1)
        positions = np.broadcast_to(np.arange(length + t, dtype=np.int32), tokens.shape)
        hidden, _ = NETWORK.hidden(params(), tokens, positions, np.ones_like(tokens))
        logits = NETWORK.logits(params(), hidden[:, length - 1 : -1]).reshape(g * t, -1)
        logprobs = sampling_logprobs(logits, make_sampling_params()).reshape(g, t, -1)
        member_logprobs = jnp.take_along_axis(logprobs, batch.tokens[i][..., None], axis=2)[..., 0]
        gap = np.where(batch.mask[i], member_logprobs - batch.sampler_logprobs[i], 0)
        assert np.abs(gap).max() < 1e-5
    assert batch.mask.sum() == undelayed.counts["slot_tokens"]


def test_draws_do_not_depend_on_timing_slots_or_chunks(undelayed):
    chance = random.Random(1)

    async def wait():
        await asyncio.sleep(chance.random() * 0.02)

    assert turns_of(play(counting_env(wait))) == turns_of(undelayed)
    assert turns_of(play(counting_env(wait), slots=7, chunk=5)) == turns_of(undelayed)
    assert turns_of(play(counting_env(), slots=1, chunk=8)) == turns_of(undelayed)


# ---------------------------------------------------------------- several contexts

FOLDED = {"turns": 8, "turn_tokens": 6, "contexts": 3, "summary_tokens": 5}


def folding_env(wait=no_wait, **limits):
    return counting_env(wait, **(FOLDED | limits))._replace(chat=ChatOptions(summary="sum"))


def test_contexts_hold_a_summary_and_what_follows_it():
    rollout = play(folding_env())
    summary_ids, full = TOKENIZER.encode("sum"), 0
    for transcript in (t for g in rollout.groups for t in g):
        parts, last = transcript.segments, -1
        for k, part in enumerate(parts):
            if part.context == last:
                continue
            if part.context:  # asked for, drawn, kept as it was drawn, and the answer behind it
                full += 1
                request, summary, repeated, answer = parts[k - 2 : k + 2]
                end = [] if summary.tokens[-1] in STOPS else [TOKENIZER.eos_id]
                assert request.tokens.tolist()[-3:] == summary_ids
                assert summary.drawn
                assert len(summary.tokens) <= 5
                assert not request.drawn
                assert not repeated.drawn
                assert repeated.tokens.tolist() == summary.tokens.tolist()
                assert answer.tokens.tolist()[: len(end)] == end
                assert TOKENIZER.decode(answer.tokens.tolist()).endswith(">")
                assert summary.reward == ()
            last = part.context
        for context in range(last + 1):
            used = sum(len(s.tokens) for s in parts if s.context == context)
            assert used <= T
        turns = [s for s in parts if s.drawn and s.reward]
        assert [s.reward[0] for s in turns] == [len(s.tokens) for s in turns]
    assert full == rollout.counts["summaries"] > 3
    sampled_tokens = sum(
        len(s.tokens) for g in rollout.groups for t in g for s in t.segments if s.drawn
    )
    assert sampled_tokens == rollout.counts["slot_tokens"]
    assert {t.stop for g in rollout.groups for t in g} <= {StopReason.TURNS, StopReason.LENGTH}


@pytest.mark.parametrize("place", [WaitingPlace.PARKED, WaitingPlace.DROPPED, None])
def test_contexts_do_not_depend_on_timing_slots_or_chunks(place):
    chance = random.Random(4)

    async def wait():
        await asyncio.sleep(chance.random() * 0.02)

    undelayed = turns_of(play(folding_env()))
    assert turns_of(play(folding_env(), slots=1, chunk=8)) == undelayed
    choose = by_chance(5) if place is None else lambda wait: place
    assert turns_of(play(folding_env(wait), choose=choose)) == undelayed


@pytest.mark.parametrize("endings", ["", "ab"], ids=["alike", "apart"])
def test_a_context_was_drawn_behind_the_prompt_and_itself_alone(endings):
    """Each one scored as a sequence of its own; and all of an episode as one row of training.

    What an opening does not share with the group's others begins each of its contexts.
    """
    env, turn = folding_env(), iter(range(100))

    async def init(prompt, seed):
        return {"said": 0}, user(prompt.text + endings[next(turn) % 2 :][:1])

    episodes = play(env._replace(init=init))
    batch = to_rollout(episodes.groups, RowShape(4, P, T, contexts=3))
    rollout, context = batch.rollout, batch.ids["context"]
    trained = to_batch(rollout, batch.rewards, np.ones(1, np.float32), batch.ids)
    scored = jit(partial(score, network=NETWORK, value=None, want=frozenset({"logprobs"})))
    scored_logprobs = np.asarray(
        scored({"policy": params()}, trained, make_sampling_params())["logprobs"]
    )
    # Decoding rounds so in episodes of one context, too.
    assert (
        np.abs(np.where(rollout.mask, scored_logprobs - rollout.sampler_logprobs, 0)).max() < 3e-5
    )
    assert context.max() == 2
    i, j = map(int, np.argwhere(context.max(-1) == 2)[0])
    prompt = rollout.prompt_tokens[i, : rollout.prompt_lengths[i]]
    for number in range(3):
        at = (context[i, j] == number) & (np.arange(3 * T) < rollout.lengths[i, j])
        tokens = np.concatenate([prompt, rollout.tokens[i, j, at]])[None]
        hidden, _ = NETWORK.hidden(params(), tokens, np.arange(tokens.size)[None], tokens * 0 + 1)
        logits = NETWORK.logits(params(), hidden[0, len(prompt) - 1 : -1])
        logprobs = np.asarray(sampling_logprobs(logits, make_sampling_params()))
        direct_logprobs = np.take_along_axis(logprobs, tokens[0, len(prompt) :, None], axis=1)[:, 0]
        assert (
            np.abs(
                np.where(rollout.mask[i, j, at], direct_logprobs - scored_logprobs[i, j, at], 0)
            ).max()
            < 3e-5
        )


def by_chance(seed):
    chance = random.Random(seed)
    return lambda wait: chance.choice(list(WaitingPlace))


@pytest.mark.parametrize("place", [*WaitingPlace, None])
def test_draws_do_not_depend_on_where_rows_wait(undelayed, place):
    """Rows held, parked, dropped, or each time one of them by chance: the same episodes.

    The same bits where no row is read again.
    """

    chance = random.Random(2)

    async def wait():
        await asyncio.sleep(chance.random() * 0.02)

    choose = by_chance(3) if place is None else lambda wait: place
    moved_rows = play(counting_env(wait), choose=choose)
    assert turns_of(moved_rows) == turns_of(undelayed)
    for mine, theirs in zip(moved_rows.groups, undelayed.groups, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            for x, y in zip(a.segments[::2], b.segments[::2], strict=True):  # those drawn
                most = 0 if place in (WaitingPlace.HELD, WaitingPlace.PARKED) else 1e-5
                np.testing.assert_allclose(x.logprobs, y.logprobs, rtol=0, atol=most)
    counts = moved_rows.counts
    assert (counts["parked"] > 0) == (place in (WaitingPlace.PARKED, None))
    assert (counts["dropped"] > 0) == (place in (WaitingPlace.DROPPED, None))
    assert (counts["reread_tokens"] > 0) == (counts["dropped"] > 0)


def test_tokens_are_read_once(undelayed):
    """Prompts once for members that begin together, answers once, and no turn's past again."""
    parked = play(counting_env(), slots=4, choose=lambda wait: WaitingPlace.PARKED)
    members = [t for g in parked.groups for t in g]
    answers = sum(len(s.tokens) for t in members for s in t.segments if not s.drawn)
    openings = [len(g[0].opening) for g in parked.groups]
    read = parked.counts["read_tokens"] - answers
    assert sum(openings) <= read <= 4 * sum(openings)
    assert parked.counts["reread_tokens"] == 0
    again = play(counting_env(), slots=4, choose=lambda wait: WaitingPlace.DROPPED).counts
    assert again["read_tokens"] > parked.counts["read_tokens"]
    assert again["read_tokens"] - again["reread_tokens"] <= answers + 4 * sum(openings)


@pytest.mark.parametrize("place", [WaitingPlace.PARKED, WaitingPlace.DROPPED])
def test_a_slot_does_not_wait(place):
    """Each of eight episodes in four slots is answered when all have ended their turns."""
    all_met = asyncio.Barrier(8)
    env = counting_env(turns=3, turn_tokens=3, call_seconds=20.0)

    async def step(state, reply):
        await all_met.wait()
        return await env.step(state, reply)

    rollout = play(env._replace(step=step), count=2, choose=lambda wait: place)
    assert {t.stop for g in rollout.groups for t in g} == {StopReason.TURNS}
    assert rollout.counts[place.value] >= 3 * 4


def test_a_slot_that_is_held_waits():
    all_met = asyncio.Barrier(8)
    env = counting_env(turns=3, turn_tokens=3, call_seconds=0.2)

    async def step(state, reply):
        await all_met.wait()

    rollout = play(env._replace(step=step), count=2, choose=lambda wait: WaitingPlace.HELD)
    assert {t.stop for g in rollout.groups for t in g} == {StopReason.TIMEOUT}
    assert rollout.counts["parked"] == rollout.counts["dropped"] == 0


def test_all_slots_waiting_is_a_wait_and_no_loop(monkeypatch):
    async def wait():
        await asyncio.sleep(0.1)

    decode, chunks = Rows.decode, []
    monkeypatch.setattr(Rows, "decode", lambda *a: chunks.append(1) or decode(*a))
    play(counting_env(turns=2, turn_tokens=3), count=1, group=2)
    chunks.clear()
    start, spent = time.monotonic(), time.thread_time()
    rollout = play(counting_env(wait, turns=2, turn_tokens=3), count=1, group=2)
    took, spent = time.monotonic() - start, time.thread_time() - spent
    assert 0.25 < rollout.counts["idle_seconds"] < took
    assert len(chunks) <= 4
    assert spent < 0.5 * took


def test_slots_without_an_episode_are_not_in_use():
    rollout = play(counting_env(turns=1), count=1, group=3, slots=4)
    assert rollout.counts["slot_steps"] <= 3 * T


@pytest.mark.parametrize("place", [WaitingPlace.PARKED, WaitingPlace.DROPPED])
def test_divided_slots_give_the_same(undelayed, place):
    """Slots divided over two devices; half as many rows may be parked, each whole on both."""
    with jax.set_mesh(make_mesh({"data": 2}, jax.devices()[:2])):
        rows.cache_clear()
        divided = play(counting_env(), choose=lambda wait: place)
        assert rows().max_suspended == 2
        rows.cache_clear()
    assert turns_of(divided) == turns_of(undelayed)
    assert divided.counts[place.value] > 0


def test_sync_functions_give_the_same(undelayed):
    env = counting_env()

    def sync(function):
        return lambda *args: asyncio.run(function(*args))

    other = env._replace(init=sync(env.init), step=sync(env.step), close=sync(env.close))
    assert turns_of(play(other)) == turns_of(undelayed)


def test_one_turn_is_what_generate_draws():
    episodes = play(counting_env(turns=1), count=3, group=4)
    sampled_prompts = prompts(3)
    tokens = np.zeros((3, P), np.int32)
    for row, prompt in zip(tokens, sampled_prompts, strict=True):
        row[: len(prompt.text)] = TOKENIZER.encode(prompt.text)
    sample = partial(generate, network=NETWORK, group=4, max_new_tokens=T, stop_tokens=STOPS)
    lengths = np.array([len(p.text) for p in sampled_prompts], np.int32)
    arguments = tokens, lengths, make_sampling_params(), np.int32(7), np.arange(3)
    expected, _ = jit(sample)(jax.random.key(3), params(), *arguments)
    rollout = to_rollout(episodes.groups, RowShape(4, P, T)).rollout
    for i in range(3):
        for j in range(4):
            n = int(expected.lengths[i, j])
            assert rollout.lengths[i, j] == n
            assert rollout.tokens[i, j, :n].tolist() == expected.tokens[i, j, :n].tolist()


def test_slots_are_refilled_while_others_wait():
    waits = []

    async def wait():
        waits.append(1)
        if len(waits) == 5:  # one of the first answers, after four openings
            await asyncio.sleep(1.0)

    begin = time.monotonic()
    rollout = play(counting_env(wait, turns=1), count=4, group=4, slots=4)
    assert time.monotonic() - begin < 3
    assert {t.stop for g in rollout.groups for t in g} <= {StopReason.TURNS, StopReason.DONE, 2}


# ---------------------------------------------------------------- limits


def test_turns_that_are_cut_are_ended_for_the_policy():
    rollout = play(counting_env(turn_tokens=4))
    cut_turns = [
        (a, b)
        for g in rollout.groups
        for t in g
        for a, b in zip(t.segments, t.segments[1:], strict=False)
        if a.drawn and a.tokens[-1] not in STOPS
    ]
    assert cut_turns
    for turn, answer in cut_turns:
        assert len(turn.tokens) == 4
        assert answer.tokens[0] == TOKENIZER.eos_id


def test_an_answer_that_leaves_no_room_is_not_given():
    env = counting_env(turns=9)

    async def wordy(state, reply):
        state, feedback = await env.step(state, reply)
        return state, feedback._replace(messages=user("x" * 30), done=False)

    rollout = play(env._replace(step=wordy))
    for transcript in (t for g in rollout.groups for t in g):
        length = sum(len(s.tokens) for s in transcript.segments)
        assert length <= T
        assert transcript.segments[-1].drawn
        assert transcript.stop == StopReason.LENGTH
        assert all(len(s.tokens) == 30 for s in transcript.segments if not s.drawn)


def test_members_that_open_differently_share_what_is_common():
    env = counting_env()
    turn = iter(range(100))

    async def init(prompt, seed):
        return {"said": 0}, user(prompt.text + "ab"[next(turn) % 2] * 2)

    rollout = play(env._replace(init=init), count=2)
    batch = to_rollout(rollout.groups, RowShape(4, P, T)).rollout
    assert batch.prompt_lengths.tolist() == [4, 4]
    assert not batch.mask[:, :, :2].any()
    assert batch.mask[:, :, 2].all()

    async def strangers(prompt, seed):
        return {"said": 0}, user("ab"[next(turn) % 2])

    failed = [t for g in play(env._replace(init=strangers), count=1).groups for t in g]
    assert {t.stop for t in failed} == {StopReason.FAILED}
    assert "different first tokens" in failed[0].reason


def test_weights_may_change_between_turns():
    versions = iter(range(8, 1000))

    def newer():
        return params(), next(versions)

    rollout = play(counting_env(), newer=newer)
    assert len(turns_of(rollout)) == 12
    for transcript in (t for g in rollout.groups for t in g):
        policy_versions = np.concatenate([s.versions for s in transcript.segments if s.drawn])
        assert (np.diff(policy_versions) >= 0).all()
        assert policy_versions[0] >= 8
    assert len({int(s.versions[0]) for t in rollout.groups[0] for s in t.segments if s.drawn}) > 2
    assert turns_of(rollout) == turns_of(play(counting_env()))


# ---------------------------------------------------------------- faults


class Broken(Exception):
    pass


def faulty_env(faults, rate, opened):
    """An environment some of whose calls go wrong, by chance; ``faults`` lists them."""
    inner = counting_env(opened=opened, call_seconds=0.3, answer_chars=1000)
    chance = random.Random(5)

    async def fault():
        kind = chance.choice(["raise", "exit", "hang", "nonsense", "nan", "huge", "stubborn"])
        faults.append(kind)
        if kind == "raise":
            raise Broken("no more")
        if kind == "exit":
            raise SystemExit(3)
        if kind == "hang":
            await asyncio.Event().wait()
        if kind == "stubborn":
            for _ in range(3):
                try:
                    await asyncio.sleep(0.4)
                except asyncio.CancelledError:
                    continue
        if kind == "nan":
            return {}, Feedback(user("x"), float("nan"))
        return {}, {"nonsense": 7, "huge": Feedback(user("x" * 10_000_000))}.get(kind, 7)

    async def init(prompt, seed):
        if chance.random() < rate:
            faults.append("init")
            raise Broken("not today")
        return await inner.init(prompt, seed)

    async def step(state, reply):
        if chance.random() < rate:
            return await fault()
        return await inner.step(state, reply)

    return inner._replace(init=init, step=step)


def check_faults(count, group):
    faults, opened, before = [], [], threading.active_count()
    begin = time.monotonic()
    rollout = play(faulty_env(faults, 0.2, opened), count=count, group=group, slots=8, chunk=4)
    took = time.monotonic() - begin
    members = [t for g in rollout.groups for t in g]
    slow = sum(kind in ("hang", "stubborn") for kind in faults)
    assert rollout.counts["env_timeouts"] == slow > 0
    assert rollout.counts["env_errors"] == len(faults) - slow > 0
    assert len(set(faults)) == 8
    assert sum(t.stop == StopReason.TIMEOUT for t in members) == slow
    assert sum(t.stop == StopReason.FAILED for t in members) == len(faults) - slow
    assert all(t.reason for t in members if not t.alive)
    assert sum(t.alive for t in members) == count * group - len(faults) > 0
    assert not opened  # every environment that opened was closed
    assert threading.active_count() == before
    assert took < 20 + 0.4 * slow  # programs are compiled meanwhile
    batch = to_rollout(rollout.groups, RowShape(group, P, T)).rollout
    assert ((batch.stop < StopReason.FAILED) == batch.mask.any(2)).all()


def test_a_fault_ends_its_member_only():
    check_faults(50, 4)


@pytest.mark.slow
def test_a_thousand_episodes_leave_nothing_behind():
    check_faults(250, 4)


@pytest.mark.slow
def test_an_async_function_that_blocks_the_loop_ends():
    env, hung = counting_env(call_seconds=0.2), []
    release = threading.Event()

    async def step(state, reply):
        if not hung:
            hung.append(1)
            release.wait(20)  # as a call that forgot to await
        return await env.step(state, reply)

    def held(wait):  # so that both plays run the same programs
        return WaitingPlace.HELD

    play(env, count=6, choose=held)  # compiles
    before = threading.active_count()
    begin = time.monotonic()
    rollout = play(env._replace(step=step), count=6, choose=held)
    assert time.monotonic() - begin < 15
    release.set()
    # With it went what the loop was to answer then: of the four slots, and four openings.
    assert 1 <= rollout.counts["env_timeouts"] <= 8
    assert sum(t.alive for g in rollout.groups for t in g) == 24 - rollout.counts["env_timeouts"]
    for _ in range(50):
        if threading.active_count() > before:
            time.sleep(0.1)
    assert threading.active_count() == before


def test_deadlines_of_turns_and_episodes():
    async def wait():
        await asyncio.sleep(0.15)

    turns = play(counting_env(wait, turn_seconds=0.05, call_seconds=9), count=1, group=2)
    assert {t.stop for t in turns.groups[0]} == {StopReason.TIMEOUT}
    assert "turn 0 took more than 0.05 seconds" in turns.groups[0][0].reason
    rollout = play(counting_env(wait, episode_seconds=0.2, call_seconds=9), count=1, group=2)
    assert {t.stop for t in rollout.groups[0]} <= {StopReason.TIMEOUT, StopReason.DONE}
    assert rollout.counts["env_timeouts"] > 0


@pytest.mark.parametrize("compiles", [0, 1])
def test_compiling_is_no_time_of_an_episode(compiles):
    delays, rows = [], SimpleNamespace(executables=3)
    scheduler = SimpleNamespace(rows=rows, slots=SimpleNamespace(delay=delays.append))
    with Scheduler._compiling_uncounted(scheduler):
        time.sleep(0.02)
        rows.executables += compiles
    assert len(delays) == compiles
    assert all(seconds >= 0.02 for seconds in delays)


def paying_late(earlier):
    """Three turns of up to four tokens, paid with the last one."""

    async def init(prompt, seed):
        return 0, user(prompt.text)

    async def step(state, reply):
        if reply.turn < 2:
            return state, Feedback(user(">"), 0.25)
        return state, Feedback((), 1.0, True, True, earlier=earlier)

    return HostEnv(init, step, limits=Limits(turns=3, turn_tokens=4))


def test_points_for_earlier_turns_stand_at_those_turns():
    rollout = play(paying_late([10.0, 20.0]), count=1)
    (group,) = rollout.groups
    for row in group:
        turns = [s for s in row.segments if s.drawn]
        assert [s.reward for s in turns] == [(10.25,), (20.25,), (1.0,)]
    paid = to_rollout([group], RowShape(4, P, T)).paid
    assert sorted(paid[paid > 0].tolist()) == sorted(4 * [1.0, 10.25, 20.25])


def test_points_for_turns_that_were_not_taken_fail_the_member():
    rollout = play(paying_late([1.0] * 3), count=1, group=2)
    assert all(row.stop == StopReason.FAILED for row in rollout.groups[0])
    assert "points for 3 earlier turns; 2 were taken" in rollout.groups[0][0].reason
    assert rollout.counts["env_errors"] == 2


def test_close_may_fail():
    env = counting_env()

    async def close(state):
        raise Broken("cannot close")

    rollout = play(env._replace(close=close), count=1)
    assert rollout.counts["env_close_errors"] == 4
    assert all(t.alive for t in rollout.groups[0])
