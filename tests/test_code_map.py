"""The map of the code names files and definitions that exist."""

import ast
import functools
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "code.md").read_text()
PAIR = re.compile(r"`(jrl/[\w/]+\.py)`:\s+((?:`[\w.]+`(?:,\s+)?)+)")


@functools.cache
def defined(path):
    """Names at the top of a file, and Class.name of the methods of its classes."""
    names = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
            inside = node.body if isinstance(node, ast.ClassDef) else ()
            names |= {f"{node.name}.{n.name}" for n in inside if isinstance(n, ast.FunctionDef)}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def test_every_file_and_name_of_the_map_exists():
    pairs = [(path, name) for path, ns in PAIR.findall(PAGE) for name in re.findall(r"[\w.]+", ns)]
    assert [(path, name) for path, name in pairs if name not in defined(path)] == []
    # A path without a name would escape the check.
    assert len(PAIR.findall(PAGE)) == PAGE.count("`jrl/") - PAGE.count("`jrl/`")
    assert len(pairs) > 40
