"""The table of features: what does not go together is found, named, and has a remedy."""

import pytest

from jrl.config import features as key_features
from jrl.config import load_config
from jrl.config.features import BY_KEY, TABLE, WITH, WITHOUT, check_features
from jrl.episodes.host import HostEnv, Limits
from jrl.errors import UserError
from jrl.methods import all_methods, get_method
from jrl.methods.plan import Plan
from jrl.setup import features
from jrl.setup.features import features_of, host_features
from jrl.setup.kinds import kind_of


def of_config(network, *lines):
    config = load_config(None, list(lines))
    method = get_method(config.method)
    return features_of(config, method, network=network, model=None, data=kind_of(config).features)


EACH_KIND = (
    ("data.task=sequence", "rewards={'own.py:right'={}}"),
    ("data={env='nim', opponent='self'}",),
    ("data.train=x.jsonl",),
    ("data.train=x.jsonl", "data.env=own.py:env"),
    ("data.train=source:own.py:words",),
    ("data.train=recorded:x.jsonl",),
    ("data.train=dialogues:x.jsonl",),
    ("data.pairs=x.jsonl", "method=dpo"),
    ("data.pairs=x.jsonl", "data.task=sequence", "method=dpo"),
)
"""Configurations of each kind of data, and of several players and rewards of one's own."""


@pytest.fixture
def network(make_bag):
    return make_bag(19, 8, 64)


def feature_names(network, monkeypatch):
    """Every feature that is looked for, whether a run has it or not."""
    env = HostEnv(init=None, step=None, limits=Limits(turns=1))
    config, *others = [
        load_config(None, [*lines]) for lines in (("data.task=sequence",), *EACH_KIND)
    ]
    for module in (key_features, features):
        monkeypatch.setattr(module, "present", lambda items: {name: name for name in items})
    method = get_method(config.method)
    more = {"network": network, "model": None, "data": kind_of(config).features}
    names = set(host_features(env, features_of(config, method, **more)))
    for other in others:
        names |= set(kind_of(other).features)
    return names | {"experts", "compiled", "packed", "in flight"}


def test_every_name_in_the_table_is_looked_for(network, monkeypatch):
    names = feature_names(network, monkeypatch)
    used = {row.name for row in TABLE}.union(*(row.needs | row.forbids for row in TABLE))
    assert used <= names
    assert set(WITHOUT) <= names
    assert set(WITH) == set().union(*(row.needs for row in TABLE))
    assert set(WITH) >= BY_KEY
    keys = {"episodes", "given completions", "own reward", "own reward of a task", "recorded"}
    keys |= {"evaluation dtype", "reward parts", "token limit", "truncation"}
    assert set().union(*(row.forbids for row in TABLE)) <= set(WITHOUT) | keys


def test_what_is_looked_for_in_keys_is_found_there():
    """A need that keys bring is missed as the configuration is read."""
    config = load_config(
        None,
        [
            *("data.train=x", "data.env=own.py:env", "model.path=y", "eval.every=1"),
            *("placement={staleness=1}", "train.mode=in_flight"),
        ],
    )
    task = load_config(None, ["data.task=sorting", "warmup.steps=1"])
    text = load_config(None, ["data.train=x"])
    found = [set(key_features.key_features(each)) for each in (config, task, text)]
    assert set().union(*found) >= BY_KEY


def test_each_row_writes_its_message():
    for row in TABLE:
        same = (each for each in TABLE if each.name == row.name)
        needed = dict.fromkeys(frozenset().union(*(each.needs for each in same)), "there")
        for need in row.needs:
            with pytest.raises(UserError) as caught:
                check_features({row.name: "A = 1"})
            assert f"A = 1 needs {WITH[need][0]}: {row.why}; {WITH[need][1]}" in str(caught.value)
        for other in row.forbids:
            with pytest.raises(UserError) as caught:
                check_features({**needed, row.name: "A = 1", other: "B = 2"})
            assert f"A = 1 does not go with B = 2: {row.why}; " in str(caught.value)
        check_features({row.name: "A = 1", **needed})


def test_all_that_does_not_go_together_is_said_at_once(network):
    lines = ("data.task=sequence", "method=arpo", "objective.router_replay=true", "lora.rank=2")
    with pytest.raises(UserError) as caught:
        check_features(of_config(network, *lines))
    assert str(caught.value).splitlines() == [
        "tree.at = 'entropy' does not go with objective.router_replay = true: a branch has no"
        " record of its past's experts; set objective.router_replay to false, or set tree.kind to"
        " 'none'",
        "objective.router_replay = true needs routed experts: the model has none;"
        " choose another model, or set objective.router_replay to false",
    ]


def test_a_plain_run_of_each_kind_lacks_nothing(network):
    check_features(of_config(network, "data.task=sequence", "train.mode=compiled"))
    check_features(of_config(network, "data={env='nim', opponent='self'}"))
    check_features(of_config(network, "data.train=x.jsonl", "train.mode=packed", "lora.rank=2"))
    sampled = ("data.task=sorting", "data.difficulty=3")
    check_features(of_config(network, *sampled, "method=dars"))
    with pytest.raises(UserError, match="go with method = 'dars', which adds members to groups: "):
        check_features(of_config(network, *sampled, "method=dars") | {"episodes": "data.env"})
    chooses = of_config(network, *sampled, "method=mopps") | {"placement": "[placement]"}
    with pytest.raises(UserError, match=r"chooses its problems, does not go with \[placement\]"):
        check_features(chooses)
    check_features(of_config(network, "data.train=dialogues:x.jsonl", "method=filtered_bc"))
    check_features(of_config(network, "data.pairs=x.jsonl", "method=dpo"))


def test_the_probability_of_an_answer_needs_answers_and_whole_rows(network):
    likely = "rewards={p={function='likelihood'}}"
    turns = "rewards={p={function='likelihood', by='turn'}}"
    with pytest.raises(UserError, match=r"\[rewards.p\] does not go with data.env.*no answers"):
        check_features(of_config(network, "data={env='nim', opponent='self'}", likely))
    with pytest.raises(UserError, match='rewards.p.by = "turn" needs episodes: other data have no'):
        check_features(of_config(network, "data.train=x.jsonl", turns))
    episodes = of_config(network, "data.train=x.jsonl", "data.env=own.py:env", turns)
    check_features(episodes)
    with pytest.raises(UserError, match=r"\[rewards.p\] does not go with data.contexts = 2"):
        check_features({"contexts": "data.contexts = 2", "shared rows": "rows", **episodes})


def test_models_that_pay_by_step_need_steps(network):
    def model(by):
        return f"rewards={{p={{function='model', path='rm', by='{by}'}}}}"

    task = ("data.task=sequence", "data.difficulty=1")
    for by in ("step", "progress"):
        with pytest.raises(UserError, match=f"rewards.p.by = '{by}' does not go with data.task"):
            check_features(of_config(network, *task, model(by)))
        check_features(of_config(network, "data.train=x.jsonl", model(by)))
    for lines in (task, ("data.train=x.jsonl",)):
        with pytest.raises(
            UserError, match='rewards.p.by = "turn" needs episodes: other data have'
        ):
            check_features(of_config(network, *lines, model("turn")))
    episodes = ("data.train=x.jsonl", "data.env=own.py:env")
    check_features(of_config(network, *episodes, model("turn")))


def test_data_that_give_completions_play_no_plan():
    plan = get_method("dars").plan
    plans = [kind_of(load_config(None, [*line])).played(plan) for line in EACH_KIND]
    assert [each == plan for each in plans] == [True] * 5 + [False] * 4
    assert all(each == Plan() for each in plans[5:])


def test_the_needs_of_methods_are_known():
    """What is read of the data and of lines."""
    read = {"lines", "goals", "rationales", "questions", "several solutions"}
    for name, published in all_methods().items():
        assert published.example().needs.reads <= read, name


def test_rewards_that_pay_nothing_and_a_value_network_for_nobody_are_said(network, caplog):
    task = ("data.task=sorting", "data.difficulty=3")
    weights = "rewards={verify={weight=0}, partial={weight=0}}"
    features._warn_unpaid.cache_clear()

    def warnings_of(*more):
        config = load_config(None, [*task, *more])
        method = get_method(config.method)
        run_features = features_of(
            config, method, network=network, model=None, data=kind_of(config).features
        )
        check_features(run_features)

    warnings_of("rewards={verify={weight=0}, partial={weight=1}}")
    assert not caplog.text
    warnings_of(weights)
    assert "warning: rewards.verify.weight and rewards.partial.weight = 0" in caplog.text
    warnings_of("value.kind=network", "method=ppo")
    with pytest.raises(UserError, match="value.kind = 'network' needs a method with a value net"):
        warnings_of("value.kind=network")
    contrast = ("data.pairs=x.jsonl", "method=simcse_reward")
    check_features(of_config(network, *contrast))
    with pytest.raises(UserError, match="does not go with value.kind = 'network': .* to 'head'"):
        check_features(of_config(network, *contrast, "value.kind=network"))
