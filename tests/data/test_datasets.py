"""Sources: the rows that were written, errors that name file and line, and the order of visits."""

import gzip
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from jrl.data.datasets import open_dataset, order
from jrl.errors import UserError
from jrl.zoo.tools.gsm8k import prepare_gsm8k

ROWS = [
    {"question": "2 + 2?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4", "level": 1},
    {"question": "caf\u00e9 \u2028 6 * 7?", "answer": "6 * 7 = 42\n#### 42", "level": 2},
    {"question": "1000 + 1?", "answer": "#### 1,001", "level": 3},
]


def write_lines(path, *lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_jsonl_rows_can_be_read_in_any_order(tmp_path):
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    spec = write_lines(tmp_path / "a.jsonl", "", lines[0], "  ", lines[1] + "\r", "", lines[2], "")
    source = open_dataset(spec)
    assert len(source) == 3
    assert [source[i] for i in (2, 0, 1)] == [ROWS[2], ROWS[0], ROWS[1]]
    assert [source.where(i).rpartition(", ")[2] for i in range(3)] == ["line 2", "line 4", "line 6"]


def test_jsonl_without_a_last_newline_and_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"a": 1}\n{"a": 2}')
    source = open_dataset(str(path))
    assert [source[0], source[1]] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("line", "message"),
    [("{'a': 1}", "not valid JSON"), ('{"a": ', "not valid JSON"), ("[1]", "not a list")],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    source = open_dataset(write_lines(tmp_path / "a.jsonl", '{"a": 1}', "", line))
    assert source[0] == {"a": 1}
    with pytest.raises(UserError, match=rf"a\.jsonl, line 3: .*{message}"):
        source[1]


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"a": "\xff"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl, line 1: not UTF-8 text"):
        open_dataset(str(tmp_path / "a.jsonl"))[0]


def test_files_that_cannot_be_sources(tmp_path):
    with pytest.raises(UserError, match=r"there is no such file"):
        open_dataset(str(tmp_path / "none.jsonl"))
    for address in ("https://x.org/a.jsonl", "s3://b/a.jsonl", "file:///tmp/a.jsonl"):
        with pytest.raises(UserError, match="is an address, and none is fetched; download it"):
            open_dataset(address)
    with pytest.raises(UserError, match="no such file .* name several files as DIR/"):
        open_dataset(f"{tmp_path}/a.jsonl,b.jsonl")
    with pytest.raises(UserError, match="data = '': is empty; name a FILE"):
        open_dataset("")
    with pytest.raises(UserError, match="the file has no rows"):
        open_dataset(write_lines(tmp_path / "empty.jsonl", "", " "))
    with pytest.raises(UserError, match=r"name a FILE\.jsonl"):
        open_dataset(write_lines(tmp_path / "a.xlsx", "a,b"))
    with pytest.raises(UserError, match="not a readable Parquet file"):
        open_dataset(write_lines(tmp_path / "a.parquet", "PAR1"))


def test_a_directory_and_a_pipe_are_no_missing_files(tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name, problem in (("folder", "is a directory; name a FILE"), ("pipe", "is a pipe or a")):
        with pytest.raises(UserError, match=problem) as raised:
            open_dataset(str(tmp_path / f"{name}.jsonl"), key="data.train")
        assert "did you mean" not in str(raised.value)


@pytest.mark.extra("data")
def test_parquet_rows_across_row_groups(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    rows = [{"question": f"{i}?", "answer": i, "tags": [{"n": i}]} for i in range(10)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)
    source = open_dataset(str(path))
    assert len(source) == 10
    assert [source[i] for i in (9, 0, 3, 2, 8)] == [rows[i] for i in (9, 0, 3, 2, 8)]
    assert source.where(4) == f"{path}, row 4"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[:0]), path)
    with pytest.raises(UserError, match="the file has no rows"):
        open_dataset(str(path))


@pytest.mark.extra("data")
def test_parquet_adds_no_arguments_to_calls_and_no_keys_to_schemas(tmp_path):
    """Its objects have the keys of all rows; a null of another column stays."""
    import pyarrow
    import pyarrow.parquet

    def row(name, **extra):
        call = {"function": {"name": "f", "arguments": {name: 1}}}
        schema = {"type": "object", "properties": {name: {"type": "integer", **extra}}}
        tools = [{"function": {"name": "f", "parameters": schema}}]
        return {"messages": [{"role": "assistant", "tool_calls": [call]}], "tools": tools}

    rows = [row("a") | {"info": {"x": 1}}, row("b", minimum=0) | {"info": {"y": None}}]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    source = open_dataset(str(path))
    for i in (0, 1):
        assert source[i]["messages"] == rows[i]["messages"]
        assert source[i]["tools"] == rows[i]["tools"]
    assert source[0]["info"] == {"x": 1, "y": None}


@pytest.fixture(scope="module")
def tfds_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tfds")
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    files = {
        "train": write_lines(directory / "train.jsonl", *lines),
        "test": write_lines(directory / "test.jsonl", lines[1]),
    }
    prepare_gsm8k(directory, files)
    return directory


@pytest.mark.extra("tfds")
def test_gsm8k_prepared_offline_is_read_back(tfds_dir):
    source = open_dataset("tfds:gsm8k", tfds_dir=str(tfds_dir))
    assert len(source) == 3
    for i, row in enumerate(ROWS):
        read = source[i]
        assert (read["question"], read["answer"]) == (row["question"], row["answer"])
        assert read["short_answer"] == row["answer"].rpartition("#### ")[2]
    for spec in ("tfds:gsm8k:test", "tfds:gsm8k/test"):
        assert open_dataset(spec, tfds_dir=str(tfds_dir))[0]["question"] == ROWS[1]["question"]
    assert len(open_dataset("tfds:gsm8k:train[:2]", tfds_dir=str(tfds_dir))) == 2
    assert "row 1" in source.where(1)


@pytest.mark.extra("tfds")
def test_tfds_needs_no_tensorflow(tfds_dir):
    code = (
        "import sys; from jrl.data.datasets import open_dataset; "
        f"s = open_dataset('tfds:gsm8k', tfds_dir={str(tfds_dir)!r}); "
        "assert type(s[0]['question']) is str; sys.exit('tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.extra("tfds")
def test_any_prepared_tfds_dataset_with_a_config(tmp_path):
    import tensorflow_datasets as tfds

    class TinySums(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        """Sums of two numbers."""

        VERSION = tfds.core.Version("2.0.0")
        BUILDER_CONFIGS = [  # noqa: RUF012
            tfds.core.BuilderConfig(name=name, description=name) for name in ("small", "test")
        ]

        def _info(self):
            features = {
                "text": tfds.features.Text(),
                "sum": np.int64,
                "pair": tfds.features.Tensor(shape=(2,), dtype=np.float32),
                "parts": tfds.features.Sequence({"name": tfds.features.Text()}),
            }
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(3), "validation": self._generate_examples(1)}

        def _generate_examples(self, count):
            for i in range(count):
                text = f"{self.builder_config.name} {i}"
                parts = [{"name": "\u00e9"}]
                yield i, {"text": text, "sum": i, "pair": np.float32([i, 0]), "parts": parts}

    for config in ("small", "test"):
        builder = TinySums(data_dir=str(tmp_path), config=config, file_format="array_record")
        builder.download_and_prepare()
    source = open_dataset("tfds:tiny_sums/small", tfds_dir=str(tmp_path))
    row = source[2]
    assert (len(source), row["text"], row["sum"]) == (3, "small 2", 2)
    assert type(row["sum"]) is int
    assert row["pair"].tolist() == [2.0, 0.0]
    assert row["parts"]["name"] == ["\u00e9"]
    # a configuration that is named like a split is a configuration
    assert open_dataset("tfds:tiny_sums/test", tfds_dir=str(tmp_path))[0]["text"] == "test 0"
    assert len(open_dataset("tfds:tiny_sums/test:validation", tfds_dir=str(tmp_path))) == 1


@pytest.mark.extra("tfds")
def test_tfds_errors_name_what_to_set(tfds_dir, tmp_path):
    with pytest.raises(UserError, match=r"not prepared in .*python -m jrl\.zoo\.tools\.gsm8k"):
        open_dataset("tfds:gsm8k", tfds_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"Unknown split 'tset'.*TFDS_DATA_DIR"):
        open_dataset("tfds:gsm8k:tset", tfds_dir=str(tfds_dir))
    with pytest.raises(UserError, match=r"no_such_dataset.*TFDS_DATA_DIR"):
        open_dataset("tfds:no_such_dataset", tfds_dir=str(tfds_dir))
    with pytest.raises(UserError, match=r"did you mean tfds:gsm8k\?; name"):
        open_dataset("tfds:gsm9k", tfds_dir=str(tfds_dir))


@pytest.mark.extra("tfds")
def test_preparing_gsm8k_refuses_bad_lines_and_leaves_nothing(tmp_path):
    good = json.dumps(ROWS[0])
    bad = write_lines(tmp_path / "bad.jsonl", good, '{"question": "q", "answer": "4"}')
    with pytest.raises(UserError, match=r"bad\.jsonl, line 2: .* no final answer after ####"):
        prepare_gsm8k(tmp_path / "data", {"train": bad})
    bad = write_lines(tmp_path / "bad.jsonl", good, '{"question": "q"}')
    with pytest.raises(UserError, match="line 2: needs the text fields question and answer"):
        prepare_gsm8k(tmp_path / "data", {"train": bad})
    assert not (tmp_path / "data").exists()


@pytest.mark.extra("tfds")
def test_gsm8k_is_not_overwritten(tfds_dir):
    with pytest.raises(UserError, match="already exists"):
        prepare_gsm8k(tfds_dir, {"train": tfds_dir / "train.jsonl"})


@pytest.mark.extra("tfds")
def test_gsm8k_has_a_command(tmp_path):
    path = write_lines(tmp_path / "train.jsonl", json.dumps(ROWS[0]))
    command = [sys.executable, "-m", "jrl.zoo.tools.gsm8k", "--dir", str(tmp_path / "data")]
    done = subprocess.run([*command, "--train", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(open_dataset("tfds:gsm8k", tfds_dir=str(tmp_path / "data"))) == 1
    again = subprocess.run([*command, "--train", path], capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "already exists" in again.stderr
    assert "Traceback" not in again.stderr


def test_order_is_a_permutation_that_seed_and_epoch_decide():
    first = order(1, 0, 100)
    assert sorted(first) == list(range(100))
    np.testing.assert_array_equal(first, order(1, 0, 100))
    for other in (order(2, 0, 100), order(1, 1, 100), order(-1, 0, 100), order(0, 1, 100)):
        assert not np.array_equal(first, other)
    # a golden value: a change of it would reorder everyone's runs
    assert order(0, 0, 8).tolist() == GOLDEN


def test_order_is_uniform():
    places = np.zeros((5, 5))
    for seed in range(2000):
        places[np.arange(5), order(seed, 3, 5)] += 1
    assert np.abs(places - 400).max() < 90  # five standard deviations


GOLDEN = [0, 2, 1, 5, 4, 3, 6, 7]


FORMS = {
    "rows.json": b'\n{"question": "a?", "answer": 1}\n{"question": "b?", "answer": 2}\n',
    "marked.json": b'\xef\xbb\xbf{"question": "a?", "answer": 1}\n{"question": "b?", "answer": 2}',
    "rows.jsonl.gz": gzip.compress(b'{"question": "a?", "answer": 1}\n\n{"answer": 2}\n'),
    "rows.tsv": b"question\tanswer\na, or b?\t1\nc?\t2\n",
    "list.json": b'[{"question": "a?", "answer": 1},\n{"answer": 2}]',
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_files(name, tmp_path):
    (tmp_path / name).write_bytes(FORMS[name])
    source = open_dataset(str(tmp_path / name))
    assert [str(source[i]["answer"]) for i in range(len(source))] == ["1", "2"]
    assert str(tmp_path / name) in source.where(1)


def test_of_a_pattern_every_file_must_be_rows(tmp_path):
    (tmp_path / "a.tsv").write_text("x\n1\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"[]\n"))
    assert open_dataset(str(tmp_path / "*.tsv"))[0] == {"x": "1"}
    with pytest.raises(UserError, match="line 1: must hold a JSON object"):
        open_dataset(str(tmp_path / "*.jsonl.gz"))[0]


def test_episodes_of_environments_with_problems_of_their_own_need_no_file():
    source = open_dataset("episodes:3")
    assert [source[i]["question"] for i in range(len(source))] == [
        *("Episode 1.", "Episode 2.", "Episode 3.")
    ]
    for wrong in ("episodes:", "episodes:0", "episodes:-1", "episodes:1e3", "episodes:99999999"):
        with pytest.raises(UserError, match=r"data = 'episodes:.*'; write episodes:N"):
            open_dataset(wrong)
