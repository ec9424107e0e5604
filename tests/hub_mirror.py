"""A cache of the Hugging Face Hub, written as huggingface_hub lays it out; no network is asked."""

import json
import pathlib
import shutil

COMMITS = {"first": "a" * 40, "second": "b" * 40}


def add(cache, repo, kind, files, *, commit=COMMITS["first"], branch="main"):
    """Writes a snapshot of a repository and lets a branch name it.

    ``files`` is a directory, or a dict of relative names and texts or bytes.
    """
    folder = pathlib.Path(cache) / f"{kind}s--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    if isinstance(files, dict):
        for name, content in files.items():
            path = snapshot / name
            path.parent.mkdir(parents=True, exist_ok=True)
            data = content if isinstance(content, bytes) else content.encode()
            path.write_bytes(data)
    else:
        shutil.copytree(files, snapshot)
    reference = folder / "refs" / branch
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(commit)
    return snapshot


def lines(rows):
    """Rows as the text of a JSONL file."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def checkpoint(directory, *, chat=False):
    """A tiny Qwen3 checkpoint with random weights and a tokenizer of letters and digits."""
    import jax
    import tokenizers
    from tokenizers import models, pre_tokenizers

    from jrl.models import hf
    from jrl.models.config import ModelConfig
    from jrl.models.transformer import transformer

    sizes = {"layers": 1, "embed_dim": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "mlp_dim": 32}
    words = ["<stop>", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789?+=<>|. \n"]
    backend = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    model = ModelConfig(vocab_size=80, max_length=640, **sizes)
    hf.save(directory, model, jax.jit(transformer(model).init)(jax.random.key(0)))
    backend.save(str(directory / "tokenizer.json"))
    about = {"eos_token": "<stop>"}
    if chat:
        about["chat_template"] = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}="
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
    return directory


def byte_tokenizer():
    """A tokenizer of bytes, with <end> as its control token; ``save`` writes tokenizer.json."""
    import tokenizers

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(letters)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return backend
