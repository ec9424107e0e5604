"""Rankings of search paths at evaluation: likelihood, reward model, values, log-ratio, judge.

None of them reads the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import numpy as np

from jrl.collect.groups import to_batch
from jrl.collect.members import demonstration_rollout
from jrl.config import Config
from jrl.config.judge import PUBLISHED_FORMS
from jrl.data.prompts import pad_prompts
from jrl.episodes.search import Path, Scorer, by_likelihood
from jrl.errors import UserError, unknown_choice
from jrl.judging.host import Texts
from jrl.judging.judges import judges_of
from jrl.judging.text_parts import TextParts
from jrl.rewards.model import ModelReward
from jrl.sampling.params import make_sampling_params
from jrl.setup.kinds import kind_of
from jrl.setup.objective import method_of
from jrl.setup.reward_parts import judge_of, parts_of
from jrl.setup.run import Run
from jrl.train import programs
from jrl.train.reward_model import model_of, trains_reward
from jrl.train.score import score
from jrl.types import Array, Params, Prompt, Rollout, StopReason

Verifier = Callable[[Run, Params, int | None], tuple[Params, Scorer]]
"""(run, its parameters, checkpoint) -> parameters to sample with, and what judges paths."""
LIKELIHOOD = "likelihood"
"""Default score of a path."""
JUDGE = "judge"
BY = (LIKELIHOOD, "model", "value", "ratio", JUDGE)
"""Scores that can rank paths."""


def verifier_of(config: Config, by: str, reduce: str) -> Verifier:
    """A verifier by name.

    Raises:
      UserError: no such verifier or reduction, one that is not read, or that the run does not have.
    """
    if by not in BY:
        raise unknown_choice("--by", by, BY)
    if reduce not in REDUCED:
        raise unknown_choice("--reduce", reduce, REDUCED)
    if by in (LIKELIHOOD, "ratio", JUDGE) and reduce != "last":
        raise UserError(f"--reduce {reduce} is not read with --by {by}; leave it out")
    if by == LIKELIHOOD:
        return lambda run, params, checkpoint: (params, by_likelihood)
    if by == "model" and not parts_of(config).given_by("model"):
        raise UserError(
            "--by model: rewards.model is missing; set rewards.model.path to the run of a reward"
            " model, such as one of configs/reward_model.toml"
        )
    if by == JUDGE:
        _check_judge(config)
    trained = method_of(config, kind_of(config).new_tokens)
    if by == "value" and (not trained.value or trains_reward(config)):
        raise UserError(
            f"--by value: method = {config.method!r} trains no value network beside a policy; use"
            " --by model with rewards.model.path, or leave it out"
        )

    def make(run: Run, params: Params, checkpoint: int | None) -> tuple[Params, Scorer]:
        sizes = run.width, run.kind.new_tokens
        if by == "ratio":
            _, first = programs.new_policy(run)
            ratios = _log_ratios(run, params, first)
            return first, partial(_by_ratio, ratios, *sizes)
        if by == JUDGE:
            return params, partial(_by_judge, run, _judge_of(run), params, sizes)
        model = next(iter(run.rewards.models.values()), None)
        if by == "value":
            model = model_of(run.config, run.mesh, 1, after=True, checkpoint=checkpoint)
        if model is None:
            raise UserError(
                "--by model: the run's reward models read whole texts and have no values of steps;"
                " set rewards.model.path to the run of a reward model"
            )
        return params, partial(_by_values, model, *sizes, REDUCED[reduce])

    return make


REDUCED: Mapping[str, Callable[[np.ndarray], float]] = {
    "last": lambda values: float(values[-1]),
    "min": lambda values: float(values.min()),
    "mean": lambda values: float(values.mean()),
}
"""Reductions of step values to a path score."""


def _by_values(
    model: ModelReward,
    width: int,
    most: int,
    reduced: Callable[[np.ndarray], float],
    paths: Sequence[Path],
) -> list[float | None]:
    """Points of paths from a model's values after each step."""
    values = model.of_tokens(_rollout_of(paths, width, most))[:, 0]
    return [reduced(values[i, np.array(path.ends) - 1]) for i, path in enumerate(paths)]


def _by_ratio(
    ratios: Callable[[Rollout], Array],
    width: int,
    most: int,
    paths: Sequence[Path],
) -> list[float | None]:
    """Points of paths by the mean log-ratio of two policies over the last step, nats a token."""
    log_ratios = np.asarray(ratios(_rollout_of(paths, width, most)))[:, 0]
    return [float(log_ratios[i, path.begin : path.ends[-1]].mean()) for i, path in enumerate(paths)]


def _check_judge(config: Config) -> None:
    """Raises UserError where no judge can rank paths alone."""
    names = parts_of(config).given_by("judge")
    if not names:
        raise UserError(
            "--by judge: no part of [rewards] has function = 'judge'; add one, such as"
            " [rewards.self] function = 'judge', model = 'policy'"
        )
    table = judge_of(config, names[0])
    if table.only or table.form in ("pairwise", "listwise", *PUBLISHED_FORMS):
        key = "only" if table.only else "form"
        raise UserError(
            f"--by judge: rewards.{names[0]}.{key} = {getattr(table, key)!r}: a path is judged"
            " alone; use form = 'score', 'yes_no' or 'rubric', without only"
        )


def _judge_of(run: Run) -> TextParts:
    """The first judge of a run alone."""
    judges = judges_of(run, "eval")
    first = next(iter(judges.givers))
    return judges._replace(givers={first: judges.givers[first]})


def _by_judge(
    run: Run, judges: TextParts, params: Params, sizes: tuple[int, int], paths: Sequence[Path]
) -> list[float | None]:
    """Points of paths by a judge, which may be the policy that sampled them.

    The self-judgement of "Is PRM Necessary? Problem-Solving RL Implicitly Induces PRM Capability in
    LLMs" (Self-PRM, arXiv:2505.11227): the policy scores each of its k solutions and the best one
    is taken. How the paper asks and scores is not known; here the judge's form says it.
    """
    rollout = _rollout_of(paths, *sizes)
    stop = np.array(rollout.stop)
    stop[len(paths) :] = StopReason.ABSENT
    by_tokens = {p.tokens.tobytes(): p for listed in run.data.prompts.values() for p in listed}
    prompts = []
    for path in (*paths, *[paths[0]] * (len(stop) - len(paths))):
        ids = np.asarray(path.opening, np.int32)
        text = run.tokenizer.decode(ids.tolist())
        prompts.append(by_tokens.get(ids.tobytes()) or Prompt(0, text, ids, ""))
    texts = Texts(prompts, rollout.replace(stop=stop), run.tokenizer)
    points, *_ = judges(texts, {}, 0, {"policy": params})
    (values,) = (scores[: len(paths), 0].tolist() for scores in points.values())
    return [None if math.isnan(value) else value for value in values]


def _log_ratios(run: Run, policy: Params, first: Params) -> Callable[[Rollout], Array]:
    """(rollout) -> [N, G, T] float32, nats: the policy's log-probabilities less the first one's."""
    want, sampling_params = frozenset({"logprobs", "ref_logprobs"}), make_sampling_params()

    @jax.jit
    def ratios(policy: Params, first: Params, rollout: Rollout) -> Array:
        n, g, _ = rollout.tokens.shape
        batch = to_batch(rollout, jax.numpy.zeros((n, g, 1)), jax.numpy.ones(1))
        both = {"policy": policy, "ref": first}
        stats = score(both, batch, sampling_params, network=run.network, value=None, want=want)
        return stats["logprobs"] - stats["ref_logprobs"]

    return partial(ratios, policy, first)


def _rollout_of(paths: Sequence[Path], width: int, most: int) -> Rollout:
    """The paths as completions, and some more, so that few programs do for all numbers of them."""
    count = 1 << (max(len(paths), 1) - 1).bit_length()
    tokens, lengths = np.zeros((count, most), np.int32), np.ones(count, np.int32)
    for row, path in enumerate(paths):
        tokens[row, : len(path.tokens)], lengths[row] = path.tokens, len(path.tokens)
    openings = [path.opening for path in paths]
    openings += [openings[0]] * (count - len(paths))
    prompts = [Prompt(i, "", ids, "") for i, ids in enumerate(openings)]
    whole = np.ones(count, bool)
    return demonstration_rollout(*pad_prompts(prompts, width), tokens, lengths, whole, 1)
