"""Runs on pairs from files: preference methods, reward models, and runs that these reward."""

import json
import pathlib
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jrl.evaluate.pairs as held_out
from jrl.collect.collector import Collector
from jrl.collect.groups import Origin
from jrl.collect.groups import place as placed
from jrl.collect.plan import Setting
from jrl.collect.reward_stages import JudgedParts, model_stage
from jrl.collect.sources import Groups
from jrl.collect.sources_given import BatchSizes, JudgedSource, judged_groups, sizes_of
from jrl.config import load_config
from jrl.config.tables import RewardTable
from jrl.data.pairs import Judged
from jrl.errors import UserError
from jrl.evaluate.pairs import JudgedEvaluator
from jrl.methods import get_method
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.run import run as running
from jrl.run.run import train
from jrl.setup.reward_parts import RunRewards, parts_of
from jrl.storage.checkpoints import Checkpoints
from jrl.storage.metrics import CLOCKS, read_jsonl
from jrl.train import build, programs
from jrl.train.reward_model import load_reward_models
from jrl.train.trainable import check_trainable
from jrl.types import StopReason
from jrl.types.asks import TRAIN

SIZES = {"layers": 1, "embed_dim": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "mlp_dim": 32}
LETTERS = "abcdefghijklmnopqrstuvwxyz? "
CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def pairs(first, count):
    """Answers of a's are chosen, answers of z's are rejected."""
    for i in range(first, first + count):
        word = LETTERS[i % 26] + LETTERS[(7 * i) % 26]
        yield {
            "prompt": f"say {word}",
            "chosen": "aa" * (1 + i % 2),
            "rejected": "zz" * (1 + i % 3),
        }


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A checkpoint with a tokenizer of letters, and files."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    root = tmp_path_factory.mktemp("pairs")
    for name, extra in (("model", ""), ("other", "!")):
        words = ["<stop>", *LETTERS, *extra]
        backend = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, []))
        backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        backend.add_special_tokens(["<stop>"])
        shape = ModelConfig(vocab_size=32, max_length=48, **SIZES)
        hf.save(root / name, shape, transformer(shape).init(jax.random.key(0)))
        backend.save(str(root / name / "tokenizer.json"))
        chat = "{% for m in messages %}{{ m.content }}<stop>{% endfor %}"
        about = {"eos_token": "<stop>", "chat_template": chat}
        (root / name / "tokenizer_config.json").write_text(json.dumps(about))
    write_rows(root / "pairs.jsonl", pairs(0, 10))
    write_rows(root / "held_out.jsonl", pairs(40, 6))
    write_rows(root / "questions.jsonl", [{"question": f"say {x}", "answer": x} for x in "abcd"])
    return root


def settings(place, run, config, *more):
    """A shipped configuration with this data, at sizes for a test."""
    return load_config(
        CONFIGS / config,
        [
            f"run.dir={json.dumps(str(run))}",
            f"model.path={json.dumps(str(place / 'model'))}",
            f"data.pairs={json.dumps(str(place / 'pairs.jsonl'))}",
            f"data.eval={json.dumps(str(place / 'held_out.jsonl'))}",
            *("data.max_prompt_tokens=12", "sampling.max_new_tokens=8", "model.remat=none"),
            *("train.prompts=4", "train.microbatches=2", "train.steps=6", "mesh.fsdp=1"),
            "optimizer={name='adam', learning_rate=1e-2}",
            *("eval.every=3", "checkpoint.every=2", "checkpoint.keep=9", "log.samples_every=1"),
            *more,
        ],
    )


def finish(config):
    """(summary, records of the steps) of a run."""
    summary = train(config, echo=lambda line: None)
    return summary, read_jsonl(pathlib.Path(config.run.dir) / "metrics.jsonl")[1:]


def state_of(config, step=None):
    run = build.setup(config)
    state, _ = programs.new_state(run)
    saved = Checkpoints(pathlib.Path(config.run.dir) / "checkpoints", 9)
    return run, saved.restore(state, step)[0]


@pytest.fixture(scope="module")
def dpo(place, tmp_path_factory):
    config = settings(place, tmp_path_factory.mktemp("dpo") / "run", "dpo.toml")
    return config, *finish(config)


@pytest.fixture(scope="module")
def rewarder(place, tmp_path_factory):
    more = ("train.microbatches=1", "train.steps=12", "eval.every=0", "checkpoint.every=0")
    run = tmp_path_factory.mktemp("rm") / "run"
    config = settings(place, run, "reward_model.toml", *more)
    return config, *finish(config)


def test_dpo_learns_the_order_of_held_out_pairs(dpo):
    _, summary, records = dpo
    before, after = summary["eval_before"], summary["eval_after"]
    assert before["loss"] == pytest.approx(np.log(2), abs=1e-5)  # the reference is the start
    assert before["pair_accuracy"] < 0.5 < 0.9 < after["pair_accuracy"] <= 1
    assert after["pair_accuracy_low"] < after["pair_accuracy"] <= after["pair_accuracy_high"]
    assert after["margin"] > 0.1
    assert after["margin"] == pytest.approx(
        after["chosen_reward"] - after["rejected_reward"], abs=1e-5
    )
    assert before["pairs"] == after["pairs"] == 6
    assert summary["accuracy_after"] == after["pair_accuracy"]
    assert pathlib.Path(summary["report"]).exists()
    assert records[-1]["accuracy"] > records[0]["accuracy"]
    assert records[-1]["margin"] > records[0]["margin"]
    assert "eval/pair_accuracy" in records[2]
    for record in records:
        assert not {"reward", "approx_kl", "logprob_diff", "entropy"} & record.keys()
        assert record["kl"] >= 0


def test_what_was_trained_on_is_among_the_samples(dpo):
    samples = read_jsonl(pathlib.Path(dpo[0].run.dir) / "samples.jsonl")
    assert {(s["completion"][0], s["reward"]) for s in samples} == {("a", 1.0), ("z", 0.0)}
    assert all(s["prompt"].startswith("say ") and s["demonstration"] for s in samples)


def test_a_resumed_run_is_the_unbroken_run(place, dpo, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    for steps in (3, 6):
        more = (f"train.steps={steps}", "optimizer={name='adam', learning_rate=1e-2}")
        config = settings(place, tmp_path / "run", "dpo.toml", *more, "optimizer.schedule=constant")
        _, records = finish(config)
    full = settings(
        place, tmp_path / "whole", "dpo.toml", "optimizer.schedule=constant", "checkpoint.every=0"
    )
    _, unbroken = finish(full)
    for a, b in zip(records, unbroken, strict=True):
        both = a.keys() & b.keys() - CLOCKS
        assert {k: a[k] for k in both} == {k: b[k] for k in both}
    ours, theirs = (state_of(c)[1] for c in (config, full))
    assert jax.tree.all(jax.tree.map(np.array_equal, ours.params, theirs.params))
    assert int(ours.step) == 6


def test_the_order_is_a_function_of_seed_epoch_and_place(dpo):
    run = build.setup(dpo[0])
    sizes = sizes_of(*run.data.judged.values())

    def row_order(seed, cursor, prompts=5):
        source = JudgedSource(run.data.judged["pairs"], sizes, seed)
        setting = Setting(run.method, prompts, 1, np.ones(1))
        collector = Collector(source, setting, run.mesh, sampled=False)
        batch, _, after = collector.collect(None, {}, step=99, cursor=cursor)
        assert after == cursor + prompts
        return batch.ids["prompt"].tolist()

    first, second = row_order(3, 0) + row_order(3, 5), row_order(3, 10) + row_order(3, 15)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert row_order(3, 0, 10) == first != row_order(4, 0, 10)
    assert row_order(None, 0, 10) == list(range(10))


def test_the_evaluation_counts_every_pair_once(dpo):
    run, state = state_of(dpo[0])
    sizes = sizes_of(*run.data.judged.values())
    pairs_judged = run.data.judged["eval"]

    def measured(rows):
        part = run._replace(data=run.data._replace(judged={**run.data.judged, "eval": rows}))
        with jax.set_mesh(run.mesh):
            return JudgedEvaluator(part, sizes)(state)

    full = measured(pairs_judged)
    assert full == pytest.approx(dpo[1]["eval_after"], abs=1e-5)
    alone = [measured([one]) for one in pairs_judged]
    for name in ("loss", "pair_accuracy", "margin", "chosen_reward"):
        assert full[name] == pytest.approx(np.mean([m[name] for m in alone]), abs=1e-5), name


def test_the_held_out_loss_weighs_the_pairs_of_a_smaller_last_batch_as_all_others(monkeypatch):
    """Three pairs in batches of two, with losses 1, 1 and 4."""
    losses = {1: (2.0, 2.0), 2: (4.0, 1.0)}

    class Rows(SimpleNamespace):
        def replace(self, **changes):
            return self

    batch = Rows(members=np.ones((2, 2), bool), mask=np.ones((2, 2, 1), bool))
    monkeypatch.setattr(held_out, "judged_batch", lambda rows, **sizes: batch)
    monkeypatch.setattr(held_out, "place_batch", lambda batch, mesh: batch)
    evaluator = object.__new__(JudgedEvaluator)
    evaluator.run = SimpleNamespace(
        data=SimpleNamespace(judged={"eval": [0, 1, 2]}),
        config=SimpleNamespace(train=SimpleNamespace(prompts=2)),
        mesh=None,
        method=get_method("dpo"),
    )
    evaluator.sizes, evaluator._sampling_params, batches = BatchSizes(1, 2, 1), None, []

    def measure(state, batch, sampling_params):
        batches.append(batch)
        return {f"{held_out.TERM}surrogate": losses[len(batches)]}

    evaluator._measure = measure
    state = SimpleNamespace(method=get_method("dpo").objective.init())
    assert evaluator(state) == {"loss": 2.0, "pairs": 3.0}


def test_a_reward_model_learns_the_order_of_held_out_pairs(rewarder):
    _, summary, records = rewarder
    assert summary["eval_before"]["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert summary["eval_after"]["pair_accuracy"] > 0.9
    assert summary["eval_after"]["margin"] > 0.5
    assert records[-1]["loss"] < records[0]["loss"]


def test_a_reward_model_reads_the_last_token(rewarder):
    """Two completions that differ in nothing else are not worth the same."""
    run, state = state_of(rewarder[0])
    one = run.data.judged["eval"][0]
    stop = one.completions[0][-1:]
    twins = one._replace(completions=tuple(np.append([2, 2], x) for x in (stop, 3)))
    groups = judged_groups([twins], BatchSizes(16, 2, 8))
    theirs = f"rewards={{model={{path={json.dumps(rewarder[0].run.dir)}}}}}"
    config = load_config(None, [theirs, f"model.path={json.dumps(rewarder[0].model.path)}"])
    models = load_reward_models(config, parts_of(config), run.mesh).models
    points = models["model"](groups.rollout)
    assert abs(points[0, 0] - points[0, 1]) > 1e-4
    # By hand: the head on the state at the last token, whatever padding stands in between.
    for member, completion in enumerate(twins.completions):
        tokens = np.concatenate([one.prompt, completion])[None]
        place = np.arange(tokens.shape[1])[None]
        hidden, _ = run.network.hidden(state.params["policy"], tokens, place, np.ones_like(place))
        head = state.params["value"]
        assert hidden[0, -1] @ head["weight"] + head["bias"] == pytest.approx(
            points[0, member], abs=1e-4
        )


def test_a_reward_model_rewards_another_run(place, rewarder, tmp_path):
    theirs, summary, _ = rewarder
    questions, path = json.dumps(str(place / "questions.jsonl")), json.dumps(theirs.run.dir)
    changes = (
        *("method=grpo", "data.pairs=", "data.eval=", f"data.train={questions}"),
        *("sampling.group=8", "sampling.max_new_tokens=4", "train.steps=10", "eval.every=0"),
        f"rewards={{exact={{weight=0.0}}, model={{path={path}, weight=2.0}}}}",
        *("reward_pool.workers=0", "data.template=chat", "optimizer.learning_rate=3e-2"),
    )
    config = settings(place, tmp_path / "run", "reward_model.toml", *changes)
    _, records = finish(config)
    assert records[-1]["reward/model"] > records[0]["reward/model"] + 0.1
    for record in records:
        assert record["reward"] == pytest.approx(2 * record["reward/model"], abs=1e-4)
        assert record["reward/exact"] == 0
    # On pairs of the file, the reward is the value that training read.
    run = build.setup(config)
    rows_judged = build.setup(theirs).data.judged["eval"]
    groups = judged_groups(rows_judged, sizes_of(rows_judged))
    points = run.rewards.models["model"](groups.rollout)
    assert points[:, 0].mean() == pytest.approx(summary["eval_after"]["chosen_reward"], abs=1e-4)
    assert points[:, 1].mean() == pytest.approx(summary["eval_after"]["rejected_reward"], abs=1e-4)
    # The column stands where the configuration names the part, with other rewards or alone.
    for tables, column in (({"exact", "model"}, 1), ({"model"}, 0)):
        weights = dict.fromkeys(sorted(tables), 1.0)
        sampled_groups = groups._replace(
            rewards=np.full((len(rows_judged), 2, column), 7.0, np.float32)
        )
        source = SimpleNamespace(draw=lambda request, sampled_groups=sampled_groups: sampled_groups)
        rest = [name for name in weights if name != "model"]
        stages, request = [model_stage(run.rewards)], SimpleNamespace(step=0, weights={})
        rewards = JudgedParts(source, rest, stages, list(weights)).draw(request).rewards
        assert rewards.shape[-1] == column + 1
        np.testing.assert_array_equal(rewards[:, :, column], points)
    assert set(groups.rollout.stop.ravel().tolist()) == {StopReason.STOP_TOKEN}


def as_classifier(source, target, weight):
    """A checkpoint of ours as a reward model, the way transformers stores one."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(source, target)
    document = json.loads((target / "config.json").read_text())
    (name,) = document["architectures"]
    document["architectures"] = [name.replace("ForCausalLM", "ForSequenceClassification")]
    (target / "config.json").write_text(json.dumps(document))
    tensors = load_file(target / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    save_file({**tensors, "score.weight": weight}, target / "model.safetensors")


def test_a_value_network_starts_from_a_reward_model(place, rewarder, tmp_path):
    """From a run and from a checkpoint, with the estimates that the reward model's numbers are."""
    theirs, trained = state_of(rewarder[0])
    weight = np.random.default_rng(0).normal(size=(1, SIZES["embed_dim"])).astype(np.float32)
    as_classifier(place / "model", tmp_path / "rm", weight)
    tokens = np.array([[3, 5, 7, 2]])
    where = np.arange(4)[None], np.ones((1, 4), np.int32)

    def estimates(path, *more):
        questions = json.dumps(str(place / "questions.jsonl"))
        text = ("method=ppo", "data.pairs=", "data.eval=", f"data.train={questions}")
        text += ("rewards={exact={}}", "sampling.group=1", "value.kind=network", "train.prompts=4")
        changes = (*text, f"value.path={json.dumps(str(path))}", *more)
        run = build.setup(settings(place, tmp_path / "run", "reward_model.toml", *changes))
        state, _ = programs.new_state(run)
        return run.value.apply(state.params["value"], None, tokens, *where)

    hidden, _ = theirs.network.hidden(trained.params["policy"], tokens, *where)
    head = trained.params["value"]
    expected = hidden @ head["weight"] + head["bias"]
    np.testing.assert_allclose(estimates(rewarder[0].run.dir), expected, atol=1e-5)
    _, params = hf.load(place / "model")
    hidden, _ = theirs.network.hidden(params, tokens, *where)
    np.testing.assert_allclose(estimates(tmp_path / "rm"), hidden @ weight[0], atol=1e-5)
    with pytest.raises(UserError, match="set kind to 'network'"):
        estimates(tmp_path / "rm", "value.kind=head")
    with pytest.raises(UserError, match="another tokenizer than the policy's"):
        estimates(tmp_path / "rm", f"model.path={json.dumps(str(place / 'other'))}")
    as_classifier(place / "model", tmp_path / "two", np.repeat(weight, 2, axis=0))
    with pytest.raises(UserError, match="scores LABEL_0, LABEL_1; a value network starts"):
        estimates(tmp_path / "two")


def test_an_ensemble_of_runs(place, rewarder, tmp_path):
    """The least of two equal models is either; linked, a probability."""
    run, _ = state_of(rewarder[0])
    rows_judged = run.data.judged["eval"]
    rollout = judged_groups(rows_judged, sizes_of(rows_judged)).rollout
    path = json.dumps(rewarder[0].run.dir)

    def points(keys):
        model = f"model.path={json.dumps(rewarder[0].model.path)}"
        config = load_config(None, [f"rewards={{model={{{keys}}}}}", model])
        return load_reward_models(config, parts_of(config), run.mesh).models["model"](rollout)

    one = points(f"path={path}")
    np.testing.assert_allclose(points(f"path=[{path}, {path}], ensemble='min'"), one, atol=1e-6)
    linked = points(f"path={path}, link='sigmoid'")
    np.testing.assert_allclose(linked, 1 / (1 + np.exp(-one)), atol=1e-6)
    assert np.ptp(one) > 0.1


@pytest.mark.parametrize("by", ["turn", "step"])
def test_a_value_at_each_turn_or_step_is_paid_where_it_ends(by):
    """SPA: a part's points are the sum over turns, and the statistic "paid" holds each of them."""
    values = np.arange(12.0).reshape(1, 2, 6)
    mask = np.array([[[1, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0]]], bool)
    turns = np.array([[[0, 0, 0, 1, 1, 1]] * 2])
    model = SimpleNamespace(by=by, of_tokens=lambda rollout: values)
    groups = judged_groups_of_turns(mask, turns, by)
    rewards = RunRewards({"reward": 1.0, "progress": 0.5}, models={"progress": model})
    after, more = model_stage(rewards)(groups, {}, 0)
    np.testing.assert_array_equal(more["progress"], [[1 + 4, 0]])
    expected = np.full((1, 2, 6), 3.0)
    expected[0, 0, [1, 4]] += 0.5 * values[0, 0, [1, 4]]
    np.testing.assert_array_equal(after.stats["paid"], expected)


def judged_groups_of_turns(mask, turns, label):
    rollout = SimpleNamespace(mask=mask)
    paid = {"paid": np.full(mask.shape, 3.0, np.float32)}
    return Groups(rollout, None, None, {}, {label: turns}, paid)


def test_the_change_of_a_value_in_each_step_is_paid_at_its_end():
    """PAV: the first step counts from the mean of the group's, later ones from the one before."""
    rng = np.random.default_rng(0)
    values, mask = rng.normal(size=(2, 3, 7)), rng.random((2, 3, 7)) < 0.8
    mask[1, 2] = False
    steps = np.sort(rng.integers(0, 3, (2, 3, 7)), axis=2)
    model = SimpleNamespace(by="progress", of_tokens=lambda rollout: values)
    rewards = RunRewards({"reward": 1.0, "progress": 0.5}, models={"progress": model})
    after, more = model_stage(rewards)(judged_groups_of_turns(mask, steps, "step"), {}, 0)
    paid, total = np.full(mask.shape, 3.0), np.zeros((2, 3))
    for n in range(2):
        ends = [
            [max(t for t in range(7) if mask[n, j, t] and steps[n, j, t] == s)
             for s in sorted({steps[n, j, t] for t in range(7) if mask[n, j, t]})]
            for j in range(3)
        ]  # fmt: skip
        first = [values[n, j, e[0]] for j, e in enumerate(ends) if e]
        for j, e in enumerate(ends):
            before = sum(first) / len(first)
            for t in e:
                paid[n, j, t] += 0.5 * (values[n, j, t] - before)
                total[n, j] += values[n, j, t] - before
                before = values[n, j, t]
    np.testing.assert_allclose(after.stats["paid"], paid, atol=1e-6)
    np.testing.assert_allclose(more["progress"], total, atol=1e-6)
    assert len(set(map(len, ends))) > 1


@pytest.mark.slow
def test_progress_under_a_prover_rewards_a_run(place, tmp_path):
    """PAV: a verifier trained on steps with chances of success, then RL on lines."""
    rows = [
        {
            "prompt": [3 + i % 5, 6],
            "responses": [[2, 2, 2, 2, 0], [27, 27, 27, 27, 0]],
            "scores": [1.0, 0.0],
            "steps": [[2, 3], [2, 3]],
            "step_values": [[0.5, 1.0], [0.25, 0.0]],
        }
        for i in range(8)
    ]
    path = json.dumps(str(write_rows(tmp_path / "steps.jsonl", rows)))
    more = ("method=pav_verifier", f"data.pairs={path}", "data.eval=", "eval.every=0")
    more += ("train.steps=12", "checkpoint.every=0", "train.microbatches=1")
    verifier = settings(place, tmp_path / "rm", "reward_model.toml", *more)
    finish(verifier)
    model, questions = json.dumps(verifier.run.dir), json.dumps(str(place / "questions.jsonl"))
    changes = (
        *("method=pav", "data.pairs=", "data.eval=", f"data.train={questions}"),
        *("sampling.group=8", "sampling.max_new_tokens=6", "train.steps=2", "eval.every=0"),
        f"rewards={{exact={{}}, progress={{function='pav', path={model}, weight=0.5}}}}",
        *("reward_pool.workers=0", "data.template=chat", "train.microbatches=1"),
    )
    config = settings(place, tmp_path / "run", "reward_model.toml", *changes)
    _, records = finish(config)
    assert len(records) == 2
    for record in records:  # relative to the group, so the mean of a line's progress is 0
        assert record["reward/progress"] == pytest.approx(0, abs=1e-5)
        assert np.isfinite(record["loss"])
    assert records[-1]["grad_norm"] > 0


@pytest.mark.slow
def test_demonstrations_are_a_reward_and_a_measure_of_difficulty(place, tmp_path):
    """DR-IRL: a reward from demonstrations, then GRPO scaled by how far samples are from them."""
    more = ("method=ml_irl", "objective.square_coef=0.1", "train.microbatches=1", "train.steps=8")
    more += ("eval.every=0", "checkpoint.every=0")
    like_config = settings(place, tmp_path / "rm", "reward_model.toml", *more)
    summary, _ = finish(like_config)
    assert summary["eval_after"]["margin"] > 0.1
    (tmp_path / "letters.py").write_text(
        "def encode(texts):\n    return [[t.count(c) + 0.1 for c in 'abcdz'] for t in texts]\n"
    )
    questions = [{"question": f"say {x}", "answer": x, "shown": 4 * x} for x in "abcd"]
    path = json.dumps(str(write_rows(tmp_path / "questions.jsonl", questions)))
    like = "function='demonstration_similarity', column='shown', weight=0.0"
    changes = (
        *("method=dr_irl", "data.pairs=", "data.eval=", f"data.train={path}"),
        *("sampling.group=4", "sampling.max_new_tokens=6", "train.steps=2", "eval.every=0"),
        f"rewards={{model={{path={json.dumps(like_config.run.dir)}}},"
        f" like={{{like}, encoder='{tmp_path}/letters.py:encode'}}}}",
        *("reward_pool.workers=0", "data.template=chat", "data.fields.solution=shown"),
    )
    config = settings(place, tmp_path / "run", "reward_model.toml", *changes)
    _, records = finish(config)
    for record in records:
        assert np.isfinite(record["loss"])
        assert 0 < record["reward/like"] <= 1
        assert record["reward"] == pytest.approx(record["reward/model"], abs=1e-4)
    assert records[-1]["grad_norm"] > 0


@pytest.mark.slow
def test_programs_that_a_row_lists_are_demonstrations(place, tmp_path):
    """GEPO: two equivalent texts and one that is not, beside what the policy drew."""
    rows = [
        {
            "question": f"say {x}",
            "answer": x,
            "solutions": [x, "e", "z"],
            "equivalent": [True, True, False],
        }
        for x in "abcd"
    ]
    path = json.dumps(str(write_rows(tmp_path / "rows.jsonl", rows)))
    parts = "exact={weight=0.0}, listed_solution={weight=0.0}"
    changes = (
        *("method=gepo", "data.pairs=", "data.eval=", f"data.train={path}"),
        *("sampling.group=2", "sampling.max_new_tokens=6", "train.steps=3", "eval.every=0"),
        f"rewards={{{parts}, total={{combine='first', of=['listed_solution', 'exact']}}}}",
        *("reward_pool.workers=0", "data.template=chat", "data.fields.solution=solutions"),
        *("objective.gepo_coef=1.0", "train.microbatches=1"),
    )
    config = settings(
        place, tmp_path / "run", "reward_model.toml", *changes, "objective.demonstrations=3"
    )
    _, records = finish(config)
    assert all(record["margin"] != 0 for record in records[1:])  # both kinds were told apart
    assert records[-1]["margin"] > records[0]["margin"]
    too_many = settings(
        place, tmp_path / "other", "reward_model.toml", *changes, "objective.demonstrations=4"
    )
    with pytest.raises(UserError, match="solutions lists 3 solutions, and .* = 4; list as"):
        finish(too_many)


@pytest.mark.slow
def test_wanted_answers_become_likelier(place, tmp_path):
    """SteerLM 2.0 on lists whose scores are log-likelihoods."""
    rows = [
        {"prompt": f"say {x}", "responses": ["aa", "zz", "ab"], "scores": [-2.0, -9.0, -3.0]}
        for x in "abcd"
    ]
    path = json.dumps(str(write_rows(tmp_path / "lists.jsonl", rows)))
    more = ("method=steerlm2", f"data.pairs={path}", "data.eval=", "eval.every=0")
    config = settings(place, tmp_path / "run", "dpo.toml", *more, "objective={}", "train.steps=20")
    _, records = finish(config)
    assert records[-1]["loss"] < 0.2 * records[0]["loss"]
    assert records[-1]["target_overlap"] > 0.9 > records[0]["target_overlap"]


def points_of(config, **keys):
    """[N, G]: points of a run's pairs by its own model, as a reward part with these keys."""
    run, _ = state_of(config)
    rows_judged = run.data.judged["pairs"]
    rollout = judged_groups(rows_judged, sizes_of(rows_judged)).rollout
    part = {"function": "model", "path": config.run.dir, **keys}
    asks = config.model_copy(update={"rewards": {"r": RewardTable(**part)}})
    model = load_reward_models(asks, parts_of(asks), run.mesh).models["r"]
    return model(rollout)


@pytest.mark.slow
def test_two_reward_models_review_each_other(place, tmp_path):
    """CRM: two whole networks, which differ, and whose mean is the reward."""
    more = ("method=crm", "value.kind=networks", "train.microbatches=1", "train.steps=12")
    more += ("eval.every=0", "checkpoint.every=0", "train.prompts=8")
    config = settings(place, tmp_path / "run", "reward_model.toml", *more)
    summary, _ = finish(config)
    assert summary["eval_after"]["pair_accuracy"] > 0.9
    mean, first, second = (
        points_of(config, **keys) for keys in ({}, {"labels": {"0": 1.0}}, {"labels": {"1": 1.0}})
    )
    np.testing.assert_allclose(mean, (first + second) / 2, atol=1e-5)
    for one in (first, second):
        assert (one[:, 0] - one[:, 1] > 0.05).mean() > 0.9
    assert np.abs(first - second).max() > 1e-3
    with pytest.raises(UserError, match=r"rewards.r.labels = '2'; choose from 0, 1"):
        points_of(config, labels={"2": 1.0})


@pytest.mark.slow
@pytest.mark.parametrize("of", ["responses", "differences"])
def test_a_reward_model_contrasts_what_it_reads(place, tmp_path, of):
    """Texts are nearer to themselves under dropout than to others, more than before."""
    more = ("method=simcse_reward", f"objective.of={of}", "train.microbatches=1")
    more += ("train.steps=12", "eval.every=0", "checkpoint.every=0", "objective.dropout=0.3")
    config = settings(place, tmp_path / "run", "reward_model.toml", *more)
    summary, records = finish(config)
    assert summary["eval_after"]["pair_accuracy"] > 0.9
    first, last = (np.mean([r["contrast"] for r in part]) for part in (records[:3], records[-3:]))
    assert last < first


@pytest.mark.slow
def test_a_reward_model_tells_responses_of_a_later_policy_apart(place, tmp_path):
    """MetaRM: rows of equal scores are a later policy's; preferences are learned all the same."""
    ranked = [
        {"prompt": r["prompt"], "responses": [r["chosen"], r["rejected"]], "scores": [1.0, 0.0]}
        for r in pairs(0, 8)
    ]
    sampled_rows = [
        {"prompt": r["prompt"], "responses": ["ab", "mz", "qa"], "scores": [0.0, 0.0, 0.0]}
        for r in pairs(8, 8)
    ]
    rows = [row for both in zip(ranked, sampled_rows, strict=True) for row in both]
    path = json.dumps(str(write_rows(tmp_path / "rows.jsonl", rows)))
    more = (f"data.pairs={path}", "train.microbatches=1", "train.steps=12", "train.prompts=8")
    more += ("eval.every=0", "checkpoint.every=0")
    runs = {}
    for ascent in (1e-9, 0.3):
        meta = ("method=meta_rm", f"objective.ascent={ascent}", *more)
        config = settings(place, tmp_path / f"run{ascent}", "reward_model.toml", *meta)
        summary, records = finish(config)
        assert summary["eval_after"]["pair_accuracy"] > 0.9
        runs[ascent] = [record["ahead_loss"] for record in records]
    # J of three equal scores: 2 / 9 of three pairs, each 1/2
    assert runs[0.3][0] == pytest.approx(1 / 3, abs=1e-3)
    assert runs[0.3][-1] > 0.34
    assert abs(runs[0.3][-1] - runs[1e-9][-1]) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["head", "network"])
def test_passes_of_a_run_s_model_with_dropout(place, tmp_path, kind):
    """UPO: passes of one model differ, and are an ensemble."""
    more = (f"value.kind={kind}", "train.microbatches=1", "train.steps=8")
    more += ("eval.every=0", "checkpoint.every=0")
    config = settings(place, tmp_path / "run", "reward_model.toml", *more)
    finish(config)
    keys = {"function": "upo", "dropout": 0.5, "passes": 3}
    singles = np.array([points_of(config, **keys, single_pass=i) for i in range(3)])
    np.testing.assert_allclose(points_of(config, **keys), singles.mean(axis=0), atol=1e-5)
    spread = points_of(config, **keys, ensemble="deviation", uncertainty=2.0)
    np.testing.assert_allclose(spread, singles.mean(axis=0) - 2 * singles.std(axis=0), atol=1e-5)
    assert singles.std(axis=0).min() > 1e-3
    assert np.abs(singles[0] - points_of(config)).max() > 1e-2


@pytest.mark.slow
def test_attributes_are_a_reward_by_their_weights(place, tmp_path):
    """HelpSteer2: a regression of two attributes, weighed as a reward."""
    rows = [
        {
            "prompt": f"say {LETTERS[i]}",
            "responses": ["aaaa", "zz"],
            "scores": [1.0, 0.0],
            "attributes": [[4.0, 1.0], [0.0, 3.0 if i % 2 else None]],
        }
        for i in range(8)
    ]
    path = json.dumps(str(write_rows(tmp_path / "rows.jsonl", rows)))
    more = ("method=helpsteer2_regression", "objective.attributes=2", f"data.pairs={path}")
    more += ("data.eval=", "eval.every=0", "checkpoint.every=0", "train.steps=60")
    more += ("train.microbatches=1", "optimizer.learning_rate=3e-2")
    config = settings(place, tmp_path / "run", "reward_model.toml", *more)
    finish(config)
    helpful, verbose = (points_of(config, labels={k: 1.0}) for k in "01")
    np.testing.assert_allclose(helpful, [[4, 0]] * 8, atol=0.5)
    np.testing.assert_allclose(verbose, [[1, 3]] * 8, atol=0.5)
    both = points_of(config, labels={"0": 0.65, "1": -0.4})
    np.testing.assert_allclose(both, 0.65 * helpful - 0.4 * verbose, atol=1e-4)


TASK = (
    *("data.task=sequence", "data.difficulty=1", "model.path=", "data.max_prompt_tokens="),
    *("sampling.max_new_tokens=", "data.overlong=", "train.steps=1", "eval.problems=8"),
    f"model.config={json.dumps(SIZES).replace(':', '=')}",
)


def test_pairs_of_a_task_are_read_with_its_tokenizer(place, tmp_path):
    task = build.setup(load_config(None, [x for x in TASK if "=" in x])).task
    rows = []
    problems = jax.jit(jax.vmap(lambda key: task.generate(key, "train")))
    problem_batch = jax.device_get(problems(jax.random.split(jax.random.key(0), 4)))
    for i in range(4):
        prompt, answer = task.render(jax.tree.map(lambda x, i=i: x[i], problem_batch))
        rows.append({"prompt": prompt, "chosen": answer, "rejected": answer[:-1] + "?"})
    path = json.dumps(str(write_rows(tmp_path / "task.jsonl", rows)))
    more = (*TASK, f"data.pairs={path}", f"data.eval={path}")
    run = build.setup(settings(place, tmp_path / "run", "dpo.toml", *more))
    first = run.data.judged["pairs"][0]
    assert run.tokenizer.decode(first.prompt) == rows[0]["prompt"]
    assert [run.tokenizer.decode(c) for c in first.completions] == [
        rows[0]["chosen"],
        rows[0]["rejected"],
    ]
    assert first.completions[0][-1] == task.stop_id


def error_of(place, tmp_path, *more, config="dpo.toml"):
    def check():
        check_trainable(build.setup(settings(place, tmp_path / "run", config, *more)))

    with pytest.raises(UserError) as caught:
        check()
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rdpo", "reward_augmented_dpo"])
def test_rows_with_a_rationale_or_with_scores_are_trained_on(place, tmp_path, name):
    """Two steps, with held-out pairs that have no rationale and, for scores, have them."""
    rows = [
        row | {"rationale": f"say a {i}"[:7], "chosen_score": 9, "rejected_score": 2}
        for i, row in enumerate(pairs(0, 8))
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    eval_rows = rows if name == "reward_augmented_dpo" else list(pairs(40, 6))
    write_rows(tmp_path / "held.jsonl", eval_rows)
    more = [f"method={name}", "train.steps=2", "sampling.max_new_tokens=24"]
    more += [f"data.pairs={tmp_path}/rows.jsonl", f"data.eval={tmp_path}/held.jsonl"]
    more += ["data.overlong=truncate", "eval.every=0", "checkpoint.every=0"]
    summary, steps = finish(settings(place, tmp_path / "run", "dpo.toml", *more))
    assert len(steps) == 2
    assert all(np.isfinite(r["loss"]) and r["grad_norm"] > 0 for r in steps)
    assert ("rationale" in steps[0]) is (name != "reward_augmented_dpo")
    assert summary["steps"] == 2


def test_what_does_not_go_together_is_said(place, rewarder, tmp_path):
    def say(*more, **kind):
        return error_of(place, tmp_path, *more, **kind)

    labels = [{"prompt": "say a", "completion": "a", "label": True}]
    path = json.dumps(str(write_rows(tmp_path / "labels.jsonl", labels)))
    one = (f"data.pairs={path}", "data.eval=", "train.microbatches=1")
    assert "compares 2 completions of one prompt" in say(*one)
    assert "such as kto" in say(*one)
    kto = settings(place, tmp_path / "run", "dpo.toml", *one, "method=kto", "objective={}")
    check_trainable(build.setup(kto))
    assert (
        "data.pairs does not go with method = 'grpo', which learns from what a policy drew"
        in say("method=grpo", "objective={}")
    )
    assert "a.jsonl' and data.pairs are both given; remove one" in say("data.train=a.jsonl")
    assert "samples problems that a program makes; give" in say("train.mode=compiled")
    assert "does not go with rewards.math: it holds its own scores; remove rewards.math" in say(
        "rewards.math={}"
    )
    assert "does not go with sampling.top_p = 0.9: it may hold tokens" in say("sampling.top_p=0.9")
    assert "line 1: the prompt has" in say("data.max_prompt_tokens=2", "data.overlong=error")


def test_a_token_that_the_model_has_no_row_for_is_named_with_its_row(place, tmp_path):
    """The vocabulary of the model, which may be larger than its tokenizer's."""
    rows = [{"prompt": [1], "responses": [[2, last], [3]], "scores": [1, 0]} for last in (31, 32)]
    path = json.dumps(str(write_rows(tmp_path / "ids.jsonl", rows)))
    ids = (f"data.pairs={path}", "data.eval=", "train.prompts=2")
    message = error_of(place, tmp_path, *ids)
    assert (
        "ids.jsonl': a response of row 2 holds token id 32, and the model's vocabulary" in message
    )
    rows[1]["responses"][0][1] = 31
    write_rows(tmp_path / "ids.jsonl", rows)
    assert build.setup(settings(place, tmp_path / "run", "dpo.toml", *ids))


def test_a_reward_model_that_cannot_serve_is_refused(place, dpo, rewarder, tmp_path):
    questions = json.dumps(str(place / "questions.jsonl"))
    text = ("method=grpo", "objective={}", "data.pairs=", "data.eval=")

    def say(reward, *more):
        return error_of(
            place, tmp_path, *text, f"data.train={questions}", f"rewards={{model={reward}}}", *more
        )

    path = json.dumps(rewarder[0].run.dir)
    assert "rewards.model.path is missing: a run directory" in say("{}")
    assert "rewards.model.paht = 'a': no such key" in say("{paht='a'}")
    assert "it holds no config.toml; train one" in say("{path='nowhere'}")
    keys = {"after": "'x'", "missing": "'zero'", "range": "[0.0, 1.0]"}
    lines = ("a run directory's model reads", "scores every sample", "numbers have no limits")
    for (key, value), line in zip(keys.items(), lines, strict=True):
        assert line in say(f"{{path={path}, {key}={value}}}")
    assert "trained 'dpo', which has no values" in say(f"{{path={json.dumps(dpo[0].run.dir)}}}")
    other = f"model.path={json.dumps(str(place / 'other'))}"
    assert "trained with another tokenizer" in say(f"{{path={path}}}", other)
    assert "alone does not say what is right" in say(f"{{path={path}}}", f"data.eval={questions}")


def test_a_run_is_not_resumed_on_pairs_that_changed_in_place(place, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    files = {name: write_rows(tmp_path / name, pairs(0, 10)) for name in ("pairs", "held_out")}
    for name, path in files.items():
        files[name] = path.rename(path.with_suffix(".jsonl"))
    more = [f"data.pairs={json.dumps(str(files['pairs']))}", "train.steps=0"]
    more += [f"data.eval={json.dumps(str(files['held_out']))}"]
    config = settings(place, tmp_path / "run", "dpo.toml", *more)
    train(config, echo=lambda line: None)
    write_rows(files["pairs"], [*pairs(0, 9), {**next(pairs(9, 1)), "chosen": "aaab"}])
    with pytest.raises(UserError, match=r"data.pairs holds other rows than when the run began"):
        train(config, echo=lambda line: None)
    write_rows(files["pairs"], pairs(0, 10))
    write_rows(files["held_out"], pairs(0, 9))
    with pytest.raises(UserError, match=r"data.eval has 9 rows, and had 10 when the run began"):
        train(config, echo=lambda line: None)


def test_the_order_of_judged_completions_makes_no_prompts():
    source = JudgedSource([None] * 5, BatchSizes(8, 2, 8), seed=1)
    assert sorted(source.order(np.arange(5)).tolist()) == [0, 1, 2, 3, 4]


def test_groups_of_a_file_are_as_large_as_it_says_whatever_was_asked():
    """As methods with edits place them, where sampling.group asks for eight."""
    ids = np.array([1, 2], np.int32)
    judged = Judged(0, "say", ids, (ids, ids[:1]), (1.0, 0.0), (False, False))
    asked = np.zeros(1, np.int32)
    number = np.arange(8, dtype=np.int32)[None]
    origin = Origin(asked, asked, number, np.zeros(8, np.int32), np.int32(0), {})
    groups = placed(judged_groups([judged], BatchSizes(8, 2, 8)), origin, np.ones(1), None)
    assert groups.use.tolist() == [[TRAIN, TRAIN]]
