"""Sources of groups: the one protocol between the training loop, evaluation and the kinds of data.

    groups = source.draw(request)   # prompts, completions and their rewards

There is one class for each kind of data: ``TaskSource`` for procedural tasks and environments on
the device, ``TextSource``, ``HostEpisodes``, ``TreeSearch``, ``RecordedSource`` and
``JudgedSource``. What wraps them (``Around``) is listed in ``train.batches.training_batches``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jrl.data.datasets import order
from jrl.errors import UserError
from jrl.types import Params, Prompt, Rollout
from jrl.types.asks import DrawRequest, new_ask


class Groups(NamedTuple):
    """Result of one draw: N groups with their rewards.

    Attributes:
      rollout: tokens, with the sampler's log-probabilities, versions and stop reasons.
      rewards: [N, G, R] float32, reward parts before their weights.
      subject: the problems: a task's arrays (a pytree with N rows) or a list of N ``Prompt``.
      counts: counters by name, such as timeouts of reward functions. Those of several draws are
        added; ``with_slot_use`` makes a share of ``slot_tokens`` and ``slot_steps``, [] int32.
      ids: for ``Batch.ids``; "prompt" [N] int32 at least, the identity of each problem.
      stats: for ``Batch.stats``, [N, G, T] float32 by name, recorded by an environment.
      spoken: [N][G] messages of episodes after their openings, for reward functions; None if none
        reads them.
      failure: the most common reason of failed members; None if none failed or gave a reason.
    """

    rollout: Rollout
    rewards: Any
    subject: Any
    counts: dict[str, Any]
    ids: dict[str, Any]
    stats: dict[str, Any] | None = None
    spoken: Any = None
    failure: str | None = None


class Source(Protocol):
    """Source of a run's groups.

    Any class with these methods; ``check_source`` names missing ones. A *row* is a problem of the
    data; a *ticket* is one use of it, issued by the loop, from which the random numbers of its
    members derive. A source with state also has a method ``resume(notes)``: a resumed run calls it
    before anything is drawn, with what ``notes`` returned at the checkpoint.
    """

    def order(self, tickets: np.ndarray) -> np.ndarray:
        """[N] int32, the row of each ticket [N] int32, without a curriculum."""

    def prompts(self, key: Any, rows: np.ndarray) -> tuple[Any, list[Prompt]]:
        """Subjects and prompts of the problems in some rows, N of each."""

    def draw(self, request: DrawRequest) -> Groups:
        """Members of the problems that the request asks for, with their rewards.

        ``request.split`` says whether the rows are training or held-out ones.
        """

    def judge(self, subject: Any, prompts: list[Prompt], rollout: Rollout, step: int = 0) -> Groups:
        """Groups of existing completions, with their rewards.

        A search gives ``step``, the training steps done, which rewards may read; a source of one's
        own, which is not searched, needs no such argument.
        """

    def finish(self, complete: bool) -> None:
        """Ends the draws of a step, before training; frees weights held for sampling.

        ``complete`` is False if they were abandoned; ``notes`` then describes the step before.
        """

    def notes(self) -> dict[str, Any]:
        """State for ``resume``, so that the next draws are the same: JSON values, NumPy arrays."""


PARTS = {
    "order": ("tickets",),
    "prompts": ("key", "rows"),
    "draw": ("request",),
    "judge": ("subject", "prompts", "rollout"),
    "finish": ("complete",),
    "notes": (),
}
"""The methods of a source with their arguments."""


def check_source(source: Any) -> Source:
    """The source itself, where it has every part of one.

    Args:
      source: of one's own.

    Raises:
      UserError: a method is missing or takes other arguments; all of them are named.
    """
    name, problems = type(source).__name__, []
    if source is None or isinstance(source, type) or inspect.iscoroutine(source):
        if inspect.iscoroutine(source):
            source.close()  # or Python would warn that nobody awaited it
        raise UserError(
            f"a source of groups (jrl.train.Source): the function returned {source!r:.60}; return"
            f" an object with the methods {', '.join(PARTS)}"
        )
    optional = {"resume": ("notes",)} if hasattr(source, "resume") else {}
    for part, arguments in (PARTS | optional).items():
        written = f"{part}({', '.join(('self', *arguments))})"
        method = getattr(source, part, None)
        if not callable(method):
            problems.append(f"{name} has no method {part}; write def {written}")
            continue
        try:
            signature = inspect.signature(method)
        except ValueError:  # compiled code, which does not say
            continue
        try:
            signature.bind(*arguments)
        except TypeError:
            problems.append(f"{name}.{part}{signature} does not take ({', '.join(arguments)}); "
                            f"write def {written}")  # fmt: skip
    if problems:
        raise UserError("a source of groups (jrl.train.Source): " + "; ".join(problems))
    return source


def check_groups(groups: Any, request: DrawRequest, parts: int, source: Any) -> Groups:
    """The groups that a source of one's own drew, if they fit what was asked for.

    Args:
      groups: returned by ``draw``.
      request: that it was given.
      parts: R, reward parts.
      source: that drew, for messages.

    Raises:
      UserError: another type or number of groups, or rewards, ids or stats of another shape or
        type; named with what would do.

    Returns:
      The groups, their rewards and stats as float32, their ids as int32.
    """
    name = type(source).__name__
    if not isinstance(groups, Groups):
        if inspect.iscoroutine(groups):
            groups.close()
        raise UserError(f"{name}.draw returned {groups!r:.60}; return jrl.train.Groups")
    if not isinstance(groups.rollout, Rollout):
        raise UserError(
            f"{name}.draw returned the rollout {groups.rollout!r:.60}; give the sampler's"
        )
    try:
        n, (count, g) = len(entries(request)[0]), groups.rollout.check().lengths.shape
    except (AssertionError, AttributeError, ValueError) as error:
        raise UserError(
            f"{name}.draw returned a rollout whose arrays do not fit each other"
            f" ({str(error).partition(chr(10))[0]}); jrl.types.Rollout has their shapes and types"
        ) from None
    if count != n:
        raise UserError(f"{name}.draw returned {count} groups for the {n} entries of the request")
    for field, value in (("ids", groups.ids), ("counts", groups.counts), ("stats", groups.stats)):
        if not isinstance(value, Mapping) and (field != "stats" or value is not None):
            raise UserError(
                f"{name}.draw returned {field} = {value!r:.40}; return values by name, {{}} for"
                " none"
            )
    for label, value in groups.counts.items():
        if not _is_number(value):
            raise UserError(
                f"{name}.draw returned counts[{label!r}] = {value!r:.40}; return one number"
            )
    if isinstance(groups.subject, list | tuple) and len(groups.subject) != n:
        raise UserError(
            f"{name}.draw returned {len(groups.subject)} subjects for {n} groups; return the"
            " prompts, one for each"
        )
    rewards = _numbers(groups.rewards, f"{name}.draw returned rewards")
    if rewards.shape != (n, g, parts):
        raise UserError(
            f"{name}.draw returned rewards of shape {rewards.shape}; {n} groups of {g} "
            f"members with {parts} reward parts have ({n}, {g}, {parts})"
        )
    if not np.isfinite(rewards).all():
        i, member, part = np.argwhere(~np.isfinite(rewards))[0].tolist()
        raise UserError(
            f"{name}.draw returned the reward {rewards[i, member, part]} for group {i}, member"
            f" {member}; rewards must be finite"
        )
    if "prompt" not in groups.ids:
        raise UserError(f"{name}.draw returned no ids['prompt'], [{n}] int32; add the rows")
    whole = n, g, groups.rollout.tokens.shape[2]
    ids = {}
    for label, values in groups.ids.items():
        shapes, x = [(n,)] if label == "prompt" else [(n,), (n, g), whole], np.asarray(values)
        if x.shape not in shapes or x.dtype.kind not in "iu":
            raise UserError(
                f"{name}.draw returned ids[{label!r}] of shape {x.shape}, {x.dtype}; return int32"
                f" of shape {' or '.join(map(str, shapes))}"
            )
        if x.size and not _INT32.min <= x.min() <= x.max() <= _INT32.max:
            raise UserError(f"{name}.draw returned ids[{label!r}] beyond int32; number from 0")
        ids[label] = x.astype(np.int32)
    stats = {}
    for label, x in (groups.stats or {}).items():
        stats[label] = _numbers(x, f"{name}.draw returned stats[{label!r}]")
        if stats[label].shape != whole:
            raise UserError(
                f"{name}.draw returned stats[{label!r}] of shape {stats[label].shape}; return"
                f" float32 of shape {whole}, a number for each token"
            )
    return groups._replace(rewards=rewards, ids=ids, stats=stats or None)


def _is_number(value: Any) -> bool:
    return np.shape(value) == () and np.asarray(value).dtype.kind in "iufb"


def _numbers(value: Any, text: str) -> np.ndarray:
    """The values as float32; UserError if they are no numbers, which begins with ``text``."""
    try:
        return np.asarray(value, np.float32)
    except (TypeError, ValueError):
        raise UserError(f"{text} {value!r:.60}; return an array of numbers") from None


_INT32 = np.iinfo(np.int32)


def entries(request: DrawRequest) -> tuple[Any, Any]:
    """(tickets, rows), each [N] int32, which all asks of a request have in common."""
    return request.asks[0].ticket, request.asks[0].row


def divided(request: DrawRequest, parts: int) -> list[DrawRequest]:
    """Requests for equal parts of a request's entries, in order; itself where they do not divide.

    Args:
      request: asks of the same tickets.
      parts: how many.
    """
    n = request.asks[0].entries
    if parts == 1 or n % parts:
        return [request]
    places = [slice(at, at + n // parts) for at in range(0, n, n // parts)]
    asks = [jax.tree.map(lambda x, at=at: x[at], request.asks) for at in places]
    return [request.replace(asks=part) for part in asks]


def drawing(request: DrawRequest) -> str:
    """The name of the weights that draw, where all asks of a request have one policy."""
    (name,) = {ask.policy for ask in request.asks}
    return name


def all_entries(request: DrawRequest) -> tuple[Any, Any]:
    """(tickets, rows), each [N] int32, of asks that are for different groups, in their order."""
    tickets, rows = ([getattr(ask, name) for ask in request.asks] for name in ("ticket", "row"))
    return np.concatenate(tickets), np.concatenate(rows)


def simple_request(
    key: Any,
    weights: Mapping[str, Params],
    step: Any,
    tickets: Any,
    count: int = 1,
    *,
    rows: Any = None,
    version: Any = None,
    **more: Any,
) -> DrawRequest:
    """A request for ``count`` members of each ticket, all by the policy.

    Args:
      key: the run's root key.
      weights: trees by name, "policy" at least.
      step: [] int32, the training step that the members are for.
      tickets: [N] int32.
      count: members of each.
      rows: [N] int32, the problems; None for those with the tickets' numbers.
      version: [] int32, of all weights; None for ``step``.
      **more: further fields of ``DrawRequest``.
    """
    versions = dict.fromkeys(weights, step if version is None else version)
    ask = new_ask(tickets, tickets if rows is None else rows, count)
    return DrawRequest(key, weights, versions, step, (ask,), **more)


def epoch_order(seed: int | None, tickets: np.ndarray, size: int) -> np.ndarray:
    """[N] int32, rows epoch after epoch, each epoch in an order of its own.

    Args:
      seed: of the order, or None for the source's own order.
      tickets: [N] int, counted from the start of the run.
      size: rows of the data.
    """
    epochs, indices = np.divmod(np.asarray(tickets), size)
    if seed is None:
        return indices.astype(np.int32)
    orders = {e: order(seed, int(e), size) for e in np.unique(epochs)}
    rows = [int(orders[e][i]) for e, i in zip(epochs, indices, strict=True)]
    return np.array(rows, np.int32)


class FromPrompts:
    """The parts of a source that has a list of prompts and holds nothing between draws.

    Attributes:
      all_prompts: in the data's order.
      seed: of the order, or None for the data's own.
    """

    all_prompts: Sequence[Prompt]
    seed: int | None

    def order(self, tickets: np.ndarray) -> np.ndarray:
        """As ``Source.order``: epoch after epoch."""
        return epoch_order(self.seed, tickets, len(self.all_prompts))

    def prompts(self, key: Any, rows: np.ndarray) -> tuple[list[Prompt], list[Prompt]]:
        """As ``Source.prompts``; a prompt is its own subject."""
        chosen = [self.all_prompts[i] for i in np.asarray(rows).tolist()]
        return chosen, chosen

    def finish(self, complete: bool) -> None:
        """As ``Source.finish``; nothing is held."""

    def notes(self) -> dict[str, Any]:
        """As ``Source.notes``; the next prompts follow from their rows."""
        return {}


class Around:
    """A source around another one; a wrapper says in a method of its own what it changes.

    Attributes:
      source: the one that it wraps.
    """

    def __init__(self, source: Source) -> None:
        self.source = source

    def order(self, tickets: np.ndarray) -> np.ndarray:
        """As ``Source.order``."""
        return self.source.order(tickets)

    def prompts(self, key: Any, rows: np.ndarray) -> tuple[Any, list[Prompt]]:
        """As ``Source.prompts``."""
        return self.source.prompts(key, rows)

    def draw(self, request: DrawRequest) -> Groups:
        """As ``Source.draw``."""
        return self.source.draw(request)

    def judge(self, subject: Any, prompts: list[Prompt], rollout: Rollout, step: int = 0) -> Groups:
        """As ``Source.judge``."""
        return self.source.judge(subject, prompts, rollout, step)

    def finish(self, complete: bool) -> None:
        """As ``Source.finish``."""
        self.source.finish(complete)

    def notes(self) -> dict[str, Any]:
        """As ``Source.notes``."""
        return self.source.notes()


def innermost(source: Source) -> Source:
    """The source that wrappers stand around."""
    return innermost(source.source) if isinstance(source, Around) else source


def resume_source(source: Source, notes: Mapping[str, Any]) -> None:
    """Gives a source what its ``notes`` returned at the checkpoint that a run resumes from.

    Raises:
      UserError: it has no method ``resume``.
    """
    inner: Any = innermost(source)
    if not hasattr(inner, "resume"):
        name = type(inner).__name__
        raise UserError(
            f"the checkpoint has notes of {name}, which has no method resume to take them; write"
            " def resume(self, notes), or let notes return {}"
        )
    inner.resume(notes)


# ---------------------------------------------------------------- groups as values


def to_host(groups: Groups) -> Groups:
    """The groups with every array on the host."""
    listed = isinstance(groups.subject, list)
    subject = groups.subject if listed else jax.device_get(groups.subject)
    return jax.device_get(groups._replace(subject=None))._replace(subject=subject)


def added_counts(counts: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Counters by name, those of two draws added.

    >>> added_counts({"a": 1}, {"a": 2, "b": 3})
    {'a': 3, 'b': 3}
    """
    return {name: counts.get(name, 0) + more.get(name, 0) for name in {**counts, **more}}


def join_groups(several: list[Groups]) -> Groups:
    """The groups of several draws, on the host, one after the other; their counts add up."""

    def joined(*parts: Any) -> Any:
        return jax.tree.map(lambda *xs: np.concatenate(xs), *parts)

    first = several[0]
    subject = (
        [prompt for groups in several for prompt in groups.subject]
        if isinstance(first.subject, list)
        else joined(*(groups.subject for groups in several))
    )
    counts: dict[str, Any] = {}
    for groups in several:
        counts = added_counts(counts, groups.counts)
    return Groups(
        rollout=joined(*(groups.rollout for groups in several)),
        rewards=joined(*(groups.rewards for groups in several)),
        subject=subject,
        counts=counts,
        ids=joined(*(groups.ids for groups in several)),
        stats=joined(*(groups.stats for groups in several)),
    )


def subjects_at(subject: Any, places: Any) -> Any:
    """The subjects at some places: of a list of prompts, or of a task's arrays."""
    if isinstance(subject, list):
        return [subject[i] for i in np.arange(len(subject))[places]]
    return jax.tree.map(lambda x: x[places], subject)


def take_groups(groups: Groups, places: Any) -> Groups:
    """The groups at some places, on the host; the counts stay."""

    def pick(tree: Any) -> Any:
        return jax.tree.map(lambda x: x[places], tree)

    return Groups(
        rollout=pick(groups.rollout),
        rewards=pick(groups.rewards),
        subject=subjects_at(groups.subject, places),
        counts=groups.counts,
        ids=pick(groups.ids),
        stats=pick(groups.stats),
    )


def counted_draw(result: tuple[Any, ...]) -> tuple[Rollout, dict[str, Any], dict[str, Any]]:
    """The result of ``generate`` or ``generate_tree`` as (rollout, labels of tokens, counts)."""
    rollout, slot_steps, *node = result
    counts = {"slot_tokens": rollout.mask.sum(), "slot_steps": slot_steps}
    if not node:
        return rollout, {}, counts
    shared = rollout.lengths.sum() - rollout.mask.sum()
    return rollout, {"node": node[0]}, counts | {"tree_shared_tokens": shared}
