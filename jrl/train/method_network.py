"""What a method trains of the policy's network: with values of tokens, or several of it."""

from __future__ import annotations

from jax.sharding import Mesh

from jrl.config import Config
from jrl.errors import UserError
from jrl.methods.base import Method
from jrl.models.several import together
from jrl.models.token_values import with_token_values
from jrl.train.placement import sampler_mesh
from jrl.types import Network


def network_of(network: Network, method: Method) -> Network:
    """What the method trains, of the policy's network: with values of tokens, or several of it."""
    if (values := method.token_values) is not None:
        network = with_token_values(network, **values._asdict())
    if method.policies > 1:
        network = together(network, method.policies, method.swap_every, method.copy_every)
    return network


def own_layout(network: Network) -> bool:
    """Whether the parameters are others than those of the network that this one was made of."""
    return network.extras.several is not None or network.extras.start is not None


def check_network(config: Config, mesh: Mesh, method: Method) -> None:
    """Raises UserError for what a run cannot have whose method changes the policy's network."""
    said, refused = f"objective.policies = {method.policies}", []
    if method.token_values is not None:
        said = f"method = {config.method!r}, whose policy has values of tokens,"
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
    if method.policies > 1 and config.train.mode not in ("host", "compiled"):
        refused.append(f"train.mode = {config.train.mode!r}; set it to 'host' or 'compiled'")
    if refused:
        raise UserError("\n".join(f"{said} does not go with {reason}" for reason in refused))
