"""Commands that use a trained policy: sample, serve, convert.

A command imports its work when it runs, so that --help is fast.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Annotated

import typer

from jrl.cli.arguments import (
    AsJson,
    Checkpoint,
    Overrides,
    Target,
    prepare_jax,
    read,
)
from jrl.cli.console import (
    print_samples,
)
from jrl.config import load_config
from jrl.config.stored import is_run, override
from jrl.errors import UserError, unknown_choice
from jrl.hub import hub_name


def sample(
    target: Target,
    overrides: Overrides = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="Prompt (repeatable); default: held-out problems."),
    ] = None,
    count: Annotated[int, typer.Option(help="Number of held-out problems.", min=1)] = 4,
    samples: Annotated[
        int | None,
        typer.Option(
            "-n",
            help="Completions of each prompt; default: 1 of a --prompt, sampling.group of others.",
            min=1,
        ),
    ] = None,
    env: Annotated[
        str | None, typer.Option("--env", help="Environment to play in; default: the run's.")
    ] = None,
    checkpoint: Checkpoint = None,
    as_json: AsJson = False,
) -> None:
    """Sample completions from a policy and print them.

    An episode is printed turn by turn. --env NAME is short for data.env=NAME.

    The sampling parameters are those of training (sampling.temperature, sampling.top_p, ...).

    Example: jrl sample runs/tiny --prompt "50352>" -n 3 sampling.temperature=0.7
    """
    grouped = any(change.startswith("sampling.group=") for change in overrides or ())
    if samples is None and prompt and not grouped:
        samples = 1
    settings = read(
        target,
        [*(overrides or []), *([override("data.env", env)] if env else [])],
    )
    prepare_jax()
    from jrl.evaluate import sample_run

    records = sample_run(
        settings, prompts=prompt, count=count, samples=samples, checkpoint=checkpoint
    )
    if as_json:
        typer.echo(json.dumps(records, indent=2, ensure_ascii=False))
        return
    print_samples(records)


def serve(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_CHECKPOINT",
            help="Run directory, Hugging Face directory or name, or configuration file.",
        ),
    ],
    overrides: Overrides = None,
    engine: Annotated[
        str, typer.Option(help="jrl: OpenAI's API over HTTP; jetstream: JetStream's over gRPC.")
    ] = "jrl",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)
    ] = 8000,
    name: Annotated[
        str | None, typer.Option(help="Name of the model; by default the directory's.")
    ] = None,
    slots: Annotated[int, typer.Option(help="Completions decoded at once.", min=1)] = 16,
    queue: Annotated[
        int, typer.Option(help="Completions that may wait for a slot.", min=0, max=1_000_000)
    ] = 256,
    chunk: Annotated[
        int, typer.Option(help="Decode steps between returns to the host; 0 measures.", min=0)
    ] = 0,
    grace: Annotated[
        float, typer.Option(help="Seconds for running requests to finish on a stop.", min=0)
    ] = 30.0,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="JRL_API_KEY", help="Bearer token that clients must send."),
    ] = None,
    record: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Record samples to DIR, to train on (docs/environments.md)."
        ),
    ] = None,
    tool_parser: Annotated[
        str | None,
        typer.Option(
            help="Tool-call format (model family), if the chat template does not determine it."
        ),
    ] = None,
    log_requests: Annotated[
        bool,
        typer.Option("--log-requests", help="Print path, status, tokens and time of each request."),
    ] = False,
    log_contents: Annotated[
        bool, typer.Option("--log-contents", help="Print the bodies and replies of requests too.")
    ] = False,
    checkpoint: Checkpoint = None,
) -> None:
    """Serve a policy with OpenAI's API over HTTP, or JetStream's over gRPC.

    Without --host only this machine can connect, and without --api-key every client is served.
    Needs the extra serve or jetstream. Prompts have at most data.max_prompt_tokens tokens,
    completions at most sampling.max_new_tokens. With jetstream, the sampling settings of the
    configuration apply to all requests.

    Example: jrl serve runs/gsm8k --port 8000
    """
    if engine not in ("jrl", "jetstream"):
        raise unknown_choice("--engine", engine, ["jrl", "jetstream"])
    if api_key == "":
        raise UserError("--api-key is empty, so every client would be served; give one, or none")
    is_checkpoint = os.path.exists(f"{target}/config.json") or hub_name(target) is not None
    if is_checkpoint and not is_run(target):
        settings = load_config(None, [override("model.path", target), *(overrides or ())])
    else:
        settings = read(target, overrides)
    prepare_jax()
    from jrl.serving import launch

    options = launch.ServerOptions(
        name=name or Path(target).resolve().name,
        host=host,
        port=port,
        slots=slots,
        queue=queue,
        chunk=chunk,
        grace_seconds=grace,
        api_key=api_key,
        record=record,
        tool_parser=tool_parser,
        log="contents" if log_contents else "requests" if log_requests else "nothing",
    )
    run = launch.serve_openai
    if engine == "jetstream":
        run = importlib.import_module("jrl.zoo.jetstream.launch").serve_jetstream
    run(settings, options, checkpoint=checkpoint, echo=typer.echo)


def convert(
    target: Target,
    output: Annotated[str, typer.Argument(metavar="DIR", help="New directory to write to.")],
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Write only the adapters, in PEFT's format.")
    ] = False,
    policy: Annotated[
        int,
        typer.Option("--policy", min=0, help="Index of the policy, in a run that trained several."),
    ] = 0,
    push: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME", help="Push DIR to the Hugging Face Hub under this name."
        ),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Make a repository that --push creates private.")
    ] = False,
) -> None:
    """Export a checkpoint as a Hugging Face directory: config, safetensors, tokenizer, model card.

    The directory loads with transformers, vLLM and other tools (docs/serving.md), and as model.path
    of another run. Adapters are merged into the weights, unless --adapters is given. --push uploads
    it with the token of HF_TOKEN or `hf auth login`; without it nothing leaves this machine.

    Example: jrl convert runs/gsm8k exported --push me/gsm8k-grpo
    """
    from jrl.run.push import check_push, push_directory

    if push is not None:
        check_push(push)
    elif private:
        raise UserError("--private is for --push OWNER/NAME; add it, or remove --private")
    settings = read(target, overrides)
    from jrl.run.export import export_run

    directory = export_run(
        settings, Path(output), checkpoint=checkpoint, adapters=adapters, policy=policy, name=push
    )
    typer.echo(str(directory))
    if push is not None:
        typer.echo(push_directory(directory, push, private=private))
