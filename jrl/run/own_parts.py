"""Parts of one's own, tried before anything compiles: a source's draw, and a method's functions.

Nothing is sampled: completions are one token each. So a wrong signature or shape is an error of one
line at the start, and not an exception behind the first compiled programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.collect.collector import on_host
from jrl.collect.edit import edited, learned, outcome_of
from jrl.collect.groups import PlacedGroups, batch_of, place
from jrl.collect.members import demonstration_rollout, flagged, widths
from jrl.collect.plan import First, Now, Setting, first_asks, new_collected, view_of
from jrl.collect.sources import Groups, Source, simple_request
from jrl.collect.sources_own import CheckedSource, make_own_source, padded
from jrl.errors import UserError
from jrl.setup.run import Run
from jrl.train import programs
from jrl.train.batches import setting_of, sources_of
from jrl.train.shapes import abstract_parameters
from jrl.types import Prompt, Rollout
from jrl.types.asks import Ask, DrawRequest, Tokens
from jrl.user_code import made_by


def check_own_parts(run: Run) -> None:
    """Raises UserError for a source or a method of one's own that does not fit the run."""
    own_method, source = ":" in run.config.method, None
    if "own source" in run.kind.features:
        limit = run.config.sampling.max_new_tokens
        source = make_own_source(run, Unsampled(run.width, limit))
        _try_source(run, source)
    if own_method and run.config.data.completions_key:
        _try_method(run, sources_of(run).train(run, None))
    elif own_method:
        _try_method(run, source)


class Unsampled(NamedTuple):
    """A run's sampler before it compiles: completions of one token that no policy sampled.

    Attributes:
      width: P, tokens.
      limit: T, tokens.
    """

    width: int
    limit: int

    def __call__(self, request: DrawRequest, prompts: Sequence[Prompt]) -> Rollout:
        """As ``sources_own.Sampler``."""
        tokens = padded(request, prompts, self.width)
        return flagged(_unsampled(tokens, widths(request.asks), self.limit), request.asks)


def _unsampled(prompts: Tokens, members: int, limit: int) -> Rollout:
    n = len(prompts.lengths)
    tokens, ones = np.zeros((n, limit), np.int32), np.ones(n, np.int32)
    return demonstration_rollout(
        prompts.ids, prompts.lengths, tokens, ones, np.ones(n, bool), members
    )


def _tried(key: str, function: Callable[..., Any], *args: Any) -> Any:
    """The result; what fails is a UserError that names the key, and the line where it can."""
    try:
        return function(*args)
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(key) else f"{key}: {text}") from None


# ---------------------------------------------------------------- a source


def _try_source(run: Run, checked: CheckedSource) -> None:
    """Draws once from a source of one's own, by all its methods but ``finish``."""
    data: Any = run.config.data
    key, n = f"data.train = {data.train!r}", run.config.train.prompts
    name, tickets = type(checked.source).__name__, np.arange(n, dtype=np.int32)
    rows = np.asarray(made_by(checked.order, key, tickets))
    if rows.shape != (n,) or not np.issubdtype(rows.dtype, np.integer):
        raise UserError(
            f"{key}: {name}.order returned {rows.dtype} of shape {rows.shape} for {n} tickets;"
            f" return ({n},) int32, the row of each"
        )
    root = np.asarray(jax.random.key_data(jax.random.key(run.config.seed)))
    pair = made_by(checked.prompts, key, root, rows)
    if not isinstance(pair, tuple) or len(pair) != 2 or len(pair[1]) != n:
        raise UserError(
            f"{key}: {name}.prompts returned {pair!r:.60} for {n} rows; return (subjects, prompts),"
            f" {n} of each"
        )
    group = run.config.sampling.group
    request = simple_request(root, {"policy": ()}, np.int32(0), tickets, group, rows=rows)
    _tried(key, made_by, checked.draw, key, request)
    if not isinstance(notes := made_by(checked.notes, key), dict):
        raise UserError(
            f"{key}: {name}.notes returned {notes!r:.40}; return a dict, {{}} for no state"
        )


# ---------------------------------------------------------------- a method


def _try_method(run: Run, source: Source | None) -> None:
    """Calls the parts of a method on the groups of a step, and traces its training step.

    Args:
      run: with a method of one's own.
      source: draws the groups, where that takes no sampler; None for groups without rewards.
    """
    key, setting = f"method = {run.config.method!r}", setting_of(run)
    problems = run.kind.problems(run.data, setting.prompts)
    weights = np.asarray(setting.weights, np.float32)
    order = (lambda tickets: tickets % problems) if source is None else source.order
    setting = setting._replace(weights=weights, order=order)
    if (curriculum := setting.method.curriculum) is not None and curriculum.between is not None:
        # It may test problems before it chooses.
        setting = setting._replace(method=setting.method._replace(curriculum=None))
    with on_host():
        groups = _tried(key, made_by, _trained_groups, key, run, setting, source)
    batch = batch_of(groups, sampled=run.kind.sampled and run.method.draw.samples)
    _tried(key, made_by, _trace_step, key, run, batch)


def _trained_groups(run: Run, setting: Setting, source: Source | None) -> PlacedGroups:
    """The groups of a step by a method's curriculum, plan, rewards and edits, one after another."""
    method, now = setting.method, Now(np.zeros(2, np.uint32), np.int32(0))
    collected = new_collected(setting)
    first = first_asks(collected, now, setting)
    if source is None:
        drawn = _empty_groups(run, first.origin.number.shape)
    else:
        drawn = _drawn_groups(run, source, first)
    groups = place(drawn, first.origin, setting.weights, None)
    shape = groups.rewards.shape
    groups = method.rewards(groups, view_of(0, first.collected, now, setting))
    if not isinstance(groups, PlacedGroups) or groups.rewards.shape != shape:
        returned = getattr(groups, "rewards", groups)
        raise UserError(
            f"rewards returned {getattr(returned, 'shape', type(returned).__name__)}; return the"
            f" groups with reward parts of shape {shape}, as jrl.methods.of_parts does"
        )
    if method.plan.next is not None:
        _check_asks(method.plan.next(groups, view_of(1, first.collected, now, setting)))
    trained, _, _ = edited(groups, first.collected, now, setting)
    if (curriculum := method.curriculum) is not None:
        assert setting.table is not None
        outcome = outcome_of(groups, trained, None, now.step, setting.table)
        before, after = first.collected, learned(curriculum, first.collected, outcome)
        forms: list[Any] = [jax.tree.structure(x.curriculum) for x in (before, after)]
        if forms[0] != forms[1]:
            raise UserError("curriculum.update returned another state than it was given")
    return trained


def _empty_groups(run: Run, shape: tuple[int, int]) -> Groups:
    """Groups of a run without rewards, with the labels and statistics that its data give."""
    (n, members), t = shape, run.kind.new_tokens * run.kind.contexts
    each, labels = sources_of(run).labels(run)
    n *= each
    prompts = Tokens(np.zeros((n, run.width), np.int32), np.ones(n, np.int32))
    axes = n, members, t
    ids = {x: np.zeros(axes[:k], np.int32) for x, k in {"prompt": 1, **labels.ids}.items()}
    stats = {x: np.zeros(axes[:k], np.float32) for x, k in labels.stats.items()}
    points = np.zeros((n, members, len(run.rewards.weights)), np.float32)
    return Groups(_unsampled(prompts, members, t), points, None, {}, ids, stats)


def _drawn_groups(run: Run, source: Source, first: First) -> Groups:
    """Groups that take no sampler, without rewards."""
    root = np.asarray(jax.random.key_data(jax.random.key(run.config.seed)))
    request = simple_request(root, {"policy": ()}, np.int32(0), first.origin.ticket)
    groups = source.draw(request.replace(asks=first.asks))
    points = np.zeros((*groups.rollout.lengths.shape, len(run.rewards.weights)), np.float32)
    return groups._replace(rewards=points)


def _check_asks(asks: Any) -> None:
    """Raises UserError for what is no tuple of asks."""
    if not isinstance(asks, tuple) or not all(isinstance(ask, Ask) for ask in asks):
        raise UserError(
            f"plan.next returned {asks!r:.60}; return a tuple of asks, such as"
            " (more(groups, count, width),), or () for none"
        )


def _trace_step(run: Run, batch: Any) -> None:
    """Traces the training step on the shapes of a batch."""
    state, _ = programs.abstract_state(run)
    with jax.set_mesh(run.mesh):
        jax.eval_shape(programs.make_train_step(run), state, batch, abstract_parameters(run))
