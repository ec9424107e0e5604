"""Starts a JetStream server of the policy of a run or a checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jrl.config import Config
from jrl.errors import UserError
from jrl.sampling.params import make_sampling_params
from jrl.serving import server as http_server
from jrl.serving.launch import ServerOptions, served_policy
from jrl.zoo.jetstream import engine as engine_adapter
from jrl.zoo.jetstream import server


def serve_jetstream(
    config: Config, options: ServerOptions, *, checkpoint: int | None, echo: Callable[[str], object]
) -> None:
    """Serves JetStream's protocol until a signal; see ``server.run``.

    Raises:
      UserError: see ``served_policy``; or the address is taken.
    """
    if options.api_key is not None:
        raise UserError("--api-key: JetStream's protocol has none; use --engine jrl")
    if options.record is not None:
        raise UserError("--record: JetStream's protocol has no sessions; use --engine jrl")
    if options.tool_parser is not None:
        raise UserError("--tool-parser: JetStream's protocol has no tools; use --engine jrl")
    if options.log != "nothing":
        raise UserError("--log-requests: JetStream's protocol is not logged; use --engine jrl")
    engine_adapter.library()
    http_server.listen(options.host, options.port).close()
    policy = served_policy(config, checkpoint=checkpoint, slots=options.slots)
    sampling = config.sampling
    engine = engine_adapter.make_engine(
        jax.random.key(config.seed),
        policy.params,
        network=policy.network,
        tokenizer=policy.tokenizer,
        sampling_params=make_sampling_params(
            sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
        ),
        slots=options.slots,
        prompt_tokens=policy.prompt_tokens,
        new_tokens=policy.new_tokens,
        mesh=policy.mesh,
    )
    del policy  # the engine has its own copy of the weights
    engine.compile()
    server.run(
        engine,
        host=options.host,
        port=options.port,
        queue_requests=options.queue,
        grace_seconds=options.grace_seconds,
        echo=echo,
    )
