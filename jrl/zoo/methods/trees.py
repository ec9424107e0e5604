"""Methods whose groups are trees: completions that share a beginning.

Each function says its paper's formula with r the reward of a completion. All else is as in
``grpo``. Where a group's members branch off one another (``Plan.tree``) a token that several go
through is drawn once and trained once, in the member that drew it; ``ids["node"]`` says who goes
through what. Any other method draws so with ``[tree]``.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jrl.methods.base import Method
from jrl.methods.curriculum import unchanged
from jrl.methods.definition import variant
from jrl.methods.domains import Count, Fraction, NonNegative, Positive, Whole
from jrl.methods.group_relative import grpo
from jrl.methods.plan import Plan, stored_apart
from jrl.methods.replays import replay_rare
from jrl.objectives.advantages import mean_centred
from jrl.objectives.aggregates import token_mean
from jrl.objectives.branches import branch_means, by_branch, through
from jrl.objectives.transforms import over_branches, per_token, stateless, trained
from jrl.types import Array, Batch, Branching, Search, Transform
from jrl.zoo.methods.rounds import hard_problems

# ---------------------------------------------------------------- the tree of prefixes


def shared_lengths(tokens: Array, lengths: Array) -> Array:
    """[G, G] int32, tokens: how long a beginning each two completions of ONE group share.

    Args:
      tokens: [G, T] int32; what lies at or past ``lengths`` is not read.
      lengths: [G] int32, tokens.

    >>> tokens = jnp.array([[5, 6, 7], [5, 6, 9], [5, 8, 7]])
    >>> shared_lengths(tokens, jnp.array([3, 3, 2])).tolist()
    [[3, 2, 1], [2, 3, 1], [1, 1, 2]]
    """
    chex.assert_rank([tokens, lengths], [2, 1])
    column = jnp.arange(tokens.shape[1])
    differ = jnp.expand_dims(tokens, 0) != jnp.expand_dims(tokens, 1)
    first = jnp.min(jnp.where(differ, column[None, None], tokens.shape[1]), axis=2)
    return jnp.minimum(first, jnp.minimum(lengths[None], lengths[:, None])).astype(jnp.int32)


def prefix_steps(scores: Array, tokens: Array, lengths: Array, members: Array) -> Array:
    """Change of the mean score of completions through each token of ONE group, from its parent.

    See ``tempo``; scores, lengths (tool output included) and members are [G], tokens [G, T]. The
    tree of prefixes is never built: completions are at one node as long as they agree.

    Returns:
      [G, T] float32, points; 0 past the end of a completion and for members that are not live.

    >>> tokens = jnp.array([[5, 6], [5, 7], [5, 7]])
    >>> ones = jnp.ones(3, bool)
    >>> prefix_steps(jnp.array([3.0, 0.0, 0.0]), tokens, jnp.array([2, 2, 2]), ones).tolist()
    [[0.0, 2.0], [0.0, -1.0], [0.0, -1.0]]
    """
    chex.assert_rank([scores, tokens, lengths, members], [1, 2, 1, 1])
    scores = jnp.where(members, scores, 0)
    shared = jnp.where(members[None], shared_lengths(tokens, lengths), -1)
    depth = jnp.arange(tokens.shape[1] + 1)  # tokens of the prefix
    together = jnp.expand_dims(shared, 2) >= depth[None, None]  # [G, G, T + 1]
    count = together.sum(axis=1)
    value = jnp.where(together, scores[None, :, None], 0).sum(axis=1) / jnp.maximum(count, 1)
    # Where nobody leaves the node, the change is 0 and not the rounding of two equal sums.
    step = jnp.where(count[:, 1:] == count[:, :-1], 0, value[:, 1:] - value[:, :-1])
    step = jnp.where(jnp.isnan(value[:, 1:]), value[:, 1:], step)
    inside = members[:, None] & (depth[None, 1:] <= lengths[:, None])
    return jnp.where(inside, step, 0)


@variant(grpo)
def tempo(base: Method, td_coef: NonNegative = 1.0) -> Method:
    """GRPO, plus the change in the group's mean reward at each token where completions part.

    TEMPO of "Exploiting Tree Structure for Credit Assignment in RL Training of LLMs"
    (arXiv:2509.18314):

        V(s) = mean normalised reward of the group's completions that begin with s
        A_t = (r - mean(r)) / std(r) + V(s_{t+1}) - V(s_t)

    and the loss of GRPO. The second term is 0 wherever all completions at a node share the next
    token. As in the released code both terms are divided by the group's deviation and weigh the
    same (``td_coef``). Departures: GRPO's mean over each completion and its clip, where the
    released script averages over tokens and clips at 0.2 and 0.28, with a dual clip of 3. The paper
    draws a group's members apart, and finds the tree where they agree; where they branch off one
    another a token that several go through is trained once, with the mean of their advantages.
    """

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(values, 2)
        steps = jax.vmap(prefix_steps)(values, batch.tokens, batch.lengths, batch.members)
        branch_values = (
            by_branch(values, batch) if "node" in batch.ids else jnp.expand_dims(values, 2)
        )
        return branch_values + td_coef * steps, batch

    return base.after(stateless(apply))


# ---------------------------------------------------------------- branches


@variant(grpo)
def arpo(base: Method) -> Method:
    """GRPO on episodes that branch behind a tool's answers where the policy grows uncertain.

    ARPO of "Agentic Reinforced Policy Optimization" (arXiv:2507.19849), with its hard attribution
    of advantages, where d members go through a token:

        A_t = 1/d sum over these members of (r_i - mean(r)) / std(r)

    Half of the group begins with the prompt, as in the paper's 8 of 16 (``tree.roots``).
    Of episodes with an environment on the host one of the others branches off, with a copy of the
    environment's state, behind each answer after which

        alpha + beta (H_t - H_initial) > tau,   or   H_t - H_initial > (tau - alpha) / beta

    H being the mean entropy of the first 20 tokens of the turn (the released code's number; all of
    a shorter turn), nats, and of the episode's first; the right side is ``tree.above``, 0 as with
    the released alpha and tau of 0.5. Members for whom no place is found begin with the prompt.
    Departures: the released code takes H from the ten likeliest tokens alone, divides it by the
    logarithm of the vocabulary's size, and compares a random number with the left side, so that of
    its thresholds the default alone carries over; each of the first members has the same number of
    branches to give, so that a tree does not depend on which tool answers first; the paper trains a
    shared token once for each of the d members, here it is trained once. Its default attribution is
    the soft one, GRPO's own. Completions of one turn are left at a token of their own whose
    distribution has the greatest entropy, if that is above ``tree.above``, in ``tree.rounds``.
    """
    return base.after(over_branches()).with_(plan=Plan(tree=Branching("entropy")))


def node_gains(scores: Array, node: Array, members: Array) -> Array:
    """Advantage of each token's node over the root and over its parent node; ``treerl``.

    Args:
      scores: [G] float, points; their mean over members is taken out of them.
      node: [G, T] int32, ``ids["node"]`` of ONE group.
      members: [G] bool.

    Returns:
      [G, T] float32, points, multiplied by the root of the number of leaves.

    >>> node = jnp.array([[1, 2], [1, 3], [4, 4]])
    >>> node_gains(jnp.array([3.0, 1.0, 2.0]), node, jnp.ones(3, bool)).tolist()
    [[0.0, 2.0], [0.0, -2.0], [0.0, 0.0]]
    """
    chex.assert_rank([scores, node, members], [1, 2, 1])
    scores = mean_centred(scores, members)  # the value of the root is then 0
    value = branch_means(scores, node, members)
    leaves = through(node, members).sum(axis=1)
    column = jnp.arange(node.shape[1])[None]
    begins = node != jnp.pad(node[:, :-1], ((0, 0), (1, 0)))
    first = jax.lax.cummax(jnp.where(begins, column, 0), axis=1)
    before = jnp.take_along_axis(jnp.pad(value[:, :-1], ((0, 0), (1, 0))), first, axis=1)
    return jnp.where(leaves > 0, jnp.sqrt(leaves * 1.0) * (value + (value - before)), 0)


@variant(grpo, without=("eps", "ddof"))
def treerl(base: Method) -> Method:
    """Each node of a tree of completions is rewarded for what it adds to the chance of success.

    "TreeRL: LLM Reinforcement Learning with On-Policy Tree Search" (arXiv:2506.11902), V(s) being
    the mean reward of the leaves below node s, and L(s) these leaves:

        A(token of s) = ((V(s) - V(root)) + (V(s) - V(parent of s))) sqrt(|L(s)|)

    then the loss of GRPO, averaged over tokens. Members leave one another at the tokens that were
    the least likely when they were drawn. The paper divides by sqrt(|L(s)|) and trains a token once
    for each of the |L(s)| completions that go through it, so that together they weigh as here,
    where a token is trained once. Departures: the paper takes the same number of places in each
    tree and several branches at each, here each branch has a place of its own and the places are
    the best of the group. Not known: clip and aggregate; they are GRPO's, and the mean over tokens.
    Where members were drawn apart each is a node below the root.
    """

    def apply(scores: Array, batch: Batch) -> tuple[Array, Batch]:
        distinct = jnp.arange(1, scores.shape[1] + 1)[None, :, None]
        node = batch.ids.get("node", jnp.broadcast_to(distinct, batch.mask.shape))
        return jax.vmap(node_gains)(scores, node, batch.members), batch

    return base.with_(
        advantage=stateless(apply),
        aggregate=token_mean,
        plan=Plan(tree=Branching("surprise")),
    )


# ---------------------------------------------------------------- nodes of a search


def constrained_values(scores: Array, node: Array, members: Array, least: float = 0.1) -> Array:
    """Values of nodes as ``episodes.tree.constrained`` backs them up, of the tree of ONE group.

    Args:
      scores: [G] float, points of the leaves, in the order in which they are backed up.
      node: [G, T] int32, ``ids["node"]``.
      members: [G] bool.
      least: the least share of its points that a leaf gives to a node.

    Returns:
      [G, T] float32, points, the value of each token's node.
    """
    chex.assert_rank([scores, node, members], [1, 2, 1])
    inside = node > 0
    begins = inside & (node != jnp.pad(node[:, :-1], ((0, 0), (1, 0))))
    depth = jnp.cumsum(begins, axis=1)
    length = jnp.max(depth, axis=1, keepdims=True)
    share = jnp.maximum((depth + 1) / (length + 1), least)
    passes = through(node, members)

    def back_up(value: Array, leaf: tuple[Array, Array, Array]) -> tuple[Array, None]:
        points, share, on_path = leaf
        updated = value + share[None] * points
        replaced = jnp.where(points > 0, share[None] * points, value)
        new = jnp.where(value * points >= 0, updated, replaced)
        return jnp.where(on_path, new, value), None

    begin = jnp.zeros(node.shape, jnp.float32)
    leaves = jnp.where(members, scores, 0), share, jnp.swapaxes(passes, 0, 1)
    return jax.lax.scan(back_up, begin, leaves)[0]


def node_advantages(width: float, bound: float) -> Transform:
    """Each node's value, held softly within bounds, less the mean score of its tree's leaves."""

    def apply(values: Array, batch: Batch) -> tuple[Array, Batch]:
        chex.assert_rank(values, 2)
        live = trained(batch)
        mean = values - jax.vmap(mean_centred)(values, batch.members)
        score = per_token(values, batch)
        last = batch.ids.get("node", jnp.zeros(live.shape, jnp.int32))
        if "node_value" in batch.stats:
            score_of_node = batch.stats["node_value"]
        elif "node" in batch.ids:
            score_of_node = jax.vmap(constrained_values)(values, last, batch.members)
        else:
            score_of_node = score
        node = jnp.where(live, score_of_node, 0)
        leaf = jnp.expand_dims(jax.vmap(jax.vmap(_last_label))(last, live), 2)
        soft = jnp.where(last == leaf, score, jnp.tanh(node / width) * bound)
        return soft - jnp.expand_dims(mean, 2), batch

    return stateless(apply)


def _last_label(labels: Array, mask: Array) -> Array:
    """[]: the label of the last live token of ONE sequence."""
    return labels[jnp.max(jnp.arange(mask.size), where=mask, initial=0)]


@variant(grpo, without=("eps", "ddof"), clip_high=0.28, dual_clip=10.0)
def deepsearch(
    base: Method,
    width: Positive = 1.0,
    bound: Positive = 1.0,
    round_steps: Whole = 0,
    hard: Fraction = 0.25,
    attempts: Count = 4,
    above: NonNegative = 0.5,
    each: Count = 8,
    kept_prompts: Count = 65536,
) -> Method:
    """GRPO on the leaves of a tree search, with the search's own values at the nodes before them.

    "DeepSearch: Overcome the Bottleneck of Reinforcement Learning with Verifiable Rewards via Monte
    Carlo Tree Search" (arXiv:2509.25454), q(s_j) being the value of node s_j after the search:

        q' = tanh(q / eps_q) q_max between root and leaf, the leaf's reward at the leaf
        A(token of s_j) = q'(s_j) - mean reward of the tree's leaves

    then the loss of GRPO with a higher upper bound. A group is a tree, a member one of its leaves;
    nodes are ``ids["node"]``, their values the statistic "node_value" (points, as
    ``episodes.tree.constrained`` backs them up). In each of at most 64 rounds the open node that
    ``episodes.tree.frontier`` wants most is followed by 8 steps of up to 256 tokens, until there is
    a leaf for each member; ``[tree]`` changes that. With kind "none" members are
    drawn apart, and a reward stands at all tokens; where they branch off one another, values are
    backed up from their own rewards. The paper's rewards are 1 and -1. eps_q (``width``) and q_max
    (``bound``) are 1 in the released code; the clip, the token mean and the advantage without a
    deviation are those of its scripts, which also take DAPO's overlong penalty out of the reward.

    With ``round_steps`` above 0 (the scripts have 100; the default is 0, as it takes problems that
    come again, ``data.train`` in text) training goes in rounds of that length. As one begins the
    policy tries every problem of the last round ``attempts`` times, and those of which more than
    ``hard`` succeed, with more than ``above`` points, are left out for good. Successes of groups in
    which no more than ``hard`` succeed are kept, the newest ``each`` of a problem. Such a problem
    is not searched again: its members are drawn apart, and the first give way to what is kept.

    Departures: every round of the search takes from the frontier, where the paper first descends by
    UCT among the new steps to an end; all leaves are trained on, where the paper takes the wrong
    one of the least entropy if none is right; what is kept is used from the next step on, where the
    released code waits for the next round. A step that several leaves go through is trained once.
    """
    in_rounds = round_steps > 0
    return base.with_(
        advantage=node_advantages(width, bound),
        aggregate=token_mean,
        plan=Plan(
            stored_apart if in_rounds else unchanged,
            tree=Search("frontier", width=8, rounds=64, tokens=256),
        ),
        edits=(replay_rare(above, hard, each, kept_prompts),) if in_rounds else (),
        curriculum=hard_problems(round_steps, attempts, hard, above) if in_rounds else None,
    )
