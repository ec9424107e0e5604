"""The benchmark programs run, and what they count is right."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    episodes,
    flags,
    floor,
    host_episodes,
    rewards,
    rollout,
    runs,
    sampler_drift,
    step,
    tpu,
    weak_scaling,
    work,
)
from benchmarks.clock import processor_seconds
from benchmarks.peers import __main__ as peers
from benchmarks.peers import frozenlake
from benchmarks.peers.record import Record
from jrl.config import load_config
from jrl.episodes import get_env
from jrl.episodes.transcript import Segment, Transcript
from jrl.errors import UserError
from jrl.models.config import ModelConfig
from jrl.types import Prompt, Rollout, StopReason
from jrl.zoo.envs.games.gridworld import Grid

TINY = [
    *("--layers", "1", "--dim", "16", "--heads", "2", "--kv-heads", "1", "--head-dim", "8"),
    *("--ffn", "16", "--vocab", "32", "--batch", "2", "--group", "2", "--prompt-len", "8"),
    *("--gen-len", "4", "--steps", "3", "--gemm", "32"),
]


FIGURES = {
    *("step_s", "rollout_s", "prefill_s", "decode_s", "reference_s", "train_s", "rollout_tok_s"),
    *("slot_use", "first_step_s", "compiles", "late_compiles", "max_rss_mb"),
}


@pytest.mark.slow
def test_episodes_print_every_figure(capsys):
    episodes.main([*TINY, "--turns", "3"])
    figures = json.loads(capsys.readouterr().out)
    assert 1 <= figures["turns"] <= 3
    tokens = 4 * figures["turns"]
    assert figures["env_steps_s"] == pytest.approx(tokens / figures["step_s"], rel=2e-3)
    assert figures["first_step_s"] > figures["step_s"] > 0


@pytest.mark.slow
def test_rewards_are_timed_with_hostile_samples_and_without(capsys):
    sizes = ["--items", "2", "--rounds", "1", "--timeout", "1", "--latency", "0.01"]
    rewards.main(["--stages", "function", "judge", *sizes])
    figures = json.loads(capsys.readouterr().out)
    for how in ("at_once", "over_generation"):
        function, judge = (figures[stage][how] for stage in ("function", "judge"))
        assert function["counts"]["reward_timeouts"] == 1  # the first kind sleeps
        assert judge["counts"]["judge_timeouts"] + judge["counts"]["judge_retries"]
        for clock in ("wall_s", "processor_s"):
            for times in (function[clock], judge[clock]):
                ratio = times["hostile"] / times["clean"]
                assert times["ratio"] == pytest.approx(ratio, rel=5e-3)
    seconds = figures["function"]["generation_s"]
    assert figures["function"]["over_generation"]["wall_s"]["clean"] >= seconds * 0.99


@pytest.mark.slow
def test_host_episodes_print_both_loops(capsys):
    sizes = ["--slots", "2", "--turns", "3", "--turn-tokens", "3", "--answer-tokens", "2"]
    host_episodes.main([*TINY, *sizes, "--gen-len", "40", "--rounds", "1"])
    figures = json.loads(capsys.readouterr().out)
    for loop in ("free", "lockstep"):
        assert 0 < figures[loop]["live_with_waits"] <= figures[loop]["live_slot_steps"] <= 1
    (only,) = figures["rounds"]
    assert only["equal_first_turns"] == 1
    assert only["free"]["tokens"] == only["lockstep"]["tokens"]
    once, pasts = only["tokens_once"], only["tokens_of_histories"]
    assert 0 < only["read_tokens"] - only["reread_tokens"] <= once
    assert once < pasts
    assert figures["speedup"] == pytest.approx(
        only["free"]["tokens_s"] / only["lockstep"]["tokens_s"], rel=1e-2
    )


def test_histories_count_every_token_once_and_every_past():
    def segment(tokens, sampled):
        return Segment(np.zeros(tokens, np.int32), sampled)

    parts = segment(3, True), segment(2, False), segment(4, True)
    opening = np.zeros(5, np.int32)
    row = Transcript(Prompt(0, "", opening, None), 0, opening, parts, StopReason.TURNS)
    assert host_episodes.histories([row, row]) == (2 * 7, 2 * (5 + 10))


@pytest.mark.slow
def test_step_prints_every_figure(capsys, tmp_path):
    path = tmp_path / "out.json"
    step.main([*TINY, "--eos", "never", "--json", str(path)])
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads(path.read_text())
    assert set(result) >= FIGURES
    assert result["tokens"] == 2 * 2 * 4
    assert result["slot_use"] == 1
    assert result["late_compiles"] == 0
    assert result["step_s"] > result["rollout_s"] > 0
    assert set(result["floor"]["fraction"]) <= {"prefill", "decode", "reference", "train"}
    assert all(x > 0 for x in result["floor"]["floor_s"].values())


@pytest.mark.slow
def test_rollout_prints_every_figure(capsys):
    rollout.main([*TINY, "--ragged", "--temperature", "0.7", "--top-k", "5"])
    result = json.loads(capsys.readouterr().out)
    assert set(result) >= FIGURES
    assert result["train_s"] is None
    assert 0 < result["slot_use"] <= 1
    assert 0 < result["tokens"] <= 16


@pytest.mark.slow
def test_distribution_measures_every_sampler(capsys):
    sampler_drift.main([*TINY[:-2], "--head-dim", "8"])
    result = json.loads(capsys.readouterr().out)
    assert result["trainer"] == "float32"
    samplers = result["samplers"]
    assert set(samplers) == {
        *("float32", "bfloat16", "int8 weights", "int8 cache", "int8 weights and cache"),
        "float8 weights",
    }
    assert samplers["float32"]["max_difference"] < 1e-5
    for name, numbers in samplers.items():
        assert numbers["tokens"] == 2 * 2 * 4
        assert name == "float32" or 1e-5 < numbers["max_difference"] < 0.5


SMALL_POD = """
method = "grpo"

[model.config]
vocab_size = 64
layers = 1
embed_dim = 16
heads = 2
kv_heads = 2
head_dim = 8
mlp_dim = 16
max_length = 32

[data]
max_prompt_tokens = 8

[sampling]
group = 2
max_new_tokens = 4

[train]
prompts = 4

[mesh]
fsdp = 4

[sampling.mesh]
data = 2
tensor = 2
"""


@pytest.fixture
def small_pod(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL_POD)
    return path


def small_plan(**changes):
    """The part of a plan's JSON that the benchmark reads, of the small configuration on 4 chips."""
    axes = dict.fromkeys(("data", "fsdp", "tensor", "context", "expert"), 1)
    programs = {
        name: {"roofline_seconds": seconds, "bytes_per_chip": size}
        for name, seconds, size in (
            ("resharding", 1.0, 10),
            ("sampler", 4.0, 30),
            ("train_step", 2.0, 20),
        )
    }
    plan = {"topology": "v5e:2x2", "mesh": axes | {"fsdp": 4}, "programs": programs}
    plan |= {"sampling_mesh": axes | {"data": 2, "tensor": 2}, "step_seconds": 7.0}
    return plan | changes


@pytest.mark.slow
def test_a_pod_is_measured_beside_its_plan(small_pod, capsys):
    """The same programs as those of a run, on the mesh of the configuration; only two compile."""
    plan = small_pod.with_name("plan.json")
    plan.write_text(json.dumps(small_plan()))
    arguments = ["--topology", "v5e:2x2", "--plan", str(plan), "--steps", "4"]
    tpu.main([str(small_pod), "sampling.group=4", *arguments])
    figures = json.loads(capsys.readouterr().out)
    measured, planned = figures["measured"], figures["predicted"]
    assert (figures["chips"], figures["sampling_mesh"]["tensor"]) == (4, 2)
    parts = [measured[name] for name in ("resharding_s", "sampler_s", "train_s")]
    assert min(parts) > 0
    assert sum(parts) <= measured["step_s"] * 1.5  # medians of different steps
    assert measured["first_step_s"] > 2 * measured["step_s"]  # it compiles
    assert measured["tokens_s_chip"] == pytest.approx(4 * 4 * 4 / measured["step_s"] / 4, rel=1e-2)
    assert planned["tokens_s_chip"] == pytest.approx(4 * 4 * 4 / 7 / 4, rel=1e-3)
    ratio = figures["measured_over_predicted"]["step_s"]
    assert ratio == pytest.approx(measured["step_s"] / 7, rel=1e-2)


def test_predicted_figures_follow_from_a_plan_and_measured_ones_from_times(small_pod):
    run = tpu.synthetic_run(load_config(small_pod))
    topology = tpu.parse_topology("v5e:2x2")
    planned = tpu.predicted(small_plan(), run, topology)
    assert (planned["step_s"], planned["bytes_per_chip"]) == (7.0, 30)
    # By hand, a token: q, k, v, o of two heads of 8, three matrices of 16 x 16, and the output
    # matrix for completions. Prompts are 16 wide, and count once for their two completions of 4.
    tokens, pairs = 16 + 2 * 4, 16 * 17 / 2 + 2 * (4 * 16 + 4 * 5 / 2)
    forward = 2 * 4 * ((16 * 8 * 8 + 3 * 16 * 16) * tokens + 16 * 64 * 8 + 2 * 2 * 8 * pairs)
    assert planned["sampler_mfu"] == pytest.approx(forward / 4 / topology.chip.flops / 4)
    assert planned["train_step_mfu"] == pytest.approx(3 * forward / 4 / topology.chip.flops / 2)
    times = {"step_s": 14.0, "sampler_s": 8.0, "train_s": 4.0, "bytes_per_chip": None}
    both = tpu.beside(tpu.figures(times, run, topology), planned)
    assert both["measured_over_predicted"]["step_s"] == 2
    assert both["measured_over_predicted"]["train_step_mfu"] == 0.5
    assert "bytes_per_chip" not in both["measured_over_predicted"]  # nothing was measured
    assert tpu.figures(times, run, None)["train_step_mfu"] is None
    prompts = run.data.prompts["train"]
    assert {p.tokens.shape for p in prompts} == {(16,)}  # the width of the plan
    assert len({p.tokens.tobytes() for p in prompts}) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topology": "v5e:4x4"}, r"of topology v5e:4x4, and this run has v5e:2x2"),
        ({"mesh": {"fsdp": 2}}, r"of mesh .*2.*, and this run has .*'fsdp': 4"),
        ({"sampling_mesh": None}, r"of sampling\.mesh None, and this run has .*'tensor': 2"),
    ],
)
def test_a_plan_of_something_else_is_refused(small_pod, changes, message):
    run = tpu.synthetic_run(load_config(small_pod))
    with pytest.raises(UserError, match=message):
        tpu.predicted(small_plan(**changes), run, tpu.parse_topology("v5e:2x2"))


def test_what_the_pod_benchmark_cannot_make_up_is_named(small_pod):
    for change, message in (
        ("data={task='sorting'}", "data.task = 'sorting'"),
        ("placement.staleness=1", "placement = "),
    ):
        with pytest.raises(UserError, match=message):
            tpu.synthetic_run(load_config(small_pod, [change]))
    with pytest.raises(SystemExit, match=r"v5e:4x4 has 16 chips, and mesh uses 4 devices"):
        tpu.main([str(small_pod), "--topology", "v5e:4x4"])


SMALL_RUN = [
    *("model.config.layers=1", "model.config.embed_dim=8", "model.config.mlp_dim=8"),
    *("model.config.heads=1", "model.config.kv_heads=1", "model.config.head_dim=8"),
    *("data.difficulty=3", "warmup.steps=0", "train.prompts=2", "sampling.group=2"),
    "eval.problems=2",
]


@pytest.mark.slow
def test_runs_print_every_figure(capsys, checkout, monkeypatch):
    """Nothing is trained here, and each process is asked to write what a run leaves."""
    started = []

    def finish(command, variables):
        started.append(command)
        for item in command:
            if item.startswith("run.dir="):
                directory = pathlib.Path(json.loads(item.removeprefix("run.dir=")))
                directory.mkdir()
                summary = {"train_seconds": 2.0, "accuracy_after": 0.5}
                (directory / "summary.json").write_text(json.dumps(summary))
        assert "JAX_COMPILATION_CACHE_DIR" not in variables
        return 5.0

    def whole_run(config):
        return lambda key: (None, {"accuracy_after": jax.random.uniform(key)})

    monkeypatch.setattr(runs, "finish", finish)
    monkeypatch.setattr(runs, "whole_run", whole_run)
    monkeypatch.chdir(checkout)
    flags = ["--steps=2", "--rounds=1", "--processes=2", "--whole=4", "--seeds", "1", "2"]
    runs.main([*SMALL_RUN, *flags])
    result = json.loads(capsys.readouterr().out)
    one, two = result["together"]
    assert (one["seeds"], two["seeds"]) == (1, 2)
    assert one["run_s_per_seed_over_one"] == 1
    assert two["run_s_per_seed"] == pytest.approx(two["run_s"] / 2, rel=1e-3)
    assert two["with_compile_s"] > two["compile_s"] > 0
    disjoint = result["apart"]
    assert (disjoint["processes"], disjoint["train_s"], disjoint["accuracy_after"]) == (2, 4.0, 0.5)
    assert result["one_process"] == {"seeds": 4, "wall_s": 5.0, "wall_s_per_seed": 1.25}
    assert result["apart_over_one_process"] == pytest.approx(
        disjoint["wall_s"] / 2 / 1.25, rel=1e-3
    )
    alone, *processes = started
    assert sorted(command[-2] for command in processes) == ["seed=0", "seed=1"]
    assert all({"train.mode=compiled", "train.steps=2", *SMALL_RUN} <= set(c) for c in processes)
    assert alone[1:3] == ["-m", "benchmarks.runs"]
    again = runs.parser().parse_args(alone[3:])
    assert (again.seeds, again.steps, again.processes, again.whole) == ([4], 2, 0, 0)
    assert again.overrides == SMALL_RUN


@pytest.mark.slow
def test_many_runs_in_one_program_learn_what_one_by_one_do(checkout):
    args = runs.parser().parse_args([*SMALL_RUN, "--steps=2", "--rounds=1"])
    config = load_config(checkout / args.config, runs.changes(args))
    together = runs.together(config, 2, args)["accuracy_after"]
    args.in_turn = True
    assert runs.together(config, 2, args)["accuracy_after"] == pytest.approx(together)


def test_a_process_that_fails_says_why(capfd):
    with pytest.raises(SystemExit, match="no such thing"):
        runs.finish([sys.executable, "-c", "raise ValueError('no such thing')"], dict(os.environ))
    assert runs.finish([sys.executable, "-c", "print(1)"], dict(os.environ)) > 0
    assert capfd.readouterr().out == ""


# ---------------------------------------------------------------- what is counted


def walked_flops(config, prompts, lengths):
    """Operations counted token by token: prefill, decode and scoring."""
    c = config
    layer = 2 * c.embed_dim * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
    layer += 2 * 3 * c.embed_dim * c.mlp_dim
    head = 2 * c.embed_dim * c.vocab_size
    see = 4 * c.heads * c.head_dim
    token = lambda positions: c.layers * (layer + see * positions)  # noqa: E731
    prefill = decode = score = 0
    for p, row in zip(prompts, lengths, strict=True):
        prefill += sum(token(i + 1) for i in range(p - 1))
        score += sum(token(i + 1) for i in range(p))
        for t in row:
            decode += sum(token(p + i) + head for i in range(t))
            score += sum(token(p + i + 1) for i in range(t - 1)) + t * head
    return prefill, decode, score


def test_weak_scaling_names_the_command_of_its_extrapolation():
    for text in (weak_scaling.__doc__, pathlib.Path("benchmarks/weak_scaling.md").read_text()):
        assert "``jrl plan --few-layers``" in text
        assert "--quick" not in text


def test_useful_work_is_counted_token_by_token():
    config = ModelConfig(
        vocab_size=11,
        layers=3,
        embed_dim=10,
        heads=4,
        kv_heads=2,
        head_dim=6,
        mlp_dim=7,
        max_length=64,
    )
    completions = floor.Completions(np.array([5, 9]), np.array([[3, 1, 7], [2, 2, 8]]))
    counts = [
        f(config, completions) for f in (floor.prefill_flops, floor.decode_flops, floor.score_flops)
    ]
    assert counts == list(walked_flops(config, completions.prompts, completions.lengths))


def test_decoding_reads_a_shared_prompt_once_a_step():
    sizes = {"vocab_size": 11, "embed_dim": 10, "heads": 4, "kv_heads": 2, "head_dim": 6}
    config = ModelConfig(**sizes, layers=3, mlp_dim=7, max_length=64)
    entry = 2 * 3 * 2 * 6 * 4  # keys and values, layers, heads, size, bytes
    completions = floor.Completions(np.array([5]), np.array([[3, 1]]))
    entries = 0 + 1 + 2  # own entries of the longer row at each of its steps; the other has none
    assert floor.decode_bytes(config, completions, 1000) == 3 * 1000 + entry * (entries + 3 * 5)


def sampled_rollout(tokens, lengths, stop):
    """A rollout on the host: one prompt, tokens [G, T]."""
    tokens, lengths = np.array(tokens, np.int32)[None], np.array(lengths, np.int32)[None]
    mask = np.arange(tokens.shape[-1])[None, None] < lengths[:, :, None]
    return Rollout(
        prompt_tokens=np.array([[1]], np.int32),
        prompt_lengths=np.array([1], np.int32),
        tokens=tokens,
        lengths=lengths,
        mask=mask,
        sampler_logprobs=np.where(mask, np.float32(-1), np.float32(0)),
        versions=np.where(mask, np.int32(0), np.int32(-1)),
        stop=np.array([stop], np.int32),
        baseline=np.zeros(lengths.shape, bool),
    )


def test_the_token_that_ends_a_completion_is_neither_judged_nor_trained_on():
    end, limit = int(StopReason.STOP_TOKEN), int(StopReason.LENGTH)
    tokens = [[4, 5, 6, flags.EOS], [flags.EOS, 0, 0, 0], [3, 3, 8, flags.EOS]]
    rollout = sampled_rollout(tokens, [4, 1, 4], [end, end, limit])
    left = work.without_stop(rollout).check()
    assert left.mask.sum(-1).tolist() == [[3, 0, 4]]
    assert ((left.versions >= 0) == left.mask).all()
    assert ((left.sampler_logprobs != 0) == left.mask).all()
    np.testing.assert_allclose(work.even_share(left)[0, :, 0], [2 / 3, 0, 1 / 2], rtol=1e-6)


@pytest.mark.parametrize("over", [False, True])
def test_prompts_are_the_same_for_everybody_and_fit(over):
    args = flags.parser("").parse_args(["--ragged", *["--ragged-over"] * over])
    steps = flags.prompts(args, 4)
    sizes = [[len(row) for row in rows] for rows in steps]
    assert steps == flags.prompts(args, 4)
    assert all(row[0] == flags.BOS and min(row[1:]) >= 3 for rows in steps for row in rows)
    assert max(max(rows) for rows in sizes) <= flags.prompt_width(args)
    assert (max(max(rows) for rows in sizes) > args.prompt_len) == over


# ---------------------------------------------------------------- peers


def test_a_record_leaves_the_first_steps_out(capsys):
    record = Record()
    for seconds in (9.0, 8.0, 1.0, 3.0, 2.0):
        record.begin()
        record.spent("rollout", seconds)
        record.drew([4, 2])
        record.compiled(seconds > 8)
        record.end()
    summary = record.summary()
    assert 0 < summary["first_step_cpu_s"] <= processor_seconds()
    assert summary["rollout_s"] == 2.0
    assert summary["rollout_tok_s"] == 3.0
    assert summary["slot_use"] == 0.75
    assert (summary["compiles"], summary["late_compiles"]) == (1, 0)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["row"] for line in lines] == [f"step {i}" for i in range(1, 6)]
    assert lines[3]["rollout_s"] == 3.0


def test_pairs_run_back_to_back_and_the_middle_ratio_counts(monkeypatch):
    times, ran = iter([1.0, 2.0, 8.0, 1.0, 1.0, 4.0]), []

    def run(command, flags, platform):
        ran.append("own" if "-m" in command else "other")
        return {"step_s": next(times), "compiles": 6, "rollout_tok_s": 10.0}

    monkeypatch.setattr(peers, "run", run)
    result = peers.compare(peers.PEERS["tunix"], "python", 3, [])
    assert ran == ["own", "other", "other", "own", "own", "other"]
    assert result["ratios"]["step_s"] == 4.0
    assert result["ratios"]["compiles"] == 1.0


def test_a_peer_that_fails_costs_no_figures(monkeypatch, capsys, tmp_path):
    calls, path = [], tmp_path / "peers.json"

    def run(command, flags, platform):
        calls.append((command[-1], flags, platform))
        is_jrl = "-m" in command
        return {"step_s": 2.0, "args": {}} if is_jrl else {"failed": "out of memory"}

    monkeypatch.setattr(peers, "run", run)
    arguments = ["--peer", "trl", "--python", "python", "--rounds", "1", "--steps", "3"]
    with pytest.raises(SystemExit, match="out of memory"):
        peers.main([*arguments, "--platform", "gpu", "--peer-micro", "1", "--json", str(path)])
    ours, other = calls
    assert ours == ("benchmarks.step", ["--steps", "3", "--gemm", "0"], "gpu")
    assert other[1:] == (["--steps", "3", "--micro", "1"], "gpu")
    printed = capsys.readouterr()
    (pair,) = json.loads(path.read_text())["rounds"]
    assert pair["own"]["step_s"] == 2
    assert pair["other"] == {"failed": "out of memory"}
    assert json.loads(printed.out)["ratios"] == {}
    assert json.loads(printed.err.splitlines()[0]) == {"row": "own", "step_s": 2}


def test_a_program_beside_another_runs_where_the_flags_say(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "somewhere")
    environment = peers.environment_for("gpu")
    assert environment["JAX_PLATFORMS"] == "cuda,cpu"
    assert environment["PYTHONPATH"].split(os.pathsep)[1] == "elsewhere"
    assert "JAX_COMPILATION_CACHE_DIR" not in environment
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, sys\n"
        "seen = {'given': sys.argv[1:-2], 'jax': os.environ['JAX_PLATFORMS']}\n"
        "json.dump(seen, open(sys.argv[-1], 'w'))\n"
    )
    ran = peers.run([sys.executable, str(script)], ["--steps", "3"])
    assert ran == {"given": ["--steps", "3", "--platform", "cpu"], "jax": "cpu"}
    script.write_text("raise SystemExit(3)")
    assert "ended with status 3" in peers.run([sys.executable, str(script)], [])["failed"]


def test_the_platform_of_the_flags_is_jaxs(monkeypatch):
    platforms = []
    monkeypatch.setattr(jax.config, "update", lambda name, value: platforms.append((name, value)))
    monkeypatch.setattr(work, "return_compiler_memory", lambda: None)
    for arguments in ([], ["--platform", "cpu"], ["--platform", "gpu"]):
        work.place(work.parser("").parse_args(arguments))
    assert platforms == [("jax_platforms", "cpu"), ("jax_platforms", "cuda,cpu")]


@pytest.mark.parametrize("peer", sorted(peers.PEERS))
def test_peers_scripts_take_the_same_flags(peer, checkout):
    """The libraries are not installed here; the scripts must at least be Python that reads."""
    source = (checkout / "benchmarks" / "peers" / peers.PEERS[peer].script).read_text()
    compile(source, peer, "exec")
    assert "flags.parser(" in source
    assert "flags.write(" in source


def test_the_peers_game_is_the_environment():
    env = get_env("gridworld", start="anywhere")
    step, tokens = jax.jit(env.step), env.tokenizer.encode
    for place in frozenlake.STARTS:
        tiles = frozenlake.prompt(place)
        state = Grid(jnp.array(tokens(tiles[:-2])), jnp.int32(place))
        for letter in "ldrusg":
            _, turn = step(state, jnp.array(tokens(letter)), jnp.int32(1), jax.random.key(0))
            after, reward, done = frozenlake.move(place, letter)
            reply = env.tokenizer.decode(turn.reply.tolist())
            assert (reply, float(turn.reward), bool(turn.done)) == (
                frozenlake.shown(after),
                reward,
                done,
            )
    keys = jax.random.split(jax.random.key(0), 300)
    starts = jax.device_get(jax.jit(jax.vmap(lambda key: env.generate(key, "train")))(keys))
    texts = {env.tokenizer.decode(row) for row in starts.tokens.tolist()}
    assert texts == {frozenlake.prompt(place) for place in frozenlake.STARTS}


def test_a_wrong_flag_is_named_before_anything_runs(checkout):
    command = [sys.executable, "-m", "benchmarks.peers", "--peer", "tunix", "--python", "none"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [*command, "--bacth", "4"], cwd=checkout, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "--bacth" in done.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--micro", "3"], "--micro 3 does not divide --batch 4; choose 0 or one of [1, 2, 4]"),
        (["--micro", "8"], "--micro 8 does not divide --batch 4"),
        (["--group", "0"], "--group 0: at least 1"),
        (["--prompt-len", "1"], "--prompt-len 1: at least 2"),
    ],
)
def test_flags_that_no_setting_has_are_named(flags, message, monkeypatch, capsys):
    monkeypatch.setattr(work, "place", lambda args: None)  # the process is ready
    with pytest.raises(SystemExit) as stopped:
        step.main(flags)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_setting_that_cannot_be_is_an_error_of_the_flags(monkeypatch, capsys):
    monkeypatch.setattr(work, "place", lambda args: None)  # the process is ready
    with pytest.raises(SystemExit) as stopped:
        step.main(["--layers", "1", "--dim", "64", "--ffn", "64", "--vocab", "64", "--tp", "4"])
    assert stopped.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "'kv_heads' of size 2" in error
    assert "tensor=4" in error
