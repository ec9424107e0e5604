"""The method of a run, and the coefficients of ``[objective]`` that every method takes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from jrl.config import Config
from jrl.config.secrets import reveal
from jrl.config.tree import BranchTree, MethodTree, SearchTree
from jrl.episodes.tree import SEARCHES
from jrl.errors import Mistakes, UserError
from jrl.methods import OwnMethod, Published, find_method
from jrl.methods.base import Method
from jrl.methods.domains import Choice, Coefficient, Range, Switch
from jrl.objectives.corrections import CORRECTIONS, named_correction
from jrl.objectives.ratios import weighted
from jrl.objectives.regularizers import entropy_bonus
from jrl.objectives.transforms import over_branches
from jrl.sampling.tree import check_branching
from jrl.types import Branching, Search
from jrl.user_code import load

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
}
"""Coefficients that the run reads where the method has none of that name."""

_TOTAL = "total_steps"
"""Coefficient of methods with a schedule over the run; all training steps unless set."""

_MOST_EPOCHS = 1000
"""More are a mistake: a step would not end, and no update would be near the policy that drew."""

_POLICIES = "jrl.zoo.networks.policies:train_policies"
"""By name, as the core imports nothing of the zoo."""

GREATEST_WEIGHT = 2.0
"""Of a token, where the losses of a method without a correction of its own are corrected."""


def method_of(config: Config, new_tokens: int | None = None) -> Method:
    """The method of a run, with its coefficients, its schedule and its correction.

    The length limit and the number of steps are the run's unless they were given.

    Args:
      config: of the run.
      new_tokens: T, of its kind of data; None for ``sampling.max_new_tokens``.

    Raises:
      UserError: an unknown method or coefficient, or a value outside its domain.
    """
    published = find_method(config.method)
    common, coefficients = _coefficients(config, published)
    limit = new_tokens or config.sampling.max_new_tokens
    defaults = {"max_tokens": limit, _TOTAL: config.train.steps}
    coefficients = {k: v for k, v in defaults.items() if k in published.coefficients} | coefficients
    method = _corrected(config, published, common, coefficients)
    if "epochs" in common:
        method = method._replace(schedule=method.schedule._replace(epochs=common["epochs"]))
    if method.schedule.epochs > _MOST_EPOCHS:
        raise UserError(
            f"objective.epochs = {method.schedule.epochs}; must be at most {_MOST_EPOCHS} passes"
            " over a batch"
        )
    if (coef := common.get("entropy_coef", 0.0)) > 0:
        method = method.plus(entropy_bonus(coef))
    method = _of_players(method, common)
    return _in_trees(config, method)


def check_total_steps(before: Config, now: Config) -> None:
    """Raises UserError where a method's schedule over all steps would be another one on resume.

    Args:
      before: the configuration that the run began with.
      now: that it is to be resumed with.
    """
    scheduled = _TOTAL in find_method(now.method).coefficients and _TOTAL not in now.objective
    if scheduled and before.train.steps != now.train.steps:
        raise UserError(
            f"run.dir = {now.run.dir!r}: train.steps = {before.train.steps} there,"
            f" {now.train.steps} now: the schedule of method = {now.method!r} ends at the last step"
            f" unless objective.{_TOTAL} is set from the beginning; name another directory, or"
            " restore train.steps"
        )


def _of_players(method: Method, common: Mapping[str, Any]) -> Method:
    """The method with the policies that are asked for.

    Raises:
      UserError: what several policies do, asked of one.
    """
    names = ("policies", "swap_every", "copy_every")
    settings = {name: common[name] for name in names if name in common}
    return load(_POLICIES, "policies")(method, **settings) if settings else method


def _in_trees(config: Config, method: Method) -> Method:
    """The method with groups that are trees, where ``[tree]`` or the method asks for them.

    Raises:
      UserError: a tree that no run of this kind grows, or that does not fit.
    """
    tree = _chosen_tree(config, method.plan.tree)
    method = method._replace(plan=method.plan._replace(tree=tree))
    _check_tree(config, tree)
    if isinstance(tree, Branching):
        tree = check_branching(tree, config.sampling.group, config.sampling.slots)
        method = method._replace(plan=method.plan._replace(tree=tree))
    if tree is None:
        return method
    return method.after(over_branches())


def _chosen_tree(config: Config, tree: Branching | Search | None) -> Branching | Search | None:
    """The tree of the configuration, whose keys come before those of the method's own."""
    table = config.tree
    if isinstance(table, MethodTree):
        # A search of the method's own is for groups that are drawn.
        return None if config.data.completions_key and isinstance(tree, Search) else tree
    keys = {k: v for k, v in table.model_dump(exclude={"kind"}).items() if v is not None}
    if isinstance(table, BranchTree):
        branching = tree if isinstance(tree, Branching) else Branching()
        return branching._replace(**keys)
    if isinstance(table, SearchTree):
        return (tree if isinstance(tree, Search) else Search())._replace(**keys)
    return None


def _check_tree(config: Config, tree: Branching | Search | None) -> None:
    """Raises UserError for a key of ``[tree]`` that this tree does not read, or cannot have."""
    if isinstance(tree, Branching) and tree.at == "even" and tree.above:
        raise UserError(
            f"tree.above = {tree.above} is not read with tree.at = {tree.at!r}; remove it"
        )
    if not isinstance(tree, Search):
        return
    if tree.exploration != Search().exploration and not SEARCHES[tree.by].explores:
        raise UserError(
            f"tree.exploration = {tree.exploration} is not read with tree.by = {tree.by!r};"
            " remove it"
        )
    if 0 < config.sampling.slots < tree.width:
        raise UserError(
            f"sampling.slots = {config.sampling.slots}: a search of tree.width = {tree.width}"
            " needs a slot for each step; raise one or lower the other"
        )


def common_coefficients(config: Config) -> dict[str, Any]:
    """The coefficients that the run reads and not the method, checked, by name."""
    return _coefficients(config, find_method(config.method))[0]


def sampler_differs(config: Config) -> bool:
    """Whether completions to train on are drawn from another distribution than the policy's."""
    return bool(config.sampling.in_8_bits) and config.data.completions_key is None


def _coefficients(
    config: Config, published: Published | OwnMethod
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The coefficients that the run reads, checked, and those of the method."""
    common, coefficients = {}, {}
    mistakes = Mistakes()
    for name, value in reveal(config.objective, "objective").items():
        if name in COMMON and name not in published.coefficients:
            mistakes.look(partial(COMMON[name].check, "objective", value))
            common[name] = value
        else:
            coefficients[name] = value
    if isinstance(published, Published):
        mistakes.look(lambda: published.check("objective", coefficients))
    mistakes.check()
    return common, coefficients


def _corrected(
    config: Config,
    published: Published | OwnMethod,
    common: Mapping[str, Any],
    coefficients: Mapping[str, Any],
) -> Method:
    """The method with its losses corrected for the sampler's distribution; decided here alone.

    ``objective.correction`` is the switch. Left out, it is off where completions are drawn from
    the policy's own distribution, and truncated importance sampling where they are not. A method
    that has no such coefficient gets the weight around its surrogate.
    """
    default = "tis" if sampler_differs(config) else "none"
    if "correction" in published.coefficients:
        chosen = {"correction": default} if sampler_differs(config) else {}
        return published(**(chosen | dict(coefficients)))
    method = published(**coefficients)
    surrogate = method.objective.surrogate
    # A loss that compares members of a group, or reads what the policy did not draw, has no use
    # for the weight of a token; one with ratios against the sampler has the weight in them.
    compares = surrogate.over == "group" or not method.draw.samples or method.draw.demonstrations
    correction = named_correction(common.get("correction", default), GREATEST_WEIGHT)
    if correction is None or compares or "sampler_logprobs" in surrogate.needs:
        return method
    surrogate = weighted(surrogate, correction)
    return method._replace(objective=method.objective._replace(surrogate=surrogate))
