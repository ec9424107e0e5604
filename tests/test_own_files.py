"""Files of one's own with mistakes in them: each is named before anything compiles, with its line.

Rewards, environments on the host, methods, networks, optimizers, tasks and sources.
"""

import numpy as np
import pytest
from mistakes import TASK, TEXT, set_up, write_sound_files

from jrl.errors import UserError
from jrl.rewards import Sample, make_reward
from jrl.rewards.pool import RewardPool
from jrl.types import Prompt

REWARD = {
    "def f(samples)\n    return [1.0]": "line 1: expected ':'",
    "def f(samples):\nreturn [1.0]": "line 2: expected an indented block",
    "def f(samples):\n\tif 1:\n        return [1.0]": "inconsistent use of tabs and spaces",
    "x = 1\0": "source code string cannot contain null bytes",
    "import nothing_like_it": "line 1: ModuleNotFoundError: No module named 'nothing_like_it'",
    "raise RuntimeError('no')": "line 1: RuntimeError: no",
    "import sys; sys.exit(3)": "line 1: SystemExit: 3",
    "def g(samples): return [1.0]": "has no function 'f'; choose from g",
    "f = 5": "is 5, not a function",
    "def f(): return [1.0]": "the function takes (); write reward(samples)",
    "def f(a, b): return [1.0]": "f.b is missing: f(a, b) needs it",
    "def f(samples, *, size): return [1.0]": "f.size is missing: f(samples, size) needs it",
    "def f(samples): yield 1.0": "the function yields; return a list of numbers",
    "def f(completions, colour, **more): return [1.0]": "takes colour, and the data has no such",
    "def f(samples): return None": "returned NoneType None; return a list with one number",
    "def f(samples): return 1.0": "returned float 1.0; return a list with one number",
    "def f(samples): return [1.0] * 7": "returned 7 numbers for 1 sample",
    "def f(samples): return []": "returned 0 numbers for 1 sample",
    "def f(samples): return ['1']": "returned str '1' instead of a number",
    "def f(samples): return [float('nan')]": "returned nan; rewards must be finite",
    "def f(samples): return {'reward': 1.0}": "returned dict {'reward': 1.0}; return a list",
    "def f(samples): return [[1.0]]": "returned a list of 1 number",
    "def f(samples): return [1j]": "returned complex 1j instead of a number",
    "def f(samples): raise KeyError('x')": "raised KeyError: 'x' (prompt 0); fix the function",
    "def f(samples): assert False": "raised AssertionError",
    "class f:\n  def __call__(self, samples): return [1.0]": "f is a class; name an object of it",
    "def f(samples): raise SystemExit(1)": "raised SystemExit: 1",
    "def f(samples): return f(samples)": "raised RecursionError",
    "def f(completions, **more): return [c[0]['content'] for c in completions]": (
        "completions are texts, so write completions[i]"
    ),
    "class V:\n  def __repr__(self): raise ValueError\ndef f(samples): return V()": (
        "returned V (whose text raises ValueError)"
    ),
    "class V:\n  def __repr__(self): raise ValueError\ndef f(samples): return [V()]": (
        "returned V (whose text raises ValueError) instead of a number"
    ),
    "def f(samples): return [1.0]\nf.prepare = lambda: 1 / 0": (
        "its prepare raised ZeroDivisionError: division by zero"
    ),
}
HEAD = """
from jrl.episodes.host import ChatOptions, EnvExtras, Feedback, HostEnv, Lifecycle, Limits

def init(prompt, seed):
    return prompt, [{"role": "user", "content": prompt.text}]

async def step(state, reply):
    return state, Feedback((), 1.0, True, True)

"""
ENV = {
    "def f(): pass": "what it returns is a NoneType; give a jrl.episodes.HostEnv",
    "def f(): return HostEnv": "what it returns is a type; give",
    "def f(): return HostEnv(init)": "TypeError: HostEnv.__new__() missing 1 required",
    "def f(): return HostEnv(None, step)": "init = None; must be a function(prompt, seed)",
    "def f(): return HostEnv(lambda p: 1, step)": "init: <lambda>(p) must take (prompt, seed)",
    "def f(): return HostEnv(init, lambda s: 1)": "step: <lambda>(s) must take (state, reply)",
    "def f(): return HostEnv(init, step, close=5)": "close = 5; must be a function(state)",
    "def f(): return HostEnv(init, step, fork=lambda: 1)": "fork: <lambda>() must take (state)",
    "def f(): return HostEnv(init, step, parts='a')": "parts = 'a'; must be a tuple of names",
    "def f(): return HostEnv(init, step, parts=())": "parts = (); give at least one name",
    "def f(): return HostEnv(init, step, players='2')": "players = '2'; must be a number",
    "def f(): return HostEnv(init, step, limits={'turns': 3})": "must be a Limits",
    "def f(): return HostEnv(init, step, limits=Limits(turns=0))": (
        "what it returns.limits.turns = 0; must be at least 1"
    ),
    "def f(): return HostEnv(init, step, limits=Limits(call_seconds=float('nan')))": (
        "limits.call_seconds = nan; must be at least 0.001"
    ),
    "def f(): return HostEnv(init, step, chat=None)": "chat = None; must be a ChatOptions",
    "def f(): return HostEnv(init, step, chat=ChatOptions(family='qwn'))": (
        "chat.family = 'qwn'; choose from deepseek, gemma"
    ),
    "def f(): return HostEnv(init, step, chat=ChatOptions(roles='user'))": "must be a tuple of",
    "def f(): return HostEnv(init, step, lifecycle=Lifecycle(begin=lambda: 1))": (
        "lifecycle.begin: <lambda>() must take (step, split)"
    ),
    "def f(): return HostEnv(init, step, extras=EnvExtras(labels='x'))": "extras.labels = 'x'",
    "def f(size): return HostEnv(init, step)": "data.size is missing: f(size) needs it",
    "def f(): raise OSError('gone')": "OSError: gone",
    "def f(): raise SystemExit(2)": "SystemExit: 2",
    "async def f(policy): return 1.0": "prompt",
    "async def f(): return 1.0": "prompt",
    "from jrl.episodes import roles\n@roles\nasync def f(policy, prompt): return 1.0": (
        'write the names of the roles as texts, such as @roles("writer", "critic")'
    ),
}
GRPO = "from jrl.methods import get_method\ndef f():\n    m = get_method('grpo')\n    return "
VARIANT = "from jrl.methods import Positive, grpo, variant\n@variant(grpo)\n"
NET = (
    "import jax.numpy as jnp\nfrom jrl import function_network\nW = jnp.ones(2)\n"
    "def f(vocab_size, max_length): return function_network(lambda key: {"
)
SIZES = "vocab_size=vocab_size, max_length=max_length)"
PARTS = {
    "method": {
        "def f(): return 'grpo'": "returned 'grpo'; return",
        "def f(a): return 1": "objective.a is missing: f(a) needs it",
        "def f(): 1 / 0": "line 1: ZeroDivisionError: division by zero",
        "def f(): assert False": "line 1: AssertionError: def f(): assert False",
        "def f(): raise SystemExit(1)": "SystemExit: 1",
        f"{GRPO}m.objective": "return",
        f"{VARIANT}def f(base): pass": "method = 'own.py:f' returned None; return a",
        f"{VARIANT}async def f(base): return base": "returned <coroutine object f",
        f"{VARIANT}def f(base): return base.objective": "return a jrl.methods.Method",
        f"{VARIANT}def f(base): assert False": "own.py, line 3: AssertionError: def f(base)",
        f"{VARIANT}def f(base, beta=1.0): return base": "annotate beta with a domain",
        f"{VARIANT}def f(base, beta: Positive = -1.0): return base": (
            "own.py:f.beta = -1.0; give a number above 0"
        ),
        "from jrl.methods import variant\n@variant\ndef f(base): return base": (
            "own.py, line 2: TypeError: variant takes the published method that is changed, as in"
        ),
        "from jrl.methods import variant\n@variant('grpo')\ndef f(base): return base": (
            "as in @variant(grpo), not 'grpo'"
        ),
    },
    "model.network": {
        f"{NET}'w': jnp.ones(2, int)}}, lambda *x: x, {SIZES}": "init returned {'w': ShapeDtype",
        f"{NET}}}, lambda *x: x, {SIZES}": "init returned {}; return a tree of float arrays",
        f"{NET}'w': W}}, lambda p, *x: None, {SIZES}": "the network returned a NoneType, expected",
        f"{NET}'w': W}}, lambda p: 1, {SIZES}": "TypeError",
        f"{NET}'w': W}}, lambda p, *x: p['v'], {SIZES}": "line 4: KeyError: 'v'",
        f"{NET}1 / 0: W}}, lambda *x: x, {SIZES}": "line 4: ZeroDivisionError: division by zero",
        f"{NET}'w': W}}, lambda p, t, *x: t[..., None] * p['w'][0], {SIZES}": (
            "the network returned float32[2, 3, 1], expected floats"
        ),
        f"{NET}'w': W}}, lambda *x: x, vocab_size=vocab_size, max_length=None)": (
            "max_length = None; must be a whole number, at least 1"
        ),
        "def f(vocab_size, max_length): pass": "returned None; return a jrl.Network",
        "def f(size): return 1": "f(size) must take vocab_size and max_length",
        "def f(vocab_size, max_length): raise ValueError('w')": "ValueError: w",
        "def f(vocab_size, max_length): raise SystemExit(1)": "SystemExit: 1",
    },
    "optimizer.name": {
        "def f(rate): pass": "returned None; return an optax optimizer",
        "def f(rate): 1 / 0": "ZeroDivisionError: division by zero",
        "def f(rate): raise SystemExit(1)": "SystemExit: 1",
        "def f(rate): return (lambda p: p, lambda g, s, p: (g, s))": "return an optax optimizer",
    },
    "data.task": {
        "def f(): pass": "returned None; return",
        "def f(size): return 1": "data.size is missing: f(size) needs it",
        "def f(): raise SystemExit(1)": "SystemExit: 1",
    },
}
SOURCES = {
    "def f(sampler, tokenizer): pass": "returned None; return an object with the methods order,",
    "async def f(sampler, tokenizer): return 1": "returned <coroutine object f",
    "def f(a): return 1": "sampler",
    "def f(sampler, tokenizer): 1 / 0": "ZeroDivisionError: division by zero",
    "def f(sampler, tokenizer): raise SystemExit(1)": "SystemExit: 1",
    "class S: pass\ndef f(sampler, tokenizer): return S()": "draw",
    "class S: pass\ndef f(sampler, tokenizer): return S": "S'>; return an object with the methods",
}
EPISODES = ("data.max_prompt_tokens=20", "data.template=")
CASES = {
    "rewards": (REWARD, (*TEXT, 'rewards={"FILE:f"={}}')),
    "data.env": (ENV, (*TEXT, *EPISODES, "rewards={reward={}}", "data.env='FILE:f'")),
    "data.train": (SOURCES, (*TEXT, *EPISODES, "rewards=", "data.train='source:FILE:f'")),
    **{key: (codes, (*TASK, f"{key}='FILE:f'")) for key, codes in PARTS.items()},
}
CASES["model.network"] = (PARTS["model.network"], (*TASK, "model={network='FILE:f'}"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_sound_files(tmp_path_factory.mktemp("sound"))


@pytest.mark.parametrize(
    ("key", "code"), [(key, code) for key, (codes, _) in CASES.items() for code in codes]
)
def test_a_mistake_is_named(key, code, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    codes, overrides = CASES[key]
    path = tmp_path / "own.py"
    path.write_text((HEAD if key == "data.env" else "") + code + "\n")
    with pytest.raises(UserError) as raised:
        set_up(place, [text.replace("FILE", str(path)) for text in overrides], probe=True)
    message = str(raised.value)
    assert codes[code] in message
    assert any(name in message for name in ("own.py", "objective.", "a source of groups", "data."))
    # A reward that raises is shown with the end of its traceback.
    assert len(message.splitlines()) == 1 or "raised " in message
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "__pycache__") == ["own.py"]


DIVIDED = """
import jax
from jax.sharding import PartitionSpec
from jrl import function_network

def f(vocab_size, max_length):
    def logits(w, tokens, *where):
        return jax.lax.with_sharding_constraint(w[tokens], PartitionSpec("data")) @ w.T

    def init(key):
        return jax.random.normal(key, (vocab_size, 4))

    return function_network(init, logits, vocab_size=vocab_size, max_length=max_length)
"""


def test_a_network_may_divide_its_arrays_over_the_mesh_of_the_run(place, tmp_path):
    for name, divided in (("own", DIVIDED), ("other", DIVIDED.replace('("data")', '("data", 3)'))):
        (tmp_path / f"{name}.py").write_text(divided)
    set_up(place, [*TASK, f"model={{network='{tmp_path}/own.py:f'}}"])
    with pytest.raises(UserError, match=r"other\.py:f'.* 3"):
        set_up(place, [*TASK, f"model={{network='{tmp_path}/other.py:f'}}"])


PREPARED = """
ready = []
def f(samples): return [float(len(ready))]
f.prepare = lambda: ready.append(1)
"""


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_function_prepares_once_before_its_first_call(workers, tmp_path):
    prompts = [Prompt(i, f"{i}?", np.arange(3, dtype=np.int32), i, {}) for i in range(2)]
    samples = [Sample(prompt, "a", np.arange(2), "length") for prompt in prompts]
    (tmp_path / "own.py").write_text(PREPARED)
    functions = {"f": make_reward(f"{tmp_path}/own.py:f")}
    with RewardPool(functions, workers=workers, timeout_seconds=9.0) as pool:
        for _ in range(2):
            assert pool.scores(samples)[0].tolist() == [[1.0], [1.0]]
