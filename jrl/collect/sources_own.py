"""Sources of one's own in a run: ``data.train = "source:FILE.py:function"``.

    def sums(sampler, tokenizer, largest=9):
        return Sums(sampler, tokenizer, largest)      # has the methods of ``sources.Source``

``sampler(request, prompts)`` draws a group of completions for each prompt, as the request asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jrl.collect.sources import (
    Around,
    Groups,
    Source,
    check_groups,
    check_source,
)
from jrl.collect.sources_text import TextSampler
from jrl.config.secrets import reveal
from jrl.data.prompts import pad_prompts
from jrl.errors import UserError
from jrl.setup.run import Run
from jrl.types import Prompt, Rollout
from jrl.types.asks import DrawRequest, Tokens
from jrl.user_code import check_options, check_takes, load, made_by


class Sampler(NamedTuple):
    """The sampler of a run, for a source of one's own.

    Attributes:
      sampler: of prompts in text.
      width: P, tokens.
      limit: T, tokens.
    """

    sampler: TextSampler
    width: int
    limit: int

    def __call__(self, request: DrawRequest, prompts: Sequence[Prompt]) -> Rollout:
        """A group of completions of each prompt, on the host.

        Args:
          request: whose asks and weights are used.
          prompts: N, one for each entry of the request, of at most ``width`` tokens.
        """
        tokens = padded(request, prompts, self.width)
        rollout, _, _ = self.sampler(request, tokens, self.limit)
        return rollout


def padded(request: DrawRequest, prompts: Sequence[Prompt], width: int) -> Tokens:
    """The prompts of a source of one's own as arrays [N, P].

    Raises:
      UserError: they are not N ``Prompt``, or one is empty or longer than ``width`` tokens.
    """
    n = request.asks[0].entries
    if len(prompts) != n or not all(isinstance(prompt, Prompt) for prompt in prompts):
        raise UserError(
            f"sampler(request, prompts) got {prompts!r:.60}; give {n} jrl.types.Prompt, one for"
            " each entry of the request"
        )
    if empty := [prompt.id for prompt in prompts if not len(prompt.tokens)]:
        raise UserError(f"prompt {empty[0]} has no tokens; it needs at least one")
    return Tokens(*pad_prompts(prompts, width))


class CheckedSource(Around):
    """A source of one's own whose groups are checked as they are drawn.

    Args:
      source: has every part of one.
      parts: R, reward parts of the run.
    """

    def __init__(self, source: Source, parts: int) -> None:
        super().__init__(source)
        self._parts = parts

    def draw(self, request: DrawRequest) -> Groups:
        """As ``Source.draw``.

        Raises:
          UserError: the shapes are not those that were asked for.
        """
        return check_groups(self.source.draw(request), request, self._parts, self.source)


def make_own_source(run: Run, sampler: Any) -> CheckedSource:
    """The source that ``data.train`` names.

    Args:
      run: from ``train.build.setup``.
      sampler: a ``Sampler``, or what stands in for one before anything compiles.

    Raises:
      UserError: there is no such function, it does not take the sampler, the tokenizer and the
        options, or what it returns lacks a part.
    """
    data: Any = run.config.data
    key = f"data.train = {data.train!r}"
    make = load(data.place, "data.train")
    check_takes(make, ("sampler", "tokenizer"), key)
    arguments = {"sampler": sampler, "tokenizer": run.tokenizer}
    arguments |= reveal(data.free_options, "data")
    check_options(make, arguments, "data")
    source = check_source(made_by(make, key, **arguments))
    return CheckedSource(source, len(run.rewards.given_by("data")))
