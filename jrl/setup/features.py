"""Features of a run that a method, its network, the data or an environment bring.

``jrl.config.features`` has the table that they are compared with.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Mapping

import jax

from jrl.config import Config
from jrl.config.features import Features, key_features, present
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
    features = key_features(config) | _reward_features(config) | _loss_features(config) | data
    features |= method_features(method, named) | _network_features(network, named)
    if config.tree.model_fields_set == {"kind"}:  # its other keys are the method's
        trees = {"tree", "asked tree", "search", "guided search", "branches"} & features.keys()
        features |= dict.fromkeys(trees, f"tree.kind = {config.tree.kind!r}")
    plan, group = method.plan, config.sampling.group
    further = plan.next is not None and plan.members(group) > 0
    features |= present({"further members": (further, f"{named}, which adds members to groups,")})
    features |= schedule_features(method.schedule, method.objective, config.frozen, named)
    processes = jax.process_count()
    sparse = model is not None and any(model.sparse)
    return features | present(
        {
            "several processes": (processes > 1, f"{processes} processes"),
            "experts": (sparse, "a model with routed experts"),
        }
    )


@functools.cache
def _warn_unpaid(parts: tuple[str, ...]) -> None:
    """Says once that no reward counts; a method may make all that it learns from itself."""
    if parts:
        weights = " and ".join(f"rewards.{name}.weight" for name in parts)
        logging.getLogger("jrl").warning(
            f"warning: {weights} = 0, so every reward is 0 and a method that learns from rewards"
            " learns nothing; set one above 0"
        )


def _reward_features(config: Config) -> Features:
    """Features of the reward parts, and of the processes that judge them."""
    rewards = parts_of(config)
    models, by_row = rewards.given_by("model"), [p.name for p in rewards.combined if p.column]
    functions = rewards.given_by("function") if config.rewards else ()
    judges, likely = rewards.given_by("judge"), rewards.given_by("likelihood")
    here = [name for name in judges if judge_of(config, name).local]
    turns = [n for n in likely if likelihood_of(config, n).by == "turn"]
    turns += [n for n in models if model_of_part(config, n).by == "turn"]
    by_step = [*parts_by_step(config).values()]
    by_token = [*parts_by_token(config).values()]
    return present(
        {
            "reward model": (models, f"[rewards.{models[0]}]" if models else ""),
            "judge": (judges, f"[rewards.{judges[0]}]" if judges else ""),
            "judge here": (here, f"rewards.{here[0]}.model" if here else ""),
            "likelihood": (likely, f"[rewards.{likely[0]}]" if likely else ""),
            "paid by turn": (turns, f'rewards.{turns[0]}.by = "turn"' if turns else ""),
            "paid by step": (by_step, by_step[0] if by_step else ""),
            "token rewards": (by_token, by_token[0] if by_token else ""),
            "row rewards": (by_row, f"rewards.{by_row[0]}" if by_row else ""),
            "own reward": (functions, f"rewards.{functions[0]}" if functions else ""),
        }
    )


def _loss_features(config: Config) -> Features:
    """Features of the coefficients that every method takes."""
    objective = config.objective
    losses = [key for key in ("router_balance", "router_z") if objective.get(key)]
    entropy = objective.get("entropy_coef")
    return present(
        {
            "router losses": (
                losses,
                " and ".join(f"objective.{key} = {objective[key]}" for key in losses),
            ),
            "entropy bonus": (entropy, f"objective.entropy_coef = {entropy}"),
        }
    )


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
    return present(
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
    return present(
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
    return present(
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
    return dict(features) | present(
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
