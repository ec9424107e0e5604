"""Conflicts between features of a run: one table, compared with the features that it has.

A feature is something that keys, a method, its network or the data bring: ``lora``, ``search``,
``several players``. Each is found with the words that name it in the configuration; a row of
``TABLE`` says what one of them needs or forbids, and why; and ``check_features`` writes the
messages. What keys alone bring (``key_features``) is checked as a configuration is read, and all
of it before anything compiles (``setup.features``). A new feature is a line that finds it, a row,
and a remedy.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

from jrl.config.tree import SearchTree
from jrl.errors import UserError

if TYPE_CHECKING:
    from jrl.config.tables import Config, SamplingTable

Features = dict[str, str]
"""Features that a run has, by name, and how the configuration names each."""


class Feature(NamedTuple):
    """Requirement or conflict of one feature.

    Attributes:
      name: of the feature.
      why: a clause that the message ends with.
      needs: names of features that must be there, too.
      forbids: names of features that must not.
    """

    name: str
    why: str
    needs: frozenset[str] = frozenset()
    forbids: frozenset[str] = frozenset()


def _needs(name: str, need: str, why: str) -> Feature:
    return Feature(name, why, needs=frozenset({need}))


def _forbids(name: str, others: str, why: str) -> Feature:
    return Feature(name, why, forbids=frozenset(others.split(", ")))


TABLE: tuple[Feature, ...] = (
    # -- keys of the configuration
    _forbids("checkpoint", "shape", "a checkpoint has its own"),
    _needs("adapters of a file", "checkpoint", "adapters belong to a checkpoint"),
    _forbids(
        *("own network", "lora, 8 bits, router replay, evaluation dtype"),
        "JRL's own networks alone can do that",
    ),
    _forbids("compiled", "files", "it samples problems that a program makes"),
    _forbids("compiled", "placement, sampling mesh", "it is one program on one mesh"),
    _needs("in flight", "episodes", "their tokens alone are drawn a chunk at a time"),
    _needs("in flight", "staleness", "weights change as tokens are drawn"),
    _forbids("own limit", "token limit", "it sets the limit itself"),
    _needs("warm start", "solutions", "it learns a task's solutions"),
    _needs("read evaluations", "evaluations", "nothing else measures it"),
    _forbids("given completions", "placement, sampling mesh", "nothing is sampled"),
    _forbids("pairs", "reward parts", "it holds its own scores"),
    _forbids("pairs", "truncation", "it may hold tokens that the sampler would leave out"),
    _forbids("episodes", "router replay", "they do not record experts"),
    # -- the mode of a run
    _forbids("compiled", "search", "a search takes a host"),
    _forbids("compiled", "rounds", "what it does between rounds takes a host"),
    _forbids("compiled", "own reward", "it judges on the host, between the two programs"),
    _forbids("compiled", "reward model", "it scores between the two programs"),
    _forbids("compiled", "judge, likelihood", "it is asked on the host, between the two programs"),
    _forbids("compiled", "row rewards", "it reads a column of the data, and a task has none"),
    # -- the network that a method trains
    _forbids("own layout", "lora", "all weights are trained"),
    _forbids(
        "own layout", "placement, sampling mesh", "the policy samples on the mesh that trains it"
    ),
    _forbids("own layout", "8 bits, router replay", "the sampler has the network as it is trained"),
    _forbids("several policies", "packed, in flight", "a batch is divided by players"),
    # -- copies of the policy, whose base is no part of it with adapters
    _forbids(
        *("renewed reference", "lora"),
        "the reference is the policy with its adapters off, which never changes",
    ),
    _forbids("held copies", "lora", "copies hold the adapters without their base"),
    # -- groups that are trees
    _forbids("tree", "given completions", "it holds the completions, so none is sampled"),
    _forbids(
        *("tree", "device environment"),
        "completions and episodes on the host branch, those in an environment on the device do not",
    ),
    _forbids("tree", "router replay", "a branch has no record of its past's experts"),
    _forbids("tree", "group loss", "what members share is in one of them alone"),
    _forbids("tree", "greedy members, demonstrations", "they are on no branch"),
    _needs("asked tree", "tree", "no member that the method samples is on a branch"),
    _forbids("tree", "several players", "episodes of several players do not branch"),
    _needs("host tree", "fork", "episodes branch with a copy of the environment's state"),
    _forbids("search", "several processes", "a search runs in one process"),
    _forbids("search", "placement", "a search samples on the training mesh"),
    _forbids("guided search", "sampling mesh", "its value network is on the training mesh"),
    _forbids("search", "reward model", "a search uses rewards of functions only"),
    _forbids("search", "judge, likelihood", "a search uses rewards of functions only"),
    _forbids(
        *("judge here", "several processes, placement, sampling mesh, several policies"),
        "it samples on the training mesh, in one process, with one policy",
    ),
    _forbids(
        *("likelihood", "several processes, placement, sampling mesh, several policies"),
        "it is scored on the training mesh, in one process, by one policy",
    ),
    _forbids("likelihood", "device environment", "its problems have no answers"),
    _forbids("likelihood", "contexts", "it reads a row from its beginning, which contexts divide"),
    _needs("paid by turn", "episodes", "other data have no turns"),
    _forbids("paid by step", "task", "completions of a task have no lines that would be steps"),
    _needs("draws", "text", "only text is sampled in parts"),
    _forbids("draws", "search", "it samples all prompts together"),
    _forbids("search", "token rewards", "a search needs one number per path"),
    _forbids("search", "own reward of a task", "a search on a task uses verify and partial"),
    # -- rounds, replay, problems that are chosen or written
    _forbids(
        *("expert", "placement, several policies, lora, in flight"),
        "completions are sampled by the policy of the round's start",
    ),
    _needs("replay", "records", "no problem of a task or of an environment on the device returns"),
    _forbids("stores", "given completions", "they are there already"),
    _forbids(
        *("stores", "placement, router replay, branches"),
        "a stored member joins a later group as it was sampled",
    ),
    _forbids("stores", "several processes", "what is kept is in one process"),
    _forbids("curriculum", "placement", "problems are chosen after the step before"),
    _forbids("curriculum", "given completions", "they are trained on in their own order"),
    _forbids("further draws", "router replay", "their experts are not on record"),
    _forbids("episodes", "further members", "they are played for whole groups"),
    _needs("questions", "records", "a task has no words for them"),
    _forbids("questions", "episodes", "they are about completions, each by itself"),
    _forbids("search", "further members", "its members are the leaves of one tree"),
    _forbids("tests between rounds", "branches", "problems are tested by independent members"),
    _needs("written problems", "episodes", "problems are written for an environment on the host"),
    _needs("host written problems", "writer", "nobody writes them"),
    _needs("estimates between rounds", "value network", "its numbers are read"),
    _forbids("branch rounds", "episodes", "they branch as they are played"),
    _forbids("step tokens", "episodes", "a search of episodes goes by turns"),
    # -- what is drawn, and what the data hold
    _forbids("placement", "nothing drawn", "its devices are for a rollout"),
    _forbids("router replay", "nothing drawn, given completions", "nothing is sampled"),
    _forbids(
        "entropy bonus", "nothing drawn, given completions", "the policy did not sample the tokens"
    ),
    _forbids(
        *("episodes", "greedy members, demonstrations, nothing drawn"),
        "episodes on the host have no such members",
    ),
    _forbids(
        *("device environment", "demonstrations, nothing drawn"),
        "an environment on the device has no demonstrations",
    ),
    _forbids("recorded", "greedy members, demonstrations beside", "no server records such members"),
    _forbids(
        *("dialogues", "sampler log-probabilities, on-policy loss"),
        "dialogues were not sampled by a policy, so they have no log-probabilities",
    ),
    _needs("rationales", "pairs", "nothing else brings them"),
    _forbids(
        *("pairs", "sampler log-probabilities, demonstrations"),
        "it reads what the policy drew, or demonstrations",
    ),
    _forbids(
        *("own source", "demonstrations, search, placement"),
        "a source of your own has neither solutions nor prompts of files",
    ),
    _forbids("several groups", "dropped groups, stores", "they belong together"),
    _forbids("several groups", "adaptive curriculum", "it learns from one group of each problem"),
    _forbids("episodes", "several processes", "episodes run in one process"),
    _needs("contexts", "shared rows", "contexts are trained as rows that share their prompt"),
    _forbids("contexts", "attention", "it is read over whole rows, which contexts divide"),
    _needs("value network kind", "value network", "it has none to choose"),
    _forbids(
        *("trained states", "value network kind"),
        "those are the policy's, and the values come of others",
    ),
    # -- experts
    _needs("router replay", "experts", "the model has none"),
    _needs("router losses", "experts", "the model has none"),
)

WITHOUT: Mapping[str, str] = {
    "checkpoint": "remove model.path (on the command line, `model.path=`)",
    "shape": "remove model.config (on the command line, `model.config=`)",
    "files": "give data.task or an environment on the device",
    "own network": "remove model.network",
    "warm start": "set warmup.steps to 0",
    "adaptive curriculum": "choose another method",
    "8 bits": "set sampling.int8 and sampling.float8 to []",
    "attention": "choose another method",
    "branch rounds": "remove tree.rounds",
    "branches": "set tree.kind to 'none'",
    "compiled": "set train.mode to 'host'",
    "contexts": "set data.contexts to 1",
    "demonstrations": "choose a method that draws its own completions",
    "demonstrations beside": "choose another method",
    "device environment": "use a task, data.train, or data.env = FILE.py:function",
    "draws": "set sampling.draws to 1",
    "dropped groups": "choose a method that keeps every group",
    "entropy bonus": "remove objective.entropy_coef",
    "episodes": "remove data.env",
    "expert": "set objective.round_steps to 0",
    "further members": "choose another method",
    "greedy members": "choose another method",
    "group loss": "choose another method",
    "held copies": "choose a method that copies no policy",
    "in flight": "set train.mode to 'host'",
    "judge": "remove the judge",
    "judge here": "name a server with url",
    "likelihood": "remove the part",
    "lora": "remove [lora]",
    "nothing drawn": "choose a method that draws its own completions",
    "on-policy loss": "choose a method that learns from any data, such as sft, filtered_bc, ilql"
    " or dpo",
    "packed": "set train.mode to 'host'",
    "pairs": "give data.train instead",
    "placement": "remove [placement]",
    "renewed reference": "choose a method whose reference stays",
    "reward model": "remove [rewards.model]",
    "router losses": "remove it",
    "router replay": "set objective.router_replay to false",
    "sampler log-probabilities": "choose a method that learns from any data, such as sft,"
    " filtered_bc, ilql or dpo",
    "row rewards": "remove it",
    "sampling mesh": "remove [sampling.mesh]",
    "guided search": "set tree.kind to 'none'",
    "search": "set tree.kind to 'none'",
    "step tokens": "remove tree.tokens and set data.turn_tokens",
    "stores": "choose another method",
    "several players": "use an environment of one player",
    "several policies": "set objective.policies to 1",
    "several processes": "use one host",
    "token rewards": "remove it",
    "task": "give data.train instead",
    "tree": "set tree.kind to 'none'",
    "asked tree": "set tree.kind to 'none'",
    "rounds": "choose another method",
    "value network kind": "set value.kind to 'head'",
}
"""Remedies that remove a feature; for others the remedy is to remove its key."""

WITH: Mapping[str, tuple[str, str]] = {
    "checkpoint": ("model.path", "give it"),
    "evaluations": ("evaluations between the steps", "set eval.every"),
    "solutions": ("data.task", "give it"),
    "staleness": (
        "a rollout during training steps",
        "set placement.staleness to 1 or more",
    ),
    "episodes": ("episodes", "give data.train and data.env = FILE.py:function"),
    "experts": ("routed experts", "choose another model"),
    "pairs": ("data.pairs", "give it, with a rationale in each row"),
    "fork": ("HostEnv.fork", "use an environment whose state can be copied"),
    "records": ("data.train", "give it, with data.env = FILE.py:function for episodes"),
    "tree": ("sampled members", "choose a method that draws its own completions"),
    "text": ("prompts in text without an environment", "give data.train alone"),
    "shared rows": ("a network that takes such rows", "use one of jrl.models.transformer"),
    "value network": (
        "a method with a value network",
        "choose such a method, as ppo is",
    ),
    "writer": ("data.writer", "set it to FILE.py:function, or to the url and model of an endpoint"),
}
"""Needed features: their names in messages, and remedies."""


BY_KEY = frozenset({"checkpoint", "episodes", "evaluations", "solutions", "staleness", "text"})
"""Needed features that keys alone bring."""


def check_features(features: Mapping[str, str]) -> None:
    """Raises UserError where features of a run do not go together, a line for each such pair.

    Args:
      features: by name, with the words that name each in the configuration.
    """
    if lines := broken_rows(features):
        raise UserError("\n".join(lines))


def broken_rows(
    features: Mapping[str, str], looked_for: Collection[str] = frozenset(WITH)
) -> list[str]:
    """A line for each pair of features that do not go together.

    Args:
      features: as ``check_features`` takes them.
      looked_for: needed features that ``features`` would name if they were there.
    """
    rows = (row for row in TABLE if row.name in features)
    lines = (line for row in rows for line in _broken(row, features, looked_for))
    return list(dict.fromkeys(lines))


def _broken(row: Feature, features: Mapping[str, str], looked_for: Collection[str]) -> list[str]:
    """A line for each missing need of a row, and for each feature that it forbids."""
    subject, lines = features[row.name], []
    for need in sorted((row.needs & frozenset(looked_for)) - features.keys()):
        label, remedy = WITH[need]
        lines.append(f"{subject} needs {label}: {row.why}; {_either(remedy, row.name)}")
    for other in sorted(row.forbids & features.keys()):
        remedy = _either(WITHOUT.get(other, f"remove {features[other]}"), row.name)
        text = features[other].removesuffix(",")  # of a clause that the sentence ends with
        lines.append(f"{subject} does not go with {text}: {row.why}; {remedy}")
    return lines


def _either(remedy: str, name: str) -> str:
    return f"{remedy}, or {WITHOUT[name]}" if name in WITHOUT else remedy


# ---------------------------------------------------------------- what keys bring


def present(items: Mapping[str, tuple[object, str]]) -> Features:
    """The names of which the first of two is true, with the second."""
    return {name: text for name, (is_there, text) in items.items() if is_there}


def key_features(config: Config) -> Features:
    """Features that keys of a configuration bring, whatever they name.

    Args:
      config: of the run; reading it has not ended, perhaps.
    """
    model, sampling, placement = config.model, config.sampling, config.placement
    network = model.network
    steps = config.tree.tokens if isinstance(config.tree, SearchTree) else None
    limit, cut = sampling.max_new_tokens, _changed(sampling, ("top_k", "top_p", "min_p"))
    parts = [f"rewards.{name}" for name in config.rewards]
    reads = _readers_of_evaluations(config)
    items = {
        "checkpoint": (model.path is not None, f"model.path = {model.path!r}"),
        "shape": (model.config is not None and network is None, "model.config"),
        "own network": (network is not None, f"model.network = {network!r}"),
        "lora": (config.lora, "[lora]"),
        "adapters of a file": (
            config.lora and config.lora.path is not None,
            f"lora.path = {config.lora and config.lora.path!r}",
        ),
        "placement": (placement, "[placement]"),
        "staleness": (placement and placement.staleness, "placement.staleness"),
        "sampling mesh": (sampling.mesh and not placement, "[sampling.mesh]"),
        "draws": (sampling.draws > 1, f"sampling.draws = {sampling.draws}"),
        "token limit": (
            limit != type(sampling).model_fields["max_new_tokens"].default,
            f"sampling.max_new_tokens = {limit}",
        ),
        "truncation": (cut, " and ".join(cut)),
        "8 bits": (sampling.in_8_bits, " and ".join(_formats(sampling))),
        "router replay": (config.replays_routing, "objective.router_replay = true"),
        "reward parts": (parts, " and ".join(parts)),
        "value network kind": (config.value.kind != "head", f"value.kind = {config.value.kind!r}"),
        "step tokens": (steps is not None, f"tree.tokens = {steps}"),
        "warm start": (config.warmup.steps, f"warmup.steps = {config.warmup.steps}"),
        "evaluations": (config.eval.every, f"eval.every = {config.eval.every}"),
        "evaluation dtype": (config.eval.dtype is not None, f"eval.dtype = {config.eval.dtype!r}"),
        "read evaluations": (reads, " and ".join(reads)),
    }
    modes = {"compiled": "compiled", "packed": "packed", "in flight": "in_flight"}
    mode = {name: (config.train.mode == m, f"train.mode = {m!r}") for name, m in modes.items()}
    return present(items | mode) | config.data.features


def _changed(sampling: SamplingTable, names: tuple[str, ...]) -> list[str]:
    """Keys of the sampler that have another value than their default, with it."""
    fields = type(sampling).model_fields
    values = {name: getattr(sampling, name) for name in names}
    return [f"sampling.{k} = {v}" for k, v in values.items() if v != fields[k].default]


def _formats(sampling: SamplingTable) -> list[str]:
    """The keys that have parts of the sampler in 8 bits, with their values."""
    keys = {"int8": sampling.int8, "float8": sampling.float8}
    return [f"sampling.{key} = {list(parts)}" for key, parts in keys.items() if parts]


def _readers_of_evaluations(config: Config) -> list[str]:
    """Keys that read a metric of the evaluations between the steps."""
    best = (config.checkpoint.best or "").removeprefix("-")
    readers = [f"checkpoint.best = {config.checkpoint.best!r}"] if best.startswith("eval/") else []
    acting = (name for name, limit in config.watch.items() if limit.action != "none")
    return readers + [f"watch.{json.dumps(n)}" for n in acting if n.startswith("eval/")]
