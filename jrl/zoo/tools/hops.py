"""A small world of people, places, firms and books, and questions that take several look-ups.

    python -m jrl.zoo.tools.hops configs/search

writes the corpus and the questions of ``configs/search.toml``. All names are made up, so that no
model knows an answer; nothing but the seed decides what is written.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_HEADS = "bel cor dan el far gil har isk jor kel lam mor nar ol pel quil ras sel tor ul vel win yar"
_TAILS = "ac ad an ar as eb el en er id ik il in ir om on or os ow um un ur ut ys"


class World(NamedTuple):
    """A made-up corpus and questions about it.

    Attributes:
      documents: the corpus.
      questions: (question, answer) pairs.
    """

    documents: list[str]
    questions: list[tuple[str, str]]


_COUNTRIES, _CITIES, _PEOPLE = 8, 24, 80


def make_world(seed: int) -> World:
    """The world of a seed; every answer is a name that some document holds."""
    rng = random.Random(seed)
    names = _names(rng)
    lands = [next(names) + "ia" for _ in range(_COUNTRIES)]
    towns = [next(names) + rng.choice(["ton", "burg", "mouth", "field"]) for _ in range(_CITIES)]
    persons = [f"{next(names)} {next(names)}" for _ in range(_PEOPLE)]
    firms = [
        f"{next(names)} {rng.choice(['Works', 'Mills', 'Lines'])}" for _ in range(_PEOPLE // 2)
    ]
    books = [f"The {next(names)} {rng.choice(['Letters', 'Papers'])}" for _ in range(_PEOPLE // 2)]
    land_of = {town: rng.choice(lands) for town in towns}
    born = {person: rng.choice(towns) for person in persons}
    founder = {firm: rng.choice(persons) for firm in firms}
    author = {book: rng.choice(persons) for book in books}
    year = {name: str(rng.randrange(1850, 1990)) for name in (*persons, *firms, *books)}
    documents = [
        *(f"{town} is a city in {land_of[town]}, on the river {next(names)}." for town in towns),
        *(f"{p} was born in {born[p]} in {year[p]}." for p in persons),
        *(f"{f} is a firm. It was founded in {year[f]} by {founder[f]}." for f in firms),
        *(f'"{b}" is a book by {author[b]}, printed in {year[b]}.' for b in books),
    ]
    questions = [
        *((f"In which city was the founder of {f} born?", born[founder[f]]) for f in firms),
        *((f"In which country was {p} born?", land_of[born[p]]) for p in persons),
        *((f'In which city was the author of "{b}" born?', born[author[b]]) for b in books),
        *(
            (f"In which country was the founder of {f} born?", land_of[born[founder[f]]])
            for f in firms
        ),
        *((f'In which year was the author of "{b}" born?', year[author[b]]) for b in books),
    ]
    rng.shuffle(documents)
    rng.shuffle(questions)
    return World(documents, questions)


def _names(rng: random.Random) -> Iterator[str]:
    """Names, each one once."""
    heads, tails = _HEADS.split(), _TAILS.split()
    every = [a + b + c for a in heads for b in tails for c in ("", "d", "l", "n")]
    rng.shuffle(every)
    return iter(name.capitalize() for name in every)


def main(directory: str, held_out: int = 40) -> None:
    """Writes corpus.jsonl, train.jsonl and eval.jsonl; questions of the last stand in no other."""
    world, place = make_world(0), Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    lines = [{"question": q, "answer": a} for q, a in world.questions]
    files = {
        "corpus": [{"text": text} for text in world.documents],
        "train": lines[held_out:],
        "eval": lines[:held_out],
    }
    for name, rows in files.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (place / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
