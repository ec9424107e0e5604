"""Networks of the zoo that methods train, by name: the core imports nothing of the zoo."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

NETWORKS = {"policies": "jrl.zoo.networks.policies:train_policies"}
"""A name -> the function that gives a method the network: (method, ...) -> method."""


def named_network(name: str) -> Callable[..., Any]:
    """The function of ``NETWORKS`` with this name."""
    module, function = NETWORKS[name].split(":")
    return getattr(importlib.import_module(module), function)
