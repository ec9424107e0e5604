"""Questions to judges, and the verdicts already given to them, in files named by their content."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jrl.rewards.verdicts import Question

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What a reply or a file raises where it is read and is not what it should be."""


class QuestionVote(NamedTuple):
    """A question and which of its votes this is."""

    question: Question
    vote: int = 0


def verdicts_of(asked: Iterable[QuestionVote], replies: Iterable[str | None]) -> list[Any]:
    """The verdict of each question in its reply; None without one.

    Questions of the same words share a reply, and each reads it for itself: their rows may have
    different answers.
    """
    pairs = zip(asked, replies, strict=True)
    return [None if reply is None else each.question.read(reply) for each, reply in pairs]


class VerdictCache(NamedTuple):
    """Replies of one judge on disk; several processes may share them.

    Attributes:
      directory: of all; None keeps nothing.
      model: who replied, as JSON values.
      how: the settings that a reply depends on besides.
    """

    directory: Path | None
    model: Any
    how: Mapping[str, Any]

    def name(self, entry: QuestionVote) -> str:
        """The sha256 of everything that a reply depends on."""
        messages = [dict(message) for message in entry.question.messages]
        content = [self.model, messages, dict(self.how), entry.vote]
        text = json.dumps(content, sort_keys=True, default=str)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def read(self, name: str, question: Question) -> str | None:
        """The reply of that name, if there is a verdict for the question in it; else None."""
        if self.directory is None:
            return None
        try:
            reply = json.loads(self._file(name).read_bytes())["reply"]
            return reply if question.read(reply) is not None else None
        except (OSError, *UNREADABLE):
            return None

    def write(self, name: str, reply: str) -> None:
        """Keeps a reply."""
        if self.directory is None:
            return
        if not self.directory.parent.is_dir():
            return  # the run was moved away, and its directory shall not come back
        file = self._file(name)
        part = file.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        text = json.dumps({"model": self.model, "reply": reply})
        # A full disk loses a verdict of the cache, not the run.
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(text, encoding="utf-8")
            part.replace(file)  # whole, whoever else writes it

    def _file(self, name: str) -> Path:
        assert self.directory is not None
        return self.directory / name[:2] / f"{name}.json"
