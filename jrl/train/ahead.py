"""The training step, compiled beside the sampler instead of after the first rollout.

XLA compiles without Python's lock, so that two programs take about as long as the slower of them.
The thread only compiles: JAX keeps the executable with the jitted function, and the first call of
that finds it there. A batch of other shapes than foreseen is compiled for when it comes.
"""

from __future__ import annotations

import contextlib
import threading
from types import TracebackType
from typing import Any, Self

import jax

from jrl.mesh import named_platform
from jrl.setup.run import Run
from jrl.train import programs
from jrl.train.shapes import abstract_batch, abstract_parameters


class StepAhead:
    """Context manager that compiles a run's training step in another thread; called as the step is.

    Args:
      run: with its rematerialisation settled.

    Attributes:
      step: the jitted step, which every call goes to.
    """

    def __init__(self, run: Run) -> None:
        self._shapes, shardings = programs.abstract_state(run)
        self._run = run._replace(params=None)  # the host's copy of a checkpoint must not stay
        self.step: Any = programs.train_program(self._run, shardings)
        self._batch: Any = None  # the shapes that are compiled for
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        """Begins to compile, where that pays; see ``pays``."""
        if pays(self._run):
            self._thread = threading.Thread(target=self._compile, name="compile-step")
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Waits for the compiler, which cannot be interrupted and must not outlive the process."""
        self._wait()

    def __call__(self, state: Any, batch: Any, *rest: Any) -> Any:
        """The step, compiled once."""
        if _shapes(batch) == _shapes(self._batch):
            self._wait()  # two threads would compile the same program twice
        return self.step(state, batch, *rest)

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _compile(self) -> None:
        run = self._run
        # What fails here fails in the step itself, too, where it is reported.
        with contextlib.suppress(Exception), jax.set_mesh(run.mesh):
            self._batch = abstract_batch(run)
            self.step.lower(self._shapes, self._batch, abstract_parameters(run)).compile()


def _shapes(tree: Any) -> Any:
    """Key for comparing two trees of arrays, or of their shapes."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def pays(run: Run) -> bool:
    """Whether a second thread shortens the start of a run.

    Not on a CPU, whose cores compile the sampler already and where a compiler that is still at work
    would hold up an interrupt; not with several processes, which compile in one order; and not
    where the first batch's shapes depend on what is drawn.
    """
    platform = named_platform(run.mesh.devices.flat[0].platform)
    train = run.config.train
    return platform != "cpu" and jax.process_count() == 1 and train.mode == "host"
