"""Every configuration key is read: changing it changes a number, a program, a file or an error."""

import functools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.collect.groups import to_batch
from jrl.collect.members import members_of
from jrl.collect.sources import simple_request
from jrl.config import describe, load_config
from jrl.errors import UserError
from jrl.evaluate import Evaluator, load_policy
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.run import run as running
from jrl.run.run import train
from jrl.sampling.params import sampling_logprobs
from jrl.setup.adapters import policy_of
from jrl.storage.metrics import CLOCKS, read_jsonl
from jrl.train import build
from jrl.train import programs as compiled
from jrl.train.batches import run_source
from jrl.types import Batch

TESTS = pathlib.Path(__file__).parents[1]
SIZES = {"layers": 1, "embed_dim": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "mlp_dim": 32}
TASK = (
    *("data.task=sequence", "data.difficulty=1", "rewards={verify={}, partial={weight=0.5}}"),
    "model.config={layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}",
    *("sampling.group=4", "train.prompts=4", "train.steps=3", "eval.problems=8"),
    "optimizer={name='sgd', learning_rate=0.1}",
    *("checkpoint.every=1", "checkpoint.keep=2", "log.samples_every=2"),
    "warmup={steps=60, batch=32, learning_rate=1e-2}",
)


OWN = """
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer


def bag(vocab_size, max_length, **sizes):
    sizes = sizes | {"layers": 2}
    return transformer(ModelConfig(vocab_size=vocab_size, max_length=max_length, **sizes))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A checkpoint with a tokenizer of letters, and questions with two sets of fields."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    root = tmp_path_factory.mktemp("keys")
    words = ["<stop>", *"abcdefghijklmnopqrstuvwxyz? "]
    backend = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    config = ModelConfig(vocab_size=32, max_length=48, **SIZES)
    for seed, name in enumerate(("model", "other")):
        hf.save(root / name, config, transformer(config).init(jax.random.key(seed)))
        backend.save(str(root / name / "tokenizer.json"))
        about = {"eos_token": "<stop>", "chat_template": "user {{ messages[-1].content }}"}
        (root / name / "tokenizer_config.json").write_text(json.dumps(about))
    for name, animals in (("a", ("eels", "whales", "cows")), ("b", ("cats", "dogs"))):
        rows = [
            {"question": f"how many {x}?", "ask": f"any {x}?", "answer": "is 5", "gold": "6"}
            for x in animals
        ]
        path = root / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "own.py").write_text(OWN)
    (root / "rewards.py").write_text(
        "import os\n\n\ndef process(samples):\n    return [float(os.getpid())] * len(samples)\n"
    )
    return root


def on_text(place):
    return (
        f"model.path={json.dumps(str(place / 'model'))}",
        f"data.train={json.dumps(str(place / 'a.jsonl'))}",
        *("data.template=plain", "sampling.group=2", "sampling.max_new_tokens=4"),
        *("train.prompts=2", "train.steps=1", "checkpoint.every=0", "log.samples_every=1"),
        *("rewards={exact={}}", "reward_pool.workers=0"),
    )


# ---------------------------------------------------------------- what can be observed


def prompts(config):
    """Questions and answers."""
    run = build.setup(config)
    problems = {
        s: [(p.text, p.tokens.tolist(), p.answer, np.array(p.solution).tolist()) for p in ps]
        for s, ps in run.data.prompts.items()
    }
    return problems, run.data.counts


def weights(config):
    """A number that the weights before training decide."""
    state, _ = compiled.new_state(build.setup(config))
    trees = (state.params, state.frozen)
    return [float(jnp.abs(x.astype(jnp.float32)).sum()) for x in jax.tree.leaves(trees)]


def programs(config):
    """The two programs as they are traced, with the shapes of what goes in and out."""
    run = build.setup(config)
    first, state, rollout, rewards = traced_sampler(run)
    batch = jax.eval_shape(to_batch, rollout, rewards, np.ones(rewards.shape[-1], np.float32))
    second = jax.make_jaxpr(compiled.make_train_step(run))(state, batch, run.sampling_params)
    return [without_addresses(first), without_addresses(second)]


def sampler(config):
    """The first of the two alone, which takes half as long to trace."""
    return [without_addresses(traced_sampler(build.setup(config))[0])]


def without_addresses(jaxpr):
    return re.sub(r"0x[0-9a-f]+", "", str(jaxpr))


def traced_sampler(run):
    """The sampler as it is traced; shapes of the state, of its rollout and of its rewards."""
    config = run.config
    make, _ = compiled.state_layout(run)
    key = jax.eval_shape(lambda: jax.random.key(0))
    frozen = {name: jax.eval_shape(net.init, key) for name, net in run.networks.items()}
    state = jax.eval_shape(make, key, run.params, frozen)
    n = config.train.prompts
    sample = compiled.train_sampler(run)
    ids = np.arange(n, dtype=np.int32)
    args = (state.key, policy_of(state, run.network), np.int32(0), ids)
    group, tree = config.sampling.group, run.method.plan.tree
    if run.task is None:
        p = jax.ShapeDtypeStruct((n, run.width), jnp.int32)
        request = simple_request(key, {"policy": args[1]}, np.int32(0), ids, group)
        more = () if tree else (members_of(request.asks, run.config.sampling.temperature),)
        args = (key, args[1], p, ids, run.sampling_params, args[2], ids, *more)
        first, (rollout, _) = jax.make_jaxpr(sample, return_shape=True)(*args)
        rewards = jax.ShapeDtypeStruct((*rollout.lengths.shape, 1), jnp.float32)
    else:
        request = simple_request(args[0], {"policy": args[1]}, *args[2:], group)
        first, groups = jax.make_jaxpr(
            functools.partial(sample, sampling_params=run.sampling_params), return_shape=True
        )(request.replace(asks=tuple(ask.replace(tree=tree) for ask in request.asks)))
        rollout, rewards = groups.rollout, groups.rewards
    return first, state, rollout, rewards


def padding(config):
    """Whether completions of unlike length are packed."""
    n, g, t = 4, 6, 32
    lengths = np.full((n, g), 3, np.int32)
    rewards = np.zeros((n, g, 1), np.float32)
    ones = np.ones((n, g), bool)
    batch = Batch(
        prompt_tokens=np.zeros((n, 2), np.int32),
        prompt_lengths=np.ones(n, np.int32),
        tokens=np.zeros((n, g, t), np.int32),
        lengths=lengths,
        mask=np.arange(t) < lengths[:, :, None],
        rewards=rewards,
        reward_weights=np.ones(1, np.float32),
        members=ones,
        baseline=~ones,
        truncated=~ones,
    )
    packer = compiled.packer(build.setup(config))
    return [packer is None or packer(batch).packing is None]


def updates(config):
    """Two optimiser updates of two weights, by two gradients."""
    optimizer = build.setup(config).optimizer
    params = {"w": jnp.array([1.0, -2.0])}
    state, weights, update = optimizer.init(params), [], jax.jit(optimizer.update)
    for gradient in ([3.0, 4.0], [-1.0, 0.5]):
        change, state = update({"w": jnp.array(gradient)}, state, params)
        weights += change["w"].tolist()
    return weights


def five_logprobs(params):
    """Log-probabilities of five tokens."""
    logits = np.array([[0.0, 1.0, 2.0, 3.0, -4.0]], np.float32)
    return np.asarray(jax.jit(sampling_logprobs)(logits, params)).tolist()


def sampling_params(config):
    """Log-probabilities in training."""
    return five_logprobs(build.setup(config).sampling_params)


def eval_sampling_params(config):
    """The same in evaluation."""
    source = run_source(build.setup(config), None, split="eval")
    return five_logprobs(source.draw.keywords["sampling_params"])


def mesh(config):
    """Devices along each axis."""
    return dict(build.setup(config).mesh.shape)


def sampler_meshes(config):
    """Devices along each axis of both meshes."""
    run = build.setup(config)
    return [None if m is None else dict(m.shape) for m in (run.mesh, run.rollout_mesh)]


def draw_on(config):
    """Devices along each axis while completions are drawn."""
    return dict(compiled.drawing_mesh(build.setup(config)).shape)


def shaped(config):
    """Sizes of the run's parts."""
    run = build.setup(config)
    return run.rewards.weights, run.width, run.model


def evaluation(config):
    """Evaluation of the model before training."""
    run = build.setup(config)
    with jax.set_mesh(run.mesh):
        key, params, _ = load_policy(run, None)
        result = Evaluator(run, None)(key, params)
    return result.metrics, len(result.samples)


def evaluated_in(config):
    """The dtype of an evaluation's activations."""
    network = Evaluator(build.setup(config), None).run.network
    return [str(x.dtype) for x in jax.tree.leaves(network.init_cache(1, 8))]


def sampled_tokens(config):
    """How the method draws its groups."""
    return (build.setup(config).method.draw,)


def judge(config):
    """The reward part that accuracy is measured by."""
    return (build.setup(config).rewards.accuracy_part,)


def whole_run(config):
    """Files and lines of a run, without clocks."""
    lines = []
    summary = train(config, echo=lines.append)
    directory = pathlib.Path(config.run.dir)
    records = read_jsonl(directory / "metrics.jsonl")[1:]
    clock = CLOCKS - {"compiles"}
    return {
        "records": [{k: v for k, v in r.items() if k not in clock} for r in records],
        "samples": [(s["step"], s["prompt"]) for s in read_jsonl(directory / "samples.jsonl")],
        "checkpoints": sorted(p.name for p in (directory / "checkpoints").iterdir()),
        "one program": len({r["seconds"] for r in records}) < len(records),
        "warm start": [line for line in lines if line.startswith("warm start")],
        "steps": summary["steps"],
        "pid": re.findall(r"rewards.py:process': ([\d.]+)", str(records)),
    }


# ---------------------------------------------------------------- the table

EVALS = ("eval.samples=2", "eval.temperature=1.0")
SPARSE = (
    "model.config={layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32, experts=4,"
    " experts_per_token=2, expert_mlp_dim=8}"
)
COLD = "warmup.steps=0"
ON_TASK = {
    "method": (programs, "method=rloo"),
    "seed": (weights, "seed=1"),
    "model.config": (shaped, "model.config.mlp_dim=48"),
    "model.dtype": (sampler, "model.dtype=bfloat16"),
    "model.param_dtype": (sampler, "model.param_dtype=bfloat16"),
    "model.attention": (sampler, "model.attention=blockwise"),
    "model.remat": (programs, "model.remat=full"),
    "model.network": (shaped, "model.network=PLACE/own.py:bag"),
    "tree.kind": (sampler, "tree.kind=branch"),
    "tree.at": (sampler, "tree.at=gap", "tree.kind=branch"),
    "tree.above": (sampler, "tree.above=0.5", "tree.kind=branch"),
    "tree.roots": (sampler, "tree.roots=1", "tree.kind=branch"),
    "tree.rounds": (sampler, "tree.rounds=2", "tree.kind=branch"),
    "tree.by": (sampled_tokens, "tree.by=uct", "tree.kind=search"),
    "tree.width": (sampled_tokens, "tree.width=2", "tree.kind=search"),
    "tree.tokens": (sampled_tokens, "tree.tokens=2", "tree.kind=search"),
    "tree.exploration": (sampled_tokens, "tree.exploration=2.0", "tree.kind=search"),
    "value.kind": (programs, "value.kind=network", "method=ppo"),
    "lora.rank": (sampler, "lora.rank=2"),
    "lora.alpha": (programs, "lora.alpha=4.0", "lora.rank=2"),
    "lora.targets": (sampler, "lora.targets=['q']", "lora.rank=2"),
    "lora.base": (sampler, "lora.base=int8", "lora.rank=2"),
    "data.task": (sampler, "data.task=sorting", "data.difficulty="),
    "sampling.group": (sampler, "sampling.group=6"),
    "sampling.temperature": (sampling_params, "sampling.temperature=0.5"),
    "sampling.top_k": (sampling_params, "sampling.top_k=2"),
    "sampling.top_p": (sampling_params, "sampling.top_p=0.5"),
    "sampling.min_p": (sampling_params, "sampling.min_p=0.5"),
    "sampling.slots": (sampler, "sampling.slots=4"),
    "sampling.int8": (sampler, "sampling.int8=cache"),
    "sampling.float8": (sampler, "sampling.float8=weights"),
    "objective": (programs, "objective.clip_high=0.4"),
    "rewards": (shaped, "rewards.partial.weight=2.0"),
    "optimizer.name": (updates, "optimizer.name=adam"),
    "optimizer.learning_rate": (updates, "optimizer.learning_rate=0.2"),
    "optimizer.schedule": (updates, "optimizer.schedule=linear"),
    "optimizer.warmup_steps": (updates, "optimizer.warmup_steps=2"),
    "optimizer.clip_norm": (updates, "optimizer.clip_norm=0.1"),
    "train.steps": (whole_run, "train.steps=2", COLD),
    "train.prompts": (sampler, "train.prompts=8"),
    "train.minibatches": (programs, "train.minibatches=2"),
    "train.microbatches": (programs, "train.microbatches=2"),
    "train.mode": (whole_run, "train.mode=compiled", "checkpoint.every=3", COLD),
    "warmup.steps": (whole_run, "warmup.steps=30", "train.steps=0"),
    "warmup.learning_rate": (whole_run, "warmup.learning_rate=2e-2", "train.steps=0"),
    "warmup.batch": (whole_run, "warmup.batch=16", "train.steps=0"),
    "eval.every": (whole_run, "eval.every=2", COLD),
    "eval.problems": (evaluation, "eval.problems=4"),
    "eval.samples": (evaluation, "eval.samples=3", *EVALS),
    "eval.dtype": (evaluated_in, "eval.dtype=bfloat16"),
    "eval.temperature": (eval_sampling_params, "eval.temperature=2.0", *EVALS),
    "checkpoint.every": (whole_run, "checkpoint.every=0", COLD),
    "checkpoint.keep": (whole_run, "checkpoint.keep=3", COLD),
    "mesh": (mesh, "mesh.data=2"),
    "sampling.mesh": (draw_on, "sampling.mesh.data=2", "mesh.fsdp=2"),
    "log.samples_every": (whole_run, "log.samples_every=3", COLD),
}
MORE_ON_TASK = {
    **{f"mesh.{axis}": (mesh, f"mesh.{axis}=2") for axis in ("fsdp", "tensor")},
    **{f"mesh.{axis}": (mesh, f"mesh.{axis}=2") for axis in ("context", "expert")},
    "placement and sampling.mesh": (sampler_meshes, "placement={}", "sampling.mesh.data=2"),
    "objective.router_replay": (programs, "objective.router_replay=true", SPARSE),
    "an option of the task": (sampler, "data.difficulty=2"),
    "objective.entropy_coef": (programs, "objective.entropy_coef=0.1"),
    "objective.epochs": (programs, "objective.epochs=3"),
    "objective.epochs of a method without": (programs, "objective.epochs=2", "method=reinforce"),
    "objective.correction": (programs, "objective.correction=none", "sampling.int8=cache"),
    "objective.correction of a method without": (
        *(programs, "objective.correction=none", "sampling.int8=cache", "method=reinforce"),
    ),
    "objective.router_balance": (programs, "objective.router_balance=0.1", SPARSE),
    "objective.router_z": (programs, "objective.router_z=0.1", SPARSE),
    "packed": (padding, "train.mode=packed"),
    "both in 8 bits": (sampler, "sampling.int8=['weights', 'cache']", "sampling.int8=cache"),
}
"""Further observations of keys: options, coefficients of every method, other values."""
TEACHER = ("method=on_policy_distillation", "frozen.teacher=PLACE/model")
TWO_TEACHERS = (
    *("method=align_distil", "frozen.dpo=PLACE/model", "frozen.reverse_dpo=PLACE/model"),
)
ON_TEXT = {
    "model.path": (weights, "model.path=PLACE/other"),
    "frozen": (weights, "frozen.dpo=PLACE/other", *TWO_TEACHERS),
    "data.train": (prompts, "data.train=PLACE/b.jsonl"),
    "data.eval": (prompts, "data.eval=PLACE/b.jsonl"),
    "data.fields": (prompts, "data.fields.question=ask"),
    "data.answer_pattern": (prompts, "data.answer_pattern=is (.+)"),
    "data.system": (prompts, "data.system=be brief"),
    "data.template": (prompts, "data.template=chat"),
    "data.max_prompt_tokens": (prompts, "data.max_prompt_tokens=14"),
    "data.overlong": (prompts, "data.overlong=drop", "data.max_prompt_tokens=14"),
    "data.shuffle": (whole_run, "data.shuffle=false"),
    "sampling.max_new_tokens": (sampler, "sampling.max_new_tokens=5"),
    "reward_pool.workers": (
        *(whole_run, "reward_pool.workers=1", 'rewards={"PLACE/rewards.py:process"={}}'),
    ),
}
MORE_ON_TEXT = {
    "frozen.ref": (weights, "frozen.ref=PLACE/other", "objective.kl_coef=0.1"),
    "frozen.teacher": (weights, "frozen.teacher=PLACE/other", *TEACHER),
    "a soup": (weights, "frozen.teacher=['PLACE/model', 'PLACE/other']", *TEACHER),
    "rewards.NAME.judge": (
        *(judge, "rewards.format.judge=true", "rewards={math={}, format={pattern='x'}}"),
    ),
    "data.fields.answer": (prompts, "data.fields.answer=gold"),
    "data.fields.solution": (prompts, "data.fields.solution=ask", "method=sft"),
}
ELSEWHERE = {
    "run.dir": "train/test_loop.py::test_a_run_directory_holds_what_scripts_rely_on",
    "run.resume": "storage/test_metrics.py::test_resume_never_and_must",
    "value.path": "collect/test_pairs.py::test_a_value_network_starts_from_a_reward_model",
    "lora.path": "setup/test_adapters.py::test_adapters_of_another_run_are_where_a_run_starts",
    "reward_pool.timeout_seconds": (
        "train/test_interrupts.py::test_a_reward_that_hangs_scores_0_is_counted_and_holds_nothing_up"
    ),
    "reward_pool.on_error": (
        "test_bad_input.py::test_a_reward_that_fails_may_be_given_0_and_counted"
    ),
    "reward_pool.on_timeout": "rewards/test_hostile.py::test_the_choices_after_a_failure",
    "reward_pool.memory_gib": (
        "rewards/test_hostile.py::test_memory_beyond_the_limit_ends_the_call_and_names_the_limit"
    ),
    "eval.variants_of": ("train/test_text_run.py::test_the_run_directory_keeps_the_contract"),
    "sampling.draws": "train/test_text_run.py::test_text_is_sampled_in_parts",
    "placement.staleness": (
        "train/test_disjoint.py::test_a_stale_run_resumes_bit_for_bit_from_where_a_signal_stopped_it"
    ),
    "checkpoint.keep_every": "train/test_records.py::test_the_best_step_outlives_the_newest",
    "checkpoint.best": "train/test_records.py::test_the_best_step_outlives_the_newest",
    "train.wait_seconds": (
        "train/test_interrupts.py::test_a_reward_that_hangs_beyond_the_limit_saves_and_ends_the_run"
    ),
    "watch": "train/test_records.py::test_a_limit_of_ones_own_saves_and_stops",
    "data.pairs": "collect/test_pairs.py::test_dpo_learns_the_order_of_held_out_pairs",
    "data.invalid": "test_bad_input.py::test_rows_that_cannot_be_used_may_be_left_out_and_counted",
    "data.env": "train/test_host_run.py::test_a_run_of_many_turns",
    "data.template_variables": (
        "data/test_messages.py::test_variables_of_the_template_are_read_or_refused"
    ),
    "log.to": "storage/test_sinks.py::test_tensorboard_events_are_written",
    "log.by": "train/test_text_run.py::test_parts_without_an_opinion_and_parts_of_parts",
    "plan.topology": ("plan/test_count.py::test_a_mesh_for_another_slice_names_the_option"),
}


def test_the_table_is_whole():
    """A new key needs an entry here, and a removed one loses it."""
    tables = [*ON_TASK, *ON_TEXT, *ELSEWHERE]
    assert len(tables) == len(set(tables))
    assert set(tables) == {key.name for key in describe()}


@pytest.mark.parametrize("key", ELSEWHERE)
def test_the_test_elsewhere_is_there_and_names_the_key(key):
    path, _, name = ELSEWHERE[key].partition("::")
    text = (TESTS / path).read_text()
    assert f"def {name}(" in text
    assert key in text


@pytest.fixture(scope="module")
def observe(tmp_path_factory):
    """Observation of a configuration, or its error; each is made once."""

    @functools.cache
    def look(observer, overrides):
        directory = tmp_path_factory.mktemp("run") / "run"
        more = [f"run.dir={json.dumps(str(directory))}"] if observer is whole_run else []
        try:
            return observer(load_config(None, [*overrides, *more]))
        except UserError as error:
            return str(error)

    return look


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    monkeypatch.setattr(running, "write_report", lambda directory: directory)


ALL = ON_TASK | ON_TEXT | MORE_ON_TASK | MORE_ON_TEXT


WHOLE_RUNS = {
    *("train.steps", "train.mode", "data.shuffle", "reward_pool.workers"),
    *("warmup.steps", "warmup.batch", "warmup.learning_rate", "log.samples_every", "eval.every"),
    *("eval.samples", "eval.problems", "checkpoint.every", "checkpoint.keep"),
}
"""Keys that only a run of several steps shows; they are changed in the full run of the tests."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in WHOLE_RUNS else n for n in ALL],
)
def test_a_change_shows(name, place, observe):
    observer, change, *more = ALL[name]
    base = [*(on_text(place) if name in ON_TEXT | MORE_ON_TEXT else TASK), *more]
    change = change.replace("PLACE", str(place))
    base = tuple(x.replace("PLACE", str(place)) for x in base)
    assert change.partition("=")[0].startswith(name) or name in MORE_ON_TASK | MORE_ON_TEXT
    before, after = observe(observer, base), observe(observer, (*base, change))
    assert before != after
    assert isinstance(after, str) == (name == "data.max_prompt_tokens"), after


@pytest.mark.parametrize("observer", [programs, updates, sampling_params, weights])
def test_without_a_change_nothing_shows(observer):
    """Two observations of one configuration are equal, as the table assumes."""
    config = load_config(None, TASK)
    assert observer(config) == observer(config)
