"""Text that is sampled in parts: rewards of one part are called while the next is sampled."""

import pathlib
import time
from types import SimpleNamespace

import numpy as np
import pytest
from judge_server import judge_server

from jrl.collect.reward_stages import JudgedParts, judge_stage, judged_parts
from jrl.collect.sources import Groups, divided, simple_request
from jrl.collect.sources_text import TextSource
from jrl.config import load_config
from jrl.config.features import check_features
from jrl.errors import UserError
from jrl.judging import row_calls
from jrl.judging.host import HostScorer, without_dropped
from jrl.judging.judges import endpoint_judges, judge_parts
from jrl.judging.row_calls import RowCalls
from jrl.models.tokenizer import CharTokenizer
from jrl.rewards import Sample, make_reward
from jrl.rewards.pool import RewardPool
from jrl.types import Prompt, Rollout, StopReason

JUDGES = pathlib.Path(__file__).parents[1] / "rewards" / "judges.py"
TOKENIZER = CharTokenizer("0123456789")
N, G, T = 4, 2, 3
PROMPTS = [Prompt(i, f"{i}", np.zeros(1, np.int32), str(i)) for i in range(N)]
NAMES = ("said", "rank", "judged")


def sampled(may_go_on):
    """A sampler of digits that follow from ticket and member; the second part waits for a call."""

    def program(key, params, ids, lengths, sampling_params, version, tickets, members):
        end = time.monotonic() + 60
        while tickets[0] == N // 2 and not may_go_on():
            assert time.monotonic() < end, "nobody was called before all parts were sampled"
            time.sleep(0.01)
        shape = (len(tickets), G, T)
        digits = (tickets[:, None, None] * 3 + np.arange(G)[:, None] + np.arange(T)) % 10
        lengths_of = np.broadcast_to(1 + np.arange(G), shape[:2]).astype(np.int32)
        mask = np.arange(T) < lengths_of[..., None]
        rollout = Rollout(
            prompt_tokens=np.asarray(ids),
            prompt_lengths=np.asarray(lengths),
            tokens=np.where(mask, digits, 0).astype(np.int32),
            lengths=lengths_of,
            mask=mask,
            sampler_logprobs=np.zeros(shape, np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            stop=np.full(shape[:2], StopReason.LENGTH, np.int32),
            baseline=np.zeros(shape[:2], bool),
        )
        return rollout, np.int32(1)

    return program


def judged_groups(url, notes, draws, may_go_on=lambda: True):
    table = f"judged={{function='judge', url='{url}', model='m', template='{{completion}}'}}"
    config = load_config(None, ["data.train=x.jsonl", "model.path=x", f"rewards={{{table}}}"])
    judges = judge_parts(endpoint_judges(config), TOKENIZER, 9, "train")
    functions = {
        "said": make_reward(f"{JUDGES}:write_note", file=str(notes)),
        "rank": make_reward(f"{JUDGES}:rank"),
    }
    with RewardPool(functions, workers=1, timeout_seconds=20.0) as pool:
        calls = RowCalls(HostScorer(pool, TOKENIZER, "train", 9), judges) if draws > 1 else None
        program = sampled(may_go_on)
        how = {"max_new_tokens": T, "steps": 9, "draws": draws, "calls": calls}
        source = TextSource(PROMPTS, 1, None, program, None, pool, TOKENIZER, **how)
        stages = [judge_stage(judges, lambda groups: groups.subject)]
        source = JudgedParts(source, ("said", "rank"), stages, NAMES, calls=calls)
        key = np.zeros(2, np.uint32)
        tickets = np.arange(N, dtype=np.int32)
        return source.draw(simple_request(key, {"policy": None}, np.int32(4), tickets, G))


@pytest.mark.slow
def test_one_part_is_judged_while_the_next_is_sampled(tmp_path, monkeypatch):
    monkeypatch.setattr("jrl.collect.sources_text.compiled_stream", lambda *args: None)
    notes = tmp_path / "notes"

    def digits(body, number):
        return f"Score: {int(body['messages'][-1]['content'][-1])}"

    results = []
    for draws in (1, 2):
        with judge_server(digits) as (url, bodies):
            both = lambda bodies=bodies: bool(bodies) and notes.exists()  # noqa: E731
            groups = judged_groups(url, notes, draws, both if draws > 1 else lambda: True)
            results.append((groups, sorted(notes.read_text().splitlines()), len(bodies)))
            notes.unlink()
    (at_once, notes_at_once, calls), (parts, notes_in_parts, calls_in_parts) = results
    np.testing.assert_array_equal(parts.rewards, at_once.rewards)
    np.testing.assert_array_equal(parts.rollout.tokens, at_once.rollout.tokens)
    for name, ids in at_once.ids.items():
        np.testing.assert_array_equal(parts.ids[name], ids)
    assert parts.subject == at_once.subject
    assert notes_in_parts == notes_at_once  # one call a member
    assert len(notes_at_once) == N * G
    assert calls_in_parts == calls
    assert len(np.unique(at_once.rewards[..., 2])) > 2


def test_each_process_calls_about_its_own_share(monkeypatch):
    """As it judges when all are there; functions of the whole batch are the first process's."""
    monkeypatch.setattr(row_calls.jax, "process_count", lambda: 2)
    monkeypatch.setattr(row_calls.jax, "process_index", lambda: 1)
    rollout, _ = sampled(lambda: True)(
        None, None, np.zeros((2, 1)), np.ones(2), *[None] * 2, np.arange(2), None
    )
    for functions, mine in (({"f": alone}, [1]), ({"f": alone, "g": batch_reward}, [])):
        with RewardPool(functions, workers=0, timeout_seconds=1.0) as pool:
            calls = RowCalls(HostScorer(pool, TOKENIZER), None)
            samples = []
            monkeypatch.setattr(pool, "begin", lambda samples=samples: Seen(samples))
            with calls.step(0):
                calls.submit_groups(PROMPTS[2:], rollout, 2)
                calls.drain()
        assert sorted({sample.prompt.id for sample in samples}) == [2 + i for i in mine]


class Seen:
    """In the place of ``pool.begin()``."""

    def __init__(self, samples):
        self.submit = samples.append

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def alone(samples):
    return [0.0] * len(samples)


def batch_reward(samples):
    return [0.0] * len(samples)


batch_reward.over = "batch"


def test_a_request_is_divided_by_its_entries():
    request = simple_request(None, {}, np.int32(0), np.arange(6, dtype=np.int32), 3)
    parts = divided(request, 3)
    assert [part.asks[0].ticket.tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert all(part.asks[0].width == 3 for part in parts)
    assert divided(request, 4) == [request] == divided(request, 1)


def test_parts_that_nobody_samples_are_said():
    words = {"draws": "sampling.draws = 2", "episodes": "data.env", "records": "data.train"}
    with pytest.raises(UserError, match=r"sampling.draws = 2 needs prompts in text without an"):
        check_features(words)
    check_features({"draws": "sampling.draws = 2", "text": "data.train"})
    keys = ["data.train=x.jsonl", "model.path=x", "train.prompts=6", "sampling.draws=4"]
    with pytest.raises(UserError, match=r"train.prompts = 6 cannot be sampled in sampling.draws"):
        load_config(None, keys)


def test_a_judge_is_asked_early_about_what_it_will_be_asked_about():
    begun = []
    keys = ("where={kind='b'}", "only='math'", "votes=2, temperature=1.0")
    tables = [
        f"j{i}={{function='judge', url='http://127.0.0.1:1/v1', model='m', {more}}}"
        for i, more in enumerate(keys)
    ]
    rewards = f"rewards={{math={{}}, {', '.join(tables)}}}"
    judges = endpoint_judges(load_config(None, ["data.train=x.jsonl", "model.path=x", rewards]))
    prompt = Prompt(0, "why?", np.zeros(1), "x", {"kind": "a"})
    for name, each in judges.items():
        each.client.begin = lambda asked, name=name: begun.append((name, len(asked)))
        each.begin(Sample(prompt, "so", np.zeros(1, np.int32), "stop_token"))
    assert begun == [("j2", 2)]  # the first is not asked, the second where another part says so


def test_processes_call_about_their_own_groups(monkeypatch):
    program = sampled(lambda: True)
    ids, lengths = np.zeros((N, 1), np.int32), np.ones(N, np.int32)
    rollout, _ = program(None, None, ids, lengths, None, 0, np.arange(N), None)
    judges = SimpleNamespace(tokenizer=TOKENIZER, steps=1)
    calls, made = RowCalls(None, judges), []
    calls._submit = lambda make, functions, judges: made.append(judges)
    monkeypatch.setattr(row_calls.jax, "process_count", lambda: 3)
    monkeypatch.setattr(row_calls.jax, "process_index", lambda: 0)
    calls.submit_groups(PROMPTS, rollout, 2)  # groups 2 to 5 of the step, of which 3 is its own
    assert np.reshape(made, (N, G))[:, 0].tolist() == [False, True, False, False]
    for alive, drawn in ((False, True), (True, False)):  # failed, or nobody sampled anything
        made.clear()
        calls.submit(SimpleNamespace(alive=alive, segments=[SimpleNamespace(drawn=drawn)]))
        assert not made


def test_without_its_baseline_a_group_leaves():
    baseline = np.array([[True, False], [True, False]])
    stop = np.full((2, 2), StopReason.STOP_TOKEN)
    rollout = Members(stop, baseline)
    left, count = without_dropped(rollout, np.array([[True, False], [False, True]]))
    assert (left.stop == StopReason.ABORTED).tolist() == [[True, True], [False, True]]
    assert count == 3


class Members(SimpleNamespace):
    """As much of a rollout as says who is there."""

    def __init__(self, stop, baseline):
        super().__init__(stop=stop, baseline=baseline)

    def replace(self, stop):
        return Members(stop, self.baseline)


class Model:
    """A reward model that notes when it reads."""

    by = "completion"

    def __init__(self, notes):
        self.notes = notes

    def __call__(self, rollout):
        self.notes.append("model")
        return np.ones(rollout.stop.shape, np.float32)


def test_models_read_before_anybody_waits_for_functions():
    """Those that began as rows ended continue in their processes meanwhile."""
    notes = []
    program = sampled(lambda: True)
    ids, lengths = np.zeros((N, 1), np.int32), np.ones(N, np.int32)
    rollout, _ = program(None, None, ids, lengths, None, 0, np.arange(N), None)
    groups = Groups(rollout, np.zeros((N, G, 0), np.float32), PROMPTS, {}, {})
    source = SimpleNamespace(draw=lambda request: groups, parts=())
    parts = {"function": ["said"], "model": ["model"]}
    rewards = SimpleNamespace(
        given_by=lambda kind: parts.get(kind, []),
        models={"model": Model(notes)},
        text_models={},
        combined=(),
        weights={"said": 1.0, "model": 1.0},
    )
    run = SimpleNamespace(
        rewards=rewards,
        tokenizer=TOKENIZER,
        config=SimpleNamespace(train=SimpleNamespace(steps=1)),
        kind=SimpleNamespace(task=None),
    )
    functions = {"said": lambda samples: notes.append("said") or [2.0]}
    with RewardPool(functions, workers=0, timeout_seconds=1.0) as pool:
        drawn = judged_parts(run, source, pool).draw(SimpleNamespace(step=0, weights={}))
    assert notes == ["model", *["said"] * (N * G)]
    np.testing.assert_array_equal(drawn.rewards, np.tile(np.float32([2.0, 1.0]), (N, G, 1)))
