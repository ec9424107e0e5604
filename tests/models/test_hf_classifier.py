"""Reward models that transformers wrote: scores of ``*For{Sequence,Token}Classification``."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from needs_extra import require

from jrl.errors import UserError
from jrl.models import hf
from jrl.models.heads import answer_scores, label_scores
from jrl.models.transformer import transformer

require("dev", "torch", "transformers")
import torch  # noqa: E402

torch.set_num_threads(1)
SHAPE = {
    **{"vocab_size": 41, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
CASES = {
    "llama": ("LlamaForSequenceClassification", {"num_labels": 1}),
    "mistral": ("MistralForSequenceClassification", {"num_labels": 1, "head_dim": 6}),
    "qwen2": ("Qwen2ForSequenceClassification", {"num_labels": 2}),
    "qwen3": (
        "Qwen3ForSequenceClassification",
        {"head_dim": 8, "id2label": {0: "helpfulness", 1: "verbosity", 2: "cost"}},
    ),
    "gemma2": (
        "Gemma2ForSequenceClassification",
        {"num_labels": 1, "head_dim": 8, "final_logit_softcapping": 1.5},
    ),
    "qwen2 by token": ("Qwen2ForTokenClassification", {"num_labels": 2}),
    "gemma3": ("Gemma3TextForSequenceClassification", {"num_labels": 1, "head_dim": 8}),
}


def write_model(directory, architecture, changes, seed=0):
    """A random checkpoint of transformers, with every norm and bias away from its start."""
    import transformers

    torch.manual_seed(seed)
    model_class = getattr(transformers, architecture)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = model_class.config_class(**{**SHAPE, **changes})
        config._attn_implementation = "eager"
        model = model_class(config).eval()
        with torch.no_grad():
            for value in model.parameters():
                value += (0.5 if value.ndim == 1 else 0.15) * torch.randn_like(value)
        model.save_pretrained(directory)
    return model


def their_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.long)).logits.float().numpy()


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_transformers(case, tmp_path):
    model = write_model(tmp_path, *CASES[case])
    tokens = np.random.default_rng(1).integers(3, 41, (3, 12))
    lengths = np.array([12, 7, 1])
    tokens[np.arange(12) >= lengths[:, None]] = 0
    expected = their_logits(model, tokens)
    if expected.ndim == 3:
        expected = expected[np.arange(3), lengths - 1]
    loaded = hf.open_classifier(tmp_path, dtype="float32")
    scores = jax.jit(label_scores(transformer(loaded.config)))
    ours = scores(hf.in_memory(loaded.params), jnp.asarray(tokens), jnp.asarray(lengths))
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(ours, expected, atol=2e-5, rtol=1e-5)
    assert len(loaded.labels) == expected.shape[1]
    if case == "qwen3":
        assert loaded.labels == ("helpfulness", "verbosity", "cost")
    assert loaded.pad_id == 0


def test_yes_less_no_is_the_difference_of_log_probabilities(tmp_path):
    model = write_model(tmp_path, "LlamaForCausalLM", {})
    tokens = np.random.default_rng(1).integers(3, 41, (2, 6))
    config, params = hf.load(tmp_path)
    logprobs = torch.log_softmax(torch.tensor(their_logits(model, tokens)[:, -1]), -1).numpy()
    ours = answer_scores(transformer(config), (7, 9))(
        {"trunk": params}, jnp.asarray(tokens), jnp.array([6, 6])
    )
    np.testing.assert_allclose(ours[:, 0], logprobs[:, 7] - logprobs[:, 9], atol=2e-5)


def test_what_is_no_reward_model_is_said(tmp_path):
    write_model(tmp_path / "lm", "LlamaForCausalLM", {})
    with pytest.raises(UserError, match="it is a language model: rewards.NAME.answers reads one"):
        hf.open_classifier(tmp_path / "lm")
    write_model(tmp_path / "rm", "LlamaForSequenceClassification", {"num_labels": 1})
    with pytest.raises(UserError, match=r"it is a reward model: name it in rewards\.NAME\.path"):
        hf.load(tmp_path / "rm")
    document = json.loads((tmp_path / "lm" / "config.json").read_text())
    document["architectures"] = ["LlamaForSequenceClassification"]
    (tmp_path / "lm" / "config.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match="missing tensor 'score.weight'"):
        hf.open_classifier(tmp_path / "lm")


def test_a_bias_is_checked_as_the_weight_is(tmp_path):
    from safetensors.numpy import load_file, save_file

    write_model(tmp_path, "Qwen2ForTokenClassification", {"num_labels": 2})
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for bias, line in {
        (0.0, 0.0, 0.0): r"'score\.bias' has shape \[3\], expected \[2\]",
        (0.0, float("nan")): r"'score\.bias' holds numbers that are not finite",
    }.items():
        save_file(tensors | {"score.bias": np.array(bias, np.float32)}, path, {"format": "pt"})
        with pytest.raises(UserError, match=line):
            hf.open_classifier(tmp_path)


def test_the_classes_of_process_reward_models_are_listed(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["BertForTokenClassification"]}')
    with pytest.raises(UserError, match="supported: .*Qwen3ForTokenClassification"):
        hf.open_classifier(tmp_path)
