"""Programs compiled for an H100 that is not there: kernels, returns to the host, bytes, memory.

A regression of what the host launches, or copies, is seen here without a GPU. What a layer launches
is the difference of programs of three layers and of two.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax
import pytest
from tpu_programs import ask

from jrl.config import load_config
from jrl.errors import UserError
from jrl.plan.compile import abstract_run_on
from jrl.plan.make import make_plan
from jrl.plan.topology import CHIPS, parse_topology
from jrl.setup.gather import MEMORY

pytestmark = [pytest.mark.extra("plan-gpu"), pytest.mark.slow]


class Bounds(NamedTuple):
    """The most of a program.

    Attributes:
      layer: kernels of a layer.
      draw: kernels of the draw in a token step.
      rest: kernels of a token step outside of both; of a training step all that is no layer's.
      returns: to the host in a token step.
      copied: share of the bytes of a token step or a training step that operations move which do
        nothing else.
    """

    layer: float
    draw: float
    rest: float
    returns: float
    copied: float


DECODING = {
    "cudnn": {
        "small": Bounds(8, 5, 14, 1 / 16, 0.01),
        "small, long": Bounds(8, 5, 14, 1 / 16, 0.01),
        "1.7b": Bounds(8, 5, 14, 1 / 16, 0.01),
    },
    "xla": {
        "small": Bounds(26, 5, 14, 1 / 16, 0.01),
        "small, long": Bounds(80, 5, 14, 22, 0.05),
        "1.7b": Bounds(26, 5, 14, 1 / 16, 0.01),
    },
}
"""By attention. "cudnn" has the kernels of ``models.gpu_kernels`` in token steps: below the aims of
10 a layer, 12 for the draw, and a return in 16 tokens."""
TRAINING = {
    "cudnn": {"small": Bounds(125, 0, 250, 0, 0.035), "1.7b": Bounds(135, 0, 450, 0, 0.05)},
    "xla": {"small": Bounds(195, 0, 215, 0, 0.05), "1.7b": Bounds(210, 0, 420, 0, 0.055)},
}
ATTENTION = "cudnn" if jax.__version_info__ >= (0, 11) else "xla"
"""JAX 0.10 cannot compile cuDNN's without a GPU."""

SMALL = {
    **{"vocab_size": 4096, "embed_dim": 256, "heads": 4, "kv_heads": 2, "head_dim": 64},
    **{"mlp_dim": 512, "max_length": 2048, "qk_norm": True},
}
LARGE = SMALL | {
    **{"vocab_size": 151936, "embed_dim": 2048, "heads": 16, "kv_heads": 8, "head_dim": 128},
    **{"mlp_dim": 6144},
}
EXPERTS = SMALL | {"experts": 16, "experts_per_token": 2, "expert_mlp_dim": 256}
SHAPES = {
    "experts": (EXPERTS, 64),
    "small": (SMALL, 64),
    "small, long": (SMALL, 1024),
    "1.7b": (LARGE, 64),
}


def tree(shape: str, layers: int) -> dict:
    """A run of 64 rows, 8 of each prompt of 256 tokens."""
    sizes, new = SHAPES[shape]
    attention = {"cudnn": "auto", "xla": "xla"}[ATTENTION]
    model = {"dtype": "bfloat16", "param_dtype": "bfloat16", "attention": attention}
    return {
        "method": "grpo",
        "model": model | {"remat": "full", "config": sizes | {"layers": layers}},
        "data": {"max_prompt_tokens": 256},
        "sampling": {"group": 8, "max_new_tokens": new},
        "train": {"prompts": 8},
        "mesh": {"data": 1},
    }


@cache
def program(shape: str, name: str, layers: int) -> dict:
    """A compiled program's numbers, as ``jrl plan --json`` has them."""
    return ask("gpu_program", tree(shape, layers), "h100x1", name)


def check(shape: str, name: str, bounds: Bounds) -> None:
    """Compares two programs of a shape with the bounds, and shows the figures where they fail."""
    two, three = (program(shape, name, layers)["kernels"] for layers in (2, 3))
    gpu_bounds = Bounds(
        three["layers"] - two["layers"],
        three["draw"],
        three["rest"],
        three["returns"],
        three["copied"] / three["bytes"],
    )
    print(shape, name, gpu_bounds)
    for part, most in bounds._asdict().items():
        assert getattr(gpu_bounds, part) <= most, gpu_bounds
    assert gpu_bounds.layer > 0, gpu_bounds
    assert (gpu_bounds.draw > 0) == (name == "sampler"), gpu_bounds


@pytest.mark.parametrize("shape", DECODING[ATTENTION])
def test_a_token_step_launches_copies_and_asks_no_more_than_its_bounds(shape):
    check(shape, "sampler", DECODING[ATTENTION][shape])


@pytest.mark.parametrize("shape", TRAINING[ATTENTION])
def test_a_training_step_launches_and_copies_no_more_than_its_bounds(shape):
    check(shape, "train_step", TRAINING[ATTENTION][shape])


def test_the_host_engine_asks_once_in_16_tokens_whatever_its_rows_ask_for():
    """They have truncation, biases, grammars and reports."""
    step = ask("gpu_engine", SMALL | {"layers": 2}, "h100x1", {"data": 1}, 16)
    assert step["returns"] == 1 / 16
    assert step["conditionals"] == 0
    assert step["draw"] <= 8


def test_devices_that_divide_the_vocabulary_draw_in_few_kernels():
    """One exchange of logits; a running sum over what both have were 188 kernels, 5,966 at 14B."""
    two = tree("small", 2) | {"mesh": {"data": 1, "tensor": 2}}
    two["sampling"] |= {"top_k": 50, "top_p": 0.9}
    step = ask("gpu_program", two, "h100x2", "sampler")["kernels"]
    assert step["returns"] == 1 / 16
    assert step["draw"] <= 10


def test_memory_and_operations_are_those_of_the_shape():
    """Two layers of 1.7B: weights, moments, and products counted from the sizes."""
    sampler, step = program("1.7b", "sampler", 2), program("1.7b", "train_step", 2)
    layer = 2048 * 128 * 2 * (16 + 8) + 3 * 2048 * 6144
    weights = 2 * (2 * layer + 151936 * 2048)
    assert step["bytes_by_part"]["weights"] == pytest.approx(weights, rel=0.01)
    assert step["bytes_by_part"]["optimizer"] == pytest.approx(2 * weights, rel=0.01)
    assert 0.9 < step["flops"] / step["model_flops"] < 2.5
    assert 0.9 < sampler["flops"] / sampler["model_flops"] < 1.5
    # Of a token step at the least the weights, of which 64 times.
    assert sampler["hbm_bytes"] > 64 * weights
    assert sampler["hbm_bytes"] < 2 * 64 * weights


def test_experts_multiply_the_rows_that_visit_them():
    """XLA's own product for GPUs multiplies all rows by all 16."""
    step = program("experts", "train_step", 2)
    assert step["flops"] < 2.5 * step["model_flops"]
    sampler = program("experts", "sampler", 2)
    assert sampler["flops"] < 2.5 * sampler["model_flops"]


def test_every_gpu_is_compiled_for():
    names = [name for name, chip in CHIPS.items() if chip.platform == "gpu"]
    kinds = ask("gpu_kinds", [f"2*{name}x8" for name in names])
    assert all(kind in MEMORY for kind in kinds), kinds
    assert len(set(kinds)) == len(names)


def test_a_weight_in_float8_is_rounded_before_it_is_multiplied():
    """XLA may leave a conversion to float8 and back out, on chips that have no products of it."""
    for text in ask("gpu_rounded", ["a100x1", "l4x1", "h100x1"], "float8"):
        assert "f8e4m3fn[256,512]" in text


def test_no_matrix_in_float8_is_written_in_16_bits_for_a_token():
    """Of two layers of 1.7B most is the output matrix; compiled for a GPU without float8."""
    changed = tree("1.7b", 2)
    changed["sampling"] |= {"float8": ["weights"]}
    if jax.__version_info__ < (0, 11):
        with pytest.raises(UserError, match=r"does not compile sampler for a100x1; JAX 0\.11"):
            ask("gpu_program", changed, "a100x1", "sampler")
        return
    float8 = ask("gpu_program", changed, "a100x1", "sampler")["hbm_bytes"]
    assert float8 < 0.7 * program("1.7b", "sampler", 2)["hbm_bytes"]


CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("gpu_*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configurations_divide_and_fit_as_counted(path):
    config = load_config(path)
    topology = parse_topology(config.plan.topology)
    assert abstract_run_on(config, topology).mesh.devices.flat[0].platform == "gpu"
    assert make_plan(config, topology, "counting").fits
