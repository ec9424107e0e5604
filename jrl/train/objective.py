"""The method of a run, and the coefficients of ``[objective]`` that every method takes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from jrl.config import Config
from jrl.config.secrets import reveal
from jrl.data.tasks import Task
from jrl.envs import Env
from jrl.envs.tree import SEARCHES
from jrl.errors import Mistakes, UserError
from jrl.methods import OwnMethod, Published, find_method
from jrl.methods.base import Method
from jrl.methods.domains import Choice, Coefficient, Range, Switch
from jrl.objectives.corrections import CORRECTIONS, named_correction
from jrl.objectives.ratios import weighted
from jrl.objectives.regularizers import entropy_bonus
from jrl.objectives.transforms import over_branches
from jrl.sampling.places import PLACES
from jrl.sampling.tree import check_branching
from jrl.train.router import RouterLosses
from jrl.types import Branching, Search

COMMON: Mapping[str, Coefficient] = {
    "copy_every": Coefficient("copy_every", Range(0, whole=True), 0),
    "correction": Coefficient("correction", Choice(tuple(CORRECTIONS)), "none"),
    "entropy_coef": Coefficient("entropy_coef", Range(0.0), 0.0),
    "epochs": Coefficient("epochs", Range(1, whole=True), 1),
    "policies": Coefficient("policies", Range(1, whole=True), 1),
    "router_balance": Coefficient("router_balance", Range(0.0), 0.0),
    "router_replay": Coefficient("router_replay", Switch(), False),
    "router_z": Coefficient("router_z", Range(0.0), 0.0),
    "swap_every": Coefficient("swap_every", Range(0, whole=True), 0),
    "tree": Coefficient("tree", Choice(("none", *PLACES, *SEARCHES)), "none"),
    "tree_above": Coefficient("tree_above", Range(0.0), 0.0),
    "tree_exploration": Coefficient("tree_exploration", Range(0.0), Search().exploration),
    "tree_roots": Coefficient("tree_roots", Range(0, whole=True), 0),
    "tree_rounds": Coefficient("tree_rounds", Range(1, whole=True), 1),
    "tree_tokens": Coefficient("tree_tokens", Range(1, whole=True), Search().tokens),
    "tree_width": Coefficient("tree_width", Range(1, whole=True), Search().width),
}
"""Coefficients that the run reads where the method has none of that name."""

GREATEST_WEIGHT = 2.0
"""Of a token, where the losses of a method without a correction of its own are corrected."""


def method_of(config: Config, task: Task | Env | None) -> Method:
    """The method of a run, with its coefficients, its schedule and its correction.

    The length limit and the number of steps are the run's unless they were given.

    Raises:
      UserError: an unknown method or coefficient, or a value outside its domain.
    """
    found = find_method(config.method)
    common, coefficients = _divided(config, found)
    known = {"max_tokens": max_new_tokens(config, task), "total_steps": config.train.steps}
    coefficients = {k: v for k, v in known.items() if k in found.coefficients} | coefficients
    method = _corrected(config, found, common, coefficients)
    if "epochs" in common:
        method = method._replace(schedule=method.schedule._replace(epochs=common["epochs"]))
    if (coef := common.get("entropy_coef", 0.0)) > 0:
        if config.data.given or not method.draw.own:
            raise UserError(
                f"objective.entropy_coef = {coef}: method = {config.method!r} trains on what the"
                " policy did not draw; remove it"
            )
        method = method.plus(entropy_bonus(coef))
    method = _of_players(method, common)
    return _in_trees(config, task, method, common)


def _of_players(method: Method, common: Mapping[str, Any]) -> Method:
    """The method with the policies that are asked for.

    Raises:
      UserError: what several policies do, asked of one.
    """
    names = ("policies", "swap_every", "copy_every")
    method = method._replace(**{name: common[name] for name in names if name in common})
    for name in names[1:]:
        if method.policies == 1 and common.get(name):
            raise UserError(
                f"objective.{name} = {common[name]}: one policy plays all players; set"
                " objective.policies to their number, or leave it out"
            )
    return method


def _in_trees(
    config: Config, task: Task | Env | None, method: Method, common: Mapping[str, Any]
) -> Method:
    """The method with groups whose members branch off one another, where that is asked for.

    Raises:
      UserError: a tree that no run of this kind grows, or that does not fit.
    """
    tree = _asked_tree(config, method.plan.tree, common)
    method = method._replace(plan=method.plan._replace(tree=tree))
    if isinstance(tree, Search):
        return _searched(config, task, method, tree, common)
    if tree is None:
        return method
    named = f"objective.tree = {tree.at!r}"
    if config.data.plays and tree.rounds > 1:
        raise UserError(
            f"objective.tree_rounds = {tree.rounds} is not read in episodes, which branch as they"
            " are played; remove it"
        )
    if tree.at == "even" and tree.above:
        raise UserError(f"objective.tree_above = {tree.above} is not read with {named}; remove it")
    if (reason := _without_trees(config, task, method)) is not None:
        raise UserError(f"{named}: {reason}")
    tree = check_branching(tree, config.sampling.group, config.sampling.slots)
    return method._replace(plan=method.plan._replace(tree=tree)).after(over_branches())


def _asked_tree(
    config: Config, tree: Branching | Search | None, common: Mapping[str, Any]
) -> Branching | Search | None:
    """The tree that ``objective`` asks for, or the method's own.

    Raises:
      UserError: a number that no tree reads, or not this one.
    """
    asked = {name: common[name] for name in COMMON if name.startswith("tree") and name in common}
    at = asked.pop("tree", None)
    numbers = {name.removeprefix("tree_"): value for name, value in asked.items()}
    if at is None and isinstance(tree, Search):
        if config.data.given and not asked:
            return None  # the method's own, for groups that are drawn
        _check_read(numbers, Search, tree.by)
        return tree._replace(**numbers)
    if at in SEARCHES:
        _check_read(numbers, Search, at)
        return Search(at, **numbers)
    if at in PLACES:
        _check_read(numbers, Branching, at)
        return Branching(at, **numbers)
    if asked:
        name = next(iter(asked))
        raise UserError(
            f"objective.{name} = {asked[name]}: members branch with objective.tree alone; set it to"
            f" one of {', '.join((*PLACES, *SEARCHES))}"
        )
    return tree if at is None else None


def _check_read(numbers: Mapping[str, Any], kind: Any, at: str) -> None:
    """Raises UserError for a number that a tree of this kind does not have."""
    for name in numbers:
        if name not in kind._fields:
            raise UserError(
                f"objective.tree_{name} = {numbers[name]} is not read with objective.tree = {at!r};"
                " remove it"
            )


def _searched(
    config: Config,
    task: Task | Env | None,
    method: Method,
    search: Search,
    common: Mapping[str, Any],
) -> Method:
    """The method with groups that are the leaves of a search tree.

    Raises:
      UserError: a search that no run of this kind makes, or that does not fit.
    """
    named = f"objective.tree = {search.by!r}"
    if search.exploration != Search().exploration and not SEARCHES[search.by].explores:
        raise UserError(
            f"objective.tree_exploration = {search.exploration} is not read with {named}; remove it"
        )
    if config.data.plays and "tree_tokens" in common:
        raise UserError(
            f"objective.tree_tokens = {search.tokens}: a search of episodes goes by turns; remove"
            " it, or set data.turn_tokens"
        )
    if (reason := _without_trees(config, task, method)) is not None:
        raise UserError(f"{named}: {reason}; or set objective.tree to 'none'")
    if 0 < config.sampling.slots < search.width:
        raise UserError(
            f"sampling.slots = {config.sampling.slots}: a search of objective.tree_width ="
            f" {search.width} needs a slot for each step; raise one or lower the other"
        )
    return method.after(over_branches())


def _without_trees(config: Config, task: Task | Env | None, method: Method) -> str | None:
    """Why a run's completions cannot branch off one another; None where they can."""
    if config.data.branches:
        return config.data.branches
    if config.replays_routing:
        return "a branch has no record of its past's experts; set objective.router_replay to false"
    if method.objective.surrogate.over == "group":
        return (
            f"method = {config.method!r} compares whole completions, and what members share is in"
            " one of them alone; choose another method"
        )
    draw = method.draw
    if draw.baseline_members or draw.demonstrations or not draw.own:
        return (
            f"method = {config.method!r} draws greedy baselines, or reads demonstrations, which are"
            " on no branch; choose another method"
        )
    return None


def router_losses(config: Config) -> RouterLosses:
    """What is added to the loss for the routers of a model with experts."""
    common, _ = _divided(config, find_method(config.method))
    return RouterLosses(common.get("router_balance", 0.0), common.get("router_z", 0.0))


def max_new_tokens(config: Config, task: Task | Env | None) -> int:
    """T: the most tokens of a completion, the task's where there is one."""
    return task.completion_tokens if task else config.sampling.max_new_tokens


def sampler_differs(config: Config) -> bool:
    """Whether completions to train on are drawn from another distribution than the policy's."""
    return bool(config.sampling.int8) and config.data.given is None


def _divided(config: Config, found: Published | OwnMethod) -> tuple[dict[str, Any], dict[str, Any]]:
    """The coefficients that the run reads, checked, and those of the method."""
    common, own = {}, {}
    mistakes = Mistakes()
    for name, value in reveal(config.objective, "objective").items():
        if name in COMMON and name not in found.coefficients:
            mistakes.look(partial(COMMON[name].check, "objective", value))
            common[name] = value
        else:
            own[name] = value
    if isinstance(found, Published):
        mistakes.look(lambda: found.check("objective", own))
    mistakes.check()
    return common, own


def _corrected(
    config: Config,
    found: Published | OwnMethod,
    common: Mapping[str, Any],
    coefficients: Mapping[str, Any],
) -> Method:
    """The method with its losses corrected for the sampler's distribution; decided here alone.

    ``objective.correction`` is the switch. Left out, it is off where completions are drawn from
    the policy's own distribution, and truncated importance sampling where they are not. A method
    that has no such coefficient gets the weight around its surrogate.
    """
    default = "tis" if sampler_differs(config) else "none"
    if "correction" in found.coefficients:
        chosen = {"correction": default} if sampler_differs(config) else {}
        return found(**(chosen | dict(coefficients)))
    method = found(**coefficients)
    surrogate = method.objective.surrogate
    # A loss that compares members of a group, or reads what the policy did not draw, has no use
    # for the weight of a token; one with ratios against the sampler has the weight in them.
    compares = surrogate.over == "group" or not method.draw.own or method.draw.demonstrations
    correction = named_correction(common.get("correction", default), GREATEST_WEIGHT)
    if correction is None or compares or "sampler_logprobs" in surrogate.needs:
        return method
    surrogate = weighted(surrogate, correction)
    return method._replace(objective=method.objective._replace(surrogate=surrogate))
