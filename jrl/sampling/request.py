"""Requests of an engine, the limits they are checked against, and completions as they grow.

All of it is on the host and holds plain values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.errors import UserError
from jrl.models.tokenizer import Tokenizer
from jrl.sampling.grammar import Constraint, Grammars
from jrl.sampling.params import make_sampling_params
from jrl.sampling.text import TextStream, check_stop
from jrl.types import StopReason

TOP_LOGPROBS = 20
"""The most alternatives of a token that a request may ask for, OpenAI's limit."""


class QueueFull(UserError):
    """The engine's queue has no room for the request."""


@dataclasses.dataclass(frozen=True)
class Request:
    """Completions of one prompt.

    Attributes:
      tokens: the prompt's ids.
      max_new_tokens: the longest completion, tokens.
      seed: below 2**64; member m samples with ``fold_in(jax.random.key(seed), m)``, whatever else
        the engine does.
      n: number of completions.
      temperature, top_k, top_p, min_p: as in ``make_sampling_params``.
      logit_bias: nats added to the logits of some tokens; -inf forbids one.
      allowed: the only tokens that may be sampled; None for all.
      stop_tokens: ids that end a completion, and are its last token; None for the engine's.
      stop_strings: texts that end a completion. The tokens that form one are part of the
        completion, its text ends before it.
      top_logprobs: alternatives reported with each token, at most ``TOP_LOGPROBS``; None for no
        report.
      grammar: that every completion follows, see ``grammar.Grammars``; None for any text. A
        completion that ends at its length may be the beginning of a text of the grammar.
    """

    tokens: Sequence[int]
    max_new_tokens: int
    seed: int = 0
    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    allowed: Sequence[int] | None = None
    stop_tokens: tuple[int, ...] | None = None
    stop_strings: tuple[str, ...] = ()
    top_logprobs: int | None = None
    grammar: str | None = None

    @property
    def biased(self) -> bool:
        """Whether the request changes logits or forbids tokens."""
        return bool(self.logit_bias) or self.allowed is not None

    def bias(self, vocab_size: int) -> np.ndarray:
        """[V] float32, nats, added to the logits."""
        out = np.zeros(vocab_size, np.float32)
        if self.allowed is not None:
            out[:] = -np.inf
            out[np.asarray(self.allowed, np.int64)] = 0.0
        # Added after `allowed`: a bias on a forbidden token leaves it at -inf.
        for token, value in self.logit_bias.items():
            out[token] += value
        return out


@dataclasses.dataclass(frozen=True)
class Completion:
    """One finished completion.

    Attributes:
      request: the number that ``submit`` gave.
      member: 0 to n - 1.
      tokens: [t] int32, the stop token or the tokens of the stop string included.
      logprobs: [t] float32, nats, under the distribution sampled from.
      versions: [t] int32, the policy version that sampled each token.
      stop: why it ended.
      text: up to the stop string, without the stop token; empty without a tokenizer.
    """

    request: int
    member: int
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    stop: StopReason
    text: str


class TokenLogprobs(NamedTuple):
    """Report on one token of a reply; see ``report.reported_logprobs``.

    Attributes:
      logprob: of the token, nats.
      top: the likeliest ids with their log-probabilities, the likeliest first.
    """

    logprob: float
    top: Sequence[tuple[int, float]] = ()


class Update(NamedTuple):
    """The part of one completion added by one decode chunk.

    Attributes:
      request: the number that ``submit`` gave.
      member: 0 to n - 1.
      tokens: the new ones, a stop token included.
      logprobs: theirs, nats.
      text: new text; no later token changes it. Empty without a tokenizer.
      ends: the length of the text, characters, after each new token but a stop token. Characters
        not yet in ``text``, because a stop string may begin with them, are counted.
      completion: the finished completion; None while it runs.
      reports: one for each new token, where the request asked for them.
    """

    request: int
    member: int
    tokens: list[int]
    logprobs: list[float]
    text: str
    ends: list[int]
    completion: Completion | None
    reports: Sequence[TokenLogprobs] = ()


class PartialCompletion:
    """A queued or running completion of a request, and the text of its tokens so far.

    Args:
      number: the request's.
      member: 0 to n - 1.
      request: the request.
      tokenizer: decodes the tokens; None for no text.

    Attributes:
      constraint: the state of the request's grammar; None before ``constrain``, and without one.
    """

    def __init__(
        self, number: int, member: int, request: Request, tokenizer: Tokenizer | None
    ) -> None:
        self.number, self.member, self.request = number, member, request
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        # Decoded as it grows: decoding the whole completion with every chunk would be quadratic.
        self._text = TextStream(tokenizer, request.stop_strings) if tokenizer else None
        self.constraint: Constraint | None = None

    def constrain(self, grammars: Grammars) -> None:
        """Begins to follow the request's grammar, before the first token."""
        if self.request.grammar is not None and self.constraint is None:
            self.constraint = grammars.start(self.request.grammar)

    def extend(
        self,
        tokens: list[int],
        logprobs: list[float],
        version: int,
        stop: StopReason,
        reports: Sequence[TokenLogprobs] = (),
    ) -> Update:
        """Appends new tokens; those after a stop string are dropped.

        Args:
          tokens: the new ones, a stop token included.
          logprobs: theirs, nats.
          version: of the policy that sampled them.
          stop: why the sampler ended the completion, or RUNNING.
          reports: what is reported about them, if requested.
        """
        text, ends = "", []
        if self._text is not None:
            before = len(self._text.ends)
            # The stop token is no text: its spelling must not match a stop string or reach the
            # reader.
            text = self._text.push(tokens[: len(tokens) - (stop == StopReason.STOP_TOKEN)])
            if stop != StopReason.RUNNING:
                # Text held back, since a stop string may have begun in it, comes out at the end.
                text += self._text.close()
            ends = self._text.ends[before:]
            if self._text.stopped:
                tokens, logprobs = tokens[: len(ends)], logprobs[: len(ends)]
                reports = reports[: len(ends)]
                # It wins over the sampler's reason: the string ended the completion earlier than
                # the token did.
                stop = StopReason.STOP_STRING
        self._tokens += tokens
        self._logprobs += logprobs
        self._versions += [version] * len(tokens)
        if self.constraint is not None:
            self.constraint.push(tokens)
        completion = None
        if stop != StopReason.RUNNING:
            completion = Completion(
                request=self.number,
                member=self.member,
                tokens=np.array(self._tokens, np.int32),
                logprobs=np.array(self._logprobs, np.float32),
                versions=np.array(self._versions, np.int32),
                stop=stop,
                text=self._text.text if self._text is not None else "",
            )
        return Update(self.number, self.member, tokens, logprobs, text, ends, completion, reports)


# ---------------------------------------------------------------- limits


@dataclasses.dataclass(frozen=True)
class RequestLimits:
    """Limits of the requests of an engine.

    Attributes:
      slots: completions decoded at once; the largest ``n``.
      prompt_tokens: the longest prompt.
      max_new_tokens: the longest completion.
      vocab_size: V.
      max_length: the longest sequence that the network accepts, tokens.
      stop_tokens: the largest number of stop tokens.
      biases: whether requests may change logits.
      reports: whether requests may ask for ``top_logprobs``.
      grammars: whether requests may bring a grammar.
    """

    slots: int
    prompt_tokens: int
    max_new_tokens: int
    vocab_size: int
    max_length: int
    stop_tokens: int
    biases: bool
    reports: bool = False
    grammars: bool = False

    def new_tokens(self, prompt_tokens: int) -> int:
        """The longest completion of a prompt of this length, tokens; below 1 for none."""
        return min(self.max_new_tokens, self.max_length - prompt_tokens)


class RequestFeatures(NamedTuple):
    """Limits of a request, and of the queue.

    Attributes:
      biases: whether they may change logits; costs [slots, V] float32 numbers.
      reports: whether they may ask for ``top_logprobs``; costs steps in which one did.
      grammars: compiles the grammars that they may bring; None for none. While a row with one
        runs, chunks are of one step: the host allows its next tokens.
      queue: completions that may wait for a slot; None for any number.
    """

    biases: bool = False
    reports: bool = False
    grammars: Grammars | None = None
    queue: int | None = None


PLAIN_REQUESTS = RequestFeatures()
"""Requests for tokens and their log-probabilities alone, any number of them."""


def check_request(request: Request, limits: RequestLimits, tokenizer: Tokenizer | None) -> None:
    """Raises UserError that names the problem of a request the engine cannot serve."""
    # Before it is queued: on the device a bad value is clamped or wrong silently, never refused.
    length, new = len(request.tokens), request.max_new_tokens
    if not length:
        raise UserError("the prompt is empty; give at least one token")
    _check_ids("tokens", request.tokens, limits.vocab_size)
    if length > limits.prompt_tokens:
        raise UserError(
            f"the prompt has {length} tokens; the cache holds prompts of up to "
            f"{limits.prompt_tokens}"
        )
    most = limits.new_tokens(length)
    if not 1 <= new <= most:
        raise UserError(
            f"max_new_tokens = {new}; after a prompt of {length} tokens it must be 1 to {most}"
        )
    if not 1 <= request.n <= limits.slots:
        raise UserError(f"n = {request.n}; must be 1 to {limits.slots}, the engine's slots")
    if not 0 <= request.seed < 2**64:
        raise UserError(f"seed = {request.seed}; must be at least 0 and below 2**64")
    # Called for its checks.
    make_sampling_params(request.temperature, request.top_k, request.top_p, request.min_p)
    if request.top_k > limits.vocab_size:
        raise UserError(
            f"sampling.top_k = {request.top_k}; the vocabulary has {limits.vocab_size} tokens; "
            "0 keeps all"
        )
    _check_bias(request, limits)
    _check_report(request, limits)
    _check_grammar(request, limits)
    if request.stop_tokens is not None:
        _check_ids("stop_tokens", request.stop_tokens, limits.vocab_size)
        if len(request.stop_tokens) > limits.stop_tokens:
            raise UserError(
                f"stop_tokens names {len(request.stop_tokens)} tokens; the engine takes at most "
                f"{limits.stop_tokens}"
            )
    if request.stop_strings and tokenizer is None:
        raise UserError("stop_strings need an engine with a tokenizer")
    for stop in request.stop_strings:
        assert tokenizer is not None
        check_stop(tokenizer, stop, "stop_strings")


def _check_report(request: Request, limits: RequestLimits) -> None:
    top = request.top_logprobs
    if top is None:
        return
    if not limits.reports:
        raise UserError("top_logprobs needs an engine built with RequestFeatures(reports=True)")
    most = min(TOP_LOGPROBS, limits.vocab_size)
    if not 0 <= top <= most:
        raise UserError(f"top_logprobs = {top}; must be 0 to {most}")


def _check_grammar(request: Request, limits: RequestLimits) -> None:
    if request.grammar is None:
        return
    if not limits.grammars:
        raise UserError("grammar needs an engine built with RequestFeatures(grammars=...)")
    if request.stop_tokens is not None:
        raise UserError("grammar and stop_tokens: a grammar ends with the engine's; leave one out")


def _check_bias(request: Request, limits: RequestLimits) -> None:
    if not request.biased:
        return
    if not limits.biases:
        raise UserError("logit_bias and allowed need RequestFeatures(biases=True) of the engine")
    _check_ids("logit_bias", request.logit_bias, limits.vocab_size)
    _check_ids("allowed", request.allowed or (), limits.vocab_size)
    bad = [t for t, x in request.logit_bias.items() if not x < np.inf]
    if bad:
        raise UserError(f"logit_bias[{bad[0]}] = {request.logit_bias[bad[0]]}; must be a number")
    # All -inf is a softmax of NaN.
    if not np.isfinite(request.bias(limits.vocab_size)).any():
        raise UserError("allowed and logit_bias leave no token to sample; allow one")


def _check_ids(name: str, ids: Any, vocab_size: int) -> None:
    # An id past the vocabulary is clamped by a gather on the device, not refused: it would be
    # another token silently.
    wrong = next((int(i) for i in ids if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise UserError(f"{name} has token {wrong}; the vocabulary ends at {vocab_size - 1}")
