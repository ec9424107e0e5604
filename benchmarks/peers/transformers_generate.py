"""Sampling with ``transformers`` on PyTorch, timed; runs in an environment of its own.

The same draws as ``python -m benchmarks.rollout``: every prompt ``--group`` times. It keeps no
log-probabilities of what it draws, which this library's sampler does.
"""

from __future__ import annotations

import time

import torch
import transformers

from benchmarks import flags
from benchmarks.peers.record import Record
from benchmarks.peers.torch_model import end_token, make_model, on_gpu, wait


def main() -> None:
    args = flags.parser(__doc__ or "").parse_args()
    device = "cuda" if on_gpu(args) else "cpu"
    model, record, width = make_model(args).eval().to(device), Record(), flags.prompt_width(args)
    with torch.no_grad():
        for rows in flags.prompts(args, args.steps):
            # Padding on the left, as its documentation asks for.
            padded = [[flags.PAD] * (width - len(row)) + row for row in rows]
            mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
            tokens, live = (torch.tensor(x).to(device) for x in (padded, mask))
            record.begin()
            begin = time.perf_counter()
            out = model.generate(
                tokens.repeat_interleave(args.group, 0),
                attention_mask=live.repeat_interleave(args.group, 0),
                do_sample=True,
                temperature=args.temperature,
                top_k=args.top_k,
                top_p=args.top_p,
                max_new_tokens=args.gen_len,
                eos_token_id=end_token(args),
                pad_token_id=flags.PAD,
            )[:, width:]
            wait(args)
            record.spent("rollout", time.perf_counter() - begin)
            # Without an end of text, every token counts.
            ended = (out == end_token(args)).long()
            before = ended.cumsum(1) - ended
            record.drew((before == 0).sum(1).tolist())
            record.end()
    versions = {"library": "transformers", "version": transformers.__version__}
    threads = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    flags.write(versions | threads | {"args": vars(args)} | record.summary(), args.json)


if __name__ == "__main__":
    main()
