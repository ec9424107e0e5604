"""Resources of a server over thousands of requests, good and bad, and cost of log-probabilities.

    python -m benchmarks.serving --requests 10000
    python -m benchmarks.serving --alternatives --layers 4 --dim 256 --vocab 32000

Starts ``jrl serve`` with random weights as a process of its own and sends it requests from several
threads: completions and chats, whole and streamed, with and without log-probabilities, streams that
nobody reads to the end, and requests that must be refused. Prints one JSON: memory, threads and
open files of the server every so many requests. With ``--alternatives`` it prints tokens a second
without log-probabilities and with 0, 5 and 20 alternatives instead.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

KEY = "sesame"
JSON = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
TEXT = {"model": "m", "prompt": "how many eels?", "max_tokens": 12}
CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "how many whales?"}],
    "max_tokens": 12,
}


class Server(NamedTuple):
    """A running server: its process, host and port."""

    process: subprocess.Popen
    host: str
    port: int

    def usage(self) -> dict[str, float]:
        """Resident memory (MB), threads and open files."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        read = lambda name: int(re.findall(rf"{name}:\s+(\d+)", status)[0])  # noqa: E731
        files = len(os.listdir(f"/proc/{self.process.pid}/fd"))
        return {"rss_mb": read("VmRSS") / 1e3, "threads": read("Threads"), "files": files}

    def ask(self, path: str, data: bytes, headers: dict[str, str], read: int = -1) -> int:
        """The status of one request, whose reply is read up to ``read`` bytes."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        with contextlib.closing(connection):
            connection.request("POST", path, data, headers)
            response = connection.getresponse()
            response.read(read) if read >= 0 else response.read()
            return response.status

    def cut(self, data: bytes) -> int:
        """0, after an upload that the client leaves unfinished."""
        with socket.create_connection((self.host, self.port), timeout=120) as raw:
            raw.sendall(data)
        return 0


def write_checkpoint(directory: Path, sizes: argparse.Namespace) -> None:
    """A Hugging Face directory with random weights, a tokenizer of bytes and a chat template."""
    import jax
    import tokenizers

    from jrl.models import hf
    from jrl.models.config import ModelConfig
    from jrl.models.transformer import transformer

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(letters)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    shape = ModelConfig(
        vocab_size=max(sizes.vocab, 257),
        layers=sizes.layers,
        embed_dim=sizes.dim,
        heads=4,
        kv_heads=2,
        head_dim=sizes.dim // 4,
        mlp_dim=4 * sizes.dim,
        max_length=256,
    )
    hf.save(directory, shape, jax.device_get(transformer(shape).init(jax.random.key(0))))
    backend.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    tokens = {"eos_token": "<end>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokens))


@contextlib.contextmanager
def serving(sizes: argparse.Namespace) -> Iterator[Server]:
    """A server in a process of its own, until the context ends."""
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory), sizes)
        command = [sys.executable, "-m", "jrl", "serve", directory, "sampling.max_new_tokens=128"]
        command += ["data.max_prompt_tokens=128", "--name", "m", "--port", "0", "--api-key", KEY]
        command += ["--slots", str(sizes.slots), "--queue", "64"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            line = next((x for x in process.stdout if x.startswith("serving")), "")
            address = re.search(r"http://([\d.]+):(\d+)", line)
            if address is None:
                raise RuntimeError(f"the server ended with code {process.wait()}")
            yield Server(process, address[1], int(address[2]))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            if process.stdout is not None:
                process.stdout.close()


# ---------------------------------------------------------------- good and bad requests


def kinds(seed: int) -> list[tuple[str, Callable[[Server], int], int]]:
    """Name, request and expected status of each kind; 0 where there is no reply."""

    def text(read: int = -1, **more: Any) -> Callable[[Server], int]:
        data = json.dumps(TEXT | {"seed": seed} | more).encode()
        return lambda server: server.ask("/v1/completions", data, JSON, read)

    def chat(read: int = -1, **more: Any) -> Callable[[Server], int]:
        data = json.dumps(CHAT | {"seed": seed} | more).encode()
        return lambda server: server.ask("/v1/chat/completions", data, JSON, read)

    def raw(data: bytes, **headers: str) -> Callable[[Server], int]:
        return lambda server: server.ask("/v1/completions", data, JSON | headers)

    top = {"logprobs": True, "top_logprobs": 1 + seed % 20}
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    half = head + f"authorization: Bearer {KEY}\r\ncontent-length: 900\r\n\r\n".encode() + b'{"mod'
    return [
        ("text", text(), 200),
        ("greedy, alternatives", text(temperature=0, logprobs=5), 200),
        ("two, biased", text(n=2, logit_bias={"7": 3}, logprobs=seed % 21), 200),
        ("stop strings", text(stop=["e", "zz"], top_p=0.9), 200),
        ("chat", chat(**top), 200),
        ("stream", chat(stream=True, **top), 200),
        ("left stream", chat(20, stream=True, max_tokens=100, **top), 200),
        ("left reply", text(0, max_tokens=100), 200),
        ("not JSON", raw(b"{"), 400),
        ("nested", raw(b"[" * 5000), 400),
        ("too long", text(prompt="a" * 5000), 400),
        ("too many alternatives", chat(logprobs=True, top_logprobs=21), 400),
        ("another model", text(model="gpt"), 404),
        ("cold", text(temperature=-1), 400),
        ("too large", raw(b" " * (9 << 20)), 413),
        ("another type", raw(b"{}", **{"content-type": "text/plain"}), 415),
        ("no key", raw(json.dumps(TEXT).encode(), authorization="Bearer no"), 401),
        ("half an upload", lambda server: server.cut(half), 0),
        ("no request", lambda server: server.cut(b""), 0),
    ]


def soak(server: Server, requests: int, every: int, threads: int) -> dict[str, Any]:
    """Resources of the server at regular numbers of requests, and the requests' statuses.

    Requests that end in another way than their kind should are counted as unexpected.
    """
    samples = [{"requests": 0} | server.usage()]
    counts: collections.Counter[str] = collections.Counter()
    wrong: collections.Counter[str] = collections.Counter()

    def work(numbers: Sequence[int]) -> None:
        for number in numbers:
            name, send, expected = (listed := kinds(number))[number % len(listed)]
            try:
                status = send(server)
            except (OSError, http.client.HTTPException) as error:
                # A server may refuse a body by its length alone, and close while it is sent.
                status = 413 if name == "too large" else -1
                if status < 0:
                    wrong[f"{name}: {type(error).__name__}"] += 1
                    continue
            counts[str(status)] += 1
            if status != expected:
                wrong[f"{name}: {status}"] += 1

    for first in range(0, requests, every):
        numbers = range(first, min(first + every, requests))
        began = time.perf_counter()
        running = [
            threading.Thread(target=work, args=(numbers[i::threads],)) for i in range(threads)
        ]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        seconds = time.perf_counter() - began
        time.sleep(1.0)  # what clients left is noticed and ended
        samples.append({"requests": numbers[-1] + 1} | server.usage() | {"seconds": seconds})
        print(json.dumps(samples[-1]), file=sys.stderr, flush=True)
    settled = samples[1:]
    return {
        "usage": samples,
        "growth_mb": settled[-1]["rss_mb"] - settled[0]["rss_mb"],
        "threads": [each["threads"] for each in settled],
        "files": [each["files"] for each in settled],
        "statuses": dict(counts),
        "unexpected": dict(wrong),
    }


# ---------------------------------------------------------------- the price of alternatives


def alternatives(server: Server, requests: int, threads: int) -> dict[str, Any]:
    """Tokens a second and memory, by the number of alternatives asked for."""
    rates: dict[str, Any] = {}
    endless = {"max_tokens": 100, "logit_bias": {"256": -100}, "temperature": 1.0}
    for name, more in (
        ("none", {}),
        ("0", {"logprobs": 0}),
        ("5", {"logprobs": 5}),
        ("20", {"logprobs": 20}),
    ):
        data = json.dumps(TEXT | endless | more).encode()

        def work(count: int, data: bytes = data) -> None:
            for _ in range(count):
                assert server.ask("/v1/completions", data, JSON) == 200

        work(2)  # whatever is made on first use
        began = time.perf_counter()
        running = [
            threading.Thread(target=work, args=(requests // threads,)) for _ in range(threads)
        ]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        tokens = requests // threads * threads * endless["max_tokens"]
        rates[name] = {"tokens_s": tokens / (time.perf_counter() - began)} | server.usage()
    return rates


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--requests", type=int, default=10_000)
    p.add_argument("--every", type=int, default=1000, help="requests between measurements")
    p.add_argument("--threads", type=int, default=4, help="of clients")
    p.add_argument("--slots", type=int, default=8)
    p.add_argument("--layers", type=int, default=1)
    p.add_argument("--dim", type=int, default=16)
    p.add_argument("--vocab", type=int, default=257)
    p.add_argument("--alternatives", action="store_true", help="time log-probabilities instead")
    p.add_argument("--json", default="", help="also write the result to this file")
    chosen = p.parse_args(arguments)
    with serving(chosen) as server:
        if chosen.alternatives:
            result = alternatives(server, chosen.requests, chosen.threads)
        else:
            result = soak(server, chosen.requests, chosen.every, chosen.threads)
    text = json.dumps(result, indent=2)
    print(text)
    if chosen.json:
        Path(chosen.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
