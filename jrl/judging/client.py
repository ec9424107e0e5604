"""The client of judges: requests at the same time, with retries, limits, and a cache on disk.

    client = JudgeClient(table, "rewards.helpful", cache=Path("runs/x/judge"))
    client.begin([QuestionVote(question, vote=0)])        # returns at once; not needed
    verdicts, counts = client.verdicts([QuestionVote(question, vote=0)])

Requests wait for the network alone, so they run in threads of this process. Nothing of a judge ends
a run: what has no verdict is None and counted.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import random
import threading
import time
import urllib.error
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jrl.config.judge import JudgeTable
from jrl.config.secrets import without_secrets
from jrl.episodes.model_endpoint import check_url, endpoint, environment_variable
from jrl.errors import UserError
from jrl.judging.cache import (
    UNREADABLE,
    QuestionVote,
    Reply,
    VerdictCache,
    reply_of,
    verdicts_of,
)
from jrl.judging.limits import Pace, Question, QuestionBatch
from jrl.system.wait_reports import waiting

_LARGEST = 4 << 20
"""Bytes of a response."""
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0
"""Seconds before the first retry, doubled up to the second for each one that failed again, while
the judge answered no other question."""
_PROBE_SECONDS = 30.0
_LONGEST_HOLD = 600.0
"""Seconds after which a judge is asked again, whatever its Retry-After says."""
_AGAIN = {408, 409, 425, 429}
"""Statuses below 500 after which a request is repeated."""
_TOO_MANY = {429, 503}
"""Statuses of a server that may have had too many requests."""


class JudgeClient:
    """A model behind an endpoint that gives verdicts.

    Args:
      table: the judge's keys.
      key: "rewards.NAME", for messages.
      cache: directory of verdicts already given; None for none. Several processes may share it.
      processes: that share ``requests_per_minute``.

    Raises:
      UserError: no address, or an environment variable that does not exist.
    """

    def __init__(
        self, table: JudgeTable, key: str, *, cache: Path | None = None, processes: int = 1
    ) -> None:
        self.table, self._key = table, key
        # Servers may call different models by one name.
        how = {"url": without_secrets(table.url or ""), "temperature": table.temperature}
        how |= {"max_tokens": table.max_tokens, **table.fields}
        self._cache = VerdictCache(cache, table.model, how)
        self._secret = ""
        self._lock = threading.Lock()  # guards what follows
        self._batch: QuestionBatch | None = None
        self._begun_names: set[str] = set()
        self._beside = table.at_once  # overdue requests that are not among ``at_once``
        check_url(table.url, f"{key}.url")
        if table.key_variable:
            self._secret = environment_variable(table.key_variable, f"{key}.key_variable")
        self._pace = Pace(table.requests_per_minute / processes)

    def probe(self) -> None:
        """Sends one request.

        Raises:
          UserError: nobody answers at the address, or the request is refused. A server that is busy
            or fails, as its status says, is there.
        """
        table, message = self.table, {"role": "user", "content": "Answer with the word yes."}
        where = f"{self._key}.url = {without_secrets(table.url)!r}"
        try:
            self._send((message,), 0, min(table.timeout, _PROBE_SECONDS))
        except urllib.error.HTTPError as error:
            if not _is_passing(error):
                reason = f"{error.code} {error.reason}"
                if address := error.headers.get("Location"):
                    reason += f", it redirects to {address}"
                with contextlib.suppress(OSError, http.client.HTTPException):
                    text = error.read(300).decode("utf-8", "replace")
                    reason += f": {' '.join(text.split())}"
                raise UserError(
                    f"{where} refuses model {table.model!r} ({reason}); check {self._key}.url,"
                    f" {self._key}.model and {self._key}.key_variable"
                ) from None
        except (OSError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", "") or error or type(error).__name__)
            reason = ascii(reason[:200])[1:-1]  # a server may have sent any bytes
            raise UserError(
                f"{where} does not answer ({reason}); start the server, or correct the address"
            ) from None
        except UNREADABLE as error:
            raise UserError(
                f"{where} answers, but not as OpenAI's API does ({error!r:.100}); name the base of"
                " the API, such as http://localhost:8000/v1"
            ) from None

    def begin(self, questions: Sequence[QuestionVote]) -> None:
        """Begins to ask; ``verdicts`` then has what was said meanwhile.

        Args:
          questions: with their votes. Those of earlier calls, or in the cache, are not asked again.
        """
        with self._lock:
            self._begin(questions)

    def _begin(self, questions: Sequence[QuestionVote]) -> tuple[QuestionBatch, list[str]]:
        """The batch of the questions, which are under way, and their names."""
        batch = self._batch = self._batch or QuestionBatch(self.table.at_once, self._beside)
        names = [self._cache.name(each) for each in questions]
        for name, each in zip(names, questions, strict=True):
            if name in self._begun_names:
                continue
            self._begun_names.add(name)
            reply = self._cache.read(name, each.question)
            if reply is not None:
                batch.finish(name, "judge_cached", reply)
                continue
            batch.put(Question(name, each))
            self._start_thread(batch)
        return batch, names

    def _start_thread(self, batch: QuestionBatch) -> None:
        if batch.start_thread():
            # Daemons: a request that a server holds open for ever must not hold the process.
            threading.Thread(target=self._work, args=(batch,), name="judge", daemon=True).start()

    def verdicts(self, questions: Sequence[QuestionVote]) -> tuple[list[Any], dict[str, float]]:
        """The judge's verdicts, within ``seconds`` from now.

        Args:
          questions: with their votes; equal ones are asked once.

        Returns:
          (a verdict for each, or None; ``judge_limits.COUNTS`` by name).
        """
        with self._lock:
            batch, names = self._begin(questions)
        batch.limit(self.table.seconds)
        own_names = dict.fromkeys(names).keys()
        with waiting("judges", lambda: batch.progress(own_names), seconds=self.table.seconds):
            batch.wait(own_names)
        self.stop()
        by_name, counts = batch.close(own_names)
        return verdicts_of(questions, map(by_name.get, names)), counts

    def stop(self) -> None:
        """Drops what was begun, and ends ``verdicts`` where another thread waits in it."""
        with self._lock:
            if self._batch is not None:
                self._batch.stop()
            self._batch, self._begun_names = None, set()

    def _work(self, batch: QuestionBatch) -> None:
        """Asks the questions of a batch until none is left or it is over."""
        while (question := batch.take()) is not None:
            self._start_thread(batch)
            result = self._ask(question, batch)
            if result is not None:
                batch.finish(question.name, *result)

    def _ask(self, question: Question, batch: QuestionBatch) -> tuple[str, Reply | None] | None:
        """(what is to be counted besides, the reply or None); None to ask again later."""
        name, entry, attempt = question[:3]
        crowded, busy, works, retry_after = False, False, False, 0.0
        try:
            if not self._pace.wait(batch):
                return "judge_timeouts", None
            batch.count("judge_calls")
            if question.answered >= 0:
                batch.count("judge_retries")
            crowded = batch.send(name)
            text, cut = self._send(entry.question.messages, entry.vote, batch.left())
            batch.replied(name)
        except urllib.error.HTTPError as error:
            error.close()
            if not _is_passing(error):
                return "judge_failures", None
            busy = error.code in _TOO_MANY
            works = batch.works_on_others(name, question.failed)
            if crowded and busy:
                self._beside = 0
                batch.narrow()
            if retry_after := _retry_after(error.headers.get("Retry-After")):
                self._pace.refused(retry_after)
        except (OSError, http.client.HTTPException):
            pass
        except UNREADABLE:
            return "judge_unreadable", None
        else:
            self._pace.served()
            reply = reply_of(text, entry.question, cut=cut)
            if reply is None:
                return "judge_unreadable", None
            self._cache.write(name, reply.text)
            return "", reply
        finally:
            batch.returned(name)
        if batch.left() <= retry_after:
            return "judge_timeouts", None
        # Where others are answered or under way, it is a limit of rate, not this question's fault.
        served = self._pace.answered > max(question.answered, 0)
        question = question.again(self._pace.answered, time.monotonic())
        if busy and (served or works):
            question = question._replace(attempt=attempt)
        elif attempt == self.table.retries:
            return "judge_failures", None
        # Jitter, so that requests that failed together do not return together.
        wait = min(_FIRST_WAIT * 2**question.in_vain, _LONGEST_WAIT) * random.uniform(0.5, 1.5)
        batch.put(question, max(wait, retry_after))
        return None

    def _send(
        self, messages: Sequence[Mapping[str, str]], vote: int, seconds: float
    ) -> tuple[Any, bool]:
        """The reply, and whether its limit of tokens ended it."""
        table = self.table
        fields = dict(table.fields)
        if vote and isinstance(fields.get("seed"), int):
            fields["seed"] += vote
        speak = endpoint(
            table.url,
            table.model,
            key=self._secret,
            max_tokens=table.max_tokens,
            temperature=table.temperature,
            fields=fields,
            timeout=max(min(table.timeout, seconds), 0.001),
            most_bytes=_LARGEST,
            read=lambda x: (x["message"]["content"], x.get("finish_reason") == "length"),
        )
        text, cut = speak(list(messages))
        return text, cut


def _is_passing(error: urllib.error.HTTPError) -> bool:
    return error.code >= 500 or error.code in _AGAIN


def _retry_after(text: str | None) -> float:
    """The seconds that a header Retry-After asks for, as a number or as a date; 0 for nothing."""
    if not text:
        return 0.0
    try:
        seconds = float(text) if text.strip().replace(".", "", 1).isdigit() else None
        if seconds is None:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, OverflowError):
        return 0.0
    return min(max(seconds, 0.0), _LONGEST_HOLD)
