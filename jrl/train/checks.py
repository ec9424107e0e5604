"""What is wrong with a model on a mesh, or with keys for its experts, said before compiling."""

from __future__ import annotations

from jax.sharding import Mesh

from jrl.config import Config
from jrl.errors import UserError
from jrl.mesh import check_sizes
from jrl.methods.base import Method
from jrl.models.config import ModelConfig


def check_model_on_mesh(mesh: Mesh, model: ModelConfig, prompt: int, completion: int) -> None:
    """Raises UserError for what the mesh does not divide, one line for each size.

    Args:
      mesh: of training.
      model: the policy's shape.
      prompt: P, tokens.
      completion: T, tokens.
    """
    sizes = [
        ("heads", "the model's heads", model.heads),
        ("kv_heads", "the model's kv_heads", model.kv_heads),
        ("vocab", "the model's vocab_size", model.vocab_size),
        ("embed", "the model's embed_dim", model.embed_dim),
        ("length", "the prompts' tokens", prompt),
        ("length", "the completions' tokens", completion),
    ]
    if not all(model.sparse):
        sizes.append(("mlp", "the model's mlp_dim", model.mlp_dim))
    if any(model.sparse):
        sizes.append(("mlp", "the model's expert_mlp_dim", model.expert_mlp_dim))
        sizes.append(("expert", "the model's experts", model.experts))
    check_sizes(mesh, sizes)


def check_experts(config: Config, model: ModelConfig, method: Method) -> None:
    """Raises UserError for keys about routed experts that this run does not read."""
    train = config.train
    asked = {
        "train.replay_routing": train.replay_routing,
        "train.router_balance": train.router_balance,
        "train.router_z": train.router_z,
    }
    for key, value in asked.items():
        if value and not any(model.sparse):
            shown = str(value).lower()
            raise UserError(f"{key} = {shown}: the model has no routed experts; remove it")
    if train.replay_routing and (not method.draw.own or config.data.pairs is not None):
        raise UserError(
            f"train.replay_routing = true: nothing is sampled with method = {config.method!r}, so "
            "there is no routing to replay; remove it"
        )
