"""Times episodes whose environment takes its time, beside a loop in lock-step; prints one JSON.

python -m benchmarks.host_episodes --layers 6 --dim 384 --heads 6 --ffn 1536 --vocab 2048 --turns 4

Environments answer after a lognormal time whose mean is ``--latency`` decode steps, as measured
here first. There are four times as many episodes as slots. Lock-step is what a naive loop does:
slots take episodes together, and all wait for the slowest turn and for the slowest answer.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import flags
from benchmarks.clock import rounded
from benchmarks.work import model_config, parser, place
from jrl.episodes.calls import Calls
from jrl.episodes.chat import PlainFormat
from jrl.episodes.env_calls import call_init, call_step
from jrl.episodes.episode import Ending, Episode, Sampled
from jrl.episodes.groups import play_episodes
from jrl.episodes.host import Feedback, HostEnv, Limits
from jrl.episodes.play import Device
from jrl.episodes.transcript import Transcript
from jrl.episodes.world import host_world
from jrl.models.tokenizer import CharTokenizer, char_tokenizer
from jrl.models.transformer import transformer
from jrl.sampling.admission import RowStart
from jrl.sampling.row_costs import WaitingPlace
from jrl.sampling.rows import More, Rows
from jrl.types import Prompt, StopReason

QUEUED, SPREAD, CALL_SECONDS = 4, 1.0, 600.0
"""Episodes a slot; the deviation of the logarithm of an answer's time; the limit of a call."""


class Work(NamedTuple):
    """Episodes that both loops play.

    Attributes:
      rows: with weights.
      tokenizer: a character a token.
      prompts: one a group.
      answer: text that the environment answers with.
      limits: of turns and tokens.
    """

    rows: Rows
    tokenizer: CharTokenizer
    prompts: list[Prompt]
    answer: str
    limits: Limits


def build(args: argparse.Namespace) -> Work:
    """The model, its slots and the prompts that the flags describe."""
    special = char_tokenizer("?").vocab_size - 1
    alphabet = "?" + "".join(chr(0x4E00 + i) for i in range(args.vocab - special - 1))
    network = transformer(model_config(args))
    stops = range(args.vocab - max(args.vocab // args.turn_tokens, 1), args.vocab)
    rows = Rows(
        network,
        slots=args.slots,
        prompt_tokens=args.prompt_len,
        max_new_tokens=args.gen_len,
        stop_tokens=tuple(stops),
        chunk=args.chunk,
        sampling={"temperature": 1.0},
        suspended=args.parked,
    )
    rows.set_weights(jax.jit(network.init)(jax.random.key(args.seed)), 0)
    chance, count = random.Random(args.seed), QUEUED * args.slots // args.group
    texts = ["".join(chance.choices(alphabet, k=args.prompt_len)) for _ in range(count)]
    prompts = [Prompt(i, text, np.zeros(0, np.int32), None) for i, text in enumerate(texts)]
    limits = Limits(turns=args.turns, turn_tokens=4 * args.turn_tokens, call_seconds=CALL_SECONDS)
    return Work(rows, char_tokenizer(alphabet), prompts, alphabet[: args.answer_tokens], limits)


def environment(work: Work, mean: float, seed: int) -> HostEnv:
    """Answers every turn after lognormal seconds of this mean, and openings at once."""
    chance = random.Random(seed)

    async def init(prompt: Prompt, seed: int) -> tuple[Any, Any]:
        return None, [{"role": "user", "content": prompt.text}]

    async def step(state: Any, reply: Any) -> tuple[Any, Feedback]:
        await asyncio.sleep(mean * chance.lognormvariate(-(SPREAD**2) / 2, SPREAD))
        return state, Feedback([{"role": "user", "content": work.answer}], 0.0)

    return HostEnv(init, step, limits=work.limits)


# ---------------------------------------------------------------- the two loops


class Outcome(NamedTuple):
    """Figures of a loop.

    Attributes:
      transcripts: of all episodes.
      slot_tokens: drawn.
      slot_steps: decode steps, each counted once for every slot for which an episode was left.
      idle: slots for which an episode was left times seconds in which none decoded for waiting.
      seconds: of the whole.
      counts: others.
    """

    transcripts: list[Transcript]
    slot_tokens: float
    slot_steps: float
    idle: float
    seconds: float
    counts: dict[str, float]


def free(work: Work, env: HostEnv, group: int, choose: Any = None) -> Outcome:
    """The library's own loop."""
    more = {} if choose is None else {"choose": choose}
    began = time.perf_counter()
    with Calls() as calls:
        world = host_world(calls, env, PlainFormat(work.tokenizer), work.tokenizer)
        seeds = list(range(len(work.prompts)))
        played = play_episodes(Device(work.rows, **more), world, work.prompts, seeds, group=group)
    seconds, counts = time.perf_counter() - began, played.counts
    return Outcome(
        [t for g in played.groups for t in g],
        counts["slot_tokens"],
        counts["slot_steps"],
        counts["idle_seconds"] * work.rows.slots,
        seconds,
        counts,
    )


def lockstep(work: Work, env: HostEnv, group: int) -> Outcome:
    """Episodes in waves of as many as there are slots, which take their turns together."""
    episodes = [
        Episode(i, j, prompt, i) for i, prompt in enumerate(work.prompts) for j in range(group)
    ]
    chat, slots = PlainFormat(work.tokenizer), work.rows.slots
    totals, began = {"tokens": 0, "steps": 0, "idle": 0.0}, time.perf_counter()
    with Calls() as calls:

        def ask(function: Callable[..., Any], arguments: dict[int, tuple]) -> dict[int, Any]:
            """The answers to one call for each row, when the last of them has come."""
            since = time.perf_counter()
            for row, more in arguments.items():
                calls.submit(row, function, env, chat, *more, seconds=CALL_SECONDS)
            answers = [calls.inbox.get() for _ in arguments]
            totals["idle"] += (time.perf_counter() - since) * len(wave)
            return {answer.number: answer.value for answer in answers}

        for first in range(0, len(episodes), slots):
            wave = episodes[first : first + slots]
            problems = {i: (*e.problem[1:], work.rows.prompt_tokens) for i, e in enumerate(wave)}
            for row, value in ask(call_init, problems).items():
                wave[row].open(*value)
                wave[row].room = work.rows.max_new_tokens
            work.rows.admit({row: _start(work, e) for row, e in enumerate(wave)})
            live = dict(enumerate(wave))
            while live:
                _draw(work, live, wave, totals)
                turns = {row: _step_arguments(work, e) for row, e in live.items()}
                answers = {}
                for row, (state, feedback, ids, state_id) in ask(call_step, turns).items():
                    episode = live[row]
                    episode.state = state
                    episode.pay(feedback)
                    ends = episode.at.turn + 1 >= work.limits.turns
                    if ends or episode.at.length + len(ids) >= episode.room:
                        episode.ending = Ending(StopReason.TURNS)
                        del live[row]
                    else:
                        episode.answer(ids, state_id)
                        answers[row] = More(ids, _limit(work, episode))
                if answers:
                    work.rows.extend(answers)
    seconds = time.perf_counter() - began
    transcripts = [e.transcript() for e in episodes]
    return Outcome(transcripts, totals["tokens"], totals["steps"], totals["idle"], seconds, {})


def _draw(
    work: Work, live: dict[int, Episode], wave: Sequence[Episode], totals: dict[str, Any]
) -> None:
    """Decodes until every live row has ended its turn."""
    for episode in live.values():
        episode.turn.stop = StopReason.RUNNING
    while any(e.turn.stop == StopReason.RUNNING for e in live.values()):
        out = work.rows.decode(0)  # no slot is wanted before the last row has stopped
        totals["steps"] += int(out.steps) * len(wave)
        for row, episode in live.items():
            count = int(out.counts[row])
            totals["tokens"] += count
            if count:
                tokens, logprobs = np.asarray(out.tokens), np.asarray(out.logprobs)
                episode.grow(Sampled(tokens[row, :count], logprobs[row, :count], 0))
            episode.turn.stop = StopReason(int(out.stop[row]))


def _step_arguments(work: Work, episode: Episode) -> tuple[Any, ...]:
    """An environment's arguments for a turn, those of ``call_step``."""
    cut = episode.turn.stop == StopReason.LENGTH
    return work.tokenizer, episode.state, episode.at.turn, episode.end_turn(), cut


def _limit(work: Work, episode: Episode) -> int:
    return min(episode.room, episode.at.length + work.limits.turn_tokens)


def _start(work: Work, episode: Episode) -> RowStart:
    return episode.row_start(_limit(work, episode))


# ---------------------------------------------------------------- figures


def histories(transcripts: Sequence[Transcript]) -> tuple[int, int]:
    """Tokens of prompts and answers, each once an episode; and of all turns' whole pasts."""
    once = pasts = 0
    for transcript in transcripts:
        length = len(transcript.opening)
        once += length
        for segment in transcript.segments:
            if segment.drawn:
                pasts += length
            else:
                once += len(segment.tokens)
            length += len(segment.tokens)
    return once, pasts


def drawn(transcripts: Sequence[Transcript]) -> list[list[int]]:
    """The tokens of each first turn: later ones follow what came before."""
    return [t.segments[0].tokens.tolist() for t in transcripts]


def figures(outcome: Outcome, step_s: float) -> dict[str, float]:
    """Of one loop in one round."""
    waits = outcome.idle / step_s
    return {
        "live_slot_steps": outcome.slot_tokens / outcome.slot_steps,
        "live_with_waits": outcome.slot_tokens / (outcome.slot_steps + waits),
        "tokens": outcome.slot_tokens,
        "tokens_s": outcome.slot_tokens / outcome.seconds,
        "seconds": outcome.seconds,
    }


def step_seconds(work: Work) -> float:
    """A decode step of all slots: the median of chunks that begin with all of them running."""
    starts = {
        row: RowStart((1,) * work.rows.prompt_tokens, row, 0, work.rows.max_new_tokens)
        for row in range(work.rows.slots)
    }
    seconds = []
    for _ in range(7):
        work.rows.admit(starts)
        jax.block_until_ready(work.rows.suspend(0))
        began = time.perf_counter()
        out = work.rows.decode(0)
        seconds.append((time.perf_counter() - began) / int(out.steps))
    return statistics.median(seconds)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Rounds of both loops in alternating order, after all programs have been compiled."""
    work = build(args)
    still = environment(work, 0.0, 0)
    short = work._replace(limits=work.limits._replace(turns=2, turn_tokens=8))
    for chosen in (WaitingPlace.PARKED, WaitingPlace.DROPPED):
        env = environment(short, 0.0, 0)
        free(short, env, args.group, lambda wait, place=chosen: place)
    free(work, still, args.group)
    lockstep(short, environment(short, 0.0, 0), args.group)
    rounds: list[dict[str, Any]] = []
    loops: list[tuple[str, Callable[..., Outcome]]] = [("free", free), ("lockstep", lockstep)]
    for number in range(args.rounds):
        step_s, outcomes = step_seconds(work), {}
        for name, loop in loops if number % 2 == 0 else loops[::-1]:
            env = environment(work, args.latency * step_s, number)
            outcomes[name] = loop(work, env, args.group)
        # Not quite all: another padding adds in another order, which can turn a near tie.
        both = zip(*(drawn(outcomes[name].transcripts) for name, _ in loops), strict=True)
        same = [a == b for a, b in both]
        once, pasts = histories(outcomes["free"].transcripts)
        counts = outcomes["free"].counts
        rounds.append(
            {
                "step_s": step_s,
                "equal_first_turns": statistics.fmean(same),
                **{name: figures(outcome, step_s) for name, outcome in outcomes.items()},
                **{n: counts[n] for n in ("parked", "dropped", "read_tokens", "reread_tokens")},
                "tokens_once": once,
                "tokens_of_histories": pasts,
            }
        )
    costs = work.rows.costs
    about = {"library": "jrl", "jax": jax.__version__, "device": jax.devices()[0].device_kind}
    names = "live_slot_steps", "live_with_waits", "tokens_s"
    medians = {
        loop: {n: statistics.median(r[loop][n] for r in rounds) for n in names}
        for loop in ("free", "lockstep")
    }
    speedup = statistics.median(r["free"]["tokens_s"] / r["lockstep"]["tokens_s"] for r in rounds)
    spent = {
        "return_s": costs.returns.seconds(1),
        "park_s": costs.leaving.least + costs.returning.least,
        "read_token_s": costs.reading.line[1],
    }
    result = {"args": vars(args), **medians, "speedup": speedup, "costs": spent, "rounds": rounds}
    return rounded(about | result)


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__ or "")
    options.add_argument(
        "--latency", type=float, default=10.0, help="mean of an answer, decode steps"
    )
    options.add_argument("--turn-tokens", type=int, default=32, help="of a turn, mean")
    options.add_argument("--answer-tokens", type=int, default=16)
    options.add_argument("--parked", type=int, default=None, help="rows that may be parked")
    options.add_argument("--rounds", type=int, default=3, help="of both loops")
    options.set_defaults(slots=8, chunk=16, group=4, turns=4, gen_len=384)
    args = options.parse_args(argv)
    if args.group < 1 or args.slots < 1 or QUEUED * args.slots % args.group:
        options.error(f"--group {args.group}: must divide {QUEUED} times --slots {args.slots}")
    if not math.isfinite(args.latency) or args.latency < 0:
        options.error(f"--latency {args.latency}: must be 0 or more")
    place(args)
    flags.write(measure(args), args.json)


if __name__ == "__main__":
    main()
