"""Reading configurations: files, overrides, unknown keys, round trips."""

import dataclasses
import re
from pathlib import Path

import pytest

from jrl.config import (
    build_config,
    config_hash,
    describe,
    dump,
    flatten,
    from_table,
    load_config,
    may_differ,
)
from jrl.config.explain import NAMES_ELSEWHERE, RENAMED
from jrl.config.stored import differences
from jrl.errors import UserError

SHIPPED = sorted(Path(__file__).parents[2].glob("configs/*.toml"))


def fails(overrides, path=None):
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    return str(caught.value)


UNKNOWN = {
    "sampling.temprature=1": "unknown key sampling.temprature = 1; did you mean sampling.temp",
    "temperature=1": "did you mean sampling.temperature or eval.temperature?",
    "sampler.group=4": "unknown key sampler; did you mean sampling?",
    "train.prompt=8": "did you mean train.prompts?",
    "train.clip_norm=1": "did you mean optimizer.clip_norm?",
    "warmup.zzz=1": "keys of [warmup] are steps, ",
    "data.tran=x": "unknown key data.tran = 'x'; did you mean data.train?",
    "lora.rnk=2": "unknown key lora.rnk = 2; did you mean lora.rank?",
    "frozn.ref=x": "unknown key frozn; did you mean frozen?",
    "zzz=1": "tables are checkpoint, data, eval",
    # as other libraries call them
    "lr=1e-5": "unknown key lr = 1e-05; did you mean optimizer.learning_rate?",
    "sampling.num_generations=8": "did you mean sampling.group?",
    "data.prompt_key=text": "did you mean data.fields.question?",
    "train.ppo_epochs=2": "did you mean objective.epochs?",
    "beta=0.04": "did you mean objective.kl_coef or objective.beta?",
    "epsilon_high=0.28": "did you mean objective.clip_high?",
    "train.loss_type=dapo": "did you mean method?",
    "num_train_epochs=1": "did you mean train.steps?",
    "actor_rollout_ref.rollout.n=5": "rollout.n = 5; did you mean sampling.group?",
}


@pytest.mark.parametrize("override", UNKNOWN)
def test_unknown_key_suggests_the_nearest(override):
    assert UNKNOWN[override] in fails([override])


@pytest.mark.parametrize(
    "override",
    ["run.dir=gs://bucket/run", "model.path=https://huggingface.co/Qwen/Qwen3-0.6B"],
)
def test_an_address_is_no_directory(override):
    key, _, address = override.partition("=")
    assert f"{key} = '{address}'; is an address; name a directory" in fails([override])


@pytest.mark.parametrize("keys", NAMES_ELSEWHERE)
def test_keys_that_other_libraries_call_otherwise_are_there(keys):
    names = {each.name for each in describe()}
    free = {
        "data.fields": ("question", "answer"),
        "objective": ("epochs", "kl_coef", "beta", "clip_low", "clip_high"),
        "optimizer": ("weight_decay",),
        "mesh": ("data", "tensor"),
    }
    for key in re.split(" or | and ", keys):
        table, _, last = key.rpartition(".")
        assert key in names or last in free[table]
    assert not set(NAMES_ELSEWHERE[keys].split()) & {name.rpartition(".")[2] for name in names}


@pytest.mark.parametrize(
    "text", ['"train.steps" = 5', '["model.config"]\nlayers = 1', '[train]\n"steps.x" = 1']
)
def test_a_key_with_a_dot_inside_quotes_is_named(text, tmp_path):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(UserError, match=r'^unknown key "[a-z.]+": quotes make one name of it'):
        load_config(tmp_path / "run.toml")


def test_override_values_are_toml_and_bare_words_are_text():
    config = load_config(
        None,
        [
            "method=rloo",
            "seed = 3",
            "data.shuffle=false",
            "optimizer.learning_rate=2e-5",
            "objective.clip_high=0.28",
            'objective.kind="k1"',
            "data.train=/tmp/a b=c.jsonl",
            "data.template=Q: {question}",
            'rewards."my.py:score".weight=2',
        ],
    )
    assert (config.method, config.seed, config.data.shuffle) == ("rloo", 3, False)
    assert config.optimizer.learning_rate == 2e-5
    assert config.objective == {"clip_high": 0.28, "kind": "k1"}
    assert config.data.train == "/tmp/a b=c.jsonl"
    assert config.data.template == "Q: {question}"
    assert config.rewards["my.py:score"].weight == 2.0


def test_later_overrides_win_over_earlier_ones_and_over_the_file(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("[train]\nsteps = 5\nprompts = 4\n[data]\ntask = 'sorting'\n")
    config = load_config(path, ["train.steps=6", "train.steps=7"])
    assert (config.train.steps, config.train.prompts) == (7, 4)


def test_an_empty_value_removes_the_key(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("[data]\ntask = 'sorting'\n")
    config = load_config(path, ["data.task=", "data.train=x.jsonl", "train.steps="])
    assert config.data.name == ""
    assert config.train.steps == build_config({}).train.steps


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("train.stepps=", "unknown key train.stepps; did you mean train.steps?"),
        ("model.pth= ", "unknown key model.pth; did you mean model.path?"),
        ("sampling.chunk=", "sampling.chunk is no longer a key"),
        ("data.difficulty=", "data.difficulty= removes nothing: [data] has no such key here"),
        ("optimizer.beta1=", "optimizer.beta1= removes nothing: [optimizer] has no such key here"),
        ("data.tran=", "unknown key data.tran; did you mean data.train?"),
        ("rewards.exct=", "rewards.exct= removes nothing: [rewards] has no such key here"),
        ('"train.steps"=', "write it without them"),
    ],
)
def test_an_empty_value_removes_no_key_that_is_not_there(override, text):
    assert text in fails(["data.train=x.jsonl", override])


def test_an_empty_value_makes_no_table():
    overrides = ["data.train=x.jsonl", "placement.staleness=", "value="]
    assert load_config(None, overrides) == load_config(None, overrides[:1])


@pytest.mark.parametrize("override", ["train.steps", "=3", "a b=1", "train..steps=1", ""])
def test_what_is_no_override_is_refused(override):
    assert "write table.key=value" in fails([override])


def test_broken_toml_value_and_path_through_a_value_are_refused():
    assert "objective.clip = [1; not a valid TOML value" in fails(["objective.clip=[1"])
    assert "override 'seed.x=1'; seed is not a table" in fails(["seed=1", "seed.x=1"])


def test_a_value_cannot_smuggle_in_another_key():
    config = load_config(None, ["data.system=1\nseed=7"])
    assert (config.seed, config.data.system) == (0, "1\nseed=7")


def test_file_errors_name_the_file(tmp_path):
    (tmp_path / "tiny.toml").write_text("seed = = 1\n")
    assert "did you mean" in fails([], tmp_path / "tinny.toml")
    message = fails([], tmp_path / "tiny.toml")
    assert "tiny.toml: not valid TOML" in message
    assert "line 1" in message
    (tmp_path / "latin.toml").write_bytes(b"method = '\xe9'\n")
    assert "not UTF-8" in fails([], tmp_path / "latin.toml")


def test_dump_reads_back_as_the_same_configuration(tmp_path):
    config = load_config(
        None,
        [
            "model.config.layers=2",
            'rewards."f.py:g".k=[1, 2]',
            "objective.clip=0.3",
            "data.system='say \"hi\"\\nbye'",
            "eval.temperature=1",
            "eval.samples=4",
            "frozen.ref=['a', 'b']",
            "lora={rank=2, targets=['q']}",
            "placement={}",
            "sampling.mesh.data=2",
            "optimizer={name='lion', b2=0.99}",
            "sampling.int8=cache",
            "log.to=tensorboard",
        ],
    )
    path = tmp_path / "a.toml"
    path.write_text(dump(config), encoding="utf-8")
    assert load_config(path) == config


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configurations_are_right(path, tmp_path):
    config = load_config(path)
    copy = tmp_path / "copy.toml"
    copy.write_text(dump(config), encoding="utf-8")
    assert load_config(copy) == config


def test_there_are_shipped_configurations():
    assert {path.name for path in SHIPPED} >= {"tiny.toml", "gsm8k.toml"}


def test_hash_names_the_experiment():
    base = config_hash(load_config(None))
    assert config_hash(load_config(None, ["run.dir=x", "train.steps=3"])) == base
    assert config_hash(load_config(None, ["seed=1"])) != base
    assert config_hash(load_config(None, ["objective.clip=0.1"])) != base
    assert [may_differ(k) for k in ("run.dir", "train.steps", "train.prompts")] == [
        True,
        True,
        False,
    ]


def test_devices_of_its_own_are_no_other_experiment_unless_the_policy_lags():
    base = config_hash(load_config(None))
    assert config_hash(load_config(None, ["placement={}", "sampling.mesh.data=2"])) == base
    assert config_hash(load_config(None, ["placement.staleness=1"])) != base


def test_the_server_of_a_judge_may_move_and_its_model_stays():
    def judged(url, *more, function="judge"):
        part = f"rewards.good={{function='{function}', url='{url}', model='m'}}"
        return load_config(None, ["data.train=rows.jsonl", part, *more])

    began, moved = judged("http://a:8000/v1"), judged("http://b:8000/v1", "rewards.good.retries=9")
    assert differences(began, moved, "there", "now") == []
    assert config_hash(began) == config_hash(moved)
    for other in (
        judged("http://a:8000/v1", "rewards.good.model=n"),
        judged(""),
        judged("http://b:8000/v1", function="mine.py:reward"),
    ):
        assert differences(began, other, "there", "now")
        assert config_hash(began) != config_hash(other)


def test_the_server_of_an_environment_may_move_and_its_model_stays():
    def played(url, model="m", writer="http://c/v1", env="guided"):
        writer = f"data.writer={{url='{writer}', model='{model}'}}"
        more = f"data.env='{env}'", f"data.url='{url}'", f"data.model='{model}'", writer
        return load_config(None, ["data.train=rows.jsonl", *more])

    began, moved = played("http://a/v1"), played("http://b/v1", writer="http://d/v1")
    assert differences(began, moved, "there", "now") == []
    assert config_hash(began) == config_hash(moved)
    assert len(differences(began, played("http://a/v1", "n"), "there", "now")) == 2
    ours = (played(url, env="mine.py:env") for url in ("http://a/v1", "http://b/v1"))
    assert len(differences(*ours, "there", "now")) == 1


@pytest.mark.parametrize("key", RENAMED)
def test_an_old_key_says_what_to_write_now(key):
    assert key not in {entry.name for entry in describe()}
    error = fails([f"{key}=1", "seed=-1"])
    assert f"{key} = 1 is no longer a key; {RENAMED[key]}" in error
    assert "seed = -1; must be at least 0" in error  # with all other problems
    for word in RENAMED[key].replace(",", " ").replace(";", " ").split():
        if "." in word and word.partition(".")[0] in ("data", "frozen", "objective", "sampling"):
            assert load_config(None, [f"{word}={NEW.get(word, 'x')}"])


NEW = {"sampling.int8": "cache", "sampling.mesh": "{}"}


def test_each_key_is_there_once():
    names = [key.name for key in describe()]
    assert len(names) == len(set(names)) > 60


def test_a_key_of_some_kinds_says_which():
    keys = {key.name: key for key in describe()}
    assert keys["data.system"].single == ["data.train", "data.pairs"]
    assert keys["data.train"].single == []


def test_every_key_is_described_and_every_leaf_is_listed():
    keys = {key.name: key for key in describe()}
    assert all(key.text for key in keys.values())
    names = {name for name in flatten(load_config(None)) if name not in ("rewards", "objective")}
    assert names <= keys.keys()
    assert keys["train.mode"].kind == "host | in_flight | packed | compiled"
    assert keys["run.dir"].kind == "text"


@dataclasses.dataclass(frozen=True)
class Shape:
    layers: int
    width: int = 8


def test_from_table_names_unknown_and_missing_keys():
    assert from_table("model.config", Shape, {"layers": 2}) == Shape(2)
    with pytest.raises(UserError) as caught:
        from_table("model.config", Shape, {"layer": 2})
    assert "unknown key model.config.layer = 2; did you mean model.config.layers?" in str(
        caught.value
    )
    assert "model.config.layers is missing" in str(caught.value)


WEIGHTS = {
    "data.train=3": "data.train = 3; must be text or a table of weights",
    "data.train={a='x'}": "data.train.a = 'x'; must be a number",
    "data.train={}": "data.train = {}; must not be empty",
    "data.train={'a.csv'=0}": "data.train.a.csv = 0; must be above 0.0",
}


@pytest.mark.parametrize("override", WEIGHTS)
def test_weights_of_sources_are_checked_in_one_line(override):
    assert fails([override]) == WEIGHTS[override]


def test_weights_of_sources_are_kept(tmp_path):
    config = load_config(None, ["data.train={'o/n/main'=3, 'a.csv'=1.5}"])
    assert config.data.train == {"o/n/main": 3.0, "a.csv": 1.5}
    (tmp_path / "a.toml").write_text(dump(config))
    assert load_config(tmp_path / "a.toml") == config


def test_a_configuration_that_is_not_there_has_neighbours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny.toml").write_text("")
    for path in ("tiny.tml", "configs/tny.toml", "elsewhere/tiny.toml"):
        with pytest.raises(UserError, match="did you mean configs/tiny.toml"):
            load_config(path)
