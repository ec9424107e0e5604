"""Shared by the fuzz tests: settings, values of any kind, damage to bytes, and how to judge."""

import json
import os
import pathlib

import hypothesis
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

from jrl.errors import UserError
from jrl.serving.api_error import ApiError

EXAMPLES = pathlib.Path(__file__).parent / "fuzz_examples"
"""Where hypothesis writes inputs that failed, and looks first; to be committed with the fix. What
is worth reading stands as an ``@example`` besides."""


TIMES = int(os.environ.get("JRL_FUZZ_TIMES", "1"))
"""As many times the examples of ``make test``, for a longer search."""


def settings(examples):
    return hypothesis.settings(
        max_examples=TIMES * examples,
        deadline=None,
        database=DirectoryBasedExampleDatabase(EXAMPLES),
        suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
    )


QUICK = settings(300)

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


def outcome(function, *arguments):
    """Message of a refusal, else ""; other errors propagate and fail the test."""
    try:
        function(*arguments)
    except (UserError, ApiError) as error:
        return str(error)
    return ""


edits = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 8), st.binary(max_size=8)), min_size=1, max_size=4
)
"""(place as a fraction, bytes removed there, bytes put there) each."""


def damaged(data, changes):
    """Bytes after edits."""
    for place, removed, put in changes:
        at = int(place * len(data))
        data = data[:at] + put + data[at + removed :]
    return data


def places(value, path=()):
    """The paths of all values in JSON."""
    yield path
    items = value.items() if isinstance(value, dict) else ()
    for name, item in enumerate(value) if isinstance(value, list) else items:
        yield from places(item, (*path, name))


def replaced(value, path, new):
    """JSON with another value at a path."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def as_json(value):
    return json.dumps(value).encode()
