"""The gallery: its pictures are those that its page shows, its pairs those that its script writes.

``test_docs_commands`` runs its commands, each for a step.
"""

import importlib.util
import json
import pathlib
import re
import xml.etree.ElementTree as ElementTree

import pytest

from jrl.config import load_config

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gallery.md"
CONFIGS = ROOT / "configs" / "gallery"


def script(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def gallery():
    return script(ROOT / ".ci" / "gallery.py")


def test_every_entry_has_command_time_curve_and_result(gallery):
    entries = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    pictures = [re.search(r"\]\(gallery/(\w+)\.svg\)", entry) for entry in entries]
    names = [picture[1] for picture in pictures if picture]
    assert names == list(gallery.PICTURES)
    assert {path.stem for path in (ROOT / "docs" / "gallery").glob("*.svg")} == set(names)
    for entry in entries[: len(names)]:
        assert re.search(r"^    jrl (train|compare) configs/", entry, flags=re.MULTILINE), entry[
            :40
        ]
        assert re.search(r"\d+ s of CPU", entry), entry[:40]
        assert "| before | after |" in entry or "| before |" in entry


def test_pictures_are_small():
    for path in (ROOT / "docs" / "gallery").iterdir():
        assert path.stat().st_size < 80_000, path.name
        assert ElementTree.parse(path).getroot().tag.endswith("svg")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_configurations_of_the_gallery_load_and_are_on_the_page(path):
    assert load_config(path).seed == 0
    assert f"configs/gallery/{path.name}" in PAGE.read_text()


def test_the_pairs_are_those_that_the_script_writes(tmp_path, monkeypatch):
    writer = script(CONFIGS / "write_pairs.py")
    monkeypatch.setattr(writer, "HERE", tmp_path)
    writer.main()
    prompts = set()
    for name, count in writer.COUNTS.items():
        assert (tmp_path / name).read_text() == (CONFIGS / name).read_text()
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert len(rows) == count
        for row in rows:
            digits = row["prompt"].rstrip(">")
            assert row["chosen"] == "".join(sorted(digits)) != row["rejected"]
            assert len(row["rejected"]) in (len(digits), len(digits) - 1)
        prompts |= {row["prompt"] for row in rows}
    assert len(prompts) == sum(writer.COUNTS.values())  # the held-out ones are new


def run_of(folder, *, steps, before, after):
    """A finished run's files, as ``jrl train`` writes them."""
    folder.mkdir()
    rows = [{"version": 1}, *({"step": i, "loss": 0.0, "reward": i / steps} for i in range(1, 3))]
    rows += [{"step": steps, "loss": 0.0, "reward": 1.0, "eval/accuracy": 0.75}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {
        "steps": steps,
        "eval_before": {"accuracy": before},
        "eval_after": {"accuracy": after},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    sample = {"prompt": "21>", "member": 0, "split": "eval"}
    samples = [
        sample | {"step": 0, "completion": "21", "reward": 0.0},
        sample | {"step": steps, "completion": "12", "reward": 1.0},
        {"step": steps, "prompt": "9>", "member": 0, "completion": "9", "reward": 1.0},
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    return folder


@pytest.mark.extra("plot")
def test_curves_and_samples_are_those_of_the_run(gallery, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gallery, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    run = run_of(tmp_path / "run", steps=5, before=0.25, after=0.75)
    assert gallery.series(run, "eval/accuracy") == ([0, 5], [0.25, 0.75])
    assert gallery.series(run, "reward") == ([1, 2, 5], [0.2, 0.4, 1.0])
    assert gallery.smooth([0.0, 1.0, 2.0]).tolist() == [0.0, 0.5, 1.0]
    gallery.main(["digits", str(run)])
    svg = (tmp_path / "docs" / "gallery" / "digits.svg").read_text()
    assert "held-out accuracy" in svg
    assert "| `21>` | `21` (0) | `12` (1) |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="usage"):
        gallery.main(["nothing", str(run)])
