"""Methods and sources of one's own whose parts do not fit: named before anything compiles."""

import jax.numpy as jnp
import pytest

import jrl
from jrl.config import load_config
from jrl.errors import UserError
from jrl.methods import (
    Curriculum,
    Method,
    Plan,
    Selection,
    edit_of,
    grpo,
    more,
    of_parts,
    only,
    top_rows,
)
from jrl.objectives import per_group
from jrl.run.own_parts import check_own_parts
from jrl.train.build import setup
from jrl.train.trainable import check_trainable
from jrl.types import Surrogate

GRPO = grpo()
SIZES = "model.config={layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}"
TASK = (
    *("data.task=sorting", "data.difficulty=3", SIZES, "train.prompts=3", "sampling.group=4"),
    "eval.problems=4",
)


def check(method, monkeypatch):
    """Checks of a run before it compiles."""
    import importlib

    module = importlib.import_module("tests_own_method")
    monkeypatch.setattr(module, "mine", method)
    run = setup(load_config(None, [*TASK, "method=tests_own_method:mine"]))
    check_trainable(run)
    check_own_parts(run)


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "tests_own_method.py").write_text("mine = None\n")
    monkeypatch.syspath_prepend(tmp_path)


def surrogate(function):
    return GRPO.with_(surrogate=Surrogate(function))


def planned(further, members=lambda group: 2):
    return GRPO.with_(plan=Plan(next=further, rounds=1, members=members))


def chosen(choose, update=lambda state, outcome: state):
    return GRPO.with_(curriculum=Curriculum(lambda table: jnp.zeros(table.rows), choose, update))


def best(state, query):
    return Selection(top_rows(state, query)), state


WRONG = {
    "advantage: another size": (
        lambda: GRPO.with_(advantage=per_group(lambda r, members: jnp.append(r, 0.0))),
        r"one group of 4 members returned \(5,\); return \[G\], here \(4,\)",
    ),
    "advantage: one number": (
        lambda: GRPO.with_(advantage=per_group(lambda r, members: r.mean())),
        r"returned \(\); return \[G\], here \(4,\)",
    ),
    "advantage: nothing": (
        lambda: GRPO.with_(advantage=per_group(lambda r, members: None)),
        r"returned None; return \[G\]",
    ),
    "advantage: no transform": (
        lambda: GRPO.with_(advantage=lambda r, members: r),
        r"objective.advantage = <function .*; must be a jrl.types.Transform",
    ),
    "surrogate: arguments": (
        lambda: surrogate(lambda stats, advantages: (advantages, {})),
        r"objective.surrogate.apply: .*must take \(stats, advantages, mask\)",
    ),
    "surrogate: losses alone": (
        lambda: surrogate(lambda stats, advantages, mask: advantages),
        r"returns \(losses \[T\], metrics by name\), \{\} for none",
    ),
    "surrogate: another size": (
        lambda: surrogate(lambda stats, advantages, mask: (jnp.append(advantages, 0.0), {})),
        r"losses of shape \(5,\); return one for each token, \[T\], here \(4,\)",
    ),
    "aggregate: one number": (
        lambda: GRPO.with_(aggregate=lambda losses, mask: losses.mean()),
        r"an aggregate returns \(sum \[\], count \[\]\)",
    ),
    "plan: arguments": (
        lambda: planned(lambda groups: ()),
        r"plan.next: .*must take \(groups, view\)",
    ),
    "plan: a number": (
        lambda: planned(lambda groups, view: (), members=2),
        r"plan.members = 2; must be a function\(group\)",
    ),
    "plan: an ask alone": (
        lambda: planned(lambda groups, view: more(groups, 1, 2)),
        r"plan.next returned .*; return a tuple of asks",
    ),
    "plan: counts of members": (
        lambda: planned(lambda groups, view: (more(groups, jnp.ones((3, 4)), 2),)),
        r"more: count has shape \(3, 4\); of 3 groups it is \(3,\)",
    ),
    "edit: nothing": (
        lambda: GRPO.with_(edits=(edit_of(lambda groups, view: None),)),
        r"edit 0 returned .*None.*; return \(groups, state\)",
    ),
    "edit: groups as members": (
        lambda: GRPO.with_(edits=(edit_of(lambda groups, view: only(groups, groups.rate() > 0)),)),
        r"only: keep has shape \(3,\); of 3 groups of 4 members it is \(3, 4\), or \(3, 1\)",
    ),
    "edit: a function": (
        lambda: GRPO.with_(edits=lambda groups, view: groups),
        r"edits = <function .*; must be a tuple of jrl.methods.Edit",
    ),
    "rewards: arguments": (
        lambda: GRPO.with_(rewards=lambda groups: groups),
        r"rewards: .*must take \(groups, view\)",
    ),
    "rewards: another shape": (
        lambda: GRPO.with_(rewards=of_parts(lambda parts, rollout: parts[..., 0])),
        r"of_parts: the function returned \(3, 4\) for reward parts of shape \(3, 4, \d\)",
    ),
    "curriculum: a part": (
        lambda: chosen(best, update=None),
        r"curriculum.update = None; must be a function\(state, outcome\)",
    ),
    "curriculum: rows": (
        lambda: chosen(lambda s, query: (Selection(query.tickets[:1]), s)),
        r"curriculum.choose returned rows of shape \(1,\); return \(3,\) int32",
    ),
    "curriculum: state": (
        lambda: chosen(best, update=lambda state, outcome: (state, outcome.rate)),
        r"curriculum.update returned another state",
    ),
    "network: nothing": (
        lambda: GRPO.with_(network=lambda network: None),
        r"network returned None; return a jrl.Network",
    ),
    "schedule: a number": (
        lambda: GRPO.with_(schedule=2),
        r"schedule = 2; must be a jrl.methods.Schedule",
    ),
    "objective: nothing": (
        lambda: Method(None),
        r"objective = None; must be a jrl.types.Objective",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_part_that_does_not_fit_is_named_before_anything_compiles(name, monkeypatch):
    make, message = WRONG[name]
    with pytest.raises(UserError, match=message) as raised:
        check(make, monkeypatch)
    assert str(raised.value).startswith("method = 'tests_own_method:mine'")
    assert len(str(raised.value).splitlines()) == 1


def test_an_exception_is_named_with_its_line(monkeypatch):
    with pytest.raises(UserError, match=r"test_own_parts.py, line \d+: ZeroDivisionError"):
        check(lambda: surrogate(lambda stats, advantages, mask: (1 / 0, {})), monkeypatch)


def test_a_part_that_no_method_has_names_the_nearest():
    with pytest.raises(UserError, match=r"'advantges'; did you mean 'advantage'\?"):
        GRPO.with_(advantges=None)


def test_parts_that_fit_are_taken(monkeypatch):
    def further(groups, view):
        return (more(groups, jnp.where(groups.rate() == 0, 2, 0), 2),)

    edit = edit_of(lambda groups, view: only(groups, (groups.rate() > 0)[:, None]))
    plan = Plan(next=further, rounds=1, members=lambda group: 2)
    check(lambda: chosen(best).with_(plan=plan, edits=(edit,)), monkeypatch)
    check(lambda: jrl.methods.mopps(pool=16), monkeypatch)
