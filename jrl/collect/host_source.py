"""The episodes of a run on the host: its environment, checked, as a source."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from jrl.collect.host_episodes import HostEpisodes, check_group, check_parts
from jrl.collect.run_rows import run_rows
from jrl.collect.tree_search import run_estimate
from jrl.config.features import check_features
from jrl.config.secrets import reveal
from jrl.episodes.branching import EpisodeBranches
from jrl.episodes.calls import Calls
from jrl.episodes.chat import Format
from jrl.episodes.configured import configured_env
from jrl.episodes.env_calls import TRIED_SECONDS, TRIED_TURNS, try_episode
from jrl.episodes.follow import summary_room
from jrl.episodes.host import HostEnv, format_of, nothing_shared
from jrl.episodes.world import close_env, gather
from jrl.errors import UserError
from jrl.sampling.places import entropy
from jrl.sampling.slots import Measure
from jrl.setup.features import check_division, host_features
from jrl.setup.kind import Labels
from jrl.setup.reward_parts import SUCCESS, RunRewards, reward_tables
from jrl.setup.run import Run, run_features
from jrl.system.working_directory import same_working_directory
from jrl.types import Prompt
from jrl.user_code import made_by


def check_host(run: Run) -> None:
    """Raises UserError for an environment, a template or a method that episodes cannot use."""
    env = described(run)
    paid_parts(run, env)
    check_group(env, run.config.sampling.group)
    check_features(host_features(env, run_features(run)))
    check_division(env.players, run.network)
    chat = format_of(env, run.tokenizer)
    _check_contexts(run, env, chat)
    for note in chat.notes:
        logging.getLogger("jrl").warning("data.env: %s", note)


def host_labels(run: Run) -> tuple[int, Labels]:
    """Groups of each problem, and what a batch of episodes is labelled with."""
    env, labels = described(run), run.kind.labels(run.method)
    asks = env.extras.asks
    ids = {**labels.ids, **dict.fromkeys(env.extras.labels, 2)}
    ids |= dict.fromkeys(env.extras.token_labels, 3) | ({"ask": 1} if asks > 1 else {})
    return env.players * asks, labels._replace(ids=ids)


def described(run: Run) -> HostEnv:
    """A run's environment as it describes itself; no episode is played with it."""
    kind: Any = run.kind
    env: HostEnv = kind.env
    return env


def try_env(run: Run) -> None:
    """Plays an episode, which nobody samples, with an environment of one's own.

    It opens with the first problem, and each turn is the problem's answer. An exception of its own
    may be what such a turn deserves, so it is a warning.

    Raises:
      UserError: ``init`` or ``step`` returns what no environment returns.
    """
    data: Any = run.config.data
    if ":" not in data.env:
        return  # the library's own
    prompt, key = run.data.prompts["train"][0], f"data.env = {data.env!r}"
    tokens = run.tokenizer.encode(str(prompt.answer) or "1")
    env = _env(run)
    if env.extras.asks > 1:
        prompt = dataclasses.replace(prompt, meta={**prompt.meta, "ask": 0})
    episode = env, format_of(env, run.tokenizer), run.tokenizer, prompt, run.width
    with (
        same_working_directory(key),
        contextlib.closing(Calls()) as calls,
        contextlib.ExitStack() as stack,
    ):
        if env.lifecycle.shutdown is not nothing_shared:
            stack.callback(close_env, calls, env)
        made_by(env.lifecycle.begin, key, 0, "train")
        # For all calls of the episode: to open it, for its turns, of which the last one begins
        # within TRIED_SECONDS, and to close it.
        each = env.limits.call_seconds
        turns = min(min(env.limits.turns, TRIED_TURNS) * each, TRIED_SECONDS + each)
        seconds = 2 * each + turns
        made = try_episode, (*episode, np.array(tokens, np.int32))
        (answer,) = gather(calls, [made], seconds)
    if answer.error:
        logging.getLogger("jrl").warning("%s: a trial episode failed: %s", key, answer.error)
    if answer.value:
        raise UserError(f"{key}: {answer.value}")


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
    check_parts(env, run.rewards.given_by("data"))
    # a part of the environment goes before a function of the library that has the same name
    functions = {n for n in run.rewards.given_by("function") if ":" not in n}
    by_environment = functions | set(run.rewards.given_by("data"))
    return tuple(n for n in weights if n in parts and n in by_environment)


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
    check_group(env, group)
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


def _env(run: Run) -> HostEnv:
    """The environment that the configuration names."""
    data: Any = run.config.data
    return configured_env(data.env, reveal(data.options, "data"))
