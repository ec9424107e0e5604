"""Values that a configuration cannot hold: none, and numbers beyond what a run computes in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jrl.config.tables import Config
from jrl.config.write import leaves


def unwritable(value: object, text: Any, key: str = "") -> Iterator[str]:
    """A line for each None, NaN and infinity in options, which may be anything.

    Args:
      value: as JSON, which has neither NaN nor infinity, only null.
      text: the same as it was given.
      key: of the two.
    """
    if value is None:
        problem = "TOML has no null: leave it out" if text is None else "must be finite"
        yield f"{key} = {text}; {problem}"
    inside = enumerate(value) if isinstance(value, list) else ()
    items = value.items() if isinstance(value, Mapping) else inside
    for name, item in items:
        yield from unwritable(item, text[name], f"{key}.{name}" if key else str(name))


_MOST, _SEED = 2**31 - 1, "seed"
_LARGEST_FLOAT, _LEAST_FLOAT = 3.4028234e38, 1.1754944e-38
"""Of float32, without denormal numbers, which devices take for 0."""


def beyond_32_bits(config: Config) -> Iterator[str]:
    """A line for each number that int32 and float32, in which a run computes, do not hold.

    Options of functions of one's own are left out: they may compute as they like.
    """
    options = {f"data.{name}" for name in config.data.model_extra or ()}
    for name, table in config.rewards.items():
        options |= {f"rewards.{name}.{option}" for option in table.options}
    for key, value in leaves(config.model_dump(mode="json", exclude_none=True)):
        if any(key == name or key.startswith(f"{name}.") for name in options):
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
