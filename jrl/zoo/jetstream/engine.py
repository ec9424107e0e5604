"""JetStream's Engine interface over the row engine.

Written for google-jetstream 0.2.2, the last release. Importing it has side effects, which
``library`` undoes: it sends every log record of the process to standard output, and it needs seqio
(hence TensorFlow) and tiktoken for tokenizers that are not used here. Where these are not
installed, empty modules replace them during the import.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jrl.errors import UserError
from jrl.models.tokenizer import Tokenizer
from jrl.sampling.admission import RowStart
from jrl.sampling.batch import ChunkOutput
from jrl.sampling.params import SamplingParams
from jrl.sampling.rows import RowOptions, Rows
from jrl.system.extras import install_line
from jrl.types import Array, Network, Params

PREFILL_TOKENS = tuple(2**i for i in range(4, 16))
"""The lengths that JetStream pads prompts to."""

_MODULES = {
    "config": "jetstream.core.config_lib",
    "orchestrator": "jetstream.core.orchestrator",
    "proto": "jetstream.core.proto.jetstream_pb2",
    "server": "jetstream.core.server_lib",
    "engine": "jetstream.engine.engine_api",
    "token_utils": "jetstream.engine.token_utils",
    "tokenizer": "jetstream.engine.tokenizer_api",
    "tokenizer_proto": "jetstream.engine.tokenizer_pb2",
}


@functools.cache
def library() -> Any:
    """JetStream's modules by short names, imported without side effects on the process.

    Raises:
      UserError: it is not installed.
    """
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        with _stand_ins():
            modules: dict[str, Any] = {
                name: importlib.import_module(path) for name, path in _MODULES.items()
            }
    except ModuleNotFoundError as error:
        raise UserError(
            f"{error}; {install_line('jetstream')}, or without TensorFlow: "
            "pip install --no-deps google-jetstream==0.2.2, and grpcio, prometheus-client, "
            "shortuuid"
        ) from None
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
    if "tensorflow" in sys.modules:  # it only tokenizes here, and must not reserve GPU memory
        sys.modules["tensorflow"].config.set_visible_devices([], "GPU")
    modules[
        "orchestrator"
    ].delete_pytree = delete_arrays  # its own calls a function that JAX removed
    return types.SimpleNamespace(**modules)


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Empty modules for imports of JetStream that are neither installed nor needed here."""
    names: dict[str, tuple[str, ...]] = {
        "seqio": (),
        "seqio.vocabularies": ("Vocabulary", "SentencePieceVocabulary"),
        "tiktoken": (),
        "tiktoken.load": ("load_tiktoken_bpe",),
    }
    missing = [n for n in names if importlib.util.find_spec(n.partition(".")[0]) is None]
    for name in missing:
        module = types.ModuleType(name)
        vars(module).update({attribute: type(attribute, (), {}) for attribute in names[name]})
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


def delete_arrays(tree: Any) -> None:
    """Frees the arrays of an inserted prefix."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.delete()


# ---------------------------------------------------------------- the engine


class SlotEngine:
    """The methods of JetStream's ``Engine``; ``make_engine`` makes one that is an ``Engine``.

    The row engine holds the state, so JetStream's decode state is a placeholder, and a prefix is
    the prompt alone, which is computed where it is inserted: the device does one thing at a time
    whichever of JetStream's threads asks for it. JetStream's API has no field for a temperature or
    a seed: one set of sampling parameters holds for all requests.

    Args:
      key: the root PRNG key; request number i uses ``fold_in(key, i)``.
      params: the policy's.
      network: the policy.
      tokenizer: the policy's.
      sampling_params: of all requests; scalars, and a bias [V] if any.
      slots: completions decoded at once.
      prompt_tokens: the longest prompt.
      new_tokens: the longest completion.
      mesh: of the weights.

    Raises:
      UserError: these sizes do not fit the network or JetStream.
    """

    def __init__(
        self,
        key: Array,
        params: Params,
        *,
        network: Network,
        tokenizer: Tokenizer,
        sampling_params: SamplingParams,
        slots: int,
        prompt_tokens: int,
        new_tokens: int,
        mesh: Mesh,
    ) -> None:
        if prompt_tokens > PREFILL_TOKENS[-1]:
            raise UserError(
                f"prompts of up to {prompt_tokens} tokens; JetStream takes {PREFILL_TOKENS[-1]}"
            )
        bias = sampling_params.bias
        self._rows = Rows(
            network,
            slots=slots,
            prompt_tokens=prompt_tokens,
            max_new_tokens=new_tokens,
            stop_tokens=tuple(tokenizer.stop_ids),
            chunk=1,  # JetStream hands on one token of each slot at a time
            sampling={
                "temperature": float(sampling_params.temperature),
                "top_k": int(sampling_params.top_k),
                "top_p": float(sampling_params.top_p),
                "min_p": float(sampling_params.min_p),
                "bias": None if bias is None else np.asarray(bias),
            },
            options=RowOptions(biases=bias is not None),
        )
        self._seed = _seed_of(key)
        self._mesh = mesh
        self._padded = next(n for n in PREFILL_TOKENS if n >= prompt_tokens)
        self.tokenizer = tokenizer
        self.slots, self.prompt_tokens, self.new_tokens = slots, prompt_tokens, new_tokens
        self.vocab_size = network.vocab_size
        self._requests = 0
        self._occupied: set[int] = set()
        self._released: set[int] = set()
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._result = jax.jit(functools.partial(_result))
        with jax.set_mesh(mesh):
            self._rows.set_weights(params, 0)

    def load_params(self, *args: Any, **kwargs: Any) -> Any:
        """The weights, prepared for decoding."""
        return self._rows.weights

    def prefill(
        self,
        *,
        params: Any,
        existing_prefix: Any = None,
        padded_tokens: Array | np.ndarray,
        true_length: int,
    ) -> dict[str, Any]:
        """The prefix of one prompt, on the host.

        Args:
          params: from ``load_params``.
          existing_prefix: not supported; JetStream 0.2.2 passes none.
          padded_tokens: [P'] int32, the prompt from column 0.
          true_length: its tokens, at least 1. A prompt longer than ``prompt_tokens`` loses its
            beginning, as JetStream truncates.
        """
        if existing_prefix is not None:
            raise UserError("existing_prefix is not supported; leave it out")
        if true_length < 1:
            raise UserError("the prompt is empty; it needs at least one token")
        self._requests += 1
        prompt = np.asarray(padded_tokens)[:true_length][-self.prompt_tokens :]
        return {"tokens": prompt.astype(np.int32), "request": np.int32(self._requests)}

    def insert(self, prefix: dict[str, Any], decode_state: Any, slot: int) -> Any:
        """The state with a prefix in a slot, ready to decode."""
        with self._lock:
            self._occupied.add(slot)
            self._released.discard(slot)
        tokens, request = tuple(np.asarray(prefix["tokens"]).tolist()), int(prefix["request"])
        with jax.set_mesh(self._mesh):
            self._rows.admit({slot: RowStart(tokens, self._seed, request, self.new_tokens)})
        return decode_state

    def generate(self, params: Any, decode_state: Any) -> tuple[Any, Any]:
        """One more token for each running slot.

        Returns:
          The state, and ResultTokens whose ``valid`` is 0 for a slot without a new token.
        """
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
        data = self.step()
        for then in callbacks:
            then()
        result = library().engine.ResultTokens(
            data=data,
            tokens_idx=(0, 1),
            valid_idx=(1, 2),
            length_idx=(2, 3),
            samples_per_slot=1,
        )
        return decode_state, result

    def step(self) -> Array:
        """[S, 3] int32 of one decode step: new token, 1 if there is one, completion tokens."""
        with self._lock:
            released, self._released = self._released, set()
        for slot in released:
            self._rows.halt(slot)
        with jax.set_mesh(self._mesh):
            # Left on the device: JetStream's own thread fetches it while the next step runs.
            return self._result(self._rows.decode(0, steps=1, fetch=False))

    def compile(self) -> None:
        """Runs every program once, so that no request waits for a compilation."""
        with jax.set_mesh(self._mesh):
            self._rows.compile(recompute=False)
        jax.block_until_ready(self.step())

    def free_resource(self, slot: int) -> None:
        """Ends the completion in a slot before the next token."""
        with self._lock:
            self._occupied.discard(slot)
            self._released.add(slot)

    def leave(self, slot: int, then: Callable[[], None]) -> None:
        """Frees a slot, and calls ``then`` in the decoding thread once the slot is idle.

        At once, where nothing runs in the slot.
        """
        with self._lock:
            occupied = slot in self._occupied
            if occupied:
                self._occupied.remove(slot)
                self._released.add(slot)
                self._callbacks.append(then)
        if not occupied:
            then()

    def init_decode_state(self, *args: Any, **kwargs: Any) -> Any:
        """A placeholder for the row engine's state, in which nothing runs from the next step on."""
        for slot in range(self.slots):
            self._rows.halt(slot)
        return np.zeros((), np.int32)

    def get_prefix_destination_sharding(self) -> Any:
        """None: prefixes stay where they are."""
        return None

    def get_tokenizer(self) -> Any:
        """Empty parameters; ``build_tokenizer`` needs none."""
        return library().tokenizer_proto.TokenizerParameters()

    def build_tokenizer(self, metadata: Any) -> Any:
        """The policy's tokenizer in JetStream's form."""
        return _tokenizer_class()(self.tokenizer)

    @property
    def executables(self) -> int:
        """Programs compiled so far."""
        result: Any = self._result
        return self._rows.executables + result._cache_size()

    @property
    def max_concurrent_decodes(self) -> int:
        """The number of slots."""
        return self.slots

    @property
    def samples_per_slot(self) -> int:
        """One completion a request."""
        return 1

    @property
    def max_prefill_length(self) -> int:
        """Tokens that the longest prompt is padded to."""
        return self._padded

    @property
    def mesh(self) -> Mesh:
        """The mesh of the weights."""
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        """None."""
        return None


def make_engine(*args: Any, **kwargs: Any) -> Any:
    """A ``SlotEngine`` that is a ``jetstream.engine.engine_api.Engine``, with its arguments."""
    return type("JetStreamEngine", (SlotEngine, library().engine.Engine), {})(*args, **kwargs)


def _seed_of(key: Array) -> int:
    """The number below 2**64 behind a PRNG key, as rows take it."""
    high, low = (int(x) for x in np.asarray(jax.random.key_data(key)))
    return high << 32 | low


def _result(out: ChunkOutput) -> Array:
    """[S, 3] int32, see ``SlotEngine.step``."""
    return jnp.stack([out.tokens[:, 0], out.counts, out.lengths], axis=1)


@functools.cache
def _tokenizer_class() -> type:
    lib = library()
    base = lib.tokenizer.Tokenizer

    class JetStreamTokenizer(base):  # type: ignore[misc, valid-type]
        """A tokenizer of this library in JetStream's form."""

        def __init__(self, tokenizer: Tokenizer) -> None:
            self._tokenizer = tokenizer

        def encode(self, s: str, **kwargs: Any) -> tuple[Any, int]:
            """Ids padded to one of JetStream's lengths, and their number."""
            ids = self._tokenizer.encode(s, add_special=True)
            kwargs |= {"is_bos": False}  # ``encode`` has added it
            return lib.token_utils.pad_tokens(np.array(ids), self.bos_id, self.pad_id, **kwargs)

        def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
            """The text of these ids."""
            return self._tokenizer.decode(token_ids)

        @property
        def pad_id(self) -> int:
            """The padding id."""
            return self._tokenizer.pad_id

        @property
        def eos_id(self) -> int:
            """The id that ends a sequence."""
            return self._tokenizer.eos_id

        @property
        def bos_id(self) -> int:
            """The id that JetStream's own server puts before prompts given as ids."""
            return self._tokenizer.eos_id

        @property
        def stop_tokens(self) -> set[int]:
            """The token ids that end a completion, without padding."""
            return set(self._tokenizer.stop_ids)

    return JetStreamTokenizer
