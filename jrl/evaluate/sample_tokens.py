"""Completions token by token, for the report: text and training statistics of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jrl.models.tokenizer import Tokenizer
from jrl.sampling.text import TextStream
from jrl.types import Rollout

MOST = 4096
"""Tokens of the kept completions of one step that are kept one by one."""


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each token; joined they are the completion, special tokens spelled out.

    A token that ends inside a character has no text, and the token that completes it has all.

    Args:
      tokenizer: of the policy.
      ids: of one completion.

    >>> from jrl.models.tokenizer import char_tokenizer
    >>> pieces(char_tokenizer(), [3, 2, 1])
    ['1', '0', '<stop>']
    """
    stream, texts, end = TextStream(tokenizer), [], 0
    stream.push(ids)
    stream.close()
    for token, stop in zip(ids, stream.ends, strict=True):
        text = stream.text[end:stop] or _special(tokenizer, token)
        texts.append(text)
        end = stop
    return texts


def _special(tokenizer: Tokenizer, token: int) -> str:
    """The spelling of a special token; "" for another one."""
    return "" if tokenizer.decode([token]) else tokenizer.decode([token], skip_special=False)


def training_view(
    rollout: Rollout,
    where: tuple[int, int, slice],
    advantages: np.ndarray,
    tokenizer: Tokenizer,
    each: bool,
) -> dict[str, Any]:
    """Training statistics of one completion, for its record.

    Args:
      rollout: on the host.
      where: its group, its member, and its tokens.
      advantages: [groups, G, T] float32; 0 where a token is not trained.
      tokenizer: of the policy.
      each: whether to say it of each token, too.

    Returns:
      "advantage", the mean over the tokens under the mask; and, of each token, "tokens": its
      "text"; its "logprobs", nats, as drawn, None where the policy did not draw it; its
      "advantages", one number where all are the same; and its "mask", a character of 0 and 1 a
      token, where not all are 1.
    """
    mask, row_advantages = rollout.mask[where], advantages[where]
    live = row_advantages[mask]
    view: dict[str, Any] = {"advantage": float(live.mean()) if live.size else 0.0}
    if not each:
        return view
    same = live.size > 0 and bool((live == live[0]).all())
    logprobs = zip(rollout.sampler_logprobs[where].tolist(), mask, strict=True)
    tokens: dict[str, Any] = {
        "text": pieces(tokenizer, rollout.tokens[where].tolist()),
        "logprobs": [round(x, 3) if drawn else None for x, drawn in logprobs],
        "advantages": _rounded(live[0]) if same else [_rounded(x) for x in row_advantages],
    }
    if not mask.all():
        tokens["mask"] = "".join("01"[int(m)] for m in mask)
    return view | {"tokens": tokens}


def _rounded(value: Any) -> float:
    return float(f"{float(value):.4g}")
