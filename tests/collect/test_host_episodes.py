"""Training on episodes with an environment on the host: its groups, redraws, and learning."""

import asyncio
import os
import pathlib
import time

import jax
import numpy as np
import optax
import pytest
from judge_server import judge_server
from tiny import tiny_config

from jrl.collect.collector import Collector
from jrl.collect.host_episodes import HostEpisodes
from jrl.collect.plan import Setting
from jrl.collect.reward_stages import JudgedParts, function_stage, judge_stage
from jrl.collect.run_rows import RunRows
from jrl.collect.sources import simple_request
from jrl.config import load_config
from jrl.episodes.chat import PlainFormat
from jrl.episodes.coroutine import coroutine_env
from jrl.episodes.host import EnvExtras, Feedback, HostEnv, Lifecycle, Limits
from jrl.errors import UserError
from jrl.judging.host import HostScorer
from jrl.judging.judges import endpoint_judges, judge_parts
from jrl.judging.row_calls import RowCalls
from jrl.mesh import make_mesh
from jrl.methods.group_relative import grpo
from jrl.models.tokenizer import char_tokenizer
from jrl.models.transformer import transformer
from jrl.rewards import make_reward
from jrl.rewards.exact import final_answer
from jrl.rewards.pool import RewardPool
from jrl.sampling.params import make_sampling_params
from jrl.sampling.rows import Rows
from jrl.train.loop import policy_weights
from jrl.train.state import init_state
from jrl.train.step import make_step
from jrl.types import Prompt, StopReason

JUDGES = pathlib.Path(__file__).parents[1] / "rewards" / "judges.py"
TOKENIZER = char_tokenizer()
P, T, G = 8, 16, 4
CONFIG = tiny_config(P + T)
NETWORK = transformer(CONFIG)
ROWS = Rows(
    NETWORK,
    slots=8,
    prompt_tokens=P,
    max_new_tokens=T,
    stop_tokens=(1,),
    chunk=4,
    sampling={"temperature": 1.0},
)
KEY = jax.random.key(0)
PROMPTS = [Prompt(10 + i, f"{i}=", np.zeros(0, np.int32), str(i)) for i in range(6)]


def digits_env(fails=lambda prompt: False):
    """Pays for each digit said; two turns of up to six tokens."""

    async def init(prompt, seed):
        if fails(prompt):
            raise RuntimeError("no room")
        return prompt, [{"role": "user", "content": prompt.text}]

    async def step(prompt, reply):
        points = sum(c.isdigit() for c in reply.text) / 6
        messages = [{"role": "user", "content": "more>"}]
        return prompt, Feedback(messages, points, reply.turn == 1, points > 0.5, None, {"said": 1})

    return HostEnv(init, step, limits=Limits(turns=2, turn_tokens=5))


def source(env, **weights):
    return HostEpisodes(
        env,
        PlainFormat(TOKENIZER),
        RunRows(ROWS),
        prompts=PROMPTS,
        seed=None,
        tokenizer=TOKENIZER,
        weights=weights or {"reward": 1.0, "success": 0.0},
    )


def request_for(params, step, prompts):
    """A request for the first prompts."""
    tickets = np.arange(prompts, dtype=np.int32)
    return simple_request(KEY, {"policy": params}, np.int32(step), tickets, G)


@pytest.fixture
def make_source():
    """make(env, ...) -> a source that is closed at the end."""
    sources = []

    def make(*args, **weights):
        sources.append(source(*args, **weights))
        return sources[-1]

    yield make
    for each in sources:
        each.close()


@pytest.fixture(scope="module")
def params():
    return NETWORK.init(jax.random.key(1))


def test_groups_hold_points_paid_and_ids(make_source, params):
    source = make_source(digits_env(), success=3.0, reward=0.5)
    groups = source.draw(request_for(params, 4, 3))
    rollout = groups.rollout.check()
    assert groups.ids["prompt"].tolist() == [10, 11, 12]
    assert set(rollout.versions[rollout.mask]) == {4}
    success, reward = groups.rewards.transpose(2, 0, 1)
    np.testing.assert_allclose(groups.stats["paid"].sum(2), 0.5 * reward, rtol=1e-6)
    assert set(np.unique(success)) <= {0.0, 1.0}
    for i, j in np.ndindex(3, G):
        policy_text = TOKENIZER.decode(rollout.tokens[i, j][rollout.mask[i, j]])
        assert reward[i, j] == pytest.approx(sum(c.isdigit() for c in policy_text) / 6)
        turns = groups.ids["turn"][i, j][rollout.mask[i, j]]
        assert groups.ids["stratum"][i, j] == turns.max() + 1
    one, same = groups.ids["answer"], {}
    for i, j in np.ndindex(3, G):  # one number for one text
        last_turn = groups.ids["turn"][i, j] == groups.ids["turn"][i, j][rollout.mask[i, j]].max()
        text = TOKENIZER.decode(rollout.tokens[i, j][rollout.mask[i, j] & last_turn])
        assert same.setdefault(final_answer(text) or text.strip(), one[i, j]) == one[i, j]
    assert len(set(one.ravel().tolist())) == len(same) > 1
    assert groups.counts["env/said"] == groups.counts["turns"]
    again = make_source(digits_env()).draw(request_for(params, 4, 3)).rollout
    np.testing.assert_array_equal(again.tokens, rollout.tokens)
    other = make_source(digits_env()).draw(request_for(params, 5, 3)).rollout
    assert (other.tokens != rollout.tokens).any()


def test_a_writer_may_take_any_time_where_episodes_may(make_source):
    async def write(failed, count, seed):
        await asyncio.sleep(0.01)
        return failed * count

    env = digits_env()
    extras, limits = EnvExtras(write=write), env.limits._replace(episode_seconds=0.0)
    assert make_source(env._replace(extras=extras, limits=limits)).written(["a"], 2, 0) == ["a"] * 2


def test_an_environment_that_changes_the_working_directory(
    make_source, params, tmp_path, monkeypatch, caplog
):
    def played(*arguments):
        os.chdir(tmp_path)
        raise RuntimeError("played")

    before, source = os.getcwd(), make_source(digits_env())
    monkeypatch.setattr(source, "_until_alive", played)
    with pytest.raises(RuntimeError, match="played"):
        source.draw(request_for(params, 4, 3))
    assert os.getcwd() == before
    assert "data.env changed the working directory" in caplog.text


def test_episodes_that_all_end_at_the_limit_of_turns_unpaid_are_told_of_once(
    make_source, params, caplog
):
    async def episode(policy, prompt):
        for _ in range(3):
            await policy(prompt.text)
        return 1.0

    limits = Limits(turns=1, turn_tokens=5)
    source = make_source(coroutine_env(episode, limits=limits))
    for _ in range(2):
        assert (source.draw(request_for(params, 4, 1)).rewards == 0).all()
    assert caplog.text.count(f"all {G} episodes ended at the limit of turns, data.turns = 1") == 1


def test_groups_left_too_small_are_played_again(make_source, params, caplog):
    times = {}

    def fails(prompt):
        times[prompt.id] = times.get(prompt.id, 0) + 1
        return prompt.id == 11 and times[11] <= 3  # one living member, then four

    groups = make_source(digits_env(fails)).draw(request_for(params, 0, 3))
    assert (groups.rollout.stop < StopReason.FAILED).all()
    assert groups.counts["groups_redrawn"] == 1
    assert groups.counts["env_errors"] == 3
    failing = make_source(digits_env(lambda prompt: prompt.id == 11))
    groups = failing.draw(request_for(params, 0, 3))
    assert (groups.rollout.stop[1] == StopReason.FAILED).all()
    assert groups.counts["groups_redrawn"] == 2  # and then given up
    assert "environment: 4 failed: RuntimeError: no room" in caplog.text


def test_an_episode_whose_weighted_rewards_float32_cannot_hold_fails_by_name(
    make_source, params, caplog
):
    """Each part fits, and so do the products; both together do not."""

    async def init(prompt, seed):
        return prompt, [{"role": "user", "content": prompt.text}]

    async def step(prompt, reply):
        huge = 3e38 if prompt.id == 11 else 1.0
        return prompt, Feedback((), (huge, huge), done=True)

    env = HostEnv(init, step, limits=Limits(turns=1, turn_tokens=3), parts=("a", "b"))
    groups = make_source(env, a=1.0, b=0.5).draw(request_for(params, 0, 3))
    failed = groups.rollout.stop == StopReason.FAILED
    assert failed.all(axis=1).tolist() == [False, True, False]
    assert groups.counts["env_errors"] == 3 * G  # played again twice, and then given up
    assert (
        "4 failed: the sum of its rewards, 1 * 3e+38 of a and 0.5 * 3e+38 of b, is inf"
        in caplog.text
    )
    fine = make_source(env, a=1.0, b=0.1).draw(request_for(params, 0, 3))
    assert (fine.rollout.stop < StopReason.FAILED).all()


@pytest.mark.parametrize("cut", [False, True])
def test_an_episode_that_fills_its_room_is_done_unless_it_says_that_it_was_cut(
    make_source, params, cut
):
    async def init(prompt, seed):
        return None, [{"role": "user", "content": prompt.text}]

    async def step(state, reply):
        return state, Feedback((), 1.0, done=True, success=True, cut=cut and reply.cut)

    rollout = make_source(HostEnv(init, step)).draw(request_for(params, 0, 3)).rollout
    full = rollout.mask.sum(2) == T
    stops = np.where(full & cut, StopReason.LENGTH, StopReason.DONE)
    last = np.take_along_axis(rollout.tokens, rollout.mask.sum(2, keepdims=True) - 1, 2)[..., 0]
    assert (full & (last != 1)).any()  # turns that only the room has ended
    np.testing.assert_array_equal(rollout.stop, np.where(last == 1, StopReason.DONE, stops))


def test_an_environment_is_told_the_step_and_the_split(make_source, params):
    calls = []
    begin = Lifecycle(begin=lambda step, split: calls.append((step, split)))
    env = digits_env()._replace(lifecycle=begin)
    make_source(env).draw(request_for(params, 7, 1))
    assert calls == [(7, "train")]


def test_a_group_that_could_never_be_open_is_named(make_source):
    with pytest.raises(UserError, match=r"opens 3 episodes at once, fewer than the 4 members"):
        make_source(digits_env()._replace(lifecycle=Lifecycle(at_once=3))).draw(
            request_for(None, 0, 1)
        )


def test_parts_that_the_environment_does_not_pay_are_named(make_source):
    with pytest.raises(UserError, match="rewards.math: the environment pays reward, success"):
        make_source(digits_env(), math=1.0)


def train(make_source, params, steps, fails=lambda prompt: False):
    method = grpo()
    parts = {"network": NETWORK, "objective": method.objective, "optimizer": optax.adam(2e-2)}
    step = jax.jit(make_step(**parts))
    state, cursor, curve = init_state(KEY, params, **parts, value=None), 0, []
    mesh, weights = make_mesh({}, jax.devices()[:1]), np.array([1.0, 0.0], np.float32)
    collector = Collector(make_source(digits_env(fails)), Setting(method, 4, G, weights), mesh)
    for i in range(steps):
        batch, _, cursor = collector.collect(KEY, policy_weights(state), step=i, cursor=cursor)
        state, metrics = step(state, batch, make_sampling_params())
        assert float(metrics["logprob_diff"]) < 1e-4
        curve.append(float(metrics["reward"]))
    return curve


def test_a_step_trains_on_the_living(make_source, params):
    (reward,) = train(make_source, params, 1, lambda prompt: prompt.id == 11)
    assert np.isfinite(reward)


def points_of(groups):
    return dict(zip(("reward", "said", "judged"), groups.rewards.transpose(2, 0, 1), strict=True))


def waits_for(may_end, env):
    """The environment, whose last problem is answered once somebody was called about a row."""

    async def step(prompt, reply):
        end = time.monotonic() + 60
        while prompt.id == 12 and not may_end():
            assert time.monotonic() < end, "nobody was called before all rows had ended"
            await asyncio.sleep(0.01)
        return await env.step(prompt, reply)

    return env._replace(step=step)


def test_rewards_and_judges_are_called_as_rows_end(make_source, params, tmp_path):
    """The last group ends once both were called about rows; points are those of calls at the end.

    With slots for two of three groups the calls come from rows of the first two.
    """
    notes = tmp_path / "notes"
    reward = make_reward(f"{JUDGES}:write_note", file=str(notes))

    def digits(body, number):
        return f"Score: {sum(c.isdigit() for c in body['messages'][-1]['content'])}"

    def draw_groups(url, bodies, early):
        table = f"judged={{function='judge', url='{url}', model='m', template='{{completion}}'}}"
        rewards = f"rewards={{reward={{}}, {table}}}"
        config = load_config(None, ["data.train=x.jsonl", "model.path=x", rewards])
        judges = judge_parts(endpoint_judges(config), TOKENIZER, 9, "train")
        may_end = lambda: bool(bodies) and notes.exists()  # noqa: E731
        inner = make_source(waits_for(may_end, digits_env()) if early else digits_env(), reward=1.0)
        inner._speaks = True
        with RewardPool({"said": reward}, workers=1, timeout_seconds=20.0) as pool:
            on_host = HostScorer(pool, TOKENIZER, "train", 9)
            calls = RowCalls(on_host, judges) if early else None
            if calls is not None:
                inner.ended = calls.submit
            prompts_of = lambda groups: groups.subject  # noqa: E731
            stages = [function_stage(on_host, prompts_of, calls), judge_stage(judges, prompts_of)]
            names = ("reward", "said", "judged")
            source = JudgedParts(inner, ("reward",), stages, names, calls=calls)
            return source.draw(request_for(params, 4, 3))

    results = []
    for early in (False, True):
        with judge_server(digits) as (url, bodies):
            results.append(
                (draw_groups(url, bodies, early), sorted(notes.read_text().splitlines()))
            )
            notes.unlink()
            request_count = len(bodies)
    (late, calls_late), (soon, calls_soon) = results
    for name, points in points_of(late).items():
        np.testing.assert_array_equal(points_of(soon)[name], points)
    assert calls_soon == calls_late  # one call a member: none was made twice
    assert len(calls_late) == 3 * G
    assert soon.counts["judge_calls"] == request_count == late.counts["judge_calls"]
    np.testing.assert_array_equal(soon.rollout.tokens, late.rollout.tokens)


@pytest.mark.slow
def test_the_policy_learns_to_say_digits(make_source, params):
    curve = train(make_source, params, 60)
    assert np.mean(curve[:5]) < 0.6
    assert np.mean(curve[-5:]) > 1.2
