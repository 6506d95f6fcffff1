"""The neural ops as the benchmark sees them: ours, torch's, the operations they take, and other libraries' versions.

Each function takes an op's arguments as its cases.py gives them: tensors positional, options by keyword.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant import ops
from accelerant.bench import peers
from accelerant.ops._cases import Sample

__all__ = ["OPS", "Subject"]

Fn = Callable[..., Any]
Flops = Callable[[Sequence[Tensor], Tensor], int]


@dataclass(frozen=True, slots=True)
class Subject:
    """An op to measure; its cases stand in its folder.

    Attributes:
        theirs: the same function by torch.
        peers: runner -> what makes its function; it raises UnsupportedCase where the library is absent.
        flops: of the forward pass, from its inputs and its first result; None where bandwidth bounds it.
        backward_flops: of the backward pass, as a multiple of the forward pass's.
        constants: arguments that no model asks a gradient of, by place.
        shared: arguments that are the same for every row of the first, by place: weights, also where they are as many
            rows as that.
        random: whether a result is another at each call, so that it is not compared.
        odd: which of the op's LARGE samples torch's function takes as well.
    """

    theirs: Fn
    peers: Mapping[str, Callable[[], Fn]] = field(default_factory=dict)
    flops: Flops | None = None
    backward_flops: float = 2.0
    random: bool = False
    constants: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    odd: Callable[[Sample], bool] = lambda sample: True


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, **options)


def _add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.layer_norm(total, weight.shape, weight, bias, **options), total


def _rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, eps), total


def _linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate=approximate)


def _swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, -1)
    return F.silu(gate) * up


def _rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    if interleaved:
        one, two = x[..., ::2], x[..., 1::2]
        return torch.stack((one * cos - two * sin, two * cos + one * sin), -1).flatten(-2).to(x.dtype)
    one, two = x.chunk(2, -1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1).to(x.dtype)


def _cross_entropy(logits: Tensor, targets: Tensor, *, inplace_backward: bool = False, **options: Any) -> Tensor:
    return F.cross_entropy(logits, targets, **options)


def _linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), targets, **options)


def attention_by_torch(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """The back end that torch chooses."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def _attention_decode(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, scale: float | None = None) -> Tensor:
    """By torch's attention with a mask of what each query sees."""
    places = lengths[:, None] - q.shape[2] + torch.arange(q.shape[2], device=q.device)
    seen = torch.arange(k.shape[2], device=q.device) <= places[..., None]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen[:, None], scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, causal: bool = False, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """By torch's own function for packed sequences, a prototype that says "causal" in one way or the other."""
    from torch.nn.attention.varlen import varlen_attn

    told = inspect.signature(varlen_attn).parameters
    how: dict[str, Any] = {"is_causal": causal} if "is_causal" in told else {"window_size": (-1, 0 if causal else -1)}
    if scale is not None:
        how["scale"] = scale
    found = varlen_attn(q, k, v, cu_q, cu_k, max_seqlen_q, max_seqlen_k, **how)
    return found[0] if isinstance(found, tuple) else found


def _by_torch_too(sample: Sample) -> bool:
    """No window, and causal only where queries and keys are as many: torch's mask is another where they are not."""
    q, k = sample.shapes[:2]
    return "window" not in sample.options and (not sample.options.get("causal") or (q or ())[2:3] == (k or ())[2:3])


def _of_one_number(sample: Sample) -> bool:
    """A loss of all rows together, whose gradient needs none to start from."""
    return sample.options.get("reduction") != "none"


def _quantize_int8(x: Tensor, *, dim: int = -1) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(dim, keepdim=True).float() / 127
    return torch.round(x / scale).to(torch.int8), scale.squeeze(dim)


def _linear_int8(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, dynamic: bool = False
) -> Tensor:
    """With a dequantised weight; dynamic, by torch's product of integers."""
    if not dynamic:
        return F.linear(x, (weight * scale[:, None]).to(x.dtype), bias)
    q, x_scale = _quantize_int8(x)
    y = torch._int_mm(q, weight.t()) * x_scale[:, None] * scale
    return (y if bias is None else y + bias).to(x.dtype)


def _matmul_flops(inputs: Sequence[Tensor], y: Tensor) -> int:
    return 2 * y.numel() * inputs[0].shape[-1]


def _linear_int8_flops(inputs: Sequence[Tensor], y: Tensor) -> int:
    """None for few rows: the weight's bytes bound those."""
    return _matmul_flops(inputs, y) if len(inputs[0]) > 16 else 0


def _linear_loss_flops(inputs: Sequence[Tensor], _: Tensor) -> int:
    hidden, weight = inputs[:2]
    return 2 * hidden.numel() * weight.shape[0]


def _conv_flops(inputs: Sequence[Tensor], y: Tensor) -> int:
    return 2 * y.numel() * inputs[1][0].numel()


def varlen_flops(q: Tensor, cu_q: Tensor, cu_k: Tensor, *, causal: bool) -> int:
    """The same, of each sequence."""
    pairs = int((cu_q.diff().long() * cu_k.diff().long()).sum())
    return 4 * pairs * q.shape[1] * q.shape[2] // (2 if causal else 1)


def attention_flops(q: Tensor, k: Tensor, *, causal: bool) -> int:
    """Two products over the pairs that are not masked, half of them where it is causal, as is the custom."""
    return 4 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * q.shape[3] // (2 if causal else 1)


_ALL: dict[str, Subject] = {
    "add": Subject(torch.add),
    "mul": Subject(torch.mul),
    "relu": Subject(F.relu),
    "sigmoid": Subject(torch.sigmoid),
    "tanh": Subject(torch.tanh),
    "silu": Subject(F.silu),
    "gelu": Subject(F.gelu),
    "softmax": Subject(F.softmax, {"liger": peers.liger_softmax, "quack": peers.quack_softmax}),
    "log_softmax": Subject(F.log_softmax),
    "layer_norm": Subject(
        _layer_norm, {"liger": peers.liger_layer_norm, "quack": peers.quack_layer_norm}, shared=(1, 2)
    ),
    "add_layer_norm": Subject(_add_layer_norm, shared=(2, 3)),
    "rms_norm": Subject(_rms_norm, {"liger": peers.liger_rms_norm, "quack": peers.quack_rms_norm}, shared=(1,)),
    "add_rms_norm": Subject(_add_rms_norm, shared=(2,)),
    "linear_gelu": Subject(_linear_gelu, {"cublaslt": peers.cublaslt_linear_gelu}, _matmul_flops, shared=(1, 2)),
    "swiglu": Subject(_swiglu, {"liger": peers.liger_swiglu}),
    "rope": Subject(_rope, constants=(1, 2)),
    "embedding": Subject(F.embedding, shared=(1,)),
    "dropout": Subject(lambda x, p=0.5, seed=None: F.dropout(x, p), random=True),
    "cross_entropy": Subject(
        _cross_entropy,
        {"liger": peers.liger_cross_entropy, "quack": peers.quack_cross_entropy},
        odd=_of_one_number,
    ),
    "linear_cross_entropy": Subject(
        _linear_cross_entropy,
        {"liger": peers.liger_linear_cross_entropy},
        _linear_loss_flops,
        shared=(1,),
        odd=_of_one_number,
    ),
    "matmul": Subject(torch.matmul, flops=_matmul_flops),
    "quantize_int8": Subject(_quantize_int8),
    "linear_int8": Subject(_linear_int8, flops=_linear_int8_flops, constants=(2,), shared=(1, 2, 3)),
    "attention": Subject(
        attention_by_torch,
        {"cudnn": peers.cudnn_attention, "flash": peers.flash_attention, "flash_attn_4": peers.flash_attention_4},
        lambda inputs, _: attention_flops(inputs[0], inputs[1], causal=False),
        backward_flops=2.5,
        odd=_by_torch_too,
    ),
    "attention_varlen": Subject(
        _attention_varlen,
        flops=lambda inputs, _: varlen_flops(inputs[0], inputs[3], inputs[4], causal=False),
        backward_flops=2.5,
        odd=lambda sample: "window" not in sample.options,
    ),
    "attention_decode": Subject(_attention_decode),
    "conv2d": Subject(F.conv2d, flops=_conv_flops, shared=(1, 2)),
    "max_pool2d": Subject(F.max_pool2d),
    "avg_pool2d": Subject(F.avg_pool2d),
}

OPS: dict[str, Subject] = {name: _ALL[name] for name in ops.__all__ if name in _ALL}
"""The subjects of the ops that there are."""
