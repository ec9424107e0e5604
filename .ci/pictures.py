"""Takes the pictures of the documentation from a run's report: make pictures RUN=runs/tiny-...

docs/report.png is the report's beginning at the width of a desk, docs/report-phone.png a group of
samples at the width of a phone, its tokens coloured by log-probability. Playwright takes them, with
its own Chromium (``python -m playwright install chromium``) or with the one that the environment
variable CHROME names, options behind it: CHROME="/opt/chromium --no-sandbox".
"""

from __future__ import annotations

import io
import os
import pathlib
import shlex
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
DESK, PHONE = (1280, 1540), (390, 1080)
"""Width and height, CSS pixels."""

SAMPLES = """() => {
  const colour = document.getElementById("colour"), step = document.getElementById("step");
  step.value = 0;
  colour.value = "logprobs";
  colour.dispatchEvent(new Event("input"));
  for (const part of document.querySelector("main").children) part.hidden = part.id !== "sampled";
}"""
"""Leaves the samples of the first step alone, coloured."""


def main(run: str) -> None:
    """Takes both pictures of a run."""
    from playwright.sync_api import sync_playwright

    report = pathlib.Path(run) / "report" / "index.html"
    if not report.is_file():
        raise SystemExit(f"{report}: no such file; name the directory of a finished run")
    program, *options = shlex.split(os.environ.get("CHROME", "")) or [None]
    pictures = (("report.png", DESK, ""), ("report-phone.png", PHONE, SAMPLES))
    for name, size, before in pictures:  # a browser each: some have one process for all pages
        with sync_playwright() as play:
            browser = play.chromium.launch(executable_path=program, args=options)
            shoot(browser, report, name, size, before)
            browser.close()


def shoot(
    browser: Any, report: pathlib.Path, name: str, size: tuple[int, int], before: str
) -> None:
    """Writes a picture of a page's first ``size`` pixels, in 256 colours."""
    from PIL import Image

    page = browser.new_page(viewport={"width": size[0], "height": size[1]})
    page.goto(report.resolve().as_uri())
    if before:
        page.evaluate(before)
    wide = page.evaluate("document.documentElement.scrollWidth")
    if wide > size[0]:
        raise SystemExit(f"{name}: the page is {wide} pixels wide, wider than its {size[0]}")
    with Image.open(io.BytesIO(page.screenshot())) as image:
        few = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
        few.save(ROOT / "docs" / name, "png", optimize=True)
    print(f"docs/{name}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python .ci/pictures.py RUN")
    main(sys.argv[1])
