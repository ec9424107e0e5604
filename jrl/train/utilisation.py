"""Model FLOP utilisation of a run's steps: what the algorithm asks for, over the devices' peak."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from jrl.models.flops import Lengths, forward_flops
from jrl.setup.run import Run

PEAKS: Mapping[str, float] = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L4": 121e12,
}
"""bfloat16 operations a second by what a device calls itself, vendors' figures without sparsity; of
several names that it begins with, the first."""


def peak_flops(device: jax.Device) -> float | None:
    """bfloat16 operations a second of a device at peak; None where nobody says, as of CPUs."""
    kind = device.device_kind
    return next((peak for name, peak in PEAKS.items() if kind.startswith(name)), None)


def training_passes(run: Run) -> float:
    """Forward passes of a training step over its batch.

    A backward pass counts two. Adapters leave out the half of it that frozen weights' gradients
    would be. A gradient taken ahead is one more of each pass.
    """
    trained = 2.0 if run.config.lora is not None else 3.0
    objective = run.method.objective
    start = {"proximal_logprobs", "rollout_values", "rollout_entropy"} & objective.needs
    scored = len(objective.frozen) + bool(start)
    schedule = run.method.schedule
    return trained * schedule.epochs * (1 if schedule.ahead is None else 2) + scored


def utilisation(run: Run, metrics: Mapping[str, float], seconds: float) -> float | None:
    """Model FLOPs of a step, sampling included, over what the devices can do in its time.

    Every row counts as if it had the mean length, which leaves out a part of attention's products.

    Args:
      run: what is trained.
      metrics: of the step: ``prompt_length``, ``length`` and, of episodes, ``row_length``, tokens.
      seconds: that the step took.

    Returns:
      None where the sizes of the model or the peak of the devices are not known.
    """
    peak = peak_flops(run.mesh.devices.flat[0])
    if peak is None or run.model is None:
        return None
    lengths = Lengths(
        run.config.train.prompts,
        run.kind.rows_of_a_prompt(run.method),
        round(float(metrics["prompt_length"])),
        round(float(metrics.get("row_length", metrics["length"]))),
    )
    passes = training_passes(run) + run.kind.samples(run.method)
    devices = run.mesh.devices.size
    devices += run.rollout_mesh.devices.size if run.rollout_mesh is not None else 0
    return passes * forward_flops(run.model, lengths) / (devices * peak * seconds)
