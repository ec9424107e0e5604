"""Text to token ids and back: the characters of the procedural tasks, and checkpoints' tokenizers.

Every tokenizer has ``vocab_size``, ``eos_id``, ``pad_id``, ``stop_ids``, ``encode``, ``decode`` and
``chat``; see ``Tokenizer``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from jrl.errors import UserError

PAD_ID = 0
STOP_ID = 1
ALPHABET = "0123456789+-*=>,:;? abcdefghijklmnopqrstuvwxyz"
"""The characters of the built-in tokenizer; the first one has id 2."""


class Tokenizer(Protocol):
    """What the library asks of a tokenizer.

    Attributes:
      vocab_size: the number of ids, special tokens included; every id is below it.
      eos_id: the id that ends a sequence.
      pad_id: the id that fills unused places; may equal ``eos_id``, masks never read it.
      stop_ids: ids that end a completion; holds ``eos_id``.
    """

    vocab_size: int
    eos_id: int
    pad_id: int
    stop_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; adds no special token, and reads those spelled out in it."""
        ...

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of ``ids``; special tokens are left out, or spelled."""
        ...

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """The conversation as the model was trained to read it."""
        ...


class CharTokenizer:
    """One token for each character of a fixed alphabet; id 0 pads and id 1 stops."""

    def __init__(self) -> None:
        self.vocab_size = len(ALPHABET) + 2
        self.eos_id = STOP_ID
        self.pad_id = PAD_ID
        self.stop_ids = (STOP_ID,)
        self._ids = {character: i + 2 for i, character in enumerate(ALPHABET)}
        self._pieces = ["<pad>", "<stop>", *ALPHABET]

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, one for each character.

        Raises:
          UserError: a character is not in the alphabet.

        >>> CharTokenizer().encode("10>")
        [3, 2, 16]
        """
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            raise UserError(
                f"the character {error.args[0]!r} in {text[:40]!r} is not in the built-in "
                f"tokenizer's alphabet {ALPHABET!r}; use a checkpoint's tokenizer for free text"
            ) from None

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of ``ids``; ids outside the vocabulary become U+FFFD.

        >>> CharTokenizer().decode([3, 2, 16, 1, 0])
        '10>'
        """
        first = 2 if skip_special else 0
        return "".join(
            self._pieces[i] if i < self.vocab_size else "\ufffd"
            for i in (int(i) for i in ids)
            if i >= first
        )

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """Always an error: the built-in tokenizer knows no conversations."""
        raise UserError(
            "the built-in character tokenizer has no chat template; "
            "set data.template to a text with {question} in it"
        )


def char_tokenizer() -> CharTokenizer:
    """The tokenizer of the procedural tasks.

    >>> char_tokenizer().vocab_size
    48
    """
    return CharTokenizer()
