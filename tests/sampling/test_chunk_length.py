"""The length of chunks from made-up costs: the least time, within the longest chunk."""

import numpy as np
import pytest

from jrl.models import gpu
from jrl.sampling.chunk_length import GPU_LENGTHS, LENGTHS, MAX_SECONDS, ChunkLength, best, costs


def measured(visit, step, *, slow=(), controller=None):
    """A controller that has timed chunks of these costs; those numbered ``slow`` were delayed."""
    controller = controller or ChunkLength()
    steps_chosen = []
    while controller.measuring:
        steps_chosen.append(controller.steps(queued=True))
        delay = 30.0 if len(steps_chosen) - 1 in slow else 0.0
        controller.record_chunk(steps_chosen[-1], visit + step * steps_chosen[-1] + delay)
    return controller, steps_chosen


@pytest.mark.parametrize("slow", [(), (0,), (0, 4)])
def test_costs_are_separated_although_single_chunks_are_delayed(slow):
    controller, steps_chosen = measured(2e-3, 5e-4, slow=slow)
    assert controller.host_seconds == pytest.approx(2e-3, rel=1e-6)
    assert controller.step_seconds == pytest.approx(5e-4, rel=1e-6)
    assert set(steps_chosen) == {1, 4}


def test_chunks_of_one_length_cost_steps_alone():
    assert costs([(2, 1.0), (2, 1.5), (2, 9.0)]) == (0.0, 0.75)


@pytest.mark.parametrize(
    ("visit", "step", "lengths", "chosen"),
    [
        (1e-3, 1e-3, [], 32),  # no queue: only host time to save
        (1e-3, 1e-3, [500] * 9, 32),
        (1e-3, 1e-3, [1, 2, 3, 2, 1], 1),
        (1e-4, 1e-3, [8, 40, 8, 12, 9], 2),
        (0.0, 1e-3, [7, 30], 1),
        (1e-2, 1e-2, [], 8),  # 16 would take longer than MAX_SECONDS
        (9.0, 1.0, [], 1),
    ],
)
def test_the_choice_balances_host_time_and_idle_slots(visit, step, lengths, chosen):
    assert best(visit, step, lengths, LENGTHS) == chosen
    # No other allowed length costs less, with slots occupied until their chunk ends.
    decoded_steps = lambda c: np.mean([-(-n // c) * c for n in lengths]) if lengths else 1.0  # noqa: E731
    time = lambda c: decoded_steps(c) * (step + visit / c)  # noqa: E731
    allowed = [c for c in LENGTHS if c == 1 or visit + c * step <= MAX_SECONDS]
    assert time(chosen) == pytest.approx(min(map(time, allowed)), rel=1e-9)


def test_idle_slots_count_only_while_completions_wait():
    controller, _ = measured(1e-3, 1e-3)
    assert controller.steps(queued=True) == 32  # no lengths are known
    for tokens in 4 * (0, 1, 2, 1, 3):  # one in five was aborted before it began
        controller.record_completion(tokens)
    assert controller.steps(queued=True) == 1
    assert controller.steps(queued=False) == 32


def test_slow_steps_are_not_tried_in_longer_chunks():
    controller, steps_chosen = measured(0.0, 2 * MAX_SECONDS)
    assert steps_chosen == [1, 1, 1]
    assert controller.steps(queued=False) == 1


def test_it_is_measured_again():
    controller, _ = measured(1e-3, 1e-3)
    for _ in range(5000):
        if controller.measuring:
            break
        controller.record_chunk(controller.steps(queued=False), 0.01)
    assert controller.measuring
    measured(1e-3, 3e-2, controller=controller)
    assert controller.steps(queued=False) == 2


def test_on_a_gpu_few_lengths_are_chosen_from(monkeypatch):
    """Each is a program there; those that are timed are among them."""
    monkeypatch.setattr(gpu, "steps_at_once", lambda: gpu.STEPS)
    controller, steps_chosen = measured(1e-2, 1e-2)
    assert controller.steps(queued=False) == 4  # 8 of LENGTHS
    assert set(steps_chosen) <= set(GPU_LENGTHS) < set(LENGTHS)
