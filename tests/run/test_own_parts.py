"""Methods and sources of one's own whose parts do not fit: named before anything compiles."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_policy import save_letters_model

import jrl
from jrl.collect import host_source
from jrl.config import load_config
from jrl.errors import UserError
from jrl.methods import (
    Between,
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
from jrl.types import Surrogate, Transform

GRPO = grpo()
SIZES = "model.config={layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}"
TASK = (
    *("data.task=sorting", "data.difficulty=3", SIZES, "train.prompts=3", "sampling.group=4"),
    "eval.problems=4",
)


def check(method, monkeypatch, data=TASK):
    """Checks of a run before it compiles."""
    import importlib

    module = importlib.import_module("tests_own_method")
    monkeypatch.setattr(module, "mine", method)
    run = setup(load_config(None, [*data, "method=tests_own_method:mine"]))
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


def between(run, uses=("draw",), **more):
    return chosen(best).with_(
        curriculum=Curriculum(
            lambda table: jnp.zeros(table.rows),
            best,
            between=Between(2, run, uses=frozenset(uses), **more),
        )
    )


def losses(stats, advantages, mask):
    return advantages, {}


def without_parts(groups, view):
    return groups.replace(rewards=groups.rewards[..., :0])


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
    "advantage: whole numbers": (
        lambda: GRPO.with_(advantage=per_group(lambda r, members: members)),
        r"the advantage returned bool; return float32",
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
    "plan: nothing first": (
        lambda: GRPO.with_(plan=Plan(first=lambda asks, view: None)),
        r"plan.first returned None; return a tuple of asks",
    ),
    "needs: one part": (
        lambda: GRPO.with_(parts="format"),
        r"needs.parts = 'format'; must be a tuple of reward parts",
    ),
    "plan: fractions of members": (
        lambda: planned(lambda groups, view: (more(groups, groups.rate(), 2),)),
        r"more: count has fractions; round it",
    ),
    "plan: no rounds": (
        lambda: GRPO.with_(plan=Plan(next=lambda groups, view: (), members=lambda group: 2)),
        r"plan.next is never called, as plan.rounds = 0",
    ),
    "plan: no room": (
        lambda: planned(lambda groups, view: (), members=lambda group: 0),
        r"plan.next can add nothing: plan.members\(4\) and plan.prompts\(3\) are 0",
    ),
    "plan: a bound": (
        lambda: planned(lambda groups, view: (), members=lambda group: None),
        r"plan.members\(8\) = None; must be a whole number, at least 0",
    ),
    "surrogate: needs": (
        lambda: GRPO.with_(surrogate=Surrogate(losses, needs="sampler_logprobs")),
        r"objective.surrogate.needs = 'sampler_logprobs'; must be a frozenset of names",
    ),
    "surrogate: over": (
        lambda: GRPO.with_(surrogate=Surrogate(losses, over="pair")),
        r"objective.surrogate.over = 'pair'; choose from group, sequence",
    ),
    "surrogate: a metric": (
        lambda: surrogate(lambda stats, advantages, mask: (advantages, {"a": jnp.ones(1)})),
        r"a surrogate returned the metric 'a' of shape \(1,\); return one number, or one for each",
    ),
    "surrogate: whole numbers": (
        lambda: surrogate(lambda stats, advantages, mask: (mask.astype(int), {})),
        r"a surrogate returned losses of int32; return float32",
    ),
    "edit: numbers": (
        lambda: GRPO.with_(
            edits=(edit_of(lambda groups, view: only(groups, groups.sizes()[:, None])),)
        ),
        r"only: keep is int\d+; give bool",
    ),
    "edit: reward parts": (
        lambda: GRPO.with_(edits=(edit_of(without_parts),)),
        r"the edits left reward parts of shape \(3, 4, 0\); keep the last axis",
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
    "curriculum: fractions": (
        lambda: chosen(lambda s, query: (Selection(query.tickets * 1.0), s)),
        r"curriculum.choose returned rows of float\d+; return \(3,\) int32",
    ),
    "curriculum: a row": (
        lambda: chosen(lambda s, query: (Selection(query.tickets + 1023), s)),
        r"curriculum.choose returned row 1024; rows are from 0 to 1023",
    ),
    "curriculum: a temperature": (
        lambda: chosen(lambda s, query: (Selection(query.tickets, temperature=np.float32(1)), s)),
        r"curriculum.choose returned temperature of shape \(\); return \(3,\), one for each row",
    ),
    "curriculum: a shorter state": (
        lambda: chosen(best, update=lambda state, outcome: state[:2]),
        r"curriculum.update returned a state with float32 of shape \(2,\) in place of float32 of"
        r" shape \(1024,\)",
    ),
    "curriculum: state": (
        lambda: chosen(best, update=lambda state, outcome: (state, outcome.rate)),
        r"curriculum.update returned another state",
    ),
    "between: a function": (
        lambda: chosen(best).with_(
            curriculum=Curriculum(lambda t: jnp.zeros(t.rows), best, between=lambda s, tools: s)
        ),
        r"curriculum.between = <function .*; must be a jrl.methods.Between or None",
    ),
    "between: arguments": (
        lambda: between(lambda state: state),
        r"curriculum.between.run: .*must take \(state, tools\)",
    ),
    "between: a tool": (
        lambda: between(lambda state, tools: state, uses=("drwa",)),
        r"curriculum.between.uses = 'drwa'; did you mean 'draw'\?",
    ),
    "between: nothing": (
        lambda: between(lambda state, tools: None),
        r"curriculum.between.run returned None; return the state with the same leaves",
    ),
    "between: shapes of tests": (
        lambda: between(lambda s, tools: s + tools.draw(jnp.arange(5), 2).success()[:3].sum(2)),
        r"test_own_parts.py, line \d+: .*axis 2 is out of bounds",
    ),
    "between: counts": (
        lambda: between(lambda state, tools: state, counts=lambda state: 3),
        r"curriculum.between.counts returned 3; return numbers by name",
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
    tested = []

    def test(state, tools):
        rows = np.arange(tools.rows, dtype=np.int32)
        tested.append(tools.draw(rows, 3).rewards.shape[:2])
        return jnp.asarray(state) + 1

    check(lambda: between(test, counts=lambda state: {"rows": float(len(state))}), monkeypatch)
    assert tested == [(1024, 3)]


# ---------------------------------------------------------------- on every kind of data

OWN = '''
import numpy as np

from jrl.collect.sources import Groups, entries
from jrl.episodes.host import EnvExtras, Feedback, HostEnv, Limits
from jrl.types import Prompt


def talk():
    """Episodes of two turns, each with a number of its own."""

    def init(prompt, seed):
        return prompt, [{"role": "user", "content": prompt.text}]

    async def step(prompt, reply):
        return prompt, Feedback([{"role": "user", "content": "go on"}], 1.0, reply.turn == 1)

    limits = Limits(turns=2, turn_tokens=5)
    return HostEnv(init, step, limits=limits, extras=EnvExtras(labels=("mood",)))


class Words:
    """Asks for a word, and labels its groups with a mood."""

    def __init__(self, sampler, tokenizer):
        self.sampler, self.ids = sampler, np.array(tokenizer.encode("a word?"), np.int32)

    def order(self, tickets):
        return tickets

    def prompts(self, key, rows):
        prompts = [Prompt(int(i), "a word?", self.ids, "a") for i in rows]
        return prompts, prompts

    def draw(self, request):
        prompts, _ = self.prompts(request.key, entries(request)[1])
        return self.judge(prompts, prompts, self.sampler(request, prompts))

    def judge(self, subject, prompts, rollout):
        shape = rollout.lengths.shape
        ids = {"prompt": np.zeros(shape[0], np.int32), "mood": np.zeros(shape, np.int32)}
        return Groups(rollout, np.zeros((*shape, 1), np.float32), prompts, {}, ids)

    def finish(self, complete):
        pass

    def notes(self):
        return {}


def words(sampler, tokenizer):
    return Words(sampler, tokenizer)
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a model of letters and files of every kind."""
    place = tmp_path_factory.mktemp("kinds")
    save_letters_model(place)
    template = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<stop>"
    about = {"eos_token": "<stop>", "chat_template": template + "{% endif %}{% endfor %}"}
    (place / "model" / "tokenizer_config.json").write_text(json.dumps(about))
    (place / "own.py").write_text(OWN)
    messages = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
    task = setup(load_config(None, [*TASK])).task
    problem = task.generate(jax.random.key(0), "train")
    prompt, answer = task.render(jax.device_get(problem))
    rows = {
        "prompts": {"question": "a?", "answer": "b"},
        "talks": {"messages": messages, "reward": 1.0},
        "pairs": {"prompt": prompt, "chosen": answer, "rejected": answer[:1]},
    }
    for name, row in rows.items():
        (place / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    return place


GROUPS = ("train.prompts=2", "sampling.group=4")
LETTERS = (
    *(*GROUPS, "model.path=PLACE/model", "sampling.max_new_tokens=12"),
    "data.max_prompt_tokens=20",
)
DPO, BC = jrl.methods.dpo(), jrl.methods.get_method("filtered_bc")
DATA = {
    "players on the device": (GRPO, (SIZES, *GROUPS, "data={env='nim', opponent='self'}")),
    "branches": (GRPO, (*TASK, "tree.kind=branch")),
    "a search": (GRPO, (*TASK, "tree.kind=search")),
    "pairs": (DPO, (*TASK, "data.pairs=PLACE/pairs.jsonl")),
    "text": (GRPO, (*LETTERS, "data.train=PLACE/prompts.jsonl", "rewards.exact={}")),
    "dialogues": (BC, (*LETTERS, "data.train=dialogues:PLACE/talks.jsonl")),
    "own source": (GRPO, (*LETTERS, "data.train=source:PLACE/own.py:words")),
    "episodes": (GRPO, (*LETTERS, "data.train=PLACE/prompts.jsonl", "data.env=PLACE/own.py:talk")),
}
LABELLED = {"own source", "episodes"}


def reads_moods(advantages, batch, state):
    return advantages + batch.ids["mood"], batch, state


@pytest.mark.parametrize("name", DATA)
def test_methods_are_tried_on_every_kind_of_data(name, place, monkeypatch):
    base, data = DATA[name]
    data = [text.replace("PLACE", str(place)) for text in data]
    wrong = base.with_(advantage=per_group(lambda r, members: jnp.append(r, 0.0)))
    with pytest.raises(UserError, match=r"one group of \d members returned \(\d,\)") as raised:
        check(lambda: wrong, monkeypatch, data)
    assert str(raised.value).startswith("method = 'tests_own_method:mine'")
    check(lambda: base, monkeypatch, data)
    moods = base.with_(advantage=Transform(lambda: (), reads_moods))
    if name in LABELLED:
        check(lambda: moods, monkeypatch, data)
        return
    with pytest.raises(UserError, match="mood"):
        check(lambda: moods, monkeypatch, data)


# ---------------------------------------------------------------- an environment's first turn

TALK = '[{"role": "user", "content": prompt.text}]'
FEEDBACK = 'Feedback([{"role": "user", "content": "go on"}], 1.0)'
TURNS = {
    "init: a state alone": ("prompt", f"s, {FEEDBACK}", "init: init returned Prompt"),
    "init: a text": ("prompt, prompt.text", f"s, {FEEDBACK}", "init: messages are 'a\\?', not a"),
    "step: feedback alone": (f"prompt, {TALK}", FEEDBACK, "step: step returned Feedback"),
    "step: no messages": (f"prompt, {TALK}", "s, Feedback([], 1.0)", r"step: messages are \[\]"),
    "step: a part more": (
        f"prompt, {TALK}",
        's, Feedback([{"role": "user", "content": "a"}], (1.0, 2.0))',
        "step: 2 reward parts; the environment names 1",
    ),
    "step: a label": (
        f"prompt, {TALK}",
        's, {"messages": [{"role": "user", "content": "a"}], "labels": {"mood": 1}}',
        "step: label mood is not declared",
    ),
    "step: a key": (f"prompt, {TALK}", 's, {"mesages": []}', "step: feedback has no mesages"),
}
EPISODES = {
    "a role": ('await policy["cri" + "tic"]("a?")', "init: there is no role 'critic'"),
    "no messages": ("await policy(3)", "init: messages are 3, not a text or a list of dicts"),
    "a reward": ('await policy("a?"); return "good"', "step: reward is 'good', not a number"),
    "an outcome": (
        'await policy("a?"); return Outcome(1.0, metrics=3)',
        "step: Outcome.metrics = 3, not a dict",
    ),
    "a reward after another turn": (
        'await policy("a?"); await policy("b?"); return {"polcy": 1.0}',
        "step: there is no role 'polcy'",
    ),
    "a metric": (
        'await policy("a?"); policy.record(good="much"); await policy("b?")',
        "step: policy.record: good is 'much', not a number",
    ),
}


def check_env_of(text, name, place, tmp_path):
    (tmp_path / "mine.py").write_text("from jrl.episodes import *\n" + text)
    data = [text.replace("PLACE", str(place)) for text in DATA["text"][1] if "rewards" not in text]
    run = setup(load_config(None, [*data, f"data.env={tmp_path}/mine.py:{name}"]))
    check_trainable(run)
    check_own_parts(run)


@pytest.mark.parametrize("name", TURNS)
def test_what_an_environment_returns_is_tried_before_anything_compiles(name, place, tmp_path):
    opened, answered, message = TURNS[name]
    text = f"def init(prompt, seed):\n    return {opened}\n\n"
    text += f"def step(s, reply):\n    return {answered}\n\n"
    with pytest.raises(UserError, match=f"mine.py:env': {message}") as raised:
        check_env_of(text + "def env():\n    return HostEnv(init, step)\n", "env", place, tmp_path)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("name", EPISODES)
def test_so_is_an_episode(name, place, tmp_path):
    body, message = EPISODES[name]
    text = f"async def episode(policy, prompt):\n    {body}\n"
    with pytest.raises(UserError, match=f"mine.py:episode': {message}"):
        check_env_of(text, "episode", place, tmp_path)


@pytest.mark.parametrize(
    ("limits", "seconds"),
    [("", 2 * 30 + 10 + 30), ("call_seconds=0.5", (2 + 8) * 0.5), ("turns=1", (2 + 1) * 30)],
)
def test_one_that_hangs_delays_a_run_by_few_calls(limits, seconds, place, tmp_path, monkeypatch):
    limited = []
    gather = host_source.gather

    def watched(calls, made, limit):
        limited.append(limit)
        return gather(calls, made, limit)

    monkeypatch.setattr(host_source, "gather", watched)
    step = f"def init(p, seed):\n    return p, {TALK.replace('prompt', 'p')}\n\n"
    step += f"def step(s, reply):\n    return s, {FEEDBACK}\n\n"
    env = f"def env():\n    return HostEnv(init, step, limits=Limits({limits}))\n"
    check_env_of(step + env, "env", place, tmp_path)
    assert limited == [seconds]


def test_an_environment_that_is_tried_is_closed_and_may_fail(place, tmp_path, caplog):
    """It begins, is told the problem's answer, is closed, and shut down; its own error is none."""
    text = f"""
calls = []

def init(prompt, seed):
    calls.append("init")
    return prompt, {TALK}

def step(s, reply):
    calls.append(reply.text)
    raise ValueError("no number")

def close(s):
    calls.append("close")

async def shutdown():
    calls.append("shutdown")
    with open({str(tmp_path / "calls")!r}, "w") as file:
        file.write(" ".join(calls))

def env():
    calls.append("made")
    begin = lambda step, split: calls.append(split)
    return HostEnv(init, step, close, lifecycle=Lifecycle(begin, shutdown))
"""
    check_env_of(text, "env", place, tmp_path)
    assert (tmp_path / "calls").read_text() == "made shutdown made train init b close shutdown"
    assert "a trial episode failed: " in caplog.text
    assert "mine.py, line 11: ValueError: no number" in caplog.text
