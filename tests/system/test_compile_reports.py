"""Lines about compiling: for programs that take long, once each, and for no other."""

import time
import types

import jax
import jax.numpy as jnp
import optax
import pytest

from jrl.config import load_config
from jrl.mesh import make_mesh
from jrl.run.compiles_sooner import compiles_sooner
from jrl.system import compile_reports
from jrl.system.compile_reports import CompileNotes, compile_run


@pytest.fixture
def patience(monkeypatch):
    monkeypatch.setattr(compile_reports, "PATIENCE", 0.02)


def events(notes, name, seconds, traced=None):
    """Events of JAX while a program is compiled for ``seconds``."""
    if traced is not None:
        notes._on_duration("/jax/core/compile/jaxpr_trace_duration", traced, fun_name=name)
    notes._on_duration("/jax/core/compile/jaxpr_to_mlir_module_duration", 0.1, fun_name=name)
    time.sleep(seconds)
    notes._on_duration("/jax/core/compile/backend_compile_duration", seconds, fun_name=name)


def test_long_compilations_are_said_and_short_ones_are_not(patience):
    lines = []
    with CompileNotes(lines.append) as notes:
        events(notes, "step", 0.3)
        events(notes, "generate", 0.0)
        events(notes, "somebody_s_own", 0.1)
        time.sleep(0.1)
    assert lines == ["compiling the training step ...", "compiled the training step in 0 s"]


def test_the_time_is_estimated_from_tracing_and_lowering(patience):
    lines = []
    with CompileNotes(lines.append) as notes:
        events(notes, "jit(iterate)", 0.1, traced=1.7)
        events(notes, "jit(step)", 0.1, traced=0.01)
        events(notes, "jit(step)", 0.1)  # traced before: nothing to estimate it from
    assert [line for line in lines if line.startswith("compiling")] == [
        "compiling one program for all steps (about 20 s)",
        "compiling the training step (about 5 s)",
        "compiling the training step ...",
    ]


def test_what_compiles_sooner_is_named_where_it_takes_long(patience):
    lines = []
    with CompileNotes(lines.append, sooner={"generate": "fewer tokens compile sooner"}) as notes:
        events(notes, "generate", 0.1, traced=8.0)
        events(notes, "generate", 0.1, traced=0.2)
        events(notes, "step", 0.1, traced=8.0)
    assert [line for line in lines if line.startswith("compiling")] == [
        "compiling the sampler (about 90 s); fewer tokens compile sooner",
        "compiling the sampler (about 5 s)",
        "compiling the training step (about 90 s)",
    ]


def test_a_line_ends_with_its_own_program(patience):
    lines = []
    with CompileNotes(lines.append) as notes:
        lowered = "/jax/core/compile/jaxpr_to_mlir_module_duration"
        compiled = "/jax/core/compile/backend_compile_duration"
        notes._on_duration(lowered, 0.1, fun_name="generate")
        time.sleep(0.2)
        notes._on_duration(lowered, 0.1, fun_name="step")
        notes._on_duration(compiled, 0.1, fun_name="broadcast_in_dim")
        assert lines == ["compiling the sampler ..."]
        time.sleep(0.2)
        notes._on_duration(compiled, 0.1, fun_name="jit(step)")
        notes._on_duration(compiled, 0.1, fun_name="generate")
    assert [line.rpartition(" in ")[0] for line in lines[2:]] == [
        *("compiled the training step", "compiled the sampler")
    ]


def test_an_estimate_has_an_end():
    assert compile_reports._about(compile_reports._estimate(5.0, 1.0)) == " (about 65 s)"
    assert compile_reports._about(compile_reports._estimate(50.0, 6.0)) == " (2 minutes or more)"


def test_a_whole_run_is_compiled_with_a_word_beforehand(patience):
    lines = []

    def run(key, hyperparameters):
        x = jax.random.normal(key, (4, 4)) * hyperparameters["learning_rate"]
        for _ in range(150):
            x = jnp.sin(x @ x) / 4  # shrinks, so that rounding stays small
        return x

    args = jax.random.key(int(time.time())), {"learning_rate": 0.5 + time.time() % 1}
    program = compile_run(jax.vmap(run, (0, None)), args[0][None], args[1], echo=lines.append)
    outputs = program(args[0][None], args[1])
    assert jnp.allclose(outputs[0], run(*args), atol=1e-5)
    assert not lines or lines[0].startswith("compiling one program for the whole run (about ")


def test_jax_tells_what_it_compiles(patience):
    """The names of events are JAX's own, and may change with it."""
    lines = []

    def held_out(x):
        for _ in range(150):
            x = jnp.sin(x @ x) / 4  # shrinks, so that rounding stays small
        return x

    with CompileNotes(lines.append):
        jax.jit(held_out)(jnp.ones((4, 4)) * jnp.float32(time.time() % 1))
    assert lines[0].startswith("compiling the evaluation (about ")
    assert lines[1].startswith("compiled the evaluation in ")
    jax.jit(held_out)(jnp.ones((5, 5)))
    assert len(lines) == 2


def slow_run(key):
    """A program that takes longer to compile than the patience of these tests."""
    x = jax.random.normal(key, (4, 4)) * jnp.float32(time.time() % 1)
    for _ in range(150):
        x = jnp.sin(x @ x) / 4
    compile_reports.report_traced_run(key)
    return x


@pytest.mark.parametrize("wrap", [lambda f: f, jax.vmap, lambda f: lambda key: f(key)])
def test_a_plain_jit_of_a_run_reports_that_it_compiles(patience, capsys, wrap):
    key = jax.random.key(0)
    jax.jit(wrap(slow_run))(key[None] if wrap is jax.vmap else key)
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("compiling one program for the whole run (about ")
    assert last.startswith("compiled one program for the whole run in ")
    jax.jit(lambda x: sum(jnp.sin(x @ x) for _ in range(150)))(jnp.ones((3, 3)) * 0.5)
    assert not capsys.readouterr().out  # of a later program nothing is printed


def test_a_run_is_reported_once(patience, capsys):
    lines = []
    compile_run(slow_run, jax.random.key(0), echo=lines.append)
    assert len(lines) == 2
    assert not capsys.readouterr().out
    slow_run(jax.random.key(0))  # without jit nothing is expected afterwards
    assert not compile_reports._of_plain_jit()._expected


def test_every_run_of_make_run_is_reported(monkeypatch):
    from jrl.data.tasks import get_task
    from jrl.methods import get_method
    from jrl.models.config import ModelConfig
    from jrl.models.transformer import transformer
    from jrl.train import compiled

    task, calls = get_task("sorting", difficulty=3), []
    length = task.prompt_tokens + task.completion_tokens
    sizes = {"layers": 1, "embed_dim": 8, "heads": 1, "kv_heads": 1, "head_dim": 8, "mlp_dim": 8}
    network = transformer(ModelConfig(vocab_size=task.vocab_size, max_length=length, **sizes))
    monkeypatch.setattr(compiled, "report_traced_run", lambda *x: calls.append(len(x)))
    run = compiled.make_run(
        method=get_method("rloo"),
        task=task,
        network=network,
        optimizer=optax.sgd,
        steps=1,
        prompts=2,
        group=2,
        weights={"verify": 1.0},
        eval_problems=2,
    )
    jax.eval_shape(run, jax.random.key(0), {"learning_rate": jnp.float32(0.1)})
    assert calls == [2]


def test_a_run_names_the_key_by_which_its_programs_compile_sooner(monkeypatch):
    def remedies_of(*settings):
        config = load_config(None, ["data.train=x.jsonl", "model.path=x", *settings])
        mesh = make_mesh({}, jax.devices()[:1])
        return compiles_sooner(types.SimpleNamespace(config=config, mesh=mesh, model=None))

    text = remedies_of("sampling.max_new_tokens=512")["generate"]
    assert text.startswith("sampling.max_new_tokens = 512; below 256")
    assert remedies_of("sampling.max_new_tokens=255") == {}
    packed = remedies_of("sampling.max_new_tokens=255", "train.mode=packed")
    assert packed["step"].startswith("train.mode = 'packed' compiles it once for each of up to 16")
    # On an accelerator no smaller states are compiled, and each piece of the cache is a branch.
    monkeypatch.setattr("jrl.run.compiles_sooner.time_follows_rows", lambda: False)
    monkeypatch.setattr("jrl.run.compiles_sooner.pieces_of", lambda n: n // 64)
    text = remedies_of("sampling.max_new_tokens=255")["task_rollout"]
    assert text == (
        "sampling.max_new_tokens = 255 keep their cache in 3 pieces; up to 127 it compiles in half"
    )


def test_without_an_estimate_a_large_program_says_what_compiles_sooner(patience, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    lines = []
    with CompileNotes(lines.append, sooner={"generate": "fewer tokens compile sooner"}) as notes:
        events(notes, "generate", 0.4, traced=0.9)
        events(notes, "generate", 0.1, traced=0.2)
    assert [line for line in lines if line.startswith("compiling")] == [
        "compiling the sampler ...; fewer tokens compile sooner",
        "compiling the sampler ...",
    ]
