"""Messages of an environment as token ids: the opening of an episode, and answers after a turn.

A conversation grows by ids only: the prompt, the sampled turn, the answer's ids, the next turn. The
ids of an answer are those that the chat template writes after an assistant's turn, taken from a
conversation of placeholders, so that sampled tokens are never rendered or encoded again.
The frame of a message (role, control tokens) is the template's; its content comes from outside and
is encoded by ``encode_framed``, so that it can never become a control token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jrl.episodes.tool_descriptions import Description, describe
from jrl.errors import UserError
from jrl.models.chat_frames import (
    ANSWER,
    Frames,
    Message,
    Span,
    calling,
    chat_template,
    check_descriptions,
    check_fields,
    check_variables,
    outside_spans,
    plain_names,
    whole_text,
)
from jrl.models.file_tokenizer import FileTokenizer
from jrl.models.tokenizer import Tokenizer

_QUESTION = {"role": "user", "content": "What is it?"}
_STYLES = tuple((content, as_text) for content in ("", None) for as_text in (False, True))
"""Contents of an assistant's turn that calls a tool, and whether its arguments are text; templates
read one or another."""
_THOUGHT = "JRLTHOUGHT"


class Format(Protocol):
    """Encoding of messages as token ids.

    Attributes:
      notes: what a user should know of it, a line each.
    """

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the format for users, one per line."""
        ...

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """The policy's first input, ending where its turn begins."""
        ...

    def following(
        self, messages: Sequence[Message], *, closed: bool, first: bool = True
    ) -> list[int]:
        """The tokens between a turn of the policy and the next one.

        Args:
          messages: the environment's answer.
          closed: whether the turn's last token ends turns; otherwise the end comes first.
          first: whether it is the episode's first answer; some templates frame later ones
            otherwise.
        """
        ...


class PlainFormat(NamedTuple):
    """Contents one after another, without roles: for models that know no conversations.

    Attributes:
      tokenizer: the policy's.
      tools: the tools, which precede the opening.
    """

    tokenizer: Tokenizer
    tools: Description | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """See ``Format``."""
        return ()

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """See ``Format``."""
        description = (
            [] if self.tools is None else self.tokenizer.encode_plain(f"{self.tools.text}\n\n")
        )
        return [
            *self.begin(),
            *description,
            *(i for m in messages for i in self.tokenizer.encode_plain(m["content"])),
        ]

    def begin(self) -> list[int]:
        """The ids that the tokenizer puts before a text, such as BOS."""
        added = self.tokenizer.encode("", add_special=True)
        return [i for i in added if i not in self.tokenizer.stop_ids]

    def following(
        self, messages: Sequence[Message], *, closed: bool, first: bool = True
    ) -> list[int]:
        """See ``Format``; a turn that was cut is ended by the end-of-text token."""
        end = [] if closed else [self.tokenizer.eos_id]
        return [*end, *(i for m in messages for i in self.tokenizer.encode_plain(m["content"]))]


class ChatFormat:
    """A checkpoint's chat template, checked on construction.

    Where the template has no place for tools, they are described in the system message, or in the
    first user's message where it takes no system message.

    What the policy drew stays as it is. A template may fold the past, by dropping what was thought
    in earlier turns; a row that grows by ids cannot, and ``notes`` says so.

    Args:
      tokenizer: the policy's.
      tools: schemas of the tools, for the template; None without tools.
      roles: of the messages that the environment answers with.
      variables: further variables of the template, such as ``enable_thinking``.
      family: of the parser that reads the policy's calls, of ``parsers.PARSERS``; "" for none of
        them.

    Attributes:
      tells_tools: whether the policy reads what tools it has; not where the template writes none
        and no family says how to describe them.

    Raises:
      UserError: the template has no answer of such a role, or cannot continue a conversation: it
        writes what came before differently when more follows. Names the first differing token. Or
        a tool's description spells a control token.
    """

    def __init__(
        self,
        tokenizer: FileTokenizer,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        roles: Sequence[str] = ("user",),
        variables: Mapping[str, Any] | None = None,
        family: str = "",
    ) -> None:
        tools = list(tools or ())
        check_descriptions(tokenizer, tools)
        name = chat_template(tokenizer, tools=bool(tools))
        check_variables(variables or {}, tokenizer, "template_variables")
        template_values = {"tools": tools or None, **(variables or {})}
        self._frames = Frames(tokenizer, name, template_values)
        self._tokenizer, self._notes = tokenizer, list[str]()
        self.tells_tools = True
        self._tools = self._describe(tools, family)
        self._style: dict[str, tuple[str | None, bool] | None] = {}  # None: in words
        self._several = False
        self._past_end: dict[str, str] = {}
        for role in roles:
            self._learn(role)
            self._check(role)

    @property
    def notes(self) -> tuple[str, ...]:
        """See ``Format``."""
        return tuple(dict.fromkeys(self._notes))

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """See ``Format``.

        Raises:
          UserError: the template refuses the messages, or what stands beside their contents, such
            as a call's arguments, spells a control token.
        """
        check_fields(self._tokenizer, messages, None, "the environment")
        if self._tools is None:
            return self._encode(*self._frames.spans([], [whole_text(m) for m in messages]), 0)
        first, *others = (whole_text(m) for m in messages)
        with_tools, pieces = self._with_tools(first, others)
        text, spans = self._frames.spans([], with_tools)
        return self._encode(text, [*outside_spans(text, spans[0], pieces), *spans[1:]], 0)

    def following(
        self, messages: Sequence[Message], *, closed: bool, first: bool = True
    ) -> list[int]:
        """See ``Format``.

        Results of tools carry the names and ids of their calls; one without a name that a template
        may write is called "unknown".

        Raises:
          UserError: the template refuses the messages, or does not write each content once; or
            what stands beside their contents spells a control token.
        """
        role = messages[0]["role"]
        if role not in self._style:
            roles = " or ".join(self._style)
            raise UserError(f"the environment answers as {role!r}; this run expects {roles}")
        messages = [plain_names(whole_text(m), i) for i, m in enumerate(messages)]
        check_fields(self._tokenizer, messages, None, "the environment")
        text, spans = self._frames.spans(self._before(role, messages, first), messages)
        # The assistant's turn in that text is a placeholder; the row already holds what the policy
        # sampled there, so everything up to the turn's end is cut off.
        end, cut = self._end(role, text[: spans[0][0]])
        # A turn cut at its limit has no end of its own; without it the answer would read as part of
        # the policy's words.
        head = [] if closed else self._tokenizer.encode(end)
        return [*head, *self._encode(text, spans, cut)]

    def _encode(self, text: str, spans: Sequence[Span], start: int) -> list[int]:
        """Ids from a character on: frames with their control tokens, contents without any."""
        shifted = [(begin - start, end - start) for begin, end in spans]
        return self._tokenizer.encode_framed(text[start:], shifted)

    # ------------------------------------------------------------ the tools

    def _describe(self, tools: Sequence[Mapping[str, Any]], family: str) -> Description | None:
        """The tools in words, where the template does not write them."""
        frames = self._frames
        # Compared by rendering, not by searching the template for a word: templates name and nest
        # the tools in many ways.
        without = frames._replace(variables={**frames.variables, "tools": None})
        # Templates that loop over the tools without a look at whether there are any write them.
        if not tools or without.refuses([_QUESTION]):
            return None
        if frames.render([_QUESTION]) != without.render([_QUESTION]):
            return None
        if not family:
            self.tells_tools = False
            return None
        self._notes.append(
            f"the chat template writes no tools; they are described in the prompt ({family})"
        )
        return describe(tools, family)

    def _with_tools(
        self, first: Message, others: Sequence[Message]
    ) -> tuple[list[Message], list[tuple[str, bool]]]:
        """The opening with the tools in its first message, and the pieces of that message.

        Each piece has its text, and whether that comes from outside.
        """
        assert self._tools is not None
        head, schemas, tail = self._tools
        pieces = [(head, False), (schemas, True), (tail, False)]
        system = {"role": "system", "content": self._tools.text}
        if first["role"] == "system":
            pieces = [(f"{first['content']}\n\n", True), *pieces]
        # Some templates refuse system messages, or a second one; the first message then carries the
        # tools.
        elif not self._frames.refuses([system, first, *others]):
            first, others = system, [first, *others]
        else:
            pieces = [*pieces, (f"\n\n{first['content']}", True)]
        content = "".join(text for text, _ in pieces)
        return [{**first, "content": content}, *others], pieces

    # ------------------------------------------------------------ conversations of placeholders

    def _before(self, role: str, messages: Sequence[Message], first: bool) -> list[Message]:
        """A conversation up to the assistant's turn that these messages answer."""
        assistant = self._frame_of(role, messages)
        history = [] if first else [assistant, *({**m, "content": "It is 42."} for m in messages)]
        return [_QUESTION, *history, assistant]

    def _frame_of(self, role: str, messages: Sequence[Message]) -> Message:
        style = self._style[role]
        if style is None:
            return {"role": "assistant", "content": ANSWER}
        answered = messages if self._several else messages[:1]
        names, ids = ([m[key] for m in answered] for key in ("name", "tool_call_id"))
        return calling(names, ids, content=style[0], as_text=style[1])

    def _learn(self, role: str) -> None:
        """Finds how the template wants an assistant's turn that an answer of this role follows."""
        message = plain_names({"role": role, "content": "It is 42."}, 0)
        failure: UserError | None = None
        # The first style that renders: templates differ in what a tool's result must follow.
        for style in (*(_STYLES if role == "tool" else ()), None):
            self._style[role] = style
            try:
                assistant = self._frame_of(role, [message])
                text = self._frames.render([_QUESTION, assistant, message])
                self._past_end[role] = self._learn_end(text, [_QUESTION, assistant])
                break
            except UserError as error:
                failure = failure or error
        else:
            raise UserError(f"the chat template cannot answer as {role!r}: {failure}")
        if role == "tool":
            two = [message, {**message, "name": "other", "tool_call_id": "jrlcall01"}]
            self._several = True
            self._several = not self._frames.refuses([*self._before(role, two, True), *two])
        self._note_folding(assistant, message)

    def _learn_end(self, text: str, conversation: Sequence[Message]) -> str:
        """The text that ends the assistant's turn within a conversation."""
        _, marker, rest = text.rpartition(ANSWER)
        if not marker:
            raise UserError("it leaves out the assistant's message")
        stops = self._frames.stops()
        ends = [(at, stop) for stop in stops if stop and (at := rest.find(stop)) >= 0]
        last = self._frames.last_end(conversation)
        first = next(iter(self._tokenizer.encode(rest)), -1)
        end = self._tokenizer.decode([first], skip_special=False) if first >= 0 else ""
        if last and not rest.startswith(last) and self._tokenizer.controls(end):
            # The last turn ends with a token that stops, and past ones with another, as gpt-oss's.
            self._notes.append(
                f"the chat template ends earlier turns with {end!r}; the policy ends its own with "
                f"{last!r}, which is kept as it was drawn"
            )
            return end
        if not ends:
            raise UserError(
                f"it ends the assistant's turn with none of the stop tokens {', '.join(stops)}"
            )
        return min(ends)[1]

    def _end(self, role: str, text: str) -> tuple[str, int]:
        """The end of the assistant's turn in the text of a conversation, and its position."""
        end = self._past_end[role]
        at = text.find(end, max(text.rfind(ANSWER), 0))
        if at < 0:
            raise UserError(f"the chat template does not end the assistant's turn with {end!r}")
        return end, at + len(end)

    # ------------------------------------------------------------ checks at the start

    def _note_folding(self, assistant: Message, message: Message) -> None:
        """Notes where the template would drop thinking that the row keeps."""
        source = self._tokenizer.templates[self._frames.name]
        if "think" not in source and "reasoning" not in source:
            return
        for key in ("content", "thinking", "reasoning_content"):
            words = f"<think>\n{_THOUGHT}\n</think>\n\n" if key == "content" else _THOUGHT
            turn = {
                **assistant,
                key: words + ((assistant["content"] or "") if key == "content" else ""),
            }
            try:
                alone = self._frames.render([_QUESTION, turn], prompt=False)
                later = self._frames.render([_QUESTION, turn, message])
            except UserError:
                continue
            if _THOUGHT not in later and (key == "content" or _THOUGHT in alone):
                self._notes.append(
                    "the chat template drops the thinking of earlier turns from the history; "
                    "episodes keep it, because what was drawn stays in its row"
                )
                return

    def _check(self, role: str) -> None:
        """Compares the parts with complete renderings of one, two and three turns."""
        message = plain_names({"role": role, "content": "It is 42."}, 0)
        assistant, where = self._frame_of(role, [message]), "the complete conversation"
        endings = []
        # Three, since some templates treat the last turn, or the first answer, unlike the others.
        for rounds in (1, 2, 3):
            talk = [_QUESTION, *[assistant, message] * rounds]
            text = self._frames.render(talk)
            opening = self._frames.render(talk[:1], prompt=False)
            # What was shown first must stay, or the policy reads what the template never writes.
            self._same(role, opening, text[: len(opening)], "what came first, with more behind it")
            endings.append(text[self._end(role, text)[1] :])
        if endings[1] != endings[2]:  # every answer has another frame
            self._same(role, self.following([message], closed=True), endings[1], where)
        for first, text in zip((True, False, False), endings, strict=True):
            self._same(role, self.following([message], closed=True, first=first), text, where)

    def _same(self, role: str, ours: Sequence[int] | str, text: str, where: str) -> None:
        ours = self._tokenizer.encode(ours) if isinstance(ours, str) else list(ours)
        expected = self._tokenizer.encode(text)
        if ours == expected:
            return
        pairs = zip([*ours, None], [*expected, None], strict=False)
        at = next(k for k, (a, b) in enumerate(pairs) if a != b)
        spelled = [
            repr(self._tokenizer.decode(ids[at : at + 1], skip_special=False)) or "nothing"
            for ids in (ours, expected)
        ]
        mine, theirs = spelled
        raise UserError(
            f"the chat template cannot continue after a {role} message: token {at} is {mine}, "
            f"but {theirs} in {where}; use another template (chat_template.jinja), or an "
            "environment that answers in another role"
        )
