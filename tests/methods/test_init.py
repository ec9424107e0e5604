import json
import sys

import pytest

import jrl.methods
from jrl.errors import UserError
from jrl.methods import all_methods, get_method, list_methods

STANDARD = {
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "gspo_token",
    "cispo",
    "rloo",
    "reinforce_plus_plus",
    "remax",
    "ppo",
    "sft",
    "reinforce",
}


def test_the_standard_methods_are_listed_once_each_and_in_order():
    names = [method["name"] for method in list_methods()]
    assert set(names) >= STANDARD
    assert names == sorted(set(names))


def test_the_list_is_json_and_complete():
    for method in json.loads(json.dumps(list_methods())):
        assert method["paper"]
        assert method["family"]
        assert method["summary"].endswith(".")
        assert method["seams"][0] == "objective"


def test_each_paper_is_written_once():
    prose = {name: " ".join(m.__doc__.split()) for name, m in all_methods().items()}
    for name, method in all_methods().items():
        full = f"(arXiv:{method.arxiv}" if method.arxiv else "("
        holders = [x for x, text in prose.items() if f'"{method.paper}" {full}' in text]
        assert len(holders) == 1, f"{name}: {method.paper} stands in {holders}"
        if name not in holders:
            assert f"the paper of ``{holders[0]}``" in prose[name]


def test_seams_and_group_sizes_are_those_of_the_papers():
    methods = {method["name"]: method for method in list_methods()}
    assert methods["dapo"]["seams"] == ["objective", "plan", "edits"]
    assert methods["remax"]["seams"] == ["objective", "plan"]
    assert methods["grpo"]["min_group"] == 2
    assert methods["ppo"]["min_group"] == 1
    assert methods["ppo"]["reward_parts"] == []
    assert methods["car"]["reward_parts"] == ["right", "confidence"]


def test_an_unknown_method_names_the_nearest():
    with pytest.raises(UserError, match="method = 'rlo'; did you mean 'rloo'"):
        get_method("rlo")


def test_a_method_that_needs_the_completion_limit_says_so():
    with pytest.raises(UserError, match="dr_grpo needs max_tokens"):
        get_method("dr_grpo")


@pytest.mark.parametrize(
    ("name", "coefficients", "message"),
    [
        ("grpo", {"clip_hi": 0.3}, "did you mean 'clip_high'"),
        ("grpo", {"clip_low": -0.1}, "grpo.clip_low = -0.1; give a number of at least 0"),
        ("grpo", {"kl_kind": "k1"}, "grpo.kl_kind = 'k1'; give one of k2, k3"),
        ("grpo", {"dual_clip": 1.0}, "a number above 1, or nothing"),
        ("ppo", {"discount": 1.5}, "a number of at least 0, at most 1"),
        ("dapo", {"max_tokens": 8, "buffer_tokens": 9}, "buffer_tokens = 9"),
    ],
)
def test_coefficients_outside_their_domain_are_refused(name, coefficients, message):
    with pytest.raises(UserError) as error:
        get_method(name, **coefficients)
    assert message in str(error.value)


def test_a_new_file_adds_its_methods(tmp_path, monkeypatch):
    (tmp_path / "my_papers.py").write_text(
        "from jrl.methods.base import Method\n"
        "from jrl.methods.definition import variant\n"
        "from jrl.methods.domains import NonNegative\n"
        "from jrl.methods.group_relative import grpo\n"
        "@variant(grpo)\n"
        "def my_method(base: Method, strength: NonNegative = 1.0) -> Method:\n"
        "    '''Mine.'''\n"
        "    return base.with_(epochs=2)\n"
    )
    monkeypatch.setattr(jrl.methods, "__path__", [*jrl.methods.__path__, str(tmp_path)])
    all_methods.cache_clear()
    try:
        assert get_method("my_method", strength=0.5).least_group == 2
        assert all_methods()["grpo"].__module__ == "jrl.methods.group_relative"
    finally:
        monkeypatch.undo()
        sys.modules.pop("jrl.methods.my_papers", None)
        all_methods.cache_clear()
    assert "my_method" not in all_methods()
