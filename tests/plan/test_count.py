"""Plans by counting: within seconds, and near the compiled plans of the shipped pod files."""

import json
import re
from pathlib import Path

import pytest
from tpu_programs import needs_libtpu
from typer.testing import CliRunner

from jrl.cli.app import app
from jrl.config import build_config, load_config
from jrl.errors import UserError
from jrl.plan import as_text, make_plan, parse_topology, text
from jrl.plan import compile as plan
from jrl.plan.records import Program

CONFIGS = Path(__file__).parents[2] / "configs"
COMPILED = json.loads((CONFIGS.parent / "benchmarks/pods.json").read_text())
PODS = sorted(path.stem for path in CONFIGS.glob("pod_*.toml"))


def pod(name, *overrides):
    config = load_config(CONFIGS / f"{name}.toml", overrides)
    return config, parse_topology(config.plan.topology)


@needs_libtpu
@pytest.mark.parametrize("name", PODS)
def test_every_pod_file_names_a_slice_that_it_fits_and_is_counted_near_its_plan(name, monkeypatch):
    monkeypatch.setattr(plan, "_compiled", None)  # nothing is compiled
    counted, compiled = make_plan(*pod(name), "counting"), COMPILED[name]
    assert counted.fits
    for program, figures in counted.programs.items():
        parts = compiled[program]["bytes_by_part"]
        for part in ("weights", "optimizer", "prepared", "cache"):
            if part in parts:
                assert figures.bytes_per_chip[part] == pytest.approx(parts[part], rel=0.02)
    # Experts' dispatch and long attention take the longest beyond what is counted.
    for program, least, most in (("sampler", 0.58, 1.05), ("train_step", 0.4, 1.05)):
        ratio = counted.programs[program].roofline_seconds / compiled[program]["roofline_seconds"]
        assert least < ratio < most, (program, ratio)
    text = as_text(counted)
    assert "verdict: fits by this estimate" in text
    assert "counted, not compiled" in text


@needs_libtpu
def test_a_mesh_for_another_slice_names_the_option():
    config, _ = pod("pod_8b_v6e")
    line = r"fsdp 64.*64 chips.*v5e:4x4 has 16.*--topology "
    with pytest.raises(UserError, match=f"{line}v6e:8x8"):
        make_plan(config, parse_topology("v5e:4x4"), "counting")
    unnamed, _ = pod("pod_8b_v6e", "plan.topology=v5e:4x4")
    with pytest.raises(UserError, match=f"{line}v5e:8x8"):
        make_plan(unnamed, parse_topology("v5e:4x4"), "counting")


@needs_libtpu
def test_judges_and_reward_models_stay_on_every_chip(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "_compiled", None)
    sizes = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "head_dim": 64}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 256, "vocab_size": 512}
    sizes |= {"max_position_embeddings": 4096, "model_type": "qwen3"}
    for name, head in (("judge", "CausalLM"), ("reward", "SequenceClassification")):
        (tmp_path / name).mkdir()
        raw = sizes | {"architectures": [f"Qwen3For{head}"], "id2label": {"0": "good"}}
        (tmp_path / name / "config.json").write_text(json.dumps(raw))
    parts = {"model": {"function": "model", "path": str(tmp_path / "reward")}}
    parts["good"] = {"function": "judge", "model": str(tmp_path / "judge"), "at_once": 6}
    model = dict.fromkeys(("layers", "heads", "kv_heads"), 1)
    model |= {"embed_dim": 128, "head_dim": 128, "mlp_dim": 256, "vocab_size": 512}
    tables = {"method": "reinforce", "mesh": {"fsdp": 4}, "train": {"prompts": 4}}
    tables |= {"model": {"config": model | {"max_length": 256}, "dtype": "bfloat16"}}
    tables |= {"data": {"max_prompt_tokens": 16}, "sampling": {"max_new_tokens": 16}}
    topology = parse_topology("v5e:2x2")
    without = make_plan(build_config(tables), topology, "counting")
    counted = make_plan(
        build_config(tables | {"rewards": {"math": {}, **parts}}), topology, "counting"
    )
    sizes_by_program = [
        counted.programs[name].bytes_per_chip for name in ("sampler", "train_step", "judge")
    ]
    for part in ("judges", "reward_models"):
        (size,) = {each[part] for each in sizes_by_program}
        assert size > 0
    # 6 replies on 4 chips; keys and values of 2 layers, 2 heads of 64, 16 bits
    assert sizes_by_program[2]["working"] == 2 * (2048 + 512) * 2 * 2 * 2 * 64 * 2
    for name, each in zip(("sampler", "train_step"), sizes_by_program, strict=False):
        more = each["total"] - without.programs[name].bytes_per_chip["total"]
        assert more == each["judges"] + each["reward_models"]
    assert "judge" not in without.programs
    assert counted.step_seconds == without.step_seconds
    assert "while judges and likelihoods are asked: " in as_text(counted)
    monkeypatch.setattr(plan, "judge_working_bytes", lambda run: 1e11)
    small = make_plan(
        build_config(tables | {"rewards": {"math": {}, **parts}}), topology, "counting"
    )
    assert not small.programs["judge"].fits
    assert any("lower at_once" in line for line in small.remedies)


@needs_libtpu
def test_parts_that_are_sampled_in_turn_further_groups_and_likelihoods_are_counted(monkeypatch):
    monkeypatch.setattr(plan, "_compiled", None)
    model = dict.fromkeys(("layers", "heads", "kv_heads"), 1)
    model |= {"embed_dim": 128, "head_dim": 128, "mlp_dim": 256, "vocab_size": 512}
    tables = {"method": "grpo", "mesh": {"fsdp": 4}, "train": {"prompts": 8}}
    tables |= {"model": {"config": model | {"max_length": 256}, "dtype": "bfloat16"}}
    tables |= {"data": {"train": "a.jsonl", "max_prompt_tokens": 16}}
    tables |= {"sampling": {"max_new_tokens": 16, "group": 2}, "rewards": {"math": {}}}

    def counted(**more):
        return make_plan(
            build_config(tables | more), parse_topology("v5e:2x2"), "counting"
        ).programs

    plain = counted()
    cache = plain["sampler"].bytes_per_chip["cache"]
    parts = counted(sampling=tables["sampling"] | {"draws": 2})
    assert parts["sampler"].bytes_per_chip["cache"] == cache / 2
    assert parts["sampler"].roofline_seconds > plain["sampler"].roofline_seconds
    assert parts["sampler"].model_flops == plain["sampler"].model_flops
    spark = counted(method="spark", objective={"question_tokens": 16})
    for name in ("sampler", "train_step"):  # twice the groups, and a reference
        assert spark[name].model_flops > 1.9 * plain[name].model_flops
        assert spark[name].roofline_seconds > 1.9 * plain[name].roofline_seconds
    # the questions' prompts are twice as wide, and completions as long as before
    assert spark["sampler"].bytes_per_chip["cache"] == cache * (32 + 2 * 16) / (16 + 2 * 16)
    likely = {"math": {}, "p": {"function": "likelihood", "rows": 8, "max_answer_tokens": 4}}
    scored = counted(rewards=likely)["judge"]
    assert scored.bytes_per_chip["working"] == 2 * (16 + 16 + 4) * 128 * 2 + 4 * 512 * 4
    assert "judge" not in plain


def test_the_time_of_compiling_follows_from_that_of_lowering():
    assert plan.compile_estimate("train_step", 4.0, 0.0) == "about 7 min"
    assert plan.compile_estimate("resharding", 0.1, -1.0) == "about 10 s"


def test_the_text_says_how_far_counted_plans_are_off_as_the_page_does():
    """The page's columns are times of the sampler and of training, and training's temporaries."""
    page = (CONFIGS / "README.md").read_text()
    rows = re.findall(r"^\| `pod_[\w.]+\.toml` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.M)
    assert len(rows) == len(PODS)
    _, times, temporaries = ((min(column), max(column)) for column in zip(*rows, strict=True))
    expected = "{} to {} and {} to {} times as compiled".format(*temporaries, *times)
    figures = Program({"total": 1.0}, True, *[None] * 5, 0.0, counted=True)
    assert expected in "\n".join(text._program("train", figures, parse_topology("v5e:4x4"), 1.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--search --quick", "--quick has no effect with --search; remove one of them"),
        ("--few-layers --search", "--few-layers has no effect with --search"),
        ("--few-layers --quick", "--few-layers has no effect with --quick"),
        ("--effort=-1 --quick", "--effort has no effect with --quick"),
        ("--quick --candidates 3", "--candidates limits a search; add --search, or remove"),
        ("--seconds 3", "--seconds limits a search; add --search, or remove --seconds"),
    ],
)
def test_options_that_would_not_be_read_are_refused(options, message, monkeypatch):
    for name in ("make.make_plan", "search.search"):
        monkeypatch.setattr(f"jrl.plan.{name}", None)  # not reached
    done = CliRunner().invoke(app, ["plan", str(CONFIGS / "tiny.toml"), *options.split()])
    assert done.exit_code == 2
    assert message in done.output


@needs_libtpu
def test_the_command_counts_for_the_slice_of_the_file(monkeypatch):
    monkeypatch.setattr(plan, "_compiled", None)
    done = CliRunner().invoke(app, ["plan", str(CONFIGS / "pod_1.7b_v5e.toml"), "--quick"])
    assert done.exit_code == 0, done.output
    assert "on v5e:4x4, 16 chips" in done.output
    assert "verdict: fits by this estimate" in done.output


@needs_libtpu
def test_a_run_whose_weights_change_in_flight_is_planned_in_two_halves(monkeypatch):
    monkeypatch.setattr(plan, "_compiled", None)
    sizes = {"vocab_size": 512, "embed_dim": 64, "layers": 2, "heads": 2, "kv_heads": 2}
    config = build_config(
        {
            "data": {"train": "episodes:8", "env": "own.py:env"},
            "model": {"config": sizes | {"head_dim": 32, "mlp_dim": 128, "max_length": 2048}},
            "mesh": {"data": 4},
            "sampling": {"mesh": {"data": 4}},
            "placement": {"staleness": 1},
            "train": {"mode": "in_flight"},
        }
    )
    counted = make_plan(config, parse_topology("v5e:2x4"), "counting")
    assert {"sampler", "train_step"} <= set(counted.programs)
