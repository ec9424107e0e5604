"""What is said of a mistake in a configuration: the key, the value, and what would do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jrl.config.keys import Key, describe, variants
from jrl.config.tables import Config, WatchTable
from jrl.config.unions import Table
from jrl.errors import choose

RENAMED: Mapping[str, str] = {
    "data.answer_key": "set data.fields.answer",
    "data.eval_pairs": "set data.eval",
    "data.options": "write its keys in [data] itself",
    "data.question_key": "set data.fields.question",
    "data.solution_key": "set data.fields.solution",
    "data.tfds_dir": "set the environment variable TFDS_DATA_DIR",
    "eval.pass_k": "remove it: pass@k is reported for k = 1, 2, 4, ... up to eval.samples",
    "eval.reward": "set judge = true in the table of that part, as in rewards.math.judge=true",
    "log.samples": "remove it: 8 rollouts are kept each time",
    "log.tensorboard": 'set log.to = "tensorboard"',
    "log.wandb": 'set log.to = "wandb:PROJECT"',
    "mesh.slices": "remove it: the devices say in how many slices they are",
    "model.grouped_matmul": "remove it: the fastest kernel of the platform is used",
    "model.reference": "set frozen.ref",
    "model.teacher": "set frozen.teacher",
    "optimizer.mu_dtype": "remove it: moments have the type of the weights, model.param_dtype",
    "placement.kind": "rollout has devices of its own where [placement] is given, as with"
    " placement.staleness=1, and else shares those of training",
    "placement.rollout": "set sampling.mesh",
    "sampling.cache": 'set sampling.int8 = "cache"',
    "sampling.chunk": "remove it: slots are refilled after every 4 decode steps",
    "sampling.correction": 'set objective.correction; "none" leaves 8-bit sampling uncorrected',
    "sampling.gather_weights": "remove it: weights are gathered to sample where a device has"
    " room for them beside the training state and the cache",
    "sampling.weights": 'set sampling.int8 = "weights"',
    "train.epochs": "set objective.epochs",
    "train.replay_routing": "set objective.router_replay",
    "train.packing": 'set train.mode = "packed"',
    "train.router_balance": "set objective.router_balance",
    "train.router_z": "set objective.router_z",
}
"""Keys of earlier versions, and what to write in their place."""


def without_renamed(tree: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """A line for each key of an earlier version, and the tree without them."""
    lines, kept = [], dict(tree)
    for table, inside in tree.items():
        if isinstance(inside, Mapping):
            old = {key: f"{table}.{key}" for key in inside if f"{table}.{key}" in RENAMED}
            kept[table] = {key: value for key, value in inside.items() if key not in old}
            lines += [
                f"{name} = {inside[key]!r} is no longer a key; {RENAMED[name]}"
                for key, name in old.items()
            ]
            if old and not kept[table]:
                del kept[table]
    return lines, kept


_SAYS = {
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be finite",
    "bool_type": "must be true or false",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "tuple_type": "must be text or a list",
    "too_short": "must not be empty",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
}


def explain(item: Mapping[str, Any]) -> str:
    """One pydantic error as a line (or the lines that a check of several keys wrote)."""
    path = [part for part in item["loc"] if isinstance(part, str) and part[:5] != "dict["]
    kinds = variants(path[0]) if path else {}
    chosen = path.pop(1) if len(path) > 1 and path[1] in kinds else ""
    key, kind, value = ".".join(path), item["type"], item["input"]
    context = item.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(key, value, chosen)
    if kind == "missing":
        return f"{key} is missing: {_text_of(key)}"
    if kind == "value_error":
        text = str(context["error"])
        if path[:1] == ["watch"]:  # a check of one table: its text does not know whose
            return f"{key}: {text}"
        return text if isinstance(value, dict | Table) else f"{key} = {value!r}; {text}"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        if path[-1] == "[key]":
            table = ".".join(path[:-2])
            return f"unknown key {table}.{value}; {_near(table, value, choices)}"
        return str(choose(key, value, choices))
    says = _SAYS.get(kind, item["msg"])
    if kind == "dict_type" and path[-1] == "train":
        says = "must be text or a table of weights"
    return f"{key} = {value!r}; {says.format(**context)}"


def _wrong_kind(known: Key, value: object, chosen: str) -> str:
    """What to say of a key that other kinds of its table have, and not the one that is given."""
    if known.name in known.only:
        return f"{known.name} = {value!r} and {chosen} are both given; remove one"
    *most, last = known.single or known.only
    kinds = f"{', '.join(most)} or {last}" if most else last
    return f"{known.name} = {value!r} goes with {kinds}, not with {chosen}; remove it"


def of_other_kinds(config: Config) -> list[str]:
    """A line for each option of a task that is a key of other data; options may be anything."""
    keys, kind = {key.name: key for key in describe()}, config.data.kind
    options = {f"data.{name}": value for name, value in config.data.free_options.items()}
    return [_wrong_kind(keys[name], v, kind) for name, v in options.items() if name in keys]


def _text_of(key: str) -> str:
    return next((known.text for known in describe() if known.name == key), "give it")


def _near(table: str, name: str, inside: Sequence[str]) -> str:
    """Names the nearest key of a table, or all of them."""
    if near := difflib.get_close_matches(name, inside, n=1):
        return f"did you mean {table}.{near[0]}?"
    return f"keys of [{table}] are {', '.join(inside)}"


def _unknown_key(key: str, value: Any, chosen: str) -> str:
    """What to write instead of a key that is not there, or not in this kind of its table."""
    known = describe()
    names = [each.name for each in known]
    for each in known:
        if each.name == key:
            return _wrong_kind(each, value, chosen)
    tables = {
        "frozen",
        "objective",
        "rewards",
        "watch",
        *(n.partition(".")[0] for n in names if "." in n),
    }
    table, _, last = key.rpartition(".")
    own = [k for k in known if k.name.startswith(f"{table}.") and (not k.only or chosen in k.only)]
    inside = [each.name.rpartition(".")[2] for each in own]
    if table.startswith("watch."):
        inside = list(WatchTable.model_fields)
    elsewhere = [name for name in names if name.rpartition(".")[2] == last]
    if difflib.get_close_matches(last, inside, n=1) or (inside and not elsewhere):
        hint = _near(table, last, inside)
    elif elsewhere:  # the right name in the wrong table is a common slip
        hint = f"did you mean {' or '.join(elsewhere[:3])}?"
    elif near := difflib.get_close_matches(key, {*names, *tables}, n=1):
        hint = f"did you mean {near[0]}?"
    else:
        hint = f"tables are {', '.join(sorted(tables))}"
    given = "" if isinstance(value, dict) else f" = {value!r}"
    return f"unknown key {key}{given}; {hint}"
