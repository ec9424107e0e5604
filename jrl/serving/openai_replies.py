"""Replies of OpenAI's completions and chat completions, complete or in pieces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

from jrl.models.tokenizer import Tokenizer
from jrl.sampling.request import TokenLogprobs, Update
from jrl.serving.api_error import Json
from jrl.serving.openai_formats import THOUGHT_END
from jrl.serving.openai_requests import ApiRequest
from jrl.serving.openai_tools import calls_of
from jrl.types import StopReason

FINISH: Mapping[StopReason, str] = {
    StopReason.STOP_TOKEN: "stop",
    StopReason.STOP_STRING: "stop",
    StopReason.LENGTH: "length",
    StopReason.ABORTED: "abort",
}
"""OpenAI's words for why a completion ended, and one of this library's: aborted by the server."""


class ReplyChoice:
    """The reply to one completion of a request, as it grows.

    Attributes:
      sampled: tokens so far, a stop token included.
      finish: OpenAI's finish_reason; None while the completion runs.
    """

    def __init__(self, request: ApiRequest, index: int, tokenizer: Tokenizer) -> None:
        self._request, self._index, self._tokenizer = request, index, tokenizer
        self._text = ""
        # Of each token but a stop token: ids, log-probabilities, and characters up to its end.
        self._tokens: list[int] = []
        self._sampled: list[int] = []  # with the stop token
        self._reports: list[TokenLogprobs] = []
        self._ends: list[int] = []
        self._text_tokens = 0  # tokens whose log-probabilities belong to the text so far
        self._streamed = 0, 0  # tokens and characters of the pieces so far
        self.sampled = 0
        self.finish: str | None = None

    def add(self, update: Update) -> Json | None:
        """The next streamed piece of a choice; None if there is nothing to send yet."""
        if self.finish is not None:
            return None
        spoken = len(update.ends)
        self.sampled += len(update.tokens)
        self._tokens += update.tokens[:spoken]
        self._sampled += update.tokens
        if self._request.logprobs:
            self._reports += update.reports[:spoken]
        self._ends += update.ends
        if update.completion is not None:
            self.finish = FINISH[update.completion.stop]
        self._text += update.text
        self._text_tokens = self._tokens_of_text(update)
        first, begin = self._streamed
        nothing_new = len(self._text) == begin and self._text_tokens == first
        if self.finish is None and (self._waits() or nothing_new):
            return None
        self._streamed = self._text_tokens, len(self._text)
        return self._json(self._text[begin:], range(first, self._text_tokens), True)

    def _waits(self) -> bool:
        """Whether what the text so far means is known only later: a call, or a thought."""
        if self._request.tools is not None or self._channels is not None:
            return True  # calls and messages are known for such at their end
        # The space behind a thought belongs to it.
        return self._request.thinking and not self._text.partition(THOUGHT_END)[2].strip()

    def finished(self) -> Json:
        """The finished choice, in one piece."""
        return self._json(self._text, range(self._text_tokens), False)

    def _tokens_of_text(self, update: Update) -> int:
        """Tokens that the text so far shows, at least in part."""
        completion, ends, count = update.completion, self._ends, self._text_tokens
        if completion is not None and completion.stop is not StopReason.STOP_STRING:
            return len(ends)
        while count < len(ends) and (ends[count - 1] if count else 0) < len(self._text):
            count += 1
        return count

    def _json(self, text: str, tokens: range, piece: bool) -> Json:
        choice: Json = {"index": self._index, "finish_reason": self.finish, "logprobs": None}
        if self._request.logprobs:
            choice["logprobs"] = (
                self._chat_logprobs if self._request.chat else self._text_logprobs
            )(tokens)
        if not self._request.chat:
            choice["text"] = text
            return choice
        thought, content, calls = self._message(text, first=not tokens.start)
        if calls:
            choice["finish_reason"] = "tool_calls"
        reasoning = {"reasoning_content": thought} if thought else {}
        if piece:
            numbered = [{"index": i, **call} for i, call in enumerate(calls)]
            choice["delta"] = reasoning | ({"content": content} if content else {})
            choice["delta"] |= {"tool_calls": numbered} if calls else {}
        else:
            choice["message"] = {"role": "assistant", "content": content, "refusal": None}
            choice["message"] |= reasoning | ({"tool_calls": calls} if calls else {})
        return choice

    @property
    def _channels(self) -> Callable[[str], tuple[str, str] | None] | None:
        """Splits a reply into thinking and answer, in formats with messages for both."""
        return self._request.parser.channels if self._request.parser else None

    def _message(self, text: str, *, first: bool) -> tuple[str, str | None, list[Json]]:
        """The thinking, the answer, and the calls.

        Clients read the content of a reply by a grammar as JSON, so what was thought before it is
        told apart. Calls are those of a choice that has ended by itself.
        """
        request = self._request
        thought = ""
        if request.thinking and first:
            thought, _, text = text.partition(THOUGHT_END)
            text = text.lstrip()
        if request.tools is None and self._channels is None:
            return thought.strip(), text, []
        sampled = self._tokenizer.decode(self._sampled, skip_special=False)
        if request.thinking:
            sampled = sampled.partition(THOUGHT_END)[2]
        calls: list[Json] = []
        if request.tools is not None and self.finish == "stop":
            before, calls = calls_of(sampled, request.tools)
        content = (before or "") if calls else text
        messages = None
        if self._channels is not None:
            drawn = self._tokenizer.decode(self._tokens, skip_special=False)
            messages = self._channels(content if calls else drawn)
        if messages is not None:
            stops = request.requests[0].stop_strings
            thought, content = (functools.reduce(_before, stops, part) for part in messages)
        return thought.strip(), (content or None) if calls else content, calls

    def _chat_logprobs(self, tokens: range) -> Json:
        def entry(token: int, logprob: float) -> Json:
            text = self._piece(token)
            # A token that is part of a character has no text of its own.
            data = None if "\ufffd" in text else list(text.encode())
            return {"token": text, "logprob": _finite(logprob), "bytes": data}

        content = []
        for i in tokens:
            alternatives = [entry(token, logprob) for token, logprob in self._reports[i].top]
            chosen = entry(self._tokens[i], self._reports[i].logprob)
            content.append(chosen | {"top_logprobs": alternatives})
        return {"content": content, "refusal": None}

    def _text_logprobs(self, tokens: range) -> Json:
        starts = [0, *self._ends]
        top = None
        if self._request.top_logprobs:
            top = [self._alternatives(self._reports[i].top) for i in tokens]
        return {
            "tokens": [self._piece(self._tokens[i]) for i in tokens],
            "token_logprobs": [_finite(self._reports[i].logprob) for i in tokens],
            "top_logprobs": top,
            "text_offset": [starts[i] for i in tokens],
        }

    def _alternatives(self, top: Iterable[tuple[int, float]]) -> Json:
        """Log-probabilities by text; of two tokens with one text the first, which is likelier."""
        by_text: Json = {}
        for token, logprob in top:
            by_text.setdefault(self._piece(token), _finite(logprob))
        return by_text

    def _piece(self, token: int) -> str:
        # Decoders may drop the space at the beginning of a text, so a token stands before it.
        decode, end = self._tokenizer.decode, self._tokenizer.eos_id
        before = decode([end], skip_special=False)
        return decode([end, token], skip_special=False)[len(before) :]


def _before(text: str, stop: str) -> str:
    return text.partition(stop)[0]


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for a token of probability 0."""
    return max(float(logprob), -9999.0)


def usage(request: ApiRequest, choices: Sequence[ReplyChoice]) -> Json:
    """Tokens read and sampled; a prompt is counted once for all its completions."""
    prompt = sum(len(each.tokens) for each in request.requests)
    sampled = sum(choice.sampled for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }


LOGPROBS_OF = (
    "the distribution sampled from: temperature, logit_bias, top_k, top_p and min_p applied; at "
    "temperature 0 the model's own, without any of them"
)
"""The distribution of a reply's log-probabilities."""


def reply_head(request: ApiRequest, model: str, name: str, created: int, *, piece: bool) -> Json:
    """The fields that every reply begins with.

    Args:
      request: the request.
      model: the server's name for it.
      name: unique to the request.
      created: seconds since 1970.
      piece: whether the reply is one of many.
    """
    kind = "text_completion"
    if request.chat:
        kind = "chat.completion.chunk" if piece else "chat.completion"
    prefix = "chatcmpl" if request.chat else "cmpl"
    head: Json = {"id": f"{prefix}-{name}", "object": kind, "created": created, "model": model}
    if request.logprobs:
        # OpenAI's are the model's own; these are what a trainer needs, of what was sampled from.
        head["logprobs_of"] = LOGPROBS_OF
    return head
