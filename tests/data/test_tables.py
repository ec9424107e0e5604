"""CSV and JSON files, files in a row, mixtures by weight, and rows that cannot be used."""

import collections
import csv
import gzip
import json

import pytest

from jrl.data.datasets import MemoryRows, open_dataset
from jrl.data.messages import Wording
from jrl.data.pairs import build_judged
from jrl.data.prompts import build_prompts
from jrl.data.tables import Mixture
from jrl.episodes.dialogues import read_dialogues
from jrl.errors import UserError
from jrl.models.tokenizer import char_tokenizer


def rows_of(source):
    return [source[i] for i in range(len(source))]


def test_csv_with_quotes_lines_in_a_cell_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfquestion,answer\r\n"a, b?","1"\r\n\r\n"two\nlines?",2\n"c",\n')
    source = open_dataset(str(path))
    assert rows_of(source) == [
        {"question": "a, b?", "answer": "1"},
        {"question": "two\nlines?", "answer": "2"},
        {"question": "c", "answer": ""},
    ]
    assert [source.where(i).rpartition(", ")[2] for i in range(3)] == ["line 2", "line 4", "line 6"]


CSV = {
    "a,b\n1,2,3\n": "line 2: 3 values for the 2 columns a, b",
    "a,a\n1,2\n": "line 1: two columns have one name: a, a",
    'a,b\n"1,2\n': "line 2: not a CSV file: unexpected end of data; a quote that begins",
    'a,b\n1,2\n"1" + 1,2\n': "line 3: not a CSV file: .* are written twice",
    'a;b\n"1,5";2\n': "line 1: 'a;b' is one name, without ','",
    "a,b\n": "the file has no rows",
}


@pytest.mark.parametrize(
    "text",
    [
        "\na,b\n1,2\n",
        "sep=,\r\na,b\r\n1,2\r\n",
        "a,b,,\n1,2,,\n,,,\n",  # of a sheet with empty columns and rows
        ",a,b\n0,1,2\n",  # of pandas, with the number of the row
    ],
)
def test_what_programs_of_sheets_write_around_a_table_is_left_out(text, tmp_path):
    (tmp_path / "a.csv").write_text(text)
    assert rows_of(open_dataset(str(tmp_path / "a.csv"))) == [{"a": "1", "b": "2"}]


@pytest.mark.parametrize("text", CSV)
def test_csv_that_cannot_be_read(text, tmp_path):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UserError, match=CSV[text]):
        open_dataset(str(tmp_path / "a.csv"))[0]


def test_json_holds_one_list(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"a": 1}, 2]))
    source = open_dataset(str(path))
    assert source[0] == {"a": 1}
    with pytest.raises(UserError, match=r"a\.json, row 1: must hold a JSON object"):
        source[1]
    for text, message in (("{}", "must hold a list"), ("[", "not valid JSON")):
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            open_dataset(str(path))


def test_a_pattern_names_files_in_the_order_of_their_names(tmp_path):
    for number in (2, 1):
        (tmp_path / f"{number}.jsonl").write_text(f'{{"a": {number}}}\n\n{{"a": {number}5}}\n')
    source = open_dataset(str(tmp_path / "*.jsonl"))
    assert [row["a"] for row in rows_of(source)] == [1, 15, 2, 25]
    assert source.where(3) == f"{tmp_path / '2.jsonl'}, line 3"
    with pytest.raises(UserError, match="no file matches"):
        open_dataset(str(tmp_path / "*.csv"))


def test_a_mixture_has_the_parts_that_were_asked_for_and_every_row():
    sources = {
        name: MemoryRows([{"of": name, "i": i} for i in range(n)]) for name, n in SIZES.items()
    }
    mixed = Mixture(sources, {"big": 3.0, "small": 1.0, "tiny": 2.0})
    rows = rows_of(mixed)
    counts = collections.Counter(row["of"] for row in rows)
    assert counts == {"big": 60, "small": 20, "tiny": 40}
    for name, size in SIZES.items():
        visited = [row["i"] for row in rows if row["of"] == name]
        assert visited == [i % size for i in range(counts[name])]
    first = collections.Counter(row["of"] for row in rows[:12])  # they alternate from the start
    assert first == {"big": 6, "small": 2, "tiny": 4}
    assert mixed.where(0) == sources[rows[0]["of"]].where(rows[0]["i"])


SIZES = {"big": 60, "small": 7, "tiny": 2}


def test_a_mixture_of_files(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(f'{{"of": "{name}"}}\n' * 4)
    a, b = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    counts = collections.Counter(row["of"] for row in rows_of(open_dataset({a: 1.0, b: 0.5})))
    assert counts == {"a": 4, "b": 2} or counts == {"a": 8, "b": 4}
    with pytest.raises(UserError, match="the weight of .* is 0; it must be above 0"):
        open_dataset({a: 0}, key="data.train")


GOOD = {"question": "two?", "answer": "2"}


def prompts(rows, **options):
    wording = Wording(char_tokenizer(), template="plain")
    return build_prompts(MemoryRows(rows), wording, **{"max_prompt_tokens": 16} | options)


def test_rows_that_cannot_be_used_are_counted_and_left_out():
    rows = [GOOD, {"question": "no answer?"}, GOOD, {"question": 3, "answer": "1"}, GOOD]
    usable, counts = prompts(rows, invalid="skip")
    assert [prompt.id for prompt in usable] == [0, 2, 4]
    assert "3 prompts of 5 rows" in str(counts)
    assert "2 of 5 rows skipped: row 2: there is no field 'answer'" in str(counts)
    assert str(counts).endswith("; and row 4")
    with pytest.raises(UserError) as caught:
        prompts(rows)
    assert str(caught.value).startswith("row 2: there is no field 'answer'")
    assert "and 1 more rows cannot be used (row 4); data.invalid = 'skip'" in str(caught.value)


def test_a_column_system_is_said_not_to_be_read():
    """As files of Alpaca's form have it; the first row may have none, and messages their own."""
    told = "the column system of 1 rows is in no prompt: set data.system"
    rows = [{**GOOD, "system": ""}, {**GOOD, "system": "be kind"}, {**GOOD, "system": None}]
    assert told in str(prompts(rows)[1])
    assert "system" not in str(prompts(rows[::2])[1])
    wording, size = Wording(char_tokenizer(), template="plain"), {"max_prompt_tokens": 16}
    pairs = [{"prompt": "a", "chosen": "b", "rejected": "c", "system": "be kind"}]
    assert told in str(build_judged(MemoryRows(pairs), wording, **size, max_completion_tokens=8)[1])
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for messages, said in ((talk, True), ([{"role": "system", "content": "s"}, *talk], False)):
        row = {"messages": messages, "system": "be kind"}
        assert (told in str(read_dialogues(MemoryRows([row]), wording).counts)) == said
    of_all = read_dialogues(MemoryRows([row | {"messages": talk}]), wording._replace(system="s"))
    assert "system" not in str(of_all.counts)


def test_all_rows_being_wrong_is_no_reason_to_skip_them():
    rows = [{"q": "a?", "answer": "1"}, {"q": "b?", "answer": "2"}]
    for invalid in ("error", "skip"):
        with pytest.raises(UserError) as caught:
            prompts(rows, invalid=invalid)
        assert "set data.fields.question to one of q, answer" in str(caught.value)
        assert "skip" not in str(caught.value)


def test_a_long_prompt_is_not_skipped_as_a_bad_row():
    rows = [GOOD, {"question": "how many eels are there?", "answer": "2"}]
    with pytest.raises(UserError, match="row 2: the prompt has 24 tokens"):
        prompts(rows, invalid="skip")


def test_judged_rows_that_cannot_be_used():
    rows = [{"prompt": "a", "chosen": "b", "rejected": c} for c in ("c", "b", "d")]
    wording = Wording(char_tokenizer(), template="plain")
    options = {"max_prompt_tokens": 8, "max_completion_tokens": 8}
    usable, counts = build_judged(MemoryRows(rows), wording, invalid="skip", **options)
    assert [one.id for one in usable] == [0, 2]
    assert "1 of 3 rows skipped: row 2: chosen and rejected are equal" in str(counts)
    with pytest.raises(UserError, match=r"row 2: .*data.invalid = 'skip' leaves such rows out"):
        build_judged(MemoryRows(rows), wording, **options)


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_long_fields_are_read(tmp_path, suffix):
    path, mark = tmp_path / f"long.{suffix}", "," if suffix == "csv" else "\t"
    path.write_text(f"question{mark}answer\n{'x' * 200_000}{mark}4\n")
    source = open_dataset(str(path))
    assert (len(source[0]["question"]), source[0]["answer"]) == (200_000, "4")
    assert csv.field_size_limit() == 131_072  # as other readers of this process have it


def test_a_line_without_end_of_a_small_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("jrl.data.lines._LONGEST_LINE", 1000)
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"question": "' + b"x" * 5000 + b'"}'))
    with pytest.raises(UserError, match="rows.jsonl.gz, line 1: longer than 1000 bytes"):
        open_dataset(str(path))


def test_a_line_of_a_plain_file_has_a_bound_too(tmp_path, monkeypatch):
    monkeypatch.setattr("jrl.data.lines._LONGEST_LINE", 1000)
    monkeypatch.setattr("jrl.data.lines._BLOCK", 300)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": "' + bytes(2000))
    with pytest.raises(UserError, match="rows.jsonl, line 2: longer than 1000 bytes; write one"):
        open_dataset(str(path))


@pytest.mark.parametrize("text", [b'a,b\n1,"', b"a,b\n1,"])
def test_a_line_of_a_sheet_has_a_bound_too(text, tmp_path, monkeypatch):
    monkeypatch.setattr("jrl.data.tables._LONGEST", 1000)
    path = tmp_path / "rows.csv"
    path.write_bytes(text + b"x" * 2000)
    with pytest.raises(UserError, match="rows.csv, line 2: not a CSV file: a line is longer than"):
        open_dataset(str(path))


def test_a_json_list_beyond_the_memory_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    path.write_text('[{"a": 1}]')
    assert len(open_dataset(str(path))) == 1
    monkeypatch.setattr("jrl.system.memory.host_bytes", lambda: 10)
    with pytest.raises(UserError, match=r"rows.json: this takes at least .* as FILE.jsonl"):
        open_dataset(str(path))
