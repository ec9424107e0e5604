"""Names of the Hugging Face Hub in a configuration, each with the commit that it means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jrl.config import Config, load_config
from jrl.hub import Kind, hub_name, pinned_name


def pinned(config: Config) -> Config:
    """The configuration with a commit in every name of the Hub, so that it means the same later.

    A run that is resumed keeps the commits that it began with.

    Args:
      config: of a run.

    Raises:
      UserError: a name that neither the Hub nor its cache knows.
    """
    pins = _recorded_commits(config)

    def pin(spec: str, kind: Kind, key: str) -> str:
        return pins[spec] if spec in pins else pinned_name(spec, kind, key)

    model, data = config.model, config.data
    changes: dict[str, Any] = {}
    if model.path is not None:
        path = pin(model.path, "model", "model.path")
        changes["model"] = model.model_copy(update={"path": path})
    if config.frozen:
        changes["frozen"] = {
            name: tuple(pin(path, "model", f"frozen.{name}") for path in paths)
            for name, paths in config.frozen.items()
        }
    files = {name: getattr(data, name, None) for name in ("train", "eval", "pairs")}
    update = {
        name: _of_data(source, pin, f"data.{name}") for name, source in files.items() if source
    }
    if update:
        changes["data"] = data.model_copy(update=update)
    return config.model_copy(update=changes)


def _of_data(files: str | Mapping[str, float], pin: Callable[..., str], key: str) -> Any:
    if isinstance(files, str):
        return pin(files, "dataset", key)
    return {pin(spec, "dataset", key): weight for spec, weight in files.items()}


def _recorded_commits(config: Config) -> dict[str, str]:
    """Name without a revision -> the same with a commit, for those of the run in ``run.dir``."""
    path = Path(config.run.dir or "") / "config.toml"
    if config.run.dir is None or config.run.resume == "never" or not path.is_file():
        return {}
    other = load_config(path)
    data = [getattr(other.data, name, None) for name in ("train", "eval", "pairs")]
    names = [other.model.path, *(path for paths in other.frozen.values() for path in paths)]
    names += [
        spec for source in data for spec in ([source] if isinstance(source, str) else source or ())
    ]
    names_by_spec = {spec: hub_name(spec) for spec in names if spec}
    return {
        ("hf:" if spec.startswith("hf:") else "") + str(name._replace(revision=None)): spec
        for spec, name in names_by_spec.items()
        if name is not None and name.pinned
    }
