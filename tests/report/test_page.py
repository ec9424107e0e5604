"""The report of synthetic runs: finished, unfinished, empty, and hostile."""

import html.parser
import json
import re

import pytest

from jrl.config import load_config
from jrl.errors import UserError
from jrl.report.page import MAX_POINTS, find_curves, smooth, write_report
from jrl.report.samples import MAX_SAMPLES
from jrl.storage.metrics import RunWriter

PNG = b"\x89PNG\r\n\x1a\n"
HOSTILE = "</script><script>document.title='x'</script><!-- <b>é & \u2028"


def make_run(directory, steps, summary=None):
    writer = RunWriter(load_config(None, [f'run.dir="{directory}"', "seed=5"]))
    for step in range(1, steps + 1):
        metrics = {
            "loss": -0.1 * step,
            "reward": step / 100,
            "kl": None,
            "grad_norm": 1.0,
            "extra": 2,
        }
        if step % 10 == 0:
            metrics |= {f"eval/accuracy{end}": step / 100 for end in ("", "_low", "_high")}
        writer.write(step, metrics)
        writer.write_samples(
            step,
            [{"prompt": HOSTILE, "completion": "c", "rewards": {"math": 1.0}, "reward": 1.0}],
        )
    if summary is not None:
        writer.write_summary(summary)
    writer.close()


class Elements(html.parser.HTMLParser):
    """The data in the page, and everything that could load something from elsewhere."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.loads, self.data, self._inside = [], [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href", "srcset")]
        self._inside = ("id", "data") in attrs

    def handle_data(self, data):
        if self._inside:
            self.data += data

    def handle_endtag(self, tag):
        self._inside = False


def read_page(path):
    text = path.read_text(encoding="utf-8")
    page = Elements(text)
    assert page.loads == []
    assert not re.search(r"url\(|@import|fetch\(|https?://(?!www\.w3\.org/2000/svg)", text)
    assert page.tags.count("script") == 2
    return json.loads(page.data)


def test_a_finished_run(tmp_path, pictures):
    summary = {
        "accuracy_before": 0.1,
        "accuracy_after": 0.9,
        "steps": 60,
        "eval_before": {"accuracy": 0.1, "accuracy_low": 0.05, "accuracy_high": 0.2},
        "eval_after": {"accuracy": 0.9, "accuracy_low": 0.8, "accuracy_high": 0.95},
    }
    make_run(tmp_path, 60, summary)
    path = write_report(tmp_path)
    assert path == tmp_path / "report" / "index.html"
    data = read_page(path)
    assert data["finished"]
    assert data["summary"] == {"accuracy_before": 0.1, "accuracy_after": 0.9, "steps": 60}
    assert data["header"]["seed"] == 5
    assert "seed = 5" in data["config"]
    curves = {curve["name"]: curve for curve in data["curves"]}
    assert [curve["name"] for curve in data["curves"][: data["main"]]] == [
        "reward",
        "eval/accuracy",
        "grad_norm",
        "loss",
    ]
    assert curves["loss"]["steps"] == list(range(1, 61))
    assert curves["eval/accuracy"]["steps"] == [0, 10, 20, 30, 40, 50, 60]
    assert curves["eval/accuracy"]["values"][-1] == 0.9  # the last evaluation replaces the step's
    assert curves["eval/accuracy"]["low"][0] == 0.05
    assert curves["extra"]["values"] == [2.0] * 60
    health = {finding["name"]: (finding["note"], finding["level"]) for finding in data["health"]}
    assert health == {
        "reward": ("rises", "good"),
        "eval/accuracy": ("better than at the start", "good"),
    }
    assert "kl" not in curves
    assert len(data["samples"]) == data["samples_total"] == 60
    assert data["samples"][0]["prompt"] == HOSTILE
    plots = {p.name: p.read_bytes() for p in (tmp_path / "report").glob("*.png")}
    assert plots.keys() == {
        "reward.png",
        "accuracy.png",
        "loss.png",
        "grad_norm.png",
        "overview.png",
    }
    assert all(image.startswith(PNG) and len(image) > 5000 for image in plots.values())


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_unfinished_run(tmp_path, steps):
    make_run(tmp_path, steps)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "lo')
    data = read_page(write_report(tmp_path))
    assert not data["finished"]
    assert data["main"] == (3 if steps else 0)
    assert data["summary"] == (
        {"step": steps, "reward": steps / 100, "grad_norm": 1.0, "loss": -0.1 * steps}
        if steps
        else {}
    )


def test_a_new_report_replaces_the_old_one(tmp_path):
    make_run(tmp_path, 3)
    write_report(tmp_path)
    stale = tmp_path / "report" / "kl.png"
    stale.write_bytes(b"old")
    write_report(tmp_path)
    assert not stale.exists()


def test_long_runs_are_thinned_evenly(tmp_path):
    records = [{"step": i, "loss": 1.0} for i in range(4 * MAX_POINTS)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (tmp_path / "samples.jsonl").write_text(
        "".join(json.dumps({"step": i, "prompt": "p"}) + "\n" for i in range(MAX_SAMPLES + 500))
    )
    data = read_page(write_report(tmp_path))
    (curve,) = data["curves"]
    assert len(curve["steps"]) == len(curve["values"]) == MAX_POINTS
    assert (curve["steps"][0], curve["steps"][-1]) == (0, 4 * MAX_POINTS - 1)
    assert len(data["samples"]) == MAX_SAMPLES
    assert data["samples_total"] == MAX_SAMPLES + 500


def test_curves_leave_out_what_is_no_number_and_merge_records_of_one_step():
    records = [
        {"step": 2, "a": 1.0, "text": "x", "flag": True},
        {"step": 1, "a": None, "b": 3},
        {"step": 2, "b": 4},
        {"a": 7.0},
    ]
    main, others = find_curves(records)
    assert main == []
    assert [(c.name, c.steps, c.values) for c in others] == [
        ("a", [2], [1.0]),
        ("b", [1, 2], [3.0, 4.0]),
    ]


def test_health_comes_first_and_what_only_rounds_is_folded():
    step = {"tokens_per_second": 9.0, "loss": 1e-9, "logprob_diff": 2e-7, "entropy": 1.5}
    step |= {"reward/mine.py:f": 0.5, "reward/math": 1.0, "reward": 1.5, "truncated": 0.0}
    main, others = find_curves([step | {"step": i, "zero_std_groups": 0.0} for i in range(3)])
    names = ["reward", "reward/math", "reward/mine.py:f", "zero_std_groups", "entropy"]
    assert [curve.name for curve in main] == [*names, "tokens_per_second"]
    assert [curve.name for curve in others] == ["truncated", "logprob_diff", "loss"]
    assert all("only rounding noise" in curve.title for curve in others)
    step |= {"logprob_diff": 1e-3}
    main, others = find_curves([step | {"step": i} for i in range(3)])
    assert "logprob_diff" in [curve.name for curve in main]


def test_smooth_keeps_the_mean_of_the_middle_and_damps_noise():
    noise = [(-1.0) ** i for i in range(200)]
    assert max(map(abs, smooth(noise))) < 0.2
    ramp = [float(i) for i in range(200)]
    assert smooth(ramp)[100] == pytest.approx(100.0)
    assert smooth([1.0, 5.0]) == [1.0, 5.0]


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(UserError, match="not a run directory: it has no metrics.jsonl"):
        write_report(tmp_path / "none")
    make_run(tmp_path / "run", 1)
    (tmp_path / "run" / "report").write_text("a file")
    with pytest.raises(UserError, match="the report cannot be written"):
        write_report(tmp_path / "run")
