"""The tokenizer of a checkpoint: text to token ids and back, and its chat templates."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jrl.errors import UserError, unknown_choice
from jrl.hub import model_directory
from jrl.models.chat_template import find_templates, render
from jrl.system.json_text import read_object, refuse_pointer

if TYPE_CHECKING:
    import tokenizers


def _check_distinct(vocabulary: Mapping[str, int], source: str) -> None:
    """Raises UserError where two tokens have one id."""
    if len(set(vocabulary.values())) == len(vocabulary):
        return
    texts: dict[int, str] = {}
    for text, token in vocabulary.items():
        if token in texts:
            raise UserError(
                f"{source}: {texts[token]!r} and {text!r} both have id {token} in the vocabulary; "
                "the file is damaged"
            )
        texts[token] = text


_SHORT = 1000
"""Characters; a shorter text is encoded in less than a millisecond."""

_CONTEXT = 256
"""Characters of a text that the tokens of what follows it depend on."""


def _is_panic(error: BaseException) -> bool:
    """Whether a library in Rust gave up; the exception is of no module and no ``Exception``."""
    return type(error).__name__ == "PanicException"


@contextlib.contextmanager
def _named(source: str, value: str | list[int]) -> Iterator[None]:
    """Turns any error of a tokenizer, panics included, into a UserError that names it."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        reason = " ".join(str(error).split())
        raise UserError(
            f"{source}: its tokenizer.json cannot be used on {value[:40]!r:.60}: {reason:.300}"
        ) from None


class FileTokenizer:
    """The tokenizer of a Hugging Face checkpoint directory, with its chat templates.

    Attributes:
      vocab_size: one more than the highest id.
      base_vocab_size: the same without added tokens.
      longest_token: characters of the longest token; no token stands for more of a text.
      eos_id: the id of ``eos_token``.
      pad_id: the id of ``pad_token``; ``eos_id`` when there is none.
      stop_ids: ``eos_id`` first, then the further ids of generation_config.json, and ``turn_id``.
      turn_id: the special token that ends a turn of the assistant by the chat template, which a
        base model's files often do not name as an end; None where there is none.
      special: the special tokens' texts by name ("bos_token", "eos_token", ...).
      templates: chat templates by name; the usual one is "default".
      notes: what a user should know of it, a line each.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        source: str,
        stop_ids: tuple[int, ...],
        pad_id: int,
        special: Mapping[str, str],
        templates: Mapping[str, str],
    ) -> None:
        self._backend = backend
        self._source = source
        vocabulary = backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError(f"{source}: the vocabulary of tokenizer.json is empty")
        self.vocab_size = 1 + max(vocabulary.values())
        self.longest_token = max(map(len, vocabulary))
        base = backend.get_vocab(with_added_tokens=False)
        self.base_vocab_size = 1 + max(base.values(), default=-1)
        _check_distinct(base, source)
        self.eos_id = stop_ids[0]
        self.stop_ids = stop_ids
        self.pad_id = pad_id
        self.special = dict(special)
        self.templates = dict(templates)
        self.turn_id = self._turn_end() if "default" in self.templates else None
        self.notes = list[str]()
        if self.turn_id is not None and self.turn_id not in stop_ids:
            self.stop_ids = (*stop_ids, self.turn_id)
            ends = [self.decode([i], skip_special=False) for i in (*stop_ids, self.turn_id)]
            self.notes.append(
                f"tokenizer: the chat template ends turns with {ends[-1]!r}, and the model's files"
                f" name {', '.join(map(repr, ends[:-1]))} alone; completions end at either"
            )

    def _turn_end(self) -> int | None:
        """The first special token behind what the assistant says last."""
        marker = "JRLANSWER"
        messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": marker}]
        try:
            text = self.chat(messages, add_generation_prompt=False)
        except (UserError, RuntimeError):  # it wants tools, does not end, or cannot be rendered
            return None
        _, mark, rest = text.rpartition(marker)
        extra_tokens = self._backend.get_added_tokens_decoder()
        ids = self.encode(rest) if mark else []
        return next((i for i in ids if i in extra_tokens and extra_tokens[i].special), None)

    def to_json(self) -> str:
        """The content of tokenizer.json, for other libraries."""
        return self._backend.to_str()

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids of ``text``; special tokens spelled out in it are read as such.

        Args:
          text: what to encode.
          add_special: put those around it that the tokenizer adds to a plain text, such as BOS;
            a text from ``chat`` already has its own.
        """
        return self._encoded(self._backend, text, add_special).ids

    def _encoded(self, backend: tokenizers.Tokenizer, text: str, add_special: bool = False) -> Any:
        with _named(self._source, text):
            if len(text) < _SHORT:
                return backend.encode(text, add_special_tokens=add_special)
            # ``encode`` holds the interpreter's lock, ``encode_batch`` does not: while a long
            # prompt is encoded in one thread, a server's others continue.
            return backend.encode_batch([text], add_special_tokens=add_special)[0]

    def encode_after(self, before: str, text: str) -> list[int]:
        """Token ids of a text that follows another one, as ``encode`` has them of both together.

        They differ from those of the text alone where a tokenizer begins every text with a space,
        as Llama 2's does: a policy that continues ``before`` samples no such token. Where a token
        stands for parts of both, as after a space, they are those of the text after a line break.
        """
        if self._begins_texts:
            for tail in (before[-_CONTEXT:], "\n"):
                head, both = self.encode(tail), self.encode(tail + text)
                if both[: len(head)] == head:
                    return both[len(head) :]
        return self.encode(text)

    @functools.cached_property
    def _begins_texts(self) -> bool:
        """Whether a text has other tokens at the beginning than behind a line break."""
        alone = self.encode("a")
        return self.encode("\na")[-len(alone) :] != alone

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text from outside, such as a tool's output: never a control token's.

        ``encode`` reads "<|im_end|>" in a web page as the end of a turn, and so would every
        tokenizer with its added tokens; that they are marked special does not help against
        "<think>", which often is not. Here added tokens are ordinary text. Where the vocabulary
        itself spells one, its text is encoded character by character.
        """
        text = text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates have no tokens
        ids: list[int] = []
        for i in self._encoded(self._plain, text).ids:
            ids += self._spelled.get(i, [i])
        return ids

    def encode_framed(
        self, text: str, outside: Sequence[tuple[int, int]], *, add_special: bool = False
    ) -> list[int]:
        """Token ids of a text; parts from outside never become control tokens.

        The ids are those of ``encode`` unless a part would be read as a control token; then parts
        and frames are encoded apart.

        Args:
          text: frames, with control tokens spelled out, and parts.
          outside: (begin, end) of each part in the text, in order.
          add_special: as in ``encode``.
        """
        text = text.encode("utf-8", "replace").decode("utf-8")
        encoding = self._encoded(self._backend, text, add_special)
        controls = [
            at for i, at in zip(encoding.ids, encoding.offsets, strict=True) if i in self._spelled
        ]
        if not any(a < end and b > begin for a, b in controls for begin, end in outside):
            return encoding.ids
        ids, start = [], 0
        for begin, end in outside:
            ids += [*self.encode(text[start:begin]), *self.encode_plain(text[begin:end])]
            start = end
        ids += self.encode(text[start:])
        added = encoding.special_tokens_mask  # 1 where the tokenizer put a token around the text
        first = next((i for i, mark in enumerate(added) if not mark), len(added))
        last = next((i for i, mark in enumerate(added[::-1]) if not mark), 0)
        return [*encoding.ids[:first], *ids, *encoding.ids[len(added) - last :]]

    def controls(self, text: str, *, special: bool = False) -> list[str]:
        """The control tokens that ``encode`` reads in a text, spelled out.

        Args:
          text: any.
          special: those alone that are marked special, as ends of turns are; "<think>", which a
            model writes itself, often is not.
        """
        ids = self.encode(text.encode("utf-8", "replace").decode("utf-8"))
        extra_tokens = self._backend.get_added_tokens_decoder() if special else {}
        written = {i for i, token in extra_tokens.items() if not token.special}
        control_ids = [i for i in ids if i in self._spelled and i not in written]
        return [self.decode([i], skip_special=False) for i in control_ids]

    @functools.cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The tokenizer without its added tokens."""
        import tokenizers

        backend = json.loads(self._backend.to_str())
        return tokenizers.Tokenizer.from_str(json.dumps({**backend, "added_tokens": []}))

    def _unknown(self) -> str | None:
        """The token that stands for what the vocabulary has none for; None where there is none.

        Files of byte-level vocabularies, as Pythia's and SmolLM2's, call the end of a text so too,
        which their encoding never writes for another text.
        """
        from tokenizers import models

        model = self._backend.model
        if isinstance(model, models.Unigram):
            return self.special.get("unk_token")
        return model.unk_token

    @functools.cached_property
    def _spelled(self) -> dict[int, list[int]]:
        """Ids that encode the text of each control token, none of them one of these.

        Control tokens are the added ones, and those that end a text or are named in the files.
        """
        extra_tokens = self._backend.get_added_tokens_decoder()
        named = [self._backend.token_to_id(text) for text in self.special.values()]
        ends = [i for i in (*self.stop_ids, *named) if i is not None]
        texts = {i: self._backend.id_to_token(i) or "" for i in ends}
        texts |= {i: token.content for i, token in extra_tokens.items()}
        # Single characters and white space are added for their own sake and control nothing.
        texts = {i: text for i, text in texts.items() if len(text.strip()) > 1}
        unknown = self._unknown()  # what a vocabulary has no token for can be nothing else
        texts = {i: text for i, text in texts.items() if text != unknown}

        def spelled(text: str) -> list[int]:
            parts = [self._encoded(self._plain, c).ids for c in text]
            return [i for part in parts for i in part if i not in texts]

        return {i: spelled(text) for i, text in texts.items()}

    def contents(self) -> dict[str, Any]:
        """All that decides which ids a conversation has: vocabulary, templates, special tokens."""
        special = {"stop_ids": self.stop_ids, "special": self.special, "templates": self.templates}
        file = Path(self._source) / "tokenizer.json"
        # The file, where there is one: another version of the library may write it otherwise.
        text = file.read_text("utf-8") if file.is_file() else self._backend.to_str()
        return {"tokenizer": text, **special}

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of ``ids``, without the cosmetic changes to spaces that some configs ask for."""
        id_list = [int(i) for i in ids]
        with _named(self._source, id_list):
            return self._backend.decode(id_list, skip_special_tokens=skip_special)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template: str = "default",
        **variables: Any,
    ) -> str:
        """The conversation as the model was trained to read it.

        Args:
          messages: dicts with "role" and "content", in order.
          add_generation_prompt: end with the header of the assistant's turn.
          template: which of the checkpoint's templates to use.
          **variables: further variables of the template, such as ``enable_thinking``.

        Returns:
          The text, special tokens spelled out; ``encode`` reads them as tokens.

        Raises:
          UserError: there is no template, or it refuses the messages.
        """
        if not self.templates:
            raise UserError(
                f"{self._source} has no chat template; set data.template to a text with "
                "{question} in it, or add chat_template.jinja to the checkpoint"
            )
        if template not in self.templates:
            raise unknown_choice("template", template, self.templates)
        source = self.templates[template]
        if "reasoning_content" not in source:
            messages = [_with_thinking(message) for message in messages]
        fixed = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        context = {"tools": None, "documents": None, **self.special, **variables, **fixed}
        return render(source, context, self._source)


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its reasons under the name of gpt-oss's template.

    That refuses them beside a content where tools are called.
    """
    if "reasoning_content" not in message or (message.get("tool_calls") and message.get("content")):
        return message
    return {**message, "thinking": message["reasoning_content"]}


def load_tokenizer(directory: str | Path) -> FileTokenizer:
    """The tokenizer of a Hugging Face checkpoint directory.

    Reads tokenizer.json, and when present tokenizer_config.json, special_tokens_map.json,
    chat_template.jinja, additional_chat_templates/, generation_config.json and config.json.

    Args:
      directory: where the files are, or a model of the Hugging Face Hub as ORG/NAME[@REVISION].

    Returns:
      The tokenizer.

    Raises:
      UserError: tokenizer.json is missing or broken, another file is not JSON, or no file names an
        end-of-sequence token that the vocabulary has.
    """
    import tokenizers

    directory = model_directory(directory)
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            f"{path} is missing; write it with transformers' "
            f"AutoTokenizer.from_pretrained({str(directory)!r}).save_pretrained(...)"
        )
    refuse_pointer(path)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except BaseException as error:  # the library raises bare Exception
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is not a tokenizer: {reason:.500}") from None
    _check_growth(backend, str(path))
    # Limits and padding stored in the file would silently cut prompts.
    backend.no_truncation()
    backend.no_padding()

    config = read_object(directory / "tokenizer_config.json")
    special = _special_texts({**read_object(directory / "special_tokens_map.json"), **config})
    pad_id = backend.token_to_id(special.get("pad_token", ""))
    stop_ids = _stop_ids(directory, backend, special.get("eos_token"))
    return FileTokenizer(
        backend,
        source=str(directory),
        stop_ids=stop_ids,
        pad_id=stop_ids[0] if pad_id is None else pad_id,
        special=special,
        templates=find_templates(directory, config.get("chat_template")),
    )


MOST_GROWTH = 100
"""Characters that a tokenizer may make of one, before tokens or behind them; Unicode's forms are at
most 18."""


def _check_growth(backend: tokenizers.Tokenizer, source: str) -> None:
    """Raises UserError where a text of ordinary length would become one of gigabytes."""
    for name in ("normalizer", "decoder"):
        part = getattr(backend, name)
        if part is None:
            continue
        growth = _growth(json.loads(part.__getstate__()))
        if growth > MOST_GROWTH:
            raise UserError(
                f"{source}: its {name} makes up to {growth} characters of one; at most "
                f"{MOST_GROWTH} are read"
            )


def _growth(part: Mapping[str, Any]) -> int:
    """Maximum characters that part of a tokenizer.json makes of one character."""
    inside = part.get("normalizers") or part.get("decoders") or []
    if part["type"] == "Sequence":
        return math.prod(map(_growth, inside))
    if part["type"] == "Replace":
        # A pattern that matches nothing matches between all characters too.
        return 1 + len(part["content"]) if len(part["content"]) > 1 else 1
    if part["type"] == "Prepend":
        return 1 + len(part["prepend"])
    if part["type"] == "Precompiled":
        data = base64.b64decode(part["precompiled_charsmap"] or "")
        # As sentencepiece writes it: the bytes of a trie, the trie, and texts with zeros between.
        texts = data[4 + int.from_bytes(data[:4], "little") :]
        return max(1, *map(len, texts.split(b"\0")))
    return 1


def _special_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of "..._token" entries, which are strings or objects with "content"."""
    texts = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            texts[name] = text
    return texts


def _stop_ids(
    directory: Path, backend: tokenizers.Tokenizer, eos_token: str | None
) -> tuple[int, ...]:
    """The token ids that end a completion, ``eos_token`` first."""
    ids: list[int] = []
    if eos_token is not None:
        eos_id = backend.token_to_id(eos_token)
        if eos_id is None:
            raise UserError(
                f"eos_token = {eos_token!r} in {directory / 'tokenizer_config.json'} is not in the "
                "vocabulary of tokenizer.json; set it to a token that is"
            )
        ids.append(eos_id)
    generation = read_object(directory / "generation_config.json")
    configured = generation.get(
        "eos_token_id", read_object(directory / "config.json").get("eos_token_id")
    )
    entries: list[Any] = configured if isinstance(configured, list) else [configured]
    if configured is None:
        entries = []
    for each in entries:
        if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < 2**31:
            raise UserError(
                f"eos_token_id = {str(configured)[:60]!r} of {directory} (generation_config.json, "
                "config.json); it must be a token id, a whole number from 0 on, or a list of them"
            )
    ids += entries
    if not ids:
        raise UserError(
            f"no file of {directory} names an end-of-sequence token, so nothing would end a "
            "completion; set eos_token in tokenizer_config.json"
        )
    return tuple(dict.fromkeys(int(i) for i in ids))
