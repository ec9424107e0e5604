"""Nasty answers are refused before sympy computes them; those of data sets are let through."""

import json
import subprocess
import sys

import pytest

from jrl.rewards.bounds import is_tame
from jrl.rewards.exact import to_number

NASTY = [
    "9^{9^{9^{9}}}",
    "9^9^9^9",
    "9**9**9**9",
    "(9^{99})^{99999}",
    "((((2^{99})^{99})^{99})^{99})^{99}",
    r"10^{10^{10}}",
    r"2^{99999999999}",
    r"2^{-99999999999}",
    r"2^{9!!}",
    r"\left(10^{10}\right)!",
    "((9!)!)!",
    "99999999!",
    "(999 \\cdot 999 \\cdot 999)!",
    "(9999 * 9999)!",
    r"\binom{999999999}{99999999}",
    r"\binom{10^9}{10^8}",
    r"(x+y+z+1)^{999}",
    r"(x+1)^{30}(y+1)^{30}(z+1)^{30}(w+1)^{30}",
    r"((x+1)^{20}+1)^{20}",
    r"\sin^{500}(x)+\cos^{500}(x)",
    r"\sum_{k=1}^{999999999} k^k",
    r"\prod_{k=1}^{99999} (1+x^k)",
    r"\int_0^1 \sin(\sin(\sin(\tan(x^x)))) dx",
    r"\lim_{x \to 0} \frac{x!}{x^{x^x}}",
    r"\sqrt[999999999]{2^{999999999}}",
    "{" * 150 + "1" + "}" * 150,
    "(" * 100 + "1" + ")" * 100,
    r"\sqrt{" * 60 + "2" + "}" * 60,
    r"\frac{1}{1+" * 30 + "1" + "}" * 30,
    "7" * 300 + "x",
    "7" * 100_000,
    "x+" * 150 + "1",
    "x+" * 50_000 + "1",
    "-" * 300 + "1x",
    "1e999999999",
    "1e0000009999999999",
    "1e1_000_000_000",
    "x1e999999999",
    r"1.5e99999999\cdot x",
    r"\{" + ",".join(f"x^{{{i}}}" for i in range(400)) + r"\}",
    r"\begin{pmatrix}" + "1 & " * 300 + r"1\end{pmatrix}^{999}",
    r"\begin{pmatrix}1&1\\1&1\end{pmatrix}^{99999999}",
    r"x^{x^{x^{x^{x}}}}",
    r"\log_{2}(2^{2^{2^{2^{2^{2}}}}})",
    r"(1+\frac{1}{9999999})^{9999999}",
    "0.1^{0.1^{-99999}}",
    r"\Gamma(10^{9})",
    "(2^x)^{(2^y)^{(2^z)}}",
]
SOUND = [
    r"\frac{x^2 + 1}{\sqrt{2}}",
    r"2^{2005}",
    r"3^{100} - 1",
    r"x^{2005} + 1",
    r"(x+1)^2",
    r"(x-1)^{10}(x+2)",
    r"\left(\frac{3}{5}\right)^{10}",
    r"\begin{pmatrix} 1 & 2 \\ -3 & 4 \end{pmatrix}",
    r"\frac{10!}{3!7!}",
    r"\binom{10}{3}",
    r"\dbinom{n}{k}",
    r"(n+1)!",
    r"n!",
    r"e^{i\pi/4}",
    r"e^{x^2}".replace("x^2", "-2x"),
    r"\frac{\sqrt{3} + \sqrt[3]{5}}{\sqrt{2 + \sqrt{3}}}",
    r"(-\infty, -3) \cup [2, 5) \cup (5, \infty)",
    r"\{1, 2, 3\}",
    r"x \in [-2, 7]",
    r"\sin^2 x + \cos^4 x",
    r"\frac{1}{2} \ln(x^2 + 1) + C",
    r"10^{-27}",
    r"6.02 \times 10^{23}",
    r"3x^2y - 5xy^3 + 12",
    r"y = -\frac{3}{4}x + 7",
    r"2\pi r^2 + 2\pi rh",
    r"1{,}234{,}567",
    r"\text{Thursday}",
    r"45^\circ",
    r"90 - \frac{\pi}{6}",
    r"a_n = 2a_{n-1} + 3^{n}",
    "12345678901234567890",
]

SCRIPT = """
import json, resource, sys, time, types
from jrl.rewards.math import math_reward
from jrl.rewards.base import Sample

def judge(completion, answer):
    prompt = types.SimpleNamespace(id=0, text="", tokens=None, answer=answer, meta={})
    return math_reward([Sample(prompt, completion, None, "length")])[0]

math_reward.prepare()
judge(r"\\boxed{x^2}", "x+1")
for text in json.load(sys.stdin):
    for completion, answer in ((r"\\boxed{%s}" % text, "x + 1"), (f"It is ${text}$", "x + 1"),
                               (r"\\boxed{x + 1}", text), (text, "7")):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begin = time.process_time()
        judge(completion, answer)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(json.dumps([text[:60], time.process_time() - begin, grown / 1024]), flush=True)
"""


@pytest.mark.extra("math")
def test_nasty_answers_take_little_time_and_memory(checkout):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(NASTY),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=checkout,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 4 * len(NASTY)
    slow = [line for line in lines if line[1] > 1.0 or line[2] > 100]
    assert not slow


@pytest.mark.parametrize("text", SOUND)
def test_answers_of_data_sets_are_let_through(text):
    assert is_tame(text)


def test_nasty_answers_never_reach_sympy():
    assert [text for text in NASTY if is_tame(text)] == []


@pytest.mark.parametrize("text", ["1e0000009999999999", "1e1_000_000_000", "1e-99999999999"])
def test_numbers_of_a_billion_digits_are_not_written_out(text):
    assert to_number(text) is None
