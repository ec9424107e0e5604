"""Problems chosen in rounds: which are tested, which are left out, and what a run keeps of it."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jrl.config import load_config
from jrl.episodes.host import EnvError
from jrl.episodes.play import BY_TIMING
from jrl.errors import UserError
from jrl.methods import get_method
from jrl.methods.base import HardProblems, WrittenProblems
from jrl.run import run as running
from jrl.run.run import train
from jrl.storage.metrics import CLOCKS, read_jsonl
from jrl.train.build import setup
from jrl.train.curriculum import CurrentPrompts, HardRounds, WrittenRounds
from jrl.train.programs import check_trainable
from jrl.train.sources import Groups, entries, simple_request
from jrl.types import Prompt, StopReason

PROMPTS = [Prompt(10 + i, f"q{i}", np.array([3], np.int32), "") for i in range(7)]
RULE = HardProblems(steps=4, attempts=4, most=0.25, above=0.5)


class World:
    """Problem i is solved by ``skill[i]`` of four attempts; what is drawn says of which."""

    def __init__(self, skill):
        self.skill, self.tested, self.dead = skill, [], ()

    def draw(self, request):
        _, rows = entries(request)
        self.tested.append((int(request.step), list(rows)))
        right = np.arange(4) < np.array([self.skill[i] for i in rows])[:, None]
        stop = np.full(right.shape, StopReason.STOP_TOKEN)
        for i, row in enumerate(rows):
            stop[i, list(self.dead) if row == 2 else []] = StopReason.ABORTED
        rollout = SimpleNamespace(stop=stop, baseline=np.zeros(right.shape, bool))
        points = np.stack([np.ones_like(right), right], axis=2).astype(np.float32)
        return Groups(rollout, points, None, {}, {})

    def rounds(self, notes=None):
        judged = lambda rewards: rewards[:, :, 1]  # noqa: E731
        current = CurrentPrompts(PROMPTS)
        source = SimpleNamespace(order=lambda tickets: tickets, notes=dict)
        return HardRounds(RULE, current, source, self, judged, at_once=3, notes=notes)


def asked(step, **weights):
    return simple_request(jax.random.key(0), weights, np.int32(step), np.zeros(1, np.int32))


def step_of(rounds, step):
    """The problems that a step finds."""

    def draw(request):
        assert request.newer == "passed through"
        return Groups(None, None, [p.id for p in rounds.current], {"other": 1.0}, {})

    rounds.source.draw = draw
    found = rounds.draw(asked(step).replace(newer="passed through"))
    assert found.counts == {"other": 1.0, "hard_problems": float(len(found.subject))}
    return found.subject


def test_problems_that_are_mostly_failed_are_drawn_until_the_next_round():
    world = World([0, 1, 2, 4, 0, 1, 3])
    rounds = world.rounds()
    assert rounds.notes() == {}
    assert step_of(rounds, 0) == [10, 11, 14, 15]  # up to a quarter is right
    assert world.tested == [(0, [0, 1, 2]), (0, [3, 4, 5]), (0, [6])]
    world.skill = [2, 0, 0, 0, 0, 4, 0]
    assert step_of(rounds, 3) == [10, 11, 14, 15]
    assert len(world.tested) == 3
    # What was left out is not tested again, though it would be failed now.
    assert step_of(rounds, 4) == [11, 14]
    assert world.tested[3:] == [(4, [0, 1, 4]), (4, [5])]
    world.skill = [4] * 7
    assert step_of(rounds, 8) == [11, 14]  # where nothing is hard the round has what there is


def test_a_resumed_run_has_the_problems_of_its_round():
    world = World([0, 1, 2, 4, 0, 1, 3])
    rounds = world.rounds()
    step_of(rounds, 5)
    (note,) = rounds.notes().values()
    assert (note["round"], note["rows"].tolist()) == (1, [0, 1, 4, 5])
    world.tested.clear()
    again = world.rounds(note)
    assert step_of(again, 6) == [10, 11, 14, 15]
    assert not world.tested
    assert step_of(again, 8) == [10, 11, 14, 15]
    assert world.tested == [(8, [0, 1, 4]), (8, [5])]


def test_a_problem_of_which_nothing_is_known_stays():
    world = World([4, 4, 4, 4, 4, 4, 0])
    world.dead = (0, 1, 2, 3)
    assert step_of(world.rounds(), 0) == [12, 16]
    world.dead = (0, 1)
    world.skill[2] = 2  # both that are known are wrong
    assert step_of(world.rounds(), 0) == [12, 16]


# ---------------------------------------------------------------- problems that are written


class Village:
    """Problems are failed by name, writers write by rule, and chances are in the text."""

    def __init__(self, write=None):
        self.lost, self.asked = {"q1", "q3"}, []
        self._write = write or (lambda failed, count, seed: [f"{f}+0.5" for f in failed])

    def write(self, failed, count, seed):
        self.asked.append((list(failed), count, seed))
        return self._write(failed, count, seed)

    def make(self, row):
        text = row["question"] if isinstance(row, dict) else row
        return None if "unusable" in text else Prompt(0, text, np.array([3], np.int32), "")

    def chances(self, params, prompts, seeds):
        assert params["value"] == "value"
        assert len(set(seeds)) == len(prompts)
        return np.array([float(p.text.rpartition("+")[2]) for p in prompts])

    def rounds(self, notes=None):
        rule, weights = WrittenProblems(3, 5, 0.05, 0.75), np.array([0.0, 2.0])
        given = (self.write, self.make, self.chances, weights)
        self.prompts = CurrentPrompts(PROMPTS[:4])
        source = SimpleNamespace(order=lambda tickets: tickets, notes=dict)
        return WrittenRounds(rule, self.prompts, source, *given, notes=notes)

    def step(self, rounds, number):
        """The texts of the problems of a step, each of which is drawn."""

        def draw(request):
            assert request.weights["policy"] == "policy"
            subject = list(self.prompts)
            right = np.array([[p.text not in self.lost, False] for p in subject])
            rollout = SimpleNamespace(stop=np.ones(right.shape), baseline=np.zeros_like(right))
            points = np.stack([np.ones_like(right), right], axis=2).astype(np.float32)
            return Groups(rollout, points, subject, {}, {})

        rounds.source.draw = draw
        found = rounds.draw(asked(number, policy="policy", value="value"))
        assert found.counts == {"written_problems": len(self.prompts) - 4.0}
        return [p.text for p in found.subject]


DATA = ["q0", "q1", "q2", "q3"]


def test_problems_like_the_failed_ones_join_those_of_the_data():
    village = Village()
    rounds = village.rounds()
    assert village.step(rounds, 0) == village.step(rounds, 2) == DATA
    assert not village.asked
    village.lost = {"q1"}  # nobody asks about the last phase any more
    assert village.step(rounds, 3) == [*DATA, "q1+0.5", "q3+0.5"]
    ((failed, count, seed),) = village.asked
    assert (failed, count) == (["q1", "q3"], 5)
    assert [p.id for p in village.prompts] == [10, 11, 12, 13, 14, 15]
    village.lost = {"q3+0.5"}
    village.step(rounds, 5)
    assert village.step(rounds, 6) == [*DATA, "q1+0.5", "q3+0.5", "q3+0.5+0.5"]
    assert village.asked[1][0] == ["q3+0.5"]
    assert village.asked[1][2] != seed
    village.lost = set()
    village.step(rounds, 6)
    village.step(rounds, 9)  # nothing was failed
    assert len(village.asked) == 2


def test_what_is_hopeless_easy_unusable_or_there_already_is_left_out():
    rows = ["a+0.04", "b+0.05", "c+0.75", "d+0.76", "e+nan", "unusable+0.5", "q2", "b+0.05"]
    village = Village(lambda *asked: [*rows, {"question": "f+0.3", "answer": "1"}])
    rounds = village.rounds()
    village.step(rounds, 0)
    assert village.step(rounds, 3) == [*DATA, "b+0.05", "c+0.75", "f+0.3"]
    assert [p.id for p in village.prompts][4:] == [14, 15, 16]


def test_a_resumed_run_has_what_was_written_and_what_was_failed():
    village = Village()
    rounds = village.rounds()
    village.step(rounds, 0)
    village.step(rounds, 3)
    (note,) = json.loads(json.dumps(rounds.notes())).values()
    again = Village()
    resumed = again.rounds(note)
    assert again.step(resumed, 4) == [*DATA, "q1+0.5", "q3+0.5"]
    assert not again.asked
    assert village.step(rounds, 6) == again.step(resumed, 6)
    assert village.asked[1] == again.asked[0]
    assert [p.id for p in village.prompts] == [p.id for p in again.prompts]


def test_a_writer_that_fails_ends_nothing(caplog):
    def fails(*asked):
        raise EnvError("no server")

    village = Village(fails)
    rounds = village.rounds()
    village.step(rounds, 0)
    assert village.step(rounds, 3) == DATA
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


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("data.task=chain",), "needs data.train: those of a procedural task are never"),
        (
            ("data.env=guess_number",),
            "needs data.train: those of a procedural task are never",
        ),
    ],
)
def test_runs_whose_problems_cannot_be_chosen_are_refused(more, said):
    small = "model.config={layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}"
    rounds = ("method=deepsearch", "objective.round_steps=3", "tree.kind=none", "run.dir=unused")
    with pytest.raises(UserError, match=said):
        check_trainable(setup(load_config(None, [small, *more, *rounds])))


def test_text_without_a_search_has_no_rounds(tmp_path, letters_model):
    rounds = "objective.round_steps=3"
    config = settings(tmp_path, letters_model, "run", rounds, "tree={kind='none'}")
    with pytest.raises(
        UserError,
        match="needs a search: .*; set tree.kind to 'search', or set objective.round_steps to 0",
    ):
        check_trainable(setup(config))


def test_coefficients_reach_the_rules():
    method = get_method("deepsearch", round_steps=7, hard=0.4, attempts=5, above=0.1, each=3)
    assert method.curriculum == HardProblems(7, 5, 0.4, 0.1)
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
