"""Networks of 8-bit integers with a defined integer result on every device, which zk.inference proves.

A layer maps int8 x to y = T[clamp(floor((m (W x + b) + 2^23) / 2^24), -128, 127)], with int8 W, integer b and m, and a
table T of 256 int8 entries. Sums are exact, and so is y. docs/proof-of-inference.md has the ranges.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.nn.layers import Linear

SHIFT = 24
_BIAS_LIMIT, _MAX_MULTIPLIER, _MAX_INPUTS = 1 << 23, 1 << 17, 1 << 16
_LARGEST = 127
_ACTIVATIONS = (
    nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.ELU, nn.LeakyReLU, nn.Softplus, nn.Hardtanh, nn.ReLU6,
    nn.Hardswish, nn.Hardsigmoid, nn.Mish,
)  # fmt: skip
"""Functions of one number, which a table represents."""
_NOTHING = (nn.Identity, nn.Dropout)


class ExactLinear(nn.Module):
    """A layer of an ExactNetwork; all arrays are buffers.

    Attributes:
        weight: (out_features, in_features), int8.
        bias: (out_features,), int32, from -2^23 to 2^23 - 1.
        multiplier: m, from 1 to 2^17.
        table: (256,), int8, the results of -128 to 127.
    """

    weight: Tensor
    bias: Tensor
    table: Tensor

    def __init__(self, weight: Tensor, bias: Tensor, multiplier: int, table: Tensor) -> None:
        super().__init__()
        self.multiplier = multiplier
        for name, value in (("weight", weight), ("bias", bias), ("table", table)):
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        """Map int8 x (..., in_features) to int8 (..., out_features)."""
        sums = (x.double() @ self.weight.double().T).long() + self.bias  # below 2^31, hence exact in float64
        q = (sums * self.multiplier + (1 << SHIFT - 1)) >> SHIFT
        return self.table[q.clamp(-128, _LARGEST) + 128]

    def extra_repr(self) -> str:
        """Describe the module for `print(model)`."""
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}, multiplier={self.multiplier}"


class ExactNetwork(nn.Sequential):
    """ExactLinear layers; quantize(model, mode="exact", examples=x) makes one.

    Attributes:
        input_scale, output_scale: a real number is about its integer times the scale.
    """

    def __init__(self, layers: list[ExactLinear], input_scale: float, output_scale: float) -> None:
        super().__init__(*layers)
        self.input_scale, self.output_scale = input_scale, output_scale

    def quantize_input(self, x: Tensor) -> Tensor:
        """Return x / input_scale rounded, halves to even, and clamped to int8; UnsupportedDtype for integers."""
        if not x.is_floating_point():
            raise UnsupportedDtype(f"quantize_input takes real numbers, got {x.dtype}")
        return torch.round(x.double() / self.input_scale).clamp(-128, _LARGEST).to(torch.int8)

    def forward(self, x: Tensor) -> Tensor:
        """Map int8 x (..., in_features) to int8, exactly; or real numbers to real ones, of x's dtype.

        Raises:
            UnsupportedDtype: neither int8 nor real numbers.
            ShapeError: the last dimension is not in_features.
        """
        width = self.exact_layers()[0].weight.shape[1]
        if x.dtype != torch.int8 and not x.is_floating_point():
            raise UnsupportedDtype(f"x must be int8 or real numbers, got {x.dtype}")
        if x.dim() == 0 or x.shape[-1] != width:
            raise ShapeError(f"x must be (..., {width}), got {tuple(x.shape)}")
        y = x if x.dtype == torch.int8 else self.quantize_input(x)
        for layer in self:
            y = layer(y)
        return y if x.dtype == torch.int8 else (y * self.output_scale).to(x.dtype)

    def exact_layers(self) -> list[Any]:
        """Return the layers."""
        return list(self)


@dataclass(frozen=True)
class _Step:
    """A linear layer and the function after it, with their names."""

    name: str
    linear: Any
    activation: nn.Module | None


def exact_network(model: nn.Module, examples: Tensor | None) -> tuple[ExactNetwork, list[str]]:
    """Return the network of a Sequential, and the names of its linear layers; see quantize."""
    if not isinstance(model, nn.Sequential):
        raise ConfigError(f'mode="exact" takes a torch.nn.Sequential, got {type(model).__name__}')
    steps = list(_steps(model))
    if examples is None:
        raise ConfigError('mode="exact" needs examples=, a batch of typical inputs: the scales follow from it')
    width = steps[0].linear.in_features
    if not isinstance(examples, Tensor) or examples.dim() != 2 or examples.shape[1] != width or not len(examples):
        shape = tuple(examples.shape) if isinstance(examples, Tensor) else type(examples).__name__
        raise ShapeError(f"examples must be (batch, {width}), got {shape}")
    if not bool(examples.isfinite().all()):
        raise ConfigError("examples has an infinity or a NaN")
    with torch.no_grad():
        x, scale, layers = examples.double(), _scale(examples.double()), []
        input_scale = scale
        for step in steps:
            layer, x, scale = _quantized(step, x, scale)
            layers.append(layer)
    return ExactNetwork(layers, input_scale, scale), [step.name for step in steps]


def _steps(model: nn.Sequential) -> Iterator[_Step]:
    """Yield the steps of a Sequential, which may have others in it; ConfigError names what is no part of one."""
    leaves = [(n, m) for n, m in model.named_modules(remove_duplicate=False) if not isinstance(m, nn.Sequential)]
    pending: _Step | None = None
    for name, module in leaves:
        if type(module) in (nn.Linear, Linear):
            if pending is not None:
                yield pending
            pending = _Step(name, module, None)
        elif type(module) in _ACTIVATIONS and pending is not None and pending.activation is None:
            pending = _Step(pending.name, pending.linear, module)
        elif type(module) not in _NOTHING:
            reason = "no linear layer is before it" if type(module) in _ACTIVATIONS else "it is neither"
            known = ", ".join(kind.__name__ for kind in _ACTIVATIONS)
            raise ConfigError(
                f'{name} ({type(module).__name__}): mode="exact" represents linear layers, and after each one function '
                f"of {known}; {reason}"
            )
    if pending is None:
        raise ConfigError("the model has no linear layer: there is nothing to quantize")
    yield pending


def _scale(x: Tensor) -> float:
    """Return the scale with which the largest magnitude is 127; 1 for zeros."""
    return float(x.abs().max()) / _LARGEST or 1.0


def _quantized(step: _Step, x: Tensor, x_scale: float) -> tuple[ExactLinear, Tensor, float]:
    """Return the layer, its real output for the examples, and the output's scale."""
    linear, activation = step.linear, step.activation
    weight = linear.weight.detach().double()
    bias = torch.zeros(len(weight)).double() if linear.bias is None else linear.bias.detach().double()
    if not bool(weight.isfinite().all() and bias.isfinite().all()):
        raise ConfigError(f"{step.name}: a weight or bias is not finite: it cannot be quantized")
    if weight.shape[1] > _MAX_INPUTS:
        raise ConfigError(
            f"{step.name}: sums of {weight.shape[1]} products could pass int32; {_MAX_INPUTS} is the most"
        )
    weight_scale = _scale(weight)
    unit = weight_scale * x_scale
    units = torch.round(bias.to(weight.device) / unit)
    if bool((off := (units < -_BIAS_LIMIT) | (units >= _BIAS_LIMIT)).any()):
        output = int(off.nonzero()[0])
        raise ConfigError(
            f"{step.name}: the bias of output {output}, {float(bias[output]):g}, is {float(units[output]):.0f} times "
            f"the product of the scales, which is not from -2^23 to 2^23 - 1"
        )
    before = x.to(weight.device) @ weight.T + bias.to(weight.device)
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
    return ExactLinear(integers, units.int(), multiplier, table), after, y_scale
