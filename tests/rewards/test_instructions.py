"""Verifiable instructions beside the values of their authors' code.

``instruction_values.json`` was computed by the copy of ``instruction_following_eval`` in
lm-evaluation-harness at 4e7e0d4, with NLTK 3.10.4's Punkt and langdetect of seed 0, and by
``if_functions`` of open-instruct at e6c3044; "x" is where that raised. Those that need the extra
``ifeval`` are in ``test_instructions_of_language.py``.
"""

import json
import pathlib

import numpy as np
import pytest

from jrl.errors import UserError
from jrl.rewards import Sample, make_reward
from jrl.rewards.instructions import CONSTRAINTS, follows
from jrl.rewards.tulu_instructions import FUNCTIONS
from jrl.types import Prompt

VALUES = json.loads((pathlib.Path(__file__).parent / "instruction_values.json").read_text())
TEXTS = VALUES["texts"]
OF_LANGUAGE = (
    *("language:response_language", "length_constraints:number_sentences"),
    *("change_case:capital_word_frequency", "change_case:english_capital"),
    *("change_case:english_lowercase", "validate_response_language"),
)


def points(text, answer="", options=(), **meta):
    prompt = Prompt(3, "?", np.zeros(1, np.int32), answer, meta)
    sample = Sample(prompt, text, np.zeros(1, np.int32), "stop_token")
    return make_reward("instructions", **dict(options))([sample])[0]


def plain(cases, of):
    return [case for case in cases if of(case) not in OF_LANGUAGE]


def test_all_25_are_compared():
    assert {case["id"] for case in VALUES["ifeval"]} == set(CONSTRAINTS)
    assert len(CONSTRAINTS) == 25
    assert {case["row"]["func_name"] for case in VALUES["tulu"]} == set(FUNCTIONS)
    assert len(FUNCTIONS) == 25
    assert len(TEXTS) >= 60


@pytest.mark.parametrize("case", plain(VALUES["ifeval"], lambda case: case["id"]))
def test_constraints_are_ifeval_s(case):
    for loose, name in ((False, "strict"), (True, "loose")):
        mine = [follows(text, case["id"], case["kwargs"], loose=loose) for text in TEXTS]
        assert "".join(str(int(x)) for x in mine) == case[name]


@pytest.mark.parametrize("case", plain(VALUES["tulu"], lambda case: case["row"]["func_name"]))
def test_functions_are_tulu_s(case):
    row = json.dumps(case["row"] | {"quantity": None})
    mine = [points(text, row) for text in TEXTS]
    assert "".join(str(int(x)) for x in mine) == case["points"]


def test_all_or_a_share_strict_or_loose():
    row = {
        "instruction_id_list": ["punctuation:no_comma", "detectable_format:title"],
        "kwargs": [{"num_words": None}, None],
    }
    assert points("<<A title>> and no more", **row) == 1.0
    assert points("<<A title>>, and more", **row) == 0.0
    assert points("<<A title>>, and more", options={"partial": True}, **row) == 0.5
    assert points("", options={"partial": True}, **row) == 0.0
    quoted = {"instruction_id_list": ["startend:quotation"], "kwargs": "[{}]"}
    assert points('Sure:\n"yes"', **quoted) == 0.0
    assert points('Sure:\n"yes"', options={"loose": True}, **quoted) == 1.0
    renamed = {"ids": ["startend:quotation"], "arguments": [{}]}
    names = {"column": "ids", "kwargs_column": "arguments"}
    assert points('"yes"', options=names, **renamed) == 1.0


def test_rows_with_a_list_of_constraints():
    answer = str([{"instruction_id": ["punctuation:no_comma"], "kwargs": [None]}])
    assert points("none here", answer) == 1.0
    assert points("one, here", answer) == 0.0


def test_keywords_that_are_no_patterns_stand_for_themselves():
    kwargs = {"keyword": "f(x", "frequency": 1, "relation": "at least"}
    assert follows("f(x) it is", "keywords:frequency", kwargs)
    assert not follows("fx it is", "keywords:frequency", kwargs)


def test_mistakes_in_rows_are_named():
    with pytest.raises(UserError, match="row 4 has no constraints in 'instruction_id_list'"):
        points("x")
    with pytest.raises(UserError, match="punctuation:no_comma"):
        points("x", instruction_id_list=["punctuation:no_coma"], kwargs=[{}])
    with pytest.raises(UserError, match="number_words needs num_words, relation in kwargs"):
        points("x", instruction_id_list=["length_constraints:number_words"], kwargs=[{}])
    with pytest.raises(UserError, match="have 2 kwargs"):
        points("x", instruction_id_list=["punctuation:no_comma"], kwargs=[{}, {}])
    with pytest.raises(UserError, match="func_name"):
        points("x", {"func_name": "validate_nothing"})
    with pytest.raises(UserError, match="validate_end needs end_phrase"):
        points("x", {"func_name": "validate_end", "end_phrase": None})
    kwargs = {"num_words": 1, "relation": "about"}
    with pytest.raises(UserError, match="relation"):
        follows("x", "length_constraints:number_words", kwargs)
