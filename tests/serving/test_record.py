"""Recordings of ``jrl serve --record``, by OpenAI's client and a real engine, and reading them.

The last test trains on it.
"""

import contextlib
import errno
import http.client
import json
import os
import pathlib
import re
import threading
from functools import cache

import jax
import numpy as np
import pytest
from needs_extra import require

from jrl.episodes.recorded import read_recorded
from jrl.episodes.recorded_files import Distribution
from jrl.episodes.transcript import RowShape, to_rollout
from jrl.errors import StorageError
from jrl.mesh import make_mesh
from jrl.models.config import ModelConfig
from jrl.models.tokenizer import CharTokenizer
from jrl.models.transformer import transformer
from jrl.sampling.engine import Engine
from jrl.sampling.request import RequestFeatures
from jrl.serving import record
from jrl.serving.http import Service
from jrl.serving.record import Recorder
from jrl.serving.server import HttpServer
from jrl.serving.worker import EngineWorker
from jrl.types import StopReason

require("serve")
require("dev", "openai")
import openai  # noqa: E402

pytestmark = pytest.mark.extra("serve")

SECRET = "sesame-opens-it"
VERSION = 7
LONG = {"1": -100.0}  # no stop token
ROOM = RowShape(group=4, prompt_tokens=16, completion_tokens=48)
NETWORK = transformer(
    ModelConfig(
        vocab_size=48,
        layers=1,
        embed_dim=16,
        heads=2,
        kv_heads=1,
        head_dim=8,
        mlp_dim=32,
        max_length=64,
    )
)


@cache
def params():
    return jax.tree.map(lambda x: 2 * x, jax.jit(NETWORK.init)(jax.random.key(0)))


class Exact(CharTokenizer):
    """Every id has a letter, and a template ends every message with the stop token, "$" in text."""

    def encode(self, text, *, add_special=False):
        return ["%$".index(c) if c in "%$" else super(Exact, self).encode(c)[0] for c in text]

    def decode(self, ids, skip_special=True):
        return "".join("%" if i == 0 else super(Exact, self).decode([i]) for i in map(int, ids))

    def chat(self, messages, *, add_generation_prompt=True, **variables):
        return "".join(m["content"].removesuffix("$") + "$" for m in messages)


class Trims(Exact):
    """A template that leaves the first letter of what the assistant said away."""

    def chat(self, messages, **variables):
        cut_messages = [
            {**m, "content": m["content"][1:]} if m["role"] == "assistant" else m for m in messages
        ]
        return super().chat(cut_messages)


class Recording(EngineWorker):
    """Keeps what the engine drew, as (prompt, completion)."""

    def __init__(self, engine, **more):
        self.completions = []
        super().__init__(engine, **more)

    def submit(self, request, on_update):
        def keep(member, update):
            if update.completion is not None:
                self.completions.append((list(request.tokens), update.completion))
            on_update(member, update)

        return super().submit(request, keep)


@cache
def engine():
    started = Engine(
        NETWORK,
        params(),
        slots=3,
        prompt_tokens=50,
        max_new_tokens=12,
        stop_tokens=(1,),
        tokenizer=Exact(),
        chunk=3,
        requests=RequestFeatures(biases=True),
        version=VERSION,
    )
    started.compile(refresh=False)
    return started


class Agent:
    """A client, with the words that it sends."""

    def __init__(self, client, running, worker, recorder):
        self.client, self.running, self.worker = client, running, worker
        self.recorder = recorder

    def say(self, messages, session=None, **more):
        """The assistant's next message behind these, and the reply."""
        headers = {} if session is None else {"X-Session-Id": session}
        ask = {"model": "tiny", "max_tokens": 4, "seed": 3, "extra_headers": headers} | more
        reply = self.client.chat.completions.create(messages=messages, **ask)
        message = {"role": "assistant", "content": reply.choices[0].message.content}
        return message, reply

    def turns(self, words, session=None, **more):
        """Three turns by default: a user's question and what tools answer."""
        messages = []
        for i, word in enumerate(words):
            messages.append({"role": "tool" if i else "user", "content": word})
            message, reply = self.say(messages, session, **more)
            messages.append(message)
        return reply

    def reward(self, session, body, key=SECRET):
        """Status and JSON of the reply."""
        connection = http.client.HTTPConnection(self.running.host, self.running.port, timeout=10)
        with contextlib.closing(connection):
            headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
            path = f"/v1/sessions/{session}/reward"
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())


@contextlib.contextmanager
def recording(directory, tokenizer=None):
    tokenizer = tokenizer or Exact()
    recorder = Recorder(directory)
    recorder.begin({"model": "tiny", "version": VERSION})
    worker = Recording(engine(), tokenizer=tokenizer, mesh=make_mesh())
    service = Service(
        worker,
        tokenizer,
        worker.limits,
        model="tiny",
        queue=40,
        api_key=SECRET,
        recorder=recorder,
    )
    running = HttpServer(service, "127.0.0.1", 0, 5.0)
    try:
        url = running.url + "/v1"
        with openai.OpenAI(base_url=url, api_key=SECRET, max_retries=0) as client:
            yield Agent(client, running, worker, recorder)
    finally:
        running.stop()
        assert running.wait(20)
        worker.close(20)
        recorder.close()


def lines(directory):
    (path,) = directory.glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def completions(directory):
    return [line for line in lines(directory) if line["kind"] == "completion"]


def test_three_turns_with_a_tool_are_on_disk_id_for_id(tmp_path):
    with recording(tmp_path) as agent:
        last = agent.turns(["2+2=", "4", "5"], "task-1")
        assert last.session_id == "task-1"
        assert agent.reward("task-1", {"reward": 0.5, "done": True})[0] == 200
        pairs = agent.worker.completions
    on_disk = completions(tmp_path)
    assert len(pairs) == len(on_disk) == 3
    for (prompt, completion), line in zip(pairs, on_disk, strict=True):
        assert line["prompt"] == prompt
        assert line["drawn"] == completion.tokens.tolist()
        assert np.float32(line["logprobs"]).tolist() == completion.logprobs.tolist()
        assert line["versions"] == VERSION
        assert line["stop"] == completion.stop.name.lower()
        assert line["sampling"]["temperature"] == 1.0
        assert line["session"] == "task-1"
    assert on_disk[-1]["request"] == last.id
    assert SECRET not in "".join(p.read_text() for p in tmp_path.iterdir())
    recorded = read_recorded(tmp_path)
    ((row,),) = recorded.groups
    counts = recorded.counts
    assert (counts.completions, counts.sessions, counts.episodes, counts.rows) == (3, 1, 1, 1)
    assert (counts.rewarded, counts.rerendered, counts.restarted, counts.broken) == (1, 0, 0, 0)
    assert row.stop is StopReason.DONE
    assert [s.drawn for s in row.segments] == [True, False, True, False, True]
    assert [s.turn for s in row.segments] == [0, 0, 1, 1, 2]
    ids = np.concatenate([row.opening, *(s.tokens for s in row.segments)]).tolist()
    assert ids == pairs[-1][0] + pairs[-1][1].tokens.tolist()
    rows = to_rollout(recorded.groups, ROOM)
    rollout = rows.rollout.check()
    mask = rollout.mask[0, 0]
    sampled = [c for _, c in pairs]
    assert rollout.tokens[0, 0][mask].tolist() == [t for c in sampled for t in c.tokens]
    assert rollout.sampler_logprobs[0, 0][mask].tolist() == [x for c in sampled for x in c.logprobs]
    assert set(rollout.versions[0, 0][mask]) == {VERSION}
    assert set(rollout.versions[0, 0][~mask]) == {-1}
    length = rollout.lengths[0, 0]
    assert rows.rewards[0, 0].tolist() == [0.5]
    assert rows.paid[0, 0].nonzero()[0].tolist() == [length - 1]


def test_sessions_that_take_turns_are_told_apart(tmp_path):
    words = ["1+", "2", "3"]
    with recording(tmp_path) as agent:
        threads = [
            threading.Thread(target=agent.turns, args=(words, name), kwargs={"seed": seed})
            for seed, name in enumerate("abc")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name, points in zip("abc", (1, 0, -2.5), strict=True):
            assert agent.reward(name, {"reward": points})[0] == 200
        completions = agent.worker.completions
    recorded = read_recorded(tmp_path)
    (group,) = recorded.groups  # all open with the same words
    assert sorted(row.points for row in group) == [-2.5, 0.0, 1.0]
    assert [row.episode for row in group] == [row.member for row in group] == [0, 1, 2]
    for row in group:
        ids = np.concatenate([row.opening, *(s.tokens for s in row.segments)]).tolist()
        assert sum(ids == prompt + c.tokens.tolist() for prompt, c in completions) == 1
        assert sum(s.drawn for s in row.segments) == 3


def test_without_a_name_a_request_continues_what_it_begins_with(tmp_path):
    with recording(tmp_path) as agent:
        first = agent.turns(["1+", "2", "3"])
        other = agent.turns(["5+"])
        again = agent.turns(["1+"])  # the same words, and not the same conversation
    names = [line["session"] for line in completions(tmp_path)]
    assert names[0] == names[1] == names[2] == first.session_id
    assert len({*names[2:]}) == 3
    assert names[3:] == [other.session_id, again.session_id]


def test_a_branch_is_two_episodes_that_share_a_past(tmp_path):
    with recording(tmp_path) as agent:
        start = [{"role": "user", "content": "1+"}]
        answer, _ = agent.say(start, "s")
        ways = []
        for word, points in (("2", 0.25), ("3", 1)):
            agent.say([*start, answer, {"role": "tool", "content": word}], "s")
            assert agent.reward("s", {"reward": points})[0] == 200
            ways.append(agent.worker.completions[-1])
        shared = agent.worker.completions[0][1].tokens.tolist()
    recorded = read_recorded(tmp_path)
    (group,) = recorded.groups
    assert recorded.counts.episodes == 2
    rows_by_points = {row.points: row for row in group}
    assert [s.drawn for s in rows_by_points[1].segments] == [True, False, True]
    assert [s.drawn for s in rows_by_points[0.25].segments] == [False, False, True]
    assert [r.segments[0].tokens.tolist() for r in group] == [shared, shared]
    for (prompt, completion), points in zip(ways, (0.25, 1), strict=True):
        row = rows_by_points[points]
        ids = np.concatenate([row.opening, *(s.tokens for s in row.segments)]).tolist()
        assert ids == prompt + completion.tokens.tolist()


def test_choices_of_a_request_are_episodes_of_one_group(tmp_path):
    with recording(tmp_path) as agent:
        agent.say([{"role": "user", "content": "1+"}], "s", n=3)
        ask = {"model": "tiny", "prompt": ["12", "34"], "stream": True, "max_tokens": 3}
        for piece in agent.client.completions.create(**ask):
            assert piece.session_id != "s"
        completions = agent.worker.completions
    recorded = read_recorded(tmp_path)
    assert [len(group) for group in recorded.groups] == [3, 1, 1]
    assert {row.segments[0].tokens.tobytes() for g in recorded.groups for row in g} == {
        completion.tokens.tobytes() for _, completion in completions
    }
    assert recorded.counts.restarted == 0  # prompts of one request do not continue each other


def test_where_a_template_writes_other_ids_the_session_is_split(tmp_path):
    with recording(tmp_path, Trims()) as agent:
        agent.turns(["1+", "2", "3"], "s", logit_bias=LONG)
        assert agent.reward("s", {"reward": 1})[0] == 200
        completions = agent.worker.completions
    recorded = read_recorded(tmp_path)
    counts = recorded.counts
    assert (counts.rerendered, counts.restarted, counts.episodes, counts.rows) == (2, 0, 1, 3)
    assert "2 times" in str(counts)
    (group,) = recorded.groups
    assert [row.episode for row in group] == [0, 0, 0]
    for row, (prompt, completion) in zip(group, completions, strict=True):
        (segment,) = row.segments
        assert row.opening.tolist() == prompt
        assert segment.tokens.tolist() == completion.tokens.tolist()
        assert row.points == 1  # each row has all points of the episode
    assert [row.segments[0].turn for row in group] == [0, 1, 2]


def test_a_line_that_a_kill_cut_is_skipped_and_counted(tmp_path):
    with recording(tmp_path) as agent:
        agent.turns(["1+", "2"], "s")
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    recorded = read_recorded(tmp_path)
    assert (recorded.counts.completions, recorded.counts.broken) == (1, 1)
    assert "1 broken" in str(recorded.counts)
    ((row,),) = recorded.groups
    assert len(row.segments) == 1


def test_a_reward_is_checked(tmp_path):
    with recording(tmp_path) as agent:
        assert agent.reward("s", {"reward": 1})[0] == 404
        agent.turns(["1+"], "s/1")
        for body, param in (
            ({"reward": "1"}, "reward"),
            ({"reward": True}, "reward"),
            ({"reward": float("nan")}, "reward"),
            ({"reward": 1e39}, "reward"),
            ({}, "reward"),
            ({"reward": 1, "done": 1}, "done"),
            ({"reward": 1, "points": 1}, "points"),
        ):
            status, reply = agent.reward("s%2F1", body)
            assert (status, reply["error"]["param"]) == (400, param), body
        assert agent.reward("s%2F1", {"reward": 1}, key="other")[0] == 401
        status, reply = agent.reward("t", {"reward": 1})
        assert (status, reply["error"]["code"]) == (404, "session_not_found")
        assert agent.reward("s%2F1", {"reward": 2, "done": None})[0] == 200
        assert agent.reward("s%2F1", {"reward": -0.5, "done": True})[0] == 200
        status, reply = agent.reward("s%2F1", {"reward": 1})
        assert (status, reply["error"]["code"]) == (409, "session_done")
        with pytest.raises(openai.ConflictError, match="is done"):
            agent.turns(["1+"], "s/1")
        (group,) = read_recorded(tmp_path).groups
        assert group[0].points == 1.5


def test_the_name_of_a_session_is_checked(tmp_path):
    with recording(tmp_path) as agent:
        inside = {"metadata": {"session_id": "m", "else": "1"}}
        assert agent.turns(["1+"], extra_body=inside).session_id == "m"
        assert agent.turns(["1+"], "m", extra_body=inside).session_id == "m"
        with pytest.raises(openai.BadRequestError, match="differ"):
            agent.turns(["1+"], "n", extra_body=inside)
        for name in (5, "", "x" * 257):
            with pytest.raises(openai.BadRequestError, match="1 to 256"):
                agent.turns(["1+"], extra_body={"metadata": {"session_id": name}})


def test_a_server_that_records_nothing_takes_no_reward(tmp_path):
    with recording(tmp_path) as agent:
        agent.running.service.recorder = None
        status, reply = agent.reward("s", {"reward": 1})
        assert status == 404
        assert "--record" in reply["error"]["message"]
        assert not hasattr(agent.turns(["1+"], "s"), "session_id")
    assert not completions(tmp_path)


def test_a_full_disk_is_told_once_and_ends_no_request(tmp_path, monkeypatch, caplog):
    with recording(tmp_path) as agent:
        agent.turns(["1+"], "a")

        class Full:
            """Writes the first half of a line, as a disk does that is full."""

            def __init__(self, file):
                self.file, self.full = file, True

            def write(self, data):
                if not self.full:
                    return self.file.write(data)
                if len(data) > 50:
                    return self.file.write(data[:50])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            def __getattr__(self, name):
                return getattr(self.file, name)

        disk = agent.recorder._file = Full(agent.recorder._file)
        for name in "bc":
            agent.turns(["1+"], name)
        assert agent.reward("a", {"reward": 1})[0] == 503
        assert sum("No space left" in r.getMessage() for r in caplog.records) == 1
        disk.full = False
        agent.turns(["1+"], "d")
        assert "3 lines were lost" in caplog.text
        assert agent.reward("a", {"reward": 1})[0] == 200
    assert [line["session"] for line in completions(tmp_path)] == ["a", "d"]
    assert read_recorded(tmp_path).counts.broken == 0


def test_what_cannot_be_written_is_said_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"--record .*file: nothing can be written"):
        Recorder(tmp_path / "file")
    with pytest.raises(StorageError, match="--record"):
        Recorder(tmp_path / "file" / "below")


def test_of_too_many_sessions_the_oldest_is_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "MOST", 2)
    with recording(tmp_path) as agent:
        for name in "abc":
            agent.turns([f"{ord(name) - 96}+"], name)
        assert agent.reward("a", {"reward": 1})[0] == 404
        assert agent.reward("b", {"reward": 1})[0] == 200
        assert len(agent.recorder._ends) == 2
        assert sum(agent.recorder._lengths.values()) == 2


def test_other_distributions_are_context_where_one_is_asked_for(tmp_path):
    with recording(tmp_path) as agent:
        start = [{"role": "user", "content": "1+"}]
        answer, _ = agent.say(start, "s", temperature=0.5)
        agent.say([*start, answer, {"role": "tool", "content": "2"}], "s")
        agent.turns(["4+"], "b", logit_bias=LONG)
    everything = read_recorded(tmp_path)
    assert everything.drawn_from == {
        Distribution(temperature=0.5): 1,
        Distribution(): 1,
        Distribution(biased=True): 1,
    }
    assert everything.counts.other == 0
    recorded = read_recorded(tmp_path, Distribution())
    ((row,),) = recorded.groups
    assert recorded.counts.other == 2
    assert [s.drawn for s in row.segments] == [False, False, True]


def test_a_step_on_what_was_recorded_begins_at_a_ratio_of_one(tmp_path):
    import optax

    from jrl.collect.groups import to_batch
    from jrl.methods.group_relative import grpo
    from jrl.sampling.params import make_sampling_params
    from jrl.train.state import init_state
    from jrl.train.step import make_step

    with recording(tmp_path) as agent:
        for i, name in enumerate("abcd"):
            agent.turns(["1+", "2", "3"], name, seed=i)
            assert agent.reward(name, {"reward": i % 2, "done": True})[0] == 200
    recorded = read_recorded(tmp_path, Distribution())
    rows = to_rollout(recorded.groups, ROOM)
    batch = to_batch(rows.rollout, rows.rewards, np.ones(1, np.float32), rows.ids)
    objective = grpo().objective
    step = make_step(network=NETWORK, objective=objective, optimizer=optax.sgd(0.1))
    with jax.set_mesh(make_mesh()):
        state = init_state(
            jax.random.key(0),
            params(),
            network=NETWORK,
            objective=objective,
            optimizer=optax.sgd(0.1),
        )
        _, metrics = jax.jit(step)(state, batch, make_sampling_params())
    assert float(metrics["skipped_updates"]) == 0
    assert np.isfinite(float(metrics["loss"]))
    assert 0 < float(metrics["grad_norm"]) < 100
    assert float(metrics["ratio"]) == pytest.approx(1, abs=1e-5)
    assert float(metrics["logprob_diff"]) == pytest.approx(0, abs=1e-5)
    assert float(metrics["completion_tokens"]) == rows.rollout.mask.sum()


def test_the_example_of_the_docs_runs(tmp_path, monkeypatch, capsys):
    page = (pathlib.Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    codes = re.findall(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    (code,) = (code for code in codes if code.startswith("from openai"))
    monkeypatch.chdir(tmp_path)
    with recording(tmp_path / "recorded") as agent:
        code = code.replace("http://127.0.0.1:8000", agent.running.url)
        names = {}
        exec(code.replace("KEY", SECRET).replace('"RUN"', '"tiny"'), names)
        names["client"].close()
    assert "1 completions in 1 sessions" in capsys.readouterr().out
    assert names["rows"].rewards.sum() == 1
    assert names["rows"].rollout.mask.sum() == len(agent.worker.completions[0][1].tokens)
