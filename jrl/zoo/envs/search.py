"""Search in texts at hand, by BM25, and as a tool."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from jrl.episodes.tools import Tool, one_text
from jrl.errors import UserError

_WORD = re.compile(r"\w+")
_K1, _B = 1.5, 0.75
"""How soon more of one word counts no more, and how much long documents are discounted."""


class Bm25:
    """An index of documents, ranked by the words that they share with a query.

    Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond" (2009), with
    Lucene's weight of a word, which is never negative:

        score(d) = sum_w log(1 + (N - n_w + 0.5) / (n_w + 0.5))
                   f_wd (k1 + 1) / (f_wd + k1 (1 - b + b |d| / mean |d|))

    Args:
      documents: N texts.

    Raises:
      UserError: there are no documents.
    """

    def __init__(self, documents: Sequence[str]) -> None:
        if not documents:
            raise UserError("search: there are no documents")
        self.documents = list(documents)
        counts = [Counter(_WORD.findall(text.lower())) for text in documents]
        lengths = np.array([sum(c.values()) for c in counts], np.float64)
        scale = _K1 * (1 - _B + _B * lengths / max(lengths.mean(), 1e-9))
        postings: dict[str, list[tuple[int, int]]] = {}
        for i, count in enumerate(counts):
            for word, times in count.items():
                postings.setdefault(word, []).append((i, times))
        self._postings: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for word, places in postings.items():
            rows, times = np.array(places).T
            weight = np.log1p((len(documents) - len(rows) + 0.5) / (len(rows) + 0.5))
            self._postings[word] = rows, weight * times * (_K1 + 1) / (times + scale[rows])

    def scores(self, query: str) -> np.ndarray:
        """[N] float64; a word that stands twice in the query counts twice."""
        out = np.zeros(len(self.documents))
        for word in _WORD.findall(query.lower()):
            if word in self._postings:
                rows, weights = self._postings[word]
                out[rows] += weights
        return out

    def search(self, query: str, count: int) -> list[int]:
        """Indices of the best documents, at most ``count``, those with a word in common alone."""
        scores = self.scores(query)
        best = np.argsort(-scores, kind="stable")[:count]
        return [int(i) for i in best if scores[i] > 0]


def search_tool(documents: Sequence[str], *, count: int = 3, longest: int = 600) -> Tool:
    """A tool that returns the best documents for a query.

    Args:
      documents: the corpus.
      count: documents in a result.
      longest: characters of each.
    """
    index = Bm25(documents)

    async def call(query: str) -> str:
        hits = index.search(query, count)
        if not hits:
            return "Nothing was found."
        return "\n\n".join(f"[{i}] {index.documents[i][:longest]}" for i in hits)

    return Tool(
        name="search",
        description="Searches the documents by words.",
        parameters=one_text("query"),
        call=call,
        longest=count * (longest + 20),
    )
