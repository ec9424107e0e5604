"""Sampling more than a step waits for: nothing is lost, and slots idle less."""

import jax
import jax.numpy as jnp
import numpy as np

from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.sampling.driver import Engine
from jrl.sampling.oversample import Collector, to_rollout
from jrl.sampling.request import Request

NETWORK = transformer(ModelConfig(16, 1, 8, 1, 1, 8, 8, max_length=72))
G, SLOTS, LONGEST, STEPS = 2, 8, 64, 6
"""Four groups fill the slots; a step waits for four."""


def weights(seed):
    return NETWORK.init(jax.random.key(seed))


def asked():
    """Endless requests with a long tail: limits from 1 to 64, two in three below 12."""
    rng = np.random.default_rng(0)
    while True:
        limit = int(np.clip(4 * (1 + rng.pareto(1.0)), 1, LONGEST))
        yield Request((1, 2, 3), limit, seed=int(rng.integers(2**32)), n=G, stop_tokens=())


def train(engine, more):
    """Groups of every step, of ``more`` requests kept under way than the four waited for."""
    collector, source, requests, steps = Collector(engine), asked(), {}, []
    for step in range(STEPS):
        while collector.waiting + len(collector.whole) < 4 + more:
            request = next(source)
            requests[collector.submit(request)] = request
        steps.append(collector.take(4))
        engine.set_weights(engine_weights[0], step + 1)
    return collector, requests, steps


engine_weights = []


def test_the_gain_on_a_long_tail():
    engine_weights[:] = [weights(0)]
    use, all_steps = {}, {}
    for more in (0, 6):
        engine = Engine(
            NETWORK,
            engine_weights[0],
            slots=SLOTS,
            prompt_tokens=4,
            max_new_tokens=LONGEST,
            stop_tokens=(),
            chunk=4,
            block=G,
        )
        collector, requests, steps = train(engine, more)
        tokens = sum(len(c.tokens) for step in steps for group in step.values() for c in group)
        use[more] = tokens / engine.slot_steps
        all_steps[more] = steps
        # Every group is whole, and each completion is as long as its request allows.
        assert all(len(step) == 4 for step in steps)
        for step in steps:
            for number, group in step.items():
                assert [c.member for c in group] == list(range(G))
                assert all(len(c.tokens) == requests[number].max_new_tokens for c in group)
        # Nothing is lost: what was not taken is whole, partial or under way.
        taken = {number for step in steps for number in step}
        assert taken | set(collector.whole) | set(collector.partial) == set(requests)
    assert use[0] < 0.6, use
    assert use[6] > 1.5 * use[0], use
    # With nothing carried over every step has one policy; with it some completions have several.
    for more, steps in all_steps.items():
        several = False
        for i, step in enumerate(steps):
            for group in step.values():
                for c in group:
                    assert (np.diff(c.versions) >= 0).all()
                    assert c.versions.max() <= i
                    several |= len(set(c.versions.tolist())) > 1
                    assert more or set(c.versions.tolist()) == {i}
        assert several == bool(more)


def test_groups_as_a_rollout():
    engine = Engine(
        NETWORK,
        weights(1),
        slots=4,
        prompt_tokens=4,
        max_new_tokens=8,
        stop_tokens=(3,),
    )
    collector = Collector(engine)
    asked = [Request((1,), 8, seed=1, n=2), Request((2, 5, 7), 6, seed=2, n=2)]
    requests = {collector.submit(r): r for r in asked}
    groups = collector.take(2)
    assert collector.take(1) == {}
    rollout = to_rollout(groups, requests, prompt_tokens=4, max_new_tokens=8)
    place = jnp.arange(12)[None]
    for i, (number, group) in enumerate(groups.items()):
        prompt = requests[number].tokens
        assert rollout.prompt_tokens[i, : rollout.prompt_lengths[i]].tolist() == list(prompt)
        for j, c in enumerate(group):
            size = rollout.lengths[i, j]
            assert rollout.tokens[i, j, :size].tolist() == c.tokens.tolist()
            assert (rollout.versions[i, j] == np.where(rollout.mask[i, j], 0, -1)).all()
            row = np.zeros((1, 12), np.int32)
            row[0, : len(prompt) + size] = [*prompt, *c.tokens]
            hidden, _ = NETWORK.hidden(weights(1), row, place, jnp.ones_like(row))
            law = np.asarray(jax.nn.log_softmax(NETWORK.logits(weights(1), hidden)))[0]
            expected = law[np.arange(size) + len(prompt) - 1, c.tokens]
            np.testing.assert_allclose(rollout.sampler_logprobs[i, j, :size], expected, atol=1e-5)
