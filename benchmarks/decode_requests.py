"""Requests that are decoded at once: accelerant's engine, its own generate, and transformers' two ways, in turns.

Every request has the same lengths, so that `generate` has a batch without padding, and all come at once: this is the
engine's cost over a plain batch, not what it gains when lengths and arrivals differ (`benchmarks.serve` measures that).
The tokens of the engine, greedy, must be those that each request gets alone.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelerant.bench.record import OURS, Row, failure_note
from accelerant.bench.timer import Timing
from accelerant.errors import AccelerantError
from accelerant.nn import Llama, LlamaConfig
from accelerant.nn.serving import Engine, Finished, PromptLogprobs, Sampling, Token

CPU_SHAPE = LlamaConfig(
    vocab_size=8000, context=512, layers=6, heads=8, kv_heads=4, width=512, hidden=1408, rope_scaling=None, tied=True
)
"""22 million parameters."""

_ROUNDS, _BLOCK, _STEP_TOKENS = 3, 16, 2048


@dataclass(frozen=True)
class Load:
    """So many requests of one prompt length and one number of new tokens."""

    requests: int
    prompt: int
    new: int

    def prompts(self, vocabulary: int) -> Tensor:
        """Return random prompts (requests, prompt), the same each time."""
        return torch.randint(vocabulary, (self.requests, self.prompt), generator=torch.Generator().manual_seed(0))


@dataclass
class _Clock:
    """The receiver of a request's events, which notes when they came."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str | None = None

    def put(self, event: PromptLogprobs | Token | Finished) -> None:
        """Note a token, or why there are no more."""
        if isinstance(event, Token):
            self.tokens.append(event.id)
            self.times.append(time.perf_counter())
        elif isinstance(event, Finished):
            self.error = event.error


class _Served:
    """A run of the engine: all requests are submitted, then it steps until they have ended."""

    def __init__(self, model: Llama, load: Load, *, fast: bool) -> None:
        blocks = load.requests * -(-(load.prompt + load.new) // _BLOCK)
        self.engine = Engine(model, blocks, _STEP_TOKENS, block_size=_BLOCK, fast=fast, start=False)
        self.load, self.prompts = load, load.prompts(model.config.vocab_size).tolist()
        self.first: list[float] = []
        self.between: list[float] = []
        self.decoded: list[float] = []  # tokens per second once every request has its first one

    def __call__(self) -> None:
        """Serve the requests."""
        self.serve(self.prompts)

    def serve(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the tokens of each prompt; notes the times to the first token and between tokens, in seconds."""
        began, clocks = time.perf_counter(), [_Clock() for _ in prompts]
        options: dict[str, Any] = {
            "max_tokens": self.load.new,
            "prefix_cache": False,
        }  # each round computes its prompts
        for ids, clock in zip(prompts, clocks, strict=True):
            self.engine.submit(ids, Sampling(temperature=0), events=clock, **options)
        while self.engine.step():
            pass
        for clock in clocks:
            if clock.error is not None:
                raise AccelerantError(f"decode: {clock.error}")
            self.first.append(clock.times[0] - began)
            self.between += [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]
        last, end = max(clock.times[0] for clock in clocks), max(clock.times[-1] for clock in clocks)
        self.decoded.append(sum(at > last for clock in clocks for at in clock.times) / max(end - last, 1e-9))
        return [clock.tokens for clock in clocks]

    def note(self) -> str:
        """Return the rate of decoding alone, which prompts do not slow, and the times of the rounds so far."""
        first, between, decoded = sorted(self.first), sorted(self.between), sorted(self.decoded)
        return (
            f"{decoded[len(decoded) // 2]:,.1f} tokens/s after the last prompt; "
            f"first token {1e3 * first[len(first) // 2]:,.1f} ms p50, {1e3 * first[len(first) * 99 // 100]:,.1f} p99; "
            f"between tokens {1e3 * between[len(between) // 2]:,.2f} ms p50"
        )


def request_rows(model: Llama, dtype: str, load: Load, where: torch.device, against: bool) -> Iterator[Row]:
    """Yield a row for each way to decode the requests; milliseconds are of all of them, from the first to the last.

    Raises:
        AccelerantError: the engine gives a request other tokens than alone.
    """
    prompts = load.prompts(model.config.vocab_size).to(where)
    served, fast = _Served(model, load, fast=False), _Served(model, load, fast=True)
    alone = served.serve(served.prompts[-1:])
    if served.serve(served.prompts)[-1:] != alone:
        raise AccelerantError(f"decode, {load.requests} requests: the last one has other tokens than alone")
    ways: dict[tuple[str, str], Callable[[], object]] = {
        (OURS, "engine"): served,
        (OURS, "engine, fast"): fast,
        ("generate", "accelerant's, one batch"): lambda: model.generate(prompts, load.new, temperature=0),
    }
    shape = "Llama 8B" if where.type == "cuda" else "Llama, 22M"
    count = "1 request" if load.requests == 1 else f"{load.requests} requests"
    case = f"{count} of {load.prompt} + {load.new} tokens, {dtype}"
    row = Row("decode", shape, case, "", "")
    with tempfile.TemporaryDirectory() as folder:
        if against and dtype in ("bfloat16", "float32") and find_spec("transformers") is not None:
            ways |= _transformers(model, load, Path(folder), where)
        yield from _in_turns(ways, row, load, where)
    del served, fast, ways
    gc.collect()


def _in_turns(
    ways: dict[tuple[str, str], Callable[[], object]], row: Row, load: Load, where: torch.device
) -> Iterator[Row]:  # fmt: skip
    """Yield the rows of ways that take turns; what fails has a row with the reason."""
    samples: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    peaks: dict[tuple[str, str], int] = {}
    failed: dict[tuple[str, str], str] = {}
    for round_ in range(_ROUNDS + 1):  # the first is not counted
        for way, call in ways.items():
            if way in failed:
                continue
            if isinstance(call, _Served) and round_ == 1:
                call.first.clear()
                call.between.clear()
                call.decoded.clear()
            try:
                milliseconds, peaks[way] = _measured(call, where)
            except (RuntimeError, AccelerantError, AttributeError, TypeError, ValueError) as error:
                if way[0] == OURS:
                    raise
                failed[way] = failure_note(error)
                continue
            samples[way].append(milliseconds)
    for (runner, implementation), call in ways.items():
        way = runner, implementation
        named = replace(row, runner=runner, implementation=implementation)
        if way in failed:
            yield replace(named, note=failed[way])
            continue
        timing = Timing.of(samples[way][1:])
        note = f"{1e3 * load.requests * load.new / timing.p50_ms:,.1f} tokens/s"
        if isinstance(call, _Served):
            note += f"; {call.note()}"
        yield replace(named.timed(timing), note=note, peak_bytes=peaks[way] or None)


def _measured(call: Callable[[], object], where: torch.device) -> tuple[float, int]:
    """Return milliseconds from an idle device to an idle one, and the peak of its memory."""
    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats(where)
        torch.cuda.synchronize(where)
    began = time.perf_counter()
    call()
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    milliseconds = 1e3 * (time.perf_counter() - began)
    return milliseconds, torch.cuda.max_memory_allocated(where) if where.type == "cuda" else 0


def _transformers(
    model: Llama, load: Load, folder: Path, where: torch.device
) -> dict[tuple[str, str], Callable[[], object]]:  # fmt: skip
    """Return transformers' generate and continuous batching of the same weights."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    model.save_pretrained(folder)
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=model.embed.weight.dtype).to(where).eval()
    theirs.generation_config.eos_token_id = None  # every request has its whole length
    prompts = load.prompts(model.config.vocab_size)
    options: dict[str, Any] = {"max_new_tokens": load.new, "do_sample": False, "pad_token_id": 0}
    config = GenerationConfig(**options)

    def generate() -> object:
        with torch.inference_mode():
            on_device = prompts.to(where)
            return theirs.generate(on_device, attention_mask=torch.ones_like(on_device), **options)

    def continuous() -> object:
        return theirs.generate_batch(prompts.tolist(), generation_config=config, progress_bar=False)

    return {("transformers", "generate"): generate, ("transformers", "continuous batching"): continuous}
