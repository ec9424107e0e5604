"""gymnasium's environments as text: the same episode as without it."""

import numpy as np
import pytest
from scripted import reply

from jrl.episodes.check_env import check_env
from jrl.episodes.host import Limits
from jrl.errors import UserError
from jrl.types import Prompt
from jrl.zoo.adapters.gymnasium import from_gymnasium

PROMPT = Prompt(0, "Walk.", np.zeros(0, np.int32), None)
ACTIONS = {"left": 0, "down": 1, "right": 2, "up": 3}


MADE = []


class Line:
    """A walk on a line, in gymnasium's interface; the seed says where it starts."""

    def __init__(self):
        self.closed = False
        MADE.append(self)

    def reset(self, *, seed):
        self.place = seed % 3
        return self.place, {}

    def step(self, action):
        self.place += action - 1
        return self.place, float(self.place == 4), self.place == 4, self.place < 0, {}

    def close(self):
        self.closed = True


def test_an_episode_is_that_of_the_environment():
    env = check_env(from_gymnasium(Line, "at {}".format, ACTIONS.get, Limits()))
    state, opening = env.init(PROMPT, 5)
    assert opening.messages == [{"role": "user", "content": "Walk.\nat 2"}]
    other, again = env.init(PROMPT, 5)
    assert again == opening
    assert other is not state
    state, feedback = env.step(state, reply("sideways"))
    assert feedback.metrics == {"unreadable": 1.0}
    assert not feedback.done
    # An unreadable turn leaves the state as it is, and a way back leads to the first one.
    assert feedback.state_key == opening.state_key == "at 2"
    state, feedback = env.step(state, reply("right"))
    assert (feedback.messages[0]["content"], feedback.reward, feedback.done) == ("at 3", 0.0, False)
    state, feedback = env.step(state, reply("right"))
    assert (feedback.reward, feedback.done, feedback.success) == (1.0, True, True)
    env.close(state)
    assert [line.closed for line in MADE[-2:]] == [True, False]
    for _ in range(3):
        other, feedback = env.step(other, reply("left"))
    assert (feedback.done, feedback.success) == (True, False)


class Three:
    """A discrete space of three actions, as gymnasium's."""

    n = 3

    def contains(self, action):
        return action in (0, 1, 2)


class Bounded(Line):
    """The walk with a space of actions, which fails at others in its own way."""

    action_space = Three()

    def step(self, action):
        return super().step([0, 1, 2][action])


def test_an_action_that_is_none_of_the_space_s_costs_the_turn():
    env = from_gymnasium(Bounded, str, int, Limits())
    state, _ = env.init(PROMPT, 5)
    state, feedback = env.step(state, reply("42"))
    assert (feedback.metrics, feedback.done) == ({"unreadable": 1.0}, False)
    assert env.step(state, reply("2"))[1].messages[0]["content"] == "3"


def test_a_named_environment_needs_the_extra():
    try:
        import gymnasium
    except ImportError:
        with pytest.raises(UserError, match="needs gymnasium; install it: "):
            from_gymnasium("FrozenLake-v1", str, int, Limits())
        return
    env = from_gymnasium(
        "FrozenLake-v1", str, ACTIONS.get, Limits(), options={"is_slippery": False}
    )
    lake = gymnasium.make("FrozenLake-v1", is_slippery=False)
    observation, _ = lake.reset(seed=3)
    state, opening = env.init(PROMPT, 3)
    assert opening.messages[0]["content"] == f"Walk.\n{observation}"
    for word in ("down", "down", "right", "right", "down", "right"):
        observation, reward, terminated, _, _ = lake.step(ACTIONS[word])
        state, feedback = env.step(state, reply(word))
        assert feedback.messages[0]["content"] == str(observation)
        assert (feedback.reward, feedback.done) == (reward, terminated)
    assert feedback.success
    env.close(state)
