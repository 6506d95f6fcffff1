"""Layers of torch.nn on Accelerant's ops, under its names and with its arguments; low-precision copies of weights.

Each class derives from torch's and has its state dict; only Linear is drawn from another distribution. Under
`torch.autocast` the layers take and return the autocast dtype, so the residual stream has the low precision too;
parameters and their gradients keep the master dtype, and norms accumulate in float32.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as everywhere
from torch.nn.utils.rnn import PackedSequence

from accelerant import ops
from accelerant._renamed import renamed_arguments
from accelerant.config import DTYPE_NAMES
from accelerant.errors import ConfigError, ShapeError, UnsupportedCase, UnsupportedDtype
from accelerant.ops._images import Pair, pair
from accelerant.ops._library import autocast_dtype, autocasts, is_plain, keys_of, name_of, ordinary_keys
from accelerant.ops._per_example import is_traced
from accelerant.ops.linear_fp8 import MULTIPLE, Float8Weight, Float8Weights, refuses_device
from accelerant.ops.recurrent import recurrent
from accelerant.ops.transformer.block import fused_linear
from accelerant.runtime.memory.limits import only_counts

FUSED = {"cuda"}
"""Device types on which a layer runs as one autograd function; elsewhere torch's own functions are as fast."""


GLOBAL_HOOKS = (
    everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks, everywhere._global_backward_hooks,
    everywhere._global_backward_pre_hooks,
)  # fmt: skip
"""torch's hooks of all modules."""


def require_width(x: Tensor, width: int, layer: str) -> None:
    """Raise ShapeError unless the last dimension of x is `width`."""
    if x.dim() == 0 or x.shape[-1] != width:
        raise ShapeError(f"{layer} takes (..., {width}), got {tuple(x.shape)}")


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype to compute in for x: the autocast dtype of its device if autocast is on, else x's own."""
    if not autocasts() or not x.is_floating_point():
        return x.dtype
    return autocast_dtype(x.device.type) or x.dtype


def dtype_of(value: torch.dtype | str | None) -> torch.dtype | None:
    """Return a dtype that may be given by its name ("bfloat16", "bf16"); raise ConfigError for another value."""
    found = getattr(torch, DTYPE_NAMES.get(value, value), None) if isinstance(value, str) else value
    if (found is None and value is None) or isinstance(found, torch.dtype):
        return found
    raise ConfigError(f"a dtype must be one of torch's or its name, such as 'bfloat16' or 'bf16', got {value!r}")


def is_fusable(x: Tensor) -> bool:
    """Return whether layers may pass x to an autograd function: it is plain, or active modes only count memory."""
    return is_plain(x) or only_counts(x)


def may_fuse(x: Tensor) -> bool:
    """Return whether layers run as one autograd function on the device of x, where `fuses` allows it."""
    return x.device.type in FUSED


def fuses(x: Tensor, dtype: torch.dtype, *layers: nn.Module) -> bool:
    """Return whether layers may run as one autograd function: on a GPU, if they may be bypassed."""
    return may_fuse(x) and may_bypass(x, dtype, *layers, feeds_sinks=True)


def may_bypass(x: Tensor, dtype: torch.dtype, *layers: nn.Module, feeds_sinks: bool = False) -> bool:
    """Return whether functions of the parameters may run in place of layers.

    They may for plain tensors, in the parameters' dtype or from float32 down, and if each layer is exactly a class of
    this module: hooks, subclasses and parametrizations expect each layer to be called.
    """
    if torch.compiler.is_compiling() or not is_fusable(x) or x.numel() == 0:
        return False
    on_cpu = x.is_cpu
    for layer in layers:
        if type(layer) not in (Linear, LayerNorm) or has_hooks(layer, feeds_sinks=feeds_sinks):
            return False
        if layer._parameters["weight"] is None:
            return False
        for parameter in layer._parameters.values():
            if parameter is not None and (
                parameter.dtype not in (dtype, torch.float32)
                or not (
                    (on_cpu and type(parameter) is nn.Parameter)  # torch's functions take any
                    or ordinary_keys.get(keys_of(parameter).raw_repr())
                    or is_fusable(parameter)
                )
            ):
                return False
    return True


def has_hooks(module: nn.Module, *, feeds_sinks: bool = False) -> bool:
    """Return whether calling a module does more than its class's forward.

    The forward and the hook that a per-example sink (accelerant.ops._per_example) puts into a module count too, unless
    `feeds_sinks`: what runs in place of the call feeds the sink itself.
    """
    state = module.__dict__
    if state["_forward_pre_hooks"] or "forward" in state:  # the latter is set there by gradient checkpointing
        traced = feeds_sinks and is_traced(module)
        if not traced or len(state["_forward_pre_hooks"]) > 1:
            return True
    return bool(
        state["_forward_hooks"] or state["_backward_hooks"] or state["_backward_pre_hooks"] or any(GLOBAL_HOOKS)
        or module._compiled_call_impl is not None
    )  # fmt: skip


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restore each module's training mode after the block; a frozen module may have another than the model."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def pair_of(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Return a layer's weight and bias."""
    return layer.weight, layer.bias


def cast_pair(layer: Any, dtype: torch.dtype) -> tuple[Tensor | Float8Weight, Tensor | None]:
    """Return weight and bias in the dtype of their products."""
    weight: Tensor | Float8Weight | None = float8_of(layer.weight) if dtype == torch.bfloat16 else None
    if weight is None:
        weight = lowered(layer.weight, dtype)
    return weight, None if layer.bias is None else lowered(layer.bias, dtype)


class Linear(nn.Linear):
    """y = x @ weight^T + bias; the arguments are those of torch.nn.Linear.

    Attributes:
        weight: (out_features, in_features), drawn from N(0, 0.02).
        bias: (out_features,), initialized to zero, or None.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        if in_features < 1 or out_features < 1:
            raise ConfigError(f"Linear needs at least one input and output, got {in_features} and {out_features}")
        super().__init__(in_features, out_features, bias, device, dtype)

    def reset_parameters(self, std: float = 0.02) -> None:
        """Draw the weight from N(0, std) with torch's global generator and zero the bias."""
        nn.init.normal_(self.weight, std=std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Apply the map to (..., in_features); return (..., out_features) in the input's dtype or the autocast dtype.

        ShapeError: another last dimension. UnsupportedCase: precision fp8 is requested where the layer cannot use it.
        """
        require_width(input, self.in_features, "Linear")
        if input.dtype is self.weight.dtype and not autocasts() and not may_fuse(input):
            return ops.linear(input, self.weight, self.bias)
        dtype = compute_dtype(input)
        if fuses(input, dtype, self):
            return fused_linear(input.to(dtype), *pair_of(self), *cast_pair(self, dtype))
        if float8_of(self.weight) is not None and input.numel():
            raise UnsupportedCase(
                f"precision fp8 needs a layer that runs as an autograd function of Accelerant; {self} runs on torch's "
                "(torch.compile, a subclass of Tensor, a hook or another device): use bfloat16"
            )
        bias = None if self.bias is None else self.bias.to(dtype)
        return ops.linear(input.to(dtype), self.weight.to(dtype), bias)

    def extra_repr(self) -> str:
        """Describe the module for `print(model)`."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


def _to_normalize(layer: Any, x: Tensor) -> Tensor:
    """Return x in the dtype to compute in; ShapeError if it does not end in the dimensions that a norm averages."""
    shape = layer.normalized_shape
    if x.shape[-len(shape) :] != shape:
        raise ShapeError(f"{type(layer).__name__} takes (..., {', '.join(map(str, shape))}), got {tuple(x.shape)}")
    return x.to(compute_dtype(x))


def _flat(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.flatten()


@renamed_arguments(width="normalized_shape")
class LayerNorm(nn.LayerNorm):
    """Center each row, scale it to unit variance, then scale by `weight` and shift by `bias`; as torch.nn.LayerNorm.

    Attributes:
        weight: of normalized_shape, initialized to one; None without elementwise_affine.
        bias: the same, initialized to zero; None with bias=False, too.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize (..., *normalized_shape), in its dtype or the autocast dtype; raise ShapeError for another one."""
        x, dims = _to_normalize(self, input), len(self.normalized_shape)
        if dims == 1:
            return ops.layer_norm(x, self.weight, self.bias, eps=self.eps)
        return ops.layer_norm(x.flatten(-dims), _flat(self.weight), _flat(self.bias), eps=self.eps).view(x.shape)


@renamed_arguments(width="normalized_shape")
class RMSNorm(nn.RMSNorm):
    """Scale each row to unit root mean square, then by `weight`; see accelerant.ops.rms_norm and torch.nn.RMSNorm.

    eps None is torch's: the epsilon of float32, in which low precisions are computed, or of float64.
    """

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float | None = None, elementwise_affine: bool = True,
        device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        if (isinstance(normalized_shape, int) and normalized_shape < 1) or normalized_shape == ():
            raise ConfigError(f"RMSNorm needs a width of at least 1, got {normalized_shape}")
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimensions; arguments, result and errors as in LayerNorm."""
        x, dims = _to_normalize(self, x), len(self.normalized_shape)
        if dims == 1:
            return ops.rms_norm(x, self.weight, eps=rms_eps(self, x))
        return ops.rms_norm(x.flatten(-dims), _flat(self.weight), eps=rms_eps(self, x)).view(x.shape)


def rms_eps(norm: nn.RMSNorm, x: Tensor) -> float:
    """Return the eps of a norm of x."""
    if norm.eps is not None:
        return norm.eps
    return torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps


# --- images (B, C, H, W), or a single one (C, H, W) ------------------------------------------------------------------
class Conv2d(nn.Conv2d):
    """A convolution, as torch.nn.Conv2d; see accelerant.ops.conv2d."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Pair, stride: Pair = 1, padding: Pair | str = 0,
        dilation: Pair = 1, groups: int = 1, bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros", device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        if in_channels < 1 or out_channels < 1 or groups < 1:
            got = f"{in_channels}, {out_channels} and {groups}"
            raise ConfigError(f"Conv2d needs channels and groups of at least 1, got {got}")
        if in_channels % groups or out_channels % groups:
            raise ConfigError(f"groups must divide the channels, got {groups} for {in_channels} and {out_channels}")
        if isinstance(padding, str) and padding not in ("valid", "same"):
            raise ConfigError(f"padding must be numbers, 'valid' or 'same', got {padding!r}")
        if padding_mode not in (modes := ("zeros", "reflect", "replicate", "circular")):
            raise ConfigError(f"padding_mode must be {' or '.join(modes)}, got {padding_mode!r}")
        sizes: Any = {"kernel_size": kernel_size, "stride": stride, "dilation": dilation}
        sizes = {name: tuple(pair(name, size, 1)) for name, size in sizes.items()}
        sizes["padding"] = padding if isinstance(padding, str) else tuple(pair("padding", padding, 0))
        options = {"groups": groups, "bias": bias, "padding_mode": padding_mode, "device": device, "dtype": dtype}
        super().__init__(in_channels, out_channels, **sizes, **options)

    def forward(self, input: Tensor) -> Tensor:
        """Convolve (B, in_channels, H, W) or (in_channels, H, W), in its dtype or the autocast dtype.

        Raises:
            ShapeError: a different number of channels, or an image smaller than the kernel.
        """
        if input.dim() not in (3, 4) or input.shape[-3] != self.in_channels:
            raise ShapeError(f"Conv2d takes (B, {self.in_channels}, H, W), got {tuple(input.shape)}")
        dtype = compute_dtype(input)
        x, padding = input.to(dtype), self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode), (0, 0)
        bias = None if self.bias is None else self.bias.to(dtype)
        return ops.conv2d(x, self.weight.to(dtype), bias, self.stride, padding, self.dilation, self.groups)  # type: ignore[arg-type]  # checked above


class MaxPool2d(nn.MaxPool2d):
    """The largest element of each window, as torch.nn.MaxPool2d; see accelerant.ops.max_pool2d."""

    def __init__(
        self, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, dilation: Pair = 1,
        return_indices: bool = False, ceil_mode: bool = False,
    ) -> None:  # fmt: skip
        _check_window(kernel_size, stride, padding, dilation)
        super().__init__(kernel_size, stride, padding, dilation, return_indices, ceil_mode)  # type: ignore[arg-type]

    def forward(self, input: Tensor) -> Any:
        """Pool (B, C, H, W) or (C, H, W); with return_indices also return where the maxima are."""
        return ops.max_pool2d(
            input, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode, self.return_indices
        )


class AvgPool2d(nn.AvgPool2d):
    """The mean of each window, as torch.nn.AvgPool2d; see accelerant.ops.avg_pool2d."""

    def __init__(
        self, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> None:  # fmt: skip
        _check_window(kernel_size, stride, padding, 1)
        super().__init__(kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)  # type: ignore[arg-type]

    def forward(self, input: Tensor) -> Tensor:
        """Pool (B, C, H, W) or (C, H, W)."""
        return ops.avg_pool2d(
            input, self.kernel_size, self.stride, self.padding, self.ceil_mode, self.count_include_pad,
            self.divisor_override,
        )  # fmt: skip


def _check_window(kernel_size: Pair, stride: Pair | None, padding: Pair, dilation: Pair) -> None:
    pair("kernel_size", kernel_size, 1)
    pair("stride", kernel_size if stride is None else stride, 1)
    pair("padding", padding, 0)
    pair("dilation", dilation, 1)


# --- recurrent layers ------------------------------------------------------------------------------------------------
_CELLS = {"LSTM": "lstm", "GRU": "gru", "RNN_TANH": "tanh", "RNN_RELU": "relu"}


class RecurrentLayer(nn.RNNBase):
    """Base of the layers: constructor and forward over those of torch's class, next in the method resolution order."""

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
        dropout: float = 0.0, bidirectional: bool = False, proj_size: int = 0, device: Any = None,
        dtype: torch.dtype | None = None, **options: Any,
    ) -> None:  # fmt: skip
        name = type(self).__name__
        if more := options.keys() - ({"nonlinearity"} if isinstance(self, nn.RNN) else set()):
            raise TypeError(f"{name}() got an unexpected keyword argument {min(more)!r}")
        if input_size < 1 or hidden_size < 1 or num_layers < 1:
            got = f"{input_size}, {hidden_size}, {num_layers}"
            raise ConfigError(f"{name} needs input_size, hidden_size and num_layers of at least 1, got {got}")
        if not 0 <= dropout < 1:
            raise ConfigError(f"{name}: dropout must be at least 0 and below 1, got {dropout}")
        if dropout and num_layers == 1:
            raise ConfigError(f"{name}: dropout applies between layers, and there is one")
        if proj_size:
            if not isinstance(self, nn.LSTM):
                raise ConfigError(f"{name} has no projections: proj_size is for LSTM")
            options["proj_size"] = proj_size
        initialize: Any = super().__init__  # of torch's class, which sets the mode of RNNBase itself
        options |= {"bias": bias, "batch_first": batch_first, "dropout": dropout, "bidirectional": bidirectional}
        initialize(input_size, hidden_size, num_layers, device=device, dtype=dtype, **options)

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> Any:
        """Process sequences (T, B, input_size), or (B, T, input_size) with batch_first; return y and the last state.

        `hx` is the initial h (num_layers directions, B, hidden_size), of LSTM h and c; None for zeros. y has directions
        hidden_size features. Packed sequences, and projections (proj_size), run by torch's functions. ShapeError or
        UnsupportedDtype: another shape, or a dtype other than the parameters'.
        """
        if self.proj_size or isinstance(input, PackedSequence):
            return super().forward(input, hx)
        lstm = self.mode == "LSTM"
        x = input if self.batch_first or input.dim() != 3 else input.transpose(0, 1)
        y, *final = recurrent(
            _CELLS[self.mode], x, self._states(x, hx if lstm else None if hx is None else (hx,), 1 + lstm),
            cast("list[Tensor]", self._flat_weights),  # on a GPU they share one allocation, as cuDNN requires
            bias=self.bias, layers=self.num_layers, dropout=self.dropout, training=self.training,
            bidirectional=self.bidirectional,
        )  # fmt: skip
        return (y if self.batch_first else y.transpose(0, 1)), tuple(final) if lstm else final[0]

    def _states(self, x: Tensor, states: Sequence[Tensor] | None, count: int) -> tuple[Tensor, ...]:
        """Check x (B, T, input_size) and the states; return the states, zeros if none are given."""
        name = type(self).__name__
        if x.dim() != 3 or x.shape[2] != self.input_size or not x.shape[1]:
            wanted, got = (
                ("B, T", x.shape)
                if self.batch_first
                else ("T, B", x.mT.shape if x.dim() < 3 else x.transpose(0, 1).shape)
            )
            raise ShapeError(f"{name} takes ({wanted}, {self.input_size}), T at least 1, got {tuple(got)}")
        dtype, low = self._flat_weights[0].dtype, torch.is_autocast_enabled(x.device.type)  # type: ignore[union-attr]
        if x.dtype != dtype and not low:
            raise UnsupportedDtype(f"{name} has parameters of {name_of(dtype)}, x is {name_of(x.dtype)}")
        shape = (self.num_layers * (2 if self.bidirectional else 1), x.shape[0], self.hidden_size)
        if states is None:
            return (torch.zeros(shape, dtype=x.dtype, device=x.device),) * count
        if len(states) != count:
            raise ShapeError(f"the state of {name} must be {count} tensors, got {len(states)}")
        for state in states:
            if state.shape != shape:
                raise ShapeError(f"the state of {name} must be {shape}, got {tuple(state.shape)}")
            if state.dtype != x.dtype and not low:
                raise UnsupportedDtype(f"x of {name} is {name_of(x.dtype)}, its state is {name_of(state.dtype)}")
        return tuple(states)


_RECURRENT = renamed_arguments(inputs="input_size", hidden="hidden_size", layers="num_layers")


@_RECURRENT
class LSTM(RecurrentLayer, nn.LSTM):
    """Long short-term memory, as torch.nn.LSTM: by cuDNN on a GPU, and by kernels of our own where those are faster.

    Source: Hochreiter and Schmidhuber 1997, with the forget gate of Gers, Schmidhuber and Cummins 2000.
    """


@_RECURRENT
class GRU(RecurrentLayer, nn.GRU):
    """Gated recurrent units, as torch.nn.GRU; h alone is the state.

    Source: Cho et al. 2014, arXiv:1406.1078, with the reset gate after the product, as in cuDNN.
    """


@_RECURRENT
class RNN(RecurrentLayer, nn.RNN):
    """Elman's layers, as torch.nn.RNN: h' = tanh(W_ih x + b_ih + W_hh h + b_hh), or relu.

    Source: Elman 1990, "Finding structure in time".
    """

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, nonlinearity: str = "tanh", *args: Any,
        **options: Any,
    ) -> None:  # fmt: skip
        if nonlinearity not in ("tanh", "relu"):
            raise ConfigError(f"RNN: nonlinearity must be tanh or relu, got {nonlinearity!r}")
        super().__init__(input_size, hidden_size, num_layers, *args, nonlinearity=nonlinearity, **options)


# --- attention -------------------------------------------------------------------------------------------------------
def joined_masks(mask: Tensor | None, padding: Tensor | None, heads: tuple[int, int]) -> Tensor | None:
    """Return torch's two masks, whose True hides, as one for our op, whose True shows."""
    parts = []
    if mask is not None:
        mask = mask.unflatten(0, heads) if mask.dim() == 3 else mask[None, None]
        parts.append(~mask if mask.dtype == torch.bool else mask)
    if padding is not None:
        parts.append((~padding if padding.dtype == torch.bool else padding)[:, None, None])
    if len(parts) < 2 or all(part.dtype == torch.bool for part in parts):
        return parts[0] & parts[1] if len(parts) == 2 else parts[0] if parts else None
    bools, numbers = sorted(parts, key=lambda part: part.dtype != torch.bool)
    return numbers.masked_fill(~bools, float("-inf")) if bools.dtype == torch.bool else bools + numbers


def multihead_forward(
    self: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None,
    attn_mask: Tensor | None, is_causal: bool,
) -> tuple[Tensor, None]:  # fmt: skip
    """Run torch.nn.MultiheadAttention without its weights on our op; the inputs have three dimensions."""
    weight, bias, E = self.in_proj_weight, self.in_proj_bias, self.embed_dim
    if query is key and key is value:
        q, k, v = F.linear(query, weight, bias).chunk(3, -1)
    else:
        biases = (None, None, None) if bias is None else bias.split(E)
        q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weight.split(E), biases, strict=True))
    batch, time = (0, 1) if self.batch_first else (1, 0)
    B, H, T = query.shape[batch], self.num_heads, query.shape[time]
    q, k, v = (x.unflatten(-1, (H, E // H)).permute(batch, 2, time, 3) for x in (q, k, v))
    causal = is_causal is True and key_padding_mask is None and k.shape[2] == T  # torch.compile's is a symbol
    o = ops.attention(q, k, v, causal, mask=None if causal else joined_masks(attn_mask, key_padding_mask, (B, H)))
    assert isinstance(o, Tensor)  # without the log-sum-exp
    joined = o.permute(0, 2, 1, 3) if self.batch_first else o.permute(2, 0, 1, 3)
    return F.linear(joined.flatten(-2), self.out_proj.weight, self.out_proj.bias), None


def refuses_multihead(
    self: nn.MultiheadAttention, qkv: Sequence[Tensor], masks: Sequence[Tensor | None], is_causal: bool
) -> str | None:
    """Return why a call of torch.nn.MultiheadAttention is torch's; None if `multihead_forward` serves it."""
    if self.training and self.dropout:
        return f"dropout of the attention weights (p = {self.dropout})"
    if any(x.dim() != 3 or x.is_nested for x in qkv):
        return "inputs that are nested or not of three dimensions"
    if masks[0] is None and is_causal:
        return "is_causal without attn_mask"
    if any(mask is not None and mask.dtype not in (torch.bool, qkv[0].dtype, torch.float32) for mask in masks):
        return "a mask of another dtype than the inputs'"
    return None


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention, with need_weights=False on accelerant.ops.attention where the op serves the call.

    Arguments, state dict and results are torch's: queries, keys and values (T, B, E), or (B, T, E) with batch_first; a
    mask's True hides. Torch's function runs calls that need the weights or drop some of them, and unbatched inputs.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return the attended values, shaped like the queries, and the weights (B, T, S) if needed, else None."""
        own = not need_weights and self._qkv_same_embed_dim and self.bias_k is None and not self.add_zero_attn
        if own and refuses_multihead(self, (query, key, value), (attn_mask, key_padding_mask), is_causal) is None:
            return multihead_forward(self, query, key, value, key_padding_mask, attn_mask, is_causal)
        return super().forward(
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )


# --- weights cast once a step ----------------------------------------------------------------------------------------
#
# Autocast keeps parameters in float32 and casts them at each use: twice a step for each matrix, and again for each
# micro-batch. A LowWeights refreshes all copies that layers requested with one multi-tensor cast, and the layers use
# them while it is active. Copies are not used outside of that, so no weight has a stale copy.


class LowWeights:
    """Low-precision copies of the parameters that layers requested while it was active.

    Products use the matrices in `float8` in 8-bit floating point; ShapeError for a dimension that is no multiple of 16.
    """

    def __init__(self, dtype: torch.dtype, float8: Iterable[Tensor] = ()) -> None:
        self._dtype = dtype
        self._sources: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._by_id: dict[int, Tensor] = {}
        sources = list(float8)
        self._float8 = Float8Weights(sources) if sources else None
        self._rounded = dict(zip(map(id, sources), self._float8.each, strict=True)) if self._float8 else {}

    def of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a parameter's copy, created on the first request."""
        if dtype != self._dtype:
            return weight.detach().to(dtype)
        if (copy := self._by_id.get(id(weight))) is None:
            copy = weight.detach().to(dtype)
            self._sources.append(weight)  # kept alive, so that its id stays unique
            self._copies.append(copy)
            self._by_id[id(weight)] = copy
        return copy

    @contextmanager
    def refreshed(self) -> Iterator[None]:
        """Refresh all copies and activate them inside the context."""
        if self._copies:
            torch._foreach_copy_(self._copies, [source.detach() for source in self._sources])
        if self._float8 is not None:
            self._float8.fill()
        token = _active.set(self)
        _rounded.update(self._rounded)
        try:
            yield
        finally:
            _active.reset(token)
            for key in self._rounded:
                del _rounded[key]


_active: ContextVar[LowWeights | None] = ContextVar("accelerant_low_weights", default=None)

_rounded: dict[int, Float8Weight] = {}
"""Weight identity -> its 8-bit form while active, for all threads: recomputation runs on autograd's threads."""


def lowered(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight in a dtype, detached: itself, the active copy, or a new one."""
    if weight.dtype == dtype:
        return weight.detach()
    copies = _active.get()
    return weight.detach().to(dtype) if copies is None else copies.of(weight, dtype)


def float8_of(weight: Tensor) -> Float8Weight | None:
    """Return a weight's active 8-bit form; None if there is none."""
    return _rounded.get(id(weight))


# --- fp8 -------------------------------------------------------------------------------------------------------------
def require_float8(device: torch.device) -> None:
    """Raise ConfigError unless a device multiplies 8-bit floating-point numbers."""
    if (reason := refuses_device(device)) is not None:
        needs = "an NVIDIA GPU of compute capability 8.9 or more"
        raise ConfigError(f"precision fp8 needs {needs}, {reason}: use bfloat16")


def float8_weights(model: nn.Module) -> list[Tensor]:
    """Return the weights of the linear layers in a model's blocks, each once, without embeddings and output layers.

    Raises ConfigError if there is none, or a dimension of one is not a multiple of 16.
    """
    weights: dict[int, Tensor] = {}
    for path, block in model.named_modules():
        if not getattr(block, "float8_linears", False):
            continue
        for name, layer in block.named_modules():
            if isinstance(layer, Linear):
                shape = tuple(layer.weight.shape)
                if any(size % MULTIPLE for size in shape):
                    raise ConfigError(
                        f"precision fp8 takes weights whose sizes are multiples of {MULTIPLE}; "
                        f"{f'{path}.{name}'.strip('.')} is {shape}"
                    )
                weights[id(layer.weight)] = layer.weight
    if not weights:
        raise ConfigError(
            f"precision fp8 is for the blocks of accelerant.nn (TransformerBlock, those of Llama); "
            f"{type(model).__name__} has none: use bfloat16"
        )
    return list(weights.values())
