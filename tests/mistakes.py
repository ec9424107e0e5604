"""Mistakes in configurations, made from the list of all keys: what people mistype, at every key.

``all_mistakes`` takes every key of ``jrl.config.describe``, and those of the tables that take names
of their own (coefficients, options, axes, limits), and spoils each in every way that its type has:
another type, a list or a table for one value, a misspelt name or choice, a number out of range,
not finite or beyond 32 bits, an empty value, letters that look like others, quotes around a dotted
name. ``CONTRADICTIONS`` are pairs of sound values that do not go together.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from jrl.config import describe, load_config
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.transformer import transformer
from jrl.run.metric_names import check_metric_names
from jrl.run.own_parts import check_own_parts
from jrl.run.reward_probe import check_reward_columns, probe_rewards
from jrl.setup.reward_parts import reward_pool
from jrl.storage.metrics import check_run_dir
from jrl.train import build
from jrl.train.trainable import check_trainable

SIZES = "{layers=1, embed_dim=16, heads=2, kv_heads=2, head_dim=8, mlp_dim=32}"
TASK = ("data.task=sorting", f"model.config={SIZES}", "train.prompts=4", "eval.problems=4")
TEXT = (
    *("model.path=PLACE/model", "data.train=PLACE/data.jsonl", "data.template=plain"),
    *("sampling.group=2", "sampling.max_new_tokens=4", "rewards={exact={}}", "train.prompts=2"),
    "reward_pool.workers=0",
)
PAIRS = (
    *("model.path=PLACE/model", "data.pairs=PLACE/pairs.jsonl", "data.template=plain"),
    *("method=dpo", "train.prompts=2", "sampling.group=2", "sampling.max_new_tokens=8"),
)
NIM = (*TASK[1:], "data.env=nim")
BASES = {"task": TASK, "text": TEXT, "pairs": PAIRS, "env": NIM}


def write_sound_files(root: pathlib.Path) -> pathlib.Path:
    """Writes what PLACE in the bases stands for: a checkpoint, questions and pairs."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    words = ["<stop>", *"abcdefghijklmnopqrstuvwxyz? "]
    backend = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    sizes = {"layers": 1, "embed_dim": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "mlp_dim": 32}
    model = ModelConfig(vocab_size=32, max_length=48, **sizes)
    hf.save(root / "model", model, jax.device_get(transformer(model).init(jax.random.key(0))))
    backend.save(str(root / "model" / "tokenizer.json"))
    (root / "model" / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    questions = [f"how many {what}?" for what in ("eels", "whales", "cows")]
    rows = [{"question": text, "answer": "5"} for text in questions]
    pairs = [{"prompt": text, "chosen": "five", "rejected": "one"} for text in questions]
    for name, lines in (("data", rows), ("pairs", pairs)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    return root


def set_up(place: pathlib.Path, overrides: Sequence[str], probe: bool = False) -> None:
    """All that a run does before it compiles, as ``jrl.run.run`` does it.

    Args:
      place: what PLACE stands for.
      overrides: of the run.
      probe: whether to call reward functions of one's own once, too.
    """
    config = load_config(None, [text.replace("PLACE", str(place)) for text in overrides])
    run = build.setup(config)
    check_trainable(run)
    check_own_parts(run)
    check_reward_columns(config, run.data.prompts)
    check_metric_names(run)
    if not config.data.scored:
        with reward_pool(config) as pool:
            if probe:
                probe_rewards(run, pool)
    if config.run.dir:
        check_run_dir(config)


class Mistake(NamedTuple):
    """One spoiled configuration.

    Attributes:
      key: what is wrong in it, as the message must name it.
      form: how it was spoiled.
      overrides: the whole configuration; PLACE stands for a directory with sound files.
      value: what must stand in the message, too; "" where nothing must.
    """

    key: str
    form: str
    overrides: tuple[str, ...]
    value: str = ""

    @property
    def name(self) -> str:
        """For a test's id."""
        return f"{self.key}-{self.form}"


FREE = {
    "objective.clip_high": ("number", "task"),
    "objective.kl_coef": ("number", "task"),
    "objective.entropy_coef": ("number", "task"),
    "objective.epochs": ("whole number", "task"),
    "objective.correction": ("choice", "task"),
    "objective.router_balance": ("number", "task"),
    "objective.discount": ("number", "task", "method=ppo"),
    "objective.beta": ("number", "pairs"),
    "rewards.exact.weight": ("number", "text"),
    "rewards.exact.judge": ("true or false", "text"),
    "rewards.verify.weight": ("number", "task"),
    "rewards.format.pattern": ("text", "text", "rewards={exact={}, format={pattern='x'}}"),
    "optimizer.b1": ("number", "task"),
    "optimizer.weight_decay": ("number", "task"),
    "optimizer.eps": ("number", "task"),
    "optimizer.nesterov": ("true or false", "task"),
    "mesh.data": ("axis", "task"),
    "mesh.tensor": ("axis", "task"),
    "sampling.mesh.fsdp": ("axis", "task"),
    "watch.loss.above": ("number", "task"),
    "watch.loss.grows": ("number", "task"),
    "watch.loss.falls": ("number", "task"),
    "watch.loss.steps": ("whole number", "task", "watch.loss.above=1"),
    "watch.loss.action": ("choice", "task", "watch.loss.above=1"),
    "model.config.layers": ("size", "task"),
    "model.config.heads": ("size", "task"),
    "model.config.head_dim": ("size", "task"),
    "model.config.mlp_dim": ("size", "task"),
    "model.config.norm_eps": ("number", "task"),
    "model.config.rope_theta": ("number", "task"),
    "model.config.tied_embeddings": ("true or false", "task"),
    "data.difficulty": ("size", "task"),
    "data.heaps": ("size", "env"),
    "data.fields.question": ("text", "text"),
    "data.fields.answer": ("text", "text"),
    "frozen.ref": ("text", "task", "objective.kl_coef=0.1"),
}
"""Keys of tables whose names a method, a reward, an optimizer or a task sets: kind, base, more."""

NEEDED = {
    "lora.alpha": ("lora.rank=2",),
    "lora.targets": ("lora.rank=2",),
    "lora.base": ("lora.rank=2",),
    "lora.path": ("lora.rank=2",),
    **{f"tree.{k}": ("tree.kind=branch",) for k in ("at", "roots", "rounds", "above")},
    **{f"tree.{k}": ("tree.kind=search",) for k in ("by", "width", "tokens", "exploration")},
    "value.kind": ("method=ppo",),
    "value.path": ("method=ppo", "value.kind=network"),
}
"""Further keys without which a key is not read."""

WRONG = {
    "text": {
        "number": "5",
        "list": "[1, 2]",
        "table": "{a=1}",
        "empty": "''",
        "null": r'"a\u0000b"',
    },
    "choice": {
        **{"number": "5", "list": "['a', 'b']", "table": "{a=1}", "empty": "''"},
        **{"true": "true", "another": "neither", "cyrillic": "n\u043ene"},
    },
    "whole number": {
        **{"text": "many", "fraction": "1.5", "negative": "-3", "huge": "10000000000000"},
        **{"list": "[1]", "table": "{a=1}", "true": "true", "nan": "nan", "empty": "''"},
        **{"wide digits": "'１２'", "date": "2020-01-01", "digits as text": "'12'"},  # noqa: RUF001
    },
    "number": {
        **{"text": "much", "negative": "-3.5", "inf": "inf", "nan": "nan", "huge": "1e300"},
        **{"list": "[1.0]", "table": "{a=1}", "true": "true", "tiny": "1e-300", "empty": "''"},
        **{"digits as text": "'0.1'", "comma": "'0,1'"},
    },
    "true or false": {
        **{"text": "maybe", "number": "1", "list": "[true]", "table": "{a=1}", "yes": "yes"},
        **{"empty": "''", "capital": "True"},
    },
    "table": {"text": "words", "number": "5", "list": "[1]", "true": "true"},
    "list": {"number": "5", "table": "{a=1}", "another": "neither", "twice": "[['a']]"},
    "axis": {
        **{"text": "many", "zero": "0", "negative": "-2", "fraction": "1.5", "list": "[1]"},
        **{"huge": "10000000000000", "true": "true", "more than there are": "4096"},
    },
}
WRONG["size"] = {k: v for k, v in WRONG["whole number"].items() if k not in ("date", "wide digits")}
WRONG["size"]["zero"] = "0"

SOUND = {
    # A template fills in no system message where it is empty, metrics are divided by no column;
    # a text may hold any character.
    *{("data.system", "empty"), ("data.system", "null"), ("log.by", "empty")},
    ("eval.variants_of", "empty"),
    # What is bad is worth less than nothing; a limit may be below 0.
    *{("rewards.exact.weight", "negative"), ("rewards.verify.weight", "negative")},
    *{("watch.loss.above", "negative"), ("rewards.format.pattern", "null")},
}
"""Spoiled values that are sound for a key: (key, form)."""


def _kind(kind: str) -> str:
    """A row of ``WRONG`` for a key's type in words."""
    if kind in WRONG:
        return kind
    return "text" if "text" in kind.split(" | ") else "choice"


def _base(key: str, only: tuple[str, ...]) -> str:
    if key.startswith("data.") and only and "data.task" not in only:
        return "text" if "data.train" in only else "pairs"
    return "task"


def misspelt(word: str) -> str:
    """A word with one letter missing."""
    middle = len(word) // 2
    return word[:middle] + word[middle + 1 :]


def keys() -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """(key, row of ``WRONG``, base, further overrides) of every key."""
    for key in describe():
        yield key.name, _kind(key.kind), _base(key.name, key.only), NEEDED.get(key.name, ())
    for name, (kind, base, *more) in FREE.items():
        yield name, kind, base, tuple(more)


def all_mistakes() -> list[Mistake]:
    """Every key in every wrong way, in the order of keys; then the contradictions."""
    mistakes = []
    for key, kind, base, more in keys():
        sound = (*BASES[base], *more)
        for form, value in WRONG[kind].items():
            if (key, form) in SOUND:
                continue
            value_shown = value if form not in ("table", "list", "twice", "null", "date") else ""
            value_shown = value_shown.strip("'") if form != "empty" else ""
            # a mistake in one axis is reported as one in the product of all
            blamed = "sampling.mesh" if key == "sampling.mesh.fsdp" else key
            mistakes.append(Mistake(blamed, form, (*sound, f"{key}={value}"), value_shown))
        mistakes += _misnamed(key, sound)
    for key, *overrides in CONTRADICTIONS:
        base = BASES.get(overrides[0], ())
        rest = overrides[1:] if base else overrides
        mistakes.append(Mistake(key, "contradiction " + rest[-1], (*base, *rest)))
    return mistakes


def _misnamed(key: str, sound: tuple[str, ...]) -> Iterator[Mistake]:
    """The key with a letter missing, as one name in quotes, and in a table that is misspelt."""
    table, _, last = key.rpartition(".")
    if len(last) > 3:
        near = f"{table}.{misspelt(last)}" if table else misspelt(last)
        # Where a table has a closed set of names, the name is all that is wrong.
        closed = table in ("mesh", "sampling.mesh", "data.fields")
        yield Mistake(near, "misspelt", (*sound, f"{near}=1"), "" if closed else "1")
    if table:
        yield Mistake(key, "quoted", (*sound, f"{json.dumps(key)}=1"))
        head, _, rest = key.partition(".")
        far = f"{misspelt(head)}.{rest}"
        yield Mistake(misspelt(head), "table misspelt", (*sound, f"{far}=1"))


CONTRADICTIONS: tuple[tuple[str, ...], ...] = (
    ("train.minibatches", "task", "train.minibatches=3"),
    ("train.microbatches", "task", "train.microbatches=3"),
    ("train.mode", "task", "train.mode=packed", "train.minibatches=2"),
    ("train.mode", "text", "train.mode=compiled"),
    ("train.mode", "task", "train.mode=in_flight"),
    ("warmup.steps", "text", "warmup.steps=3"),
    ("eval.samples", "task", "eval.samples=4"),
    ("eval.every", "task", "checkpoint.best=eval/accuracy"),
    ("checkpoint.best", "task", "checkpoint.best=accurcy"),
    ("checkpoint.best", "task", "eval.every=1", "checkpoint.best=eval/accurcy"),
    ("watch", "task", "watch.losss.above=1"),
    ("watch.loss", "task", "watch.loss={above=1, action='skip', steps=3}"),
    ("watch.loss", "task", "watch.loss={above=1, below=3}"),
    ("watch.loss", "task", "watch.loss={action='stop'}"),
    ("lora.path", "task", "lora={rank=2, path='there'}"),
    ("lora.rank", "task", "lora.rank=4000"),
    ("lora.targets", "task", "lora={rank=2, targets=['q', 'z']}"),
    ("lora.targets", "task", "lora={rank=2, targets=[]}"),
    ("lora.targets", "task", "lora={rank=2, targets=['q', 'q']}"),
    ("sampling.int8", "task", "sampling.int8=['weights', 'weights']"),
    ("sampling.float8", "task", "sampling.float8=cache"),
    ("sampling.float8", "task", "sampling.int8=weights", "sampling.float8=weights"),
    ("model.path", "text", f"model.config={SIZES}"),
    ("model.network", "task", "model.network=own.py:f", "lora.rank=2"),
    ("data.max_prompt_tokens", "task", "data.max_prompt_tokens=5"),
    ("data.task", "text", "data.task=sorting"),
    ("data.env", "task", "data.env=nim"),
    ("data.template", "task", "data.template=plain"),
    ("data.pairs", "env", "data.pairs=PLACE/pairs.jsonl"),
    ("rewards.exact", "pairs", "rewards.exact={}"),
    ("rewards", "env", "rewards.exact={}"),
    ("rewards", "text", "rewards.verify={}"),
    ("judge", "text", "rewards={exact={judge=true}, format={pattern='x', judge=true}}"),
    ("own.py", "text", "rewards={format={pattern='x'}, 'own.py:f'={}}"),
    ("sampling.top_k", "pairs", "sampling.top_k=3"),
    ("sampling.temperature", "task", "sampling.temperature=0"),
    ("sampling.temperature", "task", "sampling.temperature=1e-30"),
    ("sampling.group", "task", "sampling.group=1"),
    ("sampling.mesh", "pairs", "sampling.mesh.data=1"),
    ("[placement]", "pairs", "placement={}"),
    ("sampling.mesh.context", "task", "sampling.mesh.context=2"),
    ("-1", "task", "mesh={data=-1, fsdp=-1}"),
    ("-1", "task", "placement={}", "mesh.data=-1", "sampling.mesh.data=-1"),
    ("value.kind", "task", "value.kind=network"),
    ("frozen.ref", "task", "frozen.ref=there"),
    ("frozen.reff", "task", "frozen.reff=there", "objective.kl_coef=0.1"),
    ("frozen.teacher", "task", "method=on_policy_distillation"),
    ("tree.by", "task", "tree={kind='branch', by='uct'}"),
    ("tree.at", "task", "tree={kind='search', at='gap'}"),
    ("tree.kind", "task", "tree={by='uct'}"),
    ("tree.roots", "task", "tree={kind='branch', roots=9}", "sampling.group=4"),
    ("tree.kind", "env", "tree={kind='branch'}"),
    ("tree.kind", "pairs", "tree={kind='search'}"),
    ("objective.router_replay", "task", "objective.router_replay=true"),
    ("objective.router_z", "task", "objective.router_z=0.1"),
    ("entropy_coef", "pairs", "objective.entropy_coef=0.1"),
    ("method", "env", "method=sft"),
    ("method", "task", "method=dpoo"),
    ("method", "task", "method=GRPO"),
    ("data.task", "task", "data.task=Sorting"),
    ("model.config.kv_heads", "task", "model.config.kv_heads=3"),
    ("model.config.experts", "task", "model.config.experts=2"),
    ("model.config.experts_per_token", "task", "model.config.experts_per_token=2"),
    ("model.config.head_dim", "task", "model.config.head_dim=7"),
    ("the model holds 3", "task", "model.config.max_length=3"),
    ("model.config.vocab_size", "task", "model.config.vocab_size=3"),
    ("model.config.activation", "task", "model.config.activation=gelo"),
    ("model.config.rope_scaling", "task", "model.config.rope_scaling=yarnn"),
    ("model.attention", "task", "model.attention=cudnn"),
    ("optimizer.momentum", "task", "optimizer={name='sgd', momentum='high'}"),
    ("optimizer.name", "task", "optimizer.name=adamww"),
    ("optimizer.name", "task", "optimizer.name=AdamW"),
    ("optimizer.eps", "task", "optimizer.eps=0"),
    ("optimizer.b2", "task", "optimizer.b2=1"),
    ("optimizer.weight_decay", "task", "optimizer.weight_decay=-1"),
    ("optimizer.b3", "task", "optimizer.b3=0.5"),
    ("objective.epochs", "task", "objective.epochs=1000000000"),
    ("train.minibatches", "task", "train.minibatches=1000000000"),
    ("train.prompts", "task", "train.prompts=1000000000"),
    ("train.steps", "task", "train.steps=1e3"),
    (
        "correction_low",
        "task",
        "objective={correction='icepop', correction_low=3, correction_cap=2}",
    ),
    ("covariance_low", "task", "method=clip_cov", "objective.covariance_low=9"),
    ("weight_low", "task", "method=topr", "objective.weight_low=2"),
    ("objective.low", "task", "method=epo_entropy", "objective.low=3"),
    ("objective.low", "task", "method=bfs_prover", "objective={low=0.9, high=0.1}"),
    ("objective.high", "task", "method=amft", "objective={low=0.9, high=0.1}"),
    ("level_low", "task", "method=riskpo", "objective.level_low=0.95"),
    ("correction_cap", "task", "objective={correction='icepop', correction_cap=0.5}"),
    ("rewards.exact.tolerance", "text", "rewards.exact.tolerance=much"),
    ("rewards.math.tolerance", "text", "rewards={math={tolerance=-1}}"),
    ("rewards.format.tags", "text", "rewards={exact={}, format={tags='think'}}"),
    ("rewards.format.tags", "text", "rewards={exact={}, format={tags=[1]}}"),
    ("model.config.rope_factor", "task", "model.config.rope_factor=8.0"),
    ("objective.dual_clip", "task", "objective.dual_clip=0.5"),
    ("objective.kl_kind", "task", "objective.kl_kind=k4"),
    ("data.difficulty", "task", "data.difficulty=2"),
    ("data.most", "env", "data.most=0"),
    ("data.opponent", "env", "data.opponent=perfct"),
    ("data.illegal", "env", "data.illegal=1"),
    ("data.illegal", "env", "data.illegal=true"),
    ("data.train", "text", "data.train=PLACE/none.jsonl"),
    ("data.train", "text", "data.train=PLACE"),
    ("data.train", "text", "data.train={'PLACE/data.jsonl'=0}"),
    ("data.train", "text", "data.train={}"),
    ("data.train", "text", "data.train={'PLACE/data.jsonl'='half'}"),
    ("data.train", "text", "data.train=recorded:PLACE/none"),
    ("data.train", "text", "data.train=dialogues:PLACE/none.jsonl"),
    ("data.train", "text", "data.train=recorded:"),
    ("data.train", "text", "data.train=dialogues:"),
    (
        "data.train",
        "text",
        "data.train=source:",
        "data.template=",
        "rewards={}",
        "data.max_prompt_tokens=20",
    ),
    (
        "data.train",
        "text",
        "data.train=source:none.py:f",
        "data.template=",
        "rewards={}",
        "data.max_prompt_tokens=20",
    ),
    ("rewards.model.pth", "text", "rewards={exact={}, model={pth='none'}}"),
    ("rewards.success.wieght", "env", "rewards.success.wieght=2"),
    ("epochs", "task", "method=ppo", "objective.epochs=1000000000"),
    ("data.train", "text", "data.train=tfds:"),
    ("data.train", "text", "data.train=tfds:no_such_set/train"),
    ("data.eval", "text", "data.eval=PLACE/none.jsonl"),
    ("data.fields", "text", "data.fields.question=ask"),
    ("data.fields", "text", "data.fields={question='question', answer=5}"),
    ("data.answer_pattern", "text", "data.answer_pattern=(("),
    ("data.answer_pattern", "text", "data.answer_pattern='no group'"),
    ("data.template", "text", "data.template='{question'"),
    ("data.template", "text", "data.template='{answer}'"),
    (
        "data.template_variables",
        "text",
        "data.template_variables={messages=[]}",
        "data.template=chat",
    ),
    ("data.max_prompt_tokens", "text", "data.max_prompt_tokens=3"),
    ("sampling.max_new_tokens", "text", "sampling.max_new_tokens=400"),
    ("rewards.format.pattern", "text", "rewards={exact={}, format={pattern='(('}}"),
    ("rewards", "text", "rewards={'none.py:f'={}}"),
    ("rewards", "text", "rewards={'exact '={}}"),
    ("rewards.model", "text", "rewards={exact={}, model={}}"),
    ("rewards.model", "text", "rewards={exact={}, model={path='none'}}"),
    ("reward_pool.on_error", "text", "reward_pool.on_error=raise"),
    ("log.to", "task", "log.to=['tensorboard', 'mlflow']"),
    ("log.to", "task", "log.to=wandb:"),
    ("log.to", "task", "log.to=['tensorboard', 'tensorboard']"),
    ("model.path", "text", "model.path=PLACE/none"),
    ("model.path", "text", "model.path=PLACE/data.jsonl"),
    ("model.path", "text", "model.path=no-such-org-of-jrl/none@@"),
    ("run.dir", "task", "run.dir=PLACE/data.jsonl"),
    ("objective", "task", "objective={}", "objective.x.y=1"),
    (
        "data.url",
        "text",
        "data.env=jrl.zoo.envs.players:guided",
        "data.url='ftp://x'",
        "data.model=m",
        "rewards={reward={}}",
        "data.max_prompt_tokens=20",
        "data.template=",
    ),
    (
        "data.url",
        "text",
        "data.env=jrl.zoo.envs.players:guided",
        "data.url=''",
        "data.model=m",
        "rewards={reward={}}",
        "data.max_prompt_tokens=20",
        "data.template=",
    ),
    (
        "data.model",
        "text",
        "data.env=jrl.zoo.envs.players:guided",
        "data.url='http://x'",
        "data.model=''",
        "rewards={reward={}}",
        "data.max_prompt_tokens=20",
        "data.template=",
    ),
    (
        "data.max_tokens",
        "text",
        "data.env=jrl.zoo.envs.players:guided",
        "data.url='http://x'",
        "data.model=m",
        "data.max_tokens=many",
        "rewards={reward={}}",
        "data.max_prompt_tokens=20",
        "data.template=",
    ),
    (
        "data.temperature",
        "text",
        "data.env=jrl.zoo.envs.players:guided",
        "data.url='http://x'",
        "data.model=m",
        "data.temperature=-1",
        "rewards={reward={}}",
        "data.max_prompt_tokens=20",
        "data.template=",
    ),
    ("data.env", "text", "data.env=nim", "data.max_prompt_tokens=20", "data.template="),
    (
        "data.env",
        "text",
        "data.env=PLACE/none.py:f",
        "rewards={reward={}}",
        "data.max_prompt_tokens=20",
        "data.template=",
    ),
    ("mesh", "task", "mesh.date=2"),
    ("mesh.data", "task", "mesh.data=3"),
    ("train.wait_seconds", "task", "train.wait_seconds=0"),
    ("sampling.top_k", "task", "sampling.top_k=100000"),
    ("sampling.slots", "task", "sampling.slots=-1"),
)
"""(what the message names, base, overrides that are sound alone and not together)."""
