"""Numbers and addresses that environments are given or give: each is checked, and named."""

import numpy as np
import pytest

from jrl.episodes.episode import Episode
from jrl.episodes.host import EnvError, Feedback, reward_parts
from jrl.episodes.model_endpoint import check_url, keyed_endpoint
from jrl.episodes.transcript import Segment
from jrl.errors import UserError
from jrl.types import Prompt


@pytest.mark.parametrize("value", [1e308, -1e39, 10**400, np.float64(1e200)])
def test_a_reward_that_float32_cannot_hold_is_named(value):
    with pytest.raises(EnvError, match=r"reward is .*(infinite in float32|not finite)"):
        reward_parts(value, 1)


def test_large_rewards_that_it_holds_pass():
    assert reward_parts([3e38, -3e38, 0], 3) == (3e38, -3e38, 0.0)


def episode_of(*turns):
    """An episode of that many turns of the policy, each with an answer behind it but the last."""
    episode = Episode(0, 0, Prompt(0, "", np.zeros(0, np.int32), None), 5)
    for reward in turns:
        episode.segments += [Segment(np.ones(1, np.int32), True, reward=(reward,))]
        episode.segments += [Segment(np.ones(1, np.int32), False)]
    episode.segments[-1] = Segment(np.ones(1, np.int32), True)
    return episode


def test_rewards_whose_sum_float32_cannot_hold_fail_their_episode_by_name():
    """Each turn's fits, all of them together do not: the batch would hold an infinite score."""
    fine = episode_of(3e38, 0.0)
    fine.pay(Feedback((), (3e37,), True))
    assert fine.segments[-1].reward == (3e37,)
    with pytest.raises(
        EnvError, match=r"rewards of its turns add up to 6e\+38, infinite in float32"
    ):
        episode_of(3e38, 0.0).pay(Feedback((), (3e38,), True))
    fine.pay(Feedback((), (0.0,), True, metrics={"n": 2e38}))
    with pytest.raises(EnvError, match=r"metric n adds up to 4e\+38, infinite in float32"):
        fine.pay(Feedback((), (0.0,), True, metrics={"n": 2e38}))


@pytest.mark.parametrize(
    "url",
    ["ftp://x", "localhost:8000/v1", "http://", "http://:80", "http://h:x/", "http://a b", 3, ""],
)
def test_an_address_of_no_server_is_refused_where_it_is_written(url):
    with pytest.raises(UserError, match=r"^data\.writer\.url = .*; write an address such as"):
        keyed_endpoint(url, "m", key="data.writer.key_variable")


@pytest.mark.parametrize("url", ["http://localhost:8000/v1", "https://host", "http://[::1]:80/v1"])
def test_addresses_of_servers_pass(url):
    assert check_url(url, "--url") == url
