"""Problems that another model writes, like those that the policy fails.

    write = task_writer(endpoint("http://localhost:8000/v1", "some-model"))
    env = HostEnv(init, step, extras=EnvExtras(write=write))

In a configuration ``data.writer`` names the model, or a function of one's own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jrl.episodes.host import Writer
from jrl.episodes.model_endpoint import Speaker, keyed_endpoint, reply_of, user_message
from jrl.errors import UserError
from jrl.user_code import load

EXAMPLES, ASKS = 10, 4
"""Failed problems that one request shows, and requests at most."""

_WRITE = (
    "You write tasks for an assistant.{about} It has failed at these:\n{examples}\n\n"
    "Write {count} new tasks of the same kind. They should be varied, clear and possible, about as"
    " hard as those above, and about the same things. Put each on a line of its own between"
    " backticks, and write nothing else."
)
_CHECK = (
    "Here is a task for an assistant.{about}\nTask: {task}\nIs it clear, and can it be done? Give"
    " the reason in one sentence, then end with [YES] or [NO]."
)


def tasks_in(text: str) -> list[str]:
    r"""The tasks in a model's answer: text between backticks, or else after list marks.

    >>> tasks_in("Sure:\n`Find a red hat`\n`Find  a cap`"), tasks_in("1. Go home\n- Stay\nBye")
    (['Find a red hat', 'Find a cap'], ['Go home', 'Stay'])
    """
    text = re.sub(r"```\w*", "", text)
    tasks = re.findall(r"`([^`]+)`", text)
    tasks = tasks or re.findall(r"^\s*(?:[-*]|\d+[.)])\s+(.+)$", text, re.MULTILINE)
    return [task for each in tasks if (task := " ".join(each.split()))]


def task_writer(speaker: Speaker, *, about: str = "", check: bool = True) -> Writer:
    """Another model writes tasks like those that were failed.

    In the way of "WebRL: Training LLM Web Agents via Self-Evolving Online Curriculum Reinforcement
    Learning" (arXiv:2411.02337), in words of our own. The model is shown up to 10 of the failed
    tasks, drawn by the seed, and asked for others like them, up to 4 times for what is missing; of
    each it is then asked whether it can be done. Tasks that are there already are left out.

    Args:
      speaker: the model.
      about: where the tasks are done and what can be done there, for the model.
      check: whether it is asked if a task can be done.
    """
    place = f" {about.strip()}" if about.strip() else ""

    async def say(text: str) -> str:
        return await reply_of(speaker, [user_message(text)])

    async def write(failed: Sequence[str], count: int, seed: int) -> list[str]:
        rng, earlier_tasks, tasks = random.Random(seed), set(failed), list[str]()
        for _ in range(ASKS):
            some = rng.sample(sorted(set(failed)), min(EXAMPLES, len(set(failed))))
            examples = "\n".join(f"`{task}`" for task in some)
            request = _WRITE.format(about=place, examples=examples, count=count - len(tasks))
            for task in tasks_in(await say(request)):
                if task in earlier_tasks or len(tasks) >= count:
                    continue
                earlier_tasks.add(task)
                answer = await say(_CHECK.format(about=place, task=task)) if check else "[YES]"
                tasks += [task] if answer.rstrip(" .*\n").upper().endswith("[YES]") else []
            if len(tasks) >= count:
                break
        return tasks

    return write


_KEYS = ("url", "model", "key_variable", "about", "check", "max_tokens", "temperature")


def configured_writer(value: Any) -> Writer:
    """The writer that ``data.writer`` names.

    Args:
      value: ``FILE.py:function``, or a table of the model's ``url`` and ``model``, and perhaps
        ``key_variable``, ``about``, ``check``, ``max_tokens`` and ``temperature``.

    Raises:
      UserError: it is neither, or a key is unknown or missing.
    """
    if isinstance(value, str):
        return load(value, "data.writer")
    if not isinstance(value, Mapping):
        raise UserError(f"data.writer = {value!r:.60}; name a FILE.py:function, or a table")
    if unknown := sorted(value.keys() - set(_KEYS)):
        raise UserError(f"data.writer.{unknown[0]} is not known; choose from {', '.join(_KEYS)}")
    options = dict(value)
    for name in ("url", "model"):
        if not isinstance(options.get(name), str) or not options[name]:
            raise UserError(f"data.writer.{name} is missing; give the url and the model's name")
    for name in ("about", "key_variable"):
        if not isinstance(options.get(name, ""), str):
            raise UserError(f"data.writer.{name} = {options[name]!r:.40}; write a text")
    if not isinstance(options.get("check", True), bool):
        raise UserError(f"data.writer.check = {options['check']!r:.20}; must be true or false")
    writer_options = {name: options.pop(name) for name in ("about", "check") if name in options}
    speaker = keyed_endpoint(**options, key="data.writer.key_variable")
    return task_writer(speaker, **writer_options)
