"""What a run rewards, in a line for a person; and whether its data has what its rewards read."""

from __future__ import annotations

import inspect

from jrl.config import Config
from jrl.errors import UserError
from jrl.own import load
from jrl.rewards.columns import check_columns
from jrl.train.build import Run

_MEANS = {
    "verify": "1 for a right answer, else 0",
    "partial": "the fraction of the answer that is right",
    "math": "1 when the final answer equals the reference, as mathematics",
    "exact": "1 when the final answer equals the reference, as text",
    "format": "1 for an answer in the form that is asked for",
    "model": "a trained reward model",
}


def reward_text(run: Run) -> str:
    """The sum that a run rewards, and what each part of it is; "" where the data holds scores.

    Args:
      run: from ``build.setup``.
    """
    if run.data.judged:
        return ""
    weights = run.rewards.weights
    short = {name: name.rpartition(":")[2] for name in weights}
    total = " + ".join(
        short[name] if weight == 1 else f"{weight:g} * {short[name]}"
        for name, weight in weights.items()
    )
    means = {short[name]: _meaning(name) for name in weights}
    parts = "; ".join(f"{name}: {text}" for name, text in means.items() if text)
    return f"reward = {total}" + (f" ({parts})" if parts else "")


def check_reward_columns(run: Run) -> None:
    """Raises UserError for a reward function whose columns the training prompts do not have.

    And where the library's own would compare texts with an answer that is a list or a table.
    """
    prompts = run.data.prompts.get("train") or ()
    for name in sorted({"exact", "math"} & set(run.config.rewards)):
        for prompt in prompts:
            if isinstance(prompt.answer, list | dict):
                raise UserError(
                    f"data.train, row {prompt.id + 1}: the answer is {str(prompt.answer)[:60]}, and"
                    f" rewards.{name} compares text and numbers; write it as text, or give a"
                    " reward function of your own"
                )
    columns = prompts[0].meta if prompts else ()
    for name in _own_rewards(run.config):
        known = [*columns, *run.config.rewards[name].options]
        check_columns(load(name, "rewards"), known, f"rewards.{name}")


def _own_rewards(config: Config) -> list[str]:
    return [name for name in config.rewards if ":" in name]


def _meaning(name: str) -> str:
    """What a reward part gives points for, in one line; a function's own docstring says it."""
    if ":" not in name:
        return _MEANS.get(name, "")
    said = inspect.getdoc(load(name, "rewards")) or ""
    return said.partition("\n")[0].rstrip(".")
