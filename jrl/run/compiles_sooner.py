"""Keys of a run by which its programs would compile sooner."""

from __future__ import annotations

import jax

from jrl.collect.packing import SHAPES
from jrl.models import gpu
from jrl.models.matmul import time_follows_rows
from jrl.sampling.cache import pieces_of
from jrl.sampling.slot_sizes import SHRINK_TOKENS
from jrl.setup.run import Run


def compiles_sooner(run: Run) -> dict[str, str]:
    """Function -> the key by which its program would compile sooner; functions without one are out.

    Said where a program is compiled that takes long, and not where it comes from the cache.
    """
    texts: dict[str, str] = {}
    if (of_sampler := _of_sampler(run)) is not None:
        texts |= dict.fromkeys(("generate", "task_rollout", "rollout"), of_sampler)
    if run.config.train.mode == "packed":
        texts["step"] = (
            f"train.mode = 'packed' compiles it once for each of up to {SHAPES} shapes of rows;"
            " 'host' compiles it once"
        )
    return texts


def _of_sampler(run: Run) -> str | None:
    longest = run.config.sampling.max_new_tokens
    key = f"sampling.max_new_tokens = {longest}"
    with jax.set_mesh(run.mesh):  # the platform decides how the loop is made
        shrinks, pieces = time_follows_rows(), pieces_of(longest)
        one_piece = next(n for n in range(longest, 0, -1) if pieces_of(n) == 1)
        if run.model is not None and gpu.decodes(run.config.model.attention, run.model):
            pieces = 1  # the kernels for GPUs read what is filled of one piece
    if shrinks and longest >= SHRINK_TOKENS:
        return f"{key}; below {SHRINK_TOKENS} it compiles in a third"
    # Lowered for a GPU with 28 layers, the program of 256 tokens has 22,100 lines, that of 512 and
    # more 33,900, and that of 64 has 13,100.
    if not shrinks and pieces > 1:
        return f"{key} keep their cache in {pieces} pieces; up to {one_piece} it compiles in half"
    return None
