"""The model card of an exported policy: README.md with the Hub's metadata in front."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from jrl.config import Config, as_tree
from jrl.config.write import flatten
from jrl.errors import UserError
from jrl.hub import hub_name
from jrl.methods import show_method
from jrl.storage.metrics import read_jsonl, read_summary, write_atomic
from jrl.system.extras import version

MOST_METRICS = 12
_SPOKEN = ("accuracy_before", "accuracy_after", "steps", "train_seconds", "tokens")
_PRIVATE = ("run", "log", "reward_pool", "checkpoint")
"""Tables that say where a run was, not what it learnt."""
_BARE = re.compile(r"[\w-]+")
_PLAIN = re.compile(r"[A-Za-z][\w./:@-]*")
_DIRECTORIES = re.compile(r"""(?<![\w:/.])/(?:[^\s"':=,{}\[\]/]+/)+""")
"""The directories of an absolute path."""


def model_card(config: Config, *, step: int, name: str, adapters: bool = False) -> str:
    """The text of a model card.

    It names the base model, the method with its paper, the data, the metrics of the run's end and
    the settings to run it again; secrets and paths of this machine are left out.

    Args:
      config: of the run.
      step: training steps of the weights.
      name: OWNER/NAME, or the directory's.
      adapters: whether the directory holds adapters alone.
    """
    method = _method(config.method)
    base, sets = base_name(config), _data(config)
    front: dict[str, Any] = {"library_name": "peft" if adapters else "transformers"}
    if hub_name(config.model.path or "") is not None:  # the Hub makes a link of it
        front |= {"base_model": base, "base_model_relation": "adapter" if adapters else "finetune"}
    if (license_name := base_license(config)) is not None:
        front["license"] = license_name
    front |= {"tags": ["jrl", "reinforcement-learning", method["name"]]}
    if hub_sets := [hub.repo for each in sets if (hub := hub_name(each)) is not None]:
        front["datasets"] = list(dict.fromkeys(hub_sets))
    paper = f" ({method['paper']})" if method["paper"] else ""
    rows = [
        ("base model", base or "none: random weights"),
        ("license", license_name or "not known; that of the base model applies"),
        ("method", f"`{method['name']}`{paper}"),
        ("data", ", ".join(f"`{each}`" for each in sets) or "not named"),
        ("training steps", str(step)),
        ("library", f"JRL {version()}"),
    ]
    lines = ["---", yaml.safe_dump(front, sort_keys=False).rstrip(), "---", f"# {name}", ""]
    lines += [f"Trained with `{method['name']}` by JRL.", "", "| | |", "| --- | --- |"]
    lines += [f"| {key} | {value} |" for key, value in rows]
    lines += ["", "## Metrics", "", *_metrics(config), "", "## Train it again", ""]
    lines += [f"    {_command(config)}", ""]
    return "\n".join(lines)


def write_card(directory: Path, text: str) -> None:
    """Writes README.md into an exported directory.

    Raises:
      UserError: it cannot be written.
    """
    try:
        write_atomic(directory / "README.md", text)
    except OSError as error:
        raise UserError(f"{directory / 'README.md'} cannot be written: {error}") from None


def base_license(config: Config) -> str | None:
    """The license of the base model, of the card beside its weights; None where it is not known."""
    if config.model.path is None:
        return None
    name = hub_name(config.model.path)
    path = Path(config.model.path) / "README.md"
    if name is not None:
        import huggingface_hub

        # Of the cache: an export asks no network.
        cached = huggingface_hub.try_to_load_from_cache(name.repo, "README.md")
        if not isinstance(cached, str):
            return None
        path = Path(cached)
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError, AttributeError):
        _, front, _ = path.read_text(encoding="utf-8").split("---\n", 2)
        license_name = yaml.safe_load(front).get("license")
        return license_name if isinstance(license_name, str) else None
    return None


def _method(name: str) -> dict[str, Any]:
    try:
        about = show_method(name)
    except UserError:  # a file of one's own that is not here
        return {"name": name.rpartition(":")[2], "paper": None}
    paper, arxiv = about.get("paper"), about.get("arxiv")
    link = f", [arXiv:{arxiv}](https://arxiv.org/abs/{arxiv})" if arxiv else ""
    return {"name": about["name"], "paper": f'"{paper}"{link}' if paper else None}


def base_name(config: Config) -> str | None:
    """The base model for readers elsewhere: a Hub name, or a directory's last part."""
    if config.model.path is None:
        return None
    name = hub_name(config.model.path)
    return Path(config.model.path).name if name is None else name.repo


def _data(config: Config) -> list[str]:
    """Training data of the run: Hub names, tasks and file names."""
    keys = ("data.task", "data.train", "data.env", "data.pairs", "data.dialogues", "data.tfds")
    values = flatten(config)
    sets = [
        value if isinstance(value, str) else name.removeprefix("data.train.")
        for name, value in values.items()
        if name in keys or name.startswith("data.train.")
    ]
    return [each if hub_name(each) is not None else Path(each).name for each in sets]


def _metrics(config: Config) -> list[str]:
    """Rows of the run's summary, or of its newest record; one line where there is neither."""
    directory = Path(config.run.dir or "")
    record = read_summary(directory)
    if not record:
        lines = read_jsonl(directory / "metrics.jsonl")
        record = next((line for line in reversed(lines) if "step" in line), {})
    evaluated = record.pop("eval_after", None) or {}
    record |= {f"eval {key}": value for key, value in evaluated.items()}
    numbers = {k: v for k, v in record.items() if isinstance(v, int | float) and v is not True}
    order = sorted(numbers, key=lambda k: (k not in _SPOKEN, not k.startswith("eval ")))
    if not numbers:
        return ["The run has recorded none."]
    rows = [f"| {key.replace('_', ' ')} | {numbers[key]:.6g} |" for key in order[:MOST_METRICS]]
    return ["| metric | value |", "| --- | --- |", *rows]


def _command(config: Config) -> str:
    """The command of this run: the keys that differ from the defaults, without directories."""
    tree = as_tree(config)
    if config.model.path is not None:
        tree["model"]["path"] = base_name(config)
    parts = _overrides(tree, as_tree(Config()))
    line = " ".join(["jrl train", *map(shlex.quote, parts)])
    return _DIRECTORIES.sub("", line)


def _overrides(tree: Mapping[str, Any], defaults: Any, prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        usual = defaults.get(name) if isinstance(defaults, Mapping) else None
        key = f"{prefix}{name}"
        if value == usual or key in _PRIVATE:
            continue
        if isinstance(value, Mapping) and value and all(map(_BARE.fullmatch, value)):
            yield from _overrides(value, usual, f"{key}.")
        else:
            yield f"{key}={_toml(value, inside=False)}"


def _toml(value: Any, *, inside: bool = True) -> str:
    """A value as TOML; a text by itself needs no quotes in an override."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str) and not inside and _PLAIN.fullmatch(value):
        return value
    return json.dumps(value)
