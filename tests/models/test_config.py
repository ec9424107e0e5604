import dataclasses

import pytest

from jrl.errors import UserError
from jrl.models.config import NO_ROPE, ModelConfig, Rope

BASE = ModelConfig(
    vocab_size=31,
    layers=5,
    embed_dim=16,
    heads=4,
    kv_heads=2,
    head_dim=6,
    mlp_dim=24,
    max_length=64,
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "model.config.layers = 0"),
        ({"kv_heads": 3}, "model.config.kv_heads = 3"),
        ({"head_dim": 5}, "model.config.head_dim = 5"),
        ({"norm_eps": 0.0}, "model.config.norm_eps = 0.0"),
        ({"window": 0}, "model.config.window = 0"),
        ({"activation": "silo"}, "did you mean 'silu'"),
        ({"dtype": "float64"}, "model.config.dtype = 'float64'"),
        ({"rope_scaling": "yarn"}, "choose from linear, llama3, none"),
        (
            {"rope_scaling": "llama3", "rope_high_freq_factor": 1.0},
            "model.config.rope_high_freq_factor",
        ),
        ({"experts": 4, "expert_mlp_dim": 8}, "model.config.experts_per_token = 0"),
        ({"experts": 4, "experts_per_token": 2}, "model.config.expert_mlp_dim = 0"),
        ({"window_pattern": ()}, "model.config.window_pattern"),
    ],
)
def test_errors_name_the_field(changes, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        dataclasses.replace(BASE, **changes)


def test_equal_models_are_equal_values():
    spelled = dataclasses.replace(BASE, window=4, window_pattern=[True, False, True, False, True])
    short = dataclasses.replace(BASE, window=4, window_pattern=(True, False))
    assert spelled == short
    assert hash(spelled) == hash(short)
    assert short.windows == (4, None, 4, None, 4)


def test_layers_differ_as_the_patterns_say():
    config = dataclasses.replace(
        BASE,
        rope_theta=100.0,
        rope_scaling="linear",
        rope_factor=8.0,
        rope_local_theta=10.0,
        rope_pattern=(True, True, True, True, False),
        window=3,
        window_pattern=(True, False),
    )
    near, far = Rope(10.0), Rope(100.0, "linear", 8.0)
    assert config.ropes == (near, far, near, far, NO_ROPE)
    routed = dataclasses.replace(
        BASE, experts=2, experts_per_token=1, expert_mlp_dim=4, expert_pattern=(False, True)
    )
    assert routed.sparse == (False, True, False, True, False)
    assert BASE.sparse == (False,) * 5
