"""Names of the Hugging Face Hub, against a cache that lies on disk as huggingface_hub writes it."""

import errno
import types

import pytest
from hub_mirror import COMMITS, add, lines

from jrl import hub
from jrl.data.datasets import open_dataset
from jrl.errors import UserError
from jrl.hub import HubName, chosen_files, data_files, hub_name, model_directory, pinned_name
from jrl.models.hf import read_config

ROWS = [{"question": f"{i}?", "answer": str(i)} for i in range(3)]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


NAMES = {
    "Qwen/Qwen3-0.6B": HubName("Qwen/Qwen3-0.6B"),
    "Qwen/Qwen3-0.6B@v1": HubName("Qwen/Qwen3-0.6B", revision="v1"),
    "openai/gsm8k/main:test@refs/pr/1": HubName("openai/gsm8k", "main", "test", "refs/pr/1"),
    "hf:data/train.jsonl": HubName("data/train.jsonl"),
    "data/train.jsonl": None,
    "configs/tny.toml": None,
    "shards/a.jsonl.gz": None,
    "a/b/c/d": None,
    "./a/b": None,
    "/a/b": None,
    "gsm8k": None,
    "tfds:gsm8k/main": None,
    "shards/*.jsonl": None,
}


@pytest.mark.parametrize("spec", NAMES)
def test_names(spec, cache):
    assert hub_name(spec) == NAMES[spec]


def test_a_directory_of_that_name_comes_first(cache, tmp_path):
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert hub_name("org/model") is None
    assert str(model_directory("org/model")) == "org/model"
    assert hub_name("hf:org/model") == HubName("org/model")


def test_a_model_of_the_cache(cache):
    path = add(cache, "org/model", "model", {"config.json": "{}"})
    assert model_directory("org/model") == path
    other = add(cache, "org/model", "model", {"config.json": "{}"}, commit=COMMITS["second"])
    assert model_directory(f"org/model@{COMMITS['first']}") == path
    hub._snapshot.cache_clear()
    assert model_directory("org/model") == other
    assert pinned_name("org/model", "model", "model.path") == f"org/model@{COMMITS['second']}"
    pinned = f"org/model@{COMMITS['first']}"
    assert pinned_name(pinned, "model", "model.path") == pinned
    assert pinned_name("here.jsonl", "dataset", "data.train") == "here.jsonl"


def test_what_is_not_there_is_said_with_the_place_and_the_nearest(cache):
    add(cache, "org/model-small", "model", {"config.json": "{}"})
    with pytest.raises(UserError) as caught:
        model_directory("org/model-smal", "frozen.ref")
    message = str(caught.value)
    assert message.startswith("frozen.ref = 'org/model-smal': there is no such directory in ")
    for part in ("HF_HUB_OFFLINE is set", str(cache), "did you mean org/model-small"):
        assert part in message
    assert "\n" not in message


CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*.parquet}
  - {split: test, path: [main/test-*.parquet]}
- config_name: socratic
  data_files: socratic/*.jsonl
---
# GSM8K
"""
GSM8K = ["README.md", "main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"]
SOCRATIC = ["socratic/a.jsonl", "socratic/b.jsonl"]
GSM8K += SOCRATIC
LAYOUTS = {
    "the card": (GSM8K, CARD, "o/n/main:test", ["main/test-00000-of-00001.parquet"]),
    "a pattern": (GSM8K, CARD, "o/n/socratic", ["socratic/a.jsonl", "socratic/b.jsonl"]),
    "names": (["data/train-0.parquet", "data/test-0.parquet"], "", "o/n", ["data/train-0.parquet"]),
    "folders": (["train/0.csv", "validation/0.csv"], "", "o/n:validation", ["validation/0.csv"]),
    "converted": (["main/train/0000.parquet", "alt/train/0.parquet"], "", "o/n/alt", None),
    "one file": (["all.jsonl", "notes.txt"], "", "o/n", ["all.jsonl"]),
    "not a split": (["latest_contest.json"], "", "o/n", ["latest_contest.json"]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_files_of_a_split(name, tmp_path):
    files, card, spec, expected = LAYOUTS[name]
    (tmp_path / "README.md").write_text(card)
    files_of_split = chosen_files(files, hub._card(tmp_path), hub_name(spec), "data.train")
    assert files_of_split == (expected or ["alt/train/0.parquet"])


REFUSED = {
    "o/n": "name one of its configurations: o/n/main, o/n/socratic",
    "o/n/main:dev": "there is no split 'dev'; choose o/n/main:train, o/n/main:test",
}


@pytest.mark.parametrize("spec", REFUSED)
def test_what_a_data_set_does_not_have(spec, tmp_path):
    (tmp_path / "README.md").write_text(CARD)
    with pytest.raises(UserError) as caught:
        chosen_files(GSM8K, hub._card(tmp_path), hub_name(spec), "data.train")
    assert REFUSED[spec] in str(caught.value)
    pinned = hub_name(f"{spec}@{COMMITS['first']}")  # as a run has it; nobody wrote the commit
    with pytest.raises(UserError) as caught:
        chosen_files(GSM8K, hub._card(tmp_path), pinned, "data.train")
    assert REFUSED[spec] in str(caught.value)
    assert COMMITS["first"] not in str(caught.value)
    with pytest.raises(UserError, match="holds no .csv, .json"):
        chosen_files(["script.py"], {}, hub_name("o/n"), "data.train")


def test_rows_of_a_data_set(cache):
    files = {"README.md": CARD, "socratic/a.jsonl": lines(ROWS[:2]), "socratic/b.jsonl": "\n"}
    path = add(cache, "openai/gsm8k", "dataset", files)
    source = open_dataset("openai/gsm8k/socratic")
    assert [source[i] for i in range(len(source))] == ROWS[:2]
    assert source.where(1) == f"{path}/socratic/a.jsonl, line 2"
    assert data_files(hub_name("openai/gsm8k/socratic:train"), "data.train")[0].is_file()
    pinned = pinned_name("openai/gsm8k/socratic:train", "dataset", "data.train")
    assert pinned == f"openai/gsm8k/socratic:train@{COMMITS['first']}"
    near = r"data.eval = 'openai/gsm9k/main': .*did you mean openai/gsm8k/main, which is there"
    with pytest.raises(UserError, match=near):
        open_dataset("openai/gsm9k/main", key="data.eval")


def test_a_checkpoint_that_is_not_there_has_neighbours(cache, tmp_path):
    add(cache, "Qwen/Qwen3-0.6B", "model", {"config.json": "{}"})
    (tmp_path / "model").mkdir()
    for name, near in {"modle": "model", "qwen3-0.6B": "Qwen/Qwen3-0.6B"}.items():
        with pytest.raises(UserError) as caught:
            read_config(name)
        message = f"{name}/config.json: no such file (looked in {tmp_path}); did you mean {near}?"
        assert str(caught.value).startswith(message)
    with pytest.raises(
        UserError, match=r"model/config.json: no such file \(looked in [^;]*\); give"
    ):
        read_config("model")


A, B = "a/train.jsonl", "b/train.jsonl"
CARDS = {  # configs of a card, files, what is asked for -> files
    "any folders": ("[{data_files: 'd/**/t-*'}]", "d/x/y/t-0.csv d/t-1.csv e/t.csv", "o/n", "01"),
    "one folder": ("[{data_files: 'd/*.csv'}]", "d/0.csv d/x/1.csv", "o/n", "0"),
    "all below": ("[{data_files: 'd/**'}]", "d/0.csv d/x/1.csv e.csv", "o/n", "01"),
    "classes": ("[{data_files: './d-[0-1].cs?'}]", "d-0.csv d-1.csv d-2.csv", "o/n", "01"),
    "no class": ("[{data_files: 'd-[9-0].csv'}, {}]", "d-0.csv", "o/n", "0"),
    "data_dir": ("[{config_name: a, data_dir: a}, {config_name: b}]", f"{A} {B}", "o/n/a", "0"),
    "in data_dir": ("[{data_dir: ./b/, data_files: '*.jsonl'}]", f"{A} {B}", "o/n", "1"),
    "default": (
        "[{config_name: a, data_dir: a}, {config_name: b, data_dir: b, default: true}]",
        *(f"{A} {B}", "o/n", "1"),
    ),
    "a table": ("[{data_files: {train: b/*, test: a/*}}]", f"{A} {B}", "o/n:test", "0"),
    "about the data": ("[]", "dataset_infos.json meta.json rows.json", "o/n", "2"),
    "one form": ("[]", "train-0.parquet train-1.parquet train.csv", "o/n", "01"),
    "only that": ("[]", "meta.json", "o/n", "0"),
    "compressed": ("[]", "test.tsv train.jsonl.gz train.gz", "o/n", "1"),
}


@pytest.mark.parametrize("name", CARDS)
def test_the_files_that_a_card_names(name, tmp_path):
    configs, files, spec, expected = CARDS[name]
    (tmp_path / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")
    chosen = chosen_files(files.split(), hub._card(tmp_path), hub_name(spec), "data.train")
    assert chosen == sorted(files.split()[int(each)] for each in expected)


@pytest.mark.parametrize("configs", ["hello", "[hello]", "[{data_files: 3}]", "{a: b}"])
def test_a_card_that_cannot_be_read_is_said(configs, tmp_path):
    (tmp_path / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")
    with pytest.raises(UserError, match=r"data.train = 'o/n': '\w+' in its README.md") as caught:
        chosen_files(["a.csv"], hub._card(tmp_path), hub_name("o/n"), "data.train")
    assert "\n" not in str(caught.value)


def test_a_card_in_another_encoding_still_counts(tmp_path):
    configs = b"---\nconfigs: [{config_name: x, data_files: b.csv}]\n---\n\xff\xfe"
    (tmp_path / "README.md").write_bytes(configs)
    chosen = chosen_files(["a.csv", "b.csv"], hub._card(tmp_path), hub_name("o/n"), "data.train")
    assert chosen == ["b.csv"]


@pytest.fixture
def online(cache, monkeypatch):
    """As if the Hub could be asked: what it is asked, and an answer of our own."""
    import huggingface_hub

    monkeypatch.delenv("HF_HUB_OFFLINE")
    hub._snapshot.cache_clear()
    real, requests, answers = huggingface_hub.snapshot_download, [], {}
    ignored = {}

    def snapshot_download(repo, *, local_files_only, **about):
        ignored[about["repo_type"]] = about["ignore_patterns"]
        if not local_files_only:
            requests.append((repo, about["revision"], about["allow_patterns"]))
            if "error" in answers:
                raise answers["error"]
        return real(repo, local_files_only=True, **about)

    class Api:
        def dataset_info(self, repo, revision):
            if "files" not in answers:
                raise ConnectionError
            files = [types.SimpleNamespace(rfilename=name) for name in answers["files"]]
            return types.SimpleNamespace(sha=COMMITS["first"], siblings=files)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    return types.SimpleNamespace(asked=requests, answers=answers, ignored=ignored)


def test_a_hub_that_cannot_be_reached_leaves_the_cache(cache, online):
    path = add(cache, "org/model", "model", {"config.json": "{}"})
    online.answers["error"] = ConnectionError("no route")
    assert model_directory("org/model") == path
    with pytest.raises(UserError, match=r"the Hub could not be reached \(ConnectionError\)"):
        model_directory("org/other")


DISK = {
    "full": OSError(errno.ENOSPC, "No space left on device"),
    "read-only": OSError(errno.EROFS, "Read-only file system", "/cache"),
    "of another": PermissionError(errno.EACCES, "Permission denied", "/cache"),
}


@pytest.mark.parametrize("name", DISK)
def test_a_cache_that_cannot_be_written_is_no_hub_that_cannot_be_reached(name, cache, online):
    wrapped = RuntimeError("while downloading")
    wrapped.__cause__ = DISK[name]
    for error in (DISK[name], wrapped):
        online.answers["error"] = error
        with pytest.raises(UserError) as caught:
            model_directory("org/other")
        problem = f"the cache {cache} cannot be written: {DISK[name].strerror}"
        remedy = "set HF_HUB_CACHE to a directory with room"
        assert str(caught.value) == f"model.path = 'org/other': {problem}; {remedy}"
    path = add(cache, "org/other", "model", {"config.json": "{}"})
    assert model_directory("org/other") == path  # nothing has to be written
    online.answers["error"] = PermissionError(errno.EACCES, "Permission denied")  # of a connection
    with pytest.raises(UserError, match="the Hub could not be reached"):
        model_directory("org/none")


def test_files_of_other_forms_are_left_out_of_models_and_not_of_data_sets(cache, online):
    add(cache, "o/m", "model", {"config.json": "{}"})
    add(cache, "o/d", "dataset", {"original/train.jsonl": lines(ROWS)})
    online.answers["files"] = ["original/train.jsonl"]
    model_directory("o/m")
    assert len(open_dataset("o/d")) == len(ROWS)
    assert {"original/*", "consolidated*.safetensors"} <= set(online.ignored["model"])
    assert online.ignored["dataset"] is None


def listing(monkeypatch, names):
    """The listing of a commit, which newer versions of huggingface_hub keep."""
    files = [types.SimpleNamespace(path=name) for name in names]
    listed = lambda repo, **how: files  # noqa: E731
    monkeypatch.setattr("huggingface_hub.get_cached_repo_tree", listed, raising=False)


def test_offline_only_the_files_of_the_split_must_be_there(cache, monkeypatch):
    files = {"README.md": CARD, "socratic/a.jsonl": lines(ROWS), "socratic/b.jsonl": "\n"}
    path = add(cache, "o/n", "dataset", files)
    listing(monkeypatch, GSM8K)
    hub._snapshot.cache_clear()
    for name in ("o/n/socratic", f"o/n/socratic@{COMMITS['first']}"):
        assert data_files(hub_name(name), "data.train")[0] == path / "socratic" / "a.jsonl"
    with pytest.raises(UserError, match=r"HF_HUB_OFFLINE is set.*does not hold it"):
        data_files(hub_name("o/n/main:test"), "data.eval")
    (path / "socratic" / "b.jsonl").unlink()  # a split of which one file is missing
    hub._snapshot.cache_clear()
    with pytest.raises(UserError, match=r"HF_HUB_OFFLINE is set.*does not hold it"):
        data_files(hub_name("o/n/socratic"), "data.train")


def test_a_file_of_a_split_that_was_not_fetched_is_named(cache, online):
    """Older versions of the library return any folder that is there."""
    add(cache, "o/n", "dataset", {"README.md": CARD, SOCRATIC[0]: lines(ROWS)})
    online.answers["files"] = GSM8K
    with pytest.raises(UserError, match="not all of its files were fetched"):
        data_files(hub_name("o/n/socratic"), "data.train")


def test_of_a_pinned_data_set_only_the_split_s_files_are_fetched(cache, online):
    """A run pins first, which fetches the card."""
    files = {"README.md": CARD, **dict.fromkeys(SOCRATIC, lines(ROWS))}
    path = add(cache, "o/n", "dataset", files)
    online.answers["files"] = [*GSM8K, "socratic/a.jsonl"]
    pinned = pinned_name("o/n/socratic", "dataset", "data.train")
    fetched = data_files(hub_name(pinned), "data.train")
    assert fetched[0] == path / "socratic" / "a.jsonl"
    patterns_asked = {pattern for repo, _, patterns in online.asked for pattern in patterns}
    assert patterns_asked == {"README.md", "socratic/a.jsonl", "socratic/b.jsonl"}


def test_of_a_data_set_only_the_split_s_files_are_fetched(cache, online):
    files = {"README.md": CARD, **dict.fromkeys(SOCRATIC, lines(ROWS))}
    path = add(cache, "o/n", "dataset", files)
    online.answers["files"] = [*GSM8K, "socratic/a.jsonl"]
    fetched = data_files(hub_name("o/n/socratic"), "data.train")
    assert fetched[0] == path / "socratic" / "a.jsonl"
    patterns_asked = {pattern for repo, _, patterns in online.asked for pattern in patterns}
    assert patterns_asked == {"README.md", "socratic/a.jsonl", "socratic/b.jsonl"}
    assert {revision for _, revision, _ in online.asked} == {COMMITS["first"]}
