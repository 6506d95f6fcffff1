"""The processes of the suite scale: each measures its part of a case; rank 0 appends the results to a file.

Steps without communication are built before torch.distributed is initialized, so that nothing reduces their gradients,
and run at the same time on all devices. Every result is compared with that of one process, or with plain PyTorch's,
before its time counts.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from accelerant import distributed, ops
from accelerant.bench.record import DEVICE, OURS
from accelerant.bench.suites import size_name
from accelerant.errors import AccelerantError, UnsupportedCase
from accelerant.nn import GPT, GPTConfig, Llama, LlamaConfig
from accelerant.nn.models.language_model import Decoding, Sampling
from accelerant.nn.optim import AdamW
from accelerant.nn.train.step import TrainStep
from accelerant.runtime.processes import PeerMemory, PeerSum, PeerSums
from accelerant.runtime.streams.graphs import Graph
from benchmarks.model import MODELS, TokenBatches
from benchmarks.plain_models import PlainGPT, PlainLlama
from benchmarks.scale_model import BESIDE, COPIED, OPS, PEER_SUM, WAITS

__all__ = ["work"]

_SHARDED = {
    True: (LlamaConfig(layers=16, width=2048, hidden=8192, tied=True, context=2048), 4),
    False: (LlamaConfig(256, 64, 2, 4, 2, 64, 96, rope_scaling=None), 2),
}
"""Config and sequences a process of the sharded model, on a GPU Llama 3.2 1B, and on a CPU."""

_DECODED = {
    True: (LlamaConfig(context=8192), 512),
    False: (LlamaConfig(256, 256, 2, 8, 8, 64, 96, rope_scaling=None), 16),
}
"""Config and prompt of the decoded model, Llama 3.1 8B."""

_ATTENTION = {True: (1, 32, 8, 1 << 16, 128), False: (1, 4, 2, 512, 32)}
"""(B, Hq, Hkv, T, D) of attention over split sequences."""

_LEAST_COPIED = 1 << 20
"""Bytes from which on sums by copy engines are measured."""

_DATA_X = {32: 0.98, 4: 0.93}
_SHARDED_X, _TENSOR_X, _CONTEXT_X = 1.1, 1.6, 1.85
"""Targets on two H200: of the speed of one device alone by batch; of torch's sharded step; of one device."""

_Step = Callable[[Tensor, Tensor], Tensor]

_WARM_UP = 4
_RATE = 1e-4
_PATIENCE_S = 120.0
"""Longest wait for another process in a collective, which then fails."""

_LOSS_NEAR = 5e-3
"""Allowed relative distance of two losses of the same rows, computed with bfloat16 products."""

_LOGITS_TIMES, _ALLOWED = 2.0, 1e-3
"""A split model's logits may be _LOGITS_TIMES as far from float32's as those of one device, plus _ALLOWED."""

_ATTENTION_NEAR = 2e-2
"""Allowed distance of split attention from the whole one's, which rounds at other places, of the values."""


def work(settings: Mapping[str, Any], out: Path) -> None:
    """Measure one process's part of the case `settings["case"]`."""
    where = torch.device("cpu")
    if settings["gpu"]:
        where = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(where)
    this = _Process(where, settings["steps"], settings["peer"], out)
    cases: dict[str, Callable[[_Process], None]] = {
        "collectives": _collectives, "sharded": _sharded, "tensor": _tensor, "context": _context,
        "data": functools.partial(_data, parameters=settings["parameters"], batches=settings["batch"]),
    }  # fmt: skip
    cases[settings["case"]](this)
    dist.barrier()  # none ends while another one reads from it
    dist.destroy_process_group()


class _Process:
    """This process's device, and how it measures."""

    def __init__(self, where: torch.device, steps: int, peer: bool, out: Path) -> None:
        self.where, self.steps, self.peer, self.out = where, steps, peer, out
        self.gpu = where.type == "cuda"
        self.size = int(os.environ["WORLD_SIZE"])
        self.precision = torch.bfloat16 if self.gpu else None

    def meet(self) -> None:
        """Initialize torch.distributed."""
        backend = {"backend": "cpu:gloo,cuda:nccl", "device_id": self.where} if self.gpu else {"backend": "gloo"}
        dist.init_process_group(**backend, timeout=timedelta(seconds=_PATIENCE_S))

    @property
    def mesh(self) -> Any:
        return init_device_mesh(self.where.type, (self.size,))

    def emit(
        self, op: str, case: str, implementation: str, samples: Sequence[float], *, runner: str = DEVICE, **facts: Any
    ) -> None:  # fmt: skip
        """Append a row; in rank 0. For `facts` see `rows` of scale.py."""
        if dist.get_rank() == 0:
            row = {"op": op, "case": case, "runner": runner, "implementation": implementation, "samples": list(samples)}
            with self.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**row, **facts}) + "\n")

    def compare(
        self, op: str, case: str, alone: Sequence[float], ours: Sequence[float], aim: float,
        predict: list[Any] | None = None, **facts: Any,
    ) -> None:  # fmt: skip
        """Append the rows of one device and of all."""
        slowest = self.slowest(alone)
        self.emit(f"{op} on one device", case, "whole", slowest)
        self.emit(
            op, case, "split", ours, runner=OURS, alone_ms=statistics.median(slowest), than="on one device", aim=aim,
            predict=predict, **facts,
        )  # fmt: skip

    def mean(self, value: Tensor | float) -> float:
        """Return the mean over the processes."""
        total = torch.as_tensor(value, dtype=torch.float64, device=self.where).detach().clone().reshape(1)
        dist.all_reduce(total)
        return float(total) / self.size

    def slowest(self, samples: Sequence[float]) -> list[float]:
        """Return the largest of each sample over the processes: with communication all wait for the slowest."""
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, list(samples))
        return [max(each) for each in zip(*every, strict=True)]

    def free(self) -> None:
        """Release what no object holds any more, and count the peak of memory anew."""
        gc.collect()
        if self.gpu:
            torch.cuda.synchronize(self.where)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.where)

    def peak(self) -> int | None:
        """Return the largest peak of memory of a process since `free`."""
        if not self.gpu:
            return None
        peak = torch.tensor([torch.cuda.max_memory_allocated(self.where)], device=self.where)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        return int(peak)

    def captured(self, call: Callable[[], object], times: int) -> Callable[[], object]:
        """Return a function that makes so many calls: on a GPU the replay of a graph, as in a captured step."""
        if not self.gpu:
            return call
        graph = Graph("collectives")
        graph.capture(lambda: [call() for _ in range(times)], warm_up=1)
        return graph.replay

    def in_turns(self, calls: Sequence[Callable[[], object]], together: int = 1) -> list[list[float]]:
        """Return for each call its wall times in ms, of `together` calls in a row; calls take turns.

        Each process makes as many calls, since collectives wait for all.
        """
        together = together if self.gpu else 1

        def once(call: Callable[[], object]) -> float:
            start = time.perf_counter()
            for _ in range(together):
                call()
            if self.gpu:
                torch.cuda.synchronize(self.where)
            return 1e3 * (time.perf_counter() - start) / together

        for call in calls:  # each becomes a graph by itself
            for _ in range(_WARM_UP + 1):
                call()
        rounds = [[once(call) for call in calls] for _ in range(1 + self.steps)]
        return [list(times) for times in zip(*rounds[1:], strict=True)]


def _require_near(what: str, found: float, wanted: float, near: float = _LOSS_NEAR) -> None:
    if not abs(found - wanted) <= near * abs(wanted):
        raise AccelerantError(f"{what} is {found:.6g}, wanted {wanted:.6g}")


# --- collectives -----------------------------------------------------------------------------------------------------


def _collectives(this: _Process) -> None:
    """Measure each collective by size, as in a captured step, and what a sum costs the product that hides it."""
    this.meet()
    backend = "nccl" if this.gpu else "gloo"
    sizes = (2**12, 2**16, 2**20, 2**24, 2**26, 2**28) if this.gpu else (2**10, 2**16, 2**20, 2**23)
    for op in OPS:
        for size in sizes:
            calls = 64 if size <= 2**20 else 4
            if (call := _collective(op, size, this)) is not None:
                (samples,) = this.in_turns([this.captured(call, calls)])
                each = [ms / (calls if this.gpu else 1) for ms in samples]
                this.emit(op, size_name(size), "peers" if op in (PEER_SUM, COPIED) else backend, each, bytes=size)
    side, dtype = (8192, torch.bfloat16) if this.gpu else (1024, torch.float32)
    x = torch.ones(side, side, dtype=dtype, device=this.where)
    y = torch.empty_like(x)
    bucket = torch.ones(sizes[-2] // 4, device=this.where)
    dist.all_reduce(bucket)
    if not torch.equal(bucket, torch.full_like(bucket, this.size)):
        raise AccelerantError(f"all_reduce of ones over {this.size} processes is {bucket[0].item()}")
    bucket.zero_()

    def product() -> None:
        torch.mm(x, x, out=y)

    def both() -> None:
        sums = dist.all_reduce(bucket, async_op=True)
        product()
        assert sums is not None  # for the type checker: async_op
        sums.wait()

    alone, together, sum_alone = this.in_turns([product, both, lambda: dist.all_reduce(bucket)])
    lost = [
        min(1.0, max(0.0, (b - a) / s))
        for a, b, s in zip(map(this.mean, alone), map(this.mean, together), map(this.mean, sum_alone), strict=True)
    ]
    this.emit(BESIDE, "lost part of its time", backend, lost, unit="x")
    row, received, (rank, p) = torch.empty_like(x[:1]), torch.empty_like(bucket), (dist.get_rank(), this.size)

    def exchanged() -> None:  # as in attention over a split sequence: the transfer runs beside the product
        ways = dist.P2POp(dist.isend, bucket, (rank + 1) % p), dist.P2POp(dist.irecv, received, (rank - 1) % p)
        works = dist.batch_isend_irecv(list(ways))
        product()
        for work in works:
            work.wait()

    alone, together = this.in_turns([product, exchanged])
    waits = {
        "send_recv": [max(0.0, b - a) for a, b in zip(map(this.mean, alone), map(this.mean, together), strict=True)]
    }
    if (summed := _collective(PEER_SUM, sizes[1], this)) is not None:  # as in decoding: after one row's product

        def multiplied() -> None:
            torch.mm(x[:1], x, out=row)

        def both_in_turn() -> None:
            multiplied()
            summed()

        turns = [this.captured(call, _TOGETHER) for call in (multiplied, both_in_turn, summed)]
        waits[PEER_SUM] = [
            max(0.0, b - a - s) / _TOGETHER
            for a, b, s in zip(*(map(this.mean, each) for each in this.in_turns(turns)), strict=True)
        ]
    for op, samples in waits.items():
        this.emit(WAITS[op], size_name(sizes[-2] if op == "send_recv" else sizes[1]), backend, samples)


_TOGETHER = 64  # sums and products in a CUDA graph


def _collective(op: str, size: int, this: _Process) -> Callable[[], object] | None:
    """Return a call of a collective whose whole array has `size` bytes; None where there is none."""
    rank, p = dist.get_rank(), dist.get_world_size()
    if op == PEER_SUM:
        x, sums = torch.zeros(size // 4, device=this.where), PeerSum(this.mesh)
        return functools.partial(sums, x) if sums.takes(x) else None
    if op == COPIED:
        if size < _LEAST_COPIED or (copied := _peer_sums(size // 4, this)) is None:
            return None

        def copy() -> None:
            copied.start(0, size // 4)
            copied.finish()

        return copy
    whole, part = (torch.zeros(count, device=this.where) for count in (size // 4 // p * p, size // 4 // p))
    if op == "all_reduce":
        return functools.partial(dist.all_reduce, whole)
    if op == "all_gather":
        return functools.partial(dist.all_gather_into_tensor, whole, part)
    if op == "reduce_scatter":
        return functools.partial(dist.reduce_scatter_tensor, part, whole)
    received = torch.empty_like(whole)

    def exchange() -> None:
        sends = [dist.P2POp(dist.isend, whole, (rank + 1) % p), dist.P2POp(dist.irecv, received, (rank - 1) % p)]
        for request in dist.batch_isend_irecv(sends):
            request.wait()

    return exchange


def _peer_sums(elements: int, this: _Process) -> PeerSums | None:
    """Return sums by copy engines over so many elements; None where there are none."""
    try:
        return PeerSums(PeerMemory(elements, torch.float32, this.where), elements)
    except UnsupportedCase:
        return None


# --- data parallel ---------------------------------------------------------------------------------------------------


def _data(this: _Process, parameters: str, batches: Sequence[int]) -> None:
    """Measure a GPT's step without communication, with gradients summed, and plain PyTorch's, by batch."""
    config = MODELS[parameters]
    alone = {}
    for batch in batches:  # before `meet`: nothing reduces these gradients
        torch.manual_seed(0)
        alone[batch] = _OwnStep(GPT(config).to(this.where), this)
    this.meet()
    for number, batch in enumerate(batches):
        case = f"GPT {parameters} {batch}x{config.context}"
        aim = _DATA_X.get(batch) if parameters == "124M" else None
        _data_batch(this, config, case, batch, alone.pop(batch), {"aim": aim, "outlook": not number})
        this.free()


def _data_batch(
    this: _Process, config: GPTConfig, case: str, batch: int, alone: _Step, facts: dict[str, Any]
) -> None:  # fmt: skip
    data, turn = _own_rows(TokenBatches.drawn(config, batch * this.size, this.where), batch), itertools.count()
    torch.manual_seed(0)  # the weights of `alone`
    model = GPT(config).to(this.where)
    peer = PlainGPT.like(model) if this.peer else None
    ours = _OwnStep(model, this)
    wanted, found = this.mean(alone(*data.batch(0))), float(ours(*data.batch(0)))  # which is the processes' mean
    _require_near("the loss of all processes", found, wanted)

    def timed(*steps: _Step) -> list[list[float]]:
        calls = [functools.partial(lambda step: step(*data.batch(next(turn))), step) for step in steps]
        return this.in_turns(calls, together=2)

    before, after = timed(alone, ours)
    sums = torch.stack([param.detach().double().sum() for param in model.parameters()])
    largest = sums.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    if not torch.equal(sums, largest):
        raise AccelerantError("the processes' parameters differ after steps with summed gradients")
    buckets = ours.step.bucket_bytes
    slowest = this.slowest(before)
    this.emit("step without communication", case, "TrainStep", slowest)
    compared = {"alone_ms": statistics.median(slowest), "than": "without communication"}
    predict = {"buckets": buckets, "row_bytes": ours.step.row_bytes}
    this.emit("step", case, "TrainStep", after, runner=OURS, **compared, predict=["data_parallel", predict], **facts)
    if peer is not None:
        plain = _plain_gpt_step(peer, this)
        _require_near("plain PyTorch's loss", this.mean(plain(*data.batch(0))), wanted)
        name = f"DistributedDataParallel{', torch.compile' * this.gpu}"
        samples = timed(ours, plain)[1]  # in turns with ours: both see the same machine
        this.emit("step", case, name, samples, runner="torch", note="plain PyTorch", **compared)


def _own_rows(data: TokenBatches, batch: int) -> TokenBatches:
    mine = slice(dist.get_rank() * batch, (dist.get_rank() + 1) * batch)
    return TokenBatches([(tokens[mine].contiguous(), targets[mine].contiguous()) for tokens, targets in data.pairs])


class _OwnStep:
    """Our step, whose loss is the mean over the processes."""

    def __init__(self, model: GPT | Llama, this: _Process) -> None:
        self.step = TrainStep(
            model, AdamW(list(model.parameters()), lr=_RATE), model.loss, max_grad_norm=1.0, precision=this.precision
        )

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.step([(tokens, targets)], _RATE).loss


def _plain_gpt_step(model: PlainGPT, this: _Process) -> _Step:
    """Return the usual loop: DistributedDataParallel, torch.compile on a GPU, autocast."""
    parallel = nn.parallel.DistributedDataParallel(
        model, device_ids=[this.where.index] if this.gpu else None, gradient_as_bucket_view=True
    )
    torch.compiler.reset()  # else a second batch size is compiled for any size, which is slower
    forward: Callable[..., Tensor] = torch.compile(parallel) if this.gpu else parallel

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(this.where.type, torch.bfloat16, enabled=this.gpu):
            return forward(tokens, targets)

    return _plain_step(model, loss_of)


def _plain_step(model: nn.Module, loss_of: _Step) -> _Step:
    """Return the usual loop around a loss: clipping and fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


# --- sharded ---------------------------------------------------------------------------------------------------------


def _sharded(this: _Process) -> None:
    """Measure a Llama's step with sharded parameters, and that of plain PyTorch's FSDP2 with compiled blocks."""
    config, batch = _SHARDED[this.gpu]
    torch.manual_seed(0)
    with this.where:
        model = Llama(config)
    outer, params = config.vocab_size * config.width, sum(param.numel() for param in model.parameters())
    case = f"{'Llama 1B' if this.gpu else 'Llama, tiny'} {batch}x{config.context}"
    tokens = batch * config.context
    alone_model = copy.deepcopy(model)
    alone = _OwnStep(alone_model, this)
    this.meet()
    drawn = torch.randint(
        config.vocab_size, (4, batch * this.size, config.context + 1), generator=torch.Generator().manual_seed(0)
    )[:, dist.get_rank() * batch :][:, :batch].to(this.where)
    data = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in drawn]
    turn = itertools.count()

    def timed(step: Callable[[Tensor, Tensor], object]) -> list[float]:
        return this.in_turns([lambda: step(*data[next(turn) % 4])], together=2)[0]

    wanted = this.mean(alone(*data[0]))
    slowest = this.slowest(timed(alone))
    this.emit("unsharded step without communication", case, "TrainStep", slowest, tokens=tokens)
    weights = {name: value.cpu() for name, value in model.state_dict().items()} if this.peer else {}
    del alone, alone_model
    this.free()
    # Weights stay between the passes, which takes no more memory than the peer.
    distributed.shard(model, this.mesh, precision=this.precision, reshard_after_forward=False)
    ours = _OwnStep(model, this)
    _require_near("the loss with sharded parameters", float(ours(*data[0])), wanted)
    samples = timed(ours)
    predict = ["sharded", {"block_params": params - outer, "outer_params": outer}]
    this.emit(
        "sharded step", case, "TrainStep", samples, runner=OURS, tokens=tokens, peak_bytes=this.peak(),
        alone_ms=statistics.median(slowest), predict=predict, aim_x=_SHARDED_X if this.peer else None,
    )  # fmt: skip
    if not this.peer:
        return
    del ours, model  # the peer has the device to itself, as ours had
    this.free()
    peer = PlainLlama(config)
    peer.load_state_dict(weights)
    plain = _plain_llama_step(peer.to(this.where), this)
    this.free()
    _require_near("plain PyTorch's loss with sharded parameters", this.mean(plain(*data[0])), wanted)
    samples = timed(plain)
    name = f"FSDP2{', compiled blocks' * this.gpu}"
    this.emit("sharded step", case, name, samples, runner="torch", tokens=tokens, peak_bytes=this.peak())


def _plain_llama_step(model: PlainLlama, this: _Process) -> _Step:
    """Return torch's own way: FSDP2 by compiled blocks, a compiled loss."""
    mesh = this.mesh
    policy = MixedPrecisionPolicy(this.precision, torch.float32 if this.gpu else None)
    inner = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, cast_forward_inputs=False)
    for block in model.blocks:
        if this.gpu:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=inner)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    loss_of: Callable[..., Tensor] = torch.compile(cross_entropy) if this.gpu else cross_entropy
    return _plain_step(model, lambda tokens, targets: loss_of(model(tokens), targets))


# --- tensor parallel -------------------------------------------------------------------------------------------------


@torch.no_grad()
def _tensor(this: _Process) -> None:
    """Measure decoding of one sequence on one device, and split over all."""
    config, length = _DECODED[this.gpu]
    with torch.device("meta"):
        model = Llama(config).to(torch.bfloat16)
    model = model.to_empty(device=this.where).eval()
    generator = torch.Generator(this.where).manual_seed(0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1)
        else:
            parameter.normal_(0, 0.02, generator=generator)
    prompt = torch.randint(config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0)).to(this.where)
    this.meet()
    exact = copy.deepcopy(model).float().prefill(prompt, None)
    this.free()
    split = distributed.tensor_parallel(copy.deepcopy(model), this.mesh)
    one, distance = (_distance(_decoded_logits(each, prompt), exact) for each in (model, split))
    if not distance <= _LOGITS_TIMES * one + _ALLOWED:
        raise AccelerantError(
            f"the split model's logits are {distance:.3g} of their size from float32's, those of one device {one:.3g}"
        )
    room = min(512, config.context - length)
    runs = [Decoding(each, prompt, room, Sampling(temperature=0)) for each in (model, split)]
    for run in runs:
        run.advance()
    # Few enough steps for the room: 8 together on a GPU.
    this.steps = min(this.steps, 20)
    alone, ours = this.in_turns([run.advance for run in runs], together=8)
    case = f"{'Llama 8B' if this.gpu else 'Llama, tiny'}, 1 token after {length}, bfloat16"
    predict = {"layers": config.layers, "width_bytes": 2 * config.width, "vocabulary": config.vocab_size}
    predict["weight_bytes"] = (
        2 * sum(each.numel() for each in model.parameters()) - 2 * config.vocab_size * config.width
    )
    this.compare("decode", case, alone, ours, _TENSOR_X, ["tensor_parallel", predict], error=distance)


def _distance(found: Tensor, wanted: Tensor) -> float:
    """Return the root mean square of the difference, over that of the values."""
    return float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


def _decoded_logits(model: Llama, prompt: Tensor) -> Tensor:
    run = Decoding(model, prompt[:, :-1], 8, Sampling(temperature=0))
    run.advance()
    assert run.cache is not None  # for the type checker: more than one token may come
    return model.decode(prompt[:, -1], run.cache)


# --- context parallel ------------------------------------------------------------------------------------------------


def _context(this: _Process) -> None:
    """Measure causal attention over a long sequence on one device, and split over all, forward and backward."""
    B, Hq, Hkv, T, D = _ATTENTION[this.gpu]
    dtype = torch.bfloat16 if this.gpu else torch.float32
    generator = torch.Generator(this.where).manual_seed(0)
    q, k, v, do = (
        torch.randn(B, heads, T, D, generator=generator, device=this.where, dtype=dtype) for heads in (Hq, Hkv, Hkv, Hq)
    )
    this.meet()
    whole = [x.requires_grad_() for x in (q, k, v)]
    parts = [distributed.split_sequence(x.detach(), dim=2).requires_grad_() for x in whole]
    do_part = distributed.split_sequence(do, dim=2)

    def forward(split: bool) -> Tensor:
        if split:
            q, k, v = parts
            return distributed.context_parallel_attention(q, k, v, causal=True)
        q, k, v = whole
        o = ops.attention(q, k, v, causal=True)
        assert isinstance(o, Tensor)  # for the type checker: no log-sum-exp was requested
        return o

    def both(split: bool) -> list[Tensor]:
        o = forward(split)
        return [o, *torch.autograd.grad(o, parts if split else whole, do_part if split else do)]

    names = ("the output", "dq", "dk", "dv")
    for name, found, wanted in zip(names, both(True), both(False), strict=True):
        part = distributed.split_sequence(wanted.detach(), dim=2).float()
        distance = _distance(found.float(), part)
        if not distance <= _ATTENTION_NEAR:
            raise AccelerantError(f"{name} of a split sequence is {distance:.3g} of its size from the whole one's")
    with torch.no_grad():
        alone, ours = this.in_turns([functools.partial(forward, split) for split in (False, True)])
    case, size = f"{B}x{Hq}/{Hkv}x{T}x{D}", B * T // this.size * D * dtype.itemsize
    predict = ["context_parallel", {"q_bytes": Hq * size, "kv_bytes": Hkv * size}]
    this.compare("causal attention", f"{case}, forward", alone, ours, _CONTEXT_X, predict)
    alone, ours = this.in_turns([functools.partial(both, split) for split in (False, True)])
    this.compare("causal attention", f"{case}, forward and backward", alone, ours, _CONTEXT_X)


if __name__ == "__main__":
    work(json.loads(sys.argv[1]), Path(sys.argv[2]))
