"""Networks of 8-bit integers with a defined integer result on every device, which zk.inference proves.

A layer maps int8 x to y = T[clamp(floor((m (W x + b) + 2^23) / 2^24), -128, 127)], with int8 W, a matrix or a kernel of
a convolution, integer b and m, and a table T of 256 int8 entries. Sums are exact, and so is y.
docs/proof-of-inference.md has the ranges.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.nn.layers import AvgPool2d, Conv2d, Linear

SHIFT = 24
_BIAS_LIMIT, _MAX_MULTIPLIER, _MAX_PRODUCTS = 1 << 23, 1 << 17, 1 << 16
_LARGEST = 127
_ACTIVATIONS = (
    nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Hardtanh, nn.ReLU6,
    nn.Hardswish, nn.Hardsigmoid, nn.Mish,
)  # fmt: skip
"""Functions of one number, which a table represents."""
_LINEAR, _CONV, _POOL = (nn.Linear, Linear), (nn.Conv2d, Conv2d), (nn.AvgPool2d, AvgPool2d)
_NOTHING = (nn.Identity, nn.Dropout, nn.Dropout2d)


class ExactLayer(nn.Module):
    """A layer of an ExactNetwork; all arrays are buffers.

    Attributes:
        weight: (outputs, channels, kernel height, kernel width), int8; a Linear's kernel is the whole image.
        bias: (outputs,), int32, from -2^23 to 2^23 - 1.
        table: (256,), int8, the results of -128 to 127.
        multiplier: m, from 1 to 2^17.
        image: height and width of the input.
        stride, padding: in both directions.
    """

    weight: Tensor
    bias: Tensor
    table: Tensor

    def __init__(
        self, weight: Tensor, bias: Tensor, table: Tensor, multiplier: int, image: tuple[int, int], stride: int,
        padding: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.multiplier, self.image, self.stride, self.padding = multiplier, image, stride, padding
        for name, value in (("weight", weight), ("bias", bias), ("table", table)):
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        """Map int8 x (batch, channels, height, width) to int8 (batch, outputs, height, width)."""
        sums = _convolved(x.double(), self.weight.double(), self.stride, self.padding).long()  # exact: below 2^31
        q = ((sums + self.bias[:, None, None]) * self.multiplier + (1 << SHIFT - 1)) >> SHIFT
        return self.table[q.clamp(-128, _LARGEST) + 128]

    def extra_repr(self) -> str:
        """Describe the module for `print(model)`."""
        shape = "x".join(map(str, self.weight.shape[1:]))
        more = f"stride={self.stride}, padding={self.padding}, multiplier={self.multiplier}"
        return f"{shape}, {len(self.weight)}, {more}"


def _convolved(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """Return the convolution by a matrix product: transforms, which libraries may use, would not be exact."""
    height, width = ((n + 2 * padding - k) // stride + 1 for n, k in zip(x.shape[2:], weight.shape[2:], strict=True))
    columns = x.flatten(1).T if weight.shape[2:] == x.shape[2:] and not padding else None
    if columns is not None:
        return (weight.flatten(1) @ columns).T[:, :, None, None]
    seen = nn.functional.unfold(x, weight.shape[2:], padding=padding, stride=stride)
    return (weight.flatten(1) @ seen).reshape(len(x), len(weight), height, width)


class ExactNetwork(nn.Sequential):
    """ExactLayer modules; quantize(model, mode="exact", examples=x) makes one.

    Attributes:
        input_shape: of one input, as in the examples: (inputs,) or (channels, height, width).
        input_scale, output_scale: a real number is about its integer times the scale.
    """

    def __init__(
        self, layers: list[ExactLayer], input_shape: tuple[int, ...], input_scale: float, output_scale: float
    ) -> None:
        super().__init__(*layers)
        self.input_shape, self.input_scale, self.output_scale = input_shape, input_scale, output_scale

    def quantize_input(self, x: Tensor) -> Tensor:
        """Return x / input_scale rounded, halves to even, and clamped to int8; UnsupportedDtype for integers."""
        if not x.is_floating_point():
            raise UnsupportedDtype(f"quantize_input takes real numbers, got {x.dtype}")
        return torch.round(x.double() / self.input_scale).clamp(-128, _LARGEST).to(torch.int8)

    def forward(self, x: Tensor) -> Tensor:
        """Map int8 x (..., *input_shape) to int8, exactly; or real numbers to real ones, of x's dtype.

        Returns:
            (..., outputs), or (..., outputs, height, width) where an image has more than one pixel.

        Raises:
            UnsupportedDtype: neither int8 nor real numbers.
            ShapeError: the last dimensions are not input_shape.
        """
        if x.dtype != torch.int8 and not x.is_floating_point():
            raise UnsupportedDtype(f"x must be int8 or real numbers, got {x.dtype}")
        leading = x.shape[: x.dim() - len(self.input_shape)]
        if x.shape[len(leading) :] != self.input_shape:
            raise ShapeError(f"x must be (..., {', '.join(map(str, self.input_shape))}), got {tuple(x.shape)}")
        y = x if x.dtype == torch.int8 else self.quantize_input(x)
        first = self.exact_layers()[0]
        y = y.reshape(-1, first.weight.shape[1], *first.image)
        for layer in self:
            y = layer(y)
        y = y.reshape(*leading, *(y.shape[1:] if y.shape[2:] != (1, 1) else y.shape[1:2]))
        return y if x.dtype == torch.int8 else (y * self.output_scale).to(x.dtype)

    def exact_layers(self) -> list[Any]:
        """Return the layers."""
        return list(self)


@dataclass(frozen=True)
class _Step:
    """A layer, the function after it, and whether its input is flattened."""

    name: str
    layer: Any
    flat: bool
    activation: nn.Module | None = None


def exact_network(model: nn.Module, examples: Tensor | None) -> tuple[ExactNetwork, list[str]]:
    """Return the network of a Sequential, and the names of its layers; see quantize."""
    if not isinstance(model, nn.Sequential):
        raise ConfigError(f'mode="exact" takes a torch.nn.Sequential, got {type(model).__name__}')
    steps = list(_steps(model))
    if examples is None:
        raise ConfigError('mode="exact" needs examples=, a batch of typical inputs: the scales follow from it')
    first = steps[0].layer
    image = type(first) not in _LINEAR or steps[0].flat
    width = "channels, height, width" if image else str(first.in_features)
    dims = 4 if image else 2
    if not isinstance(examples, Tensor) or examples.dim() != dims or not examples.numel() or (
        not image and examples.shape[1] != first.in_features
    ):  # fmt: skip
        shape = tuple(examples.shape) if isinstance(examples, Tensor) else type(examples).__name__
        raise ShapeError(f"examples must be (batch, {width}), got {shape}")
    if not bool(examples.isfinite().all()):
        raise ConfigError("examples has an infinity or a NaN")
    with torch.no_grad():
        x = examples.double().reshape(*examples.shape[:2], *(examples.shape[2:] or (1, 1)))
        input_scale = scale = _scale(x)
        layers = []
        for step in steps:
            layer, x, scale = _quantized(step, x, scale)
            layers.append(layer)
    return ExactNetwork(layers, tuple(examples.shape[1:]), input_scale, scale), [step.name for step in steps]


def _steps(model: nn.Sequential) -> Iterator[_Step]:
    """Yield the steps of a Sequential, which may have others in it; ConfigError names what is no part of one."""
    leaves = [(n, m) for n, m in model.named_modules(remove_duplicate=False) if not isinstance(m, nn.Sequential)]
    pending, flat = None, False
    for name, module in leaves:
        kind = type(module)
        if kind in (*_LINEAR, *_CONV, *_POOL):
            if pending is not None:
                yield pending
            pending, flat = _Step(name, module, flat), False
        elif kind in _ACTIVATIONS and pending is not None and pending.activation is None:
            pending = replace(pending, activation=module)
        elif kind is nn.Flatten and module.start_dim == 1 and module.end_dim == -1:
            flat = True
        elif kind not in _NOTHING:
            reason = "no layer is before it" if kind in _ACTIVATIONS and pending is None else "it is neither"
            known = ", ".join(each.__name__ for each in _ACTIVATIONS)
            raise ConfigError(
                f'{name} ({kind.__name__}): mode="exact" represents Linear, Conv2d, AvgPool2d, Flatten, and after each '
                f"layer one function of {known}; {reason}"
            )
    if pending is None:
        raise ConfigError("the model has no linear layer: there is nothing to quantize")
    yield pending


def _scale(x: Tensor) -> float:
    """Return the scale with which the largest magnitude is 127; 1 for zeros."""
    return float(x.abs().max()) / _LARGEST or 1.0


def _kernel(step: _Step, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None, int, int]:
    """Return a layer as a convolution of inputs of a shape: weight, bias, stride and padding."""
    layer, kind, bias = step.layer, type(step.layer), getattr(step.layer, "bias", None)
    if kind in _LINEAR:
        weight = layer.weight.detach().double()
        if weight.shape[1] != math.prod(shape) or (shape[1:] != (1, 1) and not step.flat):
            raise ConfigError(f"{step.name}: it takes {weight.shape[1]} inputs, and an image of {shape} comes")
        return weight.reshape(len(weight), *shape), bias, 1, 0
    sizes = {name: _square(step.name, name, getattr(layer, name)) for name in ("stride", "padding")}
    if kind in _CONV:
        if layer.groups != 1 or _square(step.name, "dilation", layer.dilation) != 1 or layer.padding_mode != "zeros":
            raise ConfigError(f'{step.name}: mode="exact" takes convolutions without groups, dilation or padding modes')
        weight = layer.weight.detach().double()
    else:
        side = _square(step.name, "kernel_size", layer.kernel_size)
        if layer.ceil_mode or layer.divisor_override or sizes["padding"]:
            raise ConfigError(f'{step.name}: mode="exact" takes pools without padding, ceil_mode or divisor_override')
        weight = torch.eye(shape[0]).double()[:, :, None, None].expand(-1, -1, side, side) / side**2
    padding = sizes["padding"]
    if padding >= min(weight.shape[2:]):
        raise ConfigError(f"{step.name}: it has the padding {padding}, which must be below its kernel's size")
    smaller = any(n + 2 * padding < k for n, k in zip(shape[1:], weight.shape[2:], strict=True))
    if weight.shape[1] != shape[0] or smaller:
        raise ConfigError(f"{step.name}: it takes {weight.shape[1]} channels, and an image of {shape} comes")
    return weight, bias, sizes["stride"], padding


def _square(name: str, what: str, value: Any) -> int:
    """Return the one number of a setting; ConfigError where it has two."""
    numbers = {value} if isinstance(value, int) else set(value)
    if len(numbers) != 1 or not all(isinstance(each, int) for each in numbers):
        raise ConfigError(f'{name}: mode="exact" takes one number for both directions, got {what} {value!r}')
    return int(numbers.pop())


def _quantized(step: _Step, x: Tensor, x_scale: float) -> tuple[ExactLayer, Tensor, float]:
    """Return the layer, its real output for the examples, and the output's scale."""
    activation = step.activation
    weight, given, stride, padding = _kernel(step, tuple(x.shape[1:]))
    x = x.to(weight.device)
    bias = torch.zeros(len(weight)).to(weight) if given is None else given.detach().double()
    if not bool(weight.isfinite().all() and bias.isfinite().all()):
        raise ConfigError(f"{step.name}: a weight or bias is not finite: it cannot be quantized")
    if (count := weight[0].numel()) > _MAX_PRODUCTS:
        raise ConfigError(f"{step.name}: sums of {count} products could pass int32; {_MAX_PRODUCTS} is the most")
    weight_scale = _scale(weight)
    unit = weight_scale * x_scale
    units = torch.round(bias / unit)
    if bool((off := (units < -_BIAS_LIMIT) | (units >= _BIAS_LIMIT)).any()):
        output = int(off.nonzero()[0])
        raise ConfigError(
            f"{step.name}: the bias of output {output}, {float(bias[output]):g}, is {float(units[output]):.0f} times "
            f"the product of the scales, which is not from -2^23 to 2^23 - 1"
        )
    before = _convolved(x, weight, stride, padding) + bias[:, None, None]
    after = before if activation is None else activation(before)
    wanted = _scale(after if isinstance(activation, nn.ReLU) else before)
    multiplier = min(_MAX_MULTIPLIER, round(unit / wanted * 2**SHIFT))
    if multiplier < 1 or not math.isfinite(unit):
        raise ConfigError(f"{step.name}: its outputs are 2^24 times the product of the scales, {unit:g}, or more")
    scale = unit * 2**SHIFT / multiplier
    y_scale = scale if activation is None or isinstance(activation, nn.ReLU) else _scale(after)
    entries = torch.arange(-128, 128, dtype=torch.float64, device=weight.device)
    results = entries if activation is None else activation(entries * scale) / y_scale
    results = entries.clamp(min=0) if isinstance(activation, nn.ReLU) else results
    table = torch.round(results).clamp(-128, _LARGEST).to(torch.int8)
    integers = torch.round(weight / weight_scale).to(torch.int8)
    image = (int(x.shape[2]), int(x.shape[3]))
    return ExactLayer(integers, units.int(), table, multiplier, image, stride, padding), after, y_scale
