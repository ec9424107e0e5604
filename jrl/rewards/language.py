"""Sentences, words and the language of a text, with the extra ``ifeval``. Imports no JAX."""

from __future__ import annotations

import functools
from typing import Any

from jrl.system.extras import need


@functools.cache
def _splitter() -> Any:
    """NLTK's Punkt with its English model, which comes as a package and not as a download."""
    punkt = need("nltk.tokenize.punkt", "ifeval", "counting sentences")
    model = need("punkt", "ifeval", "counting sentences").load_model("english")
    parameters = punkt.PunktParameters()
    parameters.abbrev_types = set(model.abbrev_types)
    parameters.collocations = set(model.collocations)
    parameters.sent_starters = set(model.sent_starters)
    parameters.ortho_context.update(model.ortho_context)
    return punkt.PunktSentenceTokenizer(parameters)


def sentences(text: str) -> list[str]:
    """The sentences of an English text, by Punkt (Kiss and Strunk, 2006)."""
    return list(_splitter().tokenize(text))


def words(text: str) -> list[str]:
    """The words of an English text, as ``nltk.word_tokenize`` splits them."""
    tokenizer = need("nltk.tokenize", "ifeval", "counting words in capitals").NLTKWordTokenizer()
    return [word for sentence in sentences(text) for word in tokenizer.tokenize(sentence)]


def language_of(text: str) -> str | None:
    """The code of a text's language, by langdetect; None where it has no features to go by.

    The authors' code draws its samples anew each time; here they are those of one seed.
    """
    langdetect = need("langdetect", "ifeval", "telling the language of a text")
    langdetect.DetectorFactory.seed = 0
    try:
        return str(langdetect.detect(text))
    except langdetect.LangDetectException:
        return None
