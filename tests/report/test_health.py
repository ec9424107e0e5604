"""Health remarks of a page: on curves with a trend, and none on noise."""

import math
import random

import pytest

from jrl.report.health import NOTES, findings
from jrl.report.page import PANELS, Curve

STEPS = list(range(1, 201))


def curve(name, values, low=(), high=()):
    return Curve(name, name, STEPS[: len(values)], list(values), list(low), list(high))


def noisy(start, end, spread=0.05, seed=0):
    rng = random.Random(seed)
    return [start + (end - start) * i / 199 + rng.gauss(0, spread) for i in range(200)]


def remarks(*curves, quiet=frozenset()):
    return {f.name: (f.note, f.level) for f in findings(curves, quiet)}


def test_a_reward_rises_falls_or_is_noise():
    assert remarks(curve("reward", noisy(0.2, 0.9)))["reward"] == ("rises", "good")
    note, level = remarks(curve("reward", noisy(0.9, 0.2)))["reward"]
    assert note.startswith("falls")
    assert level == "look"
    for seed in range(20):
        assert remarks(curve("reward", noisy(0.5, 0.5, seed=seed)))["reward"] == ("", "")
    assert remarks(curve("reward/math", noisy(0.2, 0.9)))["reward/math"] == ("rises", "good")
    few = curve("reward", [0.1, 0.9, 0.5])
    assert findings([few])[0][2:] == (0.1, 0.5, "", "")  # too few to say anything


def test_accuracy_is_judged_by_its_own_intervals():
    def accuracy(last):
        values = [0.3, 0.5, last]
        return curve("eval/accuracy", values, [v - 0.1 for v in values], [v + 0.1 for v in values])

    assert remarks(accuracy(0.8))["eval/accuracy"] == ("better than at the start", "good")
    assert remarks(accuracy(0.4))["eval/accuracy"] == ("no clear change", "")
    assert remarks(accuracy(0.05))["eval/accuracy"] == ("fell below its start", "look")


@pytest.mark.parametrize(
    ("name", "sound", "faulty", "words"),
    [
        ("zero_std_groups", 0.3, 0.8, "most groups give no gradient"),
        ("truncated", 0.02, 0.4, "raise sampling.max_new_tokens"),
        ("clip_fraction_high", 0.05, 0.5, "lower optimizer.learning_rate"),
        ("clip_fraction_low", 0.05, 0.5, "lower optimizer.learning_rate"),
        ("logprob_diff", 0.001, 0.1, "sampler and trainer disagree"),
        ("skipped_updates", 0.0, 1.0, "not finite"),
        ("reward_failures", 0.0, 0.2, "fail"),
    ],
)
def test_limits(name, sound, faulty, words):
    assert remarks(curve(name, [sound] * 50))[name] == ("", "")
    note, level = remarks(curve(name, [sound] * 25 + [faulty] * 25))[name]
    assert words in note
    assert level == "look"


def test_no_key_is_named_where_a_task_sets_the_length():
    truncated = [curve("truncated", [0.4] * 50)]
    (finding,) = findings(truncated, fixed_length=True)
    assert (finding.note, finding.level) == (
        "many are truncated: they do not stop after the answer",
        "look",
    )
    (finding,) = findings([curve("truncated", [0.02] * 50)], fixed_length=True)
    assert finding.note == ""


def test_entropy_that_goes_and_lengths_that_double():
    falling = curve("entropy", [2 * math.exp(-i / 20) for i in range(200)])
    assert "nearly 0" in remarks(falling)["entropy"][0]
    assert "doubled" in remarks(curve("entropy", noisy(1, 3)))["entropy"][0]
    assert remarks(curve("length", noisy(100, 300, 5)))["length"][0] == "doubled"
    assert remarks(curve("length", noisy(300, 50, 5)))["length"][0] == "halved"
    # where nearly everything is solved, both are as they should be
    solved = curve("eval/accuracy", [0.3, 0.97], [0.2, 0.95], [0.4, 0.99])
    notes = remarks(solved, falling, curve("zero_std_groups", [0.9] * 50))
    assert notes["entropy"][1] == notes["zero_std_groups"][1] == ""


def test_what_only_rounds_says_so_in_its_note():
    rounds = curve("logprob_diff", [1e-7] * 50)._replace(title="Difference: only rounding noise")
    (finding,) = findings([rounds], frozenset({"logprob_diff"}))
    assert (finding.title, finding.note, finding.level) == ("Difference", "only rounding noise", "")


def test_every_note_is_about_a_metric_that_runs_have():
    names = {panel.name for panel in PANELS} | {"skipped_updates", "reward_failures"}
    assert set(NOTES) <= names
    assert findings([curve("somebody_s_own", [1.0])]) == []
