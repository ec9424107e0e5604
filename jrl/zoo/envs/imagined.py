"""Conversations imagined by a language model: prompts, and parsing of the replies.

The imagination engine of "Zero-Shot Goal-Directed Dialogue via RL on Imagined Conversations"
(arXiv:2311.05584): from the description of a task a model reasons about who the human could be,
imagines whole dialogues with each, and critiques them; offline RL learns from the result to reach
the goal better than the imagined agents do. ``jrl.zoo.tools.imagine`` asks the model and writes the
rows.

Not known: the paper's own prompts, and how many personas and dialogues it has (we read its abstract
and summaries of its method); the words below are ours. Departures: how skilled the agent is comes
from a list of three, so that the data hold failures as well; the critique gives a number from 0 to
10, and revises a dialogue only where the task has ``criteria``.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from jrl.models.chat_frames import Message

T = TypeVar("T")

Ask = Callable[[str, int], Any]
"""(prompt, seed of the draw) -> what the model replies."""

ATTEMPTS = 3
"""Retries after an unreadable reply."""

SKILLS = {
    "good": "The agent is skilled: it finds out what it needs to know about this human, adapts to"
    " what it hears, and reaches the goal.",
    "average": "The agent is of average skill: it means well and makes some progress, but overlooks"
    " some of what the human says, and may not reach the goal.",
    "poor": "The agent is of poor skill, in a way that happens to real people: it asks too little,"
    " assumes too much, or does not adapt, and mostly fails to reach the goal.",
}
"""Skill levels of a dialogue's agent."""


class Task(NamedTuple):
    """Description of the conversations.

    Attributes:
      description: of the task, as one would tell it to somebody new.
      agent: who the agent is, such as "a teacher".
      human: who it talks with, such as "a student".
      goal: the question that the critique answers, such as "How well does the student ...?"
      opening: what the user says first where the agent begins the conversation.
      turns: of the agent in a dialogue, about.
      personas: different people to imagine.
      criteria: by which a dialogue is revised before it is judged; () to leave it.
    """

    description: str
    agent: str
    human: str
    goal: str
    opening: str = "Hello."
    turns: int = 6
    personas: int = 10
    criteria: tuple[str, ...] = ()


class UnreadableError(Exception):
    """A reply without the requested content."""


# ---------------------------------------------------------------- what the model is asked


def reason_prompt(task: Task, count: int, existing: Sequence[str] = ()) -> str:
    """Asks for people who could be the human of a task, other than those that are known."""
    others = "".join(f"- {persona}\n" for persona in existing)
    return (
        f"{_about(task)}\n"
        f"Think about who {task.human} in this conversation could be. List {count} such people who"
        " differ in what matters to the conversation and cannot be seen at its start: what they"
        " know, want, believe, feel or hide, and how they talk.\n"
        + (f"Do not repeat these:\n{others}" if others else "")
        + f"Write {count} lines, each of the form\n1. one or two sentences about the person\n"
        "and nothing else."
    )


def imagine_prompt(task: Task, persona: str, skill: str) -> str:
    """The request for a complete dialogue with a persona, by an agent of a skill of ``SKILLS``."""
    return (
        f"{_about(task)}\n"
        f"The human: {persona}\n"
        "The agent does not know this when the conversation begins. What the human thinks and does"
        " follows from it, and changes only for good reason.\n"
        f"{SKILLS[skill]}\n"
        "Write their whole conversation as it could really happen, with about"
        f" {task.turns} messages of the agent. {_FORM}"
    )


def revise_prompt(task: Task, persona: str, dialogue: Sequence[Message]) -> str:
    """Asks for a dialogue that meets the criteria of the task."""
    criteria = "".join(f"- {each}\n" for each in task.criteria)
    return (
        f"{_about(task)}\n"
        f"The human: {persona}\n"
        f"This is a conversation between them:\n\n{transcript(dialogue)}\n\n"
        f"It should meet these criteria:\n{criteria}"
        "Write it again, changed only where it does not meet them. How well the agent does must"
        f" stay as it is. {_FORM}"
    )


def critique_prompt(task: Task, persona: str, dialogue: Sequence[Message]) -> str:
    """Asks how well a dialogue reached the goal."""
    return (
        f"{_about(task)}\n"
        f"The human: {persona}\n"
        f"This is a conversation between them:\n\n{transcript(dialogue)}\n\n"
        f"Judge it strictly, by what is said in it alone. {task.goal}\n"
        "Give your reasons in one or two sentences. Then write a last line of the form\n"
        "Score: NUMBER\n"
        "with a number from 0 (not at all) to 10 (completely)."
    )


def transcript(dialogue: Sequence[Message]) -> str:
    """A dialogue in the form that ``imagine_prompt`` asks for, without its end."""
    names = {"assistant": "Agent", "user": "Human"}
    return "\n".join(f"{names[m['role']]}: {m['content']}" for m in dialogue)


def _about(task: Task) -> str:
    return (
        f"The task: {task.description.strip()}\n"
        f"The agent is {task.agent}. The human is {task.human}."
    )


_FORM = (
    'Begin each message on a new line with "Agent:" or "Human:", write nothing before the first'
    ' one, and end with a line "END".'
)


# ---------------------------------------------------------------- what it replies


def read_personas(reply: Any) -> list[str]:
    r"""The lines of a list.

    >>> read_personas("Here they are:\n1. A shy one.\n2) A proud one.")
    ['A shy one.', 'A proud one.']

    Raises:
      UnreadableError: there is no list.
    """
    personas = re.findall(r"^\s*(?:\d+[.):]|[-*])\s+(\S.*?)\s*$", _text_of(reply), re.MULTILINE)
    if not personas:
        raise UnreadableError("no line of a list")
    return list(dict.fromkeys(personas))


_LABEL = re.compile(
    r"^\s*(?:\*\*|__)?(agent|human)(?:\*\*|__)?\s*:\s*(?:\*\*|__)?[ \t]*(.*)$", re.IGNORECASE
)
_END = re.compile(r"^\W*end\W*$", re.IGNORECASE)


def read_dialogue(reply: Any, opening: str) -> list[Message]:
    r"""The messages of a dialogue, the agent's of the role "assistant".

    Lines without a name belong to the message before them, and messages of one speaker in a row are
    one. Where the agent speaks first the user says ``opening`` before, because chat templates want
    somebody to answer.

    >>> [m["content"] for m in read_dialogue("Agent: Hi.\nHuman: Hm?\nEND", "Hello.")]
    ['Hello.', 'Hi.', 'Hm?']

    Raises:
      UnreadableError: it has no end, so that it may be cut, or one of the two says nothing.
    """
    turns: list[tuple[str, list[str]]] = []
    for line in _text_of(reply).splitlines():
        if _END.match(line):
            break
        if label := _LABEL.match(line):
            role = {"agent": "assistant", "human": "user"}[label[1].lower()]
            if not turns or turns[-1][0] != role:
                turns.append((role, []))
            turns[-1][1].append(label[2])
        elif turns:
            turns[-1][1].append(line)
    else:
        raise UnreadableError("no line END, so the dialogue may be cut")
    messages: list[Message] = [
        {"role": role, "content": "\n".join(lines).strip()} for role, lines in turns
    ]
    if not all(message["content"] for message in messages):
        raise UnreadableError("a message without words")
    if {message["role"] for message in messages} != {"assistant", "user"}:
        raise UnreadableError("no dialogue of two")
    if messages[0]["role"] == "assistant":
        messages.insert(0, {"role": "user", "content": opening})
    return messages


def read_score(reply: Any) -> float:
    r"""The score of a critique, between 0 and 1.

    >>> read_score("It went well.\n**Score:** 8/10")
    0.8

    Raises:
      UnreadableError: there is none, or it is above 10.
    """
    scores = re.findall(r"score\W{0,6}?(-?\d+(?:\.\d+)?)", _text_of(reply), re.IGNORECASE)
    if not scores or not 0 <= float(scores[-1]) <= 10:
        raise UnreadableError("no score from 0 to 10")
    return float(scores[-1]) / 10


def _text_of(reply: Any) -> str:
    """The text of a reply, without what the model thought before it."""
    return reply.rpartition("</think>")[2] if isinstance(reply, str) else ""


# ---------------------------------------------------------------- the three steps


def reason(ask: Ask, task: Task, existing: Sequence[str], *, seed: int) -> list[str]:
    """The personas of a task: those that are known, and as many others as are missing.

    Args:
      ask: the model.
      task: what conversations are about.
      existing: personas that dialogues were imagined with already.
      seed: of the run.

    Returns:
      ``task.personas`` of them, or fewer where the model lists no more.

    Raises:
      UnreadableError: it lists none.
    """
    personas, error = list(dict.fromkeys(existing)), UnreadableError("no personas")
    for attempt in range(ATTEMPTS):
        if (missing := task.personas - len(personas)) <= 0:
            break
        reply = ask(reason_prompt(task, missing, personas), draw_seed(seed, -1, "reason", attempt))
        try:
            personas += [each for each in read_personas(reply) if each not in personas][:missing]
        except UnreadableError as other:
            error = other
    if not personas:
        raise error
    return personas


def imagine_row(
    ask: Ask, task: Task, personas: Sequence[str], number: int, *, seed: int
) -> dict[str, Any]:
    """One row of a file of dialogues, which ``data.train = "dialogues:FILE"`` names.

    Args:
      ask: the model.
      task: what conversations are about.
      personas: who the human could be.
      number: of the dialogue; it chooses persona and, with the seed, skill.
      seed: of the run.

    Returns:
      A dict of "messages" and "reward", 0 to 1, and of how they came about: "number", "persona",
      "skill" and "critique".

    Raises:
      UnreadableError: a reply could not be read ``ATTEMPTS`` times.
    """
    persona = personas[number % len(personas)]
    skill = random.Random(f"{seed} {number}").choice(list(SKILLS))

    def read(prompt: str, step: str, reader: Callable[[Any], T]) -> tuple[T, str]:
        for attempt in range(ATTEMPTS):
            reply = ask(prompt, draw_seed(seed, number, step, attempt))
            try:
                return reader(reply), _text_of(reply).strip()
            except UnreadableError:
                if attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError

    def dialogue(reply: Any) -> list[Message]:
        return read_dialogue(reply, task.opening)

    messages, _ = read(imagine_prompt(task, persona, skill), "imagine", dialogue)
    if task.criteria:
        messages, _ = read(revise_prompt(task, persona, messages), "revise", dialogue)
    reward, critique = read(critique_prompt(task, persona, messages), "critique", read_score)
    more = {"number": number, "persona": persona, "skill": skill, "critique": critique}
    return {"messages": messages, "reward": reward, **more}


def draw_seed(seed: int, number: int, step: str, attempt: int) -> int:
    """The seed of one request, another for each."""
    return zlib.crc32(f"{seed} {number} {step} {attempt}".encode()) & 0x7FFFFFFF
