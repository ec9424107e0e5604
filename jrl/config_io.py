"""Reading, checking and writing the configuration of a run: TOML with dotted overrides.

The keys are declared in ``jrl/config.py``. Problems are reported all at once, one line each.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import tomli_w
from pydantic import Tag, ValidationError
from pydantic.fields import FieldInfo

from jrl.config import Config, WatchTable
from jrl.config_checks import check_batch
from jrl.config_secrets import hide_own
from jrl.config_unions import RECORDED_KIND, Table
from jrl.errors import Mistakes, UserError, choose

__all__ = [
    "Config",
    "Key",
    "as_tree",
    "build_config",
    "check_batch",
    "config_hash",
    "describe",
    "dump",
    "flatten",
    "from_table",
    "load_config",
    "may_differ",
    "table_note",
    "table_of",
    "variants",
]

T = TypeVar("T")

# ---------------------------------------------------------------- reading and writing


class Key(NamedTuple):
    """One configuration key, for documentation.

    Attributes:
      name: dotted.
      kind: its type in words.
      default: None where there is none.
      text: what it means.
      only: the kinds of its table that have it, such as "data.task"; empty where all have.
    """

    name: str
    kind: str
    default: Any
    text: str
    only: tuple[str, ...] = ()

    @property
    def single(self) -> list[str]:
        """``only`` without what no key tells alone: combinations, and recorded sessions.

        Empty for the key that names a kind itself.
        """
        names = [kind for kind in self.only if " and " not in kind and kind != RECORDED_KIND]
        return [] if self.name in self.only else names


def describe() -> list[Key]:
    """Every key of the configuration in order, each once, with type, default and meaning."""
    found: list[Key] = []
    for name, field in Config.model_fields.items():
        if kinds := variants(name):
            found += _of_union(name, kinds)
        elif (table := table_of(field.annotation)) is not None:
            found += _keys(table, name)
        else:
            found.append(_leaf(name, field))
    return found


def table_note(name: str) -> str:
    """What to know of a table before its keys: which kinds there are, whether it may be absent."""
    table = Config.model_fields[name].annotation
    if kinds := variants(name):
        first = [kind for kind in kinds if " and " not in kind and kind != RECORDED_KIND]
        return f"  one of: {', '.join(first)}; keys of only some of them say so"
    return "  optional" if type(None) in get_args(table) else ""


def variants(table: str) -> dict[str, type[Table]]:
    """The kinds of a table that is a union, by tag; empty for other tables."""
    field = Config.model_fields.get(table)
    found: dict[str, type[Table]] = {}
    for member in get_args(field.annotation) if field is not None else ():
        kind, *marks = get_args(member) or (None,)
        found |= {mark.tag: kind for mark in marks if isinstance(mark, Tag)}
    return found


def table_of(kind: Any) -> type[Table] | None:
    """The table that a field holds, also where it may be absent; None for single keys."""
    kinds = get_args(kind) if type(None) in get_args(kind) else (kind,)
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Table)), None)


def _of_union(table: str, kinds: Mapping[str, type[Table]]) -> Iterator[Key]:
    keys = {tag: {key.name: key for key in _keys(kind, table)} for tag, kind in kinds.items()}
    names = dict.fromkeys(name for inside in keys.values() for name in inside)
    for name in sorted(names, key=lambda name: name not in kinds):  # first those that tell kinds
        having = {tag: inside[name] for tag, inside in keys.items() if name in inside}
        parts = (part for key in having.values() for part in key.kind.split(" | "))
        types = " | ".join(dict.fromkeys(parts))
        only = () if len(having) == len(kinds) else tuple(having)
        yield next(iter(having.values()))._replace(kind=types, only=only)


def _keys(table: type[Table], prefix: str) -> list[Key]:
    return [_leaf(f"{prefix}.{name}", field) for name, field in table.model_fields.items()]


def _leaf(name: str, field: FieldInfo) -> Key:
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    return Key(name, _kind(field.annotation), default, field.description or "")


_KINDS = {str: "text", int: "whole number", float: "number", bool: "true or false"}


def _kind(annotation: Any) -> str:
    """A type in words: "text", "a | b" for a closed set, "table", "list"."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(inside[0])
    if origin is Literal:
        return " | ".join(inside)
    if origin in (dict, tuple):
        return {dict: "table", tuple: "list"}[origin]
    if inside:  # T | None
        return " | ".join(_kind(kind) for kind in inside if kind is not type(None))
    return _KINDS[annotation]


def load_config(
    path: str | Path | Mapping[str, Any] | None, overrides: Sequence[str] = ()
) -> Config:
    """Reads a TOML file, applies ``a.b=value`` overrides, and checks the result.

    A value is read as TOML; a bare word is text; nothing after the ``=`` removes the key.

    Args:
      path: the TOML file, its tables as nested dicts, or None to start from the defaults.
      overrides: in order; later ones win.

    Returns:
      The configuration, checked.

    Raises:
      UserError: one line for each problem, with the key, the value and what would do.

    >>> load_config(None, ["sampling.group=4", "method=rloo"]).sampling.group
    4
    """
    if isinstance(path, Mapping):
        tree = copy.deepcopy(dict(path))
    else:
        tree = {} if path is None else _read_toml(Path(path))
    mistakes = Mistakes()
    for override in overrides:
        mistakes.look(partial(_apply, tree, override))
    config = mistakes.look(lambda: build_config(tree))
    mistakes.check()
    return config


def build_config(tree: Mapping[str, Any]) -> Config:
    """A checked configuration from nested dicts.

    Args:
      tree: tables and keys, as ``tomllib`` reads them.

    Returns:
      The configuration.

    Raises:
      UserError: one line for each problem.
    """
    lines, tree = _without_renamed(tree)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        items = error.errors(include_url=False)
        # A text or a table is given: what is wrong with it as a table says enough.
        lines += [_explain(item) for item in items if item["loc"][-2:] != ("train", "str")]
    else:
        lines += _of_other_kinds(config)
        lines += _unwritable(as_tree(config), config.model_dump())
        lines += _beyond_32_bits(config)
    if lines:
        raise UserError("\n".join(lines))
    return config


def _unwritable(value: object, given: Any, key: str = "") -> Iterator[str]:
    """A line for each None, NaN and infinity in options, which may be anything.

    Args:
      value: as JSON, which has neither NaN nor infinity, only null.
      given: the same as it was given.
      key: of the two.
    """
    if value is None:
        said = "TOML has no null: leave it out" if given is None else "must be finite"
        yield f"{key} = {given}; {said}"
    inside = enumerate(value) if isinstance(value, list) else ()
    items = value.items() if isinstance(value, Mapping) else inside
    for name, item in items:
        yield from _unwritable(item, given[name], f"{key}.{name}" if key else str(name))


_MOST, _SEED = 2**31 - 1, "seed"
_LARGEST_FLOAT, _LEAST_FLOAT = 3.4028234e38, 1.1754944e-38
"""Of float32, without denormal numbers, which devices take for 0."""


def _beyond_32_bits(config: Config) -> Iterator[str]:
    """A line for each number that int32 and float32, in which a run computes, do not hold.

    Options of functions of one's own are left out: they may compute as they like.
    """
    own = {f"data.{name}" for name in config.data.model_extra or ()}
    for name, table in config.rewards.items():
        own |= {f"rewards.{name}.{option}" for option in table.options}
    for key, value in _flatten(config.model_dump(mode="json", exclude_none=True), ""):
        if any(key == name or key.startswith(f"{name}.") for name in own):
            continue
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            if isinstance(number, int) and abs(number) > _MOST and key != _SEED:
                yield f"{key} = {number}; must be at most {_MOST}"
            elif abs(number) > _LARGEST_FLOAT:
                yield f"{key} = {number}; is infinite in float32: must be at most 3.4e38"
            elif 0 < abs(number) < _LEAST_FLOAT:
                yield f"{key} = {number}; is 0 in float32: must be 0, or at least 1.2e-38"


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
    found = dict(_flatten(as_tree(config), ""))
    # Without lag, rollout on devices of its own gives the numbers of shared devices: no setting.
    return {k: v for k, v in found.items() if (k, v) != ("placement.staleness", 0)}


def config_hash(config: Config) -> str:
    """12 hex digits that name the experiment: every key but ``run.*`` and ``train.steps``."""
    kept = {k: v for k, v in flatten(config).items() if not may_differ(k)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]


_FREE_TABLES = ("run.", "log.", "checkpoint.", "mesh", "sampling.mesh", "reward_pool.", "watch.")
_FREE = ("train.steps", "eval.every", "model.attention", "train.wait_seconds", "watch")


def may_differ(key: str) -> bool:
    """Whether a run may be resumed with another value of this dotted key.

    Those that do not change what is learnt: where it runs, what is logged, saved and evaluated
    when; and ``train.steps``, the end of the run.
    """
    return key.startswith(_FREE_TABLES) or key in _FREE


def _flatten(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _read_toml(path: Path) -> dict[str, Any]:
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: is not a file; name a TOML file or a run directory")
    try:
        if path.exists() and path.stat().st_size > _LARGEST:
            raise UserError(f"{path}: larger than {_LARGEST} bytes, so no configuration")
        return _toml(path.read_text(encoding="utf-8-sig"))  # some editors begin with its mark
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text: {error}") from None
    except OSError as error:
        places = (path.parent, path.parent / "configs", Path("configs"))
        there = {p.name: p for place in reversed(places) for p in place.glob("*.toml")}
        near = difflib.get_close_matches(path.name, there, n=1)
        hint = f"; did you mean {there[near[0]]}?" if near else ""
        raise UserError(f"{path}: {error.strerror or error}{hint}") from None


_LARGEST = 10_000_000
"""Bytes of a configuration file."""
_DEEPEST = 50
"""Tables and lists inside each other."""


def _toml(text: str) -> dict[str, Any]:
    """The tables in a text; raises TOMLDecodeError also where tomllib has other errors."""

    def too_deep(value: Any, levels: int) -> bool:
        inside = value.values() if isinstance(value, dict) else value
        if not isinstance(value, dict | list):
            return False
        return not levels or any(too_deep(each, levels - 1) for each in inside)

    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError("nested too deeply; use fewer levels") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:  # such as a number of more digits than Python reads
        raise tomllib.TOMLDecodeError(str(error)) from None
    if too_deep(found, _DEEPEST):
        raise tomllib.TOMLDecodeError("nested too deeply; use fewer levels")
    return found


def _apply(tree: dict[str, Any], override: str) -> None:
    """Puts one ``a.b=value`` into nested dicts."""
    if re.search("[\ud800-\udfff]", override):
        raise UserError(f"override {override!r}; it is not UTF-8 text")
    name, equals, text = override.partition("=")
    try:
        parsed = _toml(f"{name} = 0")
    except tomllib.TOMLDecodeError:
        parsed = {}
    if not equals or len(parsed) != 1:
        raise UserError(f"override {override!r}; write table.key=value, such as train.steps=10")
    path = []
    while isinstance(parsed, dict):
        ((part, parsed),) = parsed.items()
        path.append(part)
    node = tree
    for depth, part in enumerate(path[:-1], 1):
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise UserError(f"override {override!r}; {'.'.join(path[:depth])} is not a table")
    if text.strip():
        node[path[-1]] = _parse_value(name, text.strip())
    else:
        node.pop(path[-1], None)


def _parse_value(name: str, text: str) -> Any:
    try:
        parsed = _toml(f"value = {text}")
        return parsed["value"] if len(parsed) == 1 else text
    except tomllib.TOMLDecodeError as error:
        if text[0] in "[\"'":  # a "{" may begin a template
            raise UserError(f"{name} = {text}; not a valid TOML value: {error}") from None
        return text


# ---------------------------------------------------------------- error messages

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


def _without_renamed(tree: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
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


def _explain(item: Mapping[str, Any]) -> str:
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


def _of_other_kinds(config: Config) -> list[str]:
    """A line for each option of a task that is a key of other data; options may be anything."""
    if config.task is None:
        return []
    kind = config.task.kind if config.pairs is None else "data.pairs and data.task"
    keys = {key.name: key for key in describe()}
    options = {f"data.{name}": value for name, value in config.task.options.items()}
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


def from_table(table: str, make: type[T], values: Mapping[str, Any]) -> T:
    """Builds a frozen dataclass from a free-form table, naming keys it does not have.

    Args:
      table: dotted name of the table, for messages.
      make: a dataclass, such as ``ModelConfig``.
      values: the table's keys.

    Returns:
      ``make(**values)``.

    Raises:
      UserError: unknown keys, with the nearest name, or missing ones.
    """
    fields = {field.name: field for field in dataclasses.fields(make)}  # type: ignore[arg-type]
    lines = []
    for name, value in values.items():
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {table}.{near[0]}?" if near else f"keys are {', '.join(fields)}"
            lines.append(f"unknown key {table}.{name} = {value!r}; {hint}")
    for name, field in fields.items():
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and field.init and name not in values:
            lines.append(f"{table}.{name} is missing")
    if lines:
        raise UserError("\n".join(lines))
    return make(**values)
