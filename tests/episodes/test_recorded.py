"""From files of a server to rows: what continues what, who is paid, and what a bad file says."""

import json

import numpy as np
import pytest

from jrl.episodes.recorded import REWARDED, read_recorded
from jrl.episodes.recorded_files import Distribution
from jrl.episodes.transcript import RowShape, to_rollout
from jrl.errors import UserError
from jrl.types import StopReason

SERVER = {"kind": "server", "format": 1, "model": "tiny", "version": 3}
SAMPLING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "logit_bias": {}}


class Writer:
    """Lines of one file, as a server writes them."""

    def __init__(self):
        self.lines, self.number = [SERVER], 0

    def write(self, prompt, completion, *, session="s", read=None, **changes):
        line = {
            "kind": "completion",
            "session": session,
            "number": self.number,
            "seen": self.number if read is None else read,
            "prompt": prompt,
            "drawn": completion,
            "logprobs": [-0.5 * i for i in range(len(completion))],
            "versions": 3,
            "stop": "stop_token",
            "sampling": SAMPLING,
        }
        self.lines.append(line | changes)
        self.number += 1
        return [*prompt, *completion]

    def reward(self, points, *, session="s", done=False):
        self.lines.append({"kind": "reward", "session": session, "reward": points, "done": done})

    def read(self, directory, **choices):
        text = "".join(json.dumps(line) + "\n" for line in self.lines)
        (directory / "a.jsonl").write_text(text)
        return read_recorded(directory, **choices)


@pytest.fixture
def writer():
    return Writer()


def ids(row):
    return np.concatenate([row.opening, *(s.tokens for s in row.segments)]).tolist()


def test_points_stand_where_they_were_given(writer, tmp_path):
    past = writer.write([5, 6], [7, 1])
    writer.reward(0.25)
    history = writer.write([*past, 8, 9], [10])
    writer.reward(1)
    writer.reward(0.5)
    ((row,),) = writer.read(tmp_path).groups
    assert [s.reward for s in row.segments] == [(0.25,), (), (1.5,)]
    assert [s.turn for s in row.segments] == [0, 0, 1]
    assert row.segments[0].state != row.segments[2].state
    assert ids(row) == history
    assert row.stop is StopReason.STOP_TOKEN
    rows = to_rollout([[row]], RowShape(1, 4, 8))
    assert rows.paid[0, 0].tolist() == [0, 0.25, 0, 0, 1.5, 0, 0, 0]
    assert rows.rollout.versions[0, 0].tolist() == [3, 3, -1, -1, 3, -1, -1, -1]
    assert rows.rollout.sampler_logprobs[0, 0, :5].tolist() == [0, -0.5, 0, 0, 0]


def test_rows_of_an_episode_have_all_of_its_points(writer, tmp_path):
    writer.write([5, 6], [7, 8])
    writer.reward(0.25)
    writer.write([5, 6, 9, 9], [7])  # 7, 8 came back as 9
    writer.reward(1)
    writer.write([5, 4], [3])  # the client began a shorter history
    writer.reward(2, done=True)
    recorded = writer.read(tmp_path)
    assert (recorded.counts.rerendered, recorded.counts.restarted) == (1, 1)
    assert (recorded.counts.episodes, recorded.counts.rows) == (1, 3)
    (group,) = recorded.groups
    assert [row.points for row in group] == [3.25] * 3
    assert [ids(row) for row in group] == [[5, 6, 7, 8], [5, 6, 9, 9, 7], [5, 4, 3]]
    # What came before a row's first draw is paid before it, what came after at the row's end.
    assert [[s.reward for s in row.segments] for row in group] == [
        [(3.25,)],
        [(0.25,), (3.0,)],
        [(1.25,), (2.0,)],
    ]
    assert [row.stop.name for row in group] == ["STOP_TOKEN", "STOP_TOKEN", "DONE"]
    rows = to_rollout(recorded.groups, RowShape(3, 4, 8))
    assert rows.rollout.prompt_lengths.tolist() == [1]  # they have 5 in common
    assert rows.ids["episode"].tolist() == [[0, 0, 0]]
    assert rows.rewards[0, :, 0].tolist() == [3.25] * 3


def test_a_shared_past_is_trained_on_where_the_reward_came(writer, tmp_path):
    past = writer.write([5, 6], [7])
    writer.write([*past, 8], [9])
    writer.reward(1)
    writer.write([*past, 8], [10], read=1)  # the same request again, of which nothing came
    (group,) = writer.read(tmp_path).groups
    rewarded, unrewarded = group
    assert [s.drawn for s in rewarded.segments] == [True, False, True]
    assert [s.drawn for s in unrewarded.segments] == [False, False, True]
    assert [row.metrics[REWARDED] for row in group] == [1, 0]
    assert [row.episode for row in group] == [0, 1]


def test_a_request_continues_none_that_came_later(writer, tmp_path):
    past = writer.write([5, 6], [7])
    writer.write([*past, 8], [9])
    writer.write([*past, 8, 9, 2], [4], read=1)
    (group,) = writer.read(tmp_path).groups
    assert sorted(len(row.segments) for row in group) == [3, 3]


def test_sessions_with_one_opening_are_a_group_over_files(writer, tmp_path):
    for name in "ab":
        writer.write([5, 6], [ord(name)], session=name)
    writer.write([5, 7], [8], session="c")
    other = Writer()
    other.write([5, 6], [9], session="a")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(x) + "\n" for x in other.lines))
    recorded = writer.read(tmp_path)
    assert [[ids(row)[-1] for row in group] for group in recorded.groups] == [[97, 98, 9], [8]]
    assert [group[0].prompt.id for group in recorded.groups] == [0, 1]
    assert recorded.counts.sessions == 4
    assert len(recorded.servers) == 2


def test_a_row_that_shares_no_first_token_is_a_group_of_its_own(writer, tmp_path):
    writer.write([5, 6], [7])
    writer.write([4, 6], [8])
    recorded = writer.read(tmp_path)
    assert [len(group) for group in recorded.groups] == [1, 1]
    assert recorded.counts.restarted == 1
    to_rollout(recorded.groups, RowShape(1, 4, 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drawn": [1.5]}, "line 2: not a completion"),
        ({"drawn": [-1]}, "a number out of range"),
        ({"drawn": None}, "not a list of numbers"),
        ({"prompt": []}, "empty prompt"),
        ({"logprobs": []}, "1 drawn ids have 0 log-probabilities"),
        ({"logprobs": [None]}, "line 2"),
        ({"logprobs": [float("nan")]}, "not finite"),
        ({"versions": -1}, "a number out of range"),
        ({"versions": [3, 3]}, "2 versions"),
        ({"session": None}, "without a session"),
        ({"stop": "tired"}, "line 2: not a completion"),
        ({"sampling": {}}, "KeyError: 'temperature'"),
    ],
)
def test_a_line_that_is_no_completion_is_named(writer, tmp_path, changes, message):
    writer.write([5], [6])
    writer.lines[-1] |= changes
    with pytest.raises(UserError, match=message):
        writer.read(tmp_path)


def test_what_is_no_recording_is_named(writer, tmp_path):
    with pytest.raises(UserError, match="holds no recording"):
        read_recorded(tmp_path)
    writer.lines = [{"question": "1+1="}]
    with pytest.raises(UserError, match="line 1: not the beginning of a recording of format 1"):
        writer.read(tmp_path)
    writer.lines = [SERVER | {"format": 2}]
    with pytest.raises(UserError, match="format 1"):
        writer.read(tmp_path)


def test_a_file_that_was_cut_at_its_first_line_is_empty(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"kind": "ser')
    (tmp_path / "b.jsonl").write_text("")
    counts = read_recorded(tmp_path).counts
    assert (counts.files, counts.broken, counts.completions) == (0, 1, 0)


def test_a_distribution_says_its_keys():
    assert str(Distribution(0.7, 5, biased=True)) == (
        "temperature = 0.7, top_k = 5, top_p = 1, min_p = 0, and a logit_bias or a grammar"
    )
