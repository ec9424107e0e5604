"""Training adapters: what moves, what is kept once, what is saved, and on any mesh the same."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrl.collect.groups import place_batch
from jrl.config import load_config
from jrl.errors import UserError
from jrl.evaluate import evaluate_run, load_policy
from jrl.mesh import make_mesh, replicated
from jrl.methods import get_method
from jrl.methods.schedule import Schedule, average, copies, every
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.hf.peft import load_adapters, save_adapters
from jrl.models.lora import Lora, count_trained, with_adapters
from jrl.models.transformer import transformer
from jrl.objectives.corrections import Correction
from jrl.objectives.ratios import reinforce, weighted
from jrl.run import run as running
from jrl.run.export import export_run
from jrl.run.run import train
from jrl.sampling.params import make_sampling_params
from jrl.serving.launch import served_policy
from jrl.setup.adapters import (
    base_checksum,
    check_base,
    keep_base,
    load_base,
    lora_of,
    policy_of,
    restore_policy,
    start_params,
    with_base,
    without_base,
)
from jrl.setup.frozen import frozen_params
from jrl.storage.checkpoints import Checkpoints
from jrl.storage.metrics import CLOCKS, read_jsonl
from jrl.train import build, programs
from jrl.train.score import policies_of, score
from jrl.train.state import init_state, state_shardings
from jrl.train.step import compile_step, make_step
from jrl.train.trainable import check_trainable

CONFIG = ModelConfig(
    vocab_size=20,
    layers=2,
    embed_dim=16,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_dim=16,
    max_length=16,
    tied_embeddings=False,
)
RUN = (
    *("data.task=sequence", "data.difficulty=1", "rewards={verify={}, partial={weight=0.5}}"),
    "model.config={layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}",
    *("sampling.group=4", "train.prompts=4", "eval.problems=8", "objective.kl_coef=0.05"),
    *("checkpoint.every=1", "warmup={steps=20, batch=32, learning_rate=1e-2}"),
    *("lora.rank=2", "lora.base=int8", "sampling.int8=weights", "optimizer.learning_rate=0.02"),
)
LORA = Lora(2, 4.0)
SAMPLING = make_sampling_params()


def make(base):
    network = with_adapters(transformer(CONFIG), CONFIG, LORA._replace(base=base))
    objective = get_method("grpo", kl_coef=0.1).objective
    parts = {"network": network, "objective": objective, "optimizer": optax.adam(0.02)}
    return parts, init_state(jax.random.key(0), **parts)


def nbytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(scope="module")
def int8(make_batch, quick_jit):
    """Parts, batch, compiled step, the state at step 0 and the two after it, and their metrics."""
    parts, state = make("int8")
    batch, step = make_batch(n=8), quick_jit(make_step(**parts))
    one, first = step(state, batch, SAMPLING)
    two, second = step(one, batch, SAMPLING)
    return parts, batch, step, (state, one, two), (first, second)


def test_only_adapters_move_and_the_reference_is_the_policy_without_them(int8):
    _, _, _, (state, one, two), (first, second) = int8
    assert set(two.frozen) == {"base"}
    assert_equal(two.frozen, state.frozen)
    attention = [s.params["policy"]["layers"]["attention"]["q"] for s in (state, one, two)]
    assert not np.any(attention[0]["b"])
    np.testing.assert_array_equal(attention[1]["a"], attention[0]["a"])  # B is 0: A has no slope
    assert np.any(attention[1]["b"])
    assert np.any(np.asarray(attention[2]["a"]) != attention[1]["a"])
    assert first["kl"] == 0
    assert second["kl"] > 0


def test_the_state_keeps_the_base_once_and_moments_of_adapters_alone(int8):
    parts, _, _, (state, *_), _ = int8
    adapters = 4 * count_trained(CONFIG, LORA)
    assert nbytes(state.params) == adapters
    assert nbytes(state.opt_state) == 2 * adapters + 4
    floats = nbytes(transformer(CONFIG).init(jax.random.key(0)))
    assert nbytes(state) < 0.6 * floats + 3 * adapters + 64
    full = init_state(
        jax.random.key(0),
        network=transformer(CONFIG),
        objective=parts["objective"],
        optimizer=parts["optimizer"],
    )
    assert nbytes(full) > 4 * floats


def test_the_reference_scores_as_the_base_bit_for_bit(int8, quick_jit):
    parts, batch, _, (_, _, state), _ = int8
    network = parts["network"]

    def of(params, name):
        want = frozenset({name})
        return score(params, batch, SAMPLING, network=network, value=None, want=want)[name]

    policies = policies_of(state.params, state.frozen, network)
    reference = quick_jit(functools.partial(of, name="ref_logprobs"))(policies)
    base = quick_jit(functools.partial(of, name="logprobs"))({"policy": state.frozen["base"]})
    np.testing.assert_array_equal(reference, base)


def test_a_checkpoint_of_adapters_resumes_bit_for_bit(int8, tmp_path):
    parts, batch, step, (state, one, two), _ = int8
    with Checkpoints(tmp_path, 1) as store:
        store.save(1, without_base(one))
        store.wait()
        stored, _ = store.restore(without_base(state))
    names = json.loads(next(tmp_path.glob("*/meta/metadata")).read_text())["leaves"]
    assert not [name for name in names if "base" in name]
    again, _ = step(with_base(stored, state.frozen["base"]), batch, SAMPLING)
    assert_equal(again, two)
    assert base_checksum(state.frozen["base"]) == base_checksum(two.frozen["base"])
    other = parts["network"].init(jax.random.key(1))
    config = load_config(None, ["model.path=DIR"])
    other_base = parts["network"].extras.split.split(other)[1]
    checksum = base_checksum(state.frozen["base"])
    with pytest.raises(UserError, match=r"model.path = 'DIR' holds other weights"):
        check_base(config, other_base, checksum)


def test_on_eight_devices_it_is_the_same(int8, quick_jit):
    """data, fsdp and tensor of 2 each: within 1e-4 in what adapters become, Adam's sign and all."""
    parts, batch, _, (state, one, _), (first, _) = int8
    network = parts["network"]
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    shardings = state_shardings(state, mesh, network=network)
    b = shardings.params["policy"]["layers"]["mlp"]["up"]["b"]
    assert "tensor" in str(b.spec)
    scales = shardings.frozen["base"]["layers"]["attention"]["q"].scales
    assert "tensor" in str(scales.spec)
    with jax.set_mesh(mesh):
        step = compile_step(make_step(**parts), shardings, mesh)
        placed = jax.device_put(jax.tree.map(jnp.copy, state), shardings)
        sampling_params = jax.device_put(SAMPLING, replicated(mesh))
        after, metrics = step(placed, place_batch(batch, mesh), sampling_params)
    assert after.params["policy"]["layers"]["mlp"]["up"]["b"].sharding.spec == b.spec
    np.testing.assert_allclose(metrics["grad_norm"], first["grad_norm"], rtol=1e-4)
    np.testing.assert_allclose(metrics["loss"], first["loss"], atol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), after.params, one.params)


def test_a_reference_that_is_renewed_is_refused():
    parts, _ = make("float")
    for after in (copies("ref", every(2)), average("ref", 0.9)):
        with pytest.raises(UserError, match="adapters off, which never changes"):
            make_step(**parts, schedule=Schedule(after=(after,)))


# ---------------------------------------------------------------- the importance correction


def test_a_weighted_surrogate_is_the_surrogate_times_the_truncated_ratio():
    stats = {
        "logprobs": jnp.array([-1.0, -2.0, -3.0]),
        "proximal_logprobs": jnp.array([-1.0, -2.0, -3.0]),
        "sampler_logprobs": jnp.array([-1.0, -2.5, -9.0]),
    }
    corrected = weighted(reinforce(), Correction("truncate", "token", 0.0, 2.0))
    assert corrected.needs == {"proximal_logprobs", "sampler_logprobs"}
    advantages, mask = jnp.array([1.0, 1.0, -1.0]), jnp.ones(3, bool)
    losses, metrics = corrected.apply(stats, advantages, mask)
    np.testing.assert_allclose(losses, [1.0, 2 * np.exp(0.5), -6.0], rtol=1e-6)
    np.testing.assert_allclose(metrics["correction_weight"], [1.0, np.exp(0.5), 2.0], rtol=1e-6)


def needs(*overrides):
    config = load_config(None, ["data.task=sequence", *overrides])
    return build.method_of(config).objective.surrogate.needs


def test_another_distribution_turns_the_correction_on_unless_it_is_refused():
    both = {"sampler_logprobs", "proximal_logprobs"}
    for option in ("sampling.int8=weights", "sampling.float8=weights", "sampling.int8=cache"):
        assert needs("method=grpo", option) == both
        assert needs("method=rloo", option) == both
        assert needs("method=reinforce", option) == both
        assert needs("method=topr", option) == {"sampler_logprobs"}  # has weights of its own
        assert needs("method=grpo", option, "objective.correction=none") == {"sampler_logprobs"}
        assert needs("method=rloo", option, "objective.correction=none") == set()
    assert needs("method=grpo") == {"sampler_logprobs"}
    with pytest.raises(UserError, match=r"correction = 'half'"):
        needs("method=rloo", "sampling.int8=cache", "objective.correction=half")


def steps(*overrides):
    """A run as far as it goes before anything is on a device."""
    run = build.setup(load_config(None, [*RUN[:4], *overrides]))
    check_trainable(run)
    return programs.make_train_step(run)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("lora.alpha=4",), "lora.rank is missing: rank of the adapters"),
        (("lora.rank=0",), r"lora.rank = 0; must be at least 1"),
        (("lora.rank=2", "lora.targets=['q', 'upp']"), r"'upp'; did you mean 'up'\?"),
        (("lora.rank=2", "lora.base=int4"), r"lora.base = 'int4'; did you mean 'int8'"),
        (("lora.rank=2", "method=online_dpo", "objective.refresh_ref=1"), "adapters off, which"),
        (("lora.rank=2", "lora.path=x"), r"lora.path = 'x' needs model.path: adapters belong"),
        (("sampling.int8=weihts",), r"sampling.int8 = 'weihts'; did you mean 'weights'"),
    ],
)
def test_bad_keys_are_named_before_anything_runs(overrides, message):
    with pytest.raises(UserError, match=message):
        steps(*overrides)


def test_experts_in_8_bits_are_refused_before_anything_runs():
    sparse = (
        *("model.config.experts=4", "model.config.experts_per_token=2"),
        "model.config.expert_mlp_dim=8",
    )
    for option in (("sampling.int8=weights",), ("lora.rank=2", "lora.base=int8")):
        more = ("lora.targets=['q']",) if len(option) == 2 else ()
        with pytest.raises(UserError, match="4 routed experts"):
            steps(*sparse, *option, *more)


# ---------------------------------------------------------------- whole runs


@pytest.mark.slow
def test_a_run_of_adapters_resumes_bit_for_bit_and_is_exported(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "write_report", lambda directory: directory)

    def run(name, steps, *more):
        where = f"run.dir={json.dumps(str(tmp_path / name))}"
        config, lines = load_config(None, [*RUN, where, f"train.steps={steps}", *more]), []
        train(config, echo=lines.append)
        records = read_jsonl(tmp_path / name / "metrics.jsonl")[1:]
        return config, lines, [{k: v for k, v in r.items() if k not in CLOCKS} for r in records]

    config, lines, full = run("whole", 4)
    assert [line for line in lines if "in 8 bits draws from another distribution" in line]
    assert [line for line in lines if "losses are weighted for it" in line]
    assert full[0]["kl"] == 0 < full[-1]["kl"]
    run("cut", 2)
    _, _, resumed = run("cut", 4)
    assert resumed == full
    sizes = {
        name: sum(f.stat().st_size for f in (tmp_path / "whole" / name).rglob("*") if f.is_file())
        for name in ("base", "checkpoints")
    }
    assert sizes["base"] > 0

    summary_again = evaluate_run(config)
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary_again["accuracy"] == summary["accuracy_after"]
    served = served_policy(config, checkpoint=None)
    _, policy, step = load_policy(build.setup(config, trains=False), None)
    assert step == 4
    assert_equal(served.params, policy)
    reader = load_config(None, [f"frozen.ref={json.dumps(str(tmp_path / 'whole'))}"])
    export_run(config, tmp_path / "adapters", adapters=True)
    shape, params = hf.load(export_run(config, tmp_path / "merged"))
    adapters = load_adapters(tmp_path / "adapters", shape, lora=lora_of(config))
    assert params["embed"].dtype == np.float32
    assert_equal(frozen_params(reader, "ref"), params)
    assert any(np.any(x) for x in jax.tree.leaves(adapters))

    compiled = run("compiled", 4, "train.mode=compiled", "checkpoint.every=4")[2]
    for a, b in zip(compiled, full, strict=True):
        np.testing.assert_allclose(a["loss"], b["loss"], atol=1e-5)


def test_the_base_after_a_warm_start_is_kept_with_the_run(tmp_path):
    """It is not that of model.path, from which alone a resumed or exported run would read it."""
    network = with_adapters(transformer(CONFIG), CONFIG, LORA)
    _, base = network.extras.split.split(jax.device_get(network.init(jax.random.key(0))))
    place = f"run.dir={json.dumps(str(tmp_path))}"
    config = load_config(None, ["data.task=sequence", "model.path=DIR", "lora.rank=2", place])
    keep_base(config, base)
    assert not (tmp_path / "base").exists()  # the checkpoint has it
    warmup = config.warmup.model_copy(update={"steps": 1})
    config = config.model_copy(update={"warmup": warmup})
    keep_base(config, base)
    assert_equal(load_base(config, network, base), base)


def test_adapters_are_not_read_onto_another_base_than_theirs(tmp_path):
    network = with_adapters(transformer(CONFIG), CONFIG, LORA)
    policy = jax.device_get(network.init(jax.random.key(0)))
    trained, base = network.extras.split.split(policy)
    hf.save(tmp_path / "model", CONFIG, base)
    names = {"model.path": tmp_path / "model", "run.dir": tmp_path / "run"}
    changes = [f"{key}={json.dumps(str(path))}" for key, path in names.items()]
    config = load_config(None, ["data.task=sequence", "lora.rank=2", "lora.alpha=4.0", *changes])
    notes = {"base": base_checksum(base)}
    with Checkpoints(tmp_path / "run" / "checkpoints", 1) as store:
        store.save(0, {"params": {"policy": trained}}, extra=notes)
    assert_equal(restore_policy(config, network, policy)[0], policy)
    hf.save(tmp_path / "other", CONFIG, jax.tree.map(lambda x: x + 1, base))
    weights = "model.safetensors"
    (tmp_path / "other" / weights).replace(tmp_path / "model" / weights)
    with pytest.raises(UserError, match="holds other weights than when the run began"):
        restore_policy(config, network, policy)


def test_adapters_of_another_run_are_where_a_run_starts(tmp_path):
    """lora.path puts the adapters that a directory holds on the base of model.path."""
    network = with_adapters(transformer(CONFIG), CONFIG, LORA)
    policy = network.init(jax.random.key(0))
    trained, base = network.extras.split.split(policy)
    trained = jax.tree.map(lambda x: x + 0.5, trained)
    save_adapters(tmp_path / "adapters", CONFIG, trained, lora=LORA)
    config = load_config(
        None,
        [
            *("data.task=sequence", "lora.rank=2", "lora.alpha=4.0", "model.path=DIR"),
            f"lora.path={json.dumps(str(tmp_path / 'adapters'))}",
        ],
    )
    full = start_params(config, CONFIG, network, jax.device_get(base))
    assert_equal(network.extras.split.split(full)[0], jax.device_get(trained))
    state = init_state(
        jax.random.key(3),
        full,
        network=network,
        objective=get_method("grpo").objective,
        optimizer=optax.sgd(0.1),
    )
    assert_equal(policy_of(state, network), full)


@pytest.mark.parametrize("loaded", [True, False])
def test_the_reference_of_a_run_is_the_policy_that_it_starts_from(loaded, make_batch, quick_jit):
    """Base and the adapters of ``lora.path``, as in TRL, so that the first divergence is 0."""
    network = with_adapters(transformer(CONFIG), CONFIG, LORA)
    policy = network.init(jax.random.key(0))
    trained, base = network.extras.split.split(policy)
    start = network.extras.split.join(jax.tree.map(lambda x: x + 0.05, trained), base)
    parts = {"network": network, "objective": get_method("grpo", kl_coef=0.1).objective}
    parts["optimizer"] = optax.adam(0.02)
    state = init_state(jax.random.key(3), start if loaded else base, **parts)
    assert set(state.frozen) == ({"base", "start"} if loaded else {"base"})
    batch = make_batch(n=8)

    def scored(policies, name):
        want = frozenset({name})
        return score(policies, batch, SAMPLING, network=network, value=None, want=want)[name]

    ref, bare, at_start = (
        quick_jit(functools.partial(scored, name=name))(policies)
        for policies, name in (
            (policies_of(state.params, state.frozen, network), "ref_logprobs"),
            ({"policy": base}, "logprobs"),
            ({"policy": start if loaded else base}, "logprobs"),
        )
    )
    np.testing.assert_array_equal(ref, at_start)
    assert (np.abs(ref - bare).max() > 1e-3) == loaded
    step = quick_jit(make_step(**parts))
    one, first = step(state, batch, SAMPLING)
    two, second = step(one, batch, SAMPLING)
    assert first["kl"] == 0
    assert second["kl"] > 0
    assert_equal(two.frozen, state.frozen)
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    assert set(state_shardings(state, mesh, network=network).frozen) == set(state.frozen)


def test_a_reference_that_is_named_takes_the_place_of_the_adapters_that_a_run_starts_from():
    network = with_adapters(transformer(CONFIG), CONFIG, LORA)
    policy = network.init(jax.random.key(0))
    bare = transformer(CONFIG).init(jax.random.key(5))
    objective = get_method("grpo", kl_coef=0.1).objective
    parts = {"network": network, "objective": objective, "optimizer": optax.sgd(0.1)}
    state = init_state(jax.random.key(3), policy, frozen={"ref": bare}, **parts)
    assert set(state.frozen) == {"base", "ref"}
    assert_equal(policies_of(state.params, state.frozen, network)["ref"], bare)
    plain = get_method("grpo").objective
    state = init_state(jax.random.key(3), policy, **{**parts, "objective": plain})
    assert set(state.frozen) == {"base"}, "what nothing reads is not kept"
