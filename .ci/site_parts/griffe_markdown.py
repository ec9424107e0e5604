"""An extension of griffe: every docstring as the site's Markdown."""

from __future__ import annotations

from typing import Any

import griffe

from site_parts.markdown import as_markdown


class AsMarkdown(griffe.Extension):
    """Rewrites the docstrings of a package once it is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites one object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
