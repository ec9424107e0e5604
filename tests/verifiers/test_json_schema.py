"""JSON judged by its schema."""

import json
import re
import time

import numpy as np
import pytest

from jrl.errors import UserError
from jrl.rewards import Sample, make_reward
from jrl.types import Prompt
from jrl.verifiers.json_schema import _NONE, impossible, last_json

pytestmark = pytest.mark.extra("tools")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
}


def paid(text, options=(), **meta):
    prompt = Prompt(5, "?", np.zeros(1, np.int32), "", meta)
    sample = Sample(prompt, text, np.zeros(1, np.int32), "stop_token")
    return make_reward("json_schema", **dict(options))([sample])[0]


def test_the_schema_of_the_row_or_of_the_option():
    for schema in (PERSON, json.dumps(PERSON)):
        assert paid('Here: {"name": "Ann", "age": 3}.', json_schema=schema) == 1.0
        assert paid('{"age": 3}', json_schema=schema) == 0.0
        assert paid('{"name": "Ann"}', {"schema": schema}) == 1.0
    assert paid("[1]", {"schema": PERSON}, json_schema={"type": "array"}) == 1.0
    assert paid("[1]", {"column": "form"}, form={"type": "array"}) == 1.0


def test_partial_points_for_json_alone():
    assert paid('{"age": 3}', {"partial": 0.25}, json_schema=PERSON) == 0.25
    assert paid("no JSON", {"partial": 0.25}, json_schema=PERSON) == 0.0
    assert paid('{"name": "a", "age": NaN}', {"partial": 0.25}, json_schema=PERSON) == 0.0


def test_the_last_json_counts():
    assert last_json('```json\n{"a": 1}\n``` or [2]') == {"a": 1}
    assert last_json("```json\n[1]\n```\nno:\n```json\n[2]\n```\n```\nx\n```") == [2]
    assert last_json('{"a": [1]} then {"b": 2} {bad') == {"b": 2}
    assert last_json("null") is None
    assert last_json("") is _NONE
    assert last_json("```\nnot\n``` {") is _NONE


def test_hostile_json_ends():
    begin = time.monotonic()
    for text in ("[" * 200_000, "{[" * 100_000, '{"a":' * 100_000, "[]" * 300_000):
        assert paid(text, json_schema=PERSON) == 0.0
    slow = {"type": "string", "pattern": "^(a+)+$"}
    assert paid(json.dumps("a" * 40 + "b"), json_schema=slow) == 0.0
    assert time.monotonic() - begin < 20


def test_schemas_that_cannot_be_are_named():
    with pytest.raises(UserError, match="column 'json_schema' of row 6 is empty"):
        paid("1")
    with pytest.raises(UserError, match="no JSON"):
        paid("1", json_schema="{")
    with pytest.raises(UserError, match="invalid"):
        paid("1", json_schema={"type": "nothing"})
    with pytest.raises(UserError, match="nothing can satisfy its schema"):
        make_reward("json_schema", schema={"enum": []})
    assert "is false" in impossible({"properties": {"a": False}, "required": ["a"]})
    closed = {"properties": {}, "required": ["a"], "additionalProperties": False}
    assert impossible(closed) == "the schema requires 'a' and forbids it"
    assert impossible(PERSON) == ""


NEVER = {
    "another type": ({"type": "integer", "enum": ["a"]}, 'allows only ["a"], which its other'),
    "a value out of bounds": ({"const": 3, "minimum": 5}, "allows only [3], which its other"),
    "two types": (
        {"allOf": [{"type": "string"}, {"type": "number"}]},
        "types string and number at",
    ),
    "no way": ({"anyOf": [False, {"enum": []}]}, "its anyOf[0] is false"),
    "an open bound": ({"exclusiveMinimum": 5, "maximum": 5}, "exclusiveMinimum = 5 above maximum"),
    "inside": (
        {"type": "object", "properties": {"a": {"oneOf": [{"not": {}}]}}, "required": ["a"]},
        "its oneOf[0] allows no value",
    ),
}
POSSIBLE = (
    {"type": "string", "minimum": 5, "maximum": 3},  # bounds of numbers say nothing of a text
    {"type": ["integer", "string"], "minimum": 5, "maximum": 3},
    {"allOf": [{"type": "integer"}, {"type": "number"}]},
    {"type": "integer", "enum": ["a", 4]},
    {"anyOf": [False, {"type": "null"}]},
    {"minimum": 5, "maximum": 5},
    {"type": ["null", "object"], "properties": {"a": False}, "required": ["a"]},
    {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "enum": [1]},
)


@pytest.mark.parametrize("name", NEVER)
def test_schemas_that_no_reply_satisfies_are_named(name):
    schema, why = NEVER[name]
    with pytest.raises(UserError, match=re.escape(why)):
        make_reward("json_schema", schema=schema)


def test_schemas_that_some_reply_satisfies_are_not():
    for schema in POSSIBLE:
        make_reward("json_schema", schema=schema)
