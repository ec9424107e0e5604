"""Sessions that ``jrl serve --record`` wrote, as transcripts to train on, id for id.

    recorded = read("recorded")
    print(recorded.counts)
    rows = to_rollout(recorded.groups, shape)

No text is encoded here. A request whose prompt begins with the prompt and the drawn ids of an
earlier one of its session continues that row; what stands between is tokens that nobody drew. One
whose prompt does not, because the chat template writes the assistant's words otherwise than they
were drawn or the client shortened them, begins another row of the same episode, and is counted.
Requests that continue the same ids are episodes with a shared past, which is trained on in one of
them.
"""

from __future__ import annotations

import collections
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jrl.episodes.recorded_files import Distribution, RecordedCompletion, read_file
from jrl.episodes.transcript import Segment, Transcript
from jrl.errors import UserError
from jrl.types import Prompt, StopReason

REWARDED = "rewarded"
"""The metric of a row that is 1 where its episode was given a reward, else 0."""
ROW = "row"
"""The label of a row that says which row of a file of dialogues it is from."""


class RecordedCounts(NamedTuple):
    """Counts of the sessions and completions read.

    Attributes:
      files: with a first line.
      completions: on record.
      sessions: with at least one of them.
      episodes: ends of sessions; more than sessions where requests continued the same ids.
      rows: transcripts, of which an episode has several where it was split.
      rewarded: episodes that were given a reward.
      rerendered: splits where a prompt begins with an earlier prompt but not with the ids drawn
        after it, because the chat template renders them differently.
      restarted: other splits, such as where a client shortened the history.
      other: completions of another distribution than was asked for; they are context alone.
      broken: lines that a kill or a full disk cut.
    """

    files: int = 0
    completions: int = 0
    sessions: int = 0
    episodes: int = 0
    rows: int = 0
    rewarded: int = 0
    rerendered: int = 0
    restarted: int = 0
    other: int = 0
    broken: int = 0

    def __str__(self) -> str:
        """One line for a log."""
        return (
            f"{self.completions} completions in {self.sessions} sessions of {self.files} files: "
            f"{self.episodes} episodes, {self.rewarded} with a reward, in {self.rows} rows; split "
            f"where the assistant's words came back in other ids {self.rerendered} times, and for "
            f"another history {self.restarted} times; {self.other} completions of another "
            f"distribution; {self.broken} broken lines skipped"
        )


class Recorded(NamedTuple):
    """Recorded sessions.

    Attributes:
      groups: of rows whose episodes open with the same ids; what ``to_rollout`` takes. Each row has
        all points of its episode, one reward part; () where nobody gave any.
      counts: what was read.
      drawn_from: how many completions each distribution has.
      servers: the first line of each file.
    """

    groups: tuple[tuple[Transcript, ...], ...]
    counts: RecordedCounts
    drawn_from: Mapping[Distribution, int]
    servers: tuple[Mapping[str, Any], ...]


def read_recorded(directory: str | Path, sampling: Distribution | None = None) -> Recorded:
    """The sessions in a directory of ``jrl serve --record``; a function of its files alone.

    Args:
      directory: with the files.
      sampling: what is to be trained; completions that were drawn from another distribution become
        tokens that nobody drew. None takes all.

    Returns:
      The rows, in groups, with versions and log-probabilities as recorded.

    Raises:
      UserError: there is no such directory, it has no recording, or a file in it is none; names
        file and line.
    """
    paths = sorted(Path(directory).expanduser().glob("*.jsonl"))
    if not paths:
        raise UserError(
            f"{directory} holds no recording (*.jsonl); name a directory that jrl serve --record"
            " wrote to"
        )
    servers, sessions, broken = [], [], 0
    for path in paths:
        first, count, cut = read_file(path)
        broken += cut
        if first is not None:
            servers.append(first)
        sessions += count
    for nodes in sessions:
        _link(nodes)
    groups, episodes = joined_groups(sessions, sampling)
    nodes = [node for session in sessions for node in session]
    drawn_from = collections.Counter(node.sampling for node in nodes)
    splits = [n for n in nodes if n.parent is not None and not n.joined]
    rerendered = sum(n.start.startswith(n.parent.start) for n in splits if n.parent is not None)
    counts = RecordedCounts(
        files=len(servers),
        completions=len(nodes),
        sessions=len(sessions),
        episodes=len(episodes),
        rows=sum(map(len, groups)),
        rewarded=sum(episode.points is not None for episode in episodes),
        rerendered=rerendered,
        restarted=len(splits) - rerendered,
        other=0 if sampling is None else len(nodes) - drawn_from[sampling],
        broken=broken,
    )
    return Recorded(groups, counts, dict(drawn_from), tuple(servers))


def joined_groups(
    sessions: Iterable[Sequence[RecordedCompletion]], sampling: Distribution | None = None
) -> tuple[tuple[tuple[Transcript, ...], ...], list[_Episode]]:
    """Groups of rows of sessions whose completions say what they continue; and the episodes.

    Args:
      sessions: completions of each, in the order of their numbers, with ``parent`` and ``joined``.
      sampling: what is to be trained; None takes all.

    Returns:
      (rows whose episodes open with the same ids, in groups; the episodes).
    """
    episodes = [episode for nodes in sessions for episode in _episodes(nodes)]
    return _groups(episodes, sampling), episodes


# ---------------------------------------------------------------- what continues what


def _link(nodes: Sequence[RecordedCompletion]) -> None:
    """Finds the predecessor of each completion of a session."""
    for i, node in enumerate(nodes):
        # Only what was complete when the request came: parallel requests of one session continue
        # none of each other.
        before = [other for other in nodes[:i] if other.number < node.seen]
        joined = [other for other in before if node.start.startswith(other.whole)]
        # The longest past: its tokens are the ones that the policy read, so the row continues id
        # for id.
        best = max(joined, key=lambda other: (len(other.whole), other.number), default=None)
        # An earlier prompt that this one begins with, but not with the tokens sampled after it.
        inside = [
            other
            for other in before
            if len(other.start) < len(node.start)
            and node.start.startswith(other.start)
            and (best is None or len(other.start) > len(best.whole))
        ]
        same = next((other for other in nodes[:i] if other.start == node.start), None)
        if same is not None:  # another draw for the same prompt
            node.parent, node.joined = same.parent, same.joined
        elif inside:
            node.parent = max(inside, key=lambda other: (len(other.start), other.number))
        elif best is not None:
            node.parent, node.joined = best, True
        elif before:
            node.parent = before[-1]


class _Episode(NamedTuple):
    """One way through a session, from its beginning to a completion that nothing continues.

    Attributes:
      path: of completions.
      trained: numbers of those that are trained on in this episode.
      points: in all; None where nobody gave any.
    """

    path: tuple[RecordedCompletion, ...]
    trained: frozenset[int]
    points: float | None


def _episodes(nodes: Sequence[RecordedCompletion]) -> Iterator[_Episode]:
    """The episodes of a session, those that were rewarded at their end first, and then the newest.

    Each completion is trained on in the first of them, as the ends that a reward came for are those
    that the agent followed up.
    """
    continued = {node.parent.number for node in nodes if node.parent is not None}
    ends = [node for node in nodes if node.number not in continued]
    earlier: set[int] = set()
    # A shared beginning is trained once; it goes to the end that was rewarded, and among those to
    # the newest.
    for end in sorted(ends, key=lambda node: (node.points is None, -node.number)):
        path = [end]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        numbers = {node.number for node in path}
        rewards = [node.points for node in path if node.points is not None]
        total = sum(rewards) if rewards else None
        yield _Episode(tuple(path[::-1]), frozenset(numbers - earlier), total)
        earlier |= numbers


# ---------------------------------------------------------------- from episodes to rows


def _groups(
    episodes: Iterable[_Episode], sampling: Distribution | None
) -> tuple[tuple[Transcript, ...], ...]:
    """Rows of episodes that open with the same ids; groups in the order of their first episode."""
    rows_of: dict[bytes, list[tuple[int, Transcript]]] = {}
    openings: dict[bytes, np.ndarray] = {}
    for number, episode in enumerate(episodes):
        for row in _rows(episode, sampling):
            first = episode.path[0].prompt
            # Rows of a group share its prompt, so one that shares none of it is its own.
            opening = first if row.opening[0] == first[0] else row.opening
            key = opening.tobytes()
            openings[key] = opening
            # By ids and not by session: sessions on the same task become members of one group.
            rows_of.setdefault(key, []).append((number, row))
    groups = []
    for i, (key, rows) in enumerate(rows_of.items()):
        prompt = Prompt(i, "", openings[key], None)
        numbers = {number: j for j, number in enumerate(dict.fromkeys(n for n, _ in rows))}
        members = enumerate(rows)
        groups.append(
            tuple(
                row._replace(prompt=prompt, member=j, episode=numbers[number])
                for j, (number, row) in members
            )
        )
    return tuple(groups)


def _rows(episode: _Episode, sampling: Distribution | None) -> Iterator[Transcript]:
    """The consistent stretches of an episode, but those that are trained on elsewhere."""
    stretches: list[list[RecordedCompletion]] = []
    for node in episode.path:
        if not node.joined:
            stretches.append([])
        stretches[-1].append(node)
    turn = 0
    for stretch in stretches:
        first, last = stretch[0], stretch[-1]
        if any(_trains(node, episode, sampling) for node in stretch):
            opening, segments = _segments(stretch, turn, episode, sampling)
            yield Transcript(
                prompt=Prompt(0, "", first.prompt, None),
                member=0,
                opening=opening,
                segments=tuple(segments),
                stop=StopReason.DONE if last.done else last.stop,
                metrics={REWARDED: float(episode.points is not None)},
                labels={ROW: first.row},
            )
        turn += len(stretch)


def _trains(node: RecordedCompletion, episode: _Episode, sampling: Distribution | None) -> bool:
    right = sampling is None or node.sampling == sampling
    return right and node.number in episode.trained and len(node.drawn) > 0


def _segments(
    stretch: Sequence[RecordedCompletion],
    turn: int,
    episode: _Episode,
    sampling: Distribution | None,
) -> tuple[np.ndarray, list[Segment]]:
    """The opening of a row and its segments, with the points of its whole episode.

    Those of earlier rows stand before the first token that was drawn, those of later ones at the
    last, so that the points after each token are the episode's.
    """
    opening, segments = stretch[0].prompt, []
    first, last = episode.path.index(stretch[0]), episode.path.index(stretch[-1])
    earlier = sum(node.points or 0.0 for node in episode.path[:first])
    later = sum(node.points or 0.0 for node in episode.path[last + 1 :])
    # Points paid before this row have to stand before its first sampled token, and a reward needs a
    # token: the opening gives up its last one.
    if earlier and len(opening) > 1:
        segments.append(_outside(opening[-1:], turn, stretch[0], earlier))
        opening, earlier = opening[:-1], 0.0
    for i, node in enumerate(stretch):
        if i:
            answer = node.prompt[len(stretch[i - 1].whole) // 4 :]
            if len(answer):
                segments.append(_outside(answer, turn + i - 1, stretch[i - 1], None))
        points = node.points
        if (i == 0 and earlier) or (node is stretch[-1] and later):
            points = (points or 0.0) + earlier * (i == 0) + later * (node is stretch[-1])
        sampled = _outside(node.drawn, turn + i, node, points)
        if _trains(node, episode, sampling):
            sampled = sampled._replace(drawn=True, logprobs=node.logprobs, versions=node.versions)
        segments.append(sampled)
    return opening, segments


def _outside(
    tokens: np.ndarray, turn: int, node: RecordedCompletion, points: float | None
) -> Segment:
    """Tokens that nobody drew, at a turn; equal prompts are equal states."""
    state = zlib.crc32(node.start) & 0x7FFFFFFF
    reward = () if points is None else (points,)
    return Segment(tokens, False, turn=turn, step=turn, state=state, reward=reward)
