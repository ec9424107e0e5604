r"""Tool-call formats of each model family, as values: text to calls, a call to text.

    parser = PARSERS["hermes"]
    parser.parse('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    # (Call("add", {"a": 1}),)

A parser reads the policy's words with their control tokens spelled out, never raises, and tells two
kinds of error apart: "structure", what no call can be read from, and "content", a call of a tool or
with arguments that there are not (``tools.check_call``).

Calls are parsed from where they begin, by a reader of their language (JSON, Python, or parameters
between tags), which says where they end. So a family's marks inside a string are text. Only where
that reader fails do marks say how far the broken call goes.

Each family has a module. ``base`` has the records; ``json_calls`` and ``python_values`` the
readers that they share.
"""

from __future__ import annotations

from collections.abc import Mapping

from jrl.episodes.parsers.base import Call as Call
from jrl.episodes.parsers.base import Malformed as Malformed
from jrl.episodes.parsers.base import Parser as Parser
from jrl.episodes.parsers.base import Schemas as Schemas
from jrl.episodes.parsers.deepseek import DEEPSEEK
from jrl.episodes.parsers.gemma import GEMMA
from jrl.episodes.parsers.gpt_oss import GPT_OSS
from jrl.episodes.parsers.hermes import HERMES
from jrl.episodes.parsers.llama3 import LLAMA3
from jrl.episodes.parsers.mistral import MISTRAL
from jrl.episodes.parsers.qwen3_coder import QWEN3_CODER
from jrl.errors import UserError, unknown_choice

PARSERS: Mapping[str, Parser] = {
    parser.name: parser
    for parser in (HERMES, QWEN3_CODER, LLAMA3, MISTRAL, GEMMA, DEEPSEEK, GPT_OSS)
}
"""The formats by family: Hermes and Qwen 2.5 and 3, Qwen3-Coder, Llama 3, Mistral, Gemma 3,
DeepSeek V3 and R1, gpt-oss."""


def get_parser(name: str, template: str | None = None) -> Parser:
    """The parser of a family.

    Args:
      name: of ``PARSERS``.
      template: the chat template that it is used with; None where there is none. One without the
        marks of any family, which has no place for tools, goes with every parser.

    Raises:
      UserError: there is no such family, or the template is that of another one.
    """
    if name not in PARSERS:
        raise unknown_choice("parser", name, PARSERS)
    fit = [n for n, parser in PARSERS.items() if template is not None and parser.fits(template)]
    if fit and name not in fit:
        fault_text = f"its chat template is of {' or '.join(map(repr, fit))}"
        raise UserError(f"parser = {name!r} does not fit the model: {fault_text}; use that parser")
    return PARSERS[name]
