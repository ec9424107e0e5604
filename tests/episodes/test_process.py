"""Environments in processes: episodes that hang, die or flood end alone; nothing is left behind."""

import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from jrl.episodes import process as module
from jrl.episodes.calls import Calls, run_either
from jrl.episodes.host import Limits, Reply
from jrl.episodes.process import process_env
from jrl.errors import UserError
from jrl.types import Prompt

SOURCE = """
import os, signal, sys, time, types

def make(greeting="hello"):
    def init(prompt, seed):
        print("noise on standard output")
        if prompt.meta.get("hang"):
            time.sleep(99)
        return {"n": 0, "seed": seed}, [{"role": "user", "content": greeting + " " + prompt.text}]

    def step(state, reply):
        state["n"] += 1
        if reply.text == "hang":
            time.sleep(99)
        if reply.text == "die":
            os.kill(os.getpid(), signal.SIGSEGV)
        if reply.text == "exit":
            sys.exit(3)
        if reply.text == "fork":
            os.fork()
        if reply.text == "raise":
            raise KeyError("lost")
        if reply.text == "flood":
            return state, {"messages": [{"role": "user", "content": "x" * 50_000_000}]}
        if reply.text == "strange":
            return state, {"reward": {1: object()}}
        messages = [{"role": "user", "content": f"{state['n']} {state['seed']} {os.getpid()}"}]
        return state, {"messages": messages, "reward": 0.5, "done": reply.turn > 1}

    async def slow_close(state):
        pass

    return types.SimpleNamespace(init=init, step=step, close=slow_close)

def broken():
    raise RuntimeError("no simulator here")
"""
PROMPT = Prompt(1, "you", np.zeros(0, np.int32), None, {"hang": False})


def processes():
    """Running workers, those without a parent too, but not those of another worker of pytest."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text, pid = path.read_bytes(), int(path.parent.name)
            if str(module._WORKER).encode() in text and not is_anothers(pid):
                pids.append(pid)
        except OSError:
            continue
    return pids


def is_anothers(pid):
    """Whether a process descends from a sibling of this one."""
    while pid not in (0, 1, os.getpid()):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if parent == os.getppid() != 1:
            return True
        pid = parent
    return False


@pytest.fixture
def world(tmp_path):
    """ask(function, *arguments) -> the answer, of an environment in processes."""
    file = tmp_path / "own.py"
    file.write_text(SOURCE)
    limits = Limits(call_seconds=20, answer_chars=1000)
    env = process_env(f"{file}:make", {"greeting": "hi"}, limits=limits)
    before = threading.active_count()
    with Calls() as calls:

        def ask(function, *arguments, seconds=20.0):
            calls.submit(0, function, *arguments, seconds=seconds)
            return calls.inbox.get(timeout=30)

        yield env, ask
        calls.run(env.lifecycle.shutdown, 5)
    deadline = time.monotonic() + 5
    while (processes() or threading.active_count() > before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes()
    assert threading.active_count() <= before  # one of an earlier test may have ended


def reply(text, turn=0):
    return Reply(text, text, np.zeros(1, np.int32), turn, False)


def test_an_episode_and_the_next_in_the_same_process(world):
    env, ask = world
    pids = set()
    for seed in (5, 6):
        state, messages = ask(env.init, PROMPT, seed).value
        assert messages == [{"role": "user", "content": "hi you"}]
        for turn in (0, 1):
            state, feedback = ask(env.step, state, reply("go", turn)).value
            n, seed_text, pid = feedback["messages"][0]["content"].split()
            assert (n, seed_text) == (str(turn + 1), str(seed))
            pids.add(pid)
        _, feedback = ask(env.step, state, reply("go", 2)).value
        assert (feedback["done"], feedback["reward"]) == (True, 0.5)
        assert not ask(env.close, state).error
    assert len(pids) == 1
    assert pids == {str(p) for p in processes()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("die", "its process died"),
        ("exit", "SystemExit: 3"),
        ("raise", "KeyError: 'lost'"),
        ("flood", "the limit is"),
        ("hang", "no answer within 0.5 seconds"),
        ("strange", ""),
    ],
)
def test_faults_end_one_episode(world, text, message):
    env, ask = world
    state, _ = ask(env.init, PROMPT, 1).value
    other, _ = ask(env.init, PROMPT, 2).value
    begin = time.monotonic()
    answer = ask(env.step, state, reply(text), seconds=0.5 if text == "hang" else 20.0)
    assert message in answer.error
    assert answer.timeout == (text == "hang")
    assert time.monotonic() - begin < 5
    ask(env.close, state)
    assert ask(env.step, other, reply("go")).value[1]["reward"] == 0.5
    ask(env.close, other)
    again, messages = ask(env.init, PROMPT, 3).value
    assert messages
    ask(env.close, again)


def test_a_child_that_an_environment_leaves_behind_answers_nothing(world):
    """Were it to answer, every later turn would get the feedback of the one before it."""
    env, ask = world
    state, _ = ask(env.init, PROMPT, 5).value
    for turn, text in enumerate(["fork", "go", "fork"]):
        state, feedback = ask(env.step, state, reply(text, turn)).value
        assert feedback["messages"][0]["content"].split()[0] == str(turn + 1)
    ask(env.close, state)


@pytest.mark.filterwarnings("ignore:.*fork")
def test_an_environment_in_the_run_s_process_leaves_no_child_behind():
    """It would go on as a second trainer."""

    async def forks():
        return os.fork()

    def forks_in_a_thread():
        return os.fork()

    with Calls() as calls:
        for number, function in enumerate((forks, forks_in_a_thread)):
            calls.submit(number, function, seconds=20.0)
            child = calls.inbox.get(timeout=20).value
            assert child
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_process_that_hangs_while_it_opens_is_killed(world):
    env, ask = world
    slow = Prompt(1, "you", np.zeros(0, np.int32), None, {"hang": True})
    assert ask(env.init, slow, 1, seconds=1.0).timeout
    deadline = time.monotonic() + 5
    while processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes()


def test_what_cannot_start_is_told(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(SOURCE)
    env = process_env(f"{file}:broken")
    with Calls() as calls:
        calls.submit(0, env.init, PROMPT, 1, seconds=20)
        assert "no simulator here" in calls.inbox.get(timeout=30).error
        calls.run(env.lifecycle.shutdown, 5)
    with pytest.raises(UserError, match="there is no file"):
        process_env("nowhere.py:make")
    with pytest.raises(UserError, match="FILE.py:function"):
        process_env("nowhere")
    with pytest.raises(UserError, match="no such interpreter"):
        process_env(f"{file}:make", python="/nowhere/python")


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to end children")
def test_a_file_imports_what_lies_beside_it_and_its_keys_are_in_no_command(tmp_path):
    (tmp_path / "neighbour.py").write_text("GREETING = 'hello'\n")
    file = tmp_path / "own.py"
    file.write_text(
        f"import neighbour\n{SOURCE}".replace("def make(greeting=", "def make(api_key, greeting=")
    )
    env = process_env(f"{file}:make", {"api_key": "k-1234"}, limits=Limits(call_seconds=20))
    with Calls() as calls:
        calls.submit(0, env.init, PROMPT, 1, seconds=20)
        assert calls.inbox.get(timeout=30).value[1][0]["content"] == "hello you"
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes()]
        assert commands
        assert not any(b"k-1234" in command for command in commands)
        calls.run(env.lifecycle.shutdown, 5)


def test_a_tool_may_take_an_argument_called_function():
    async def derivative(function, variable):
        return f"d{function}/d{variable}"

    assert asyncio.run(run_either(derivative, function="f", variable="x")) == "df/dx"


def test_modules_beside_the_worker_do_not_hide_others(tmp_path):
    ours = f"{Path(module.__file__).parents[1]}/"  # a checkout, too, may be named jrl
    (tmp_path / "env.py").write_text(
        "import importlib.util, types\n"
        "def make():\n"
        "    found = [n for n in ('gymnasium', 'calculator', 'textarena_child')\n"
        f"             if (s := importlib.util.find_spec(n)) and {ours!r} in (s.origin or '')]\n"
        "    say = lambda prompt, seed: (0, [{'role': 'user', 'content': repr(found)}])\n"
        "    return types.SimpleNamespace(init=say, step=None)\n"
    )
    env = process_env(f"{tmp_path}/env.py:make")

    async def opened():
        try:
            return (await env.init(PROMPT, 0))[1]
        finally:
            await env.lifecycle.shutdown()

    assert asyncio.run(opened())[0]["content"] == "[]"


def test_processes_end_with_a_killed_trainer(tmp_path):
    import subprocess

    file, script = tmp_path / "own.py", tmp_path / "trainer.py"
    file.write_text(SOURCE)
    script.write_text(
        "import numpy as np, time\n"
        "from jrl.episodes.calls import Calls\n"
        "from jrl.episodes.process import process_env\n"
        "from jrl.types import Prompt\n"
        f"env, calls = process_env({str(file) + ':make'!r}), Calls()\n"
        "prompt = Prompt(1, 'you', np.zeros(0, np.int32), None)\n"
        "calls.submit(0, env.init, prompt, 1, seconds=20)\n"
        "calls.inbox.get()\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    trainer = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    with trainer:
        assert trainer.stdout.readline() == "ready\n"
        assert processes()
        os.kill(trainer.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes()


def test_processes_at_a_time_and_who_waits_loses_no_time(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(SOURCE)
    limits = Limits(call_seconds=20)
    env = process_env(f"{file}:make", limits=limits, at_once=2)
    assert env.lifecycle.at_once == 2
    process_counts = []

    async def episode(number):
        hang = Prompt(1, "you", np.zeros(0, np.int32), None, {"hang": number == 0})
        try:
            state, _ = await asyncio.wait_for(env.init(hang, 0), 1.5 if number == 0 else None)
        except TimeoutError:
            return "gone"
        process_counts.append(len(processes()))
        await asyncio.sleep(0.05)
        await env.close(state)
        return "played"

    async def several():
        episodes = await asyncio.gather(*(episode(number) for number in range(6)))
        await env.lifecycle.shutdown()
        return episodes

    assert asyncio.run(several()) == ["gone"] + ["played"] * 5
    assert max(process_counts) <= 2
    with pytest.raises(UserError, match="at_once = -1"):
        process_env(f"{file}:make", at_once=-1)
