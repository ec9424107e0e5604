"""Environments as coroutines: turns, roles and rewards, faults, cancellation, and their names."""

import asyncio
import functools
import random
import threading
import time

import jax
import numpy as np
import pytest
import scripted
from scripted import reply

from jrl.episodes.calls import Calls
from jrl.episodes.chat import PlainFormat
from jrl.episodes.check_env import check_env
from jrl.episodes.configured import configured_env
from jrl.episodes.coroutine import Outcome, coroutine_env, roles
from jrl.episodes.gate import Gate
from jrl.episodes.groups import play_episodes
from jrl.episodes.host import EnvError, Feedback, HostEnv, Limits, check_feedback
from jrl.episodes.play import Device
from jrl.episodes.worker import made_env
from jrl.episodes.world import host_world
from jrl.errors import UserError
from jrl.models.config import ModelConfig
from jrl.models.tokenizer import char_tokenizer
from jrl.models.transformer import transformer
from jrl.sampling.rows import Rows
from jrl.types import Prompt, StopReason

PROMPT = Prompt(0, "6 * 7?", np.zeros(0, np.int32), "42")


def play(env, *turns, seed=0):
    return scripted.play(env, turns, PROMPT, seed)


def user(text):
    return [{"role": "user", "content": text}]


async def ask_twice(policy, prompt, seed):
    first = await policy(f"{prompt.text} ({seed})")
    second = await policy({"role": "tool", "content": f"you said {first.text}"}, state_key="again")
    return float(prompt.answer in second.text)


def test_an_episode_is_played_turn_by_turn():
    env = check_env(coroutine_env(ask_twice, limits=Limits(turns=3)))
    assert (env.players, env.fork, env.limits.turns) == (1, None, 3)
    opening, first, end = play(env, "41", "42", seed=5)
    assert opening == user("6 * 7? (5)")
    assert first.messages == [{"role": "tool", "content": "you said 41"}]
    assert (first.reward, first.done, first.next, first.state_key) == ((0.0,), False, 0, "again")
    assert (end.reward, end.done, end.success, end.cut) == ((1.0,), True, True, False)
    assert not play(env, "42", "41")[-1].success


@roles("writer", "critic")
async def debate(policy, prompt):
    draft = await policy(prompt.text)
    policy.record(drafts=1)
    await policy["critic"]("Any mistakes?")
    policy.reward(0.25, role="writer")
    policy.reward(0.5)  # the last turn's
    final = await policy.role("writer", user("Now improve it."))
    right = float(prompt.answer in final.text)
    policy.reward(right, turn=draft.turn)
    return Outcome({"writer": right, "critic": 2.0}, metrics={"drafts": 1.0}, labels={"kind": 3})


def test_rewards_of_several_roles_reach_their_turns():
    env = coroutine_env(debate)
    assert env.players == 2
    opening, first, second, end = play(env, "41", "yes", "42")
    assert opening == user("6 * 7?")
    assert (first.next, first.metrics, first.reward) == (1, {"drafts": 1.0}, (0.0,))
    assert (second.next, second.reward, second.earlier) == (0, (0.5,), ((0.25,),))
    assert (end.reward, end.earlier) == ((1.0,), ((1.0,), (2.0,)))
    assert (end.metrics, end.labels, end.success) == ({"drafts": 1.0}, {"kind": 3}, True)
    total = {"writer": 0.25 + 1.0 + 1.0, "critic": 0.5 + 2.0}
    paid = [first.reward[0] + second.earlier[0][0] + end.earlier[0][0] + end.reward[0]]
    paid += [second.reward[0] + end.earlier[1][0]]
    assert dict(zip(total, paid, strict=True)) == total


@pytest.mark.parametrize(
    ("value", "rewards", "success"),
    [
        (1.0, (1.0, 1.0), True),  # a number is for every role
        ({"a": 0.5, "b": 3.0}, (0.5, 3.0), False),  # success is the first role's
        ({"b": 1.0}, (0.0, 1.0), False),
        (None, (0.0, 0.0), False),
        (True, (1.0, 1.0), True),
        (Outcome(0.0, success=True), (0.0, 0.0), True),
        (Outcome(success=False), (0.0, 0.0), False),
    ],
)
def test_what_an_episode_may_return(value, rewards, success):
    async def episode(policy, prompt):
        await policy("a?")
        await policy["b"]("b?")
        return value

    end = play(coroutine_env(episode, roles=("a", "b")), "x", "y")[-1]
    earlier = end.earlier[0][0] if end.earlier else 0.0
    assert ((earlier, end.reward[0]), end.success) == (rewards, success)


def test_rewards_have_the_parts_of_the_environment():
    async def episode(policy, prompt):
        await policy("?")
        policy.reward((0.5, 1.0))
        return (0.5, 0.0)

    env = coroutine_env(episode, parts=("form", "content"))
    end = play(env, "x")[-1]
    assert (end.reward, end.success) == ((1.0, 1.0), True)
    with pytest.raises(EnvError, match="1 reward parts; the environment names 2"):
        play(coroutine_env(ask_twice, parts=("a", "b")), "x", "y")


def returns(value):
    async def episode(policy, prompt):
        await policy("?")
        return value

    return episode


def after_a_turn(act):
    async def episode(policy, prompt):
        await policy("?")
        result = act(policy)
        return await result if asyncio.iscoroutine(result) else result

    return episode


async def in_a_task(policy, prompt):
    await asyncio.gather(policy("?"), policy("!"))


async def no_turn(policy, prompt):
    return 1.0


async def other_first(policy, prompt):
    await policy["other"]("?")


@pytest.mark.parametrize(
    ("episode", "message"),
    [
        (no_turn, "the episode ended before its first turn"),
        (other_first, "'other' takes the first turn; name the roles so that .* now 'policy'"),
        (in_a_task, r"awaited in another task \(asyncio.gather"),
        (returns("good"), "reward is 'good', not a number"),
        (returns(float("nan")), "reward is nan, not finite"),
        (returns({"critic": 1.0}), "no role 'critic'; the episode has policy, other. Name all"),
        (returns({"other": 1.0}), "a reward for 'other', which has taken no turn"),
        (returns(Outcome(1.0, metrics=3)), "Outcome.metrics = 3, not a dict"),
        (after_a_turn(lambda p: p["critic"]), "no role 'critic'"),
        (after_a_turn(lambda p: p.reward(1.0, turn=1)), "a reward for turn 1; 1 were taken"),
        (after_a_turn(lambda p: p.reward(1.0, turn=-1)), "a reward for turn -1"),
        (after_a_turn(lambda p: p.reward(1.0, turn=0, role="policy")), "a role or a turn, not"),
        (after_a_turn(lambda p: p(7)), "messages are 7, not a text or a list of dicts"),
        (
            after_a_turn(lambda p: p([{"role": "assistant", "content": "x"}])),
            "messages are what comes next in the conversation",
        ),
        (after_a_turn(lambda p: p([])), r"messages are \[\], not a list of at least one dict"),
    ],
)
def test_a_mistake_of_an_episode_is_named(episode, message):
    with pytest.raises(EnvError, match=message):
        play(coroutine_env(episode, roles=("policy", "other")), "x", "y")


def test_a_role_without_a_turn_may_be_given_nothing():
    assert play(coroutine_env(returns({"b": 0.0}), roles=("a", "b")), "x")[-1].reward == (0.0,)


# ---------------------------------------------------------------- faults and cancellation


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class _Unnamed(type):
    @property
    def __name__(cls):
        raise RuntimeError("no name")


class Nameless(Exception, metaclass=_Unnamed):
    pass


class Disguised(Exception):
    @property
    def __class__(self):
        raise RuntimeError("no class")


def answer_to(function, *arguments, seconds=5.0, cancel=False):
    """The answer to a call, as a run makes it."""
    with Calls() as calls:
        calls.submit(0, function, *arguments, seconds=seconds)
        if cancel:
            time.sleep(0.1)
            calls.cancel(0)
        return calls.inbox.get(timeout=10)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("no such file"), "ValueError: no such file"),
        (Unspeakable(), "Unspeakable: (and its text raises RuntimeError)"),
        (SystemExit(3), "SystemExit: 3"),
        (StopIteration(), "RuntimeError: coroutine raised StopIteration"),
    ],
)
def test_an_exception_is_the_answer_with_its_text(error, message):
    async def episode(policy, prompt):
        raise error

    assert answer_to(coroutine_env(episode).init, PROMPT, 0).error == message


@pytest.mark.parametrize("error", ["Unspeakable", "Nameless", "Disguised"])
def test_an_exception_that_hides_what_it_is_is_an_answer_before_its_deadline(error):
    def fail():
        raise globals()[error]("why")

    async def fail_later():
        fail()

    for function in (fail, fail_later):
        answer = answer_to(function)
        assert not answer.timeout
        assert answer.error.startswith(f"{error}: ")


def test_a_call_that_takes_too_long_cancels_the_episode():
    events = []

    async def episode(policy, prompt):
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            events.append("clean")

    answer = answer_to(coroutine_env(episode).init, PROMPT, 0, seconds=2.0)
    assert (answer.timeout, events) == (True, ["clean"])


def test_an_episode_that_swallows_its_cancellation_ends_at_its_next_turn():
    events = []

    async def episode(policy, prompt):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            events.append("cancelled")
        try:
            await policy("?")
        finally:
            events.append("closed")

    assert answer_to(coroutine_env(episode).init, PROMPT, 0, cancel=True).error == "cancelled"
    assert events == ["cancelled", "closed"]


@pytest.mark.parametrize("stubborn", [False, True])
def test_closing_an_episode_runs_its_clean_up(stubborn):
    events = []

    async def episode(policy, prompt):
        try:
            await policy("?")
        except asyncio.CancelledError:
            while stubborn:
                try:
                    await policy("again?")
                except asyncio.CancelledError:
                    events.append("asked")
        finally:
            if not stubborn:
                await asyncio.sleep(0.01)
            events.append("clean")

    play(coroutine_env(episode))
    assert events == (["asked", "asked", "clean"] if stubborn else ["clean"])


def test_an_error_of_the_clean_up_is_the_answer_of_close():
    async def episode(policy, prompt):
        try:
            await policy("?")
        finally:
            raise ValueError("cannot clean up")

    with pytest.raises(ValueError, match="cannot clean up"):
        play(coroutine_env(episode))


def test_an_episode_awaits_threads_tasks_and_timeouts_of_its_own():
    async def episode(policy, prompt):
        here = threading.get_ident()
        background = asyncio.create_task(asyncio.sleep(0, "later"))
        thread = await asyncio.to_thread(threading.get_ident)
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)
        except TimeoutError:
            await policy(f"{thread != here} {await background}")
        return 1.0

    opening, end = play(coroutine_env(episode), "x")
    assert opening == user("True later")
    assert end.success


def test_seconds_in_a_queue_do_not_count_in_any_call():
    gate = Gate(1, "a desk")

    async def episode(policy, prompt):
        await policy("?")
        async with gate:
            await asyncio.sleep(0.3)
        return 1.0

    env = coroutine_env(episode)

    async def call():
        return await env.init(PROMPT, 0)

    with Calls() as calls:
        states = []
        for number in range(5):
            calls.submit(number, call, seconds=5.0)
            states.append(calls.inbox.get(timeout=10).value[0])
        for number, state in enumerate(states):
            calls.submit(number, env.step, state, reply("x", 0), seconds=1.0)
        answers = [calls.inbox.get(timeout=10) for _ in states]
    assert not any(answer.error for answer in answers)  # the last one has waited 1.2 seconds


def test_variables_of_a_context_last_from_turn_to_turn():
    import contextvars

    language = contextvars.ContextVar("language", default="en")

    async def episode(policy, prompt):
        token = language.set("fr")
        await policy(language.get())
        await policy(language.get())
        language.reset(token)
        return 1.0

    assert play(coroutine_env(episode), "x", "y")[1].messages == user("fr")


def test_an_event_loop_that_is_given_up_takes_no_waiting_episode_with_it():
    env = coroutine_env(ask_twice)
    with Calls() as calls:
        calls.submit(0, env.init, PROMPT, 0, seconds=5.0)
        state, _ = calls.inbox.get(timeout=10).value

        started = threading.Event()

        async def block():
            started.set()
            time.sleep(0.5)

        calls.submit(1, block, seconds=0.1)
        assert started.wait(10)
        assert calls.blocked(0.1)
        for turn in range(2):
            calls.submit(2 + turn, env.step, state, reply("42", turn), seconds=5.0)
            feedback = calls.inbox.get(timeout=10).value[1]
    assert feedback.success


def test_an_iterator_that_is_exhausted_ends_its_call():
    with Calls() as calls:
        calls.submit(0, lambda: next(iter(())), seconds=60.0)
        assert calls.inbox.get(timeout=10).error.startswith("StopIteration")


# ---------------------------------------------------------------- the same engine

TOKENIZER = char_tokenizer()
STOPS = (1, 5, 9, 20, 33)
CONFIG = ModelConfig(
    vocab_size=48,
    layers=1,
    embed_dim=16,
    heads=2,
    kv_heads=1,
    head_dim=8,
    mlp_dim=16,
    max_length=48,
)


@functools.cache
def table():
    network = transformer(CONFIG)
    init = jax.jit(network.init, compiler_options={"xla_backend_optimization_level": 0})
    row_table = Rows(
        network,
        slots=3,
        prompt_tokens=8,
        max_new_tokens=40,
        stop_tokens=STOPS,
        chunk=3,
        sampling={"temperature": 1.0},
    )
    return row_table, jax.tree.map(lambda x: 1.5 * x, init(jax.random.key(0)))


def play_rows(env):
    """Everything that is known of six episodes."""
    rows, params = table()
    rows.set_weights(params, 7)
    texts = [Prompt(i, f"{i}+{i}=", np.zeros(0, np.int32), None) for i in range(2)]
    chat = PlainFormat(TOKENIZER)
    with Calls() as calls:
        world = host_world(calls, env, chat, TOKENIZER)
        out = play_episodes(Device(rows), world, texts, [11, 12], group=3)
    return [
        (
            t.stop,
            t.reason,
            dict(t.metrics),
            [(s.tokens.tolist(), s.drawn, s.reward, s.player, s.turn, s.state) for s in t.segments],
        )
        for group in out.groups
        for t in group
    ], out.counts


def as_functions(turns):
    """Asks for more until a turn is long; rewards each turn, and the first one again at the end."""

    async def init(prompt, seed):
        return 0, user(prompt.text)

    async def step(total, reply):
        total, long = total + len(reply.tokens), len(reply.tokens) > 12
        return total, Feedback(
            user(f"{total}>"),
            float(len(reply.tokens)),
            done=long,
            success=long,
            metrics={"said": float(len(reply.tokens))},
            earlier=(float(total),) if long and reply.turn else (),
        )

    return HostEnv(init, step, players=2, limits=Limits(turns=turns))


def as_coroutine(turns, wait):
    async def episode(policy, prompt):
        total, turn, messages = 0, 0, prompt.text
        while True:
            await wait()
            answer = await policy[policy.roles[turn % 2]](messages)
            await wait()
            total, turn = total + len(answer.tokens), turn + 1
            policy.record(said=len(answer.tokens))
            policy.reward(len(answer.tokens))
            if len(answer.tokens) > 12:
                if turn > 1:
                    policy.reward(total, turn=0)
                return Outcome(success=True)
            messages = f"{total}>"

    return coroutine_env(episode, roles=("a", "b"), limits=Limits(turns=turns))


def test_a_coroutine_is_played_like_the_functions_it_stands_for():
    expected, _ = play_rows(as_functions(4))
    assert {stop for stop, *_ in expected} >= {StopReason.DONE, StopReason.TURNS}
    chance = random.Random(1)

    async def wait():
        await asyncio.sleep(0.02 * chance.random())

    for _ in range(2):  # whatever the timing
        assert play_rows(as_coroutine(4, wait))[0] == expected


def test_a_failing_episode_ends_its_own_member_and_no_other():
    count = iter(range(100))
    numbers = []

    async def episode(policy, prompt):
        number = next(count)
        try:
            await policy(prompt.text)
            if number == 1:
                raise Unspeakable
            await policy("more")
            await policy("more")
        finally:
            numbers.append(number)

    rows, counts = play_rows(coroutine_env(episode, limits=Limits(turns=2)))
    reasons = [reason for _, reason, *_ in rows if reason]
    assert reasons == ["Unspeakable: (and its text raises RuntimeError)"]
    assert counts["env_errors"] == 1
    stops = [stop for stop, *_ in rows]
    assert stops.count(StopReason.FAILED) == 1
    assert stops.count(StopReason.TURNS) >= 3
    assert sorted(numbers) == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]  # those that reach the limit of turns are cancelled


# ---------------------------------------------------------------- by name

OWN = """
import os

from jrl.episodes.coroutine import coroutine_env, roles


@roles("writer", "critic")
async def episode(policy, prompt, seed, *, word="well"):
    await policy(f"{prompt.text} {word} {os.getpid()}")
    await policy["critic"]("?")
    return {"writer": 1.0, "critic": 0.5}


async def needs(policy, prompt, *, word):
    await policy(word)


def made(word="well"):
    return coroutine_env(episode)


def plain(policy, prompt):
    return 0.0


async def alone(prompt):
    return 0.0


async def swapped(prompt, policy):
    return 0.0


async def yields(policy, prompt):
    yield 0.0


async def seedless(policy, seed):
    return 0.0


async def undeclared(policy, prompt):
    await policy(prompt.text)
    await policy.role("judge", "?")


@roles("writer")
async def one_more(policy, prompt):
    await policy(prompt.text)
    await policy["editor"]("?")
"""


@pytest.fixture
def module(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py"


def test_a_configuration_names_an_episode(module):
    env = configured_env(f"{module}:episode", {"word": "now", "turn_tokens": 9, "turns": 2})
    assert (env.players, env.limits.turn_tokens, env.limits.turns) == (2, 9, 2)
    opening, first, end = play(env, "x", "y")
    assert opening[0]["content"].startswith("6 * 7? now ")
    assert (first.next, end.reward, end.earlier) == (1, (0.5,), ((1.0,),))
    assert configured_env(f"{module}:made", {}).players == 2


def test_an_episode_is_played_in_a_process_of_its_own(module):
    env = configured_env(f"{module}:episode", {"word": "now", "isolate": True})
    here = configured_env(f"{module}:episode", {"word": "now"})

    async def run():
        state, opening = await env.init(PROMPT, 1)
        state, first = await env.step(state, reply("x", 0))
        state, end = await env.step(state, reply("y", 1))
        await env.close(state)
        again, _ = await env.init(PROMPT, 1)  # the same process serves the next episode
        await env.close(again)
        await env.lifecycle.shutdown()
        return opening, first, end

    opening, first, end = asyncio.run(run())
    (message,) = opening["messages"]
    assert message["content"] != play(here, "x", "y")[0][0]["content"]  # another process
    assert check_feedback(first, env.limits, 1, 2).next == 1
    assert check_feedback(end, env.limits, 1, 2).earlier == ((1.0,),)


def test_a_process_plays_an_object_whose_call_is_the_episode():
    class Asks:
        async def __call__(self, policy, prompt):
            return float((await policy(prompt.text)).text == "42")

    assert play(made_env(Asks(), {}), "42")[-1].reward == (1.0,)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("plain", {}, r"plain\(policy, prompt\) is not async; write async def episode"),
        ("alone", {}, r"alone\(prompt\) must take policy and prompt, in this order"),
        ("swapped", {}, r"swapped\(prompt, policy\) must take policy and prompt, in this order"),
        ("seedless", {}, r"seedless\(policy, seed\) must take policy and prompt"),
        ("yields", {}, r"yields\(policy, prompt\) yields; an episode awaits its turns"),
        ("undeclared", {}, r"of 'judge', and its roles are policy; .* @roles\(.policy., .judge.\)"),
        ("one_more", {}, r"turns of 'editor', .* such as @roles\(.writer., .editor.\)"),
        ("needs", {}, r"data.word is missing: needs\(policy, prompt, word\) needs it"),
        ("episode", {"wrd": 1}, "data.wrd = 1: there is no such option; did you mean 'word'"),
        ("episode", {"tool_calls": 1}, "data.tool_calls = 1: there is no such option"),
        ("episode", {"turns": 0}, "data.turns = 0; must be at least 1"),
    ],
)
def test_a_wrong_episode_is_named_before_anything_is_played(module, name, options, message):
    with pytest.raises(UserError, match=message):
        configured_env(f"{module}:{name}", options)


def test_what_cannot_be_an_episode_in_python():
    async def needs(policy, prompt, word):
        return 0.0

    with pytest.raises(UserError, match=r"needs\(policy, prompt, word\) needs word, which no"):
        coroutine_env(needs)
    with pytest.raises(UserError, match="episode = 3; give async def episode"):
        coroutine_env(3)
    with pytest.raises(UserError, match=r"roles = \('a', 'a'\); give each role a name of its own"):
        coroutine_env(ask_twice, roles=("a", "a"))
    assert coroutine_env(functools.partial(needs, word="x")).players == 1


def test_an_object_with_an_async_call_is_an_episode():
    class Asks:
        def __init__(self, question):
            self.question = question

        async def __call__(self, policy, prompt):
            await policy(self.question)

    assert play(coroutine_env(Asks("why?")))[0] == user("why?")


# ---------------------------------------------------------------- environments of functions


def wrong(**fields):
    return HostEnv(lambda prompt, seed: 0, lambda state, reply: 0)._replace(**fields)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (wrong(step=None), r"env.step = None; must be a function\(state, reply\)"),
        (wrong(step=lambda state: 0), r"env.step: <lambda>\(state\) must take \(state, reply\)"),
        (wrong(init=lambda prompt, seed, more: 0), r"must take \(prompt, seed\)"),
        (wrong(close=lambda: 0), r"env.close: <lambda>\(\) must take \(state\)"),
        (wrong(fork=lambda: 0), r"env.fork: <lambda>\(\) must take \(state\)"),
        (wrong(fork=3), r"env.fork = 3; must be a function\(state\) or None"),
        (wrong(limits=4), "env.limits = 4; must be a Limits"),
        (wrong(chat=("user",)), r"env.chat = \('user',\); must be a ChatOptions"),
        (wrong(lifecycle=None), "env.lifecycle = None; must be a Lifecycle"),
        (wrong(players=0), "env.players = 0; must be a number, at least 1"),
        (wrong(parts=()), r"env.parts = \(\); give at least one name"),
        (wrong(parts=("a", "a")), r"env.parts = \('a', 'a'\): 'a' is there twice"),
        (wrong(parts="reward"), "env.parts = 'reward'; must be a tuple of names"),
    ],
)
def test_a_wrong_part_of_an_environment_is_named(env, message):
    with pytest.raises(UserError, match=message):
        check_env(env)


def test_a_coroutine_where_an_environment_belongs_is_named():
    async def episode():
        return None

    with pytest.raises(UserError, match="env is a coroutine; give a jrl.episodes.HostEnv"):
        check_env(episode())


def test_fields_that_have_moved_are_named(tmp_path):
    (tmp_path / "old.py").write_text(
        "from jrl.episodes.host import HostEnv\n"
        "def old(): return HostEnv(print, print, roles=('tool',))\n"
        "def replaced(): return HostEnv(print, print)._replace(at_once=3)\n"
    )
    with pytest.raises(UserError, match=r"takes roles as chat=ChatOptions\(roles=...\)"):
        configured_env(f"{tmp_path}/old.py:old", {})
    with pytest.raises(UserError, match=r"takes at_once as lifecycle=Lifecycle\(at_once=...\)"):
        configured_env(f"{tmp_path}/old.py:replaced", {})
