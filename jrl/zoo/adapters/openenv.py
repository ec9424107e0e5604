"""OpenEnv environments on a server, for a policy of text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jrl.episodes.host import EnvError, Feedback, HostEnv, Limits, Reply
from jrl.system.extras import need
from jrl.types import NOTHING, Prompt


def from_openenv(
    url: str,
    *,
    action: str = "message",
    observation: str = "",
    fixed: Mapping[str, Any] = NOTHING,
    limits: Limits = Limits(turns=16, call_seconds=60.0),  # noqa: B008 - cannot be changed
) -> HostEnv:
    """An environment on a server; needs the extra ``openenv``.

    Every episode has a connection of its own, and with it an environment of its own on the server.
    It is reset with the group's seed, so that members start alike where the environment reads
    seeds. Rewards are the environment's; an episode that ends with one above 0 is a success.

    Args:
      url: of the server, such as "http://localhost:8000".
      action: the field of the environment's action that takes the policy's text.
      observation: the field of its observation that the policy reads; "" for all of them, as JSON.
      fixed: further fields of every action.
      limits: of an episode, by their names in a configuration; the server is waited for as long
        as a call may take.

    Raises:
      UserError: openenv is not installed.
    """
    core = need("openenv.core", "openenv", repr(url))

    def shown(fields_seen: Any) -> str:
        if not observation:
            return json.dumps(fields_seen, ensure_ascii=False, default=str)
        if observation not in fields_seen:
            fields = ", ".join(map(str, fields_seen)) or "none"
            raise EnvError(f"an observation without {observation!r}; it has {fields}")
        return str(fields_seen[observation])

    async def init(prompt: Prompt, seed: int) -> tuple[Any, Feedback]:
        client = core.GenericEnvClient(url, message_timeout_s=limits.call_seconds)
        try:
            await client.connect()
            result = await client.reset(seed=seed % 2**31)
            text = shown(result.observation)
        except BaseException:
            await client.close()
            raise
        start = f"{prompt.text}\n{text}" if prompt.text else text
        return client, Feedback([{"role": "user", "content": start}], state_key=text)

    async def step(client: Any, reply: Reply) -> tuple[Any, Feedback]:
        result = await client.step({**fixed, action: reply.text})
        reward, done = float(result.reward or 0.0), bool(result.done)
        text = shown(result.observation)
        messages = [{"role": "user", "content": text or "..."}]
        won = done and reward > 0
        return client, Feedback(messages, reward, done=done, success=won, state_key=text)

    async def close(client: Any) -> None:
        await client.close()

    return HostEnv(init, step, close, limits=limits, fork=None)  # a state is a connection
