"""Transcripts of episodes, id for id, and the one function that makes training rows of them.

An episode is a list of segments. Sampled tokens keep the ids, log-probabilities and versions that
the sampler recorded; no text is ever encoded again. All other tokens (tool output, user turns,
hints, another player's words, a branch's shared past) are completion tokens with ``mask`` False and
version -1, so that every objective works on many turns as on one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.errors import UserError
from jrl.models.chat_frames import Message
from jrl.models.tokenizer import Tokenizer
from jrl.types import NOTHING, Prompt, Rollout, StopReason

_IDS = ("turn", "step", "state", "node", "context")


class Segment(NamedTuple):
    """Adjacent tokens that have one origin.

    Attributes:
      tokens: [t] int32.
      drawn: whether the policy sampled them for this row, which is trained on them.
      logprobs: [t] float32, nats, under the sampling distribution; None if no policy sampled them.
      versions: [t] int32, the policy version that sampled each token; None likewise.
      turn: number of the turn, from 0; an answer of the environment belongs to the turn before it.
      step: number of the reasoning step or action.
      state: id of the environment's state before the tokens; equal states have equal ids.
      node: number of the tree node.
      value: of that node at the end of a search, points.
      reward: [R] points, paid at the last token; () for none.
      context: number of the context. The policy saw the opening and the segments of this context.
      player: index of the player that sampled it, in an episode of several.
      labels: [t] int32 by name, set by the environment.
      messages: of the environment, if the tokens are its answer.
    """

    tokens: np.ndarray
    drawn: bool
    logprobs: np.ndarray | None = None
    versions: np.ndarray | None = None
    turn: int = 0
    step: int = 0
    state: int = 0
    node: int = 0
    value: float = 0.0
    reward: tuple[float, ...] = ()
    context: int = 0
    player: int = 0
    labels: Mapping[str, np.ndarray] = NOTHING
    messages: tuple[Mapping[str, Any], ...] = ()

    def as_past(self) -> Segment:
        """The segment as context of another row, which is not trained on it."""
        return self._replace(drawn=False)


class Transcript(NamedTuple):
    """One row: an episode, or a part of one whose history was folded or branched.

    Attributes:
      prompt: the problem.
      member: number in its group.
      opening: [p] int32, the tokens that the policy saw first; empty if the episode never opened.
      segments: after the opening, in order.
      stop: why it ended; with FAILED or TIMEOUT the row leaves its group.
      episode: number in its group; rows of one episode have the same.
      role: index of the player whose turns are sampled tokens of this row.
      metrics: the environment's, by name.
      reason: text of the failure; "" without one.
      labels: labels of the episode by name, set by the environment.
    """

    prompt: Prompt
    member: int
    opening: np.ndarray
    segments: tuple[Segment, ...]
    stop: StopReason
    episode: int = 0
    role: int = 0
    metrics: Mapping[str, float] = NOTHING
    reason: str = ""
    labels: Mapping[str, int] = NOTHING

    @property
    def alive(self) -> bool:
        """Whether the row counts in its group."""
        return self.stop < StopReason.FAILED

    @property
    def points(self) -> float:
        """Points of all parts, unweighted."""
        return float(sum(sum(s.reward) for s in self.segments))


def turns_of(segments: Sequence[Segment]) -> list[int]:
    """Indices of the turns; the last sampled segment of a full context is a summary, not a turn."""
    following = [s.context for s in segments[1:]] + [segments[-1].context] if segments else []
    return [
        i
        for i, (segment, context) in enumerate(zip(segments, following, strict=True))
        if segment.drawn and segment.context == context
    ]


def conversation(transcript: Transcript, tokenizer: Tokenizer) -> list[Message]:
    """The conversation after the opening, with the row's player as the assistant.

    Turns that another row is trained on, as those that branches share, are in it; what other
    players said in a row of one player is a user's.
    """
    messages: list[Message] = []
    for segment in transcript.segments:
        if segment.versions is not None:
            own = segment.drawn or segment.player == transcript.role
            content = tokenizer.decode(segment.tokens.tolist())
            messages.append({"role": "assistant" if own else "user", "content": content})
        messages += segment.messages
    return messages


class RowShape(NamedTuple):
    """Sizes of the arrays.

    Attributes:
      group: G, rows of a group.
      prompt_tokens: P.
      completion_tokens: T, of one context.
      parts: R, reward parts.
      contexts: C, concatenated in a row, which has C * T columns.
      labels: names of the numbers of episodes that become ids.
      token_labels: of those of tokens.
    """

    group: int
    prompt_tokens: int
    completion_tokens: int
    parts: int = 1
    contexts: int = 1
    labels: tuple[str, ...] = ()
    token_labels: tuple[str, ...] = ()


class EpisodeArrays(NamedTuple):
    """Transcripts as arrays, all NumPy.

    Attributes:
      rollout: the record that training reads.
      ids: "turn", "step", "state" [N, G, T] and "episode", "role" [N, G], int32; "node" [N, G, T]
        where any segment has one, and "context" where the shape has several.
      rewards: [N, G, R] float32, points of each part, summed over the row.
      paid: [N, G, T] float32, points of all parts by their weights, at the tokens that they were
        paid at.
      values: [N, G, T] float32, points of each token's node.
    """

    rollout: Rollout
    ids: dict[str, np.ndarray]
    rewards: np.ndarray
    paid: np.ndarray
    values: np.ndarray


def to_rollout(
    groups: Sequence[Sequence[Transcript]], shape: RowShape, weights: Sequence[float] = ()
) -> EpisodeArrays:
    """Transcripts as the rows of a training batch; pure, and nothing is cut.

    A group's prompt is the common prefix of the openings of its living rows. The rest of an opening
    (empty if all members start alike) is unsampled completion tokens in every context of a row.

    Args:
      groups: N groups of at most G rows. Missing rows become FAILED ones without tokens.
      shape: of the arrays.
      weights: [R], of the reward parts in ``paid``; () for 1 each.

    Returns:
      The rows; failed members have ``stop`` FAILED or TIMEOUT.

    Raises:
      UserError: a row does not fit the shape, members of a group share no first token, points
        stand where there is no token or have another number of parts.
    """
    n, g, p = len(groups), shape.group, shape.prompt_tokens
    part_weights = np.array(weights or [1.0] * shape.parts, np.float32)
    prompts, lengths = np.zeros((n, p), np.int32), np.ones(n, np.int32)
    arrays = _empty(n, shape)
    for i, group in enumerate(groups):
        if len(group) > g:
            raise UserError(f"{len(group)} rows in a group; the batch holds {g} of each group")
        # Of living rows alone: a member that failed to open would make the common opening empty.
        opening = common_opening([row.opening for row in group if len(row.opening) and row.alive])
        if len(opening) > p:
            raise UserError(
                f"prompt {group[0].prompt.id} opens with {len(opening)} tokens and the limit is "
                f"{p}; raise data.max_prompt_tokens"
            )
        # A prompt has at least one token, also where the whole group failed and none is read.
        lengths[i] = max(len(opening), 1)
        prompts[i, : len(opening)] = opening
        for j, row in enumerate(group):
            for name in ("stop", "episode", "role"):
                arrays[name][i, j] = getattr(row, name)
            for name in shape.labels:
                arrays[name][i, j] = row.labels.get(name, -1)
            if row.alive:  # what others drew may be under any opening, and is never read
                _fill(arrays, (i, j), row, len(opening), shape, part_weights)
    names = (*_IDS, "episode", "role", *shape.labels, *shape.token_labels)
    ids = {name: arrays.pop(name) for name in names}
    if not ids["node"].any():
        del ids["node"]  # methods for trees would take the rows for one without members
    if shape.contexts == 1:
        del ids["context"]
    # Popped, so that what is left is exactly the fields of the rollout.
    rewards, paid, values = (arrays.pop(name) for name in ("rewards", "paid", "value"))
    rollout = Rollout(prompt_tokens=prompts, prompt_lengths=lengths, **arrays)  # type: ignore
    return EpisodeArrays(rollout, ids, rewards, paid, values)


def _empty(n: int, shape: RowShape) -> dict[str, Any]:
    """Empty arrays for n groups, by name."""
    g, t = shape.group, shape.completion_tokens * shape.contexts
    return {
        "tokens": np.zeros((n, g, t), np.int32),
        "lengths": np.zeros((n, g), np.int32),
        "mask": np.zeros((n, g, t), bool),
        "sampler_logprobs": np.zeros((n, g, t), np.float32),
        "versions": np.full((n, g, t), -1, np.int32),
        # Missing rows count as failed, so that they leave their group.
        "stop": np.full((n, g), StopReason.FAILED, np.int32),
        "baseline": np.zeros((n, g), bool),
        "rewards": np.zeros((n, g, shape.parts), np.float32),
        "paid": np.zeros((n, g, t), np.float32),
        "value": np.zeros((n, g, t), np.float32),
        **{name: np.zeros((n, g, t), np.int32) for name in _IDS},
        **{name: np.zeros((n, g), np.int32) for name in ("episode", "role")},
        **{name: np.full((n, g), -1, np.int32) for name in shape.labels},
        **{name: np.full((n, g, t), -1, np.int32) for name in shape.token_labels},
    }


def _fill(
    arrays: dict[str, Any],
    place: tuple[int, int],
    row: Transcript,
    shared: int,
    shape: RowShape,
    part_weights: np.ndarray,
) -> None:
    """Writes a row's tokens after its first ``shared`` ones into the arrays."""
    end = 0
    # The opening beyond the group's prompt is repeated in each context, since the policy read it in
    # each.
    rest = Segment(np.asarray(row.opening)[shared:], drawn=False)
    parts = [rest, *row.segments]
    # Backwards, so that an insertion does not move the places still to be looked at.
    for i in range(len(parts) - 1, 1, -1):
        if parts[i].context != parts[i - 1].context:
            parts.insert(i, rest._replace(context=parts[i].context))
    for part in parts:
        _check(part, row, end, shape)
        at = (*place, slice(end, end + len(part.tokens)))
        end += len(part.tokens)
        arrays["tokens"][at], arrays["mask"][at] = part.tokens, part.drawn
        if part.drawn:
            arrays["sampler_logprobs"][at] = part.logprobs
            arrays["versions"][at] = part.versions
        for name in (*_IDS, "value"):
            arrays[name][at] = getattr(part, name)
        for name, numbers in part.labels.items():
            arrays[name][at] = numbers
        if part.reward:
            arrays["rewards"][place] += part.reward
            arrays["paid"][(*place, end - 1)] += part_weights @ np.array(part.reward, np.float32)
    arrays["lengths"][place] = end


def rows_of_players(groups: Sequence[Sequence[Transcript]], players: int) -> list[list[Transcript]]:
    """Episodes of R players as N * R groups; group n * R + r is player r of the n-th prompt.

    What the other players drew is what any environment says, and points stand at a player's own
    turns alone. A player that never moved leaves its group.

    Args:
      groups: N groups of whole episodes.
      players: R.
    """

    def row(episode: Transcript, player: int) -> Transcript:
        segments = tuple(
            s
            if s.player == player or not s.drawn
            else s.as_past()._replace(reward=(), labels=NOTHING)
            for s in episode.segments
        )
        # A row without a drawn token has no gradient, yet its points would move the group's
        # baseline.
        acted = any(s.drawn for s in segments)
        stop = episode.stop if acted or not episode.alive else StopReason.FAILED
        reason = episode.reason if acted or episode.reason else f"player {player} never moved"
        return episode._replace(segments=segments, role=player, stop=stop, reason=reason)

    return [[row(episode, r) for episode in group] for group in groups for r in range(players)]


def trained_once(
    rows: Sequence[Transcript], names: Sequence[Sequence[Hashable]], live: Sequence[bool]
) -> tuple[list[Transcript], int]:
    """Rows that share segments, each of which is drawn in the first living row that has it.

    In the others it is the past, so that each token is trained once.

    Args:
      rows: of a group.
      names: of the segments of each row; those of one name are the same.
      live: whether a row counts; one that does not would keep what it shares from being trained.

    Returns:
      The rows, and the tokens that stand in living ones as the past of another.
    """
    owned, trained, shared = set[Hashable](), [], 0
    for row, row_names, lives in zip(rows, names, live, strict=True):
        past = [name in owned for name in row_names]
        parts = list(zip(row.segments, past, strict=True))
        shared += lives * sum(len(s.tokens) for s, is_past in parts if is_past)
        segments = tuple(s.as_past() if is_past else s for s, is_past in parts)
        trained.append(row._replace(segments=segments))
        owned.update(row_names if lives else ())
    return trained, shared


def common_opening(openings: Sequence[np.ndarray]) -> np.ndarray:
    """The common prefix of a group's rows.

    Args:
      openings: [p] int32 each.

    Returns:
      [c] int32; empty where there are no openings.

    Raises:
      UserError: not even their first token.
    """
    opening = common_prefix(openings)
    if openings and not len(opening):
        raise UserError(
            "the members of a group open with different first tokens; init must show all members "
            "of a group the same problem, so let it depend on the prompt and the seed alone"
        )
    return opening


def common_prefix(rows: Sequence[np.ndarray]) -> np.ndarray:
    """[c] int32, the tokens that all rows begin with; empty where there are no rows."""
    if not rows:
        return np.zeros(0, np.int32)
    # With the first one is enough: what equals it at a column equals all others there.
    first, least = np.asarray(rows[0]), min(map(len, rows))
    same = np.ones(least, bool)
    for other in rows[1:]:
        same &= np.asarray(other)[:least] == first[:least]
    return first[: least if same.all() else int(np.argmin(same))]


def _check(part: Segment, row: Transcript, end: int, shape: RowShape) -> None:
    """Raises UserError for a segment that does not fit after ``end`` tokens of its row."""
    where = f"prompt {row.prompt.id}, member {row.member}"
    most = shape.completion_tokens * shape.contexts
    if part.context >= shape.contexts:
        raise UserError(f"{where}: context {part.context}; the batch holds {shape.contexts}")
    if end + len(part.tokens) > most:
        raise UserError(
            f"{where}: {end + len(part.tokens)} completion tokens and the limit is "
            f"{most}; rows are never cut, so raise sampling.max_new_tokens"
        )
    if part.drawn and (part.logprobs is None or part.versions is None):
        raise UserError(f"{where}: a drawn segment without log-probabilities or versions")
    if part.reward and len(part.reward) != shape.parts:
        raise UserError(f"{where}: {len(part.reward)} reward parts; the run has {shape.parts}")
    if part.reward and end + len(part.tokens) == 0:
        raise UserError(f"{where}: a reward is assigned before the first token")
