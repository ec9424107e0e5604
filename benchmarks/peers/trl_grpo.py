"""GRPO steps with TRL on PyTorch, timed; runs in an environment of its own.

Its trainer is used as it is; a step is what happens between two calls of its callback.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import datasets
import tokenizers
import torch
import transformers
import trl

from benchmarks import flags
from benchmarks.peers.record import Record
from benchmarks.peers.torch_model import end_token, make_model, on_gpu, wait


def make_tokenizer(vocab: int, end: int) -> transformers.PreTrainedTokenizerFast:
    """A text is token ids with spaces between them; ``end`` may lie outside the vocabulary."""
    words = {str(i): i for i in range(vocab)} | {str(end): end}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=str(flags.PAD)))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=str(flags.PAD),
        bos_token=str(flags.BOS),
        eos_token=str(end),
        padding_side="left",
    )


def even_share(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(i % 2 == 0 for i in ids) / max(len(ids), 1) for ids in completion_ids]


class Clock(transformers.TrainerCallback):
    """Tells the record where steps begin and end."""

    def __init__(self, record: Record, args: argparse.Namespace) -> None:
        self.record, self.args = record, args

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """See ``TrainerCallback``."""
        self.record.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """See ``TrainerCallback``."""
        wait(self.args)
        self.record.end()


def main() -> None:
    args = flags.parser(__doc__ or "").parse_args()
    record, rows = Record(), args.batch * args.group
    micro = (args.micro or args.batch) * args.group
    texts = [" ".join(map(str, row)) for rows in flags.prompts(args, args.steps) for row in rows]
    with tempfile.TemporaryDirectory() as directory:
        # By path, because that is where the trainer takes its reference from.
        make_model(args).save_pretrained(directory)
        config = trl.GRPOConfig(
            output_dir=directory,
            use_cpu=not on_gpu(args),
            bf16=args.dtype == "bfloat16",
            model_init_kwargs={"dtype": args.dtype},
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            gradient_checkpointing=False,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=rows // micro,
            num_generations=args.group,
            max_steps=args.steps,
            max_completion_length=args.gen_len,
            shuffle_dataset=False,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            beta=args.beta,
            loss_type="grpo",
            epsilon=0.2,
            learning_rate=flags.LEARNING_RATE,
            lr_scheduler_type="constant",
            adam_beta1=flags.B1,
            adam_beta2=flags.B2,
            weight_decay=0.0,
            max_grad_norm=0.0,
            seed=args.seed,
        )
        trainer = trl.GRPOTrainer(
            model=directory,
            args=config,
            reward_funcs=even_share,
            train_dataset=datasets.Dataset.from_dict({"prompt": texts}),
            processing_class=make_tokenizer(args.vocab, end_token(args)),
            callbacks=[Clock(record, args)],
        )
        draw = trainer._generate_single_turn

        def timed(*positional: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            out = draw(*positional, **named)
            wait(args)
            record.spent("rollout", time.perf_counter() - begin)
            record.drew([len(ids) for ids in out[0]])
            return out

        trainer._generate_single_turn = timed
        trainer.train()
    versions = {"library": "trl", "version": trl.__version__, "torch": torch.__version__}
    flags.write(versions | {"args": vars(args)} | record.summary(), args.json)


if __name__ == "__main__":
    main()
