"""Secrets of rewards: used, hidden in what is written, and asked for again."""

import pytest

from jrl.config_io import as_tree, build_config, config_hash, dump, flatten
from jrl.config_secrets import HIDDEN, hide, reveal
from jrl.errors import UserError

TREE = {
    "data": {"task": "sorting"},
    "rewards": {"a.py:judge": {"api_key": "sk-123", "client": {"password": "pw"}, "max_tokens": 9}},
}


@pytest.mark.parametrize(
    "name", ["key", "API_KEY", "authToken", "hf_token", "client_secret", "password", "credentials"]
)
def test_what_looks_like_a_secret_is_hidden(name):
    assert hide({name: "x"}) == {name: HIDDEN}
    assert hide({name: 3}) == {name: 3}
    assert hide({name: "env:X"}) == {name: "env:X"}


@pytest.mark.parametrize("name", ["keyword", "tokenizer", "url", "monkey"])
def test_other_options_are_kept(name):
    assert hide({name: "x"}) == {name: "x"}


def test_nothing_that_is_written_holds_a_secret_and_the_run_has_it():
    config = build_config(TREE)
    for written in (dump(config), str(flatten(config)), str(as_tree(config, none=True))):
        assert "sk-123" not in written
        assert "'pw'" not in written
        assert HIDDEN in written
        assert "max_tokens" in written
    options = config.rewards["a.py:judge"].options
    assert reveal(options, "rewards.x") == TREE["rewards"]["a.py:judge"]


def test_another_key_is_the_same_run():
    other = {**TREE, "rewards": {"a.py:judge": {**TREE["rewards"]["a.py:judge"], "api_key": "b"}}}
    assert config_hash(build_config(other)) == config_hash(build_config(TREE))
    assert flatten(build_config(other)) == flatten(build_config(TREE))


def test_the_environment_gives_a_secret(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-9")
    assert reveal({"api_key": "env:JUDGE_KEY", "n": 1}, "r") == {"api_key": "sk-9", "n": 1}
    assert reveal({"place": "env:JUDGE_KEY"}, "r") == {"place": "env:JUDGE_KEY"}
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(UserError, match="r.api_key = 'env:JUDGE_KEY': there is no environment"):
        reveal({"api_key": "env:JUDGE_KEY"}, "r")


def test_the_secret_of_a_run_directory_is_asked_for():
    with pytest.raises(UserError, match=r"rewards.j.c.token = .*give it again, or keep it in an e"):
        reveal({"c": {"token": HIDDEN}}, "rewards.j")
