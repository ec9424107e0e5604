"""Episodes whose turns are texts of a script in place of a policy's."""

import asyncio
import inspect

import numpy as np

from jrl.episodes.host import Reply, check_feedback, check_opening


def reply(text, turn=0, cut=False):
    """A turn of the policy as an environment gets it; its token ids are not the text's."""
    return Reply(text, text, np.zeros(1, np.int32), turn, cut)


async def play_turns(env, turns, prompt, seed=0, cut=False):
    """(the opening messages, the feedback to each turn), checked as a run checks them."""
    state, answer = await env.init(prompt, seed)
    (opening, _), feedbacks = check_opening(answer, env.limits), []
    for number, text in enumerate(turns):
        state, feedback = await env.step(state, reply(text, number, cut))
        feedbacks.append(check_feedback(feedback, env.limits, len(env.parts), env.players))
    closing = env.close(state)
    if inspect.isawaitable(closing):
        await closing
    return opening, feedbacks


def play(env, turns, prompt, seed=0, cut=False):
    """``play_turns`` outside of an event loop, as one list: the opening, then the feedbacks."""
    opening, feedbacks = asyncio.run(play_turns(env, turns, prompt, seed, cut))
    return [opening, *feedbacks]
