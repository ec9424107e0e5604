"""Notebooks as pages, with the outputs that are kept in them."""

from __future__ import annotations

import pathlib


def write_notebook(source: pathlib.Path, target: pathlib.Path) -> None:
    """Writes a notebook as Markdown, and its pictures beside it."""
    from nbconvert import MarkdownExporter

    folder = f"{target.stem}_files"
    text, resources = MarkdownExporter().from_filename(
        str(source), resources={"output_files_dir": folder, "unique_key": target.stem}
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    for name, data in resources["outputs"].items():
        picture = target.parent / name
        picture.parent.mkdir(exist_ok=True)
        picture.write_bytes(data)
