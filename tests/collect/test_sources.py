"""Sources of groups: what each has, what one of one's own lacks, and rows apart from tickets."""

import dataclasses
import functools
import inspect
import json

import jax
import numpy as np
import pytest

from jrl.collect.host_episodes import HostEpisodes
from jrl.collect.sources import PARTS, Around, Groups, check_groups, epoch_order, simple_request
from jrl.collect.sources_given import JudgedSource, RecordedSource
from jrl.collect.sources_own import check_notes, padded, unsampled
from jrl.collect.sources_task import TaskSource, task_rollout
from jrl.collect.sources_text import TextSource
from jrl.collect.tree_search import TreeSearch
from jrl.config import load_config
from jrl.data.tasks import get_task
from jrl.errors import UserError
from jrl.run import run as running
from jrl.run.run import train
from jrl.sampling.params import make_sampling_params
from jrl.storage.metrics import read_jsonl
from jrl.types import Prompt

BUILT_IN = (TaskSource, TextSource, HostEpisodes, TreeSearch, RecordedSource, JudgedSource, Around)

OWN = '''
import numpy as np

from jrl.collect.sources import Groups, entries
from jrl.types import Prompt


class Vowels:
    """Asks for words with a vowel; row i asks for the i-th one."""

    def __init__(self, sampler, tokenizer):
        self.sampler, self.tokenizer = sampler, tokenizer

    def order(self, tickets):
        return tickets % 5

    def prompts(self, key, rows):
        asked = [f"a word with {'aeiou'[i]}?" for i in rows]
        made = [np.array(self.tokenizer.encode(text), np.int32) for text in asked]
        prompts = [Prompt(int(i), *each, "aeiou"[i]) for i, *each in zip(rows, asked, made)]
        return prompts, prompts

    def draw(self, request):
        prompts, _ = self.prompts(request.key, entries(request)[1])
        return self.judge(prompts, prompts, self.sampler(request, prompts))

    def judge(self, subject, prompts, rollout):
        decode = self.tokenizer.decode
        texts = [[decode(ids.tolist()) for ids in group] for group in rollout.tokens]
        points = [[[p.answer in text] for text in g] for p, g in zip(prompts, texts)]
        ids = {"prompt": np.array([p.id for p in prompts], np.int32)}
        return Groups(rollout, np.array(points), prompts, {}, ids)

    def finish(self, complete):
        pass

    def notes(self):
        return {}


def vowels(sampler, tokenizer):
    return Vowels(sampler, tokenizer)


class Counts(Vowels):
    """Counts its draws, and writes what it is resumed with."""

    drawn = 0

    def draw(self, request):
        self.drawn += 1
        return super().draw(request)

    def notes(self):
        return {"cursor": self.drawn, "each": np.arange(self.drawn)}

    def resume(self, notes):
        self.drawn = notes["cursor"]
        with open(f"{__file__}.resumed", "w") as file:
            print(self.drawn, notes["each"].tolist(), file=file)


def counts(sampler, tokenizer):
    return Counts(sampler, tokenizer)


class Loses(Vowels):
    def notes(self):
        return {"drawn": 1}


def loses(sampler, tokenizer):
    return Loses(sampler, tokenizer)


class Words(Vowels):
    def judge(self, subject, prompts, rollout):
        groups = super().judge(subject, prompts, rollout)
        return groups._replace(rewards=[[["good"]] * 4] * 2)


def words(sampler, tokenizer):
    return Words(sampler, tokenizer)


class Moods(Vowels):
    def judge(self, subject, prompts, rollout):
        groups = super().judge(subject, prompts, rollout)
        return groups._replace(ids=groups.ids | {"mood": np.zeros((2, 4))})


def moods(sampler, tokenizer):
    return Moods(sampler, tokenizer)


class Doubts(Vowels):
    def judge(self, subject, prompts, rollout):
        groups = super().judge(subject, prompts, rollout)
        return groups._replace(stats={"doubt": np.zeros((2, 4))})


def doubts(sampler, tokenizer):
    return Doubts(sampler, tokenizer)


class Partial(Vowels):
    finish = None

    def order(self):
        return 0


def partial(sampler, tokenizer):
    return Partial(sampler, tokenizer)


class Short(Vowels):
    def judge(self, subject, prompts, rollout):
        groups = super().judge(subject, prompts, rollout)
        return groups._replace(rewards=groups.rewards[:, :, 0])


def short(sampler, tokenizer):
    return Short(sampler, tokenizer)


class Halves(Vowels):
    def order(self, tickets):
        return tickets / 2


def halves(sampler, tokenizer):
    return Halves(sampler, tokenizer)


class Texts(Vowels):
    def prompts(self, key, rows):
        return ["which?"] * len(rows), ["which?"] * len(rows)


def texts(sampler, tokenizer):
    return Texts(sampler, tokenizer)


class Alone(Vowels):
    def prompts(self, key, rows):
        return super().prompts(key, rows)[1]

    def draw(self, request):
        prompts = self.prompts(request.key, entries(request)[1])
        return self.judge(prompts, prompts, self.sampler(request, prompts))


def alone(sampler, tokenizer):
    return Alone(sampler, tokenizer)


class Forgets(Vowels):
    def notes(self):
        return None


def forgets(sampler, tokenizer):
    return Forgets(sampler, tokenizer)


def narrow(tokenizer):
    return None


def lengths(samples):
    return [len(sample.completion) for sample in samples]
'''


def settings(tmp_path, model, source, *more):
    (tmp_path / "own.py").write_text(OWN)
    changes = (
        *(f"data.train=source:{tmp_path}/own.py:{source}", f"model.path={model}", "method=grpo"),
        *("data.max_prompt_tokens=20", "sampling.group=4", "sampling.max_new_tokens=6"),
        *("train.prompts=2", "train.steps=2", "eval.problems=5", "checkpoint.every=0"),
        *("log.samples_every=1", f"run.dir={json.dumps(str(tmp_path / 'run'))}"),
    )
    return load_config(None, [*changes, *more])


def test_a_source_of_ones_own_trains_and_is_evaluated(tmp_path, letters_model, monkeypatch):
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    lengths = f'{{function="{tmp_path}/own.py:lengths", weight=0.25}}'
    rewards = (f"rewards={{reward={{}}, lengths={lengths}}}", "reward_pool.workers=0")
    config = settings(tmp_path, letters_model, "counts", *rewards)
    summary = train(config, echo=lambda line: None)
    assert summary["eval_before"]["problems"] == 5
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")[1:]
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    trained = [s for s in samples if s.get("split") != "eval"]
    assert {s["prompt"][-2] for s in trained} == set("aeio")  # tickets 0 to 3, a row each
    for sample in samples:
        text = sample["completion"]
        assert sample["reward"] == (sample["answer"] in text) + len(text) / 4
    for step, record in enumerate(records, 1):
        points = [s["reward"] for s in trained if s["step"] == step]
        assert record["reward"] == pytest.approx(np.mean(points))
        assert record["logprob_diff"] < 1e-4
    train(config, echo=lambda line: None)  # the end of the run, again
    assert (tmp_path / "own.py.resumed").read_text() == "2 [0, 1]\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("partial", r"Partial.order\(\) does not take \(tickets\); write def order\(self, tickets"),
        ("partial", r"Partial has no method finish; write def finish\(self, complete\)"),
        ("narrow", r"narrow\(tokenizer\) must take sampler and tokenizer"),
        ("vowel", r"did you mean 'vowels'"),
        ("short", r"Short.draw returned rewards of shape \(2, 4\); 2 groups .* have \(2, 4, 1\)"),
        ("halves", r"Halves.order returned float64 of shape \(2,\) for 2 tickets"),
        ("texts", r"sampler\(request, prompts\) got \['which\?'.*; give 2 jrl.types.Prompt"),
        ("alone", r"Alone.prompts returned \[Prompt.* for 2 rows; return \(subjects, prompts\)"),
        ("forgets", r"Forgets.notes returned None; return a dict"),
        ("loses", r"Loses.notes returned \{'drawn': 1\}, .*; write def resume\(self, notes\)"),
        ("words", r"Words.draw returned rewards \[\[\['good'\].*; return an array of numbers"),
        (
            "moods",
            r"Moods.draw returned ids\['mood'\] of shape \(2, 4\), float64; return int32 of"
            r" shape \(2,\) or \(2, 4\) or \(2, 4, 6\)",
        ),
        (
            "doubts",
            r"Doubts.draw returned stats\['doubt'\] of shape \(2, 4\); return float32 of shape"
            r" \(2, 4, 6\)",
        ),
    ],
)
def test_what_a_source_lacks_is_named_before_anything_compiles(
    source, message, tmp_path, letters_model, monkeypatch
):
    monkeypatch.setattr(running.programs, "new_state", lambda run: pytest.fail("compiles"))
    with pytest.raises(UserError, match=message):
        train(settings(tmp_path, letters_model, source), echo=lambda line: None)


PROMPT = Prompt(0, "a?", np.array([1, 2], np.int32), "b")
REQUEST = simple_request(np.zeros(2, np.uint32), {"policy": ()}, np.int32(0), np.arange(2), 3)
SOUND = Groups(
    unsampled(padded(REQUEST, [PROMPT] * 2, 4, 5), 3, 6),
    np.zeros((2, 3, 1)),
    [PROMPT] * 2,
    {"seen": 2},
    {"prompt": np.arange(2)},
)
SPOILED = {
    "a reward that is not finite": (
        {"rewards": np.full((2, 3, 1), np.nan)},
        "draw returned the reward nan for group 0, member 0; rewards must be finite",
    ),
    "another number of tokens": (
        {"rollout": SOUND.rollout.replace(mask=SOUND.rollout.mask[:, :, :1])},
        "draw returned a rollout whose arrays do not fit each other",
    ),
    "tokens in a list": (
        {"rollout": SOUND.rollout.replace(tokens=SOUND.rollout.tokens.tolist())},
        "draw returned a rollout whose arrays do not fit each other",
    ),
    "no counts": ({"counts": None}, "draw returned counts = None; return values by name"),
    "a count in words": (
        {"counts": {"seen": "two"}},
        r"counts\['seen'\] = 'two'; return one number",
    ),
    "no ids": ({"ids": None}, "draw returned ids = None"),
    "a list of stats": ({"stats": [1]}, r"draw returned stats = \[1\]"),
    "a subject for two": ({"subject": [PROMPT]}, "returned 1 subjects for 2 groups"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_groups_that_do_not_fit_are_named(name):
    changes, message = SPOILED[name]
    assert check_groups(SOUND, REQUEST, 1, None).rewards.dtype == np.float32
    with pytest.raises(UserError, match=message) as raised:
        check_groups(SOUND._replace(**changes), REQUEST, 1, None)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    "tokens", [[5], [-1], [1.5], "ab", None, [[1]], np.array([0.0])], ids=lambda x: repr(x)
)
def test_prompts_have_ids_of_the_vocabulary(tokens):
    prompt = dataclasses.replace(PROMPT, tokens=tokens)
    message = "prompt 0 has the tokens .*; give a list of ids from 0 to 4"
    with pytest.raises(UserError, match=message):
        padded(REQUEST, [PROMPT, prompt], 4, 5)


def test_notes_come_back_as_they_were():
    class Counts:
        def resume(self, notes):
            pass

    notes = {"rows": [{"3": 1}], "each": np.arange(2)}
    assert check_notes(notes, Counts()) is notes
    with pytest.raises(UserError, match=r"Counts.notes returned the key 3; keys must be text"):
        check_notes({"rows": [{3: 1}]}, Counts())


@pytest.mark.parametrize("kind", BUILT_IN)
def test_every_source_has_all_parts(kind):
    for part, arguments in PARTS.items():
        if (kind, part) == (TaskSource, "draw"):
            continue  # a compiled program
        inspect.signature(getattr(kind, part)).bind(None, *arguments)


def test_the_row_says_what_is_asked_and_the_ticket_what_is_drawn(make_bag):
    task = get_task("sorting", difficulty=3)
    network = make_bag(task.vocab_size, 8, task.prompt_tokens + task.completion_tokens)
    params, key = network.init(jax.random.key(0)), jax.random.key(1)
    options = {"task": task, "parts": ("verify",), "network": network}
    draw = jax.jit(functools.partial(task_rollout, **options))

    def sample_rows(tickets, rows):
        arrays = [np.array(x, np.int32) for x in (tickets, rows)]
        request = simple_request(key, {"policy": params}, np.int32(0), arrays[0], 2, rows=arrays[1])
        groups = draw(request, sampling_params=make_sampling_params())
        rollout = jax.device_get(groups.rollout)
        return rollout.prompt_tokens.tolist(), rollout.tokens.tolist(), groups.ids["prompt"]

    questions, answers, prompt = sample_rows([0, 1, 2], [4, 4, 5])
    assert questions[0] == questions[1] != questions[2]
    assert answers[0] != answers[1]
    assert prompt.tolist() == [4, 4, 5]
    again, same, _ = sample_rows([2, 0], [5, 4])  # whatever stands beside them
    assert (again, same) == ([questions[2], questions[0]], [answers[2], answers[0]])


def test_epochs_see_every_row_once_each_in_an_order_of_its_own():
    rows = epoch_order(3, np.arange(20), 10)
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    assert rows[:10].tolist() != rows[10:].tolist()
    assert epoch_order(None, np.arange(12), 10).tolist() == [*range(10), 0, 1]
