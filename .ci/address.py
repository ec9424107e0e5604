"""Writes the repository's address where it stands: make address URL=..."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


def main(address: str) -> None:
    """Replaces the address wherever it stands."""
    if not re.fullmatch(r"(https|ssh|git)://[^\s\"]+|git@[^\s\"]+:[^\s\"]+", address):
        print(f"{address!r} is no address; give one such as https://HOST/ORG/NAME", file=sys.stderr)
        raise SystemExit(2)
    replace(ROOT / "pyproject.toml", r'^(Repository = )"[^"]*"', rf'\1"{address}"')
    replace(ROOT / "README.md", r"^(    git clone )\S+( jrl)$", rf"\g<1>{address}\g<2>")
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        replace(path, r'(REPO = \\")[^"\\]*(\\")', rf"\g<1>{address}\g<2>")


def replace(path: pathlib.Path, pattern: str, new: str) -> None:
    """Replaces the one place of a file that matches."""
    text, count = re.subn(pattern, new, path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if count != 1:
        raise SystemExit(f"{path}: expected one place for the address, found {count}")
    path.write_text(text, encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) == 2 else "")
