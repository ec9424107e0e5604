"""Conflicts between features of a run: one table, compared with the features that it has.

A feature is something that a configuration, a method, its network or the data bring: ``lora``,
``search``, ``several players``. ``features_of`` finds those of a run, each with the words that name
it in the configuration; a row of ``TABLE`` says what one of them needs or forbids, and why; and
``check_features`` writes the messages. A new feature is a line that finds it, a row, and a remedy.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Mapping
from typing import NamedTuple

import jax

from jrl.config import Config
from jrl.config.tables import SamplingTable
from jrl.config.tree import SearchTree
from jrl.episodes.host import HostEnv
from jrl.errors import UserError
from jrl.methods.base import Method, Schedule
from jrl.methods.curriculum import unchanged
from jrl.methods.edit import Stateless
from jrl.methods.replays import is_by_prompt
from jrl.models.config import ModelConfig
from jrl.setup.reward_parts import (
    judge_of,
    likelihood_of,
    model_of_part,
    parts_by_step,
    parts_by_token,
    parts_of,
)
from jrl.types import NOTHING, Branching, Network, Objective, Search

Features = dict[str, str]
"""Features that a run has, by name, and how the configuration names each."""


class Feature(NamedTuple):
    """Requirement or conflict of one feature.

    Attributes:
      name: of the feature.
      why: a clause that the message ends with.
      needs: names of features that must be there, too.
      forbids: names of features that must not.
    """

    name: str
    why: str
    needs: frozenset[str] = frozenset()
    forbids: frozenset[str] = frozenset()


def _needs(name: str, need: str, why: str) -> Feature:
    return Feature(name, why, needs=frozenset({need}))


def _forbids(name: str, others: str, why: str) -> Feature:
    return Feature(name, why, forbids=frozenset(others.split(", ")))


TABLE: tuple[Feature, ...] = (
    # -- the mode of a run
    _forbids("compiled", "search", "a search takes a host"),
    _forbids("compiled", "rounds", "what it does between rounds takes a host"),
    _forbids("compiled", "own reward", "it judges on the host, between the two programs"),
    _forbids("compiled", "reward model", "it scores between the two programs"),
    _forbids("compiled", "judge, likelihood", "it is asked on the host, between the two programs"),
    _forbids("compiled", "row rewards", "it reads a column of the data, and a task has none"),
    # -- the network that a method trains
    _forbids("own layout", "lora", "all weights are trained"),
    _forbids(
        "own layout", "placement, sampling mesh", "the policy samples on the mesh that trains it"
    ),
    _forbids("own layout", "8 bits, router replay", "the sampler has the network as it is trained"),
    _forbids("several policies", "packed, in flight", "a batch is divided by players"),
    # -- copies of the policy, whose base is no part of it with adapters
    _forbids(
        *("renewed reference", "lora"),
        "the reference is the policy with its adapters off, which never changes",
    ),
    _forbids("held copies", "lora", "copies hold the adapters without their base"),
    # -- groups that are trees
    _forbids("tree", "given completions", "it holds the completions, so none is sampled"),
    _forbids(
        *("tree", "device environment"),
        "completions and episodes on the host branch, those in an environment on the device do not",
    ),
    _forbids("tree", "router replay", "a branch has no record of its past's experts"),
    _forbids("tree", "group loss", "what members share is in one of them alone"),
    _forbids("tree", "greedy members, demonstrations", "they are on no branch"),
    _needs("asked tree", "tree", "no member that the method samples is on a branch"),
    _forbids("tree", "several players", "episodes of several players do not branch"),
    _needs("host tree", "fork", "episodes branch with a copy of the environment's state"),
    _forbids("search", "several processes", "a search runs in one process"),
    _forbids("search", "placement", "a search samples on the training mesh"),
    _forbids("guided search", "sampling mesh", "its value network is on the training mesh"),
    _forbids("search", "reward model", "a search uses rewards of functions only"),
    _forbids("search", "judge, likelihood", "a search uses rewards of functions only"),
    _forbids(
        *("judge here", "several processes, placement, sampling mesh, several policies"),
        "it samples on the training mesh, in one process, with one policy",
    ),
    _forbids(
        *("likelihood", "several processes, placement, sampling mesh, several policies"),
        "it is scored on the training mesh, in one process, by one policy",
    ),
    _forbids("likelihood", "device environment", "its problems have no answers"),
    _forbids("likelihood", "contexts", "it reads a row from its beginning, which contexts divide"),
    _needs("paid by turn", "episodes", "other data have no turns"),
    _forbids("paid by step", "task", "completions of a task have no lines that would be steps"),
    _needs("draws", "text", "only text is sampled in parts"),
    _forbids("draws", "search", "it samples all prompts together"),
    _forbids("search", "token rewards", "a search needs one number per path"),
    _forbids("search", "own reward of a task", "a search on a task uses verify and partial"),
    # -- rounds, replay, problems that are chosen or written
    _forbids(
        *("expert", "placement, several policies, lora, in flight"),
        "completions are sampled by the policy of the round's start",
    ),
    _needs("replay", "records", "no problem of a task or of an environment on the device returns"),
    _forbids("stores", "given completions", "they are there already"),
    _forbids(
        *("stores", "placement, router replay, branches"),
        "a stored member joins a later group as it was sampled",
    ),
    _forbids("stores", "several processes", "what is kept is in one process"),
    _forbids("curriculum", "placement", "problems are chosen after the step before"),
    _forbids("curriculum", "given completions", "they are trained on in their own order"),
    _forbids("further draws", "router replay", "their experts are not on record"),
    _forbids("episodes", "further members", "they are played for whole groups"),
    _needs("questions", "records", "a task has no words for them"),
    _forbids("questions", "episodes", "they are about completions, each by itself"),
    _forbids("search", "further members", "its members are the leaves of one tree"),
    _forbids("tests between rounds", "branches", "problems are tested by independent members"),
    _needs("written problems", "episodes", "problems are written for an environment on the host"),
    _needs("host written problems", "writer", "nobody writes them"),
    _needs("estimates between rounds", "value network", "its numbers are read"),
    _forbids("branch rounds", "episodes", "they branch as they are played"),
    _forbids("step tokens", "episodes", "a search of episodes goes by turns"),
    # -- what is drawn, and what the data hold
    _forbids("placement", "nothing drawn", "its devices are for a rollout"),
    _forbids("router replay", "nothing drawn, given completions", "nothing is sampled"),
    _forbids(
        "entropy bonus", "nothing drawn, given completions", "the policy did not sample the tokens"
    ),
    _forbids(
        *("episodes", "greedy members, demonstrations, nothing drawn"),
        "episodes on the host have no such members",
    ),
    _forbids(
        *("device environment", "demonstrations, nothing drawn"),
        "an environment on the device has no demonstrations",
    ),
    _forbids("recorded", "greedy members, demonstrations beside", "no server records such members"),
    _forbids(
        *("dialogues", "sampler log-probabilities, on-policy loss"),
        "dialogues were not sampled by a policy, so they have no log-probabilities",
    ),
    _needs("rationales", "pairs", "nothing else brings them"),
    _forbids(
        *("pairs", "sampler log-probabilities, demonstrations"),
        "it reads what the policy drew, or demonstrations",
    ),
    _forbids(
        *("own source", "demonstrations, search, placement"),
        "a source of your own has neither solutions nor prompts of files",
    ),
    _forbids("several groups", "dropped groups, stores", "they belong together"),
    _forbids("several groups", "adaptive curriculum", "it learns from one group of each problem"),
    _forbids("episodes", "several processes", "episodes run in one process"),
    _needs("contexts", "shared rows", "contexts are trained as rows that share their prompt"),
    _forbids("contexts", "attention", "it is read over whole rows, which contexts divide"),
    _needs("value network kind", "value network", "it has none to choose"),
    _forbids(
        *("trained states", "value network kind"),
        "those are the policy's, and the values come of others",
    ),
    # -- experts
    _needs("router replay", "experts", "the model has none"),
    _needs("router losses", "experts", "the model has none"),
)

WITHOUT: Mapping[str, str] = {
    "adaptive curriculum": "choose another method",
    "8 bits": "set sampling.int8 and sampling.float8 to []",
    "attention": "choose another method",
    "branch rounds": "remove tree.rounds",
    "branches": "set tree.kind to 'none'",
    "compiled": "set train.mode to 'host'",
    "contexts": "set data.contexts to 1",
    "demonstrations": "choose a method that draws its own completions",
    "demonstrations beside": "choose another method",
    "device environment": "use a task, data.train, or data.env = FILE.py:function",
    "draws": "set sampling.draws to 1",
    "dropped groups": "choose a method that keeps every group",
    "entropy bonus": "remove objective.entropy_coef",
    "episodes": "remove data.env",
    "expert": "set objective.round_steps to 0",
    "further members": "choose another method",
    "greedy members": "choose another method",
    "group loss": "choose another method",
    "held copies": "choose a method that copies no policy",
    "in flight": "set train.mode to 'host'",
    "judge": "remove the judge",
    "judge here": "name a server with url",
    "likelihood": "remove the part",
    "lora": "remove [lora]",
    "nothing drawn": "choose a method that draws its own completions",
    "on-policy loss": "choose a method that learns from any data, such as sft, filtered_bc, ilql"
    " or dpo",
    "packed": "set train.mode to 'host'",
    "pairs": "give data.train instead",
    "placement": "remove [placement]",
    "renewed reference": "choose a method whose reference stays",
    "reward model": "remove [rewards.model]",
    "router losses": "remove it",
    "router replay": "set objective.router_replay to false",
    "sampler log-probabilities": "choose a method that learns from any data, such as sft,"
    " filtered_bc, ilql or dpo",
    "row rewards": "remove it",
    "sampling mesh": "remove [sampling.mesh]",
    "guided search": "set tree.kind to 'none'",
    "search": "set tree.kind to 'none'",
    "step tokens": "remove tree.tokens and set data.turn_tokens",
    "stores": "choose another method",
    "several players": "use an environment of one player",
    "several policies": "set objective.policies to 1",
    "several processes": "use one host",
    "token rewards": "remove it",
    "task": "give data.train instead",
    "tree": "set tree.kind to 'none'",
    "asked tree": "set tree.kind to 'none'",
    "rounds": "choose another method",
    "value network kind": "set value.kind to 'head'",
}
"""Remedies that remove a feature; for others the remedy is to remove its key."""

WITH: Mapping[str, tuple[str, str]] = {
    "episodes": ("episodes", "give data.train and data.env = FILE.py:function"),
    "experts": ("routed experts", "choose another model"),
    "pairs": ("data.pairs", "give it, with a rationale in each row"),
    "fork": ("HostEnv.fork", "use an environment whose state can be copied"),
    "records": ("data.train", "give it, with data.env = FILE.py:function for episodes"),
    "tree": ("sampled members", "choose a method that draws its own completions"),
    "text": ("prompts in text without an environment", "give data.train alone"),
    "shared rows": ("a network that takes such rows", "use one of jrl.models.transformer"),
    "value network": (
        "a method with a value network",
        "choose such a method, as ppo is",
    ),
    "writer": ("data.writer", "set it to FILE.py:function, or to the url and model of an endpoint"),
}
"""Needed features: their names in messages, and remedies."""


def check_features(features: Mapping[str, str]) -> None:
    """Raises UserError where features of a run do not go together, a line for each such pair.

    Args:
      features: by name, with the words that name each in the configuration.
    """
    lines = [line for row in TABLE if row.name in features for line in _broken(row, features)]
    if lines:
        raise UserError("\n".join(dict.fromkeys(lines)))


def _broken(row: Feature, features: Mapping[str, str]) -> list[str]:
    """A line for each missing need of a row, and for each feature that it forbids."""
    subject, lines = features[row.name], []
    for need in sorted(row.needs - features.keys()):
        label, remedy = WITH[need]
        lines.append(f"{subject} needs {label}: {row.why}; {_either(remedy, row.name)}")
    for other in sorted(row.forbids & features.keys()):
        remedy = _either(WITHOUT.get(other, f"remove {features[other]}"), row.name)
        text = features[other].removesuffix(",")  # of a clause that the sentence ends with
        lines.append(f"{subject} does not go with {text}: {row.why}; {remedy}")
    return lines


def _either(remedy: str, name: str) -> str:
    return f"{remedy}, or {WITHOUT[name]}" if name in WITHOUT else remedy


# ---------------------------------------------------------------- the features of a run


def features_of(
    config: Config,
    method: Method,
    *,
    network: Network,
    model: ModelConfig | None,
    data: Features,
) -> Features:
    """Features of a run, all but those of an environment on the host (``host_features``).

    Args:
      config: of the run.
      method: its method.
      network: the policy, as the method trains it.
      model: its shape; None for a network of one's own.
      data: what the data bring, ``kind.Kind.features``.
    """
    named = f"method = {config.method!r}"
    if config.rewards and not any(parts_of(config).weights.values()):
        _warn_unpaid(tuple(config.rewards))
    present = _config_features(config) | data
    present |= method_features(method, named) | _network_features(network, named)
    if config.tree.model_fields_set == {"kind"}:  # its other keys are the method's
        trees = {"tree", "asked tree", "search", "guided search", "branches"} & present.keys()
        present |= dict.fromkeys(trees, f"tree.kind = {config.tree.kind!r}")
    plan, group = method.plan, config.sampling.group
    further = plan.next is not None and plan.members(group) > 0
    present |= _present({"further members": (further, f"{named}, which adds members to groups,")})
    present |= schedule_features(method.schedule, method.objective, config.frozen, named)
    if model is not None and any(model.sparse):
        present["experts"] = "a model with routed experts"
    return present


@functools.cache
def _warn_unpaid(parts: tuple[str, ...]) -> None:
    """Says once that no reward counts; a method may make all that it learns from itself."""
    if parts:
        weights = " and ".join(f"rewards.{name}.weight" for name in parts)
        logging.getLogger("jrl").warning(
            f"warning: {weights} = 0, so every reward is 0 and a method that learns from rewards"
            " learns nothing; set one above 0"
        )


def _present(items: Mapping[str, tuple[object, str]]) -> Features:
    """The names of which the first of two is true, with the second."""
    return {name: text for name, (present, text) in items.items() if present}


def _config_features(config: Config) -> Features:
    """Features that keys of the configuration ask for."""
    sampling, objective, mode = config.sampling, config.objective, config.train.mode
    losses = [key for key in ("router_balance", "router_z") if objective.get(key)]
    rewards = parts_of(config)
    models, by_row = rewards.given_by("model"), [p.name for p in rewards.combined if p.column]
    functions = rewards.given_by("function") if config.rewards else ()
    judges, likely = rewards.given_by("judge"), rewards.given_by("likelihood")
    here = [name for name in judges if judge_of(config, name).local]
    turns = [n for n in likely if likelihood_of(config, n).by == "turn"]
    turns += [n for n in models if model_of_part(config, n).by == "turn"]
    by_step = [*parts_by_step(config).values()]
    by_token = [*parts_by_token(config).values()]
    steps = config.tree.tokens if isinstance(config.tree, SearchTree) else None
    items = {
        "lora": (config.lora, "[lora]"),
        "placement": (config.placement, "[placement]"),
        "sampling mesh": (sampling.mesh and not config.placement, "[sampling.mesh]"),
        "draws": (sampling.draws > 1, f"sampling.draws = {sampling.draws}"),
        "8 bits": (sampling.in_8_bits, " and ".join(_formats(sampling))),
        "router replay": (config.replays_routing, "objective.router_replay = true"),
        "router losses": (losses, " and ".join(f"objective.{k} = {objective[k]}" for k in losses)),
        "entropy bonus": (
            objective.get("entropy_coef"),
            f"objective.entropy_coef = {objective.get('entropy_coef')}",
        ),
        "value network kind": (config.value.kind != "head", f"value.kind = {config.value.kind!r}"),
        "reward model": (models, f"[rewards.{models[0]}]" if models else ""),
        "judge": (judges, f"[rewards.{judges[0]}]" if judges else ""),
        "judge here": (here, f"rewards.{here[0]}.model" if here else ""),
        "likelihood": (likely, f"[rewards.{likely[0]}]" if likely else ""),
        "paid by turn": (turns, f'rewards.{turns[0]}.by = "turn"' if turns else ""),
        "paid by step": (by_step, by_step[0] if by_step else ""),
        "token rewards": (by_token, by_token[0] if by_token else ""),
        "row rewards": (by_row, f"rewards.{by_row[0]}" if by_row else ""),
        "own reward": (functions, f"rewards.{functions[0]}" if functions else ""),
        "step tokens": (steps is not None, f"tree.tokens = {steps}"),
        "several processes": (jax.process_count() > 1, f"{jax.process_count()} processes"),
    }
    modes = {"compiled": "compiled", "packed": "packed", "in flight": "in_flight"}
    return _present(items) | {
        name: f"train.mode = {mode!r}" for name, value in modes.items() if value == mode
    }


def _formats(sampling: SamplingTable) -> list[str]:
    """The keys that have parts of the sampler in 8 bits, with their values."""
    keys = {"int8": sampling.int8, "float8": sampling.float8}
    return [f"sampling.{key} = {list(parts)}" for key, parts in keys.items() if parts]


def method_features(method: Method, named: str = "the method") -> Features:
    """Features that a method brings.

    Args:
      method: with the tree that the configuration asks for.
      named: how messages name it.
    """
    draw, objective, curriculum = method.draw, method.objective, method.curriculum
    replays = any(is_by_prompt(edit) for edit in method.edits)
    stores = any(not isinstance(edit.init, Stateless) for edit in method.edits)
    chooses = curriculum is not None
    adapts = curriculum is not None and curriculum.update is not unchanged
    uses = frozenset() if curriculum is None else curriculum.uses
    # A curriculum chooses from a pool, whose problems come again.
    replays = replays and not chooses
    plan_tree = method.plan.tree
    rounds = plan_tree.rounds if isinstance(plan_tree, Branching) else 1
    tree = f"tree.by = {plan_tree.by!r}" if isinstance(plan_tree, Search) else ""
    tree = f"tree.at = {plan_tree.at!r}" if isinstance(plan_tree, Branching) else tree
    expert = bool(method.plan.policies)
    between = curriculum is not None and curriculum.between
    attention = any(statistic.over == "attention" for statistic in objective.statistics)
    states = any(s.over == "hidden" and not s.start for s in objective.statistics)
    draws = f"{named}, which learns from what a policy drew,"
    return _present(
        {
            "tree": (draw.shares, tree),
            "asked tree": (plan_tree, tree),
            "search": (draw.search, tree),
            "guided search": (draw.search and method.plan.estimate, tree),
            "branches": (draw.tree, tree),
            "branch rounds": (rounds > 1, f"tree.rounds = {rounds}"),
            "greedy members": (draw.baseline_members, f"{named}, which draws greedy baselines,"),
            "demonstrations": (draw.demonstrations, f"{named}, which reads demonstrations,"),
            "demonstrations beside": (
                draw.demonstrations and draw.samples,
                f"{named}, which reads demonstrations beside what the policy drew,",
            ),
            "nothing drawn": (not draw.samples, f"{named}, which draws nothing,"),
            "group loss": (
                objective.surrogate.over == "group",
                f"{named}, which compares whole completions,",
            ),
            "sampler log-probabilities": ("sampler_logprobs" in objective.needs, draws),
            "on-policy loss": (objective.surrogate.on_policy, draws),
            "value network": (method.value, f"{named}, which has a value network,"),
            "trained states": (
                states and method.value,
                f"{named}, which trains states that its values are read from,",
            ),
            "attention": (attention, f"{named}, which reads attention,"),
            "questions": (
                "questions" in method.needs.reads,
                f"{named}, which asks about completions,",
            ),
            "dropped groups": (
                method.plan.next is not None or (method.edits and not replays),
                f"{named}, which keeps some groups and drops others,",
            ),
            "stores": (stores, f"{named}, which stores completions,"),
            "curriculum": (chooses, f"{named}, which chooses its problems,"),
            "adaptive curriculum": (adapts, f"{named}, whose choice of problems adapts,"),
            "further draws": (method.plan.next is not None, f"{named}, which draws again,"),
            "replay": (replays, f"{named}, which keeps completions by prompt,"),
            "rationales": ("rationales" in method.needs.reads, f"{named}, which reads rationales,"),
            "expert": (expert, f"{named}, whose completions another policy draws,"),
            "rounds": (between, f"{named}, which chooses problems anew in rounds,"),
            "tests between rounds": ("draw" in uses, f"{named}, which tests problems in rounds,"),
            "written problems": ("write" in uses, f"{named}, which has problems written,"),
            "estimates between rounds": ("estimate" in uses, f"{named}, which estimates problems,"),
        }
    )


def schedule_features(
    schedule: Schedule, objective: Objective, frozen: Collection[str], named: str = "the method"
) -> Features:
    """Features of what changes the training state beside its updates.

    Args:
      schedule: of a method.
      objective: of it.
      frozen: names of the frozen policies that are given.
      named: how messages name the method.
    """
    renewed = "ref" in (schedule.frozen & objective.frozen) - set(frozen)
    copies = sorted(schedule.frozen - {"ref"})
    return _present(
        {
            "renewed reference": (renewed, f"{named}, which renews the reference,"),
            "held copies": (copies, f"{named}, which holds the copies {', '.join(copies)},"),
        }
    )


def _network_features(network: Network, named: str) -> Features:
    """Features of the network that is trained."""
    extras, stack = network.extras, network.extras.stack
    text = f"{named}, whose policy has further parameters,"
    if stack is not None:
        text = f"objective.policies = {stack.policies}"
    return _present(
        {
            "own layout": (extras.own_layout, text),
            "several policies": (stack, text),
            "shared rows": (extras.hidden_shared, "rows that share a prompt"),
        }
    )


def host_features(env: HostEnv, features: Mapping[str, str] = NOTHING) -> Features:
    """Features of an environment on the host, beside those of a run.

    Args:
      env: of the run.
      features: from ``features_of``.
    """
    groups, contexts = env.players * env.extras.asks, env.limits.contexts
    written, tree = features.get("written problems"), features.get("tree")
    return dict(features) | _present(
        {
            "fork": (env.fork, "HostEnv.fork"),
            "writer": (env.extras.write, "EnvExtras.write"),
            "host written problems": (written, written or ""),
            "host tree": (tree, tree or ""),
            "several players": (env.players > 1, f"data.env, of {env.players} players,"),
            "several groups": (groups > 1, f"data.env, whose problems make {groups} groups each,"),
            "contexts": (contexts > 1, f"data.contexts = {contexts}"),
        }
    )


def check_division(players: int, network: Network) -> None:
    """Raises UserError where players cannot be shared out among the policies of a network."""
    if (stack := network.extras.stack) is not None and players % stack.policies:
        raise UserError(
            f"objective.policies = {stack.policies}: each policy plays as many players as the"
            f" others, and the environment has {players} for the policy; choose an environment of"
            " several players, such as data.env = 'nim' with data.opponent = 'self', or set"
            " objective.policies to 1"
        )
