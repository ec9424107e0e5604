"""GRPO steps with Tunix, timed; runs in Tunix's environment, see ``benchmarks/README.md``.

The library's code path is its own: what is timed is wrapped, nothing is replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
import tunix
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

from benchmarks import flags
from benchmarks.peers.record import Record

ARGS = flags.parser(__doc__ or "").parse_args()
if flags.jax_platform(ARGS) is not None:
    jax.config.update("jax_platforms", flags.jax_platform(ARGS))
if ARGS.devices > 1:
    jax.config.update("jax_num_cpu_devices", ARGS.devices)


class IdTokenizer:
    """A text is token ids with spaces between them."""

    def encode(self, text: str, **_: Any) -> list[int]:
        """Ids of a text."""
        return [int(word) for word in text.split()]

    def decode(self, ids: Any, **_: Any) -> str:
        """The text of ids."""
        return " ".join(str(int(i)) for i in ids)

    def bos_id(self) -> int:
        """The first token of every text."""
        return flags.BOS

    def eos_id(self) -> int:
        """The token that ends a text."""
        return flags.EOS

    def pad_id(self) -> int:
        """Padding."""
        return flags.PAD


def model(mesh: jax.sharding.Mesh) -> nnx.Module:
    dtype = jax.numpy.dtype(ARGS.dtype)
    config = qwen3.ModelConfig(
        num_layers=ARGS.layers,
        vocab_size=ARGS.vocab,
        embed_dim=ARGS.dim,
        hidden_dim=ARGS.ffn,
        num_heads=ARGS.heads,
        head_dim=ARGS.head_dim,
        num_kv_heads=ARGS.kv_heads,
        rope_theta=10_000,
        norm_eps=1e-6,
        use_tied_embedding=not ARGS.untied,
        dtype=dtype,
        param_dtype=dtype,
    )
    with mesh:
        model = qwen3.Qwen3(config, rngs=nnx.Rngs(params=ARGS.seed))
        if mesh.size > 1:
            state = nnx.state(model)
            specs = nnx.get_partition_spec(state)
            nnx.update(model, jax.lax.with_sharding_constraint(state, specs))
    return model


def dataset() -> Iterator[dict[str, np.ndarray]]:
    for rows in flags.prompts(ARGS, ARGS.steps + 1):
        # The sampler puts the first token in front by itself.
        texts = [" ".join(map(str, row[1:])) for row in rows]
        yield {"prompts": np.array(texts), "answer": np.array(["even"] * len(rows))}


def even_share(prompts: Any, completions: list[str], answer: Any, **_: Any) -> list[float]:
    ids = [np.array(text.split(), dtype=int) for text in completions]
    return [float((x % 2 == 0).mean()) if x.size else 0.0 for x in ids]


def cluster(mesh: jax.sharding.Mesh) -> tuple[Any, nnx.Module]:
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    longest = flags.prompt_width(ARGS) + ARGS.gen_len + 1
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine="vanilla",
        offload_to_cpu=False,
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adamw(
                flags.LEARNING_RATE, b1=flags.B1, b2=flags.B2, weight_decay=0.0
            ),
            eval_every_n_steps=10**9,
            max_steps=ARGS.steps,
            mini_batch_size=ARGS.batch,
            train_micro_batch_size=ARGS.micro or ARGS.batch,
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=ARGS.gen_len,
            max_prompt_length=ARGS.prompt_len,
            kv_cache_size=longest,
            temperature=ARGS.temperature,
            top_p=ARGS.top_p,
            top_k=ARGS.top_k or None,
            seed=ARGS.seed or None,
            # An id that no vocabulary has: no completion ends before its limit.
            eos_tokens=[ARGS.vocab + 7] if ARGS.eos == "never" else [flags.EOS],
        ),
    )
    models = {"actor": model(mesh)} | ({"reference": model(mesh)} if ARGS.beta else {})
    engine = rl_cluster.RLCluster(tokenizer=IdTokenizer(), cluster_config=config, **models)
    return engine, models["actor"]


def wrap(owner: Any, name: str, around: Callable[[Callable], Callable]) -> None:
    setattr(owner, name, around(getattr(owner, name)))


def main() -> None:
    record = Record()
    events = jax.monitoring.register_event_duration_secs_listener
    events(lambda name, _, **__: record.compiled(name.endswith("backend_compile_duration")))
    devices = np.array(jax.devices()[: ARGS.fsdp * ARGS.tp]).reshape(ARGS.fsdp, ARGS.tp)
    engine, actor = cluster(jax.sharding.Mesh(devices, ("fsdp", "tp")))
    config = GRPOConfig(num_generations=ARGS.group, num_iterations=1, beta=ARGS.beta, epsilon=0.2)
    learner = GRPOLearner(rl_cluster=engine, algo_config=config, reward_fns=even_share)
    weights = lambda: jax.tree.leaves(nnx.state(actor, nnx.Param))  # noqa: E731

    def timed(phase: str, ready: Callable[[Any], Any]) -> Callable[[Callable], Callable]:
        def around(function: Callable) -> Callable:
            def run(*args: Any, **kwargs: Any) -> Any:
                begin = time.perf_counter()
                out = function(*args, **kwargs)
                jax.block_until_ready(ready(out))
                record.spent(phase, time.perf_counter() - begin)
                if phase == "rollout":
                    record.drew([len(tokens) for tokens in out.tokens])
                return out

            return run

        return around

    sampler = engine.rollout._sampler
    wrap(sampler, "_compiled_prefill_fn", timed("prefill", jax.tree.leaves))
    wrap(sampler, "_compiled_decode_fn", timed("decode", jax.tree.leaves))
    wrap(engine, "generate", timed("rollout", lambda out: ()))
    wrap(engine, "get_ref_per_token_logps", timed("reference", jax.tree.leaves))
    wrap(engine, "update_actor", timed("train", lambda out: weights()))
    wrap(learner, "_run_global_step", record.step(lambda: jax.block_until_ready(weights())))
    learner.train(dataset())
    versions = {"library": "google-tunix", "version": tunix.__version__, "jax": jax.__version__}
    flags.write(versions | {"args": vars(ARGS)} | record.summary(), ARGS.json)


if __name__ == "__main__":
    main()
