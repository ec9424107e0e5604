"""Reward parts made of others: ``[rewards.NAME] combine = "gate"``, ``of = ["form", "right"]``.

    gate(columns([[0.0, 1.0], [1.0, 0.5]]))     # the second part, where the first has its points

A combinator is a pure function of points [..., K], NaN where a part has no opinion, on NumPy or JAX
arrays. The parts that it reads have weight 0 unless the configuration gives them one. What a
combinator makes is NaN, no opinion, where what it cannot do without is. Imports no JAX.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jrl.errors import UserError, unknown_choice
from jrl.user_code import FORMS, check_options, load


class Columns(NamedTuple):
    """Inputs of a combinator: a step's samples.

    Attributes:
      points: [N, G, K] float32, of the parts in the order of ``of``; NaN for no opinion.
      members: [N, G] bool, samples that are compared with one another.
      names: K names.
      rows: N mappings, the fields of each prompt's row; () where the data has none.
      step: [] int32, training steps done.
    """

    points: Any
    members: Any
    names: Sequence[str] = ()
    rows: Sequence[Any] = ()
    step: Any = 0


def columns(points: Any, members: Any = None, names: Sequence[str] = ()) -> Columns:
    """Columns of one group, for trying a combinator: points [G, K] as nested lists or an array."""
    import numpy as np

    array = np.asarray(points, np.float32)[None]
    live = np.ones(array.shape[:2], bool) if members is None else np.asarray(members)[None]
    return Columns(array, live, names)


def _xp(c: Columns) -> Any:
    return c.points.__array_namespace__()


def _is_known(c: Columns) -> Any:
    return ~_xp(c).isnan(c.points)


def _or_zero(c: Columns) -> Any:
    return _xp(c).where(_is_known(c), c.points, 0)


def _total(c: Columns, weights: Sequence[float], first: int = 0) -> Any:
    """[N, G]: the weighted sum of the parts from ``first`` on; NaN where none has an opinion."""
    xp, each = _xp(c), _weights(weights, c.points.shape[-1] - first)
    factors = xp.asarray([[each]], dtype=c.points.dtype)
    scored = _is_known(c)[..., first:].any(-1)
    return xp.where(scored, (_or_zero(c)[..., first:] * factors).sum(-1), math.nan)


def _weights(weights: Sequence[float], size: int) -> Sequence[float]:
    """The weights of some parts, 1 for each where there are none."""
    if weights and len(weights) != size:
        raise UserError(f"weights has {len(weights)} numbers for {size} parts")
    if not all(map(math.isfinite, weights)):
        raise UserError(f"weights = {list(weights)}; write finite numbers")
    if weights and not any(weights):
        raise UserError(f"weights = {list(weights)}, of which none counts; set one other than 0")
    return weights or [1.0] * size


def weighted_sum(c: Columns, weights: Sequence[float] = ()) -> Any:
    """The weighted sum of the parts; those without an opinion are left out."""
    return _total(c, weights)


def mean(c: Columns) -> Any:
    """The mean of the parts that have an opinion."""
    xp, scored = _xp(c), _is_known(c)
    count = scored.sum(-1)
    total = xp.where(scored, c.points, 0).sum(-1)
    return xp.where(count > 0, total / xp.maximum(count, 1), math.nan)


def product(c: Columns) -> Any:
    """The product of the parts that have an opinion."""
    xp, scored = _xp(c), _is_known(c)
    return xp.where(scored.any(-1), xp.where(scored, c.points, 1).prod(-1), math.nan)


def least(c: Columns) -> Any:
    """The least of the parts that have an opinion."""
    xp, scored = _xp(c), _is_known(c)
    return xp.where(scored.any(-1), xp.where(scored, c.points, math.inf).min(-1), math.nan)


def greatest(c: Columns) -> Any:
    """The greatest of the parts that have an opinion."""
    xp, scored = _xp(c), _is_known(c)
    return xp.where(scored.any(-1), xp.where(scored, c.points, -math.inf).max(-1), math.nan)


def gate(
    c: Columns, least: float = 1.0, otherwise: float = 0.0, weights: Sequence[float] = ()
) -> Any:
    """The sum of the further parts where the first has at least ``least``, else ``otherwise``."""
    xp, first = _xp(c), c.points[..., 0]
    gated = xp.where(first >= least, _total(c, weights, 1), otherwise)
    return xp.where(_is_known(c)[..., 0], gated, math.nan)


def veto(c: Columns, below: float = 0.0, points: float = 0.0, weights: Sequence[float] = ()) -> Any:
    """The sum of the further parts; ``points`` where the first is less than ``below``.

    Where the first has no opinion there is no veto.
    """
    xp = _xp(c)
    return xp.where(c.points[..., 0] < below, points, _total(c, weights, 1))


def sequence(c: Columns, least: float = 1.0, weights: Sequence[float] = ()) -> Any:
    """The sum of the parts up to the first one that has less than ``least``, that one included."""
    xp, size = _xp(c), c.points.shape[-1]
    total, reached = xp.zeros_like(c.points[..., 0]), xp.ones(c.points.shape[:-1], dtype=bool)
    values, scored, factors = _or_zero(c), _is_known(c), _weights(weights, size)
    for k in range(size):
        total = total + xp.where(reached, factors[k] * values[..., k], 0)
        reached = reached & (~scored[..., k] | (values[..., k] >= least))
    return xp.where(scored.any(-1), total, math.nan)


def saturate(c: Columns, limit: float = 1.0, weights: Sequence[float] = ()) -> Any:
    """Limit tanh(s / limit), s the weighted sum: it grows like s at 0 and never past ``limit``."""
    if not 0 < limit < math.inf:
        raise UserError(f"limit = {limit}; write a number above 0")
    return limit * _xp(c).tanh(_total(c, weights) / limit)


def clip(
    c: Columns, low: float = -math.inf, high: float = math.inf, weights: Sequence[float] = ()
) -> Any:
    """The weighted sum, held between ``low`` and ``high``."""
    if not low < high:
        raise UserError(f"low = {low}, high = {high}; between them is nothing")
    return _xp(c).clip(_total(c, weights), low, high)


def threshold(c: Columns, least: float = 0.5, weights: Sequence[float] = ()) -> Any:
    """1 where the weighted sum is at least ``least``, else 0."""
    xp, total = _xp(c), _total(c, weights)
    return xp.where(xp.isnan(total), math.nan, xp.where(total >= least, 1.0, 0.0))


def first_opinion(c: Columns) -> Any:
    """The first part that has an opinion, in the order of ``of``."""
    xp, scored = _xp(c), _is_known(c)
    at = xp.argmax(scored, axis=-1)
    return xp.take_along_axis(c.points, at[..., None], axis=-1)[..., 0]


def by_kind(c: Columns, column: str, cases: dict[str, str], others: str = "") -> Any:
    """The part that ``cases`` names for the row's value in ``column``, else ``others``.

    ``others = "none"`` is no opinion; without ``others`` such rows are refused before a run.
    """
    xp = _xp(c)
    named = {*cases.values(), *({others} - {"", "none"})}
    if missing := sorted(named - set(c.names)):
        raise UserError(f"cases names {', '.join(missing)}, and of has {', '.join(c.names)}")
    chosen_names = [cases.get(str(row.get(column)), others) for row in c.rows]
    places = [c.names.index(name) if name in c.names else -1 for name in chosen_names]
    at = xp.asarray(places)[:, None, None]
    chosen = xp.take_along_axis(c.points, xp.clip(at, 0, None), axis=-1)[..., 0]
    return xp.where(at[..., 0] >= 0, chosen, math.nan)


def schedule(c: Columns, steps: Sequence[int], factors: Sequence[float]) -> Any:
    """The sum of the parts times a factor that changes with the training step.

    Linear between ``steps``, with the first factor before them and the last one after.
    """
    finite = all(map(math.isfinite, [*steps, *factors]))
    if len(steps) != len(factors) or list(steps) != sorted(set(steps)) or not steps or not finite:
        raise UserError(
            f"steps = {list(steps)}, factors = {list(factors)}; give a factor for each of some"
            " rising steps"
        )
    xp, total = _xp(c), _total(c, ())
    return total * xp.interp(xp.asarray(c.step, dtype=total.dtype), xp.asarray(steps),
                             xp.asarray(factors, dtype=total.dtype))  # fmt: skip


def row_numbers(row: Mapping[str, Any], column: str, several: bool) -> list[float]:
    """The number, or the numbers, that a row has in a column; NaN where it has none.

    Args:
      row: of the data.
      column: its field.
      several: whether it may be a list.

    Raises:
      UserError: something else stands there.
    """
    value = row.get(column)
    try:
        each = (value or [None]) if several and isinstance(value, list) else [value]
        return [math.nan if x is None else float(x) for x in each]
    except (TypeError, ValueError):
        what = "a number, or a list of numbers" if several else "a number"
        raise UserError(
            f"column = {column!r}: a row has {str(value)[:40]!r} there; write {what}"
        ) from None


def row_weight(c: Columns, column: str) -> Any:
    """The sum of the parts times the number that each row of the data has in ``column``."""
    xp = _xp(c)
    factors = xp.asarray([row_numbers(row, column, False)[0] for row in c.rows])
    return _total(c, ()) * factors[:, None].astype(c.points.dtype)


def bounded(c: Columns, column: str = "", weights: Sequence[float] = ()) -> Any:
    """The mean of sigmoid(s - r) over the reference points r that each row has in ``column``.

    PAR, "Reward Shaping to Mitigate Reward Hacking in RLHF" (arXiv:2502.18770): s is the score of a
    reward model, r those of answers of the reference policy, of which one is enough; the reward is
    in (0, 1), 1/2 at the reference, and saturates. It is as well the share of references that are
    beaten under Bradley and Terry's model. Without a column r is 0: s is then the difference of two
    parts, as of a reward model on the completion and, with its key ``column``, on a reference.

    Args:
      c: the parts.
      column: with a number, or a list of numbers; "" for 0.
      weights: of the parts in s.
    """
    xp, total = _xp(c), _total(c, weights)
    if not column:  # a reference without a score is not one with the score 0
        return xp.where(_is_known(c).all(-1), 1 / (1 + xp.exp(-total)), math.nan)
    points = xp.zeros_like(total)
    references = [row_numbers(row, column, True) for row in c.rows]
    most = max((len(each) for each in references), default=1)
    padded = xp.asarray([each + [math.nan] * (most - len(each)) for each in references])
    if c.rows:
        shifted = total[..., None] - padded[:, None].astype(total.dtype)
        wins, valid = 1 / (1 + xp.exp(-shifted)), ~xp.isnan(shifted)
        points = xp.where(valid, wins, 0).sum(-1) / xp.where(valid.any(-1), valid.sum(-1), math.nan)
    return points


def _moments(c: Columns, values: Any, over: str) -> tuple[Any, Any]:
    """Mean and deviation of the members with an opinion, over each group or all groups."""
    xp = _xp(c)
    axis = 1 if over == "group" else (0, 1)
    live = c.members & ~xp.isnan(values)
    count = xp.maximum(live.sum(axis=axis, keepdims=True), 1)
    mean = xp.where(live, values, 0).sum(axis=axis, keepdims=True) / count
    squares = xp.where(live, (values - mean) ** 2, 0).sum(axis=axis, keepdims=True)
    return mean, xp.sqrt(squares / xp.maximum(count - 1, 1))


def normalise(
    c: Columns, over: str = "group", eps: float = 1e-6, weights: Sequence[float] = ()
) -> Any:
    """The weighted sum minus its mean, over its deviation (n - 1) plus ``eps``.

    Over each group, or over all groups of the step with ``over = "batch"``. The sum of parts
    normalised one by one is the score of GDPO ("GDPO: Group reward-Decoupled Normalization Policy
    Optimization", arXiv:2601.05242).
    """
    if over not in ("group", "batch"):
        raise unknown_choice("over", over, ("group", "batch"))
    total = _total(c, weights)
    middle, deviation = _moments(c, total, over)
    return (total - middle) / (deviation + eps)


def rank(c: Columns, weights: Sequence[float] = ()) -> Any:
    """The share of the group's other members that a sample beats; half a win for equals."""
    xp, total = _xp(c), _total(c, weights)
    live = c.members & ~xp.isnan(total)
    mine, other = total[:, :, None], total[:, None, :]
    both = live[:, :, None] & live[:, None, :] & ~xp.eye(total.shape[1], dtype=bool)[None]
    wins = xp.where(both, xp.where(mine > other, 1.0, xp.where(mine == other, 0.5, 0.0)), 0)
    return xp.where(live, wins.sum(-1) / xp.maximum(both.sum(-1), 1), math.nan)


COMBINATORS: dict[str, Callable[..., Any]] = {
    "sum": weighted_sum,
    "mean": mean,
    "product": product,
    "min": least,
    "max": greatest,
    "gate": gate,
    "veto": veto,
    "sequence": sequence,
    "saturate": saturate,
    "clip": clip,
    "threshold": threshold,
    "first": first_opinion,
    "by_kind": by_kind,
    "schedule": schedule,
    "row_weight": row_weight,
    "bounded": bounded,
    "normalise": normalise,
    "rank": rank,
}
"""Combinators by name."""
_ZOO = "jrl.zoo.rewards.combinators"
PUBLISHED = {"cosine_shift": f"{_ZOO}:cosine_shift", "group_contrast": f"{_ZOO}:group_contrast"}
"""Combinators of one paper each, by name."""
BY_GROUP = frozenset({"normalise", "rank", "group_contrast"})
"""Combinators that compare the members of a group."""


class Combined(NamedTuple):
    """A reward part made of others.

    Attributes:
      name: of the part.
      of: the names of those that it reads, which may be combined themselves.
      combine: (columns) -> [N, G] points, options bound.
      column: of the data that it reads; "" for none.
    """

    name: str
    of: tuple[str, ...]
    combine: Callable[[Columns], Any]
    column: str = ""


def combined(
    parts: Sequence[Combined],
    points: Mapping[str, Any],
    members: Any,
    rows: Sequence[Any] = (),
    step: Any = 0,
) -> dict[str, Any]:
    """The points of all parts by name, each [N, G] float32, NaN for no opinion.

    Args:
      parts: in an order of ``in_order``.
      points: of the parts that are there, by name, each [N, G] float32.
      members: [N, G] bool, samples that are compared with one another.
      rows: N mappings, the fields of each prompt's row; () where the data has none.
      step: [] int32, training steps done.
    """
    every = dict(points)
    for part in parts:
        first = every[part.of[0]]
        xp = first.__array_namespace__()
        stacked = xp.stack([every[name] for name in part.of], axis=-1)
        result = part.combine(Columns(stacked, members, part.of, rows, step))
        every[part.name] = result.astype(first.dtype)
    return every


def make_combined(name: str, combine: str, of: Sequence[str], options: dict[str, Any]) -> Combined:
    """A reward part made of others, its options bound and tried once.

    Args:
      name: of the part, for messages.
      combine: one of ``COMBINATORS``, or "FILE.py:function" of one's own.
      of: the names of the parts that it reads.
      options: keyword arguments of the combinator.

    Raises:
      UserError: no such combinator, nothing to combine, or an option that it does not have or
        that does not fit.
    """
    key = f"rewards.{name}"
    combine, named = PUBLISHED.get(combine, combine), combine
    if ":" not in combine and combine not in COMBINATORS:
        choices = (*COMBINATORS, *PUBLISHED)
        raise UserError(f"{unknown_choice(f'{key}.combine', combine, choices)}, {FORMS}")
    if not of:
        raise UserError(
            f"{key}.combine = {combine!r} has nothing to combine; name parts in {key}.of"
        )
    function = load(combine, f"{key}.combine") if ":" in combine else COMBINATORS[combine]
    check_options(function, options, key, first=1)
    reads_rows = "column" in inspect.signature(function).parameters

    def bound(c: Columns) -> Any:
        try:
            return function(c, **options)
        except UserError as error:
            raise UserError(f"{key}: {error}") from None

    try:
        trial = columns([[1.0] * len(of)] * 2, names=tuple(of))
        shape = bound(trial._replace(rows=({},) if reads_rows else ())).shape
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{key}: {named} with {options} raises {error!r:.200}") from None
    if tuple(shape) != (1, 2):
        size = f"{tuple(shape)} for points [1, 2, {len(of)}]"
        raise UserError(f"{key}: {named} returned shape {size}; return [N, G]")
    return Combined(name, tuple(of), bound, str(options.get("column", "")))


def in_order(parts: Sequence[Combined]) -> list[Combined]:
    """The parts so that each comes after those that it reads.

    Raises:
      UserError: some read one another.
    """
    ordered: list[Combined] = []
    left = list(parts)
    while left:
        names = {part.name for part in left}
        ready = [part for part in left if not names.intersection(part.of)]
        if not ready:
            circle = ", ".join(f"rewards.{part.name}" for part in left)
            raise UserError(f"{circle}: each is made of the others; take one out of an of")
        ordered += ready
        left = [part for part in left if part not in ready]
    return ordered
