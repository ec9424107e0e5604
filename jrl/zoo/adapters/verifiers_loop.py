"""The chat loop of a verifiers agent inside this process: a harness of verifiers 0.4 or newer.

verifiers' own ``null`` and ``bash`` harnesses start a program by ``uv`` for each episode. A harness
"may run its loop in-process instead of launching a program, as long as every model call goes
through" the endpoint that it is given (``verifiers.v1.harness.Harness.launch``); this one does.
Imported only where verifiers is installed; verifiers finds it as the module ``jrl_chat_loop``.
"""

from __future__ import annotations

import json
import sys
from contextlib import AsyncExitStack
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

from jrl.system.json_text import parse_json

__all__ = ["ChatLoop"]

NAME = "jrl_chat_loop"
"""The id under which a verifiers configuration names this harness."""


class ChatLoopConfig(vf.HarnessConfig):
    """Settings of the chat loop: those of every harness."""


class ChatLoop(vf.Harness[ChatLoopConfig]):
    """A conversation with the tools of the task until a turn calls none, as ``null`` has it."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        """Plays one segment of an episode; see ``Harness.launch``."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = []
        if system:
            messages.append({"role": "system", "content": system})
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        servers = {name: {"url": url} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            tools, names, opened = await connect_mcp({"mcpServers": servers}, stack)
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
            ask = {"model": ctx.model, **({"tools": tools} if tools else {})}
            while True:
                answer = await client.post(
                    f"{endpoint}/chat/completions",
                    headers={"Authorization": f"Bearer {secret}"},
                    json={**ask, "messages": messages},
                )
                if answer.status_code != httpx.codes.OK:  # a stop, a limit or an error: the trace
                    return vf.ProgramResult(1, "", answer.text[-2000:])  # says which
                message = answer.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(0, "", "")
                for call in message["tool_calls"]:
                    messages.append(await _result(call, names, opened))


async def _result(call: dict[str, Any], names: Any, servers: Any) -> dict[str, Any]:
    """The message that answers a tool call; what cannot be called is answered with the reason."""
    name = call["function"]["name"]
    content: Any
    try:
        arguments = parse_json(call["function"]["arguments"] or "{}", "the arguments")
    except Exception as error:
        content = f"error: invalid JSON in tool arguments ({error}); resend the call"
    else:
        if not isinstance(arguments, dict):
            content = f"error: tool arguments are {json.dumps(arguments)[:80]}; resend an object"
        elif name not in names:
            content = f"error: unknown tool {name!r}"
        else:
            content = await call_mcp(servers, names, name, arguments)
    return {"role": "tool", "tool_call_id": call["id"], "content": content, "name": name}


sys.modules[NAME] = sys.modules[__name__]  # plugins of verifiers are modules of the top level
