"""BM25 against its formula, written out."""

import asyncio
import math
import re

import numpy as np
import pytest

from jrl.errors import UserError
from jrl.zoo.envs.search import Bm25, search_tool

DOCUMENTS = [
    "The Rhine flows through Basel.",
    "Basel lies on the Rhine; the Rhine is long. The Rhine!",
    "Paris lies on the Seine.",
    "",
    "A long text about nothing of the kind, with many more words than any other document has.",
]


def reference(query, k1=1.5, b=0.75):
    words = [re.findall(r"\w+", d.lower()) for d in DOCUMENTS]
    mean = sum(map(len, words)) / len(words)
    out = []
    for document in words:
        score = 0.0
        for word in re.findall(r"\w+", query.lower()):
            having = sum(word in d for d in words)
            weight = math.log(1 + (len(words) - having + 0.5) / (having + 0.5))
            times = document.count(word)
            length = k1 * (1 - b + b * len(document) / mean)
            score += weight * times * (k1 + 1) / (times + length)
        out.append(score)
    return np.array(out)


@pytest.mark.parametrize("query", ["Rhine", "the rhine the", "Seine Basel long", "absent", ""])
def test_scores_follow_the_formula(query):
    index = Bm25(DOCUMENTS)
    np.testing.assert_allclose(index.scores(query), reference(query), rtol=1e-12)


def test_the_best_come_first_and_strangers_not_at_all():
    index = Bm25(DOCUMENTS)
    assert index.search("Rhine", 3) == [1, 0]
    assert index.search("absent", 3) == []
    assert index.search("lies", 1) == [2]


def test_the_tool():
    tool = search_tool(DOCUMENTS, count=1, longest=12)
    assert asyncio.run(tool.call(query="seine")) == "[2] Paris lies o"
    assert asyncio.run(tool.call(query="absent")) == "Nothing was found."
    with pytest.raises(UserError, match="no documents"):
        Bm25([])
