"""Reward models that read text: published classifiers and language models, beside transformers."""

import dataclasses
import json
import math
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from needs_extra import require

from jrl.config import load_config
from jrl.config.judge import checked
from jrl.config.reward_model import RewardModelTable
from jrl.config.tables import RewardTable
from jrl.errors import UserError
from jrl.evaluate.verifiers import verifier_of
from jrl.judging.host import Texts
from jrl.judging.text_parts import TextParts
from jrl.mesh import make_mesh
from jrl.rewards import model as reward_model
from jrl.rewards.base import Sample
from jrl.rewards.combine import columns, make_combined
from jrl.rewards.model import dropout_passes, reduce_ensemble
from jrl.rewards.reading import check_reader
from jrl.rewards.rules import Rules
from jrl.rewards.text_models import label_weights, load_text_model
from jrl.run import run as running
from jrl.run.run import train
from jrl.setup.first_row import check_first_row
from jrl.setup.reward_parts import model_of_part, parts_by_token, parts_of
from jrl.storage.metrics import read_jsonl
from jrl.train.reward_model import check_text_models, load_reward_models
from jrl.types import Prompt, StopReason

require("dev", "torch", "transformers")
import torch  # noqa: E402
import transformers  # noqa: E402

torch.set_num_threads(1)
CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
CHAT = (
    "{% if note %}{{ note }}{% endif %}"
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
SPECIAL = ["<|pad|>", "<|turn|>", "<|end|>"]
SIZES = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
LABELS = {0: "helpfulness", 1: "cost"}


def write_tokenizer(directory):
    import tokenizers

    letters = sorted(set(map(chr, range(32, 127))) | {"\n"})
    words = {token: i for i, token in enumerate([*SPECIAL, *letters, "Ye", "Yes", "No"])}
    merges = [("Y", "e"), ("Ye", "s"), ("N", "o")]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(words, merges))
    backend.add_special_tokens(SPECIAL)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|end|>", chat_template=CHAT
    )
    fast.save_pretrained(directory)
    return len(words)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Three reward models of one shape, "rm0" to "rm2", and a language model "lm"."""
    root = tmp_path_factory.mktemp("text_models")
    for seed, name in enumerate(("rm0", "rm1", "rm2", "lm")):
        size = write_tokenizer(root / name)
        kind = "CausalLM" if name == "lm" else "SequenceClassification"
        model_class = getattr(transformers, f"Qwen3For{kind}")
        extra = {} if name == "lm" else {"id2label": LABELS}
        torch.manual_seed(seed)
        model = model_class(model_class.config_class(**SIZES, vocab_size=size, **extra)).eval()
        with torch.no_grad():
            for value in model.parameters():
                value += (0.5 if value.ndim == 1 else 0.3) * torch.randn_like(value)
        model.save_pretrained(root / name)
    return root


PROMPT = Prompt(
    7, "", np.zeros(1, np.int32), "4", {"facts": "2 + 2 = 4"}, question="What is 2 + 2?"
)


def sample(completion, prompt=PROMPT):
    return Sample(prompt, completion, np.zeros(1, np.int32), "stop_token")


def loaded(place, names="rm0", mesh=None, rules=None, **keys):
    paths = [str(place / name) for name in names.split()]
    table = checked(RewardModelTable, "rewards.r", {"path": paths, **keys})
    return load_text_model(
        table, rules or Rules(), "rewards.r", mesh or make_mesh(), dtype="float32", seed=0
    )


def theirs(place, name, messages=None, text=None, prompt=False, **variables):
    """The logits that transformers gives to a conversation, or to a text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / name)
    kind = "AutoModelForCausalLM" if name == "lm" else "AutoModelForSequenceClassification"
    model = getattr(transformers, kind).from_pretrained(place / name).eval()
    if messages is not None:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt, **variables
        )
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        return model(ids).logits[0].double().numpy()


def talk(answer, question="What is 2 + 2?"):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


ONE = {"labels": {"helpfulness": 1.0}}


def test_points_are_the_weighted_logits_of_transformers(place):
    """In texts of several widths, and more of them than go through the model at a time."""
    answers = ["4", "It is 4, and " + "not 5 " * 15, "5", "no"]
    model = loaded(place, rows=8, labels={"helpfulness": 0.5, "cost": -2.0})
    points, counts = model([sample(a) for a in answers * 3])
    expected = [theirs(place, "rm0", talk(a)) @ [0.5, -2.0] for a in answers]
    np.testing.assert_allclose(points, expected * 3, atol=1e-4)
    assert np.ptp(expected) > 0.1
    assert counts == {"reward_model_unread": 0, "reward_model_overlong": 0}


def test_a_template_shows_facts_principle_and_reference(place):
    messages = [
        {"role": "user", "content": "{question} Facts: {facts}. {principle} {reference}"},
        {"role": "assistant", "content": "{completion}"},
    ]
    model = loaded(place, template=messages, principle="Be short.", **ONE)
    question = "What is 2 + 2? Facts: 2 + 2 = 4. Be short. 4"
    expected = theirs(place, "rm0", talk("It is 4", question))[0]
    assert model([sample("It is 4")])[0] == [pytest.approx(expected, abs=1e-4)]
    text = loaded(place, template="Q: {question}\nF: {facts}\nA: {completion}", **ONE)
    expected = theirs(place, "rm0", text="Q: What is 2 + 2?\nF: 2 + 2 = 4\nA: 4")[0]
    assert text([sample("4")])[0] == [pytest.approx(expected, abs=1e-4)]


def test_variables_reach_the_chat_template(place):
    expected = theirs(place, "rm0", talk("4"), note="Strictly: ")[0]
    model = loaded(place, variables={"note": "Strictly: "}, **ONE)
    assert model([sample("4")])[0] == [pytest.approx(expected, abs=1e-4)]
    assert abs(expected - theirs(place, "rm0", talk("4"))[0]) > 1e-3


def test_padding_that_a_template_writes_at_the_end_is_not_read(place):
    expected = theirs(place, "rm0", text="A: 4<|pad|><|pad|>")[0]
    model = loaded(place, template="A: {completion}<|pad|><|pad|>", **ONE)
    assert model([sample("4")])[0] == [pytest.approx(expected, abs=1e-4)]
    assert model.reader.ids(sample("4"))[-1] != 0


def test_a_completion_never_becomes_a_control_token(place):
    model = loaded(place, **ONE)
    ids = model.reader.ids(sample("4<|end|>\n<|turn|>user"))
    assert ids.count(1) == ids.count(2) == 2  # those of the template's two turns
    assert "".join(model.reader.tokenizer.decode(ids).split(" ")).count("<|end|>") == 1


@pytest.mark.parametrize("role", ["assistant", "user"])
def test_of_a_call_that_spells_a_control_token_there_is_no_opinion(place, role):
    """The data was checked with the policy's tokenizer, which has other control tokens."""
    reader = loaded(place, **ONE).reader
    call = {"function": {"name": "f", "arguments": {"a": "4<|end|>"}}}
    messages = ({"role": role, "content": "", "tool_calls": [call]}, {"role": role, "content": "x"})
    asked = dataclasses.replace(PROMPT, messages=messages)
    assert reader.ids(Sample(asked, "4", np.zeros(1), "length")) is None


def test_of_an_episode_everything_that_was_said_is_read(place):
    spoken = [
        {"role": "assistant", "content": "<think>add</think> 4"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "<think>hm</think> Yes"},
    ]
    episode = Sample(PROMPT, "<think>hm</think> Yes", np.zeros(1), "done", tuple(spoken))
    opening = [{"role": "user", "content": PROMPT.question}]
    reward = theirs(place, "rm0", [*opening, *spoken])[0]
    assert loaded(place, **ONE)([episode])[0] == [pytest.approx(reward, abs=1e-4)]
    last = [*opening, *spoken[:2], {"role": "assistant", "content": "Yes"}]
    expected = pytest.approx(theirs(place, "rm0", last)[0], abs=1e-4)
    assert loaded(place, after="</think>", **ONE)([episode])[0] == [expected]


def test_yes_and_no_of_a_language_model(place):
    question = "{question} {completion} Is that right?"
    template = [{"role": "user", "content": question}]
    model = loaded(place, "lm", answers=["Y", "N"], template=template)
    text = "What is 2 + 2? 4 Is that right?"
    logits = theirs(place, "lm", [{"role": "user", "content": text}], prompt=True)[-1]
    logprobs = logits - np.logaddexp.reduce(logits)
    yes, no = (model.reader.tokenizer.encode(x)[0] for x in "YN")
    expected = logprobs[yes] - logprobs[no]
    assert model([sample("4")])[0] == [pytest.approx(expected, abs=1e-4)]
    likely = loaded(place, "lm", answers=["Y", "N"], template=template, link="sigmoid")
    assert likely([sample("4")])[0] == [pytest.approx(1 / (1 + np.exp(-expected)), abs=1e-5)]
    with pytest.raises(UserError, match="rewards.r.answers: 'Yess' is 2 tokens"):
        loaded(place, "lm", answers=["Yess", "No"], template=template)


def reduced(each, ensemble, c):
    """The formulas of arXiv:2310.02743 in float64."""
    mean = sum(each) / len(each)
    variance = sum((x - mean) ** 2 for x in each) / len(each)
    return {
        "mean": mean,
        "min": np.min(each, axis=0),
        "deviation": mean - c * variance**0.5,
        "uwo": mean - c * variance,
    }[ensemble]


@pytest.mark.parametrize("ensemble", ["mean", "min", "deviation", "uwo"])
def test_an_ensemble_is_reduced_as_the_paper_says(ensemble):
    each = np.random.default_rng(0).normal(size=(5, 4))
    ours = reduce_ensemble(jnp.asarray(each, jnp.float32), ensemble, 0.3)
    np.testing.assert_allclose(ours, reduced(each, ensemble, 0.3), atol=1e-6)


def test_models_are_linked_before_they_are_one():
    """The mean of probabilities, not the probability of the mean."""
    table = checked(RewardModelTable, "rewards.r", {"path": ["a", "b"], "link": "sigmoid"})
    each = np.array([[0.0, -1.0], [4.0, 3.0]])
    linked = reward_model.reduced(jnp.asarray(each, jnp.float32), table)
    np.testing.assert_allclose(linked, (1 / (1 + np.exp(-each))).mean(axis=0), atol=1e-6)


def test_an_ensemble_of_checkpoints(place):
    each = np.array([theirs(place, f"rm{i}", talk("4"))[0] for i in range(3)])
    model = loaded(place, "rm0 rm1 rm2", ensemble="uwo", uncertainty=0.3, **ONE)
    assert model([sample("4")])[0] == [pytest.approx(reduced(each, "uwo", 0.3), abs=1e-4)]
    assert np.ptp(each) > 0.1


def test_a_pass_leaves_inputs_out_and_scales_the_others():
    weight = jnp.arange(1.0, 4001.0)
    every = np.asarray(dropout_passes(weight, 0, 0.25, 3, None, 7))
    assert every.shape == (3, 4000)
    for i, one in enumerate(every):
        left_out = one == 0
        assert left_out.mean() == pytest.approx(0.25, abs=0.03)
        np.testing.assert_allclose(one[~left_out], np.asarray(weight)[~left_out] / 0.75, rtol=1e-6)
        np.testing.assert_array_equal(dropout_passes(weight, 0, 0.25, 3, i, 7)[0], one)
    assert (every[0] != every[1]).any()
    assert (np.asarray(dropout_passes(weight, 0, 0.25, 3, 0, 8))[0] != every[0]).any()
    rows = np.asarray(dropout_passes(jnp.ones((2, 9)), 1, 0.5, 4, None, 0))
    np.testing.assert_array_equal(rows[:, 0], rows[:, 1])  # one mask of the inputs


def test_passes_with_dropout_are_an_ensemble(place):
    """UPO's estimator: a trunk that is read once, behind a head in several passes."""
    keys = {"dropout": 0.5, "passes": 3, **ONE}
    singles = [loaded(place, single_pass=i, **keys) for i in range(3)]
    samples = [sample("4"), sample("It is 5")]
    each = np.array([model(samples)[0] for model in singles])
    spread = loaded(place, ensemble="uwo", uncertainty=0.3, **keys)(samples)[0]
    np.testing.assert_allclose(spread, reduced(each, "uwo", 0.3), atol=1e-4)
    assert np.ptp(each, axis=0).min() > 1e-3
    assert singles[1](samples[1:])[0] == [pytest.approx(each[1, 1], abs=1e-5)]  # in any company
    part = published("upo", place, single_pass=9, **ONE)
    assert (part.reader.table.dropout, part.reader.table.passes) == (0.1, 10)
    table = checked(RewardModelTable, "rewards.r", {"path": str(place / "rm0"), **keys})
    again = load_text_model(
        table, Rules(), "rewards.r", make_mesh(), "float32", seed=0, others=singles
    )
    shared = zip(*(map(jax.tree.leaves, (m.params["trunk"] for m in (again, singles[0])))))  # noqa: B905
    assert all(a is b for a, b in shared)


def test_what_is_not_read_has_no_opinion(place):
    """RLMT: what was thought is not shown to the model, and who does not stop has no answer."""
    model = loaded(place, after="</think>", max_tokens=60, **ONE)
    texts = ["I think 4.</think>\n\n4", "I think", "</think>" + "4" * 60, "</think>"]
    points, counts = model([sample(x) for x in texts])
    assert points[0] == pytest.approx(theirs(place, "rm0", talk("4"))[0], abs=1e-4)
    assert points[1:3] == [None, None]
    assert points[3] == pytest.approx(theirs(place, "rm0", talk(""))[0], abs=1e-4)
    assert counts == {"reward_model_unread": 1, "reward_model_overlong": 1}


def keys_of(name, place, path, **more):
    """The keys that a part of a paper's name has, as the run reads them."""
    part = {"function": name, "path": str(place / path), **more}
    config = load_config(None, ["data.train=x", "model.path=x"]).model_copy(
        update={"rewards": {"r": RewardTable(**part)}}
    )
    assert parts_of(config).givers == {"r": "model"}
    return model_of_part(config, "r").model_dump(exclude_unset=True) | {"path": [str(place / path)]}


def published(name, place, path="rm0", **more):
    table = checked(RewardModelTable, "rewards.r", keys_of(name, place, path, **more))
    return load_text_model(table, Rules(), "rewards.r", make_mesh(), "float32", seed=0)


def test_rlbff_reads_yes_and_no_to_the_principle_of_a_row(place):
    prompt = Prompt(0, "", np.zeros(1), "", {"principle": "brevity"}, question="Why?")
    model = published("rlbff", place, "lm")
    text = (
        "user: Why?\n\nassistant: So.\n\nDoes the last response fulfil this principle: brevity?"
        " Answer Yes or No."
    )
    logits = theirs(place, "lm", [{"role": "user", "content": text}], prompt=True)[-1]
    logprobs = logits - np.logaddexp.reduce(logits)
    yes, no = (model.reader.tokenizer.encode(x)[0] for x in ("Yes", "No"))
    assert model([sample("So.", prompt)])[0] == [
        pytest.approx(logprobs[yes] - logprobs[no], abs=1e-4)
    ]


def test_rlmt_hides_the_thinking(place):
    model = published("rlmt", place, **ONE)
    twice = sample("hm</think> 5, no</think> 4")  # what stands behind the last one counts
    points, _ = model([sample("hm</think> 4"), twice, sample("hm")])
    expected = theirs(place, "rm0", talk("4"))[0]
    assert points == [pytest.approx(expected, abs=1e-4)] * 2 + [None]
    broken = model._replace(program=lambda params, tokens, lengths: lengths * np.float32("nan"))
    with pytest.raises(UserError, match="rm0' gives a number that is not finite"):
        broken([sample("hm</think> 4")])


def test_rluf_is_a_probability(place):
    expected = 1 / (1 + np.exp(-theirs(place, "rm0", talk("4"))[0]))
    points, _ = published("rluf", place, **ONE)([sample("4")])
    assert points == [pytest.approx(expected, abs=1e-5)]


def test_helpsteer2_weighs_five_attributes(place):
    weights = {
        **{"helpfulness": 0.65, "correctness": 0.8, "coherence": 0.45},
        **{"complexity": 0.55, "verbosity": -0.4},
    }
    table = checked(RewardModelTable, "rewards.r", keys_of("helpsteer2", place, "rm0"))
    names = [*sorted(weights), "other"]
    assert label_weights(table, names, "r") == [*(weights[n] for n in sorted(weights)), 0.0]
    with pytest.raises(UserError, match="rewards.r.labels = 'correctness'; choose from"):
        published("helpsteer2", place)


def test_pav_pays_what_a_step_changes_of_a_chance(place):
    assert {k: v for k, v in keys_of("pav", place, "rm0").items() if k != "path"} == {
        "by": "progress",
        "link": "sigmoid",
    }
    paths = (f"model.path={place / 'lm'}", "data.train=x.jsonl")
    keys = f"function='pav', path='{place / 'rm0'}', labels={{cost=1.0}}, weight=0.5"
    part = f"rewards={{p={{{keys}}}}}"
    config = load_config(None, [*paths, part])
    assert parts_by_token(config) == {"p": "rewards.p.by = 'progress'"}
    model = load_reward_models(config, parts_of(config), make_mesh()).text_models["p"]
    assert (model.by_group, model.rules.by_token) == (True, 0.5)
    turns = load_config(None, [*paths, part.replace("weight", "by='turn', weight")])
    with pytest.raises(UserError, match="rewards.p.by = 'turn': a checkpoint's model reads"):
        load_reward_models(turns, parts_of(turns), make_mesh())


def in_steps(text, prompt=PROMPT):
    """The sample of a text of which each letter is a token."""
    tokens = np.arange(len(text), dtype=np.int32)
    return Sample(prompt, text, tokens, "stop_token", ends=np.arange(1, len(text) + 1))


@pytest.mark.parametrize("by", ["step", "progress"])
def test_a_model_that_reads_text_pays_at_the_ends_of_steps(place, by):
    """Each step is read with what is before it; the first is beside those of the group."""
    texts = ["It is 4.\n\nNo, 5.", "4", "", "Two\n\n  more\n\nof it"]
    ends = [[8, 9 + 7], [1], [], [3, 11, 18]]
    model = loaded(place, by=by, **ONE)
    (points,), counts = model.points([[in_steps(text) for text in texts]])
    read = [[text[:e].rstrip() for e in at] for text, at in zip(texts, ends, strict=True)]
    values = [[theirs(place, "rm0", talk(each))[0] for each in listed] for listed in read]
    before = np.mean([listed[0] for listed in values if listed])
    assert points[2] is None
    for text, listed, paid in zip(texts, values, points, strict=True):
        if listed:
            steps = np.diff(listed, prepend=before) if by == "progress" else np.array(listed)
            at = np.flatnonzero(paid)
            assert len(paid) == len(text)
            np.testing.assert_allclose(np.array(paid)[at], steps, atol=1e-4)
            assert at[-1] == len(text) - 1
    unknown = dataclasses.replace(in_steps("3\n\n4"), ends=())  # thinking was taken out of it
    (others,), _ = model.points([[*(in_steps(text) for text in texts), unknown]])
    assert others == [*points, None]
    long = loaded(place, by=by, max_tokens=45, **ONE)
    ((few,), counts) = long.points([[in_steps(text) for text in ("4", "4\n\n" + "5" * 40)]])
    assert few[0] is not None
    assert few[1] is None  # a step of it is not read
    assert counts["reward_model_overlong"] == 1


def test_par_scores_the_reference_of_a_row(place):
    """Beside a float64 sigmoid of the two logits; a group reads its reference once."""
    prompt = Prompt(7, "", np.zeros(1, np.int32), "4", {"first": "It is four."}, question="Sum?")
    members = [sample("4", prompt), sample("5", prompt)]
    score, reference = loaded(place, **ONE), loaded(place, column="first", **ONE)
    s, r = score(members)[0], reference(members)[0]
    expected = [theirs(place, "rm0", talk(x, "Sum?"))[0] for x in ("4", "5", "It is four.")]
    np.testing.assert_allclose([*s, r[0]], expected, atol=1e-4)
    assert r[0] == r[1]
    read = []
    counted = reference._replace(program=lambda *x: read.append(x) or reference.program(*x))
    counted(members)
    assert int(np.asarray(read[0][2]).sum()) == len(reference.reader.ids(members[0])) + 15
    par = make_combined("par", "bounded", ("s", "r"), {"weights": [1.0, -1.0]})
    made = par.combine(columns(np.transpose([s, r])))[0]
    a, b, c = expected
    np.testing.assert_allclose(made, [1 / (1 + math.exp(c - x)) for x in (a, b)], atol=1e-5)
    assert reference([sample("4")])[0] == [None]
    table = checked(RewardModelTable, "rewards.r", {"path": "x", "column": "frist"})
    with pytest.raises(UserError, match=r"rewards.r.column = 'frist'; did you mean 'first'"):
        check_reader(table, reference.reader.tokenizer, ["first"], "rewards.r")


def test_fact_rlhf_shows_facts(place):
    model = published("fact_rlhf", place, **ONE)
    question = "What is 2 + 2?\n\nFacts:\n2 + 2 = 4"
    expected = theirs(place, "rm0", talk("4", question))[0]
    assert model([sample("4")])[0] == [pytest.approx(expected, abs=1e-4)]


class Words:
    """A tokenizer whose tokens are numbers."""

    def decode(self, tokens):
        return "</think>" * (tokens[0] % 2) + str(tokens[0])


def test_members_that_are_gone_and_rows_that_it_is_not_asked_about(place):
    """A cost beside a reward: parts of their own, each with its rows and what None means."""
    end, left, absent = StopReason.STOP_TOKEN, StopReason.ABORTED, StopReason.ABSENT
    stop = np.array([[end, end, left], [end, end, absent]])
    tokens = np.array([[[0], [1], [3]], [[4], [5], [7]]])
    rollout = types.SimpleNamespace(
        tokens=tokens, lengths=np.ones((2, 3), int), stop=stop, mask=tokens >= 0
    )
    prompts = [Prompt(i, "", np.zeros(1), "", {"kind": "ab"[i]}, question="?") for i in range(2)]
    models = {
        "help": loaded(place, after="</think>", rules=Rules("drop"), **ONE),
        "cost": loaded(place, labels={"cost": 1.0}, rules=Rules("zero", where={"kind": "b"})),
    }
    judge = TextParts(models, Words(), 1)
    points, dropped, _, paid = judge(Texts(prompts, rollout, Words()), {}, 0)
    assert paid is None
    np.testing.assert_array_equal(dropped, [[True, False, False], [True, False, False]])
    assert points["help"][0, 1] == pytest.approx(theirs(place, "rm0", talk("1", "?"))[0], abs=1e-4)
    assert np.isnan(points["help"][:, 0]).all()
    assert np.isnan(points["help"][:, 2]).all()
    assert np.isnan(points["cost"][0]).all()
    assert points["cost"][1, 0] == pytest.approx(theirs(place, "rm0", talk("4", "?"))[1], abs=1e-4)


def test_a_mesh_of_several_devices_gives_the_same(place):
    answers = [sample(str(i)) for i in range(5)]
    meshes = make_mesh({"fsdp": 1}), make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    one, many = (loaded(place, mesh=mesh, **ONE)(answers)[0] for mesh in meshes)
    np.testing.assert_allclose(one, many, atol=1e-5)


WRONG = {
    "path is missing: a run directory": {},
    "labels is missing: the model scores helpfulness, cost": {"path": "rm0"},
    "labels = 'help'; choose from": {"path": "rm0", "labels": {"help": 1.0}},
    "with one path; give a list of models": {"path": "rm0", "ensemble": "min"},
    "uncertainty = 2.0 is not read with ensemble = 'mean'": {
        "path": ["rm0", "rm1"],
        "uncertainty": 2.0,
    },
    "passes = 3 without dropout; set it to 0.1": {"path": "rm0", "passes": 3},
    "dropout = 0.1 with 2 paths": {"path": ["rm0", "rm1"], "dropout": 0.1},
    "dropout = 0.1 with answers": {"path": "lm", "dropout": 0.1, "answers": ["Y", "N"]},
    "single_pass = 2 of 2 passes": {"path": "rm0", "dropout": 0.1, "passes": 2, "single_pass": 2},
    "template is missing: with answers": {"path": "lm", "answers": ["Y", "N"]},
    "after = '</think>' is not read with by = 'step'": {
        **{"path": "rm0", "by": "step", "after": "</think>"},
        **ONE,
    },
    "column = 'first' is not read with by = 'progress'": {
        **{"path": "rm0", "by": "progress", "column": "first"},
        **ONE,
    },
    "of which none counts": {"path": "rm0", "labels": {"cost": 0.0}},
    "write a message as {role": {"path": "rm0", "template": [{"role": "user"}]},
    "it is a language model": {"path": "lm"},
    "has another shape or other labels": {"path": ["rm0", "wide"], **ONE},
}


@pytest.mark.parametrize("line", WRONG)
def test_mistakes_are_said_in_a_line(place, tmp_path, line):
    keys = dict(WRONG[line])
    if "path" in keys:
        names = [keys["path"]] if isinstance(keys["path"], str) else keys["path"]
        keys["path"] = [str(place / name) for name in names]
    if "wide" in str(keys):
        document = json.loads((place / "rm1" / "config.json").read_text())
        document["id2label"] = {"0": "other", "1": "cost"}
        (tmp_path / "config.json").write_text(json.dumps(document))
        for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_bytes((place / "rm1" / name).read_bytes())
        keys["path"][1] = str(tmp_path)

    def load():
        table = checked(RewardModelTable, "rewards.r", keys)
        load_text_model(table, Rules(), "rewards.r", make_mesh(), "float32", seed=0)

    with pytest.raises(UserError) as caught:
        load()
    assert line in str(caught.value)


def test_models_of_an_ensemble_have_a_bias_or_none(place, tmp_path):
    from safetensors.numpy import load_file, save_file

    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((place / "rm1" / name).read_bytes())
    tensors = load_file(place / "rm1" / "model.safetensors")
    tensors["score.bias"] = np.zeros(2, np.float32)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    paths = [str(place / "rm0"), str(tmp_path)]
    table = checked(RewardModelTable, "rewards.r", {"path": paths, **ONE})
    with pytest.raises(UserError, match=r"rewards\.r\.path: .*only one of them has a score\.bias"):
        load_text_model(table, Rules(), "rewards.r", make_mesh(), "float32", seed=0)


def test_a_template_is_checked_against_the_data(place):
    model = loaded(place, **ONE)

    def say(**keys):
        table = checked(RewardModelTable, "rewards.r", {"path": "x", **keys})
        with pytest.raises(UserError) as caught:
            check_reader(table, model.reader.tokenizer, ["facts"], "rewards.r")
        return str(caught.value)

    assert "{fact}" in say(template="{completion} {fact}")
    assert "does not show what is judged" in say(template="{question}")
    assert "rewards.r.variables.think is not read" in say(variables={"think": False})
    check_reader(model.reader.table, model.reader.tokenizer, [], "rewards.r")


def test_rows_need_no_answer_where_models_alone_judge(place, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Why?"}\n')
    keys = f"function='model', path='{place / 'rm0'}', template='{{completion}} {{reference}}'"
    model = f"help={{{keys}}}"

    def config(rewards, *more):
        paths = (f"model.path={place / 'lm'}", f"data.train={tmp_path / 'rows.jsonl'}")
        return load_config(None, [*paths, f"rewards={{{rewards}}}", *more])

    check_first_row(config(model))
    for other in (config(f"{model}, math={{}}"), config(model, "data.fields.answer=answer")):
        with pytest.raises(UserError, match="there is no field 'answer'"):
            check_first_row(other)
    with pytest.raises(UserError, match="{reference}, which is no field"):
        check_text_models(config(model), [Prompt(0, "", np.zeros(1), None)])
    check_text_models(config(model), [PROMPT])


def test_a_search_by_a_model_that_reads_text_is_refused(place):
    paths = (f"model.path={place / 'lm'}", "data.train=x.jsonl")
    part = f"rewards={{help={{function='model', path='{place / 'rm0'}'}}}}"
    make = verifier_of(load_config(None, [*paths, part]), "model", "last")
    kind = types.SimpleNamespace(new_tokens=4)
    rewards = types.SimpleNamespace(models={})
    with pytest.raises(UserError, match="have no values of steps"):
        make(types.SimpleNamespace(width=4, kind=kind, rewards=rewards), None, None)


@pytest.mark.slow
def test_a_run_with_a_reward_a_cost_and_a_multiplier(place, tmp_path, monkeypatch):
    """configs/rlhf.toml: two models beside each other, and a cost that is constrained."""
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    rows = [{"prompt": f"What is {i}?"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def records(name, *more):
        config = load_config(
            CONFIGS / "rlhf.toml",
            [
                f"run.dir={json.dumps(str(tmp_path / name))}",
                f"model.path={json.dumps(str(place / 'lm'))}",
                f"data.train={json.dumps(str(tmp_path / 'rows.jsonl'))}",
                f"rewards.helpful.path={json.dumps(str(place / 'rm0'))}",
                "rewards.helpful.labels={helpfulness=1.0}",
                *("rewards.helpful.max_tokens=0", "rewards.cost.max_tokens=0"),
                f"rewards.cost.path={json.dumps(str(place / 'lm'))}",
                *("rewards.cost.variables={}", "model.dtype=float32", "mesh.fsdp=1"),
                *("data.max_prompt_tokens=64", "sampling.max_new_tokens=6", "train.prompts=4"),
                *("train.minibatches=1", "train.microbatches=1", "train.steps=2"),
                *("checkpoint.every=0", "log.samples_every=1"),
                *more,
            ],
        )
        train(config, echo=lambda line: None)
        samples = read_jsonl(tmp_path / name / "samples.jsonl")
        return read_jsonl(tmp_path / name / "metrics.jsonl")[1:], samples

    lines, samples = records("run")
    assert all(np.isfinite(r["loss"]) for r in lines)
    assert lines[0]["reward"] == pytest.approx(lines[0]["reward/helpful"], abs=1e-4)
    assert lines[0]["reward_model_unread"] == lines[0]["reward_model_overlong"] == 0
    first = samples[0]
    question = first["prompt"].split("user\n")[-1].split("<|end|>")[0]
    points = theirs(place, "rm0", talk(first["completion"], question))
    assert first["rewards"]["helpful"] == pytest.approx(points[0], abs=1e-3)
    free, _ = records("free", "objective.budget=1000.0")
    assert free[1]["loss"] != lines[1]["loss"]  # the multiplier is another
