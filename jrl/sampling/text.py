"""Tokens to text as they arrive: complete characters only, cut at stop strings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jrl.errors import UserError
from jrl.models.tokenizer import Tokenizer

_BROKEN = "\ufffd"
_MAX_PENDING = 3
"""A character has at most four bytes, so at most three tokens wait for the rest of one."""


class TextStream:
    """The text of one completion, token by token.

    Text returned by ``push`` is final: an incomplete character waits for its other tokens, and
    text that may be the beginning of a stop string waits until that is decided. The returned
    texts, joined, do not depend on how many tokens were pushed at a time.

    Attributes:
      text: everything decoded, up to the stop string if one was found.
      ends: the length of ``text`` after each token, characters.
      stopped: whether a stop string was found; later tokens are ignored.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids: list[int] = []
        self._anchor = self._read = 0  # tokens: where decoding starts, and how many are decoded
        self._released = 0
        self.text = ""
        self.ends: list[int] = []
        self.stopped = False

    def push(self, tokens: Iterable[int]) -> str:
        """Decodes tokens; returns the text that has become final.

        Args:
          tokens: the next ids, without the stop token.
        """
        for token in tokens:
            if self.stopped:
                break
            self._ids.append(int(token))
            self._decode(last=False)
            self.ends.append(len(self.text))
        return self._give(0 if self.stopped else self._waiting())

    def close(self) -> str:
        """Ends the text; returns the part held back for stop strings."""
        if not self.stopped:
            self._decode(last=True)
            if self.ends and not self.stopped:
                self.ends[-1] = len(self.text)
        return self._give(0)

    def _decode(self, last: bool) -> None:
        # Decoders may treat the first token specially, so both texts start at the same token.
        decode = self._tokenizer.decode
        decoded = decode(self._ids[self._anchor : self._read])
        longer = decode(self._ids[self._anchor :])
        pending = len(self._ids) - self._read
        # A character's bytes may come in several tokens: half of them is no text yet.
        if longer.endswith(_BROKEN) and pending <= _MAX_PENDING and not last:
            return
        begin = len(self.text)
        self.text += longer[len(decoded) :]
        if pending:
            self._anchor, self._read = self._read, len(self._ids)
        matches = [
            position
            for stop in self._stop
            if (position := self.text.find(stop, max(0, begin - len(stop) + 1))) >= 0
        ]
        if matches:
            self.text, self.stopped = self.text[: min(matches)], True

    def _waiting(self) -> int:
        """Characters at the end of the text that may begin a stop string."""
        for size in range(min(len(self.text), max(map(len, self._stop), default=1) - 1), 0, -1):
            tail = self.text[-size:]
            if any(stop.startswith(tail) for stop in self._stop):
                return size
        return 0

    def _give(self, waiting: int) -> str:
        end = max(len(self.text) - waiting, self._released)
        begin, self._released = self._released, end
        return self.text[begin:end]


def longest_text(tokenizer: Tokenizer, prompt_tokens: int) -> int:
    """Maximum characters of a prompt; a longer text is not encoded at all.

    Args:
      tokenizer: of the prompt.
      prompt_tokens: of the longest prompt.
    """
    return prompt_tokens * getattr(tokenizer, "longest_token", 64) + 1000


def check_stop(tokenizer: Tokenizer, stop: str, name: str = "stop") -> None:
    """Raises UserError for a stop string that can occur in no completion.

    The searched text has no special tokens, and a tokenizer may not know every character.
    """
    if not stop:
        raise UserError(f"{name} = ''; an empty stop string matches nothing; leave it out")
    # With a letter before it, as decoders may drop the space at the beginning of a text.
    round_trip = tokenizer.decode(tokenizer.encode("a" + stop))
    if stop not in round_trip:
        raise UserError(
            f"{name} = {stop!r} can never match: the tokenizer decodes it as {round_trip[1:]!r}; "
            "special tokens are not part of the text"
        )
