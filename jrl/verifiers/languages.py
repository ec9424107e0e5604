"""Languages of programs beside Python, and what compiles and starts them. Imports no JAX."""

from __future__ import annotations

import re
import shutil
from typing import NamedTuple

from jrl.errors import UserError, unknown_choice

_GIB = 1 << 30


class Language(NamedTuple):
    """Commands that run programs of a language.

    Attributes:
      file: the name of the source.
      tools: programs that must be there, the one that compiles or runs first.
      compile: commands, each a list of words; a tool's name stands for its path.
      command: that starts the program.
      hello: a program that prints 42.
      address_bytes: that a process reserves, beside the memory that it uses.
    """

    file: str
    tools: tuple[str, ...]
    compile: tuple[tuple[str, ...], ...]
    command: tuple[str, ...]
    hello: str
    address_bytes: int = 4 * _GIB


LANGUAGES = {
    "c": Language(
        "main.c",
        ("gcc",),
        (("gcc", "-O2", "-std=gnu17", "-o", "main", "main.c", "-lm"),),
        ("./main",),
        '#include <stdio.h>\nint main(void) { printf("42\\n"); return 0; }\n',
    ),
    "c++": Language(
        "main.cpp",
        ("g++",),
        (("g++", "-O2", "-std=gnu++17", "-o", "main", "main.cpp"),),
        ("./main",),
        "#include <iostream>\nint main() { std::cout << 42 << std::endl; }\n",
    ),
    "rust": Language(
        "main.rs",
        ("rustc",),
        (("rustc", "-O", "--edition", "2021", "-o", "main", "main.rs"),),
        ("./main",),
        'fn main() { println!("42"); }\n',
    ),
    "go": Language(
        "main.go",
        ("go",),
        (("go", "build", "-o", "main", "main.go"),),
        ("./main",),
        'package main\n\nimport "fmt"\n\nfunc main() { fmt.Println(42) }\n',
        64 * _GIB,
    ),
    "java": Language(
        "Main.java",
        ("javac", "java"),
        (("javac", "-J-Xmx256m", "-J-XX:+UseSerialGC", "Main.java"),),
        ("java", "-Xmx256m", "-Xss64m", "-XX:+UseSerialGC", "-cp", ".", "Main"),
        "public class Main { public static void main(String[] a) { System.out.println(42); } }\n",
        64 * _GIB,
    ),
    "javascript": Language(
        "main.js", ("node",), (), ("node", "main.js"), "console.log(42);\n", 64 * _GIB
    ),
}
"""Beside "python"."""
_OTHER_NAMES = {
    "cpp": "c++",
    "cxx": "c++",
    "golang": "go",
    "js": "javascript",
    "node": "javascript",
    "nodejs": "javascript",
    "py": "python",
    "python3": "python",
    "pypy3": "python",
    "rs": "rust",
}


def language_named(name: str) -> str:
    """The name of a language among ``LANGUAGES`` and "python", from one of its names.

    Raises:
      UserError: there is no such language.
    """
    plain = _OTHER_NAMES.get(name.strip().lower(), name.strip().lower())
    if plain != "python" and plain not in LANGUAGES:
        raise unknown_choice("rewards.code.language", name, ("python", *LANGUAGES))
    return plain


def commands_of(language: str) -> tuple[list[list[str]], list[str]]:
    """The commands that compile and that start, with the tools' paths.

    Raises:
      UserError: a tool is not on this machine.
    """
    how = LANGUAGES[language]
    paths = {tool: shutil.which(tool) for tool in how.tools}
    for tool, path in paths.items():
        if path is None:
            raise UserError(
                f"rewards.code: programs in {language} need {tool}, which is not on this machine;"
                " install it, or leave those rows out"
            )

    def full(words: tuple[str, ...]) -> list[str]:
        return [str(paths.get(words[0]) or words[0]), *words[1:]]

    return [full(words) for words in how.compile], full(how.command)


def source_of(language: str, program: str) -> str:
    """The source as its file must have it: the public class of Java is Main."""
    public = re.search(r"\bpublic\s+(?:final\s+)?class\s+(\w+)", program)
    if language == "java" and public and public[1] != "Main":
        return re.sub(rf"\b{public[1]}\b", "Main", program)
    return program
