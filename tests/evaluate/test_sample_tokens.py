"""Tokens one by one in samples: their texts, and what training knew of them."""

import numpy as np
import pytest
from hub_mirror import checkpoint

from jrl.evaluate.sample_tokens import pieces, training_view
from jrl.models.file_tokenizer import load_tokenizer
from jrl.models.tokenizer import char_tokenizer
from jrl.types import Rollout

TOKENIZER = char_tokenizer("abc")


def rollout(tokens, mask, logprobs):
    shape = (1, 1, len(tokens))
    return Rollout(
        prompt_tokens=np.zeros((1, 1), np.int32),
        prompt_lengths=np.ones(1, np.int32),
        tokens=np.array(tokens, np.int32).reshape(shape),
        lengths=np.full((1, 1), len(tokens), np.int32),
        mask=np.array(mask, bool).reshape(shape),
        sampler_logprobs=np.array(logprobs, np.float32).reshape(shape),
        versions=np.zeros(shape, np.int32),
        stop=np.zeros((1, 1), np.int32),
        baseline=np.zeros((1, 1), bool),
    )


def view(tokens, mask, logprobs, advantages, each=True):
    advantage_array = np.array(advantages, np.float32).reshape(1, 1, -1)
    here = (0, 0, slice(len(tokens)))
    return training_view(rollout(tokens, mask, logprobs), here, advantage_array, TOKENIZER, each)


def test_tokens_of_one_advantage_say_it_once():
    fields = view([2, 3, 1], [1, 1, 1], [-0.5, -0.12345, 0.0], [1.25] * 3)
    assert fields["advantage"] == 1.25
    assert fields["tokens"] == {
        "text": ["a", "b", "<stop>"],
        "logprobs": [-0.5, -0.123, 0.0],
        "advantages": 1.25,
    }
    assert view([2, 3], [1, 1], [0, 0], [1, 1], each=False) == {"advantage": 1.0}


def test_what_the_environment_said_is_marked_and_counts_in_nothing():
    fields = view([2, 3, 4], [1, 0, 1], [-1.0, 0.0, -2.0], [2.0, 0.0, -1.0])
    assert fields["advantage"] == 0.5
    assert fields["tokens"]["logprobs"] == [-1.0, None, -2.0]
    assert fields["tokens"]["advantages"] == [2.0, 0.0, -1.0]
    assert fields["tokens"]["mask"] == "101"
    # one advantage of all that were drawn stays one number
    assert view([2, 3], [1, 0], [0, 0], [3.0, 0.0])["tokens"]["advantages"] == 3.0
    assert view([2], [0], [0], [0.0])["advantage"] == 0.0


def test_pieces_join_to_the_text(tmp_path):
    tokenizer = load_tokenizer(checkpoint(tmp_path / "model"))
    ids = tokenizer.encode("What is 2 + 2?")
    assert len(ids) == 14
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)
    assert pieces(tokenizer, [*ids, tokenizer.eos_id])[-1].strip() == "<stop>"
    assert pieces(tokenizer, []) == []


def test_a_character_of_several_tokens_stands_at_the_last_of_them():
    class Bytes:
        """One token a byte."""

        def decode(self, ids, skip_special=True):
            return bytes(ids).decode(errors="replace")

    assert pieces(Bytes(), list("aé€".encode())) == ["a", "", "é", "", "", "€"]


@pytest.mark.parametrize("count", [1, 7])
def test_as_many_texts_as_tokens(count):
    assert len(pieces(TOKENIZER, [0] * count)) == count
