"""Context parallelism: each process holds a part of every sequence, and keys and values travel around a ring.

In each of N steps a process attends with its queries to the keys and values at hand, while it sends them to the next
process and receives those of the previous one. Results of two steps are merged by their log-sum-exp:

    o = o + sigmoid(lse' - lse) (o' - o)        lse = log(exp lse + exp lse')

The backward pass goes around the ring once more. The kernel of one step gets the merged o and lse, so that its
probabilities are those of the whole softmax. dk and dv travel with the keys, in float32, and come home after N hops.

A causal mask hides half of the scores. So that every process has the same share of the others, the sequence is cut
into 2N chunks, and process r holds chunks r and 2N - 1 - r (a zigzag). Then every step but the first is half a block
without a mask: all queries see the first half of an earlier process's keys; of a later process's keys, the second
half of the queries sees all.

Source: Liu, Zaharia and Abbeel 2023, arXiv:2310.01889, section 3; Brandon et al. 2023, arXiv:2311.09431, section 3 for
causal balance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from accelerant import ops
from accelerant.distributed.tensor_parallel import group_of
from accelerant.errors import ConfigError, ShapeError, UnsupportedCase
from accelerant.nn.models.gpt import GPT
from accelerant.nn.models.language_model import LanguageModel, require_tokens
from accelerant.nn.models.llama import Llama, LlamaAttention
from accelerant.nn.transformer import MultiHeadAttention
from accelerant.ops._launch import ceil_div, next_power_of_2
from accelerant.ops.attention import attention_bwd, check_heads, checked, options_of, shapes_of
from accelerant.runtime.compilation.triton import TritonKernel, refuses_triton
from accelerant.runtime.dispatch import Case

M = TypeVar("M", bound=LanguageModel)

_MERGE = TritonKernel("accelerant.distributed.triton_kernels", "merge")
_MERGED_ROWS = 16


def split_sequence(
    x: Tensor, group: dist.ProcessGroup | DeviceMesh | None = None, *, dim: int = 1, causal: bool = True
) -> Tensor:
    """Return this process's part of a tensor that every process has.

    Args:
        x: any shape and dtype; tokens (B, S), or q, k and v with dim=2.
        group: the N processes; None for all.
        dim: dimension of the positions in the sequence, a multiple of 2N (of N without `causal`).
        causal: return chunks r and 2N - 1 - r of 2N; False: chunk r of N.

    Raises:
        ShapeError: the sequence does not divide evenly.
    """
    group = group_of(group)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    chunks = 2 * size if causal else size
    if not x.dim() or x.shape[dim] % chunks or not x.shape[dim]:
        length = x.shape[dim] if x.dim() else "a scalar"
        raise ShapeError(f"a sequence over {size} processes must be a multiple of {chunks} long, got {length}")
    parts = x.chunk(chunks, dim)
    return torch.cat((parts[rank], parts[-1 - rank]), dim) if causal else parts[rank].contiguous()


def join_sequence(
    x: Tensor, group: dist.ProcessGroup | DeviceMesh | None = None, *, dim: int = 1, causal: bool = True
) -> Tensor:
    """Return the whole of what `split_sequence` split, in every process; one all-gather, without a gradient."""
    group = group_of(group)
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.detach().contiguous(), group)
    if not causal:
        return torch.cat(parts, dim)
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([early for early, _ in halves] + [late for _, late in reversed(halves)], dim)


# --- attention -------------------------------------------------------------------------------------------------------
class _Ring:
    """The processes of a group, each of which sends to the next rank and receives from the previous one."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self._to, self._from = (dist.get_global_rank(group, (self.rank + way) % self.size) for way in (1, -1))

    def pass_on(self, *xs: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Send tensors, which must not change before the result is called: that waits for the previous process's."""
        if self.size == 1:
            return lambda: xs
        received = tuple(map(torch.empty_like, xs))
        sends = [dist.P2POp(dist.isend, x, self._to, self.group) for x in xs]
        works = dist.batch_isend_irecv(sends + [dist.P2POp(dist.irecv, x, self._from, self.group) for x in received])

        def wait() -> tuple[Tensor, ...]:
            for work in works:  # on a GPU the current stream waits, not the host
                work.wait()
            return received

        return wait


def _visible(ring: _Ring, step: int, rows: int, causal: bool) -> tuple[slice, slice, bool]:
    """Return the queries that see keys of a step, those keys, and whether the causal mask applies within."""
    everything = slice(0, rows)
    if not causal or not step:
        return everything, everything, causal
    if (ring.rank - step) % ring.size < ring.rank:
        return everything, slice(0, rows // 2), False
    return slice(rows // 2, rows), everything, False


def _merge(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge results of other keys into o (B, H, S, D) and lse (B, H, S), rows of a longer sequence, in place."""
    if part.dtype != torch.float64 and refuses_triton(part.device) is None:
        rows, D = part_lse.numel(), part.shape[3]
        _MERGE.launch(
            (ceil_div(rows, _MERGED_ROWS),),
            (o, lse, part.contiguous(), part_lse.contiguous(), rows, part.shape[2], lse.stride(1), D),
            {"BLOCK": _MERGED_ROWS, "BLOCK_D": next_power_of_2(D)}, num_warps=4,
        )  # fmt: skip
        return
    share = (part_lse - lse).sigmoid_().unsqueeze(-1)
    o.copy_(o.to(lse.dtype).lerp_(part.to(lse.dtype), share))
    lse.copy_(torch.logaddexp(lse, part_lse))


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: _Ring, causal: bool, scale: float) -> Tensor:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        kv: tuple[Tensor, ...] = (k.contiguous(), v.contiguous())
        S = q.shape[2]
        o = lse = q.new_empty(0)
        for step in range(ring.size):
            coming = ring.pass_on(*kv) if step + 1 < ring.size else None
            rows, keys, masked = _visible(ring, step, S, causal)
            now = (q[:, :, rows].contiguous(), kv[0][:, :, keys], kv[1][:, :, keys])
            o_step, lse_step = ops.attention(*now, masked, scale, return_lse=True)
            if step:
                _merge(o[:, :, rows], lse[:, :, rows], o_step, lse_step)
            else:  # a sum of two is rounded once in its own dtype
                dtype = wide if ring.size > 2 else q.dtype
                o, lse = o_step.to(dtype).contiguous(), lse_step.clone()
            kv = kv if coming is None else coming()
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.settings = ring, causal, scale
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        ring, causal, scale = ctx.settings
        wide, S = lse.dtype, q.shape[2]
        dq, kv = (
            torch.zeros_like(q, dtype=wide, memory_format=torch.contiguous_format),
            (k.contiguous(), v.contiguous()),
        )
        dkv = tuple(torch.zeros_like(x, dtype=wide) for x in kv)
        homeward: Callable[[], tuple[Tensor, ...]] | None = None
        for step in range(ring.size):
            coming = ring.pass_on(*kv) if step + 1 < ring.size else None
            rows, keys, masked = _visible(ring, step, S, causal)
            q_, do_, o_, lse_ = (x[:, :, rows].contiguous() for x in (q, do, o, lse))
            k_, v_ = (x[:, :, keys] for x in kv)
            case = Case(q.device, q.dtype, (*q.shape[:2], k.shape[1], q_.shape[2], k_.shape[2], q.shape[3]),
                        options_of(masked, -1))  # fmt: skip
            dq_step, *dkv_step = attention_bwd(case, do_, q_, k_, v_, o_, lse_, masked, scale, -1)
            dq[:, :, rows] += dq_step
            if homeward is not None:
                dkv = homeward()
            for total, part in zip(dkv, dkv_step, strict=True):
                total[:, :, keys] += part
            homeward = ring.pass_on(*dkv)
            kv = kv if coming is None else coming()
        assert homeward is not None  # for the type checker: a group has at least one process
        dk, dv = (x.to(k.dtype) for x in homeward())
        return dq.to(q.dtype), dk, dv, None, None, None


_attend: Callable[..., Tensor] = _RingAttention.apply


def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: dist.ProcessGroup | DeviceMesh | None = None, causal: bool = False,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Compute softmax attention over sequences of which each of N processes holds a part.

    Every process calls it with tensors of the same shapes; `split_sequence` makes the parts.

    Args:
        q: (B, Hq, S, D), this process's queries; float16, bfloat16, float32 or float64.
        k, v: (B, Hkv, S, D), its keys and values, dtype of q. Hkv divides Hq.
        group: the processes, in the order of the parts; None for all. A DeviceMesh of one dimension will do.
        causal: hide the keys after a query's position. The parts are chunks r and 2N - 1 - r then, and S is even.
        scale: factor of the scores; None for 1 / sqrt(D).

    Returns:
        (B, Hq, S, D), dtype of q: the rows of accelerant.ops.attention over the whole sequence that belong to this
        process's queries. Merged in float32 (float64 for float64). Differentiable once; gradients of q, k and v are
        those of the whole, too.

    Raises:
        ShapeError: incompatible shapes, an empty part, or an odd S with `causal`.
        UnsupportedDtype: a dtype not listed above, or several.
        ConfigError: torch.distributed is not initialized, or a mesh of several dimensions.

    Source: see the module.
    """
    q, k, v = checked(q, k, v, "context_parallel_attention")
    if q.dim() != 4 or k.dim() != 4 or q.shape[2:] != k.shape[2:] or q.shape[0] != k.shape[0] or not q.numel():
        raise ShapeError(f"context_parallel_attention takes q (B, Hq, S, D), k (B, Hkv, S, D), got {shapes_of(q, k)}")
    check_heads(q.shape[1], k.shape[1])
    if not isinstance(causal, bool):
        raise ConfigError(f"context_parallel_attention: causal must be True or False, got {type(causal).__name__}")
    if causal and q.shape[2] % 2:
        raise ShapeError(f"with causal=True a process holds two chunks of one length, got {q.shape[2]} positions")
    ring = _Ring(group_of(group))
    return _attend(q, k, v, ring, causal, 1 / math.sqrt(q.shape[3]) if scale is None else float(scale))


# --- models ----------------------------------------------------------------------------------------------------------
class _Total(torch.autograd.Function):
    """The sum over processes, whose gradient is N times this process's: gradients are averaged afterwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.size = dist.get_world_size(group)
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy * ctx.size, None


_total: Callable[..., Tensor] = _Total.apply


class _LlamaRing(LlamaAttention):
    group: dist.ProcessGroup

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: object = None) -> Tensor:
        heads = self.qkv(x).view(*x.shape[:2], self.heads + 2 * self.kv_heads, self.head_width).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = ops.rope(q, cos, sin), ops.rope(k, cos, sin)
        o = context_parallel_attention(q, k, v, group=self.group, causal=True)
        y: Tensor = self.projection(o.transpose(1, 2).reshape(*x.shape[:2], self.heads * self.head_width))
        return y


class _GptRing(MultiHeadAttention):
    group: dist.ProcessGroup

    def forward(self, x: Tensor, *_: object, **__: object) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        o = context_parallel_attention(q, k, v, group=self.group, causal=True)
        y: Tensor = self.projection(o.transpose(1, 2).reshape(x.shape))
        return y


class _ContextParallel(LanguageModel):
    """A model whose `loss` and `forward` take whole sequences, of which this process computes its part."""

    group: dist.ProcessGroup
    needs_equal_batches = True
    _output_weight: Callable[[], Tensor]

    def _on_part(self, run: Callable[[Tensor], Tensor], idx: Tensor) -> Tensor:
        require_tokens(idx, self.config.context)
        part = split_sequence(idx, self.group)
        self.positions = split_sequence(torch.arange(idx.shape[1], device=idx.device), self.group, dim=0)
        try:
            return run(part)
        finally:
            self.positions = None

    def forward(self, idx: Tensor) -> Tensor:
        return self._on_part(super().forward, idx)

    def loss(self, idx: Tensor, targets: Tensor) -> Tensor:
        self._require_targets(idx, targets)
        rows, counted = self._on_part(self.hidden, idx).flatten(0, 1), (targets != -100).sum()
        weight = self._output_weight()[: self.config.vocab_size].to(rows.dtype)  # that of a GPT is padded
        mine = split_sequence(targets, self.group).flatten().long()
        return _total(ops.linear_cross_entropy(rows, weight, mine, reduction="sum") / counted, self.group)

    def generate(self, *_: object, **__: object) -> Tensor:
        raise UnsupportedCase("a context-parallel model does not generate: give its weights to a model of one process")


def context_parallel(model: M, mesh: DeviceMesh, *, average_gradients: bool = True) -> M:
    """Make a model compute its part of every sequence; for training with sequences beyond one device's memory.

    Every process calls `model.loss(idx, targets)` with the same whole sequences (B, T), T a multiple of twice the
    number of processes. It computes T / N positions, with their rotary or learned embeddings, and gets the mean loss of
    all tokens. `model(idx)` returns the logits of the process's positions, in the order of `split_sequence`.

    Gradients are averaged over the mesh in the backward pass, parameter by parameter. Averaging them once more changes
    nothing, and under accelerant.distributed.shard, called afterwards with the same mesh, FSDP2 alone does.

    Args:
        model: a Llama or GPT of accelerant.nn, with the same parameters in each process; modified in place.
        mesh: of one dimension.
        average_gradients: False leaves that to what trains the model over all processes of the mesh, and no others:
            accelerant.nn.train.TrainStep, in buckets that overlap the backward pass.

    Returns:
        the model.

    Raises:
        UnsupportedCase: another model, dropout, or one that is split already; from then on, in `generate`.
        ConfigError: torch.distributed is not initialized, or a mesh of several dimensions.
    """
    group = group_of(mesh)
    kind, changed = type(model), cast(Any, model)
    rings: dict[type, tuple[type, type]] = {Llama: (LlamaAttention, _LlamaRing), GPT: (MultiHeadAttention, _GptRing)}
    if kind not in rings:
        raise UnsupportedCase(f"context_parallel splits sequences of nn.Llama and nn.GPT, got {kind.__name__}")
    layer, ring = rings[kind]
    for number, block in enumerate(changed.blocks):
        if type(block.attention) is not layer or getattr(block.attention, "dropout", False):
            raise UnsupportedCase(
                f"context_parallel needs {layer.__name__} without dropout, block {number} has {block.attention}"
            )
    for block in changed.blocks:
        block.attention.__class__, block.attention.group = ring, group
    changed.__class__ = type(f"ContextParallel{kind.__name__}", (_ContextParallel, kind), {})
    changed.group = group

    def averaged(gradient: Tensor) -> Tensor:
        mean = gradient / dist.get_world_size(group)
        dist.all_reduce(mean, group=group)
        return mean

    for parameter in model.parameters():
        if average_gradients and parameter.requires_grad:
            parameter.register_hook(averaged)
    return model
