"""Mistakes in files of data: each is one line that names the file, the place and the remedy."""

import errno
import gzip
import io
import json
import tracemalloc

import pytest

from jrl.data.datasets import open_dataset
from jrl.data.messages import Wording
from jrl.data.pairs import build_judged
from jrl.data.prompts import build_prompts
from jrl.errors import UserError
from jrl.models.tokenizer import char_tokenizer

GOOD = b'{"question": "1+1?", "answer": "2"}\n'
TEXT = "question,answer\n1+1?,2\n"


def parquet(**columns):
    import pyarrow as arrow
    from pyarrow import parquet as files

    sink = io.BytesIO()
    files.write_table(arrow.table(columns), sink)
    return sink.getvalue()


def zipped(data, damage=None, cut=None):
    packed = bytearray(gzip.compress(data))
    if damage is not None:
        packed[damage] ^= 0xFF
    return bytes(packed[:cut])


PROMPTS = {
    "utf-16": ("a.jsonl", GOOD.decode().encode("utf-16"), "UTF-16; save it as UTF-8"),
    "latin-1": (
        "a.jsonl",
        '{"question": "1+1 é?", "answer": "2"}\n'.encode("latin-1"),
        "line 1: not UTF",
    ),
    "latin-1 csv": ("a.csv", (TEXT + "é?,3\n").encode("latin-1"), "; save it as UTF-8"),
    "utf-16 csv": ("a.csv", TEXT.encode("utf-16"), "begins as UTF-16; save it as UTF-8"),
    "a null byte": ("a.jsonl", GOOD + b"\0\0\0\0\n", "line 2: not valid JSON"),
    "null bytes in csv": ("a.csv", TEXT.encode() + b"\0,3\n", ""),
    "empty": ("a.jsonl", b"", "the file has no rows"),
    "empty csv": ("a.csv", b"", "the file has no rows"),
    "empty json": ("a.json", b"", "not valid JSON"),
    "empty list": ("a.json", b"[]", "the file has no rows"),
    "empty parquet": ("a.parquet", b"", "not a readable Parquet file"),
    "empty gzip": ("a.jsonl.gz", b"", "the file has no rows"),
    "blank lines": ("a.jsonl", b"\n \n\r\n", "the file has no rows"),
    "ragged": ("a.csv", TEXT.encode() + b"2+2?\n", "line 3: 1 values for the 2 columns"),
    "too wide": ("a.tsv", b"question\tanswer\n1?\t2\t3\n", "line 2: 3 values for the 2 columns"),
    "columns twice": ("a.csv", b"question,answer,answer\n1?,2,3\n", "two columns have one name"),
    "no header": ("a.csv", b"1+1?,2\n2+2?,4\n", "no field 'question' and no field 'answer'"),
    "semicolons": ("a.csv", b"question;answer\n1+1?;2\n", "seem to stand between ';'"),
    "tabs": ("a.csv", b"question\tanswer\n1+1?\t2\n", "or name the file .tsv"),
    "an open quote": ("a.csv", TEXT.encode() + b'"2+2?,4\n', "not a CSV file"),
    "null": ("a.jsonl", b'{"question": null, "answer": "2"}\n', "line 1: question must be text"),
    "null answer": ("a.jsonl", GOOD + b'{"question": "a?", "answer": null}\n', "line 2: answer is"),
    "not a number": ("a.jsonl", b'{"question": "a?", "answer": NaN}\n', "line 1: answer is nan"),
    "a number for text": ("a.jsonl", b'{"question": 5, "answer": "2"}\n', "line 1: question must"),
    "a table for text": ("a.jsonl", b'{"question": {"a": 1}, "answer": 2}\n', "question must be"),
    "a list of numbers": ("a.jsonl", b'{"question": [1, 2], "answer": 2}\n', "question holds 1"),
    "messages without roles": (
        *("a.jsonl", b'{"question": [{"text": "a"}], "answer": 2}\n'),
        "a message has role and content",
    ),
    "nested": ("a.jsonl", b'{"row": {"question": "a?", "answer": 2}}\n', "no field 'question'"),
    "a list of lines": ("a.jsonl", b"[" + GOOD.strip() + b"]\n", "line 1: must hold a JSON object"),
    "a list over lines": ("a.jsonl", b"[\n" + GOOD + b"]\n", "line 1: not valid JSON"),
    "trailing commas": ("a.jsonl", GOOD.strip() + b",\n" + GOOD, "line 1: not valid JSON"),
    "a comma in an object": ("a.jsonl", b'{"question": "a?", "answer": 2,}\n', "line 1: not valid"),
    "single quotes": ("a.jsonl", b"{'question': 'a?', 'answer': 2}\n", "line 1: not valid JSON"),
    "two on a line": ("a.jsonl", GOOD.strip() + GOOD, "line 1: not valid JSON"),
    "an object over lines": ("a.jsonl", b'{\n"question": "a?",\n"answer": 2}\n', "line 1: not"),
    "a text": ("a.jsonl", b'"1+1?"\n', "line 1: must hold a JSON object"),
    "a key twice": ("a.jsonl", b'{"question": "a?", "question": "b?", "answer": 1}\n', "twice"),
    "half a character": ("a.jsonl", b'{"question": "\\ud800", "answer": 1}\n', "lone surrogate"),
    "very deep": ("a.jsonl", b'{"question": ' + b"[" * 99_999 + b"\n", "line 1: nested too deeply"),
    "a json of objects in an object": ("a.json", b'{"rows": []}', "must hold a list of objects"),
    "a json of texts": ("a.json", b'["a?"]', "row 0: must hold a JSON object"),
    "a cut json": ("a.json", b'[{"question": "a?"', "not valid JSON"),
    "no gzip": ("a.jsonl.gz", GOOD, "not a readable gzip file"),
    "a cut gzip": ("a.jsonl.gz", zipped(GOOD * 99, cut=-9), "not a readable gzip file"),
    "a damaged gzip": ("a.jsonl.gz", zipped(GOOD * 99, damage=-6), "not a readable gzip file"),
    "damaged within": ("a.jsonl.gz", zipped(GOOD * 99, damage=20), "not a readable gzip file"),
    "gzip in gzip": ("a.jsonl.gz", gzip.compress(gzip.compress(GOOD)), "not UTF-8 text"),
    "a gzip by another name": ("a.jsonl", gzip.compress(GOOD), "name it .jsonl.gz"),
    "parquet by another name": ("a.jsonl", b"PAR1\x15\x04\x15\xff", "name it .parquet"),
    "a sheet by another name": ("a.csv", b"PK\x03\x04\xff\xff", "as sheets of Excel do"),
    "thousands of digits": ("a.jsonl", b'{"answer": ' + b"9" * 5000 + b"}\n", "write it as text"),
    "no answers": ("a.jsonl", b'{"question": "a?", "answer": ["", []]}\n', "answer is empty"),
    "answers that are none": ("a.jsonl", b'{"question": "a?", "answer": [NaN]}\n', "answer is nan"),
    "a cut parquet": ("a.parquet", b"PAR1" + bytes(50), "not a readable Parquet file"),
    "git lfs": ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid x\n", "Git LFS"),
    "git lfs parquet": ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
    "a page instead": ("a.jsonl", b"<!doctype html>\n<html></html>\n", "line 1: not valid JSON"),
    "blank question": (
        "a.jsonl",
        b'{"question": "  ", "answer": 1}\n',
        "line 1: question is blank",
    ),
    "white space in names": ("a.csv", b"question, answer\n1?,2\n", "a space around its name"),
    "other case": ("a.jsonl", b'{"Question": "1?", "Answer": 2}\n', "no field 'question'"),
}


def error_of(place, name, content, read):
    """Error message of a file; a sound file fails the test."""
    (place / name).write_bytes(content)
    with pytest.raises(UserError) as raised:
        read(open_dataset(str(place / name), key="data.train"))
    message = str(raised.value)
    assert len(message.splitlines()) == 1, message
    assert len(message.replace(str(place), "")) < 600, message
    assert name in message or "data.train" in message, message
    return message


def prompts_of(source):
    build_prompts(source, Wording(char_tokenizer(), template="plain"), max_prompt_tokens=50)


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(name, tmp_path):
    file, content, expected = PROMPTS[name]
    assert expected in error_of(tmp_path, file, content, prompts_of)


SOUND = {
    "crlf": ("a.jsonl", GOOD.replace(b"\n", b"\r\n") * 2),
    "crlf csv": ("a.csv", TEXT.replace("\n", "\r\n").encode()),
    "cr csv": ("a.csv", TEXT.replace("\n", "\r").encode()),
    "a mark": ("a.jsonl", b"\xef\xbb\xbf" + GOOD),
    "no last newline": ("a.jsonl", GOOD.strip()),
    "names in capitals": ("A.CSV", TEXT.encode()),
    "several parts of gzip": ("a.jsonl.gz", gzip.compress(GOOD) + gzip.compress(GOOD)),
    "line separators in a text": (
        "a.jsonl",
        '{"question": "1+1?", "answer": "2\u2028"}\n'.encode(),
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_what_editors_write_is_read(name, tmp_path):
    file, content = SOUND[name]
    (tmp_path / file).write_bytes(content)
    prompts_of(open_dataset(str(tmp_path / file)))


def row(**fields):
    return json.dumps({"prompt": "a", "responses": ["b", "c"], "scores": [1, 0]} | fields).encode()


PAIRS = {
    "scores of null": (row(scores=[None, 1]), "scores holds None; write finite float32 numbers"),
    "scores of lists": (row(scores=[[1], 1]), "scores holds [1]"),
    "scores in texts": (row(scores=["1", "0"]), "scores holds '1'"),
    "one score": (row(scores=1), "scores = '1'; give a list"),
    "one response": (row(responses="b"), "responses = 'b'; give a list"),
    "a number": (row(responses=5), "responses = '5'; give a list"),
    "too few": (row(scores=[1]), "2 responses but 1 scores"),
    "null responses": (row(responses=[None, "b"]), "responses[0]"),
    "number responses": (row(responses=[1, "b"]), "responses[0]"),
    "a table": (row(responses={"a": 1}), "give a list"),
    "a label in words": (
        b'{"prompt": "a", "completion": "b", "label": "good"}',
        "label = 'good'; write true or false",
    ),
    "a label of a list": (b'{"prompt": "a", "completion": "b", "label": [1]}', "label = [1]"),
    "chosen of null": (b'{"prompt": "a", "chosen": null, "rejected": "b"}', "there is no chosen"),
    "chosen of a number": (b'{"prompt": "a", "chosen": 1, "rejected": 2}', "chosen"),
    "prompt of a table": (b'{"prompt": {}, "chosen": "b", "rejected": "c"}', "prompt must be"),
}


def pairs_of(source):
    wording = Wording(char_tokenizer(), template="plain")
    build_judged(source, wording, max_prompt_tokens=40, max_completion_tokens=12)


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name, tmp_path):
    content, expected = PAIRS[name]
    assert expected in error_of(tmp_path, "a.jsonl", content + b"\n", pairs_of)


def test_a_column_of_another_type_in_parquet(tmp_path):
    content = parquet(question=[1, 2], answer=["a", "b"])
    assert "question must be text" in error_of(tmp_path, "a.parquet", content, prompts_of)
    content = parquet(question=["a?", None], answer=["a", "b"])
    assert "row 1: question must be" in error_of(tmp_path, "a.parquet", content, prompts_of)


def test_a_damaged_page_of_parquet(tmp_path):
    content = bytearray(parquet(question=["a?" * 50, "b?"], answer=["a", "b"]))
    content[8:40] = b"\xff" * 32  # the header of the first page; the footer stays
    message = error_of(tmp_path, "a.parquet", bytes(content), prompts_of)
    assert "row 0: row group 0 cannot be read" in message


def test_very_many_lines_of_a_small_file_are_refused_before_memory_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr("jrl.system.memory.host_bytes", lambda: 2**27)
    message = error_of(tmp_path, "a.jsonl.gz", gzip.compress(b"{}\n" * 700_000), prompts_of)
    assert (
        "a.jsonl.gz': 700000 rows: this takes at least 267 MiB of memory, and there are" in message
    )


def test_what_a_compressed_file_holds_is_in_no_memory_and_needs_room_on_disk(tmp_path, monkeypatch):
    """Bounded by blocks, not by the file: 32 MiB of white space and one row behind it."""
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(32):
            file.write(b"\n" * 2**20)
        file.write(GOOD)
    tracemalloc.start()
    source = open_dataset(str(path))
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()
    assert (len(source), source.where(0)) == (1, f"{path}, line {2**25 + 1}")
    assert source[0] == json.loads(GOOD)
    full = lambda *args: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full"))  # noqa: E731
    monkeypatch.setattr("jrl.data.lines.os.write", full)
    message = error_of(tmp_path, "b.jsonl.gz", path.read_bytes(), prompts_of)
    assert "decompressed it has more than" in message
    assert "set TMPDIR to a directory with more room" in message


def test_a_line_of_100_megabytes_is_named(tmp_path):
    content = b'{"question": "' + b"x" * 100_000_000 + b'", "answer": "2"}\n'
    message = error_of(tmp_path, "a.jsonl", GOOD + content, prompts_of)
    assert "line 2: the prompt has" in message
