"""Proofs judged by a REPL, played by ``stand_in_repl.py``."""

import pathlib
import shlex
import sys
import time

import numpy as np
import pytest

from jrl.errors import UserError
from jrl.rewards import Sample, make_reward
from jrl.types import Prompt
from jrl.verifiers.lean import is_proof, states, without_comments

REPL = shlex.join([sys.executable, str(pathlib.Path(__file__).parent / "stand_in_repl.py")])
STATEMENT = "theorem t (n : Nat) : n + 0 = n"


def paid(proof, statement=f"{STATEMENT} := by sorry", **options):
    prompt = Prompt(5, "?", np.zeros(1, np.int32), "", {"formal_statement": statement})
    sample = Sample(prompt, proof, np.zeros(1, np.int32), "stop_token")
    return make_reward("lean", **{"repl": REPL, "seconds": 20.0} | options)([sample])[0]


def test_a_proof_is_paid():
    assert paid(f"Thus:\n```lean4\n{STATEMENT} := rfl\n```") == 1.0
    assert paid("theorem t (n : Nat) :\n    n + 0 = n := by rfl -- done") == 1.0
    assert paid(f"lemma a : 1 = 1 := rfl\n{STATEMENT} := rfl") == 1.0
    assert paid(f"{STATEMENT} := choice") == 1.0
    assert paid(f"{STATEMENT} := ring") == 0.0
    assert paid("") == 0.0


@pytest.mark.parametrize(
    "proof",
    [
        "theorem t (n : Nat) : True := rfl",
        f"-- {STATEMENT}\ntheorem t : True := rfl",
        f"/- {STATEMENT} -/ theorem t : True := rfl",
        f'theorem a : "{STATEMENT} := " = "" := rfl',
        f"axiom a : False\n{STATEMENT} := rfl",
        f"variable (h : False)\ninclude h\n{STATEMENT} := rfl",
        f'#eval IO.println "x"\n{STATEMENT} := rfl',
        f"{STATEMENT} := by native_decide",
        f"{STATEMENT} := by sorry",
        f"local notation n = m => True\n{STATEMENT} := rfl",
        f"{STATEMENT} := rfl\n#eval 1",
        f"{STATEMENT} \u2228 True := rfl",
        f"{STATEMENT} := cheat",
        f"open Evil\n{STATEMENT} := rfl",
        f"{STATEMENT} := by run_tac pure ()",
        f"theorem w : True := trivial simproc f (True) := fun _ => x\n{STATEMENT} := rfl",
        f"{STATEMENT} := by exact Lean.Elab.whatever",
    ],
)
def test_what_is_no_proof_is_not_paid(proof):
    assert paid(proof) == 0.0


def test_a_repl_that_hangs_or_crashes_costs_its_own_sample():
    begin = time.monotonic()
    assert paid(f"lemma hang : 1 = 1 := rfl\n{STATEMENT} := rfl", seconds=1.0) == 0.0
    assert time.monotonic() - begin < 15
    assert paid(f"lemma crash : 1 = 1 := rfl\n{STATEMENT} := rfl") == 0.0
    assert paid(f"{STATEMENT} := rfl") == 1.0


def test_the_header_comes_first_and_its_mistakes_are_named():
    needs = f"lemma needs_header : 1 = 1 := rfl\n{STATEMENT} := rfl"
    assert paid(needs) == 0.0
    assert paid(needs, header="import Mathlib") == 1.0
    with pytest.raises(UserError, match="unknown module prefix"):
        paid(f"{STATEMENT} := rfl", header="import Nothing")


def test_mistakes_are_named():
    with pytest.raises(UserError, match="there is no such program"):
        make_reward("lean", repl="no_repl_of_this_name")
    with pytest.raises(UserError, match="row 6 states no theorem"):
        paid("x", "1 + 1 = 2")


def test_replies_are_read():
    fine = {"severity": "info", "data": "'t' does not depend on any axioms"}
    assert is_proof({"env": 1, "messages": [fine]}, "t")
    assert not is_proof({"env": 1, "messages": [fine]}, "s")
    assert not is_proof({"env": 1}, "t")
    assert not is_proof({"messages": [fine]}, "t")
    assert not is_proof({"env": 1, "messages": [fine], "sorries": [{}]}, "t")
    warned = {"severity": "warning", "data": "declaration uses 'sorry'"}
    assert not is_proof({"env": 1, "messages": [warned, fine]}, "t")
    assert without_comments("a -- b\nc /- -- -/ d") == "a \nc  d"
    assert not states("theorem u : 1 = 1 := rfl", "theorem t : 1 = 1")
    assert not states("deriving x theorem t : 1 = 1 := rfl", "theorem t : 1 = 1")
