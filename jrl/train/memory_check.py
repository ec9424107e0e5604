"""Lower bound on a run's memory, checked before anything is compiled.

Counted are arrays that exist in every run of such sizes: weights, also of judges and reward models,
completions, and the keys and values of those that are decoded at a time. Activations, gradients and
copies come on top, so what is refused here could not run, and what passes may still be too large;
``jrl plan`` measures programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jrl.config import Config
from jrl.models.config import ModelConfig
from jrl.setup.gather import cached_tokens
from jrl.system.memory import check_fits, host_bytes
from jrl.train.held_models import held_models

_TOKEN_BYTES = 4 + 4 + 4 + 1
"""Of a completion: its id, log-probability and policy version, and whether it is live."""


def available_bytes() -> int:
    """Memory of the devices of all processes; on CPUs that of the hosts."""
    local = jax.local_devices()
    if local[0].platform == "cpu":
        return host_bytes() * jax.process_count()
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in local]
    return int(max(limits)) * jax.device_count() or host_bytes() * jax.process_count()


def check_training(run: Any) -> None:
    """Raises a UserError where weights, a step's completions or those of evaluation cannot fit.

    Args:
      run: from ``build.setup``.
    """
    config, draw = run.config, run.method.draw
    check_weights(run)
    check_held_models(run)
    draws = draw.samples and config.data.completions_key is None
    setting = f"train.prompts = {config.train.prompts}"
    if draws:
        setting += f" with sampling.group = {config.sampling.group}"
        group = config.sampling.group + draw.baseline_members
        shape = run.kind.batch_shape(run.method)
        _check(run, setting, config.prompts_at_once, group, batch=shape)
    else:
        _check(run, setting, config.train.prompts, 1, sampled=False)
    if config.warmup.steps and config.data.has_solutions:
        setting = f"warmup.batch = {config.warmup.batch}"
        _check(run, setting, config.warmup.batch, 1, sampled=False)
    if run.kind.held_out(run.config, run.data).problems:
        check_evaluation(run)


def check_weights(run: Any, *, key: str = "", times: int = 1) -> None:
    """Raises a UserError where the policy's weights alone cannot fit.

    Args:
      run: from ``build.setup``.
      key: what sets how many policies there are.
      times: as many.
    """
    path = run.config.model.path
    model = "model.config" if path is None else f"model.path = {path!r}"
    setting = f"{key} = {times}" if key else model
    remedy = f"lower {key}" if key else "choose a smaller model"
    needed = times * _policy_bytes(run)
    check_fits(f"{setting}: the weights", needed, remedy, available=available_bytes())


def check_held_models(run: Any) -> None:
    """Raises a UserError where models of rewards do not fit beside the policy's weights.

    Judges and likelihoods are asked one after the other, so that the one that takes most counts.

    Args:
      run: from ``build.bare_run``, before anything is loaded.
    """
    models = held_models(run.config, run.rewards, run.model)
    if not models:
        return
    size = sum(model.weight_bytes() for model in models)
    working = max(model.working_bytes() for model in models)
    parts = " and ".join(f"rewards.{model.part}" for model in models)
    with_work = " with what a part keeps while it is asked" if working else ""
    lower = ", lower at_once or rows, or name a server with url" if working else ""
    check_fits(
        f"{parts}: the weights beside the policy's{with_work}",
        _policy_bytes(run) + size + working,
        f"choose smaller models{lower}",
        available=available_bytes(),
    )


def _policy_bytes(run: Any) -> float:
    """Bytes of the policy's weights, at the least those of an int8 base."""
    shapes = jax.eval_shape(run.network.init, jax.random.key(0))
    lora = run.config.lora
    least = 1 if lora is not None and lora.base == "int8" else 8
    return sum(
        float(np.prod(x.shape)) * min(x.dtype.itemsize, least) for x in jax.tree.leaves(shapes)
    )


def check_evaluation(run: Any, keys: Sequence[str] = ("eval.problems", "eval.samples")) -> None:
    """Raises a UserError where the completions of an evaluation cannot fit.

    Args:
      run: from ``build.setup``, ``config.eval`` as it will be.
      keys: what the number of problems and that of completions for each are called.
    """
    table = run.config.eval
    setting = f"{keys[0]} = {table.problems} with {keys[1]} = {table.samples}"
    held_out = run.kind.held_out(run.config, run.data)
    # Some kinds decode as many at a time as a training step has.
    _check(run, setting, min(held_out), table.samples)
    _check(run, setting, held_out.problems, table.samples, sampled=False)


def check_problems(run: Any, key: str, problems: int) -> None:
    """Raises a UserError where problems and one completion of each cannot fit.

    Args:
      run: from ``build.setup``.
      key: what sets how many there are.
      problems: as many.
    """
    _check(run, f"{key} = {problems}", problems, 1, sampled=False)


def check_slots(key: str, slots: int, tokens: int, model: ModelConfig | None) -> None:
    """Raises a UserError where the keys and values of an engine's slots cannot fit.

    Args:
      key: what sets how many there are.
      slots: completions decoded at once.
      tokens: of each, its prompt's included.
      model: the policy's shape; None where it is not known.
    """
    each = _TOKEN_BYTES if model is None else token_cache_bytes(model)
    setting = f"{key} = {slots} of {tokens} tokens each"
    check_fits(setting, float(slots) * tokens * each, f"lower {key}", available=available_bytes())


def token_cache_bytes(model: ModelConfig, itemsize: int | None = None) -> int:
    """Bytes of one token's keys and values, at the least 1 a number, as with an int8 cache."""
    return 2 * model.layers * model.kv_heads * model.head_dim * (itemsize or 1)


def _check(
    run: Any,
    setting: str,
    prompts: int,
    group: int,
    *,
    sampled: bool = True,
    batch: tuple[int, int, int] | None = None,
) -> None:
    """Checks completions of a group for each prompt; those that are drawn have a cache, too.

    Args:
      run: from ``build.setup``.
      setting: the keys that set the sizes.
      prompts: that the sampler has at a time.
      group: completions of each.
      sampled: whether the policy draws them.
      batch: groups, members and tokens of the batch that is made of them; None for these.
    """
    config: Config = run.config
    new = run.kind.new_tokens
    groups, members, longest = batch or (prompts, group, new)
    contexts = run.kind.contexts  # a row of training holds all contexts of an episode
    new, longest = new * contexts, longest * contexts
    size = 4.0 * groups * run.width + float(groups) * members * longest * _TOKEN_BYTES
    # The caches of episodes may wait on the host, so they are not counted.
    if sampled and run.model is not None and not config.data.plays:
        itemsize = 1 if "cache" in config.sampling.in_8_bits else np.dtype(run.model.dtype).itemsize
        cached = cached_tokens(prompts, group, run.width, new, config.sampling.slots)
        size += cached * token_cache_bytes(run.model, itemsize)
    keys = " or ".join(part.split(" = ")[0] for part in setting.split(" with "))
    setting = f"{setting}, {run.width} + {new} tokens each"
    check_fits(setting, size, f"lower {keys}", available=available_bytes())
