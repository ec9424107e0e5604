"""Tasks: disjoint splits, strict verifiers, pure generators, text that says what the tokens are."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.data.tasks import TASKS, base, get_task
from jrl.errors import UserError
from jrl.models.tokenizer import PAD_ID, STOP_ID

SMALL = {name: {} for name in TASKS}


@functools.cache
def task_of(name):
    return get_task(name, **SMALL[name])


@functools.cache
def problems_of(name, split, count=2048, seed=7):
    task = task_of(name)
    keys = jax.random.split(jax.random.key(seed), count)
    return jax.jit(jax.vmap(functools.partial(task.generate, split=split)))(keys)


def row(tree, i):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[i], tree)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_splits_share_no_problem(name):
    task = task_of(name)
    seen = {
        split: {
            task.tokenizer.decode(tokens[:length])
            for tokens, length in zip(
                np.asarray(problems.tokens), np.asarray(problems.length), strict=True
            )
        }
        for split in ("train", "eval")
        for problems in [problems_of(name, split)]
    }
    assert not seen["train"] & seen["eval"]
    assert len(seen["eval"]) >= 500
    assert len(seen["train"]) > len(seen["eval"])


@pytest.mark.parametrize("name", sorted(TASKS))
def test_solutions_are_right_and_changed_solutions_are_wrong(name):
    task = task_of(name)
    problems = problems_of(name, "train")
    tokens, lengths = jax.jit(jax.vmap(task.solution))(problems)
    verify = jax.jit(jax.vmap(task.verify))
    partial = jax.jit(jax.vmap(task.partial))
    chex.assert_shape(tokens, (2048, task.completion_tokens))
    assert verify(problems, tokens, lengths).tolist() == [1.0] * 2048
    assert partial(problems, tokens, lengths).tolist() == [1.0] * 2048

    # what comes at and past `length` is not read
    place = jnp.arange(task.completion_tokens)[None]
    noise = jnp.where(place >= lengths[:, None], 5, tokens)
    assert verify(problems, noise, lengths).min() == 1.0

    # a token missing at the end, one too many, and a completion without its stop token
    assert verify(problems, tokens, lengths - 1).max() == 0.0
    longer = jnp.pad(tokens, ((0, 0), (0, 1)), constant_values=STOP_ID)
    assert verify(problems, longer, lengths + 1).max() == 0.0
    unstopped = jnp.where(place == lengths[:, None] - 1, 3, tokens)
    assert verify(problems, unstopped, lengths).max() == 0.0
    assert verify(problems, tokens, jnp.zeros_like(lengths)).max() == 0.0
    assert partial(problems, tokens, lengths - 1).max() < 1.0

    # the first token replaced by one that cannot begin a right completion
    wrong = tokens.at[:, 0].set(task.tokenizer.encode("x")[0])
    assert verify(problems, wrong, lengths).max() == 0.0
    points = partial(problems, wrong, lengths)
    assert points.min() >= 0.0
    assert points.max() < 1.0


@pytest.mark.parametrize("name", sorted(TASKS))
def test_generate_is_a_pure_function_of_its_key(name):
    task = task_of(name)
    keys = jax.random.split(jax.random.key(3), 4)
    generate = jax.jit(functools.partial(task.generate, split="eval"))
    together = jax.jit(jax.vmap(generate))(keys)
    for i in range(4):
        chex.assert_trees_all_equal(row(together, i), generate(keys[i]))
    other = jax.jit(jax.vmap(generate))(jax.random.split(jax.random.key(4), 4))
    assert not np.array_equal(other.tokens, together.tokens)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_text_and_tokens_say_the_same(name):
    task = task_of(name)
    problems = problems_of(name, "train")
    for i in range(50):
        problem = row(problems, i)
        text, answer = task.render(problem)
        length = int(problem.length)
        assert 0 < length <= task.prompt_tokens
        assert task.tokenizer.encode(text) == problem.tokens[:length].tolist()
        assert problem.tokens[length:].tolist() == [PAD_ID] * (task.prompt_tokens - length)
        tokens, size = task.solution(problem)
        assert [*task.tokenizer.encode(answer), STOP_ID] == tokens[:size].tolist()
    assert int(problems.tokens.max()) < task.vocab_size


def test_sorting_sorts():
    task = task_of("sorting")
    for i in range(50):
        text, answer = task.render(row(problems_of("sorting", "eval"), i))
        assert text == text[:-1] + ">"
        assert "".join(sorted(text[:-1])) == answer


def test_arithmetic_agrees_with_python():
    task = get_task("arithmetic", difficulty=3, operations="+-*")
    keys = jax.random.split(jax.random.key(0), 200)
    problems = jax.jit(jax.vmap(functools.partial(task.generate, split="train")))(keys)
    seen = set()
    for i in range(200):
        text, answer = task.render(row(problems, i))
        assert str(eval(text[:-1])) == answer
        seen |= set(text) & set("+-*")
    assert seen == set("+-*")


def test_arithmetic_twins_are_in_one_split():
    def pairs(split):
        texts = set()
        for i in range(500):
            text, _ = task_of("arithmetic").render(row(problems_of("arithmetic", split), i))
            if "+" in text:
                texts.add(tuple(sorted(text[:-1].split("+"))))
        return texts

    assert not pairs("train") & pairs("eval")


def test_without_a_candidate_of_the_split_the_fixed_problem_is_returned():
    def draw(key):
        value = jax.random.randint(key, (1,), 0, 1000, jnp.int32)
        return base.Problem(value, jnp.int32(1), value), value

    generate = base.split_generator(draw, candidates=1)
    keys = jax.random.split(jax.random.key(0), 400)
    problems = jax.vmap(functools.partial(generate, split="eval"))(keys)
    assert jax.vmap(base.in_eval)(problems.tokens).all()
    values, counts = np.unique(np.asarray(problems.tokens), return_counts=True)
    assert counts.max() > 200
    assert len(values) > 50
    train = jax.vmap(functools.partial(generate, split="train"))(keys)
    assert not jax.vmap(base.in_eval)(train.tokens).any()


def test_a_space_that_cannot_be_split_is_refused():
    def draw(key):
        value = jnp.zeros((1,), jnp.int32)
        return base.Problem(value, jnp.int32(1), value), value

    with pytest.raises(UserError, match="too few problems"):
        base.split_generator(draw)


@pytest.mark.parametrize("value", [0, 7, -13, 99, 100, -999, 1234, -1230])
def test_number_is_decimal(value):
    text = base.number(jnp.int32(value), 4)
    decoded = task_of("sorting").tokenizer.decode(text.tokens[: int(text.length)])
    assert decoded == str(value)


def test_errors_name_the_key_and_the_choices():
    with pytest.raises(UserError, match=r"task\.name = 'sort'; did you mean 'sorting'"):
        get_task("sort")
    with pytest.raises(UserError, match=r"task\.difficulty = 0; choose a whole number from 3"):
        get_task("sorting", difficulty=0)
    with pytest.raises(UserError, match="split = 'test'; .*choose from eval, train"):
        task_of("sorting").generate(jax.random.key(0), "test")
    with pytest.raises(UserError, match="operations = '/'"):
        get_task("arithmetic", operations="/")


@pytest.mark.parametrize(
    ("name", "difficulty"), [("sorting", 3), ("arithmetic", 1), ("sorting", 32), ("arithmetic", 4)]
)
def test_extreme_difficulties_work(name, difficulty):
    task = get_task(name, difficulty=difficulty)
    problem = jax.jit(functools.partial(task.generate, split="eval"))(jax.random.key(0))
    assert task.verify(problem, *task.solution(problem)) == 1.0
