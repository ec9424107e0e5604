"""Checks the metrics that a configuration names, before anything is sampled."""

from __future__ import annotations

import jax

from jrl.config import Config
from jrl.errors import UserError, unknown_choice
from jrl.evaluate import evaluation_names
from jrl.setup.run import Run
from jrl.storage.metrics import CLOCKS
from jrl.train import programs
from jrl.train.shapes import abstract_batch

RECORDED = CLOCKS | {
    *("prompts", "kl", "slot_use", "skipped_steps", "rollbacks", "staleness", "staleness_max"),
    *("reward_failures", "reward_timeouts", "reward_errors", "env_failures"),
    *("judge_calls", "judge_cached", "judge_retries"),
    *("judge_unreadable", "judge_timeouts", "judge_failures"),
    *("tree_shared_tokens", "rounds", "groups_kept", "groups_missing", "groups_redrawn"),
    *("search_nodes", "search_leaves", "read_tokens", "reread_tokens", "replayed"),
}
"""Metrics that a record has beside those of the training step, in runs of one kind or another."""


def check_metric_names(run: Run) -> None:
    """Raises UserError for a metric in [watch] or checkpoint.best that no record will have.

    The step is traced for it, not compiled. Environments and judged data have metrics of their own:
    there a wrong name is found at the first step.

    Args:
      run: from ``build.setup``.
    """
    _check_evaluations(run)
    config = run.config
    best = (config.checkpoint.best or "").removeprefix("-")
    references = [("watch", name) for name in config.watch]
    references += [("checkpoint.best", best)] if best else []
    parts = {f"reward/{name}" for name in run.rewards.weights}
    open_names = [
        (key, name)
        for key, name in references
        if not name.startswith("eval/") and name not in RECORDED | parts
    ]
    if not open_names or not run.kind.known_metrics:
        return
    step, (make, _) = programs.make_train_step(run), programs.state_layout(run)
    key = jax.eval_shape(lambda: jax.random.key(0))
    frozen = {name: jax.eval_shape(net.init, key) for name, net in run.networks.items()}
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), run.params)
    with jax.set_mesh(run.mesh):
        state = jax.eval_shape(make, key, params, frozen)
        _, metrics = jax.eval_shape(step, state, abstract_batch(run), run.sampling_params)
    names = {name for name, value in metrics.items() if not value.shape} | RECORDED | parts
    for key, name in open_names:
        if name not in names:
            raise unknown_choice(key, name, names)


def asked_of_evaluations(config: Config) -> list[tuple[str, str]]:
    """(key, metric without "eval/") of the evaluation metrics that [watch] and retention read."""
    best = (config.checkpoint.best or "").removeprefix("-")
    references = [("watch", name) for name, limit in config.watch.items() if limit.action != "none"]
    references += [("checkpoint.best", best)]
    return [(key, n.removeprefix("eval/")) for key, n in references if n.startswith("eval/")]


def _check_evaluations(run: Run) -> None:
    """Raises UserError for a metric of evaluations that none will have."""
    config, data = run.config, run.data
    references, held_out = asked_of_evaluations(config), run.kind.held_out(config, data)
    if references and not held_out.problems and "eval" not in data.judged:
        key, name = references[0]
        raise UserError(f"{key} = 'eval/{name}' needs held-out prompts; set data.eval")
    names = evaluation_names(run)
    if names is None:
        return  # known with the first evaluation, which comes before the first step
    for key, name in references:
        if name not in names:
            raise unknown_choice(key, f"eval/{name}", (f"eval/{each}" for each in names))
