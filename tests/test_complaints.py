"""What users of other libraries complain about most, and which tests hold that it is not so here.

A row names a complaint of the public issue trackers of trl, verl, open-r1, tunix, marin and others;
its tests must exist. ``OPEN`` says what of a row no test holds yet.
"""

import ast
import pathlib
import re
import tomllib

import numpy as np
import pytest

from jrl.train.collect import TextSource, to_batch
from jrl.types import Prompt, Rollout, StopReason

TESTS = pathlib.Path(__file__).parent
ROWS = {
    1: ("house_test.py::test_7_trainer_logprobs_equal_the_samplers",),
    2: (  # generation dominates the step
        "sampling/test_generate.py::test_slots_stay_full",
        "test_benchmarks.py::test_decoding_reads_a_shared_prompt_once_a_step",
    ),
    3: (  # stragglers leave the devices idle
        "sampling/test_generate.py::test_draws_do_not_depend_on_the_slots",
        "train/test_disjoint.py::"
        "test_a_stale_run_resumes_bit_for_bit_from_where_a_signal_stopped_it",
    ),
    4: (
        "models/test_vocabulary.py::test_the_memory_of_a_fused_head_does_not_grow_with_the_vocabulary",
    ),
    5: ("train/test_disjoint.py::test_a_leaf_that_changed_on_its_way_is_named_with_its_version",),
    6: (  # installation
        "test_complaints.py::test_it_installs_without_another_framework",
        "test_package.py::test_every_import_is_declared",
        "test_readme.py::test_it_installs_from_the_checkout_only",
    ),
    7: (  # hangs instead of errors
        "rewards/test_hostile.py::test_a_process_that_is_stopped_is_ended_at_its_time_limit",
        "data/test_answers.py::test_a_catastrophic_pattern_is_ended_and_named",
        "models/test_chat_template.py::test_time_is_bounded",
        "serving/test_http.py::test_an_upload_that_stops_halfway_is_ended",
    ),
    8: (
        "rewards/test_pool.py::test_a_call_that_hangs_scores_0_and_the_others_are_judged",
        "rewards/test_hostile.py::"
        "test_calls_that_hold_the_interpreter_lock_cost_their_own_time_only",
        "rewards/test_bounds.py::test_nasty_answers_take_little_time_and_memory",
    ),
    9: ("house_test.py::test_10_resume_is_bit_equal",),
    11: ("test_complaints.py::test_what_is_trained_is_what_was_sampled_token_for_token",),
    13: ("train/test_collect.py::test_refilling_until_the_batch_is_full",),
    16: ("train/test_loop.py::test_nothing_is_compiled_after_the_first_step",),
    17: (  # the GPU path is second class, CPU is none
        "models/attention/test_choice.py::test_on_a_gpu_programs_call_cudnn_forward_and_backward",
        "test_benchmarks.py::test_gpu_runs_on_a_cpu_and_writes_its_table",
    ),
    19: (
        "train/test_multiprocess.py::test_two_processes_train_sample_save_and_resume_as_one_does",
    ),
    20: (  # memory and preemption
        "train/test_interrupts.py::test_a_killed_run_resumes_from_its_newest_checkpoint",
        "rewards/test_hostile.py::test_memory_beyond_the_limit_ends_the_call_and_names_the_limit",
    ),
    24: ("train/test_text_run.py::test_transformers_reads_the_export_and_agrees",),
    25: (  # parity between stacks
        "methods/test_peers.py::test_a_loss_and_its_gradient_are_the_peers",
        "house_test.py::test_6_draws_differ_by_step_and_repeat_by_seed",
    ),
}
OPEN = {
    2: "the speed itself is measured by benchmarks/ and not held by a test",
    7: "waits on devices and on other hosts",
    14: "collapse of entropy and reward is not warned of",
    17: "the suite runs on CPU; GPU programs are compiled and looked at",
    20: "growth of host memory over a long run",
    25: "curves of a whole run beside those of another library",
}


@pytest.mark.parametrize("row", ROWS)
def test_the_tests_of_a_row_exist(row):
    for name in ROWS[row]:
        file, _, function = name.partition("::")
        tree = ast.parse((TESTS / file).read_text())
        assert function in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, name


def test_it_installs_without_another_framework(checkout):
    """Row 6: one install, no second engine; what is needed has a bound that a resolver can read."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    names = {re.match(r"[\w.-]+", line).group().lower() for line in project["dependencies"]}
    assert not names & {"torch", "vllm", "ray", "transformers", "trl", "deepspeed", "flash-attn"}
    unbound = [line for line in project["dependencies"] if not re.search(r"[<>=~]=?\d", line)]
    assert not unbound


class OneWay:
    """Texts from tokens, and never back."""

    def decode(self, ids):
        return "?" * len(ids)

    def encode(self, text, **options):
        raise AssertionError("a completion was encoded again")


class Echo:
    def scores(self, samples, *, group):
        self.samples = samples
        return np.ones((len(samples), 1), np.float32), {}


def test_what_is_trained_is_what_was_sampled_token_for_token():
    """Row 11: text goes to rewards, and nothing comes back from it."""
    n, g, p, t = 3, 2, 4, 6
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, t + 1, (n, g)).astype(np.int32)
    rollout = Rollout(
        prompt_tokens=rng.integers(0, 50, (n, p)).astype(np.int32),
        prompt_lengths=np.full(n, p, np.int32),
        tokens=rng.integers(0, 50, (n, g, t)).astype(np.int32),
        lengths=lengths,
        mask=np.arange(t) < lengths[:, :, None],
        sampler_logprobs=-rng.random((n, g, t)).astype(np.float32),
        versions=np.zeros((n, g, t), np.int32),
        stop=np.full((n, g), StopReason.STOP_TOKEN, np.int32),
        baseline=np.zeros((n, g), bool),
    )
    prompts = [Prompt(i, "", rollout.prompt_tokens[i], None, {}) for i in range(n)]
    pool = Echo()
    groups = TextSource(prompts, p, None, None, None, pool, OneWay()).judge(prompts, rollout)
    batch = to_batch(groups.rollout, groups.rewards, np.ones(1, np.float32))
    for name in ("prompt_tokens", "tokens", "lengths", "mask"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(rollout, name))
    np.testing.assert_array_equal(batch.stats["sampler_logprobs"], rollout.sampler_logprobs)
    seen = [(s.tokens.tolist(), s.completion) for s in pool.samples]
    rows = zip(rollout.tokens.reshape(-1, t), lengths.reshape(-1), strict=True)
    assert seen == [(row[:k].tolist(), "?" * k) for row, k in rows]
