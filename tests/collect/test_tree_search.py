"""Groups that are leaves of a search: trees replayed by hand, what is drawn and read, and runs."""

import json
from functools import cache
from types import SimpleNamespace
from typing import get_args

import jax
import numpy as np
import pytest
from tiny import SIZES, jit, tiny_config, trainer_logprobs

from jrl.collect.collector import Collector
from jrl.collect.groups import to_batch
from jrl.collect.plan import Setting
from jrl.collect.plan_tools import TextTools
from jrl.collect.run_rows import RunRows, prompt_seeds
from jrl.collect.sources import Groups, simple_request
from jrl.collect.tree_search import TreeSearch, plan_of, run_estimate
from jrl.config import load_config
from jrl.config.tree import SearchTree
from jrl.episodes.search import by_likelihood, by_path
from jrl.episodes.tree import SEARCHES, Step, Tree
from jrl.errors import UserError
from jrl.evaluate import load_policy
from jrl.evaluate.search import problems_of
from jrl.evaluate.searcher import searched_run, searcher_of
from jrl.mesh import make_mesh
from jrl.methods import get_method
from jrl.methods.plan import Plan, stored_apart
from jrl.methods.replays import replay_rare
from jrl.models.transformer import transformer
from jrl.objectives.policy import compute_advantages
from jrl.run import run as running
from jrl.run.diagnostics import obstacles
from jrl.run.run import train
from jrl.sampling.places import entropy
from jrl.sampling.rows import Rows
from jrl.setup.kinds import kind_of
from jrl.setup.objective import method_of
from jrl.storage.metrics import read_jsonl
from jrl.train.batches import task_source
from jrl.train.build import setup
from jrl.types import SILENT, Branching, Prompt, Search, StopReason

P, T, G, END, LINE = 6, 14, 4, 1, 2
NETWORK = transformer(tiny_config(P + T, vocab_size=12))
PROMPTS = [Prompt(i, "", np.array([3, *range(4, 5 + i)], np.int32), "") for i in range(3)]


@cache
def params():
    return jax.tree.map(lambda x: 1.5 * x, jit(NETWORK.init)(jax.random.key(0)))


@cache
def rows(slots=5, chunk=3, parked=64):
    return Rows(
        NETWORK,
        slots=slots,
        prompt_tokens=P,
        max_new_tokens=T,
        stop_tokens=(END, LINE),
        chunk=chunk,
        sampling={"temperature": 1.0},
        suspended=parked,
        measure=entropy,
    )


def even_share(tokens):
    """Points: the share of even tokens."""
    return float(np.mean(np.asarray(tokens) % 2 == 0))


def problems(unjudged=lambda tokens: False):
    judged_paths, steps = [], set()

    def judge(about, prompts, rollout, step):
        steps.add(step)
        n, g, _ = rollout.tokens.shape
        paths = [rollout.tokens[i, j, : rollout.lengths[i, j]] for i in range(n) for j in range(g)]
        judged_paths.extend((p.id, tuple(x.tolist())) for p, x in zip(prompts, paths, strict=True))
        points = np.array([[even_share(x), 9.0] for x in paths], np.float32).reshape(n, g, 2)
        out = np.array([unjudged(x) for x in paths]).reshape(n, g)
        stop = np.where(out, np.int32(StopReason.ABORTED), rollout.stop)
        silent = np.array([len(x) % 3 == 0 for x in paths]).reshape(n, g).astype(np.int32)
        ids = {SILENT: 2 * silent}  # no opinion of the second part
        return Groups(rollout.replace(stop=stop), points, about, {"judged": float(n)}, ids)

    chosen = lambda key, rows: ([PROMPTS[i] for i in rows],) * 2  # noqa: E731
    rest = {"notes": dict, "finish": lambda complete: None, "order": lambda tickets: tickets}
    source = SimpleNamespace(prompts=chosen, judge=judge, steps=steps, **rest)
    return source, judged_paths


WEIGHTS = np.array([1.0, 0.0])


def request(step, search, weights, group=G):
    """A request for all prompts, each of which is searched."""
    plain_request = simple_request(
        jax.random.key(4), weights, step, np.arange(3, dtype=np.int32), group
    )
    return plain_request.replace(asks=(plain_request.asks[0].replace(tree=search),))


def run_search(search, unjudged=lambda tokens: False, estimate=None, group=G, **sizes):
    """The groups of one draw, the source, and what was judged."""
    prompts, judged_paths = problems(unjudged)
    weights = {"policy": params(), **({} if estimate is None else {"value": "value"})}
    how = {"width": P, "ends": (END,), "estimate": estimate}
    source = TreeSearch(RunRows(rows(**sizes)), search, prompts, WEIGHTS, **how)
    groups = source.draw(request(5, search, weights, group))
    return groups, source, judged_paths


def odd_share(weights, tokens, lengths):
    """Points of a path that goes on: the share of odd tokens, the prompt's included."""
    assert weights["value"] == "value"
    assert len(tokens) in (1, 2, 4, 8, 16, 32)
    return [np.mean(row[:n] % 2) for row, n in zip(tokens, lengths, strict=True)]


def steps_of(tree):
    return [(n.parent, n.step.content.tolist(), n.done) for n in tree.nodes if n.step is not None]


SEARCHED = {name: Search(name, 3, 12, 4, 0.7 if "uct" in name else 1.0) for name in SEARCHES}


@pytest.fixture(scope="module", params=[*SEARCHED, "guided"])
def search_case(request):
    guided = request.param == "guided"
    search = SEARCHED["puct" if guided else request.param]
    return search, *run_search(search, estimate=odd_share if guided else None), guided


def test_nodes_are_chosen_and_backed_up_as_the_search_says(search_case):
    """Each tree is grown once more, node by node, from what was drawn."""
    search, groups, source, _, guided = search_case
    kind = SEARCHES[search.by]
    for n, tree in enumerate(source.trees):
        again, filled, here = Tree(), False, 1
        for _ in range(1 if kind.whole else search.rounds):
            chosen = kind.select(search.width, search.exploration)(again)
            if len(again.leaves()) >= G or not chosen:
                break
            assert len(chosen) <= search.width
            for node in np.repeat(chosen, search.width):
                assert tree.nodes[here].parent == node
                add(again, n, tree, here, kind, guided)
                here += 1
        leaves = len(again.leaves())
        for i in range(here, len(tree.nodes)):  # what completes the group
            filled = True
            add(again, n, tree, i, kind, guided)
        assert (leaves < G) == filled
        assert len(again.leaves()) == max(leaves, G)
        mine = groups.ids["node"][n]
        values = np.array([0.0] + [kind.value(node) for node in again.nodes[1:]])
        np.testing.assert_allclose(groups.stats["node_value"][n], values[mine], atol=1e-6)


def add(again, n, tree, number, kind, guided):
    step = tree.nodes[number].step
    again.add(tree.nodes[number].parent, Step(step.content, *step[1:]))
    path_tokens = np.concatenate([tree.nodes[i].step.content for i in tree.path(number)])
    if step.done:
        kind.backup(again, number, even_share(path_tokens))
    elif guided:
        path_tokens = np.concatenate([PROMPTS[n].tokens, path_tokens])
        kind.backup(again, number, float(np.mean(path_tokens % 2)))


def test_members_are_leaves_and_each_step_is_trained_once(search_case):
    search, groups, source, judged_paths, _ = search_case
    whole_completions = SEARCHES[search.by].whole
    rollout = groups.rollout.check()
    node, mask = groups.ids["node"], np.asarray(rollout.mask)
    for n, tree in enumerate(source.trees):
        visited = set()
        for i, leaf in enumerate(tree.leaves()[:G]):
            path, at = tree.path(leaf), 0
            for number in path:
                step = tree.nodes[number].step.content
                here = slice(at, at + len(step))
                np.testing.assert_array_equal(rollout.tokens[n, i, here], step)
                assert (node[n, i, here] == number).all()
                assert (mask[n, i, here] == (number not in visited)).all()
                at += len(step)
                assert whole_completions or len(step) <= 4
                assert (
                    step[-1] == END or at == T
                    if whole_completions
                    else (step[-1] in (END, LINE) or len(step) == 4 or at == T)
                )
            visited |= set(path)
            assert rollout.lengths[n, i] == at
            last = rollout.tokens[n, i, at - 1]
            assert rollout.stop[n, i] == (
                StopReason.STOP_TOKEN if last == END else StopReason.LENGTH
            )
            assert groups.rewards[n, i, 0] == pytest.approx(even_share(rollout.tokens[n, i, :at]))
    assert (rollout.versions == np.where(mask, 5, -1)).all()
    every = [
        (n, tuple(t for i in tree.path(leaf) for t in tree.nodes[i].step.content.tolist()))
        for n, tree in enumerate(source.trees)
        for leaf in tree.leaves()
    ]
    assert sorted(judged_paths) == sorted(every)  # once each


def test_the_trainers_log_probabilities_are_the_searchs(search_case):
    rollout = search_case[1].rollout
    scored = trainer_logprobs(NETWORK, params(), rollout)
    assert np.abs(np.where(rollout.mask, scored - rollout.sampler_logprobs, 0)).max() < 1e-5


def test_prompts_are_read_once_and_paths_never(search_case):
    search, groups, source, _, _ = search_case
    counts = groups.counts
    assert counts["read_tokens"] == sum(len(p.tokens) for p in PROMPTS)
    assert counts["reread_tokens"] == 0
    tokens = sum(len(step) for tree in source.trees for _, step, _ in steps_of(tree))
    assert counts["slot_tokens"] == tokens
    assert counts["search_nodes"] == sum(len(tree.nodes) - 1 for tree in source.trees)
    mask = np.asarray(groups.rollout.mask)
    assert counts["tree_shared_tokens"] == groups.rollout.lengths.sum() - mask.sum()
    assert (counts["tree_shared_tokens"] > 0) != SEARCHES[search.by].whole
    assert counts["judged"] == counts["search_leaves"]


@pytest.mark.parametrize("sizes", [{"slots": 3}, {"slots": 11, "chunk": 7}, {"parked": 0}], ids=str)
def test_a_search_depends_on_neither_slots_nor_chunks_nor_where_rows_are_kept(sizes):
    search = SEARCHED["puct"]
    (_, baseline, _), (groups, source, _) = run_search(search), run_search(search, **sizes)
    assert [steps_of(a) for a in source.trees] == [steps_of(a) for a in baseline.trees]
    assert (groups.counts["reread_tokens"] > 0) == ("parked" in sizes)


@pytest.mark.parametrize(
    "other", [{"width": 2}, {"rounds": 1}, {"tokens": 3}, {"exploration": 9.0}], ids=str
)
def test_each_number_of_a_search_changes_its_trees(other):
    search = SEARCHED["puct"]
    both = search, search._replace(**other)
    searches = (run_search(each, estimate=odd_share, group=12) for each in both)
    (_, baseline, _), (_, source, _) = searches
    assert [steps_of(a) for a in source.trees] != [steps_of(a) for a in baseline.trees]


def test_divided_slots_give_the_same():
    _, baseline, _ = run_search(SEARCHED["puct"])
    with jax.set_mesh(make_mesh({"data": 2}, jax.devices()[:2])):
        rows.cache_clear()
        _, source, _ = run_search(SEARCHED["puct"], slots=6)
        rows.cache_clear()
    assert [steps_of(a) for a in source.trees] == [steps_of(a) for a in baseline.trees]


def test_where_rounds_run_out_open_nodes_are_completed():
    groups, source, _ = run_search(Search("puct", 2, 1, 3))
    for tree in source.trees:
        assert tree.nodes[0].children == [1, 2]
        done = len([i for i in (1, 2) if tree.nodes[i].done])
        assert len(tree.leaves()) == G
        if not done:  # two more each, one step after the other
            assert [len(tree.nodes[i].children) for i in (1, 2)] == [2, 2]
            assert all(len(n.children) <= 1 for n in tree.nodes[3:])
    assert (groups.rollout.stop < StopReason.FAILED).all()


def test_a_leaf_that_nobody_could_judge_leaves_its_group():
    unjudged = lambda tokens: len(tokens) % 2 == 1  # noqa: E731
    groups, source, _ = run_search(SEARCHED["uct"], unjudged)
    out = groups.rollout.lengths % 2 == 1
    assert 0 < out.sum() < out.size
    np.testing.assert_array_equal(groups.rollout.stop == StopReason.ABORTED, out)
    # What the others went through is trained in one of them.
    mask, node = np.asarray(groups.rollout.mask), groups.ids["node"]
    for n in range(3):
        live = ~out[n]
        expected = {
            (int(t), int(node[n, i, t]))
            for i in range(G)
            for t in np.nonzero(node[n, i])[0]
            if live[i]
        }
        trained = [
            (int(t), int(node[n, i, t]))
            for i in range(G)
            for t in np.nonzero(mask[n, i])[0]
            if live[i]
        ]
        assert sorted(trained) == sorted(expected)
    assert source.source.steps == {5}
    for tree in source.trees:
        judged_leaves = [i for i in tree.leaves() if sum(len(s) for s in path_of(tree, i)) % 2 == 0]
        assert tree.nodes[0].visits == len(judged_leaves)


def test_what_has_no_opinion_of_a_leaf_is_said_of_its_member():
    groups, _, _ = run_search(SEARCHED["uct"])
    silent = groups.rollout.lengths % 3 == 0
    assert 0 < silent.sum() < silent.size
    np.testing.assert_array_equal(groups.ids[SILENT], 2 * silent)


def test_what_is_kept_of_a_tree_is_whole_and_its_prompt_is_drawn_apart():
    """Kept: the even half. Later their prompts' members share nothing, and the first are kept."""
    prompts, _ = problems()
    search = SEARCHED["frontier"]
    source = TreeSearch(RunRows(rows()), search, prompts, WEIGHTS, width=P, ends=(END,))
    rule = replay_rare(0.5, 0.8, each=2, prompts=8)
    plan = Plan(stored_apart, tree=search)
    method = get_method("grpo")._replace(plan=plan, edits=(rule,))
    mesh = make_mesh({}, jax.devices()[:1])
    tools = lambda key: TextTools(PROMPTS, T)  # noqa: E731
    collector = Collector(source, Setting(method, 3, G, WEIGHTS, tools=tools), mesh)

    def step(number):
        key, weights = jax.random.key(4), {"policy": params()}
        return collector.collect(key, weights, step=number, cursor=0)[1]

    first = step(5)
    assert first.counts["replayed"] == 0
    store = collector.collected.edits[0]
    rows_by_prompt = {}
    for slot, row in sorted(store.rows.items(), key=lambda item: store.slots.age[item[0]]):
        rows_by_prompt.setdefault(int(store.slots.prompt[slot]), []).append(row)
    shared = 0
    for prompt, every in rows_by_prompt.items():
        for row in every:
            assert row["rollout.mask"].all()
            assert (row["rollout.versions"] == 5).all()
            shares = first.ids["node"][prompt] > 0
            shared += int((shares & ~first.rollout.mask[prompt]).any())
            leaf_tokens = row["rollout.tokens"]
            tree = source.trees[prompt]
            (leaf,) = [i for i in tree.leaves()[:G] if ids_at(tree, i) == leaf_tokens.tolist()][:1]
            logprobs = [s.logprobs for s in tree.nodes[leaf].step.episode.segments]
            np.testing.assert_array_equal(row["rollout.sampler_logprobs"], np.concatenate(logprobs))
    assert shared
    again = step(6)
    assert again.counts["replayed"] == sum(map(len, rows_by_prompt.values()))
    # Prompts that are drawn without search come last in the request.
    order = sorted(range(3), key=lambda n: n in rows_by_prompt)
    for n, tree in zip(order, source.trees, strict=True):
        stored_rows = rows_by_prompt.get(n, ())
        is_path = all(len(node.children) <= 1 for node in tree.nodes[1:])
        if stored_rows:
            assert is_path
            assert len(tree.nodes[0].children) == G
            nodes = [set(again.ids["node"][n, g][again.rollout.mask[n, g]]) for g in range(G)]
            assert sum(map(len, nodes)) == len(set.union(*nodes))
        stored_tokens = {tuple(row["rollout.tokens"]) for row in stored_rows}
        first_ones = range(len(stored_rows))
        tokens = [again.rollout.tokens[n, g, : again.rollout.lengths[n, g]] for g in first_ones]
        assert {tuple(x) for x in tokens} == stored_tokens
        assert (again.ids["replayed"][n] == (np.arange(G) < len(stored_rows))).all()
    assert 0 < len(rows_by_prompt) < 3
    batch = to_batch(
        again.rollout, again.rewards, np.array([1.0, 0.0], np.float32), again.ids, again.stats
    )
    objective = get_method("deepsearch").objective
    advantages = np.asarray(compute_advantages(objective, batch, objective.init())[0])
    for n, stored_rows in rows_by_prompt.items():
        scores = np.asarray(again.rewards, np.float64)[n, :, 0]
        for g in range(len(stored_rows)):
            last = again.rollout.lengths[n, g] - 1
            at_leaf = scores[g] - scores.mean()
            assert advantages[n, g, last] == pytest.approx(at_leaf, abs=1e-5)


def ids_at(tree, leaf):
    return [t for i in tree.path(leaf) for t in tree.nodes[i].step.content.tolist()]


def path_of(tree, node):
    return [tree.nodes[i].step.content for i in tree.path(node)]


def test_deepsearch_reads_the_values_of_its_search():
    """In float64: tanh of q at the nodes before the leaf, the leaf's score at the leaf."""
    groups, source, _ = run_search(SEARCHED["frontier"])
    weights = np.array([1.0, 0.0], np.float32)
    batch = to_batch(groups.rollout, groups.rewards, weights, groups.ids, groups.stats)
    objective = get_method("deepsearch").objective
    advantages = np.asarray(compute_advantages(objective, batch, objective.init())[0])
    scores = np.asarray(groups.rewards, np.float64)[..., 0]
    for n, tree in enumerate(source.trees):
        for i, leaf in enumerate(tree.leaves()[:G]):
            for t in np.nonzero(groups.rollout.mask[n, i])[0]:
                node = groups.ids["node"][n, i, t]
                q = scores[n, i] if node == leaf else np.tanh(tree.nodes[node].total)
                assert advantages[n, i, t] == pytest.approx(q - scores[n].mean(), abs=1e-5)


# ---------------------------------------------------------------- runs

TASK = (
    *("data.task=sequence", "data.difficulty=1", "sampling.group=4"),
    f"model.config={json.dumps(SIZES).replace(':', ' =')}",
)


@pytest.mark.parametrize("method", ["deepsearch", "alphamath"])
def test_a_run_on_a_task_searches(method, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    tree = "{kind='search',tokens=2,width=3}" if method == "deepsearch" else "{kind='search'}"
    config = load_config(
        None,
        [
            *(*TASK, f"method={method}", f"tree={tree}", "train.prompts=16", "train.steps=2"),
            *("rewards={verify={},partial={}}", "optimizer.warmup_steps=0"),
            *("checkpoint.every=0", "eval.problems=4", "log.samples_every=1"),
            f"run.dir={json.dumps(str(tmp_path / 'run'))}",
        ],
    )
    train(config, echo=lambda line: None)
    records = [r for r in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "loss" in r]
    assert len(records) == 2
    assert max(record["grad_norm"] for record in records) > 0
    for record in records:
        assert record["search_leaves"] >= 64
        assert record["reread_tokens"] == 0
        assert record["logprob_diff"] < 1e-4


def test_a_path_is_worth_what_the_value_head_says_behind_its_last_token():
    config = load_config(None, [*TASK, "method=alphamath", "tree.kind=search"])
    run = setup(config)
    policy = jit(run.network.init)(jax.random.key(1))
    head = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(2), x.shape), run.value.init(jax.random.key(3))
    )
    longest = run.width + run.task.completion_tokens
    tokens = np.random.default_rng(0).integers(0, run.network.vocab_size, (2, longest))
    lengths = np.array([longest - 3, 2], np.int32)
    estimates = run_estimate(run)(
        {"policy": policy, "value": head}, tokens.astype(np.int32), lengths
    )
    for row, length, points in zip(tokens, lengths, np.asarray(estimates, np.float64), strict=True):
        alone, at = row[None, :length].astype(np.int32), np.arange(length)[None]
        hidden, _ = run.network.hidden(policy, alone, at, np.ones_like(at))
        value = run.value.apply(head, hidden, alone, at, np.ones_like(at))[0, -1]
        assert points == pytest.approx((1 + np.tanh(np.float64(value))) / 2, abs=1e-5)
    assert abs(estimates[0] - estimates[1]) > 1e-3
    assert run_estimate(setup(load_config(None, [*TASK, "method=deepsearch"]))) is None


def test_a_search_at_evaluation_samples_what_training_samples():
    """Token for token, with the same weights, seeds and problems; of text, in lines and steps."""
    config = load_config(
        None,
        [
            *(*TASK, "method=deepsearch", "train.prompts=4", "mesh.fsdp=1", "eval.problems=4"),
            "tree={kind='search', by='best_first', width=3, rounds=4, tokens=2}",
            *("sampling.temperature=0.7", "eval.temperature=0.7", "sampling.top_k=5"),
            *("sampling.top_p=0.9", "sampling.min_p=0.02", "model.dtype=float32"),
        ],
    )
    run = setup(config)
    search = run.method.draw.search
    with jax.set_mesh(run.mesh):
        key, params, _ = load_policy(run, None)
        source = task_source(run, None)
        plain_request = simple_request(key, {"policy": params}, 0, np.arange(4, dtype=np.int32), 4)
        source.draw(plain_request.replace(asks=(plain_request.asks[0].replace(tree=search),)))
        evaluated = searched_run(config, search.width)
        _, prompts = problems_of(evaluated, key, "train")
        seeds, kind = prompt_seeds(key, "sample", 0, np.arange(4)), {"step_tokens": search.tokens}
        with searcher_of(evaluated, key, params, 0, width=search.width, **kind) as searcher:
            plan = plan_of(search, config.sampling.group)
            searched = searcher(prompts, seeds, plan, by_path(by_likelihood))
    assert [steps_of(a) for a in searched.trees] == [steps_of(a) for a in source.trees]
    assert all(len(tree.nodes) > 8 for tree in searched.trees)
    for mine, theirs in zip(searched.trees, source.trees, strict=True):
        for a, b in zip(mine.nodes[1:], theirs.nodes[1:], strict=True):
            assert a.step.logprob == pytest.approx(b.step.logprob, abs=1e-6)


@pytest.mark.slow
def test_a_search_resumes_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "write_report", lambda directory: directory)

    def run(name, steps):
        config = load_config(
            None,
            [
                *(*TASK, "method=deepsearch", "tree={kind='search',tokens=2,width=3}"),
                *("train.prompts=8", f"train.steps={steps}", "rewards={partial={}}"),
                *("checkpoint.every=1", "eval.problems=4"),
                f"run.dir={json.dumps(str(tmp_path / name))}",
            ],
        )
        train(config, echo=lambda line: None)
        records = read_jsonl(tmp_path / name / "metrics.jsonl")
        return {r["step"]: (r["loss"], r["grad_norm"]) for r in records if "loss" in r}

    run("parts", 1)
    assert run("parts", 2) == run("whole", 2)


def test_a_run_on_text_searches_by_its_rewards(tmp_path, monkeypatch, letters_model):
    monkeypatch.setattr(running, "write_report", lambda directory: directory)
    (tmp_path / "own.py").write_text(
        "def vowels(samples):\n"
        "    vowels = [sum(c in 'aeiou' for c in s.completion) / 9 for s in samples]\n"
        "    return [v + s.step + s.steps for v, s in zip(vowels, samples, strict=True)]\n"
    )
    rows = [{"question": f"how many {x}?", "answer": "a"} for x in ("eels", "cows", "whales")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = json.dumps(str(tmp_path / "own.py") + ":vowels")
    config = load_config(
        None,
        [
            *(f"model.path={json.dumps(str(letters_model))}", "data.template=plain"),
            *(f"data.train={json.dumps(str(tmp_path / 'rows.jsonl'))}", "method=deepsearch"),
            *("sampling.group=6", "sampling.max_new_tokens=9", "train.prompts=2", "train.steps=2"),
            *("tree={kind='search',width=3,tokens=4}", "log.samples_every=1"),
            *(f"rewards={{{reward}={{}}}}", "reward_pool.workers=0", "checkpoint.every=0"),
            f"run.dir={json.dumps(str(tmp_path / 'run'))}",
        ],
    )
    train(config, echo=lambda line: None)
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert {len(s["nodes"]) for s in samples} - {1}
    for s in samples:
        vowels = sum(c in "aeiou" for c in s["completion"]) / 9
        assert s["reward"] == pytest.approx(vowels + (s["step"] - 1) + 2)


# ---------------------------------------------------------------- what is refused

BAD = {
    "tree.exploration = 2.0 is not read with tree.by = 'best_first'": [
        "tree={kind='search', by='best_first', exploration=2.0}"
    ],
    "sampling.slots = 3: a search of tree.width = 5 needs a slot for each step": [
        *("tree={kind='search', by='uct', width=5}", "sampling.slots=3")
    ],
    "tree.kind = 'search' does not go with method = 'online_dpo', which compares whole": [
        *("tree.kind=search", "method=online_dpo")
    ],
    "tree.by = 'frontier' does not go with data.env = 'guess_number': completions and episodes": [
        *("method=deepsearch", "data={env='guess_number', numbers=4, turns=3}")
    ],
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_searched_is_named_before_anything_compiles(message):
    config = load_config(None, [*TASK, *BAD[message]])
    with pytest.raises(UserError) as caught:
        setup(config)
    assert message in str(caught.value)


def test_a_compiled_run_does_not_search(tmp_path):
    run = ("train.mode=compiled", f"run.dir={json.dumps(str(tmp_path / 'run'))}")
    with pytest.raises(
        UserError, match="'compiled' does not go with tree.by = 'frontier': a search takes a host"
    ):
        train(load_config(None, [*TASK, "method=deepsearch", *run]), echo=lambda line: None)


def test_a_search_on_a_task_goes_by_the_tasks_own_rewards(tmp_path):
    (tmp_path / "own.py").write_text("def some(samples):\n    return [1.0 for _ in samples]\n")
    reward = json.dumps(f"{tmp_path}/own.py:some")
    run = (f"rewards={{{reward}={{}}}}", f"run.dir={json.dumps(str(tmp_path / 'run'))}")
    with pytest.raises(UserError, match="a search on a task uses verify and partial"):
        train(load_config(None, [*TASK, "method=deepsearch", *run]), echo=lambda line: None)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "part",
    [
        "x={function='own.py:one', over='group'}",
        "x={function='own.py:one', over='batch'}",
        "x={combine='rank', of=['math']}",
        "x={function='own.py:all_of_them'}",
        "x={function='rank_fidelity'}",
    ],
)
def test_a_search_has_no_parts_that_compare_completions(part, tmp_path, letters_model):
    (tmp_path / "own.py").write_text(
        "from jrl.rewards import whole_batch\n"
        "def one(samples):\n    return [1.0 for _ in samples]\n"
        "@whole_batch\ndef all_of_them(samples):\n    return [1.0 for _ in samples]\n"
    )
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "2"}) + "\n")
    config = load_config(
        None,
        [
            *(f"model.path={json.dumps(str(letters_model))}", "method=deepsearch"),
            *(f"data.train={json.dumps(str(tmp_path / 'rows.jsonl'))}", "data.template=plain"),
            f"rewards={{math={{}}, {part.replace('own.py', f'{tmp_path}/own.py')}}}",
            *(f"run.dir={json.dumps(str(tmp_path / 'run'))}", "reward_pool.workers=0"),
            "sampling.max_new_tokens=9",
        ],
    )
    (line,) = obstacles(config)  # as jrl doctor says it
    assert line.startswith("rewards.x compares completions, and tree.by = 'frontier'")
    with pytest.raises(UserError) as refused:
        train(config, echo=lambda line: None)
    assert str(refused.value) == line
    assert not (tmp_path / "run").exists()


def test_the_configuration_offers_the_searches_that_there_are():
    words, _ = get_args(SearchTree.model_fields["by"].annotation)
    assert get_args(words) == tuple(SEARCHES)


def test_the_methods_own_search_gives_way():
    def draw(*more):
        config = load_config(None, [*TASK, "method=deepsearch", *more])
        return method_of(config, kind_of(config).new_tokens).draw

    assert draw().search == Search("frontier", 8, 64, 256)
    search = "tree={kind='search', %s}"
    assert draw(search % "width=2").search == Search("frontier", 2, 64, 256)
    assert draw(search % "by='puct'").search == Search("puct", 8, 64, 256)
    assert draw("method=rloo", "tree.kind=search").search == Search("puct")
    assert draw("tree.kind=none")[3:5] == (None, None)
    assert draw("tree={kind='branch', at='gap'}")[3:5] == (Branching("gap", 2), None)
