"""Models and data sets of the Hugging Face Hub by name, through huggingface_hub and its cache.

    ORG/NAME[@REVISION]                       a model
    ORG/NAME[/CONFIG][:SPLIT][@REVISION]      a data set; ``hf:`` in front says so where it could
                                              also be a file

A directory or file of that name comes first. What is in the cache (HF_HUB_CACHE) is used without a
network where HF_HUB_OFFLINE=1, where the Hub cannot be reached, and where the revision is a commit.
Of a data set only the files of the split that is asked for are fetched.
"""

from __future__ import annotations

import difflib
import errno
import functools
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from jrl.errors import UserError

DATA_SUFFIXES = (".csv", ".json", ".jsonl", ".jsonl.gz", ".parquet", ".tsv")
"""Suffixes of the files of rows that are read."""

_FORMS = ((".parquet",), (".json", ".jsonl", ".jsonl.gz"), (".csv", ".tsv"))
"""Suffixes of one form. Of files that lie together in several forms, ``datasets`` reads one."""

_NOT_ROWS = frozenset(
    f"{name}.json"
    for name in (
        *("config", "dataset_dict", "dataset_info", "dataset_infos", "meta", "metadata", "state"),
        *("croissant", "schema", "special_tokens_map", "stats", "tokenizer", "tokenizer_config"),
    )
)
"""Files that describe a data set; rows only where its card says so, or where it holds no others."""

MODEL_FILES = (
    *("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt"),
    "additional_chat_templates/*",
)
_NOT_OURS = (
    *("original/*", "onnx/*", "openvino/*", "*.bin", "*.pth", "*.gguf"),
    "consolidated*.safetensors",
)
"""Files of a model that are not read, such as its weights in another form once more."""

Kind = Literal["model", "dataset"]

_OFFLINE = "HF_HUB_OFFLINE is set, so the Hub was not asked"

_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(
    rf"(?P<hf>hf:)?(?P<repo>{_PART}/{_PART})(?:/(?P<config>{_PART}))?"
    r"(?::(?P<split>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILES = (".gz", ".py", ".toml", ".txt", ".xlsx", ".zip")
"""Suffixes of other files: a name with one is that of a file that is not there."""

_SPLITS = ("train", "test", "validation", "valid", "val", "dev")


class HubName(NamedTuple):
    """A parsed Hub name.

    Attributes:
      repo: ORG/NAME.
      config: of a data set, or None.
      split: of a data set, or None.
      revision: a branch, a tag or a commit, or None for the newest.
    """

    repo: str
    config: str | None = None
    split: str | None = None
    revision: str | None = None

    @property
    def pinned(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return bool(self.revision and _COMMIT.fullmatch(self.revision))

    def __str__(self) -> str:
        """The name as it is written."""
        parts = (("/", self.config), (":", self.split), ("@", self.revision))
        return self.repo + "".join(f"{mark}{part}" for mark, part in parts if part)


def hub_name(spec: str) -> HubName | None:
    """The parsed Hub name, or None for a file or directory.

    >>> hub_name("openai/gsm8k/main:test")
    HubName(repo='openai/gsm8k', config='main', split='test', revision=None)
    >>> hub_name("data/train.jsonl") is hub_name("./model") is None
    True
    """
    match = _NAME.fullmatch(spec)
    if match is None:
        return None
    fields = match.groupdict()
    suffix = PurePosixPath(fields["config"] or fields["repo"]).suffix
    if fields.pop("hf") is None and (suffix in (*DATA_SUFFIXES, *_FILES) or Path(spec).exists()):
        return None
    return HubName(**fields)


def model_directory(spec: str | os.PathLike[str], key: str = "model.path") -> Path:
    """The directory of a checkpoint, fetched from the Hub where it is named by ORG/NAME.

    Args:
      spec: a directory, or ORG/NAME[@REVISION]. A directory that is not there comes back as it is.
      key: the configuration key that names it, for messages.

    Raises:
      UserError: neither the working directory nor the Hub (or, offline, its cache) has it.
    """
    name = hub_name(str(spec))
    if name is None or name.config or name.split:
        return Path(spec).expanduser()
    return _fetched(name, "model", key, MODEL_FILES)


def near_models(directory: Path) -> str:
    """The searched directory, and the nearest names there and in the Hub's cache."""
    place = directory.absolute().parent
    siblings = (
        [path.name for path in place.glob("*") if path.is_dir() and path.name != directory.name]
        if place.is_dir()
        else []
    )
    nearest = [f"{directory.parent / each}" for each in _nearest(directory.name, siblings)]
    of_hub = {name.rpartition("/")[2]: name for name in _in_cache("model")}
    nearest += [of_hub[each] for each in _nearest(directory.name, of_hub)]
    hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
    return f"(looked in {place}{'' if place.is_dir() else ', which is not there'}){hint}"


def _nearest(name: str, names: Iterable[str]) -> list[str]:
    """The nearest of some names, whatever their case."""
    lower = {each.lower(): each for each in names}
    return [lower[each] for each in difflib.get_close_matches(name.lower(), lower, n=1)]


def _in_cache(kind: Kind) -> list[str]:
    """ORG/NAME of what huggingface_hub keeps on this disk."""
    start = f"{kind}s--"
    folders = cache_directory().glob(f"{start}*")
    return sorted(p.name.removeprefix(start).replace("--", "/", 1) for p in folders)


def data_files(name: HubName, key: str) -> list[Path]:
    """The files that hold a split of a data set, in the order of their names.

    Args:
      name: of the data set.
      key: the configuration key that names it, for messages.

    Raises:
      UserError: no such data set, configuration or split (those there are named), or none of its
        files has a form that is read.
    """
    listing = _listed(name)
    if listing is not None:
        commit, names = listing
        name = name._replace(revision=commit)
        card = _fetched(name, "dataset", key, ("README.md",)) if "README.md" in names else None
        selected = chosen_files(names, _card(card), name, key)
        directory = _fetched(name, "dataset", key, tuple(selected))
        if not all((directory / file).exists() for file in selected):
            reason = _OFFLINE if offline() else "not all of its files were fetched"
            raise _not_found(name, "dataset", key, reason)
        return [directory / file for file in selected]
    directory = _fetched(name, "dataset", key, ("README.md",))
    names = [path.relative_to(directory).as_posix() for path in directory.rglob("*")]
    return [directory / file for file in chosen_files(names, _card(directory), name, key)]


def pinned_name(spec: str, kind: Kind, key: str) -> str:
    """The name with its current commit; a file or directory unchanged."""
    name = hub_name(spec)
    if name is None or name.pinned or (kind == "model" and (name.config or name.split)):
        return spec
    patterns = MODEL_FILES if kind == "model" else ("README.md",)
    commit = _fetched(name, kind, key, patterns).name
    return ("hf:" if spec.startswith("hf:") else "") + str(name._replace(revision=commit))


def cache_directory() -> Path:
    """The cache directory of huggingface_hub."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    home = Path(os.environ.get("HF_HOME") or caches / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()


def offline() -> bool:
    """Whether the environment forbids to ask the Hub."""
    flag = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return flag.upper() in ("1", "ON", "YES", "TRUE")


# ---------------------------------------------------------------- which files are a split


def chosen_files(
    files: Iterable[str], card: Mapping[str, Any], name: HubName, key: str
) -> list[str]:
    """Files of a dataset for the named configuration and split.

    As ``datasets`` finds them: by the ``configs`` of the card, else by "train", "test" and so on
    in the names of files and directories.

    Args:
      files: of the repository, relative.
      card: the front matter of its README.md.
      name: what is asked for; without a configuration the only one, or "default"; without a split
        "train".
      key: the configuration key that names it, for messages.

    Raises:
      UserError: see ``data_files``.
    """
    paths = [file for file in sorted(files) if file.endswith(DATA_SUFFIXES)]
    table, default = _of_card(paths, card, f"{key} = {str(name)!r}")
    table = table or _of_names(paths)
    name = name._replace(revision=None) if name.pinned else name  # nobody wrote the commit
    if not table:
        raise UserError(
            f"{key} = {str(name)!r}: the data set holds no {', '.join(DATA_SUFFIXES)} file; one"
            " that is made by a script has them at @refs/convert/parquet"
        )
    config = name.config or (next(iter(table)) if len(table) == 1 else default)
    if config not in table:
        choices = ", ".join(f"{name.repo}/{each}" for each in table)
        raise UserError(f"{key} = {str(name)!r}: name one of its configurations: {choices}")
    split = name.split or "train"
    if split not in table[config]:
        choices = ", ".join(str(name._replace(split=each)) for each in table[config])
        raise UserError(f"{key} = {str(name)!r}: there is no split {split!r}; choose {choices}")
    return table[config][split]


def _of_card(
    files: list[str], card: Mapping[str, Any], setting: str
) -> tuple[dict[str, dict[str, list[str]]], str]:
    """The files of every configuration and split of a card, and the default configuration."""
    table: dict[str, dict[str, list[str]]] = {}
    default = "default"
    configs = card.get("configs") or []
    if not isinstance(configs, list) or not all(isinstance(each, Mapping) for each in configs):
        raise UserError(
            f"{setting}: 'configs' in its README.md is {configs!r:.60}, not a list of tables with"
            " config_name and data_files; datasets refuses it too"
        )
    for config in configs:
        name, folder = str(config.get("config_name", "default")), str(config.get("data_dir") or "")
        folder = folder.removeprefix("./").strip("/")
        inside = [file for file in files if not folder or file.startswith(f"{folder}/")]
        if splits := _splits(inside, config.get("data_files"), folder, setting):
            table[name] = splits
            default = name if config.get("default") is True else default
    return table, default


def _splits(files: list[str], entries: Any, folder: str, setting: str) -> dict[str, list[str]]:
    """The files of each split, by the ``data_files`` of a configuration or else by their names."""
    splits: dict[str, list[str]] = {}
    if not entries:
        for each in _of_names(files).values():
            for split, matching in each.items():
                splits.setdefault(split, []).extend(matching)
        return splits
    if isinstance(entries, Mapping) and "path" not in entries:
        entries = [{"split": split, "path": path} for split, path in entries.items()]
    parts = entries if isinstance(entries, list) else [entries]
    for part in parts:
        part = {"path": part} if isinstance(part, str) else part
        paths = part.get("path") if isinstance(part, Mapping) else None
        paths = [paths] if isinstance(paths, str) else paths
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise UserError(
                f"{setting}: 'data_files' in its README.md has {part!r:.60}, not a path or a table"
                " with split and path; datasets refuses it too"
            )
        patterns = [_glob(f"{folder}/{path}" if folder else path) for path in paths]
        matching = [file for file in files if any(each.fullmatch(file) for each in patterns)]
        if matching:
            splits.setdefault(str(part.get("split", "train")), []).extend(matching)
    return splits


def _glob(pattern: str) -> re.Pattern[str]:
    """A pattern of paths as the Hub reads it: ``*`` stays in a folder, ``**/`` is any number."""
    tokens = re.findall(r"\*\*/|\*\*|\*|\?|\[!?[^\]/]+\]|.", pattern.removeprefix("./"))
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    try:
        return re.compile("".join(parts.get(each) or _class(each) for each in tokens), re.DOTALL)
    except re.error:  # such as [z-a]
        return re.compile(re.escape(pattern))


def _class(text: str) -> str:
    """A regular expression of a pattern's next letter or class of letters, such as ``[0-9]``."""
    if len(text) == 1:
        return re.escape(text)
    inside = re.sub(r"([\\^&~|\[])", r"\\\1", text[1:-1].removeprefix("!"))
    return f"[{'^' if text.startswith('[!') else ''}{inside}]"


def _of_names(files: list[str]) -> dict[str, dict[str, list[str]]]:
    table: dict[str, dict[str, list[str]]] = {}
    files = [f for f in files if PurePosixPath(f).name not in _NOT_ROWS] or files
    for file in files:
        *folders, last = PurePosixPath(file).with_suffix("").parts
        split = next((s for part in (last, *reversed(folders)) if (s := _split_in(part))), "train")
        named = [f for f in folders if f != "data" and not _split_in(f)]
        table.setdefault(named[0] if named else "default", {}).setdefault(split, []).append(file)
    return {c: {split: _one_form(f) for split, f in splits.items()} for c, splits in table.items()}


def _one_form(files: list[str]) -> list[str]:
    """A split's files of the most common format, since others would repeat its rows."""
    return max(([f for f in files if f.endswith(form)] for form in _FORMS), key=len)


def _split_in(part: str) -> str | None:
    words = re.split(r"[^a-z]+", part.lower())
    return next((split for split in _SPLITS if split in words), None)


def _card(directory: Path | None) -> dict[str, Any]:
    """The front matter of a data set's README.md; {} without one."""
    path = directory / "README.md" if directory is not None else None
    if path is None or not path.is_file():
        return {}
    import yaml

    # Only the front matter counts; a letter in another encoding below it must not end a run.
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    header = re.match(r"---\s*\n(.*?)\n---", text, flags=re.DOTALL)
    try:
        card = yaml.safe_load(header[1]) if header else {}
    except yaml.YAMLError:
        return {}
    return card if isinstance(card, dict) else {}


# ---------------------------------------------------------------- the Hub and its cache


def _listed(name: HubName) -> tuple[str | None, list[str]] | None:
    """The revision of a data set and all its files; None where neither Hub nor cache tells."""
    cached = _listed_in_cache(name)
    if offline() or (name.pinned and cached is not None):
        return cached
    from huggingface_hub import HfApi

    try:
        info = HfApi().dataset_info(name.repo, revision=name.revision)
    except Exception:  # whatever is wrong, the cache is asked next and says what
        return cached
    return str(info.sha), [str(file.rfilename) for file in info.siblings or ()]


def _listed_in_cache(name: HubName) -> tuple[str | None, list[str]] | None:
    """The listing that newer versions of huggingface_hub keep beside what they fetch."""
    import huggingface_hub

    cached_tree = getattr(huggingface_hub, "get_cached_repo_tree", None)
    if cached_tree is None:
        return None
    try:
        files = cached_tree(
            name.repo, repo_type="dataset", revision=name.revision, cache_dir=cache_directory()
        )
    except Exception:  # of another version, or none is kept
        return None
    return name.revision, [str(file.path) for file in files]


@functools.lru_cache(maxsize=64)
def _snapshot(name: HubName, kind: Kind, patterns: tuple[str, ...], cache: str, local: bool) -> str:
    from huggingface_hub import snapshot_download

    return str(
        snapshot_download(
            name.repo,
            repo_type=kind,
            revision=name.revision,
            cache_dir=cache,
            allow_patterns=list(patterns),
            ignore_patterns=list(_NOT_OURS) if kind == "model" else None,
            local_files_only=local,
        )
    )


def _fetched(name: HubName, kind: Kind, key: str, patterns: tuple[str, ...]) -> Path:
    """The directory that holds these files of a repository at a commit."""
    from huggingface_hub import errors

    requested = name
    name, cache = name._replace(config=None, split=None), str(cache_directory())
    why, unwritable = _OFFLINE, None
    if not offline():
        try:
            return Path(_snapshot(name, kind, patterns, cache, False))
        except errors.GatedRepoError:
            why = (
                f"the Hub gives it to those who accepted its terms; see huggingface.co/{name.repo}"
            )
        except errors.RevisionNotFoundError:
            why = f"the Hub has it, without a revision {name.revision!r}"
        except errors.RepositoryNotFoundError:
            why = "the Hub has none of that name (or it is private: log in with `hf auth login`)"
        except Exception as error:
            why = f"the Hub could not be reached ({type(error.__cause__ or error).__name__})"
            unwritable = _of_disk(error)
    try:
        return Path(_snapshot(name, kind, patterns, cache, True))
    except Exception:
        if unwritable is not None:
            raise UserError(
                f"{key} = {str(requested)!r}: the cache {cache} cannot be written:"
                f" {unwritable.strerror}; set HF_HUB_CACHE to a directory with room"
            ) from None
        raise _not_found(requested, kind, key, why) from None


def _of_disk(error: BaseException | None) -> OSError | None:
    """The error of a disk that is full or may not be written, in an error or what caused it."""
    while error is not None:
        if isinstance(error, OSError) and (
            error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
            # Those of a connection name no file.
            or (error.errno in (errno.EACCES, errno.EPERM) and error.filename is not None)
        ):
            return error
        error = error.__cause__ or error.__context__
    return None


def _not_found(name: HubName, kind: Kind, key: str, why: str) -> UserError:
    nearest = difflib.get_close_matches(name.repo, _in_cache(kind), n=1)
    other = nearest and nearest[0] != name.repo
    hint = f"; did you mean {name._replace(repo=nearest[0])}, which is there?" if other else ""
    kind_text = "directory" if kind == "model" else "file"
    return UserError(
        f"{key} = {str(name)!r}: there is no such {kind_text} in {Path.cwd()}, {why}, and its cache"
        f" {cache_directory()} does not hold it{hint}"
    )
