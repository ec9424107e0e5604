"""Self-play: every player of an episode becomes a row, and a group, of its own.

What the other players drew is then what any environment says: completion tokens with ``mask`` False
and version -1. Each player has its own points, and is compared with the same player of the group's
other episodes, so that every method trains on several players as it does on one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jrl.episodes.device_play import Episodes
from jrl.types import Array, StopReason


def rows_of_players(played: Episodes, players: int) -> Episodes:
    """Episodes of R players as N * R groups; group n * R + r is player r of the n-th start.

    Args:
      played: [N, G] episodes, with ``success`` [N, G, R].
      players: R.

    Returns:
      [N * R, G] rows with ``success`` [N * R, G]. A row of a player that never moved has ended as
      ABORTED, so that it leaves its group.
    """
    # Tokens are repeated, not split: a player's tokens were sampled after all that the others said,
    # so each row needs the whole episode as its context.
    rollout = jax.tree.map(lambda x: jnp.repeat(x, players, axis=0), played.rollout)
    player = jnp.tile(jnp.arange(players), played.success.shape[0])[:, None, None]
    ids = {name: jnp.repeat(getattr(played, name), players, axis=0) for name in _BY_TOKEN}
    mask = rollout.mask & (ids["role"] == player)
    acted = mask.any(axis=2)
    rollout = rollout.replace(
        mask=mask,
        sampler_logprobs=jnp.where(mask, rollout.sampler_logprobs, 0.0),
        # -1, as for any token that the row's player did not sample: no policy version to correct
        # for.
        versions=jnp.where(mask, rollout.versions, -1),
        stop=jnp.where(acted, rollout.stop, StopReason.ABORTED).astype(jnp.int32),
    )
    return Episodes(
        rollout=rollout,
        turn=ids["turn"],
        state=ids["state"],
        role=ids["role"],
        paid=jnp.where(mask, ids["paid"], 0.0),
        success=_by_player(played.success),
        turns=jnp.repeat(played.turns, players, axis=0),
    )


_BY_TOKEN = ("turn", "state", "role", "paid")


def _by_player(x: Array) -> Array:
    """[N * R, G] from [N, G, R]."""
    n, g, players = x.shape
    return x.transpose(0, 2, 1).reshape(n * players, g)
