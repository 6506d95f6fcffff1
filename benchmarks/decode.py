"""Decoding one sequence with a Llama of 8 billion parameters: the time of a token, compared with plain torch.

    python -m benchmarks.decode --dtype int8
    python -m benchmarks.decode --requests 1 --requests 8 --requests 32 --requests 64

The model has Llama 3.1 8B's shape and random weights, made on the device. A step reads one token and draws the next,
with a cache of 512 tokens; sampling is greedy. The runners are `Llama` as `generate` runs it ("accelerant"), the same
computation in torch's functions, step by step ("torch"), and that with each block under torch.compile and the whole
step in a CUDA graph ("compile", as gpt-fast does). In int8 every linear layer's weight, the output layer's too, is
8-bit integers with a scale for each output.

With --requests so many are decoded at once, by the engine and by others (benchmarks/decode_requests.py), after prompts
of 1,024 tokens, 128 more; on a CPU by a Llama of 22 million parameters in float32, after 64 tokens, 32 more.

The weights and the cache are a step's least bytes. On a CPU the model is tiny: the suite then only shows that it runs.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant.bench.record import Row, failure_note
from accelerant.bench.suite import Suite, SuiteCase, SuiteRun, check_names, option
from accelerant.bench.timer import Timing, first_ms
from accelerant.cli.bench import run_command
from accelerant.errors import AccelerantError, ConfigError
from accelerant.nn import LinearInt8, Llama, LlamaConfig
from accelerant.nn.models.language_model import Decoding, Sampling
from accelerant.nn.quantization import quantized_on_meta
from accelerant.runtime.provider import ComputeDevice
from benchmarks.decode_requests import CPU_SHAPE, Load, request_rows

__all__ = ["DTYPES", "PEERS", "DecodeSuite"]

DTYPES = ("bfloat16", "int8", "int4")
PEERS = ("torch", "compile", "transformers")

_TARGETS_MS = {"bfloat16": 1e3 / 200, "int8": 1e3 / 370}
"""Targets on an H200."""

_PROMPT, _WARM, _TOGETHER = 512, 6, 8
"""Tokens before the first that counts; steps before the first sample; steps of a sample."""

_SPREAD = 0.02
"""Standard deviation of the weights."""

_TINY = LlamaConfig(vocab_size=256, context=1024, layers=2, heads=4, kv_heads=2, width=64, hidden=96)
_TIMES, _ALLOWED = 2.0, 1e-3
"""A runner's logits may be _TIMES as far from float32's as torch's are, plus _ALLOWED of the largest: every runner
rounds to bfloat16 at other points, layer after layer."""


@dataclass(frozen=True)
class DecodeSuite(Suite):
    """Measure decoding of one sequence with a Llama of 8 billion parameters: milliseconds a token, tokens a second."""

    name = "decode"
    examples = ("", "--dtype int8 --against none", "--requests 1 --requests 64", "--out now.json --compare before.json")

    dtype: tuple[str, ...] = option(
        DTYPES, "Dtype of the weights: bfloat16, int8 or, with --requests, int4; may be repeated."
    )
    against: tuple[str, ...] = option(
        PEERS, "Peers: torch and compile of one sequence, transformers of several requests, or none.", same=True
    )
    requests: tuple[int, ...] = option(
        (), "Measure this many requests at once in place of one sequence; may be repeated.", same=True
    )
    budget_s: float = option(0.5, "Seconds of steps behind each figure.", min=0.0, same=True)

    def resolve(self, device: ComputeDevice) -> Self:
        """Return the suite with whole names of dtypes; raises ConfigError for an unknown dtype or peer, or no dtype."""
        names = ["bfloat16" if name == "bf16" else name for name in self.dtype]
        check_names("--dtype", "dtype", names, DTYPES)
        dtypes = tuple(dtype for dtype in DTYPES if dtype in names and (self.requests or dtype != "int4"))
        check_names("--against", "peer", self.against, PEERS)
        if not dtypes:
            raise ConfigError(f"--dtype: name one of {', '.join(DTYPES)}, the last one with --requests")
        return replace(self, dtype=dtypes)

    def prepare(self, run: SuiteRun) -> None:
        """Measure the copy rate, where a row is compared with it."""
        if self.requests:
            return
        run.require_ceiling("copy", self.budget_s)

    def cases(self, run: SuiteRun) -> list[SuiteCase]:
        """Return a case for each dtype; cases of one dtype share its model."""
        model = functools.lru_cache(maxsize=1)(functools.partial(_random_model, run.torch_device))
        if self.requests:
            dtypes = self.dtype if run.gpu else ("float32",)
            return [
                SuiteCase(f"{count} requests, {dtype}", functools.partial(self._measure_requests, dtype, model, count))
                for dtype in dtypes for count in self.requests
            ]  # fmt: skip
        runners = ", ".join(("accelerant", *(peer for peer in self.against if peer != "transformers")))
        return [
            SuiteCase(f"{dtype}, {runners}", functools.partial(self._measure, dtype, model))
            for dtype in self.dtype
            if dtype != "int4"
        ]

    def covers(self, row: Row) -> bool:
        """Return whether a baseline's row is of one of the dtypes."""
        return row.suite == self.name and any(dtype in row.case for dtype in self.dtype)

    def measure(self, run: SuiteRun) -> None:
        """Measure all cases and release the model."""
        try:
            super().measure(run)
        finally:
            gc.collect()
            if run.gpu:
                torch.cuda.empty_cache()

    @torch.no_grad()
    def _measure(self, dtype: str, make: Callable[[str], Llama], run: SuiteRun) -> None:
        run.progress("decode: making the model")
        model = make(dtype)
        for row in _rows(model, dtype, self, run):
            run.add(row)  # at once: an error keeps it

    @torch.no_grad()
    def _measure_requests(self, dtype: str, make: Callable[[str], Llama], count: int, run: SuiteRun) -> None:
        run.progress(f"decode: {count} requests, {dtype}")
        model = make(dtype) if run.gpu else _random_model(run.torch_device, dtype, CPU_SHAPE)
        load = Load(count, 1024, 128) if run.gpu else Load(count, 64, 32)
        for row in request_rows(model, dtype, load, run.torch_device, "transformers" in self.against):
            run.add(row)


def _random_model(where: torch.device, dtype: str, config: LlamaConfig | None = None) -> Llama:
    """Return the model with random weights of the usual size, or random integers in their place; norms are one."""
    config = config or (LlamaConfig(context=8192) if where.type == "cuda" else _TINY)
    with torch.device("meta"):
        model = Llama(config).to(torch.float32 if dtype == "float32" else torch.bfloat16)
    layers = quantized_on_meta(model, dtype) if dtype in ("int8", "int4") else {}
    model = model.to_empty(device=where)
    generator = torch.Generator(where).manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1)
        else:
            parameter.normal_(0, _SPREAD, generator=generator)
    for layer in layers.values():
        bits = 8 if isinstance(layer, LinearInt8) else 4
        integers = layer.weight_int8 if isinstance(layer, LinearInt8) else layer.weight_int4
        least = -128 if bits == 8 else 0
        integers.random_(least, least + 256, generator=generator)
        layer.scale.fill_(_SPREAD * 12**0.5 / 2**bits)
    return model.eval()


def _rows(model: Llama, dtype: str, suite: DecodeSuite, run: SuiteRun) -> Iterator[Row]:
    """Yield each runner's row, after its logits were compared with float32's.

    Raises:
        AccelerantError: our step gives other logits, or torch's fails, which the others are compared with.
    """
    where, config, against = run.torch_device, model.config, suite.against
    length = _PROMPT if run.gpu else 16
    prompt = torch.randint(config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0)).to(where)
    name = "Llama 8B" if run.gpu else "Llama, tiny"
    cached = 2 * config.layers * config.kv_heads * config.head_size * length * 2
    base = Row(
        "decode", name, f"1 token after {length}, {dtype}", "", "", bytes=_weight_bytes(model) + cached, ceiling="copy"
    )
    implementations = {
        "torch": "eager",
        "accelerant": "one CUDA graph" if run.gpu else "eager",
        "compile": "blocks compiled, one CUDA graph",
    }
    exact: Tensor | None = None
    allowed = 0.0
    for runner, implementation in implementations.items():
        if runner not in ("torch", "accelerant", *against):
            continue
        run.progress(f"decode: {dtype}, {runner}")
        row = replace(base, runner=runner, implementation=implementation)
        try:
            step: Any = (
                _OwnStep(model, prompt) if runner == "accelerant" else _PlainStep(model, prompt, runner == "compile")
            )
            logits = step.logits()
            if exact is None:
                exact = step.exact_logits()
                allowed = _TIMES * _distance(logits, exact) + _ALLOWED
        except (RuntimeError, AccelerantError) as error:
            note = failure_note(error)
            if runner == "accelerant":
                raise
            if runner == "torch":
                raise AccelerantError(f"decode, {dtype}: torch's step, which others are checked by: {note}") from error
            yield replace(row, note=note)
            continue
        distance = _distance(logits, exact)
        if not distance <= allowed:
            note = f"logits are {distance:.3g} of the largest from float32's, {allowed:.3g} are allowed"
            if runner == "accelerant":
                raise AccelerantError(f"decode, {dtype}: {note}")
            yield replace(row, note=note)
            continue
        if runner != "torch" or "torch" in against:
            timing = _timed(step.advance, where, suite.budget_s)
            target = _TARGETS_MS[dtype] if runner == "accelerant" and run.is_model("H200") else None
            yield replace(row.timed(timing), target=target, note=f"{1e3 / timing.p50_ms:,.1f} tokens/s")
        del step


def _distance(logits: Tensor, exact: Tensor) -> float:
    """Return the root mean square of the difference over the largest logit."""
    return float((logits - exact).square().mean().sqrt() / exact.abs().max())


def _weight_bytes(model: Llama) -> int:
    """Return the bytes of the weights that a step reads: all but the embedding, of which it reads a row."""
    sizes = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    return sum(sizes.values()) - (model.embed.weight.nbytes if model.lm_head is not None else 0)


def _timed(advance: Callable[[], object], where: torch.device, budget_s: float) -> Timing:
    """Return the milliseconds of a token, from consecutive steps between idle states of the device."""
    for _ in range(_WARM):
        advance()
    samples: list[float] = []
    began = time.perf_counter()
    while len(samples) < 5 or (time.perf_counter() - began < budget_s and len(samples) < 40):
        samples.append(first_ms(lambda: [advance() for _ in range(_TOGETHER)], where) / _TOGETHER)
    timing = Timing.of(samples)
    alone = statistics.median(first_ms(advance, where) for _ in range(5))
    return replace(timing, wall_ms=alone, back_to_back_ms=timing.p50_ms)


class _OwnStep:
    """Llama's decoding as `generate` runs it."""

    def __init__(self, model: Llama, prompt: Tensor) -> None:
        self._model, self._prompt = model, prompt
        room = min(512, model.config.context - prompt.shape[1])
        self._run = Decoding(model, prompt, room, Sampling(temperature=0))
        self._run.advance()

    def logits(self) -> Tensor:
        """Return the logits after the prompt's last token."""
        run = Decoding(self._model, self._prompt[:, :-1], 8, Sampling(temperature=0))
        run.advance()
        assert run.cache is not None  # for the type checker: more than one token may come
        return self._model.decode(self._prompt[:, -1], run.cache)

    def advance(self) -> None:
        """Decode one more token."""
        if self._run.end >= min(self._run.tokens.shape[1], self._model.config.context):
            raise AccelerantError("decode: the sequence is at its end")
        self._run.advance()


class _PlainStep:
    """The same computation in torch's functions, with a static cache and the position on the device."""

    def __init__(self, model: Llama, prompt: Tensor, compiled: bool) -> None:
        self._model, self._prompt = model, prompt
        room = min(512, model.config.context - prompt.shape[1])
        run = Decoding(model, prompt[:, :-1], room, Sampling(temperature=0))
        run.advance()
        assert run.cache is not None  # for the type checker: more than one token may come
        self._k, self._v = run.cache.k, run.cache.v
        self._cos, self._sin = _tables(model, self._k[0].shape[2], prompt.device)
        self._position = torch.tensor([prompt.shape[1] - 1], device=prompt.device)
        self._token = prompt[:, -1].clone()
        self._block: Callable[..., Tensor] = _block
        self._graph: torch.cuda.CUDAGraph | None = None
        if compiled:
            torch.compiler.reset()
            self._block = torch.compile(_block, options={"coordinate_descent_tuning": True})

    def exact_logits(self) -> Tensor:
        """Return the logits in float32, from the same weights and cache."""
        return self._step(torch.float32)

    def logits(self) -> Tensor:
        """Return the logits after the prompt's last token."""
        logits = self._step()
        if self._block is not _block and self._token.is_cuda:
            self._capture()
        return logits

    def advance(self) -> None:
        """Decode one more token."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._draw()

    def _draw(self) -> None:
        self._token.copy_(self._step().argmax(-1))
        self._position += 1

    def _step(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        model = self._model
        x = model.embed(self._token).to(dtype)
        cos, sin = (table.index_select(0, self._position).to(dtype) for table in (self._cos, self._sin))
        mask = (torch.arange(self._k[0].shape[2], device=x.device) <= self._position)[None, None, None]
        config = (model.config.heads, model.config.kv_heads, model.config.head_size, model.config.eps)
        for block, k, v in zip(model.blocks, self._k, self._v, strict=True):
            x = self._block(x, _weights(block), k.to(dtype), v.to(dtype), self._position, mask, cos, sin, config)
        x = F.rms_norm(x, x.shape[-1:], model.norm.weight.to(dtype), model.config.eps)
        return _linear(x, _weight(model.lm_head)).float()

    def _capture(self) -> None:
        """Capture the whole step, which is warm already, as one CUDA graph."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._draw()


def _tables(model: Llama, positions: int, where: torch.device) -> tuple[Tensor, Tensor]:
    from accelerant.ops.rope import rope_tables

    config = model.config
    cos, sin = rope_tables(positions, config.head_size, config.rope_base, config.rope_scaling, device=where)
    return cos, sin


def _weight(layer: Any) -> tuple[Tensor, Tensor | None]:
    return (layer.weight_int8, layer.scale) if isinstance(layer, LinearInt8) else (layer.weight, None)


def _weights(block: Any) -> tuple[Any, ...]:
    layers = (block.attention.qkv, block.attention.projection, block.mlp.gate_up, block.mlp.down)
    return (block.norm_1.weight, block.norm_2.weight, *map(_weight, layers))


def _linear(x: Tensor, weight: tuple[Tensor, Tensor | None]) -> Tensor:
    matrix, scale = weight
    y = F.linear(x, matrix.to(x.dtype))
    return y if scale is None else y * scale.to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _block(
    x: Tensor, weights: tuple[Any, ...], k: Tensor, v: Tensor, position: Tensor, mask: Tensor, cos: Tensor, sin: Tensor,
    config: tuple[int, int, int, float],
) -> Tensor:  # fmt: skip
    """Compute a block on one token x (1, width)."""
    norm_1, norm_2, qkv, projection, gate_up, down = weights
    heads, kv_heads, width, eps = config
    heads_of = _linear(F.rms_norm(x, x.shape[-1:], norm_1.to(x.dtype), eps), qkv).view(
        1, heads + 2 * kv_heads, 1, width
    )
    q, new_k, new_v = heads_of.split((heads, kv_heads, kv_heads), 1)
    k.index_copy_(2, position, _rotated(new_k, cos, sin))
    v.index_copy_(2, position, new_v)
    o = F.scaled_dot_product_attention(_rotated(q, cos, sin), k, v, attn_mask=mask, enable_gqa=True)
    x = x + _linear(o.reshape(1, heads * width), projection)
    gate, up = _linear(F.rms_norm(x, x.shape[-1:], norm_2.to(x.dtype), eps), gate_up).chunk(2, -1)
    return x + _linear(F.silu(gate) * up, down)


if __name__ == "__main__":
    run_command(DecodeSuite)
