"""The source of episodes with an environment on the host.

Like ``TextSource``, but each prompt opens episodes instead of being completed once.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from jrl.collect.host_search import episode_scorer, leaves_played
from jrl.collect.run_rows import RunRows, prompt_seeds
from jrl.collect.sources import FromPrompts, Groups, added_counts, all_entries, drawing
from jrl.collect.sources_text import root_key
from jrl.collect.tree_search import Estimate, drawn_alone, estimates, group_of, plan_of
from jrl.config.features import check_features
from jrl.episodes.branching import EpisodeBranches
from jrl.episodes.calls import Calls
from jrl.episodes.chat import Format
from jrl.episodes.env_calls import call_init
from jrl.episodes.groups import Played, play_episodes
from jrl.episodes.host import EnvError, HostEnv
from jrl.episodes.play import Device, keep_weights
from jrl.episodes.search import EpisodeScorer, Searcher, play_search
from jrl.episodes.transcript import RowShape, Transcript, conversation, rows_of_players, to_rollout
from jrl.episodes.tree import SearchPlan
from jrl.episodes.world import HostWorld, close_env, gather, host_world
from jrl.errors import UserError
from jrl.judging.host import answer_number
from jrl.models.tokenizer import Tokenizer
from jrl.rewards import FUNCTION_NAMES
from jrl.setup.features import host_features
from jrl.setup.reward_parts import SUCCESS
from jrl.system.float32 import sum_overflows
from jrl.system.working_directory import same_working_directory
from jrl.types import Params, Prompt, Rollout, Search, StopReason
from jrl.types.asks import DrawRequest

_SEED_STRIDE = 0x9E3779B97F4A7C15
"""Difference of the seeds of a problem's groups: the 64-bit golden ratio, which spreads them."""
_ROUNDS = 3
"""Maximum number of attempts at a group with too many failed members."""


class HostEpisodes(FromPrompts):
    """Groups of episodes; a ``Source``.

    In addition to the ids of ``EpisodeArrays`` it records "stratum" [N, G], the turns taken, and
    "answer" [N, G], a number for the final answer of the last turn.

    Args:
      env: the environment.
      chat: how its messages become ids.
      rows: decode slots that record the measure of ``branches``, or entropies for a search.
      prompts: all problems, in the source's order; their text is what the environment reads.
      seed: of the order, or None for the source's own order.
      tokenizer: the policy's.
      weights: reward part -> weight, of the environment's parts and "success"; its names are those
        of the rewards' columns.
      speaks: whether ``Groups.spoken`` holds the conversations, for reward functions.
      split: "train" or "eval".
      tree: branching of a group's members, or the search whose leaves they are; ids then gain
        "node", as in ``sampling.tree``. None to play each member by itself.
      estimate: with a search, estimated points of unfinished paths, backed up as those of leaves
        are; ``draw`` then reads the weights "value" too. None to use leaves only.

    Attributes:
      ended: called with each row as it ends, while others are played; not with leaves of a search
        or of branches, which are complete only at the end. None for no call.

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
        check_parts(env, weights)
        if tree is not None:
            _check_fork(env, "[tree]")
        self._branches = tree if isinstance(tree, EpisodeBranches) else None
        self._search = tree if isinstance(tree, Search) else None
        self._estimate = estimate
        self._env, self._chat, self._rows, self._tokenizer = env, chat, rows, tokenizer
        self.all_prompts, self.seed, self._split = prompts, seed, split
        self._weights = dict(weights)
        sizes = rows.rows.prompt_tokens, rows.rows.max_new_tokens
        named = env.extras.labels, env.extras.token_labels
        self._shape = RowShape(0, *sizes, len(env.parts), env.limits.contexts, *named)
        self._asks = env.extras.asks if split == "train" else 1
        self._calls: Calls | None = None
        self._opened = self._warned = False  # any episode yet; that no turn is paid

    def judge(self, subject: Any, prompts: list[Prompt], rollout: Rollout, step: int = 0) -> Groups:
        """Refused: the environment computes rewards only while it plays.

        Raises:
          UserError: always.
        """
        raise UserError("data.env: episodes are judged as they are played")

    @property
    def parts(self) -> tuple[str, ...]:
        """The reward parts that the environment pays, in the order of the rewards' columns."""
        return tuple(self._weights)

    def draw(self, request: DrawRequest) -> Groups:
        """As ``Source.draw``. A group with too few members left is played again, and counted.

        Entries that ask for no tree are not searched.
        """
        name = drawing(request)
        step, version = int(request.step), int(request.versions[name])
        tickets, order = all_entries(request)
        self._env.lifecycle.begin(step, self._split)
        stream = "eval" if self._split == "eval" else request.stream
        check_group(self._env, group := group_of(request))
        problems, _ = self.prompts(request.key, order)
        chosen = [self._with_ask(prompt, k) for prompt in problems for k in range(self._asks)]
        score = self._scorer(request.weights)
        with (
            same_working_directory("data.env"),
            self._rows.loaded(root_key(request), request.weights[name], version) as key,
        ):
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
        self._warn_of_turns(groups)
        batch = self._as_groups(groups, chosen, counts, group)
        return batch._replace(failure=failure or None)

    def _check_opened(self, groups: Sequence[Sequence[Transcript]], failure: str) -> None:
        """Raises UserError if no episode of the first draw opened in ``_ROUNDS`` attempts.

        Later ones would fail too, after programs had been compiled.
        """
        if self._opened:
            return
        members = [t for g in groups for t in g]
        self._opened = any(len(t.opening) for t in members)
        if members and not self._opened:
            raise UserError(
                f"data.env: none of the {len(members)} episodes of the first draw opened: {failure}"
            )

    def _warn_of_turns(self, groups: Sequence[Sequence[Transcript]]) -> None:
        """Says once that all episodes end at the limit of turns, before anything is paid.

        A coroutine that returns its reward is cancelled there, and nothing would be learned.
        """
        if self._warned or self._split != "train" or not any(self._weights.values()):
            return
        members = [t for g in groups for t in g if t.alive]
        if members and all(t.stop == StopReason.TURNS and not t.points for t in members):
            self._warned = True
            logging.getLogger("jrl").warning(
                "environment: all %d episodes ended at the limit of turns, data.turns = %d, without"
                " a reward; raise it if they take more",
                len(members),
                self._env.limits.turns,
            )

    def _open_calls(self) -> Calls:
        if self._calls is None:
            self._calls = Calls()
            # Closed with this object or at Python's exit, if not before.
            self._end = weakref.finalize(self, close_env, self._calls, self._env)
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
        seconds = self._env.limits.episode_seconds or math.inf  # 0: any time
        (answer,) = gather(self._open_calls(), [call], seconds)
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
        """[groups] seeds below 2**64; those of one problem are far from each other."""
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
            counts = added_counts(counts, played.counts)
            todo = [i for i in todo if sum(t.alive for t in groups[i]) < least]
            if not todo:
                break
            redrawn = len(todo) * (attempt + 1 < _ROUNDS)
            counts["groups_redrawn"] += redrawn
        return groups, counts

    def _payable(self, row: Transcript, counts: dict[str, float]) -> Transcript:
        """The row, failed if the weighted sum of its rewards is beyond float32.

        Each part is finite (``episodes.host``), and so is its sum over turns.
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
        """Calls ``ended`` with the rows of an episode in a batch, one for each player."""
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
        """A number for the final answer of the last turn; equal answers have equal numbers."""
        turns = [segment for segment in transcript.segments if segment.drawn]
        last_turn = self._tokenizer.decode(turns[-1].tokens.tolist()) if turns else ""
        return answer_number(last_turn)

    def close(self) -> None:
        """Shuts down the environment's shared resources and its threads."""
        if self._calls is not None:
            self._end()
            self._calls = None


def check_parts(env: HostEnv, names: Iterable[str]) -> None:
    """Raises UserError for a reward part that an environment does not have."""
    parts = (*env.parts, SUCCESS)
    for name in names:
        if name not in parts:
            raise UserError(
                f"rewards.{name}: the environment pays {', '.join(parts)}, and reward functions are"
                f" {', '.join(FUNCTION_NAMES)} and those of your own (FILE.py:function); choose"
                " from those"
            )


def check_group(env: HostEnv, group: int) -> None:
    """Raises UserError where the members of a group could never all be open."""
    if 0 < env.lifecycle.at_once < group:
        raise UserError(
            f"the environment opens {env.lifecycle.at_once} episodes at once, fewer than the"
            f" {group} members of a group, which begin together; raise its limit (such as"
            " data.processes)"
        )


def _check_fork(env: HostEnv, named: str) -> None:
    """Raises UserError where no episode can be copied for what ``named`` asks for."""
    fork = {name: text for name, text in host_features(env).items() if name == "fork"}
    check_features({"host tree": named} | fork)


def _report(groups: Sequence[Sequence[Transcript]]) -> str:
    """Logs why members failed, the most frequent reason first; returns that one, or ""."""
    reasons = collections.Counter(t.reason for g in groups for t in g if not t.alive)
    for reason, count in reasons.most_common(3):
        logging.getLogger("jrl").warning("environment: %d failed: %s", count, reason)
    return str(reasons.most_common(1)[0][0]) if reasons else ""
