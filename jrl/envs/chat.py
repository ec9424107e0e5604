"""Messages of an environment as token ids: the opening of an episode, and what follows a turn.

A conversation grows by ids alone: the prompt, what the policy drew, the ids of the answer, what it
drew next. The ids of an answer are those that the chat template writes behind an assistant's turn,
taken from a conversation of placeholders, so that nothing that was drawn is rendered or encoded
again. The frame of a message (role, control tokens) is the template's; its content comes from
outside and is encoded by ``encode_framed``, so that it can never become a control token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jrl.errors import UserError
from jrl.models.tokenizer import FileTokenizer, Tokenizer

Message = Mapping[str, Any]
"""A dict with "role" and "content", both text, and what else the template reads."""

_ANSWER = "JRLANSWER"
_QUESTION = {"role": "user", "content": "What is it?"}
_CALL_ID = "jrlcall00"  # nine letters or digits: Mistral's templates refuse other ids


class Format(Protocol):
    """How messages become ids."""

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """What the policy sees first, ending where it is to speak."""
        ...

    def following(self, messages: Sequence[Message], *, closed: bool) -> list[int]:
        """What follows a turn of the policy, ending where it is to speak again.

        Args:
          messages: the environment's answer.
          closed: whether the turn's last token ends turns; otherwise the end comes first.
        """
        ...


class PlainFormat(NamedTuple):
    """Contents one after another, without roles: for models that know no conversations.

    Attributes:
      tokenizer: the policy's.
    """

    tokenizer: Tokenizer

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """See ``Format``."""
        return [i for m in messages for i in self.tokenizer.encode_plain(m["content"])]

    def following(self, messages: Sequence[Message], *, closed: bool) -> list[int]:
        """See ``Format``; a turn that was cut is ended by the end-of-text token."""
        end = [] if closed else [self.tokenizer.eos_id]
        return [*end, *self.opening(messages)]


class ChatFormat:
    """A checkpoint's chat template, checked on construction.

    Args:
      tokenizer: the policy's.
      tools: schemas of the tools, for the template; None without tools.
      roles: of the messages that the environment answers with.
      variables: further variables of the template, such as ``enable_thinking``.

    Raises:
      UserError: the template has no answer of such a role, or cannot continue a conversation: it
        writes what came before differently when more follows. Names the first differing token.
    """

    def __init__(
        self,
        tokenizer: FileTokenizer,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        roles: Sequence[str] = ("user",),
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._variables = {"tools": list(tools) if tools else None, **(variables or {})}
        self._ends = [tokenizer.decode([i], skip_special=False) for i in tokenizer.stop_ids]
        self._before = {role: self._dummy(role) for role in roles}
        for role in roles:
            self._check(role)

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """See ``Format``."""
        text, spans = self._spans([], [_whole(m) for m in messages])
        return self._encode(text, spans, 0)

    def following(self, messages: Sequence[Message], *, closed: bool) -> list[int]:
        """See ``Format``.

        Raises:
          UserError: the template refuses the messages, or does not write each content once.
        """
        role = messages[0]["role"]
        if role not in self._before:
            said = " or ".join(self._before)
            raise UserError(f"the environment answers as {role!r}; this run expects {said}")
        text, spans = self._spans(self._before[role], [_whole(m) for m in messages])
        end, cut = self._end(text[: spans[0][0]])
        head = [] if closed else self._tokenizer.encode(end)
        return [*head, *self._encode(text, spans, cut)]

    # ------------------------------------------------------------ rendering

    def _render(self, messages: Sequence[Message], *, prompt: bool = True) -> str:
        return self._tokenizer.chat(messages, add_generation_prompt=prompt, **self._variables)

    def _spans(
        self, before: Sequence[Message], messages: Sequence[Message]
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and where in it the contents of ``messages`` stand.

        Each content is found by rendering a placeholder in its place, so that a template may trim
        or quote it, and a content may look like anything.
        """
        marks = [f"JRLCONTENT{i}JRL" for i in range(len(messages))]
        marked = [{**m, "content": mark} for m, mark in zip(messages, marks, strict=True)]
        frame = self._render([*before, *marked])
        parts, rest = [], frame
        for mark, message in zip(marks, messages, strict=True):
            part, found, rest = rest.partition(mark)
            if not found or mark in rest:
                raise UserError(
                    f"the chat template writes the content of a {message['role']} message "
                    f"{'more than once' if found else 'nowhere, or not in its turn'}"
                )
            parts.append(part)
        text, spans = "", []
        for i, message in enumerate(messages):
            whole = self._render([*before, *marked[:i], message, *marked[i + 1 :]])
            head, _, tail = frame.partition(marks[i])
            if not (whole.startswith(head) and whole.endswith(tail)):
                raise UserError(
                    f"the chat template writes a {message['role']} message in another frame "
                    f"because of what it says: {message['content']!r:.60}"
                )
            text += parts[i]
            spans.append((len(text), len(text) + len(whole) - len(head) - len(tail)))
            text += whole[len(head) : len(whole) - len(tail)]
        return text + rest, spans

    def _encode(self, text: str, spans: Sequence[tuple[int, int]], start: int) -> list[int]:
        """Ids from a character on: frames with their control tokens, contents without any."""
        shifted = [(begin - start, end - start) for begin, end in spans]
        return self._tokenizer.encode_framed(text[start:], shifted)

    def _dummy(self, role: str) -> list[Message]:
        """A conversation up to the assistant's turn that an answer of this role follows."""
        answers: list[Message] = [{"role": "assistant", "content": _ANSWER}]
        if role == "tool":
            for arguments in ({"it": _ANSWER}, json.dumps({"it": _ANSWER})):
                function = {"name": "look", "arguments": arguments}
                call = {"id": _CALL_ID, "type": "function", "function": function}
                answers.insert(-1, {"role": "assistant", "content": "", "tool_calls": [call]})
        failure: UserError | None = None
        for answer in answers:
            before = [_QUESTION, answer]
            try:
                self._end(self._render([*before, self._message(role)]))
                return before
            except UserError as error:
                failure = failure or error
        raise UserError(f"the chat template cannot answer as {role!r}: {failure}")

    def _end(self, text: str) -> tuple[str, int]:
        """What ends the assistant's turn in the text of a conversation, and where it has ended."""
        said = text.rfind(_ANSWER)
        if said < 0:
            raise UserError("it does not write what the assistant said")
        found = [(at, end) for end in self._ends if end and (at := text.find(end, said)) >= 0]
        if not found:
            raise UserError(
                f"it ends the assistant's turn with none of the stop tokens {', '.join(self._ends)}"
            )
        at, end = min(found)
        return end, at + len(end)

    # ------------------------------------------------------------ the check at the start

    def _message(self, role: str) -> Message:
        named = {"name": "look", "tool_call_id": _CALL_ID} if role == "tool" else {}
        return {"role": role, "content": "It is 42.", **named}

    def _check(self, role: str) -> None:
        """Compares the parts with complete renderings of one turn and of two."""
        before, message = self._before[role], self._message(role)
        ids = self.following([message], closed=True)
        for talk in ([*before, message], [*before, message, before[-1], message]):
            text = self._render(talk)
            first = self._render(talk[:1], prompt=False)
            # What was shown first must stay, or the policy reads what the template never writes.
            self._same(role, first, text[: len(first)], "what came first, with more behind it")
            _, cut = self._end(text)
            self._same(role, ids, text[cut:], "the complete conversation")

    def _same(self, role: str, ours: Sequence[int] | str, text: str, where: str) -> None:
        ours = self._tokenizer.encode(ours) if isinstance(ours, str) else list(ours)
        whole = self._tokenizer.encode(text)
        if ours == whole:
            return
        pairs = zip([*ours, None], [*whole, None], strict=False)
        at = next(k for k, (a, b) in enumerate(pairs) if a != b)
        said = [
            repr(self._tokenizer.decode(ids[at : at + 1], skip_special=False)) or "nothing"
            for ids in (ours, whole)
        ]
        raise UserError(
            f"the chat template cannot continue after a {role} message: token {at} is {said[0]}, "
            f"but {said[1]} in {where}; use another template (chat_template.jinja), or an "
            "environment that answers in another role"
        )


def _whole(message: Message) -> Message:
    """The message with "?" for halves of characters, which no tokenizer takes."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": content.encode("utf-8", "replace").decode()}
