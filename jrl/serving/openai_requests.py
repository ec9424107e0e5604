"""Requests of OpenAI's completions and chat completions: JSON bodies, checked before device work.

The reference is https://platform.openai.com/docs/api-reference. A parameter that would change the
completion and is not supported here is refused, not ignored.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jrl.episodes.parsers import Parser
from jrl.errors import UserError
from jrl.models.chat_frames import reads_variable
from jrl.models.file_tokenizer import FileTokenizer
from jrl.models.tokenizer import Tokenizer
from jrl.sampling.grammar import Grammars
from jrl.sampling.params import COLDEST
from jrl.sampling.request import TOP_LOGPROBS, Request, RequestLimits
from jrl.sampling.text import check_stop, longest_text
from jrl.serving.api_error import ApiError, Json
from jrl.serving.openai_formats import reply_grammar
from jrl.serving.openai_tools import (
    Tools,
    conversation,
    read_tools,
    takes_one_call,
    told_calls,
)

IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
) | {"prompt_cache_retention"}
"""Parameters that do not change the completion."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),  # vLLM's, as are the next two
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "suffix": (None, ""),
    "ignore_eos": (None, False),
    "include_stop_str_in_output": (None, False),
    "length_penalty": (None, 1),
    "min_tokens": (None, 0),
    "skip_special_tokens": (None, True),
    "stop_token_ids": (None, []),
    "echo": (None, False),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),  # of completions; chats have more
    "modalities": (None, ["text"]),
    "reasoning_effort": (None, "none"),  # of completions; chats have more
    "verbosity": (None, "medium"),
    "prediction": (None,),
    "audio": (None,),
    "web_search_options": (None,),
}
"""Parameters that are accepted only with these values, which change nothing."""

COMMON = frozenset(
    {"model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "logit_bias", "seed", "stop"}
) | {"n", "logprobs", "stream", "stream_options"}
ACCEPTED: Mapping[bool, frozenset[str]] = {
    False: COMMON | {"prompt", "best_of"},
    True: COMMON
    | {"messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice"}
    | {"chat_template_kwargs", "response_format", "reasoning_effort"},
}
"""The parameters of completions (False) and of chat completions (True)."""

_CHANGING = ("audio", "function_call", "prefix", "partial")
"""Fields of a message that would change the reply, and that this server does not read."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of ``reasoning_effort``, as in OpenAI's API."""

_TEXTS = ("role", "content", "reasoning_content")

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions; a chat completion may be as long as the limits allow."""
_LONGEST_STOP = 1000
"""Characters of a stop string; every token is compared with it."""
_SEED_STRIDE = 0x9E3779B97F4A7C15
"""Between the seeds of a request's prompts; the 64-bit golden ratio spreads them."""


@dataclasses.dataclass(frozen=True)
class ApiRequest:
    """A checked request of a client.

    Attributes:
      chat: whether it is a chat completion.
      requests: the engine's, one for each prompt; they differ in prompt and seed alone. A chat
        completion has one.
      logprobs: whether to reply with the tokens' log-probabilities.
      top_logprobs: alternatives of each token to reply with.
      stream: whether to reply in pieces.
      usage: whether the last piece counts the tokens.
      tools: of a chat completion; None for none.
      parser: of the model's family, for a chat completion; None where nothing says so.
      thinking: whether the reply follows a grammar and begins inside a thought.
    """

    chat: bool
    requests: tuple[Request, ...]
    logprobs: bool
    top_logprobs: int
    stream: bool
    usage: bool
    tools: Tools | None = None
    parser: Parser | None = None
    thinking: bool = False

    @property
    def n(self) -> int:
        """Completions of each prompt."""
        return self.requests[0].n

    @property
    def total(self) -> int:
        """Completions of all prompts."""
        return len(self.requests) * self.n


def parse(
    body: Any,
    *,
    chat: bool,
    tokenizer: Tokenizer,
    limits: RequestLimits,
    model: str,
    most: int | None = None,
    parser: Parser | None = None,
    grammars: Grammars | None = None,
) -> ApiRequest:
    """The request in a JSON body.

    Args:
      body: the JSON value.
      chat: whether it is a chat completion.
      tokenizer: the model's.
      limits: the engine's.
      model: the name of the model that is served.
      most: completions of one request; None for any number.
      parser: of the model's tool calls; None where nothing says how it writes them.
      grammars: of the model; None where replies cannot be made to follow one.

    Raises:
      ApiError: names the parameter, the value and what is allowed.
    """
    if not isinstance(body, dict):
        raise ApiError(f"the body must be a JSON object, not {_kind(body)}")
    _check_names(body, chat)
    _check_model(_get(body, "model", str, None), model)
    n = _n(body, limits)
    tools = read_tools(body, parser) if chat else None
    served: Any = tokenizer  # a cache's key
    if tools is not None and takes_one_call(served):
        tools = tools._replace(single=True)
    if chat:
        prompts = _chat_prompt(body, tokenizer, limits, tools)
    else:
        raw_prompt = body.get("prompt")
        requested = (
            n * len(raw_prompt) if isinstance(raw_prompt, list) and not _ids(raw_prompt) else n
        )
        if most is not None and requested > most:  # before any of them is encoded
            raise ApiError(f"{requested} completions at once; this server takes at most {most}")
        prompts = _prompts(body, tokenizer, limits)
    longest = _check_prompts(prompts, limits, "messages" if chat else "prompt")
    thinking = chat and _ends_in_thought(tokenizer, prompts[0])
    grammar = reply_grammar(body, tools, grammars, thinking=thinking) if chat else None
    with_logprobs, top = _logprobs(body, chat, limits)
    stream = bool(_get(body, "stream", bool, None))
    options = _stream_options(body, stream)
    seed = _integer(body, "seed", None, -(2**63), 2**63 - 1)
    request = Request(
        tokens=(),
        max_new_tokens=_max_tokens(body, chat, longest, limits),
        seed=secrets.randbits(64) if seed is None else seed,
        n=n,
        temperature=_number(
            body,
            "temperature",
            1.0,
            lambda x: x == 0 or COLDEST <= x <= 100,
            f"0 (greedy) or {COLDEST} to 100",
        ),
        top_k=_top_k(body, limits),
        top_p=_number(body, "top_p", 1.0, lambda x: 0 < x <= 1, "above 0, at most 1"),
        min_p=_number(body, "min_p", 0.0, lambda x: 0 <= x < 1, "at least 0, below 1"),
        logit_bias=_logit_bias(body, limits),
        stop_strings=_stop(body, tokenizer),
        top_logprobs=top if with_logprobs else None,
        grammar=grammar,
    )
    return ApiRequest(
        chat=chat,
        requests=tuple(
            dataclasses.replace(
                request, tokens=prompt, seed=(request.seed + i * _SEED_STRIDE) % 2**64
            )
            for i, prompt in enumerate(prompts)
        ),
        logprobs=with_logprobs,
        top_logprobs=top,
        stream=stream,
        usage=bool(_get(options, "include_usage", bool, None)),
        tools=tools,
        parser=parser if chat else None,
        thinking=thinking and grammar is not None,
    )


def _ends_in_thought(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Whether the chat template has opened a thought that the reply begins in."""
    end = tokenizer.decode(prompt[-16:], skip_special=False)
    return end.rstrip().endswith("<think>")


def _check_model(name: str | None, model: str) -> None:
    if name is None:
        raise ApiError(f"model is missing; this server has {model!r}", param="model")
    if name != model:
        raise no_such_model(name, model)


def no_such_model(name: str, model: str) -> ApiError:
    """The reply to a request for another model."""
    return ApiError(
        f"model = {name!r} does not exist; this server has {model!r}",
        status=404,
        param="model",
        code="model_not_found",
    )


# ---------------------------------------------------------------- parts of a request


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return names.get(type(value), "null" if value is None else "a number")


def _get(body: Json, name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        words = {str: "a string", bool: "true or false", dict: "an object", list: "an array"}
        raise ApiError(f"{name} must be {words[kind]}, not {_kind(value)}", param=name)
    return value


def _number(
    body: Json, name: str, default: float, fine: Callable[[float], bool], domain: str
) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ApiError(f"{name} must be a number, not {_kind(value)}", param=name)
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not math.isfinite(number) or not fine(number):
        raise ApiError(f"{name} = {number!r}; must be {domain}", param=name)
    return number


def _integer(body: Json, name: str, default: int | None, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ApiError(f"{name} = {value!r}; must be an integer", param=name)
    if not low <= value <= high:
        raise ApiError(f"{name} = {value}; must be {low} to {high}", param=name)
    return value


def _check_names(body: Json, chat: bool) -> None:
    for name, value in body.items():
        if name in ACCEPTED[chat] or name in IGNORED:
            continue
        if name not in NEUTRAL:
            raise ApiError(f"unknown parameter {name!r}", param=name, code="unknown_parameter")
        if value not in NEUTRAL[name]:
            raise ApiError(
                f"{name} = {value!r} is not supported by this server; leave it out", param=name
            )


def _check_text(size: int, tokenizer: Tokenizer, limits: RequestLimits, name: str) -> None:
    most = longest_text(tokenizer, limits.prompt_tokens)
    if size > most:
        raise ApiError(
            f"{name} has {size} characters; this server takes at most {limits.prompt_tokens} "
            f"tokens, which {most} characters do not exceed",
            param=name,
            code="context_length_exceeded",
        )


def _encode(
    tokenizer: Tokenizer, text: str, limits: RequestLimits, name: str, special: bool
) -> tuple[int, ...]:
    _check_text(len(text), tokenizer, limits, name)
    try:
        ids = tuple(tokenizer.encode(text, add_special=special))
    except UserError as error:
        raise ApiError(f"{name}: {error}", param=name) from None
    _check_length(ids, limits, name)
    return ids


def _check_length(prompt: Sequence[int], limits: RequestLimits, name: str) -> None:
    if len(prompt) > limits.prompt_tokens:
        raise ApiError(
            f"{name} has {len(prompt)} tokens; this server takes at most {limits.prompt_tokens}",
            param=name,
            code="context_length_exceeded",
        )


def _stream_options(body: Json, stream: bool) -> Json:
    options = _get(body, "stream_options", dict, None)
    if options is None:
        return {}
    if not stream:
        raise ApiError("stream_options needs stream = true", param="stream_options")
    for name in options:
        if name not in ("include_usage", "include_obfuscation"):
            raise ApiError(f"unknown parameter {name!r:.40}", param=f"stream_options.{name:.40}")
    return options


def _ids(x: Any) -> bool:
    return isinstance(x, list) and all(type(i) is int for i in x)


def _prompts(
    body: Json, tokenizer: Tokenizer, limits: RequestLimits
) -> tuple[tuple[int, ...], ...]:
    prompt = body.get("prompt")
    if isinstance(prompt, str) or (_ids(prompt) and prompt):
        prompt = [prompt]
    if not isinstance(prompt, list) or not all(isinstance(p, str) or _ids(p) for p in prompt):
        raise ApiError(
            "prompt must be a string, an array of strings, an array of token ids or an array of "
            "those",
            param="prompt",
        )
    if not prompt:
        raise ApiError("prompt holds no prompt", param="prompt")
    return tuple(
        _encode(tokenizer, p, limits, "prompt", True) if isinstance(p, str) else tuple(p)
        for p in prompt
    )


def _chat_prompt(
    body: Json, tokenizer: Tokenizer, limits: RequestLimits, tools: Tools | None
) -> tuple[tuple[int, ...], ...]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages must be an array with at least one message", param="messages")
    plain = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(f"{where} must be an object with a role and a content", param="messages")
        if not message["role"] or not isinstance(message.get("name") or "", str):
            wrong = "name" if message["role"] else "role"
            raise ApiError(f"{where}.{wrong} must be a text", param=f"{where}.{wrong}")
        # Other fields change no prompt: clients send replies back with fields of their own.
        if more := [name for name in _CHANGING if message.get(name)]:
            raise ApiError(
                f"{where}.{more[0]} is not supported by this server", param=f"{where}.{more[0]}"
            )
        plain.append(_plain(_with_known_role(message, tokenizer), where))
    size = sum(len(m.get(part, "")) for m in plain for part in _TEXTS)
    size += sum(len(json.dumps(m["tool_calls"])) for m in plain if "tool_calls" in m)
    _check_text(size, tokenizer, limits, "messages")
    variables = _template_variables(body, tokenizer)
    try:
        ids = tuple(conversation(tokenizer, plain, tools, variables))
    except UserError as error:
        raise ApiError(f"messages: {error}", param="messages") from None
    _check_length(ids, limits, "messages")
    return (ids,)


def _with_known_role(message: Json, tokenizer: Tokenizer) -> Json:
    """The message; a developer's is the system's where no chat template knows developers."""
    templates = tokenizer.templates.values() if isinstance(tokenizer, FileTokenizer) else ()
    if message["role"] != "developer" or any("developer" in text for text in templates):
        return message
    return {**message, "role": "system"}


def _template_variables(body: Json, tokenizer: Tokenizer) -> Json:
    """Variables of the chat template: ``chat_template_kwargs``, and ``reasoning_effort`` if read.

    Templates that do not read the latter, of models without levels of effort, are as without it;
    vLLM and SGLang do the same.
    """
    variables = _get(body, "chat_template_kwargs", dict, {})
    effort = _get(body, "reasoning_effort", str, None)
    if effort is None:
        return variables
    if effort not in EFFORTS:
        raise ApiError(
            f"reasoning_effort = {effort!r:.40}; choose from {', '.join(EFFORTS)}",
            param="reasoning_effort",
        )
    if variables.get("reasoning_effort", effort) != effort:
        raise ApiError(
            "reasoning_effort and chat_template_kwargs.reasoning_effort differ; give one",
            param="reasoning_effort",
        )
    if not reads_variable(tokenizer, "reasoning_effort"):
        return variables
    return {**variables, "reasoning_effort": effort}


def _plain(message: Json, where: str) -> Json:
    """The message as chat templates take it."""
    calls = told_calls(message, where) or {}
    # Words are optional beside calls; an empty list of them is sent by some servers.
    if message.get("content") is None and (calls or message.get("tool_calls") == []):
        message = message | {"content": ""}
    plain = {"role": message["role"], "content": _content(message, where), **calls}
    if message.get("name"):
        plain["name"] = message["name"]
    if message.get("tool_call_id") is not None:
        plain["tool_call_id"] = str(message["tool_call_id"])
    field = "reasoning" if message.get("reasoning_content") is None else "reasoning_content"
    thought = message.get(field)
    if thought is not None:
        if not isinstance(thought, str) or message["role"] != "assistant":
            name = f"{where}.{field}"
            raise ApiError(f"{name} must be a text, of the assistant", param=name)
        plain["reasoning_content"] = thought
    return plain


def _content(message: Json, where: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [None]
    if not all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in parts
    ):
        raise ApiError(
            f"{where}.content must be a string or an array of text parts",
            param=f"{where}.content",
        )
    return "".join(part["text"] for part in parts)


def _check_prompts(prompts: Sequence[tuple[int, ...]], limits: RequestLimits, name: str) -> int:
    """The length of the longest prompt, tokens."""
    for prompt in prompts:
        if not prompt:
            raise ApiError(f"{name} is empty; it needs at least one token", param=name)
        _check_length(prompt, limits, name)
        wrong = [i for i in prompt if not 0 <= i < limits.vocab_size]
        if wrong:
            raise ApiError(
                f"{name} holds token id {wrong[0]}; ids are 0 to {limits.vocab_size - 1}",
                param=name,
            )
    return max(map(len, prompts))


def _max_tokens(body: Json, chat: bool, prompt_tokens: int, limits: RequestLimits) -> int:
    most = limits.new_tokens(prompt_tokens)
    name = (
        "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    )
    limit = _integer(body, name, None, 1, 2**31 - 1)
    if name != "max_tokens" and body.get("max_tokens") not in (None, limit):
        raise ApiError("max_tokens and max_completion_tokens differ; give one", param="max_tokens")
    if limit is None:
        limit = most if chat else min(most, DEFAULT_MAX_TOKENS)
    if limit > most or most < 1:
        raise ApiError(
            f"{name} = {limit}; after a prompt of {prompt_tokens} tokens this server can write "
            f"{max(most, 0)}",
            param=name,
            code="context_length_exceeded",
        )
    return limit


def _n(body: Json, limits: RequestLimits) -> int:
    n = _integer(body, "n", 1, 1, 2**31 - 1)
    assert n is not None
    if n > limits.slots:
        raise ApiError(f"n = {n}; this server decodes {limits.slots} sequences at once", param="n")
    best = _integer(body, "best_of", None, 1, 2**31 - 1)
    if best not in (None, n):
        raise ApiError(f"best_of = {best!r}; only best_of = n is supported", param="best_of")
    return n


def _top_k(body: Json, limits: RequestLimits) -> int:
    top_k = _integer(body, "top_k", 0, -1, limits.vocab_size)
    assert top_k is not None
    return max(top_k, 0)  # -1 is what other servers call off


def _logprobs(body: Json, chat: bool, limits: RequestLimits) -> tuple[bool, int]:
    """Whether log-probabilities are wanted, and of how many alternatives."""
    if chat:
        requested = bool(_get(body, "logprobs", bool, None))
        top = _integer(body, "top_logprobs", 0, 0, min(TOP_LOGPROBS, limits.vocab_size))
        assert top is not None
        if top and not requested:
            raise ApiError("top_logprobs needs logprobs = true", param="top_logprobs")
        return requested, top
    top = _integer(body, "logprobs", None, 0, min(TOP_LOGPROBS, limits.vocab_size))
    return top is not None, top or 0


def _logit_bias(body: Json, limits: RequestLimits) -> dict[int, float]:
    bias: dict[int, float] = {}
    biases = _get(body, "logit_bias", dict, {})
    for key in biases:
        name = f"logit_bias[{key!r:.40}]"
        # In digits as JSON writes them: "07" and other scripts' would name one token twice.
        if not re.fullmatch("0|[1-9][0-9]{0,8}", key) or int(key) >= limits.vocab_size:
            raise ApiError(
                f"{name}: keys are token ids, 0 to {limits.vocab_size - 1}", param="logit_bias"
            )
        if biases[key] is None:
            raise ApiError(f"{name} must be a number, not null", param="logit_bias")
        value = {name: biases[key]}
        try:
            bias[int(key)] = _number(value, name, 0.0, lambda x: -100 <= x <= 100, "-100 to 100")
        except ApiError as error:
            error.param = "logit_bias"
            raise
    return bias


def _stop(body: Json, tokenizer: Tokenizer) -> tuple[str, ...]:
    stop = body.get("stop")
    stop = [] if stop is None else [stop] if isinstance(stop, str) else stop
    texts = isinstance(stop, list) and all(isinstance(s, str) for s in stop)
    if texts:  # at a stop token's own text the completion ends in any case
        ends = {tokenizer.decode([i], skip_special=False) for i in tokenizer.stop_ids}
        stop = [text for text in stop if text not in ends]
    if not texts or len(stop) > 4:
        raise ApiError("stop must be a string or an array of at most 4 strings", param="stop")
    for text in stop:
        if len(text) > _LONGEST_STOP:
            raise ApiError(
                f"stop has a string of {len(text)} characters; at most {_LONGEST_STOP}",
                param="stop",
            )
        try:
            check_stop(tokenizer, text)
        except UserError as error:
            raise ApiError(str(error), param="stop") from None
    return tuple(dict.fromkeys(stop))
