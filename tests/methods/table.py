"""What the two tables over all methods share."""

import functools
import importlib.metadata

from jrl.methods import all_methods

# Each program runs a few times: what counts is how long it takes to compile.
FAST = {"xla_backend_optimization_level": 0}
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones do not know it
    FAST["xla_cpu_use_fusion_emitters"] = False

# Coefficients for the small numbers of the tests, where the defaults are for others. Rewards are
# between 0 and 1 here.
COEFFICIENTS = {"mpo": {"threshold": 0.5}}


@functools.cache
def example(name):
    """The method of that name as the tables build it."""
    published = all_methods()[name]
    given = COEFFICIENTS.get(name, {})
    made_up = {
        c.name: c.domain.example
        for c in published.coefficients.values()
        if c.required and c.name not in given
    }
    return published(**made_up, **given)
