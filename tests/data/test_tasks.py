"""Tasks: disjoint splits, strict verifiers, pure generators, text that says what the tokens are."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.data.tasks import TASKS, base, get_task
from jrl.data.tasks.countdown import read_expression
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
    texts = {
        split: {
            task.tokenizer.decode(tokens[:length])
            for tokens, length in zip(
                np.asarray(problems.tokens), np.asarray(problems.length), strict=True
            )
        }
        for split in ("train", "eval")
        for problems in [problems_of(name, split)]
    }
    assert not texts["train"] & texts["eval"]
    assert len(texts["eval"]) >= 500
    assert len(texts["train"]) > len(texts["eval"])


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
    positions = jnp.arange(task.completion_tokens)[None]
    noise = jnp.where(positions >= lengths[:, None], 5, tokens)
    assert verify(problems, noise, lengths).min() == 1.0

    # a token missing at the end, one too many, and a completion without its stop token
    assert verify(problems, tokens, lengths - 1).max() == 0.0
    longer = jnp.pad(tokens, ((0, 0), (0, 1)), constant_values=STOP_ID)
    assert verify(problems, longer, lengths + 1).max() == 0.0
    unstopped = jnp.where(positions == lengths[:, None] - 1, 3, tokens)
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
    together = problems_of(name, "eval")
    generate = jax.jit(functools.partial(task.generate, split="eval"))
    keys = jax.random.split(jax.random.key(7), 2048)
    for i in (0, 1, 2047):
        chex.assert_trees_all_equal(row(together, i), generate(keys[i]))
    assert not np.array_equal(generate(jax.random.key(8)).tokens, together.tokens[0])


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
    operators = set()
    for i in range(200):
        text, answer = task.render(row(problems, i))
        assert str(eval(text[:-1])) == answer
        operators |= set(text) & set("+-*")
    assert operators == set("+-*")


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
    def draw(bits):
        value = base.integers(bits, 0, 1000)
        return base.Problem(value, jnp.int32(1), value), value

    generate = base.split_generator(draw, 1, candidates=1)
    keys = jax.random.split(jax.random.key(0), 400)
    problems = jax.vmap(functools.partial(generate, split="eval"))(keys)
    assert jax.vmap(base.in_eval)(problems.tokens).all()
    values, counts = np.unique(np.asarray(problems.tokens), return_counts=True)
    assert counts.max() > 200
    assert len(values) > 50
    train = jax.vmap(functools.partial(generate, split="train"))(keys)
    assert not jax.vmap(base.in_eval)(train.tokens).any()


def test_a_space_that_cannot_be_split_is_refused():
    def draw(bits):
        value = jnp.zeros((1,), jnp.int32)
        return base.Problem(value, jnp.int32(1), value), value

    with pytest.raises(UserError, match="too few problems"):
        base.split_generator(draw, 1)


def test_chain_agrees_with_python():
    for i in range(100):
        text, answer = task_of("chain").render(row(problems_of("chain", "eval"), i))
        value, results = int(text[0]), []
        for sign, operand in zip(text[1:-1:2], text[2:-1:2], strict=True):
            value = eval(f"{value}{sign}{operand}")
            results.append(str(value))
            assert 0 <= value <= 99
        assert ",".join(results) == answer


def test_sequences_follow_one_of_the_rules_and_no_prompt_has_two_answers():
    task = get_task("sequence", difficulty=4, next_terms=2)
    keys = jax.random.split(jax.random.key(1), 1000)
    problems = jax.jit(jax.vmap(functools.partial(task.generate, split="train")))(keys)
    rules, answers = set(), {}
    for i in range(1000):
        text, answer = task.render(row(problems, i))
        assert answers.setdefault(text, answer) == answer
        terms = np.array([int(t) for t in f"{text[:-1]},{answer}".split(",")])
        steps = np.diff(terms)
        holds = [
            len(set(steps)) == 1,
            len(set(np.diff(steps))) == 1 and len(set(steps)) > 1,
            len(set(steps[::2])) == len(set(steps[1::2])) == 1 and len(set(steps)) > 1,
            (terms[2:] == terms[1:-1] + terms[:-2]).all(),
        ]
        assert sum(holds) == 1
        rules.add(holds.index(True))
    assert rules == {0, 1, 2, 3}


def left_to_right(expression, numbers):
    """The value of a legal expression, or None, in plain Python."""
    parts = re.split(r"([-+*])", expression)
    left = list(numbers)
    value, sign = 0, "+"
    for i, part in enumerate(parts):
        if i % 2:
            sign = part
            continue
        if not re.fullmatch("[1-9][0-9]*", part) or int(part) not in left:
            return None
        left.remove(int(part))
        value = {"+": value + int(part), "-": value - int(part), "*": value * int(part)}[sign]
    return value


def test_countdown_agrees_with_a_reader_in_python():
    task = task_of("countdown")
    problems = row(problems_of("countdown", "train"), slice(0, 400))
    rng = np.random.default_rng(0)
    texts, right, legal = [], [], []
    for i in range(400):
        prompt, answer = task.render(row(problems, i))
        numbers = [int(n) for n in prompt.split(":")[0].split(",")]
        text = list(answer)
        for _ in range(rng.integers(0, 3)):
            text[rng.integers(len(text))] = rng.choice(list("123456789+-*0"))
        text = "".join(text)[: task.completion_tokens - 1]
        value = left_to_right(text, numbers)
        texts.append([*task.tokenizer.encode(text), STOP_ID])
        legal.append(value is not None)
        right.append(value == int(prompt[:-1].split(":")[1]))
    tokens = jnp.array([t + [PAD_ID] * (task.completion_tokens - len(t)) for t in texts])
    lengths = jnp.array([len(t) for t in texts])
    assert 50 < sum(right) < sum(legal) < 350
    assert jax.jit(jax.vmap(task.verify))(problems, tokens, lengths).tolist() == right
    expected = np.where(right, 1.0, np.where(legal, 0.2, 0.0)).astype(np.float32)
    np.testing.assert_array_equal(
        jax.jit(jax.vmap(task.partial))(problems, tokens, lengths), expected
    )


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3*5+7", 22),
        ("7+3*5", 50),
        ("7", 7),
        ("3*5+7+7", None),
        ("35+7", None),
        ("03+7", None),
        ("3++7", None),
        ("+3", None),
        ("3+", None),
        ("", None),
        ("4", None),
        ("3 + 7", None),
    ],
)
def test_countdown_expressions(expression, value):
    tokens = jnp.array([*task_of("countdown").tokenizer.encode(expression), STOP_ID])
    result, legal = read_expression(jnp.array([3, 7, 5]), tokens, jnp.int32(len(tokens)))
    assert bool(legal) == (value is not None)
    if legal:
        assert int(result) == value


@pytest.mark.parametrize("value", [0, 7, -13, 99, 100, -999, 1234, -1230])
def test_number_is_decimal(value):
    tokens, length = base.join(6, base.number(jnp.int32(value), 4), base.text(base.ARROW))
    assert task_of("sorting").tokenizer.decode(tokens) == f"{value}>"
    assert int(length) == len(str(value)) + 1


def test_a_shipped_task_is_made_once_for_the_same_options():
    task = get_task("sorting", difficulty=3)
    assert get_task("sorting", difficulty=3) is task
    assert get_task("sorting", difficulty=4) is not task
    with pytest.raises(UserError, match=r"data\.difficulty = \[3\]; choose an integer"):
        get_task("sorting", difficulty=[3])


def test_errors_name_the_key_and_the_choices():
    with pytest.raises(UserError, match=r"data\.task = 'sort'; did you mean 'sorting'"):
        get_task("sort")
    with pytest.raises(UserError, match=r"data\.difficulty = 0; choose an integer from 3"):
        get_task("sorting", difficulty=0)
    with pytest.raises(UserError, match="split = 'test'; .*choose from eval, train"):
        task_of("sorting").generate(jax.random.key(0), "test")
    with pytest.raises(UserError, match="operations = '/'"):
        get_task("arithmetic", operations="/")


@pytest.mark.parametrize(
    ("name", "difficulty"),
    [
        ("sorting", 3),
        ("arithmetic", 1),
        ("chain", 2),
        ("countdown", 2),
        ("countdown", 6),
    ],
)
def test_extreme_difficulties_work(name, difficulty):
    task = get_task(name, difficulty=difficulty)
    problem = jax.jit(functools.partial(task.generate, split="eval"))(jax.random.key(0))
    assert task.verify(problem, *task.solution(problem)) == 1.0
