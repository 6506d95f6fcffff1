"""Linear layers with 8-bit integer weights.

quantize(model) replaces each linear layer by a LinearInt8, which takes half the memory of one in bfloat16, and reads
half the bytes, which bound the time of products with few rows. mode="dynamic" rounds the inputs too, for products with
many rows. Quantized weights are not trained; gradients pass through, so adapters can be, those of peft too.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accelerant import ops
from accelerant.errors import ConfigError
from accelerant.nn.exact import exact_network
from accelerant.nn.layers import Linear, compute_dtype, require_width
from accelerant.ops.linear_int4.op import GROUP, dequantize_int4

_MODES = ("weight_only", "int8", "dynamic", "int4")
_KINDS = (nn.Linear, Linear)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

Skip = Sequence[str] | Callable[[str, nn.Module], bool]


class LinearInt8(nn.Linear):
    """A linear layer with integer weights, y = x @ weight^T + bias; see `from_linear`.

    A state_dict has the buffers below. A layer also loads one of a torch.nn.Linear, whose weight it quantizes.

    Attributes:
        weight_int8: (out_features, in_features), int8; a buffer.
        scale: (out_features,), float32 even when the module is moved to another dtype; a buffer.
        bias: (out_features,), the parameter of the layer that it was made of, or None.
        dynamic: whether x is also rounded to integers, row by row.
    """

    weight_int8: Tensor
    scale: Tensor

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, dynamic: bool = False) -> None:
        nn.Module.__init__(self)
        if in_features < 1 or out_features < 1:
            raise ConfigError(f"LinearInt8 needs at least one input and output, got {in_features} and {out_features}")
        self.in_features, self.out_features, self.dynamic = in_features, out_features, dynamic
        self._dtype = torch.get_default_dtype()
        self.register_buffer("weight_int8", torch.zeros(out_features, in_features, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(out_features, dtype=torch.float32))
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_features)) if bias else None)

    @property
    def weight(self) -> Tensor:
        """weight_int8 * scale, (out_features, in_features), in the dtype of the original layer; computed at each read.

        What is written to it, or to its `data`, is rounded to new integers, as when peft merges an adapter.
        """
        weight = self._floats()
        if torch.compiler.is_compiling():  # cannot trace the subclass
            return weight
        weight = weight.as_subclass(_Weight)
        weight.layer = self
        return weight

    @weight.setter
    def weight(self, weight: Tensor) -> None:
        self.weight_int8, self.scale = _quantized(weight)

    def _floats(self) -> Tensor:
        return (self.weight_int8 * self.scale[:, None]).to(self._dtype)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Quantize a new weight that is assigned as a parameter, as those of torch.nn.Linear are."""
        if name == "weight" and param is not None:
            self.weight = param.detach()
        else:
            super().register_parameter(name, param)

    @classmethod
    def from_linear(cls, linear: nn.Linear | Linear, *, dynamic: bool = False) -> LinearInt8:
        """Quantize a layer, scaling each output's weights by their largest; raise ConfigError if one is not finite."""
        quantized = _quantized(linear.weight)
        with torch.device("meta"):  # its buffers are replaced below
            layer = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, dynamic=dynamic)
        layer.weight_int8, layer.scale = quantized
        layer._dtype = linear.weight.dtype
        layer._parameters["bias"] = linear.bias
        return layer.train(linear.training)

    def load_rows(self, pieces: Iterable[Tensor]) -> None:
        """Quantize a weight of which the pieces are some rows each; raise ConfigError if one is not finite."""
        begin = 0
        for piece in pieces:
            q, scale = _quantized(piece)
            if begin == 0:
                self.weight_int8 = q.new_empty(self.out_features, self.in_features)
                self.scale = scale.new_empty(self.out_features)
                self._dtype = piece.dtype
            end = begin + len(q)
            self.weight_int8[begin:end], self.scale[begin:end] = q, scale
            begin = end

    def to_linear(self) -> nn.Linear:
        """Return a torch.nn.Linear with the rounded weights, which train, and this layer's bias."""
        with torch.device("meta"):
            layer = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        layer.weight = nn.Parameter(self._floats())
        layer._parameters["bias"] = self.bias
        return layer.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the map to x (..., in_features); result and errors as in Linear."""
        require_width(x, self.in_features, "LinearInt8")
        dtype = compute_dtype(x)
        bias: Tensor | None = self.bias
        if bias is not None and bias.dtype not in (torch.float32, dtype):
            bias = bias.to(dtype)
        return ops.linear_int8(x.to(dtype), self.weight_int8, self.scale, bias, dynamic=self.dynamic)

    def extra_repr(self) -> str:
        """Describe the module for `print(model)`."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, dynamic={self.dynamic}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        weight = state_dict.get(prefix + "weight")
        if isinstance(weight, Tensor) and weight.is_floating_point():
            del state_dict[prefix + "weight"]
            quantized = _quantized(weight)
            state_dict |= {prefix + "weight_int8": quantized[0], prefix + "scale": quantized[1]}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> LinearInt8:
        before = self.scale
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._dtype = fn(torch.empty(0, dtype=self._dtype, device=before.device)).dtype
        if self.scale.dtype != torch.float32:
            self.scale = before.to(self.scale.device)
        return self


class LinearInt4(nn.Linear):
    """A linear layer with weights of 4 bits in groups of 128 columns; see `from_linear` and ops.linear_int4.

    Attributes:
        weight_int4: (out_features, in_features / 2), uint8; a buffer.
        scale: (out_features, in_features / 128), float32 even when the module is moved to another dtype; a buffer.
        zero: as scale; a buffer, None if the integers are symmetric.
        bias: (out_features,), the parameter of the layer that it was made of, or None.
    """

    weight_int4: Tensor
    scale: Tensor
    zero: Tensor | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, symmetric: bool = True) -> None:
        nn.Module.__init__(self)
        if in_features < 1 or in_features % GROUP or out_features < 1:
            raise ConfigError(f"LinearInt4 needs inputs in a multiple of {GROUP}, got {in_features} to {out_features}")
        self.in_features, self.out_features = in_features, out_features
        self._dtype = torch.get_default_dtype()
        groups = (out_features, in_features // GROUP)
        self.register_buffer("weight_int4", torch.zeros(out_features, in_features // 2, dtype=torch.uint8))
        self.register_buffer("scale", torch.ones(groups, dtype=torch.float32))
        self.register_buffer("zero", None if symmetric else torch.zeros(groups, dtype=torch.float32))
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_features)) if bias else None)

    @property
    def weight(self) -> Tensor:
        """The weight that the integers represent, in the dtype of the original layer; computed at each read."""
        return dequantize_int4(self.weight_int4, self.scale, self.zero).to(self._dtype)

    @weight.setter
    def weight(self, weight: Tensor) -> None:
        self.load_rows([weight.detach()])

    @classmethod
    def from_linear(cls, linear: nn.Linear | Linear, *, symmetric: bool = True) -> LinearInt4:
        """Quantize a layer; raise ConfigError if a weight is not finite, or the inputs are no multiple of 128."""
        with torch.device("meta"):  # its buffers are replaced below
            layer = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, symmetric=symmetric)
        layer.load_rows([linear.weight.detach()])
        layer._parameters["bias"] = linear.bias
        return layer.train(linear.training)

    def load_rows(self, rows: Iterable[Tensor]) -> None:
        """Quantize a weight that comes in parts, rows from the first on."""
        symmetric, parts = self.zero is None, []
        for part in rows:
            self._dtype = part.dtype
            parts.append(ops.quantize_int4(part, symmetric=symmetric))
            if not bool(parts[-1][1].isfinite().all()):
                raise ConfigError("a weight is not finite: it cannot be quantized")
        weights, scales, zeros = zip(*parts, strict=True)
        self.weight_int4, self.scale = torch.cat(weights), torch.cat(scales)
        self.zero = None if symmetric else torch.cat(zeros)

    def to_linear(self) -> nn.Linear:
        """Return a torch.nn.Linear with the rounded weights, which train, and this layer's bias."""
        with torch.device("meta"):
            layer = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        layer.weight = nn.Parameter(self.weight)
        layer._parameters["bias"] = self.bias
        return layer.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the map to x (..., in_features); result and errors as in Linear."""
        require_width(x, self.in_features, "LinearInt4")
        dtype = compute_dtype(x)
        bias: Tensor | None = self.bias
        if bias is not None and bias.dtype not in (torch.float32, dtype):
            bias = bias.to(dtype)
        rows = x.to(dtype) if x.dim() > 1 else x.to(dtype)[None]
        y = ops.linear_int4(rows, self.weight_int4, self.scale, self.zero, bias)
        return y if x.dim() > 1 else y[0]

    def extra_repr(self) -> str:
        """Describe the module for `print(model)`."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> LinearInt4:
        scale, zero = self.scale, self.zero
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch does not annotate it
        self._dtype = fn(torch.empty(0, dtype=self._dtype, device=scale.device)).dtype
        if self.scale.dtype != torch.float32:
            device = self.scale.device
            self.scale, self.zero = scale.to(device), None if zero is None else zero.to(device)
        return self


_INTEGERS = LinearInt8, LinearInt4


class _Weight(Tensor):
    """The weight of a LinearInt8 in floating point. The layer is quantized again from what is written to it."""

    layer: LinearInt8

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if func == _GET_DATA:
            result = result.as_subclass(cls)
            result.layer = args[0].layer
        elif func == _SET_DATA or name == "__setitem__" or (name.endswith("_") and name[:1] != "_"):
            written = args[0] if args else None
            if isinstance(written, cls) and name != "requires_grad_":
                written.layer.weight = written.as_subclass(Tensor)
        elif isinstance(written := (kwargs or {}).get("out"), cls):
            written.layer.weight = written.as_subclass(Tensor)
        return result


_GET_DATA, _SET_DATA = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]


def _quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the integers and scales of a weight; raise ConfigError if one is not finite."""
    q, scale = ops.quantize_int8(weight.detach())
    if not scale.is_meta and not bool(scale.isfinite().all()):
        output = int((~scale.isfinite()).nonzero()[0])
        raise ConfigError(f"a weight of output {output} is not finite: it cannot be quantized")
    return q, scale


def float_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return a model's state_dict with LinearInt8's weights in floating point, which a model without them loads."""
    state: dict[str, Any] = model.state_dict()
    for name, module in model.named_modules(remove_duplicate=False):
        path = f"{name}." if name else ""
        if isinstance(module, LinearInt8) and path + "weight_int8" in state:
            del state[path + "weight_int8"], state[path + "scale"]
            state[path + "weight"] = module._floats()
        elif isinstance(module, LinearInt4) and path + "weight_int4" in state:
            del state[path + "weight_int4"], state[path + "scale"]
            state.pop(path + "zero", None)
            state[path + "weight"] = module.weight
    return state


@dataclass(frozen=True, slots=True, repr=False)
class QuantizationReport:
    """The changes that quantize made to `model`: the argument if changed in place, else a copy.

    `replaced` names layers, `skipped` has the reason of each that was not; sizes count shared parameters once.
    """

    model: nn.Module
    mode: str
    replaced: tuple[str, ...]
    skipped: dict[str, str]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        bits = 4 if self.mode == "int4" else 8
        lines = [
            f"{len(self.replaced)} linear layers in {bits}-bit integers ({self.mode}), {len(self.skipped)} left",
            f"{self.bytes_before / 2**20:.1f} MiB before, {self.bytes_after / 2**20:.1f} MiB after",
        ]
        return "\n".join([*lines, *(f"left {name}: {reason}" for name, reason in self.skipped.items())])

    __repr__ = __str__


def quantize(
    model: nn.Module, *, mode: str = "weight_only", skip: Skip = ("lm_head",), inplace: bool = True,
    examples: Tensor | None = None,
) -> QuantizationReport:  # fmt: skip
    """Replace a model's linear layers by LinearInt8, or for mode="int4" by LinearInt4.

    Replaces torch.nn.Linear and accelerant.nn.Linear. Subclasses, which may compute something else, layers whose weight
    another module shares, and layers with hooks are left. So are adapters: those of peft, and layers that are trained
    in a model with frozen ones. A layer that occurs twice is replaced at both occurrences.

    A state_dict has the integers, under names that no other layer loads: it is for models that are quantized in the
    same way. `save_pretrained` of a transformers model or one of accelerant.nn writes the rounded weights in the
    model's dtype instead: every library loads them, and quantize(loaded_model) restores the integers.

    mode="exact" makes a network of integers alone, whose int8 outputs are the same on every device: zk.inference proves
    them. torch.fx traces the model: Linear, Conv2d, batch normalizations and additions after them, functions of one
    number (ReLU, GELU, ...), which become tables, pools and Flatten; all else is refused by name. The model stays as it
    is, and `skip` and `inplace` have no effect.

    Args:
        model: a model that contains linear layers, not itself one.
        mode: "weight_only" or "int8"; "dynamic", which also rounds x to integers, for products with many rows; "int4",
            for layers whose inputs are a multiple of 128; or "exact".
        skip: layers to leave: full names ("blocks.0.mlp.up") or last components ("lm_head"); or a function of name and
            layer. The output layer is left by default: its errors affect the result directly.
        inplace: False changes a copy, which the report holds.
        examples: for "exact", typical inputs (batch, in_features) or (batch, channels, height, width), from which the
            scales of activations follow.

    Returns:
        the replaced layers, the others with reasons, and the sizes in bytes.

    Raises:
        ConfigError: an unknown mode, no linear layer, a weight that is not finite, or for "exact" a module that it does
            not represent. Nothing is changed then.
        ShapeError: examples have another shape.
    """
    if mode == "exact":
        network, replaced = exact_network(model, examples)
        return QuantizationReport(network, mode, tuple(replaced), {}, _size_bytes(model), _size_bytes(network))
    if mode not in _MODES or examples is not None:
        what = f"{mode!r} with examples" if mode in _MODES else repr(mode)
        raise ConfigError(f"mode must be one of {_MODES}, or 'exact', which alone takes examples, got {what}")
    if isinstance(model, _KINDS):
        raise ConfigError("quantize takes a model that has linear layers, not a layer: see LinearInt8.from_linear")
    if not (occurrences := list(_linear_layers(model))):
        raise ConfigError(f"{type(model).__name__} has no linear layer: there is nothing to quantize")
    before = _size_bytes(model)
    if not inplace:
        model = copy.deepcopy(model)
        occurrences = list(_linear_layers(model))
    owners: defaultdict[int, set[nn.Module]] = defaultdict(set)  # of each parameter, by its id
    for module in model.modules():
        for parameter in module._parameters.values():
            owners[id(parameter)].add(module)
    adapters = _adapters(model)
    frozen = any(not layer.weight.requires_grad for *_, layer in occurrences if type(layer) in _KINDS)
    skipped: dict[str, str] = {}
    quantized: dict[nn.Module, LinearInt8 | LinearInt4] = {}
    changes: list[tuple[str, nn.Module, str, nn.Module]] = []
    for name, parent, key, layer in occurrences:
        reason = _reason_against(name, layer, skip, owners, frozen) if layer not in adapters else "it is an adapter"
        if reason is None and mode == "int4" and layer.in_features % GROUP:
            reason = f"its {layer.in_features} inputs are no multiple of {GROUP}"
        if reason is not None:
            skipped[name] = reason
            continue
        if layer not in quantized:
            try:
                quantized[layer] = _quantized_layer(layer, mode)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
        changes.append((name, parent, key, quantized[layer]))
    for _, parent, key, new in changes:
        parent._modules[key] = new  # like add_module, but for containers whose keys are not attribute names
    _adapt_libraries(model)
    return QuantizationReport(model, mode, tuple(name for name, *_ in changes), skipped, before, _size_bytes(model))


def _quantized_layer(layer: nn.Linear | Linear, mode: str) -> LinearInt8 | LinearInt4:
    return LinearInt4.from_linear(layer) if mode == "int4" else LinearInt8.from_linear(layer, dynamic=mode == "dynamic")


def _adapt_libraries(model: nn.Module) -> None:
    """Turn off torch's fused inference around quantized layers, and attach transformers' hooks for saving them."""
    for module in model.modules():  # torch's fused inference reads the weights of these layers itself
        if isinstance(module, nn.TransformerEncoderLayer) and any(isinstance(m, _INTEGERS) for m in module.children()):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder) and any(isinstance(m, _INTEGERS) for m in module.modules()):
            module.use_nested_tensor = False
    PreTrainedModel: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and any(isinstance(m, _INTEGERS) for m in module.modules()):
            importlib.import_module("accelerant.nn._hugging_face_quantizer").attach(module)


def quantized_on_meta(model: nn.Module, kind: str) -> dict[str, LinearInt8 | LinearInt4]:
    """Replace each linear layer of a model without storage by one in integers, "int8" or "int4"; return them by name.

    For "int4" the output layer, and layers whose inputs are no multiple of a group, have 8 bits.
    """
    if kind not in ("int8", "int4"):
        raise ConfigError(f"quantize must be 'int8', 'int4' or None, got {kind!r}")
    layers: dict[str, LinearInt8 | LinearInt4] = {}
    for name, parent, key, layer in list(_linear_layers(model)):
        small = kind == "int4" and not layer.in_features % GROUP and key != "lm_head"
        make = LinearInt4 if small else LinearInt8
        with torch.device("meta"):
            layers[name] = make(layer.in_features, layer.out_features, bias=layer.bias is not None)
        parent._modules[key] = layers[name]
    return layers


def unquantize(model: nn.Module, *, inplace: bool = True) -> nn.Module:
    """Replace each layer in integers of a model by a torch.nn.Linear with its rounded weights, which train.

    Returns the model, or a copy without `inplace`, in the weights' original dtype; ConfigError if a layer is given.
    """
    if isinstance(model, _INTEGERS):
        raise ConfigError("unquantize takes a model that has LinearInt8 layers, not a layer")
    model = model if inplace else copy.deepcopy(model)
    replaced: dict[nn.Module, nn.Linear] = {}
    for parent in list(model.modules()):
        for key, layer in parent._modules.items():
            if isinstance(layer, _INTEGERS):
                if layer not in replaced:
                    replaced[layer] = layer.to_linear()
                parent._modules[key] = replaced[layer]
    if replaced and getattr(model, "hf_quantizer", None) is not None:
        del model.hf_quantizer
        model.is_quantized = False  # type: ignore[assignment]  # transformers' flag
    return model


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    """Yield each occurrence of each linear layer, or Conv1D: name, parent, key in the parent, layer."""
    kinds = (*_KINDS, getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", ()))
    seen: set[tuple[nn.Module, str]] = set()
    for path, parent in model.named_modules(remove_duplicate=False):
        for key, child in parent._modules.items():
            if isinstance(child, kinds) and (parent, key) not in seen:
                seen.add((parent, key))
                yield (f"{path}.{key}" if path else key), parent, key, child


def _adapters(model: nn.Module) -> set[nn.Module]:
    """Return the modules that peft added to a model; each of its layers wraps one of the model's, its base_layer."""
    layers: Any = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", ())
    wrappers: Any = getattr(sys.modules.get("peft.utils.other"), "AuxiliaryTrainingWrapper", ())
    models: Any = getattr(sys.modules.get("peft.peft_model"), "PeftModel", ())
    added: set[nn.Module] = set()
    for module in model.modules():
        for name, child in module.named_children():
            if (
                (isinstance(module, layers) and name != "base_layer")
                or isinstance(module, wrappers)
                or (isinstance(module, models) and name == "prompt_encoder")
            ):
                added |= set(child.modules())
    return added


def _reason_against(
    name: str, layer: Any, skip: Skip, owners: dict[int, set[nn.Module]], some_frozen: bool
) -> str | None:
    name = name.removesuffix(".base_layer")  # of one that peft has wrapped
    if isinstance(layer, _INTEGERS):
        return "it is quantized already"
    if not isinstance(layer, _KINDS):
        return "a Conv1D of transformers is not quantized; the layers of accelerant.nn.GPT.from_pretrained are"
    if callable(skip):
        if skip(name, layer):
            return "left by the function given as skip"
    elif name in skip or name.rpartition(".")[2] in skip:
        return "named in skip"
    if type(layer) not in _KINDS:
        return f"{type(layer).__name__} is derived from Linear and may compute something else"
    if layer.weight.dtype not in _DTYPES:
        return f"its weight is {layer.weight.dtype}"
    if some_frozen and layer.weight.requires_grad:
        return "it is trained, and others are frozen (after model.requires_grad_(False) it is quantized)"
    if len(owners[id(layer.weight)]) > 1:
        others = sorted(type(owner).__name__ for owner in owners[id(layer.weight)] if owner is not layer)
        return f"its weight is also that of {', '.join(others)}"
    if "forward" in layer.__dict__:
        return "its forward was replaced by another library"
    if any((layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)):
        return "it has hooks"
    return None


def _size_bytes(model: nn.Module) -> int:
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())
