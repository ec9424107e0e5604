"""Distance of faster samplers' distributions from the one that training scores with.

    python -m benchmarks.distribution --layers 8 --dim 512 --vocab 32000
    python -m benchmarks.distribution --model DIR

Draws completions with each sampler, scores the same tokens as training does, and prints one JSON:
for each sampler the mean and the largest absolute difference of log-probabilities (nats), and an
estimate of KL(sampler, policy) in nats a token. The sampler in the trainer's own dtype differs by
rounding alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import flags, work
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.quant import sampler
from jrl.models.transformer import transformer
from jrl.run.sampler_difference import rollout_difference
from jrl.sampling.generate import generate
from jrl.sampling.params import SamplingParams, make_sampling_params
from jrl.types import Network, Params


def samplers(config: ModelConfig) -> dict[str, Network]:
    """The samplers that are compared, by name."""
    networks = {}
    for dtype in dict.fromkeys((config.dtype, "bfloat16")):
        networks[dtype] = transformer(dataclasses.replace(config, dtype=dtype))
    network = networks[config.dtype]
    options = [("same", "int8")]
    if not any(config.sparse):
        options += [("int8", "same"), ("int8", "int8"), ("float8", "same")]
    for weights, cache in options:
        parts = (("weights", weights), ("cache", cache))
        rounded = [part for part, kind in parts if kind != "same"]
        name = f"{weights if weights != 'same' else cache} {' and '.join(rounded)}"
        networks[name] = sampler(network, config, weights=weights, cache=cache)
    return networks


def measure(
    params: Params,
    config: ModelConfig,
    prompts: Sequence[np.ndarray],
    sampling_params: SamplingParams,
    **sizes: int,
) -> dict[str, dict[str, float]]:
    """``distribution_difference`` of each sampler.

    Args:
      params: of the model.
      config: the model as it is trained.
      prompts: tokens [N, P] int32 and lengths [N] int32.
      sampling_params: what is drawn from.
      **sizes: group and max_new_tokens.
    """
    tokens, lengths = prompts
    ids, differences = np.arange(len(lengths), dtype=np.int32), {}
    score = jax.jit(partial(rollout_difference, network=transformer(config)))
    for name, network in samplers(config).items():
        draw = jax.jit(partial(generate, network=network, stop_tokens=(), **sizes))
        rollout, _ = draw(
            jax.random.key(0), params, tokens, lengths, sampling_params, np.int32(0), ids
        )
        differences[name] = {
            key: float(x) for key, x in score(params, rollout, sampling_params).items()
        }
    return differences


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the JSON."""
    parser = flags.parser(__doc__.splitlines()[0])
    parser.add_argument("--model", help="a Hugging Face checkpoint instead of random weights")
    parser.set_defaults(dim=256, gen_len=64, batch=4, group=4)
    args = parser.parse_args(arguments)
    config, params = _model(args)
    width = flags.prompt_width(args)
    args.vocab = config.vocab_size
    first = flags.prompts(args, 1)[0]
    tokens = np.zeros((len(first), width), np.int32)
    for row, prompt in zip(tokens, first, strict=True):
        row[: len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in first], np.int32)
    sampling_params = make_sampling_params(args.temperature, args.top_k, args.top_p)
    sizes = {"group": args.group, "max_new_tokens": args.gen_len}
    record: dict[str, Any] = {
        "trainer": config.dtype,
        "parameters": int(sum(np.prod(x.shape) for x in jax.tree.leaves(params))),
        "samplers": measure(params, config, (tokens, lengths), sampling_params, **sizes),
    }
    text = json.dumps(record, indent=2)
    print(text)
    if args.json:
        Path(args.json).write_text(text + "\n")


def _model(args: argparse.Namespace) -> tuple[ModelConfig, Params]:
    if args.model is None:
        config = work.model_config(args)
        return config, jax.jit(transformer(config).init)(jax.random.key(args.seed))
    config, params = hf.load(args.model, dtype=args.dtype)
    return config, jax.tree.map(jnp.asarray, params)


if __name__ == "__main__":
    main()
