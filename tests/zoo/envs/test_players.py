"""Episodes with others: who is told what, and who is paid for which turn."""

import asyncio
import http.server
import json
import threading

import numpy as np
import pytest
from scripted import play, reply

from jrl.episodes.check_env import check_env
from jrl.episodes.host import EnvError, Feedback, Limits, check_feedback
from jrl.episodes.model_endpoint import endpoint
from jrl.episodes.parsers import Call, get_parser
from jrl.errors import UserError
from jrl.types import Prompt
from jrl.zoo.envs.players import (
    UNKNOWN,
    consultation_env,
    dialogue_env,
    discussion_env,
    expert_env,
    guided_env,
    pair_env,
)
from jrl.zoo.envs.zero_search import noise_chance, zero_search_env

PROMPT = Prompt(0, "What is 6 * 7?", np.zeros(0, np.int32), "42")


def talk(env, turns, prompt=PROMPT):
    return play(env, turns, prompt)


def right(prompt, text):
    return float(prompt.answer in text)


def test_guidance_is_read_by_the_other_model_and_its_answers_are_paid():
    conversations = []

    def other(messages):
        conversations.append([m["content"] for m in messages])
        return "42" if "harder" in messages[-1]["content"] else "41"

    env = check_env(guided_env(other, right, turns=3, system="Help."))
    opening, first, second = talk(env, ["Multiply.", "Think harder."])
    assert [m["role"] for m in opening] == ["system", "user"]
    assert conversations[0] == ["What is 6 * 7?\n\nMultiply."]
    assert conversations[1] == [*conversations[0], "41", "Think harder."]
    assert (first.reward, first.done, first.messages[0]["content"]) == ((0.0,), False, "41")
    assert (second.reward, second.done, second.success) == ((1.0,), True, True)
    with pytest.raises(EnvError, match="the other model said None, not text"):
        talk(guided_env(lambda messages: None, right), ["x"])


def test_a_dialogue_ends_when_the_judge_says_so():
    async def user(messages):
        assert [m["role"] for m in messages] == ["user", "assistant", "user"][: len(messages)]
        assert messages[0]["content"] == f"You said: {PROMPT.text}\n\nwhere"
        return f"heard {len(messages)}"

    def judge(prompt, messages):
        text = messages[-1]["content"]
        return (5.0, True) if text == "diagnosis" else (-2.0 if text == "again" else 1.0)

    _, first, second, third = talk(dialogue_env(user, judge), ["where", "again", "diagnosis"])
    assert [f.reward for f in (first, second, third)] == [(1.0,), (-2.0,), (5.0,)]
    assert first.messages[0]["content"] == "heard 1"
    assert third.done
    assert third.success


@pytest.mark.parametrize(
    ("turns", "points"), [(("41", "42"), (0.0, 1.0)), (("42", "42"), (1.0, 1.0))]
)
def test_the_observer_reads_the_pioneers_answer_and_both_get_both_rewards(turns, points):
    first, second = points
    _, pioneer, observer = talk(pair_env(right), turns)
    assert "another one's" in pioneer.messages[0]["content"]
    assert (pioneer.reward, pioneer.done) == ((first,), False)
    assert observer.earlier == ((second,),)  # the pioneer's share of the observer's reward
    assert (observer.reward, observer.done, observer.success) == ((first + second,), True, True)
    assert pioneer.metrics == {"pioneer_reward": first}


@pytest.mark.parametrize(
    ("score", "last", "earlier"),
    [
        ("<score>3</score>", 0.0, ((1.0,), (0.0,))),
        ("so <score> 2 </score>", 0.0, ((0.5,), (0.5,))),
        ("ten out of ten", -1.0, ((0.0,), (0.0,))),
    ],
)
def test_a_discussion_is_paid_by_its_own_score(score, last, earlier):
    *_, first, end = talk(discussion_env(), ["42", "right", score])
    assert (first.reward, first.earlier) == ((0.0,), ())
    assert (end.reward, end.earlier, end.done) == ((last,), earlier, True)


def test_an_expert_is_followed_and_mistakes_are_mended():
    meta = {"actions": ["open", "type", "send"], "observations": ["a form", "text", "sent"]}
    prompt = Prompt(0, "Send it.", np.zeros(0, np.int32), "", meta)
    _, first, second, third = talk(expert_env(), ["open", "close", "send"], prompt)
    assert [f.reward for f in (first, second, third)] == [(1.0,), (0.0,), (1.0,)]
    assert first.messages[0]["content"] == "a form"
    assert second.messages[0]["content"] == "The right action was: type\ntext"
    assert third.done
    assert not third.success
    assert [f.state_key for f in (first, second)] == [1, 2]
    *_, end = talk(expert_env(patches=0), ["close"], prompt)
    assert end.done
    assert talk(expert_env(), ["open", "type", "send"], prompt)[-1].success
    with pytest.raises(EnvError, match='a problem without "actions"'):
        talk(expert_env(), [])
    with pytest.raises(UserError, match="patches = -1; must be at least 0"):
        expert_env(patches=-1)


def test_points_of_earlier_turns_are_checked():
    ok = Feedback((), 1.0, True, earlier=[0.5, (2.0,)])
    assert check_feedback(ok, Limits(), 1).earlier == ((0.5,), (2.0,))
    for wrong in (3.0, [float("nan")], [(1.0, 2.0)]):
        with pytest.raises(EnvError, match="earlier is|not finite|2 reward parts"):
            check_feedback(Feedback((), 1.0, True, earlier=wrong), Limits(), 1)


def test_an_endpoint_is_asked_as_openai_writes_it():
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append((self.path, self.headers["Authorization"], json.loads(body)))
            out = json.dumps({"choices": [{"message": {"content": "42"}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(out)))
            self.end_headers()
            self.wfile.write(out)

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/v1/"
        speak = endpoint(url, "some", key="k", max_tokens=7, temperature=0.5)
        _, end = talk(guided_env(speak, right), ["Multiply."])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert end.success
    ((path, key, body),) = requests
    assert (path, key) == ("/v1/chat/completions", "Bearer k")
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("some", 7, 0.5)
    assert body["messages"][0]["content"].endswith("Multiply.")


def test_a_consultation_pays_turn_by_turn():
    def patient(messages):
        assert messages[0]["role"] == "system"
        assert "\n\nflu\n\n" in messages[0]["content"]
        assert UNKNOWN in messages[0]["content"]
        return "I do not know" if "blood" in messages[-1]["content"] else "Yes, a fever."

    def examiner(prompt, diagnosis):
        return 8.0 if prompt.answer in diagnosis else 1.0

    prompt = Prompt(0, "I feel ill.", np.zeros(0, np.int32), "flu")
    env = consultation_env(patient, examiner, turns=(6, 6))
    turns = ["Question: fever?", "Question: blood?", "question: FEVER?", "Hm", "Diagnosis: flu"]
    opening, *feedbacks = talk(env, turns, prompt)
    assert "You have 6 turns." in opening[0]["content"]
    assert [f.reward[0] for f in feedbacks] == [1.0, -1.0, -2.0, -2.0, 8.0]
    replies = [f.messages[0]["content"] for f in feedbacks[:-1]]
    assert replies[0] == "Yes, a fever.\nTurn 1 of 6."
    assert [text[-12:] for text in replies] == [f"Turn {k} of 6." for k in (1, 2, 3, 4)]
    assert feedbacks[-1].done
    assert feedbacks[-1].success
    late = talk(consultation_env(patient, examiner, turns=(1, 1)), ["Question: fever?"], prompt)
    assert (late[-1].reward, late[-1].done) == ((-5.0,), True)
    with pytest.raises(UserError, match="turns = \\(3, 2\\)"):
        consultation_env(patient, examiner, turns=(3, 2))


def test_the_turns_of_a_consultation_are_drawn_told_and_kept():
    env = consultation_env(lambda messages: "Yes.", lambda prompt, reply: 0.0)
    least = {}
    for seed in range(9):
        state, opening = asyncio.run(env.init(PROMPT, seed))
        turn_count = int(opening.messages[0]["content"].split("You have ")[1].split()[0])
        turn, done = 0, False
        while not done:
            state, feedback = asyncio.run(env.step(state, reply(f"Question: {turn}?", turn)))
            turn, done = turn + 1, feedback.done
        assert (turn, feedback.reward) == (turn_count, -5.0)
        least[turn_count] = seed
    assert sorted(least) == list(range(2, 11))


def test_a_simulated_search_misleads_more_and_more():
    prompts = []

    def other(messages):
        prompts.append(messages[0]["content"])
        return "documents"

    parser = get_parser("hermes")
    env = zero_search_env(other, 40, right, end=1.0)
    text = parser.render(Call("search", {"query": "seven"}))
    for _ in range(20):
        _, documents, end = talk(env, [text, "42"])
        assert "documents" in documents.messages[0]["content"]
        assert end.success
    assert sum("useless" in a for a in prompts) == 0
    for step, split, noisy in ((40, "train", 20), (40, "eval", 0), (0, "train", 0)):
        # The step says how far the training is, whatever was played before.
        env.lifecycle.begin(step, split)
        for _ in range(20):
            talk(env, [text])
        assert sum("useless" in a for a in prompts[-20:]) == noisy
    with pytest.raises(UserError, match="steps = 0"):
        zero_search_env(other, 0)
    assert "The answer is: 42" in prompts[0]
    assert [noise_chance(x, 0.0, 0.75) for x in (0.0, 0.5, 1.0, 2.0)] == [0.0, 0.25, 0.75, 0.75]
