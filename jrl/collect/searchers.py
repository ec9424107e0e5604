"""Searches of a run's problems with any weights, of text or of episodes, as training searches.

with text_searcher(run, key, params, step, how) as search:
searched = search(prompts, seeds, plan, score)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from jrl.collect.host_source import host_source
from jrl.collect.run_rows import completion_ends, run_rows, step_ends
from jrl.episodes.play import Device
from jrl.episodes.search import Searcher, play_search
from jrl.episodes.world import TextWorld
from jrl.errors import UserError
from jrl.sampling.places import entropy
from jrl.setup.run import Run
from jrl.types import Array, Params


class SearchHow(NamedTuple):
    """Settings of a search, besides its plan.

    Attributes:
      slots: decoded at once.
      whole: whether a step is a whole completion.
      step_tokens: the most of a step of text, which ends with a line, too. In episodes a step is a
        turn, and this is not read.
      split: "train" or "eval", which an environment is told.
      temperature: of the tokens.
    """

    slots: int
    whole: bool
    step_tokens: int
    split: str
    temperature: float


@contextlib.contextmanager
def text_searcher(
    run: Run, key: Array, params: Params, step: int, how: SearchHow
) -> Iterator[Searcher]:
    """A searcher of text.

    Args:
      run: that is evaluated.
      key: its root key.
      params: the policy's.
      step: of training.
      how: settings.

    Raises:
      UserError: steps without a token.
    """
    if not how.whole and not how.step_tokens >= 1:
        raise UserError(f"step_tokens = {how.step_tokens}; give at least 1")
    rows = run_rows(
        run,
        how.slots,
        stop_tokens=step_ends(run, whole=how.whole),
        max_new_tokens=run.kind.new_tokens,
        split="eval",
        temperature=how.temperature,
        measure=entropy,
    )
    # A line ends a step of text as an environment's reply ends a turn; the world says which of them
    # end the path, too.
    world = TextWorld(completion_ends(run), 0 if how.whole else how.step_tokens)
    with rows.loaded(key, params, step):
        yield partial(play_search, Device(rows.rows), world)


@contextlib.contextmanager
def episode_searcher(
    run: Run, key: Any, params: Params, step: int, how: SearchHow
) -> Iterator[Searcher]:
    """A searcher of episodes with an environment on the host.

    Args:
      run: that is evaluated.
      key: its root key.
      params: the policy's.
      step: of training.
      how: settings.

    Raises:
      UserError: the environment's state cannot be copied.
    """
    prompts = run.data.prompts[how.split]
    source = host_source(
        run, prompts, 1, split="eval", temperature=how.temperature, width=how.slots
    )
    # What the environment's episodes share ends with the search, not with the run.
    with contextlib.closing(source), source.searcher(key, params, step, how.split) as search:
        yield search
