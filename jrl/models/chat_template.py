"""Chat templates of checkpoints: found, compiled, and rendered within limits of time and size.

Templates are programs that come with a checkpoint. Jinja's sandbox keeps them from what is outside;
the limits here keep them from looping for hours and from writing gigabytes. What the limits know is
a closed set of forms, in which chat templates are written; templates of other forms are rendered in
a process of its own (``template_process``), under limits of the system.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import logging
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jrl.errors import UserError
from jrl.models.template_process import render_apart

if TYPE_CHECKING:
    import jinja2

MOST_CHARACTERS = 10_000_000
"""Of a conversation; the longest contexts hold fewer."""

MOST_IN_ALL = 1_000_000_000
"""Characters and items that all steps of one conversation make; most are made to be joined."""

MOST_ITEMS = 100_000
"""Of a list, as Jinja's own range allows."""

MOST_WORKED = 1_000_000
"""Maximum characters of a text for filters that process it letter by letter."""

MOST_INDENT = 16
"""Characters that tojson puts before each level."""
MOST_PLACES = 400
"""Of a rounded number, before or behind the point."""

MOST_SECONDS = 5.0
"""Time limit of one conversation; typical ones take a millisecond."""


class _Beyond(Exception):
    """A template exceeds a limit."""


_totals = threading.local()
"""``total``: characters and items that this thread's conversation has made so far."""


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
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
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
    import jinja2
    from jinja2 import meta

    try:
        return frozenset(meta.find_undeclared_variables(_environment().parse(template)))
    except (jinja2.TemplateError, RecursionError):
        return None


def render(template: str, variables: Mapping[str, Any], source: str) -> str:
    """A conversation in a template's words.

    Args:
      template: Jinja.
      variables: of the template.
      source: where the template is from, for errors.

    Raises:
      UserError: the template is malformed, refuses the conversation, fails, or exceeds the limits
        of time and size.
    """
    if _is_plain(template):
        return render_here(template, variables, source, MOST_SECONDS)
    return render_apart(template, variables, source, MOST_SECONDS)


def render_here(template: str, variables: Mapping[str, Any], source: str, seconds: float) -> str:
    """``render`` in this process, whatever the template.

    Args:
      template: Jinja.
      variables: of the template.
      source: where the template is from, for errors.
      seconds: limit of time.

    Raises:
      UserError: as ``render``.
    """
    import jinja2

    _totals.total = 0
    try:
        text = _limited(_compiled(template), variables, seconds)
        text.encode()  # half of a character, which no tokenizer takes
        return text
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        problem = f"it writes {half}, half of a character (a lone surrogate)"
    except jinja2.TemplateSyntaxError as error:
        problem = f"line {error.lineno}: {error}"
    except (jinja2.TemplateError, _Beyond) as error:
        problem = str(error)
        if isinstance(error, _Beyond) and _expanded(variables.get("messages")) > MOST_CHARACTERS:
            raise UserError(
                f"the messages hold more than {MOST_CHARACTERS} characters, the most that a"
                " conversation may have; shorten them, or leave the row out"
            ) from None
    except MemoryError:
        problem = "it needs more memory than there is"
    except Exception as error:  # what Python's operators raise: dividing by 0, text plus number
        problem = f"{type(error).__name__}: {str(error)[:200]}"
    first = problem.partition("\n")[0]
    raise UserError(f"the chat template of {source} says: {first}")


def _limited(template: jinja2.Template, variables: Mapping[str, Any], seconds: float) -> str:
    """The rendered text; looks at each line of the template whether its time is over."""
    end, before = time.monotonic() + seconds, sys.gettrace()

    def on_line(frame: Any, event: str, argument: Any) -> Any:
        if time.monotonic() > end:
            raise _Beyond(f"it takes longer than {seconds:g} s; loop over the messages only")
        return on_line

    def on_call(frame: Any, event: str, argument: Any) -> Any:
        return on_line if frame.f_code.co_filename == "<template>" else None

    pieces, size = [], 0
    sys.settrace(on_call)
    try:
        for piece in template.generate(**variables):
            size += len(piece)
            if size > MOST_CHARACTERS:
                raise _Beyond(_TOO_LONG)
            pieces.append(piece)
    finally:
        sys.settrace(before)
    return "".join(pieces)


_TOO_LONG = f"it writes more than {MOST_CHARACTERS} characters; write the messages only"


def _bounded(size: float) -> None:
    """Raises where one step makes more than this, or all steps together make too much."""
    _totals.total = getattr(_totals, "total", 0) + size
    if size > MOST_CHARACTERS or _totals.total > MOST_IN_ALL:
        raise _Beyond(_TOO_LONG)


def _bounded_list(items: float) -> None:
    """Raises where one step makes a longer list than that."""
    if items > MOST_ITEMS:
        raise _Beyond(
            f"it makes a list of more than {MOST_ITEMS} items; loop over the messages only"
        )
    _bounded(items)


_PLAIN_FILTERS = frozenset(
    (
        *("abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first"),
        *("float", "indent", "int", "items", "join", "last", "length", "list", "lower", "map"),
        *("max", "min", "reject", "rejectattr", "replace", "reverse", "round", "safe", "select"),
        *("selectattr", "string", "tojson", "trim", "upper"),
    )
)
_PLAIN_METHODS = frozenset(
    (
        *("capitalize", "count", "endswith", "find", "get", "index", "isdigit", "items"),
        *("join", "keys", "lower", "lstrip", "replace", "rfind", "rsplit", "rstrip", "split"),
        *("splitlines", "startswith", "strip", "title", "upper", "values"),
    )
)
_PLAIN_FUNCTIONS = frozenset(("namespace", "raise_exception", "range", "strftime_now"))


@functools.lru_cache(maxsize=64)
def _is_plain(template: str) -> bool:
    """Whether all that a template does is known to take no more than it is bounded to.

    Chat templates loop over messages, cut, join and compare texts. A list that is made of values,
    or whatever else is not in these sets, may double with each turn of a loop.
    """
    import jinja2
    from jinja2 import nodes

    try:
        tree = _environment().parse(template)
    except jinja2.TemplateError:
        return True  # which ``render_here`` says
    except RecursionError:
        return False

    def is_constant(node: Any) -> bool:
        return not any(node.find_all((nodes.Name, nodes.Call, nodes.Filter)))

    macros = {macro.name for macro in tree.find_all(nodes.Macro)}
    repeated = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
    in_loops = {id(call) for each in repeated for call in each.find_all(nodes.Call)}
    if not all(
        is_constant(node)
        for node in tree.find_all((nodes.List, nodes.Tuple, nodes.Dict, nodes.Mul, nodes.Pow))
        if getattr(node, "ctx", "load") == "load"
    ):
        return False
    for name in tree.find_all(nodes.Name):
        if name.name in ("varargs", "kwargs", "caller"):
            return False
    for filtered in tree.find_all(nodes.Filter):
        if filtered.name not in _PLAIN_FILTERS or (filtered.name == "map" and filtered.args):
            return False
    for call in tree.find_all(nodes.Call):
        if call.dyn_args is not None or call.dyn_kwargs is not None:
            return False
        if isinstance(call.node, nodes.Getattr):
            if call.node.attr not in _PLAIN_METHODS:
                return False
        elif not isinstance(call.node, nodes.Name):
            return False
        elif call.node.name == "namespace":
            if id(call) in in_loops and not all(map(is_constant, call.kwargs)):
                return False
        elif call.node.name not in _PLAIN_FUNCTIONS | macros:
            return False
    return not any(tree.find_all((nodes.FilterBlock, nodes.CallBlock)))


def _expanded(value: Any) -> int:
    """Characters and items of a value with all that it holds, up to somewhat above the limit."""
    size, waiting = 0, [value]
    while waiting and size <= MOST_CHARACTERS:
        each = waiting.pop()
        size += 1 + (len(each) if isinstance(each, str) else 0)
        if isinstance(each, Mapping):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple):
            waiting += each
    return size


def _listed(value: Any) -> Any:
    """A list of what ``map`` or ``select`` makes; any other value as it is."""
    if isinstance(value, Iterator):
        value = list(itertools.islice(value, MOST_ITEMS + 1))
        _bounded_list(len(value))
    return value


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _flat(value: Any) -> list[Any]:
    """All values nested in a value, at any depth; of a mapping its values."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [inner for each in value[:1000] for inner in _flat(each)]
    return [value]


def _check_result(name: str, value: Any, arguments: tuple[Any, ...]) -> None:
    """Refuses results of methods and filters longer than a conversation may be."""
    numbers = [abs(a) for a in _flat(arguments) if isinstance(a, int)]
    if name in ("batch", "slice"):
        _bounded_list(max(numbers, default=0))
    if name == "list":
        _bounded_list(_size(value))
    if name in ("split", "rsplit", "splitlines") or name in LETTERWISE:
        if _size(value) > MOST_WORKED:
            raise _Beyond(f"{name} of a text of {_size(value)} characters; at most {MOST_WORKED}")
        _bounded(_size(value))
    if name == "sum" and any(not isinstance(a, int | float | str) for a in arguments):
        raise _Beyond("sum of values that are not numbers")
    if name == "translate":
        _bounded(_size(value) * max(map(_size, _flat(arguments)), default=0))
    text = [len(a) for a in arguments if isinstance(a, str)]
    if name == "round" and max(numbers, default=0) > MOST_PLACES:
        raise _Beyond(f"round to {max(numbers)} places; at most {MOST_PLACES}")
    if name in COMPARING and _size(value) * max(text, default=0) > MOST_COMPARED:
        raise _Beyond(f"{name} of {_size(value)} characters with a text of {max(text)}")
    if name == "join" and isinstance(value, Collection):  # a text, too: of its letters
        items = len(value) if isinstance(value, str) else sum(map(_size, value))
        _bounded(items + len(value) * sum(text))
    if not isinstance(value, str):
        return
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap"):
        width = max([*numbers, *text], default=0)
        _bounded(width * (1 + value.count("\n") + value.count("\t")))
    if name == "replace" and text:
        _bounded(len(value) + (value.count(arguments[0]) if text[0] else len(value)) * text[-1])
    if name in ("format", "%"):
        _bounded(max((int(n) for n in _digits(value)), default=0) + max(numbers, default=0))


LETTERWISE = (
    *("e", "escape", "forceescape", "sort", "striptags", "title", "unique", "urlencode"),
    *("urlize", "wordcount", "xmlattr"),
)
"""Filters that take long on long texts and lists."""


COMPARING = ("trim", "strip", "lstrip", "rstrip", "rfind", "rsplit")
"""Filters and methods that may compare each letter of a text with each of another."""
MOST_COMPARED = 10**9
"""Pairs of letters that one of them compares at most, a second's work."""


def _digits(text: str) -> list[str]:
    return "".join(c if c.isdigit() and c.isascii() else " " for c in text[:100_000]).split()


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    """A chat template, ready to be rendered."""
    environment = _environment()
    compiled = environment.from_string(template)
    compiled.root_render_func.__globals__["str_join"] = environment.concat
    return compiled


@functools.cache
def _warn_of_clock() -> None:
    logging.getLogger("jrl").warning(
        "the chat template reads the clock (strftime_now): the same conversation is another text on"
        " another day; most such templates take a variable in its place, such as date_string"
    )


@functools.cache
def _environment() -> jinja2.Environment:
    """The environment that chat templates are written for."""
    import jinja2
    import jinja2.ext
    import jinja2.runtime
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """Writes the body of ``{% generation %}`` blocks, which mark the assistant's words."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's own attribute

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    class Bounded(jinja2.sandbox.ImmutableSandboxedEnvironment):
        """Jinja's sandbox with bounds on the results of operators, methods and filters."""

        intercepted_binops = frozenset({"+", "*", "**", "%"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_operator(operator, left, right)
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, method: Any, /, *args: Any, **kwargs: Any) -> Any:
            args = _checked_arguments(method, args, kwargs)
            return super().call(context, method, *args, **kwargs)

        @staticmethod
        def concat(parts: Any) -> str:  # what a macro or a block has written, and a ~ b
            texts = [str(part) for part in parts]
            _bounded(sum(map(len, texts)))
            return "".join(texts)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def refuse_random(value: Any) -> None:
        raise jinja2.TemplateError(
            "it uses random numbers; a conversation must be the same text in every run"
        )

    environment = Bounded(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    padding = ("batch", "center", "indent", "replace", "format", "join", "slice", "wordwrap")
    for name in (*padding, *LETTERWISE, "list", "round", "sum", "trim"):
        environment.filters[name] = _checked_filter(name, environment.filters[name])
    environment.filters["tojson"] = _tojson
    environment.filters["random"] = refuse_random
    del environment.globals["lipsum"]  # writes as much as it is asked to, for as long
    environment.globals.update(raise_exception=raise_exception, strftime_now=_strftime_now)
    return environment


def _check_operator(operator: str, left: Any, right: Any) -> None:
    """Refuses an operator whose result would be longer than a conversation may be."""
    bound = _bounded_list if isinstance(left, list) or isinstance(right, list) else _bounded
    if operator == "+":
        bound(_size(left) + _size(right))
        if bound is _bounded_list:  # what is written of it, at some time
            _bounded(_expanded(left) + _expanded(right))
    elif operator == "*" and (_size(left) or _size(right)):
        number, other = (left, right) if isinstance(left, int) else (right, left)
        bound(_size(other) * (number if isinstance(number, int) else 1))
    elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        factor = right if operator == "**" else 1
        _bounded(left.bit_length() * max(factor, 1) + right.bit_length())
    elif operator == "%" and isinstance(left, str):
        _check_result("%", left, right if isinstance(right, tuple) else (right,))


def _checked_arguments(
    method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The arguments of a call, of which those of a text's methods are checked."""
    method_of = getattr(method, "__wrapped__", method)  # the sandbox wraps ``format``
    owner = getattr(method_of, "__self__", None)
    if isinstance(owner, str):
        name = getattr(method_of, "__name__", "")
        if name == "join" and args:
            args = (_listed(args[0]), *args[1:])
            _check_result("join", args[0], (owner,))
        _check_result(name, owner, (*args, *kwargs.values()))
    return args


def _strftime_now(form: str) -> str:
    _warn_of_clock()
    return datetime.datetime.now().strftime(form)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    if isinstance(indent := options.get("indent"), int) and indent > MOST_INDENT:
        raise _Beyond(f"tojson(indent={indent}); an indent of at most {MOST_INDENT} is read")
    return json.dumps(_listed(value), ensure_ascii=ensure_ascii, **options)


def _checked_filter(name: str, usual: Any) -> Any:
    """A filter that first looks at how long its result would be."""

    @functools.wraps(usual)  # with the marks that say what Jinja passes first
    def checked(*args: Any, **kwargs: Any) -> Any:
        values = args[1:] if getattr(usual, "jinja_pass_arg", None) else args
        if values and name == "join":
            items = _listed(values[0])
            at = len(args) - len(values)
            args, values = (*args[:at], items, *args[at + 1 :]), (items, *values[1:])
        if values:
            _check_result(name, values[0], (*values[1:], *kwargs.values()))
        return usual(*args, **kwargs)

    return checked
