"""Schemas of tools: what they say is what jsonschema says, and every check ends."""

import itertools
import time
from types import SimpleNamespace

import pytest

from jrl.episodes.schemas import CHECK_SECONDS, check_schema, fault
from jrl.errors import UserError


def of(**properties):
    return {"type": "object", "properties": properties}


TREE = {"$defs": {"t": {"anyOf": [of(x={"$ref": "#/$defs/t"})] * 2}}, "$ref": "#/$defs/t"}


def nested(depth):
    return {"x": nested(depth - 1)} if depth else {"x": 1}


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        (of(a={"pattern": "^(a|aa)+$"}), {"a": "a" * 60 + "!"}),
        ({"type": "object", "patternProperties": {"^(a|aa)+$": {}}}, {"a" * 60 + "!": 1}),
        (
            {
                "type": "object",
                "patternProperties": {"^(a|aa)+$": {}},
                "additionalProperties": False,
            },
            {"a" * 60 + "!": 1},
        ),
        ({"type": "object", **TREE}, nested(40)),
        # An inner draft must not bring back validators without a clock.
        (
            of(
                a={"$schema": "https://json-schema.org/draft/2020-12/schema", "pattern": "(a|aa)+$"}
            ),
            {"a": "a" * 60 + "!"},
        ),
    ],
)
def test_checks_end_in_time(schema, arguments):
    check_schema(schema, "a tool")
    begin = time.thread_time()
    assert "took more than" in fault(schema, arguments)  # told to the policy, not raised
    assert time.thread_time() - begin < CHECK_SECONDS + 10  # without a limit it takes for ever


def test_a_busy_machine_is_no_fault_of_the_arguments(monkeypatch):
    ticks = itertools.count(0, 10)
    clock = SimpleNamespace(monotonic=lambda: next(ticks), thread_time=time.thread_time)
    monkeypatch.setattr("jrl.episodes.schemas.time", clock)
    schema = of(a={"type": "string", "pattern": "^b+$"})
    check_schema(schema, "a tool")
    assert fault(schema, {"a": "bb"}) is None


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (of(a={"$ref": "#/$defs/none"}), r"\$ref = '#/\$defs/none', which it does not define"),
        (of(a={"$ref": "https://example.com/a.json"}), "does not define"),
        (of(a={"items": [{"type": "string"}]}), "invalid"),
        (of(a={"pattern": "("}), r"the pattern '\('"),
        ({"type": "object", "$ref": "#"}, "nested too deeply|took more than"),
        ({"type": "string"}, '"type": "object"'),
        ([1], "not an object"),
        (
            {"type": "object", "patternProperties": {"a": {}}, "unevaluatedProperties": False},
            "use additionalProperties",
        ),
    ],
)
def test_schemas_that_cannot_check_are_named(schema, message):
    with pytest.raises(UserError, match=f"the tool: .*{message}"):
        check_schema(schema, "the tool")


def test_the_draft_is_the_schemas():
    old = of(a={"items": [{"type": "string"}, {"type": "integer"}]})
    old["$schema"] = "http://json-schema.org/draft-07/schema#"
    check_schema(old, "a tool")
    check_schema(of(a={"pattern": r"^\\p{L}+$"}), "a tool")  # a pattern of other languages
    assert fault(old, {"a": ["x", 1]}) is None
    assert "['a'][1]: 'y' is not of type 'integer'" in fault(old, {"a": ["x", "y"]})


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ({"s": "ab", "p_1": 2}, True),
        ({"s": "abc"}, False),
        ({"p_1": "x"}, False),
        ({"q": 1}, False),
        ({"s": 1}, False),
        ([], False),
    ],
)
def test_faults_are_jsonschemas(arguments, fits):
    import jsonschema

    schema = {
        "type": "object",
        "properties": {"s": {"type": "string", "pattern": "^a.$"}},
        "patternProperties": {"^p_": {"type": "integer"}},
        "additionalProperties": False,
    }
    check_schema(schema, "a tool")
    assert jsonschema.Draft202012Validator(schema).is_valid(arguments) == fits
    assert (fault(schema, arguments) is None) == fits
