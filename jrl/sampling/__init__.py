"""Drawing completions.

``params`` is the distribution drawn from, ``sample`` the draw, ``cache`` rows of a network's cache,
``slots`` the state of sequences being decoded, ``queue`` sequences that take turns in slots, and
``generate`` a whole batch in one program.
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
