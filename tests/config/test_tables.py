"""Limits and conflicts of configuration keys."""

import pytest

from jrl.config import build_config, check_batch, load_config
from jrl.config.checks import batch_parts
from jrl.errors import UserError

WRONG = {
    "train.steps=ten": "train.steps = 'ten'; must be a whole number",
    "train.steps=1.5": "train.steps = 1.5; must be a whole number",
    "train.steps=true": "train.steps = True; must be a whole number",
    "train.prompts=0": "train.prompts = 0; must be at least 1",
    "sampling.temperature=-0.1": "sampling.temperature = -0.1; must be at least 0.0",
    "sampling.temperature=nan": "sampling.temperature = nan; must be finite",
    "sampling.top_k=-1": "sampling.top_k = -1; must be at least 0",
    "sampling.top_p=0": "sampling.top_p = 0; must be above 0.0",
    "sampling.top_p=1.01": "sampling.top_p = 1.01; must be at most 1.0",
    "sampling.min_p=1": "sampling.min_p = 1; must be below 1.0",
    "sampling=3": "sampling = 3; must be a table",
    "rewards.math=2": "rewards.math = 2; must be a table",
    "rewards.math.weight=a": "rewards.math.weight = 'a'; must be a number",
    "data.shuffle=True": "data.shuffle = 'True'; must be true or false",
    "log.to=3": "log.to = 3; must be text or a list",
    "log.to=wandb": "log.to = 'wandb'; must be tensorboard, wandb:PROJECT, "
    "trackio:PROJECT or mlflow:EXPERIMENT",
    "sampling.int8=cash": "sampling.int8 = 'cash'; did you mean 'cache'? choose from cache, w",
    "sampling.float8=cache": "sampling.float8 = 'cache'; has weights alone; set sampling.int8 = ",
    "frozen.ref=3": "frozen.ref = 3; must be text or a list",
    "frozen.ref=[]": "frozen.ref = []; must not be empty",
    "lora.alpha=3.0": "lora.rank is missing: rank of the adapters",
    "lora=3": "lora = 3; must be a table",
    "data=3": "data = 3; must be a table",
    "mesh.data=0": "mesh.data = 0; must be at least 1, or -1 for all remaining devices",
    "sampling.mesh.fsdp=0": "sampling.mesh.fsdp = 0; must be at least 1, or -1 for all",
    "sampling.mesh.fdsp=2": "unknown key sampling.mesh.fdsp; did you mean sampling.mesh.fsdp",
    "mesh.fdsp=2": "unknown key mesh.fdsp; did you mean mesh.fsdp?",
    "data.fields.anser=x": "unknown key data.fields.anser; did you mean data.fields.answer?",
    "seed=-1": "seed = -1; must be at least 0",
    "data.template=Question": "must be chat, plain, or text with {question}",
    "data.template={question} {x}": "must be chat, plain, or text with {question}",
    "data.answer_pattern=(": "not a regular expression",
    "data.answer_pattern=####": "needs a group in parentheses",
}


@pytest.mark.parametrize("override", WRONG)
def test_wrong_value_names_key_value_and_remedy(override):
    with pytest.raises(UserError) as caught:
        load_config(None, [override])
    assert WRONG[override] in str(caught.value)


CONFLICTS = {
    "minibatches": (
        ["train.prompts=6", "train.minibatches=4"],
        "train.prompts = 6 is not a multiple of train.minibatches = 4",
    ),
    "microbatches": (
        ["train.prompts=8", "train.minibatches=2", "train.microbatches=3"],
        "train.prompts / train.minibatches = 4 is not a multiple of train.microbatches = 3",
    ),
    "mesh": (
        ["train.prompts=8", "train.microbatches=2", "mesh.data=4", "mesh.fsdp=2"],
        "make train.prompts = 8 a multiple of 16",
    ),
    "two open axes": (["mesh.data=-1", "mesh.fsdp=-1"], "mesh.data and mesh.fsdp are -1"),
    "open axes of two meshes": (
        ["mesh.data=-1", "placement={}", "sampling.mesh.data=-1"],
        "mesh.data and sampling.mesh.data are -1; only one axis can take",
    ),
    "two models": (
        ["model.path=x", "model.config.layers=2"],
        "model.path = 'x' does not go with model.config: a",
    ),
    "task and train": (
        ["data.task=sorting", "data.train=x"],
        "data.train = 'x' and data.task are both given; remove one",
    ),
    "pairs and train": (
        ["data.pairs=x", "data.train=y"],
        "data.train = 'y' and data.pairs are both given; remove one",
    ),
    "task and eval": (
        ["data.task=sorting", "data.eval=x"],
        "data.eval = 'x' goes with data.train or data.pairs, not with data.task; remove it",
    ),
    "pairs and fields": (
        ["data.pairs=x", "data.answer_pattern=(a)"],
        "data.answer_pattern = '(a)' goes with data.train, not with data.pairs; remove it",
    ),
    "pairs of a task and template": (
        ["data={pairs='x', task='sorting'}", "data.template=plain"],
        "goes with data.train or data.pairs, not with data.pairs and data.task; remove it",
    ),
    "compiled files": (
        ["data.train=x", "train.mode=compiled"],
        "samples problems that a program makes; give data.task or an environment",
    ),
    "limit of a task": (
        ["data.task=sorting", "sampling.max_new_tokens=9"],
        "data.task = 'sorting' does not go with sampling.max_new_tokens = 9",
    ),
    "adapters of nothing": (
        ["lora={rank=2, path='x'}"],
        "lora.path = 'x' needs model.path: adapters belong to",
    ),
    "compiled on two meshes": (
        ["data.task=sorting", "placement={}", "train.mode=compiled"],
        "train.mode = 'compiled' does not go with [placement]: it is one program",
    ),
    "newer weights of what is drawn at once": (
        ["data.task=sorting", "placement={staleness=1}", "train.mode=in_flight"],
        "train.mode = 'in_flight' needs episodes: their tokens alone are drawn",
    ),
    "newer weights of nothing": (
        ["data.train=x", "data.env=y:z", "placement={}", "train.mode=in_flight"],
        "needs a rollout during training steps: weights change as tokens are drawn; set placement.",
    ),
    "a rollout of pairs": (
        ["data.pairs=x", "placement={}"],
        "data.pairs does not go with [placement]: nothing is sampled",
    ),
    "packed minibatches": (
        ["train.mode=packed", "train.minibatches=2"],
        "train.mode = 'packed' packs a batch for one update, and train.minibatches = 2",
    ),
    "tokens of a search of turns": (
        ["data.train=x", "data.env=y:z", "tree.kind=search", "tree.tokens=8"],
        "tree.tokens = 8 does not go with data.env with data.train: a search of episodes goes by",
    ),
    "own network": (
        ["model.network=a:b", "lora.rank=2"],
        "model.network = 'a:b' does not go with [lora]",
    ),
    "two judges": (
        ["rewards.math.judge=true", "rewards.exact.judge=true"],
        "rewards.math.judge and rewards.exact.judge are true",
    ),
    "warm start on files": (["data.train=x", "warmup.steps=5"], "warmup.steps = 5 needs data.task"),
    "greedy copies": (["eval.samples=4"], "eval.temperature = 0 repeats one completion"),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_conflict_names_both_keys(name):
    overrides, message = CONFLICTS[name]
    with pytest.raises(UserError) as caught:
        load_config(None, overrides)
    assert message in str(caught.value)
    for override in overrides[:-1]:
        load_config(None, [override])  # each alone may be right


def test_all_problems_are_reported_at_once():
    with pytest.raises(UserError) as caught:
        load_config(None, ["train.steps=x", "sampling.top_k=-1", "zzz=1", "mesh.data=0"])
    assert len(str(caught.value).splitlines()) == 4


def test_check_batch_once_the_devices_are_known():
    config = load_config(None, ["train.prompts=12", "train.microbatches=2", "mesh.fsdp=-1"])
    assert batch_parts(config.mesh_axes) is None
    assert config.train.microbatch_prompts == 6
    check_batch(config, 3)
    with pytest.raises(UserError, match="make train.prompts = 12 a multiple of 8"):
        check_batch(config, 4)


def test_values_do_not_change():
    config = build_config({})
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 3


def test_reward_options_are_what_is_not_the_weight():
    short = load_config(None, ["data.train=x.jsonl", "rewards=rewards.py:right"])
    assert short == load_config(None, ["data.train=x.jsonl", 'rewards={"rewards.py:right"={}}'])
    several = load_config(None, ["data.train=x.jsonl", 'rewards=["math", "a.py:f"]'])
    assert list(several.rewards) == ["math", "a.py:f"]
    config = load_config(None, ["rewards.format.weight=2", "rewards.format.pattern='<a>'"])
    assert config.rewards["format"].weight == 2.0
    assert config.rewards["format"].options == {"pattern": "<a>"}


@pytest.mark.parametrize("template", ["chat", "plain", "Q: {question}\nA:", "{{}} {question}"])
def test_templates_that_are_right(template):
    assert build_config({"data": {"template": template}}).data.template == template


KINDS = {
    "task": (["data.task=sorting", "data.difficulty=7"], {"difficulty": 7}, None, None),
    "prompts": (["data.train=a.jsonl"], None, None, "chat"),
    "pairs": (["data.pairs=a.jsonl", "data.eval=b.jsonl"], None, "a.jsonl", "chat"),
    "pairs of a task": (
        ["data={pairs='a.jsonl', task='sorting', difficulty=7}"],
        *({"difficulty": 7}, "a.jsonl", None),
    ),
    "nothing": ([], None, None, "chat"),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_is_given_says_which_kind_of_data_it_is(name):
    overrides, options, pairs, template = KINDS[name]
    config = load_config(None, overrides)
    data = config.data
    assert (data.free_options if data.name else None) == options
    assert getattr(data, "pairs", None) == pairs
    assert data.completions_key == (None if pairs is None else "data.pairs")
    assert getattr(data, "template", None) == template
    assert not hasattr(config.data, "answer_pattern") or name in ("prompts", "nothing")


def test_an_optimizer_has_its_own_keys():
    sgd = load_config(None, ["optimizer.name=sgd", "optimizer.momentum=0.5"]).optimizer
    assert (sgd.name, sgd.options, sgd.learning_rate) == ("sgd", {"momentum": 0.5}, 1e-6)
    plain = load_config(None, []).optimizer
    assert (plain.name, plain.options) == ("adamw", {})


def test_optional_tables_are_none_where_they_are_not_given():
    without = load_config(None, [])
    assert (without.lora, without.placement) == (None, None)
    config = load_config(None, ["lora.rank=2", "placement.staleness=4"])
    assert (config.lora.rank, config.lora.alpha) == (2, 16.0)
    assert config.placement.staleness == 4


def test_axes_left_out_are_1():
    config = load_config(None, ["mesh.data=4", "placement={}", "sampling.mesh.fsdp=2"])
    assert config.mesh_axes == {"data": 4, "fsdp": 1, "tensor": 1, "context": 1, "expert": 1}
    assert config.sampling.mesh_axes == config.mesh_axes | {"data": 1, "fsdp": 2}


def test_a_word_stands_for_a_list_of_one():
    config = load_config(None, ["frozen.ref=DIR", "sampling.int8=cache", "log.to=wandb:mine"])
    assert config.frozen == {"ref": ("DIR",)}
    assert config.sampling.formats == {"weights": "same", "cache": "int8"}
    assert config.sampling.in_8_bits == ("cache",)
    assert config.log.to == ("wandb:mine",)
    two = load_config(None, ["frozen.ref=['A', 'B']"])
    assert two.frozen == {"ref": ("A", "B")}


def test_weights_are_in_one_format_of_8_bits():
    config = load_config(None, ["sampling.int8=cache", "sampling.float8=weights"])
    assert config.sampling.formats == {"weights": "float8", "cache": "int8"}
    assert config.sampling.in_8_bits == ("weights", "cache")
    with pytest.raises(UserError, match=r"sampling.int8 and sampling.float8 both name 'weights'"):
        load_config(None, ["sampling.int8=['cache', 'weights']", "sampling.float8=weights"])


@pytest.mark.parametrize(("samples", "ks"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6))])
def test_pass_at_k_is_reported_for_powers_of_two_and_all_samples(samples, ks):
    config = load_config(None, [f"eval.samples={samples}", "eval.temperature=1.0"])
    assert config.eval.pass_k == ks
