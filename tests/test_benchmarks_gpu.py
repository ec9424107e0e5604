"""``benchmarks.gpu``: its rows on a CPU, its profiles from a written trace, its end in time."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from benchmarks import (
    floor,
    gpu,
    gpu_programs,
    gpu_sampling,
    gpu_table,
    gpu_training,
    kernels,
)
from benchmarks.gpu_programs import Measured
from benchmarks.gpu_training import Update
from benchmarks.lease import Budget, Cost, Record
from jrl.system.memory import program_bytes
from jrl.train.remat import ORDER

TINY = ["--shapes", "tiny", "--prompt-len", "8", "--gemm", "32", "--copy-mb", "1", "--rounds", "1"]


def rows_of_output(text):
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {kind: [x for x in lines if x["kind"] == kind] for kind in {x["kind"] for x in lines}}


@pytest.mark.slow
def test_gpu_runs_on_a_cpu_and_writes_rows_as_they_come(capsys, monkeypatch, tmp_path):
    seconds = iter([1.0, 4.0, 1.0])  # to prepare weights, in all, and to prefill

    def repeated(call, rounds):
        jax.block_until_ready(call())
        return next(seconds)

    monkeypatch.setattr(gpu_sampling, "repeated", repeated)
    path, lines = tmp_path / "gpu.md", tmp_path / "gpu.jsonl"
    flags = [*TINY, "--work", "4:8:16:2", "--packed", "32", "--attention", "blockwise"]
    flags += ["--lora", "2", "--peak-tflops", "1", "--int8", "weights", "cache"]
    gpu.main([*flags, "--table", str(path), "--json", str(lines), "--hlo", str(tmp_path / "hlo")])
    output = capsys.readouterr().out
    rows = rows_of_output(output)
    assert rows == rows_of_output(lines.read_text())
    sampling, profile = rows["sampling"]
    assert (sampling["batch"], sampling["new"], sampling["group"]) == (4, 16, 2)
    assert (sampling["decode_s"], sampling["tok_s"]) == (2, 4 * 16 / 2)
    assert sampling["token_step_ms"] == 2 / 16 * 1e3
    copy_bytes_s = rows["rate"][1]["copy_gb_s"] * 1e9
    fraction = sampling["decode_bytes_s"] / copy_bytes_s
    assert sampling["decode_fraction"] == pytest.approx(fraction, rel=2e-3)
    assert min(sampling["compile_s"], sampling["lower_s"], sampling["setup_s"]) > 0
    assert (sampling["int8"], sampling["float8"]) == (["cache", "weights"], [])
    assert profile["kernels_a_step"] is profile["idle_share"] is None  # no GPU
    training, _ = rows["training"]
    assert (training["packed_tokens"], training["completions"], training["lora"]) == (32, 3, 2)
    assert training["attention"] == sampling["prefill_attention"] == "blockwise"
    assert training["fraction"] > 0
    assert training["prime_rl_mfu"] == pytest.approx(training["prime_rl_flop_s"] / 1e12, rel=1e-3)
    assert training["memory_over_kept"] > 1
    assert (training["layers"], training["remat"]) == (1, "scores")
    assert "refused" not in training
    assert rows["end"] == [{"kind": "end", "reason": "", "left_out": []}]
    assert output.endswith(path.read_text())
    assert "| 4 | 8 | 16 | 2 | cache; weights |  |" in path.read_text()
    assert "--shapes tiny" in path.read_text()
    assert {p.name for p in (tmp_path / "hlo").iterdir()} == {
        "sampling_32_4_8_16_2.txt",
        "training_32_32_scores.txt",
    }


# ---------------------------------------------------------------- memory


def test_out_of_memory_is_a_row_and_other_errors_are_not():
    def exhausted():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 1 GiB\nmore")

    def failing():
        raise jax.errors.JaxRuntimeError("INTERNAL: no")

    assert gpu_programs.attempt(exhausted).row == {"does_not_fit": "RESOURCE_EXHAUSTED: 1 GiB"}
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        gpu_programs.attempt(failing)


def test_what_does_not_fit_is_known_before_it_runs():
    args = gpu.parser().parse_args(["--memory-gb", "1e-6"])
    limit, double = gpu_programs.memory_limit(args), jax.jit(lambda x: 2 * x, donate_argnums=0)
    small, large = (jax.ShapeDtypeStruct((n,), np.float32) for n in (200, 300))
    program = gpu_programs.fitting(double, limit, small)
    assert program.held_bytes == program_bytes(program.call) == 800  # donated: once
    assert min(program.lower_s, program.compile_s) > 0
    with pytest.raises(gpu_programs.DoesNotFit, match=r"needs 0\.0 GB"):
        gpu_programs.fitting(double, limit, large)
    row = gpu_programs.attempt(lambda: gpu_programs.fitting(double, limit, large)).row
    assert row.keys() == {"does_not_fit"}


def test_training_gives_up_activations_and_then_layers(monkeypatch):
    def row(config, variant, work, args):
        if variant.layers > 2:
            raise gpu_programs.DoesNotFit("too much")
        return Measured({"layers": variant.layers, "remat": variant.remat})

    monkeypatch.setattr(gpu_training, "variant_row", row)
    config, work = gpu.model_config("tiny", 8), Update(2, 1, 4)
    args = gpu.parser().parse_args([])
    first = gpu_training.training_row(config, work, args).row
    assert first == {"layers": 1, "remat": "scores"}
    row = gpu_training.training_row(dataclasses.replace(config, layers=5), work, args).row
    assert (row["layers"], row["remat"]) == (2, "full")
    assert row["refused"] == [f"5 layers, {remat}: too much" for remat in ORDER]
    assert row["refused_s"] > 0
    assert gpu_table.cell(row, "refused") == "; ".join(row["refused"])


# ---------------------------------------------------------------- what the flags ask for


def test_rows_of_several_settings_in_one_run():
    args = gpu.parser().parse_args(["--work", "64:256:128:8", "1:512:256:1", "--packed", "1024"])
    first, second, update = gpu.rows_of("tiny", args)  # nothing is made before a row runs
    assert (first.name, second.name) == ("tiny sampling 64:256:128:8", "tiny sampling 1:512:256:1")
    assert update.kind == "training"
    args = gpu.parser().parse_args(["--batches", "3", "4", "--group", "2"])
    assert gpu.works(args) == [(3, 512, 1024, 1), (4, 512, 1024, 2)]
    args = gpu.parser().parse_args(
        ["--packed", "4096", "65536", "--completions", "1", "--prompt-len", "4"]
    )
    assert gpu.updates(args) == [(4, 1, 4092), (4, 1, 65532)]
    assert Update.of(16_384, 0, 512) == (512, 31, 512)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--work", "64:256"], "'64:256' is not ROWS:PROMPT:NEW:GROUP"),
        (["--work", "6:256:8:4"], "'6:256:8:4': at least 1 each"),
        (["--packed", "512"], "--packed 512 does not hold a prompt of --prompt-len 512"),
    ],
)
def test_rows_that_cannot_be_are_named(flags, complaint, capsys):
    with pytest.raises(SystemExit):
        gpu.main(flags)
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "layers", "width", "weights"),
    [("0.6b", 28, 1024, 596e6), ("1.7b", 28, 2048, 1.72e9), ("4b", 36, 2560, 4.02e9)],
)
def test_shapes_are_those_of_qwen3(name, layers, width, weights):
    config = gpu.model_config(name, 8)
    assert (config.layers, config.embed_dim, config.tied_embeddings) == (layers, width, True)
    head = config.embed_dim * config.vocab_size
    assert floor.trunk_weights(config) + head == pytest.approx(weights, rel=5e-3)
    assert not gpu.model_config("8b", 8).tied_embeddings


def test_the_peak_is_of_the_card_and_not_of_a_slower_one_of_its_name():
    assert gpu.peak_of("NVIDIA H100 80GB HBM3") == gpu.peak_of("NVIDIA H200") == 989
    assert gpu.peak_of("NVIDIA A100-SXM4-80GB") == 312
    assert gpu.peak_of("NVIDIA H100 PCIe") is gpu.peak_of("NVIDIA L40S") is None


# ---------------------------------------------------------------- what is counted


def test_the_rate_is_prime_rls():
    """Throughputs and MFU of two of its published rows, 2026-01-15, one H100."""
    config = gpu.model_config("0.6b", 8)
    full = floor.prime_rl_flops(config, 65_536) * 10_147.47 / 989e12
    assert full == pytest.approx(0.26805, rel=1e-3)
    adapters = gpu_training.count_trained(config, gpu_training.Lora(16))
    low_rank = floor.prime_rl_flops(config, 16_384, adapters) * 13_341.81 / 989e12
    assert low_rank == pytest.approx(0.10902, rel=2e-3)


def test_a_frozen_base_has_no_gradients_of_its_own():
    config, work = gpu.model_config("tiny", 8), Update(5, 2, 3)
    forward = floor.score_flops(config, work.drawn())
    assert floor.update_flops(config, work.drawn()) == 3 * forward
    tokens = 5 + 2 * 2  # the last token of a completion is not an input
    pairs = sum(range(1, 6)) + 2 * (6 + 7)
    attention = 4 * config.layers * config.heads * config.head_dim * pairs
    weights = floor.update_flops(config, work.drawn(), adapters=100) - 6 * 100 * tokens
    assert weights == 2 * forward + attention


def test_8_bits_are_read_as_such(capsys):
    args = gpu.parser().parse_args(["--int8", "cache", "weights"])
    config = gpu.model_config("8b", 64)
    short = gpu_sampling.sampling_network(config, args)
    plain = gpu_sampling.sampling_network(config, gpu.parser().parse_args([]))

    def size(network):
        weights = jax.eval_shape(lambda key: network.prepare(network.init(key)), jax.random.key(0))
        return gpu_programs.weight_bytes({n: x for n, x in weights.items() if n != "embed"})

    assert 0.5 < size(short) / size(plain) < 0.51
    args = gpu.parser().parse_args(["--int8", "cache", "--float8", "weights"])
    float8 = gpu_sampling.sampling_network(config, args)
    assert size(float8) == size(short)
    weights = jax.eval_shape(lambda key: float8.prepare(float8.init(key)), jax.random.key(0))
    assert weights["head"].values.dtype == "float8_e4m3fn"
    with pytest.raises(SystemExit):
        gpu.main(["--int8", "weights", "--float8", "weights"])
    assert "both name weights" in capsys.readouterr().err
    completions = floor.Completions(np.array([5]), np.array([[3, 1]]))
    read = floor.decode_bytes(config, completions, 0, config.head_dim + 4)
    assert read / floor.decode_bytes(config, completions, 0) == (128 + 4) / 256


# ---------------------------------------------------------------- profiles

TRACE = """
planes {
  name: "/device:GPU:0"
  event_metadata { key: 1 value { id: 1 name: "prefill_gemm" } }
  event_metadata { key: 2 value { id: 2 name: "layer" } }
  event_metadata { key: 3 value { id: 3 name: "draw" } }
  event_metadata { key: 4 value { id: 4 name: "MemcpyD2H" } }
  event_metadata { key: 5 value { id: 5 name: "while" } }
  lines { name: "Stream #13(Compute)" timestamp_ns: 1000 %s }
  lines { name: "XLA Ops" timestamp_ns: 1000
          events { metadata_id: 5 offset_ps: 0 duration_ps: 900000000 } }
}
planes { name: "/host:CPU" lines { name: "python" timestamp_ns: 1000 } }
"""


def profile_of(*events):
    """A profile of (name's number, start in us, duration in us) on one stream."""
    text = "".join(
        f"events {{ metadata_id: {i} offset_ps: {begin * 10**6} duration_ps: {took * 10**6} }}"
        for i, begin, took in events
    )
    data = jax.profiler.ProfileData.from_text_proto(TRACE % text)
    device_events = kernels.device_events(data)
    return kernels.Profile(device_events, kernels.span(device_events) / 1e9)


def test_figures_of_a_token_step_are_those_of_the_loop():
    prefill = [(1, 0, 40), (1, 40, 60)]
    # Two steps of two layers, a draw and a copy to the host, idle between them.
    step = [(2, 0, 10), (2, 10, 10), (3, 20, 5), (4, 25, 1)]
    loop = [(i, begin + at, took) for at in (100, 140) for i, begin, took in step]
    loop.append((3, 179, 1))
    profile, before = profile_of(*prefill, *loop), profile_of(*prefill)
    figures = kernels.step_figures(profile, [before], 2, 70e-6)
    assert figures == {
        "kernels_a_step": 3.5,
        "copies_to_host_a_step": 1,
        "busy_ms_a_step": pytest.approx(0.0265),
        "idle_share": pytest.approx(1 - 53 / 70),
        "profiled_idle_share": pytest.approx(1 - 53 / 80),
    }
    first, second, *_ = kernels.largest(profile, 2, most=3)
    assert (first["kernel"], first["count"], first["mean_us"]) == ("prefill_gemm", 2, 50)
    assert (second["kernel"], second["a_step"], second["total_ms"]) == ("layer", 2, 0.04)
    assert "layer" in kernels.as_text([first, second])


def test_what_runs_at_the_same_time_is_busy_once():
    overlapping = profile_of((1, 0, 10), (2, 5, 10), (3, 6, 2), (3, 30, 1)).events
    assert kernels.busy(overlapping) == 16_000
    assert kernels.span(overlapping) == 31_000
    assert kernels.busy([]) == kernels.span([]) == 0


def test_a_profile_with_missing_events_has_a_note():
    events = profile_of((2, 0, 500_000)).events
    assert "profile_note" not in kernels.step_figures(kernels.Profile(events, 0.52), [], 1, None)
    note = kernels.step_figures(kernels.Profile(events, 1.0), [], 1, None)["profile_note"]
    assert note == "events span 0.500 s of 1.000 s: some may be missing"


def test_a_profiler_that_fails_costs_no_row(capsys):
    def failing_profile():
        raise RuntimeError("no rights")

    record = Record("", lambda record: "")
    record.add({"kind": "sampling"})
    args = gpu.parser().parse_args([])
    gpu.add_profile(
        record, {"kind": "sampling", "shape": "tiny"}, Measured({}, failing_profile), args
    )
    (row,) = gpu_table.merged(record.rows)
    assert row["profile_error"] == "RuntimeError: no rights"


# ---------------------------------------------------------------- its end


def test_a_budget_expects_of_a_row_what_the_last_of_its_kind_took():
    now = [0.0]
    budget = Budget(100, clock=lambda: now[0])
    assert budget.fits("sampling", Cost(28, 1e9))  # nothing is known
    now[0] = 40
    budget.spent("sampling", Cost(28, 1e9), compile_s=30, seconds=40)
    assert budget.estimate("sampling", Cost(14, 3e9)) == 30 / 2 + 10 * 3
    assert budget.estimate("training", Cost(1, 1)) == 40
    assert budget.fits("sampling", Cost(28, 2e9))
    assert not budget.fits("sampling", Cost(28, 3.1e9))
    assert Budget(0).fits("sampling", Cost(28, 1e9))


def test_rows_that_there_is_no_time_for_are_left_out(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "policy", lambda config, args: None)
    monkeypatch.setattr(gpu, "sampling_row", lambda *_: Measured({"compile_s": 1e6}))
    monkeypatch.setattr(gpu.time, "perf_counter", iter(range(0, 10**9, 10**5)).__next__)
    gpu.main([*TINY, "--work", "1:8:4:1", "2:8:4:1", "--packed", "--seconds", "1000000"])
    rows = rows_of_output(capsys.readouterr().out)
    assert len(rows["sampling"]) == 1
    (end,) = rows["end"]
    assert end["left_out"] == ["tiny sampling 2:8:4:1"]
    assert "tiny sampling 2:8:4:1 would take about" in end["reason"]


def test_a_row_that_fails_is_named_and_the_others_go_on(monkeypatch, capsys):
    def row(model, work, args):
        if work.rows == 1:
            raise RuntimeError("broken kernel")
        return Measured({"batch": work.rows})

    monkeypatch.setattr(gpu, "policy", lambda config, args: None)
    monkeypatch.setattr(gpu, "sampling_row", row)
    with pytest.raises(SystemExit, match="1"):
        gpu.main([*TINY, "--work", "1:8:4:1", "2:8:4:1", "--packed"])
    printed = capsys.readouterr()
    first, second = rows_of_output(printed.out)["sampling"]
    assert first["failed"] == "RuntimeError: broken kernel"
    assert second["batch"] == 2
    assert "Traceback" in printed.err
    assert "| RuntimeError: broken kernel |" in printed.out


BLOCKED = """
import sys, time
from benchmarks.lease import Record, ends_in_time
record = Record("", lambda record: f"{len(record.rows)} rows\\n")
with ends_in_time(record, float(sys.argv[1])):
    record.add({"kind": "sampling"})
    record.left_out.append("the next one")
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "status", "reason"),
    [
        (signal.SIGTERM, 128 + signal.SIGTERM, "SIGTERM"),
        pytest.param(signal.SIGINT, 128 + signal.SIGINT, "SIGINT", marks=pytest.mark.slow),
        (None, 0, "--seconds 0.2"),
    ],
)
def test_a_process_that_is_ended_writes_what_it_has(number, status, reason, checkout):
    seconds = "0" if number else "0.2"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    begin = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", BLOCKED, seconds],
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert json.loads(process.stdout.readline()) == {"kind": "sampling"}
        if number:
            process.send_signal(number)
        rest = process.stdout.read()
    assert process.returncode == status
    assert time.monotonic() - begin < 50
    end, summary = rest.splitlines()
    end = json.loads(end)
    assert end["reason"] == f"{reason} in the middle of a row"
    assert end["left_out"] == ["the next one"]
    assert summary == "1 rows"
