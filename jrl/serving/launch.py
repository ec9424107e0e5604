"""Starts a server of the policy of a run or a checkpoint."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jrl.config import Config
from jrl.config.stored import is_run
from jrl.errors import UserError
from jrl.mesh import make_mesh, placed_shapes, tree_shardings
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.quant import sampler
from jrl.models.tokenizer import Tokenizer, check_vocab
from jrl.models.transformer import transformer
from jrl.sampling.engine import Engine
from jrl.sampling.grammar import Grammars
from jrl.sampling.request import RequestFeatures
from jrl.serving import http, server
from jrl.serving.openai_tools import tool_parser
from jrl.serving.record import Recorder
from jrl.serving.worker import EngineWorker
from jrl.setup.adapters import put_policy, restore_policy, start_params, trained_network
from jrl.setup.frozen import run_shape
from jrl.setup.kinds import kind_of
from jrl.setup.objective import method_of
from jrl.train.memory_check import check_slots
from jrl.types import Network, Params


class ServedPolicy(NamedTuple):
    """A policy ready to be served.

    Attributes:
      network: the policy.
      params: its weights, on the mesh.
      tokenizer: the model's, or the task's.
      mesh: of its weights.
      prompt_tokens: the longest prompt.
      new_tokens: the longest completion.
      version: training steps that made the weights; 0 before training.
    """

    network: Network
    params: Params
    tokenizer: Tokenizer
    mesh: Mesh
    prompt_tokens: int
    new_tokens: int
    version: int = 0


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Settings of a server.

    Attributes:
      name: the model's name for clients.
      host, port: where to listen.
      slots: completions decoded at once.
      queue: completions that may wait for a slot.
      chunk: decode steps between two returns to the host, with OpenAI's protocol; 0 lets the engine
        measure and choose.
      grace_seconds: how long running requests may finish after a signal to stop.
      api_key: what clients of OpenAI's protocol must send; None asks for none.
      record: a directory for what is drawn with OpenAI's protocol; None records nothing.
      tool_parser: the family whose tool calls the model writes; None for what its template says.
      log: what to print of each request: "nothing", "requests" (path, status, tokens and time) or
        "contents" (bodies and replies too).
    """

    name: str
    host: str
    port: int
    slots: int
    queue: int
    chunk: int
    grace_seconds: float
    api_key: str | None = None
    record: str | None = None
    tool_parser: str | None = None
    log: str = "nothing"


def served_policy(config: Config, *, checkpoint: int | None, slots: int = 1) -> ServedPolicy:
    """The policy of a configuration; unlike ``train.setup``, needs no data, rewards or judges.

    Args:
      config: a run's. With ``run.dir`` the policy comes from its checkpoints, else it is the model
        before training.
      checkpoint: a training step; None for the newest.
      slots: completions to be decoded at once, whose keys and values must fit.

    Raises:
      UserError: no such checkpoint, the configuration names no model, or the slots cannot fit.
    """
    kind = kind_of(config)
    shape = run_shape(config, kind.task)
    path = None if config.model.path is None else Path(config.model.path)
    # ``run_shape`` wants a checkpoint where there is no task.
    tokenizer: Tokenizer = kind.tokenizer_in(path or "")
    check_vocab(tokenizer, shape.vocab_size)
    network, directory = trained_network(config, shape, transformer(shape)), config.run.dir
    if directory is not None and (checkpoint is not None or is_run(directory)):
        network = method_of(config, kind.new_tokens).network(network)
    mesh = make_mesh(config.sampling.mesh_axes if config.sampling.mesh else config.mesh_axes)
    new_tokens, prompt_tokens = kind.new_tokens, kind.longest_prompt
    longest_prompt = network.max_length - new_tokens
    if longest_prompt < 1:
        raise UserError(
            f"sampling.max_new_tokens = {new_tokens}: the model holds {network.max_length} tokens "
            "with the prompt; lower it"
        )
    tokens = min(prompt_tokens, longest_prompt) + new_tokens
    check_slots("--slots", slots, tokens, shape)
    with jax.set_mesh(mesh):
        params, version = _params(config, shape, network, mesh, checkpoint)
    if not network.extras.own_layout:
        network = sampler(network, shape, **config.sampling.formats)
    return ServedPolicy(
        network, params, tokenizer, mesh, min(prompt_tokens, longest_prompt), new_tokens, version
    )


def _params(
    config: Config, shape: ModelConfig, network: Network, mesh: Mesh, checkpoint: int | None
) -> tuple[Params, int]:
    """The weights on the mesh, and their version: a run's, a checkpoint's, or random ones."""
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    where = tree_shardings(mesh, network.axes(), shapes)
    directory = config.run.dir
    if directory is not None and (checkpoint is not None or is_run(directory)):
        layout = placed_shapes(shapes, where)
        also = {"step": jax.ShapeDtypeStruct((), np.int32)}
        params, restored = restore_policy(config, network, layout, checkpoint=checkpoint, also=also)
        return params, int(restored["step"])
    if config.model.path is not None:
        _, params = hf.open_checkpoint(config.model.path, dtype=config.model.param_dtype)
        return put_policy(network, start_params(config, shape, network, params), where), 0
    return jax.jit(network.init, out_shardings=where)(jax.random.key(config.seed)), 0


def serve_openai(
    config: Config, options: ServerOptions, *, checkpoint: int | None, echo: Callable[[str], object]
) -> None:
    """Serves OpenAI's protocol until a signal; see ``server.run``.

    Raises:
      UserError: see ``served_policy``; or the address is taken.
      StorageError: nothing can be written where ``options.record`` says.
    """
    server.check_ready(options.host, options.port)
    # Before the weights are read, which takes minutes.
    recorder = None if options.record is None else Recorder(Path(options.record))
    policy = served_policy(config, checkpoint=checkpoint, slots=options.slots)
    parser = tool_parser(options.tool_parser, policy.tokenizer)
    if recorder is not None:
        recorder.begin(_weights(config, options, policy))
        echo(f"recording to {recorder.path}")
    tokenizer = policy.tokenizer
    grammars = _grammars(tokenizer, policy.network.vocab_size, echo)
    echo(
        f"compiling for {options.slots} slots, prompts of up to {policy.prompt_tokens} tokens and"
        f" completions of up to {policy.new_tokens} ..."
    )
    began = time.monotonic()
    with jax.set_mesh(policy.mesh):
        engine = Engine(
            policy.network,
            policy.params,
            slots=options.slots,
            prompt_tokens=policy.prompt_tokens,
            max_new_tokens=policy.new_tokens,
            stop_tokens=tokenizer.stop_ids,
            tokenizer=tokenizer,
            chunk=options.chunk or None,
            requests=RequestFeatures(biases=True, reports=True, grammars=grammars),
            version=policy.version,
        )
        policy = policy._replace(params=None)  # the engine has its own copy, prepared for decoding
        engine.compile(refresh=False)
    echo(f"compiled in {time.monotonic() - began:.0f} s")
    worker = EngineWorker(engine, tokenizer=tokenizer, mesh=policy.mesh)
    service = http.Service(
        worker,
        tokenizer,
        worker.limits,
        model=options.name,
        queue=options.queue,
        api_key=options.api_key,
        recorder=recorder,
        parser=parser,
        grammars=grammars,
    )
    try:
        server.run(
            service,
            host=options.host,
            port=options.port,
            grace_seconds=options.grace_seconds,
            echo=echo,
            log=options.log,
        )
    finally:
        if recorder is not None:
            recorder.close()


def _grammars(
    tokenizer: Tokenizer, vocab_size: int, echo: Callable[[str], object]
) -> Grammars | None:
    """The grammars of the served model; without them a line says what is refused, and why."""
    try:
        return Grammars(tokenizer, vocab_size)
    except UserError as error:
        echo(f"response_format and tool_choice = 'required' are refused: {error}")
        return None


def _weights(config: Config, options: ServerOptions, policy: ServedPolicy) -> dict[str, Any]:
    """The weights that a server samples with, for its record."""
    return {
        "model": options.name,
        "path": config.model.path,
        "run": config.run.dir,
        "version": policy.version,
        "vocab_size": policy.network.vocab_size,
    }
