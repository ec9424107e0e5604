"""Text to token ids and back: what every tokenizer has, and that of the procedural tasks.

Every tokenizer has ``vocab_size``, ``eos_id``, ``pad_id``, ``stop_ids``, ``encode``,
``encode_plain``, ``decode`` and ``chat``; see ``Tokenizer``. Those of checkpoints are in
``file_tokenizer``, and by their names here too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jrl.errors import UserError
from jrl.models.file_tokenizer import FileTokenizer as FileTokenizer
from jrl.models.file_tokenizer import load_tokenizer as load_tokenizer

PAD_ID = 0
STOP_ID = 1
ALPHABET = "0123456789+-*=>,:;? abcdefghijklmnopqrstuvwxyz"
"""The characters of the built-in tokenizer; the first one has id 2."""


class Tokenizer(Protocol):
    """The tokenizer interface of the library.

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

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids of ``text``; special tokens spelled out in it are read as such.

        ``add_special`` puts those around it that the tokenizer adds to a plain text, such as BOS.
        """
        ...

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text from outside, such as a tool's output: never a control token's."""
        ...

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of ``ids``; special tokens are left out, or spelled."""
        ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation as the model was trained to read it."""
        ...


class CharTokenizer:
    """One token for each character of a fixed alphabet; id 0 pads and id 1 stops.

    Args:
      alphabet: different characters; the first one has id 2.
    """

    def __init__(self, alphabet: str = ALPHABET) -> None:
        self.alphabet = alphabet
        self.vocab_size = len(alphabet) + 2
        self.longest_token = 1
        self.eos_id = STOP_ID
        self.pad_id = PAD_ID
        self.stop_ids: tuple[int, ...] = (STOP_ID,)
        self._ids = {character: i + 2 for i, character in enumerate(alphabet)}
        self._pieces = ["<pad>", "<stop>", *alphabet]

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids of ``text``, one for each character; there are no special tokens to add.

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
                f"tokenizer's alphabet {self.alphabet!r}; "
                "use a checkpoint's tokenizer for free text"
            ) from None

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text from outside, in small letters; "?" is what the alphabet lacks.

        >>> char_tokenizer().decode(CharTokenizer().encode_plain("Error: 1/0"))
        'error: 1?0'
        """
        return [self._ids.get(character, self._ids["?"]) for character in text.lower()]

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
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Always an error: the built-in tokenizer knows no conversations."""
        raise UserError(
            "the built-in character tokenizer has no chat template; "
            "set data.template to a text with {question} in it"
        )

    def save(self, directory: Path) -> None:
        """Writes the files from which ``FileTokenizer`` and transformers read this tokenizer."""
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers

        backend = tokenizers.Tokenizer(
            models.BPE({piece: i for i, piece in enumerate(self._pieces)}, [])
        )
        backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        backend.decoder = decoders.Fuse()
        backend.add_special_tokens(["<pad>", "<stop>"])
        backend.save(str(directory / "tokenizer.json"))
        files = {
            "generation_config.json": {"eos_token_id": STOP_ID, "pad_token_id": PAD_ID},
            "tokenizer_config.json": {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<stop>",
                "pad_token": "<pad>",
                "model_input_names": ["input_ids", "attention_mask"],
            },
        }
        for name, content in files.items():
            text = json.dumps(content, indent=2) + "\n"
            (directory / name).write_text(text, encoding="utf-8")


def char_tokenizer(alphabet: str = ALPHABET) -> CharTokenizer:
    """The tokenizer of the procedural tasks, or one of fewer characters.

    >>> char_tokenizer().vocab_size, char_tokenizer("ldru").encode("u")
    (48, [5])
    """
    return CharTokenizer(alphabet)


def check_vocab(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises UserError when the tokenizer writes ids that the model has no embedding for.

    A smaller tokenizer is fine: checkpoints often pad their embeddings. So are added tokens past
    the end that text does not use, as Gemma 3 has one for images; ``check_ids`` finds used ones.
    """
    base = getattr(tokenizer, "base_vocab_size", tokenizer.vocab_size)
    if base > vocab_size:
        raise UserError(
            f"the tokenizer has {base} ids but the model's vocabulary has only {vocab_size}; use "
            "the tokenizer that belongs to the checkpoint"
        )
    if max(tokenizer.stop_ids) >= vocab_size:
        raise UserError(
            f"the tokenizer ends a text with id {max(tokenizer.stop_ids)} but the model's "
            f"vocabulary has only {vocab_size} ids; use the checkpoint's own tokenizer"
        )


def check_ids(largest: int, vocab_size: int, where: str) -> None:
    """Raises UserError when a text holds an id that the model has no embedding for."""
    if largest >= vocab_size:
        raise UserError(
            f"{where}: a text holds token id {largest} but the model's vocabulary has only "
            f"{vocab_size} ids; an added token of the tokenizer was never given an embedding"
        )


def line_ends(tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """The ids whose text ends a line."""
    return tuple(i for i in range(vocab_size) if "\n" in tokenizer.decode([i]))
