"""Problems chosen in rounds: which are tested, which are left out, and what a run keeps of it."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jrl.collect.collector import Collector
from jrl.collect.curriculum import HostRounds, HostTools, Problems
from jrl.collect.plan import Setting
from jrl.collect.sources import Groups, entries
from jrl.config import load_config
from jrl.episodes.host import EnvError
from jrl.episodes.play import BY_TIMING
from jrl.errors import UserError
from jrl.mesh import make_mesh
from jrl.methods import get_method
from jrl.methods.curriculum import Table
from jrl.run import run as running
from jrl.run.run import train
from jrl.storage.metrics import CLOCKS, read_jsonl
from jrl.train.build import setup
from jrl.train.trainable import check_trainable
from jrl.types import Prompt, Rollout, StopReason
from jrl.zoo.methods.rounds import hard_problems, written_problems

PROMPTS = [Prompt(10 + i, f"q{i}", np.array([3], np.int32), "") for i in range(7)]
KEY = jax.random.key(0)


def rollout_of(stop):
    """Completions of two tokens that have stopped like this, [N, G]."""
    n, g = stop.shape
    return Rollout(
        prompt_tokens=np.full((n, 1), 3, np.int32),
        prompt_lengths=np.ones(n, np.int32),
        tokens=np.ones((n, g, 2), np.int32),
        lengths=np.full((n, g), 2, np.int32),
        mask=np.ones((n, g, 2), bool),
        sampler_logprobs=np.zeros((n, g, 2), np.float32),
        versions=np.zeros((n, g, 2), np.int32),
        stop=stop.astype(np.int32),
        baseline=np.zeros((n, g), bool),
    )


class Run:
    """Steps of a run on some prompts whose completions ``draw`` judges."""

    def __init__(self, curriculum, draw, weights, judge=None, problems=None, host=HostTools()):  # noqa: B008
        self.curriculum, self.judge = curriculum, judge
        self.weights, self.problems = np.array(weights, np.float32), problems
        prompts = PROMPTS if problems is None else problems
        subjects = lambda key, rows: ([prompts[i] for i in rows],) * 2  # noqa: E731
        rest = {"finish": lambda complete: None, "notes": dict, "order": None}
        self.source = SimpleNamespace(draw=draw, prompts=subjects, **rest)
        self.rounds = HostRounds(self.source, problems, host)
        self.resume({})

    def resume(self, notes):
        """Goes on from the notes of a checkpoint."""
        data = 7 if self.problems is None else 4
        setting = Setting(
            get_method("reinforce").with_(curriculum=self.curriculum),
            *(3, 1, self.weights, self.judge),
            table=Table(data, 1, np.zeros(data, np.int32)),
            in_order=lambda tickets, size: np.asarray(tickets) % size,
        )
        mesh = make_mesh({}, jax.devices()[:1])
        self.collector = Collector(self.source, setting, mesh, rounds=self.rounds, notes=notes)

    def notes(self):
        """State of a checkpoint, written and read again."""
        return json.loads(json.dumps(self.collector.notes(), default=lambda x: x.tolist()))

    def step(self, number, cursor=0):
        """The counts of a step and the problems that it draws."""
        _, groups, _ = self.collector.collect(
            KEY, {"policy": "policy", "value": "value"}, step=number, cursor=cursor
        )
        self.collector.learn(number, None)
        return groups


# ---------------------------------------------------------------- problems that are tested


class World:
    """Problem i is solved by ``skill[i]`` of four attempts; what is drawn says of which."""

    def __init__(self, skill, curriculum=None):
        self.skill, self.tested, self.dead = skill, [], ()
        rule = hard_problems(steps=4, attempts=4, most=0.25, above=0.5)
        self.run = Run(curriculum or rule, self.draw, [1.0, 0.0], judge=1)

    def draw(self, request):
        _, rows = entries(request)
        (ask,) = request.asks
        if request.stream == "curriculum":
            assert ask.width == 4
            self.tested.append((int(request.step), list(rows)))
        right = np.arange(ask.width) < np.array([self.skill[i] for i in rows])[:, None]
        stop = np.full(right.shape, StopReason.STOP_TOKEN)
        for i, row in enumerate(rows):
            stop[i, [j for j in self.dead if row == 2 and j < ask.width]] = StopReason.ABORTED
        points = np.stack([np.ones_like(right), right], axis=2).astype(np.float32)
        subject = [PROMPTS[i] for i in rows]
        ids = {"prompt": np.array([p.id for p in subject], np.int32)}
        return Groups(rollout_of(stop), points, subject, {}, ids)

    def problems(self, step):
        """All problems of the round that a step is in, by steps from different tickets."""
        size = int(self.run.step(step).counts["hard_problems"])
        ids = [self.run.step(step, cursor=i).subject[0].id for i in range(size)]
        return ids


def test_problems_that_are_mostly_failed_are_drawn_until_the_next_round():
    world = World([0, 1, 2, 4, 0, 1, 3])
    groups = world.run.step(0)
    assert [p.id for p in groups.subject] == [10, 11, 14]  # up to a quarter is right
    assert groups.counts["hard_problems"] == 4.0
    assert world.tested == [(0, [0, 1, 2]), (0, [3, 4, 5]), (0, [6])]
    world.skill = [2, 0, 0, 0, 0, 4, 0]
    assert world.problems(3) == [10, 11, 14, 15]
    assert len(world.tested) == 3
    # What was left out is not tested again, though it would be failed now.
    assert world.problems(4) == [11, 14]
    assert world.tested[3:5] == [(4, [0, 1, 4]), (4, [5])]
    world.skill = [4] * 7
    assert world.problems(8) == [11, 14]  # where nothing is hard the round has what there is


def test_a_resumed_run_has_the_problems_of_its_round():
    world = World([0, 1, 2, 4, 0, 1, 3])
    world.run.step(4)
    notes = world.run.notes()
    assert [0, 1, 4, 5] in notes["collect"].values()
    world.tested.clear()
    again = World(world.skill)
    again.run.resume(notes)
    assert again.problems(6) == [10, 11, 14, 15]
    assert not again.tested
    again.run.step(8)
    assert again.tested == [(8, [0, 1, 4]), (8, [5])]


def test_a_problem_of_which_nothing_is_known_stays():
    world = World([4, 4, 4, 4, 4, 4, 0])
    world.dead = (0, 1, 2, 3)
    assert world.problems(0) == [12, 16]
    world = World([4, 4, 2, 4, 4, 4, 0])
    world.dead = (0, 1)  # both that are known are wrong
    assert world.problems(0) == [12, 16]


# ---------------------------------------------------------------- problems that are written


class Village:
    """Problems are failed by name, writers write by rule, and chances are in the text."""

    def __init__(self, write=None):
        self.lost, self.requests = {"q1", "q3"}, []
        self._write = write or (lambda failed, count, seed: [f"{f}+0.5" for f in failed])
        self.prompts = Problems(PROMPTS[:4], self.make)
        rule = written_problems(steps=3, problems=5, low=0.05, high=0.75)
        host = HostTools(self.write, self.logits)
        self.run = Run(rule, self.draw, [0.0, 2.0], problems=self.prompts, host=host)

    def write(self, failed, count, seed):
        self.requests.append((list(failed), count, seed))
        return self._write(failed, count, seed)

    def make(self, row):
        text = row["question"] if isinstance(row, dict) else row
        return None if "unusable" in text else Prompt(0, text, np.array([3], np.int32), "")

    def logits(self, params, prompts, seeds):
        assert params["value"] == "value"
        assert len(set(seeds)) == len(prompts)
        chances = np.array([float(p.text.rpartition("+")[2]) for p in prompts])
        return np.log(chances / (1 - chances))

    def draw(self, request):
        subject = [self.prompts[i] for i in entries(request)[1]]
        right = np.array([[p.text not in self.lost] for p in subject])
        points = np.stack([np.ones_like(right), right], axis=2).astype(np.float32)
        ids = {"prompt": np.array([p.id for p in subject], np.int32)}
        return Groups(rollout_of(np.ones(right.shape)), points, subject, {}, ids)

    def step(self, number):
        """The texts of the problems, each of which is drawn in the step or one like it."""
        for cursor in range(0, len(self.prompts), 3):
            groups = self.run.step(number, cursor)
            if cursor == 0:
                assert groups.counts["written_problems"] == len(self.prompts) - 4.0
        return [p.text for p in self.prompts]


DATA = ["q0", "q1", "q2", "q3"]


def test_problems_like_the_failed_ones_join_those_of_the_data():
    village = Village()
    assert village.step(1) == village.step(2) == DATA
    assert not village.requests
    village.lost = {"q1"}  # nobody asks about the last phase any more
    assert [p.text for p in village.run.step(3, cursor=3).subject] == ["q3", "q1+0.5", "q3+0.5"]
    ((failed, count, seed),) = village.requests
    assert (failed, count) == (["q1", "q3"], 5)
    assert [p.id for p in village.prompts] == [10, 11, 12, 13, 14, 15]
    village.lost = {"q3+0.5"}
    village.step(5)
    village.run.step(6)
    assert [p.text for p in village.prompts] == [*DATA, "q1+0.5", "q3+0.5", "q3+0.5+0.5"]
    assert village.requests[1][0] == ["q3+0.5"]
    assert village.requests[1][2] != seed
    village.lost = set()
    village.step(7)
    village.step(9)  # nothing was failed
    assert len(village.requests) == 2


def test_what_is_hopeless_easy_unusable_or_there_already_is_left_out():
    rows = ["a+0.04", "b+0.0501", "c+0.7499", "d+0.76", "e+nan", "unusable+0.5", "q2", "b+0.0501"]
    village = Village(lambda *args: [*rows, {"question": "f+0.3", "answer": "1"}])
    village.step(1)
    village.run.step(3)
    assert [p.text for p in village.prompts] == [*DATA, "b+0.0501", "c+0.7499", "f+0.3"]
    assert [p.id for p in village.prompts][4:] == [14, 15, 16]


def test_a_resumed_run_has_what_was_written_and_what_was_failed():
    village, again = Village(), Village()
    village.step(1)
    village.run.step(3, cursor=0)
    again.run.resume(village.run.notes())
    village.run.step(4, cursor=3)
    again.run.step(4, cursor=3)
    assert [p.text for p in again.prompts] == [*DATA, "q1+0.5", "q3+0.5"]
    assert not again.requests
    for each in (village, again):
        each.run.step(6)
    assert village.requests[1] == again.requests[0]
    assert [(p.id, p.text) for p in village.prompts] == [(p.id, p.text) for p in again.prompts]


def test_a_step_that_fails_leaves_nothing_written():
    village = Village()
    village.step(1)
    draw, village.run.source.draw = village.run.source.draw, None
    with pytest.raises(TypeError):
        village.run.step(3)
    assert len(village.prompts) == 6
    assert "added" not in village.run.notes()["collect"]
    village.run.source.draw = draw
    village.run.step(4)
    assert len(village.prompts) == 4


def test_a_writer_that_fails_ends_nothing(caplog):
    def fails(*args):
        raise EnvError("no server")

    village = Village(fails)
    village.step(1)
    assert village.step(3) == DATA
    assert "nothing was written: no server" in caplog.text


# ---------------------------------------------------------------- runs

OWN = """
def lucky(samples):
    easy = ["easy" in s.prompt.text for s in samples]
    return [float(e or len(s.completion) % 3 == 0) for e, s in zip(easy, samples)]
"""


def settings(tmp_path, model, run, *more):
    (tmp_path / "own.py").write_text(OWN)
    names = ("eels", "easy", "cows", "mice", "whales")
    rows = [{"question": f"how many {x}?", "answer": "a"} for x in names]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = json.dumps(str(tmp_path / "own.py") + ":lucky")
    return load_config(
        None,
        [
            *(f"model.path={json.dumps(str(model))}", "data.template=plain"),
            *(f"data.train={json.dumps(str(tmp_path / 'rows.jsonl'))}", "method=deepsearch"),
            *("sampling.group=6", "sampling.max_new_tokens=9", "train.prompts=2", "train.steps=6"),
            "objective={round_steps=3, attempts=2, hard=0.5, each=2}",
            "tree={kind='search', width=3, tokens=4}",
            *("log.samples_every=1", f"rewards={{{reward}={{judge=true}}}}"),
            *("reward_pool.workers=0", "checkpoint.every=2", "optimizer.learning_rate=0.01"),
            f"run.dir={json.dumps(str(tmp_path / run))}",
            *more,
        ],
    )


def records_of(directory):
    return [r for r in read_jsonl(directory / "metrics.jsonl") if "loss" in r]


def test_a_run_searches_hard_problems_and_trains_on_what_it_found(
    tmp_path, monkeypatch, letters_model
):
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    train(settings(tmp_path, letters_model, "whole"), echo=lambda line: None)
    records = records_of(tmp_path / "whole")
    hard = [r["hard_problems"] for r in records]
    assert len(set(hard[:3])) == len(set(hard[3:])) == 1
    assert 5 > hard[0] >= hard[3] >= 1  # the easy one is left out
    replayed = [r["replayed"] for r in records]
    assert replayed[0] == 0 < sum(replayed)
    assert all(r["grad_norm"] > 0 for r in records)
    samples = read_jsonl(tmp_path / "whole" / "samples.jsonl")
    assert not [s for s in samples if "easy" in s["prompt"]]
    train(settings(tmp_path, letters_model, "parts", "train.steps=3"), echo=lambda line: None)
    train(settings(tmp_path, letters_model, "parts"), echo=lambda line: None)
    left = CLOCKS | BY_TIMING
    parts = [
        [{k: v for k, v in r.items() if k not in left} for r in records_of(tmp_path / run)]
        for run in ("whole", "parts")
    ]
    assert parts[0] == parts[1]


def test_rounds_take_a_host_and_branches_take_no_tests():
    small = "model.config={layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}"
    rounds = (
        "data.task=sequence",
        "method=deepsearch",
        "objective.round_steps=3",
        "run.dir=unused",
    )
    for more, message in {
        ("train.mode=compiled", "tree.kind=none"): "in rounds: .*or set train.mode to 'host'",
        ("tree={kind='branch', at='even', roots=2}",): "tests problems .* independent members",
    }.items():
        with pytest.raises(UserError, match=message):
            check_trainable(setup(load_config(None, [small, *rounds, *more])))


def test_coefficients_reach_the_rules():
    method = get_method("deepsearch", round_steps=7, hard=0.4, attempts=5, above=0.1, each=3)
    assert method.curriculum == hard_problems(7, 5, 0.4, 0.1)
    points, members = np.array([[1.0, 0, 0], [1, 1, 0], [0.1, 0, 0]]), np.ones((3, 3), bool)
    (rule,) = method.edits
    keep, replace = (cell.cell_contents for cell in rule.apply.__closure__[1:])
    assert keep(points, members).tolist() == [[True, False, False], *[[False] * 3] * 2]
    assert replace(points, members).all()
    assert rule.init.each == 3
    assert method.seams == ("objective", "curriculum", "plan", "edits")
    plain = get_method("deepsearch")
    assert plain.curriculum is None
    assert plain.edits == ()
