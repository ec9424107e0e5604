"""Numbers and addresses that environments are given or give: each is checked, and named."""

import numpy as np
import pytest

from jrl.episodes.host import EnvError, reward_parts
from jrl.episodes.model_endpoint import check_url, keyed_endpoint
from jrl.errors import UserError


@pytest.mark.parametrize("value", [1e308, -1e39, 10**400, np.float64(1e200)])
def test_a_reward_that_float32_cannot_hold_is_named(value):
    with pytest.raises(EnvError, match=r"reward is .*(infinite in float32|not finite)"):
        reward_parts(value, 1)


def test_large_rewards_that_it_holds_pass():
    assert reward_parts([3e38, -3e38, 0], 3) == (3e38, -3e38, 0.0)


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
