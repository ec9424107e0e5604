"""Faults that the house test exists for, planted one at a time; each must turn it red.

    python tests/mutants.py            # all of them
    python tests/mutants.py NAME ...   # some

A mutant is an edit of the library's source in a copy. The house test's check runs against the copy
in a process of its own, a fork of one that has imported JAX and other packages, but nothing of the
library; the fault is caught when that check fails by its assertion.
``test_mutants.py`` runs this list, and first checks that the unedited copy is green.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

SERVE = "--serve"
ROOT = pathlib.Path(__file__).resolve().parent.parent


class Mutant(NamedTuple):
    """One planted fault.

    Attributes:
      check: the house test's number that must turn red.
      file: below jrl/.
      old: text that occurs exactly once in it.
      new: what takes its place.
    """

    check: int
    file: str
    old: str
    new: str


MUTANTS = {
    "a frame for every hop": Mutant(
        1,
        "train/loop.py",
        "        batch, groups, cursor = batches.collect(state.key, weights(state), "
        "step=i, cursor=cursor)\n",
        "        deep = lambda f: lambda *a, **k: f(*a, **k)\n"
        "        drawn = deep(batches.collect)(state.key, weights(state), step=i, cursor=cursor)\n"
        "        batch, groups, cursor = drawn\n",
    ),
    "a hop that begins elsewhere": Mutant(
        2,
        "train/loop.py",
        "        begin = time.perf_counter()\n",
        "        from jrl.train.router import router_pairs\n"
        "        begin = time.perf_counter() + len(router_pairs({}))\n",
    ),
    "weights that lose their place": Mutant(
        4,
        "train/step.py",
        "        out_shardings=(shardings, replicated(mesh)),\n",
        "        out_shardings=replicated(mesh),\n",
    ),
    "a second executable at step 2": Mutant(
        3,
        "train/step.py",
        "        in_shardings=(shardings, None, replicated(mesh)),\n"
        "        out_shardings=(shardings, replicated(mesh)),\n",
        "        out_shardings=replicated(mesh),\n",
    ),
    "a batch left on the host": Mutant(
        5,
        "collect/groups.py",
        "    rows = _place(batch.replace(reward_weights=None), batch_sharding(mesh))\n",
        "    rows = jax.device_get(batch.replace(reward_weights=None))\n",
    ),
    "a constant sampling key": Mutant(
        6,
        "collect/sources_task.py",
        "stream(request.key, sample_stream(request), request.step)\n",
        "stream(request.key, sample_stream(request), 0)\n",
    ),
    "one key for a whole group": Mutant(
        6,
        "sampling/sequences.py",
        "(None, 0)))(prompt_keys, numbers)",
        "(None, 0)))(prompt_keys, 0 * numbers)",
    ),
    "log-probability before temperature": Mutant(
        7,
        "sampling/slots.py",
        "logits, slots.sampling_params)\n",
        "logits, slots.sampling_params)\n"
        "        raw = jax.nn.log_softmax(logits)\n"
        "        logprob = jnp.take_along_axis(raw, token[:, None], axis=1)[:, 0]\n",
    ),
    "a trainer that ignores truncation": Mutant(
        7,
        "sampling/params.py",
        "        scaled = jnp.where(mask, scaled, -jnp.inf)\n    total",
        "        pass\n    total",
    ),
    "hidden states one column late": Mutant(
        7,
        "train/batch_rows.py",
        "jnp.concatenate([last, batch.tokens[:, :, :-1]], axis=2)",
        "batch.tokens",
    ),
    "prompt padding that is attended to": Mutant(
        7,
        "models/layers.py",
        "at_both = shared_attention(options.attention, config, rows)\n",
        "rows = rows._replace(prompt_lengths=p + 0 * rows.prompt_lengths)\n"
        "    at_both = shared_attention(options.attention, config, rows)\n",
    ),
    "the wrong sign": Mutant(
        8,
        "objectives/policy.py",
        "    advantages = jax.lax.stop_gradient(jnp.where(live, advantages, 0))\n",
        "    advantages = -jax.lax.stop_gradient(jnp.where(live, advantages, 0))\n",
    ),
    "no baseline": Mutant(
        8,
        "objectives/advantages.py",
        "    return jnp.where(members, shifted - mean, 0)\n",
        "    return jnp.where(members, shifted, 0)\n",
    ),
    "the stop token left untrained": Mutant(
        8,
        "collect/groups.py",
        "        mask=rollout.mask & members[:, :, None],\n",
        "        mask=rollout.mask & members[:, :, None] & (rollout.tokens != 1),\n",
    ),
    "a mean of means over microbatches": Mutant(
        9,
        "train/step.py",
        "        terms = {name: (total, counts[name]) for name, (total, _) in terms.items()}\n",
        "        terms = {k: (t, c * microbatches) for k, (t, c) in terms.items()}\n",
    ),
    "moments forgotten on resume": Mutant(
        10,
        "run/records.py",
        "        self.position = Position(**extra)\n",
        "        self.position = Position(**extra)\n"
        "        from jrl.train.compiled import with_policy\n"
        "        state = with_policy(state, state.params['policy'], self.run.optimizer)\n",
    ),
    "data that starts over on resume": Mutant(
        10,
        "run/records.py",
        "        self.position = Position(**extra)\n",
        "        self.position = Position(**(extra | {'cursor': 0}))\n",
    ),
    "a state that is copied, not donated": Mutant(
        4,
        "train/step.py",
        "        donate_argnums=0,\n",
        "",
    ),
    "a constant sampling key for prompts in text": Mutant(
        6,
        "collect/sources_text.py",
        "compiled_stream(root_key(request), request.stream, request.step)",
        "compiled_stream(root_key(request), request.stream, 0)",
    ),
    "the same prompts at every step": Mutant(
        6,
        "collect/plan.py",
        "xp.asarray(collected.cursor + count, np.int32)",
        "xp.asarray(collected.cursor, np.int32)",
    ),
    "a cursor that the loop forgets": Mutant(
        6,
        "train/loop.py",
        "step=i, cursor=cursor)",
        "step=i, cursor=0)",
    ),
    "a biased draw": Mutant(
        7,
        "sampling/slots.py",
        "jax.random.uniform(jax.random.fold_in(key, t))",
        "jax.random.uniform(jax.random.fold_in(key, t)) ** 2",
    ),
    "a temperature that nobody reads": Mutant(
        7,
        "sampling/params.py",
        "jnp.where(greedy, 1.0, temperature), greedy",
        "jnp.where(greedy, 1.0, 1.0), greedy",
    ),
    "the upper clip on the wrong side": Mutant(
        8,
        "objectives/ratios.py",
        "        above = (advantages > 0) & (ratio > greatest)",
        "        above = (advantages < 0) & (ratio > greatest)",
    ),
    "a divergence that is rewarded": Mutant(
        8,
        "objectives/regularizers.py",
        "        return divergence(stats",
        "        return -divergence(stats",
    ),
    "a reference that moves along": Mutant(
        8,
        "train/step.py",
        "policies_of(state.params, state.frozen, parts.network),",
        'policies_of(state.params, {"ref": state.params["policy"]}, parts.network),',
    ),
    "epochs that reuse the first gradient": Mutant(
        8,
        "train/step.py",
        "_gradient(parts, at, state.frozen, ",
        "_gradient(parts, state.params, state.frozen, ",
    ),
    "the same minibatch every time": Mutant(
        8,
        "train/step.py",
        "(order, part * (n // minibatches)",
        "(order, 0 * part",
    ),
    "rewards of other problems": Mutant(
        8,
        "collect/sources_task.py",
        "judge_problems(task, parts, problems, rollout",
        "judge_problems(task, parts, jax.tree.map(lambda x: x[::-1], problems), rollout",
    ),
    "rewards of other prompts in text": Mutant(
        8,
        "judging/host.py",
        "make_sample(self.prompts[i], tokens",
        "make_sample(self.prompts[j % len(self.prompts)], tokens",
    ),
    "evaluation on problems trained on": Mutant(
        10,
        "train/compiled.py",
        ', split="eval")',
        ', split="train")',
    ),
    "a gradient that is not clipped": Mutant(
        10,
        "train/optimizer.py",
        "        if is_zero(numbers_table.clip_norm):\n",
        "        if True:\n",
    ),
}


def copy_of_library(directory: pathlib.Path) -> pathlib.Path:
    """The library and its house test, alone in ``directory``."""
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "jrl", directory / "jrl", ignore=skip)
    (directory / "configs").mkdir()
    shutil.copy(ROOT / "configs" / "tiny.toml", directory / "configs")
    (directory / "tests").mkdir()
    for name in ("conftest.py", "house_test.py", "small_policy.py", "slow.txt"):
        shutil.copy(ROOT / "tests" / name, directory / "tests" / name)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, directory)
    return directory


class Forks:
    """Runs checks in forks of a process that has imported all packages but the library.

    Importing them takes longer than many a check. No device is opened before the fork, and XLA has
    no threads yet.
    """

    def __init__(self) -> None:
        environment = dict(os.environ)
        # JAX reads these as it is imported, before the house test's conftest can set them.
        environment.setdefault("JAX_PLATFORMS", "cpu")
        environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
        environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
        self._server = subprocess.Popen(
            [sys.executable, __file__, SERVE],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, directory: pathlib.Path, checks: str) -> subprocess.CompletedProcess[str]:
        """The copy's house test, those tests whose names match ``checks``."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        output = directory / "output.txt"
        self._server.stdin.write(json.dumps([str(directory), checks, str(output)]) + "\n")
        self._server.stdin.flush()
        code = int(self._server.stdout.readline())
        return subprocess.CompletedProcess([checks], code, output.read_text())

    def close(self) -> None:
        """Ends the process."""
        self._server.communicate()


def serve() -> None:
    """Forks a process for each line of standard input, and prints its exit code."""
    names = ("chex", "flax.linen", "jax.numpy", "optax", "orbax.checkpoint", "pydantic", "yaml")
    for name in (*names, "numpy", "pytest", "tokenizers", "typer"):
        importlib.import_module(name)
    for line in sys.stdin:
        directory, checks, output = json.loads(line)
        child = os.fork()
        if child == 0:
            _check(directory, checks, output)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _check(directory: str, checks: str, output: str) -> NoReturn:
    with open(output, "wb") as file:
        for standard in (1, 2):
            os.dup2(file.fileno(), standard)
    os.chdir(directory)
    os.environ["PYTHONPATH"] = directory
    sys.path.insert(0, directory)
    signal.alarm(600)  # a check that hangs ends its process
    import pytest

    options = ["-x", "-p", "no:cacheprovider", "-m", "", "-k", checks]
    code = pytest.main([*options, "tests/house_test.py"])
    sys.stdout.flush()
    os._exit(int(code))


@contextmanager
def planted(name: str, directory: pathlib.Path) -> Iterator[None]:
    """Edits the copy for a while; an edit that no longer fits the source is an error.

    The file has its own time again afterwards, which tells Python that the bytecode of the edited
    one is of another.
    """
    mutant = MUTANTS[name]
    path = directory / "jrl" / mutant.file
    text = path.read_text()
    assert text.count(mutant.old) == 1, f"{name!r}: {mutant.file} has changed; mend the mutant"
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        yield
    finally:
        shutil.copy2(ROOT / "jrl" / mutant.file, path)


def verdict(name: str, forks: Forks, directory: pathlib.Path) -> tuple[bool, str]:
    """Whether the house test catches a mutant in a copy, and the output of pytest.

    One copy serves all, so that Python compiles the library's other files once.
    """
    with planted(name, directory):
        result = forks.run(directory, f"test_{MUTANTS[name].check}_")
    failed = f"FAILED tests/house_test.py::test_{MUTANTS[name].check}_" in result.stdout
    by_the_check = "AssertionError" in result.stdout or "Disallowed" in result.stdout
    caught = result.returncode == 1 and failed and by_the_check
    return caught, result.stdout


def main() -> int:
    """Prints a line a mutant; the exit status says whether all were caught."""
    missed, forks = 0, Forks()
    with tempfile.TemporaryDirectory() as scratch:
        directory = copy_of_library(pathlib.Path(scratch))
        for name in sys.argv[1:] or MUTANTS:
            caught, _ = verdict(name, forks, directory)
            missed += not caught
            print(
                f"{'caught' if caught else 'MISSED'}  check {MUTANTS[name].check:>2}  {name}",
                flush=True,
            )
    forks.close()
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(serve() if sys.argv[1:] == [SERVE] else main())
