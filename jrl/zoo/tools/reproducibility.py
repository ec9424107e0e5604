"""Dependence of a policy's results on batch, mesh and dtype.

Floating-point sums depend on their order, and that on shapes and on how devices divide them, so
that the same prompts can get other completions. The measures are those of "Give Me FP32 or Give Me
Death? Challenges and Solutions for Reproducible Reasoning" (arXiv:2506.09501).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.config import Config
from jrl.errors import UserError, unknown_choice
from jrl.evaluate import load_policy
from jrl.evaluate.search import points_of, problems_of
from jrl.mesh import AXES, make_mesh
from jrl.models.config import DTYPES
from jrl.sampling.engine import Engine
from jrl.sampling.request import Completion, Request, RequestFeatures
from jrl.serving.launch import ServedPolicy, served_policy
from jrl.setup.run import Run
from jrl.train import build
from jrl.train.memory_check import check_problems, check_slots
from jrl.types import Prompt, StopReason

_CHUNK = 16


class Sampled(NamedTuple):
    """One completion under one setting.

    Attributes:
      tokens: [t] int, the stop token included.
      logprobs: [t] float, nats, each token's.
      points: of the part that says whether it is right.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    points: float


class Setting(NamedTuple):
    """One way to compute the same completions.

    Attributes:
      batch: completions decoded at once.
      mesh: devices along each axis that has several.
      dtype: of activations.
    """

    batch: int
    mesh: str
    dtype: str


def first_difference(rows: Sequence[np.ndarray]) -> int | None:
    """The first position at which token sequences are not all the same; None if they never differ.

    A sequence that ends differs from one that continues.

    >>> first_difference([np.array([5, 6, 7]), np.array([5, 6, 8]), np.array([5, 6, 7, 9])])
    2
    """
    shortest = min(map(len, rows))
    together = np.stack([row[:shortest] for row in rows])
    differs = (together != together[0]).any(axis=0)
    if differs.any():
        return int(differs.argmax())
    return None if all(len(row) == shortest for row in rows) else shortest


def movement(runs: Sequence[Sequence[Sampled]]) -> dict[str, float | None]:
    """Differences between the completions of the same problems under several settings.

    Args:
      runs: at least two settings, each with one completion of every problem.

    Returns:
      accuracy, the mean over settings, and accuracy_std over them; length_std, tokens, the mean
      over problems of the deviation over settings; diverged, the fraction of problems whose
      completions are not all the same; divergence_index, the mean first position of these;
      probability_std and logprob_std (nats), deviations over settings of a token's probability and
      log-probability, averaged over the tokens before the first difference, then over problems;
      logprob_most, nats, the largest difference between two settings there. Deviations are of a
      sample (n - 1); None where there is nothing to average.
    """
    accuracies = [float(np.mean([sample.points >= 1 for sample in run])) for run in runs]
    lengths, divergences, probabilities, logprobs, most = [], [], [], [], []
    for each in zip(*runs, strict=True):
        lengths.append(np.std([len(sample.tokens) for sample in each], ddof=1))
        index = first_difference([sample.tokens for sample in each])
        divergences.append(index)
        shared = len(each[0].tokens) if index is None else index
        if shared:
            values = np.stack([sample.logprobs[:shared] for sample in each]).astype(np.float64)
            probabilities.append(np.exp(values).std(axis=0, ddof=1).mean())
            logprobs.append(values.std(axis=0, ddof=1).mean())
            most.append(np.ptp(values, axis=0).max())
    indices = [index for index in divergences if index is not None]
    mean = lambda x: float(np.mean(x)) if len(x) else None  # noqa: E731
    return {
        "accuracy": mean(accuracies),
        "accuracy_std": float(np.std(accuracies, ddof=1)),
        "length_std": mean(lengths),
        "diverged": len(indices) / len(divergences),
        "divergence_index": mean(indices),
        "probability_std": mean(probabilities),
        "logprob_std": mean(logprobs),
        "logprob_most": float(max(most)) if most else None,
    }


def compare(results: Mapping[Setting, Sequence[Sampled]]) -> list[dict[str, Any]]:
    """``movement`` for each part of a setting that varies, alone and together.

    Args:
      results: completions of the same problems under every combination of batch, mesh and dtype.

    Returns:
      Rows with "varies", "dtype" (of the settings compared, None for several), "settings" and the
      measures. Where one part varies the others are the first ones.
    """
    settings = list(results)
    batches = list(dict.fromkeys(setting.batch for setting in settings))
    meshes = list(dict.fromkeys(setting.mesh for setting in settings))
    dtypes = list(dict.fromkeys(setting.dtype for setting in settings))
    rows: list[tuple[str, str | None, list[Setting]]] = []
    for dtype in dtypes:
        rows += [
            ("batch", dtype, [Setting(b, meshes[0], dtype) for b in batches]),
            ("mesh", dtype, [Setting(batches[0], m, dtype) for m in meshes]),
        ]
        if len(batches) > 1 and len(meshes) > 1:
            both = [Setting(b, m, dtype) for b, m in itertools.product(batches, meshes)]
            rows.append(("batch, mesh", dtype, both))
    rows.append(("dtype", None, [Setting(batches[0], meshes[0], d) for d in dtypes]))
    return [
        {"varies": varies, "dtype": dtype, "settings": len(each)}
        | movement([results[setting] for setting in each])
        for varies, dtype, each in rows
        if len(each) > 1
    ]


# ---------------------------------------------------------------- a run


def measure_drift(
    config: Config,
    *,
    batches: Sequence[int],
    meshes: Sequence[str],
    dtypes: Sequence[str],
    problems: int,
    checkpoint: int | None = None,
) -> dict[str, Any]:
    """Completions of held-out problems under every combination of settings, compared.

    Args:
      config: a run's configuration; with ``run.dir``, its checkpoints are looked for there.
      batches: completions decoded at once.
      meshes: such as "tensor=2" or "data=2,tensor=2"; none takes the run's own.
      dtypes: of activations; none takes that of evaluation and float32.
      problems: held-out ones, at most.
      checkpoint: a training step; None for the newest.

    Returns:
      "step"; "greedy" and "sampled", rows of ``compare`` for completions at temperature 0 and at
      ``sampling.temperature`` with fixed seeds; "settings", each with its accuracies.

    Raises:
      UserError: episodes, no held-out problems, fewer than two settings, or impossible ones.
    """
    run_dtype = config.eval.dtype or config.model.dtype
    dtypes = list(dict.fromkeys(dtypes or (run_dtype, "float32")))
    batches, meshes = (
        list(dict.fromkeys(batches)),
        list(dict.fromkeys(meshes)) or [_mesh_of(config)],
    )
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise unknown_choice("--dtype", dtype, DTYPES)
    sizes = {mesh: _sizes(mesh) for mesh in meshes}
    if len(batches) * len(meshes) * len(dtypes) < 2:
        raise UserError("one setting has nothing to be compared with; name several with --batch")
    run = build.setup(config, trains=False)
    if config.data.plays or run.kind.episode_columns:
        raise UserError("data.env: episodes are not measured; give a run on prompts or a task")
    for batch in batches:
        check_slots("--batch", batch, run.width + run.kind.new_tokens, run.model)
    if config.data.has_solutions:
        check_problems(run, "--problems", problems)
    with jax.set_mesh(run.mesh):
        key, params, step = load_policy(run, checkpoint)
        del params  # it is loaded anew on each mesh
        about, prompts = problems_of(run, key, "eval", problems)
    results: dict[str, dict[Setting, list[Sampled]]] = {"greedy": {}, "sampled": {}}
    for mesh, dtype in itertools.product(meshes, dtypes):
        policy = served_policy(_changed(config, sizes[mesh], dtype), checkpoint=checkpoint)
        for batch in batches:
            engine = _engine(policy, batch, run.width)
            for kind, samples in results.items():
                completions = _draw(engine, policy, prompts, _sampling(config, kind))
                points = _points(run, about, prompts, completions)
                samples[Setting(batch, mesh, dtype)] = [
                    Sampled(c.tokens, logprobs, float(p))
                    for (c, logprobs), p in zip(completions, points, strict=True)
                ]
    summaries = [
        setting._asdict()
        | {
            f"{kind}_accuracy": float(np.mean([d.points >= 1 for d in samples[setting]]))
            for kind, samples in results.items()
        }
        for setting in results["greedy"]
    ]
    rows = {kind: compare(samples) for kind, samples in results.items()}
    return {"step": step, "problems": len(prompts), **rows, "settings": summaries}


def _mesh_of(config: Config) -> str:
    """The mesh of a run in words; data=1 for one device."""
    several = [f"{axis}={size}" for axis, size in config.mesh_axes.items() if size != 1]
    return ",".join(several) or "data=1"


def _sizes(mesh: str) -> dict[str, int]:
    """Devices along each axis; a UserError for what is no mesh of this machine."""
    sizes: dict[str, int] = {}
    for part in mesh.split(","):
        axis, _, size = (x.strip() for x in part.partition("="))
        if axis not in AXES or not size.isdecimal() or int(size) < 1:
            raise UserError(
                f"--mesh {mesh!r}: {part.strip()!r} must be AXIS=DEVICES with an axis of"
                f" {', '.join(AXES)}, such as tensor=2"
            )
        sizes[axis] = int(size)
    make_mesh(sizes)
    return sizes


def _changed(config: Config, mesh: Mapping[str, int], dtype: str) -> Config:
    """The configuration with the policy as it is evaluated, on this mesh and in this dtype."""
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"dtype": dtype}),
            "mesh": dict(mesh),
            "sampling": config.sampling.model_copy(update={"mesh": {}, "int8": (), "float8": ()}),
        }
    )


def _sampling(config: Config, kind: str) -> dict[str, Any]:
    """The sampling parameters of a request."""
    if kind == "greedy":
        return {"temperature": 0.0}
    s = config.sampling
    chosen = {"temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p, "min_p": s.min_p}
    return chosen if s.temperature > 0 else chosen | {"temperature": 1.0}


def _engine(policy: ServedPolicy, batch: int, prompt_tokens: int) -> Engine:
    """An engine that decodes ``batch`` completions at once."""
    with jax.set_mesh(policy.mesh):
        return Engine(
            policy.network,
            policy.params,
            slots=batch,
            prompt_tokens=prompt_tokens,
            max_new_tokens=policy.new_tokens,
            stop_tokens=policy.tokenizer.stop_ids,
            chunk=min(_CHUNK, policy.new_tokens),
            requests=RequestFeatures(reports=True),
        )


def _draw(
    engine: Engine,
    policy: ServedPolicy,
    prompts: Sequence[Prompt],
    sampling: Mapping[str, Any],
) -> list[tuple[Completion, np.ndarray]]:
    """One completion of each prompt, and its tokens' log-probabilities."""
    numbers = [
        engine.submit(Request(tuple(ids), policy.new_tokens, seed=i, top_logprobs=0, **sampling))
        for i, ids in enumerate(prompt.tokens.tolist() for prompt in prompts)
    ]
    logprobs: dict[int, list[float]] = {number: [] for number in numbers}
    completions: dict[int, Completion] = {}
    with jax.set_mesh(policy.mesh):
        for update in engine.run():
            logprobs[update.request] += [report.logprob for report in update.reports]
            if update.completion is not None:
                completions[update.request] = update.completion
    return [(completions[number], np.array(logprobs[number])) for number in numbers]


def _points(
    run: Run, about: Any, prompts: list[Prompt], completions: Sequence[tuple[Completion, Any]]
) -> np.ndarray:
    """[M] the rewards of the part that defines accuracy."""
    paths = [np.asarray(completion.tokens, np.int32) for completion, _ in completions]
    ended = [StopReason(c.stop) == StopReason.STOP_TOKEN for c, _ in completions]
    return points_of(run, about, prompts, np.arange(len(paths)), paths, np.array(ended))
