"""Questions to judges, and the verdicts already given to them, in files named by their content."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jrl.rewards.verdicts import Question

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""Exceptions from parsing a malformed reply or file."""
_OPEN_NUMBER = re.compile(r"\d[.,]?\Z")
"""The end of a text in a number that may have further digits."""


class QuestionVote(NamedTuple):
    """A question and which of its votes this is."""

    question: Question
    vote: int = 0


class Reply(NamedTuple):
    """A judge's reply in which there is a verdict.

    Attributes:
      text: of the judge.
      read: reads it, for the question that was sent.
      verdict: of that question.
    """

    text: str
    read: Callable[[str], Any]
    verdict: Any

    def verdict_for(self, question: Question) -> Any:
        """The verdict of a question of the same words, whose row may have another answer."""
        return self.verdict if question.read == self.read else _verdict(question, self.text)


def reply_of(text: Any, question: Question, *, cut: bool = False) -> Reply | None:
    """The reply to a question; None where no verdict is in it.

    Args:
      text: of the judge.
      question: what was asked.
      cut: whether a limit of tokens ended the reply: "Score: 1" may have been "Score: 10".
    """
    if not isinstance(text, str) or (cut and _OPEN_NUMBER.search(text)):
        return None
    verdict = _verdict(question, text)
    return None if verdict is None else Reply(text, question.read, verdict)


def _verdict(question: Question, text: str) -> Any:
    """The verdict in a reply; None where there is none, or where the reader raises."""
    try:
        return question.read(text)
    except Exception:  # a form of one's own, or one that did not foresee such a reply
        return None


def verdicts_of(entries: Iterable[QuestionVote], replies: Iterable[Reply | None]) -> list[Any]:
    """The verdict of each question in its reply; None without one."""
    pairs = zip(entries, replies, strict=True)
    return [None if reply is None else reply.verdict_for(each.question) for each, reply in pairs]


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

    def read(self, name: str, question: Question) -> Reply | None:
        """The reply of that name, if there is a verdict for the question in it; else None."""
        if self.directory is None:
            return None
        try:
            return reply_of(json.loads(self._file(name).read_bytes())["reply"], question)
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
