"""Constrained decoding: which tokens a grammar allows next, by the library llguidance.

    grammars = Grammars(tokenizer, vocab_size)
    grammars.check(grammar)                   # UserError for one that cannot be satisfied
    constraint = grammars.start(grammar)
    constraint.mask()                         # [W] uint32, a bit a token
    constraint.push(sampled)

A grammar is a text in llguidance's variant of Lark, in which ``%json`` stands before a JSON schema
(https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md). All work is on the host; the
row engine adds -inf to the logits of the other tokens, so no program depends on a grammar.
"""

from __future__ import annotations

import collections
import functools
import json
import re
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np

from jrl.errors import UserError
from jrl.models.file_tokenizer import FileTokenizer
from jrl.models.tokenizer import Tokenizer
from jrl.system.extras import need

_WORDS = {
    r"^Unimplemented keys: \[(.*)\]$": r"decoding cannot follow the schema's \1; remove it",
    r"^Unknown format: (.*)$": r"decoding cannot follow the schema's format = '\1'; remove it",
    r"^NoExtensionBias$|^circular references with sibling keys .*": (
        "the schema refers to nothing but itself; give it a type"
    ),
    r"^Failed to generate regex for (\w+) range: (.*)": (
        r"decoding cannot follow the schema's bounds of \1 (\2); remove or narrow them"
    ),
}
"""Messages of llguidance that do not say what to do, and what stands in their place."""
_REMEMBERED = 64
"""Compiled grammars that are kept; clients repeat their schemas."""


def mask_words(vocab_size: int) -> int:
    """W, 32-bit words of a mask over the vocabulary."""
    return -(-vocab_size // 32)


def no_mask(rows: int, vocab_size: int) -> np.ndarray:
    """[rows, W] uint32, masks that allow every token."""
    return np.full((rows, mask_words(vocab_size)), 0xFFFFFFFF, np.uint32)


class Grammars:
    """Compiles grammars for one tokenizer. Its methods may be called from any thread.

    Args:
      tokenizer: the model's.
      vocab_size: V, of the logits.

    Raises:
      UserError: llguidance is not installed, or it cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._library = need("llguidance", "serve", "constrained decoding")
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        size = max(tokenizer.vocab_size, vocab_size)
        try:
            self._compiler = _compiler(self._library, tokenizer, size)
        except Exception as error:  # of Rust, by any name
            reason = " ".join(str(error).split())
            problem = f"constrained decoding cannot use this model's tokenizer: {reason:.300}"
            raise UserError(problem) from None
        self._compiled: collections.OrderedDict[str, Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def check(self, grammar: str) -> None:
        """Raises UserError for a grammar that is wrong, or that no text of the model satisfies."""
        self.start(grammar).mask()

    def start(self, grammar: str) -> Constraint:
        """The grammar at the beginning of a completion.

        Raises:
          UserError: the grammar is wrong or cannot be satisfied.
        """
        with self._lock:
            compiled = self._compiled.pop(grammar, None)
        if compiled is None:
            # Not under the lock, for which the thread that decodes would wait; two requests with
            # one new schema may compile it twice.
            text = self._library.LLMatcher.grammar_from_lark(grammar)
            compiled = self._library.LLMatcher(self._compiler, text, log_level=0)
        if problem := compiled.get_error():
            raise UserError(_plain(problem))
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > _REMEMBERED:
                self._compiled.popitem(last=False)
            # The compiled grammar is shared; its state is not.
            matcher = compiled.deep_copy()
        return Constraint(matcher, self._vocab_size)

    def literal(self, text: str, *, last: bool = False) -> str:
        """An expression of a grammar for a text in which control tokens are spelled out.

        Args:
          text: that is matched.
          last: whether the completion may end with the text's last token.

        Raises:
          UserError: the text has a stop token elsewhere, at which the completion would end.
        """
        control = self._control
        if not control:
            return json.dumps(text)
        pattern = "|".join(map(re.escape, sorted(control, key=len, reverse=True)))
        parts = re.split(f"({pattern})", text)
        parts = [part for part in parts if part]
        before = parts[:-1] if last else parts
        if stop := next((p for p in before if control.get(p) in self._tokenizer.stop_ids), None):
            raise UserError(f"{stop!r} is a stop token of the model, which no grammar can ask for")
        return " ".join(
            f"<[{control[part]}]>" if part in control else json.dumps(part) for part in parts
        )

    @functools.cached_property
    def _control(self) -> dict[str, int]:
        """Control tokens, which no string of a grammar matches: text -> id."""
        ids = [i for i in range(self._tokenizer.vocab_size) if self._compiler.is_special_token(i)]
        texts = {self._tokenizer.decode([i], skip_special=False): i for i in ids}
        return {text: i for text, i in texts.items() if text and "\ufffd" not in text}


class Constraint:
    """The state of a grammar in one completion."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def mask(self) -> np.ndarray:
        """[W] uint32: bit t % 32 of word t // 32 says whether token t may come next.

        Where the grammar is complete, stop tokens may.

        Raises:
          UserError: no token may, or the grammar is too complex to go on.
        """
        bits = self._matcher.compute_bitmask()
        if problem := self._matcher.get_error():
            raise UserError(_plain(problem))
        words = np.zeros(mask_words(self._vocab_size), np.uint32)
        read = np.frombuffer(bits, np.uint32)[: words.size]
        words[: read.size] = read
        if spare := -self._vocab_size % 32:  # ids of the tokenizer that the model has no logit for
            words[-1] &= np.uint32(0xFFFFFFFF >> spare)
        if not words.any():
            raise UserError("the model's vocabulary has no token that the grammar allows next")
        return words

    def push(self, tokens: Iterable[int]) -> None:
        """Advances by sampled tokens; ``mask`` raises for one that was not allowed."""
        for token in tokens:
            self._matcher.consume_token(int(token))


def _compiler(library: Any, tokenizer: Tokenizer, size: int) -> Any:
    """Llguidance's view of a tokenizer, with ``size`` tokens."""
    stops = list(tokenizer.stop_ids)
    if isinstance(tokenizer, FileTokenizer):
        return library.LLTokenizer(tokenizer.to_json(), n_vocab=size, eos_token=stops)
    wrapped = library._tokenizer.TokenizerWrapper(_TokenBytes(tokenizer, size))
    # Slices are an optimisation for vocabularies of many thousand tokens.
    return library.LLTokenizer(wrapped, eos_token=stops, slices=[])


class _TokenBytes:
    """A tokenizer as llguidance takes those that are no tokenizer.json.

    Behind the vocabulary stand 256 tokens of a byte each, which the model has not: texts that a
    grammar forces are encoded, and a character that the model cannot write must not become another.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._tokenizer, self._size = tokenizer, size
        self.eos_token_id, self.bos_token_id = tokenizer.eos_id, None
        ids = range(tokenizer.vocab_size)
        texts = [tokenizer.decode([i], skip_special=False).encode() for i in ids]
        unused = range(len(texts), size)
        self.tokens = [*texts, *(b"" for _ in unused), *(bytes([b]) for b in range(256))]
        self.special_token_ids = sorted({tokenizer.pad_id, *tokenizer.stop_ids, *unused})

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        ids: list[int] = []
        for character in data.decode("utf-8", "surrogateescape"):
            try:
                ids += self._tokenizer.encode(character)
            except UserError:  # not in the vocabulary
                ids += [self._size + byte for byte in character.encode("utf-8", "surrogateescape")]
        return ids


def _plain(problem: str) -> str:
    """Llguidance's message in one line, without its excerpt of the grammar."""
    problem = re.sub(r"(\n +\d+ \||<state>).*", "", problem, flags=re.DOTALL)
    problem = re.sub(r"^at \d+\(\d+\): ", "", " ".join(problem.split()))
    problem = problem.removeprefix("failed to compile JSON schema: ")
    for pattern, words in _WORDS.items():
        problem = re.sub(pattern, words, problem)
    return problem[:300]
