"""Runs whose groups are trees: methods, compiled and on the host, text, and what is refused."""

import json
from functools import partial

import jax
import numpy as np
import optax
import pytest

from jrl.collect.groups import to_batch
from jrl.collect.sources import simple_request
from jrl.collect.sources_task import task_rollout
from jrl.config import load_config
from jrl.config.features import check_features
from jrl.errors import UserError
from jrl.methods import get_method
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.heads import value_head
from jrl.models.transformer import transformer
from jrl.objectives.transforms import over_branches
from jrl.run import run as running
from jrl.run.run import train
from jrl.sampling.params import make_sampling_params
from jrl.setup.features import features_of
from jrl.setup.kinds import kind_of
from jrl.setup.objective import method_of
from jrl.storage.metrics import read_jsonl
from jrl.train.compiled import iterate, make_iteration
from jrl.train.state import init_state
from jrl.train.step import make_step
from jrl.types import Branching

PROMPTS, GROUP, STEPS = 4, 4, 3
WEIGHTS = {"verify": 1.0, "partial": 0.5}
KEY, SAMPLING = jax.random.key(5), make_sampling_params(0.8)
TREE = Branching("entropy", 2, 2)
SIZES = {"layers": 1, "embed_dim": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "mlp_dim": 32}


@pytest.fixture(scope="module")
def network(make_bag, first_letter):
    size = first_letter.prompt_tokens + first_letter.completion_tokens
    return make_bag(first_letter.vocab_size, 8, size)


def on_trees(name):
    """The method as ``[tree]`` makes it."""
    method = get_method(name)
    return method.with_(plan=method.plan._replace(tree=TREE)).after(over_branches())


@pytest.mark.parametrize("name", ["arpo", "treerl", "tempo", "deepsearch", "alphamath", "rloo"])
def test_a_method_trains_on_trees_three_steps(name, network, first_letter, quick_jit):
    """In one program, and each token that was drawn is trained once."""
    method = on_trees(name)
    common = {"network": network, "objective": method.objective, "optimizer": optax.sgd(0.3)}
    if method.value:
        common["value"] = value_head(network)
    options = {"task": first_letter, "network": network, "group": GROUP}
    step = make_step(**common)

    def record_step(state, batch, sampling_params):
        state, metrics = step(state, batch, sampling_params)
        return state, metrics | {"mask": batch.mask, "node": batch.ids["node"]}

    iteration = make_iteration(
        record_step, method=method, weights=WEIGHTS, prompts=PROMPTS, **options
    )
    state = init_state(KEY, **common)
    run = quick_jit(partial(iterate, iteration, steps=STEPS))
    after, _, curves = run(state, iteration.begin(state), SAMPLING)
    curves = jax.device_get(curves)
    assert np.isfinite(curves["loss"]).all()
    change = jax.tree.map(lambda a, b: float(abs(a - b).max()), state.params, after.params)
    assert max(jax.tree.leaves(change)) > 1e-4
    for mask, node in zip(curves["mask"], curves["node"], strict=True):
        for n in range(PROMPTS):
            t, labels = np.nonzero(node[n].T)[0], node[n].T[node[n].T > 0]
            sampled = set(zip(t.tolist(), labels.tolist(), strict=True))
            pairs = [(t, int(node[n, i, t])) for i, t in zip(*np.nonzero(mask[n]), strict=True)]
            assert sorted(pairs) == sorted(sampled)  # each token of a node once
    shared = (curves["node"] > 0).sum((1, 2, 3)) - curves["mask"].sum((1, 2, 3))
    np.testing.assert_array_equal(curves["tree_shared_tokens"], shared)
    assert curves["tree_shared_tokens"].sum() > 0


def test_a_branch_is_judged_whole(network, first_letter, quick_jit):
    params = quick_jit(network.init)(KEY)
    draw = partial(
        task_rollout,
        sampling_params=SAMPLING,
        task=first_letter,
        parts=tuple(WEIGHTS),
        network=network,
    )
    ids = np.arange(PROMPTS, dtype=np.int32)
    request = simple_request(KEY, {"policy": params}, np.int32(0), ids, GROUP)
    groups = quick_jit(draw)(
        request.replace(asks=tuple(x.replace(tree=TREE) for x in request.asks))
    )
    assert set(groups.ids) == {"prompt", "answer", "node"}
    batch = to_batch(groups.rollout, groups.rewards, np.ones(2, np.float32), groups.ids)
    batch.check()
    rollout = jax.device_get(groups.rollout)
    stops = np.take_along_axis(rollout.tokens, rollout.lengths[..., None] - 1, axis=2)[..., 0] == 1
    problems = jax.device_get(groups.subject)
    right = stops & (rollout.lengths == 2) & (rollout.tokens[..., 0] == problems.tokens[:, None, 0])
    np.testing.assert_array_equal(groups.rewards[..., 0], right)


# ---------------------------------------------------------------- text


def test_a_run_on_text_shares_the_past(tmp_path, monkeypatch):
    import tokenizers
    from tokenizers import models, pre_tokenizers

    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    words = ["<stop>", *"abcdefghijklmnopqrstuvwxyz? "]
    backend = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    config = ModelConfig(vocab_size=32, max_length=48, **SIZES)
    hf.save(tmp_path / "model", config, transformer(config).init(jax.random.key(0)))
    backend.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    rows = [{"question": f"how many {x}?", "answer": "a"} for x in ("eels", "cows", "whales")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text(
        "def vowels(samples):\n"
        "    return [sum(c in 'aeiou' for c in s.completion) / 9 for s in samples]\n"
    )
    reward = json.dumps(str(tmp_path / "own.py") + ":vowels")
    config = load_config(
        None,
        [
            *(f"model.path={json.dumps(str(tmp_path / 'model'))}", "data.template=plain"),
            *(f"data.train={json.dumps(str(tmp_path / 'rows.jsonl'))}", "method=treerl"),
            *("sampling.group=6", "sampling.max_new_tokens=9", "train.prompts=2", "train.steps=3"),
            *("tree={kind='branch',roots=2,rounds=2}", "log.samples_every=1"),
            *(f"rewards={{{reward}={{}}}}", "reward_pool.workers=0", "checkpoint.every=0"),
            f"run.dir={json.dumps(str(tmp_path / 'run'))}",
        ],
    )
    train(config, echo=lambda line: None)
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")[1:]
    # Rows that hold what members share once give the same numbers.
    packed = config.model_copy(
        update={
            "train": config.train.model_copy(update={"mode": "packed"}),
            "run": config.run.model_copy(update={"dir": str(tmp_path / "packed")}),
        }
    )
    train(packed, echo=lambda line: None)
    for one, other in zip(
        records, read_jsonl(tmp_path / "packed" / "metrics.jsonl")[1:], strict=True
    ):
        for name in ("loss", "grad_norm", "entropy", "reward", "tree_shared_tokens"):
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    for record in records:
        assert record["tree_shared_tokens"] > 0
        assert record["grad_norm"] > 0
        mine = [s for s in samples if s["step"] == record["step"]]
        total = sum(s["length"] for s in mine)  # both groups of a step are kept
        assert total == record["tree_shared_tokens"] + record["completion_tokens"]
        groups = [[s for s in mine if s["group"] == n] for n in range(2)]
        for group in groups:  # each has nodes of its own, and some share the first
            assert len({s["nodes"][-1] for s in group}) == len(group)
            assert len({s["nodes"][0] for s in group}) < len(group)
        for s in mine:
            vowels = sum(c in "aeiou" for c in s["completion"]) / 9
            assert s["reward"] == pytest.approx(vowels)


# ---------------------------------------------------------------- what is refused

TASK = (
    *("data.task=sequence", "data.difficulty=1", "sampling.group=8"),
    f"model.config={json.dumps(SIZES).replace(':', ' =')}",
)
GAP = "tree={kind='branch', at='gap'}"
BAD = {
    "tree.roots = 8: sampling.group = 8 leaves no member": [GAP, "tree.roots=8"],
    "tree.rounds = 3 does not divide the 4 of": [GAP, "tree.rounds=3"],
    "sampling.slots = 4: a tree of sampling.group = 8 members needs a slot for each": [
        *(GAP, "sampling.slots=4")
    ],
    "tree.above = 0.5 is not read with tree.at = 'even'": [
        "tree={kind='branch', at='even', above=0.5}"
    ],
    "tree.at = 'gap' does not go with data.env = 'guess_number': completions and episodes on": [
        *(GAP, "data={env='guess_number', numbers=4, turns=3}")
    ],
    "tree.at = 'gap' does not go with data.pairs: it holds the completions": [
        *(GAP, "data={pairs='x.jsonl'}", "method=dpo")
    ],
    "tree.at = 'gap' does not go with method = 'remax', which draws greedy baselines": [
        GAP,
        "method=remax",
    ],
    "tree.at = 'gap' does not go with method = 'online_dpo', which compares whole completions": [
        *(GAP, "method=online_dpo")
    ],
    "tree.at = 'gap' needs sampled members: no member that the method samples is on a": [
        *(GAP, "method=sft")
    ],
    "go with objective.router_replay = true: a branch has no record of its past's experts": [
        *("method=arpo", "objective.router_replay=true")
    ],
}


@pytest.mark.parametrize("key", BAD)
def test_what_grows_no_tree_is_named_before_anything_compiles(key, network):
    config = load_config(None, [*TASK, *BAD[key]])
    kind = kind_of(config)

    def check():
        more = {"network": network, "model": None, "data": kind.features}
        check_features(features_of(config, method_of(config, kind.new_tokens), **more))

    with pytest.raises(UserError) as caught:
        check()
    assert key in str(caught.value)


def test_any_method_takes_a_tree():
    config = load_config(None, [*TASK, "method=rloo", GAP])
    assert method_of(config, kind_of(config).new_tokens).draw.tree == Branching("gap", 4, 1, 0.0)
    config = load_config(None, [*TASK, "method=arpo", "tree={kind='branch',roots=2}"])
    assert method_of(config, kind_of(config).new_tokens).draw.tree == Branching(
        "entropy", 2, 1, 0.0
    )
