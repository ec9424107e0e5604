"""Evaluation: accuracy, pass@k and majority vote on held-out prompts, with confidence intervals."""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jrl.config import Config
from jrl.data.tasks import Task
from jrl.episodes import Env
from jrl.errors import UserError
from jrl.evaluate.samples import samples_of
from jrl.mesh import replicated
from jrl.rewards.exact import final_answer
from jrl.rewards.pool import RewardPool
from jrl.sampling.params import make_sampling_params
from jrl.train import build, programs
from jrl.train.adapters import restore_policy
from jrl.train.build import Run
from jrl.train.collect import Groups, TextSource, compiled_stream
from jrl.train.compiled import held_out
from jrl.train.episodes import eval_parts
from jrl.train.host_episodes import HostEpisodes, host_source
from jrl.train.memory_check import check_evaluation
from jrl.train.resharding import free
from jrl.types import Array, Params, Prompt, StopReason


class Evaluation(NamedTuple):
    """What an evaluation found.

    Attributes:
      metrics: accuracy, accuracy_low, accuracy_high (95 %), pass@k, majority, length, problems.
      samples: records as ``RunWriter.write_samples`` takes them.
    """

    metrics: dict[str, float]
    samples: list[dict[str, Any]]


def pass_at_k(correct: np.ndarray, k: int) -> float:
    """The chance that at least one of k completions drawn from those given is right.

    The unbiased estimator of "Evaluating Large Language Models Trained on Code"
    (arXiv:2107.03374): 1 - C(n - c, k) / C(n, k), averaged over problems.

    Args:
      correct: [M, n] bool, problems by completions.
      k: at most n.

    Returns:
      A fraction.

    Raises:
      UserError: k is above n.

    >>> round(pass_at_k(np.array([[True, False, False], [False, False, False]]), 2), 4)
    0.3333
    """
    n = correct.shape[1]
    if not 1 <= k <= n:
        raise UserError(f"pass@{k}: there are {n} completions a problem; raise eval.samples")
    counts = [int(c) for c in correct.sum(axis=1)]
    # C(n - c, k) / C(n, k) as a product of c factors: the binomials have millions of digits.
    factors = np.clip(1 - k / np.arange(n, 0, -1.0), 0, 1)  # at i: 1 - k / (n - i)
    none_right = [float(np.prod(factors[:c])) for c in counts]
    return float(np.mean(1 - np.array(none_right)))


def majority_vote(answers: Sequence[Sequence[str | None]], correct: np.ndarray) -> float:
    """The fraction of problems whose most frequent answer is right; ties go to the earliest.

    The self-consistency of "Self-Consistency Improves Chain of Thought Reasoning in Language
    Models" (arXiv:2203.11171).

    Args:
      answers: [M][n] answers as text; None where a completion gives none, which does not vote.
      correct: [M, n] bool, whether each answer is right.

    Returns:
      A fraction; a problem without any answer counts as wrong.

    >>> majority_vote([["7", "3", "7"]], np.array([[True, False, True]]))
    1.0
    """
    right = 0
    for row, marks in zip(answers, correct, strict=True):
        votes = collections.Counter(a for a in row if a is not None)
        if votes:
            winner = max(votes, key=lambda a: votes[a])
            right += bool(marks[list(row).index(winner)])
    return right / max(len(answers), 1)


def wilson(successes: float, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a proportion, 95 % by default.

    Args:
      successes: at most ``trials``; may be fractional (a mean over samples of each problem).
      trials: problems, the independent units.
      z: standard deviations.

    Returns:
      (low, high) fractions.

    >>> tuple(round(x, 3) for x in wilson(9, 10))
    (0.596, 0.982)
    """
    if trials == 0:
        return 0.0, 1.0
    p = successes / trials
    centre = p + z * z / (2 * trials)
    spread = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def evaluation_metrics(
    correct: np.ndarray,
    lengths: np.ndarray,
    *,
    pass_k: Sequence[int],
    answers: Sequence[Sequence[str | None]] | None = None,
) -> dict[str, float]:
    """The numbers of an evaluation.

    Args:
      correct: [M, n] bool.
      lengths: [M, n] int, tokens.
      pass_k: each k reported.
      answers: for the majority vote; left out without them or with one completion a problem.

    Returns:
      Fractions by name, and ``length`` in tokens.
    """
    m, n = correct.shape
    low, high = wilson(float(correct.mean(axis=1).sum()), m)
    metrics = {
        "accuracy": float(correct.mean()),
        "accuracy_low": low,
        "accuracy_high": high,
        "length": float(lengths.mean()),
        "problems": float(m),
    }
    metrics |= {f"pass@{k}": pass_at_k(correct, k) for k in pass_k}
    if answers is not None and n > 1:
        metrics["majority"] = majority_vote(answers, correct)
    return metrics


def evaluation_names(run: Run) -> set[str] | None:
    """The metrics of an evaluation of a run on prompts; None where its environment adds some.

    Args:
      run: from ``setup``.
    """
    table = run.config.eval
    if run.config.episodes:
        return None
    answers = [["1"] * table.samples] if run.task is None else None
    one = np.ones((1, table.samples), int)
    names = evaluation_metrics(one == 1, one, pass_k=table.pass_k, answers=answers).keys()
    return {*names, *(("success", "reward", "turns") if isinstance(run.task, Env) else ())}


def episode_metrics(groups: Groups) -> dict[str, float]:
    """Means over evaluated episodes: success (fraction), reward (points) and turns."""
    taken = np.where(groups.rollout.mask, np.asarray(groups.ids["turn"]) + 1, 0).max(-1)
    success, reward = np.asarray(groups.rewards).mean((0, 1)).tolist()
    return {"success": success, "reward": reward, "turns": float(taken.mean())}


def environment_metrics(groups: Groups) -> dict[str, float]:
    """What an environment on the host counted, such as tool errors, an episode on average."""
    episodes = max(groups.counts.get("episodes", 0.0), 1.0)
    found = {k.removeprefix("env/"): v for k, v in groups.counts.items() if k.startswith("env/")}
    return {name: float(value) / episodes for name, value in sorted(found.items())}


# ---------------------------------------------------------------- evaluating a policy


class Evaluator:
    """Evaluates a run's policy on its held-out prompts, always the same ones.

    Args:
      run: from ``setup``.
      pool: the reward functions, for a run on text; a completion is right when the part
        ``run.rewards.judge`` gives at least one point. None when there is nothing to judge by.
    """

    def __init__(self, run: Run, pool: RewardPool | None) -> None:
        self.run = run = programs.as_evaluated(run)
        self.pool = pool
        table, sampling = run.config.eval, run.config.sampling
        sampling_params = make_sampling_params(
            table.temperature, sampling.top_k, sampling.top_p, sampling.min_p
        )
        mesh = programs.drawing_mesh(run, "eval")
        self.sampling_params = jax.device_put(sampling_params, replicated(mesh))
        self.told = ""  # how far an evaluation on text is; read by another thread
        self._episodes: HostEpisodes | None = None
        self._program: Any = None
        if run.task is not None:
            draw = partial(held_out, task=run.task, problems=table.problems, samples=table.samples)
            self._program = programs.compiled_draw(
                run, draw, programs.evaluated(run), whole=True, split="eval"
            )
        elif run.config.episodes:
            self._episodes = host_source(
                run,
                run.data.prompts["eval"],
                table.samples,
                split="eval",
                temperature=table.temperature,
            )
        else:
            self._program = programs.sampler_program(run, split="eval", group=table.samples)

    @property
    def available(self) -> bool:
        """Whether the run has held-out prompts at all."""
        return self.run.task is not None or bool(self.run.data.prompts["eval"])

    def __call__(self, key: Array, params: Params) -> Evaluation:
        """Evaluates under the run's mesh.

        Args:
          key: the run's root key.
          params: the policy's.
        """
        groups = (self._task if self.run.task is not None else self._text)(key, params)
        free(self._program)
        names = self.run.rewards.weights
        if self.run.task is not None or self.pool is None:
            names = {"verify": 1.0} if self.run.task is None else eval_parts(self.run.task)
        if self._episodes is not None:
            names = eval_parts(None)
        judge = list(names).index(self.run.rewards.judge) if self.run.rewards.judge in names else 0
        correct = np.asarray(groups.rewards)[:, :, judge] >= 1
        records = samples_of(groups, self.run.tokenizer, self.run.task, names, correct.size)
        answers: Any = None
        if self.run.task is None:
            answers = [final_answer(r["completion"]) for r in records]
            answers = np.array(answers, object).reshape(correct.shape).tolist()
        metrics = evaluation_metrics(
            correct,
            np.asarray(groups.rollout.mask).sum(-1),
            pass_k=self.run.config.eval.pass_k,
            answers=answers,
        )
        if "turn" in groups.ids:
            metrics |= episode_metrics(groups)
        if self._episodes is not None:
            metrics["failed"] = float((groups.rollout.stop >= StopReason.FAILED).mean())
            metrics |= environment_metrics(groups)
        return Evaluation(metrics, [r | {"split": "eval"} for r in records])

    def _task(self, key: Array, params: Params) -> Groups:
        groups: Groups = jax.device_get(self._program(key, params, self.sampling_params))
        return groups

    def _text(self, key: Array, params: Params) -> Groups:
        """All held-out prompts in draws of one size, the last one filled up and cut."""
        config, prompts = self.run.config, self.run.data.prompts["eval"]
        size, total = config.train.prompts, min(config.eval.problems, len(prompts))
        draw = self._source(prompts)
        draws = []
        for start in range(0, total, size):
            self.told = f"{start} of {total} prompts done"
            positions = (start + np.arange(size)).astype(np.int32)
            drawing = compiled_stream(key, "eval", np.int32(0))
            draws.append(draw(drawing, params, np.int32(0), positions))
        join = lambda *xs: np.concatenate(xs)[:total]  # noqa: E731
        counts: collections.Counter[str] = collections.Counter()
        for drawn in draws:
            counts.update(drawn.counts)
        return Groups(
            jax.tree.map(join, *(d.rollout for d in draws)),
            join(*(d.rewards for d in draws)),
            [prompt for d in draws for prompt in d.subject][:total],
            dict(counts),
            jax.tree.map(join, *(d.ids for d in draws)),
            jax.tree.map(join, *(d.stats for d in draws)),
        )

    def _source(self, prompts: Sequence[Prompt]) -> Any:
        """What draws held-out groups of text."""
        if self._episodes is not None:
            return self._episodes.draw
        source = TextSource(
            prompts=prompts,
            width=self.run.width,
            seed=None,
            program=self._program,
            sampling_params=self.sampling_params,
            pool=self.pool,
            tokenizer=self.run.tokenizer,
            name="eval",
        )
        return source.draw if self.pool is None else programs.with_rewards(self.run, source.draw)


def load_policy(run: Run, checkpoint: int | None) -> tuple[Array, Params, int]:
    """The root key, the policy and its step: from a run's checkpoint, or as before training.

    Args:
      run: from ``setup``.
      checkpoint: a training step; None for the newest.

    Raises:
      UserError: ``run.dir`` holds a run but no such checkpoint.
    """
    began = (Path(run.config.run.dir or "") / "config.toml").exists()
    if run.config.run.dir is None or (checkpoint is None and not began):
        return *programs.new_policy(run), 0
    wanted = {
        "step": jax.ShapeDtypeStruct((), np.int32),
        "key": jax.eval_shape(jax.random.key_data, jax.eval_shape(lambda: jax.random.key(0))),
    }
    layout = programs.policy_layout(run)
    policy, found = restore_policy(
        run.config, run.network, layout, checkpoint=checkpoint, also=wanted
    )
    return found["key"], policy, int(found["step"])


def evaluate_run(config: Config, *, checkpoint: int | None = None) -> dict[str, Any]:
    """Evaluates a run's checkpoint, or the model it starts from.

    Args:
      config: a run's configuration; with ``run.dir``, its checkpoints are looked for there.
      checkpoint: a training step; None for the newest.

    Returns:
      ``step`` and the evaluation's metrics.

    Raises:
      UserError: nothing to evaluate on, or no such checkpoint.
    """
    run = build.setup(config, trains=False)
    if run.task is not None or run.data.prompts["eval"]:
        check_evaluation(run)
    with jax.set_mesh(run.mesh):
        key, params, step = load_policy(run, checkpoint)
        if run.task is not None:
            return {"step": step} | Evaluator(run, None)(key, params).metrics
        if not run.data.prompts["eval"]:
            raise UserError("data.eval is missing; name a file of held-out prompts")
        with build.reward_pool(config) as pool:
            return {"step": step} | Evaluator(run, pool)(key, params).metrics


def asked_in_text(run: Run, questions: Sequence[str]) -> Run:
    """A run of a procedural task whose held-out prompts are these texts, judged by nobody.

    Raises:
      UserError: a text is longer than the task's prompts, or holds a character that is none of
        its tokenizer's.
    """
    task = run.task
    assert isinstance(task, Task)
    prompts = []
    for number, text in enumerate(questions, 1):
        ids = task.tokenizer.encode(text)
        if not 0 < len(ids) <= task.prompt_tokens:
            problem = task.generate(jax.random.key(0), split="eval")
            raise UserError(
                f"prompt {number}: {text!r} has {len(ids)} characters; prompts of data.task ="
                f" {task.name!r} have up to {task.prompt_tokens}, such as"
                f" {task.render(problem)[0]!r}"
            )
        prompts.append(Prompt(number - 1, text, np.array(ids, np.int32), "", {}, None))
    limit = {"max_new_tokens": task.completion_tokens}
    sampling = run.config.sampling.model_copy(update=limit)
    return run._replace(
        config=run.config.model_copy(update={"sampling": sampling}),
        task=None,
        data=run.data._replace(prompts={"train": [], "eval": prompts}),
    )


def sample_run(
    config: Config,
    *,
    prompts: Sequence[str] | None = None,
    count: int = 4,
    checkpoint: int | None = None,
) -> list[dict[str, Any]]:
    """Completions of a run's policy, drawn as in training.

    Args:
      config: a run's configuration.
      prompts: questions in text; None for held-out problems.
      count: held-out problems taken when ``prompts`` is None.
      checkpoint: a training step; None for the newest.

    Returns:
      Records with prompt, completion, length and stop, and with rewards where there is an answer
      to judge by.

    Raises:
      UserError: a prompt that the tokenizer or the task's length does not allow, or no such
        checkpoint.
    """
    run = build.setup(config, trains=False)
    if isinstance(run.task, Env) and prompts:
        raise UserError(f"data.env = {run.task.name!r} makes its own prompts; leave --prompt out")
    if run.task is not None and prompts:
        run = asked_in_text(run, prompts)
        config = run.config
    elif run.task is None:
        chosen = build.question_prompts(run, prompts) if prompts else run.data.prompts["eval"]
        if not chosen:
            raise UserError("data.eval is missing; give prompts, or a file of held-out ones")
        run = run._replace(data=run.data._replace(prompts={"eval": chosen}))
    held_out = not prompts
    table = run.config.eval.model_copy(
        update={
            "problems": len(prompts) if prompts else count,
            "samples": config.sampling.group,
            "temperature": config.sampling.temperature,
        }
    )
    run = run._replace(config=config.model_copy(update={"eval": table}))
    check_evaluation(run, keys=("--count", "sampling.group"))
    with jax.set_mesh(run.mesh):
        key, params, step = load_policy(run, checkpoint)
        with contextlib.ExitStack() as stack:
            judged = held_out and run.task is None
            pool = stack.enter_context(build.reward_pool(config)) if judged else None
            records = Evaluator(run, pool)(key, params).samples
    unjudged = ("rewards", "reward", "answer", "split")
    return [
        {"step": step} | {k: v for k, v in r.items() if held_out or k not in unjudged}
        for r in records
    ]
