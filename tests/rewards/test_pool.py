"""The pool: limits, crashes, bad results, order, groups, and nothing left behind."""

import math
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from jrl.errors import UserError
from jrl.rewards import Sample, make_reward, whole_batch, whole_group
from jrl.rewards.pool import RewardPool
from jrl.rewards.rules import Rules
from jrl.types import Prompt

JUDGES = pathlib.Path(__file__).parent / "judges.py"


def judge(name, **options):
    return make_reward(f"{JUDGES}:{name}", **options)


def samples_of(*completions, ids=None):
    ids = ids or range(len(completions))
    return [
        Sample(
            Prompt(i, f"{i}?", np.arange(3, dtype=np.int32), i, {"k": [i]}),
            text,
            np.arange(2),
            "length",
        )
        for i, text in zip(ids, completions, strict=True)
    ]


@pytest.fixture(scope="module")
def pool():
    functions = {
        "slow": judge("slow_when_asked"),
        "length": judge("length", scale=0.5),
        "dies": judge("dies"),
        "bad": judge("bad"),
    }
    with RewardPool(functions, workers=2, timeout_seconds=1.0, on_error="zero") as pool:
        yield pool


def test_points_keep_the_order_of_samples_and_functions(pool):
    points, (_, counts, _) = pool.scores(samples_of(*("x" * i for i in range(20))))
    assert points.shape == (20, 4)
    assert points.dtype == np.float32
    np.testing.assert_array_equal(points[:, 0], np.arange(20))
    np.testing.assert_array_equal(points[:, 1], np.arange(20) / 2)
    np.testing.assert_array_equal(points[:, 2], np.ones(20))
    np.testing.assert_array_equal(points[:, 3], np.full(20, 0.5))
    assert counts.items() >= {"reward_timeouts": 0.0, "reward_errors": 0.0}.items()


@pytest.mark.parametrize("text", ["hang", "spin"])
def test_a_call_that_hangs_scores_0_and_the_others_are_judged(pool, text):
    start = time.monotonic()
    points, (_, counts, _) = pool.scores(samples_of("a", text, "c", "d"))
    assert time.monotonic() - start < 30
    assert points[:, 0].tolist() == [0.0, 0.0, 2.0, 3.0]
    assert points[:, 1].tolist() == [0.5, 2.0, 0.5, 0.5]
    assert counts.items() >= {"reward_timeouts": 1.0, "reward_errors": 0.0}.items()


def test_a_call_that_kills_its_process_scores_0_and_is_counted(pool):
    points, (_, counts, _) = pool.scores(samples_of("a", "die", "c"))
    assert points[:, 2].tolist() == [1.0, 0.0, 1.0]
    assert counts.items() >= {"reward_timeouts": 0.0, "reward_errors": 1.0}.items()
    assert pool.scores(samples_of("a"))[0][0, 2] == 1.0


@pytest.mark.parametrize(
    "kind", ["raise", "exit", "nan", "inf", "two", "none", "number", "text", "unpicklable"]
)
def test_a_bad_result_scores_0_and_is_counted(pool, kind):
    points, (_, counts, _) = pool.scores(samples_of("a", kind))
    assert points[:, 3].tolist() == [0.5, 0.0]
    assert counts["reward_errors"] == 1.0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("raise", "raised RuntimeError: no idea"),
        ("exit", "raised SystemExit: 3"),
        ("nan", "returned nan; rewards must be finite"),
        ("inf", "returned inf"),
        ("two", "returned 2 numbers for 1 sample"),
        ("none", "returned NoneType None"),
        ("number", "returned float 1.0"),
        ("text", "returned str '1' instead of a number or None"),
    ],
)
def test_without_workers_errors_name_function_prompt_and_remedy(kind, message):
    with RewardPool({"mine": judge("bad")}, workers=0, timeout_seconds=1.0) as pool:
        assert pool.scores(samples_of("fine"))[0].tolist() == [[0.5]]
        with pytest.raises(UserError, match="rewards.mine: ") as raised:
            pool.scores(samples_of("fine", kind))
    assert message in str(raised.value)
    assert "(prompt 1)" in str(raised.value)
    assert "reward_pool.on_error" in str(raised.value)


def test_of_a_batch_the_sample_that_is_wrong_is_named():
    @whole_batch
    def nan_last(samples):
        return [0.0] * (len(samples) - 1) + [math.nan]

    named = pytest.raises(UserError, match=r"returned nan.* for sample 2 \(prompt 2\); fix")
    with RewardPool({"f": nan_last}, workers=0, timeout_seconds=1.0) as pool, named:
        pool.scores(samples_of("a", "b", "c"), group=1)


def test_a_function_may_use_up_its_list_and_none_may_shorten_it():
    def pops(samples):
        return [float(len(samples.pop().completion)) for _ in range(len(samples))]

    @whole_group
    def filters(samples):
        samples[:] = samples[:1]
        return [1.0 for _ in samples]

    limits = {"workers": 0, "timeout_seconds": 1.0, "on_error": "zero"}
    with RewardPool({"pops": pops, "filters": filters}, **limits) as pool:
        points, (_, counts, _) = pool.scores(samples_of("a", "bb"), group=2)
    assert points.tolist() == [[1.0, 0.0], [2.0, 0.0]]
    assert counts["reward_errors"] == 1


def test_workers_raise_too_show_the_line_are_reused_and_know_no_jax():
    functions = {
        "bad": judge("bad"),
        "dies": judge("dies"),
        "light": judge("knows_no_jax"),
        "math": make_reward("math"),
        "pid": judge("pid"),
    }
    with RewardPool(functions, workers=1, timeout_seconds=5.0) as pool:
        points, _ = pool.scores(samples_of(*(rf"\boxed{{{i}}}" for i in range(8))))
        np.testing.assert_array_equal(points[:, 2:4], np.ones((8, 2)))
        assert len(set(points[:, 4])) == 1
        assert points[0, 4] != os.getpid()
        with pytest.raises(UserError, match=r"rewards\.bad: raised RuntimeError") as raised:
            pool.scores(samples_of("fine", "raise"))
        assert "judges.py" in str(raised.value)
        with pytest.raises(UserError, match=r"rewards\.dies: its process died \(exit code 7\)"):
            pool.scores(samples_of("die"))
        assert pool.scores(samples_of("a"))[0][0, 0] == 0.5


def test_functions_over_groups_see_whole_groups():
    samples = samples_of("aaa", "a", "aa", "b", "bb", ids=[4, 4, 4, 9, 9])
    with RewardPool({"rank": judge("rank")}, workers=0, timeout_seconds=1.0) as pool:
        points, _ = pool.scores(samples)
        assert points[:, 0].tolist() == [2.0, 0.0, 1.0, 0.0, 1.0]
        # the same prompt twice in a row is two groups when the caller says how large they are
        twice = samples_of("aaa", "a", "aa", "aaaa", ids=[4, 4, 4, 4])
        assert pool.scores(twice)[0][:, 0].tolist() == [2.0, 0.0, 1.0, 3.0]
        assert pool.scores(twice, group=2)[0][:, 0].tolist() == [1.0, 0.0, 0.0, 1.0]
        with pytest.raises(UserError, match="5 samples cannot be split into groups of 2"):
            pool.scores(samples, group=2)


def lines_of(file, count, seconds=30.0):
    """The lines of a file once it has so many."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if file.exists() and len(lines := file.read_text().split()) >= count:
            return sorted(lines)
        time.sleep(0.01)
    raise AssertionError(f"{file.name} has no {count} lines")


def test_calls_begin_before_all_samples_are_there_and_are_not_made_again(tmp_path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    functions = {
        "alone": judge("write_note", file=str(alone)),
        "group": judge("noted_group", file=str(together)),
    }
    rules = {"alone": Rules(high=10, with_prompt=True)}
    limits = {"workers": 1, "timeout_seconds": 20.0, "on_error": "none"}
    samples = samples_of("a", "bb", "bb", "c" * 9, ids=[4, 4, 4, 4])
    with RewardPool(functions, rules=rules, **limits) as pool:
        expected = pool.scores(samples, group=4)
        alone.unlink(), together.unlink()
        with pool.begin() as calls:
            for sample in (samples[3], samples[1], samples_of("gone")[0]):
                calls.submit(sample)
            # they run while nobody asks for them
            assert lines_of(alone, 3) == ["0?gone", "4?bb", "4?" + "c" * 9]
            assert not together.exists()  # a group is called when it is there
            scores = pool.scores(samples, group=4, begun=calls)
        np.testing.assert_array_equal(scores.points, expected.points)
        assert scores.outcome.counts == expected.outcome.counts
        # equal samples have a call each, and what began is not called again
        assert lines_of(alone, 5) == ["0?gone", "4?a", "4?bb", "4?bb", "4?" + "c" * 9]
        assert lines_of(together, 1) == ["a"]
    with RewardPool(functions, **limits | {"workers": 0}) as pool, pool.begin() as calls:
        calls.submit(samples[0])
        assert calls.calls == 0  # in the trainer's own process all are called at the end


def test_calls_that_nobody_collects_are_dropped():
    functions = {"slow": judge("slow_when_asked")}
    with RewardPool(functions, workers=1, timeout_seconds=600.0) as pool:
        with pool.begin() as calls:
            for sample in samples_of("hang", "hang"):
                calls.submit(sample)
        assert pool.scores(samples_of("quick"))[0].tolist() == [[0.0]]


def test_a_call_that_hangs_holds_up_no_other(tmp_path):
    """With one process at a time: the calls behind it are made while it hangs."""
    functions = {
        "slow": judge("slow_when_asked"),
        "noted": judge("write_note", file=str(tmp_path / "n")),
    }
    with RewardPool(functions, workers=1, timeout_seconds=60.0) as pool:
        pool.scores(samples_of(*"abcdefgh"))  # what calls usually take
        (tmp_path / "n").unlink()
        with pool.begin() as calls:
            for sample in samples_of("hang", "b", "c"):
                calls.submit(sample)
            assert lines_of(tmp_path / "n", 3) == ["b", "c", "hang"]


def test_what_cannot_be_sent_is_refused_at_once():
    with pytest.raises(UserError, match=r"rewards\.mine cannot be sent to a .*workers = 0"):
        RewardPool({"mine": lambda samples: [0.0]}, workers=1, timeout_seconds=1.0)
    with pytest.raises(UserError, match="on_error = 'skip'; choose from drop, none, stop, zero"):
        RewardPool({}, workers=0, timeout_seconds=1.0, on_error="skip")


def test_a_worker_that_is_killed_while_idle_is_replaced():
    with RewardPool({"pid": judge("pid")}, workers=1, timeout_seconds=5.0) as pool:
        for _ in range(2):
            points, (_, counts, _) = pool.scores(samples_of("a", "b"))
            assert counts["reward_errors"] == 0.0
            os.kill(int(points[0, 0]), signal.SIGKILL)
            time.sleep(0.5)
        again, _ = pool.scores(samples_of("a"))
        assert again[0, 0] != points[0, 0]
    with pytest.raises(RuntimeError):
        pool.scores(samples_of("a"))


def test_a_script_that_is_not_guarded_is_told_so(tmp_path, checkout):
    script = tmp_path / "trainer.py"
    script.write_text(UNGUARDED + "def own(samples):\n    return [1.0]\nscores(own)\n")
    done = ended([str(script)], checkout)
    assert done.returncode == 1
    # Python may warn of what the workers left behind after it.
    error = [line for line in done.stderr.splitlines() if "UserError: " in line][-1]
    assert "UserError: the worker processes of the rewards end as soon as they start" in error
    assert "__main__" in error


def test_functions_of_files_need_no_guarded_script(checkout):
    text = f"{UNGUARDED}scores(make_reward({str(JUDGES)!r} + ':length'))\n"
    done = ended(["-"], checkout, input=text)
    assert (done.returncode, done.stdout) == (0, "True\n[[3.0]]\n"), done.stderr


UNGUARDED = """
import pickle, types
import numpy as np
from jrl.rewards import Sample, copies, make_reward
from jrl.rewards.pool import RewardPool

def scores(reward):
    prompt = types.SimpleNamespace(id=0, text="", tokens=np.zeros(1), answer=1, meta={})
    sample = Sample(prompt, "abc", np.zeros(1), "length")
    if copies.CAN_COPY:
        template = copies.Template(pickle.dumps({"r": reward}))
        template.connection.poll(60)
    print(template.look() if copies.CAN_COPY else True)
    with RewardPool({"r": reward}, workers=1, timeout_seconds=60) as pool:
        print(pool.scores([sample])[0].tolist())

"""


def ended(arguments, checkout, **options):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        **options,
    )


def children(pid):
    path = pathlib.Path(f"/proc/{pid}/task")
    return [int(c) for t in path.glob("*/children") for c in t.read_text().split()]


def all_ended(pids, seconds=10.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        alive = [p for p in pids if pathlib.Path(f"/proc/{p}").exists() and not zombie(p)]
        if not alive:
            return True
        time.sleep(0.05)
    return False


def zombie(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


SCRIPT = """
    import numpy as np
    from jrl.rewards import Sample, make_reward
    from jrl.rewards.pool import RewardPool
    import types

    if __name__ == "__main__":
        prompt = types.SimpleNamespace(id=0, text="", tokens=np.zeros(1), answer=1, meta={})
        def samples(text):
            return [Sample(prompt, text, np.zeros(1), "length")] * 4
        reward = make_reward(JUDGES + ":slow_when_asked")
        with RewardPool({"r": reward}, workers=2, timeout_seconds=600) as pool:
            pool.scores(samples("quick"))
            print("ready", flush=True)
            pool.scores(samples("hang"))
"""


@pytest.mark.skipif(not pathlib.Path("/proc").is_dir(), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_or_killed_trainer_leaves_no_process(tmp_path, checkout, number):
    script = tmp_path / "trainer.py"
    script.write_text(f"JUDGES = {str(JUDGES)!r}\n" + textwrap.dedent(SCRIPT))
    trainer = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(checkout)},
    )
    try:
        assert trainer.stdout.readline() == "ready\n"
        time.sleep(0.5)
        family = children(trainer.pid)
        assert len(family) >= 2
        trainer.send_signal(number)
        _, errors = trainer.communicate(timeout=30)
        assert trainer.returncode != 0
        if number == signal.SIGINT:
            assert "KeyboardInterrupt" in errors
        assert all_ended(family)
    finally:
        trainer.kill()
        trainer.communicate()


@pytest.mark.filterwarnings("ignore:os.fork")  # of a process with threads, as with workers = 0
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("act", ["fork", "fork and raise"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_child_that_a_reward_leaves_behind_answers_nothing(act, workers):
    limits = {"timeout_seconds": 20.0, "on_error": "zero"}
    with RewardPool({"forks": judge("forks")}, workers=workers, **limits) as pool:
        first, _ = pool.scores(samples_of("10", act, "30", "40"))
        second, (_, counts, _) = pool.scores(samples_of("50", "60"))
    assert first[:, 0].tolist() == [10, 1, 30, 40]
    assert second[:, 0].tolist() == [50, 60]
    assert counts["reward_errors"] == 0


def test_a_worker_that_answers_twice_is_ended_and_counted():
    limits = {"timeout_seconds": 20.0, "on_error": "zero"}
    with RewardPool({"forks": judge("forks")}, workers=1, **limits) as pool:
        first, (_, before, _) = pool.scores(samples_of("10", "answer twice", "30"))
        second, (_, after, _) = pool.scores(samples_of("40", "50"))
    assert before["reward_errors"] + after["reward_errors"] >= 1
    right = [10, 0, 30], [40, 50]
    for values, expected in zip((first, second), right, strict=True):
        # A call that was lost with its worker counts nothing; no call gets another one's reward.
        assert all(x in (0, y) for x, y in zip(values[:, 0], expected, strict=True))


def silent_about_b(samples):
    return [None if s.completion == "b" else float(len(s.completion)) for s in samples]


@whole_batch
def of_all(samples):
    return [float(len(samples))] * len(samples)


@pytest.mark.parametrize(
    ("missing", "point", "dropped"), [("none", math.nan, 0), ("zero", 0, 0), ("drop", math.nan, 1)]
)
def test_what_no_opinion_means(missing, point, dropped):
    rules = {"f": Rules(missing=missing)}
    with RewardPool({"f": silent_about_b}, workers=0, timeout_seconds=1.0, rules=rules) as pool:
        points, (out, counts, _) = pool.scores(samples_of("a", "b"), group=2)
    np.testing.assert_array_equal(points[:, 0], [1.0, point])
    assert out.tolist() == [False, bool(dropped)]
    assert counts["reward_missing"] == 1


def test_a_range_is_held_and_rows_are_chosen():
    rules = {"f": Rules(high=1.5, where={"kind": ["x", "y"]})}
    samples = samples_of("a", "cc", "dd")
    for sample, kind in zip(samples, "xyz", strict=True):
        sample.prompt.meta["kind"] = kind
    limits = {"workers": 0, "timeout_seconds": 1.0, "on_error": "none"}
    with RewardPool({"f": silent_about_b}, rules=rules, **limits) as pool:
        points, (_, counts, _) = pool.scores(samples)
    np.testing.assert_array_equal(points[:, 0], [1.0, math.nan, math.nan])
    assert counts["reward_errors"] == 1  # "cc"; nobody was asked about "dd"
    assert counts["reward_calls"] == 2


def test_functions_over_the_batch_see_all_groups():
    with RewardPool({"f": of_all}, workers=0, timeout_seconds=1.0) as pool:
        assert pool.over_batch
        assert pool.scores(samples_of("a", "b", "c", "d"), group=2).points[:, 0].tolist() == [4] * 4
