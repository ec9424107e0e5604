"""A run's batches: its source, the wrappers around it, and the collector.

A reader finds here, in one list, what stands between the training loop and the sampler.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jrl.collect.collector import Batches, Collector
from jrl.collect.curriculum import HostRounds, HostTools, episode_rounds, text_rounds, with_problems
from jrl.collect.device_episodes import on_device
from jrl.collect.host_source import check_host, host_labels, host_source, try_env
from jrl.collect.plan import Setting
from jrl.collect.plan_tools import Hinter, TextTools
from jrl.collect.resharding import ReshardedSampler
from jrl.collect.reward_stages import FiniteSums, JudgedParts, judged_parts
from jrl.collect.searchers import episode_searcher, text_searcher
from jrl.collect.sources import Source, epoch_order
from jrl.collect.sources_given import JudgedSource, RecordedSource, sizes_of
from jrl.collect.sources_own import Sampler, make_own_source, tried_source
from jrl.collect.sources_task import EnvSource, TaskSource
from jrl.collect.sources_text import TextSampler, TextSource
from jrl.collect.tree_search import TreeSearch, search_source, undrawn_text
from jrl.episodes.search import Searcher
from jrl.episodes.transcript import RowShape
from jrl.errors import UserError
from jrl.mesh import replicated
from jrl.methods.curriculum import Curriculum, Table
from jrl.models.tokenizer import line_ends
from jrl.rewards.pool import RewardPool
from jrl.sampling.params import SamplingParams, make_sampling_params
from jrl.setup.device_kinds import AskedKind, EnvKind, TaskKind
from jrl.setup.features import check_division
from jrl.setup.given_kinds import DialogueKind, PairKind, RecordedKind, TaskPairKind
from jrl.setup.kind import Kind, Labels
from jrl.setup.kinds import EpisodeKind, SourceKind, TextKind
from jrl.setup.recorded import RECORDED_REWARD
from jrl.setup.run import Run, question_prompts
from jrl.system.signals import Stopping
from jrl.train import programs
from jrl.train.disjoint import draw_ahead, restored
from jrl.types import Prompt


def run_source(run: Run, pool: RewardPool | None, split: str = "train") -> Source:
    """The source of a run's groups with its wrappers, from the inside out.

    Args:
      run: from ``build.setup``.
      pool: the reward functions on the host; None for none.
      split: "train" or "eval".
    """
    if split == "eval":
        return sources_of(run).held_out(run, pool)
    source = sources_of(run).train(run, pool)
    if isinstance(source, TreeSearch):  # it searches a source that has all parts
        return source
    return judged_parts(run, source, pool)


def table_of(run: Run, curriculum: Curriculum) -> Table:
    """The problems that a run's curriculum chooses from, with the data's columns of numbers."""
    rows = run.kind.problems(run.data, curriculum.pool)
    columns = number_columns(run.data.prompts.get("train", ()))
    return Table(rows, 1, jnp.zeros(rows, jnp.int32), columns)


def number_columns(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The columns in which every row has a finite number, [rows] float32 by name.

    "stage" is 0 where a row has none, and may be text, as CSV has it.

    Raises:
      UserError: a stage is no number.
    """
    names = set(prompts[0].meta) if prompts else set()
    for prompt in prompts:
        names = {name for name in names if _is_number(prompt.meta.get(name))}
        if not names:
            break
    columns = {n: [float(p.meta[n]) for p in prompts] for n in sorted(names)}
    if any("stage" in prompt.meta for prompt in prompts):
        columns["stage"] = [_stage(prompt) for prompt in prompts]
    return {name: jnp.asarray(values, jnp.float32) for name, values in columns.items()}


def _stage(prompt: Prompt) -> float:
    value = prompt.meta.get("stage")
    try:
        stage = 0.0 if value is None or value == "" else float(value)
    except (TypeError, ValueError):
        stage = math.nan
    if not math.isfinite(stage):
        raise UserError(f"data.train, row {prompt.id + 1}: stage = {value!r:.40}; write a number")
    return stage


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@contextlib.contextmanager
def training_batches(
    run: Run, pool: RewardPool | None, cursor: int, notes: Mapping[str, Any], stopping: Stopping
) -> Iterator[Batches]:
    """The batches of a run: collected on demand, or ahead of training on separate devices.

    Args:
      run: from ``build.setup``.
      pool: the reward functions of a run on text.
      cursor: tickets issued so far.
      notes: of the source and the packing that an earlier call of the run had; {} for a new run.
      stopping: when set, a rollout ahead of training has as long to end as any other.
    """
    packer = programs.packer(run)
    if packer is not None and "packing" in notes:
        packer.resume(notes["packing"])
    run, problems = with_problems(run)
    source = run_source(run, pool)
    if isinstance(source, JudgedParts) or (pool is not None and pool.functions):
        source = FiniteSums(source, run.rewards.weights, run.config.reward_pool.on_error)
    collector = Collector(
        source,
        setting_of(run),
        run.mesh,
        packer,
        sampled=run.kind.sampled,
        rounds=HostRounds(source, problems, sources_of(run).rounds(run, source)),
        notes=notes,
    )
    if run.rollout_mesh is None:
        yield collector
        return
    carried = [restored(groups, run) for groups in notes.get("carried", [])]
    with draw_ahead(run, collector, cursor, carried, stopping) as ahead:
        yield ahead


def setting_of(run: Run) -> Setting:
    """The constants of a run's steps, for its collector."""
    curriculum = run.method.curriculum
    return Setting(
        method=run.method._replace(plan=run.kind.played(run.method.plan)),
        prompts=run.config.train.prompts,
        group=run.config.sampling.group,
        weights=list(run.rewards.weights.values()),
        accuracy_column=run.rewards.accuracy_column,
        tools=sources_of(run).tools(run),
        table=None if curriculum is None else table_of(run, curriculum),
        contexts=run.kind.contexts_of_plans,
        in_order=partial(epoch_order, run.config.data.order_seed(run.config.seed)),
    )


# ---------------------------------------------------------------- a source for each kind of data


def task_source(run: Run, pool: RewardPool | None) -> Source:
    """Problems of a task."""
    if (search := run.method.draw.search) is not None:
        problems = TaskSource(run.kind.task, run.rewards.given_by("data"), None)
        return search_source(run, search, judged_parts(run, problems, pool))
    return _of_task(run, TaskSource)


def env_source(run: Run, pool: RewardPool | None) -> Source:
    """Episodes in an environment on the device."""
    return _of_task(run, EnvSource)


def _of_task(run: Run, make: type[TaskSource]) -> Source:
    program, params = programs.train_sampler(run), _placed(run, run.sampling_params, "train")
    parts, draw = run.rewards.given_by("data"), _taking_requests(program)
    return make(run.kind.task, parts, draw, params, free=_free(program))


def text_source(run: Run, pool: RewardPool | None, program: Any = None) -> Source:
    """Prompts in text; ``program`` is one of ``train_sampler``, None for a new one."""
    config, draw, seed = run.config, run.method.draw, run.config.data.order_seed(run.config.seed)
    if draw.search is not None:
        return search_source(run, draw.search, undrawn_text(run, pool, seed))
    program = programs.train_sampler(run) if program is None else program
    by_line = "step" in run.kind.labels(run.method).ids
    return TextSource(
        all_prompts=run.data.prompts["train"],
        width=run.width,
        seed=seed,
        program=program,
        sampling_params=_placed(run, run.sampling_params, "train"),
        pool=pool,
        tokenizer=run.tokenizer,
        max_new_tokens=config.sampling.max_new_tokens,
        temperature=config.sampling.temperature,
        lines=line_ends(run.tokenizer, run.network.vocab_size) if by_line else (),
        steps=config.train.steps,
        free=_free(program),
        draws=config.sampling.draws,
    )


def episode_source(run: Run, pool: RewardPool | None) -> Source:
    """Episodes with an environment on the host."""
    return host_source(run, run.data.prompts["train"], run.config.sampling.group)


def recorded_source(run: Run, pool: RewardPool | None) -> Source:
    """The groups of recorded sessions or dialogues."""
    sampling, config = run.config.sampling, run.config
    return RecordedSource(
        groups=run.data.recorded,
        all_prompts=run.data.prompts["train"],
        shape=RowShape(sampling.group, run.width, sampling.max_new_tokens),
        seed=config.data.order_seed(config.seed),
        weight=run.rewards.weights[RECORDED_REWARD],
    )


def pair_source(run: Run, pool: RewardPool | None) -> Source:
    """The training groups of ``data.pairs``."""
    sizes, config = sizes_of(*run.data.judged.values()), run.config
    return JudgedSource(run.data.judged["pairs"], sizes, config.data.order_seed(config.seed))


def own_source(run: Run, pool: RewardPool | None) -> Source:
    """A source of one's own."""
    params = _placed(run, run.sampling_params, "train")
    sampling = run.config.sampling
    sampler = TextSampler(programs.train_sampler(run), params, sampling.temperature)
    limit, size = sampling.max_new_tokens, run.network.vocab_size
    return make_own_source(run, Sampler(sampler, run.width, limit, size))


MakeSource = Callable[[Run, RewardPool | None], Source]
"""(run, reward functions on the host) -> the source of its groups."""


def held_out_task(run: Run, pool: RewardPool | None) -> Source:
    """Held-out problems of a task or an environment on the device."""
    program, params = _evaluation(run)
    draw, free = _taking_requests(program), _free(program)
    parts = tuple(run.kind.eval_parts)
    return TaskSource(run.kind.task, parts, draw, params, free=free, split="eval")


def held_out_text(run: Run, pool: RewardPool | None) -> Source:
    """Held-out prompts in text."""
    program, params = _evaluation(run)
    source = TextSource(
        all_prompts=run.data.prompts["eval"],
        width=run.width,
        seed=None,
        program=program,
        sampling_params=params,
        pool=pool,
        tokenizer=run.tokenizer,
        name="eval",
        steps=run.config.train.steps,
        free=_free(program),
    )
    return source if pool is None else judged_parts(run, source, pool, "eval")


def held_out_episodes(run: Run, pool: RewardPool | None) -> Source:
    """Held-out prompts that open episodes on the host."""
    table, prompts = run.config.eval, run.data.prompts["eval"]
    return host_source(run, prompts, table.samples, split="eval", temperature=table.temperature)


def held_out_own(run: Run, pool: RewardPool | None) -> Source:
    """A source of one's own, asked for the split "eval"."""
    sampler = TextSampler(*_evaluation(run), run.config.eval.temperature)
    limit, size = run.config.sampling.max_new_tokens, run.network.vocab_size
    source = make_own_source(run, Sampler(sampler, run.width, limit, size))
    return source if pool is None else judged_parts(run, source, pool, "eval")


def undrawn_source(run: Run, pool: RewardPool | None, split: str) -> Source:
    """A source with the problems and rewards of a split that samples nothing.

    Args:
      run: on a task, or on prompts in text.
      pool: the reward functions of a run on text.
      split: "train" or "eval".
    """
    return sources_of(run).undrawn(run, pool, split)


def _undrawn_prompts(run: Run, pool: RewardPool | None, split: str) -> Source:
    return undrawn_text(run, pool, None, split)


def _undrawn_task(run: Run, pool: RewardPool | None, split: str) -> Source:
    return TaskSource(run.kind.task, tuple(run.kind.eval_parts), None, split=split)


def nothing_own(run: Run) -> None:
    """Nothing: the data need a sampler, and no part of them is one's own."""


def tried_env(run: Run) -> None:
    """Nothing, after a turn with an environment of one's own."""
    try_env(run)


def given_source(run: Run) -> Source:
    """The source of completions that the data hold."""
    return sources_of(run).train(run, None)


def _check_players(run: Run) -> None:
    check_division(run.kind.players, run.network)


def _kind_labels(run: Run) -> tuple[int, Labels]:
    return run.kind.players, run.kind.labels(run.method)


def task_tools(run: Run) -> Callable[[Any], Any] | None:
    """Solutions and hints of a task; nothing of an environment."""
    task: Any = run.kind.task
    return on_device(task).tools(task)


def text_tools(run: Run) -> Callable[[Any], Any]:
    """Solutions and hints of prompts in text."""
    return _of_text(run, Hinter(run))


def solution_tools(run: Run) -> Callable[[Any], Any]:
    """Solutions of prompts that hints have no place in."""
    return _of_text(run, None)


def no_tools(run: Run) -> None:
    """Nothing: no plan is played."""


def _of_text(run: Run, hinted: Hinter | None) -> Callable[[Any], Any]:
    new = run.config.sampling.max_new_tokens
    tools = TextTools(
        run.data.prompts["train"],
        new,
        hinted,
        tokenizer=run.tokenizer,
        tokens_of=lambda question: question_prompts(run, [question], 1 << 30)[0].tokens,
        longest=run.network.max_length - new,
    )
    return lambda key: tools


class Sources(NamedTuple):
    """Functions of a kind of data that need a run's programs.

    Attributes:
      train: makes the source of groups to train on.
      held_out: makes the source of held-out groups with all their reward parts, for a run from
        ``programs.as_evaluated``.
      undrawn: (run, reward functions, split) -> source of a split's problems that samples nothing.
      tools: (run) -> (root key) -> the data's tools for plans; None for none.
      check: raises UserError if a run cannot be trained on these data.
      tried: (run) -> source that draws without a sampler, or None; before anything compiles. Raises
        UserError if a source or an environment of one's own does not fit.
      labels: (run) -> groups of each problem, and the labels of a batch.
      rounds: (run, its source) -> what a curriculum's host part may call.
      searcher: (run, key, params, step, settings) -> searches its problems in a ``with`` block.
    """

    train: MakeSource
    held_out: MakeSource = held_out_text
    undrawn: Callable[[Run, RewardPool | None, str], Source] = _undrawn_prompts
    tools: Callable[[Run], Callable[[Any], Any] | None] = no_tools
    check: Callable[[Run], None] = _check_players
    tried: Callable[[Run], Source | None] = nothing_own
    labels: Callable[[Run], tuple[int, Labels]] = _kind_labels
    rounds: Callable[[Run, Source], HostTools] = text_rounds
    searcher: Callable[..., contextlib.AbstractContextManager[Searcher]] = text_searcher


_EPISODES = Sources(
    episode_source,
    held_out_episodes,
    tools=solution_tools,
    check=check_host,
    tried=tried_env,
    labels=host_labels,
    rounds=episode_rounds,
    searcher=episode_searcher,
)
_TASK = Sources(task_source, held_out_task, _undrawn_task, task_tools)
_RECORDED = Sources(recorded_source, tried=given_source)
SOURCES: Mapping[type[Kind], Sources] = {
    TextKind: Sources(text_source, tools=text_tools),
    AskedKind: Sources(text_source),
    TaskKind: _TASK,
    EnvKind: Sources(env_source, held_out_task, tools=task_tools),
    EpisodeKind: _EPISODES,
    RecordedKind: _RECORDED,
    DialogueKind: _RECORDED,
    SourceKind: Sources(own_source, held_out_own, tools=solution_tools, tried=tried_source),
    PairKind: Sources(pair_source, tried=given_source),
    TaskPairKind: Sources(pair_source, held_out_task, _undrawn_task, tried=given_source),
}
"""Kind of data -> its sources and tools."""


def sources_of(run: Run) -> Sources:
    """The sources and tools of a run's data; the kind is looked up only here."""
    return SOURCES[type(run.kind)]


def _evaluation(run: Run) -> tuple[Any, SamplingParams]:
    """The compiled sampler of held-out completions, and its sampling parameters."""
    table, sampling = run.config.eval, run.config.sampling
    params = make_sampling_params(table.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    program = programs.sampler_program(run, split="eval", group=table.samples)
    return program, _placed(run, params, "eval")


def _placed(run: Run, params: SamplingParams, split: str) -> SamplingParams:
    """The parameters of a distribution on the mesh that draws from it."""
    placed: SamplingParams = jax.device_put(params, replicated(programs.drawing_mesh(run, split)))
    return placed


def _taking_requests(program: Any) -> Any:
    """(request, sampling_params=...) -> groups: a program on a mesh of its own, or of the run's."""
    return program.draw if isinstance(program, ReshardedSampler) else program


def _free(program: Any) -> Callable[[], None] | None:
    """Function that frees a program's weights between draws; None if it holds none."""
    return program.free if isinstance(program, ReshardedSampler) else None
