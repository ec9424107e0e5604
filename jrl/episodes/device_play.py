"""Episodes of a whole batch in one program: rows of several turns in ``sampling.device_loop``.

    decode a few tokens -> where a turn ended: step the environment, append its reply -> again

Episodes take turns in the decode slots as completions do in ``generate``, on the same queue. A
token's draw is keyed by its row and column, and so is what the environment draws, so that neither
slots nor neighbours change an episode.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jrl.episodes.device import Env, Start, TurnLog, empty_log, paid_points
from jrl.errors import UserError
from jrl.sampling.cache import pick
from jrl.sampling.device_loop import Turns, as_rollout, sample_rows, turn_ended
from jrl.sampling.params import SamplingParams
from jrl.sampling.queue import Queue
from jrl.sampling.sequences import Members, Prompts, SamplerInputs, Sequences, first_members
from jrl.sampling.slot_sizes import SlotPlan
from jrl.sampling.slots import extend
from jrl.types import Array, Network, Params, Rollout, Stack, StopReason


class Episodes(NamedTuple):
    """Result of ``play``: the rollout, and the environment's records.

    Attributes:
      rollout: replies are completion tokens outside ``mask``.
      turn: [N, G, T] int32, the number of the turn that a token belongs to, its reply's included.
      state: [N, G, T] int32, ``Turn.state_id`` of that turn.
      role: [N, G, T] int32, the player who took that turn.
      paid: [N, G, T] float32, points, at the last token of the turn that earned them.
      success: [N, G] bool; [N, G, R] where the policy plays R players.
      turns: [N, G] int32, turns taken.
    """

    rollout: Rollout
    turn: Array
    state: Array
    role: Array
    paid: Array
    success: Array
    turns: Array


class EpisodeTable(struct.PyTreeNode):
    """All B episodes on their way, whether they have a slot, wait for one or are over.

    Attributes:
      state: the environment's, with B rows.
      keys: [B] PRNG keys; step k draws with number T + k of its row's, after the T tokens'.
      begin: [B] int32, the column where the turn in progress began.
      log: of the turns taken.
    """

    state: Any
    keys: Array
    begin: Array
    log: TurnLog


def play(
    key: Array,
    params: Params,
    starts: Start,
    sampling_params: SamplingParams,
    version: Array,
    ids: Array,
    group: Members | int,
    *,
    env: Env,
    network: Network,
    slots: int | SlotPlan = 0,
    step: Array | None = None,
) -> tuple[Episodes, Array]:
    """``group`` episodes from each start: ``generate`` with the turns of an environment.

    Args:
      key: consumed.
      params: the policy's.
      starts: N of them; all members of a group begin with the same one.
      sampling_params: scalars.
      version: [] int32, the policy's version.
      ids: [N] int32; an episode's draws depend on (key, its start's id, its member) alone.
      group: as in ``generate``; limits are the environment's.
      env: the environment.
      network: the policy.
      slots: S, episodes played at a time, 0 for all; or the whole plan of how they take turns.
      step: [] int32, the training step, where each player is drawn by the policy of several that
        plays it then; None for one policy that plays all.

    Returns:
      The episodes, and the slot-steps they took, [] int32.

    Raises:
      UserError: an episode does not fit the network, or the slots no block.
    """
    members = group if isinstance(group, Members) else first_members(ids.shape[0], group)
    (n, g), width = members.number.shape, env.completion_tokens
    check_room(env, network)
    several = network.extras.stack if step is not None else None
    if several is not None:
        network = several.speaking(jnp.zeros(1, jnp.int32))  # replaced wherever rows are continued
    prompts = Prompts(starts.tokens, starts.length, ids, members, starts.state)
    sampled = sample_rows(
        SamplerInputs(key, params, prompts, sampling_params, version, step),
        network=network,
        width=width,
        stop_tokens=(env.stop_id,),
        plan=SlotPlan.of(slots),
        turns=_turns(env, network, several),
    )
    log: TurnLog = sampled.log
    # The log has one entry a turn; labels of every token are made from it once, here, instead of
    # being carried through the decode loop.
    tokens = {name: x.reshape(n, g, width) for name, x in log.by_token(width).items()}
    results, routing = sampled.results, sampled.routing
    rollout = as_rollout(results, prompts, version, sampled=tokens["drawn"], routing=routing)
    success, turns = log.success.reshape(n, g, *log.success.shape[1:]), log.count.reshape(n, g)
    # What the reply of the environment occupies is not trained, and no reward may lie there.
    paid = jnp.where(rollout.mask, tokens["paid"], 0.0)
    labels = tokens["turn"], tokens["state"], tokens["role"]
    return Episodes(rollout, *labels, paid, success, turns), sampled.slot_steps


def check_room(env: Env, network: Network) -> None:
    """Raises UserError when an episode may be longer than the network allows."""
    longest = env.prompt_tokens + env.completion_tokens
    if longest > network.max_length:
        raise UserError(
            f"data.env: an episode of {env.name!r} may reach {longest} tokens ({env.turns} turns of"
            f" {env.turn_tokens} and replies of {env.reply_tokens} after a prompt of "
            f"{env.prompt_tokens}), but the model holds {network.max_length}; lower data.turns or "
            "raise model.config.max_length"
        )


def _turns(env: Env, network: Network, several: Stack | None) -> Turns:
    """The turns of an environment's episodes, in the form that the device loop takes.

    Args:
      env: the environment.
      network: the policy; with several of them any one, which has the shapes of all.
      several: the policies, where each player is drawn by one of them.
    """

    def begin(queue: Queue, sequences: Sequences, state: Any) -> Queue:
        rows = sequences.keys.shape[0]
        table = EpisodeTable(
            # All members of a group begin in the same state: B rows from N.
            state=pick(state, jnp.arange(rows) // (rows // sequences.last.shape[0])),
            keys=sequences.keys,
            begin=jnp.zeros(rows, jnp.int32),
            log=empty_log(env, rows),
        )
        # Rows reach their own columns at their own time, once replies differ in length.
        # As they do where slots are refilled.
        aligned = queue.slots.aligned and env.turns == 1
        return queue.replace(extra=table, slots=queue.slots.replace(aligned=aligned))

    def limits(queue: Queue) -> Array:
        return queue.extra.begin[queue.index] + env.turn_tokens

    def speaker(queue: Queue, step: Array | None) -> Network:
        if several is None:
            return network
        # Asked of the state, not counted: who moves may depend on what was played.
        movers = jax.vmap(env.mover)(pick(queue.extra.state, queue.index))
        return several.speaking(several.policy(movers, step))

    answer = partial(_answer, env=env, network=network)
    return Turns(begin, limits, speaker, answer, lambda queue: queue.extra.log)


@jax.named_scope("environment")
def _answer(weights: Any, queue: Queue, *, env: Env, network: Network) -> Queue:
    """The queue with the environment's reply to every turn that ended."""
    slots, table, ended = queue.slots, queue.extra, turn_ended(queue)
    # Slots and episodes are numbered differently once slots are refilled; everything below is by
    # slot and is scattered back by episode at the end.
    episodes: EpisodeTable = pick(table, queue.index)
    turn, width = episodes.log.count, slots.tokens.shape[1]
    size = slots.lengths - episodes.begin
    tokens = jax.vmap(partial(_window, size=env.turn_tokens))(slots.tokens, episodes.begin, size)
    # Beyond the T numbers that the row's own tokens use, so that no draw of the environment is one
    # of the policy's.
    keys = jax.vmap(jax.random.fold_in)(episodes.keys, width + turn)
    player = jax.vmap(env.mover)(episodes.state)
    # For every slot, whether its turn ended or not: shapes are fixed, and what did not end is
    # dropped at the scatter.
    state, result = jax.vmap(env.step)(episodes.state, tokens, size, keys)

    last = turn + 1 >= env.turns
    over = result.done | last
    reason = jnp.where(result.done, StopReason.DONE, jnp.where(last, StopReason.TURNS, 0))
    # After the last turn nobody reads a reply, and the row has no room for one.
    count = jnp.where(ended & ~over, jnp.clip(result.count, 0, env.reply_tokens), 0)
    begin = slots.lengths + count
    slots = slots.replace(
        stop=jnp.where(ended, reason, slots.stop).astype(jnp.int32), limits=begin + env.turn_tokens
    )
    # Left out of the program where no reply can come: it is a forward pass of reply_tokens a slot.
    if env.turns > 1 and env.reply_tokens:
        slots = extend(weights, slots, result.reply, count, network=network)

    at = jnp.where(ended, turn, env.turns)  # past the log, where nothing is written
    log = episodes.log
    put = lambda x, new: jax.vmap(lambda row, i, v: row.at[i].set(v, mode="drop"))(x, at, new)  # noqa: E731
    players = put(log.players, player)
    after = episodes.replace(
        state=state,
        begin=begin,
        log=log.replace(
            count=turn + 1,
            starts=put(log.starts, episodes.begin),
            ends=put(log.ends, begin - count),
            states=put(log.states, result.state_id),
            players=players,
            points=jax.vmap(paid_points)(log.points, players, at, result.reward),
            success=result.success,
        ),
    )
    # Past the table, where nothing is written.
    index = jnp.where(ended, queue.index, table.begin.shape[0])
    table = jax.tree.map(lambda x, new: x.at[index].set(new, mode="drop"), table, after)
    return queue.replace(slots=slots, extra=table)


def _window(tokens: Array, begin: Array, length: Array, *, size: int) -> Array:
    """[A] int32: the tokens of ONE row's turn, then 0."""
    # The slice is moved back where it would pass the row's end; a turn never does, as a row has
    # room for all its turns.
    window = jax.lax.dynamic_slice_in_dim(tokens, begin, size)
    return jnp.where(jnp.arange(size) < length, window, 0)


# ---------------------------------------------------------------- scripted episodes


def scripted(key: Array, start: Start, *, env: Env) -> tuple[Array, Array, TurnLog]:
    """ONE episode played by ``env.solution``.

    Returns:
      tokens [T] int32, length [] int32, and the log, with one row.
    """
    assert env.solution is not None
    width = env.completion_tokens
    solution: Callable[[Any], tuple[Array, Array]] = env.solution

    def put(tokens: Array, at: Array, new: Array, count: Array) -> Array:
        place = jnp.arange(new.shape[0])
        return tokens.at[jnp.where(place < count, at + place, width)].set(new, mode="drop")

    def turn(carry: tuple, number: Array) -> tuple[tuple, tuple]:
        state, tokens, begin, live = carry
        turn_tokens, size = solution(state)
        after, result = env.step(state, turn_tokens, size, jax.random.fold_in(key, number))
        over = result.done | (number + 1 == env.turns)
        size = jnp.where(live, size, 0)
        count = jnp.where(live & ~over, jnp.clip(result.count, 0, env.reply_tokens), 0)
        tokens = put(tokens, begin, turn_tokens, size)
        end = begin + size
        tokens = put(tokens, end, result.reply, count)
        player = env.mover(state)
        row = (live, jnp.where(live, begin, width), end, result.state_id, player, result.reward)
        return (after, tokens, end + count, live & ~over), (*row, result.success)

    first = (start.state, jnp.zeros(width, jnp.int32), jnp.int32(0), jnp.bool_(True))
    # Turns after the end are scanned too, and masked: a solution may be short.
    (_, tokens, length, _), rows = jax.lax.scan(turn, first, jnp.arange(env.turns))
    live, starts, ends, states, players, rewards, success = rows
    rewards = jnp.where(live.reshape(-1, *(1,) * (rewards.ndim - 1)), rewards, 0.0)
    points, _ = jax.lax.scan(
        lambda points, turn: (paid_points(points, players, *turn), None),
        jnp.zeros(env.turns, jnp.float32),
        (jnp.where(live, jnp.arange(env.turns), env.turns), rewards),
    )
    turns, last = live.sum(dtype=jnp.int32), jnp.maximum(live.sum() - 1, 0)
    log = TurnLog(turns, starts, ends, states, players, points, success[last])
    return tokens, length, jax.tree.map(lambda x: x[None], log)
