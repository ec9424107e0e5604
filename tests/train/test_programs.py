"""Number of programs that a run compiles before its first steps end."""

from jrl.config import load_config
from jrl.run.run import train
from jrl.system.compile_cache import CompileCounter

TASK = (
    *("data.task=sequence", "data.difficulty=1", "rewards={verify={}, partial={weight=0.5}}"),
    "model.config={layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}",
    *("sampling.group=4", "train.prompts=4", "train.steps=3", "checkpoint.every=0"),
)


def test_a_run_in_host_mode_has_few_programs(tmp_path, monkeypatch):
    """Both programs of a step, the state, the evaluation, and what is between them."""
    monkeypatch.setenv("JRL_CACHE_DIR", "")
    config = load_config(None, (*TASK, "eval.problems=8", f"run.dir={tmp_path / 'run'}"))
    with CompileCounter() as compiles:
        train(config, echo=lambda line: None)
    assert compiles.count < 12
