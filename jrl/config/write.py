"""A configuration as TOML, as dotted keys, and as a name of the experiment."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import tomli_w

from jrl.config.secrets import hide_own
from jrl.config.tables import Config


def dump(config: Config) -> str:
    """The configuration as TOML with every key written out; ``load_config`` reads it back."""
    return tomli_w.dumps(as_tree(config))


def as_tree(config: Config, *, none: bool = False) -> dict[str, Any]:
    """The configuration as nested dicts of JSON values, secrets hidden; with None if asked."""
    tree = config.model_dump(mode="json", exclude_none=not none)
    tables = {"data": config.data, "optimizer": config.optimizer}
    return hide_own(tree, {name: table.model_extra or {} for name, table in tables.items()})


def flatten(config: Config) -> dict[str, Any]:
    """The configuration as dotted keys and JSON values, None left out."""
    values = dict(leaves(as_tree(config)))
    # Without lag, rollout on devices of its own gives the numbers of shared devices: no setting.
    return {k: v for k, v in values.items() if (k, v) != ("placement.staleness", 0)}


def config_hash(config: Config) -> str:
    """12 hex digits that name the experiment: all keys but those that may differ on resume."""
    free = keys_of_servers(config)
    fixed = {k: v for k, v in flatten(config).items() if not may_differ(k) and k not in free}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:12]


_FREE_TABLES = (
    *("run.", "log.", "checkpoint.", "mesh", "sampling.mesh", "reward_pool.", "watch.", "plan."),
)
_OF_SERVERS = (
    *("url", "key_variable", "at_once", "timeout", "seconds", "retries", "requests_per_minute"),
    "cache",
)
_FREE = ("train.steps", "eval.every", "model.attention", "train.wait_seconds", "watch")


def may_differ(key: str) -> bool:
    """Whether a run may be resumed with another value of this dotted key.

    Those that do not change what is learnt: where it runs, what is logged, saved and evaluated
    when; and ``train.steps``, the end of the run.
    """
    return key.startswith(_FREE_TABLES) or key in _FREE


def keys_of_servers(config: Config) -> frozenset[str]:
    """Dotted keys about servers that a resumed run may have other values of.

    Judges behind an API, and environments and writers of the library that ask a server: where it is
    and how it is asked, as it has another address after each restart of its own. The model and the
    questions stay those of the run.
    """
    judges = [
        name
        for name, part in config.rewards.items()
        if (part.function or name) == "judge" and part.options.get("url")
    ]
    keys = {f"rewards.{name}.{key}" for name in judges for key in _OF_SERVERS}
    options, env = config.data.model_extra or {}, getattr(config.data, "env", None)
    if isinstance(env, str) and ":" not in env:  # else its options mean what its author says
        if isinstance(options.get("url"), str):
            keys |= {"data.url", "data.key_variable"}
        if isinstance(options.get("server"), str):  # a list is a command
            keys.add("data.server")
    if isinstance(options.get("writer"), Mapping):
        keys |= {"data.writer.url", "data.writer.key_variable"}
    return frozenset(keys)


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each value of nested dicts with its dotted key; an empty table is a value."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
