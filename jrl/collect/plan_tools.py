"""Tools of the data for plans: its own solutions, hints, and questions about completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.data.tasks import Task
from jrl.errors import UserError
from jrl.models.tokenizer import Tokenizer
from jrl.rewards.base import Sample
from jrl.setup.run import Run, question_prompts
from jrl.types import Array, Prompt, StopReason, stream
from jrl.types.asks import Asks, Tokens


class TaskTools(NamedTuple):
    """Solutions and hints of a procedural task; in a compiled run, too.

    Attributes:
      task: which.
      key: the run's root key.
    """

    task: Task
    key: Any

    def solutions(self, asks: Asks, number: int | None = None) -> Tokens:
        """The task's own solution of each entry of the first ask, whatever the number."""
        del number
        return _task_solutions(self.task, self.key, asks[0].row)

    def hints(self, groups: Any, level: Any, levels: int) -> Mapping[str, Any]:
        """The first part of each group's solution, as the beginning of the completion.

        A procedural task has no hint but its solution, and no prompt that would hold one. Nobody is
        trained on the hint itself.

        Args:
          groups: m of them.
          level: [m] or [] int32, from 1 to ``levels``: this share of the solution, without its stop
            token, rounded up.
          levels: static.
        """
        whole = _task_solutions(self.task, self.key, groups.row)
        body = jnp.maximum(whole.lengths - 1, 0)
        lengths = jnp.minimum(-(-body * level // levels), body).astype(jnp.int32)
        return {"prefix": Tokens(whole.ids, lengths)}

    def prompt_ids(self, rows: Any) -> Any:
        """The identity of the problem in each row."""
        return rows


@partial(jax.jit, static_argnums=0)
def _task_solutions(task: Task, key: Array, rows: Array) -> Tokens:
    """Solutions [N, T]; one without a stop token counts as longer than T."""
    keys = jax.vmap(lambda i: stream(key, "data", i))(jnp.asarray(rows))
    problems = jax.vmap(partial(task.generate, split="train"))(keys)
    ids, lengths, complete = jax.vmap(partial(task_solution, task))(problems)
    return Tokens(ids, lengths + ~complete)


def task_solution(task: Task, problem: Any) -> tuple[Array, Array, Array]:
    """ONE problem's solution: tokens [T], length [] with the stop token, whether it has one."""
    tokens, length = task.solution(problem)
    at = jnp.arange(tokens.shape[0])
    # Without its stop token a solution teaches the policy never to end.
    bare = (tokens[length - 1] != task.stop_id) & (length < tokens.shape[0])
    tokens = jnp.where(bare & (at == length), task.stop_id, tokens)
    length = (length + bare).astype(jnp.int32)
    return tokens, length, tokens[length - 1] == task.stop_id


def _of_several(prompt: Prompt, number: int | None) -> np.ndarray:
    """A prompt's solution, or number ``number`` of several; all end with the last one's end token.

    Rows with fewer are refused when the data are read.
    """
    assert prompt.solution is not None
    if number is None:
        return prompt.solution
    ends = np.flatnonzero(prompt.solution == prompt.solution[-1])
    return np.split(prompt.solution, ends[:-1] + 1)[number]


class TextTools(NamedTuple):
    """Solutions and hints of prompts in text.

    Attributes:
      prompts: those of the data, a row each.
      limit: T, the most tokens of a completion.
      hinted: (prompt, hint) -> the token ids of the prompt with the hint in it; None where the data
        has none.
      key_of_hints: the field of a prompt's ``meta`` that holds its hints, a list of texts or of
        tiers, lists of texts.
      tokenizer: turns completions into text.
      tokens_of: (question) -> the token ids of a prompt with it; None where the data has none.
      longest: tokens of the longest prompt.
    """

    prompts: Sequence[Prompt]
    limit: int
    hinted: Callable[[Prompt, str], np.ndarray] | None = None
    key_of_hints: str = "hints"
    tokenizer: Tokenizer | None = None
    tokens_of: Callable[[str], np.ndarray] | None = None
    longest: int = 0

    def samples(self, groups: Any) -> list[list[Sample | None]]:
        """[m][M]: the members that count in their groups, as reward functions see them.

        Args:
          groups: m of them, on the host. What a member was only shown is no part of its text.
        """
        assert self.tokenizer is not None
        rollout, live = groups.rollout, np.asarray(groups.drawn())
        listed: list[list[Sample | None]] = [[None] * live.shape[1] for _ in live]
        for i, j in np.argwhere(live).tolist():
            tokens = np.asarray(rollout.tokens[i, j])[np.asarray(rollout.mask[i, j])]
            text = self.tokenizer.decode(tokens.tolist())
            stop = StopReason(int(rollout.stop[i, j])).name.lower()
            listed[i][j] = Sample(self.prompts[int(groups.row[i])], text, tokens, stop)
        return listed

    def contexts(self, questions: Sequence[str], most: int) -> tuple[Tokens, np.ndarray]:
        """Prompts with these questions, by the run's template.

        Args:
          questions: in words of the policy's own.
          most: tokens of the longest; also the width.

        Returns:
          (prompts [A, W], W the least of ``most`` and ``longest``; [A] bool, False for those that
          are longer or that the tokenizer cannot write).
        """
        assert self.tokens_of is not None
        width, ids, usable = min(most, self.longest), [], []
        for question in questions:
            try:
                tokens = self.tokens_of(question)
            except UserError:  # a completion with characters that the tokenizer does not have
                tokens = np.zeros(0, np.int32)
            usable.append(0 < len(tokens) <= width)
            ids.append(tokens if usable[-1] else np.ones(1, np.int32))
        return padded(ids, width), np.array(usable, bool)

    def solutions(self, asks: Asks, number: int | None = None) -> Tokens:
        """The data's own solution of each entry of the first ask.

        Args:
          asks: of the step so far.
          number: of several that a prompt has, from 0 on; None for its only one.

        Raises:
          UserError: a prompt has none.
        """
        solutions = []
        for row in np.asarray(asks[0].row).tolist():
            prompt = self.prompts[row]
            if prompt.solution is None:
                raise UserError(
                    f"prompt {prompt.id} has no solution to learn from; name the field that holds "
                    "it in data.fields.solution"
                )
            solutions.append(_of_several(prompt, number))
        return padded(solutions, self.limit)

    def hints(self, groups: Any, level: Any, levels: int) -> Mapping[str, Any]:
        """The prompts with a hint, under which members are drawn and trained.

        The hints of a prompt are texts in ascending order of what they give away, or tiers, each a
        list of such texts. Level l of L shows the hint at place l / L, rounded up, with those
        before it in its tier.

        Args:
          groups: m of them, on the host.
          level: [m] or [] int, from 1 to ``levels``.
          levels: how many there are.

        Raises:
          UserError: a prompt has no hints.
        """
        rows = np.asarray(groups.row)
        numbers = np.broadcast_to(np.asarray(level), rows.shape).tolist()
        contexts = []
        for row, number in zip(rows.tolist(), numbers, strict=True):
            prompt = self.prompts[row]
            shown = _increments(prompt.meta.get(self.key_of_hints))
            if not shown or self.hinted is None:
                raise UserError(
                    f"prompt {prompt.id} has no field {self.key_of_hints!r}, a list of hints from"
                    " the vaguest to the clearest; add it to the rows of data.train"
                )
            place = max(-(-len(shown) * number // levels), 1)
            contexts.append(self.hinted(prompt, shown[place - 1]))
        return {"context": padded(contexts), "keep": True}

    def prompt_ids(self, rows: Any) -> np.ndarray:
        """The identity of the problem in each row."""
        return np.array([self.prompts[i].id for i in np.asarray(rows).tolist()], np.int32)


def _increments(hints: Any) -> list[str]:
    r"""What a prompt's hints say level by level: each tier begins anew, and adds a text a level.

    >>> _increments(["a", "b"]), _increments([["a", "b"], ["c"]])
    (['a', 'a\nb'], ['a', 'a\nb', 'c'])
    """
    listed = [hints] if isinstance(hints, str) else list(hints or ())
    tiers = [each if isinstance(each, list | tuple) else [each] for each in listed]
    if not any(isinstance(each, list | tuple) for each in listed):
        tiers = [listed]
    return ["\n".join(map(str, tier[: k + 1])) for tier in tiers for k in range(len(tier))]


class Hinter:
    """(prompt, hint) -> token ids of the prompt's question followed by the hint.

    Args:
      run: on text, whose template turns questions into prompts.
    """

    _MARK = "JRLQUESTION0JRL"

    def __init__(self, run: Run) -> None:
        self._run, self._around = run, ("", "")

    def _template(self) -> tuple[str, str]:
        """The template's tokens before and after a question; computed with the first hint."""
        if self._around == ("", ""):
            # The mark may be longer than any question.
            (probe,) = question_prompts(self._run, [self._MARK], self._run.network.max_length)
            before, _, after = probe.text.partition(self._MARK)
            if self._MARK in after:
                raise UserError(
                    "data.template holds {question} more than once, and a hint has no one place in"
                    " it; write it once"
                )
            self._around = before, after
        return self._around

    def __call__(self, prompt: Prompt, hint: str) -> np.ndarray:
        """The tokens.

        Raises:
          UserError: the prompt is not the template's, as one that was truncated, or is a
            conversation.
        """
        before, after = self._template()
        text, begin = prompt.text, len(before)
        end = len(text) - len(after)
        if not (text.startswith(before) and text.endswith(after) and begin <= end):
            raise UserError(
                f"prompt {prompt.id} was cut, and a hint has no place in it; raise"
                " data.max_prompt_tokens, or set data.overlong to 'drop'"
            )
        limit = self._run.network.max_length - self._run.config.sampling.max_new_tokens
        question = text[begin:end]
        plain, hinted = question_prompts(
            self._run, [question, f"{question}\n\nHint: {hint}"], limit
        )
        # The template's tokens between messages would otherwise be encoded as words of a user.
        if not np.array_equal(plain.tokens, prompt.tokens):
            raise UserError(
                f"prompt {prompt.id} is more than a question of text (it has several messages,"
                " tools or template variables of its own), and a hint has no place in it; write"
                " such rows as one question"
            )
        return hinted.tokens


def padded(texts: Sequence[np.ndarray], most: int = 0) -> Tokens:
    """Token sequences as arrays, cut at ``most`` tokens; the lengths are those before the cut.

    The width is a multiple of 16, or ``most`` where that is given.
    """
    width = most or -(-max(map(len, texts), default=1) // 16) * 16
    ids = np.zeros((len(texts), width), np.int32)
    for i, text in enumerate(texts):
        ids[i, : min(len(text), width)] = text[:width]
    return Tokens(ids, np.array([len(text) for text in texts], np.int32))
