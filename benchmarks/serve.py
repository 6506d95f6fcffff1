"""Serving a language model to many users at once, beside other engines: tokens a second, waiting times, memory.

    python -m benchmarks.serve --shape small --users 1 --users 16
    python -m benchmarks.serve --model ./Llama-3.1-8B --device cuda --against vllm --out runs/serve.json

Each user sends a request, reads its answer, and sends the next. Lengths are drawn once, the same for all engines:
prompts of 16 to 1,024 tokens (log-normal, median 128, sigma 0.7), answers of 4 to 256 (median 64, sigma 0.7), tokens
uniform, greedy, ends of text ignored. The engines are `accelerant serve` over HTTP ("accelerant") and its engine
without HTTP ("engine"), transformers' continuous batching ("continuous"), transformers' generate in batches of all
users padded to the left ("generate"), and `vllm serve` ("vllm", where it is installed), each in a process of its own.

Prints a table, what loses to a peer first; --out writes it as a record of benchmarks, after each engine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerant.bench.record import OURS, BenchmarkRecord, Environment, Row
from accelerant.runtime import registry
from accelerant.runtime.monitoring.monitor import sample

ENGINES = ("accelerant", "engine", "continuous", "generate", "vllm")
SHAPES = {
    "tiny": (64, 2, 96), "small": (384, 6, 1024), "1b": (2048, 16, 8192), "8b": (4096, 32, 14336),
}  # fmt: skip
"""Width, layers and hidden size of random models; heads of 64 (tiny: 16), a quarter of them for keys and values."""
_REQUESTS_A_USER, _LEAST = 3, 12


@dataclass(slots=True)
class Request:
    """A prompt, how many tokens are wanted, and when they came."""

    ids: list[int]
    tokens: int
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    counted: int = 0


def requests_for(users: int, vocabulary: int, context: int) -> list[Request]:
    """Return the requests of a cell, the same each time."""
    draw = random.Random(users)

    def length(median: float, least: int, most: int) -> int:
        return min(most, max(least, round(draw.lognormvariate(math.log(median), 0.7))))

    found = []
    for _ in range(max(_LEAST, _REQUESTS_A_USER * users)):
        tokens = length(64, 4, min(256, context // 4))
        prompt = length(128, 16, min(1024, context - tokens))
        found.append(Request([draw.randrange(4, vocabulary) for _ in range(prompt)], tokens))
    return found


# --- engines in this process; each is run in a process of its own ----------------------------------------------------


def _run_engine(folder: Path, device: str, requests: list[Request], users: int) -> None:
    """Run our engine without HTTP."""
    import queue

    from accelerant.nn.models.llama import load_model
    from accelerant.nn.serving import Engine, Finished, Sampling

    model, _ = load_model(folder, device=device)
    room = sum(-(-(len(one.ids) + one.tokens) // 16) for one in requests)
    ready: queue.SimpleQueue[None] = queue.SimpleQueue()

    class Taker:
        def __init__(self, request: Request) -> None:
            self.request = request

        def put(self, event: Any) -> None:
            if isinstance(event, Finished):
                self.request.counted = event.usage.completion_tokens
                ready.put(None)
            else:
                self.request.times.append(time.perf_counter())

    with Engine(model, min(room, 1 << 15), 512) as engine:
        answers = [engine.submit(requests[0].ids, Sampling(temperature=0), max_tokens=4)]  # whose deletion cancels
        list(answers[0])
        for number, request in enumerate(requests):
            if number >= users:
                ready.get()
            request.sent = time.perf_counter()
            options: dict[str, Any] = {"max_tokens": request.tokens, "ignore_eos": True, "events": Taker(request)}
            answers.append(engine.submit(request.ids, Sampling(temperature=0), **options))
        for _ in range(min(users, len(requests))):
            ready.get()


def _transformers(folder: Path, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device).eval()
    model.generation_config.update(eos_token_id=None, pad_token_id=0, do_sample=False)
    return model


def _run_continuous(folder: Path, device: str, requests: list[Request], users: int) -> None:
    """Run transformers' continuous batching."""
    from transformers import ContinuousBatchingConfig

    model = _transformers(folder, device)
    waiting = iter(enumerate(requests))
    blocks = min(1 << 10, sum(-(-(len(one.ids) + one.tokens) // 256) + 1 for one in requests))
    config = ContinuousBatchingConfig(block_size=256, num_blocks=blocks, max_batch_tokens=512)
    with model.continuous_batching_context_manager(continuous_batching_config=config) as manager:

        def send() -> None:
            if (following := next(waiting, None)) is not None:
                number, request = following
                request.sent = time.perf_counter()
                options = {"max_new_tokens": request.tokens, "eos_token_id": -1, "streaming": True}
                manager.add_request(request.ids, request_id=str(number), **options)

        for _ in range(users):
            send()
        left = len(requests)
        while left:
            result = manager.get_result(timeout=60)
            if result is None:
                raise RuntimeError("continuous batching gave nothing for a minute")
            request, now = requests[int(result.request_id)], time.perf_counter()
            new = len(result.generated_tokens) - request.counted
            request.times += [now] * max(0, new)
            request.counted = len(result.generated_tokens)
            if result.is_finished():
                left -= 1
                send()


def _run_generate(folder: Path, device: str, requests: list[Request], users: int) -> None:
    """Run transformers' generate in batches of all users, padded to the left."""
    import torch

    model = _transformers(folder, device)

    class Clock:
        def put(self, value: torch.Tensor) -> None:
            now = time.perf_counter()
            if begun:  # the first call has the prompts
                for one in batch:
                    if len(one.times) < one.tokens:
                        one.times.append(now)
            begun.append(now)

        def end(self) -> None:
            pass

    for first in range(0, len(requests), users):
        batch, begun = requests[first : first + users], list[float]()
        longest = max(len(one.ids) for one in batch)
        ids = torch.tensor([[0] * (longest - len(one.ids)) + one.ids for one in batch], device=device)
        mask = torch.tensor([[0] * (longest - len(one.ids)) + [1] * len(one.ids) for one in batch], device=device)
        for one in batch:
            one.sent = time.perf_counter()
        processor = _Timed(Clock())
        model.generate(
            ids, attention_mask=mask, max_new_tokens=max(one.tokens for one in batch), logits_processor=[processor]
        )
        processor.clock.put(ids)
        for one in batch:
            one.counted = one.tokens


class _Timed:
    """A logits processor that tells the time of each step."""

    def __init__(self, clock: Any) -> None:
        self.clock = clock

    def __call__(self, ids: Any, scores: Any) -> Any:
        self.clock.put(ids)
        return scores


# --- servers over HTTP -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _server(name: str, folder: Path, device: str, work: Path) -> Iterator[tuple[str, int]]:
    """Start a server; yield its address and its process."""
    port = _free_port()
    if name == "accelerant":
        command = [sys.executable, "-m", "accelerant", "serve", "--device", device, "--model", f"model={folder}"]
        command += ["--directory", str(work / "service"), "--log", "text", "--port", str(port)]
    else:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        command += ["--served-model-name", "model", "--port", str(port)]
    with (work / f"{name}.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            _wait(f"http://127.0.0.1:{port}/v1/models", process, work / f"{name}.log")
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    import httpx

    end = time.monotonic() + 900
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended:\n{log.read_text()[-2000:]}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5, trust_env=False).status_code == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"{url} does not answer")


async def _load(url: str, requests: list[Request], users: int) -> None:
    """Send the requests, as many at once as there are users."""
    import httpx

    waiting = iter(requests)
    limits = httpx.Limits(max_connections=users)
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False, limits=limits) as client:

        async def user() -> None:
            for request in waiting:
                body = {
                    "model": "model", "prompt": request.ids, "max_tokens": request.tokens, "temperature": 0,
                    "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
                }  # fmt: skip
                request.sent = time.perf_counter()
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    answer.raise_for_status()
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            event = json.loads(line[6:])
                            if event.get("choices"):
                                request.times.append(time.perf_counter())
                            if event.get("usage"):
                                request.counted = event["usage"]["completion_tokens"]

        await asyncio.gather(*(user() for _ in range(users)))


# --- figures ---------------------------------------------------------------------------------------------------------


def summary(requests: list[Request], memory_bytes: int) -> dict[str, float]:
    """Return the figures of a cell; times in milliseconds."""
    begun, ended = min(one.sent for one in requests), max(one.times[-1] for one in requests)
    first = [1e3 * (one.times[0] - one.sent) for one in requests]
    between = [1e3 * (b - a) for one in requests for a, b in zip(one.times, one.times[1:], strict=False)]
    wrong = [one for one in requests if one.counted != one.tokens]
    if wrong:
        raise RuntimeError(f"{len(wrong)} answers have {wrong[0].counted} tokens instead of {wrong[0].tokens}")
    return {
        "tokens_s": sum(one.counted for one in requests) / (ended - begun),
        "first_ms_p50": _quantile(first, 0.5), "first_ms_p99": _quantile(first, 0.99),
        "between_ms_p50": _quantile(between, 0.5), "between_ms_p99": _quantile(between, 0.99),
        "memory_bytes": memory_bytes,
    }  # fmt: skip


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, math.floor(share * len(values)))] if values else 0.0


def _peak_bytes(pid: int, device: str) -> int:
    """Return the device's memory in use; on the CPU the peak of a process and those that it started."""
    if device != "cpu":
        return int(sample(device).memory_used_bytes or 0)
    found = 0
    for each in [pid, *_children(pid)]:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{each}/status").read_text().splitlines()
            found += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return found


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        here = [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return here + [one for child in here for one in _children(child)]
    return []


def write_folder(path: Path, shape: str) -> Path:
    """Write a random Llama with a tokenizer of words: each token is text at once."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers

    from accelerant.nn import Llama, LlamaConfig

    width, layers, hidden = SHAPES[shape]
    heads = width // (16 if shape == "tiny" else 64)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128256 if shape == "8b" else 4096, context=2048, layers=layers, heads=heads,
        kv_heads=max(1, heads // 4), width=width, hidden=hidden, rope_scaling=None,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16 if shape in ("1b", "8b") else torch.float32)
    Llama(config).save_pretrained(path)
    torch.set_default_dtype(torch.float32)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(config.vocab_size)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def _measured(name: str, given: argparse.Namespace, folder: Path, users: int, work: Path) -> dict[str, float]:
    if name in ("accelerant", "vllm"):
        requests = _requests(folder, users)
        with _server(name, folder, given.device, work) as (url, pid):
            asyncio.run(_load(url, _requests(folder, 1)[:2], 1))  # the first call compiles what it needs
            asyncio.run(_load(url, requests, users))
            return summary(requests, _peak_bytes(pid, given.device))
    command = [
        sys.executable, "-m", "benchmarks.serve", "--worker", name, "--model", str(folder), "--users", str(users),
    ]  # fmt: skip
    done = subprocess.run([*command, "--device", given.device], capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "it ended")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _requests(folder: Path, users: int) -> list[Request]:
    fields = json.loads((folder / "config.json").read_text())
    return requests_for(users, fields["vocab_size"], min(2048, fields["max_position_embeddings"]))


def rows_of(model: str, users: int, engine: str, figures: dict[str, float]) -> list[Row]:
    """Return a record's rows of a cell."""
    ours = {"accelerant": "over HTTP", "engine": "engine"}

    def row(what: str, unit: str, value: float, note: str = "") -> Row:
        case = f"{users} user{'s' * (users != 1)}, {what}"
        runner = OURS if engine in ours else engine
        return Row("serve", model, case, runner, ours.get(engine, engine), unit, value, value, value, note=note)

    return [
        row("a token", "us", 1e6 / figures["tokens_s"], f"{figures['tokens_s']:,.1f} tokens/s"),
        row("first token p99", "ms", figures["first_ms_p99"], f"p50 {figures['first_ms_p50']:,.1f} ms"),
        row("between tokens p99", "ms", figures["between_ms_p99"], f"p50 {figures['between_ms_p50']:,.1f} ms"),
        row("memory", "MiB", figures["memory_bytes"] / 2**20),
    ]


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, help="Folder of a Llama; default: random weights of --shape.")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--users", type=int, action="append", help="Users at once; may be repeated.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--against", choices=ENGINES, action="append", help="Engines; default: all that are installed.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        requests, runs = _requests(given.model, given.users[0]), {
            "engine": _run_engine, "continuous": _run_continuous, "generate": _run_generate,
        }  # fmt: skip
        run: Callable[..., None] = runs[given.worker]
        run(given.model, given.device, requests, given.users[0])
        print(json.dumps(summary(requests, _peak_bytes(os.getpid(), given.device))))
        return
    chosen = given.against or [name for name in ENGINES if name != "vllm" or importlib.util.find_spec("vllm")]
    record = BenchmarkRecord(Environment.of(registry.find_device(given.device, torch_tensors=True)))
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        folder = given.model or write_folder(work / "model", given.shape)
        model = folder.name if given.model else given.shape
        for users in given.users or [1, 16, 64, 256]:
            for name in dict.fromkeys(["accelerant", *chosen]):
                try:
                    figures = _measured(name, given, folder, users, work)
                except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                    print(f"{name}, {users} users: failed: {error}", file=sys.stderr)
                    continue
                print(f"{name}, {users} users: {figures['tokens_s']:,.1f} tokens/s", file=sys.stderr)
                record.rows += rows_of(model, users, name, figures)
                if given.out:
                    record.save(given.out)
    record.conclude()
    print(record.table())
    if given.out:
        record.save(given.out)


if __name__ == "__main__":
    main()
