"""Error messages for configuration mistakes: key, value, valid choices."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jrl.config.base import Table
from jrl.config.keys import Key, describe, variants
from jrl.config.tables import Config, WatchTable
from jrl.errors import unknown_choice

RENAMED: Mapping[str, str] = {
    "data.answer_key": "set data.fields.answer",
    "data.eval_pairs": "set data.eval",
    "data.options": "write its keys in [data] itself",
    "data.question_key": "set data.fields.question",
    "data.solution_key": "set data.fields.solution",
    "data.tfds_dir": "set the environment variable TFDS_DATA_DIR",
    "eval.pass_k": "remove it: pass@k is reported for k = 1, 2, 4, ... up to eval.samples",
    "eval.reward": "set judge = true in the table of that part, as in rewards.math.judge=true",
    "log.samples": "remove it: complete groups, 8 members or more, are written each time",
    "log.tensorboard": 'set log.to = "tensorboard"',
    "log.wandb": 'set log.to = "wandb:PROJECT"',
    "log.trackio": 'set log.to = "trackio:PROJECT"',
    "log.mlflow": 'set log.to = "mlflow:EXPERIMENT"',
    "mesh.slices": "remove it: the number of slices is read from the devices",
    "model.grouped_matmul": "remove it: the fastest kernel of the platform is used",
    "model.reference": "set frozen.ref",
    "model.teacher": "set frozen.teacher",
    "optimizer.mu_dtype": "remove it: moments have the type of the weights, model.param_dtype",
    "placement.kind": "[placement], as with placement.staleness=1, gives rollout its own devices;"
    " without it rollout shares those of training",
    "placement.rollout": "set sampling.mesh",
    "sampling.cache": 'set sampling.int8 = "cache"',
    "sampling.chunk": "remove it: slots are refilled after every 4 decode steps",
    "sampling.correction": 'set objective.correction; "none" leaves 8-bit sampling uncorrected',
    "sampling.gather_weights": "remove it: weights are gathered for sampling if a device has"
    " memory for them beside the training state and the cache",
    "sampling.weights": 'set sampling.int8 = "weights"',
    "objective.tree": 'set tree.kind = "branch" with tree.at, tree.kind = "search" with tree.by, or'
    ' tree.kind = "none"',
    **{
        f"objective.tree_{name}": f'set tree.{name}, beside tree.kind = "branch"'
        for name in ("roots", "above")
    },
    **{
        f"objective.tree_{name}": f'set tree.{name}, beside tree.kind = "search"'
        for name in ("width", "tokens", "exploration")
    },
    "objective.tree_rounds": "set tree.rounds, beside tree.kind",
    "train.epochs": "set objective.epochs",
    "train.replay_routing": "set objective.router_replay",
    "train.packing": 'set train.mode = "packed"',
    "train.router_balance": "set objective.router_balance",
    "train.router_z": "set objective.router_z",
}
"""Keys of earlier versions, and their replacements."""


def without_renamed(tree: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Error lines for keys of earlier versions, and the tree without these keys."""
    lines, remaining = [], dict(tree)
    for table, inside in tree.items():
        if isinstance(inside, Mapping):
            old = {key: f"{table}.{key}" for key in inside if f"{table}.{key}" in RENAMED}
            remaining[table] = {key: value for key, value in inside.items() if key not in old}
            lines += [
                f"{name} = {inside[key]!r} is no longer a key; {RENAMED[name]}"
                for key, name in old.items()
            ]
            if old and not remaining[table]:
                del remaining[table]
    return lines, remaining


_SAYS = {
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be finite",
    "bool_type": "must be true or false",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "union_tag_not_found": "must be a table",
    "tuple_type": "must be text or a list",
    "too_short": "must not be empty",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
}


def explain_all(items: Sequence[Mapping[str, Any]]) -> list[str]:
    """Pydantic's errors as lines, without those that another one explains."""
    # Of a text or a table: what is wrong with it as a table says enough.
    lines = [explain(item) for item in items if item["loc"][-2:] != ("train", "str")]
    # A required key that is misspelt is not missing besides.
    suggested = {match[1] for line in lines if (match := re.search(r"did you mean (\S+)\?$", line))}
    lines = [line for line in lines if line.partition(" is missing: ")[0] not in suggested]
    unknown = [match[1] for line in lines if (match := re.match(r"unknown key (\S+);", line))]
    return [line for line in lines if not line.startswith(tuple(f"{key} = " for key in unknown))]


def explain(item: Mapping[str, Any]) -> str:
    """One pydantic error as a line (or the lines that a check of several keys wrote)."""
    path = [part for part in item["loc"] if isinstance(part, str) and part[:5] != "dict["]
    kinds = variants(path[0]) if path else {}
    kind_name = path.pop(1) if len(path) > 1 and path[1] in kinds else ""
    key, kind, value = ".".join(path), item["type"], item["input"]
    context = item.get("ctx", {})
    if kind == "extra_forbidden":
        if "." in path[-1]:
            return f'unknown key "{path[-1]}": quotes make one name of it; write {key} without them'
        return _unknown_key(key, value, kind_name)
    if kind == "union_tag_not_found" and isinstance(value, dict):
        if near := difflib.get_close_matches("kind", value, n=1):
            return f"unknown key {key}.{near[0]} = {value[near[0]]!r}; did you mean {key}.kind?"
        return f"{key}.kind is missing: {_text_of(f'{key}.kind')}"
    if kind == "union_tag_invalid":
        choices = [re.findall("'([^']*)'", tag)[0] for tag in kinds]
        return str(unknown_choice(f"{key}.kind", value["kind"], choices))
    if kind == "missing":
        return f"{key} is missing: {_text_of(key)}"
    if kind == "value_error":
        text = str(context["error"])
        if path[:1] == ["watch"]:  # a check of one table: its text does not know whose
            return f"{key}: {text}"
        return text if isinstance(value, dict | Table) else f"{key} = {value!r}; {text}"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        if path[-1] == "[key]":
            table = ".".join(path[:-2])
            return f"unknown key {table}.{value}; {_near(table, value, choices)}"
        return str(unknown_choice(key, value, choices))
    problem = _SAYS.get(kind, item["msg"])
    if kind == "dict_type" and path[-1] == "train":
        problem = "must be text or a table of weights"
    return f"{key} = {value!r}; {problem.format(**context)}"


def _wrong_kind(key: Key, value: object, kind_name: str | None) -> str:
    """The error for a key of another kind of its table."""
    if key.name in key.only:
        return f"{key.name} = {value!r} and {kind_name} are both given; remove one"
    *most, last = key.single or key.only
    kinds = f"{', '.join(most)} or {last}" if most else last
    return f"{key.name} = {value!r} goes with {kinds}, not with {kind_name}; remove it"


def of_other_kinds(config: Config) -> list[str]:
    """A line for each option of a task that is a key of other data; options may be anything."""
    keys, kind = {key.name: key for key in describe()}, config.data.kind
    options = {f"data.{name}": value for name, value in config.data.free_options.items()}
    return [_wrong_kind(keys[name], v, kind) for name, v in options.items() if name in keys]


def not_removable(path: Sequence[str]) -> str:
    """The error for ``KEY=`` where the key is not set; empty for keys that may be set or not."""
    keys, key = {each.name: each.kind for each in describe()}, ".".join(path)
    if any("." in part for part in path):
        return f'"{key}"= removes nothing: quotes make one name of it; write it without them'
    if key in keys or key in {name.partition(".")[0] for name in keys}:
        return ""
    if key in RENAMED:
        return f"{key} is no longer a key; {RENAMED[key]}"
    for length in range(1, len(path)):
        if "table" in keys.get(table := ".".join(path[:length]), ""):  # of keys of one's own
            return f"{key}= removes nothing: [{table}] has no such key here"
    table, _, last = key.rpartition(".")
    inside = [name.partition(".")[2] for name in keys if name.startswith(f"{table}.")]
    if table in _WITH_OPTIONS and not difflib.get_close_matches(last, inside, n=1):
        return f"{key}= removes nothing: [{table}] has no such key here"
    return _unknown_key(key, {}, None)


_WITH_OPTIONS = ("data", "optimizer")
"""Tables whose further keys are options of the function that they name."""


def _text_of(key: str) -> str:
    return next((item.text for item in describe() if item.name == key), "give it")


def _near(table: str, name: str, inside: Sequence[str]) -> str:
    """Names the nearest key of a table, or all of them."""
    if nearest := difflib.get_close_matches(name, inside, n=1):
        return f"did you mean {table}.{nearest[0]}?"
    return f"keys of [{table}] are {', '.join(inside)}"


NAMES_ELSEWHERE = {
    "optimizer.learning_rate": "lr actor_lr",
    "optimizer.clip_norm": "max_grad_norm grad_clip max_norm gradient_clip gradient_clipping",
    "optimizer.warmup_steps": "num_warmup_steps lr_warmup_steps warmup_ratio lr_warmup_steps_ratio",
    "optimizer.schedule": "lr_scheduler_type lr_scheduler",
    "optimizer.weight_decay": "weight_decay",
    "train.prompts": "batch_size train_batch_size rollout_batch_size per_device_train_batch_size",
    "train.microbatches": "gradient_accumulation_steps grad_accum gradient_accumulation",
    "train.steps": "max_steps total_steps num_steps total_training_steps iterations"
    " num_train_epochs num_epochs total_epochs",
    "sampling.group": "n num_generations group_size n_samples_per_prompt rollout_n",
    "sampling.max_new_tokens": "max_tokens max_completion_length max_response_length max_length"
    " generate_max_len",
    "data.max_prompt_tokens": "max_prompt_length prompt_max_len",
    "data.fields.question": "prompt_key prompt_column input_key",
    "data.fields.answer": "answer_column label_key",
    "data.system": "system_prompt",
    "data.eval": "val_files eval_dataset test validation",
    "data.train": "train_files train_dataset dataset_name dataset",
    "model.path": "model_name model_name_or_path pretrain base_model",
    "model.dtype": "torch_dtype bf16 fp16",
    "model.remat": "gradient_checkpointing enable_gradient_checkpointing",
    "method": "loss_type scale_rewards importance_sampling_level adv_estimator advantage_estimator",
    "objective.kl_coef or objective.beta": "beta kl_loss_coef init_kl_coef",
    "objective.clip_low and objective.clip_high": "epsilon clip_ratio cliprange eps_clip clip_eps",
    "objective.clip_low": "clip_ratio_low eps_clip_low",
    "objective.clip_high": "epsilon_high clip_ratio_high eps_clip_high",
    "objective.epochs": "num_iterations ppo_epochs",
    "eval.every": "eval_steps test_freq eval_interval",
    "checkpoint.every": "save_steps save_freq save_interval",
    "checkpoint.keep": "save_total_limit",
    "run.dir": "output_dir save_path default_local_dir",
    "log.to": "report_to logger",
    "lora.rank": "r lora_r lora_rank use_peft peft_config",
    "lora.alpha": "lora_alpha",
    "lora.targets": "target_modules lora_target_modules",
    "mesh.tensor": "tp tensor_parallel_size tensor_model_parallel_size",
    "mesh.data": "dp data_parallel_size",
}
"""Key -> names that other libraries have for it."""
KEYS_ELSEWHERE = {name: key for key, names in NAMES_ELSEWHERE.items() for name in names.split()}
"""Such a name -> the key."""


def _of_deeper_tables(key: str, value: Any) -> tuple[str, Any]:
    """The key and value inside an unknown table, where another library has it there; else as is."""
    inner, inside = key, value
    while isinstance(inside, Mapping) and len(inside) == 1:
        name, inside = next(iter(inside.items()))
        inner = f"{inner}.{name}"
    known = inner.rpartition(".")[2].lower() in KEYS_ELSEWHERE and not isinstance(inside, Mapping)
    return (inner, inside) if known else (key, value)


def _unknown_key(key: str, value: Any, kind_name: str | None) -> str:
    """The error for an unknown key, or one of another kind of table, with the nearest valid one.

    A kind of None stands for every kind of the table.
    """
    keys = describe()
    names = [each.name for each in keys]
    for each in keys:
        if each.name == key:
            return _wrong_kind(each, value, kind_name)
    tables = {
        "frozen",
        "objective",
        "rewards",
        "watch",
        *(n.partition(".")[0] for n in names if "." in n),
    }
    key, value = _of_deeper_tables(key, value)
    table, _, last = key.rpartition(".")
    siblings = [
        k
        for k in keys
        if k.name.startswith(f"{table}.") and (not k.only or kind_name in (*k.only, None))
    ]
    inside = [each.name.rpartition(".")[2] for each in siblings]
    if table.startswith("watch."):
        inside = list(WatchTable.model_fields)
    elsewhere = [name for name in names if name.rpartition(".")[2] == last]
    if last.lower() in KEYS_ELSEWHERE and not elsewhere:
        hint = f"did you mean {KEYS_ELSEWHERE[last.lower()]}?"
    elif difflib.get_close_matches(last, inside, n=1) or (inside and not elsewhere):
        hint = _near(table, last, inside)
    elif elsewhere:  # the right name in the wrong table is a common slip
        hint = f"did you mean {' or '.join(elsewhere[:3])}?"
    elif nearest := difflib.get_close_matches(key.lower(), {*names, *tables}, n=1):
        hint = f"did you mean {nearest[0]}?"
    else:
        hint = f"tables are {', '.join(sorted(tables))}"
    assignment = "" if isinstance(value, dict) else f" = {value!r}"
    return f"unknown key {key}{assignment}; {hint}"
