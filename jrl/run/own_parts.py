"""Methods of one's own, tried before anything compiles.

Nothing is sampled: completions are one token each. So a wrong signature or shape is an error of one
line at the start, and not an exception behind the first compiled programs. Sources and environments
of one's own are tried where they are made (``train.batches.Sources.tried``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.collect.collector import on_host
from jrl.collect.curriculum import HostRounds, HostTools, with_problems
from jrl.collect.edit import edited, learned, outcome_of
from jrl.collect.groups import PlacedGroups, batch_of, place
from jrl.collect.members import widths
from jrl.collect.plan import CollectState, Setting, StepKey, first_asks, new_collected, view_of
from jrl.collect.sources import Groups, Source, simple_request
from jrl.collect.sources_own import tried, unsampled
from jrl.errors import UserError
from jrl.methods.curriculum import Curriculum
from jrl.methods.plan import Plan
from jrl.setup.run import Run
from jrl.train import programs
from jrl.train.batches import setting_of, sources_of
from jrl.train.shapes import abstract_parameters
from jrl.types import Prompt
from jrl.types.asks import Ask, DrawRequest, Tokens
from jrl.user_code import made_by


def check_own_parts(run: Run) -> None:
    """Raises UserError for a source, an environment or a method of one's own that does not fit."""
    source = sources_of(run).tried(run)
    if ":" in run.config.method:
        _try_method(run, source)


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
    with on_host():
        groups = tried(key, made_by, _trained_groups, key, run, setting, source)
    batch = batch_of(groups, sampled=run.kind.has_logprobs(run.method))
    tried(key, made_by, _trace_step, key, run, batch)


def _trained_groups(run: Run, setting: Setting, source: Source | None) -> PlacedGroups:
    """The groups of a step by a method's curriculum, plan, rewards and edits, one after another."""
    method, now = setting.method, StepKey(np.zeros(2, np.uint32), np.int32(0))
    drawer = _Unrewarded(run, source)
    collected = _begun(run, setting, drawer, new_collected(setting))
    first = first_asks(collected, now, setting)
    if source is None:
        drawn = _empty_groups(run, first.origin.number.shape)
    else:
        drawn = drawer.draw(drawer.request(first.origin.ticket).replace(asks=first.asks))
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
        _check_room(method.plan, setting)
        _check_asks(method.plan.next(groups, view_of(1, first.collected, now, setting)))
    trained, after, _ = edited(groups, first.collected, now, setting)
    for i, (old, new) in enumerate(zip(first.collected.edits, after.edits, strict=True)):
        if not _same_form(old, new):
            raise UserError(f"edit {i} returned another state than it was given")
    if trained.rewards.shape[2:] != shape[2:]:
        raise UserError(
            f"the edits left reward parts of shape {trained.rewards.shape}; keep the last axis,"
            f" {shape[2]} parts"
        )
    if (curriculum := method.curriculum) is not None:
        assert setting.table is not None
        outcome = outcome_of(groups, trained, None, now.step, setting.table)
        chosen, updated = first.collected, learned(curriculum, first.collected, outcome)
        _check_same(collected.curriculum, chosen.curriculum, curriculum, "choose")
        _check_same(chosen.curriculum, updated.curriculum, curriculum, "update")
    return trained


def _same_form(tree: Any, other: Any) -> bool:
    """Whether two trees have the same leaves, by their places."""
    forms: list[Any] = [jax.tree.structure(each) for each in (tree, other)]
    return bool(forms[0] == forms[1])


def _check_same(before: Any, after: Any, curriculum: Curriculum, name: str) -> None:
    """Raises UserError where a curriculum's state has other leaves than before, or other shapes.

    A checkpoint restores the state as it began, and a compiled run carries it; with ``between`` its
    arrays may grow.
    """
    if not _same_form(before, after):
        raise UserError(f"curriculum.{name} returned another state than it was given")
    if curriculum.between is not None:
        return
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if jnp.shape(old) != jnp.shape(new) or jnp.result_type(old) != jnp.result_type(new):
            raise UserError(
                f"curriculum.{name} returned a state with {_layout(new)} in place of"
                f" {_layout(old)}; keep shapes and types"
            )


def _layout(leaf: Any) -> str:
    return f"{jnp.result_type(leaf)} of shape {jnp.shape(leaf)}"


def _check_room(plan: Plan, setting: Setting) -> None:
    """Raises UserError for a plan whose further rounds have no room for what they sample."""
    if not plan.members(setting.group) and not plan.prompts(setting.prompts):
        raise UserError(
            f"plan.next can add nothing: plan.members({setting.group}) and"
            f" plan.prompts({setting.prompts}) are 0; set members, for more of a group, or prompts,"
            " for more groups"
        )


class _Unrewarded:
    """What draws groups before anything compiles: completions of one token, without rewards.

    Args:
      run: from ``build.setup``.
      source: draws them, where that takes no sampler; None for completions of nothing.
    """

    def __init__(self, run: Run, source: Source | None) -> None:
        self._run, self._source = run, source

    def request(self, tickets: np.ndarray) -> DrawRequest:
        """A request of the first step."""
        root = np.asarray(jax.random.key_data(jax.random.key(self._run.config.seed)))
        return simple_request(root, {"policy": ()}, np.int32(0), tickets)

    def draw(self, request: DrawRequest) -> Groups:
        """As ``Source.draw``."""
        if self._source is None:
            shape = request.asks[0].entries, widths(request.asks)
            # No room beyond the one token: a round may test all problems of the data.
            return _empty_groups(self._run, shape, 1)
        groups, parts = self._source.draw(request), len(self._run.rewards.weights)
        points = np.zeros((*groups.rollout.lengths.shape, parts), np.float32)
        return groups._replace(rewards=points)


def _empty_groups(run: Run, shape: tuple[int, int], tokens: int | None = None) -> Groups:
    """Groups of a run without rewards, with the labels and statistics that its data give.

    Args:
      run: from ``build.setup``.
      shape: problems, and members of each.
      tokens: T; None for the run's.
    """
    (n, members), t = shape, tokens or run.kind.new_tokens * run.kind.contexts
    each, labels = sources_of(run).labels(run)
    n *= each
    prompts = Tokens(np.zeros((n, run.width), np.int32), np.ones(n, np.int32))
    axes = n, members, t
    ids = {x: np.zeros(axes[:k], np.int32) for x, k in {"prompt": 1, **labels.ids}.items()}
    stats = {x: np.zeros(axes[:k], np.float32) for x, k in labels.stats.items()}
    points = np.zeros((n, members, len(run.rewards.weights)), np.float32)
    return Groups(unsampled(prompts, members, t), points, None, {}, ids, stats)


def _begun(run: Run, setting: Setting, drawer: Any, collected: CollectState) -> CollectState:
    """The collector's state after ``Curriculum.between``, which is called as the first round does.

    The tests that it makes have no rewards, a writer repeats what it is shown with a word more, and
    the value network says 0.
    """
    between = None if setting.method.curriculum is None else setting.method.curriculum.between
    if between is None:
        return collected
    _, problems = with_problems(run)
    request = drawer.request(np.arange(setting.prompts, dtype=np.int32))
    after = HostRounds(drawer, problems, _TOOLS).begun(collected, request, setting)
    if not _same_form(collected.curriculum, after.curriculum):
        raise UserError(
            f"curriculum.between.run returned {after.curriculum!r:.40}; return the state with the"
            " same leaves, which may be longer"
        )
    counts = between.counts(after.curriculum)
    if not isinstance(counts, Mapping) or not all(isinstance(x, Real) for x in counts.values()):
        raise UserError(
            f"curriculum.between.counts returned {counts!r:.60}; return numbers by name, {{}} for"
            " none"
        )
    return after


def _written_again(texts: Sequence[str], count: int, seed: int) -> list[str]:
    return [f"{text} again" for text in texts[:count]]


def _no_values(weights: Any, prompts: Sequence[Prompt], seeds: Sequence[int]) -> np.ndarray:
    return np.zeros(len(prompts))


_TOOLS = HostTools(_written_again, _no_values)


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
