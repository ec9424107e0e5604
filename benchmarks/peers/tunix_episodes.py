"""FrozenLake with Tunix's agentic GRPO, timed; runs in Tunix's environment.

The library's code path is its own. Given to it are an environment of the same rules, a template
without words, turns of one token, and a seed for each call of its sampler, whose draws would
otherwise all be the same.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import tunix
from flax import nnx
from tunix.rl import rl_cluster
from tunix.rl.agentic.agentic_grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.agentic.environments.base_environment import BaseTaskEnv, EnvStepResult
from tunix.rl.rollout.base_rollout import RolloutConfig

from benchmarks import flags
from benchmarks.peers import frozenlake
from benchmarks.peers.record import Record
from benchmarks.peers.tunix_grpo import IdTokenizer, model

ARGS = flags.parser(__doc__ or "").parse_args()

ALPHABET = "ldrusfhg01234567"
FIRST = 3
"""The id of the first character; those before it pad, begin and end texts."""
STEPS = itertools.count()
COUNTS = {"turns": 0, "episodes": 0}
LOCK = threading.Lock()


def ids(text: str) -> str:
    """A text of the game as ids with spaces between them."""
    return " ".join(str(FIRST + ALPHABET.index(character)) for character in text)


class Lake(BaseTaskEnv):
    """One episode."""

    def __init__(self, example: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(example, max_steps=ARGS.turns, **kwargs)
        self.place = int(np.ravel(example["place"])[0])
        self.opening = str(np.ravel(example["prompts"])[0])

    def _initial_observation(self) -> Any:
        with LOCK:
            COUNTS["episodes"] += 1
        return self.opening

    def _step_impl(self, action: Any) -> EnvStepResult:
        with LOCK:
            COUNTS["turns"] += 1
        number = int(action) - FIRST if str(action).strip() else -1
        letter = ALPHABET[number] if 0 <= number < len(ALPHABET) else ""
        self.place, reward, done = frozenlake.move(self.place, letter)
        return EnvStepResult(ids(frozenlake.shown(self.place)), reward, done, {})


class Plain:
    """A template without words: messages one after the other."""

    def parse(self, messages: Any, add_generation_prompt: bool = False, **_: Any) -> str:
        """The text of messages."""
        return " ".join(str(m["content"]) for m in messages if str(m["content"]))


class Learner(GRPOLearner):
    """Turns of one token."""

    def _model_call(self, chat_lists: Any, env: Any = None, **_: Any) -> Any:
        return super()._model_call(chat_lists, env, max_generation_steps=1)


def dataset() -> Iterator[dict[str, np.ndarray]]:
    rng = np.random.default_rng(ARGS.seed)
    for _ in range(ARGS.steps + 1):
        places = rng.choice(frozenlake.STARTS, ARGS.batch)
        texts = [ids(frozenlake.prompt(int(place))) for place in places]
        yield {"prompts": np.array(texts), "place": places}


def cluster(mesh: jax.sharding.Mesh, width: int, length: int) -> tuple[Any, nnx.Module]:
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
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
            max_tokens_to_generate=length,
            max_prompt_length=width,
            kv_cache_size=width + length + 1,
            temperature=ARGS.temperature,
            top_p=ARGS.top_p,
            top_k=ARGS.top_k or None,
            return_logprobs=True,
            eos_tokens=[ARGS.vocab + 7],
        ),
    )
    models = {"actor": model(mesh)} | ({"reference": model(mesh)} if ARGS.beta else {})
    engine = rl_cluster.RLCluster(tokenizer=IdTokenizer(), cluster_config=config, **models)
    return engine, models["actor"]


def main() -> None:
    record = Record()
    events = jax.monitoring.register_event_duration_secs_listener
    events(lambda name, _, **__: record.compiled(name.endswith("backend_compile_duration")))
    # A reply and a turn are three tokens; a call of the sampler reads all that came before it.
    length = 3 * ARGS.turns
    width = len(frozenlake.prompt(0)) + 1 + length
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    engine, actor = cluster(mesh, width, length)
    draw = engine.rollout.generate

    def seeded(prompts: Any, config: Any, **kwargs: Any) -> Any:
        return draw(prompts, dataclasses.replace(config, seed=next(STEPS)), **kwargs)

    engine.rollout.generate = seeded
    config = GRPOConfig(
        num_generations=ARGS.group,
        num_iterations=1,
        beta=ARGS.beta,
        epsilon=0.2,
        max_response_length=length,
        max_concurrency=ARGS.concurrency,
    )
    learner = Learner(rl_cluster=engine, algo_config=config, chat_parser=Plain(), env_class=Lake)
    update = engine.update_actor
    turns: list[float] = []
    begin = {"at": time.perf_counter(), "turns": 0, "compiles": 0}

    def timed(*args: Any, **kwargs: Any) -> Any:
        """A step ends with its update: its episodes were played since the one before."""
        out = update(*args, **kwargs)
        jax.block_until_ready(jax.tree.leaves(nnx.state(actor, nnx.Param)))
        now = time.perf_counter()
        with LOCK:
            turns_so_far = COUNTS["turns"]
        row = {"step_s": now - begin["at"], "compiles": record.compiles - begin["compiles"]}
        record.rows.append(row)
        turns.append((turns_so_far - begin["turns"]) / (ARGS.batch * ARGS.group))
        begin.update(at=now, turns=turns_so_far, compiles=record.compiles)
        return out

    engine.update_actor = timed
    learner.train(dataset())
    summary = record.summary()
    mean = float(np.mean(turns[flags.WARMUP :]))
    summary |= {
        "turns": mean,
        "env_steps_s": mean * ARGS.batch * ARGS.group / summary["step_s"],
    }
    versions = {"library": "google-tunix", "version": tunix.__version__, "jax": jax.__version__}
    flags.write(versions | {"args": vars(ARGS)} | summary, ARGS.json)


if __name__ == "__main__":
    main()
