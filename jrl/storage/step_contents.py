"""Contents of a checkpoint step: named arrays, layouts, checksums, and host values.

Leaves of a state have the names of their paths, such as ``params.policy.layers.wq``. Arrays among
the host's values are stored like leaves; a name stands in their place.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.errors import UserError
from jrl.storage.integrity import checksums
from jrl.storage.step_files import crc_of
from jrl.system.processes import any_says

FORMAT = 2  # 1 had no checksums


def contents(
    state: Any, extra: Mapping[str, Any], *, step: int, label: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The named arrays of a step, and its JSON metadata.

    Args:
      state: any pytree of arrays, typed PRNG keys and Python numbers.
      extra: values of the host.
      step: its number, which its directory is named after.
      label: names the checkpoint, for messages.

    Raises:
      UserError: ``extra`` cannot be JSON, or two leaves have one name.
    """
    leaves, _ = _named_leaves(state)
    lifted: dict[str, np.ndarray] = {}
    described = {
        "format": FORMAT,
        "step": step,
        "leaves": {name: _layout(leaf) for name, leaf in leaves.items()},
        "extra": _lift(dict(extra), lifted),
    }
    try:
        meta = json.loads(json.dumps(described))
    except (TypeError, ValueError) as error:
        raise UserError(f"{label}: extra cannot be JSON: {error}") from error
    arrays = {name: _stored(leaf) for name, leaf in (leaves | lifted).items() if np.size(leaf)}
    meta["checksums"] = checksums(arrays)
    meta["crc32"] = crc_of(meta)
    return arrays, meta


def read_contents(
    path: str, template: Any, *, step: int, subset: bool, label: str
) -> tuple[Any, dict[str, Any]]:
    """The state and ``extra`` of a step, verified.

    Args:
      path: the files of the step.
      template: as ``Checkpoints.restore`` takes it.
      step: the number that its directory has.
      subset: whether the checkpoint may hold more leaves.
      label: names the checkpoint, for messages.

    Raises:
      UserError: a leaf is missing, left over, or of another shape or dtype; or the directory is
        another step's.
      Exception: what a broken file makes the readers raise.
    """
    leaves, treedef = _named_leaves(template)
    meta = _read_by_all(lambda: _read_meta(path))
    layout = meta["leaves"]
    if (holds := meta.get("step", step)) != step:  # older checkpoints do not say
        raise UserError(
            f"{label} holds step {holds}: directories of steps were renamed or copied; give each"
            " the number of the step that it holds, and delete copies"
        )
    _check_layout(label, layout, leaves, subset)
    lifted = {} if subset else _lifted(meta["extra"])
    nonempty = {name: leaf for name, leaf in (leaves | lifted).items() if np.size(leaf)}
    arrays = _read_by_all(lambda: _read_arrays(path, nonempty)) if nonempty else {}
    _verify(arrays, meta.get("checksums", {}))
    values = [
        _restored(arrays[name], leaf, layout[name]) if name in arrays else _empty(leaf)
        for name, leaf in leaves.items()
    ]
    lifted = {name: arrays.get(name, empty) for name, empty in lifted.items()}
    return treedef.unflatten(values), _lower(meta["extra"], lifted)


def all_processes(ok: bool) -> bool:
    """Whether ``ok`` is true on every process, as all must skip the same steps."""
    return not any_says(not ok)


def _read_by_all(read: Callable[[], Any]) -> Any:
    """What each process reads; where one of them fails, all of them do.

    Each reads files of its own, so one alone may meet a broken one while the others go on to what
    all do together.
    """
    value, fault = None, None
    try:
        value = read()
    except Exception as error:
        fault = error
    if not all_processes(fault is None):
        raise fault or OSError("another process could not read it")
    return value


def _read_meta(path: str) -> dict[str, Any]:
    """The JSON metadata of a step."""
    import orbax.checkpoint as ocp
    from etils import epath

    # The handler alone: a Checkpointer waits for the other processes, which may have failed.
    with contextlib.closing(ocp.CompositeCheckpointHandler()) as handler:
        args = ocp.args.Composite(meta=ocp.args.JsonRestore())
        meta = handler.restore(epath.Path(path), args=args)["meta"]
    if meta["format"] != 1 and meta.pop("crc32", None) != crc_of(meta):
        raise ValueError("meta/metadata has another checksum than when it was written")
    return meta


def _read_arrays(path: str, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays by name, each placed as the leaf that is given for it."""
    import orbax.checkpoint as ocp
    from etils import epath

    drop_late_callbacks()
    with contextlib.closing(ocp.CompositeCheckpointHandler()) as handler:
        args = ocp.args.Composite(
            state=ocp.args.PyTreeRestore(
                item=dict.fromkeys(leaves, 0),
                restore_args={name: _restore_args(leaf) for name, leaf in leaves.items()},
                partial_restore=True,
            )
        )
        return handler.restore(epath.Path(path), args=args)["state"]


def drop_late_callbacks() -> None:
    """Silences arrays that are deleted after a transfer of another one failed.

    Each comes back to an event loop that the first error has closed, seconds later where a disk is
    full, and would print a traceback; the first error itself is raised.
    """
    global _hook
    before = sys.unraisablehook
    if before is _hook:
        return

    def drop(event: Any) -> None:
        if "Event loop is closed" not in str(event.exc_value):
            before(event)

    _hook = sys.unraisablehook = drop


_hook: Any = None
"""The last hook set here; other code may have set another since."""


def _verify(arrays: Mapping[str, Any], expected: Mapping[str, int]) -> None:
    """Raises ValueError naming the first array that is not the one that was stored."""
    for name, checksum in checksums(arrays).items() if expected else ():
        if checksum != expected.get(name):
            raise ValueError(f"{name} has another checksum than when it was saved")


def _named_leaves(tree: Any) -> tuple[dict[str, Any], Any]:
    paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") or "state" for path, _ in paths]
    leaves = dict(zip(names, (leaf for _, leaf in paths), strict=True))
    if len(leaves) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"two leaves of the state are both called {twice!r}; rename one")
    return leaves, treedef


ARRAY = "array:"
"""Prefix of the names of arrays in ``extra``, where each is {name: [dtype, shape]}."""


def _lift(value: Any, arrays: dict[str, np.ndarray], path: str = "extra") -> Any:
    """The value with its arrays moved to ``arrays`` and their name and layout in their place."""
    if isinstance(value, np.ndarray):
        name = f"{ARRAY}{path}"
        arrays[name] = value
        return {name: [str(value.dtype), list(value.shape)]}
    if isinstance(value, Mapping):
        return {key: _lift(item, arrays, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_lift(item, arrays, f"{path}.{i}") for i, item in enumerate(value)]
    return value


def _lifted(value: Any) -> dict[str, np.ndarray]:
    """Empty arrays by name, one for each that ``_lift`` moved."""
    if isinstance(value, Mapping):
        arrays: dict[str, np.ndarray] = {}
        for key, item in value.items():
            if key.startswith(ARRAY):
                arrays[key] = np.empty(item[1], item[0])
            else:
                arrays |= _lifted(item)
        return arrays
    if isinstance(value, list):
        return {name: array for item in value for name, array in _lifted(item).items()}
    return {}


def _lower(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The value with its arrays back in their places."""
    if isinstance(value, Mapping):
        if len(value) == 1 and (name := next(iter(value))).startswith(ARRAY):
            return arrays.get(name)
        return {key: _lower(item, arrays) for key, item in value.items()}
    return [_lower(item, arrays) for item in value] if isinstance(value, list) else value


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _layout(leaf: Any) -> dict[str, Any]:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    layout = {"shape": list(np.shape(leaf)), "dtype": str(dtype)}
    if _is_key(leaf) and isinstance(leaf, jax.Array):
        layout["impl"] = str(jax.random.key_impl(leaf))
    return layout


def _stored(leaf: Any) -> Any:
    """The stored form of a leaf; a copy if the device's memory could be donated meanwhile."""
    data = jax.random.key_data(leaf) if _is_key(leaf) else leaf
    if isinstance(data, jax.Array):
        # Every process has all of an uncommitted array, so it is stored like a host array.
        return data if data.committed else np.array(data)
    return np.asarray(data)


def _placed(leaf: Any) -> Any:
    """The sharding that a template's leaf asks for, or None."""
    if isinstance(leaf, jax.Array):
        return leaf.sharding if leaf.committed else None
    return getattr(leaf, "sharding", None)


def _restore_args(leaf: Any) -> Any:
    import orbax.checkpoint as ocp

    sharding = _placed(leaf)
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    shape, dtype = leaf.shape, leaf.dtype
    if _is_key(leaf):
        # The sharding of keys applies to their data: the words of a key stay together.
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        shape, dtype = data.shape, data.dtype
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=shape, dtype=dtype)


def _restored(data: Any, leaf: Any, layout: Mapping[str, Any]) -> Any:
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(data), impl=layout["impl"])
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return data if isinstance(data, jax.Array) else jnp.asarray(data)
    return np.asarray(data) if isinstance(leaf, np.ndarray) else type(leaf)(data.item())


def _empty(leaf: Any) -> Any:
    """A leaf without elements; these are not stored."""
    if isinstance(leaf, np.ndarray):
        return np.empty(leaf.shape, leaf.dtype)
    empty = jnp.empty(leaf.shape, leaf.dtype)
    sharding = _placed(leaf)
    return empty if sharding is None else jax.device_put(empty, sharding)


def _check_layout(
    label: str, stored: Mapping[str, Any], leaves: Mapping[str, Any], subset: bool
) -> None:
    def text(layout: Mapping[str, Any]) -> str:
        return f"{layout['dtype']}{layout['shape']}"

    problems = [f"{name} is not in the checkpoint" for name in leaves if name not in stored]
    for name, leaf in leaves.items():
        if name in stored and text(stored[name]) != text(_layout(leaf)):
            problems.append(f"{name} is {text(stored[name])}, expected {text(_layout(leaf))}")
    if not subset:
        problems += [f"{name} is in the checkpoint only" for name in stored if name not in leaves]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise UserError(
            f"{label} does not match this run: {'; '.join(problems[:3])}"
            f"{more}. Restore it with the model, objective and optimizer that wrote it,"
            " or use another run.dir"
        )
