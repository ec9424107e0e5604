"""The environment that ``[data]`` of a configuration names, with the options that all of them have.

Beside the arguments of the function that ``data.env`` names, ``[data]`` may hold

- limits that the engine keeps whatever the environment is: ``turn_tokens``, ``call_seconds``,
  ``turn_seconds``, ``episode_seconds``, ``answer_chars``, ``contexts``, ``summary_tokens``
  (``host.Limits``);
- ``summary``, the message that asks for a summary;
- ``writer``, what writes new problems (``writer.configured_writer``);
- ``template_variables``, variables of the chat template, such as ``{enable_thinking = false}``;
- ``isolate = true``, which plays each episode in a process (``process.process_env``).

An argument of the function of the same name comes first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jrl.envs.host import HostEnv
from jrl.envs.process import process_env
from jrl.envs.writer import configured_writer
from jrl.episodes.check_env import check_env
from jrl.errors import UserError
from jrl.own import GIVEN, check_options, load, made_by

LIMITS = (
    *("turn_tokens", "call_seconds", "turn_seconds", "episode_seconds", "answer_chars"),
    *("contexts", "summary_tokens"),
)
"""Fields of ``Limits`` that no environment reads by itself."""
COMMON = (*LIMITS, "template_variables", "isolate", "summary", "writer")


def configured_env(spec: str, options: Mapping[str, Any]) -> HostEnv:
    """The environment of a configuration.

    Args:
      spec: ``data.env``, FILE.py:function or module:function.
      options: further keys of ``[data]``.

    Raises:
      UserError: there is no such function or option, or what it returns is no environment.
    """
    make = load(spec, "data.env")
    common = {name: options[name] for name in _left_over(make) if name in options}
    own = {name: value for name, value in options.items() if name not in common}
    check_options(make, own, "data", others=_left_over(make))
    said = f"data.env = {spec!r}"
    env = check_env(made_by(make, said, **own), f"{said}: what it returns")
    isolate = common.pop("isolate", False)
    if not isinstance(isolate, bool):
        raise UserError(f"data.isolate = {isolate!r}; must be true or false")
    variables = common.pop("template_variables", env.chat.variables)
    if not isinstance(variables, Mapping):
        raise UserError(
            f"data.template_variables = {variables!r:.60}; write a table, such as "
            "{enable_thinking = false}"
        )
    write = configured_writer(common.pop("writer")) if "writer" in common else env.extras.write
    unread = [name for name in ("summary", "summary_tokens") if name in common]
    summary = common.pop("summary", env.chat.summary)
    if not isinstance(summary, str) or not summary.strip():
        raise UserError(f"data.summary = {summary!r:.60}; write what asks the policy for a summary")
    limits = env.limits._replace(**common).check("data")
    if limits.contexts == 1 and unread:
        raise UserError(
            f"data.{unread[0]} is read where episodes have several contexts; set data.contexts to 2"
            " or more, or remove it"
        )
    env = env._replace(
        limits=limits,
        chat=env.chat._replace(variables=variables, summary=summary),
        extras=env.extras._replace(write=write),
    )
    return _isolated(env, spec, own) if isolate else env


def _left_over(make: Callable[..., Any]) -> tuple[str, ...]:
    """The common options that a function does not take itself."""
    parameters = inspect.signature(make).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return tuple(name for name in COMMON if name == "isolate")
    return tuple(name for name in COMMON if name not in {p.name for p in parameters})


def _isolated(env: HostEnv, spec: str, options: Mapping[str, Any]) -> HostEnv:
    """The environment with each episode in a process; what this one holds only describes it."""
    if spec.startswith(GIVEN):
        raise UserError(
            f"data.isolate: {spec!r} was passed in Python, and processes cannot find it; name a "
            "file as FILE.py:function"
        )
    played = process_env(
        spec,
        options,
        roles=env.chat.roles,
        parts=env.parts,
        limits=env.limits,
        at_once=env.lifecycle.at_once,
    )
    return env._replace(
        init=played.init,
        step=played.step,
        close=played.close,
        fork=played.fork,
        lifecycle=env.lifecycle._replace(shutdown=played.lifecycle.shutdown),
    )
