"""Judges that are models on the run's devices: the policy, its start, or another checkpoint.

    models = load_judge_models(config, rewards, mesh)       # all but the policy
    judge = model_judge(table, models["helpful"], seed=0)
    verdicts, counts = judge.verdicts([QuestionVote(question, vote=0)])

A reply is sampled by the row engine as any completion is: what it says depends on the weights, the
run's seed, the question and the number of the vote, not on what else is asked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jrl.config import Config
from jrl.config.judge import POLICY, START, JudgeTable
from jrl.config.stored import config_of_run
from jrl.data.messages import Wording
from jrl.episodes.play import Device
from jrl.episodes.search import by_likelihood, by_path, play_search
from jrl.episodes.tree import search_plan
from jrl.episodes.world import TextWorld
from jrl.errors import UserError
from jrl.judging.cache import QuestionVote, Reply, VerdictCache, reply_of, verdicts_of
from jrl.judging.limits import COUNTS
from jrl.mesh import tree_shardings
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.file_tokenizer import load_tokenizer
from jrl.models.tokenizer import Tokenizer
from jrl.models.transformer import transformer
from jrl.rewards.model import JudgeModel
from jrl.sampling.rows import Rows
from jrl.setup.frozen import is_run_not_checkpoint, model_params, model_shape
from jrl.setup.reward_parts import RunRewards, judge_of
from jrl.storage.integrity import checksum
from jrl.types import Params, Prompt

_CHUNK = 16
"""Decode steps between two looks at which replies have ended."""


def judge_directory(config: Config, name: str) -> str | None:
    """The directory of the model of a judge on the run's devices; None for the policy.

    Raises:
      UserError: the policy did not begin with a checkpoint.
    """
    table, key = judge_of(config, name), f"rewards.{name}.model"
    if table.model != START:
        return None if table.model == POLICY else table.model
    if config.model.path is None:
        raise UserError(
            f"{key} = 'start' needs model.path, the checkpoint that the policy begins with; or name"
            " a directory"
        )
    return config.model.path


def judge_shape(config: Config, name: str) -> ModelConfig | None:
    """The shape of the model of a judge on the run's devices; None for the policy.

    Raises:
      UserError: there is no such model, or its questions and replies are longer than it reads.
    """
    directory, table = judge_directory(config, name), judge_of(config, name)
    if directory is None:
        return None
    try:
        shape = model_shape(directory, f"rewards.{name}.model")
    except UserError as error:
        hint = f"{error}, or set rewards.{name}.url, the address of a server"
        raise UserError(str(error) if table.model == START else hint) from None
    check_judge_length(shape.max_length, table, f"rewards.{name}")
    types: dict[str, Any] = {"dtype": config.model.dtype, "param_dtype": config.model.param_dtype}
    return dataclasses.replace(shape, **types)


def check_judge_length(longest: int, table: JudgeTable, key: str) -> None:
    """Raises UserError where a question and its reply do not fit a model of that length."""
    if table.max_prompt_tokens + table.max_tokens > longest:
        raise UserError(
            f"{key}.max_prompt_tokens = {table.max_prompt_tokens} and {key}.max_tokens ="
            f" {table.max_tokens}: the model reads {longest} tokens; lower one of them"
        )


def load_judge_models(
    config: Config, rewards: RunRewards, mesh: Mesh, longest: int
) -> dict[str, JudgeModel]:
    """The models of a run's judges on its devices, but for the policy, by reward part.

    Parts that name one directory share its weights.

    Args:
      config: of the run.
      rewards: its reward parts.
      mesh: of training.
      longest: sequence that the policy reads, tokens.

    Raises:
      UserError: see ``judge_shape``, also of the policy.
    """
    models: dict[str, JudgeModel] = {}
    by_directory: dict[str, JudgeModel] = {}
    for name in rewards.given_by("judge"):
        if not (table := judge_of(config, name)).local:
            continue
        if (shape := judge_shape(config, name)) is None:
            check_judge_length(longest, table, f"rewards.{name}")
            continue
        directory = judge_directory(config, name) or ""
        if directory not in by_directory:
            by_directory[directory] = _load(config, directory, f"rewards.{name}.model", shape, mesh)
        models[name] = by_directory[directory]
    return models


def _load(config: Config, directory: str, key: str, shape: ModelConfig, mesh: Mesh) -> JudgeModel:
    network = transformer(shape, attention=config.model.attention)
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    where = tree_shardings(mesh, network.axes(), shapes)
    params = hf.place(model_params(directory, key, config.model.param_dtype), where)
    sums = np.asarray(jax.jit(checksum)(params)).tolist()
    return JudgeModel(network, params, _tokenizer(directory, key), tuple(sums))


def _tokenizer(directory: str, key: str) -> Tokenizer:
    if is_run_not_checkpoint(directory, key):
        directory = config_of_run(directory).model.path or ""
    return load_tokenizer(Path(directory))


# ---------------------------------------------------------------- replies


class _Replies(TextWorld):
    """Text that nobody answers, by the name that reports of long waits have."""

    name = "judges"


class ModelJudge(NamedTuple):
    """A model that gives verdicts, called as ``judge_client.JudgeClient`` is.

    Attributes:
      model: with weights, or ``with_weights`` gives it some.
      rows: decode slots, which hold no memory between two calls.
      wording: turns questions into prompts.
      longest: a question, tokens; longer ones have no verdict.
      cache: replies already given; their names key what is sampled.
    """

    model: JudgeModel
    rows: Rows
    wording: Wording
    longest: int
    cache: VerdictCache

    def with_weights(self, weights: Mapping[str, Params]) -> ModelJudge | None:
        """The judge, the policy's weights in it where it is the policy; None without them."""
        if self.model.params is not None:
            return self
        if POLICY not in weights:
            return None
        return self._replace(model=self.model._replace(params=weights[POLICY]))

    def verdicts(self, questions: Sequence[QuestionVote]) -> tuple[list[Any], dict[str, float]]:
        """As ``JudgeClient.verdicts``; questions that are too long count as failures."""
        counts = dict.fromkeys(COUNTS, 0.0)
        names = [self.cache.name(each) for each in questions]
        by_name: dict[str, Reply | None] = {}
        left: dict[str, tuple[QuestionVote, list[int]]] = {}
        for name, each in zip(names, questions, strict=True):
            if name in by_name or name in left:
                continue
            by_name[name] = self.cache.read(name, each.question)
            if by_name[name] is not None:
                counts["judge_cached"] += 1
            elif (ids := self._prompt(each)) is None:
                counts["judge_failures"] += 1
            else:
                left[name] = each, ids
        counts["judge_calls"] = float(len(left))
        replies = self._replies({name: ids for name, (_, ids) in left.items()})
        for name, (text, cut) in replies.items():
            by_name[name] = reply = reply_of(text, left[name][0].question, cut=cut)
            if reply is None:
                counts["judge_unreadable"] += 1
            else:
                self.cache.write(name, text)
        return verdicts_of(questions, map(by_name.get, names)), counts

    def probe(self) -> None:
        """Nothing: a model that is there answers."""

    def stop(self) -> None:
        """Nothing: the thread that is interrupted is the one that samples."""

    def _prompt(self, entry: QuestionVote) -> list[int] | None:
        """The ids of a question; None where the model cannot read it."""
        messages = [dict(message) for message in entry.question.messages]
        if self.wording.template != "chat":  # a model without a chat template reads plain text
            text = "\n\n".join(message["content"] for message in messages)
            messages = [{"role": "user", "content": text}]
        try:
            ids = self.wording.prompt(messages, None, "a question to a judge")[1]
        except UserError:  # a completion with characters that the tokenizer does not have
            return None
        return ids if 0 < len(ids) <= self.longest else None

    def _replies(self, prompts: Mapping[str, list[int]]) -> dict[str, tuple[str, bool]]:
        """The reply to each question by its name, and whether its limit of tokens ended it."""
        if not prompts:
            return {}
        tokenizer, rows = self.wording.tokenizer, self.rows
        as_prompts = [
            Prompt(i, "", np.array(x, np.int32), "") for i, x in enumerate(prompts.values())
        ]
        rows.set_weights(self.model.params, 0)
        try:
            searched = play_search(
                Device(rows),
                _Replies(tokenizer.stop_ids),
                as_prompts,
                [int(name[:16], 16) for name in prompts],
                search_plan("best_of_n", 1),
                by_path(by_likelihood),
            )
        finally:
            rows.release()
        replies = [tree.step(1).content.tolist() for tree in searched.trees]
        texts = [(tokenizer.decode(x), x[-1] not in tokenizer.stop_ids) for x in replies]
        return dict(zip(prompts, texts, strict=True))


def model_judge(
    table: JudgeTable,
    model: JudgeModel,
    *,
    seed: int,
    cache: Path | None = None,
    variables: Mapping[str, Any] | None = None,
) -> ModelJudge:
    """A judge on the run's devices.

    Args:
      table: the judge's keys.
      model: who judges.
      seed: of the run.
      cache: directory of verdicts already given; None for none.
      variables: further ones of the chat template.
    """
    tokenizer = model.tokenizer
    chats = bool(getattr(tokenizer, "templates", ()))
    how = {"temperature": table.temperature, "max_tokens": table.max_tokens, "seed": seed}
    rows = Rows(
        model.network,
        slots=table.at_once,
        prompt_tokens=table.max_prompt_tokens,
        max_new_tokens=table.max_tokens,
        stop_tokens=tokenizer.stop_ids,
        chunk=_CHUNK,
        sampling={"temperature": table.temperature},
    )
    return ModelJudge(
        model,
        rows,
        Wording(tokenizer, template="chat" if chats else "plain", variables=variables or {}),
        table.max_prompt_tokens,
        VerdictCache(cache, list(model.checksum) or table.model, how),
    )
