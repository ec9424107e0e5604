"""Proofs in Lean 4 by a REPL: the reward ``lean``. Imports no JAX."""

from __future__ import annotations

import atexit
import json
import os
import re
import select
import shlex
import shutil
import subprocess
import time
from typing import Any

from jrl.errors import UserError
from jrl.rewards.base import Sample
from jrl.system.json_text import json_or_none
from jrl.verifiers.code import last_block

_LONGEST_REPLY = 1 << 22
_STATEMENTS = ("formal_statement", "statement", "theorem", "answer")
_AXIOMS = frozenset(("propext", "Classical.choice", "Quot.sound"))
_REFUSED = re.compile(
    r"#|\b(sorry|sorryAx|admit|axiom|constant|opaque|unsafe|extern|implemented_by|native_decide|"
    r"import|include|omit|variable|variables|universe|namespace|section|end|open|export|local|"
    r"scoped|attribute|instance|def|abbrev|structure|class|inductive|mutual|notation|infix|infixl|"
    r"infixr|prefix|postfix|macro|macro_rules|syntax|elab|elab_rules|declare_syntax_cat|"
    r"initialize|builtin_initialize|run_cmd|run_tac|run_elab|run_meta|by_elab|eval|set_option|"
    r"debug|private|protected|noncomputable|partial|IO|System|Process|unsafeIO|unsafeBaseIO|"
    r"(?:builtin_)?d?simproc(?:_decl)?|irreducible_def|register_\w+|declare_\w+|alias|deriving|"
    r"Lean|Elab|Meta|Qq)\b"
)
"""Words that let a text do more than prove: run programs, add axioms, change what a statement says.
Conservative: a proof that uses one is not accepted."""
_NAME = re.compile(r"\b(?:theorem|lemma)\s+([^\s:({\[]+)")
_END = re.compile(r":=\s*(by\s*)?(sorry\s*)?$")


def lean(
    samples: list[Sample],
    repl: str = "repl",
    project: str = "",
    header: str = "",
    column: str = "",
    seconds: float = 60.0,
) -> list[float]:
    """1 where a completion proves the row's theorem, by Lean 4's REPL, else 0.

    The last fenced block, or all of a completion, must state the row's theorem word for word, with
    theorems and lemmas alone before it. It is sent to a process that speaks the protocol of
    leanprover-community/repl ({"cmd": ..., "env": ...} and a blank line). It is a proof when there
    are no errors and no sorry, and when #print axioms names none but Lean's usual three. Texts with
    words that could run programs or change the statement are refused before, see docs/safety.md.

    Args:
      samples: what to judge.
      repl: the command that starts the REPL, such as "lake env /opt/repl/.lake/build/bin/repl".
      project: the directory to start it in, of a Lean project; "" for the present one.
      header: commands that come first, once for each process, such as "import Mathlib".
      column: of the statement; "" for ``formal_statement``, ``statement``, ``theorem`` or the
        answer.
      seconds: of one proof, and of the header; below ``reward_pool.timeout_seconds``.

    Raises:
      UserError: there is no such REPL, or its header fails; or a row states no theorem.
    """
    words = shlex.split(repl)
    if not words or shutil.which(words[0], path=_path(project)) is None:
        raise UserError(
            f"rewards.lean.repl = {repl!r}: there is no such program; build"
            " github.com/leanprover-community/repl with lake, and give the command that starts it"
        )
    if not seconds > 0:
        raise UserError(f"rewards.lean.seconds = {seconds} must be above 0")
    points = []
    for sample in samples:
        statement, name = _statement(sample, column)
        text = without_comments(last_block(sample.completion))
        if not states(text, statement):
            points.append(0.0)
            continue
        process = _repl_of(tuple(words), project, header, seconds)
        reply = process.ask(f"{text}\n\n#print axioms {name}", seconds)
        points.append(float(reply is not None and is_proof(reply, name)))
    return points


def _path(project: str) -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), project or os.curdir])


def _statement(sample: Sample, column: str) -> tuple[str, str]:
    """The row's theorem up to its proof, and the theorem's name."""
    columns = {**sample.prompt.meta, "answer": sample.prompt.answer}
    names = [column] if column else list(_STATEMENTS)
    value = next((columns[name] for name in names if columns.get(name)), "")
    text = without_comments(str(value)).strip()
    named = list(_NAME.finditer(text))
    if not named:
        raise UserError(
            f"rewards.lean: row {sample.prompt.id + 1} states no theorem in {', '.join(names)};"
            " give text such as 'theorem t (n : Nat) : n = n := by sorry'"
        )
    return _END.sub("", text[named[-1].start() :]).strip(), named[-1][1]


def without_comments(text: str) -> str:
    """Lean source without comments, which nest.

    >>> without_comments("a /- b /- c -/ d -/ e -- f")
    'a  e '
    """
    outside, depth, i = [], 0, 0
    while i < len(text):
        pair = text[i : i + 2]
        if pair == "/-":
            depth, i = depth + 1, i + 2
        elif pair == "-/" and depth:
            depth, i = depth - 1, i + 2
        elif pair == "--" and not depth:
            end = text.find("\n", i)
            i = len(text) if end < 0 else end
        else:
            outside += [text[i]] if not depth else []
            i += 1
    return "".join(outside)


def states(text: str, statement: str) -> bool:
    """Whether a text without comments states a theorem and does nothing but prove.

    Spaces do not count. Texts in quotes are refused, as is every word of ``_REFUSED``.

    >>> states("theorem t : 1 = 1 := rfl", "theorem t :  1 = 1")
    True
    >>> states("axiom a : False theorem t : 1 = 2 := a.elim", "theorem t : 1 = 2")
    False
    """
    before, stated, after = " ".join(text.split()).partition(" ".join(statement.split()))
    # what the statement itself says is the row's
    refused = _REFUSED.search(before) or _REFUSED.search(after) or '"' in before + after
    starts = not before.strip() or before.lstrip().startswith(("theorem ", "lemma "))
    return bool(stated) and not refused and starts and after.lstrip().startswith((":=", "|"))


def is_proof(reply: dict[str, Any], name: str) -> bool:
    """Whether a reply of the REPL has no errors, no sorry, and no axioms but the usual.

    Args:
      reply: to the proof, followed by #print axioms.
      name: of the theorem.
    """
    messages = reply.get("messages") or []
    if reply.get("sorries") or "env" not in reply:
        return False
    if any(message.get("severity") == "error" for message in messages):
        return False
    texts = [str(message.get("data", "")) for message in messages]
    if any("declaration uses" in text and "sorry" in text for text in texts):
        return False
    about = [text for text in texts if f"'{name}'" in text and "axioms" in text]
    if not about:
        return False
    used = re.findall(r"\[(.*?)\]", about[-1], re.DOTALL)
    axioms = {part.strip() for part in used[-1].split(",")} if used else set()
    return axioms <= _AXIOMS and (bool(used) or "does not depend on any axioms" in about[-1])


# ---------------------------------------------------------------- the process


class _Repl:
    """A running REPL, whose header has been read."""

    def __init__(self, command: tuple[str, ...], project: str, header: str, seconds: float) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=project or None,
        )
        self._env: int | None = None
        if header.strip():
            reply = self.ask(header, seconds)
            bad = [m for m in (reply or {}).get("messages", []) if m.get("severity") == "error"]
            if reply is None or bad or "env" not in reply:
                self.close()
                why = bad[0].get("data", "") if bad else reply or f"no reply in {seconds:g} s"
                raise UserError(f"rewards.lean.header = {header[:80]!r} fails: {str(why)[:300]}")
            self._env = reply["env"]

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def ask(self, command: str, seconds: float) -> dict[str, Any] | None:
        """The reply to commands; None where there is none in time, and then it is ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        message: dict[str, Any] = {"cmd": command}
        if self._env is not None:
            message["env"] = self._env
        end, data = time.monotonic() + seconds, b""
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n\n")
            self._process.stdin.flush()
            place = self._process.stdout.fileno()
            while (left := end - time.monotonic()) > 0 and len(data) < _LONGEST_REPLY:
                if not select.select([place], [], [], left)[0]:
                    break
                chunk = os.read(place, 1 << 16)
                data += chunk
                if not chunk:
                    break
                if data.rstrip().endswith(b"}") and (reply := _object(data)) is not None:
                    return reply
        except OSError:
            pass
        self.close()
        return None

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.communicate()


def _object(data: bytes) -> dict[str, Any] | None:
    value = json_or_none(data)
    return value if isinstance(value, dict) else None


_running: dict[tuple[Any, ...], _Repl] = {}
"""One for each command in this process; importing Mathlib takes many seconds."""


def _repl_of(command: tuple[str, ...], project: str, header: str, seconds: float) -> _Repl:
    key = (command, project, header)
    if key not in _running or not _running[key].alive:
        _running[key] = _Repl(command, project, header, seconds)
    return _running[key]


@atexit.register
def _close_all() -> None:
    for process in _running.values():
        if process.alive:
            process.close()
