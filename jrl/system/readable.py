"""Records of functions as text: each function by its name and the values it was made of.

``repr`` of a function is an address. A part of an objective is a function that another one
returned, so its text is the call that made it: ``clip(low=0.2, high=0.28)``. The arguments are read
from the closure.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

DEPTH, LONGEST = 8, 400
"""Calls within calls, and characters of one part, beyond which text is cut."""
WRAPPERS = {"stateless", "check_then_apply", "checked"}
"""Functions that only adapt another one, which is shown in their place."""
LOCAL = ".<locals>."


def readable(record: Any) -> str:
    """A NamedTuple as ``Name(field=value, ...)``, without fields at their defaults.

    It serves as the ``__repr__`` of records that hold functions.

    >>> from typing import NamedTuple
    >>> class Part(NamedTuple):
    ...     apply: object
    ...     size: int = 1
    >>> readable(Part(functools.partial(round, ndigits=2)))
    'Part(round(ndigits=2))'
    """
    return _cut(_record(record, 0))


def lines(record: Any, head: str, parts: Mapping[str, str], *, without: Sequence[str] = ()) -> str:
    """A record over several lines: a head, then parts by name, in one column each.

    Args:
      record: gives further parts: its fields that are not at their defaults.
      head: the first line.
      parts: text of what is shown first, by name.
      without: fields of the record that are not shown.
    """
    fields = {name: value for name, value, _ in _fields(record) if name not in without}
    texts = {**parts, **{name: as_text(value) for name, value in fields.items()}}
    width = max(map(len, texts), default=0)
    rows = (f"  {name:<{width}}  {_cut(text)}" for name, text in texts.items())
    return "\n".join([head, *rows])


def as_text(value: Any, depth: int = 0) -> str:
    """A value as text, with functions by name."""
    if depth > DEPTH:
        return "..."
    if isinstance(value, str):
        return value if depth == 0 else repr(value)
    if isinstance(value, functools.partial):
        arguments = [as_text(x, depth + 1) for x in value.args]
        arguments += [f"{name}={as_text(x, depth + 1)}" for name, x in value.keywords.items()]
        return f"{_name(value.func)}({', '.join(arguments)})"
    if inspect.isroutine(value):
        return _function([value], depth)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _record(value, depth)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(each, getattr(value, each.name)) for each in dataclasses.fields(value)]
        texts = (f"{each.name}={as_text(x, depth + 1)}" for each, x in fields if x != each.default)
        return f"{type(value).__name__}({', '.join(texts)})"
    if isinstance(value, tuple | list):
        return f"({', '.join(as_text(x, depth + 1) for x in value)})"
    if isinstance(value, frozenset | set):
        return ", ".join(sorted(map(str, value))) or "none"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{k}: {as_text(x, depth + 1)}' for k, x in value.items())}}}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):  # an array may be traced: no values
        return f"{value.dtype}{list(value.shape)}"
    return repr(value)


def _record(record: Any, depth: int) -> str:
    fields = [*_fields(record)]
    made_of = {name: value for name, value, _ in fields}.get("parts")
    # A surrogate says by a record which parts it was made of.
    if made_of is not None and hasattr(made_of, "_asdict"):
        parts = made_of._asdict().items()
        texts = [f"{name}={as_text(x, depth + 1)}" for name, x in parts if x is not None]
        return f"{type(made_of).__name__}({', '.join(texts)})"
    # Among other parts the functions of a part say what it is: an advantage has ``apply``, a term
    # of the loss ``value`` and ``coef``.
    names = [name for name in ("apply", "value", "coef") if name in record._fields]
    if depth and names:
        return _function([getattr(record, name) for name in names], depth)
    texts = [
        as_text(value, depth + 1) if required else f"{name}={as_text(value, depth + 1)}"
        for name, value, required in fields
        if not (inspect.isroutine(value) and name in ("init", "update"))
    ]
    return f"{type(record).__name__}({', '.join(texts)})"


def _fields(record: Any) -> Iterator[tuple[str, Any, bool]]:
    """(name, value, whether it has no default) of fields that are not at their defaults."""
    defaults = getattr(record, "_field_defaults", {})
    for name in record._fields:
        value = getattr(record, name)
        if name not in defaults or not _same(value, defaults[name]):
            yield name, value, name not in defaults


def _function(functions: Sequence[Callable[..., Any]], depth: int) -> str:
    """A function by name; those that another function made as one call of that one."""
    function = functions[0]
    if isinstance(function, functools.partial):
        return as_text(function, depth)
    qualified = getattr(function, "__qualname__", getattr(function, "__name__", "function"))
    if LOCAL not in qualified:
        return _name(function)
    outer = qualified.partition(LOCAL)[0]
    values = {name: value for one in functions for name, value in _closure(one).items()}
    if outer in WRAPPERS and "apply" in values:
        return as_text(values["apply"], depth)
    maker = getattr(function, "__globals__", {}).get(outer)
    arguments = _arguments(maker, values, depth) if inspect.isfunction(maker) else None
    if arguments is None:
        arguments = [f"{name}={as_text(x, depth + 1)}" for name, x in values.items()]
    return f"{outer.lstrip('_')}({', '.join(arguments)})"


def _arguments(maker: Callable[..., Any], values: dict[str, Any], depth: int) -> list[str]:
    """The arguments of a call that captured these values, in the order of its signature."""
    texts = []
    for name, parameter in inspect.signature(maker).parameters.items():
        if name not in values:
            continue
        value = values.pop(name)
        if parameter.kind is parameter.VAR_POSITIONAL:
            texts += [as_text(x, depth + 1) for x in value]
        elif parameter.default is parameter.empty:
            texts.append(as_text(value, depth + 1))
        elif isinstance(value, int | float | str) or not _same(value, parameter.default):
            texts.append(f"{name}={as_text(value, depth + 1)}")
    # What the function computed from its arguments; helpers that it defined say nothing more.
    texts += [
        f"{name}={as_text(x, depth + 1)}"
        for name, x in values.items()
        if not (LOCAL in getattr(x, "__qualname__", "") or isinstance(x, frozenset))
    ]
    return texts


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    """The values that a function captured, by name; a variable not yet set is left out."""
    values = {}
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:
            continue
    return values


def _name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", type(function).__name__)
    return "lambda" if name == "<lambda>" else name.lstrip("_")


def _same(value: Any, default: Any) -> bool:
    """Whether a value is its default; arrays, whose comparison is an array, never are."""
    return value is default or (type(value) is type(default) and bool(_equal(value, default)))


def _equal(value: Any, default: Any) -> bool:
    return False if hasattr(value, "dtype") else value == default


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
