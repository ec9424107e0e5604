"""Sampling completions.

In one program, for a whole batch:

- ``params``: the distribution sampled from, and how a token is sampled
- ``cache``: rows of a network's cache
- ``slots``: the state of sequences being decoded
- ``sequences``: prompts and members before they have a slot
- ``queue``: sequences that take turns in slots
- ``generate``: all completions of a batch
- ``device_loop``, ``slot_sizes``: rows of a batch through the slots, of one turn or several
- ``tree``, ``places``: groups whose members branch off one another
- ``report``: log-probabilities that a reply reports

From the host, chunk by chunk:

- ``rows``: the engine: admits, decodes, extends, suspends, resumes and forks rows
- ``admission``: prompts and settings of new rows as arrays
- ``batch``, ``suspend``: the engine's programs
- ``row_costs``, ``chunk_length``: measured costs, and what follows from them
- ``engine``: continuous batching of requests, a queue in front of the rows
- ``request``, ``text``: requests, completions as they grow, and their text
"""

from __future__ import annotations

from typing import TYPE_CHECKING

HOMES = {
    "jrl.sampling.params": (
        *(
            "SamplingParams",
            "make_sampling_params",
            "sample",
            "sampling_logprobs",
            "token_logprobs",
        ),
    ),
}
"""Module -> public names."""

if TYPE_CHECKING:
    from jrl.sampling.params import SamplingParams as SamplingParams
    from jrl.sampling.params import make_sampling_params as make_sampling_params
    from jrl.sampling.params import sample as sample
    from jrl.sampling.params import sampling_logprobs as sampling_logprobs
    from jrl.sampling.params import token_logprobs as token_logprobs
else:
    from jrl.system.lazy_names import lazy_names

    __all__, __getattr__, __dir__ = lazy_names(__name__, HOMES)
