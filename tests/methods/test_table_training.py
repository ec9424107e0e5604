"""The library's own training step and whole runs, on one method of each family.

``test_table.py`` trains every method by its loss and gradients; here what surrounds them is the
library's, and each method is a compilation of its own.
"""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from chain import (
    FULLEST,
    NETWORK,
    OPTIMIZER,
    SAMPLING,
    STEPS,
    VALUES,
    assert_learns,
    batch_of,
    expected_reward,
    frozen,
    start,
)
from table import NAMES, example, one_of_each_family, out_of_reach

from jrl.data.tasks import get_task
from jrl.methods import all_methods
from jrl.methods.replays import is_by_prompt
from jrl.models.config import ModelConfig
from jrl.models.heads import value_head
from jrl.models.transformer import transformer
from jrl.train.compiled import make_run
from jrl.train.state import init_state
from jrl.train.step import make_step


def train(name):
    """(expected reward before and after, metrics of every step)."""
    method = example(name)
    objective, schedule = method.objective, method.schedule
    common = {
        "network": NETWORK,
        "objective": objective,
        "optimizer": OPTIMIZER,
        "value": VALUES if method.value else None,
    }
    frozen_params = {key: frozen(key) for key in objective.frozen}
    state = init_state(jax.random.key(0), {"table": start()}, **common, frozen=frozen_params)
    step = jax.jit(make_step(**common, schedule=schedule))
    metrics = []
    for i in range(STEPS):
        batch = batch_of(method, i, state.params["policy"]["table"])
        state, step_metrics = step(state, batch, SAMPLING)
        metrics.append(jax.device_get(step_metrics))
    return expected_reward(start()), expected_reward(state.params["policy"]["table"]), metrics


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == FULLEST else pytest.mark.slow)
        for name in sorted(one_of_each_family() | {FULLEST})
    ],
)
def test_the_librarys_step_moves_the_right_way(name):
    metrics = assert_learns(name, *train(name))
    assert not any(step_metrics["skipped_updates"] for step_metrics in metrics)


# ---------------------------------------------------------------- whole runs


def representatives():
    """One method of each family that a run on the device alone can hold, by family."""
    names = {}
    for name in NAMES:
        method = example(name)
        between = method.curriculum is not None and method.curriculum.between is not None
        on_host = between or any(is_by_prompt(edit) for edit in method.edits)
        on_host |= "questions" in method.needs.reads  # made of texts
        alone = not on_host and method.objective.frozen <= {"ref"}
        if method.draw.samples and alone and not out_of_reach(name):
            names.setdefault(all_methods()[name].family, name)
    return names


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(representatives().values()))
def test_a_whole_run_of_one_method_of_each_family(name):
    """Sampler, rewards, advantages, step and evaluation as one program."""
    task = get_task("sequence", difficulty=1)
    network = transformer(
        ModelConfig(
            vocab_size=task.vocab_size,
            layers=1,
            embed_dim=32,
            heads=2,
            kv_heads=1,
            head_dim=16,
            mlp_dim=64,
            max_length=task.prompt_tokens + task.completion_tokens,
        )
    )
    method = example(name)
    run = make_run(
        method=method,
        task=task,
        network=network,
        optimizer=optax.adam,
        steps=STEPS,
        prompts=8,
        group=max(4, method.least_group),
        weights={"verify": 1.0, "partial": 1.0},
        value=value_head(network) if method.value else None,
        warmup={"steps": 20, "batch": 32, "learning_rate": 3e-3},
        eval_problems=32,
    )
    state, curves = jax.jit(run)(jax.random.key(0), {"learning_rate": 1e-3})
    assert int(state.step) == STEPS
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(curves))
    assert not curves["skipped_updates"].any()
    assert curves["grad_norm"].max() > 0
