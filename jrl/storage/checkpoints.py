"""Checkpoints: atomic steps on disk with the arrays of a training state and values of the host.

A step is a directory that gets its final name only when it is complete. Leaves are stored under
their paths (``params.policy.layers.wq``) with shapes and dtypes, so a mismatch is named before any
array is read, and with checksums, so a flipped bit is seen. A state restores onto any mesh: the
template gives the sharding of each leaf.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pathlib
import traceback
import warnings
from collections.abc import Mapping
from typing import Any

import jax

from jrl.errors import StorageError, UserError
from jrl.storage.lock import is_replaced
from jrl.storage.step_contents import (
    all_processes,
    contents,
    drop_late_callbacks,
    read_contents,
)
from jrl.storage.step_files import readable, write_record
from jrl.system.wait_reports import io_progress, waiting

STEP_DIGITS = 8
_LONGEST_SAVE = 7 * 24 * 3600
"""Seconds."""


class Checkpoints:
    """The checkpoints of one run: the newest, and those that are kept for good.

    Nothing is written or deleted before the first ``save``, so another program may read the
    directory of a running one. All processes of a multi-process run make the same calls.

    Args:
      directory: one sub-directory a step; created if missing. Local or ``gs://``.
      keep: how many steps to keep, at least 1; older ones are deleted once a newer one is complete.
      keep_every: steps that it divides are kept for good; 0 keeps none so.

    Raises:
      UserError: ``keep`` below 1.
    """

    def __init__(self, directory: str | pathlib.Path, keep: int, *, keep_every: int = 0):
        if keep < 1:
            raise UserError(f"checkpoint.keep = {keep}; keep at least 1")
        text = str(directory)
        self.directory = text if "://" in text else str(pathlib.Path(text).absolute())
        self.keep, self.keep_every = keep, keep_every
        self._best: int | None = None
        self._good: int | None = None
        self._writer: Any = None
        self._newest = -1  # the step that was saved or restored last
        self._writing = -1
        self._damaged: set[int] = set()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Closes; an error of closing does not hide one that is already raised."""
        try:
            self.close()
        except UserError:
            if error is None:
                raise

    def steps(self) -> list[int]:
        """The complete steps on disk, oldest first."""
        import orbax.checkpoint as ocp

        return sorted(ocp.utils.checkpoint_steps(self.directory))

    def latest_step(self) -> int | None:
        """The newest complete step on disk, or None."""
        return max(self.steps(), default=None)

    def save(
        self,
        step: int,
        state: Any,
        *,
        extra: Mapping[str, Any] | None = None,
        best: int | None = None,
        good: int | None = None,
    ) -> None:
        """Writes a step in the background; an existing step is never overwritten.

        Returns once the arrays are copied off the devices, so the state may be donated. Waits for
        the previous save. Saving the step that was saved or restored last does nothing. Steps
        found damaged while restoring are deleted first.

        Args:
          step: training steps done, at least 0.
          state: any pytree of arrays, typed PRNG keys and Python numbers; None where absent.
          extra: values of the host (data position, metrics, batches sampled ahead): JSON values,
            and NumPy arrays inside dicts and lists.
          best: a step that is not deleted, however old, until another is named.
          good: another one.

        Raises:
          StorageError: this save failed, or with several processes the one before it; earlier steps
            are unchanged.
          UserError: ``extra`` is not JSON, or the directory has later steps than the one this run
            resumed from.
        """
        import orbax.checkpoint as ocp

        try:
            self.wait()
        except StorageError as error:
            if jax.process_count() > 1:  # the others have not seen it
                raise
            # An earlier step that could not be written is no reason not to write this one.
            warnings.warn(str(error), stacklevel=2)
        if step == self._newest:
            return
        self.check_writable(step)
        if later := [s for s in self.steps() if s >= step and s not in self._damaged]:
            raise UserError(
                f"checkpoint step {step} is older than step {max(later)} in {self.directory}, which"
                " another continuation wrote; delete the later steps or use another run.dir"
            )
        arrays, meta = contents(state, extra or {}, step=step, label=f"checkpoint step {step}")
        self._best, self._good = best, good
        try:
            writer = self._open_writer()
            for old in sorted(self._damaged & set(self.steps())):
                writer.delete(old)
            self._writing = step
            with waiting(f"saving of step {step}", io_progress):
                writer.save(
                    step,
                    args=ocp.args.Composite(
                        state=ocp.args.PyTreeSave(arrays), meta=ocp.args.JsonSave(meta)
                    ),
                    force=True,
                )
        except (OSError, ValueError) as error:
            raise self._not_written(step, error) from error
        self._damaged.clear()
        self._newest = step

    def check_writable(self, step: int = 0) -> None:
        """Raises StorageError when the directory takes no files, without waiting for the writer.

        Its threads would retry for minutes. A bucket is not tried.

        Args:
          step: what is about to be saved.
        """
        fault: Exception | None = None
        if "://" not in self.directory and jax.process_index() == 0:
            probe = pathlib.Path(self.directory) / f".probe-{os.getpid()}"
            try:
                if is_replaced(probe.parent.parent):
                    raise FileNotFoundError(errno.ENOENT, "run.dir is not there any more")
                probe.parent.mkdir(parents=True, exist_ok=True)
                probe.write_bytes(bytes(4096))
                probe.unlink()
            except OSError as error:
                fault = error
                with contextlib.suppress(OSError):
                    probe.unlink(missing_ok=True)
        if not all_processes(fault is None):
            raise self._not_written(step, fault or OSError("process 0 cannot write there"))

    def check(self) -> None:
        """Raises StorageError when the save in the background has failed already."""
        # Orbax keeps the error of what has ended in the thread that finalizes, which is asked by a
        # wait alone.
        if self._writer is not None and not self._writer.is_saving_in_progress():
            self._check_writer(wait=True)

    def wait(self) -> None:
        """Blocks until the save in the background is complete.

        Raises:
          StorageError: it failed; earlier steps are unchanged.
        """
        self._check_writer(wait=True)

    def _check_writer(self, *, wait: bool) -> None:
        if self._writer is None:
            return
        try:
            if wait:
                with waiting(f"saving of step {self._writing}", io_progress):
                    self._writer.wait_until_finished()
            self._writer.check_for_errors()
        except (OSError, ValueError) as error:
            raise self._not_written(self._newest, error) from error

    def close(self) -> None:
        """Waits, then ends the writer's threads; a later ``save`` starts them again."""
        try:
            self.wait()
        finally:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()

    def restore(
        self, template: Any, step: int | None = None, *, subset: bool = False
    ) -> tuple[Any, dict[str, Any]]:
        """The state of a step, bit for bit, with the shardings of the template's leaves.

        A damaged step is skipped with a warning and the one before it is read, unless ``step``
        names it.

        Args:
          template: a tree like the saved one. A leaf with a sharding (a placed array, or
            ``jax.ShapeDtypeStruct(shape, dtype, sharding=...)``) restores onto it; an uncommitted
            array or a plain struct restores uncommitted; NumPy arrays and Python numbers restore
            as such.
          step: the step to read; None for the newest undamaged one.
          subset: True to read only the template's leaves of a checkpoint with more, such as the
            parameters without the optimizer; arrays in ``extra`` are None then.

        Returns:
          ``(state, extra)``.

        Raises:
          UserError: no checkpoint, no such step, no undamaged step, or a leaf that is missing, left
            over, or of another shape or dtype (named, with found and expected).
        """
        self.wait()
        steps = self.steps()
        if not steps:
            raise UserError(f"no checkpoint in {self.directory}")
        if step is not None and step not in steps:
            available = ", ".join(map(str, steps))
            raise UserError(
                f"no checkpoint of step {step} in {self.directory}; there are {available}"
            )
        candidates = [step] if step is not None else steps[::-1]
        for candidate in candidates:
            error: Exception | None = None
            try:
                result = self._read(candidate, template, subset)
            except (UserError, MemoryError, jax.errors.JaxRuntimeError):
                raise
            except Exception as caught:  # whatever a broken file makes the readers raise
                error = caught
            if all_processes(error is None):
                self._newest = candidate
                return result
            if step is None:
                self._damaged.add(candidate)
                warnings.warn(
                    f"checkpoint step {candidate} in {self.directory} is damaged and was"
                    f" skipped ({_short(error)})",
                    stacklevel=2,
                )
        raise UserError(
            f"checkpoint step {', '.join(map(str, candidates))} in {self.directory} is damaged"
            f" ({_short(error)}); restore another step, or start again in another run.dir"
        ) from error

    def _read(self, step: int, template: Any, subset: bool) -> tuple[Any, dict[str, Any]]:
        with contextlib.ExitStack() as stack:
            path, fault = self._path(step), None
            repaired: list[str] = []
            try:
                path, repaired = stack.enter_context(readable(path))
            except OSError as error:
                fault = error
            # All processes must agree before the readers start, which wait for each other.
            if not all_processes(fault is None):
                raise fault or OSError("another process could not read it")
            step_text = f"checkpoint step {step} in {self.directory}"
            with waiting(f"reading of step {step}", io_progress):
                result = read_contents(path, template, step=step, subset=subset, label=step_text)
        if repaired:
            warnings.warn(
                f"{step_text}: {', '.join(repaired)} damaged, and read from a copy", stacklevel=3
            )
        return result

    def _open_writer(self) -> Any:
        import orbax.checkpoint as ocp

        if self._writer is None:
            # Errors of its threads, which the user already gets as an exception.
            for name in ("absl", "asyncio"):
                logging.getLogger(name).addFilter(_not_orbax)
            drop_late_callbacks()
            options = ocp.CheckpointManagerOptions(
                preservation_policy=self,
                cleanup_tmp_directories=True,  # left by a killed save
                step_format_fixed_length=STEP_DIGITS,
                save_root_metadata=False,
                async_options=ocp.AsyncOptions(
                    # Waits without progress have a limit of their own, ``train.wait_seconds``.
                    timeout_secs=_LONGEST_SAVE,
                    post_finalization_callback=self._write_sizes,
                ),
            )
            self._writer = ocp.CheckpointManager(self.directory, options=options)
        return self._writer

    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        """The steps to keep, for orbax's deletion of the others; oldest first."""
        newest = len(checkpoints) - self.keep
        return [
            place >= newest
            or info.step in (self._best, self._good)
            or bool(self.keep_every and info.step % self.keep_every == 0)
            for place, info in enumerate(checkpoints)
        ]

    def _path(self, step: int) -> str:
        return f"{self.directory}/{step:0{STEP_DIGITS}d}"

    def _write_sizes(self) -> None:
        """Records the files of the step before it gets its final name."""
        from etils import epath

        if jax.process_index():
            return
        for root in epath.Path(self.directory).glob(f"{self._writing:0{STEP_DIGITS}d}*"):
            write_record(root)

    def _not_written(self, step: int, error: Exception) -> StorageError:
        # The next save opens a new writer, which removes the partial step.
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(Exception):  # it repeats the error being reported
                writer.close()
        self._newest = -1
        return StorageError(
            f"checkpoint step {step} was not written to {self.directory} ({_short(error)});"
            f" earlier steps are unchanged; {self._remedy(error)}"
        )

    def _remedy(self, error: Exception) -> str:
        """A remedy for a failed save."""
        path = pathlib.Path(self.directory)
        if "://" not in self.directory and path.exists() and not path.is_dir():
            return f"{path} is a file; move it away"
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return "make the directory writable or set another run.dir"
        return "free disk space or set another run.dir"


def _not_orbax(record: logging.LogRecord) -> bool:
    """Whether a record is neither orbax's own nor about an error in one of its tasks."""
    error = record.exc_info and record.exc_info[1]
    frames = traceback.walk_tb(error.__traceback__ if error else None)
    files = [record.pathname, *(frame.f_code.co_filename for frame, _ in frames)]
    return not any("orbax" in pathlib.Path(file).parts for file in files)


def _short(error: Exception | None) -> str:
    if error is None:
        return "another process could not read it"
    text = " ".join(str(error).split("[tensorstore_spec")[0].split())
    return text if len(text) <= 300 else f"{text[:120]} ... {text[-170:]}"
