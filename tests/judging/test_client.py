"""The client of judges against a server that is slow, down, limited, broken, or lies."""

import contextlib
import json
import math
import socket
import threading
import time

import pytest
from judge_server import judge_server, reply_body

from jrl.config.judge import JudgeTable, checked
from jrl.errors import UserError
from jrl.judging import client as judge_client
from jrl.judging import limits as judge_limits
from jrl.judging.cache import QuestionVote
from jrl.judging.client import JudgeClient
from jrl.judging.limits import COUNTS, QuestionBatch
from jrl.rewards.replies import read_score
from jrl.rewards.verdicts import Question


def questions(*texts, vote=0):
    def read(reply):
        return read_score(reply, 0, 10)

    return [QuestionVote(Question(({"role": "user", "content": t},), read), vote) for t in texts]


def answers(text, *right, reads):
    """The same question for rows of these right answers; ``reads`` gets the answer at each."""

    def row(answer):
        def read(reply):
            reads.append(answer)
            return float(reply == answer)

        return QuestionVote(Question(({"role": "user", "content": text},), read))

    return [row(answer) for answer in right]


def client(url, cache=None, **options):
    table = checked(JudgeTable, "rewards.good", {"url": url, "model": "m"} | options)
    return JudgeClient(table, "rewards.good", cache=cache)


def counted(counts, **expected):
    """Exactly these counts are above 0."""
    assert {k: v for k, v in counts.items() if v} == {f"judge_{k}": v for k, v in expected.items()}
    assert set(counts) == set(COUNTS)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(judge_client, "_FIRST_WAIT", 0.001)


def test_requests_overlap_and_equal_ones_are_sent_once(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    together = threading.Barrier(3)  # passes if three requests are under way at once

    def answer(body, number):
        together.wait(20)
        return f"Score: {len(body['messages'][-1]['content'])}"

    with judge_server(answer) as (url, bodies):
        options = {"key_variable": "JUDGE_KEY", "fields": {"seed": 3}, "at_once": 3}
        mine = client(url, **options)
        verdicts, counts = mine.verdicts(questions("a", "bb", "a", "ccc"))
    assert verdicts == [0.1, 0.2, 0.1, 0.3]
    counted(counts, calls=3)
    assert {b["authorization"] for b in bodies} == {"Bearer sesame"}
    assert {(b["model"], b["temperature"], b["seed"], b["max_tokens"]) for b in bodies} == {
        ("m", 0.0, 3, 512)
    }


def test_a_failure_that_passes_is_tried_again():
    statuses = [500, 503, 429]

    def answer(body, number):
        if number < len(statuses):
            return statuses[number], {}, "not now"
        return "Score: 5"

    with judge_server(answer) as (url, _):
        verdicts, counts = client(url).verdicts(questions("a"))
        assert verdicts == [0.5]
        counted(counts, calls=4, retries=3)
        statuses[:] = [500] * 99
        verdicts, counts = client(url, retries=2).verdicts(questions("b"))
    assert verdicts == [None]
    counted(counts, calls=3, retries=2, failures=1)


def test_an_error_in_a_body_of_status_200_is_one_of_its_code():
    def body(code):
        return 200, {}, json.dumps({"error": {"code": code, "message": "no provider"}})

    replies = [body(429), body(502), "Score: 5"]
    with judge_server(lambda _, number: replies[number]) as (url, _):
        verdicts, counts = client(url).verdicts(questions("a"))
    assert verdicts == [0.5]
    counted(counts, calls=3, retries=2)
    with judge_server(lambda *_: body(401)) as (url, _):
        verdicts, counts = client(url).verdicts(questions("a"))
        counted(counts, calls=1, failures=1)
        with pytest.raises(UserError, match="refuses model 'm' .401 no provider"):
            client(url).probe()
    with judge_server(lambda *_: body("odd")) as (url, _):
        verdicts, counts = client(url).verdicts(questions("a"))
    assert verdicts == [None]
    counted(counts, calls=1, unreadable=1)


def test_a_number_that_the_limit_of_tokens_cut_is_no_verdict(tmp_path):
    """'Score: 1' may have been 'Score: 10'."""

    def answer(body, number):
        text, _, reason = body["messages"][-1]["content"].partition("|")
        return 200, {}, reply_body(text, finish_reason=reason or None)

    texts = ("Score: 1|length", "Score: 1.|length", "Score: 1\n|length", "[[1]]|length")
    with judge_server(answer) as (url, _):
        cached = client(url, cache=tmp_path)
        verdicts, counts = cached.verdicts(questions(*texts, "Score: 1|stop", "Score: 1"))
        assert verdicts == [None, None, 0.1, 0.1, 0.1, 0.1]
        counted(counts, calls=6, unreadable=2)
        verdicts, counts = cached.verdicts(questions(*texts))  # the cache has no cut ones
        assert verdicts == [None, None, 0.1, 0.1]
        counted(counts, calls=2, cached=2, unreadable=2)


def test_what_is_refused_is_not_tried_again():
    with judge_server(lambda body, number: (400, {}, "too long")) as (url, _):
        verdicts, counts = client(url).verdicts(questions("a"))
    assert verdicts == [None]
    counted(counts, calls=1, failures=1)


@pytest.mark.parametrize(
    ("after", "least"), [("0.3", 0.3), ("Mon, 01 Jan 2001 00:00:00 GMT", 0), ("soon", 0)]
)
def test_retry_after_is_honoured(after, least):
    times = []

    def answer(body, number):
        times.append(time.monotonic())
        return (429, {"Retry-After": after}, "") if number == 0 else "Score: 5"

    with judge_server(answer) as (url, _):
        verdicts, counts = client(url).verdicts(questions("a"))
    assert verdicts == [0.5]
    counted(counts, calls=2, retries=1)
    assert times[1] - times[0] >= least


def test_what_a_server_asks_for_has_a_limit():
    assert judge_client._retry_after("86400") == judge_client._LONGEST_HOLD
    table = checked(JudgeTable, "k", {"url": "http://a/v1", "model": "m", "requests_per_minute": 6})
    assert JudgeClient(table, "k", processes=4)._pace._gap == 40.0  # all of them send 6


def test_each_vote_has_a_seed_of_its_own():
    with judge_server(lambda body, number: "Score: 5") as (url, bodies):
        mine = client(url, fields={"seed": 3})
        mine.verdicts([*questions("a"), *questions("a", vote=2)])
    assert sorted(body["seed"] for body in bodies) == [3, 5]


def test_one_who_waits_too_long_loses_its_samples_alone():
    with judge_server(lambda b, n: (429, {"Retry-After": "86400"}, "")) as (url, _):
        verdicts, counts = client(url, at_once=1).verdicts(questions("a", "b"))
    assert verdicts == [None, None]
    counted(counts, calls=1, timeouts=2)  # nobody else was sent to be refused


@pytest.mark.parametrize(
    "response",
    [
        (200, {}, "{"),
        (200, {}, "[]"),
        (200, {}, '{"choices": []}'),
        (200, {}, '{"choices": [{"message": {"content": null}}]}'),
        (200, {}, reply_body("x" * (judge_client._LARGEST + 1) + "\nScore: 5")),
        "What a fine answer, 10 of 10 for me!",
        "Score: 1e9",
        "Score: 10\nScore: 99",
    ],
)
def test_what_cannot_be_read_is_counted_and_no_number(response, tmp_path):
    with judge_server(lambda body, number: response) as (url, _):
        mine = client(url, cache=tmp_path / "cache")
        for _ in range(2):  # nor is it kept
            verdicts, counts = mine.verdicts(questions("a"))
            assert verdicts == [None]
            counted(counts, calls=1, unreadable=1)


def test_a_reader_that_raises_costs_its_own_question():
    """In a thread its error would be lost, and the question waited for until the time is over."""

    def raises(reply):
        return 1 / 0

    (fine,) = questions("a")
    with judge_server(lambda body, number: "Score: 10") as (url, _):
        mine = client(url, seconds=20.0)
        begun = time.monotonic()
        same_words = fine.question._replace(read=raises)
        asked = [fine, QuestionVote(same_words), QuestionVote(same_words, vote=1)]
        verdicts, counts = mine.verdicts(asked)
        assert time.monotonic() - begun < 10
    assert verdicts == [1.0, None, None]
    counted(counts, calls=2, unreadable=1)


def test_slow_ones_cost_their_own_samples():
    go_on = threading.Event()

    def answer(body, number):
        if body["messages"][-1]["content"] == "slow":
            go_on.wait(60)
        return "Score: 5"

    try:
        with judge_server(answer) as (url, _):
            # the limit of the batch: what is late has no verdict, the others do
            verdicts, counts = client(url, seconds=3).verdicts(questions("slow", "a", "b"))
            assert verdicts == [None, 0.5, 0.5]
            counted(counts, calls=3, timeouts=1)
            # the limit of a request: it is tried again
            verdicts, counts = client(url, timeout=0.3, retries=1).verdicts(questions("slow"))
            assert verdicts == [None]
            counted(counts, calls=2, retries=1, failures=1)
            go_on.set()
    finally:
        go_on.set()


def test_requests_per_minute():
    times = []

    def answer(body, number):
        times.append(time.monotonic())
        return "Score: 5"

    with judge_server(answer) as (url, _):
        verdicts, _ = client(url, requests_per_minute=300).verdicts(questions("a", "b", "c"))
        assert verdicts == [0.5] * 3
        # Two gaps of 0.2 s; the first request may arrive late, unlimited ones come at once.
        assert times[2] - times[0] >= 0.2
        slow = client(url, requests_per_minute=1, seconds=5)
        verdicts, counts = slow.verdicts(questions("d", "e"))
        assert sorted(verdicts, key=str) == [0.5, None]
        counted(counts, calls=1, timeouts=1)  # its turn would come too late


def test_the_cache_is_one_of_several_clients(tmp_path):
    with judge_server(lambda body, number: f"Score: {number}") as (url, _):
        options = {"cache": tmp_path / "cache", "temperature": 1.0}
        first, counts = client(url, **options).verdicts(questions("a"))
        counted(counts, calls=1)
        again, counts = client(url, **options).verdicts(questions("a", "a"))
        counted(counts, cached=1)
        assert again == first * 2
        (file,) = (tmp_path / "cache").rglob("*.json")
        same_name = client(url.replace("127.0.0.1", "localhost"), **options)
        _, counts = same_name.verdicts(questions("a"))  # another server, by the model's name
        counted(counts, calls=1)
        for other in ({"model": "n"}, {"temperature": 0.5}, {"fields": {"seed": 1}}):
            _, counts = client(url, **options | other).verdicts(questions("a"))
            counted(counts, calls=1)
        _, counts = client(url, **options).verdicts(questions("a", vote=1))
        counted(counts, calls=1)
        file.write_text('{"reply": "Sco')  # cut, as of a full disk
        _, counts = client(url, **options).verdicts(questions("a"))
        counted(counts, calls=1)
        files = [f for f in (tmp_path / "cache").rglob("*") if f.is_file()]
        assert len(files) == 6
        assert {f.suffix for f in files} == {".json"}


def test_a_limit_of_rate_costs_no_question_its_attempts():
    """Others are answered meanwhile, so that it is not the question's fault."""
    arrived, others = threading.Condition(), []
    refusals = []

    def answer(body, number):
        text = body["messages"][-1]["content"]
        with arrived:
            if text == "0" and len(refusals) < 6:
                # At most three are under way beside it, so that the fourth comes after a reply.
                last = len(others) + 4
                arrived.wait_for(lambda: len(others) >= last, 60)
                refusals.append(text)
                return 429, {}, ""
            others.append(text)
            arrived.notify_all()
        return "Score: 5"

    texts = [str(i) for i in range(40)]
    with judge_server(answer) as (url, _):
        verdicts, counts = client(url, at_once=2, retries=2).verdicts(questions(*texts))
    assert verdicts == [0.5] * len(texts)
    counted(counts, calls=46, retries=6)


def test_a_judge_that_works_on_a_long_reply_and_refuses_others_is_not_given_up():
    """Its first reply comes after more refusals than a question has attempts."""
    arrived, refused = threading.Event(), threading.Event()
    refusals = []

    def answer(body, number):
        if body["messages"][-1]["content"] == "long":
            arrived.set()
            refused.wait(60)
            return "Score: 5"
        arrived.wait(60)
        if len(refusals) < 6:
            refusals.append(429)
            return 429, {}, ""
        refused.set()
        return "Score: 5"

    with judge_server(answer) as (url, _):
        mine = client(url, at_once=2, retries=2)
        verdicts, counts = mine.verdicts(questions("long", "short"))
    assert verdicts == [0.5, 0.5]
    counted(counts, calls=8, retries=6)


def test_others_that_were_sent_later_do_not_show_that_a_judge_works():
    batch = QuestionBatch(4, 0)
    batch._sent = {"a": 5.0, "b": 6.0, "c": math.inf}  # "c" is about to be sent
    assert not batch.works_on_others("a", math.inf)
    assert batch.works_on_others("b", math.inf)
    assert not batch.works_on_others("b", 4.0)  # what was sent since it failed may be refused, too
    assert batch.works_on_others("b", 5.5)
    assert judge_limits.Question("b", None).again(0, 7.0).failed == 7.0


def closed_port():
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return each.getsockname()[1]


def test_a_judge_that_is_down_costs_its_own_samples():
    verdicts, counts = client(f"http://127.0.0.1:{closed_port()}/v1", retries=1).verdicts(
        questions("a", "b")
    )
    assert verdicts == [None, None]
    counted(counts, calls=4, retries=2, failures=2)


def test_the_probe_says_who_does_not_answer():
    with pytest.raises(UserError, match=r"rewards.good.url = 'http.*does not answer \(.*refused"):
        client(f"http://127.0.0.1:{closed_port()}/v1").probe()
    replies = {
        401: "refuses model 'm' .401 Unauthorized: no such key.*check rewards.good.url",
        404: "refuses model 'm' .404 Not Found",
        200: "not as OpenAI's API does",
    }
    for status, message in replies.items():
        reply = (status, {}, "no such key")
        with (
            judge_server(lambda b, n, reply=reply: reply) as (url, _),
            pytest.raises(UserError, match=message),
        ):
            client(url).probe()
    for fine in ("yes", (503, {}, ""), (429, {}, "")):
        with judge_server(lambda b, n, fine=fine: fine) as (url, bodies):
            client(url).probe()
            assert len(bodies) == 1
    with pytest.raises(UserError, match=r"rewards.good.key_variable names 'NOT_THERE'"):
        client("http://127.0.0.1/v1", key_variable="NOT_THERE")
    with pytest.raises(UserError, match=r"rewards.good.url = 'localhost'; write an address"):
        client("localhost")


def test_another_thread_may_end_it():
    go_on = threading.Event()

    def answer(body, number):
        go_on.wait(60)
        return "Score: 5"

    with judge_server(answer) as (url, bodies):
        mine, results = client(url), []
        thread = threading.Thread(target=lambda: results.append(mine.verdicts(questions("a"))))
        thread.start()
        while not bodies:
            time.sleep(0.01)
        mine.stop()
        thread.join(20)
        go_on.set()
    ((verdicts, counts),) = results
    assert verdicts == [None]
    counted(counts, calls=1, timeouts=1)


def test_a_question_that_waits_for_its_repetition_holds_up_no_other(monkeypatch):
    monkeypatch.setattr(judge_client, "_FIRST_WAIT", 1.0)
    order = []

    def answer(body, number):
        order.append(body["messages"][-1]["content"])
        return "Score: 5" if order[-1] != "a" or order.count("a") > 1 else (500, {}, "")

    with judge_server(answer) as (url, _):
        verdicts, counts = client(url, at_once=1).verdicts(questions("a", "b", "c"))
    assert verdicts == [0.5] * 3
    counted(counts, calls=4, retries=1)
    assert order == ["a", "b", "c", "a"]


def test_questions_are_asked_before_all_are_there():
    with judge_server(lambda body, number: "Score: 5") as (url, bodies):
        mine = client(url)
        mine.begin(questions("a", "gone"))
        mine.begin(questions("a", "b"))
        while len(bodies) < 3:  # nobody waits for them
            time.sleep(0.01)
        verdicts, counts = mine.verdicts(questions("b", "a", "c"))
        assert verdicts == [0.5] * 3
        counted(counts, calls=4)
        mine.begin(questions("d"))
        mine.stop()  # what was begun is dropped: a later call asks again
        verdicts, counts = mine.verdicts(questions("d"))
        assert verdicts == [0.5]
        counted(counts, calls=1)


def test_a_server_that_never_answers_holds_up_nobody_beyond_the_limit():
    """The limit is counted from where the run waits, however long ago the question was asked."""
    go_on = threading.Event()

    def answer(body, number):
        go_on.wait(60)
        return "Score: 5"

    with judge_server(answer) as (url, bodies):
        try:
            mine = client(url, seconds=0.5, timeout=60.0)
            mine.begin(questions("a"))
            while not bodies:
                time.sleep(0.01)
            begin = time.monotonic()
            verdicts, counts = mine.verdicts(questions("a", "b"))
            assert 0.5 <= time.monotonic() - begin < 20
            assert verdicts == [None, None]
            counted(counts, calls=2, timeouts=2)
        finally:
            go_on.set()


def test_a_wait_that_a_judge_asks_for_ends_with_the_limit():
    with judge_server(lambda b, n: (429, {"Retry-After": "86400"}, "")) as (url, bodies):
        mine = client(url, at_once=1)
        mine.begin(questions("a"))
        while not bodies:
            time.sleep(0.01)
        begin = time.monotonic()
        verdicts, counts = mine.verdicts(questions("a", "b"))
        assert time.monotonic() - begin < 60
    assert verdicts == [None, None]
    counted(counts, calls=1, timeouts=2)


def test_one_refusal_holds_up_its_own_question_alone():
    """A server that answers others goes on; one that refuses twice in a row is left alone."""
    times, refuse = {}, {"1"}

    def answer(body, number):
        text = body["messages"][-1]["content"]
        first = text not in times
        times.setdefault(text, []).append(time.monotonic())
        return (429, {"Retry-After": "0.3"}, "") if first and text in refuse else "Score: 5"

    with judge_server(answer) as (url, _):
        mine = client(url, at_once=1)
        verdicts, counts = mine.verdicts(questions("0", "1", "2", "3"))
        assert verdicts == [0.5] * 4
        counted(counts, calls=5, retries=1)
        assert times["3"][0] < times["1"][1]  # nobody waits with the one that was refused
        assert times["1"][1] - times["1"][0] >= 0.3
        times.clear()
        refuse |= {"2"}
        mine.verdicts(questions("0", "1", "2", "3", vote=1))
        assert times["3"][0] - times["2"][0] >= 0.3


@pytest.mark.parametrize("refuses", [False, True])
def test_a_request_that_is_overdue_holds_up_no_other(monkeypatch, refuses):
    """The server answers it after a later one alone; if it can serve no two, it says so."""
    monkeypatch.setattr(judge_limits, "_OVERDUE_SECONDS", 0.01)
    later, refusals = threading.Event(), [(429, {}, "")] * refuses
    narrowed, narrow = [], QuestionBatch.narrow
    monkeypatch.setattr(
        QuestionBatch, "narrow", lambda batch: narrowed.append(batch) or narrow(batch)
    )

    def answer(body, number):
        text = body["messages"][-1]["content"]
        if text == "hangs":
            later.wait(60)
        if text == "later":
            later.set()
            if refusals:
                return refusals.pop()
        return "Score: 5"

    with judge_server(answer) as (url, _):
        mine = client(url, at_once=1)
        mine.verdicts(questions(*"abcdefgh"))
        mine.begin(questions(*"ijklmnop"))  # what replies usually take
        verdicts, counts = mine.verdicts(questions("hangs", "later"))
        assert verdicts == [0.5, 0.5]
        assert counts["judge_calls"] == 10 + refuses
        assert mine._beside == (not refuses)  # from then on, no more than at_once
        assert len(narrowed) == refuses  # and in this call


def test_overdue_requests_are_held_to_a_number():
    batch = QuestionBatch(2, 3)
    now = time.monotonic()
    batch._seconds.extend([0.0] * 8)
    for count, sent_at, wait in (
        (1, now, 0.0),
        (2, now, 1.0),
        (2, now - 9.0, 0.0),
        (4, now - 9.0, 0.0),
        (5, now - 9.0, threading.TIMEOUT_MAX),
    ):
        batch._sent = {str(i): sent_at for i in range(count)}
        assert batch._full(now) == pytest.approx(wait)
    batch._sent = {"a": now - 9.0, "b": now - 9.0, "c": now - 0.25}
    assert batch._full(now) == 0.0
    batch._sent["d"] = now - 0.5
    assert batch._full(now) == pytest.approx(0.5)
    batch.narrow()
    assert batch._full(now) == threading.TIMEOUT_MAX


def test_repetitions_wait_longer_only_while_nobody_else_is_answered(monkeypatch):
    monkeypatch.setattr(judge_client.random, "uniform", lambda low, high: 1.0)
    waits, put = [], QuestionBatch.put

    def put_and_note(batch, question, after=0.0):
        if after:
            waits.append(after)
        put(batch, question, after)

    monkeypatch.setattr(QuestionBatch, "put", put_and_note)

    def answer(body, number):
        return (500, {}, "") if body["messages"][-1]["content"] == "bad" else "Score: 5"

    with judge_server(answer) as (url, _):
        mine = client(url, at_once=1)
        mine.verdicts(questions("bad"))
        assert waits == [0.001, 0.002, 0.004, 0.008]
        waits.clear()
        monkeypatch.setattr(
            QuestionBatch, "put", lambda *args: (mine._pace.served(), put_and_note(*args))
        )
        mine.verdicts(questions("bad", vote=1))
        assert waits == [0.001] * 4


def raw_server(send):
    """A server of one connection after the other, each answered by ``send(socket, number)``."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        for number in range(99):
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(5)
                connection.recv(1 << 16)
                send(connection, number)

    threading.Thread(target=serve, daemon=True).start()
    return listening, f"http://127.0.0.1:{listening.getsockname()[1]}/v1"


def test_slow_headers_end_with_the_time_of_their_request():
    def send(connection, number):
        for _ in range(40 if number == 0 else 0):  # each piece is in time, all together are not
            connection.sendall(b"H")
            time.sleep(0.1)
        body = reply_body("Score: 5").encode()
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    listening, url = raw_server(send)
    with listening:
        verdicts, counts = client(url, at_once=1, timeout=1.0).verdicts(questions("a"))
    assert verdicts == [0.5]
    assert counts["judge_retries"] >= 1


def test_a_body_that_is_cut_is_asked_for_again():
    body = reply_body("Score: 5").encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    listening, url = raw_server(lambda c, number: c.sendall(head + body[: number * len(body)]))
    with listening:
        verdicts, counts = client(url).verdicts(questions("a"))
    assert verdicts == [0.5]
    counted(counts, calls=2, retries=1)


@pytest.mark.parametrize("status", [301, 302, 307])
def test_a_redirect_takes_the_key_nowhere(status, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    with judge_server(lambda body, number: "Score: 9") as (other, elsewhere):
        reply = (status, {"Location": f"{other}/chat/completions"}, "")
        with judge_server(lambda body, number: reply) as (url, _):
            mine = client(url, key_variable="JUDGE_KEY")
            verdicts, counts = mine.verdicts(questions("a"))
            assert verdicts == [None]
            counted(counts, calls=1, failures=1)
            with pytest.raises(
                UserError, match=f"refuses model 'm' .{status}.*redirects to {other}"
            ):
                mine.probe()
        assert elsewhere == []


def test_a_reply_to_one_question_is_read_for_each_row_by_its_own_answer(tmp_path):
    with judge_server(lambda body, number: "4") as (url, _):
        for cached in (0, 1):
            mine, reads = client(url, cache=tmp_path), []
            rows = answers("solve by the plan", "4", "5", "4", reads=reads)
            verdicts, counts = mine.verdicts(rows)
            assert verdicts == [1.0, 0.0, 1.0]
            assert sorted(reads) == ["4", "4", "5"]  # the one that is sent is not read again
            counted(counts, **{"cached": 1} if cached else {"calls": 1})
