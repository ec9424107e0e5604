"""The catalogue of methods, and a page for each, made from its docstring."""

from __future__ import annotations

import inspect
import json
import pathlib
import re
import tomllib
from collections.abc import Callable
from typing import Any

from site_parts.markdown import as_markdown, cell

FAMILIES = {
    "group_relative": "Group-relative",
    "ratios": "Ratios and clipping",
    "policy_gradient": "REINFORCE and baselines",
    "actor_critic": "Actor-critic",
    "preference": "Preference pairs",
    "supervised": "Supervised",
    "distillation": "Distillation",
    "reward_model": "Reward models",
    "preference_strength": "Reward models by strength of preference",
    "intrinsic": "The policy's own confidence",
    "batch_statistics": "Statistics of the batch",
    "demonstrations": "With demonstrations",
    "difficulty": "Weights by difficulty",
    "entropy": "Entropy",
    "filters": "Filters",
    "mirror_descent": "Mirror descent",
    "off_policy": "Off-policy and replay",
    "offline": "Offline, of many turns",
    "preference_lists": "Labels and ranked lists",
    "preference_online": "Online preferences",
    "ranking": "Ranking",
    "joint": "Policy and judge together",
    "rlhf": "RLHF",
    "sampling": "Choice of samples",
    "selection": "Choice of problems",
    "spark": "A policy that learns to judge",
    "stages": "Stages of a run",
    "structure": "Turns, steps and episodes",
    "token_credit": "Credit of tokens",
    "trees": "Trees",
}
"""Family, the name of its module -> its heading; those used most first."""

TEXT = ("gsm8k", "data.train=train.jsonl")
PAIRS = ("dpo", "data.pairs=pairs.jsonl")
SCORED = ("reward_model", "data.pairs=pairs.jsonl")
TALKS = ("dialogues", "data.train=dialogues:talks.jsonl")
"""Configuration, and the data that it is given on the command line."""
CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs"
DIALOGUES = ("filtered_bc", "ilql", "mc_returns")
LISTED = ("gepo",)
"""Methods whose rows list several solutions."""
DEPARTURES = re.compile(r"(?:\A|\n\n|(?<=[.)])\s)(?:Departures?:\s|(?=Departures, ))")
"""Where the departures begin: a paragraph, or the end of one."""


def example(method: dict[str, Any]) -> str:
    """A command that trains by the method, on data of the kind that it reads."""
    name, family = method["name"], method["family"]
    if family in ("reward_model", "preference_strength"):
        config, data = SCORED
    elif name in DIALOGUES:
        config, data = TALKS
    elif family in ("preference", "preference_lists") and "sampler_logprobs" not in method["needs"]:
        config, data = PAIRS
    else:
        config, data = TEXT
    words = [f"jrl train configs/{config}.toml model.path=DIR {data}"]
    words += ["frozen.teacher=TEACHER"] * (family == "distillation")
    words += ["data.fields.solution=solutions"] * (name in LISTED)
    return " ".join([*words, f"method={name}", *removed(config, method)])


def removed(config: str, method: dict[str, Any]) -> list[str]:
    """What takes the coefficients away that a configuration sets for its own method alone."""
    table = tomllib.loads((CONFIGS / f"{config}.toml").read_text(encoding="utf-8"))
    named = {each["name"] for each in method["coefficients"]}
    return [f"objective.{key}=" for key in table.get("objective", {}) if key not in named]


def method_page(method: dict[str, Any], function: Callable[..., Any], home: str) -> str:
    """The page of one method.

    Args:
      method: what ``jrl.methods.list_methods`` has of it.
      function: it, for its docstring.
      home: the address of its module's source, or its path.
    """
    name = method["name"]
    formula, departures = parts(inspect.getdoc(function) or "")
    front = {"title": name, "description": method["summary"], "hide": ["toc"]}
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in front.items()), "---", ""]
    lines += [f"# {name}", "", as_markdown(method["summary"]), "", *facts(method, home), ""]
    lines += ["## Formula", "", as_markdown(formula), ""]
    if departures:
        lines += ["## Departures from the paper", "", as_markdown(departures), ""]
    if method["unsupported"]:
        lines += ["## What a run lacks", "", as_markdown(method["unsupported"]) + ".", ""]
    lines += ["## Keys", "", *keys(method), ""]
    lines += ["## Example", "", "```bash", example(method), "```", ""]
    lines += ["In Python:", "", "```python", "import jrl", "", f"method = jrl.methods.{name}()"]
    return "\n".join([*lines, "```", ""]).replace(f"{name}()", in_python(method))


def in_python(method: dict[str, Any]) -> str:
    """The call that makes the method, with what it cannot do without."""
    required = [f"{each['name']}=..." for each in method["coefficients"] if each["required"]]
    return f"{method['name']}({', '.join(required)})"


def parts(docstring: str) -> tuple[str, str]:
    """(what follows the summary, the departures), each "" where there is none."""
    body = docstring.partition("\n\n")[2].strip("\n")
    mark = DEPARTURES.search(body)
    if mark is None:
        return body, ""
    after = body[mark.end() :].strip()
    return body[: mark.start()].rstrip(), after[:1].upper() + after[1:]


def facts(method: dict[str, Any], home: str) -> list[str]:
    """Paper, family, relatives and needs, as a list."""
    paper = as_markdown(method["paper"] or "none")
    if method["arxiv"]:
        paper = f"[{paper}](https://arxiv.org/abs/{method['arxiv']}) (arXiv:{method['arxiv']})"
    family = FAMILIES[method["family"]]
    facts = [f"- **Paper:** {paper}", f"- **Family:** [{family}](index.md#{slug(family)})"]
    if method["base"]:
        facts.append(f"- **Differs from:** [{method['base']}]({method['base']}.md)")
    facts.append(f"- **Smallest group:** {method['min_group']}")
    if method["reward_parts"]:
        facts.append("- **Reward parts, in order:** " + ", ".join(method["reward_parts"]))
    if method["needs"]:
        facts.append("- **Statistics it reads:** " + ", ".join(f"`{n}`" for n in method["needs"]))
    facts.append("- **Parts of a step that it sets:** " + ", ".join(method["seams"]))
    facts.append(f"- **Source:** {home}")
    return facts


def keys(method: dict[str, Any]) -> list[str]:
    """The table of coefficients."""
    if not method["coefficients"]:
        return ["It has no coefficients of its own."]
    lines = ["| key | default | values |", "| --- | --- | --- |"]
    for each in method["coefficients"]:
        default = f"`{json.dumps(each['default'])}`".replace("`null`", "none")
        if each["required"]:
            default = "a run sets it"
        lines.append(f"| `objective.{each['name']}` | {default} | {cell(each['domain'])} |")
    return lines


def catalogue(methods: list[dict[str, Any]]) -> str:
    """The page of all methods: a table for each family."""
    lines = [
        "# Methods",
        "",
        f"{len(methods)} published methods by family, each with a page: formula, paper, departures",
        "from it, keys. `jrl methods NAME` prints them in a terminal; `method=NAME` trains by it.",
    ]
    for family, heading in FAMILIES.items():
        lines += ["", f"## {heading}", "", "| method | | paper |", "| --- | --- | --- |"]
        for each in methods:
            if each["family"] != family:
                continue
            paper = cell(each["paper"] or "")
            if each["arxiv"]:
                paper = f"[{paper}](https://arxiv.org/abs/{each['arxiv']})"
            name = f"[`{each['name']}`]({each['name']}.md)"
            lines.append(f"| {name} | {cell(as_markdown(each['summary']))} | {paper} |")
    return "\n".join(lines) + "\n"


def navigation(methods: list[dict[str, Any]]) -> list[Any]:
    """The catalogue, then a group for each family."""
    groups = {
        heading: [
            {each["name"]: f"methods/{each['name']}.md"}
            for each in methods
            if each["family"] == family
        ]
        for family, heading in FAMILIES.items()
    }
    return ["methods/index.md", *({heading: pages} for heading, pages in groups.items())]


def slug(heading: str) -> str:
    """A heading's name in an address, as Markdown makes it."""
    letters = "".join(c for c in heading.lower() if c.isalnum() or c in " -_")
    return letters.strip().replace(" ", "-")
