"""Environments of many turns: on the device in one program, or on the host beside the sampler.

- ``Env``, ``Turn``, ``Start``, ``get_env``: pure functions, played inside a compiled program
- ``coroutine_env``, ``roles``: an episode as a coroutine that awaits the policy's turns
- ``HostEnv``, ``Feedback``, ``tool_env``, ``process_env``: ``init`` and ``step`` on the host
- ``to_rollout``: transcripts of episodes as rows to train on
- ``Tree``, ``play_search``, ``rows_of_tree``: searches over turns, and their rows
"""

from __future__ import annotations

from typing import TYPE_CHECKING

HOMES = {
    "jrl.episodes.coroutine": ("EpisodeFunction", "coroutine_env"),
    "jrl.episodes.device": ("Env", "Start", "Turn", "task_env"),
    "jrl.episodes.device_envs": ("ENVS", "get_env"),
    "jrl.episodes.host": (
        *("ChatOptions", "EnvError", "EnvExtras", "Feedback", "HostEnv", "Lifecycle", "Limits"),
        *("Reply",),
    ),
    "jrl.episodes.model_endpoint": ("endpoint", "keyed_endpoint"),
    "jrl.episodes.parsers": ("Call", "Malformed", "PARSERS", "Parser", "get_parser"),
    "jrl.episodes.policy": ("Outcome", "Policy", "roles"),
    "jrl.episodes.process": ("process_env",),
    "jrl.episodes.recorded": ("Recorded", "read_recorded"),
    "jrl.episodes.sandbox": ("Sandbox", "SandboxLimits", "SandboxResult", "python_tool"),
    "jrl.episodes.search": ("Searched", "play_search"),
    "jrl.episodes.tools": ("Tool", "ToolError", "tool_env"),
    "jrl.episodes.transcript": ("RowShape", "EpisodeArrays", "Segment", "Transcript", "to_rollout"),
    "jrl.episodes.tree": ("SEARCHES", "SearchPlan", "Step", "Tree", "search_plan"),
    "jrl.episodes.tree_rows": ("TreeRows", "rows_of_tree"),
}
"""Module -> public names."""

if TYPE_CHECKING:
    from jrl.episodes.coroutine import EpisodeFunction as EpisodeFunction
    from jrl.episodes.coroutine import coroutine_env as coroutine_env
    from jrl.episodes.device import Env as Env
    from jrl.episodes.device import Start as Start
    from jrl.episodes.device import Turn as Turn
    from jrl.episodes.device import task_env as task_env
    from jrl.episodes.device_envs import ENVS as ENVS
    from jrl.episodes.device_envs import get_env as get_env
    from jrl.episodes.host import ChatOptions as ChatOptions
    from jrl.episodes.host import EnvError as EnvError
    from jrl.episodes.host import EnvExtras as EnvExtras
    from jrl.episodes.host import Feedback as Feedback
    from jrl.episodes.host import HostEnv as HostEnv
    from jrl.episodes.host import Lifecycle as Lifecycle
    from jrl.episodes.host import Limits as Limits
    from jrl.episodes.host import Reply as Reply
    from jrl.episodes.model_endpoint import endpoint as endpoint
    from jrl.episodes.model_endpoint import keyed_endpoint as keyed_endpoint
    from jrl.episodes.parsers import PARSERS as PARSERS
    from jrl.episodes.parsers import Call as Call
    from jrl.episodes.parsers import Malformed as Malformed
    from jrl.episodes.parsers import Parser as Parser
    from jrl.episodes.parsers import get_parser as get_parser
    from jrl.episodes.policy import Outcome as Outcome
    from jrl.episodes.policy import Policy as Policy
    from jrl.episodes.policy import roles as roles
    from jrl.episodes.process import process_env as process_env
    from jrl.episodes.recorded import Recorded as Recorded
    from jrl.episodes.recorded import read_recorded as read_recorded
    from jrl.episodes.sandbox import Sandbox as Sandbox
    from jrl.episodes.sandbox import SandboxLimits as SandboxLimits
    from jrl.episodes.sandbox import SandboxResult as SandboxResult
    from jrl.episodes.sandbox import python_tool as python_tool
    from jrl.episodes.search import Searched as Searched
    from jrl.episodes.search import play_search as play_search
    from jrl.episodes.tools import Tool as Tool
    from jrl.episodes.tools import ToolError as ToolError
    from jrl.episodes.tools import tool_env as tool_env
    from jrl.episodes.transcript import EpisodeArrays as EpisodeArrays
    from jrl.episodes.transcript import RowShape as RowShape
    from jrl.episodes.transcript import Segment as Segment
    from jrl.episodes.transcript import Transcript as Transcript
    from jrl.episodes.transcript import to_rollout as to_rollout
    from jrl.episodes.tree import SEARCHES as SEARCHES
    from jrl.episodes.tree import SearchPlan as SearchPlan
    from jrl.episodes.tree import Step as Step
    from jrl.episodes.tree import Tree as Tree
    from jrl.episodes.tree import search_plan as search_plan
    from jrl.episodes.tree_rows import TreeRows as TreeRows
    from jrl.episodes.tree_rows import rows_of_tree as rows_of_tree
else:
    from jrl.system.lazy_names import lazy_names

    __all__, __getattr__, __dir__ = lazy_names(__name__, HOMES)
