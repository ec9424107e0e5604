"""The chat loop of a verifiers agent inside this process: a harness of verifiers 0.4 or newer.

verifiers' own ``null`` and ``bash`` harnesses start a program by ``uv`` for each episode. A harness
"may run its loop in-process instead of launching a program, as long as every model call goes
through" the endpoint that it is given (``verifiers.v1.harness.Harness.launch``); this one does.
"""

from __future__ import annotations

import json
import sys
from contextlib import AsyncExitStack
from functools import cache
from types import ModuleType
from typing import Any

from jrl.errors import UserError
from jrl.system.extras import need
from jrl.system.json_text import parse_json

NAME = "jrl_chat_loop"
"""The id under which a verifiers configuration names this harness."""
_OK = 200


@cache
def chat_loop() -> Any:
    """The configuration of the chat loop, which verifiers then finds by the id ``NAME``.

    Its harness holds a conversation, with the tools of the task, until a turn calls none, as
    verifiers' ``null`` does.
    """
    vf = need("verifiers.v1", "verifiers", "an environment of verifiers")

    class ChatLoopConfig(vf.HarnessConfig):  # type: ignore[name-defined]
        """Settings of the chat loop: those of every harness."""

    class ChatLoop(vf.Harness[ChatLoopConfig]):  # type: ignore[name-defined]
        """A conversation until a turn calls no tool."""

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
            return await _converse(
                vf, ctx.model, self.resolve_prompt(data), endpoint, secret, mcp_urls
            )

    module = ModuleType(NAME, "The chat loop of JRL, as a plugin of verifiers.")
    vars(module).update(ChatLoop=ChatLoop, __all__=["ChatLoop"])
    sys.modules[NAME] = module  # plugins of verifiers are modules of the top level
    return ChatLoopConfig(id=NAME)


async def _converse(
    vf: Any, model: str, prompts: Any, endpoint: str, secret: str, mcp_urls: dict[str, str]
) -> Any:
    """Asks the model, and calls the tools that it asks for, until it asks for none."""
    chat = need("verifiers.v1.dialects.chat", "verifiers", "an environment of verifiers")
    mcp = need("verifiers.v1.harnesses.utils.mcp", "verifiers", "an environment of verifiers")
    httpx = need("httpx", "verifiers", "an environment of verifiers")
    system, prompt = prompts
    messages: list[dict[str, Any]] = []
    if system:
        messages.append({"role": "system", "content": system})
    if isinstance(prompt, str):
        messages.append({"role": "user", "content": prompt})
    else:
        messages += [chat.message_to_wire(message) for message in prompt or ()]
    servers = {name: {"url": url} for name, url in mcp_urls.items()}
    async with AsyncExitStack() as stack:
        tools, names, opened = await mcp.connect_mcp({"mcpServers": servers}, stack)
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
        ask = {"model": model, **({"tools": tools} if tools else {})}
        while True:
            answer = await client.post(
                f"{endpoint}/chat/completions",
                headers={"Authorization": f"Bearer {secret}"},
                json={**ask, "messages": messages},
            )
            if answer.status_code != _OK:  # a stop, a limit or an error; the trace says which
                return vf.ProgramResult(1, "", answer.text[-2000:])
            message = answer.json()["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return vf.ProgramResult(0, "", "")
            for call in message["tool_calls"]:
                messages.append(await _result(call, names, opened, mcp.call_mcp))


async def _result(call: dict[str, Any], names: Any, servers: Any, call_tool: Any) -> dict[str, Any]:
    """The message that answers a tool call; what cannot be called is answered with the reason."""
    name = call["function"]["name"]
    content: Any
    try:
        arguments = parse_json(call["function"]["arguments"] or "{}", "tool arguments")
    except UserError as error:
        content = f"error: {error}; resend the call with valid JSON"
    else:
        if not isinstance(arguments, dict):
            content = f"error: tool arguments are {json.dumps(arguments)[:80]}; resend an object"
        elif name not in names:
            content = f"error: unknown tool {name!r}"
        else:
            content = await call_tool(servers, names, name, arguments)
    return {"role": "tool", "tool_call_id": call["id"], "content": content, "name": name}
