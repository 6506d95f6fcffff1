"""Decoding one sequence with a Llama of 8 billion parameters: the time of a token, beside plain torch's.

The model has Llama 3.1 8B's shape and random weights, made on the device. A step reads one token and draws the next,
with a cache of 512 tokens behind it; sampling is greedy. The runners are `Llama` as `generate` runs it ("accelerant"),
the same computation in torch's functions, step by step ("torch"), and that with each block under torch.compile and the
whole step in a CUDA graph ("compile", as gpt-fast does). In int8 every linear layer's weight is 8-bit integers with a
scale for each output, the output layer's too.

A step cannot be faster than its weights and its cache are read: the rows' bytes are those. On a CPU the model is tiny:
the suite then only shows that it runs.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant.bench.ceilings import measure_copy
from accelerant.bench.journal import Journal
from accelerant.bench.pieces import Piece, measure_pieces
from accelerant.bench.record import Environment, Record, Row
from accelerant.bench.timer import Timing, synchronize
from accelerant.errors import AccelerantError, ConfigError
from accelerant.nn import LinearInt8, Llama, LlamaConfig, quantize
from accelerant.nn.models.generation import Decoding, Sampling
from accelerant.runtime.provider import ComputeDevice

__all__ = ["AGAINST", "DTYPES", "check_names", "measure", "run"]

DTYPES = ("bfloat16", "int8")
AGAINST = ("torch", "compile")

_TARGETS_OF = "H200"
_TARGETS_MS = {"bfloat16": 1e3 / 200, "int8": 1e3 / 370}
_PROMPT, _WARM, _TOGETHER = 512, 6, 8
"""Tokens before the first that counts; steps before the first sample; steps of a sample."""

_TINY = LlamaConfig(vocab_size=256, context=1024, layers=2, heads=4, kv_heads=2, width=64, hidden=96)
_TIMES, _ALLOWED = 2.0, 1e-3
"""A runner's logits may be so many times as far from float32's as torch's are, and so much of the largest more: every
runner rounds to bfloat16 in places of its own, layer after layer."""


def check_names(dtypes: Sequence[str], against: Sequence[str]) -> None:
    """Refuse a dtype or a peer that the suite does not have.

    Raises:
        ConfigError: names it and the ones there are.
    """
    for what, given, known in (("dtype", dtypes, DTYPES), ("peer", against, AGAINST)):
        for name in given:
            if name not in known:
                raise ConfigError(f"no {what} {name!r} in this suite; it has {', '.join(known)}")


def run(device: ComputeDevice, **options: Any) -> Record:
    """A record of its own; see measure."""
    record = Record(Environment.of(device))
    measure(record, device, **options)
    record.conclude()
    return record


def measure(
    record: Record,
    device: ComputeDevice,
    *,
    dtypes: Sequence[str] = DTYPES,
    against: Sequence[str] = AGAINST,
    budget_s: float = 0.5,
    journal: Journal | None = None,
    until: float | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Measure into a record.

    Args:
        record: gets ceilings and rows.
        device: where.
        dtypes: of DTYPES.
        against: of AGAINST.
        budget_s: seconds of steps behind each figure.
        journal: gets the rows of a dtype as soon as they are there; those that it has are left out.
        until: the time of time.monotonic() after which no further dtype is begun.
        progress: told what is measured next.

    Raises:
        ConfigError: a dtype or peer that there is not.
        AccelerantError: our step gives other logits than torch's.
    """
    check_names(dtypes, against)
    where = torch.device(device.torch_device)
    if "copy GB/s" not in record.ceilings:
        record.ceilings |= measure_copy(where, budget_s=budget_s)
    made = functools.cache(functools.partial(_made, where))
    pieces = [
        Piece(
            "decode",
            f"{dtype}, {', '.join(('accelerant', *against))}",
            functools.partial(_dtype, made, dtype, device, where, against, budget_s),
        )
        for dtype in DTYPES
        if dtype in dtypes
    ]  # bfloat16 first: int8 changes the model
    try:
        measure_pieces(record, pieces, where=where, journal=journal, until=until, progress=progress)
    finally:
        made.cache_clear()
        gc.collect()
        if where.type == "cuda":
            torch.cuda.empty_cache()


@torch.no_grad()
def _dtype(
    made: Callable[[], Llama], dtype: str, device: ComputeDevice, where: torch.device, against: Sequence[str],
    budget_s: float, record: Record, progress: Callable[[str], None],
) -> None:  # fmt: skip
    """The rows of a dtype."""
    progress("decode: making the model")
    model = made()
    if dtype == "int8":
        quantize(model, skip=())
    for row in _rows(model, dtype, device, where, against, budget_s, progress):
        record.rows.append(row)  # at once: what ends the run leaves it


def _made(where: torch.device) -> Llama:
    """Random weights of the usual size, the norms one."""
    config = LlamaConfig(context=8192) if where.type == "cuda" else _TINY
    with torch.device("meta"):
        model = Llama(config).to(torch.bfloat16)
    model = model.to_empty(device=where)
    generator = torch.Generator(where).manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1)
        else:
            parameter.normal_(0, 0.02, generator=generator)
    return model.eval()


def _rows(
    model: Llama, dtype: str, device: ComputeDevice, where: torch.device, against: Sequence[str], budget_s: float,
    progress: Callable[[str], None],
) -> Iterator[Row]:  # fmt: skip
    """Each runner's row."""
    config = model.config
    length = _PROMPT if where.type == "cuda" else 16
    prompt = torch.randint(config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0)).to(where)
    name = "Llama 8B" if where.type == "cuda" else "Llama, tiny"
    cached = 2 * config.layers * config.kv_heads * config.head_size * length * 2
    base = Row(
        "decode", name, f"1 token after {length}, {dtype}", "", "", bytes=_weight_bytes(model) + cached, ceiling="copy"
    )
    steps = {"accelerant": "one CUDA graph" if where.type == "cuda" else "eager"}
    steps |= {"torch": "eager", "compile": "blocks compiled, one CUDA graph"}
    exact: Tensor | None = None
    allowed = 0.0
    for runner in ("torch", "accelerant", "compile"):
        if runner not in ("accelerant", *against) and runner != "torch":
            continue
        progress(f"decode: {dtype}, {runner}")
        row = replace(base, runner=runner, implementation=steps[runner])
        try:
            step: Any = _Ours(model, prompt) if runner == "accelerant" else _Plain(model, prompt, runner == "compile")
            logits = step.logits()
            if exact is None:
                exact = step.exact_logits()
                allowed = _TIMES * _distance(logits, exact) + _ALLOWED
        except (RuntimeError, AccelerantError) as error:
            words = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
            if runner == "accelerant":
                raise
            if runner == "torch":  # what the others are compared with
                raise AccelerantError(f"decode, {dtype}: torch's step, which others are checked by: {words}") from error
            yield replace(row, note=words)
            continue
        distance = _distance(logits, exact)
        if not distance <= allowed:
            words = f"logits are {distance:.3g} of the largest from float32's, {allowed:.3g} are allowed"
            if runner == "accelerant":
                raise AccelerantError(f"decode, {dtype}: {words}")
            yield replace(row, note=words)
            continue
        if runner != "torch" or "torch" in against:
            timing = _timed(step.advance, where, budget_s)
            target = _TARGETS_MS[dtype] if runner == "accelerant" and _TARGETS_OF in device.name else None
            yield replace(
                row, p20=timing.p20_ms, p50=timing.p50_ms, p80=timing.p80_ms, samples=timing.samples, target=target,
                note=f"{1e3 / timing.p50_ms:,.1f} tokens/s",
            )  # fmt: skip
        del step


def _distance(logits: Tensor, exact: Tensor) -> float:
    """The root mean square of the difference, of the largest."""
    return float((logits - exact).square().mean().sqrt() / exact.abs().max())


def _weight_bytes(model: Llama) -> int:
    """What a step reads of the weights: all but the embedding, of which it reads a row."""
    kept = {id(each): each.nbytes for each in (*model.parameters(), *model.buffers())}
    return sum(kept.values()) - (model.embed.weight.nbytes if model.lm_head is not None else 0)


def _timed(advance: Callable[[], object], where: torch.device, budget_s: float) -> Timing:
    """Milliseconds a token, of steps one after the other: from idle device to idle device, several at a time."""
    for _ in range(_WARM):
        advance()
    samples: list[float] = []
    began = time.perf_counter()
    while len(samples) < 5 or (time.perf_counter() - began < budget_s and len(samples) < 40):
        synchronize(where)
        start = time.perf_counter()
        for _ in range(_TOGETHER):
            advance()
        synchronize(where)
        samples.append((time.perf_counter() - start) / _TOGETHER * 1e3)
    return Timing.of(samples)


class _Ours:
    """Llama's decoding as generate runs it."""

    def __init__(self, model: Llama, prompt: Tensor) -> None:
        self._model, self._prompt = model, prompt
        room = min(512, model.config.context - prompt.shape[1])
        self._run = Decoding(model, prompt, room, Sampling(temperature=0))
        self._run.advance()

    def logits(self) -> Tensor:
        """After the prompt's last token, decoded."""
        run = Decoding(self._model, self._prompt[:, :-1], 8, Sampling(temperature=0))
        run.advance()
        assert run.cache is not None  # for the type checker: more than one token may come
        return self._model.decode(self._prompt[:, -1], run.cache)

    def advance(self) -> None:
        """One token more."""
        if self._run.end >= min(self._run.tokens.shape[1], self._model.config.context):
            raise AccelerantError("decode: the sequence is at its end")
        self._run.advance()


class _Plain:
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
        """After the prompt's last token, computed in float32 from the same weights and the same cache."""
        return self._step(torch.float32)

    def logits(self) -> Tensor:
        """After the prompt's last token."""
        found = self._step()
        if self._block is not _block and self._token.is_cuda:
            self._capture()
        return found

    def advance(self) -> None:
        """One token more."""
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
        return _times(x, _weight(model.lm_head)).float()

    def _capture(self) -> None:
        """The whole step as one CUDA graph; it is warm already."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._draw()


def _tables(model: Llama, places: int, where: torch.device) -> tuple[Tensor, Tensor]:
    from accelerant.ops.rope.tables import rope_tables

    config = model.config
    cos, sin = rope_tables(places, config.head_size, config.rope_base, config.rope_scaling, device=where)
    return cos, sin


def _weight(layer: Any) -> tuple[Tensor, Tensor | None]:
    return (layer.weight, layer.scale) if isinstance(layer, LinearInt8) else (layer.weight, None)


def _weights(block: Any) -> tuple[Any, ...]:
    layers = (block.attention.qkv, block.attention.projection, block.mlp.gate_up, block.mlp.down)
    return (block.norm_1.weight, block.norm_2.weight, *map(_weight, layers))


def _times(x: Tensor, weight: tuple[Tensor, Tensor | None]) -> Tensor:
    matrix, scale = weight
    y = F.linear(x, matrix.to(x.dtype))
    return y if scale is None else y * scale.to(x.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _block(
    x: Tensor, weights: tuple[Any, ...], k: Tensor, v: Tensor, position: Tensor, mask: Tensor, cos: Tensor, sin: Tensor,
    config: tuple[int, int, int, float],
) -> Tensor:  # fmt: skip
    """A block on one token x (1, width)."""
    norm_1, norm_2, qkv, projection, gate_up, down = weights
    heads, kv_heads, width, eps = config
    found = _times(F.rms_norm(x, x.shape[-1:], norm_1.to(x.dtype), eps), qkv).view(1, heads + 2 * kv_heads, 1, width)
    q, new_k, new_v = found.split((heads, kv_heads, kv_heads), 1)
    k.index_copy_(2, position, _turned(new_k, cos, sin))
    v.index_copy_(2, position, new_v)
    o = F.scaled_dot_product_attention(_turned(q, cos, sin), k, v, attn_mask=mask, enable_gqa=True)
    x = x + _times(o.reshape(1, heads * width), projection)
    gate, up = _times(F.rms_norm(x, x.shape[-1:], norm_2.to(x.dtype), eps), gate_up).chunk(2, -1)
    return x + _times(F.silu(gate) * up, down)
