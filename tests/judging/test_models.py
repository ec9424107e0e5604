"""Judges on the run's devices: the policy, its start, or another checkpoint."""

import json
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.config import load_config
from jrl.config.judge import JudgeTable, checked
from jrl.episodes.search import Path
from jrl.errors import UserError
from jrl.evaluate.verifiers import _by_judge, verifier_of
from jrl.judging.cache import QuestionVote
from jrl.judging.host import Texts
from jrl.judging.judges import check_judges, judges_of
from jrl.judging.models import judge_directory, model_judge
from jrl.models import hf
from jrl.models.config import ModelConfig
from jrl.models.tokenizer import CharTokenizer
from jrl.models.transformer import transformer
from jrl.rewards.model import JudgeModel
from jrl.rewards.replies import read_yes_no
from jrl.rewards.verdicts import Question
from jrl.run.run import train
from jrl.setup.reward_parts import judge_of
from jrl.storage.metrics import read_jsonl
from jrl.train import build
from jrl.types import Prompt, StopReason
from jrl.zoo.rewards.plans import plan_of

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
TOKENS = CharTokenizer()
SIZES = {"layers": 1, "embed_dim": 64, "heads": 1, "kv_heads": 1, "head_dim": 8, "mlp_dim": 16}
SIZES |= {"max_length": 48, "tied_embeddings": False}
CONFIG = ModelConfig(vocab_size=TOKENS.vocab_size, **SIZES)
FOLLOWS = ("1y", "ye", "es", "0n", "no", "2z", "3y", "3n")
"""The judge's reply after a character: yes after 1, no after 0, either after 3."""
ONE = "function='judge', form='yes_no', template='{completion}', max_prompt_tokens=8, max_tokens=8"


def parrot(config=CONFIG, follows=FOLLOWS, tokenizer=TOKENS):
    """Weights of a model whose next token depends on the last one alone."""
    params = jax.eval_shape(transformer(config).init, jax.random.key(0))
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
    head = np.zeros(params["head"].shape, np.float32)
    for character in tokenizer.alphabet:
        (at,) = tokenizer.encode(character)
        after = [f[1] for f in follows if f[0] == character]
        head[at, tokenizer.encode("".join(after)) if after else [tokenizer.eos_id]] = 9.0
    params["embed"] = jnp.eye(*params["embed"].shape)
    params["final_norm"] += 1
    return params | {"head": jnp.asarray(head)}


def judge(temperature=0.0, seed=0):
    table = {"model": "dir", "max_tokens": 8, "at_once": 4, "max_prompt_tokens": 16}
    table = checked(JudgeTable, "rewards.good", table | {"temperature": temperature})
    return model_judge(table, JudgeModel(transformer(CONFIG), parrot(), TOKENS, (7,)), seed=seed)


@pytest.fixture(scope="module")
def greedy():
    """One judge for several tests: its programs are compiled once."""
    return judge()


def requests_of(*texts, vote=0, read=read_yes_no):
    return [QuestionVote(Question(({"role": "user", "content": t},), read), vote) for t in texts]


def counted(counts, **expected):
    assert {k: v for k, v in counts.items() if v} == {f"judge_{k}": v for k, v in expected.items()}


def test_verdicts_of_a_model_on_these_devices(greedy, tmp_path):
    cached = greedy._replace(cache=greedy.cache._replace(directory=tmp_path / "judge"))
    texts = ("a 1", "a 0", "a 2", "a 1", "A 1", "17 letters are too", "9" * 16 + "1")
    verdicts, counts = cached.verdicts(requests_of(*texts))
    assert verdicts == [1.0, 0.0, None, 1.0, None, None, None]
    # the tokenizer does not have a capital, and two are longer than sixteen tokens
    counted(counts, calls=3, unreadable=1, failures=3)
    verdicts, counts = cached.verdicts(requests_of("b 0", "a 1", "a 2"))
    assert verdicts == [0.0, 1.0, None]
    counted(counts, cached=1, calls=2, unreadable=1)
    assert cached.rows.weights is None  # no memory is held between two calls


def test_a_reply_is_read_for_each_row_by_its_own_answer(greedy):
    ask = lambda right: requests_of("own 1", read=lambda reply: float(reply == right))[0]  # noqa: E731
    verdicts, counts = greedy.verdicts([ask("yes"), ask("no"), ask("yes")])
    assert verdicts == [1.0, 0.0, 1.0]
    counted(counts, calls=1)


def test_a_number_that_the_limit_of_tokens_cut_is_no_verdict(greedy):
    endless = greedy._replace(model=greedy.model._replace(params=parrot(follows=("a1", "11"))))
    verdicts, counts = endless.verdicts(requests_of("x a", read=float))
    assert verdicts == [None]
    counted(counts, calls=1, unreadable=1)
    ended = greedy._replace(model=greedy.model._replace(params=parrot(follows=("a1",))))
    assert ended.verdicts(requests_of("x a", read=float))[0] == [1.0]


def test_without_temperature_votes_agree(greedy):
    text = lambda reply: reply or None  # noqa: E731
    votes = [each for v in range(8) for each in requests_of("x 3", vote=v, read=text)]
    assert len(set(greedy.verdicts(votes)[0])) == 1


def test_the_same_seed_says_the_same_whatever_else_is_asked():
    """Votes of the same question are draws of their own, keyed by the question and the seed."""
    text = lambda reply: reply or None  # noqa: E731
    questions = [each for v in range(8) for each in requests_of("x 3", "y 3", vote=v, read=text)]
    one = judge(temperature=1.0)
    together = one.verdicts(questions)[0]
    assert set(together) == {"yes", "no"}
    assert [one.verdicts([each])[0][0] for each in reversed(questions[:5])] == together[4::-1]
    assert one.verdicts(questions[::3])[0] == together[::3]
    other = one._replace(cache=judge(temperature=1.0, seed=1).cache)
    assert other.verdicts(questions)[0] != together


RUN = (
    *("data.task=sorting", "data.difficulty=3", "train.prompts=2", "sampling.group=2"),
    f"model.config={json.dumps(SIZES).replace(':', '=')}",
    *("train.steps=1", "checkpoint.every=0", "eval.problems=2", "log.samples_every=0"),
    "warmup.steps=0",
)


def settings(judge, *more):
    return load_config(None, [*RUN, f"rewards={{verify={{}}, good={{{judge}}}}}", *more])


def points_of(judges, texts, params):
    """Points of a run's judges for one group of these completions."""
    ids = [TOKENS.encode(text) for text in texts]
    tokens = np.zeros((1, len(ids), 8), np.int32)
    for j, each in enumerate(ids):
        tokens[0, j, : len(each)] = each
    lengths = np.array([[len(each) for each in ids]])
    stop = np.full(lengths.shape, StopReason.STOP_TOKEN)
    rollout = types.SimpleNamespace(tokens=tokens, lengths=lengths, stop=stop, mask=tokens > 0)
    prompts = [Prompt(0, "2+2", np.zeros(1, np.int32), "4")]
    weights = {} if params is None else {"policy": params}
    points, _, counts, _ = judges(Texts(prompts, rollout, TOKENS), {}, 0, weights)
    return points["good"][0].tolist(), counts


def test_the_policy_of_the_step_judges(tmp_path):
    """Of a run with a directory: what an earlier policy said of a text is not kept."""
    run = build.setup(settings(f"{ONE}, model='policy'", f"run.dir={tmp_path}"))
    with jax.set_mesh(run.mesh):
        judges = judges_of(run, "train")
        points, counts = points_of(judges, ("51", "50", "1"), parrot(run.model))
        assert points == [1.0, 0.0, 1.0]
        assert counts["judge_calls"] == 3
        assert points_of(judges, ("51",), parrot(run.model, ("1n", "no")))[0] == [0.0]
        points, counts = points_of(judges, ("51",), None)  # of what was there already: no opinion
    assert np.isnan(points).all()
    assert counts["judge_calls"] == 0


def test_a_policy_ranks_its_own_solutions():
    """Self-PRM: the best of several is the one that the policy itself says yes to."""
    config = settings(f"{ONE}, model='policy'")
    run = build.setup(config, trains=False)
    opening = np.array(TOKENS.encode("2+2>"), np.int32)
    texts = ("50", "51", "52", "1")
    paths = [
        Path(opening, np.array([*TOKENS.encode(t), TOKENS.eos_id]), (1,), 0, -1.0, True)
        for t in texts
    ]
    with jax.set_mesh(run.mesh):
        _, score = verifier_of(config, "judge", "last")(run, parrot(run.model), None)
        assert score(paths) == [0.0, 1.0, None, 1.0]
    with pytest.raises(UserError, match="rewards.good.form = 'listwise': a path is judged alone"):
        verifier_of(
            settings(f"{ONE.replace('yes_no', 'listwise')}, model='policy'"), "judge", "last"
        )
    with pytest.raises(UserError, match="--by judge: no part of .rewards. has function = 'judge'"):
        verifier_of(load_config(None, RUN), "judge", "last")


def test_paths_are_judged_beside_the_rows_that_they_begin_with():
    """Their prompts are the rows' own, else the text of their opening; nobody else is asked."""
    row = Prompt(5, "2+2>", np.array(TOKENS.encode("2+2>"), np.int32), "4", {"facts": "even"})
    ends = np.array([TOKENS.eos_id])
    paths = [Path(np.array(TOKENS.encode(t)), ends, (1,), 0, 0.0, True) for t in ("2+2>", "3>")]

    def judges(texts, so_far, step, weights):
        stop = np.asarray(texts.rollout.stop)[:, 0]
        assert (stop != StopReason.ABSENT).tolist() == [True, True, True, False]
        assert [prompt.meta for prompt in texts.prompts[:2]] == [row.meta, {}]
        assert [prompt.text for prompt in texts.prompts[:2]] == ["2+2>", "3>"]
        return {"good": np.array([[0.25], [np.nan], [1.0], [0.0]])}, None, {}, None

    run = types.SimpleNamespace(
        tokenizer=TOKENS, data=types.SimpleNamespace(prompts={"eval": [row]})
    )
    assert _by_judge(run, judges, None, (8, 4), [*paths, paths[0]]) == [0.25, None, 1.0]


@pytest.fixture
def checkpoint(tmp_path):
    """The judge of these tests, saved."""
    hf.save(tmp_path / "model", CONFIG, parrot())
    TOKENS.save(tmp_path / "model")
    return tmp_path / "model"


def test_another_checkpoint_judges(checkpoint, tmp_path):
    (tmp_path / "run").mkdir()
    where = f"run.dir={tmp_path / 'run'}"
    run = build.setup(settings(f"{ONE}, model='{checkpoint}'", where))
    with jax.set_mesh(run.mesh):
        judges = judges_of(run, "train")
        assert points_of(judges, ("51", "50"), None)[0] == [1.0, 0.0]
        assert points_of(judges, ("51", "50"), None)[1]["judge_cached"] == 2
    # other weights in the same place are another judge, and a chat template is what it reads
    hf.save(checkpoint, CONFIG, parrot(follows=(">n", "no")))
    TOKENS.save(checkpoint)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}>"
    (checkpoint / "chat_template.jinja").write_text(template)
    again = build.setup(
        settings(f"{ONE}, model='{checkpoint}'}}, second={{{ONE}, model='{checkpoint}'", where)
    )
    assert again.rewards.judges["good"] is again.rewards.judges["second"]  # in memory once
    assert again.rewards.judges["good"].checksum != run.rewards.judges["good"].checksum
    with jax.set_mesh(again.mesh):
        assert points_of(judges_of(again, "train"), ("51", "50"), None)[0] == [0.0, 0.0]


def test_who_can_judge_here_is_said_before_anything_compiles(checkpoint):
    with pytest.raises(UserError, match=r"rewards.good.model = 'start' needs model.path"):
        build.setup(settings(f"{ONE}, model='start'"))
    with pytest.raises(UserError, match=r"good.model = 'gpt' is neither.*or set rewards.good.url"):
        check_judges(settings(f"{ONE}, model='gpt'"), [])
    long = ONE.replace("max_tokens=8", "max_tokens=41")
    with pytest.raises(UserError, match=r"good.max_prompt_tokens = 8 and .* reads 48 tokens"):
        check_judges(settings(f"{long}, model='{checkpoint}'"), [])
    with pytest.raises(UserError, match=r"good.max_prompt_tokens = 8 and .* reads 48 tokens"):
        build.setup(settings(f"{long}, model='policy'"))
    with pytest.raises(UserError, match=r"rewards.good.model.* the training mesh, in one proc"):
        build.setup(settings(f"{ONE}, model='policy'", "sampling.mesh={fsdp=1}"))


@pytest.mark.parametrize("model", ["policy", "start", "other"])
def test_the_shipped_judge_needs_no_server(model):
    changes = ["data.train=x.jsonl", "model.path=x", "rewards.clear.url=''"]
    shipped = load_config(CONFIGS / "judge.toml", [*changes, f"rewards.clear.model={model}"])
    assert judge_of(shipped, "clear").local
    directory = {"policy": None, "start": "x", "other": "other"}[model]
    assert judge_directory(shipped, "clear") == directory


def test_a_run_that_its_policy_judges_repeats(tmp_path):
    """A random policy's reply is no verdict; it is counted and has no other effect."""
    records = []
    for name in ("a", "b"):
        config = settings(f"{ONE}, model='policy'", f"run.dir={tmp_path / name}")
        train(config, echo=lambda line: None)
        records.append(read_jsonl(tmp_path / name / "metrics.jsonl")[-1])
    assert records[0]["judge_calls"] >= records[0]["judge_unreadable"] > 0
    assert not (tmp_path / "a" / "judge").exists()  # its verdicts are another judge's tomorrow
    names = ("loss", "reward", "judge_calls", "judge_unreadable", "reward_missing")
    assert [records[0].get(n) for n in names] == [records[1].get(n) for n in names]


@pytest.mark.slow
def test_plans_are_paid_by_the_solutions_that_the_policy_finds_by_them(tmp_path):
    """PTA-GRPO: three solutions for each plan; nobody is asked about a completion without one."""
    # "?<plan>+</plan>;", or loops around it; "=4" answers every plan.
    follows = ("?<", "<p", "</", "/p", "pl", "la", "an", "n>", ">+", ">;", "+<", "=4")
    tokenizer = CharTokenizer(TOKENS.alphabet + "</")
    sizes = ModelConfig(vocab_size=tokenizer.vocab_size, **SIZES)
    hf.save(tmp_path / "model", sizes, parrot(sizes, follows, tokenizer))
    tokenizer.save(tmp_path / "model")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    rows = [{"question": "2+2?", "answer": "4"}, {"question": "2+3?", "answer": "5"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    form = "function='judge', form='pta_plan', model='policy', votes=3, temperature=1.0"
    limits = "max_prompt_tokens=30, max_tokens=8"
    config = load_config(
        None,
        [
            *(f"model.path={tmp_path / 'model'}", f"data.train={tmp_path / 'rows.jsonl'}"),
            *("data.max_prompt_tokens=8", "train.prompts=2", "train.steps=1", "method=grpo"),
            *("sampling.group=4", "sampling.max_new_tokens=24", "sampling.temperature=1.0"),
            f"rewards={{plan={{{form}, template='{{plan}}=', {limits}}}}}",
            *("checkpoint.every=0", "log.samples_every=1"),
            f"run.dir={tmp_path / 'run'}",
        ],
    )
    train(config, echo=lambda line: None)
    record = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    samples = [s for s in read_jsonl(tmp_path / "run" / "samples.jsonl") if s["step"] == 1]
    plans = [plan_of(s["completion"]) for s in samples]
    assert 0 < sum(map(bool, plans)) < len(plans) == 8
    assert record["judge_calls"] == 3 * len({plan for plan in plans if plan})  # each question once
    for plan, each in zip(plans, samples, strict=True):
        assert each["rewards"]["plan"] == float(bool(plan) and each["answer"] == "4")
