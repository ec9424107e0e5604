"""A run from Python in one call, with rows, a reward function and a model passed as values."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import inspect
import json
import pickle
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jrl.config import Config, build_config
from jrl.config.read import read_toml
from jrl.config.tables import reward_tables
from jrl.data.tasks import Task
from jrl.errors import UserError
from jrl.methods.base import Method
from jrl.rewards.columns import SIGNATURE
from jrl.storage.metrics import read_jsonl
from jrl.system.directories import fresh_dir
from jrl.types import Network, Params, TrainState
from jrl.user_code import PYTHON_PREFIX, forget_changed_files, keep_rows, python_values

if TYPE_CHECKING:
    from jrl.episodes import Env
    from jrl.episodes.host import HostEnv

ROWS = "python"
"""Directory, within a run's, of the rows passed in Python."""

Rows = Iterable[Mapping[str, Any]]
Reward = Callable[..., Sequence[float]]


class Result(NamedTuple):
    """Result of a run.

    Attributes:
      metrics: one dict a training step, as in ``metrics.jsonl``.
      summary: what ``summary.json`` holds: accuracy_before, accuracy_after, steps, and more.
      dir: the run directory, with checkpoints, samples and the report.
      config: the configuration of the run, with every key.
      state: after the last step, on the devices: weights and optimizer state.
      policy: the policy's weights.
      network: the policy, whose functions take these weights.
      tokenizer: of prompts and completions.
      values: what was passed to the run in Python, by the names that its configuration has.
    """

    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    dir: Path
    config: Config
    state: TrainState
    policy: Params
    network: Network
    tokenizer: Any
    values: dict[str, Any]

    def sample(self, *prompts: str) -> list[dict[str, Any]]:
        """Completions of the trained policy, ``sampling.group`` for each prompt.

        Args:
          *prompts: questions, made into prompts as those of the run were.

        Returns:
          Records with "prompt", "completion", "length" and "stop".
        """
        from jrl.evaluate import sample_run

        with python_values(self.values):
            return sample_run(self.config, prompts=prompts)

    def export(self, directory: str | Path, *, adapters: bool = False) -> Path:
        """Writes the trained policy as a Hugging Face directory, as ``jrl convert`` does.

        Args:
          directory: a new one.
          adapters: the adapters alone, in PEFT's form; else they are merged into the weights.

        Returns:
          The directory.
        """
        from jrl.run.export import export_run

        with python_values(self.values):
            return export_run(self.config, Path(directory), adapters=adapters)


def fit(
    rows: Rows | str | Mapping[str, float] | None = None,
    reward: Reward | str | Mapping[str, Reward | float] | None = None,
    model: str | Path | Mapping[str, Any] | Network | Callable[..., Network] | None = None,
    *,
    method: str | Method | Callable[..., Method] | None = None,
    task: str | Task | Callable[..., Task] | None = None,
    env: str | Callable[..., Env | HostEnv | Coroutine[Any, Any, Any]] | None = None,
    eval_rows: Rows | str | None = None,
    config: Config | str | Path | Mapping[str, Any] | None = None,
    dir: str | Path | None = None,
    on_step: Callable[[dict[str, Any]], object] | None = None,
    echo: Callable[[str], object] = print,
    **settings: Any,
) -> Result:
    """Trains a policy, as ``jrl train`` does, on values of this program.

    Args:
      rows: prompts: dicts with "question" and "answer" (or the names in ``data.fields``) and
        further columns for rewards; or a value of ``data.train`` (files, a Hub dataset, a table
        of weights).
      reward: ``f(samples) -> list of numbers``, where a sample has ``completion``, ``tokens``,
        ``stop`` and ``prompt`` (with ``text``, ``answer`` and ``meta``, the further columns); or
        ``f(completions, **columns)``, the form of TRL; or a name that ``[rewards]`` takes, such as
        "math"; or a dict of several, by name: functions, or weights of named ones. Functions
        of a module run in worker processes, with limits of time and memory (``[reward_pool]``);
        those of a script or notebook run in this process without limits, unless
        ``reward_pool.workers`` is set.
      model: a checkpoint directory, a Hugging Face Hub name, the sizes of a model with random
        weights (with ``task``), a ``jrl.Network``, or a function that returns one.
      method: a name of ``jrl methods``, a method, or a function of the keys of ``[objective]`` that
        returns one; GRPO by default.
      task: a procedural task instead of rows: its name, the task, or a function that returns it.
      env: an environment to play instead: its name, or a function of further keys of ``[data]``
        that returns it, a ``jrl.episodes.Env`` on the device, or with ``rows`` a
        ``jrl.episodes.HostEnv`` that plays them, or an episode itself,
        ``async def episode(policy, prompt)``.
      eval_rows: held-out prompts, as ``rows``.
      config: everything else: a configuration, a TOML file, or its keys as a dict, nested or
        dotted ({"train.steps": 100}).
      dir: run directory; runs/fit-TIME by default. One that holds this run resumes it.
      on_step: called with the record of each training step.
      echo: called with each printed line; the progress line goes to standard output.
      **settings: more keys, with ``__`` for the dot: ``train__steps=100``.

    Returns:
      A ``Result``.

    Raises:
      UserError: bad input, named, before anything compiles.
      KeyboardInterrupt: after SIGINT or SIGTERM, when the state has been saved.
    """
    from jrl.run.run import run_config
    from jrl.setup.adapters import policy_of

    forget_changed_files()  # before what checks the configuration reads them
    values: dict[str, Any] = {}
    tree = _tree(config)
    _set(tree, {name.replace("__", "."): value for name, value in settings.items()})
    _set_model(tree, model, values)
    _set_method(tree, method, values)
    _set_data(tree, rows, eval_rows, task, values)
    _set_env(tree, env, values)
    _set_rewards(tree, reward, values)
    run_table = _table(tree, "run")
    if dir is not None or not run_table.get("dir"):
        run_table["dir"] = str(dir) if dir is not None else str(fresh_dir("fit"))
    checked = build_config(tree)
    directory = Path(checked.run.dir or "")
    try:
        with python_values(values):
            trained = run_config(checked, echo=echo, on_record=on_step)
    finally:
        if (directory / "config.toml").exists():  # for the commands on this run
            keep_rows(directory / ROWS, values)
    run = trained.run
    return Result(
        metrics=read_jsonl(directory / "metrics.jsonl")[1:],
        summary=trained.summary,
        dir=directory,
        config=run.config,
        state=trained.state,
        policy=policy_of(trained.state, run.network),
        network=run.network,
        tokenizer=run.tokenizer,
        values=values,
    )


# ---------------------------------------------------------------- values into a configuration


def _tree(config: Config | str | Path | Mapping[str, Any] | None) -> dict[str, Any]:
    """The keys that a configuration sets as nested dicts, its own to change.

    Without defaults, which would be taken for keys that somebody has set; and with secrets, which
    the run needs.
    """
    if isinstance(config, Config):
        set_keys = config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
        if "tree" in set_keys:  # the kind of a tree that was made as a value is a default of it
            set_keys["tree"]["kind"] = config.tree.kind
        return set_keys
    if isinstance(config, str | Path):
        return read_toml(Path(config))
    tree: dict[str, Any] = {}
    _set(tree, config or {})
    return tree


def _set(tree: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Puts dotted keys, and tables into tables that are there; names in tables are whole."""
    for name, value in changes.items():
        *path, last = name.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise UserError(f"config[{name!r}]: {part} is not a table")
        _merge(node, last, value)


def _merge(tree: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(value, Mapping) and isinstance(tree.get(name), dict):
        for inner, inner_value in value.items():
            _merge(tree[name], inner, inner_value)
    else:
        tree[name] = copy.deepcopy(dict(value)) if isinstance(value, Mapping) else value


def _table(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """A table, made where there is none."""
    table = tree.setdefault(name, {})
    if not isinstance(table, dict):
        raise UserError(f"{name} = {table!r:.60}; {name} is a table")
    return table


def _set_model(tree: dict[str, Any], model: Any, values: dict[str, Any]) -> None:
    if model is None:
        return
    table = _table(tree, "model")
    if isinstance(model, Mapping):
        table["config"] = dict(model)
    elif isinstance(model, str | Path):
        table["path"] = str(model)
    elif isinstance(model, Network) or callable(model):
        values["network"] = _that_network(model) if isinstance(model, Network) else model
        table["network"] = f"{PYTHON_PREFIX}network"
    else:
        raise UserError(
            f"model = {model!r:.60}; give a directory, a name of the Hub, a dict of sizes, a"
            " jrl.Network, or a function that makes one"
        )


def _that_network(network: Network) -> Callable[..., Network]:
    """An existing network as a function of sizes; it must be long enough for the run."""

    def make(vocab_size: int, max_length: int) -> Network:
        if network.max_length < max_length:
            raise UserError(
                f"model: the network has max_length = {network.max_length}, and prompts and"
                f" completions of this run take up to {max_length} tokens"
            )
        return network

    return make


def _set_method(tree: dict[str, Any], method: Any, values: dict[str, Any]) -> None:
    if not isinstance(tree.get("method", ""), str):
        raise UserError(
            "config['method'] is a value of Python, and a configuration holds names; pass it to"
            " fit as method="
        )
    if isinstance(method, str):
        tree["method"] = method
    elif isinstance(method, Method) or callable(method):
        values["method"] = method if callable(method) else lambda: method
        tree["method"] = f"{PYTHON_PREFIX}method"
    elif method is not None:
        raise UserError(
            f"method = {method!r:.60}; give a name of `jrl methods`, a jrl.methods.Method, or a"
            " function that makes one"
        )


def _set_env(tree: dict[str, Any], env: Any, values: dict[str, Any]) -> None:
    table = _table(tree, "data")
    if isinstance(env, str):
        table["env"] = env
    elif callable(env):
        values["env"] = env
        table["env"] = f"{PYTHON_PREFIX}env"
    elif env is not None:
        raise UserError(
            f"env = {env!r:.60}; give the name of an environment, or a function that makes one"
        )


def _set_data(
    tree: dict[str, Any], rows: Any, eval_rows: Any, task: Any, values: dict[str, Any]
) -> None:
    table = _table(tree, "data")
    for key, name, given_rows in (("train", "rows", rows), ("eval", "eval_rows", eval_rows)):
        if isinstance(given_rows, str | Mapping):
            table[key] = given_rows
        elif given_rows is not None:
            listed = _checked(list(given_rows), name)
            # The name says what the rows are, so that a run is not resumed with others.
            values[f"{name}-{_digest(listed)}"] = listed
            table[key] = f"{PYTHON_PREFIX}{name}-{_digest(listed)}"
    if isinstance(task, str):
        table["task"] = task
    elif task is not None:
        values["task"] = task if not isinstance(task, Task) else lambda: task
        table["task"] = f"{PYTHON_PREFIX}task"


def _checked(rows: list[Any], name: str) -> list[dict[str, Any]]:
    if not rows:
        raise UserError(f"{name} is empty; give at least one dict with question and answer")
    for i, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise UserError(
                f"{name}, row {i}: {row!r:.60}; a row is a dict, such as"
                ' {"question": "2 + 2?", "answer": "4"}'
            )
    return [dict(row) for row in rows]


def _set_rewards(tree: dict[str, Any], reward: Any, values: dict[str, Any]) -> None:
    if reward is None:
        return
    several = list(reward) if isinstance(reward, list | tuple) else [reward]
    named = reward.items() if isinstance(reward, Mapping) else [(None, part) for part in several]
    tree["rewards"] = reward_tables(tree.get("rewards", {}))
    table, labels = _table(tree, "rewards"), set()
    for name, part in named:
        if isinstance(part, str):
            table.setdefault(part, {})
        elif callable(part):
            label = name or getattr(part, "__name__", "reward").strip("<>")
            if label in labels:
                raise UserError(f"two rewards are called {label!r}; give them as a dict, by name")
            labels.add(label)
            values[label] = part
            table.setdefault(f"{PYTHON_PREFIX}{label}", {})
            if not _is_of_a_module(part):
                _table(tree, "reward_pool").setdefault("workers", 0)
        elif name is not None and isinstance(part, int | float):
            table.setdefault(name, {})["weight"] = part
        else:
            raise UserError(f"reward = {part!r:.60}; give a function, {SIGNATURE}, or a name")


def _is_of_a_module(function: Callable[..., Any]) -> bool:
    """Whether a worker process can import a function by its name.

    One of a script or notebook it cannot. Nor does an object with a state of its own go, of which
    the worker would change a copy.
    """
    module = getattr(function, "__module__", None)
    if not inspect.isfunction(function) or module in (None, "__main__", "__mp_main__"):
        return False
    try:
        module_spec = importlib.util.find_spec(str(module))
        return module_spec is not None and bool(pickle.dumps(function))
    except Exception:  # whatever a module's own finder, or pickling, raises
        return False


def _digest(rows: list[dict[str, Any]]) -> str:
    text = json.dumps(rows, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
