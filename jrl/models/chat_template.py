"""Chat templates of checkpoints: found, compiled, and rendered within limits of time and memory.

Templates are programs that come with a checkpoint. Jinja's sandbox keeps them from what is outside;
nothing in it keeps a line of one from looping for hours or writing gigabytes. So they are rendered
in a process of its own (``template_process``), whose limits the system enforces.
"""

from __future__ import annotations

import datetime
import functools
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jrl.errors import UserError
from jrl.models.template_process import MOST_BYTES, render_apart

if TYPE_CHECKING:
    import jinja2

TEMPLATES = "additional_chat_templates"
"""The folder of a checkpoint with templates by name."""
MOST_SECONDS = 5.0
"""Time limit of one conversation; typical ones take a millisecond."""

_LONGEST_REASON = 500
"""Characters of a refusal, whose words a template may choose, too."""


def find_templates(directory: Path, configured: Any) -> dict[str, str]:
    """Chat templates by name; a file of its own wins over tokenizer_config.json.

    Args:
      directory: of the checkpoint.
      configured: the entry "chat_template" of tokenizer_config.json: text, a list of objects with
        name and template, or None.

    Raises:
      UserError: the entry is something else, or a file is not UTF-8 text.
    """
    templates: dict[str, str] = {}
    where = f"{directory / 'tokenizer_config.json'}: chat_template"
    if isinstance(configured, str):
        templates["default"] = configured
    elif isinstance(configured, list):
        for entry in configured:
            fields = entry if isinstance(entry, dict) else {}
            name, template = fields.get("name"), fields.get("template")
            if not (isinstance(name, str) and isinstance(template, str)):
                raise UserError(
                    f"{where} holds {str(entry)[:60]}; each entry has name and template, both text"
                )
            templates[name] = template
    elif configured is not None:
        raise UserError(
            f"{where} = {str(configured)[:60]}; it must be text, or a list of templates"
        )
    for path in sorted((directory / TEMPLATES).glob("*.jinja")):
        templates[path.stem] = _read(path)
    if (directory / "chat_template.jinja").is_file():
        templates["default"] = _read(directory / "chat_template.jinja")
    return templates


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path}: not UTF-8 text: {error}") from None


@functools.lru_cache(maxsize=64)
def variables_read(template: str) -> frozenset[str] | None:
    """The variables that a template reads and does not set itself; None where it is malformed."""
    try:
        return frozenset(render_apart(template, None, "", MOST_SECONDS)[0].split())
    except UserError:
        return None


def render(template: str, variables: Mapping[str, Any], source: str) -> str:
    """A conversation in a template's words.

    Args:
      template: Jinja.
      variables: of the template, values that can be pickled.
      source: where the template is from, for errors.

    Raises:
      UserError: the template is malformed, refuses the conversation, fails, or exceeds the limits
        of time and memory.
    """
    text, clock = render_apart(template, variables, source, MOST_SECONDS)
    if clock:
        _warn_of_clock()
    return text


@functools.cache
def _warn_of_clock() -> None:
    logging.getLogger("jrl").warning(
        "the chat template reads the clock (strftime_now): the same conversation is another text on"
        " another day; most such templates take a variable in its place, such as date_string"
    )


# ---------------------------------------------------------------- in the process of its own


def render_here(template: str, variables: Mapping[str, Any], source: str) -> tuple[str, bool]:
    """A conversation in a template's words, and whether the template has read the clock.

    Args:
      template: Jinja.
      variables: of the template.
      source: where the template is from, for errors.

    Raises:
      UserError: the template is malformed, refuses the conversation or fails, or what it writes is
        no text or too long.
    """
    import jinja2

    clock = False

    def strftime_now(form: str) -> str:
        nonlocal clock
        clock = True
        return datetime.datetime.now().strftime(form)

    try:
        text = _compiled(template).render({**variables, "strftime_now": strftime_now})
        # Half of a character, which no tokenizer takes, is an error here.
        if len(text.encode()) <= MOST_BYTES:
            return text, clock
        problem = f"it writes more than {MOST_BYTES} bytes; write the messages only"
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        problem = f"it writes {half}, half of a character (a lone surrogate)"
    except jinja2.TemplateSyntaxError as error:
        problem = f"line {error.lineno}: {error}"
    except jinja2.TemplateError as error:
        problem = str(error)
    except MemoryError:
        problem = "it needs more memory than there is; write the messages only"
    except Exception as error:  # what Python's operators raise: dividing by 0, text plus number
        problem = f"{type(error).__name__}: {str(error)[:200]}"
    first = problem.partition("\n")[0][:_LONGEST_REASON]
    raise UserError(f"the chat template of {source} says: {first}")


def variables_here(template: str, source: str) -> tuple[str, bool]:
    """The names that ``variables_read`` gives, in words; reading them computes what is constant.

    Raises:
      UserError: the template is malformed.
    """
    import jinja2
    from jinja2 import meta

    try:
        names = meta.find_undeclared_variables(_environment().parse(template))
    except (jinja2.TemplateError, RecursionError, MemoryError) as error:
        raise UserError(f"the chat template of {source} says: {error}") from None
    return " ".join(names), False


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    """A chat template, ready to be rendered."""
    return _environment().from_string(template)


def _listed(value: Any) -> list[Any]:
    """What Jinja's filters such as map make, as a list, which they may as well have made.

    Raises:
      TypeError: a value that JSON does not have.
    """
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


@functools.cache
def _environment() -> jinja2.Environment:
    """The environment that chat templates are written for."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """Writes the body of ``{% generation %}`` blocks, which mark the assistant's words."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's own attribute

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def refuse_random(value: Any) -> None:
        raise jinja2.TemplateError(
            "it uses random numbers; a conversation must be the same text in every run"
        )

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, default=_listed, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters.update(tojson=tojson, random=refuse_random)
    del environment.globals["lipsum"]  # random words
    environment.globals.update(raise_exception=raise_exception)
    return environment
