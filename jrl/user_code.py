"""User code: functions named in a configuration as FILE.py:function or module:function.

Values that a Python program passes (rows, a reward function) are named too, as python:NAME, and
found while that program is inside ``given``.

Free of JAX, because the processes that run rewards import it.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, cast

from jrl.errors import UserError, class_name, error_text, nearest
from jrl.system.json_text import parse_json
from jrl.system.moved_modules import moved_to
from jrl.system.time_limit import time_limit

FORMS = "FILE.py:function or module:function"

IMPORT_SECONDS = 120.0
"""Time for a file or module to be imported."""

PYTHON_PREFIX = "python:"
"""Prefix of the name of a value passed in Python."""

_python_values: ContextVar[Mapping[str, Any]] = ContextVar(
    "python_values", default=MappingProxyType({})
)


@contextlib.contextmanager
def python_values(values: Mapping[str, Any]) -> Iterator[None]:
    """Inside, ``python:NAME`` in a configuration means ``values["NAME"]``.

    >>> with python_values({"double": lambda x: 2 * x}):
    ...     load("python:double", "rewards")(3)
    6
    """
    token = _python_values.set({**_python_values.get(), **values})
    try:
        yield
    finally:
        _python_values.reset(token)


def keep_rows(directory: Path, values: Mapping[str, Any]) -> None:
    """Writes those values that are rows into a directory, for ``remember``."""
    rows = {name: value for name, value in values.items() if isinstance(value, list)}
    if rows:
        directory.mkdir(exist_ok=True)
    for name, items in rows.items():
        lines = [json.dumps(row, ensure_ascii=False, default=str) for row in items]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def remember(directory: Path) -> None:
    """Makes the rows written by ``keep_rows`` available as passed values.

    Raises:
      UserError: a file of them is damaged; names its line.
    """
    rows = {path.stem: _read_rows(path) for path in sorted(directory.glob("*.jsonl"))}
    _python_values.set({**_python_values.get(), **rows})


def _read_rows(path: Path) -> list[Any]:
    remedy = "restore the file, or pass the rows again in Python"
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}; {remedy}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = parse_json(line, where)
        except UserError as error:
            raise UserError(f"{error}; {remedy}") from None
        if not isinstance(row, dict):
            raise UserError(f"{where}: holds {row!r:.40} and no row; {remedy}")
        rows.append(row)
    return rows


def python_value(spec: str, key: str) -> Any:
    """The value that ``python:NAME`` names.

    Raises:
      UserError: outside of the program that passed it, such as in ``jrl eval`` on its run.
    """
    name = spec.removeprefix(PYTHON_PREFIX)
    if name not in _python_values.get():
        raise UserError(
            f"{key} = {spec!r} was passed to the run in Python and is not known here; name a file"
            " that holds it"
        )
    return _python_values.get()[name]


def load(spec: str, key: str) -> Callable[..., Any]:
    """The function that a configuration names.

    Args:
      spec: ``FILE.py:function``, the file relative to the working directory, or
        ``module:function``. A file or module is imported once in a process. Or ``python:NAME``.
      key: the configuration key that names it, for messages.

    Returns:
      The function, or another object that can be called.

    Raises:
      UserError: one line with the key, the value and what would do: there is no such file or
        module, it cannot be imported (with the line), or it has no such function (with the nearest
        name).

    >>> load("math:gcd", "rewards")(6, 4)
    2
    """
    if spec.startswith(PYTHON_PREFIX):
        return python_value(spec, key)
    place, _, name = spec.rpartition(":")
    setting = f"{key} = {spec!r}"
    if not place or not name:
        raise UserError(f"{setting}; write {FORMS}")
    is_file = place.endswith(".py")
    limit = time_limit(IMPORT_SECONDS, _TooLongError, again=1.0)
    try:
        with limit, _no_wide_numbers(setting, place):
            module = _of_file(_existing(Path(place), setting)) if is_file else _of_name(place)
    except UserError:
        raise
    except _TooLongError:
        raise SlowImport(
            f"{setting}: importing {place} took longer than {IMPORT_SECONDS:.0f} s; wait, download "
            "and load models inside the function, or in its attribute prepare"
        ) from None
    except ModuleNotFoundError as error:
        if not is_file and f"{place}.".startswith(f"{error.name}."):
            new_name = moved_to(place)
            hint = (
                f"name {new_name}" if new_name else "name an installed module, or FILE.py:function"
            )
            raise UserError(f"{setting}: there is no module {error.name!r}; {hint}") from None
        raise UserError(f"{setting}: {error_with_line(error, place)}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{setting}: {error_with_line(error, place)}") from error
    if not hasattr(module, name):
        names = [n for n, value in vars(module).items() if _is_own(value, module) and n[0] != "_"]
        raise UserError(f"{setting}: {place} has no function {name!r}; {nearest(name, names)}")
    function = getattr(module, name)
    if not callable(function):
        raise UserError(f"{setting}: {name} in {place} is {function!r:.40}, not a function")
    return function


def parameters_of(function: Callable[..., Any], setting: str) -> Mapping[str, inspect.Parameter]:
    """The parameters of a user function, by name.

    Args:
      function: it.
      setting: the key that names it, for the message.

    Raises:
      UserError: Python does not know them, as of ``max`` and other functions written in C.
    """
    try:
        return inspect.signature(function).parameters
    except (ValueError, TypeError):
        name = getattr(function, "__name__", "the function")
        raise UserError(
            f"{setting}: the arguments of {name} cannot be read, as it is not written in Python;"
            " call it from a function of your own"
        ) from None


def check_options(
    function: Callable[..., Any],
    options: Mapping[str, Any],
    table: str,
    *,
    first: int = 0,
    others: Iterable[str] = (),
    all_given: bool = True,
) -> None:
    """Raises a UserError for options that a function does not take, or needs and does not get.

    Args:
      function: to be called with the options as keyword arguments.
      options: by name.
      table: the table of the configuration that holds them, for messages.
      first: how many of its first arguments the caller gives by position.
      others: keys of the table that are not options, which may have been meant.
      all_given: whether nothing but the options is passed by name, so that none may be missing.
    """
    every = list(parameters_of(function, f"[{table}]").values())
    parameters = every[first:]
    named = {p.name: p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    names = [p.name for p in every[:first]] + list(named)
    signature = f"{getattr(function, '__name__', 'the function')}({', '.join(names)})"
    lines = []

    def removed(name: str) -> str:
        # A task of one's own on a shipped configuration meets the keys of the task that was there.
        return f"; where a configuration file sets it, data.{name}= removes it" * (table == "data")

    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        unknown = {name: value for name, value in options.items() if name not in named}
        accepted = [*named, *others]
        if len(unknown) > 2:  # most likely the options of another function
            choice = f"choose from {', '.join(accepted)}" if accepted else "it takes none"
            lines = [
                f"[{table}] has {', '.join(unknown)}, which {signature} does not take; {choice}"
            ]
        else:
            lines = [
                f"{table}.{name} = {value!r}: there is no such option; {nearest(name, accepted)}"
                + removed(name)
                for name, value in unknown.items()
            ]
    required = [name for name, p in named.items() if p.default is p.empty]
    absent = [f"{table}.{name}" for name in required if all_given and name not in options]
    if len(absent) == 1:
        lines.append(
            f"{absent[0]} is missing: {signature} needs it; set it, or give the argument a default"
        )
    elif absent:
        lines.append(
            f"{', '.join(absent)} are missing: {signature} needs them; set them, or give the"
            " arguments defaults"
        )
    if lines:
        raise UserError("\n".join(lines))


def check_takes(function: Callable[..., Any], names: Sequence[str], setting: str) -> None:
    """Raises a UserError unless a function takes arguments of these names.

    Args:
      function: of one's own.
      names: what the library passes to it, by name.
      setting: the key that names it with its value, for the message.
    """
    parameters = parameters_of(function, setting)
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    if not set(names) <= set(parameters):
        signature = f"{getattr(function, '__name__', 'the function')}({', '.join(parameters)})"
        raise UserError(f"{setting}: {signature} must take {' and '.join(names)}")


def check_function(
    function: Any, arguments: tuple[str, ...], key: str, optional: bool = False
) -> None:
    """Raises UserError unless a value can be called with these arguments by position.

    Args:
      function: the value.
      arguments: their names, for the message.
      key: that names the function, for the message.
      optional: whether None would do, for the message.
    """
    if not callable(function):
        none = " or None" if optional else ""
        raise UserError(
            f"{key} = {function!r:.40}; must be a function({', '.join(arguments)}){none}"
        )
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return  # written in C: its arguments are not known
    try:
        signature.bind(*arguments)
    except TypeError:
        name = getattr(function, "__name__", "it")
        raise UserError(
            f"{key}: {name}{_bare_signature(signature)} must take ({', '.join(arguments)})"
        ) from None


def _bare_signature(signature: inspect.Signature) -> str:
    """The arguments without annotations.

    >>> _bare_signature(inspect.signature(lambda state, *, key=1: None))
    '(state, *, key=1)'
    """
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def made_by(function: Callable[..., Any], setting: str, /, *args: Any, **options: Any) -> Any:
    """The result of a user function that makes a part of the run.

    Args:
      function: it.
      setting: the key and the value that name it, for messages.
      *args: its arguments.
      **options: more.

    Raises:
      UserError: it raised something, named with its line.
    """
    name = getattr(function, "__name__", "the function")
    try:
        with _no_wide_numbers(setting, name, "calling"):
            return function(*args, **options)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{setting}: {error_with_line(error, setting)}") from error


class SlowImport(UserError):
    """A user's file or module takes too long to import; a retry would take as long."""


class _TooLongError(BaseException):
    """An import takes too long; no Exception, which code of users may catch."""


def _is_own(value: object, module: ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def _existing(path: Path, setting: str) -> Path:
    full = path.expanduser().resolve()
    if full.is_file():
        return full
    close = difflib.get_close_matches(path.name, [p.name for p in full.parent.glob("*.py")], n=1)
    hint = (
        f"did you mean {path.parent / close[0]}?"
        if close
        else f"files are relative to {Path.cwd()}"
    )
    raise UserError(f"{setting}: there is no file {path}; {hint}")


@contextlib.contextmanager
def _no_wide_numbers(setting: str, place: str, doing: str = "importing") -> Iterator[None]:
    """Raises UserError where what runs inside switches JAX to 64 bits: a run's programs have 32."""
    before = _wide_numbers()
    yield
    if _wide_numbers() and not before:
        raise UserError(
            f"{setting}: {doing} {place} sets jax_enable_x64, and a run computes in 32 bits; "
            "remove it, and write jax.enable_x64(True) around what needs 64"
        )


def _wide_numbers() -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and bool(jax.config.jax_enable_x64)


_FILES: dict[Path, tuple[tuple[int, int], ModuleType]] = {}
"""Modules of files, each with the file's time and size as it was read."""


def forget_changed_files() -> None:
    """Lets files that were changed since they were read be read again.

    A run keeps what it began with; the next one of a notebook gets what was edited between them.
    """
    for path, (version, _) in list(_FILES.items()):
        if not path.is_file() or _version(path) != version:
            del _FILES[path]


def _version(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


def _of_file(path: Path) -> ModuleType:
    if path not in _FILES:
        version = _version(path)
        _FILES[path] = version, _read_file(path)
    return _FILES[path][1]


def _read_file(path: Path) -> ModuleType:
    folder = str(path.parent)
    if folder not in sys.path:  # last, so that modules beside the file replace no others
        sys.path.append(folder)
    try:
        return _of_file_alone(path)
    except ImportError as error:
        if "relative import" not in str(error):
            raise
        return _of_package(path)


def _of_package(path: Path) -> ModuleType:
    """A file of a package, which imports others of it by their places."""
    root = path.parent
    while (root / "__init__.py").is_file():
        root = root.parent
    if root == path.parent:
        raise ImportError(f"{path.name} imports relative to a package, and {root} is none")
    sys.path.insert(0, str(root))  # the package itself, not one of its name elsewhere
    try:
        module = importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))
    finally:
        sys.path.remove(str(root))
        sys.path.append(str(root))
    if module.__file__ is None or Path(module.__file__).resolve() != path:
        raise ImportError(f"another package of this name is installed: {module.__file__}")
    return module


def _of_file_alone(path: Path) -> ModuleType:
    # Under a name of its own, so that a file called as a module of the library replaces nothing.
    name = f"jrl_own_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _of_name(name: str) -> ModuleType:
    return importlib.import_module(name)


def error_with_line(error: BaseException, place: str) -> str:
    """The error of a user's code in one line, with the line of the file where there is one.

    Args:
      error: as it was caught.
      place: where it came from, if no line is known.
    """
    if issubclass(type(error), SyntaxError):  # isinstance reads __class__, which may raise
        wrong = cast("SyntaxError", error)
        line = f", line {wrong.lineno}" if wrong.lineno else ""
        return f"{wrong.filename or place}{line}: {wrong.msg}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    # The user's line, also where the library that it calls refuses what it was given.
    frames = [f for f in frames if not _is_installed(f.filename)] or frames
    where = f", line {frames[-1].lineno}" if frames[-1].filename != __file__ else ""
    first = error_text(error).strip().partition("\n")[0]
    if where and not first:  # assert, or raise ValueError: the line itself says the most
        first = frames[-1].line or ""
    return f"{frames[-1].filename if where else place}{where}: {class_name(error)}: {first}"


def _is_installed(filename: str) -> bool:
    """Whether a file is of this library or of another one."""
    return "site-packages" in filename or Path(filename).is_relative_to(Path(__file__).parent)
