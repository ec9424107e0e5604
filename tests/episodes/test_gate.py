"""Queues and clocks: who waits for others loses no time of its own, and not for ever."""

import asyncio
import time

import pytest

from jrl.episodes.calls import Calls
from jrl.episodes.gate import Gate, run_within
from jrl.episodes.host import EnvError, Limits, Reply
from jrl.episodes.parsers import Call, get_parser
from jrl.episodes.tools import Tool, tool_env
from jrl.types import Prompt


def answers(calls, count):
    answers_read = [calls.inbox.get(timeout=10) for _ in range(count)]
    return sorted(answers_read, key=lambda a: a.number)


def test_waiting_for_others_is_not_counted_but_own_time_is():
    gate = Gate(1, "a place")

    async def work(seconds):
        async with gate:
            await asyncio.sleep(seconds)
        return seconds

    with Calls() as calls:
        for number in range(4):  # the last one ends after 0.8 s
            calls.submit(number, work, 0.2, seconds=0.5)
        assert [a.error for a in answers(calls, 4)] == [""] * 4
        begin = time.monotonic()
        calls.submit(0, work, 5.0, seconds=0.3)
        calls.submit(1, work, 0.1, seconds=0.3)
        slow, other = answers(calls, 2)
        assert (slow.timeout, other.error) == (True, "")
        assert 0.3 <= slow.seconds < 1.0
        assert time.monotonic() - begin < 2.0


def test_a_call_inside_a_call_stops_both_clocks():
    gate = Gate(1, "a place")

    async def tool():
        async with gate:
            await asyncio.sleep(0.15)

    async def turn():
        task = await run_within(tool(), 0.3)
        assert task.done()
        await asyncio.sleep(0.01)

    async def several():
        return [
            t.done() for t in await asyncio.gather(*(run_within(turn(), 0.3) for _ in range(5)))
        ]

    assert asyncio.run(several()) == [True] * 5


def test_a_queue_that_does_not_move_is_left():
    gate = Gate(1, "the oven", seconds=0.2)

    async def stuck():
        async with gate:
            with pytest.raises(EnvError, match=r"waited 0.2 seconds .* for the oven"):
                await gate.enter()
        async with gate:  # the place was given back
            return True

    assert asyncio.run(stuck())

    async def moving():  # 0.6 s in all, but somebody leaves every 0.1 s
        async def one():
            async with gate:
                await asyncio.sleep(0.1)

        await asyncio.gather(*(one() for _ in range(6)))
        return True

    assert asyncio.run(moving())


def test_the_first_that_came_goes_first():
    gate, order = Gate(2, "a place"), []

    async def one(number):
        async with gate:
            order.append(number)
            await asyncio.sleep(0.01 * (5 - number % 3))

    async def several():
        await asyncio.gather(*(one(number) for number in range(9)))

    asyncio.run(several())
    assert order == list(range(9))


def test_who_is_cancelled_in_a_queue_leaves_no_place_taken():
    gate = Gate(1, "a place")

    async def play():
        await gate.enter()
        waiting = asyncio.create_task(gate.enter())
        await asyncio.sleep(0.01)
        waiting.cancel()
        gate.leave()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.wait_for(gate.enter(), 1.0)
        return True

    assert asyncio.run(play())


def test_a_busy_tool_fails_no_member():
    """Four members of one turn each, and a tool that serves one at a time."""
    gate, parser = Gate(1, "the tool"), get_parser("hermes")

    async def look():
        async with gate:
            await asyncio.sleep(0.2)
        return "seen"

    schema = {"type": "object", "properties": {}}
    tool = Tool("look", "Looks.", schema, look, seconds=0.4)
    env = tool_env([tool], parser, lambda p, r: 1.0, Limits(call_seconds=0.5))
    text = parser.render(Call("look", {}))

    async def turn():
        state, _ = await env.init(Prompt(0, "?", None, ""), 0)
        _, feedback = await env.step(state, Reply(text, text, None, 0, False))
        return feedback.messages[0]["content"]

    with Calls() as calls:
        for number in range(4):
            calls.submit(number, turn, seconds=env.limits.call_seconds)
        assert [(a.value, a.error) for a in answers(calls, 4)] == [("seen", "")] * 4
