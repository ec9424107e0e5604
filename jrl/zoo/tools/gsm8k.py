"""GSM8K as a TFDS dataset, prepared offline from its JSONL files and without TensorFlow.

    python -m jrl.zoo.tools.gsm8k --dir DIR --train train.jsonl --test test.jsonl

After that ``data.train="tfds:gsm8k"`` reads it, with TFDS_DATA_DIR=DIR in the environment.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

from jrl.data.datasets import open_dataset
from jrl.errors import UserError
from jrl.system.extras import need

FEATURES = ("question", "answer", "annotation", "short_answer")


def prepare_gsm8k(directory: str | Path, files: Mapping[str, str | Path]) -> Path:
    """Writes GSM8K in TFDS's array_record form, with the features of TFDS's own builder.

    Args:
      directory: the TFDS data directory; the dataset goes to ``gsm8k/1.0.0`` in it.
      files: split name -> JSONL file with "question" and "answer", the answer ending in "#### N".

    Returns:
      The directory of the dataset.

    Raises:
      UserError: a file is missing or malformed (names the line), or the dataset already
        exists.
    """
    need("tensorflow_datasets", "tfds", "preparing GSM8K")
    import tensorflow_datasets as tfds

    sources = {split: open_dataset(str(path)) for split, path in files.items()}
    target = Path(directory).expanduser() / "gsm8k" / "1.0.0"
    if target.exists():
        raise UserError(f"{target} already exists; remove it to prepare GSM8K again")

    class Gsm8k(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
        """Grade school math word problems."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> tfds.core.DatasetInfo:
            text = {name: tfds.features.Text() for name in FEATURES}
            return tfds.core.DatasetInfo(
                builder=self,
                description=(
                    "Word problems of grade school mathematics, from "
                    '"Training Verifiers to Solve Math Word Problems" (arXiv:2110.14168).'
                ),
                features=tfds.features.FeaturesDict(text),
                homepage="https://github.com/openai/grade-school-math",
                disable_shuffling=True,
            )

        def _split_generators(self, dl_manager: object) -> dict[str, Iterator]:
            return {split: self._generate_examples(split) for split in sources}

        def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, str]]]:
            for index in range(len(sources[split])):
                yield index, _example(sources[split][index], sources[split].where(index))

    # Check all lines before writing, so that a bad file leaves no partial dataset.
    for source in sources.values():
        for index in range(len(source)):
            _example(source[index], source.where(index))
    builder = Gsm8k(data_dir=str(directory), file_format="array_record")
    builder.download_and_prepare()
    return target


def _example(row: Mapping[str, object], where: str) -> dict[str, str]:
    """The features of a line's problem."""
    question, answer = row.get("question"), row.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str):
        raise UserError(f"{where}: needs the text fields question and answer")
    annotation, marker, short = answer.partition("####")
    if not marker or not short.strip():
        raise UserError(f"{where}: the answer has no final answer after ####")
    return dict(zip(FEATURES, (question, answer, annotation, short.strip()), strict=True))


def main() -> None:
    """The command line of this module."""
    parser = argparse.ArgumentParser(
        prog="python -m jrl.zoo.tools.gsm8k", description="Prepare GSM8K for tfds:gsm8k, offline."
    )
    parser.add_argument("--dir", required=True, help="TFDS data directory to write to")
    parser.add_argument("--train", help="JSONL file of the training split")
    parser.add_argument("--test", help="JSONL file of the test split")
    arguments = vars(parser.parse_args())
    directory = arguments.pop("dir")
    files = {split: path for split, path in arguments.items() if path}
    if not files:
        parser.error("give --train, --test or both")
    try:
        print(f"wrote {prepare_gsm8k(directory, files)}")
    except UserError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
