"""The tables of a configuration: every key with its type, limits, default and meaning.

A table that may be absent, such as ``[lora]``, is None where it is not given. Those of which there
are several kinds are in ``data`` and ``tree``, conflicts of keys of several tables in ``features``
and ``checks``.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from jrl.config.base import Table, key
from jrl.config.checks import conflicts
from jrl.config.data import Data, PromptData
from jrl.config.optimizer import Optimizer
from jrl.config.tree import MethodTree, Tree

DType = Literal["float32", "bfloat16"]


def _listed(value: object) -> object:
    """Wraps a text in a list, so that a command line may use ``KEY=word``."""
    return (value,) if isinstance(value, str) else value


def reward_tables(value: object) -> object:
    """A name, or a list of them, as a table of reward parts with their defaults."""
    names = _listed(value)
    if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names):
        return {name: {} for name in names}
    return value


def _names(remedy: str) -> AfterValidator:
    """Refuses a path that is empty, an address, or holds a character that no path holds."""

    def check(value: str) -> str:
        if "://" in value:  # would be a directory "gs:" on this machine
            raise ValueError(
                "is an address; name a directory, in which a bucket may be mounted, or a model of"
                " the Hugging Face Hub as ORG/NAME"
            )
        if not value.strip() or "\0" in value:
            raise ValueError(remedy)
        return value

    return AfterValidator(check)


class RunTable(Table):
    """Location of the run, and when to resume it."""

    dir: (
        Annotated[
            str,
            _names("must be a path; `run.dir=` on the command line removes the key"),
            AfterValidator(os.path.expanduser),
        ]
        | None
    ) = key(None, "run directory; made when missing, default runs/NAME-TIME")
    resume: Literal["auto", "never", "must"] = key(
        "auto",
        "auto: resume from the newest checkpoint if there is one; never: refuse a directory that"
        " holds a run; must: refuse one that does not",
    )


# ---------------------------------------------------------------- the policy


class ModelTable(Table):
    """The policy network: a checkpoint, sizes for random weights, or a custom network."""

    path: Annotated[str, _names("must be a directory or a Hub name")] | None = key(
        None,
        "Hugging Face checkpoint to start from: a directory, or a Hub name as"
        " ORG/NAME[@REVISION]; with network, its tokenizer only",
    )

    config: dict[str, Any] | None = key(
        None,
        "sizes of a model with random weights (vocab_size, layers, embed_dim, heads, kv_heads,"
        " head_dim, mlp_dim, ...), instead of path; with network, the options of its function",
    )
    network: str | None = key(
        None,
        "a network of your own: FILE.py:function or module:function, called with vocab_size,"
        " max_length and the keys of model.config; returns a jrl.Network",
    )
    dtype: DType = key("float32", "type of activations")
    param_dtype: DType = key("float32", "type of weights and optimizer state")
    attention: Literal["auto", "blockwise", "cudnn", "splash", "triton", "xla"] = key(
        "auto",
        "attention kernel, all equal up to rounding: xla computes all scores at once; blockwise"
        " needs memory linear in the length; splash is for TPUs, in decoding too; cudnn is for GPUs"
        " in 16 bit, where decoding has kernels of its own (triton: these on any platform, slowly);"
        " auto takes the fastest exact one for the platform",
    )
    remat: Literal["auto", "scores", "elementwise", "dots", "mlp", "full", "none"] = key(
        "auto",
        "rematerialisation in the backward pass. elementwise: all but matrix products and"
        " attention; scores: the same, and the vocabulary's scores are kept; dots: attention as"
        " well; mlp: elementwise and the two wide products of the feed-forward part; full: whole"
        " layers; none: nothing; auto: the fastest of these that fits the memory of a GPU or TPU,"
        " elementwise on a CPU; a run directory keeps the choice",
    )


class LoraTable(Table):
    """Low-rank adapters: a small set of trained weights on top of frozen ones."""

    rank: int = Field(description="rank of the adapters", ge=1)
    alpha: float = key(16.0, "the adapters' output is multiplied by alpha / rank", gt=0)
    targets: Annotated[tuple[str, ...], BeforeValidator(_listed)] = key(
        ("q", "k", "v", "o", "gate", "up", "down"), "projections that get adapters", strict=False
    )
    base: Literal["float", "int8"] = key(
        "float",
        "storage of the frozen weights: float: model.param_dtype; int8: 8 bits, with a scale for"
        " each output channel",
    )
    path: Annotated[str, _names("must be a directory")] | None = key(
        None,
        "PEFT adapter directory to start from, of the same rank, alpha and targets; a method's"
        " reference policy is then model.path with these adapters, unless frozen.ref names another"
        " one (frozen.ref = model.path's value for the bare model)",
    )


class ValueTable(Table):
    """The value network, for methods that have one."""

    kind: Literal["head", "network", "networks"] = key(
        "head",
        "head: a linear head on the policy's last layer; network: a separate network, initialised"
        " from the weights of model.path if set; networks: one for each number that the method"
        " reads, such as crm's two reward models",
    )
    path: Annotated[str, _names("must be a directory")] | None = key(
        None,
        "reward model that the network starts from, trunk and head: the run directory of one, or a"
        " *ForSequenceClassification checkpoint with one label; of the policy's tokenizer",
    )

    @model_validator(mode="after")
    def _starts(self) -> Self:
        if self.path is not None and self.kind != "network":
            raise ValueError(
                f"path = {self.path!r} with kind = {self.kind!r}; set kind to 'network', which has"
                " a trunk of its own"
            )
        return self


def _once(values: tuple[str, ...]) -> tuple[str, ...]:
    """Refuses a list with a repeated value."""
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"names {value!r} twice; remove one")
    return values


Policies = Annotated[
    tuple[Annotated[str, _names("must be a directory, or a list of directories")], ...],
    BeforeValidator(_listed),
    Field(min_length=1, strict=False),
]
"""A directory, or several whose weights are averaged."""


# ---------------------------------------------------------------- sampling and rewards


def _size(value: int) -> int:
    if value < 1 and value != -1:
        raise ValueError("must be at least 1, or -1 for all remaining devices")
    return value


Axis = Literal["data", "fsdp", "tensor", "context", "expert"]
Mesh = dict[Axis, Annotated[int, AfterValidator(_size)]]
"""Devices along the axes of a mesh, 1 along absent ones; -1 for all remaining devices."""


def _whole(mesh: Mesh) -> dict[str, int]:
    """Devices along every axis."""
    return dict.fromkeys(get_args(Axis), 1) | mesh


def _without_cache(values: object) -> object:
    """Refuses the sampler's other part: a vector with a scale of its own is more exact in int8."""
    if values == "cache" or (isinstance(values, tuple | list) and "cache" in values):
        raise ValueError('has weights alone; set sampling.int8 = "cache" for keys and values')
    return values


class SamplingTable(Table):
    """Sampling parameters and decoding slots."""

    group: int = key(8, "completions per prompt", ge=1, le=1_000_000)
    temperature: float = key(1.0, "softmax temperature; 0 is greedy", ge=0)
    top_k: int = key(0, "keep the k likeliest tokens; 0 keeps all", ge=0)
    top_p: float = key(1.0, "keep the smallest set with this probability", gt=0, le=1)
    min_p: float = key(0.0, "keep tokens this likely relative to the likeliest", ge=0, lt=1)
    max_new_tokens: int = key(
        256, "longest completion, tokens; a procedural task or environment sets its own", ge=1
    )
    slots: int = key(
        0,
        "completions decoded at a time; a finished one frees its slot; 0: one slot per completion."
        " Per device if the mesh shards only the batch and weights are gathered for sampling",
        ge=0,
    )
    draws: int = key(
        1,
        "parts of a step's prompts (in text), sampled one after the other: reward functions and"
        " judges score one part while the next is sampled",
        ge=1,
    )
    int8: Annotated[
        tuple[Literal["weights", "cache"], ...],
        AfterValidator(_once),
        BeforeValidator(_listed),
        Field(strict=False),
    ] = key(
        (),
        "8-bit storage while sampling for training and serving: weights, cache (keys and values),"
        " or both. This changes the sampling distribution: losses are corrected for it unless"
        ' objective.correction = "none"',
    )
    float8: Annotated[
        tuple[Literal["weights"], ...],
        AfterValidator(_once),
        BeforeValidator(_listed),
        BeforeValidator(_without_cache),
        Field(strict=False),
    ] = key(
        (),
        "the same in float8_e4m3fn, for weights only: 4 significant bits per number, while int8"
        " divides a channel's range into 254 steps and so is more exact unless a channel has a few"
        " outliers",
    )

    mesh: Mesh = key(
        {},
        "device mesh while sampling, with the axes of [mesh]; by default the devices and mesh of"
        " training; with [placement] separate devices, one by default",
    )

    @property
    def mesh_axes(self) -> dict[str, int]:
        """Devices along each axis of the sampling mesh."""
        return _whole(self.mesh)

    @property
    def formats(self) -> dict[str, str]:
        """Storage of the sampler's "weights" and "cache": "same", "int8", "float8" of weights."""
        parts = dict.fromkeys(("weights", "cache"), "same")
        return parts | dict.fromkeys(self.int8, "int8") | dict.fromkeys(self.float8, "float8")

    @property
    def in_8_bits(self) -> tuple[str, ...]:
        """The parts, "weights" or "cache", with 8 bits per number, in either format."""
        return tuple(part for part, kind in self.formats.items() if kind != "same")


class RewardTable(Table):
    """One reward part; other keys are options of the reward function, or of the combinator."""

    model_config = ConfigDict(extra="allow")

    weight: float | None = key(
        None,
        "factor of the part in the sum; by default 1, and 0 if another part combines it",
    )
    judge: bool = key(False, "accuracy is the fraction of completions with 1 or more in this part")
    function: str | None = key(
        None, "reward function, if it is not the part's name: math, FILE.py:function"
    )
    missing: Literal["none", "zero", "drop"] = key(
        "none",
        "how None from the function counts: none: the part is left out of that sample's sum; zero:"
        " as 0; drop: the sample leaves its group",
    )
    range: Annotated[list[float], Field(min_length=2, max_length=2)] | None = key(
        None, "lowest and highest value; others are an error of the function"
    )
    where: dict[str, Any] = key(
        {}, "column = value, or a list of values: only for these rows of the data"
    )
    over: Literal["sample", "group", "batch"] | None = key(
        None,
        "samples per call of your own function: one (the default), a group, or all of a step as in"
        " TRL",
    )
    by_token: bool = key(
        False,
        "the function may return a list for a sample, one number per token; methods with credit"
        " per token read them there, others read their sum",
    )
    with_prompt: bool = key(
        False,
        "your own function gets the prompt's text, chat template included, before the completion,"
        " as solution_str in scripts for early versions of verl (TinyZero, Logic-RL, Search-R1)",
    )
    combine: str | None = key(
        None, "combines other parts: gate, product, sum, FILE.py:function, ..."
    )
    of: list[str] = key([], "parts that combine reads")

    @property
    def options(self) -> dict[str, Any]:
        """The keys that the reward function takes."""
        return dict(self.model_extra or {})


class RewardPoolTable(Table):
    """The processes that run reward functions."""

    workers: int = key(
        2,
        "processes; 0: run rewards in the trainer, without limits of time and memory",
        ge=0,
        le=1024,
    )
    timeout_seconds: float = key(10.0, "limit for one completion; see on_timeout", gt=0)
    memory_gib: float = key(
        4.0, "memory limit of one process and its children, in GiB; beyond it the call fails", gt=0
    )
    on_timeout: Literal["zero", "drop", "stop"] = key(
        "zero", "on a timeout: reward 0, drop the completion from its group, or stop the run"
    )
    on_error: Literal["zero", "drop", "stop"] = key(
        "stop", "on an exception in a reward function: the same choices"
    )

    @field_validator("on_error", mode="before")
    @classmethod
    def _renamed(cls, value: object) -> object:
        if value == "raise":
            raise ValueError('this is now "stop"')
        return value


# ---------------------------------------------------------------- training


class TrainTable(Table):
    """Training steps and how a step's batch is split."""

    steps: int = key(100, "training steps, each one rollout and one update", ge=0)
    prompts: int = key(32, "prompts per step; completions are prompts times sampling.group", ge=1)
    minibatches: int = key(1, "optimizer updates per pass over a batch", ge=1)
    microbatches: int = key(1, "gradient-accumulation steps per update", ge=1)
    mode: Literal["host", "in_flight", "packed", "compiled"] = key(
        "host",
        "host: a step is two programs, with rewards in Python between them; in_flight (with"
        " [placement]): as host, but running episodes switch to new weights as soon as a step ends;"
        " token versions then depend on timing; packed: as host, with"
        " completions of unequal length packed into rows, at the cost of compiling about 16 shapes;"
        " compiled: the whole run of a procedural task or environment is one program",
    )

    wait_seconds: float = key(
        3600.0,
        "longest wait without progress for rewards, environments, rollouts, training steps,"
        " evaluations, other processes, files or saving; beyond it the run saves what it can and"
        " ends",
        gt=0,
    )

    @model_validator(mode="after")
    def _packs_whole_batches(self) -> Self:
        if self.mode == "packed" and self.minibatches > 1:
            raise ValueError(
                f"train.mode = 'packed' packs a batch for one update, and train.minibatches ="
                f" {self.minibatches}; set one to 'host' or the other to 1"
            )
        return self

    @property
    def microbatch_prompts(self) -> int:
        """Prompts per forward pass of the training step."""
        return self.prompts // (self.minibatches * self.microbatches)


class WarmupTable(Table):
    """Supervised warm start on the procedural task's own solutions."""

    steps: int = key(0, "supervised steps before training", ge=0)
    learning_rate: float = key(1e-3, "learning rate of the warm start", gt=0)
    batch: int = key(64, "solutions per warm start step", ge=1)


class EvalTable(Table):
    """Evaluation on held-out prompts, before, during and after training."""

    every: int = key(0, "training steps between evaluations; 0: only before and after", ge=0)
    problems: int = key(512, "at most this many held-out problems", ge=1)
    samples: int = key(
        1,
        "completions per problem; pass@k is reported for k = 1, 2, 4, ... up to it",
        ge=1,
        le=1_000_000,
    )
    temperature: float = key(0.0, "softmax temperature in evaluation", ge=0)
    dtype: DType | None = key(
        None,
        "type of activations in evaluation, by default model.dtype; with 16-bit weights float32"
        " minimises the effect of batch, mesh and device on results (docs/runs.md)",
    )
    variants_of: str = key(
        "",
        "column of data.eval that variants of one problem share; all_variants is the"
        " fraction of its values all of whose problems are right",
    )

    @property
    def pass_k(self) -> tuple[int, ...]:
        """The k of the reported pass@k: powers of two, and all samples."""
        powers = (2**i for i in range(self.samples.bit_length()))
        return tuple(sorted({*powers, self.samples}))

    @model_validator(mode="after")
    def _samples_differ(self) -> Self:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"eval.samples = {self.samples} with eval.temperature = 0 repeats one completion;"
                " set eval.temperature above 0 or eval.samples to 1"
            )
        return self


class CheckpointTable(Table):
    """Checkpoints in the run directory."""

    every: int = key(50, "training steps between checkpoints; 0: only at the end", ge=0)
    keep: int = key(2, "newest checkpoints kept", ge=1)
    keep_every: int = key(0, "steps divisible by this number are kept forever; 0: none", ge=0)
    best: str | None = key(
        None,
        "metric whose best checkpoint is kept too, such as eval/accuracy; with a minus, such as"
        " -loss, the lowest is best",
    )

    @field_validator("best")
    @classmethod
    def _names_a_metric(cls, value: str | None) -> str | None:
        if value is not None and not value.removeprefix("-").strip():
            raise ValueError("must be a metric's name, such as eval/accuracy or -loss")
        return value


class WatchTable(Table):
    """A limit on a metric, and the action when it is violated."""

    above: float | None = None
    below: float | None = None
    grows: float | None = Field(default=None, gt=1)
    falls: float | None = Field(default=None, gt=0, le=1)
    steps: int = Field(1, ge=1)
    action: Literal["warn", "skip", "rollback", "stop", "none"] = "warn"

    @model_validator(mode="after")
    def _has_a_limit(self) -> Self:
        fixed, relative = (self.above, self.below), (self.grows, self.falls)
        if {*fixed, *relative} == {None} and self.action != "none":
            raise ValueError("needs above, below, grows or falls")
        if self.action == "skip" and (self.steps > 1 or {*relative} != {None}):
            raise ValueError(
                'action = "skip" acts inside the training step, on each step by itself: it takes'
                " above and below; remove steps, grows and falls"
            )
        if self.above is not None and self.below is not None and self.above < self.below:
            raise ValueError(
                f"above = {self.above:g} is less than below = {self.below:g}: every value breaks"
                " one of them; above is the largest value allowed, below the least"
            )
        return self


class PlacementTable(Table):
    """Rollout on separate devices: in every process those after its devices of [mesh]."""

    staleness: int = key(
        0,
        "maximum policy lag of a batch, in training steps; from 1 on, rollout and training run at"
        " the same time",
        ge=0,
    )


class PlanTable(Table):
    """Hardware for `jrl plan`; ignored in training."""

    topology: str = key(
        "v5e:4x4",
        "TPU slice or host of GPUs that `jrl plan` compiles for, CHIP:SHAPE such as v6e:8x8 or"
        " GPUxCOUNT such as h100x8, NUMBER*... for several; its option --topology overrides it",
        pattern=r"^([1-9]\d*\*)?[a-z]\w*?[:x]\d+(x\d+)*$",
    )


def _log_target(value: str) -> str:
    name, _, project = value.partition(":")
    if value != "tensorboard" and (name not in ("wandb", "trackio", "mlflow") or not project):
        raise ValueError("must be tensorboard, wandb:PROJECT, trackio:PROJECT or mlflow:EXPERIMENT")
    return value


class LogTable(Table):
    """Outputs of a run besides metrics.jsonl."""

    MIN_MEMBERS: ClassVar[int] = 8
    """Keep the fewest complete groups with at least 8 members in total."""

    samples_every: int = key(
        10,
        "training steps between writes of complete groups, 8 members or more, to samples.jsonl;"
        " 0: never",
        ge=0,
    )
    by: str = key(
        "", "column of the data, such as data_source: adds metrics reward_by/VALUE for each value"
    )
    to: Annotated[
        tuple[Annotated[str, AfterValidator(_log_target)], ...],
        AfterValidator(_once),
        BeforeValidator(_listed),
        Field(strict=False),
    ] = key(
        (),
        "further targets of metrics, each with an extra of its name: tensorboard, wandb:PROJECT"
        " (Weights & Biases), trackio:PROJECT, mlflow:EXPERIMENT; several as a list"
        " (docs/trackers.md)",
    )


class Config(Table):
    """All tables. ``load_config`` makes one."""

    method: str = key(
        "grpo",
        "training method; `jrl methods` lists them; or a function of your own as FILE.py:function"
        " or module:function",
    )
    seed: int = key(0, "root of all random numbers", ge=0, lt=2**32)
    run: RunTable = key(RunTable(), "")
    model: ModelTable = key(ModelTable(), "")
    lora: LoraTable | None = key(None, "")
    value: ValueTable = key(ValueTable(), "")
    frozen: dict[str, Policies] = key(
        {},
        "policies that the method reads but does not train: ref (by default a copy of the initial"
        " policy), teacher, or another name of the method. Each a Hugging Face checkpoint or run"
        " directory of any size with the policy's vocabulary, or a list of directories of one"
        " network, whose weights are averaged",
    )
    data: Data = key(PromptData(), "")
    sampling: SamplingTable = key(SamplingTable(), "")
    objective: dict[str, Any] = key(
        {},
        "coefficients of the loss: the method's (`jrl methods NAME`), and with every method"
        " correction (for the sampler's distribution), epochs (passes over a batch) and, for models"
        " with experts, router_balance and router_z (weights of losses on routers), router_replay"
        " (true: each token goes to the experts that the sampler chose): configs/README.md",
    )
    tree: Tree = key(MethodTree(), "")
    rewards: Annotated[dict[str, RewardTable], BeforeValidator(reward_tables)] = key(
        {},
        "reward parts by name: math, exact, format, model, or your own function as"
        ' "FILE.py:function" or "module:function", written as'
        " reward(samples) -> list of numbers, or reward(completions, **columns) as in TRL;"
        " verify, partial and your own for a procedural task; reward and success for an"
        " environment. Each a table with weight, judge (true: accuracy is measured by this part)"
        " and options; or one name, or a list of names, such as rewards=rewards.py:right",
    )
    reward_pool: RewardPoolTable = key(RewardPoolTable(), "")
    optimizer: Optimizer = key(Optimizer(), "")
    train: TrainTable = key(TrainTable(), "")
    warmup: WarmupTable = key(WarmupTable(), "")
    eval: EvalTable = key(EvalTable(), "")
    checkpoint: CheckpointTable = key(CheckpointTable(), "")
    mesh: Mesh = key(
        {},
        "device mesh of training, and of rollout unless it has its own. Axes: data (shards the"
        " batch), fsdp (batch and weights), tensor (heads and layer widths), context (sequences in"
        " training), expert (batch and experts); default 1, -1 along one axis for all remaining"
        " devices",
    )
    placement: PlacementTable | None = key(None, "")
    plan: PlanTable = key(PlanTable(), "")
    log: LogTable = key(LogTable(), "")
    watch: dict[str, WatchTable] = key(
        {},
        "limits by metric, such as entropy or logprob_diff. Each a table with above, below, grows"
        " (more than this multiple of its mean over the first 10 steps), falls (by more than this"
        " fraction from its best mean over 10 steps), steps (consecutive violations, default 1)"
        " and action (warn; skip: skip the step's update; rollback: continue with the weights of"
        " the newest earlier checkpoint and the next prompts, at most 3 times; stop: save and end;"
        " none). configs/README.md lists the default limits",
    )

    @property
    def prompts_at_once(self) -> int:
        """Prompts of a step that the sampler has at a time."""
        return self.train.prompts // self.sampling.draws

    @property
    def mesh_axes(self) -> dict[str, int]:
        """Devices of training along each axis."""
        return _whole(self.mesh)

    @property
    def replays_routing(self) -> bool:
        """Whether training routes each token to the sampler's experts."""
        return self.objective.get("router_replay") is True

    @model_validator(mode="after")
    def _no_conflicts(self) -> Self:
        if problems := conflicts(self):
            raise ValueError("\n".join(problems))
        return self
