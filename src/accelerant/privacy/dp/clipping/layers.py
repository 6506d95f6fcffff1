"""Which modules are known, what their forward becomes while a clipper is attached, and what is refused, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accelerant import nn as our
from accelerant.errors import ShapeError, UnsupportedCase
from accelerant.nn.layers import compute_dtype
from accelerant.ops._per_example import PerExampleSink, mark_traced
from accelerant.ops.norm.op import _layer_norm as _layer_norm_op
from accelerant.ops.norm.op import _rms_norm as _rms_norm_op
from accelerant.privacy.dp.clipping import frozen, functions
from accelerant.privacy.dp.clipping.copies import leave_out, mark
from accelerant.privacy.dp.clipping.frozen import BatchNorm

__all__ = [
    "KINDS",
    "MODELS",
    "NAMED",
    "Kind",
    "Survey",
    "adapt",
    "batch_of",
    "replace",
    "survey",
]

Forward = Callable[..., Any]
Make = Callable[[nn.Module, PerExampleSink, Forward], Forward]
"""From a module, the sink and its own forward: what to call while gradients are recorded."""


Adapt = Callable[[Any, PerExampleSink], dict[str, Forward]]
"""From a model and the sink: its methods that use parameters past their layers, as they are to be."""

MODELS: dict[type, Adapt] = {}
"""By class, exactly: a subclass may do something else with its parameters."""


class Kind(NamedTuple):
    """A layer that is known.

    Attributes:
        make: see Make.
        refuses: why a module of this class cannot be exact, and what to use instead; None where it can.
        inside: whether its forward uses the parameters of modules in it, too.
    """

    make: Make
    refuses: Callable[[Any], str | None] = lambda module: None
    inside: bool = False


KINDS: dict[Any, Kind] = {}
"""By the class's own forward: a subclass with another forward is another layer."""

NAMED: dict[str, tuple[Kind, Callable[[str], str | None]]] = {}
"""By "package.module:Class.forward", for packages that may not be there; and why that function is not known, if so."""


@dataclass
class Survey:
    """What of a model is to be clipped.

    Attributes:
        parameters: by name, each once.
        replaced: modules, and how their forward is made.
        models: modules that use parameters of their layers themselves, and what replaces their methods for it.
        frozen: BatchNorm in eval mode, by name: exact while it stays in it.
    """

    parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    replaced: list[tuple[nn.Module, Make]] = field(default_factory=list)
    models: list[tuple[nn.Module, Adapt]] = field(default_factory=list)
    frozen: list[tuple[str, nn.Module]] = field(default_factory=list)


def survey(model: nn.Module) -> Survey:
    """Go through a model's modules.

    Raises:
        UnsupportedCase: with each module that cannot be exact.
    """
    found = Survey()
    refusals: list[str] = []
    covered: set[int] = set()
    uncovered: dict[int, str] = {}
    for name, module in model.named_modules():
        place = name or type(model).__name__
        if type(module) in MODELS:
            found.models.append((module, MODELS[type(module)]))
        why = _mixes(module)
        if why is not None:
            refusals.append(f"{place} ({type(module).__name__}): {why}")
            continue
        if isinstance(module, BatchNorm):
            found.frozen.append((place, module))
            continue
        kind = kind_of(module)
        inside = kind is not None and kind.inside
        own = {key: each for key, each in module.named_parameters(recurse=inside) if each.requires_grad}
        if kind is None:
            for key, each in own.items():
                uncovered.setdefault(
                    id(each),
                    f"{f'{name}.{key}'.strip('.')} of {type(module).__name__}: no rule for its per-example gradients; "
                    "make it of supported layers, or freeze it",
                )
            continue
        if not own:
            continue
        why = kind.refuses(module) or _computes(module, own)
        if why is None and "forward" in module.__dict__:
            why = "its forward was replaced by another library: undo that first"
        if why is not None:
            refusals.append(f"{place} ({type(module).__name__}): {why}")
        else:
            found.replaced.append((module, kind.make))
        covered.update(id(each) for each in own.values())
    refusals += [text for key, text in uncovered.items() if key not in covered]
    if refusals:
        raise UnsupportedCase("per-example clipping cannot be exact for:\n  " + "\n  ".join(refusals))
    found.parameters = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    return found


def kind_of(module: nn.Module) -> Kind | None:
    """What is known of a module's class."""
    found = KINDS.get(type(module).forward)
    if found is None:
        path = f"{type(module).__module__}:{type(module).__qualname__}.forward"
        named = NAMED.get(path)
        if named is not None and named[1](path) is None:
            return named[0]
    return found


def _mixes(module: nn.Module) -> str | None:
    if isinstance(module, BatchNorm):
        return frozen.why_not(module)
    if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
        return "its running statistics keep what examples held: take track_running_stats=False"
    return None


def _computes(module: nn.Module, own: Iterable[str]) -> str | None:
    """Why not, where torch.nn.utils put a tensor in the place of a parameter: weight of weight_g and weight_v, say."""
    for key in own:
        for ending in ("_g", "_v", "_orig"):
            place = key.removesuffix(ending)
            if place != key and isinstance(module.__dict__.get(place), Tensor):
                return f"its {place} is computed from {key} (weight_norm, spectral_norm, pruning): remove that first"
    return None


class _Method:
    """What stands in a module in place of a method; in a copy of it, or a pickle, the method itself does."""

    def __init__(self, module: nn.Module, name: str, call: Forward) -> None:
        self._module, self._name, self._call = module, name, call
        mark(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _uncompiled(self._call, *args, **kwargs)
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _bound(memo.get(id(self._module), self._module), self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _bound, (self._module, self._name)


def _bound(module: nn.Module, name: str) -> Any:
    """A module's method as its class has it."""
    return MethodType(getattr(type(module), name), module)


def _uncompiled(call: Forward, *args: Any, **kwargs: Any) -> Any:
    """A call that torch.compile leaves to Python: the sink is fed as the backward pass runs, not as it is traced."""
    import torch._dynamo

    return torch._dynamo.disable(call)(*args, **kwargs)


def _put(module: nn.Module, methods: Mapping[str, _Method]) -> Callable[[], None]:
    module.__dict__.update(methods)
    whole = leave_out(module)

    def undo() -> None:
        whole()
        for name, method in methods.items():
            if module.__dict__.get(name) is method:
                del module.__dict__[name]

    return undo


def replace(module: nn.Module, make: Make, sink: PerExampleSink) -> Callable[[], None]:
    """Put another forward in a module; returns what takes it out again."""
    plain = module.forward
    traced = make(module, sink, plain)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return traced(*args, **kwargs) if torch.is_grad_enabled() else plain(*args, **kwargs)

    method = _Method(module, "forward", forward)
    mark_traced(method)
    remove = _put(module, {"forward": method})
    # Who reads the parameters past the module's forward (a model that adds and normalises at once) looks for hooks.
    hook = module.register_forward_pre_hook(_nothing)

    def undo() -> None:
        hook.remove()
        remove()

    return undo


def adapt(model: nn.Module, adapt: Adapt, sink: PerExampleSink) -> Callable[[], None]:
    """Put other methods in a model; returns what takes them out again."""
    methods = adapt(model, sink)
    return _put(model, {name: _Method(model, name, method) for name, method in methods.items()})


@mark
def _nothing(module: nn.Module, args: Any) -> None:
    return None


def batch_of(x: Tensor, sink: PerExampleSink, layer: nn.Module, least: int = 2) -> tuple[Tensor, int]:
    """A layer's input with one entry for each example in front, and how many these are.

    Raises:
        ShapeError: its first dimension is not that of the model's input.
    """
    examples = sink.batch
    if x.dim() < least:
        raise ShapeError(
            f"{type(layer).__name__} takes {least} dimensions or more with a clipper attached, the examples first, "
            f"got {tuple(x.shape)}"
        )
    if examples is None or x.shape[0] == examples:
        return x, x.shape[0]
    if x.shape[0] == 1:
        return x.expand(examples, *x.shape[1:]), examples
    raise ShapeError(
        f"{layer} got {tuple(x.shape)}, whose first dimension is not the batch of {examples} examples that the model "
        "got: per-example gradients need the examples first in each layer"
    )


# --- linear maps -----------------------------------------------------------------------------------------------------


def _linear(module: Any, sink: PerExampleSink, plain: Forward) -> Forward:
    def forward(input: Tensor) -> Tensor:
        x, examples = batch_of(input, sink, module)
        return functions.linear(x, module.weight, module.bias, sink, examples)

    return forward


def _our_linear(module: Any, sink: PerExampleSink, plain: Forward) -> Forward:
    def forward(x: Tensor) -> Tensor:
        x, examples = batch_of(x, sink, module)
        return functions.linear(x.to(compute_dtype(x)), module.weight, module.bias, sink, examples)

    return forward


KINDS[nn.Linear.forward] = Kind(_linear)
KINDS[our.Linear.forward] = Kind(_our_linear)


# --- embeddings ------------------------------------------------------------------------------------------------------


def _refuses_embedding(module: nn.Embedding) -> str | None:
    if module.max_norm is not None:
        return "max_norm changes the table in the forward pass: leave it out"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq mixes the examples of a batch: leave it out"
    if module.sparse:
        return "sparse gradients are not made: take sparse=False"
    return None


def _embedding(module: Any, sink: PerExampleSink, plain: Forward) -> Forward:
    positions: list[bool] = []  # whether its vectors of tokens are positions, shared by the examples; learnt once

    def forward(input: Tensor) -> Tensor:
        padding, examples = module.padding_idx, sink.batch
        if input.dim() == 1 and examples is not None:
            if not positions:
                positions.append(_are_positions(input, examples))
            if positions[0]:
                return functions.lookup(input[None], module.weight, padding, sink, examples)
        if input.dim() and input.shape[0] == 1 and examples is not None:
            return functions.lookup(input, module.weight, padding, sink, examples)
        tokens, count = batch_of(input, sink, module, least=1)
        return functions.lookup(tokens, module.weight, padding, sink, count)

    return forward


def _are_positions(tokens: Tensor, examples: int) -> bool:
    """Whether a vector of tokens is 0, 1, 2, ...: one for each position, not one for each example.

    Raises:
        ShapeError: it could be either.
    """
    count = torch.arange(tokens.shape[0], device=tokens.device)
    if tokens.shape[0] == 0 or not bool((tokens - tokens[0] == count).all()):
        return False
    if tokens.shape[0] == examples and examples > 1:
        raise ShapeError(
            f"an Embedding got the {examples} numbers in a row that positions would be, for {examples} examples: give "
            "positions as (1, T), or a token for each example as (B, 1)"
        )
    return tokens.shape[0] != examples


KINDS[nn.Embedding.forward] = Kind(_embedding, _refuses_embedding)


# --- norms -----------------------------------------------------------------------------------------------------------


def _layer_norm(module: Any, sink: PerExampleSink, plain: Forward) -> Forward:
    def forward(input: Tensor) -> Tensor:
        shape = tuple(module.normalized_shape)
        x, examples = batch_of(input, sink, module, 1 + len(shape))
        if torch.is_autocast_enabled(x.device.type):
            x = x if x.dtype == torch.float64 else x.float()
        return functions.layer_norm(x, module.weight, module.bias, shape, module.eps, sink, examples)

    return forward


def _our_layer_norm(module: Any, sink: PerExampleSink, plain: Forward) -> Forward:
    def forward(x: Tensor) -> Tensor:
        x, examples = batch_of(x, sink, module)
        x = x.to(compute_dtype(x)).contiguous()
        return functions.our_norm(x, module.weight, module.bias, module.eps, _layer_norm_op, sink, examples)

    return forward


def _rms_norm(module: Any, sink: PerExampleSink, plain: Forward) -> Forward:
    def forward(x: Tensor) -> Tensor:
        shape = tuple(module.normalized_shape)
        x, _ = batch_of(x, sink, module, 1 + len(shape))
        y = nn.functional.rms_norm(x, shape, None, module.eps)
        places = tuple(range(x.dim() - len(shape), x.dim()))
        return functions.scale_shift(y, module.weight, None, places, sink, torch.result_type(y, module.weight))

    return forward


def _our_rms_norm(module: Any, sink: PerExampleSink, plain: Forward) -> Forward:
    def forward(x: Tensor) -> Tensor:
        x, examples = batch_of(x, sink, module)
        x = x.to(compute_dtype(x)).contiguous()
        return functions.our_norm(x, module.weight, None, module.eps, _rms_norm_op, sink, examples)

    return forward


def _group_norm(module: Any, sink: PerExampleSink, plain: Forward) -> Forward:
    def forward(input: Tensor) -> Tensor:
        x, _ = batch_of(input, sink, module)
        y = nn.functional.group_norm(x, module.num_groups, None, None, module.eps)
        return functions.scale_shift(y, module.weight, module.bias, (1,), sink, y.dtype)

    return forward


def _instance_norm(module: Any, sink: PerExampleSink, plain: Forward) -> Forward:
    def forward(input: Tensor) -> Tensor:
        x, _ = batch_of(input, sink, module, 3)
        y = nn.functional.instance_norm(x, eps=module.eps)
        return functions.scale_shift(y, module.weight, module.bias, (1,), sink, y.dtype)

    return forward


KINDS[nn.LayerNorm.forward] = Kind(_layer_norm)
KINDS[our.LayerNorm.forward] = Kind(_our_layer_norm)
KINDS[nn.RMSNorm.forward] = Kind(_rms_norm)
KINDS[our.RMSNorm.forward] = Kind(_our_rms_norm)
KINDS[nn.GroupNorm.forward] = Kind(_group_norm)
KINDS[nn.modules.instancenorm._InstanceNorm.forward] = Kind(_instance_norm)
