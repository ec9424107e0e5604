"""``[optimizer]``: its keys, and those that are arguments of the function that ``name`` names."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

from jrl.config.base import Table, key


class Optimizer(Table):
    """The optimizer and its schedule; further keys are arguments of the optimizer's function."""

    model_config = ConfigDict(extra="allow")

    name: str = key(
        "adamw",
        "optimizer of optax by name, such as adamw, sgd, lion or adafactor, or a function of your"
        " own as FILE.py:function or module:function, called with the learning rate; its other"
        " arguments, such as b1, b2 or weight_decay (0 when not set), are further keys of"
        " [optimizer]",
    )
    learning_rate: float = key(1e-6, "learning rate at its peak", ge=0)
    schedule: Literal["constant", "cosine", "linear"] = key(
        "constant", "learning rate after the warm-up; cosine and linear fall to 0 at the last step"
    )
    warmup_steps: int = key(0, "training steps over which the learning rate rises from 0", ge=0)
    clip_norm: float = key(1.0, "largest global gradient norm; 0 does not clip", ge=0)

    @property
    def options(self) -> dict[str, Any]:
        """The further keys: arguments of the optimizer's function."""
        return dict(self.model_extra or {})
