"""Networks of 8-bit integers with a defined integer result on every device, which zk.inference proves.

A layer maps int8 x to y = T[clamp(floor((m (W x + b) + s x' + 2^23) / 2^24), -128, 127)], with int8 W, a matrix or a
kernel of a convolution, integer b, s, and m of each output channel, the output x' of an earlier layer, and a table T of
256 int8 entries. Sums are exact, and so is y.
docs/proof-of-inference.md has the ranges.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import dropwhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelerant.errors import ConfigError, RangeError, ShapeError, UnsupportedDtype
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
_NORM = (nn.BatchNorm1d, nn.BatchNorm2d)
_NOTHING = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d)
_FUNCTIONS: dict[Any, Callable[[], nn.Module]] = {
    torch.relu: nn.ReLU, functional.relu: nn.ReLU, "relu": nn.ReLU, functional.gelu: nn.GELU, functional.silu: nn.SiLU,
    torch.tanh: nn.Tanh, "tanh": nn.Tanh, torch.sigmoid: nn.Sigmoid, "sigmoid": nn.Sigmoid,
}  # fmt: skip
_ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")
_ONE = 1 << SHIFT


class ExactLayer(nn.Module):
    """A layer of an ExactNetwork; all arrays are buffers.

    `weight` is (outputs, channels, kernel height, kernel width) int8, where a Linear's kernel is the whole image;
    `bias` (outputs,) int32 from -2^23 to 2^23 - 1; `table` (256,) int8, the results of -128 to 127; `multiplier`
    (outputs,) int64, m from 1 to 2^17; `image` the input's height and width. `source` counts the layers back to the one
    whose output is the input, `skip` those to the one whose output is added, times skip_multiplier, before the shift; 0
    for none.
    """

    weight: Tensor
    bias: Tensor
    table: Tensor
    multiplier: Tensor

    def __init__(
        self, weight: Tensor, bias: Tensor, table: Tensor, multiplier: Tensor | int, image: tuple[int, int],
        stride: int, padding: int, source: int = 1, skip: int = 0, skip_multiplier: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.image, self.stride, self.padding = image, stride, padding
        self.source, self.skip, self.skip_multiplier = source, skip, skip_multiplier
        each = torch.as_tensor(multiplier, dtype=torch.int64, device=weight.device).expand(len(weight)).clone()
        for name, value in (("weight", weight), ("bias", bias), ("table", table), ("multiplier", each)):
            self.register_buffer(name, value)

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """Map int8 x (batch, channels, height, width) to int8 (batch, outputs, height, width)."""
        sums = _convolved(x.double(), self.weight.double(), self.stride, self.padding).long()  # exact: below 2^31
        scaled = (sums + self.bias[:, None, None]) * self.multiplier[:, None, None] + (1 << SHIFT - 1)
        if added is not None:
            scaled += added.long() * self.skip_multiplier
        return self.table[(scaled >> SHIFT).clamp(-128, _LARGEST) + 128]

    def extra_repr(self) -> str:
        """Describe the module for `print(model)`."""
        shape = "x".join(map(str, self.weight.shape[1:]))
        multipliers = "-".join(str(int(each)) for each in dict.fromkeys(self.multiplier.aminmax()))
        more = f"stride={self.stride}, padding={self.padding}, multiplier={multipliers}"
        return f"{shape}, {len(self.weight)}, {more}"


def _convolved(x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    """Return the convolution by a matrix product: transforms, which libraries may use, would not be exact."""
    height, width = ((n + 2 * padding - k) // stride + 1 for n, k in zip(x.shape[2:], weight.shape[2:], strict=True))
    columns = x.flatten(1).T if weight.shape[2:] == x.shape[2:] and not padding else None
    if columns is not None:
        return (weight.flatten(1) @ columns).T[:, :, None, None]
    seen = nn.functional.unfold(x, weight.shape[2:], padding=padding, stride=stride)
    return (weight.flatten(1) @ seen).reshape(len(x), len(weight), height, width)


def _dtype_of(x: object) -> str:
    return str(x.dtype) if isinstance(x, Tensor) else f"{type(x).__name__}, which is no tensor"


class ExactNetwork(nn.Sequential):
    """ExactLayer modules; quantize(model, mode="exact", examples=x) makes one.

    `input_shape` is (inputs,) or (channels, height, width); a real number is about its integer times the scale.
    """

    def __init__(
        self, layers: list[ExactLayer], input_shape: tuple[int, ...], input_scale: float, output_scale: float
    ) -> None:
        super().__init__(*layers)
        self.input_shape, self.input_scale, self.output_scale = input_shape, input_scale, output_scale

    def quantize_input(self, x: Tensor) -> Tensor:
        """Return x / input_scale rounded, halves to even, and clamped to int8.

        UnsupportedDtype: no tensor of real numbers. RangeError: a NaN, which is near no integer.
        """
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise UnsupportedDtype(f"quantize_input takes real numbers, got {_dtype_of(x)}")
        if bool(x.isnan().any()):
            raise RangeError("x has a NaN, which is near no integer")
        return torch.round(x.double() / self.input_scale).clamp(-128, _LARGEST).to(torch.int8)

    def forward(self, x: Tensor) -> Tensor:
        """Map int8 x (..., *input_shape) to int8, exactly; or real numbers to real ones, of x's dtype.

        Returns (..., outputs), or (..., outputs, height, width) where an image has more than one pixel.
        UnsupportedDtype: neither int8 nor real numbers. ShapeError: the last dimensions are not input_shape.
        """
        if not isinstance(x, Tensor) or (x.dtype != torch.int8 and not x.is_floating_point()):
            raise UnsupportedDtype(f"x must be int8 or real numbers, got {_dtype_of(x)}")
        leading = x.shape[: x.dim() - len(self.input_shape)]
        if x.shape[len(leading) :] != self.input_shape:
            raise ShapeError(f"x must be (..., {', '.join(map(str, self.input_shape))}), got {tuple(x.shape)}")
        y = x if x.dtype == torch.int8 else self.quantize_input(x)
        first = self.exact_layers()[0]
        y = y.reshape(-1, first.weight.shape[1], *first.image)
        outputs = [y]
        for layer in self.exact_layers():
            outputs.append(layer(outputs[-layer.source], outputs[-layer.skip] if layer.skip else None))
        y = outputs[-1]
        y = y.reshape(*leading, *(y.shape[1:] if y.shape[2:] != (1, 1) else y.shape[1:2]))
        return y if x.dtype == torch.int8 else (y * self.output_scale).to(x.dtype)

    def exact_layers(self) -> list[Any]:
        """Return the layers."""
        return list(self)


@dataclass
class _Step:
    """A layer and what is done to its output: a batch norm, an addition, a function of one number.

    `source` and `added` are numbers of steps, -1 is the model's input; `flat`: the input is flattened.
    """

    name: str
    layer: Any
    source: int
    flat: bool
    norm: Any = None
    added: int | None = None
    activation: nn.Module | None = None


@dataclass(frozen=True)
class _Value:
    """An output of a layer for the examples, in real numbers; `layer` is its number, and its least integer `least`."""

    real: Tensor
    scale: float
    layer: int
    least: int


def exact_network(model: nn.Module, examples: Tensor | None) -> tuple[ExactNetwork, list[str]]:
    """Return the network of a model, and the names of its layers; see quantize."""
    steps = _Steps(model).found
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
    if examples.is_complex():
        raise UnsupportedDtype(f"examples must be real numbers, got {examples.dtype}")
    if not bool(examples.isfinite().all()):
        raise ConfigError("examples has an infinity or a NaN")
    with torch.no_grad():
        x = examples.double().reshape(*examples.shape[:2], *(examples.shape[2:] or (1, 1)))
        values, layers = {-1: _Value(x, _scale(x), -1, -128)}, list[ExactLayer]()
        for number, step in enumerate(steps):
            make = _pooled if type(step.layer) is nn.MaxPool2d else _quantized
            added = None if step.added is None else values[step.added]
            more, real, scale = make(step, values[step.source], added, len(layers))
            layers += more
            values[number] = _Value(real, scale, len(layers) - 1, int(more[-1].table.min()))
    network = ExactNetwork(layers, tuple(examples.shape[1:]), values[-1].scale, values[len(steps) - 1].scale)
    return network, [step.name for step in steps]


class _Steps:
    """The steps of a model, traced by torch.fx; ConfigError names what is no part of one."""

    def __init__(self, model: nn.Module) -> None:
        from torch import fx

        class Traced(fx.Proxy):
            def __iadd__(self, other: Any) -> Any:  # which fx takes for a sum that leaves self as it is
                return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})

        class Tracer(fx.Tracer):
            def proxy(self, node: fx.Node) -> fx.Proxy:
                return Traced(node, self)

            def is_leaf_module(self, m: nn.Module, qualname: str) -> bool:
                if type(m).__module__.startswith(("torch.nn.", "accelerant.nn.")):
                    return not isinstance(m, nn.Sequential)
                return next(m.children(), None) is None and next(m.parameters(), None) is not None

        if type(model) in (*_LINEAR, *_CONV):
            model = nn.Sequential(model)
        try:
            graph = Tracer().trace(model)
        except Exception as error:  # whatever a forward raises with proxies
            text = f'mode="exact" traces the model by torch.fx, and {type(model).__name__} failed: {error}'
            raise ConfigError(text) from error
        self.found: list[_Step] = []
        self._model, self._at = model, dict[Any, tuple[int, bool]]()
        """Of a node, the number of the step whose output it is, and whether it is flattened."""
        for node in graph.nodes:
            self._add(node)
        if not self.found:
            raise ConfigError("the model has no linear layer: there is nothing to quantize")

    def _add(self, node: Any) -> None:
        if node.op == "output":
            result = node.args[0]
            if not hasattr(result, "users") or self._place(result)[0] != len(self.found) - 1:
                raise ConfigError('mode="exact" takes models whose output is one tensor, that of the last layer')
        elif node.op == "placeholder":
            if self._at and node.users:
                raise ConfigError(f'mode="exact" takes models of one input, got another one, {node.target!r}')
            self._at.setdefault(node, (-1, False))
        elif node.op == "call_module":
            self._module(node, str(node.target), self._model.get_submodule(str(node.target)))
        elif node.target in _FUNCTIONS and len(node.args) == 1 and not set(node.kwargs) - {"inplace"}:
            self._module(node, node.name, _FUNCTIONS[node.target]())
        elif node.target in _ADDITIONS and len(node.args) == 2 and not node.kwargs:
            self._addition(node)
        elif (node.target in (torch.flatten, "flatten") and node.args[1:] == (1,) and not node.kwargs) or (
            node.target in ("view", "reshape") and len(node.args) == 3 and node.args[2] == -1
        ):
            self._at[node] = self._place(node.args[0])[0], True
        elif node.target not in ("size", getattr, operator.getitem):  # those are for views
            raise ConfigError(f'{node.name}: mode="exact" does not represent {node.target}')

    def _place(self, node: Any) -> tuple[int, bool]:
        """Return the number of the step whose output a node is, and whether it is flattened."""
        if node not in self._at:
            raise ConfigError(f'{node.name}: mode="exact" does not represent {node.target}')
        return self._at[node]

    def _users(self, number: int) -> Iterator[tuple[Any, Any]]:
        """Yield the nodes that are the output of a step, as those of a dropout are, each with each of its users."""
        return ((node, user) for node, (step, _) in self._at.items() if step == number for user in node.users)

    def _open(self, node: Any) -> _Step | None:
        """Return the step whose output a node is, if no function follows it yet and nothing else uses it."""
        number, flat = self._place(node)
        if number < 0 or flat or type(self.found[number].layer) is nn.MaxPool2d:
            return None
        used = Counter(each for each, _ in self._users(number))
        if max(used.values()) > 1:
            return None
        return self.found[number] if self.found[number].activation is None else None

    def _module(self, node: Any, name: str, module: nn.Module) -> None:
        if len(node.args) != 1 or (node.kwargs and node.op == "call_module"):
            raise ConfigError(f'{name}: mode="exact" takes modules that are called with one input')
        kind, before = type(module), node.args[0]
        step, (number, flat) = self._open(before), self._place(before)
        self._at[node] = number, flat
        if kind in (*_LINEAR, *_CONV, *_POOL, nn.MaxPool2d):
            self.found.append(_Step(name, module, number, flat))
            self._at[node] = len(self.found) - 1, False
        elif kind in _ACTIVATIONS and step is not None:
            step.activation = module
        elif kind in _NORM and step is not None and step.norm is step.added is None and type(step.layer) not in _POOL:
            step.norm = module
        elif isinstance(module, nn.Flatten) and kind is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
            self._at[node] = number, True
        elif kind not in _NOTHING:
            known = ", ".join(each.__name__ for each in _ACTIVATIONS)
            reason = "no layer is before it" if kind in _ACTIVATIONS and number < 0 else "it is neither"
            raise ConfigError(
                f'{name} ({kind.__name__}): mode="exact" represents Linear, Conv2d, AvgPool2d, MaxPool2d, Flatten, and '
                f"after a linear layer or convolution a BatchNorm, an addition, and one function of {known}; {reason}"
            )

    def _addition(self, node: Any) -> None:
        pairs = [(self._at[each][0], each) for each in node.args if each in self._at]
        (other, _), (number, last) = sorted(pairs, key=lambda pair: pair[0]) if len(pairs) == 2 else ((-1, 0), (-1, 0))
        step = self._open(last) if last else None
        later = set(dropwhile(lambda each: each is not node, node.graph.nodes)) - {node}
        if node.target in (operator.iadd, "add_") and any(user in later for _, user in self._users(other)):
            raise ConfigError(f'{node.name}: mode="exact" does not represent a sum in place of what is used later')
        if step is None or step.added is not None or not 0 <= other < number:
            raise ConfigError(
                f'{node.name}: mode="exact" adds the output of an earlier layer to that of a later one, before its '
                "function, if nothing else takes the latter"
            )
        step.added, self._at[node] = other, (number, False)


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
    if (padding := sizes["padding"]) >= min(weight.shape[2:]):
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


def _normalized(step: _Step, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight and bias with the batch normalization that follows, by its running statistics."""
    norm = step.norm
    if norm.running_mean is None or norm.num_features != len(weight):
        raise ConfigError(f"{step.name}: its batch normalization has no running statistics, or is of other channels")
    gain = (norm.running_var.double() + norm.eps).rsqrt()
    gain = gain if norm.weight is None else gain * norm.weight.detach().double()
    shift = 0 if norm.bias is None else norm.bias.detach().double()
    return weight * gain[:, None, None, None], (bias - norm.running_mean.double()) * gain + shift


def _quantized(step: _Step, given: _Value, added: _Value | None, number: int) -> tuple[list[ExactLayer], Tensor, float]:
    """Return the layer, its real output for the examples, and the output's scale."""
    activation, x = step.activation, given.real
    weight, offset, stride, padding = _kernel(step, tuple(x.shape[1:]))
    x = x.to(weight.device)
    bias = torch.zeros(len(weight)).to(weight) if offset is None else offset.detach().double()
    if step.norm is not None:
        weight, bias = _normalized(step, weight, bias)
    if not bool(weight.isfinite().all() and bias.isfinite().all()):
        raise ConfigError(f"{step.name}: a weight or bias is not finite: it cannot be quantized")
    if (count := weight[0].numel()) > _MAX_PRODUCTS:
        raise ConfigError(f"{step.name}: sums of {count} products could pass int32; {_MAX_PRODUCTS} is the most")
    weight_scale = _scale(weight)
    unit = weight_scale * given.scale
    units = torch.round(bias / unit)
    if bool((off := (units < -_BIAS_LIMIT) | (units >= _BIAS_LIMIT)).any()):
        output = int(off.nonzero()[0])
        raise ConfigError(
            f"{step.name}: the bias of output {output}, {float(bias[output]):g}, is {float(units[output]):.0f} times "
            f"the product of the scales, which is not from -2^23 to 2^23 - 1"
        )
    before = _convolved(x, weight, stride, padding) + bias[:, None, None]
    if added is not None and added.real.shape != before.shape:
        shapes = tuple(added.real.shape[1:]), tuple(before.shape[1:])
        raise ConfigError(f"{step.name}: an output of {shapes[0]} is added to one of {shapes[1]}")
    before = before if added is None else before + added.real.to(before)
    after = before if activation is None else activation(before)
    wanted = _scale(after if isinstance(activation, nn.ReLU) else before)
    wanted = wanted if added is None else max(wanted, added.scale / 1.99)
    multiplier = min(_MAX_MULTIPLIER, round(unit / wanted * _ONE))
    if multiplier < 1 or not math.isfinite(unit):
        raise ConfigError(f"{step.name}: its outputs are 2^24 times the product of the scales, {unit:g}, or more")
    scale = unit * _ONE / multiplier
    graph = (number - given.layer, 0, 0)
    if added is not None:
        if (times := round(added.scale / scale * _ONE)) > 2 * _ONE:
            raise ConfigError(f"{step.name}: what is added to it is more than 256 times as large")
        graph = (number - given.layer, number - added.layer, times)
    y_scale = scale if activation is None or isinstance(activation, nn.ReLU) else _scale(after)
    entries = torch.arange(-128, 128, dtype=torch.float64, device=weight.device)
    results = entries if activation is None else activation(entries * scale) / y_scale
    results = entries.clamp(min=0) if isinstance(activation, nn.ReLU) else results
    table = torch.round(results).clamp(-128, _LARGEST).to(torch.int8)
    magnitudes = weight.flatten(1).abs().amax(1) / (_LARGEST * weight_scale)
    least = torch.maximum(magnitudes, bias.abs() / (unit * (_BIAS_LIMIT - 1)))
    multipliers = torch.ceil(multiplier * least).clamp(1, multiplier)
    part = multipliers / multiplier  # of a channel's scale in that of all weights
    integers = torch.round(weight / (weight_scale * part[:, None, None, None])).to(torch.int8)
    image = (int(x.shape[2]), int(x.shape[3]))
    units = torch.round(bias / (unit * part)).int()
    layer = ExactLayer(integers, units, table, multipliers, image, stride, padding, *graph)
    return [layer], after, y_scale


def _pooled(step: _Step, given: _Value, added: _Value | None, number: int) -> tuple[list[ExactLayer], Tensor, float]:
    """Return layers for the maximum of integers that are at least 0: max(m, x) = m + max(x - m, 0), a pixel at a time.

    A weight of -128 and a multiplier of 2^17 are a factor of -1, and all differences fit int8.
    """
    pool, x, layers = step.layer, given.real, list[ExactLayer]()
    sizes = {name: _square(step.name, name, getattr(pool, name)) for name in ("kernel_size", "stride", "padding")}
    side, stride, padding = sizes.values()
    if given.least < 0 or pool.ceil_mode or pool.return_indices or _square(step.name, "dilation", pool.dilation) != 1:
        raise ConfigError(
            f'{step.name} (MaxPool2d): mode="exact" takes pools of results of at least 0, as those of a ReLU, and '
            "without dilation, ceil_mode or indices"
        )
    image = (int(x.shape[2]), int(x.shape[3]))
    if min(image) + 2 * padding < side:
        raise ConfigError(f"{step.name}: it has a kernel of {side}, and an image of {tuple(x.shape[1:])} comes")
    after = pool(x)
    channels, pixels = x.shape[1], (int(after.shape[2]), int(after.shape[3]))
    entries, no_bias = torch.arange(-128, 128), torch.zeros(x.shape[1], dtype=torch.int32)
    negated, below, same = (table.to(torch.int8) for table in (-entries.clamp(min=-127), entries.clamp(max=0), entries))
    eye = (-128 * torch.eye(channels)).to(torch.int8)[:, :, None, None]
    for at in range(side * side):
        weight = torch.zeros(channels, channels, side, side, dtype=torch.int8)
        weight[:, :, at // side, at % side] = eye[:, :, 0, 0]
        place, source = (image, stride, padding), number + len(layers) - given.layer
        table, graph = (below, (1, _ONE)) if layers else (negated, (0, 0))  # -x, or min(m - x, 0)
        layers.append(ExactLayer(weight, no_bias, table, _MAX_MULTIPLIER, *place, source, *graph))
        if at:
            layers.append(ExactLayer(eye, no_bias, same, _MAX_MULTIPLIER, pixels, 1, 0, 1, 2, _ONE))
    return [layer.to(x.device) for layer in layers], after, given.scale
