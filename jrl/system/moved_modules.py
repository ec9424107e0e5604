"""Modules that have moved: importing one by its old name gives it, and says where it is now."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from typing import Any

MOVED = {
    "checkpoint": "storage.checkpoints",
    "collect.episodes": "collect.device_episodes",
    "compare": "run.compare",
    "compile_notes": "system.compile_reports",
    "compiles": "system.compile_cache",
    "config.unions": "config.data, config.tree and config.optimizer",
    "data.goals": "zoo.methods.goals",
    "data.gsm8k": "zoo.tools.gsm8k",
    "data.hops": "zoo.tools.hops",
    "data.sources": "data.datasets",
    "devices": "system.devices",
    "directories": "system.directories",
    "drift": "zoo.tools.reproducibility",
    "envs": "episodes",
    "envs.arrays": "zoo.adapters.arrays",
    "envs.base": "episodes.device",
    "envs.calculator": "zoo.envs.calculator",
    "envs.describe": "episodes.tool_descriptions",
    "envs.frames": "models.chat_frames",
    "envs.games": "zoo.envs.games",
    "envs.gymnasium": "zoo.adapters.gymnasium",
    "envs.imagined": "zoo.envs.imagined",
    "envs.labelled": "zoo.envs.foretell and zoo.envs.ranked_list",
    "envs.libraries": "zoo.adapters.array_games",
    "envs.mcp_tools": "zoo.adapters.mcp",
    "envs.named": "zoo.envs.players, zoo.envs.zero_search, zoo.adapters.mcp and .gymnasium",
    "envs.openenv_client": "zoo.adapters.openenv",
    "envs.play": "episodes.device_play",
    "envs.players": "zoo.envs.players",
    "envs.propositions": "zoo.envs.propositions",
    "envs.prover": "zoo.envs.prover",
    "envs.reasoning": "zoo.adapters.reasoning_gym",
    "envs.search": "zoo.envs.search",
    "envs.self_play": "episodes.device_self_play",
    "envs.shipped": "zoo.envs.tool_questions",
    "envs.statements": "zoo.envs.statements",
    "envs.subgoals": "zoo.envs.subgoals",
    "envs.tactics": "zoo.envs.tactics",
    "envs.textarena_child": "zoo.adapters.textarena_child",
    "envs.textarena_games": "zoo.adapters.textarena",
    "envs.verifiers_env": "zoo.adapters.verifiers",
    "envs.writer": "zoo.envs.writer",
    "episodes.endpoint": "episodes.model_endpoint",
    "evaluate.episodes": "evaluate.searcher",
    "export": "run.export",
    "extras": "system.extras",
    "imagine": "zoo.tools.imagine",
    "integrity": "storage.integrity",
    "json_text": "system.json_text",
    "memory": "system.memory",
    "methods.batch_statistics": "zoo.methods.batch_statistics",
    "methods.demonstrations": "zoo.methods.demonstrations",
    "methods.difficulty": "zoo.methods.difficulty",
    "methods.entropy": "zoo.methods.entropy",
    "methods.mirror_descent": "zoo.methods.mirror_descent",
    "methods.networks": "zoo.networks",
    "methods.off_policy": "zoo.methods.off_policy",
    "methods.offline": "zoo.methods.offline",
    "methods.preference_lists": "zoo.methods.preference_lists",
    "methods.preference_online": "zoo.methods.preference_online",
    "methods.ranking": "zoo.methods.ranking",
    "methods.reinforce": "methods.policy_gradient",
    "methods.rlhf": "zoo.methods.rlhf",
    "methods.structure": "zoo.methods.structure",
    "methods.token_credit": "zoo.methods.token_credit",
    "methods.trees": "zoo.methods.trees",
    "metrics": "storage.metrics",
    "models.several": "zoo.networks.policies",
    "models.token_values": "zoo.networks.token_values",
    "objectives.functional": "objectives.array_losses, objectives.array_advantages and"
    " objectives.array_pairs",
    "objectives.length_rewards": "zoo.methods.mirror_descent, zoo.methods.batch_statistics and"
    " zoo.methods.rlhf",
    "objectives.prompt_table": "zoo.methods.prompt_table",
    "objectives.tie_breakers": "objectives.comparisons, zoo.methods.batch_statistics and"
    " zoo.methods.entropy",
    "own": "user_code",
    "plan.disjoint": "plan.make",
    "processes": "system.processes",
    "progress": "run.progress",
    "rewards.minerva": "zoo.rewards.minerva",
    "rewards.other_names": "zoo.rewards.trl and zoo.rewards.verl",
    "run_lock": "storage.lock",
    "sample_tokens": "evaluate.sample_tokens",
    "samples": "evaluate.samples",
    "sampling.parking": "sampling.suspend",
    "serving.batch": "sampling.batch",
    "serving.chunk_length": "sampling.chunk_length",
    "serving.engine": "sampling.engine",
    "serving.episode_rows": "sampling.rows",
    "serving.jetstream": "zoo.jetstream.server",
    "serving.jetstream_engine": "zoo.jetstream.engine",
    "serving.request": "sampling.request",
    "serving.row_costs": "sampling.row_costs",
    "serving.search": "episodes.search",
    "serving.step_rows": "sampling.rows",
    "serving.text": "sampling.text",
    "signals": "system.signals",
    "sinks": "storage.sinks",
    "step_contents": "storage.step_contents",
    "step_files": "storage.step_files",
    "train.adapters": "setup.adapters",
    "train.collect": "collect.collector",
    "train.compiler": "setup.compiler",
    "train.contexts": "collect.contexts",
    "train.curriculum": "collect.curriculum",
    "train.demonstrations": "collect.members",
    "train.edit": "collect.edit",
    "train.episode_search": "episodes.search",
    "train.episode_trees": "episodes.tree",
    "train.episodes": "collect.device_episodes",
    "train.features": "setup.features",
    "train.fits": "train.memory_check",
    "train.frozen": "setup.frozen",
    "train.gather": "setup.gather",
    "train.groups": "collect.groups",
    "train.held_models": "train.memory_check",
    "train.host_branches": "episodes.branching",
    "train.host_episodes": "collect.host_episodes",
    "train.host_play": "episodes.play",
    "train.host_slots": "episodes.slots",
    "train.judge_cache": "judging.cache",
    "train.judge_client": "judging.client",
    "train.judge_limits": "judging.limits",
    "train.judge_models": "judging.models",
    "train.judges": "judging.judges",
    "train.judging": "judging.host",
    "train.kinds": "setup.kinds",
    "train.lacks": "run.diagnostics",
    "train.likelihood": "judging.likelihood",
    "train.members": "collect.members",
    "train.method_network": "zoo.networks",
    "train.objective": "setup.objective",
    "train.packing": "collect.packing",
    "train.pairs": "collect.sources_given",
    "train.pins": "run.revisions",
    "train.placement": "setup.placement",
    "train.plan": "collect.plan",
    "train.plan_tools": "collect.plan_tools",
    "train.prompt_seeds": "collect.run_rows",
    "train.recorded": "collect.sources_given",
    "train.records": "run.records",
    "train.replay": "methods.stores and methods.replays",
    "train.resharding": "collect.resharding",
    "train.reward_ensembles": "rewards.model",
    "train.reward_parts": "setup.reward_parts",
    "train.reward_runs": "setup.reward_runs",
    "train.reward_stages": "collect.reward_stages",
    "train.reward_sums": "collect.reward_stages",
    "train.reward_text": "run.reward_probe",
    "train.row_calls": "judging.row_calls",
    "train.run_rows": "collect.run_rows",
    "train.sampler_difference": "run.sampler_difference",
    "train.several": "zoo.networks.policies",
    "train.sources": "collect.sources",
    "train.sources_own": "collect.sources_own",
    "train.sources_task": "collect.sources_task",
    "train.sources_text": "collect.sources_text",
    "train.text_models": "rewards.text_models",
    "train.text_parts": "judging.text_parts",
    "train.tree_search": "collect.tree_search",
    "train.value_start": "train.reward_model",
    "verifiers.gym": "zoo.rewards.reasoning_gym",
    "verifiers.verl": "zoo.rewards.verl",
    "waits": "system.wait_reports",
    "zoo.tools.calculator": "zoo.envs.calculator",
    "zoo.tools.search": "zoo.envs.search",
}
"""Old name -> new one, both without ``jrl.``; what was below an old name is below the new one."""

RENAMED = {"data.sources": {"open_source": "open_dataset"}}
"""Old name of a module -> functions in it that have another name now, too."""

_FUNCTIONS = {"episodes.endpoint", "methods.reinforce"}
"""Old names that a function of the package has today, whose place an import would take."""
_IN_ENVS = "; environments and their tools are in jrl.zoo.envs, adapters in jrl.zoo.adapters"


def moved_to(name: str) -> str | None:
    """The new name of a module such as ``jrl.envs.host``; None for an unknown one."""
    head, _, rest = name.partition(".")
    below: list[str] = []
    while head == "jrl" and rest:
        if rest in MOVED:
            return ".".join(["jrl", MOVED[rest], *below])
        rest, _, last = rest.rpartition(".")
        below.insert(0, last)
    return None


class _Moved(importlib.abc.Loader):
    """Gives the module of a new name, as it is, for an old one."""

    def __init__(self, new: str) -> None:
        self._new = new

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """The module of the new name, whose functions have their old names too."""
        module = importlib.import_module(self._new)
        for old, name in RENAMED.get(spec.name.removeprefix("jrl."), {}).items():
            setattr(module, old, getattr(module, name))
        self._spec = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: it has run. Its own specification, which import replaces, is put back."""
        module.__spec__ = self._spec

    def get_code(self, name: str) -> types.CodeType | None:
        """That of the new name, for ``python -m``."""
        spec = importlib.util.find_spec(self._new)
        assert spec is not None
        assert isinstance(spec.loader, importlib.abc.InspectLoader)
        return spec.loader.get_code(self._new)


class _MovedPackage(importlib.abc.Loader):
    """Gives a package a module of its own, whose names are those of the new one.

    Import sets what is imported below a package as its attribute: ``jrl.envs.play`` would take the
    place of ``jrl.episodes.play``, which is another module.
    """

    def __init__(self, new: str) -> None:
        self._new = new

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """None: the usual empty one."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Has the module look names up: old ones of modules below it, others in the new package."""
        package, old = importlib.import_module(self._new), module.__name__

        def find(name: str) -> Any:
            moved = f"{old}.{name}".removeprefix("jrl.") in MOVED
            return importlib.import_module(f"{old}.{name}") if moved else getattr(package, name)

        vars(module)["__getattr__"] = find


class _Finder(importlib.abc.MetaPathFinder):
    """Comes first: below the old name of a package others would load its files a second time."""

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        new = moved_to(fullname)
        if new is None:
            return None
        text = f"{fullname} is {new} now"
        several = not all(map(str.isidentifier, new.split(".")))
        if several or fullname.removeprefix("jrl.") in _FUNCTIONS:
            raise ModuleNotFoundError(text, name=fullname)
        spec = importlib.util.find_spec(new)
        if spec is None:
            more = _IN_ENVS if fullname.startswith("jrl.envs.") else ""
            raise ModuleNotFoundError(f"{text}, and there is none{more}", name=fullname)
        if fullname != "jrl.envs":  # what is in it is named next
            warnings.warn(f"{text}; write the new name", FutureWarning, stacklevel=2)
        package = spec.submodule_search_locations is not None
        loader = _MovedPackage(new) if package else _Moved(new)
        return importlib.machinery.ModuleSpec(fullname, loader, is_package=package)


def install() -> None:
    """Has an old name import the module of the new one, and say so."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
