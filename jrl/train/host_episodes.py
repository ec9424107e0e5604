"""Groups of episodes with an environment on the host: what a training step draws from text.

The twin of ``TextSource``: its prompts open episodes instead of being completed once.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jrl.config.secrets import reveal
from jrl.envs.calls import Calls
from jrl.envs.chat import Format
from jrl.envs.configured import configured_env
from jrl.envs.host import EnvError, HostEnv, format_of, nothing_shared
from jrl.envs.transcript import RowShape, Transcript, rows_of_players, to_rollout
from jrl.errors import UserError
from jrl.mesh import replicated
from jrl.models.tokenizer import Tokenizer
from jrl.sampling.places import entropy
from jrl.serving.episode_rows import EpisodeRows
from jrl.train.asks import DrawRequest
from jrl.train.build import Run, sampler_of
from jrl.train.episode_search import EpisodeSearch
from jrl.train.episode_trees import EpisodeTrees, PathEstimate
from jrl.train.host_branches import EpisodeBranches
from jrl.train.host_play import Newer, Played, keep_weights, play_episodes, summary_room
from jrl.train.placement import sampler_mesh
from jrl.train.prompt_seeds import prompt_seeds
from jrl.train.resharding import drawn_from_prepared, network_on, weights_program
from jrl.train.several import check_division
from jrl.train.sources import Groups, all_entries, drawing, epoch_order
from jrl.train.sources_text import answer_number, root_key
from jrl.train.tree_search import Estimate, drawn_alone, estimates, run_estimate
from jrl.types import Params, Prompt, Rollout, Several

SUCCESS = "success"
"""The reward part that is 1 where the environment says that an episode ended well, beside those
that it names."""
_SLOTS, _CHUNK = 64, 16
"""Slots where the configuration names none, and the most decode steps between two looks at the
inbox: fewer where slots are idle."""
_SEED_STRIDE = 0x9E3779B97F4A7C15
"""Between the seeds of a problem's groups; the 64-bit golden ratio spreads them."""
_ROUNDS = 3
"""How often a group is played at most, where too many of its members fail."""


class HostEpisodes:
    """Groups of episodes; a ``Source``.

    Beside the ids of ``Rows`` it records "stratum" [N, G], the turns taken, and "answer" [N, G], a
    number for the final answer of the last turn.

    Args:
      env: the environment.
      chat: how its messages become ids.
      rows: decode slots.
      prompts: all problems, in the source's order; their text is what the environment reads.
      seed: of the order, or None for the source's own order.
      tokenizer: the policy's.
      group: G.
      weights: reward part -> weight, of the environment's parts and "success".
      sample: stream of the run's keys that draws are keyed by: "sample" or "eval".
      resharding: where ``rows`` has a mesh of its own, that mesh and the program that makes the
        weights there which ``rows`` reads; None where it has the mesh in use.
      branches: how the members of a group branch off one another, with ``rows`` that measure what
        it reads; then ids gain "node", as ``sampling.tree`` has it. None to play each by itself.
      trees: how a group is searched, with ``rows`` that measure entropies; None to search none.
      estimate: with ``trees``, points of paths that have not ended; ``draw`` then reads the
        weights "value" too.
      several: where players are policies of their own, with ``rows`` that draw from each.

    Raises:
      UserError: a reward part that the environment does not have, fewer episodes at once than
        members, or branches where the environment's state cannot be copied.
    """

    def __init__(
        self,
        env: HostEnv,
        chat: Format,
        rows: EpisodeRows,
        *,
        prompts: Sequence[Prompt],
        seed: int | None,
        tokenizer: Tokenizer,
        group: int,
        weights: Mapping[str, float],
        sample: str = "sample",
        resharding: tuple[Mesh, Callable[[Params], Any]] | None = None,
        branches: EpisodeBranches | None = None,
        trees: EpisodeTrees | None = None,
        estimate: Estimate | None = None,
        several: Several | None = None,
    ) -> None:
        _check_parts(env, weights)
        _check_group(env, group)
        if branches is not None or trees is not None:
            _check_fork(env)
        self._branches, self._several = branches, several
        self._trees, self._estimate = trees, estimate
        self._env, self._chat, self._rows, self._tokenizer = env, chat, rows, tokenizer
        self._all, self._seed, self._group, self._sample = prompts, seed, group, sample
        self._weights, self._resharding = dict(weights), resharding
        sizes = rows.prompt_tokens, rows.max_new_tokens
        named = env.labels, env.token_labels
        self._shape = RowShape(group, *sizes, len(env.parts), env.limits.contexts, *named)
        self._asks = env.asks if sample == "sample" else 1
        self._calls: Calls | None = None

    def order(self, tickets: np.ndarray) -> np.ndarray:
        """As ``Source.order``: epoch after epoch."""
        return epoch_order(self._seed, tickets, len(self._all))

    def prompts(self, key: Any, rows: np.ndarray) -> tuple[list[Prompt], list[Prompt]]:
        """As ``Source.prompts``; a prompt is its own subject."""
        chosen = [self._all[i] for i in np.asarray(rows).tolist()]
        return chosen, chosen

    def judge(self, subject: Any, prompts: list[Prompt], rollout: Rollout) -> Groups:
        """Only the environment judges, while it plays.

        Raises:
          UserError: always.
        """
        raise UserError("data.env: episodes are judged as they are played")

    def finish(self, complete: bool) -> None:
        """Nothing is held between draws."""

    def notes(self) -> dict[str, Any]:
        """Nothing: the next episodes follow from their rows."""
        return {}

    def draw(self, request: DrawRequest) -> Groups:
        """As ``Source.draw``. A group with too few living members is played again, and counted.

        Entries that ask for no tree are not searched.
        """
        self._open_calls()
        key, step, params = root_key(request), request.step, request.weights[drawing(request)]
        tickets, order = all_entries(request)
        self._env.begin(int(step), "eval" if self._sample == "eval" else "train")
        problems, _ = self.prompts(key, order)
        chosen = [self._asked(prompt, k) for prompt in problems for k in range(self._asks)]
        with contextlib.ExitStack() as stack:
            if self._resharding is not None:
                mesh, weights = self._resharding
                stack.enter_context(jax.set_mesh(mesh))
                params, key = weights(params), jax.device_put(key, replicated(mesh))
            seeds = partial(self._seeds_of, partial(prompt_seeds, key, self._sample, step, tickets))
            estimate = None
            if self._estimate is not None:
                most = self._rows.prompt_tokens + self._rows.max_new_tokens
                read = {"policy": params, "value": request.weights["value"]}
                estimate = partial(estimates, partial(self._estimate, read), most)
            self._rows.set_weights(params, int(request.versions[drawing(request)]))
            del params  # where they are a copy they are freed with the rows
            several, at = self._several, int(step)
            policy_of = None if several is None else partial(several.policy, step=at)
            newer = request.newer or keep_weights
            play = partial(self._play, newer=newer, policy_of=policy_of)
            if self._trees is not None:
                alone = np.repeat(drawn_alone(request), self._asks)
                unsearched = {p.id for p, is_alone in zip(chosen, alone, strict=True) if is_alone}
                play = partial(self._search, self._trees, estimate, unsearched)
            groups, counts = self._until_alive(chosen, seeds, play)
            self._rows.release()
        _report(groups)
        return self._as_groups(groups, chosen, counts)

    def _open_calls(self) -> Calls:
        if self._calls is None:
            self._calls = Calls()
            # What nobody closed ends with this object, or with Python.
            self._end = weakref.finalize(self, _close, self._calls, self._env)
        return self._calls

    @property
    def _turns(self) -> EpisodeSearch:
        """What calls the environment for whole batches."""
        calls = self._open_calls()
        return EpisodeSearch(self._rows, calls, self._env, self._chat, self._tokenizer)

    def openings(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[np.ndarray | None]:
        """What the policy would see first of each problem; None where no episode opens."""
        search = self._turns
        episodes = search.opened(prompts, seeds)
        states = [episode.state for episode in episodes if episode.has_state]
        search.answers([(self._env.close, (state,)) for state in states])
        return [episode.opening if episode.has_state else None for episode in episodes]

    def written(self, failed: Sequence[str], count: int, seed: int) -> list[Any]:
        """New problems by the environment's writer, each a text or a row.

        Raises:
          EnvError: it failed, or wrote no list.
        """
        asked = (self._env.write, (list(failed), count, seed))
        (answer,) = self._turns.answers([asked], self._env.limits.episode_seconds)
        if answer.error:
            raise EnvError(answer.error)
        if not isinstance(answer.value, list | tuple):
            raise EnvError(f"the writer returned {answer.value!r:.60}, not a list")
        return list(answer.value)

    def _asked(self, prompt: Prompt, ask: int) -> Prompt:
        """The problem as one of its groups begins with it."""
        if self._env.asks == 1:
            return prompt
        return dataclasses.replace(prompt, meta={**prompt.meta, "ask": ask})

    def _seeds_of(self, seeds: Callable[[int], Any], attempt: int) -> list[int]:
        """Below 2**64, of each group; those of a problem are far apart."""
        own = range(self._asks)
        return [(int(s) + k * _SEED_STRIDE) % 2**64 for s in seeds(attempt) for k in own]

    def _until_alive(
        self,
        chosen: Sequence[Prompt],
        seeds_of: Callable[[int], Any],
        play: Callable[[Sequence[Prompt], Sequence[int]], Played],
    ) -> tuple[list[list[Transcript]], dict[str, float]]:
        """Transcripts by group, and counts; ``seeds_of`` gives those of the n-th attempt."""
        groups: list[list[Transcript]] = [[] for _ in chosen]
        counts: dict[str, float] = {"groups_redrawn": 0.0}
        todo, least = list(range(len(chosen))), min(2, self._group)
        for attempt in range(_ROUNDS):
            seeds = seeds_of(attempt)
            played = play([chosen[i] for i in todo], [seeds[i] for i in todo])
            for i, members in zip(todo, played.groups, strict=True):
                groups[i] = members
            counts = {k: counts.get(k, 0) + played.counts.get(k, 0) for k in counts | played.counts}
            todo = [i for i in todo if sum(t.alive for t in groups[i]) < least]
            if not todo:
                break
            redrawn = len(todo) * (attempt + 1 < _ROUNDS)
            counts["groups_redrawn"] += redrawn
        return groups, counts

    def _play(
        self,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        newer: Newer,
        policy_of: Callable[[int], int] | None,
    ) -> Played:
        assert self._calls is not None
        return play_episodes(
            self._rows,
            self._calls,
            self._env,
            self._chat,
            prompts,
            seeds,
            group=self._group,
            tokenizer=self._tokenizer,
            newer=newer,
            branches=self._branches,
            policy_of=policy_of,
        )

    def _search(
        self,
        trees: EpisodeTrees,
        estimate: PathEstimate | None,
        unsearched: Collection[int],
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
    ) -> Played:
        search = self._turns
        alone = [prompt.id in unsearched for prompt in prompts]
        return trees.play(search, search.opened(prompts, seeds), self._group, alone, estimate)

    def _as_groups(
        self, groups: list[list[Transcript]], chosen: list[Prompt], counts: dict[str, float]
    ) -> Groups:
        worth = [self._weights.get(name, 0.0) for name in self._env.parts]
        for transcript in (t for g in groups for t in g if t.alive):
            for name, value in transcript.metrics.items():
                if name != SUCCESS:
                    counts[f"env/{name}"] = counts.get(f"env/{name}", 0.0) + value
        if self._env.players > 1 and self._sample == "sample":
            groups = rows_of_players(groups, self._env.players)
            chosen = [prompt for prompt in chosen for _ in range(self._env.players)]
        asks = {}
        if self._env.asks > 1:
            asks = {"ask": np.array([p.meta["ask"] for p in chosen], np.int32)}
        rows = to_rollout(groups, self._shape, worth)
        success = [[t.metrics.get(SUCCESS, 0.0) * t.alive for t in g] for g in groups]
        paid = {name: rows.rewards[:, :, i] for i, name in enumerate(self._env.parts)}
        paid[SUCCESS] = np.array(success, np.float32)
        turns = np.where(rows.rollout.mask, rows.ids["turn"] + 1, 0).max(axis=2)
        return Groups(
            rollout=rows.rollout,
            rewards=np.stack([paid[name] for name in self._weights], axis=2),
            subject=chosen,
            counts=counts,
            ids={
                **asks,
                "prompt": np.array([p.id for p in chosen], np.int32),
                "stratum": turns.astype(np.int32),
                "answer": np.array([[self._answer(t) for t in g] for g in groups], np.int32),
                **rows.ids,
            },
            stats={"paid": rows.paid}
            | ({} if self._trees is None else {"node_value": rows.values}),
        )

    def _answer(self, transcript: Transcript) -> int:
        """A number for the final answer of the last turn: equal numbers, equal answers."""
        drawn = [segment for segment in transcript.segments if segment.drawn]
        said = self._tokenizer.decode(drawn[-1].tokens.tolist()) if drawn else ""
        return answer_number(said)

    def close(self) -> None:
        """Ends what the environment shares between episodes, and its threads."""
        if self._calls is not None:
            self._end()
            self._calls = None


def check_host(run: Run) -> None:
    """Raises UserError for an environment, a template or a method that episodes cannot use."""
    if (
        run.method.draw.demonstrations
        or run.method.draw.baseline_members
        or not run.method.draw.own
    ):
        raise UserError(
            f"data.env: method = {run.config.method!r} trains on demonstrations or greedy members,"
            " which episodes on the host do not have; choose another method"
        )
    if jax.process_count() > 1:
        raise UserError("data.env with data.train runs in one process; use one host")
    env = _env(run)
    try:
        _check_parts(env, run.rewards.weights)
        _check_group(env, run.config.sampling.group)
        if run.method.draw.shares:
            _check_fork(env)
        check_division(env.players, run.method.policies)
        _check_players(run, env)
        chat = format_of(env, run.tokenizer)
        _check_contexts(run, env, chat)
        for note in chat.notes:
            logging.getLogger("jrl").warning("data.env: %s", note)
    finally:
        if env.shutdown is not nothing_shared:  # this one plays no episode
            _close(Calls(), env)


def _check_parts(env: HostEnv, weights: Mapping[str, float]) -> None:
    known = (*env.parts, SUCCESS)
    for name in weights:
        if name not in known:
            said = ", ".join(known)
            raise UserError(f"rewards.{name}: the environment pays {said}; choose from those")


def _check_group(env: HostEnv, group: int) -> None:
    """Raises UserError where the members of a group could never all be open."""
    if 0 < env.at_once < group:
        raise UserError(
            f"the environment opens {env.at_once} episodes at once, fewer than the {group} members "
            "of a group, which begin together; raise its limit (such as data.processes)"
        )


def _check_contexts(run: Run, env: HostEnv, chat: Format) -> None:
    """Raises UserError for contexts that leave no room to speak, branch, or cannot be trained."""
    contexts, room = env.limits.contexts, run.config.sampling.max_new_tokens
    if contexts == 1:
        return
    said = f"data.contexts = {contexts}"
    if (needed := summary_room(env, chat)) >= room:
        raise UserError(
            f"{said}: a summary of up to data.summary_tokens = {env.limits.summary_tokens} and what"
            f" asks for it take {needed} tokens of sampling.max_new_tokens = {room}; raise that, or"
            " lower data.summary_tokens"
        )
    if run.method.draw.shares:
        raise UserError(
            f"{said}: episodes that branch have one context; set objective.tree to 'none', or"
            " data.contexts to 1"
        )
    if run.network.extras.hidden_shared is None:
        raise UserError(
            f"{said}: contexts are trained as rows that share their prompt, which this network does"
            " not take; set data.contexts to 1, or use a network of jrl.models.transformer"
        )
    if any(statistic.over == "attention" for statistic in run.method.objective.statistics):
        raise UserError(
            f"{said}: method = {run.config.method!r} reads attention over whole rows, which"
            " contexts divide; set data.contexts to 1"
        )


def _check_players(run: Run, env: HostEnv) -> None:
    """Raises UserError where groups that belong together would not stay together."""
    groups = env.players * env.asks
    if groups == 1:
        return
    if run.method.draw.shares and env.players > 1:
        raise UserError(
            f"data.env: episodes of {env.players} players do not branch; set objective.tree to"
            " 'none'"
        )
    if run.method.edits or run.method.plan.next is not None:
        raise UserError(
            f"data.env: method = {run.config.method!r} keeps some groups and drops others, and"
            f" each problem makes {groups}; choose a method that keeps every group"
        )


def _check_fork(env: HostEnv) -> None:
    """Raises UserError where no episode could branch."""
    if env.fork is None:
        raise UserError(
            "objective.tree: episodes branch with a copy of the environment's state, and this"
            " environment has none (HostEnv.fork is None: a process, a connection); use another"
            " environment, or a method that draws members apart"
        )


def host_source(
    run: Run,
    prompts: Sequence[Prompt],
    group: int,
    *,
    split: str = "train",
    temperature: float | None = None,
) -> HostEpisodes:
    """The episodes of a run's environment.

    Args:
      run: whose ``data.env`` returns the environment.
      prompts: what episodes are about.
      group: members.
      split: "train" or "eval".
      temperature: None for the run's.
    """
    sampling, env = run.config.sampling, _env(run)
    evaluates = split == "eval"
    tree, search = run.method.draw.tree, run.method.draw.search
    slots = min(sampling.slots or _SLOTS, run.config.train.prompts * group)
    branches = trees = measure = None
    if tree is not None and not evaluates:
        branches = EpisodeBranches(tree, group, sampling.slots)
        measure = branches.measure
    if search is not None and not evaluates:
        trees, measure = EpisodeTrees(search, env.parts, SUCCESS, run.rewards.weights), entropy
        widest = run.config.train.prompts * max(group, search.width)
        slots = min(sampling.slots or _SLOTS, widest)
    mesh = sampler_mesh(run.config, run.mesh)
    network = network_on(run, mesh)
    network = network if evaluates else sampler_of(run, network)
    several = None if evaluates else network.extras.several
    resharding = None if mesh is None else (mesh, weights_program(run, network, mesh))
    rows = EpisodeRows(
        network if mesh is None else drawn_from_prepared(network),
        slots=slots,
        prompt_tokens=run.width,
        max_new_tokens=sampling.max_new_tokens,
        stop_tokens=run.tokenizer.stop_ids,
        chunk=_CHUNK,
        sampling={
            "temperature": sampling.temperature if temperature is None else temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
        },
        measure=measure,
        each=several is not None,
    )
    return HostEpisodes(
        env,
        format_of(env, run.tokenizer),
        rows,
        prompts=prompts,
        seed=None if evaluates else run.config.data.order_seed(run.config.seed),
        tokenizer=run.tokenizer,
        group=group,
        weights={SUCCESS: 1.0, env.parts[0]: 0.0} if evaluates else run.rewards.weights,
        sample="eval" if evaluates else "sample",
        resharding=resharding,
        branches=branches,
        trees=trees,
        estimate=None if trees is None else run_estimate(run),
        several=several,
    )


def _env(run: Run) -> HostEnv:
    """The environment that the configuration names."""
    data: Any = run.config.data
    return configured_env(data.env, reveal(data.options, "data"))


def _close(calls: Calls, env: HostEnv) -> None:
    with contextlib.suppress(Exception):  # a run that has ended well must not fail here
        calls.run(env.shutdown, env.limits.call_seconds)
    calls.close()


def _report(groups: Sequence[Sequence[Transcript]]) -> None:
    """Logs why members failed, the most frequent reason first."""
    reasons = collections.Counter(t.reason for g in groups for t in g if not t.alive)
    for reason, count in reasons.most_common(3):
        logging.getLogger("jrl").warning("environment: %d failed: %s", count, reason)
