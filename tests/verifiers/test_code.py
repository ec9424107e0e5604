"""Programs judged by their tests."""

import asyncio
import json
import pathlib
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
from hostile_solutions import PROGRAMS

from jrl.episodes import sandbox
from jrl.errors import UserError
from jrl.rewards import Sample, make_reward
from jrl.types import Prompt
from jrl.verifiers import code, code_tests
from jrl.verifiers.code import last_block
from jrl.verifiers.code_tests import assert_case, same_output, same_value

DOUBLE = {"inputs": ["1\n", "2\n", "5\n"], "outputs": ["2\n", "4\n", "10\n"]}
RIGHT = "print(2 * int(input()))"
CALLS = {"fn_name": "double", "inputs": [[1], [2]], "outputs": [2, 4]}
ASSERTS = ["assert double(1) == 2", "assert [double(2)] == list((4,))", "assert not double(2) - 4"]


def sample(program, answer="", text="?", fenced=True, **meta):
    completion = f"So:\n```python\n{program}\n```\nDone." if fenced else program
    prompt = Prompt(7, text, np.zeros(1, np.int32), answer, meta)
    return Sample(prompt, completion, np.zeros(3, np.int32), "stop_token")


def points(*samples, **options):
    return make_reward("code", **options)(list(samples))


@pytest.mark.parametrize(
    "answer",
    [
        DOUBLE,
        json.dumps(DOUBLE),
        [{"input": i, "output": o} for i, o in zip(*DOUBLE.values(), strict=True)],
        {"inputs": [["1"], ["2"]], "outputs": [["2"], ["4"]]},
    ],
)
def test_standard_input_and_output(answer):
    assert points(sample(RIGHT, answer), sample("print(3)", answer)) == [1.0, 0.0]


def test_where_a_loop_runs():
    async def cell():  # as a notebook runs one
        return points(sample(RIGHT, DOUBLE))

    assert asyncio.run(cell()) == [1.0]


def test_partial_credit_is_the_share_of_tests():
    half = "n = int(input())\nprint(n + 2 if n == 2 else n + 5 if n == 5 else 1 / 0)"
    assert points(sample(half, DOUBLE)) == [0.0]
    assert points(sample(half, DOUBLE), partial=True) == [pytest.approx(2 / 3)]
    assert points(sample(half, DOUBLE), partial=True, max_tests=1) == [0.0]


def test_functions_and_methods_are_called():
    method = (
        "class Solution:\n    def double(self, x):\n        print('noise')\n        return 2 * x"
    )
    texts = {"fn_name": "double", "inputs": ["1", "2"], "outputs": ["2", "4"]}
    for answer in (
        CALLS,
        texts,
        [{"type": "function_call", "fn_name": "double", "input": [3], "output": [6]}],
    ):
        assert points(sample(method, answer)) == [1.0]
        assert points(sample("def double(x):\n    return 1", answer)) == [0.0]


def test_mbpp_asserts_and_humaneval():
    uses_setup = "assert math.floor(double(2)) == 4"
    row = {"test_list": [*ASSERTS, uses_setup], "test_setup_code": "import math"}
    assert points(sample("def double(x): return x * 2", **row)) == [1.0]
    assert points(sample("def double(x): return 2", **row), partial=True) == [pytest.approx(1 / 4)]
    human = {
        "test": "def check(candidate):\n    assert candidate(2) == 4\n",
        "entry_point": "double",
        "text": "def double(x):\n",
    }
    assert points(sample("    return 2 * x", fenced=False, **human)) == [1.0]
    assert points(sample("def double(x): return x", **human)) == [0.0]


def test_asserts_inside_run_although_builtins_are_replaced():
    row = {"test_list": ["assert double(2) in (4,)"]}
    for program in (PROGRAMS["no asserts"], PROGRAMS["exit"], PROGRAMS["another exit"]):
        assert points(sample(program, **row)) == [0.0]
    assert points(sample("def double(x): return 2 * x", **row)) == [1.0]


def test_what_programs_of_contests_do():
    for program in (
        "import sys\nprint(2 * int(sys.stdin.readline()))",
        "print(2 * int(open(0).read()))",
        "import os\nos.write(1, str(2 * int(os.read(0, 9))).encode())",
        "import sys\nsys.stdout.write(str(2 * int(sys.stdin.buffer.read())))\nsys.exit()",
        "import threading\nthreading.Thread(target=lambda: print(2 * int(input()))).start()",
        "def main():\n    print(2 * int(input()))\nif __name__ == '__main__':\n    main()",
        "import atexit\nn = int(input())\natexit.register(lambda: print(2 * n))",
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\n"
        "print(2 * A(int(input())).x)",
    ):
        assert points(sample(program, DOUBLE)) == [1.0], program


def test_expected_outputs_stay_outside():
    """A program that prints all that its process knows does not print them."""
    secret = {"inputs": ["1"], "outputs": ["secret-73519"]}
    dump = PROGRAMS["reads the driver's frames"]

    tests = code_tests.tests_of({}, secret, "", 0)
    limits = code.Testing("", "python", "", 4, 8, 512, 1024, 0, 0)
    verdicts = code.judge(dump, tests, "python", limits)
    assert verdicts.notes[0].startswith("ok")
    lines = code._run(dump, tests, "python", limits, False)
    assert "secret-73519" not in lines[0]["text"]
    assert len(lines[0]["text"]) > 500
    case = assert_case("assert f(1) == 'secret-73519'")
    assert "secret-73519" not in str(case.sent)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_hostile_programs_do_not_pass(name):
    limits = {"seconds": 1.0, "total_seconds": 4.0, "memory_mib": 256.0}
    rows = [
        {"answer": {"inputs": ["2", "7", "1"], "outputs": ["4", "14", "2"]}},
        {"answer": CALLS},
        {"test_list": ["assert double(2) == 4", "assert double(2) in (4,)"]},
    ]
    for row in rows:
        begin = time.monotonic()
        assert points(sample(PROGRAMS[name], **row), **limits) == [0.0]
        assert time.monotonic() - begin < 30
    assert points(sample(RIGHT, DOUBLE), **limits) == [1.0]  # nothing of it is left


@pytest.mark.parametrize(
    "name",
    [
        "marks of the driver",
        "marks on every descriptor",
        "marks on the parent's descriptors",
        "exit",
        "kill the parent",
        "all is equal",
        "no asserts",
        "another write",
        "bad code",
    ],
)
def test_marks_and_exits_do_not_pass(name):
    asserts = {"test_list": ["assert double(2) == 4"]}
    for row in ({"answer": {"inputs": ["2"], "outputs": ["7"]}}, {"answer": CALLS}, asserts):
        assert points(sample(PROGRAMS[name], **row), seconds=1.0, total_seconds=4.0) == [0.0]


@pytest.mark.parametrize(
    ("language", "program"),
    [
        ("c", '#include <stdio.h>\nint main(void){int x;scanf("%d",&x);printf("%d",2*x);}'),
        pytest.param(
            "cpp",
            "#include <iostream>\nint main(){int x;std::cin>>x;std::cout<<2*x;}",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "js",
            "console.log(2*parseInt(require('fs').readFileSync(0,'utf8')))",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "java",
            "import java.util.*; public class Foo { public static void main(String[] a) {"
            " System.out.println(2 * new Scanner(System.in).nextInt()); } }",
            marks=pytest.mark.slow,
        ),
        (
            "rust",
            "fn main() { let mut s = String::new(); std::io::stdin().read_line(&mut s).unwrap();"
            ' println!("{}", 2 * s.trim().parse::<i64>().unwrap()); }',
        ),
        ("go", "package main"),
    ],
)
def test_other_languages_where_their_tools_are(language, program):
    longer = {"seconds": 10.0, "total_seconds": 40.0}
    try:
        paid = points(sample(program, DOUBLE, language=language), **longer)
    except UserError as error:  # the one clear line of a machine without the tool
        paid = str(error)
    if isinstance(paid, str):
        compiler = shutil.which({"rust": "rustc", "go": "go", "c": "gcc"}.get(language, "none"))
        assert re.search("programs in .* install", paid)
        assert language == "rust" or compiler is None, paid
        return
    assert paid == [1.0]
    assert points(sample("int main( {", DOUBLE, language=language), **longer) == [0.0]


def test_bad_rows_and_options_are_named():
    with pytest.raises(UserError, match="row 8 has no tests"):
        points(sample("x"))
    with pytest.raises(UserError, match="2 inputs and 1 outputs"):
        points(sample("x", {"inputs": ["1", "2"], "outputs": ["1"]}))
    with pytest.raises(UserError, match="holds no test"):
        points(sample("x", {"inputs": [], "outputs": []}))
    with pytest.raises(UserError, match="are no tests"):
        points(sample("x", tests={"inputs": ["1"]}), column="tests")
    with pytest.raises(UserError, match="cobol"):
        points(language="cobol")
    with pytest.raises(UserError, match="raise total_seconds"):
        points(seconds=20.0)
    with pytest.raises(UserError, match=r"memory_mib = 0"):
        points(memory_mib=0.0)
    with pytest.raises(UserError, match="only Python has functions to call"):
        points(sample("x", CALLS, language="c"))


def test_how_outputs_and_values_are_compared():
    assert same_output("a  b \nc\n\n", "a b\nc", 0)
    assert not same_output("a b c", "a b\nc", 0)
    assert same_output("0.3333333", "0.33333331", 1e-6)
    assert not same_output("12345678901234567890", "12345678901234567891", 1e-3)
    assert not same_output("nan", "1.0", 1e-6)
    assert same_value((1, [2.0]), [1, [2]], 1e-9)
    assert same_value({1: "a"}, {"1": "a"}, 0)
    assert not same_value("1.0", 1.0, 1e-6)
    assert not same_value([1], 1, 0)
    assert assert_case("assert f(1) == set([1, 2])").expected == {1, 2}
    assert assert_case("assert abs(f(1) - 2) < 0.5").expected == 0.5
    assert last_block("```\na\n```\n```py\nb\n```") == "b\n"
    assert last_block("no fence") == "no fence"


def test_limits_of_a_program_and_of_its_output():
    wordy = {"inputs": ["1"], "outputs": ["x" * 3000]}
    for kib, paid in ((1, 0.0), (4, 1.0)):
        assert points(sample("print('x' * 3000)", wordy), output_kib=kib) == [paid]
    long = sample(RIGHT + "\n# " + "x" * code._LONGEST_PROGRAM, DOUBLE)
    assert points(long) == [0.0]
    assert points(sample(RIGHT + "\nraise SystemExit(1)", DOUBLE)) == [0.0]
    tests = code_tests.tests_of({}, DOUBLE, "", 0)
    limits = code.testing_of({})
    for stop, notes in ((True, 1), (False, 3)):
        assert len(code.judge("1 / 0", tests, "python", limits, stop=stop).notes) == notes


def test_more_inputs_than_a_policy_s_code_may_have():
    long = "1 " * 600_000
    program = "print(sum(map(int, input().split())))"
    assert points(sample(program, {"inputs": [long], "outputs": ["600000"]})) == [1.0]


@pytest.mark.slow
def test_where_nothing_sets_the_code_apart(monkeypatch):
    way = sandbox._way_in()._replace(prefix=(), filtered=True, fenced=True)
    if not sandbox._runs(way):
        way = way._replace(fenced=False)
    monkeypatch.setattr(sandbox, "_way_in", lambda: way)
    code._sandbox.cache_clear()
    try:
        limits = {"seconds": 1.0, "total_seconds": 4.0, "memory_mib": 256.0}
        asserts = {"test_list": ["assert double(2) == 4", "assert double(2) in (4,)"]}
        for name, program in PROGRAMS.items():
            assert points(sample(program, DOUBLE), **limits) == [0.0], name
            assert points(sample(program, **asserts), **limits) == [0.0], name
        assert points(sample(RIGHT, DOUBLE), **limits) == [1.0]
        assert points(sample("def double(x): return 2 * x", **asserts), **limits) == [1.0]
    finally:
        code._sandbox.cache_clear()


def test_no_jax_is_loaded():
    check = "import sys, jrl.verifiers.code; sys.exit('jax' in sys.modules)"
    root = pathlib.Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", check], cwd=root, check=False).returncode == 0


def test_a_faster_program_is_worth_more():
    """By processor time in the sandbox, beside a program that counts where one multiplies."""
    slow = "n = int(input())\nt = 0\nfor i in range(2 * n):\n    t += 1\nprint(t)"
    tests = {"inputs": ["600000\n"], "outputs": ["1200000\n"]}
    samples = [sample(p, tests, input=slow) for p in (RIGHT, "print(1)")]
    fast, wrong = make_reward("code_speed", repeats=1)(samples)
    assert 1 < fast < 2
    assert wrong == 0.0
