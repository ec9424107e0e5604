"""Reward models that read text with a tokenizer of their own: published ones, and language models.

    model = load_text_model(table, Rules(), "rewards.help", mesh, dtype="bfloat16", seed=0)
    points, counts = model(samples)            # numbers, None for no opinion

Weights are placed on the run's mesh; texts go through the model some rows at a time, in a few
widths, so that few programs do for all lengths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrl.config.reward_model import RewardModelTable
from jrl.errors import UserError, unknown_choice
from jrl.hub import model_directory
from jrl.mesh import batch_sharding, batch_shards, replicated, tree_shardings
from jrl.models import hf
from jrl.models.file_tokenizer import load_tokenizer
from jrl.models.heads import Scores, answer_scores, label_scores
from jrl.models.hf.stored import Stored
from jrl.models.tokenizer import check_vocab
from jrl.models.transformer import transformer
from jrl.rewards.base import Points, Returned, Sample
from jrl.rewards.model import dropout_passes, reduced
from jrl.rewards.reading import Reader
from jrl.rewards.rules import Rules
from jrl.rewards.steps import steps_of
from jrl.types import Array, Network, Params

LEAST_WIDTH = 64
"""Tokens: shorter texts are padded to this width."""


class TextModel(NamedTuple):
    """Points of samples from a model that reads their text; a ``text_parts.TextGiver``.

    Attributes:
      reader: from a sample to token ids.
      program: (params, tokens [B, L], lengths [B]) -> [B] float32, jitted.
      params: of the models of the ensemble, [M, ...].
      mesh: where they lie.
      longest: tokens of the longest text that is read.
      rules: which samples it is asked about, and what no opinion means.
    """

    reader: Reader
    program: Callable[[Params, Array, Array], Array]
    params: Params
    mesh: Mesh
    longest: int
    rules: Rules

    @property
    def only(self) -> str:
        """As ``TextGiver.only``: it reads all."""
        return ""

    @property
    def by_group(self) -> bool:
        """As ``TextGiver.by_group``: the progress of first steps is beside that of the others."""
        return self.reader.table.by == "progress"

    @property
    def remote(self) -> bool:
        """As ``TextGiver.remote``: it is on the run's devices."""
        return False

    def with_weights(self, weights: Mapping[str, Params]) -> TextModel:
        """Itself: it reads the same whatever drew the members."""
        del weights
        return self

    def points(
        self, units: Sequence[Sequence[Sample]]
    ) -> tuple[list[Sequence[Returned]], dict[str, float]]:
        """As ``TextGiver.points``: one number for a sample, or one for each of its tokens.

        By step, a sample of which it is not known where its tokens end in the text has no opinion.
        """
        if self.reader.table.by == "completion":
            numbers, counts = self([sample for unit in units for sample in unit])
            return [[number] for number in numbers], counts
        steps = [
            [steps_of(s.completion) if len(s.ends) == len(s.tokens) else [] for s in unit]
            for unit in units
        ]
        read = [
            dataclasses.replace(sample, completion=sample.completion[:end].rstrip())
            for unit, of_unit in zip(units, steps, strict=True)
            for sample, pieces in zip(unit, of_unit, strict=True)
            for _, end in pieces
        ]
        numbers, counts = self(read)
        values = iter(numbers)
        results: list[Sequence[Returned]] = []
        for unit, of_unit in zip(units, steps, strict=True):
            each = [[next(values) for _ in pieces] for pieces in of_unit]
            results.append(self._of_steps(unit, of_unit, each))
        return results, counts

    def _of_steps(
        self,
        unit: Sequence[Sample],
        steps: Sequence[Sequence[tuple[int, int]]],
        values: Sequence[Sequence[Points]],
    ) -> list[Returned]:
        """Numbers for each sample's tokens; None without a step, or where one was not read."""
        complete = [bool(each) and None not in each for each in values]
        paid = [
            np.array(each if ok else [], float) for each, ok in zip(values, complete, strict=True)
        ]
        if self.by_group:  # the change; the mean first value stands for that of the prompt
            before = np.mean([each[0] for each in paid if len(each)] or [0.0])
            paid = [np.diff(each, prepend=before) if len(each) else each for each in paid]
        return [
            sample.by_token([(*at, x) for at, x in zip(pieces, each.tolist(), strict=True)])
            if ok
            else None
            for sample, pieces, each, ok in zip(unit, steps, paid, complete, strict=True)
        ]

    def begin(self, sample: Sample) -> None:
        """Nothing: the devices decode."""

    def stop(self) -> None:
        """Nothing: the thread that is interrupted is the one that reads."""

    def __call__(self, samples: Sequence[Sample]) -> tuple[list[Points], dict[str, float]]:
        """The numbers of samples, and counts of those without one.

        Raises:
          UserError: a number is not finite.
        """
        points: list[Points] = [None] * len(samples)
        texts = [self.reader.ids(sample) for sample in samples]
        read = [i for i, ids in enumerate(texts) if ids and len(ids) <= self.longest]
        counts = {
            "reward_model_unread": float(sum(not ids for ids in texts)),
            "reward_model_overlong": float(len(texts) - len(read) - sum(not ids for ids in texts)),
        }
        unique = {tuple(texts[i] or ()): None for i in read}  # a group shares one in ``column``
        chosen = [list(ids) for ids in unique]
        how: Any = {"rows": self.reader.table.rows, "longest": self.longest, "mesh": self.mesh}
        program = partial(self.program, self.params)
        values = over_texts(program, chosen, [len(ids) for ids in chosen], **how)
        if not np.isfinite(values).all():
            raise UserError(
                f"the reward model {self.reader.table.path[0]!r} gives a number that is not"
                " finite; its checkpoint is damaged, or model.dtype is too narrow for it"
            )
        by_text = dict(zip(unique, values.tolist(), strict=True))
        for i in read:
            points[i] = by_text[tuple(texts[i] or ())]
        return points, counts


def over_texts(
    program: Callable[..., Array],
    texts: Sequence[Sequence[int]],
    *columns: Sequence[int],
    rows: int,
    longest: int,
    mesh: Mesh,
) -> np.ndarray:
    """[n] float32: a number for each of n texts.

    Args:
      program: (tokens [B, L], one [B] of each column) -> [B], jitted.
      texts: token ids; those of one width are read together.
      *columns: [n] int32, at least 1, such as the texts' lengths.
      rows: B, or the next number that the mesh divides.
      longest: the greatest L.
      mesh: where the program runs.
    """
    shards, at = batch_shards(mesh), batch_sharding(mesh)
    rows, values = -(-rows // shards) * shards, np.zeros(len(texts), np.float32)
    order = sorted(range(len(texts)), key=lambda k: len(texts[k]))
    for begin in range(0, len(order), rows):
        part = order[begin : begin + rows]
        tokens = np.zeros((rows, min(width_of(len(texts[part[-1]])), longest)), np.int32)
        numbers = np.ones((len(columns), rows), np.int32)
        for row, k in enumerate(part):
            tokens[row, : len(texts[k])] = texts[k]
            numbers[:, row] = [column[k] for column in columns]
        arrays = (tokens, *numbers)
        placed = [jax.make_array_from_callback(x.shape, at, x.__getitem__) for x in arrays]
        with jax.set_mesh(mesh):
            values[part] = np.asarray(program(*placed))[: len(part)]
    return values


def width_of(length: int) -> int:
    """The width that texts of a length are padded to: 64, 96, 128, 192, 256, ... tokens.

    >>> [width_of(n) for n in (1, 64, 65, 97, 129)]
    [64, 64, 96, 128, 192]
    """
    width = LEAST_WIDTH
    while width < length:
        width = width * 3 // 2 if width & (width - 1) == 0 else width // 3 * 4
    return width


# ---------------------------------------------------------------- loading


def load_text_model(
    table: RewardModelTable,
    rules: Rules,
    key: str,
    mesh: Mesh,
    dtype: str,
    *,
    seed: int,
    others: Sequence[TextModel] = (),
) -> TextModel:
    """A reward model of one or several checkpoints, placed on a mesh.

    Args:
      table: its keys.
      rules: of the part.
      key: "rewards.NAME", for messages.
      mesh: of the run to be rewarded.
      dtype: of the trunk and its activations.
      seed: of the masks of passes with dropout.
      others: loaded before; one of the same checkpoint shares its trunk.

    Raises:
      UserError: a checkpoint that cannot be read, labels that it does not have, or models of an
        ensemble that are not of one shape.
    """
    directory = model_directory(table.path[0], f"{key}.path")
    reader = Reader(table, load_tokenizer(directory))
    loaded = [_load(path, table, key, dtype) for path in table.path]
    for path, each in zip(table.path, loaded, strict=True):
        if _shape(each) != _shape(loaded[0]):
            raise UserError(
                f"{key}.path: {path!r} has another shape or other labels than {table.path[0]!r},"
                " or only one of them has a score.bias; models of an ensemble are of one shape"
            )
    config = loaded[0].config
    check_vocab(reader.tokenizer, config.vocab_size)
    network = transformer(config)
    if table.answers is not None:
        scores = answer_scores(network, reader.answer_ids(key))
    else:
        scores = label_scores(network)
        reader = reader._replace(pad_id=loaded[0].pad_id)
    weights = jnp.asarray(label_weights(table, loaded[0].labels, key), jnp.float32)
    points = partial(text_points, scores=scores, weights=weights, table=table)
    try:
        params = _placed([each.params for each in loaded], network, mesh)
    except UserError as error:  # sizes that the mesh does not divide
        raise UserError(f"{key}.path: {error}") from None
    same = [other for other in others if other.reader.table.path == table.path]
    if same and same[0].mesh == mesh and "trunk" in same[0].params:
        params = params | {"trunk": same[0].params["trunk"]}
    if table.dropout:
        heads = params["head"]
        weight = dropout_passes(
            heads["weight"][0], 1, table.dropout, table.passes, table.single_pass, seed
        )
        passes = {n: jnp.broadcast_to(x, (len(weight), *x.shape[1:])) for n, x in heads.items()}
        params = params | {"head": passes | {"weight": weight}}
    return TextModel(
        reader,
        jax.jit(points, out_shardings=replicated(mesh)),
        params,
        mesh,
        min(table.max_tokens or config.max_length, config.max_length),
        rules,
    )


def _shape(model: hf.Classifier) -> tuple[Any, ...]:
    """What models of an ensemble share."""
    return model.config, model.labels, sorted(model.params.get("head", ()))


def _load(path: str, table: RewardModelTable, key: str, dtype: str) -> hf.Classifier:
    directory = model_directory(path, f"{key}.path")
    try:
        if table.answers is None:
            return hf.open_classifier(directory, dtype=dtype)
        config, params = hf.open_checkpoint(directory, dtype=dtype)
    except UserError as error:
        raise UserError(f"{key}.path: {error}") from None
    return hf.Classifier(config, {"trunk": params}, ("",), None)


def label_weights(table: RewardModelTable, labels: Sequence[str], key: str) -> list[float]:
    """The weight of each label of a head.

    Raises:
      UserError: a label that the head does not have, or none is named of several.
    """
    for name in table.labels:
        if name not in labels:
            raise unknown_choice(f"{key}.labels", name, labels)
    if len(labels) > 1 and not table.labels:
        raise UserError(
            f"{key}.labels is missing: the model scores {', '.join(labels)}; give those that count"
            f" a weight, such as {key}.labels.{labels[0]} = 1.0"
        )
    return [table.labels.get(name, 0.0) if table.labels else 1.0 for name in labels]


def text_points(
    params: Params,
    tokens: Array,
    lengths: Array,
    *,
    scores: Scores,
    weights: Array,
    table: RewardModelTable,
) -> Array:
    """[B] float32: the points of texts.

    Args:
      params: of M models, with a leading axis of M.
      tokens: [B, L] int32.
      lengths: [B] int32.
      scores: of one model.
      weights: [K] of its labels.
      table: link and ensemble.
    """
    axes: Any = 0
    if table.dropout:  # the trunk runs once for the heads of all passes
        params = {**params, "trunk": jax.tree.map(lambda x: x[0], params["trunk"])}
        axes = {"trunk": None, "head": 0}
    each = jax.vmap(scores, in_axes=(axes, None, None))(params, tokens, lengths)
    return reduced(each @ weights, table)


def _placed(trees: Sequence[Params], network: Network, mesh: Mesh) -> Params:
    """Weights of M models on a mesh, stacked; each device reads its own part of the files."""
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    where: dict[str, Any] = {"trunk": tree_shardings(mesh, network.axes(), shapes)}
    if "head" in trees[0]:
        where["head"] = jax.tree.map(lambda _: replicated(mesh), dict(trees[0]["head"]))

    def read(leaf: Any, index: tuple[slice, ...]) -> np.ndarray:
        part: np.ndarray = leaf.read(index) if isinstance(leaf, Stored) else leaf[index]
        return part

    def stacked(at: NamedSharding, *leaves: Any) -> jax.Array:
        def parts(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            return np.stack([read(leaf, index[1:]) for leaf in leaves[index[0]]])

        over = NamedSharding(mesh, PartitionSpec(None, *at.spec))
        return jax.make_array_from_callback((len(leaves), *leaves[0].shape), over, parts)

    return jax.tree.map(stacked, where, *trees)
