"""The environment that ``[data]`` of a configuration names, with the options that all of them have.

``data.env`` names a function that makes a ``HostEnv``, or an episode, ``async def episode(policy,
prompt)`` (``jrl.episodes.coroutine``). Further keys of ``[data]`` are its arguments, and

- limits that the engine keeps whatever the environment is: the fields of ``host.Limits``. A
  function that reads limits itself, as environments of tools do, takes them all as ``limits``, an
  argument whose default is a ``Limits``; ``tool_calls`` is for these alone;
- ``summary``, the message that asks for a summary;
- ``writer``, what writes new problems (``writer.configured_writer``);
- ``template_variables``, variables of the chat template, such as ``{enable_thinking = false}``;
- ``isolate = true``, which plays each episode in a process (``process.process_env``).

An argument of the function of the same name comes first.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from jrl.episodes.check_env import check_env, check_episode, check_roles, is_episode
from jrl.episodes.coroutine import coroutine_env
from jrl.episodes.host import ChatOptions, EnvExtras, HostEnv, Lifecycle, Limits
from jrl.episodes.process import process_env
from jrl.errors import UserError, unknown_choice
from jrl.user_code import FORMS, PYTHON_PREFIX, check_options, load, made_by, parameters_of

LIMITS = Limits._fields
COMMON = (*LIMITS, "template_variables", "isolate", "summary", "writer")
"""Keys of ``[data]`` for every environment."""
CONFIGURED_WRITER = "jrl.zoo.envs.writer:configured_writer"

_RECORD_OF = {
    name: f"{field}={record.__name__}({name}=...)"
    for field, record in (("chat", ChatOptions), ("lifecycle", Lifecycle), ("extras", EnvExtras))
    for name in record._fields
}
_PLAYERS, _ADAPTERS = "jrl.zoo.envs.players", "jrl.zoo.adapters"
HOST_ENVS: Mapping[str, str] = {
    "consultation": f"{_PLAYERS}:consultation",
    "dialogue": f"{_PLAYERS}:dialogue",
    "discussion": f"{_PLAYERS}:discussion_env",
    "expert": f"{_PLAYERS}:expert_env",
    "foretell": "jrl.zoo.envs.foretell:foretell",
    "guided": f"{_PLAYERS}:guided",
    "gymnasium": f"{_ADAPTERS}.gymnasium:gymnasium",
    "judged": "jrl.zoo.envs.judged:judged_env",
    "mcp": f"{_ADAPTERS}.mcp:mcp",
    "multi_hop": "jrl.zoo.envs.tool_questions:multi_hop",
    "openenv": f"{_ADAPTERS}.openenv:from_openenv",
    "pair": f"{_PLAYERS}:pair",
    "prover": "jrl.zoo.envs.prover:prover",
    "python_math": "jrl.zoo.envs.tool_questions:python_math",
    "ranked_list": "jrl.zoo.envs.ranked_list:ranked_list",
    "reasoning_gym": f"{_ADAPTERS}.reasoning_gym:from_reasoning_gym",
    "textarena": f"{_ADAPTERS}.textarena:from_textarena",
    "verifiers": f"{_ADAPTERS}.verifiers:from_verifiers",
    "zero_search": "jrl.zoo.envs.zero_search:zero_search",
}
"""Environments on the host by name: where the function is that makes each."""
_FORMER = "jrl." + "envs"
_RENAMED = {
    **{f"{_FORMER}.named:{n}": n for n in ("guided", "dialogue", "pair", "consultation", "mcp")},
    **{f"{_FORMER}.named:{n}": n for n in ("zero_search", "gymnasium")},
    **{f"{_FORMER}.shipped:{n}": n for n in ("python_math", "multi_hop")},
    **{f"{_FORMER}.labelled:{n}": n for n in ("foretell", "ranked_list")},
    **{f"{_FORMER}.players:{n}_env": n for n in ("discussion", "expert")},
    f"{_FORMER}.prover:prover": "prover",
    f"{_FORMER}.textarena_games:from_textarena": "textarena",
    f"{_FORMER}.reasoning:from_reasoning_gym": "reasoning_gym",
    f"{_FORMER}.openenv_client:from_openenv": "openenv",
    f"{_FORMER}.verifiers_env:from_verifiers": "verifiers",
}
"""Former names of environments, and those of ``HOST_ENVS`` that took their place."""


def configured_env(spec: str, options: Mapping[str, Any]) -> HostEnv:
    """The environment of a configuration.

    Args:
      spec: ``data.env``, a name of ``HOST_ENVS``, FILE.py:function or module:function.
      options: further keys of ``[data]``.

    Raises:
      UserError: there is no such function or option, or what it returns is no environment.
    """
    spec = _current_name(spec, options)
    if ":" not in spec and spec not in HOST_ENVS:
        raise UserError(f"{unknown_choice('data.env', spec, HOST_ENVS)}, {FORMS}")
    spec = HOST_ENVS.get(spec, spec)
    make = load(spec, "data.env")
    shared = _shared_keys(make)
    common = {name: options[name] for name in shared if name in options}
    arguments = {name: value for name, value in options.items() if name not in common}
    env = _made(make, spec, arguments, common, shared)
    isolate = common.pop("isolate", False)
    if not isinstance(isolate, bool):
        raise UserError(f"data.isolate = {isolate!r}; must be true or false")
    variables = common.pop("template_variables", env.chat.variables)
    if not isinstance(variables, Mapping):
        raise UserError(
            f"data.template_variables = {variables!r:.60}; write a table, such as "
            "{enable_thinking = false}"
        )
    write = env.extras.write
    if "writer" in common:
        write = load(CONFIGURED_WRITER, "data.writer")(common.pop("writer"))
    unread = [name for name in ("summary", "summary_tokens") if name in common]
    summary = common.pop("summary", env.chat.summary)
    if not isinstance(summary, str) or not summary.strip():
        raise UserError(f"data.summary = {summary!r:.60}; give the text that asks for one")
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
    return _isolated(env, spec, arguments) if isolate else env


def _made(
    make: Callable[..., Any],
    spec: str,
    arguments: dict[str, Any],
    common: Mapping[str, Any],
    shared: tuple[str, ...],
) -> HostEnv:
    """The checked result of a function; passes ``limits`` to those that take it."""
    where = f"data.env = {spec!r}"
    if is_episode(make):
        check_episode(make, where, options=True)
        # The engine gives the seed, and policy and prompt by position.
        seed = {"seed": 0} if "seed" in parameters_of(make, where) else {}
        check_options(make, arguments | seed, "data", first=2, others=shared)
        roles = getattr(make, "roles", ()) or ("policy",)
        check_roles(make, roles, where)
        return check_env(coroutine_env(functools.partial(make, **arguments), roles=roles), where)
    check_options(make, arguments, "data", others=shared)
    if (limits := _limits_argument(make)) is not None:
        changes = {name: value for name, value in common.items() if name in LIMITS}
        arguments["limits"] = limits._replace(**changes).check("data")
    try:
        return check_env(made_by(make, where, **arguments), f"{where}: what it returns")
    except UserError as error:
        pattern = r"unexpected (?:keyword argument|field names:) \[?'(\w+)'"
        match = re.search(pattern, str(error))
        if match is None or match[1] not in _RECORD_OF:
            raise
        raise UserError(
            f"{error}; HostEnv takes {match[1]} as {_RECORD_OF[match[1]]} (jrl.episodes.host)"
        ) from None


def _limits_argument(make: Callable[..., Any]) -> Limits | None:
    """The default of a function's argument ``limits``, where that is a record of all limits."""
    parameter = parameters_of(make, "data.env").get("limits")
    default = None if parameter is None else parameter.default
    return default if isinstance(default, Limits) else None


def _shared_keys(make: Callable[..., Any]) -> tuple[str, ...]:
    """The keys of ``COMMON`` that a function does not take by itself."""
    parameters = parameters_of(make, "data.env")
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return ("isolate",)
    unread = () if _limits_argument(make) else ("tool_calls",)
    return tuple(name for name in COMMON if name not in parameters and name not in unread)


def _current_name(spec: str, options: Mapping[str, Any]) -> str:
    """The name of an environment today; warns of a former one.

    Raises:
      UserError: an argument has another name today.
    """
    if spec in _RENAMED:
        text = f"data.env = {spec!r} is {_RENAMED[spec]!r} now; write the new name"
        warnings.warn(text, FutureWarning, stacklevel=3)
        spec = _RENAMED[spec]
    if spec == "openenv" and "seconds" in options:
        raise UserError("data.seconds of openenv is now data.call_seconds, as everywhere")
    return spec


def _isolated(env: HostEnv, spec: str, options: Mapping[str, Any]) -> HostEnv:
    """The environment with each episode in a process; what this one holds only describes it."""
    if spec.startswith(PYTHON_PREFIX):
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
