"""Tries exports in llama.cpp and vLLM: greedy tokens and log-probabilities beside JRL's.

In three environments, since the engines pin other versions of shared packages:

    python .ci/handoff.py make DIR --vocabularies LLAMA_CPP/models   # JRL's, with `dev`
    LLAMA/python .ci/handoff.py llama.cpp DIR --source LLAMA_CPP      # and gguf, sentencepiece
    VLLM/python .ci/handoff.py vllm DIR

LLAMA_CPP is a checkout of llama.cpp, or vendor/llama.cpp in the source package of llama-cpp-python;
its vocabularies are published tokenizers. `make` writes, for each family, a base checkpoint of tiny
random weights, trains it for two steps with `jrl train`, exports it with `jrl convert`, and writes
down what `jrl sample` says greedily. The engines read the exports and print a row each; the exit
status is 1 where an engine refuses one or picks another token.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import pathlib
import shutil
import subprocess
import sys

PROMPT = "Ada has 3 apples and finds 4 more. How many has she now?"
NEW_TOKENS = 24
CLOSE = 2e-2
"""Greatest difference of a token's log-probability, in nats, between two engines in float32."""

SIZES = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "qwen3": ("Qwen3ForCausalLM", "qwen2", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", {"tie_word_embeddings": True, "num_attention_heads": 2}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "qwen2", {**MOE, "norm_topk_prob": True}),
    "llama": ("LlamaForCausalLM", "llama-bpe", {"rope_theta": 5e5}),
    "smollm3": ("SmolLM3ForCausalLM", "llama-bpe", {"num_hidden_layers": 4}),
    "mistral": ("MistralForCausalLM", "llama-spm", {"sliding_window": None}),
    "gemma2": ("Gemma2ForCausalLM", "llama-spm", {"query_pre_attn_scalar": 32}),
    "gemma3": ("Gemma3ForCausalLM", "llama-spm", {"query_pre_attn_scalar": 32}),
}
"""Family: (architecture, vocabulary, changes to SIZES)."""
ALL = (*FAMILIES, "qwen3_lora", "characters")
"""The exports that are tried: each family, adapters, and the tokenizer of procedural tasks."""

CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SPLITS = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""How the published tokenizers cut a text into words."""

# ---------------------------------------------------------------- checkpoints and exports


def write_tokenizer(
    vocabulary: pathlib.Path, directory: pathlib.Path, *, prefix: bool
) -> dict[str, int]:
    """A published tokenizer as its checkpoints have it; the ids for config.json.

    `prefix`: whether one of SentencePiece reads a text as if a space stood before it; Gemma's
    does not.
    """
    import gguf

    fields = gguf.GGUFReader(vocabulary).fields
    values = {
        name.removeprefix("tokenizer.ggml."): field.contents()
        for name, field in fields.items()
        if name.startswith("tokenizer.ggml.")
    }
    tokens = values["tokens"]
    bos, eos = tokens[values["bos_token_id"]], tokens[values["eos_token_id"]]
    pre = values.get("pre")
    backend = sentencepiece_backend(values, directory, prefix) if pre == "default" else None
    backend = backend or byte_level_backend(values)
    backend.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "LlamaTokenizer" if pre == "default" else "PreTrainedTokenizerFast",
        **{"bos_token": bos, "eos_token": eos, "pad_token": eos},
    }
    config |= {"unk_token": tokens[values["unknown_token_id"]]} if pre == "default" else {}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (directory / "chat_template.jinja").write_text(CHAT)
    ids = {f"{name}_token_id": values[f"{name}_token_id"] for name in ("bos", "eos")}
    return {"vocab_size": len(tokens), **ids}


def byte_level_backend(values):
    """A tokenizer of bytes, as Qwen and Llama 3 publish theirs."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    tokens, types = values["tokens"], values["token_type"]
    merges = [tuple(merge.split(" ")) for merge in values["merges"]]
    words = {t: i for i, (t, kind) in enumerate(zip(tokens, types, strict=True)) if kind == 1}
    backend = tokenizers.Tokenizer(
        models.BPE(words, merges, ignore_merges=values["pre"] != "qwen2")
    )
    split = pre_tokenizers.Split(tokenizers.Regex(SPLITS[values["pre"]]), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([t for t, k in zip(tokens, types, strict=True) if k == 3])
    if values["pre"] == "qwen2":
        backend.normalizer = normalizers.NFC()
    else:
        bos = tokens[values["bos_token_id"]]
        single = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, values["bos_token_id"])]
        )
        backend.post_processor = single
    return backend


def sentencepiece_backend(values, directory, prefix):
    """A tokenizer of SentencePiece, and its tokenizer.model, as Llama 2, Mistral and Gemma have."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, processors
    from transformers.utils import sentencepiece_model_pb2_new as pb

    tokens, scores, types = values["tokens"], values["scores"], values["token_type"]
    model = pb.ModelProto()
    for token, score, kind in zip(tokens, scores, types, strict=True):
        model.pieces.add(piece=token, score=score, type=kind)
    model.trainer_spec.model_type = 2  # BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.vocab_size = len(tokens)
    model.normalizer_spec.add_dummy_prefix = prefix
    model.normalizer_spec.remove_extra_whitespaces = False
    (directory / "tokenizer.model").write_bytes(model.SerializeToString())
    ids = {token: i for i, token in enumerate(tokens)}
    pairs = [
        (ids[token], token[:at], token[at:])
        for token in tokens
        for at in range(1, len(token))
        if token[:at] in ids and token[at:] in ids
    ]
    merges = [(a, b) for _, a, b in sorted(pairs, key=lambda p: (p[0], ids[p[1]], ids[p[2]]))]
    backend = tokenizers.Tokenizer(
        models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    steps = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    parts += [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return backend


def write_base(directory: pathlib.Path, family: str, vocabularies: pathlib.Path) -> None:
    """A checkpoint of random weights, every norm away from its start."""
    import torch
    import transformers

    directory.mkdir(parents=True)
    architecture, vocabulary, changes = FAMILIES[family]
    file = vocabularies / f"ggml-vocab-{vocabulary}.gguf"
    ids = write_tokenizer(file, directory, prefix=not family.startswith("gemma"))
    torch.manual_seed(0)
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**{**SIZES, **ids, "pad_token_id": None, **changes})
    model = model_class(config).eval()
    with torch.no_grad():
        for value in model.parameters():
            value += (0.3 if value.ndim == 1 else 0.1) * torch.randn_like(value)
    model.save_pretrained(directory)


def jrl(*arguments: str) -> str:
    """What a command of JRL prints."""
    command = [sys.executable, "-m", "jrl", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def make(directory: pathlib.Path, families: list[str], vocabularies: pathlib.Path) -> None:
    """Trains, exports and samples a tiny model of each family."""
    rows = directory / "rows.jsonl"
    directory.mkdir(parents=True, exist_ok=True)
    row = {"question": PROMPT, "answer": "7", "solution": "She has 3 + 4 = 7 apples."}
    rows.write_text("".join(json.dumps(row) + "\n" for _ in range(8)))
    for family in families:
        place = directory / family
        shutil.rmtree(place, ignore_errors=True)
        run, exported = str(place / "run"), str(place / "exported")
        if family == "characters":
            more = ["configs/tiny.toml", "warmup.steps=2", "eval.every=0"]
            more += ["model.config.head_dim=32"]  # vLLM's kernels for CPUs have none of 16
        else:
            name = family.removesuffix("_lora")
            write_base(place / "base", name, vocabularies)
            more = ["method=sft", f"model.path={place / 'base'}", f"data.train={rows}"]
            more += ["data.template={question}", "data.max_prompt_tokens=64", "train.prompts=4"]
            more += ["eval.every=0", "model.dtype=float32", "sampling.group=1"]
            more += [f"sampling.max_new_tokens={NEW_TOKENS}", "optimizer.learning_rate=1e-3"]
            more += ["lora.rank=8"] if name != family else []
        jrl("train", *more, f"run.dir={run}", "train.steps=2")
        jrl("convert", run, exported)
        if family.endswith("_lora"):
            jrl("convert", run, str(place / "adapters"), "--adapters")
        prompt = "50352>" if family == "characters" else PROMPT
        sampled = jrl("sample", run, "--prompt", prompt, "--json", "sampling.temperature=0")
        expected = {"text": prompt} | forward(place / "exported", prompt)
        completion = json.loads(sampled)[0]["completion"]
        if completion != expected["completion"]:
            difference = f"jrl sample says {completion!r}, the export {expected['completion']!r}"
            raise SystemExit(f"{family}: {difference}")
        (place / "expected.json").write_text(json.dumps(expected, indent=1))
        print(f"{family}: exported; jrl sample: {completion!r}", flush=True)


def forward(directory: pathlib.Path, text: str) -> dict[str, list]:
    """The prompt's ids, the greedy completion's ids and their log-probabilities, by JRL."""
    import jax
    import jax.numpy as jnp

    from jrl.models import hf
    from jrl.models.file_tokenizer import load_tokenizer
    from jrl.models.transformer import transformer

    config, params = hf.load(directory, dtype="float32")
    network, tokenizer = transformer(config), load_tokenizer(directory)
    prompt = tokenizer.encode(text, add_special=True)
    length = min(config.max_length, 96)
    positions = jnp.arange(length)[None]

    @jax.jit
    def scores(params, tokens, at):
        hidden, _ = network.hidden(params, tokens, positions, jnp.ones_like(positions))
        return jax.nn.log_softmax(network.logits(params, hidden[0, at]))

    tokens: list[int] = []
    logprobs: list[float] = []
    while len(tokens) < min(NEW_TOKENS, length - len(prompt)):
        ids = prompt + tokens
        row = scores(params, jnp.asarray([ids + [0] * (length - len(ids))]), len(ids) - 1)
        tokens.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    ends = [i for i, token in enumerate(tokens) if token in tokenizer.stop_ids]
    text = tokenizer.decode(tokens[: min(ends, default=len(tokens))])
    return {"prompt": prompt, "tokens": tokens, "logprobs": logprobs, "completion": text}


# ---------------------------------------------------------------- the engines


def report(engine: str, family: str, expected: dict, ids: list[int], tokens, logprobs) -> bool:
    """Prints a row; whether the engine agrees."""
    same_ids = ids == expected["prompt"]
    same = tokens == expected["tokens"]
    gaps = [abs(a - b) for a, b in zip(logprobs, expected["logprobs"], strict=False)]
    print(
        f"{engine} | {family} | prompt ids {'equal' if same_ids else f'differ: {ids}'} | "
        f"{len(tokens)} greedy tokens {'equal' if same else f'differ: {tokens}'} | "
        f"largest difference of a log-probability {max(gaps, default=math.inf):.1e}",
        flush=True,
    )
    return same_ids and same and max(gaps) < CLOSE


def to_gguf(script: pathlib.Path, directory: pathlib.Path, *more: str) -> str:
    """Converts a directory with a script of llama.cpp; the new file."""
    file = f"{directory}.gguf"
    command = [sys.executable, str(script), str(directory), "--outfile", file, "--outtype", "f32"]
    done = subprocess.run([*command, *more], capture_output=True, text=True)
    if done.returncode:
        raise ValueError((done.stdout + done.stderr).strip().splitlines()[-1])
    return file


def llama_cpp(place: pathlib.Path, family: str, source: pathlib.Path) -> bool:
    """Converts an export to GGUF and compares llama.cpp's greedy tokens."""
    import llama_cpp

    expected = json.loads((place / "expected.json").read_text())
    adapters, lora = place / "adapters", None
    base = place / ("base" if adapters.exists() else "exported")
    try:
        file = to_gguf(source / "convert_hf_to_gguf.py", base)
        if adapters.exists():
            lora = to_gguf(source / "convert_lora_to_gguf.py", adapters, "--base", str(base))
    except ValueError as error:
        print(f"llama.cpp {llama_cpp.__version__} | {family} | not converted: {error}", flush=True)
        return False
    model = llama_cpp.Llama(
        **{"model_path": file, "lora_path": lora, "n_ctx": 128, "logits_all": True},
        **{"n_threads": 1, "type_k": 0, "type_v": 0, "verbose": False},  # a cache in float32
    )
    ids = model.tokenize(expected["text"].encode(), add_bos=True, special=True)
    tokens, logprobs = [], []
    model.eval(expected["prompt"])
    for _ in expected["tokens"]:
        row = model.scores[model.n_tokens - 1].astype("float64")
        row -= row.max()
        logprobs.append(float(row.max() - math.log(sum(map(math.exp, row)))))
        tokens.append(int(row.argmax()))
        model.eval(tokens[-1:])
    return report(f"llama.cpp {llama_cpp.__version__}", family, expected, ids, tokens, logprobs)


def vllm(place: pathlib.Path, family: str) -> bool:
    """Compares vLLM's greedy tokens, of merged weights or of a base with adapters."""
    import vllm as package
    from vllm.lora.request import LoRARequest

    expected = json.loads((place / "expected.json").read_text())
    adapters = place / "adapters"
    model = package.LLM(
        model=str(place / ("base" if adapters.exists() else "exported")),
        **{"dtype": "float32", "enforce_eager": True, "max_num_seqs": 1, "seed": 0},
        max_model_len=len(expected["prompt"]) + len(expected["tokens"]),
        enable_lora=adapters.exists(),
    )
    settings = package.SamplingParams(
        temperature=0, max_tokens=len(expected["tokens"]), logprobs=1, ignore_eos=True
    )
    request = LoRARequest("jrl", 1, str(adapters)) if adapters.exists() else None
    prompt = {"prompt_token_ids": expected["prompt"]}
    (done,) = model.generate(prompt, settings, lora_request=request, use_tqdm=False)
    ids, tokens = model.get_tokenizer().encode(expected["text"]), list(done.outputs[0].token_ids)
    rows = zip(done.outputs[0].logprobs, tokens, strict=True)
    logprobs = [row[token].logprob for row, token in rows]
    return report(f"vLLM {package.__version__}", family, expected, ids, tokens, logprobs)


def main() -> int:
    """Runs one of the three parts; 1 where an engine disagrees."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("part", choices=["make", "llama.cpp", "vllm"])
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("families", nargs="*", help=f"default: {', '.join(ALL)}")
    parser.add_argument("--vocabularies", type=pathlib.Path, help="models/ of llama.cpp")
    parser.add_argument("--source", type=pathlib.Path, help="a checkout of llama.cpp")
    args = parser.parse_args()
    if args.part == "make":
        make(args.directory, args.families or list(ALL), args.vocabularies)
        return 0
    families = args.families or [f for f in ALL if (args.directory / f).exists()]
    if args.part == "vllm" and len(families) > 1:  # an engine keeps its process's memory
        command = [sys.executable, __file__, "vllm", str(args.directory)]
        return max(subprocess.run([*command, family]).returncode for family in families)
    try_one = vllm if args.part == "vllm" else functools.partial(llama_cpp, source=args.source)
    agreed = [try_one(args.directory / family, family) for family in families]
    return int(not all(agreed))


if __name__ == "__main__":
    sys.exit(main())
