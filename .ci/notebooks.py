"""Executes the notebooks and keeps their outputs in them: make notebooks [ARGS="3 5"].

What differs from machine to machine and says nothing to a reader is left out: times of cells, and
lines on standard error.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pathlib
import re
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
KERNEL = {
    "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
    "display_name": "Python 3",
    "language": "python",
}


def main(numbers: list[str]) -> None:
    """Executes the notebooks of these numbers, or all."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        if not numbers or path.name.partition("_")[0] in numbers:
            print(path.relative_to(ROOT), flush=True)
            execute(path)


def execute(path: pathlib.Path) -> None:
    """Runs all cells in a fresh kernel and writes the notebook back."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        spec = pathlib.Path(folder) / "kernels" / "python3" / "kernel.json"
        spec.parent.mkdir(parents=True)
        spec.write_text(json.dumps(KERNEL), encoding="utf-8")
        os.environ |= {
            "JUPYTER_PATH": folder,
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        }
        nbclient.NotebookClient(
            notebook, kernel_name="python3", timeout=900, resources={"metadata": {"path": folder}}
        ).execute()
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [stable(output) for output in cell.outputs if is_kept(output)]
    # Executing adds the kernel's version and the like.
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, path)


def is_kept(output: dict) -> bool:
    """Whether an output is for a reader."""
    if output["output_type"] == "display_data":
        return "image/png" in output["data"]
    return output.get("name") == "stdout"


def stable(output: dict) -> dict:
    """The output without a picture's description in words, and without addresses in memory."""
    if output["output_type"] == "display_data":
        output["metadata"] = {}
        output["data"] = {"image/png": smaller(output["data"]["image/png"])}
    else:
        output["text"] = re.sub(r" at 0x[0-9a-f]+", "", output["text"])
    return output


def smaller(picture: str) -> str:
    """A PNG in base64, in 64 colours: plots lose nothing that is seen, and take a third."""
    from PIL import Image

    with Image.open(io.BytesIO(base64.b64decode(picture))) as image:
        paper = Image.new("RGBA", image.size, "white")
        paper.alpha_composite(image.convert("RGBA"))
        buffer = io.BytesIO()
        paper.convert("RGB").quantize(64).save(buffer, "png", optimize=True)
    shorter = base64.b64encode(buffer.getvalue()).decode()
    return min(picture, shorter, key=len)


if __name__ == "__main__":
    main(sys.argv[1:])
