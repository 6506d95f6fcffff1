"""LSTM, GRU and RNN layers: torch's (cuDNN on a GPU), and own kernels that run all steps of a layer in one launch.

The cells, of a row of inputs x and the state h before, with a = W_ih x + b_ih and s = W_hh h + b_hh, divided by gates:

    LSTM    i, f, o = sigmoid(a + s), g = tanh(a + s);  c' = f c + i g,  h' = o tanh(c')
    GRU     r, z = sigmoid(a + s), n = tanh(a_n + r s_n);  h' = (1 - z) n + z h
    RNN     h' = tanh(a + s), or relu

Our kernels compute the recurrence. The products over all steps, with the inputs and for the weights' gradients, are
torch's. The ledger counts forward passes; backward passes are torch's autograd's, or our autograd function's.

Source: Hochreiter and Schmidhuber 1997, with the forget gate of Gers, Schmidhuber and Cummins 2000; Cho et al. 2014,
arXiv:1406.1078, with the reset gate after the product, as in cuDNN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant.ops._launch import ceil_div, next_power_of_2
from accelerant.ops._library import is_ordinary, is_plain, refuses_triton_kernel
from accelerant.ops.attention.launch import triton_capability
from accelerant.ops.recurrent.llvm_kernels import GATES, RecurrentKernel, lanes, vectors
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import Kernel
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation
from accelerant.runtime.dispatch.plan import rules
from accelerant.runtime.provider import ComputeProvider


def layer_reference(
    cell: str, x: Tensor, h: Tensor, c: Tensor | None, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None,
    b_hh: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Run a direction of a layer over x (B, T, K) from h, c (B, H) in plain PyTorch; return y and the states."""
    gates, ys = GATES[cell], []
    for a in F.linear(x, w_ih, b_ih).unbind(1):
        s = F.linear(h, w_hh, b_hh)
        if cell == "lstm":
            assert c is not None  # for the type checker
            i, f, g, o = (a + s).chunk(gates, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        elif cell == "gru":
            (ar, az, an), (sr, sz, sn) = a.chunk(gates, -1), s.chunk(gates, -1)
            z = (az + sz).sigmoid()
            h = (1 - z) * (an + (ar + sr).sigmoid() * sn).tanh() + z * h
        else:
            h = (a + s).tanh() if cell == "tanh" else (a + s).relu()
        ys.append(h)
    return (torch.stack(ys, 1), h) if c is None else (torch.stack(ys, 1), h, c)


# --- one layer by a kernel of ours -----------------------------------------------------------------------------------
class _Layer(torch.autograd.Function):
    """layer_reference, with the recurrence by a pair of launches, forward and backward; see llvm_kernels.py."""

    @staticmethod
    def forward(ctx: Any, launches: Any, cell: str, x: Tensor, h: Tensor, c: Tensor | None, *weights: Any) -> Any:
        w_ih, w_hh, b_ih, b_hh = weights
        B, T, K = x.shape
        H = h.shape[1]
        bias, n_bias = b_ih, h
        if b_ih is not None:
            added = b_hh
            if cell == "gru":
                n_bias = b_hh[2 * H :]
                added = torch.cat((b_hh[: 2 * H], torch.zeros_like(n_bias)))
            bias = b_ih + added
        elif cell == "gru":
            n_bias = x.new_zeros(H)
        gates = F.linear(x.reshape(B * T, K), w_ih, bias)
        y = x.new_empty(B, T, H)
        aux = torch.empty_like(y) if cell in ("lstm", "gru") else y
        launches[0](cell, gates, w_hh, y, h, aux, h if c is None else c, n_bias)
        ctx.launches, ctx.cell = launches, cell
        ctx.save_for_backward(x, h, c, *weights, y, gates, aux)
        last = y[:, -1].clone()
        return (y, last) if c is None else (y, last, aux[:, -1].clone())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, h, c, *weights, y, gates, aux = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of the gradient
            inputs = [x, h, c, *weights]
            wanted = [one for one, needed in zip(inputs, ctx.needs_input_grad[2:], strict=True) if needed]
            results = layer_reference(ctx.cell, *inputs)
            found = iter(torch.autograd.grad(results, wanted, grads, create_graph=True, allow_unused=True))
            return (None, None, *(next(found) if needed else None for needed in ctx.needs_input_grad[2:]))
        w_ih, w_hh, *_ = weights
        B, T, H = y.shape
        dh = grads[1].clone(memory_format=torch.contiguous_format)
        dc = dh if c is None else grads[2].clone(memory_format=torch.contiguous_format)
        of_h = torch.empty_like(gates)
        dn = torch.empty_like(y) if ctx.cell == "gru" else y
        ctx.launches[1](
            ctx.cell, gates, w_hh, y, h, aux, h if c is None else c, grads[0].contiguous(), dh, dc, of_h, dn
        )
        of_x = torch.cat((of_h[:, : 2 * H], dn.view(B * T, H)), 1) if ctx.cell == "gru" else of_h
        _, _, need_x, _, _, *need = ctx.needs_input_grad
        before = torch.cat((h[:, None], y[:, :-1]), 1).view(B * T, H) if need[1] else None
        return (
            None, None, (of_x @ w_ih).view(x.shape) if need_x else None, dh, None if c is None else dc,
            of_x.t() @ x.reshape(B * T, x.shape[2]) if need[0] else None, None if before is None else of_h.t() @ before,
            of_x.sum(0) if need[2] else None, of_h.sum(0) if need[3] else None,
        )  # fmt: skip


_run_layer: Callable[..., tuple[Tensor, ...]] = _Layer.apply


def run_layers(
    run: Callable[[Tensor, int, int], Sequence[Tensor]], x: Tensor, layers: int, dropout: float, training: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Run all layers and directions by `run` (input, number, direction); return y and the states."""
    ends: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        outputs = []
        for direction in range(2 if bidirectional else 1):
            y, *last = run(x.flip(1) if direction else x, layer, direction)
            outputs.append(y.flip(1) if direction else y)
            ends.append(tuple(last))
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and layer + 1 < layers:
            x = F.dropout(x, dropout, training)
    return (x, *(torch.stack(end) for end in zip(*ends, strict=True)))


def _stack(
    launches: Any, cell: str, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], bias: bool, layers: int,
    dropout: float, training: bool, bidirectional: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    each = 4 if bias else 2

    def run(x: Tensor, layer: int, direction: int) -> tuple[Tensor, ...]:
        at = layer * (2 if bidirectional else 1) + direction
        own = [*weights[at * each : (at + 1) * each], *(() if bias else (None, None))]
        h, c = (*(state[at].contiguous() for state in states), None)[:2]
        return _run_layer(launches, cell, x, h, c, *own)

    return run_layers(run, x, layers, dropout, training, bidirectional)


# --- on a CPU --------------------------------------------------------------------------------------------------------
def _real(dtype: torch.dtype) -> str:
    return "double" if dtype == torch.float64 else "float"


@functools.cache
def _compiled(kernel: RecurrentKernel) -> tuple[ComputeProvider, Kernel]:
    provider = registry.create("cpu")
    return provider, provider.compile(kernel.source())


def _launch_llvm(backward: bool, cell: str, gates: Tensor, w_hh: Tensor, y: Tensor, *others: Tensor) -> None:
    """Launch a kernel with packed weights, on as many threads as torch uses; each computes a part of the rows."""
    B, T, H = y.shape
    if not B:
        return
    G, V, L = (*vectors(cell, backward), lanes(_real(y.dtype)))
    if backward:
        packed = w_hh.reshape(GATES[cell] * H, H // (V * L), V * L).transpose(0, 1)
    else:
        packed = w_hh.reshape(G, H // (V * L), V * L, H).permute(1, 3, 0, 2)
    provider, kernel = _compiled(RecurrentKernel(cell, backward, _real(y.dtype)))
    share = ceil_div(B, min(B, torch.get_num_threads()))
    args = (gates, packed.contiguous(), y, *others, T, H, B, share)
    provider.launch(kernel, (ceil_div(B, share),), (1,), args)


_LLVM = (functools.partial(_launch_llvm, False), functools.partial(_launch_llvm, True))

_LEAST_STEPS, _FEW_STATES = 16, 2048
"""Steps from which on, and states of the whole batch up to which, the CPU's kernels are faster than torch's functions.

From runs on a busy Zen 3 core, float32, one thread; `benchmarks.recurrent` measures it. GRU and RNN were faster
than torch in every case of 32 steps, and slower in some of 4. LSTM, which torch computes by oneDNN, was faster with its
backward pass up to 2048 states, and with two threads slower at 1024 (0.87 times the speed). AVX-512, which our vectors
of 32 bytes do not use, was not measured.
"""

_TRACED = "torch must see every operation: tracing, a transform, a subclass, autocast or mixed dtypes"


def _refuses_llvm(case: Case) -> str | None:
    if case.device.type != "cpu":
        return f"is for a CPU, not {case.device.type}"
    if case.dtype not in (torch.float32, torch.float64):
        return "computes float32 and float64"
    cell, hidden, traced, learns, threads = case.options[2:]
    if traced:
        return _TRACED
    multiple = 4 * lanes(_real(case.dtype))
    if hidden % multiple:
        return f"needs a hidden size of a multiple of {multiple}, got {hidden}"
    B, T, _ = case.shape
    if rules().forced:
        return None
    if T < _LEAST_STEPS:
        return f"{T} steps do not repay the packing of the weights, {_LEAST_STEPS} do"
    states = B * hidden
    if cell == "lstm" and not (learns and states <= _FEW_STATES and threads == 1):
        return (
            f"oneDNN's LSTM is as fast without a gradient, by several threads, or with more than {_FEW_STATES} states; "
            f"these are {states}, by {threads} threads"
        )
    if states > _FEW_STATES and torch.backends.cpu.get_cpu_capability() == "AVX512":
        return f"with more than {_FEW_STATES} states torch's products use AVX-512; these are {states}"
    return None


# --- on a GPU --------------------------------------------------------------------------------------------------------
KERNELS = {
    name: TritonKernel("accelerant.ops.recurrent.triton_kernels", f"recurrent_{name}", widths=(last,))
    for name, last in (("fwd", 9), ("bwd", 13))
}
_BLOCK_B = 16
_EXCHANGE_BYTES = 12 << 10  # shared memory of a program besides its weights


def constants(cell: str, hidden: int, dtype: torch.dtype, capability: tuple[int, int] | None) -> dict[str, Any]:
    """Return the compile-time arguments of both kernels; capability None: the interpreter."""
    tf32 = (
        dtype == torch.float32 and torch.backends.cudnn.allow_tf32 and capability is not None and capability >= (8, 0)
    )
    return {
        "CELL": cell, "BLOCK_B": _BLOCK_B, "BLOCK_H": max(16, next_power_of_2(hidden)),
        "PRECISION": "tf32x3" if tf32 else "ieee",
        "UPCAST": dtype == torch.bfloat16 and (capability is None or capability < (8, 0)),
    }  # fmt: skip


def num_warps(hidden: int, dtype: torch.dtype) -> int:
    """Return the warps of a program, which share the columns of the weights."""
    return 8 if hidden > 64 or (hidden > 32 and dtype == torch.float32) else 4


def _launch_triton(name: str, cell: str, gates: Tensor, w_hh: Tensor, y: Tensor, *others: Tensor) -> None:
    B, T, H = y.shape
    if B:
        fixed = constants(cell, H, y.dtype, triton_capability(y.device))
        args: tuple[Any, ...] = (gates, w_hh.contiguous(), y, *others, B, T, H)
        KERNELS[name].launch((ceil_div(B, _BLOCK_B),), args, fixed, num_warps=num_warps(H, y.dtype), num_stages=1)


_TRITON = (functools.partial(_launch_triton, "fwd"), functools.partial(_launch_triton, "bwd"))


def _refuses_triton(case: Case) -> str | None:
    cell, hidden, traced = case.options[2:5]
    if traced:
        return _TRACED
    if (reason := refuses_triton_kernel(case)) is not None:
        return reason
    itemsize, most = case.dtype.itemsize, 99 << 10
    if case.device.type == "cuda":
        found: Any = torch.cuda.get_device_properties(case.device)  # torch does not annotate these, nor has all on ROCm
        most = getattr(found, "shared_memory_per_block_optin", most)
        if torch.cuda.get_device_capability(case.device) < (8, 0):
            itemsize = 4  # Triton has no matrix units there, and computes in float32
    size = GATES[cell] * max(16, next_power_of_2(hidden)) ** 2 * itemsize
    if size + _EXCHANGE_BYTES > most:
        return f"keeps the weights, {size >> 10} KiB, in shared memory, of which a block has {most >> 10} KiB"
    return None


def _torch(cell: str, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], *options: Any) -> Any:
    state = tuple(states) if cell == "lstm" else states[0]
    return _TORCH[cell](x, state, list(weights), *options, True)


_TORCH: dict[str, Callable[..., Any]] = {
    "lstm": torch.lstm, "gru": torch.gru, "tanh": torch.rnn_tanh, "relu": torch.rnn_relu
}  # fmt: skip


def _cost(case: Case) -> Cost:
    """Return the cost of reading x and the weights and writing y once, with a product per weight, step and sequence."""
    B, T, inputs = case.shape
    weights, outputs = case.options[0], case.options[1]
    return Cost((B * T * (inputs + outputs) + weights) * case.dtype.itemsize, 2 * B * T * weights)


lstm_fwd, gru_fwd, rnn_fwd = (
    Operation(
        name,
        (
            Implementation("llvm", functools.partial(_stack, _LLVM), refuses=_refuses_llvm, own=True),
            Implementation("torch", _torch),
            Implementation("triton", functools.partial(_stack, _TRITON), refuses=_refuses_triton, own=True),
        ),
        cost=_cost,
    )
    for name in ("lstm_fwd", "gru_fwd", "rnn_fwd")
)
_OPERATIONS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "lstm": lstm_fwd,
    "gru": gru_fwd,
    "tanh": rnn_fwd,
    "relu": rnn_fwd,
}


def recurrent(
    cell: str, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], *, bias: bool, layers: int,
    dropout: float, training: bool, bidirectional: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Run "lstm", "gru", "tanh" or "relu" layers over checked x (B, T, inputs); return y and the last states."""
    hidden = states[0].shape[-1]
    others = (*states, *weights)
    traced = torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type) or not is_plain(x)
    traced = traced or not all(is_ordinary(one) and one.dtype == x.dtype for one in others)
    masked = dropout > 0 and training and layers > 1  # a reentrant checkpoint must draw one mask without and with grad
    learns = (torch.is_grad_enabled() or masked) and any(one.requires_grad for one in (x, *others))
    size = sum(weight.numel() for weight in weights)
    threads = torch.get_num_threads() if x.device.type == "cpu" else 0
    options = (size, hidden * (2 if bidirectional else 1), cell, hidden, traced, learns, threads)
    case = Case(x.device, x.dtype, x.shape, options)
    return _OPERATIONS[cell](case, cell, x, states, weights, bias, layers, dropout, training, bidirectional)
