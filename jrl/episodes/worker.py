"""The process of one environment: the program that ``process.process_env`` starts.

It imports only the standard library, because it runs by its path in the Python that has the
environment's own dependencies. It reads requests and writes answers as JSON, each after its length
in eight bytes.
"""

import asyncio
import ctypes
import functools
import importlib
import importlib.util
import inspect
import json
import os
import signal
import sys
import types
from collections.abc import Mapping
from typing import Any

_DIES_WITH_PARENT = 1


def load(spec: str) -> Any:
    """The function that ``FILE.py:function`` or ``module:function`` names."""
    place, _, name = spec.rpartition(":")
    if place.endswith(".py"):
        # Behind all else, so that a file beside it hides no module.
        sys.path.append(os.path.dirname(os.path.abspath(place)))
        spec_of_file = importlib.util.spec_from_file_location("jrl_environment", place)
        assert spec_of_file is not None
        assert spec_of_file.loader is not None
        module = importlib.util.module_from_spec(spec_of_file)
        sys.modules["jrl_environment"] = module
        spec_of_file.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    return getattr(module, name)


def words(error: BaseException) -> str:
    """An error in one line; one whose text cannot be made is named by its type."""
    try:
        return f"{type(error).__name__}: {error}"[:300]
    except BaseException:
        return str(type.__dict__["__name__"].__get__(type(error)))  # whatever a metaclass says


def fields(value: Any) -> Any:
    """A feedback as a dict: a dict already, a NamedTuple, or an object with attributes."""
    if isinstance(value, dict):
        return value
    if hasattr(value, "_asdict"):
        return value._asdict()
    return vars(value) if hasattr(value, "__dict__") else value


def plain(value: Any) -> Any:
    """A value that JSON does not know, as one that it does: mappings, numbers and sequences."""
    if isinstance(value, Mapping):
        return dict(value)
    for convert in ("tolist", "item"):  # of an array, of any other number
        if hasattr(value, convert):
            return getattr(value, convert)()
    return list(value) if isinstance(value, (set, frozenset, range)) else repr(value)


def made_env(make: Any, options: dict) -> Any:
    """The environment of a function, or of an episode: only the latter needs JRL installed here."""
    # Of an object, such as one that holds a tokenizer, the method __call__ is the episode.
    if inspect.iscoroutinefunction(make) or inspect.iscoroutinefunction(type(make).__call__):
        from jrl.episodes.coroutine import coroutine_env

        roles = getattr(make, "roles", ())
        return coroutine_env(functools.partial(make, **options), roles=roles)
    if isinstance(options.get("limits"), dict):  # a record, which JSON has as a table
        default = inspect.signature(make).parameters["limits"].default
        options = {**options, "limits": default._replace(**options["limits"])}
    return make(**options)


class Session:
    """The environment, and the state of its one episode."""

    def __init__(self, spec: str, options: dict) -> None:
        self.env = made_env(load(spec), options)
        self.state: Any = None
        self._loop = asyncio.new_event_loop()  # one for all calls: what init opens, step may use

    def call(self, name: str, *arguments: object) -> Any:
        """The result of a function of the environment, also of an async one."""
        value = getattr(self.env, name)(*arguments)
        if inspect.isawaitable(value):

            async def wait() -> Any:
                return await value

            return self._loop.run_until_complete(wait())
        return value

    def answer(self, request: dict) -> Any:
        """The answer to a request."""
        if request["do"] == "init":
            prompt = types.SimpleNamespace(**request["prompt"])
            self.state, opening = self.call("init", prompt, request["seed"])
            return opening if isinstance(opening, list) else fields(opening)
        if request["do"] == "step":
            reply = types.SimpleNamespace(**request["reply"])
            self.state, feedback = self.call("step", self.state, reply)
            return fields(feedback)
        state, self.state = self.state, None
        if getattr(self.env, "close", None) is not None:
            self.call("close", state)
        return None


def end_child(parent: int) -> None:
    """Ends the process if it is a child that the environment forked and that came back.

    Were it to go on, it would read the parent's requests, and answer each a second time.
    """
    if os.getpid() != parent:
        os._exit(1)


def main() -> None:
    """Answers requests until standard input ends."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_DIES_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    # Python puts this file's directory first; an environment that imports gymnasium must not find
    # the file of that name beside this one.
    directory = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != directory]
    # What the environment prints must not stand among the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = sys.stdin.buffer
    # Not arguments of the command, which every user may read and which may hold keys.
    settings = json.loads(requests.read(int.from_bytes(requests.read(8), "big")))
    session, failure, own = None, "", os.getpid()
    try:
        session = Session(settings["env"], settings["options"])
    except BaseException as error:
        failure = words(error)
    finally:
        end_child(own)
    while len(head := requests.read(8)) == 8:
        request = json.loads(requests.read(int.from_bytes(head, "big")))
        out: dict[str, Any] = {"error": failure}
        if session is not None:
            try:
                out = {"value": session.answer(request)}
            except BaseException as error:  # SystemExit too: the next episode is played
                out = {"error": words(error)}
            finally:
                end_child(own)
        number = {"call": request.get("call")}
        try:
            body = json.dumps({**out, **number}, default=plain).encode()
        except (ValueError, TypeError, RecursionError, MemoryError) as error:
            reason = f"its answer is no JSON: {error}"[:300]
            body = json.dumps({"error": reason, **number}).encode()
        answers.write(len(body).to_bytes(8, "big") + body)
        answers.flush()


if __name__ == "__main__":
    main()
