"""The constraints that need the extra ``ifeval``, beside the values of their authors' code."""

import json
import pathlib

import pytest

from jrl.rewards.instructions import follows
from jrl.rewards.language import language_of
from jrl.rewards.tulu_instructions import FUNCTIONS

pytestmark = pytest.mark.extra("ifeval")
VALUES = json.loads((pathlib.Path(__file__).parent / "instruction_values.json").read_text())
TEXTS = VALUES["texts"]
IDS = (
    *("language:response_language", "length_constraints:number_sentences"),
    *("change_case:capital_word_frequency", "change_case:english_capital"),
    "change_case:english_lowercase",
)


@pytest.mark.parametrize("case", [case for case in VALUES["ifeval"] if case["id"] in IDS])
def test_constraints_are_ifeval_s(case):
    for loose, name in ((False, "strict"), (True, "loose")):
        mine = [follows(text, case["id"], case["kwargs"], loose=loose) for text in TEXTS]
        assert "".join(str(int(x)) for x in mine) == case[name]


def test_the_function_is_tulu_s():
    name = "validate_response_language"
    check, _ = FUNCTIONS[name]
    for case in VALUES["tulu"]:
        if case["row"]["func_name"] == name:
            mine = "".join(str(int(check(text, case["row"]["language"]))) for text in TEXTS)
            assert mine == case["points"].replace("x", "0")  # where theirs raises


def test_the_same_language_each_time():
    assert len({language_of("Das ist gut, this is good") for _ in range(20)}) == 1
