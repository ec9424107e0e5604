"""JetStream's Engine interface over decode slots.

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
from jrl.sampling.cache import put_prefixes, share
from jrl.sampling.params import SamplingParams
from jrl.sampling.slots import Slots, check_length, decode, pieces_of, prefill, start
from jrl.system.extras import install_line
from jrl.types import Array, Network, Params, StopReason

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
            found: dict[str, Any] = {
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
    found["orchestrator"].delete_pytree = delete_arrays  # its own calls a function that JAX removed
    return types.SimpleNamespace(**found)


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

    A prefix is a dict of arrays: the prompt's cache, its last token, its length and the data of
    the completion's PRNG key. The decode state is a ``Slots``. JetStream's API has no field for a
    temperature or a seed: one set of sampling parameters holds for all requests.

    Args:
      key: the root PRNG key; request number i uses ``fold_in(key, i)``.
      params: the policy's.
      network: the policy.
      tokenizer: the policy's.
      sampling_params: of all requests; scalars.
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
        if slots < 1:
            raise UserError(f"slots = {slots}; must be at least 1")
        check_length(network, prompt_tokens, new_tokens)
        self._key, self._network = key, network
        self._sampling_params, self._mesh = sampling_params, mesh
        self._padded = next(n for n in PREFILL_TOKENS if n >= prompt_tokens)
        self.tokenizer = tokenizer
        self.slots, self.prompt_tokens, self.new_tokens = slots, prompt_tokens, new_tokens
        self.vocab_size = network.vocab_size
        self._requests = 0
        self._occupied: set[int] = set()
        self._released: set[int] = set()
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        with jax.set_mesh(mesh):
            self._weights = jax.jit(network.prepare)(params)
        bind = functools.partial
        self._prefill = jax.jit(bind(_prefill, network=network))
        make = bind(
            _empty,
            network=network,
            slots=slots,
            prompt_tokens=self._padded,
            new_tokens=new_tokens,
        )
        # Through jit, or arrays of the state may share a buffer, which cannot be donated twice.
        self._make = jax.jit(make)
        # The state lies as it did, or what one program returns would compile the others anew. As a
        # function of this engine: programs of one function are counted together.
        where = jax.tree.map(lambda x: x.sharding, self.init_decode_state())
        self._insert = jax.jit(bind(_insert), donate_argnums=0, out_shardings=where)
        step = bind(_step, network=network, stop_tokens=tuple(tokenizer.stop_ids))
        self._step = jax.jit(step, donate_argnums=1, out_shardings=(where, None))

    def load_params(self, *args: Any, **kwargs: Any) -> Any:
        """The weights, prepared for decoding."""
        return self._weights

    def prefill(
        self,
        *,
        params: Any,
        existing_prefix: Any = None,
        padded_tokens: Array | np.ndarray,
        true_length: int,
    ) -> dict[str, Any]:
        """The prefix of one prompt.

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
        key = jax.random.key_data(jax.random.fold_in(self._key, self._requests))
        prompt = np.asarray(padded_tokens)[:true_length][-self.prompt_tokens :]
        tokens = np.zeros(next(n for n in PREFILL_TOKENS if n >= len(prompt)), np.int32)
        tokens[: len(prompt)] = prompt
        with jax.set_mesh(self._mesh):
            return self._prefill(params, tokens, np.int32(len(prompt)), key)

    def insert(self, prefix: dict[str, Any], decode_state: Slots, slot: int) -> Slots:
        """The state with a prefix in a slot, ready to decode; ``decode_state`` is donated."""
        with self._lock:
            self._occupied.add(slot)
            self._released.discard(slot)
        with jax.set_mesh(self._mesh):
            return self._insert(decode_state, prefix, np.int32(slot))

    def generate(self, params: Any, decode_state: Slots) -> tuple[Slots, Any]:
        """One more token for each running slot; ``decode_state`` is donated.

        Returns:
          The state, and ResultTokens whose ``valid`` is 0 for a slot without a new token.
        """
        keep = np.ones(self.slots, bool)
        with self._lock:
            keep[list(self._released)] = False
            self._released.clear()
            callbacks, self._callbacks = self._callbacks, []
        state, data = self._step_once(params, decode_state, keep)
        for then in callbacks:
            then()
        result = library().engine.ResultTokens(
            data=data,
            tokens_idx=(0, 1),
            valid_idx=(1, 2),
            length_idx=(2, 3),
            samples_per_slot=1,
        )
        return state, result

    def compile(self) -> None:
        """Runs every program once, so that no request waits for a compilation."""
        weights, state = self.load_params(), self.init_decode_state()
        widths = [width for width in PREFILL_TOKENS if width <= self._padded]
        for width in widths:
            size = min(width, self.prompt_tokens)
            prompt = {"padded_tokens": np.zeros(width, np.int32), "true_length": size}
            state = self.insert(self.prefill(params=weights, **prompt), state, 0)
            state, _ = self._step_once(weights, state, np.zeros(self.slots, bool))
        jax.block_until_ready(state)
        self._requests = 0  # the keys of requests are those of an engine that did not do this
        self._occupied.clear()

    def _step_once(self, params: Any, state: Slots, keep: np.ndarray) -> tuple[Slots, Array]:
        with jax.set_mesh(self._mesh):
            return self._step(params, state, keep)

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

    def init_decode_state(self, *args: Any, **kwargs: Any) -> Slots:
        """Slots in which nothing runs."""
        with jax.set_mesh(self._mesh):
            return self._make(self._weights, self._sampling_params)

    def get_prefix_destination_sharding(self) -> Any:
        """None: prefixes stay on the devices that computed them."""
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
        jitted: tuple[Any, ...] = (self._make, self._prefill, self._insert, self._step)
        return sum(f._cache_size() for f in jitted)

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


def _prefill(
    weights: Any, tokens: Array, length: Array, key: Array, *, network: Network
) -> dict[str, Any]:
    cache = prefill(weights, tokens[None], length[None], network=network)
    return {"cache": cache, "last": tokens[length - 1], "length": length, "key": key}


def _insert(slots: Slots, prefix: dict[str, Any], slot: Array) -> Slots:
    def put(x: Array, value: Any) -> Array:
        return x.at[slot].set(value)

    length = prefix["length"]
    return slots.replace(
        cache=put_prefixes(slots.cache, slot[None], prefix["cache"], length[None] - 1),
        pending=put(slots.pending, prefix["last"]),
        prompt_lengths=put(slots.prompt_lengths, length),
        lengths=put(slots.lengths, 0),
        stop=put(slots.stop, StopReason.RUNNING),
        keys=put(slots.keys, jax.random.wrap_key_data(prefix["key"])),
    )


def _step(
    weights: Any, slots: Slots, keep: Array, *, network: Network, stop_tokens: Sequence[int]
) -> tuple[Slots, Array]:
    """The next state, and [S, 3] int32: new token, 1 if there is one, completion tokens."""
    runs = (slots.stop == StopReason.RUNNING) & keep
    ended = jnp.where(slots.stop == StopReason.RUNNING, StopReason.ABORTED, slots.stop)
    slots = slots.replace(stop=jnp.where(runs, slots.stop, ended).astype(jnp.int32))
    slots, _ = decode(
        weights, slots, jnp.int32(0), network=network, steps=1, stop_tokens=stop_tokens
    )
    return slots, jnp.stack([slots.pending, runs.astype(jnp.int32), slots.lengths], axis=1)


def _empty(
    weights: Any,
    sampling_params: SamplingParams,
    *,
    network: Network,
    slots: int,
    prompt_tokens: int,
    new_tokens: int,
) -> Slots:
    nothing = jnp.zeros(slots, jnp.int32)
    cache = share(
        network.init_cache(slots, prompt_tokens, weights),
        nothing,
        1,
        network=network,
        weights=weights,
        length=new_tokens,
        pieces=pieces_of(new_tokens),
    )
    keys = jax.random.split(jax.random.key(0), slots)  # replaced before use
    made = start(
        cache,
        nothing[:, None],
        nothing + 1,
        keys,
        sampling_params,
        nothing + new_tokens,
        max_new_tokens=new_tokens,
    )
    return made.replace(stop=nothing + StopReason.LENGTH)


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
            """The ids that end a completion, without padding."""
            return set(self._tokenizer.stop_ids)

    return JetStreamTokenizer
