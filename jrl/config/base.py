"""Base class and key function of all configuration tables."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


def key(default: Any, text: str, **limits: Any) -> Any:
    """A field with its description and numeric limits."""
    if isinstance(default, dict | list):
        value = default
        return Field(default_factory=lambda: type(value)(value), description=text, **limits)
    return Field(default=default, description=text, **limits)


class Table(BaseModel):
    """Base of all tables: unknown keys are errors, types are exact, values are immutable."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )
