"""What does not go with a policy of which the method changes the network."""

from __future__ import annotations

from jax.sharding import Mesh

from jrl.config import Config
from jrl.errors import UserError
from jrl.train.placement import sampler_mesh
from jrl.types import Network


def check_network(config: Config, mesh: Mesh, network: Network) -> None:
    """Raises UserError for what a run cannot have whose method changes the policy's network."""
    said, refused = f"method = {config.method!r}, whose policy has values of tokens,", []
    if (stack := network.extras.stack) is not None:
        said = f"objective.policies = {stack.policies}"
    if config.lora is not None:
        refused.append("[lora], since all weights are trained; remove it")
    if config.placement is not None:
        refused.append("[placement]: the policy draws where it is trained; remove it")
    elif sampler_mesh(config, mesh) is not None:
        refused.append("[sampling.mesh]: the policy draws where it is trained; remove it")
    if config.sampling.int8:
        refused.append(f"sampling.int8 = {list(config.sampling.int8)}; set it to []")
    if config.replays_routing:
        refused.append("objective.router_replay = true; set it to false")
    if stack is not None and config.train.mode not in ("host", "compiled"):
        refused.append(f"train.mode = {config.train.mode!r}; set it to 'host' or 'compiled'")
    if refused:
        raise UserError("\n".join(f"{said} does not go with {reason}" for reason in refused))
