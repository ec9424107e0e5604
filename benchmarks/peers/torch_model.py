"""The model of the flags in PyTorch, as ``transformers`` has it."""

from __future__ import annotations

import argparse
import warnings

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks import flags


def on_gpu(args: argparse.Namespace) -> bool:
    """Whether the flags, or what is there, say to run on a GPU."""
    return args.platform == "gpu" or (args.platform == "auto" and torch.cuda.is_available())


def wait(args: argparse.Namespace) -> None:
    """Returns when the device has done what it was given, so that times are those of the work."""
    if on_gpu(args):
        torch.cuda.synchronize()


def make_model(args: argparse.Namespace) -> Qwen3ForCausalLM:
    """Weights at random; no token ends a completion when the flags say so."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(args.seed)
    config = Qwen3Config(
        vocab_size=args.vocab,
        hidden_size=args.dim,
        intermediate_size=args.ffn,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=flags.prompt_width(args) + args.gen_len,
        tie_word_embeddings=not args.untied,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=flags.BOS,
        eos_token_id=end_token(args),
        pad_token_id=flags.PAD,
    )
    return Qwen3ForCausalLM(config).to(getattr(torch, args.dtype))


def end_token(args: argparse.Namespace) -> int:
    """The id that ends a completion; one that no vocabulary has when nothing shall."""
    return flags.EOS if args.eos == "natural" else args.vocab + 7
