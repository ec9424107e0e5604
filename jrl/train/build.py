"""From a configuration to the values a run is made of. Strings become functions here, once.

run = setup(config)                       # everything but the state; see ``programs``
run = bare_run(config, mesh, model=...)   # without data and weights, to plan it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import optax
from jax.sharding import Mesh

from jrl.config.checks import check_batch
from jrl.config.secrets import reveal
from jrl.config.tables import Config, RewardTable
from jrl.config.unions import QuestionTable, TextTable
from jrl.data.pairs import Judged, JudgedCounts, build_judged
from jrl.data.prompts import PromptCounts, build_prompts
from jrl.data.sources import MemoryRows, open_source
from jrl.data.tables import Source
from jrl.data.tasks import Task
from jrl.envs import Env
from jrl.envs.transcript import Transcript
from jrl.errors import Mistakes, UserError, choose
from jrl.mesh import batch_shards
from jrl.methods.base import Method
from jrl.models import hf
from jrl.models.attention.choice import check_attention_on_mesh
from jrl.models.config import ModelConfig
from jrl.models.heads import after_token
from jrl.models.quant import sampler
from jrl.models.routing import recording
from jrl.models.tokenizer import Tokenizer, check_ids, check_vocab, load_tokenizer
from jrl.models.transformer import transformer
from jrl.own import FORMS, check_options, check_takes, load, made_by
from jrl.rewards import make_reward
from jrl.rewards.pool import RewardPool
from jrl.sampling.params import SamplingParams, make_sampling_params
from jrl.train.adapters import lora_of, start_params, trained_network
from jrl.train.episodes import EPISODE_REWARDS, check_lengths, default_parts, eval_parts
from jrl.train.fits import check_training
from jrl.train.frozen import frozen_shape, run_shape, run_task
from jrl.train.gather import gathers
from jrl.train.method_network import check_network, network_of, own_layout
from jrl.train.objective import max_new_tokens, method_of, router_losses
from jrl.train.optimizer import make_optimizer
from jrl.train.placement import check_model_on_mesh, check_sampler_mesh, make_meshes
from jrl.train.recorded import RECORDED_REWARD, KeptCounts, recorded_groups
from jrl.train.reward_model import NAME, ModelReward, load_reward_model, make_value, trains_reward
from jrl.train.step import check_vocabularies
from jrl.types import NOTHING, Network, Params, Prompt, ValueNetwork

TASK_REWARDS = ("verify", "partial", NAME)


class RunData(NamedTuple):
    """What a run reads from files; empty where a procedural task makes the prompts.

    Attributes:
      prompts: "train" and "eval", prompts in text; empty with pairs.
      judged: "pairs" and "eval", judged completions; empty without ``data.pairs``.
      counts: what became of the records of each file.
      recorded: rows of sessions in groups, one of each training prompt; empty without
        recorded sessions or dialogues in ``data.train``.
    """

    prompts: Mapping[str, Sequence[Prompt]]
    judged: dict[str, list[Judged]]
    counts: dict[str, PromptCounts | JudgedCounts | KeptCounts]
    recorded: Sequence[Sequence[Transcript]] = ()


class RunRewards(NamedTuple):
    """What completions are judged by.

    Attributes:
      weights: reward part -> weight.
      judge: the reward part that says whether a completion is right; "" where nothing does.
      model: the trained one behind the reward part "model", or None.
    """

    weights: dict[str, float]
    judge: str = ""
    model: ModelReward | None = None

    @property
    def judged(self) -> int | None:
        """The column of the judge among the parts; None where nothing says what is right."""
        names = list(self.weights)
        return names.index(self.judge) if self.judge in names else None


class Run(NamedTuple):
    """Everything a run is made of, before its state.

    Attributes:
      config: what was asked for.
      mesh: where it trains.
      rollout_mesh: where completions to train on are drawn; None for ``mesh``.
      model: the policy's shape, or None for a network of one's own.
      network: the policy.
      value: the value network, or None.
      networks: the frozen policies that the configuration names and the method reads, by name.
      params: the checkpoint's weights, on the host or in their files, or None to draw them.
      tokenizer: the model's, or the task's.
      task: the procedural task or the environment, or None.
      data: what was read from files.
      width: P, tokens.
      sampling_params: the distribution that is drawn from and trained.
      rewards: what completions are judged by.
      method: what to train with, its schedule that of this run.
      optimizer: from optax.
    """

    config: Config
    mesh: Mesh
    rollout_mesh: Mesh | None
    model: ModelConfig | None
    network: Network
    value: ValueNetwork | None
    networks: dict[str, Network]
    params: Params
    tokenizer: Any
    task: Task | Env | None
    data: RunData
    width: int
    sampling_params: SamplingParams
    rewards: RunRewards
    method: Method
    optimizer: optax.GradientTransformation

    @property
    def shape(self) -> ModelConfig:
        """The policy's shape, in a run of the library's own decoder."""
        assert self.model is not None
        return self.model


def setup(config: Config, *, trains: bool = True) -> Run:
    """Builds and checks a run; what is wrong with the configuration is said here.

    Args:
      config: of the run.
      trains: False to set no devices aside for rollout.

    Raises:
      UserError: naming the key, the value and what would do, before any step runs.
    """
    task = run_task(config)
    method = method_of(config, task)
    mesh, rollout_mesh = make_meshes(config, apart=trains)
    tokenizer, model, params = _model(config, task)
    data = read_data(config, tokenizer, task, method)
    run = bare_run(
        config,
        mesh,
        task=task,
        model=model,
        tokenizer=tokenizer,
        width=task.prompt_tokens if task else _width(config, data),
        networks=_frozen_networks(config, method),
    )
    _check_tokens(data, run.network.vocab_size)
    if trains:
        check_training(run._replace(data=data))
    return run._replace(
        rollout_mesh=rollout_mesh,
        params=params if model is None else start_params(config, model, run.network, params),
        data=data,
        rewards=RunRewards(
            weights=run.rewards.weights,
            judge=accuracy_part(config, task),
            model=load_reward_model(config, rollout_mesh or mesh),
        ),
    )


def bare_run(
    config: Config,
    mesh: Mesh,
    *,
    task: Task | Env | None,
    model: ModelConfig | None,
    tokenizer: Any,
    width: int,
    networks: Mapping[str, Network] = NOTHING,
) -> Run:
    """A run without data and weights: what its two programs are made of, and what a plan compiles.

    Args:
      config: of the run.
      mesh: where it trains.
      task: the procedural task, or None.
      model: the policy's shape, or None for ``model.network``.
      tokenizer: only its ``stop_ids`` are read, and its size for a network of one's own.
      width: P, tokens.
      networks: frozen policies that are not like the policy, by name.

    Raises:
      UserError: what does not fit together, or does not divide over the mesh.
    """
    method = method_of(config, task)
    check_batch(config, batch_shards(mesh))
    check_experts(config, model, method)
    if model is None:
        network = own_network(config, task, tokenizer)
    else:
        network = trained_network(config, model, policy_network(config, model, mesh))
    one, network = network, network_of(network, method)
    if network is not one:
        check_network(config, mesh, method)
    check_vocabularies(network, networks)
    new_tokens = max_new_tokens(config, task)
    for each in (network, *networks.values()):
        check_lengths(each, task, width, new_tokens)
    if model is not None:
        check_model_on_mesh(mesh, model, width, new_tokens)
        check_attention_on_mesh(mesh, model, config.model.attention)
    check_sampler_mesh(config, mesh, model, width, new_tokens)
    value = make_value(config, one) if method.value else None
    if value is not None and trains_reward(config):
        value = after_token(value)
    updates = method.schedule.epochs * config.train.minibatches
    optimizer = make_optimizer(config.optimizer, config.train.steps, updates)
    return Run(
        config=config,
        mesh=mesh,
        rollout_mesh=None,
        model=model,
        network=network,
        value=value,
        networks=dict(networks),
        params=None,
        tokenizer=tokenizer,
        task=task,
        data=RunData({}, {}, {}),
        width=width,
        sampling_params=sampling_params_of(config, network.vocab_size),
        rewards=RunRewards(reward_weights(config, task)),
        method=method,
        optimizer=optimizer(config.optimizer.learning_rate),
    )


def sampler_of(run: Run, network: Network | None = None) -> Network:
    """The policy as completions to train on are drawn from it; ``network`` is it elsewhere."""
    network = network or run.network
    if run.model is None or own_layout(network):
        return network
    network = sampler(network, run.model, **run.config.sampling.formats)
    return recording(network, run.model) if run.config.replays_routing else network


def policy_network(config: Config, model: ModelConfig, mesh: Mesh) -> Network:
    """The policy as a function of whole weights."""
    return transformer(
        model,
        attention=config.model.attention,
        remat=config.model.remat,
        gather=gathers(config, model, mesh),
    )


def _frozen_networks(config: Config, method: Method) -> dict[str, Network]:
    """The frozen policies that are named and read, each of its own size."""
    needed = method.objective.frozen
    names = [name for name in config.frozen if name in needed]
    how = config.model.attention
    return {name: transformer(frozen_shape(config, name), attention=how) for name in names}


def sampling_params_of(config: Config, vocab_size: int) -> SamplingParams:
    """The distribution that a run draws from and trains.

    Raises:
      UserError: ``sampling.top_k`` is more than the vocabulary.
    """
    s = config.sampling
    if s.top_k > vocab_size:
        raise UserError(
            f"sampling.top_k = {s.top_k}: the vocabulary has {vocab_size} tokens; 0 keeps all"
        )
    return make_sampling_params(s.temperature, s.top_k, s.top_p, s.min_p)


def own_network(config: Config, task: Task | Env | None, tokenizer: Any) -> Network:
    """The network of one's own that ``model.network`` names, for the run's tokens and lengths.

    Raises:
      UserError: there is no such function, it does not take ``model.config``, or it returns
        something else.
    """
    spec = config.model.network or ""
    longest = task.prompt_tokens if task else _rounded(_text(config).max_prompt_tokens)
    sizes = {
        "vocab_size": tokenizer.vocab_size,
        "max_length": longest + max_new_tokens(config, task),
    }
    make = load(spec, "model.network")
    check_takes(make, tuple(sizes), f"model.network = {spec!r}")
    sizes |= reveal(config.model.config or {}, "model.config")
    check_options(make, sizes, "model.config")
    network = made_by(make, f"model.network = {spec!r}", **sizes)
    if not isinstance(network, Network):
        raise UserError(
            f"model.network = {spec!r} returned {network!r:.40}; return a jrl.Network, which"
            " jrl.linen_network and jrl.nnx_network make of a Flax module, and"
            " jrl.function_network of functions"
        )
    check_vocab(tokenizer, network.vocab_size)
    return network


def _model(config: Config, task: Task | Env | None) -> tuple[Any, ModelConfig | None, Params]:
    """Tokenizer, shape (None for ``model.network``), and weights when a checkpoint is named."""
    choice = config.model
    if choice.network is not None:
        if task is None and choice.path is None:
            raise UserError(
                f"model.network = {choice.network!r} with text needs model.path, the directory of"
                " its tokenizer"
            )
        return task.tokenizer if task else load_tokenizer(Path(choice.path or "")), None, None
    shape = run_shape(config, task)
    if choice.path is None:
        assert task is not None, "sizes without a checkpoint are those of a task's model"
        return task.tokenizer, shape, None
    directory = Path(choice.path)
    tokenizer = task.tokenizer if task else load_tokenizer(directory)
    check_vocab(tokenizer, shape.vocab_size)
    if (lora := lora_of(config)) is not None:
        lora.check(shape)
    _, params = hf.open_checkpoint(directory, dtype=choice.param_dtype)
    return tokenizer, shape, params


def read_data(
    config: Config,
    tokenizer: Any,
    task: Task | Env | None,
    method: Method,
    opened: Callable[..., Source] = open_source,
) -> RunData:
    """Prompts or judged completions from the files that the configuration names.

    Args:
      config: of the run.
      tokenizer: the model's, or the task's.
      task: the procedural task or the environment, or None.
      method: what to train with.
      opened: opens a source, as ``open_source`` does.

    Raises:
      UserError: a row lacks a field, is too long, or the template fails on it.
    """
    if config.recorded is not None:
        groups, given, kept = recorded_groups(config, config.recorded, tokenizer, method, opened)
        return RunData({"train": given, "eval": []}, {}, {"train": kept}, groups)
    judged, counts = _judged(config, tokenizer, task, opened)
    prompts: dict[str, list[Prompt]] = {"train": [], "eval": []}
    if task is None and not judged:
        prompts, prompt_counts = _prompts(config, tokenizer, method, opened)
        counts |= prompt_counts
    return RunData(prompts, judged, counts)


def _check_tokens(data: RunData, vocab_size: int) -> None:
    """Raises UserError for a token that the model has no row for."""
    texts = {split: [p.tokens for p in listed] for split, listed in data.prompts.items()}
    for split, listed in data.judged.items():
        texts[split] = [tokens for j in listed for tokens in (j.prompt, *j.completions)]
    texts["train"] += [x.tokens for group in data.recorded for row in group for x in row.segments]
    for split, arrays in texts.items():
        check_ids(max((int(x.max()) for x in arrays), default=0), vocab_size, f"data.{split}")


def _width(config: Config, data: RunData) -> int:
    """P: the longest prompt, rounded up to 16 so that a few more rows change no program."""
    if config.episodes:
        return config.max_prompt_tokens  # nobody knows yet what an environment will say
    lengths = [len(p.tokens) for listed in data.prompts.values() for p in listed]
    lengths += [len(j.prompt) for listed in data.judged.values() for j in listed]
    return _rounded(max(lengths))


def _rounded(length: int) -> int:
    return -(-length // 16) * 16


def _prompts(
    config: Config, tokenizer: Tokenizer, method: Method, opened: Callable[..., Source]
) -> tuple[dict[str, list[Prompt]], dict[str, PromptCounts]]:
    """Training and held-out prompts, tokenized."""
    data = config.data
    if not isinstance(data, QuestionTable) or data.train is None:
        raise UserError(
            "data.train and data.task are both missing; name a file of prompts or a procedural task"
        )
    names = {"question": "question", "answer": "answer", **data.fields}
    if method.draw.demonstrations:
        names.setdefault("solution", names["answer"])
    elif "solution" in names:
        raise UserError(
            f"data.fields.solution = {names['solution']!r} is not read by method = "
            f"{config.method!r}, which trains on no demonstrations; remove it"
        )
    prompts: dict[str, list[Prompt]] = {"train": [], "eval": []}
    counts: dict[str, PromptCounts] = {}
    for split, spec in (("train", data.train), ("eval", data.eval)):
        if spec is not None:
            prompts[split], counts[split] = build_prompts(
                opened(spec, key=f"data.{split}"),
                tokenizer,
                question_key=names["question"],
                answer_key=names["answer"],
                answer_pattern=data.answer_pattern,
                solution_key=names.get("solution") if split == "train" else None,
                **data.wording,
                max_prompt_tokens=data.max_prompt_tokens,
                overlong=data.overlong,
                invalid=data.invalid,
            )
    return prompts, counts


def _judged(
    config: Config, tokenizer: Tokenizer, task: Task | Env | None, opened: Callable[..., Source]
) -> tuple[dict[str, list[Judged]], dict[str, Any]]:
    """Training and held-out judged completions, tokenized; empty without ``data.pairs``.

    With a procedural task they are texts of that task, which gives tokenizer and lengths.
    """
    data = config.pairs
    if data is None:
        return {}, {}
    text = config.text or TextTable()
    judged: dict[str, list[Judged]] = {}
    counts: dict[str, Any] = {}
    for split, spec in (("pairs", data.pairs), ("eval", data.eval)):
        if spec is not None:
            judged[split], counts[split] = build_judged(
                opened(spec, key=f"data.{split}"),
                tokenizer,
                **text.wording,
                max_prompt_tokens=task.prompt_tokens if task else text.max_prompt_tokens,
                max_completion_tokens=max_new_tokens(config, task),
                overlong=data.overlong,
                invalid=data.invalid,
            )
    return judged, counts


def _text(config: Config) -> TextTable:
    """How text becomes prompts, in a run without a task."""
    assert config.text is not None
    return config.text


def question_prompts(run: Run, questions: Sequence[str], most: int = 0) -> list[Prompt]:
    """Prompts without answers, made as the run's own are; at most as long as those, or ``most``."""
    data = _text(run.config)
    prompts, _ = build_prompts(
        MemoryRows([{"question": q} for q in questions], "prompt"),
        run.tokenizer,
        answer_key=None,
        **data.wording,
        max_prompt_tokens=most or run.width,
    )
    return prompts


def reward_weights(config: Config, task: Task | Env | None) -> dict[str, float]:
    """Reward part -> weight."""
    if config.pairs is not None:
        return {"score": 1.0}
    if config.recorded is not None:
        unknown = [name for name in config.rewards if name != RECORDED_REWARD]
        if unknown:
            raise choose("rewards", unknown[0], (RECORDED_REWARD,))
        table = config.rewards.get(RECORDED_REWARD)
        return {RECORDED_REWARD: 1.0 if table is None else table.weight}
    if not config.rewards:
        return default_parts(task) if task or config.episodes else {"math": 1.0}
    if isinstance(task, Env):
        unknown = [name for name in config.rewards if name not in EPISODE_REWARDS]
        if unknown:
            raise choose("rewards", unknown[0], EPISODE_REWARDS)
    elif task:
        for name in config.rewards:
            if name not in TASK_REWARDS and ":" not in name:
                raise UserError(f"{choose('rewards', name, TASK_REWARDS)}, {FORMS}")
    return {name: table.weight for name, table in config.rewards.items()}


def accuracy_part(config: Config, task: Task | Env | None) -> str:
    """The reward part that accuracy is measured by."""
    chosen = next((name for name, part in config.rewards.items() if part.judge), None)
    # A reward model says which of two is better, not what is right.
    names = [name for name in reward_weights(config, task) if name != NAME]
    names = [*eval_parts(task)][:1] if task or config.episodes else names
    if chosen is not None:
        if chosen not in names:
            raise UserError(
                f"rewards.{chosen}.judge = true: accuracy is measured by {' or '.join(names)} here;"
                " remove it"
            )
        return chosen
    if not names:
        if isinstance(config.data, QuestionTable) and config.data.eval is not None:
            raise UserError(
                "rewards.model alone does not say what is right; add [rewards.math] with "
                "weight = 0 to measure accuracy, or remove data.eval"
            )
        return NAME
    checkers = [name for name in names if name in ("math", "exact")]
    found = checkers if len(checkers) == 1 else names
    if len(found) > 1:
        raise UserError(
            "several reward parts could say what is right; set judge = true in one of "
            + ", ".join(f"rewards.{name}" for name in names)
        )
    return found[0]


def reward_pool(config: Config) -> RewardPool:
    """The reward functions on the host; a reward model and a task's own parts are none of them.

    In episodes the environment pays, and there are none.
    """
    elsewhere = (NAME,) if config.task is None else (*TASK_REWARDS, *EPISODE_REWARDS)
    tables = {n: t for n, t in config.rewards.items() if n not in elsewhere}
    tables = tables if config.rewards or config.task else {"math": RewardTable()}
    tables = {} if config.episodes or config.recorded else tables
    pool, mistakes, functions = config.reward_pool, Mistakes(), {}
    for name, table in tables.items():
        options = reveal(table.options, f"rewards.{name}")
        functions[name] = mistakes.look(partial(make_reward, name, **options))
    mistakes.check()
    return RewardPool(
        functions,
        workers=pool.workers if tables else 0,
        timeout_seconds=pool.timeout_seconds,
        memory_gib=pool.memory_gib,
        on_timeout=pool.on_timeout,
        on_error=pool.on_error,
    )


def check_experts(config: Config, model: ModelConfig | None, method: Method) -> None:
    """Raises UserError for keys about routed experts that this run does not read."""
    losses = router_losses(config)
    asked = {
        "objective.router_replay": config.replays_routing,
        "objective.router_balance": losses.balance,
        "objective.router_z": losses.z,
    }
    for key, value in asked.items():
        if value and (model is None or not any(model.sparse)):
            shown = str(value).lower()
            raise UserError(f"{key} = {shown}: the model has no routed experts; remove it")
    if config.replays_routing and (not method.draw.own or config.given_completions):
        raise UserError(
            f"objective.router_replay = true: nothing is sampled with method = {config.method!r}, "
            "so there is no routing to replay; remove it"
        )
