"""Public names as type checkers and editors see them: signatures, and no further names."""

import sys

import jedi
import pytest

import jrl

USE = """
import jrl
from jrl import fit

reveal_type(jrl.fit)
reveal_type(fit)
reveal_type(jrl.methods.grpo)
reveal_type(jrl.objectives.grpo_loss)
reveal_type(jrl.train.make_step)
jrl.generator
"""


@pytest.mark.slow  # mypy reads the whole library, and JAX
def test_mypy_sees_signatures(tmp_path):
    from mypy import api

    script = tmp_path / "use.py"
    script.write_text(USE)
    cache = str(tmp_path.parent / "mypy")
    out, errors, status = api.run(
        ["--config-file", "pyproject.toml", "--cache-dir", cache, str(script)]
    )
    lines = [line.partition(": note: Revealed type is ")[2] for line in out.splitlines()]
    fit, same, method, loss, step = (line for line in lines if line)
    assert fit == same
    assert fit.startswith('"def (rows: ')
    assert fit.endswith('fallback=jrl.entry.Result]"')
    assert "on_step: (def (dict[str, Any]) -> object) | None" in fit
    assert method.endswith('definition.Published"')
    assert "old_logprobs: jax" in loss
    assert "microbatches: int" in step
    assert 'Module has no attribute "generator"' in out
    assert status == 1, errors


@pytest.mark.parametrize(
    ("call", "first"),
    [
        ("jrl.fit(", "rows"),
        ("jrl.make_step(", "network"),
        ("jrl.objectives.grpo_loss(", "logprobs"),
        ("jrl.episodes.HostEnv(", "init"),
        ("jrl.episodes.tool_env(", "tools"),
        ("jrl.methods.gspo(", "clip_low"),
    ],
)
def test_editors_show_signatures(call, first):
    """As IPython and notebooks ask, from a session in which ``jrl`` is imported."""
    (signature,) = jedi.Interpreter(call, [{"jrl": jrl}]).get_signatures(1, len(call))
    names = [p.name for p in signature.params if p.name != "*"]
    assert names[0] == first
    assert len(names) > 3


def test_editors_complete_public_names_alone():
    names = {c.name for c in jedi.Interpreter("jrl.", [{"jrl": jrl}]).complete(1, 4)}
    assert names == {*jrl.__all__}
    assert "jrl" in sys.modules
