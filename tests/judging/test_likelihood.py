"""The policy's probability of the answer as a reward: what is read, what is paid and where."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from jrl.config import load_config
from jrl.config.judge import checked
from jrl.config.likelihood import LikelihoodTable
from jrl.errors import UserError
from jrl.judging.likelihood import Likelihood, likelihoods
from jrl.mesh import make_mesh
from jrl.models.tokenizer import CharTokenizer
from jrl.rewards.rules import Rules
from jrl.setup.reward_parts import parts_by_token, parts_of
from jrl.types import Prompt, StopReason

TOKENS = CharTokenizer()


def test_likelihood_is_that_of_the_last_tokens():
    """A network whose next token depends on the last one alone, beside a loop."""
    table = np.random.default_rng(0).normal(size=(7, 7)).astype(np.float32)
    network = types.SimpleNamespace(
        hidden=lambda params, tokens, at, segments: (jnp.eye(7)[tokens], {}),
        logits=lambda params, hidden: hidden @ params,
    )
    tokens = np.array([[1, 2, 3, 4, 5, 0], [6, 5, 4, 0, 0, 0]], np.int32)
    starts, lengths = np.array([2, 1]), np.array([5, 3])
    values = likelihoods(table, tokens, starts, lengths, network=network, most=4)
    logprobs = table - np.log(np.exp(table).sum(axis=1, keepdims=True))
    for row, (start, end) in enumerate(zip(starts, lengths, strict=True)):
        each = [logprobs[tokens[row, t - 1], tokens[row, t]] for t in range(start, end)]
        assert values[row] == pytest.approx(np.exp(np.mean(each)), rel=1e-5)


def part(pairs, rows=4, where=None, missing="none", longest=64, **keys):
    """A part whose "policy" finds an answer probable by how many letters x stand before it."""

    def program(params, tokens, starts, lengths):
        tokens, starts, lengths = (np.asarray(x) for x in (tokens, starts, lengths))
        texts = [TOKENS.decode(t[:n].tolist()) for t, n in zip(tokens, lengths, strict=True)]
        pairs.extend((text[:s], text[s:]) for text, s in zip(texts, starts, strict=True) if s > 1)
        return np.array([text[:s].count("x") for text, s in zip(texts, starts, strict=True)])

    table = checked(LikelihoodTable, "rewards.p", {"rows": rows, "before": " = ", **keys})
    rules = Rules(missing, where=where or {})
    return Likelihood(table, rules, 0.5, TOKENS, longest, make_mesh(), program)


def members(*texts, turns=None, stop=StopReason.STOP_TOKEN):
    """One group of texts after the prompt "q"; upper case of a text is what the policy said."""
    ids = [TOKENS.encode(text.lower()) for text in texts]
    most = max(map(len, ids))
    tokens, mask = np.zeros((1, len(ids), most), np.int32), np.zeros((1, len(ids), most), bool)
    turn = np.zeros(tokens.shape, np.int32)
    for j, each in enumerate(ids):
        tokens[0, j, : len(each)] = each
        mask[0, j, : len(each)] = [letter.isupper() or turns is None for letter in texts[j]]
        turn[0, j, : len(each)] = [int(n) for n in (turns or {}).get(texts[j], "0" * len(each))]
    rollout = types.SimpleNamespace(
        prompt_tokens=np.array([TOKENS.encode("q")]),
        prompt_lengths=np.array([1]),
        tokens=tokens,
        mask=mask,
        lengths=np.array([[len(each) for each in ids]]),
        stop=np.full((1, len(ids)), stop),
    )
    return rollout, turn


PROMPTS = [Prompt(0, "q", np.zeros(1, np.int32), "42", {"kind": "a"})]
POLICY = {"policy": None}


def test_a_completion_is_followed_by_the_answer():
    pairs = []
    rollout, _ = members("axxb", "x")
    points, paid = part(pairs)(rollout, None, PROMPTS, POLICY)
    assert sorted(pairs) == [("qaxxb = ", "42"), ("qx = ", "42")]
    assert points.tolist() == [[2.0, 1.0]]
    assert not paid.any()
    ended, pairs = members("axx")[0], []
    ended.tokens[0, 0, 2] = TOKENS.eos_id
    part(pairs)(ended, None, PROMPTS, POLICY)
    assert pairs == [("qax = ", "42")]  # the answer stands in the place of the end


def test_turns_are_paid_for_what_they_tell():
    """Gains stand at the last token that the policy drew in a turn; the last turn has none."""
    pairs = []
    # turns AB, X and C; "x," and "xx," are what the environment said
    turns = {"ABx,Xxx,C": "000011112", "A": "0"}
    rollout, turn = members(*turns, turns=turns)
    points, paid = part(pairs, by="turn")(rollout, turn, PROMPTS, POLICY)
    assert sorted(pairs) == [
        ("q = ", "42"),
        ("q = ", "42"),
        ("qabx, = ", "42"),
        ("qabx,xxx, = ", "42"),
    ]
    assert points.tolist() == [[4.0, 0.0]]
    assert paid[0].tolist() == [[0, 0.5, 0, 0, 1.5, 0, 0, 0, 0], [0] * 9]


def test_no_opinion_where_nothing_can_be_asked():
    rollout, _ = members("ax")
    none = [
        (part([]), PROMPTS, {}),  # the weights that drew it are not known
        (part([]), [Prompt(0, "q", np.zeros(1, np.int32), None)], POLICY),
        (part([], max_answer_tokens=1), PROMPTS, POLICY),
        (part([], longest=7), PROMPTS, POLICY),
        (part([], where={"kind": "b"}), PROMPTS, POLICY),
    ]
    for one, prompts, weights in none:
        assert np.isnan(one(rollout, None, prompts, weights)[0]).all()
    fits = part([], longest=len("qax = 42"))  # the longest row that there is room for
    assert fits(rollout, None, PROMPTS, POLICY)[0].tolist() == [[1.0]]
    assert part([], where={"kind": "b"}, missing="zero")(rollout, None, PROMPTS, POLICY)[0] == 0
    failed, _ = members("ax", stop=StopReason.FAILED)
    assert np.isnan(part([])(failed, None, PROMPTS, POLICY)[0]).all()


EPISODES = ("data.train=rows.jsonl", "data.env=python_math", "model.path=DIR")
GAIN = "rewards={reward={}, gain={function='likelihood', by='turn', weight=0.5}}"


def test_parts_by_turn_are_points_by_token():
    config = load_config(None, [*EPISODES, GAIN])
    assert parts_of(config).givers == {"reward": "data", "gain": "likelihood"}
    assert parts_by_token(config) == {"gain": 'rewards.gain.by = "turn"'}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("by='turns'", "rewards.gain.by = 'turns'"),
        ("befor='x'", "befor"),
        ("range=[0, 1]", "rewards.gain.range"),
        ("missing='drop'", "rewards.gain.missing"),
    ],
)
def test_mistakes_name_the_key(keys, words):
    with pytest.raises(UserError, match=words.replace("[", r"\[")):
        parts_of(
            load_config(None, [*EPISODES, f"rewards={{gain={{function='likelihood', {keys}}}}}"])
        )
