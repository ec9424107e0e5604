"""Groups of episodes with an environment on the host: what a training step draws from text.

The twin of ``TextSource``: its prompts open episodes instead of being completed once.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from jrl.collect.run_rows import RunRows, prompt_seeds, run_rows
from jrl.collect.sources import Groups, all_entries, drawing, epoch_order
from jrl.collect.sources_text import root_key
from jrl.collect.tree_search import (
    Estimate,
    drawn_alone,
    estimates,
    group_of,
    plan_of,
    run_estimate,
)
from jrl.config.secrets import reveal
from jrl.episodes.branching import EpisodeBranches
from jrl.episodes.calls import Calls
from jrl.episodes.chat import Format
from jrl.episodes.configured import configured_env
from jrl.episodes.env_calls import call_init
from jrl.episodes.episode import Episode
from jrl.episodes.follow import summary_room
from jrl.episodes.groups import Played, play_episodes
from jrl.episodes.host import EnvError, HostEnv, format_of, nothing_shared
from jrl.episodes.play import Device, keep_weights
from jrl.episodes.search import EpisodeScorer, Searched, Searcher, leaf_rows, path_of, play_search
from jrl.episodes.transcript import (
    RowShape,
    Transcript,
    conversation,
    rows_of_players,
    to_rollout,
)
from jrl.episodes.tree import SearchPlan
from jrl.episodes.world import HostWorld, gather, host_world
from jrl.errors import UserError
from jrl.judging.host import answer_number
from jrl.models.tokenizer import Tokenizer
from jrl.rewards import FUNCTION_NAMES
from jrl.sampling.places import entropy
from jrl.sampling.slots import Measure
from jrl.setup.features import check_division, check_features, host_features
from jrl.setup.reward_parts import SUCCESS, RunRewards, reward_tables
from jrl.setup.run import Run, run_features
from jrl.system.float32 import sum_overflows
from jrl.types import Params, Prompt, Rollout, Search, StopReason
from jrl.types.asks import DrawRequest

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
      rows: decode slots, with what ``branches`` reads measured, or entropies for a search.
      prompts: all problems, in the source's order; their text is what the environment reads.
      seed: of the order, or None for the source's own order.
      tokenizer: the policy's.
      weights: reward part -> weight, of the environment's parts and "success"; its names are those
        of the rewards' columns.
      speaks: whether ``Groups.spoken`` holds what was said, for reward functions.
      split: "train" or "eval".
      tree: how the members of a group branch off one another, or how it is searched, so that they
        are leaves; ids then gain "node", as ``sampling.tree`` has it. None to play each by itself.
      estimate: with a search, points of paths that have not ended, backed up as those of leaves
        are; ``draw`` then reads the weights "value" too. None to go by leaves alone.

    Attributes:
      ended: called with each row that ends by itself, before the others have: not with the leaves
        of a search or of branches, which are known when all are there. None for nothing.

    Raises:
      UserError: a reward part that the environment does not have, or branches where the
        environment's state cannot be copied.
    """

    def __init__(
        self,
        env: HostEnv,
        chat: Format,
        rows: RunRows,
        *,
        prompts: Sequence[Prompt],
        seed: int | None,
        tokenizer: Tokenizer,
        weights: Mapping[str, float],
        split: str = "train",
        tree: EpisodeBranches | Search | None = None,
        estimate: Estimate | None = None,
        speaks: bool = False,
    ) -> None:
        self._speaks = speaks
        self.ended: Callable[[Transcript], None] | None = None
        _check_parts(env, weights)
        if tree is not None:
            _check_fork(env, "[tree]")
        self._branches = tree if isinstance(tree, EpisodeBranches) else None
        self._search = tree if isinstance(tree, Search) else None
        self._estimate = estimate
        self._env, self._chat, self._rows, self._tokenizer = env, chat, rows, tokenizer
        self._all, self._seed, self._split = prompts, seed, split
        self._weights = dict(weights)
        sizes = rows.rows.prompt_tokens, rows.rows.max_new_tokens
        named = env.extras.labels, env.extras.token_labels
        self._shape = RowShape(0, *sizes, len(env.parts), env.limits.contexts, *named)
        self._asks = env.extras.asks if split == "train" else 1
        self._calls: Calls | None = None
        self._opened = False  # any episode yet

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

    @property
    def parts(self) -> tuple[str, ...]:
        """The reward parts that the environment pays, in the order of the rewards' columns."""
        return tuple(self._weights)

    def finish(self, complete: bool) -> None:
        """Nothing is held between draws."""

    def notes(self) -> dict[str, Any]:
        """Nothing: the next episodes follow from their rows."""
        return {}

    def draw(self, request: DrawRequest) -> Groups:
        """As ``Source.draw``. A group with too few living members is played again, and counted.

        Entries that ask for no tree are not searched.
        """
        name = drawing(request)
        step, version = int(request.step), int(request.versions[name])
        tickets, order = all_entries(request)
        self._env.lifecycle.begin(step, self._split)
        stream = "eval" if self._split == "eval" else request.stream
        _check_group(self._env, group := group_of(request))
        problems, _ = self.prompts(request.key, order)
        chosen = [self._with_ask(prompt, k) for prompt in problems for k in range(self._asks)]
        score = self._scorer(request.weights)
        with self._rows.loaded(root_key(request), request.weights[name], version) as key:
            seeds = partial(
                self._seeds_of, partial(prompt_seeds, key, stream, request.step, tickets)
            )
            newer, policy_of = request.newer or keep_weights, self._rows.policy_of(step)
            device = Device(self._rows.rows, newer, policy_of=policy_of)
            play = partial(self._play, device, group)
            if self._search is not None:
                alone = np.repeat(drawn_alone(request), self._asks)
                unsearched = {p.id for p, is_alone in zip(chosen, alone, strict=True) if is_alone}
                plan = plan_of(self._search, group)
                play = partial(self._searched, device, plan, score, unsearched)
            of_attempt = partial(self._seeds_of, seeds)
            groups, counts = self._until_alive(chosen, of_attempt, play, min(2, group))
        failure = _report(groups)
        self._check_opened(groups, failure)
        batch = self._as_groups(groups, chosen, counts, group)
        return batch._replace(failure=failure or None)

    def _check_opened(self, groups: Sequence[Sequence[Transcript]], failure: str) -> None:
        """Raises UserError where no episode of the first draw opened, tried ``_ROUNDS`` times.

        The next ones would not either, and programs would be compiled to train on nothing.
        """
        if self._opened:
            return
        members = [t for g in groups for t in g]
        self._opened = any(len(t.opening) for t in members)
        if members and not self._opened:
            raise UserError(
                f"data.env: none of the {len(members)} episodes of the first draw opened: {failure}"
            )

    def _open_calls(self) -> Calls:
        if self._calls is None:
            self._calls = Calls()
            # What nobody closed ends with this object, or with Python.
            self._end = weakref.finalize(self, _close, self._calls, self._env)
        return self._calls

    @contextlib.contextmanager
    def searcher(self, key: Any, params: Params, step: int, split: str) -> Iterator[Searcher]:
        """A search of problems under some weights, as evaluation calls it.

        Args:
          key: the run's root key.
          params: the policy's.
          step: of training.
          split: "train" or "eval", which the environment is told.

        Raises:
          UserError: the environment's state cannot be copied.
        """
        _check_fork(self._env, "--search")
        self._env.lifecycle.begin(step, split)
        with self._rows.loaded(key, params, step):
            device = Device(self._rows.rows, policy_of=self._rows.policy_of(step))
            yield partial(play_search, device, self._world())

    def openings(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[np.ndarray | None]:
        """The opening of each problem as token ids; None if no episode opens."""
        calls, seconds = self._open_calls(), self._env.limits.call_seconds
        arguments = self._env, self._chat
        longest = self._rows.rows.prompt_tokens
        calls_of_init = [
            (call_init, (*arguments, prompt, seed, longest))
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        opened = gather(calls, calls_of_init, seconds)
        states = [answer.value[0] for answer in opened if not answer.error]
        gather(calls, [(self._env.close, (state,)) for state in states], seconds)
        return [None if answer.error else answer.value[1] for answer in opened]

    def written(self, failed: Sequence[str], count: int, seed: int) -> list[Any]:
        """New problems by the environment's writer, each a text or a row.

        Raises:
          EnvError: it failed, or wrote no list.
        """
        assert self._env.extras.write is not None
        call = (self._env.extras.write, (list(failed), count, seed))
        (answer,) = gather(self._open_calls(), [call], self._env.limits.episode_seconds)
        if answer.error:
            raise EnvError(answer.error)
        if not isinstance(answer.value, list | tuple):
            raise EnvError(f"the writer returned {answer.value!r:.60}, not a list")
        return list(answer.value)

    def _with_ask(self, prompt: Prompt, ask: int) -> Prompt:
        """The problem as one of its groups begins with it."""
        if self._env.extras.asks == 1:
            return prompt
        return dataclasses.replace(prompt, meta={**prompt.meta, "ask": ask})

    def _seeds_of(self, seeds: Callable[[int], Any], attempt: int) -> list[int]:
        """Below 2**64, of each group; those of a problem are far apart."""
        asks = range(self._asks)
        return [(int(s) + k * _SEED_STRIDE) % 2**64 for s in seeds(attempt) for k in asks]

    def _until_alive(
        self,
        chosen: Sequence[Prompt],
        seeds_of: Callable[[int], Any],
        play: Callable[[Sequence[Prompt], Sequence[int]], Played],
        least: int,
    ) -> tuple[list[list[Transcript]], dict[str, float]]:
        """Transcripts by group, and counts.

        Args:
          chosen: a prompt of each group.
          seeds_of: (n) -> the seeds of the n-th attempt.
          play: plays some groups.
          least: members of a group that must be alive; else it is played again.
        """
        groups: list[list[Transcript]] = [[] for _ in chosen]
        counts: dict[str, float] = {"groups_redrawn": 0.0}
        todo = list(range(len(chosen)))
        for attempt in range(_ROUNDS):
            seeds = seeds_of(attempt)
            played = play([chosen[i] for i in todo], [seeds[i] for i in todo])
            for i, members in zip(todo, played.groups, strict=True):
                groups[i] = [self._payable(member, counts) for member in members]
            counts = {k: counts.get(k, 0) + played.counts.get(k, 0) for k in counts | played.counts}
            todo = [i for i in todo if sum(t.alive for t in groups[i]) < least]
            if not todo:
                break
            redrawn = len(todo) * (attempt + 1 < _ROUNDS)
            counts["groups_redrawn"] += redrawn
        return groups, counts

    def _payable(self, row: Transcript, counts: dict[str, float]) -> Transcript:
        """The row, as failed where the weighted sum of its rewards is beyond float32.

        Each part is within it (``episodes.host``), and so is what the turns add up to.
        """
        parts = {
            n: float(sum(s.reward[i] for s in row.segments if s.reward))
            for i, n in enumerate(self._env.parts)
        }
        parts[SUCCESS] = row.metrics.get(SUCCESS, 0.0)
        points = [parts[name] for name in self._weights]
        if not row.alive or not sum_overflows(points, list(self._weights.values())):
            return row
        counts["env_errors"] = counts.get("env_errors", 0.0) + 1
        terms = [f"{w:g} * {parts[name]:g} of {name}" for name, w in self._weights.items() if w]
        reason = f"the sum of its rewards, {' and '.join(terms)}, is infinite in float32"
        return row._replace(stop=StopReason.FAILED, reason=reason)

    def _play(
        self, device: Device, group: int, prompts: Sequence[Prompt], seeds: Sequence[int]
    ) -> Played:
        world, branches = self._world(), self._branches
        ended = None if self.ended is None else partial(self._row_ended, self.ended)
        return play_episodes(
            device, world, prompts, seeds, group=group, branches=branches, ended=ended
        )

    def _row_ended(self, ended: Callable[[Transcript], None], transcript: Transcript) -> None:
        """Hands on the rows that an episode becomes in a batch, a row for each player."""
        for rows in self._by_role([[transcript]]):
            for row in rows:
                ended(row)

    def _by_role(self, groups: list[list[Transcript]]) -> list[list[Transcript]]:
        """Training: a group for each player of each prompt."""
        divides = self._env.players > 1 and self._split == "train"
        return rows_of_players(groups, self._env.players) if divides else groups

    def _world(self) -> HostWorld:
        return host_world(self._open_calls(), self._env, self._chat, self._tokenizer)

    def _searched(
        self,
        device: Device,
        plan: SearchPlan,
        score: EpisodeScorer,
        unsearched: Collection[int],
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
    ) -> Played:
        """Groups that are the leaves of a search; ``Segment.node`` numbers the turns of a tree."""
        world = self._world()
        rounds = [0 if prompt.id in unsearched else plan.rounds for prompt in prompts]
        return leaves_played(play_search(device, world, prompts, seeds, plan, score, rounds), plan)

    def _scorer(self, weights: Mapping[str, Params]) -> EpisodeScorer:
        if self._estimate is None:
            return episode_scorer(self._env.parts, self._weights, None)
        most = self._rows.rows.prompt_tokens + self._rows.rows.max_new_tokens
        estimate = partial(estimates, partial(self._estimate, weights), most)
        return episode_scorer(self._env.parts, self._weights, estimate)

    def _as_groups(
        self,
        groups: list[list[Transcript]],
        chosen: list[Prompt],
        counts: dict[str, float],
        group: int,
    ) -> Groups:
        part_weights = [self._weights.get(name, 0.0) for name in self._env.parts]
        for transcript in (t for g in groups for t in g if t.alive):
            for name, value in transcript.metrics.items():
                if name != SUCCESS:
                    counts[f"env/{name}"] = counts.get(f"env/{name}", 0.0) + value
        groups = self._by_role(groups)
        chosen = [p for p in chosen for _ in range(len(groups) // len(chosen))]
        asks = {}
        if self._env.extras.asks > 1:
            asks = {"ask": np.array([p.meta["ask"] for p in chosen], np.int32)}
        rows = to_rollout(groups, self._shape._replace(group=group), part_weights)
        success = [[t.metrics.get(SUCCESS, 0.0) * t.alive for t in g] for g in groups]
        paid = {name: rows.rewards[:, :, i] for i, name in enumerate(self._env.parts)}
        paid[SUCCESS] = np.array(success, np.float32)
        columns = [paid[name] for name in self._weights]
        turns = np.where(rows.rollout.mask, rows.ids["turn"] + 1, 0).max(axis=2)
        values = {} if self._search is None else {"node_value": rows.values}
        spoken = [[conversation(t, self._tokenizer) for t in g] for g in groups if self._speaks]
        return Groups(
            rollout=rows.rollout,
            rewards=np.stack(columns, axis=2) if columns else rows.rewards[:, :, :0],
            subject=chosen,
            counts=counts,
            ids={
                **asks,
                "prompt": np.array([p.id for p in chosen], np.int32),
                "stratum": turns.astype(np.int32),
                "answer": np.array([[self._answer(t) for t in g] for g in groups], np.int32),
                **rows.ids,
            },
            stats={"paid": rows.paid} | values,
            spoken=spoken if self._speaks else None,
        )

    def _answer(self, transcript: Transcript) -> int:
        """A number for the final answer of the last turn: equal numbers, equal answers."""
        turns = [segment for segment in transcript.segments if segment.drawn]
        last_turn = self._tokenizer.decode(turns[-1].tokens.tolist()) if turns else ""
        return answer_number(last_turn)

    def close(self) -> None:
        """Ends what the environment shares between episodes, and its threads."""
        if self._calls is not None:
            self._end()
            self._calls = None


def check_host(run: Run) -> None:
    """Raises UserError for an environment, a template or a method that episodes cannot use."""
    env = _env(run)
    try:
        paid_parts(run, env)
        _check_group(env, run.config.sampling.group)
        check_features(host_features(env, run_features(run)))
        check_division(env.players, run.network)
        chat = format_of(env, run.tokenizer)
        _check_contexts(run, env, chat)
        for note in chat.notes:
            logging.getLogger("jrl").warning("data.env: %s", note)
    finally:
        if env.lifecycle.shutdown is not nothing_shared:  # this one plays no episode
            _close(Calls(), env)


def _check_parts(env: HostEnv, names: Iterable[str]) -> None:
    parts = (*env.parts, SUCCESS)
    for name in names:
        if name not in parts:
            raise UserError(
                f"rewards.{name}: the environment pays {', '.join(parts)}, and reward functions are"
                f" {', '.join(FUNCTION_NAMES)} and those of your own (FILE.py:function); choose"
                " from those"
            )


def paid_parts(run: Run, env: HostEnv) -> tuple[str, ...]:
    """The reward parts of a run that its environment pays.

    Raises:
      UserError: a part that neither the environment nor a reward function gives, or a function
        under the name of a part of the environment.
    """
    parts, weights = (*env.parts, SUCCESS), run.rewards.weights
    tables = reward_tables(run.config)
    for name in weights:
        function = tables[name].function
        if name in parts and function is not None:
            raise UserError(
                f"rewards.{name}.function = {function!r}, and the environment pays a part of that"
                " name; give the function's part another name"
            )
    _check_parts(env, run.rewards.given_by("data"))
    # a part of the environment goes before a function of the library that has the same name
    functions = {n for n in run.rewards.given_by("function") if ":" not in n}
    return tuple(n for n in weights if n in parts and (n in functions or _is_data(run, n)))


def _is_data(run: Run, name: str) -> bool:
    return run.rewards.givers[name] == "data"


def _check_group(env: HostEnv, group: int) -> None:
    """Raises UserError where the members of a group could never all be open."""
    if 0 < env.lifecycle.at_once < group:
        raise UserError(
            f"the environment opens {env.lifecycle.at_once} episodes at once, fewer than the"
            f" {group} members of a group, which begin together; raise its limit (such as"
            " data.processes)"
        )


def _check_contexts(run: Run, env: HostEnv, chat: Format) -> None:
    """Raises UserError for contexts that leave no room to speak."""
    contexts, room = env.limits.contexts, run.config.sampling.max_new_tokens
    if contexts == 1:
        return
    key = f"data.contexts = {contexts}"
    if (needed := summary_room(env, chat)) >= room:
        raise UserError(
            f"{key}: a summary of up to data.summary_tokens = {env.limits.summary_tokens} and what"
            f" asks for it take {needed} tokens of sampling.max_new_tokens = {room}; raise that, or"
            " lower data.summary_tokens"
        )


def _check_fork(env: HostEnv, named: str) -> None:
    """Raises UserError where no episode can be copied for what ``named`` asks for."""
    fork = {name: text for name, text in host_features(env).items() if name == "fork"}
    check_features({"host tree": named} | fork)


def host_source(
    run: Run,
    prompts: Sequence[Prompt],
    group: int,
    *,
    split: str = "train",
    temperature: float | None = None,
    width: int = 0,
) -> HostEpisodes:
    """The episodes of a run's environment.

    Args:
      run: whose ``data.env`` returns the environment.
      prompts: what episodes are about.
      group: members.
      split: "train" or "eval".
      temperature: None for the run's.
      width: of a search at evaluation; 0 for none.
    """
    sampling, env = run.config.sampling, _env(run)
    _check_group(env, group)
    evaluates = split == "eval"
    tree = None if evaluates else run.method.draw.tree
    search = None if evaluates else run.method.draw.search
    branches = None if tree is None else EpisodeBranches(tree, group, sampling.slots)
    measure: Measure | None = entropy if width or search is not None else None
    measure = measure if branches is None else branches.measure
    paid = {name: run.rewards.weights[name] for name in paid_parts(run, env)}
    rows = run_rows(
        run,
        run.config.train.prompts * max(group, width, 0 if search is None else search.width),
        stop_tokens=run.tokenizer.stop_ids,
        max_new_tokens=sampling.max_new_tokens,
        split=split,
        temperature=temperature,
        measure=measure,
    )
    return HostEpisodes(
        env,
        format_of(env, run.tokenizer),
        rows,
        prompts=prompts,
        seed=None if evaluates else run.config.data.order_seed(run.config.seed),
        tokenizer=run.tokenizer,
        weights={SUCCESS: 1.0, env.parts[0]: 0.0} if evaluates else paid,
        speaks=_reads_messages(run.rewards) and not evaluates,
        split=split,
        tree=branches or search,
        estimate=None if search is None else run_estimate(run),
    )


def _reads_messages(rewards: RunRewards) -> bool:
    """Whether anything on the host judges what was said."""
    on_host = rewards.given_by("function") or rewards.given_by("judge")
    return bool(on_host or rewards.text_models)


def episode_scorer(
    parts: Sequence[str],
    weights: Mapping[str, float],
    estimate: Callable[[Sequence[np.ndarray]], Sequence[float]] | None,
) -> EpisodeScorer:
    """Points of paths: what was paid where one has ended, else what is estimated, if anything.

    Args:
      parts: the environment's reward parts.
      weights: reward part -> weight, "success" included.
      estimate: (ids of openings and paths) -> points of each; None to go by leaves alone.
    """
    part_weights = np.array([weights.get(name, 0.0) for name in parts])

    def score(episodes: Sequence[Episode]) -> list[float | None]:
        points: list[float | None] = [None] * len(episodes)
        unfinished = [i for i, episode in enumerate(episodes) if episode.ending is None]
        for i in set(range(len(episodes))) - set(unfinished):
            paid = sum(part_weights @ s.reward for s in episodes[i].segments if s.reward)
            points[i] = float(paid) + weights.get(SUCCESS, 0.0) * episodes[i].success
        if unfinished and estimate is not None:
            paths = [path_of(episodes[i]) for i in unfinished]
            estimated = estimate([np.concatenate([p.opening, p.tokens]) for p in paths])
            for i, number in zip(unfinished, estimated, strict=True):
                points[i] = float(number)
        return points

    return score


def leaves_played(searched: Searched, plan: SearchPlan) -> Played:
    """The groups of a search: the first leaves of each tree, all failed where it has none.

    Args:
      searched: until each tree had as many leaves.
      plan: of the search, whose ``leaves`` are G.
    """
    groups, shared, group = [], 0, plan.leaves
    for root, tree in zip(searched.roots, searched.trees, strict=True):
        leaves = tree.leaves()[:group]
        live = [step.episode.transcript().alive for step in map(tree.step, leaves)]
        rows, past = leaf_rows(tree, leaves, live, plan.value)
        groups.append(rows if leaves else [root.transcript()] * group)
        shared += past
    counts = searched.counts | {
        "episodes": float(group * len(groups)),
        "tree_shared_tokens": float(shared),
        "search_nodes": float(sum(len(tree.nodes) - 1 for tree in searched.trees)),
        "search_leaves": float(sum(len(tree.leaves()) for tree in searched.trees)),
    }
    return Played(groups, counts)


def _env(run: Run) -> HostEnv:
    """The environment that the configuration names."""
    data: Any = run.config.data
    return configured_env(data.env, reveal(data.options, "data"))


def _close(calls: Calls, env: HostEnv) -> None:
    with contextlib.suppress(Exception):  # a run that has ended well must not fail here
        calls.run(env.lifecycle.shutdown, env.limits.call_seconds)
    calls.close()


def _report(groups: Sequence[Sequence[Transcript]]) -> str:
    """Logs why members failed, the most frequent reason first; returns that one, or ""."""
    reasons = collections.Counter(t.reason for g in groups for t in g if not t.alive)
    for reason, count in reasons.most_common(3):
        logging.getLogger("jrl").warning("environment: %d failed: %s", count, reason)
    return str(reasons.most_common(1)[0][0]) if reasons else ""
