"""Rows whose own solution is judged wrong are named when data is read, and judged once."""

import json

import numpy as np
import pytest

from jrl.config import load_config
from jrl.errors import UserError
from jrl.rewards import make_reward
from jrl.run import reference_check
from jrl.run.reference_check import check_references, check_verifiers
from jrl.types import Prompt
from jrl.verifiers import code as programs

RIGHT = "```python\nprint(2 * int(input()))\n```"


def prompts(*rows, answer=None):
    return {
        "train": [
            Prompt(i, "?", np.zeros(1, np.int32), row.get("answer", answer), row)
            for i, row in enumerate(rows)
        ]
    }


def config(part, *more):
    return load_config(None, ["data.train=x.jsonl", f"rewards={part}", *more])


def doubled(solution, outputs=("2", "4"), **more):
    tests = {"inputs": ["1", "2"], "outputs": list(outputs)}
    return {"input_output": json.dumps(tests), "solution": solution, **more}


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    monkeypatch.setenv("JRL_CACHE_DIR", str(tmp_path))
    return tmp_path / "references"


def test_programs_that_fail_their_tests_are_named_and_right_ones_run_once(memory, monkeypatch):
    wrong, bare = doubled(RIGHT, ("2", "5")), {"input_output": "{}"}
    body = {"entry_point": "f", "test": "def check(f):\n    assert f(1) == 2\n",
            "canonical_solution": "    return 2 * x\n"}  # fmt: skip
    data = prompts(doubled(json.dumps([RIGHT, "no"])), wrong, bare, body)
    data["train"][3] = Prompt(3, "", np.zeros(1, np.int32), None, body, question="def f(x):\n")
    match = (
        r"rewards.code: 1 of 3 rows have a solution .*check_rows = 0 to check none\n"
        r"  data.train, row 2: fails tests \[1\].*test 1 expects '5' and has ok '4"
    )
    with pytest.raises(UserError, match=match):
        check_references(config("{code={}}"), data)
    assert len(memory.read_text().split()) == 2
    judge_calls = []
    judge = programs.judge
    monkeypatch.setattr(programs, "judge", lambda *a, **k: judge_calls.append(a) or judge(*a, **k))
    dropping = config("{code={}}", "reward_pool.on_error=drop")
    (note,) = check_references(dropping, data)
    assert "data.train, row 2" in note
    assert len(judge_calls) == 1  # the wrong one alone
    assert check_references(config("{code={check_rows=1}}"), data) == []
    assert check_references(config("{code={check_rows=0}}"), data) == []
    where = "{code={where={input_output='{}'}}}"
    assert check_references(config(where), data) == []
    assert len(judge_calls) == 1
    with pytest.raises(UserError, match=r"check_solution = 'entry_point'.*|fails tests"):
        check_references(config("{code={check_solution='entry_point'}}"), data)


def test_no_more_than_a_few_rows_are_named():
    data = prompts(*[doubled("print(input())", name=i) for i in range(7)])
    with pytest.raises(UserError, match=r"7 of 7 rows") as error:
        check_references(config("{code={}}"), data)
    assert len(str(error.value).splitlines()) == 1 + 5 + 1
    assert str(error.value).endswith("and 2 more")


def test_each_process_runs_a_share_and_all_hear_of_every_row(monkeypatch):
    """Two processes, played one after the other: what they tell is what one process says."""
    data = prompts(
        doubled("print(input())", name="a"),
        doubled(RIGHT, name="b"),
        doubled("print(3)", name="c"),
        doubled("print(0)", name="d"),
    )
    dropping = config("{code={}}", "reward_pool.on_error=drop")
    alone = check_references(dropping, data)
    sent, judge_calls, judge = [], [], programs.judge
    monkeypatch.setattr(programs, "judge", lambda *a, **k: judge_calls.append(a) or judge(*a, **k))
    monkeypatch.setattr(reference_check.jax, "process_count", lambda: 2)
    monkeypatch.setattr(reference_check, "all_say", lambda value: sent.append(value) or [])
    shares = []
    for process in range(2):
        monkeypatch.setattr(reference_check.jax, "process_index", lambda i=process: i)
        assert check_references(dropping, data) == []
        shares.append([row for row, _ in sent[-1]])
    assert shares == [["data.train, row 1", "data.train, row 3"], ["data.train, row 4"]]
    assert len(judge_calls) == 3  # the right one is remembered, and no row is run twice
    received = json.loads(json.dumps(sent))
    monkeypatch.setattr(reference_check, "all_say", lambda value: received)
    assert check_references(dropping, data) == alone


def test_gold_queries_that_fail_or_give_other_rows_are_named():
    schema = "CREATE TABLE t (a INTEGER); INSERT INTO t VALUES (1), (2);"
    row = {"schema": schema, "answer": "SELECT count(*) FROM t"}
    bad = row | {"answer": "SELECT b FROM t"}
    data = prompts(row, bad, row | {"rows": [[3]]}, row | {"rows": [[2]]})
    with pytest.raises(UserError) as error:
        check_references(config("{sql={rows_column='rows'}}"), data)
    head, failed, other = str(error.value).splitlines()
    assert head.startswith("rewards.sql: 2 of 4 rows")
    assert failed.startswith("  data.train, row 2:")
    assert "no such column: b" in failed
    assert other == "  data.train, row 3: the gold query gives [(2,)], not [(3,)]"


def test_an_option_that_is_none_is_said():
    with pytest.raises(UserError, match=r"check_rows = -1: give 0 for none"):
        programs.code([], check_rows=-1)


def test_rows_that_ask_for_what_is_none_are_named_before_a_run():
    fits = {"json_schema": {"type": "integer"}}
    never = {"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}
    data = prompts(fits, never, {})
    with pytest.raises(UserError) as error:
        check_verifiers(config("{json_schema={}}"), data)
    head, *lines = str(error.value).splitlines()
    assert head.startswith("rewards.json_schema: 2 of 3 rows ask for what it cannot judge; repair")
    assert "data.train, row 2" in lines[0]
    assert "minimum = 5 above maximum = 3" in lines[0]
    assert "row 3" in lines[1]
    assert "is empty" in lines[1]
    (note,) = check_verifiers(config("{json_schema={}}", "reward_pool.on_error=drop"), data)
    assert note == str(error.value)
    assert (
        check_verifiers(config("{json_schema={schema={type='string'}}}"), prompts(fits, {})) == []
    )
    strange = prompts({"instruction_id_list": ["punctuation:no_coma"], "kwargs": [{}]})
    with pytest.raises(UserError, match=r"row 1: .*no_coma"):
        check_verifiers(config("{instructions={}}"), strange)


def test_rows_of_a_kind_that_no_part_judges_are_named_before_a_run():
    data = prompts({"kind": "math"}, {"kind": "code"}, {})
    two = "math={},exact={weight=0},"
    by = "v={combine='by_kind',of=['math','exact'],column='kind',cases={math='math'%s}%s}"
    match = (
        r"rewards.v.cases names no part for 2 of 3 rows \(it has math\); add .*others.*\n"
        r"  data.train, row 2: kind = 'code'\n  data.train, row 3: kind = None$"
    )
    with pytest.raises(UserError, match=match):
        check_verifiers(config("{" + two + by % ("", "") + "}"), data)
    for others in ("none", "exact"):
        chosen = by % ("", f",others='{others}'")
        assert check_verifiers(config("{" + two + chosen + "}"), data) == []
    where = "{math={where={kind='math'}},exact={where={kind=['code','words']}}}"
    unfit = "{math={},exact={where={kind='word'}}}"
    with pytest.raises(
        UserError, match=r"exact.where = {'kind': 'word'} fits no row.*'math'; kind"
    ):
        check_verifiers(config(unfit), data)
    unfit = unfit.replace("kind", "knd")
    with pytest.raises(UserError, match=r"exact.where = 'knd': the data has no such column; there"):
        check_verifiers(config(unfit), data)
    with pytest.raises(UserError, match=r"1 of 3 rows are in the where of no part.*\n.*row 3: kin"):
        check_verifiers(config(where), data)
    assert check_verifiers(config(where), prompts({"kind": "math"}, {"kind": "words"})) == []
    assert check_verifiers(config("{math={where={kind='math'}},exact={}}"), data) == []


def test_rows_without_the_number_that_a_combination_reads_are_named_before_a_run():
    by = "{math={},v={combine='%s',of=['math'],column='w'}}"
    data = prompts({"w": 2.0}, {"w": "3"}, {"w": None}, {})
    assert check_verifiers(config(by % "row_weight"), data) == []
    match = r"rewards.v: 1 of 2 rows have no number.*\n  data.train, row 2: column = 'w': a row"
    wrong = (("row_weight", "heavy"), ("row_weight", [0.5, 0.5]), ("bounded", [0.5, "x"]))
    for combine, value in wrong:
        with pytest.raises(UserError, match=match):
            check_verifiers(config(by % combine), prompts({"w": 2.0}, {"w": value}))
    with pytest.raises(UserError, match=r"rewards.v.column = 'w': the data has no such column"):
        check_verifiers(config(by % "row_weight"), prompts({"u": 1}))


SHOWN = "fails tests [1] (counted from 0): test 1 expects '5'"


@pytest.mark.parametrize(
    ("part", "column", "complaint"),
    [
        ("prime_code={continuous=true}", "solution", SHOWN),
        ("sandbox_fusion={timeout=3}", "solution", SHOWN),
        ("default_compute_score={}", "solution", SHOWN),
        ("code_speed={repeats=2}", "input", "its program in 'input' passes 2 of 4 runs"),
    ],
    ids=lambda value: str(value).partition("=")[0][:12],
)
def test_other_functions_that_run_programs_find_such_rows_too(part, column, complaint):
    rows = [doubled(RIGHT), doubled(RIGHT, ("2", "5")), {"data_source": "openai/gsm8k"}]
    rows = [{"data_source": "taco", column: row.pop("solution", None)} | row for row in rows]
    rows = rows if part.startswith("default") else rows[:2]
    with pytest.raises(UserError) as error:
        check_references(config("{" + part + "}"), prompts(*rows))
    head, line = str(error.value).splitlines()
    assert head.startswith(f"rewards.{part.partition('=')[0]}: 1 of 2 rows")
    assert line.startswith("  data.train, row 2: ")
    assert complaint in line
    none = part.replace("{", "{check_rows=0,").replace(",}", "}")
    assert check_references(config("{" + none + "}"), prompts(*rows)) == []
    with pytest.raises(UserError, match=r"check_rows = -1: give 0 for none"):
        make_reward(part.partition("=")[0], check_rows=-1)


def test_a_row_without_a_slow_program_is_named():
    data = prompts(doubled(RIGHT))
    with pytest.raises(UserError, match=r"row 1: .*has no program in 'input'; name the column"):
        check_references(config("{code_speed={}}"), data)


@pytest.mark.parametrize("part", ["code={}", "code_speed={repeats=1}"])
def test_a_busy_machine_makes_no_solution_wrong(part, monkeypatch):
    """A program that ran out of time runs again with more, and has its limits in processor time."""
    data, limits, used = prompts(doubled(RIGHT) | {"input": RIGHT}), [], [5.0, 0.2]

    def judge(program, tests, language, testing, **_):
        limits.append(testing.total_seconds)
        if len(limits) % 2:
            return programs.Verdicts([True, False], ["ok ''", "timeout ''"], seconds=(0.1, 0.2))
        return programs.Verdicts([True] * 2, ["ok ''"] * 2, seconds=(0.1, used.pop(0)))

    monkeypatch.setattr(programs, "judge", judge)
    with pytest.raises(UserError, match="1 of 1 rows"):  # 5 s of the 4 s that a test has
        check_references(config("{" + part + "}"), data)
    assert check_references(config("{" + part + "}"), data) == []
    assert [second / first for first, second in (limits[:2], limits[2:])] == [4, 4]


def test_a_compiler_counts_where_a_solution_had_no_time(monkeypatch):
    """Its processor time is within the limits, too, or each program of the run would time out."""
    testing = programs.testing_of({})
    short = programs.Verdicts([False], ["timeout ''"], seconds=(1.0,))
    for compiling, expected in ((3.0, [True]), (9.0, [False])):
        again = programs.Verdicts([True], ["ok ''"], seconds=(1.0,), compiling=compiling)
        answers = iter([short, again])
        monkeypatch.setattr(programs, "judge", lambda *a, answers=answers: next(answers))
        assert programs.judge_solution("x", None, "go", testing).passed == expected
