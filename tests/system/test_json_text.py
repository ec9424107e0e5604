"""JSON of others: read, or refused with the place and the reason."""

import json

import hypothesis
import pytest
from hypothesis import strategies as st

from jrl.data.datasets import JsonlDataset
from jrl.errors import UserError
from jrl.system.json_text import parse_json, read_object

BAD = [
    (b"[" * 100_000, "nested too deeply"),
    (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
    (b'{"a": "\\ud800"}', r"holds \\ud800, half of a character"),
    (b'{"\\uDC00b": 1}', r"holds \\udc00"),
    (b'{"a": "\xff"}', "not UTF-8 text"),
    (b"{'a': 1}", "not valid JSON"),
    (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),
    (b"", "not valid JSON"),
    (b'{"a": 1, "b": 2, "a": 3}', "the key 'a' is there twice, with 1 and with 3; keep one"),
    (b'[{"x": {"y": "no", "y": ["yes"]}}]', "the key 'y' is there twice, with 'no' and with "),
    (b'{"a": 1, "a": true}', "the key 'a' is there twice, with 1 and with True"),
]


@pytest.mark.parametrize(("data", "message"), BAD)
def test_one_line_says_where_and_why(data, message):
    with pytest.raises(UserError, match=message) as raised:
        parse_json(data, "train.jsonl, line 3")
    assert str(raised.value).startswith("train.jsonl, line 3: ")
    assert "\n" not in str(raised.value)
    str(raised.value).encode()


def test_whole_characters_of_two_halves_are_read():
    assert parse_json(b'"\\ud83d\\ude00 \\\\ud800"', "x") == "\U0001f600 \\ud800"
    assert parse_json(b'\xef\xbb\xbf{"a": 1}', "x") == {"a": 1}


def test_a_key_that_is_there_twice_with_one_value_says_nothing_else():
    assert parse_json(b'{"a": [1], "b": 2, "a": [1]}', "x") == {"a": [1], "b": 2}


@hypothesis.given(st.binary(max_size=60) | st.text(max_size=60).map(json.dumps).map(str.encode))
@hypothesis.settings(max_examples=200, deadline=None, database=None)
def test_any_bytes_are_read_or_refused(data):
    message = "here: "
    try:
        json.dumps(parse_json(data, "here"), ensure_ascii=False).encode()
    except UserError as error:
        message = str(error)
    assert message.startswith("here: ")
    assert "\n" not in message


@pytest.mark.parametrize("line", [b"[" * 50_000, b'{"a": "\\udead"}', b"3", b"\xff"])
def test_a_line_of_data_is_named(tmp_path, line):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b"\n")
    with pytest.raises(UserError, match=r"train\.jsonl, line 2: "):
        JsonlDataset(path)[1]


def test_objects_of_files(tmp_path):
    assert read_object(tmp_path / "none.json") == {}
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(UserError, match="list.json must hold a JSON object, not list"):
        read_object(tmp_path / "list.json")
