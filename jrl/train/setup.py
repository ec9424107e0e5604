"""From a configuration to the values a run is made of. Strings become functions here, once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from jrl.config import Config, check_batch, from_table
from jrl.data.prompts import PromptCounts, build_prompts
from jrl.data.sources import Rows, open_source
from jrl.data.tasks import Task, get_task
from jrl.errors import UserError, choose
from jrl.mesh import batch_shards, make_mesh, replicated
from jrl.methods import all_methods, get_method
from jrl.methods.base import Method
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.heads import value_head, value_network
from jrl.models.tokenizer import Tokenizer, check_ids, check_vocab, load_tokenizer
from jrl.models.transformer import transformer
from jrl.rewards import make_reward
from jrl.rewards.pool import RewardPool
from jrl.sampling.draw import Law, make_law
from jrl.sampling.engine import check_fits, generate
from jrl.tables import RewardTable
from jrl.train.compiled import Iterate, make_iteration
from jrl.train.optimizer import make_optimizer
from jrl.train.rollout import check_group, task_rollout
from jrl.train.state import init_state, state_shardings
from jrl.train.step import Step, compile_step, make_step
from jrl.types import Network, Params, Prompt, TrainState, ValueNetwork

TASK_REWARDS = ("verify", "partial")


class Run(NamedTuple):
    """Everything a run is made of, before its state.

    Attributes:
      config: what was asked for.
      mesh: where it runs.
      model: the policy's shape.
      network: the policy.
      value: the value network, or None.
      tokenizer: the model's, or the task's.
      task: the procedural task, or None.
      prompts: training and held-out prompts in text; empty with a task.
      width: P, tokens.
      method: what to train with.
      optimizer: from optax.
      law: what is drawn from and trained.
      weights: reward part -> weight.
      judge: the reward part that says whether a completion is right.
      epochs: passes over each step's batch.
      params: the checkpoint's weights on the host, or None to draw them.
    """

    config: Config
    mesh: Mesh
    model: ModelConfig
    network: Network
    value: ValueNetwork | None
    tokenizer: Any
    task: Task | None
    prompts: dict[str, list[Prompt]]
    prompt_counts: dict[str, PromptCounts]
    width: int
    method: Method
    optimizer: optax.GradientTransformation
    law: Law
    weights: dict[str, float]
    judge: str
    epochs: int
    params: Params


def setup(config: Config) -> Run:
    """Builds and checks a run; what is wrong with the configuration is said here.

    Raises:
      UserError: naming the key, the value and what would do, before any step runs.
    """
    task = _task(config)
    method = _method(config, task)
    mesh = make_mesh(config.mesh.model_dump())
    check_batch(config, batch_shards(mesh))
    tokenizer, model, params = _model(config, task)
    network = transformer(model, remat=config.model.remat)
    prompts, counts = ({}, {}) if task else _prompts(config, tokenizer, method)
    for split, listed in prompts.items():
        largest = max((int(p.tokens.max()) for p in listed), default=0)
        check_ids(largest, model.vocab_size, f"data.{split}")
    width = task.prompt_tokens if task else _width(prompts)
    check_fits(network, width, _max_new_tokens(config, task))
    kinds = {"head": value_head, "network": value_network}
    value = kinds[config.value.kind](network) if method.value else None
    epochs = config.train.epochs or method.schedule.epochs
    updates = epochs * config.train.minibatches
    optimizer = make_optimizer(config.optimizer, config.train.steps, updates)
    return Run(
        config=config,
        mesh=mesh,
        model=model,
        network=network,
        value=value,
        tokenizer=tokenizer,
        task=task,
        prompts=prompts,
        prompt_counts=counts,
        width=width,
        method=method,
        optimizer=optimizer(config.optimizer.learning_rate),
        law=_law(config),
        weights=_weights(config, task),
        judge=_judge(config, task),
        epochs=epochs,
        params=params,
    )


def _task(config: Config) -> Task | None:
    if config.data.task is None:
        return None
    knobs = {} if config.data.difficulty is None else {"difficulty": config.data.difficulty}
    return get_task(config.data.task, **knobs)


def _method(config: Config, task: Task | None) -> Method:
    """The method; one that counts against the length limit is told it unless it was given."""
    coefficients = dict(config.objective)
    asks = all_methods().get(config.method)
    if asks is not None and "max_tokens" in asks.coefficients:
        coefficients.setdefault("max_tokens", _max_new_tokens(config, task))
    return get_method(config.method, **coefficients)


def _law(config: Config) -> Law:
    s = config.sampling
    return make_law(s.temperature, s.top_k, s.top_p, s.min_p)


def _max_new_tokens(config: Config, task: Task | None) -> int:
    return task.completion_tokens if task else config.sampling.max_new_tokens


def _model(config: Config, task: Task | None) -> tuple[Any, ModelConfig, Params]:
    """Tokenizer, shape, and weights when a checkpoint is named."""
    choice = config.model
    types: dict[str, Any] = {"dtype": choice.dtype, "param_dtype": choice.param_dtype}
    if choice.path is not None:
        directory = Path(choice.path)
        tokenizer = task.tokenizer if task else load_tokenizer(directory)
        shape = hf.read_config(directory)
        check_vocab(tokenizer, shape.vocab_size)
        shape, params = hf.load(directory, dtype=choice.param_dtype)
        return tokenizer, dataclasses.replace(shape, **types), params
    if task is None:
        raise UserError(
            "model.path is missing: training on data.train needs a checkpoint directory with a "
            "tokenizer; for a model from random weights name a procedural task in data.task"
        )
    if choice.config is None:
        raise UserError("model.path and model.config are both missing; give one of them")
    length = task.prompt_tokens + task.completion_tokens
    sizes = {"vocab_size": task.vocab_size, "max_length": length} | types | choice.config
    shape = from_table("model.config", ModelConfig, sizes)
    check_vocab(task.tokenizer, shape.vocab_size)
    return task.tokenizer, shape, None


def _prompts(
    config: Config, tokenizer: Tokenizer, method: Method
) -> tuple[dict[str, list[Prompt]], dict[str, PromptCounts]]:
    """Training and held-out prompts, tokenized."""
    data = config.data
    if data.train is None:
        raise UserError(
            "data.train and data.task are both missing; name a file of prompts or a procedural task"
        )
    solution_key = None
    if method.draw.demonstrations:
        solution_key = data.solution_key or data.answer_key
    elif data.solution_key is not None:
        raise UserError(
            f"data.solution_key = {data.solution_key!r} is not read by method = "
            f"{config.method!r}, which trains on no demonstrations; remove it"
        )
    prompts: dict[str, list[Prompt]] = {}
    counts: dict[str, PromptCounts] = {}
    for split in ("train", "eval"):
        spec = getattr(data, split)
        if spec is None:
            prompts[split] = []
            continue
        prompts[split], counts[split] = build_prompts(
            open_source(spec, tfds_dir=data.tfds_dir),
            tokenizer,
            question_key=data.question_key,
            answer_key=data.answer_key,
            answer_pattern=data.answer_pattern,
            solution_key=solution_key if split == "train" else None,
            system=data.system,
            template=data.template,
            max_prompt_tokens=data.max_prompt_tokens,
            overlong=data.overlong,
        )
    return prompts, counts


def question_prompts(run: Run, questions: Sequence[str]) -> list[Prompt]:
    """Prompts without answers, made as the run's own are; at most as long as those."""
    data = run.config.data
    prompts, _ = build_prompts(
        Rows([{"question": q} for q in questions], "prompt"),
        run.tokenizer,
        answer_key=None,
        system=data.system,
        template=data.template,
        max_prompt_tokens=run.width,
    )
    return prompts


def _width(prompts: dict[str, list[Prompt]]) -> int:
    """P: the longest prompt, rounded up to 16 so that a few more rows change no program."""
    longest = max(len(p.tokens) for split in prompts.values() for p in split)
    return -(-longest // 16) * 16


def _weights(config: Config, task: Task | None) -> dict[str, float]:
    """Reward part -> weight."""
    if not config.rewards:
        return {"verify": 1.0} if task else {"math": 1.0}
    if task:
        for name in config.rewards:
            if name not in TASK_REWARDS:
                raise choose("rewards", name, TASK_REWARDS)
    return {name: table.weight for name, table in config.rewards.items()}


def _judge(config: Config, task: Task | None) -> str:
    """The reward part that accuracy is measured by."""
    chosen = config.eval.reward
    names = ["verify"] if task else list(_weights(config, task))
    if chosen is not None:
        if chosen not in names:
            raise choose("eval.reward", chosen, names)
        return chosen
    checkers = [name for name in names if name in ("math", "exact")]
    found = checkers if len(checkers) == 1 else names
    if len(found) > 1:
        raise UserError(
            "eval.reward is missing: several reward parts could say what is right; name one of "
            + ", ".join(names)
        )
    return found[0]


def reward_pool(config: Config) -> RewardPool:
    """The reward functions of a run on text."""
    tables = config.rewards or {"math": RewardTable()}
    pool = config.reward_pool
    return RewardPool(
        {name: make_reward(name, **table.options) for name, table in tables.items()},
        workers=pool.workers,
        timeout_seconds=pool.timeout_seconds,
        on_error=pool.on_error,
    )


def check_trainable(run: Run) -> None:
    """Raises UserError when a run can be sampled from and evaluated, but not trained."""
    config = run.config
    check_group(config.method, run.method, config.sampling.group)
    if config.sampling.temperature == 0:
        raise UserError(
            "sampling.temperature = 0 draws the same completion for every member of a group; "
            "training needs a temperature above 0"
        )
    state_layout(run)
    if config.train.mode == "compiled":
        make_train_iteration(run)


# ---------------------------------------------------------------- the state and the two programs


def state_layout(run: Run) -> tuple[Callable[..., TrainState], TrainState]:
    """What makes a state from (key, policy params or None), and where each of its leaves lies.

    Raises:
      UserError: a weight that the mesh does not divide.
    """

    def make(key: jax.Array, params: Params) -> TrainState:
        return init_state(
            key,
            params,
            network=run.network,
            objective=run.method.objective,
            optimizer=run.optimizer,
            value=run.value,
        )

    key = jax.eval_shape(lambda: jax.random.key(run.config.seed))
    shapes = jax.eval_shape(make, key, run.params)
    return make, state_shardings(shapes, run.mesh, network=run.network, value=run.value)


def new_state(run: Run) -> tuple[TrainState, TrainState]:
    """A state at step 0 on the run's mesh, and its shardings."""
    make, shardings = state_layout(run)
    params = run.params
    if params is not None:  # placed leaf by leaf: no device ever holds the whole model
        params = jax.device_put(params, shardings.params["policy"])
    # Donated, because the state copies what it is given.
    make_placed = jax.jit(make, out_shardings=shardings, donate_argnums=1)
    return make_placed(jax.random.key(run.config.seed), params), shardings


def train_sampler(run: Run) -> Any:
    """Program 1 of a training step, compiled; None where the method draws nothing from text."""
    draw = run.method.draw
    group = run.config.sampling.group if draw.own else 0
    if run.task is None and not group:
        return None
    return sampler_program(
        run,
        split="train",
        group=group,
        baselines=draw.baseline_members,
        demonstrations=draw.demonstrations,
    )


def sampler_program(
    run: Run, *, split: str, group: int, baselines: int = 0, demonstrations: int = 0
) -> Any:
    """Program 1, compiled: ``task_rollout`` for a task, ``generate`` for text.

    Demonstrations in text are joined to the groups on the host, by ``TextSource``.
    """
    everywhere = replicated(run.mesh)
    if run.task is not None:
        on_task = partial(
            task_rollout,
            task=run.task,
            split=split,
            parts=tuple(run.weights) if split == "train" else ("verify",),
            network=run.network,
            group=group,
            baseline_members=baselines,
            demonstrations=demonstrations,
        )
        return jax.jit(on_task)
    on_text = partial(
        generate,
        network=run.network,
        group=group,
        max_new_tokens=run.config.sampling.max_new_tokens,
        stop_tokens=run.tokenizer.stop_ids,
        baseline_members=baselines,
    )
    # The whole rollout comes back to every host: each judges the text of all.
    return jax.jit(on_text, out_shardings=everywhere)


def train_program(run: Run, shardings: TrainState) -> Step:
    """Program 2, compiled."""
    return compile_step(make_train_step(run), shardings, run.mesh)


def make_train_step(run: Run) -> Step:
    """Program 2 as a pure function."""
    train = run.config.train
    return make_step(
        network=run.network,
        objective=run.method.objective,
        optimizer=run.optimizer,
        value=run.value,
        epochs=run.epochs,
        minibatches=train.minibatches,
        microbatches=train.microbatches,
    )


def make_train_iteration(run: Run) -> Iterate:
    """All five hops of a run on a task as a pure function, for compiled runs.

    Raises:
      UserError: the method has work for the host between the two programs.
    """
    assert run.task is not None
    return make_iteration(
        make_train_step(run),
        method=run.method,
        task=run.task,
        network=run.network,
        weights=run.weights,
        prompts=run.config.train.prompts,
        group=run.config.sampling.group,
    )
