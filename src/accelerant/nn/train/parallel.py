"""Data parallel training: gradients summed over the processes of torch.distributed while the backward pass runs.

Buckets of gradients are summed in the order in which the backward pass finishes them, so that all but the last one
overlap it (Li et al. 2020, arXiv:2006.15704, section 4.2). The largest gradient, of an embedding tied to the output
layer, would be the last: its part from the output layer is the first bucket, and the rows that the embedding has looked
up are gathered at the end.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accelerant.errors import ConfigError, UnsupportedCase
from accelerant.ops.embedding import launch_backward_sorted
from accelerant.ops.transformer import block
from accelerant.runtime.ledger import FallbackRecord, ledger
from accelerant.runtime.processes import PeerMemory, PeerSums, Processes

_BUCKET_BYTES, _COPIED_BYTES = 100 << 20, 25 << 20
"""Size of a bucket that NCCL or gloo sum, and of one that copy engines do; the fastest for a GPT of 124M parameters."""
_FIRST_BYTES = 1 << 20  # a small first bucket: the network is busy from the first gradients on
_ALIGNED = 64  # elements: gradients begin at multiples of 128 bytes or more, for vectorized kernels


def share_of(rows: int, processes: Processes) -> slice:
    """Return this process's rows of a batch; raise ConfigError if the processes cannot have as many each."""
    if rows % processes.size:
        raise ConfigError(f"batch_size must be a multiple of the {processes.size} processes, got {rows}")
    count = rows // processes.size
    return slice(processes.rank * count, (processes.rank + 1) * count)


def is_reduced_elsewhere(model: nn.Module, params: Iterable[Tensor]) -> bool:
    """Return whether something else averages the gradients: DistributedDataParallel, or FSDP2 with its DTensors."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return True
    if (module := sys.modules.get("torch.distributed.tensor")) is None:
        return False
    sizes = [param.device_mesh.size() for param in params if isinstance(param, module.DTensor)]
    world = torch.distributed.get_world_size() if sizes else 0
    if sizes and max(sizes) < world:
        raise UnsupportedCase(
            f"parameters are split over {max(sizes)} of {world} processes, and nothing sums gradients over the others: "
            "shard them over another dimension of the mesh (accelerant.distributed.shard)"
        )
    return bool(sizes)


def start_equal(model: nn.Module, processes: Processes) -> None:
    """Copy rank 0's parameters and buffers into those of the other processes."""
    if processes.size > 1 and not is_reduced_elsewhere(model, model.parameters()):
        processes.from_first_([tensor.detach() for tensor in (*model.parameters(), *model.buffers())])


def described(params: Sequence[Tensor]) -> str:
    """Return a text that differs for parameters of other shapes or dtypes, or in another order."""
    kinds = "; ".join(f"{param.dtype} {tuple(param.shape)}" for param in params)
    return f"{len(params)} tensors ({hashlib.sha256(kinds.encode()).hexdigest()[:16]})"


@dataclass(slots=True)
class _Table:
    """A table whose gradient is summed in two parts; each process looks up `count` rows of `dtype`.

    A process whose step looks up others sums a whole gradient as the first part, and sends zeros; outside of captured
    steps, no later step has two parts then. `rows` holds rows and tokens until they are gathered.
    """

    index: int
    count: int
    dtype: torch.dtype
    split: bool = False
    rows: tuple[Tensor, Tensor] | None = None


_ROW_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class _Bucket:
    """Gradients of one collective at `offsets` of `flat`; copy engines sum in memory that stays, from `first` on."""

    indices: list[int]
    offsets: list[int]
    size: int
    dtype: torch.dtype
    device: torch.device
    first: int = 0
    flat: Tensor | None = None


class GradientReduction:
    """Sums gradients over the processes, in buckets that overlap the backward pass.

    Every process reduces every bucket in each step, in the same order: in the first step the parameters' reversed,
    later that of rank 0's backward pass. A parameter that some process did not use has a gradient of zeros there;
    `.grad` of one that none used stays None. `frozen`: which ones are used no longer changes, as in a captured step.
    """

    def __init__(
        self, params: Sequence[Tensor], processes: Processes, *, dtype: torch.dtype = torch.float32,
        bucket_bytes: int | None = None,
    ) -> None:  # fmt: skip
        if dtype not in (torch.float32, torch.bfloat16):
            raise ConfigError(f"reduce_dtype must be float32 or bfloat16, got {dtype}")
        if bucket_bytes is not None and bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes must be above 0, got {bucket_bytes}")
        self._params, self._processes, self._dtype = list(params), processes, dtype
        self._bytes, self._given_bytes = bucket_bytes or _BUCKET_BYTES, bucket_bytes
        self.frozen = False
        self._armed = self._ordered = False
        self._used: list[int] = []
        self._memory: PeerMemory | None = None
        self._table: _Table | None = None
        self._uses: dict[int, list[tuple[int, torch.dtype] | None]] = {}
        self._whole: dict[int, tuple[int, int]] = {}
        self._order: list[int] = []
        self._arrange(reversed(range(len(self._params))))
        this = weakref.ref(self)  # hooks must not keep this object alive
        hooks = [
            param.register_post_accumulate_grad_hook(functools.partial(_ready, this, index))
            for index, param in enumerate(self._params)
            if param.requires_grad
        ]
        weakref.finalize(self, lambda: [hook.remove() for hook in hooks])

    def connect(self) -> None:
        """Let GPUs of one host sum in each other's memory, or NCCL, with the reason in the ledger; all call it."""
        kinds = {(bucket.dtype, bucket.device) for bucket in self._buckets}
        dtype, device = next(iter(kinds))
        if device.type != "cuda" or self._processes.size == 1:
            return
        try:
            if len(kinds) > 1:
                raise UnsupportedCase(f"gradients of {len(kinds)} dtypes or devices")
            self._memory = PeerMemory(sum(bucket.size for bucket in self._buckets), dtype, device)
            self._bytes = self._given_bytes or _COPIED_BYTES
        except UnsupportedCase as error:
            ledger().fallback(FallbackRecord("train_step", "sum of gradients", "copy engines", "NCCL", str(error)))
        self._arrange(reversed(range(len(self._params))))

    def _arrange(self, order: Iterable[int]) -> None:
        """Divide the parameters into buckets, in this order; a table with two parts is the first."""
        if self._table is not None:
            order = [self._table.index, *(index for index in order if index != self._table.index)]
        self._buckets: list[_Bucket] = []
        opened: dict[tuple[torch.dtype, torch.device], _Bucket] = {}
        for index in order:
            param = self._params[index]
            dtype = param.dtype if param.is_complex() or param.dtype == torch.float64 else self._dtype
            kind, size = (dtype, param.device), -(-param.numel() // _ALIGNED) * _ALIGNED
            if kind in opened and (opened[kind].size + size) * dtype.itemsize > self._bytes:
                self._buckets.append(opened.pop(kind))  # an embedding, the last gradient, does not hold it up
            bucket = opened.setdefault(kind, _Bucket([], [], 0, *kind))
            bucket.indices.append(index)
            bucket.offsets.append(bucket.size)
            bucket.size += size
            least = self._bytes if self._buckets else min(_FIRST_BYTES, self._bytes)
            if bucket.size * dtype.itemsize >= least or (self._table is not None and index == self._table.index):
                self._buckets.append(opened.pop(kind))
        self._buckets += opened.values()
        first = 0
        for bucket in self._buckets:
            bucket.first, first = first, first + bucket.size
        memory, longest = self._memory, max(bucket.size for bucket in self._buckets)
        self._sums = None if memory is None else PeerSums(memory, longest)
        self._bucket_of = {index: number for number, bucket in enumerate(self._buckets) for index in bucket.indices}
        self._launched: list[tuple[Any, list[Tensor]]] = []

    @property
    def bucket_bytes(self) -> list[int]:
        """Bytes of each bucket, in the order of the sums."""
        return [bucket.size * bucket.dtype.itemsize for bucket in self._buckets]

    @property
    def row_bytes(self) -> int:
        """Bytes of the rows of a table that this process sends in a step."""
        apart = self._table
        return 0 if apart is None else apart.count * apart.dtype.itemsize * self._params[apart.index].shape[1]

    # --- products that write into buckets, and a table in two parts (accelerant.ops.transformer.block.TableSums) ------
    def place(self, weight: Tensor, shape: Sequence[int]) -> Tensor | None:
        """Return the memory of a bucket for the first gradient of a parameter in a step's last backward pass."""
        index = self._at.pop(weight.data_ptr(), None) if self._armed else None
        if index is None:
            return None
        param, bucket = self._params[index], self._buckets[self._bucket_of[index]]
        if (
            param.dtype != bucket.dtype or param.shape != tuple(shape) or not param.is_contiguous()
            or param.grad is not None or _is_hooked(param)
        ):  # fmt: skip
            return None
        return _laid_out(self._flat(bucket), param, bucket.offsets[bucket.indices.index(index)])

    def _flat(self, bucket: _Bucket) -> Tensor:
        """Return a bucket's memory in this step."""
        if self._sums is not None:
            return self._sums.memory.own[bucket.first : bucket.first + bucket.size]
        if bucket.flat is None:
            whole = bucket.size == sum(self._params[index].numel() for index in bucket.indices)
            new = torch.empty if whole else torch.zeros  # gaps are summed, too, and NCCL may be told to look for NaN
            bucket.flat = new(bucket.size, dtype=bucket.dtype, device=bucket.device)
        return bucket.flat

    def watch(self) -> None:
        """Begin to note which tables are used; the next forward pass is the last one of the step."""
        self._uses, self._whole = {}, {}
        if self._table is not None:
            self._table.split, self._table.rows = False, None
        block.table_sums[:] = [self]

    def looks_up(self, table: Tensor, count: int, dtype: torch.dtype) -> None:
        """Note that this many rows of a table are looked up, in a dtype."""
        self._uses.setdefault(table.data_ptr(), []).append((count, dtype))

    def multiplies(self, table: Tensor) -> None:
        """Note that a table is an output layer's weight."""
        self._uses.setdefault(table.data_ptr(), []).append(None)

    def whole(self, table: Tensor, gradient: Tensor) -> None:
        """Note a gradient in which both parts have met, with its version: autograd may add others in place."""
        self._whole[table.data_ptr()] = gradient.data_ptr(), gradient._version

    def takes_product(self, table: Tensor, gradient: Tensor) -> bool:
        """Start the sum of the output layer's part, if the step uses the table as its processes have agreed."""
        if (apart := self._table) is None or not self._armed:
            return False
        param = self._params[apart.index]
        used = self._uses.get(table.data_ptr())
        if param.data_ptr() != table.data_ptr() or param.grad is not None or used != [(apart.count, apart.dtype), None]:
            return False
        if _is_hooked(param):
            return False
        apart.split, param.grad = True, gradient
        self.ready(apart.index)
        return True

    def takes_rows(self, table: Tensor, dy: Tensor, tokens: Tensor) -> bool:
        """Keep the rows that the embedding has looked up, if the other part's sum has begun."""
        apart = self._table
        if apart is None or not apart.split or self._params[apart.index].data_ptr() != table.data_ptr():
            return False
        apart.rows = dy.reshape(apart.count, -1), tokens.reshape(-1).long()
        return True

    def _found_table(self) -> _Table | None:
        """Return the table that the first step of every process used alike, if it is worth it; one exchange."""
        mine = [-1, 0, 0]
        for index in self._finished:
            param = self._params[index]
            used = self._uses.get(param.data_ptr(), [])
            if (
                len(used) == 2 and used[0] is not None and used[1] is None and used[0][1] in _ROW_DTYPES
                and param.is_contiguous() and param.dim() == 2 and index in self._clean and not _is_hooked(param)
            ):  # fmt: skip
                count, dtype = used[0]
                gathered = self._processes.size * count * dtype.itemsize
                if gathered <= 4 * len(param) and not torch.are_deterministic_algorithms_enabled():
                    mine = [index, count, _ROW_DTYPES.index(dtype)]
        largest = self._processes.largest([*mine, *(-each for each in mine)])
        if largest[0] < 0 or any(a != -b for a, b in zip(largest[:3], largest[3:], strict=True)):
            return None
        return _Table(mine[0], mine[1], _ROW_DTYPES[mine[2]])

    def _gather(self, apart: _Table) -> Callable[[], None]:
        """Start to gather the rows and tokens of all processes; return a function that adds them to the gradient."""
        param, p = self._params[apart.index], self._processes.size
        if apart.rows is None:
            rows = torch.zeros(apart.count, param.shape[1], dtype=apart.dtype, device=param.device)
            tokens = torch.zeros(apart.count, dtype=torch.int64, device=param.device)
        else:
            rows, tokens = (each.contiguous() for each in apart.rows)
        every = [each.new_empty(p * len(each), *each.shape[1:]) for each in (tokens, rows)]
        works: list[Any] = [
            torch.distributed.all_gather_into_tensor(to, each, async_op=True)
            for to, each in zip(every, (tokens, rows), strict=True)
        ]
        apart.rows = None
        works[0].wait()
        order = torch.sort(every[0], stable=True) if param.is_cuda else None  # while the last sums are under way

        def add() -> None:
            works[1].wait()
            if param.grad is None:
                return
            if order is not None:  # the order of the sums depends on the tokens alone
                launch_backward_sorted(every[1], every[0], param.grad, -1, (True, True), into=param.grad, order=order)
            else:
                param.grad.index_add_(0, every[0], every[1].to(param.grad.dtype))

        return add

    def arm(self) -> None:
        """Begin to sum: the next backward pass is the last one of the step."""
        self._left = [len(bucket.indices) for bucket in self._buckets]
        self._launched, self._finished, self._has = [], list[int](), [0] * len(self._params)
        self._clean = set[int]()
        self._at = {param.data_ptr(): index for index, param in enumerate(self._params)}
        self._armed = True

    def release(self) -> None:
        """End a step, also one that raised before `finish`: later backward passes are not summed."""
        self._armed = False
        if self in block.table_sums:
            block.table_sums.clear()
        if self._table is not None:
            self._table.rows = None
        for bucket in self._buckets:
            bucket.flat = None

    def ready(self, index: int) -> None:
        """Note that a gradient is complete; start the sum of each bucket whose turn it is."""
        if not self._armed:
            return
        apart, grad = self._table, self._params[index].grad
        if apart is not None and apart.split and index == apart.index and index in self._finished:
            if grad is None:
                return  # autograd's hook, without a gradient
            raise UnsupportedCase(
                f"parameter {index}, an embedding tied to the output layer, has another gradient than in the first "
                "step: make a new TrainStep where the loss changes"
            )
        if grad is not None and self._whole.get(self._params[index].data_ptr()) == (grad.data_ptr(), grad._version):
            self._clean.add(index)  # nothing else was added to it
        if self._bucket_of[index] < len(self._launched) or not self._left[self._bucket_of[index]]:
            raise UnsupportedCase(
                f"a backward pass gave parameter {index} its gradient twice: processes that train together need "
                "checkpoint(..., use_reentrant=False)"
            )
        self._finished.append(index)
        self._left[self._bucket_of[index]] -= 1
        while len(self._launched) < len(self._buckets) and not self._left[len(self._launched)]:
            self._launch(self._buckets[len(self._launched)])

    @torch.no_grad()
    def _launch(self, bucket: _Bucket) -> None:
        flat, bucket.flat = self._flat(bucket), None
        views, to, grads = [], [], []
        for index, offset in zip(bucket.indices, bucket.offsets, strict=True):
            param = self._params[index]
            view = _laid_out(flat, param, offset)
            views.append(view)
            if param.grad is None:
                view.zero_()
                continue
            if param.grad.layout != torch.strided:
                raise UnsupportedCase(
                    "processes that train together need dense gradients: an embedding has sparse ones"
                )
            self._has[index] = 1
            if param.grad.data_ptr() != view.data_ptr() or param.grad.dtype != view.dtype:
                to.append(view)
                grads.append(param.grad)
            param.grad = None
        if to:
            torch._foreach_copy_(to, grads)
        work = None
        if self._sums is None:
            work = torch.distributed.all_reduce(flat, async_op=True)
        else:
            self._sums.start(bucket.first, bucket.size)
        self._launched.append((work, views))

    @torch.no_grad()
    def finish(self, loss: Tensor) -> None:
        """Start the sums left, and the loss's in place; put all into `.grad`. The stream waits, not the host."""
        while len(self._launched) < len(self._buckets):
            self._launch(self._buckets[len(self._launched)])
        self._armed = False
        block.table_sums.clear()
        add_rows = None if self._table is None else self._gather(self._table)
        summed = torch.distributed.all_reduce(loss, async_op=True)  # not earlier: all processes have one order
        capturing = self._params[0].is_cuda and torch.cuda.is_current_stream_capturing()
        given_up = 0
        if not (self.frozen or capturing):
            other = self._table is not None and not self._table.split
            *self._used, given_up = self._processes.largest([*self._has, other])
        summed.wait()
        launched, self._launched = self._launched, []
        if self._sums is not None:
            self._sums.finish()
        for bucket, (work, views) in zip(self._buckets, launched, strict=True):
            if work is not None:
                work.wait()
            for index, view in zip(bucket.indices, views, strict=True):
                param = self._params[index]
                if self._used[index]:
                    param.grad = view if view.dtype == param.dtype else view.to(param.dtype)
        if add_rows is not None:
            add_rows()
        if not (self._ordered or capturing):
            self._ordered = True
            seen = set(self._finished)
            order = [*self._finished, *(index for index in range(len(self._params)) if index not in seen)]
            self._table, self._order = self._found_table(), self._processes.of_first(order)
            self._arrange(self._order)
        elif given_up:  # no bucket would be summed before the table's
            self._table = None
            self._arrange(self._order)


def _is_hooked(param: Tensor) -> bool:
    """Return whether a parameter has hooks that are not a reduction's: they expect its whole gradient."""
    after: Any = param._post_accumulate_grad_hooks
    return bool(param._backward_hooks) or any(
        getattr(hook, "func", None) is not _ready for hook in (after or {}).values()
    )


def _ready(reduction: weakref.ref[GradientReduction], index: int, _: Tensor) -> None:
    if (found := reduction()) is not None:
        found.ready(index)


def _laid_out(flat: Tensor, param: Tensor, offset: int) -> Tensor:
    """Return the part of a bucket for a parameter's gradient, with its strides if they have no gaps."""
    dense = 1 + sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
    if dense == param.numel():
        return flat.as_strided(param.shape, param.stride(), flat.storage_offset() + offset)
    return flat[offset : offset + param.numel()].view(param.shape)
