"""The rules by which layers give per-example gradients, and how a clipper attaches them to a model.

While a clipper is attached, a rule's `forward` runs in place of its layer's wherever gradients are recorded. It calls
functions (layers.py) whose backward pass feeds the clipper.

    @register
    class ScaleRule(LayerRule):
        layers = (Scale,)

        def forward(self, x):
            x, _ = self.examples_first(x)
            return scale_shift(x, self.module.weight, None, (x.dim() - 1,), self.sink, x.dtype)

Attached objects are marked, and the module's `__getstate__` leaves them out: copies and files are ordinary models. In a
`region` of torch's vmap, which layers with a rule leave, a tensor that depends on the examples has the shape of one
example, so an operation cannot mix them, and one that no example determines is known as shared.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import MethodType
from typing import Any, ClassVar, Final, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch._functorch.vmap import vmap_increment_nesting
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from accelerant.errors import ShapeError, UnsupportedCase
from accelerant.ops._per_example import PerExampleSink, mark_traced

# --- regions: code that runs for each example by itself ---------------------------------------------------------------


_CHECKPOINT = (
    "checkpoint(), or other hooks for saved tensors, are called in the forward pass of a module that runs for each "
    "example by itself, and do not know that: call them outside of that module, or in a layer of it"
)


class NotForEachExample(UnsupportedCase):
    """A result that all examples share is used as only a region allows; `once`: another batch may need none."""

    def __init__(self, message: str, *, once: bool = False) -> None:
        super().__init__(message)
        self.once = once


class Region:
    """The scope of code that runs for each of so many examples by itself."""

    def __init__(self, level: int, examples: int) -> None:
        self.level, self.examples = level, examples

    def wrap(self, x: Tensor) -> Tensor:
        """Hide the first dimension of x (B, *shape)."""
        return _functorch._add_batch_dim(x, 0, self.level)

    def unwrap(self, x: Tensor) -> Tensor | None:
        """Return (B, *shape); None if no example determines x."""
        if not _functorch.is_batchedtensor(x) or _functorch.maybe_get_level(x) != self.level:
            return None
        value, dim = _functorch._unwrap_batched(x, self.level)
        return value.movedim(0 if dim is None else dim, 0)

    def created(self, make: Callable[[], Tensor]) -> Tensor:
        """Return a tensor (B, *shape) that is made outside of the region, wrapped."""
        with _outside():
            return self.wrap(make())

    def outside(self, call: Callable[..., Any], args: Any, kwargs: Any, *, states: bool = False) -> Any:
        """Call a layer with the whole batch; UnsupportedCase for an argument that lacks the dimension of the examples.

        With `states`, results and arguments after the first have the examples in dimension 1, as recurrent layers do.
        """
        B, leads = self.examples, list[bool]()
        known: dict[int, Tensor] = {}

        def enter(x: Tensor) -> Tensor:
            if id(x) in known:
                return known[id(x)]
            value, first = self.unwrap(x), not leads
            at = 1 if states and not first else 0
            lead = x.dim() > at and x.shape[at] == 1
            if value is None and (first or states):  # the rule of a layer takes examples first
                value = x.expand(B, *x.shape)
            elif value is not None and not first and lead != leads[0]:
                raise UnsupportedCase(
                    f"an argument {tuple(x.shape)} of {_name(call)} has no dimension for the examples, as it would be "
                    "for one: give it one as the input has"
                )
            if first:
                leads.append(lead)
            if value is not None and lead:
                value = value.squeeze(1 + at)
                value = value.movedim(0, 1) if at else value
            known[id(x)] = x if value is None else value
            return known[id(x)]

        seen: list[Tensor] = []

        def leave(y: Tensor) -> Tensor:
            at = 1 if states and seen else 0
            seen.append(y)
            if y.dim() <= at or y.shape[at] != B:
                raise UnsupportedCase(f"{_name(call)} returned {tuple(y.shape)}, without a dimension of {B} examples")
            y = y.movedim(at, 0)
            return self.wrap(y.unsqueeze(1 + at) if leads[:1] == [True] else y)

        inputs = mapped((args, kwargs), enter)
        with _outside():
            return mapped(call(*inputs[0], **inputs[1]), leave)


_regions: list[Region | None] = []  # Those that run, the innermost last; None where a layer left one


def in_region() -> bool:
    """Return whether a region runs, also where a layer left it."""
    return bool(_regions)


def current() -> Region | None:
    """Return the region that the running code is in."""
    return _regions[-1] if _regions else None


@contextmanager
def _outside() -> Iterator[None]:
    _regions.append(None)
    message = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    torch._C._autograd._saved_tensors_hooks_enable()
    try:
        with temporarily_pop_interpreter_stack():
            yield
    finally:
        torch._C._autograd._saved_tensors_hooks_disable(message or _CHECKPOINT, False)
        _regions.pop()


@contextmanager
def region(examples: int) -> Generator[Region]:
    """Run code for each of so many examples by itself."""
    hooks = torch._C._autograd
    message = hooks._saved_tensors_hooks_get_disabled_error_message()
    with vmap_increment_nesting(examples, "different") as level:
        now = Region(level, examples)
        _regions.append(now)
        hooks._saved_tensors_hooks_disable(_CHECKPOINT, False)
        try:
            with _BatchAttention(now):
                yield now
        finally:
            if message is None:
                hooks._saved_tensors_hooks_enable()
            else:
                hooks._saved_tensors_hooks_disable(message, False)
            _regions.pop()


class _BatchAttention(TorchFunctionMode):
    """Calls torch's attention with the whole batch where it can: for each example it would run once each."""

    def __init__(self, now: Region) -> None:
        super().__init__()
        self._region = now

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and current() is self._region:
            tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            if all(self._region.unwrap(each) is None or (each.dim() == 4 and each.shape[0] == 1) for each in tensors):
                return self._region.outside(func, args, kwargs)
            with sdpa_kernel(SDPBackend.MATH):  # of operations that vmap has; a bias may take gradients
                return func(*args, **kwargs)
        if func is F.embedding and current() is self._region:  # vmap gives gradients to the rows of padding
            names = "input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"
            given = dict(zip(names, args, strict=False)) | kwargs
            padding = given.pop("padding_idx", None)
            y = F.embedding(**given)
            own = None if padding is None else given["input"] == padding % len(given["weight"])
            return y if own is None else torch.where(own[..., None], y.detach(), y)
        if func in (torch.rand, torch.randn) and args in (([],), ((),)) and current() is self._region:
            with _outside():  # one number for all examples, as of layers that are dropped
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def mapped(nested: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return nested containers, mappings of any class and data classes with each tensor changed."""

    def each(item: Any) -> Any:
        if isinstance(item, Tensor):
            return change(item)
        if is_dataclass(item) and not isinstance(item, type):
            return replace(item, **{field.name: mapped(getattr(item, field.name), change) for field in fields(item)})
        if isinstance(item, Mapping):
            found = {key: mapped(value, change) for key, value in item.items()}
            result = copy.copy(item) if isinstance(item, MutableMapping) else found
            result.update(found)
            return result
        return [mapped(value, change) for value in item] if isinstance(item, list) else item

    return tree_map(each, nested)


def tensors_of(nested: Any) -> list[Tensor]:
    """Return the tensors in nested mappings, sequences and data classes."""
    if isinstance(nested, Tensor):
        return [nested]
    items = nested if isinstance(nested, tuple | list) else ()
    if isinstance(nested, Mapping):
        items = tuple(nested.values())
    elif is_dataclass(nested):
        items = tuple(getattr(nested, each.name) for each in fields(nested))
    return [each for item in items for each in tensors_of(item)]


def _name(call: Any) -> str:
    owner = getattr(call, "__self__", None)
    return type(getattr(owner, "module", owner)).__name__ if owner is not None else getattr(call, "__name__", "a layer")


# --- rules ------------------------------------------------------------------------------------------------------------


Forward = Callable[..., Any]
Methods = dict[str, Forward]
MakeMethods = Callable[[Any, PerExampleSink], Methods]
_T = TypeVar("_T")
_Rule = TypeVar("_Rule", bound="type[LayerRule]")


class SharedRows(Tensor):
    """Rows (T, D) that all examples share, such as those of positions: a view of (B, T, D), whose gradient is needed.

    Sums and products with a tensor of the examples give (B, T, D). Any other use raises NotForEachExample.
    """

    _each: Tensor

    @staticmethod
    def of(each: Tensor) -> SharedRows:
        """Return the rows of each (B, T, D)."""
        rows: SharedRows = Tensor._make_subclass(SharedRows, each.detach()[0])
        rows._each = each
        return rows

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _DESCRIPTIONS:
                return func(*args, **(kwargs or {}))
            each = [x._each if isinstance(x, SharedRows) else x for x in args]
            if func in _BROADCAST and not kwargs and len({x.dim() for x in each if isinstance(x, Tensor)}) == 1:
                counts = {x.shape[0] for x in each if isinstance(x, Tensor)}
                if len(counts) == 1 and all(isinstance(x, Tensor) for x in each):
                    return func(*each)
        shape = tuple(next(x._each for x in args if isinstance(x, SharedRows)).shape) if args else ()
        raise NotForEachExample(
            f"rows of an Embedding that all examples share, {shape[1:]} for {shape[:1]} examples, are used by "
            f"{getattr(func, '__name__', func)}: give positions as (1, T)"
        )


_BROADCAST = frozenset([
    torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__,
])  # fmt: skip
_DESCRIPTIONS = frozenset([
    Tensor.__repr__, Tensor.dim, Tensor.size, Tensor.numel, Tensor.is_floating_point,
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "requires_grad", "layout")),
    *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_sparse", "is_meta")),
])  # fmt: skip


class LayerRule(ABC):
    """Per-example gradients of one kind of layer; one instance for each attached layer.

    Attributes:
        layers: the classes it covers, or "package.module:Class" for packages that may be absent. A subclass of a
            covered class is covered unless it has its own `forward`; a class named by its path is covered exactly.
        covers_children: whether the layer's forward uses parameters of its submodules, too.
        has_states: whether its results and arguments after the first have the examples in dimension 1.
        shares: whether its result may be one that all examples share, as that of an Embedding for positions.
    """

    layers: ClassVar[tuple[type[nn.Module] | str, ...]] = ()
    covers_children: ClassVar[bool] = False
    has_states: ClassVar[bool] = False
    shares: ClassVar[bool] = False

    def __init__(self, module: nn.Module, sink: PerExampleSink, plain: Forward) -> None:
        self.module: Any = module
        self.sink, self.plain = sink, plain

    @classmethod
    def refusal(cls, module: Any) -> str | None:
        """Return why this module cannot be exact and what to use instead; None if it can."""
        return None

    @classmethod
    def matches(cls, path: str) -> bool:
        """Return whether the class at a path of `layers` has the source that the rule was written for."""
        return True

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the layer's own forward computes, feeding the sink in the backward pass."""

    def inside(self, region: Region, *args: Any, **kwargs: Any) -> Any:
        """Compute `forward` for a caller that runs for each example by itself, in a region."""
        return region.outside(self.forward, args, kwargs, states=self.has_states)

    def examples_first(self, x: Tensor, least: int = 2) -> tuple[Tensor, int]:
        """Return a layer's input with the examples in dimension 0, and their number; ShapeError if it has none."""
        count = self.sink.batch
        if x.dim() < least:
            raise ShapeError(
                f"{type(self.module).__name__} takes {least} dimensions or more with a clipper attached, the examples "
                f"first, got {tuple(x.shape)}"
            )
        if count is None or x.shape[0] == count:
            return x, x.shape[0]
        if x.shape[0] == 1:
            self.sink.shared = True
            return x.expand(count, *x.shape[1:]), count
        message = (
            f"{self.module} got {tuple(x.shape)}, whose first dimension is not the batch of {count} examples that the "
            "model got: per-example gradients need the examples first in each layer"
        )
        raise NotForEachExample(message) if self.sink.runs_by_example else ShapeError(message)


class _WholeBatch(LayerRule):
    """A layer without parameters whose kernels take whole batches."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain(*args, **kwargs)


_rules: dict[Any, type[LayerRule]] = {}  # by the layer class's forward, or "package.module:Class"

model_methods: dict[type, MakeMethods] = {}
"""Functions for model classes that use parameters of their layers without calling the layers.

Each takes the model and the sink and returns replacements for methods by name, which run wherever gradients are
recorded. Subclasses are not covered: they may use their parameters differently."""


def register(rule: _Rule) -> _Rule:
    """Add a rule for its layers; a later rule for the same layer replaces the earlier one."""
    for layer in rule.layers:
        _rules[layer if isinstance(layer, str) else layer.forward] = rule
    return rule


# --- the clipped part of a model -------------------------------------------------------------------------------------


@dataclass
class Survey:
    """The clipped part of a model: rules of layers, replaced methods of models, BatchNorms that must stay frozen."""

    parameters: list[tuple[str, nn.Parameter]]
    layers: list[tuple[nn.Module, type[LayerRule]]] = field(default_factory=list)
    models: list[tuple[nn.Module, MakeMethods]] = field(default_factory=list)
    frozen: list[tuple[str, nn.Module]] = field(default_factory=list)


def survey(model: nn.Module) -> Survey:
    """Find the rule of each layer; raise UnsupportedCase with each module that has no exact per-example gradients."""
    found = Survey([(name, param) for name, param in model.named_parameters() if param.requires_grad])
    refusals = [
        f"{name} is {param.dtype}, whose imaginary part no norm would count: take a real parameter of both parts, and "
        "torch.view_as_complex of it"
        for name, param in found.parameters
        if param.is_complex()
    ]
    covered: set[int] = set()
    own_users: list[tuple[str, nn.Module, bool, set[int]]] = []
    for name, module in model.named_modules():
        path, kind = name or type(model).__name__, type(module)
        if kind in model_methods:
            found.models.append((module, model_methods[kind]))
        reason = _mixes_examples(module)
        if reason is not None:
            refusals.append(f"{path} ({kind.__name__}): {reason}")
            continue
        if isinstance(module, _BatchNorm):
            found.frozen.append((path, module))
            continue
        by_path = _rules.get(class_path := f"{kind.__module__}:{kind.__qualname__}")
        matching = by_path if by_path is not None and by_path.matches(class_path) else None
        rule = None if kind.forward is nn.Module.forward else _rules.get(kind.forward, matching)
        computed = _computes_weights(module)
        if rule is None or computed:
            if (module is model or not _is_holder(module)) and (held := _held(module)):
                own_users.append((path, module, computed, held))
            continue
        own = {
            key: param for key, param in module.named_parameters(recurse=rule.covers_children) if param.requires_grad
        }
        if own:
            covered.update(map(id, own.values()))
            reason = rule.refusal(module) or _reparametrized(module, own)
            if reason is None and "forward" in module.__dict__:
                reason = "its forward was replaced by another library, or by nn.patch: undo that first (nn.unpatch)"
            if reason is None:
                found.layers.append((module, rule))
            else:
                refusals.append(f"{path} ({kind.__name__}): {reason}")
    for path, module, computed, held in own_users:
        if not computed and held <= covered and not _reads(module, held):
            continue  # other names of parameters of layers
        if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
            refusals.append(f"{path} ({type(module).__name__}): it has no forward that uses its parameters")
        elif (
            reason := _reparametrized(module, [key for key, _ in module.named_parameters(recurse=False)])
        ) is not None:
            refusals.append(f"{path} ({type(module).__name__}): {reason}")
        else:
            found.layers.append((module, _rules[nn.Module.forward]))
            ruled = {id(each) for each, _ in found.layers}
            found.layers += [(each, _WholeBatch) for each in _own_kernels(module, ruled)]
    if refusals:
        raise UnsupportedCase("per-example clipping cannot be exact for:\n  " + "\n  ".join(refusals))
    return found


def holders(module: nn.Module) -> list[nn.Module]:
    """Return a module and those in it whose parameters only its forward can use: lists, mappings, parametrizations."""
    inner = [each for child in module.children() if _is_holder(child) for each in holders(child)]
    return [module, *inner]


def _is_holder(module: nn.Module) -> bool:
    return isinstance(module, ParametrizationList) or type(module).forward is nn.Module.forward


def _held(module: nn.Module) -> set[int]:
    own = (param for holder in holders(module) for param in holder._parameters.values())
    return {id(param) for param in own if param is not None and param.requires_grad}


def _reads(module: nn.Module, held: set[int]) -> bool:
    """Return whether the forward of a module, or a method that it calls, names one of these parameters of its own."""
    names = {name for name, param in module._parameters.items() if id(param) in held}
    found, todo = set[str](), ["forward"]
    while todo:
        name = todo.pop()
        codes = [getattr(vars(each).get(name), "__code__", None) for each in type(module).__mro__]  # super()'s, too
        new = {each for code in codes if code is not None for each in code.co_names} - found
        found |= new
        todo += new
    return not names.isdisjoint(found)


def computing_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks of torch.nn.utils that compute a weight from parameters alone: weight_norm, pruning."""
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, WeightNorm | BasePruningMethod)]


def _computes_weights(module: nn.Module) -> bool:
    """Return whether a module computes a weight from parameters that take gradients."""
    inner = module._modules.get("parametrizations")
    computed = [] if inner is None else list(inner.parameters())
    if computing_hooks(module):
        computed += module.parameters(recurse=False)
    return any(param.requires_grad for param in computed)


def _own_kernels(module: nn.Module, ruled: set[int]) -> list[nn.Module]:
    """Return the outermost of our modules in a module, without those that have a rule."""
    found: list[nn.Module] = []
    for child in module.children():
        if id(child) in ruled:
            continue
        if type(child).__module__.startswith("accelerant.nn."):
            found.append(child)
        else:
            found += _own_kernels(child, ruled)
    return found


def _mixes_examples(module: nn.Module) -> str | None:
    if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
        return "its running statistics keep what examples held: take track_running_stats=False"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        return "max_norm changes the rows of the tokens in the forward pass, frozen or not: leave it out"
    if isinstance(module, nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
        return "sparse gradients are not made: take sparse=False"
    if not isinstance(module, _BatchNorm):
        return None
    if module.training or not _has_statistics(module):
        return (
            "it mixes the examples of a batch: take GroupNorm or LayerNorm; or keep it as it is, in eval mode with "
            "its running statistics and frozen (eval(), requires_grad_(False))"
        )
    if any(param.requires_grad for param in module.parameters()):
        return "in eval mode it must be frozen as well: requires_grad_(False)"
    return None


def _reparametrized(module: nn.Module, own: Iterable[str]) -> str | None:
    """Return a refusal if a hook computes a parameter from others and from what it keeps, as spectral_norm does."""
    if computing_hooks(module):
        return None
    for key in own:
        for ending in ("_g", "_v", "_orig"):
            target = key.removesuffix(ending)
            if target != key and isinstance(module.__dict__.get(target), Tensor):
                return f"its {target} is computed from {key} by a hook (spectral_norm): remove that first"
    return None


# --- frozen BatchNorm ------------------------------------------------------------------------------------------------

_BatchNorm = nn.modules.batchnorm._BatchNorm
_BATCH_NORM_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def require_frozen(name: str, module: nn.Module) -> None:
    """Raise UnsupportedCase unless a BatchNorm is a constant map of each example: in eval mode, with statistics."""
    if module.training:
        raise UnsupportedCase(
            f"{name} ({type(module).__name__}) was put into train mode, where it mixes the examples of a batch and "
            "keeps what they held: call its eval() after the model's train()"
        )
    if not _has_statistics(module):
        raise UnsupportedCase(
            f"{name} ({type(module).__name__}) has no running statistics any more, or another forward: it would mix "
            "the examples of a batch. Restore what it had when make_private was called"
        )


def watch_frozen(name: str, module: nn.Module, undo: ExitStack) -> None:
    """Apply `require_frozen` before each forward pass, in which running statistics would absorb the examples."""

    def before(module: nn.Module, args: Any) -> None:
        require_frozen(name, module)

    undo.callback(module.register_forward_pre_hook(mark(before)).remove)
    hide_marked(module, undo)


def _has_statistics(module: nn.Module) -> bool:
    """Return whether a BatchNorm in eval mode normalizes by numbers that no batch determines."""
    plain = type(module).forward in _BATCH_NORM_FORWARDS and "forward" not in module.__dict__
    return plain and module.running_mean is not None


# --- attaching; each function registers its inverse with an ExitStack ------------------------------------------------


def attach_rule(
    module: nn.Module, rule: type[LayerRule], sink: PerExampleSink, undo: ExitStack, require_used: Callable[[], object]
) -> None:
    """Replace a module's forward by its rule's wherever gradients are recorded; `require_used` follows the first."""
    checks = [require_used]
    ruled = rule(module, sink, module.forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        region = current()
        result = ruled.forward(*args, **kwargs) if region is None else ruled.inside(region, *args, **kwargs)
        if checks:
            checks[0]()
            checks.clear()
        return result

    replace_methods(module, {"forward": forward}, undo)
    mark_traced(module.forward)
    # Fused functions that read the parameters without calling the module look for hooks: this one stops them.
    undo.callback(module.register_forward_pre_hook(_no_op).remove)


def replace_methods(
    module: nn.Module, methods: Methods, undo: ExitStack, *, compiled: Callable[[], bool] | None = None
) -> None:
    """Replace methods by functions without self, wherever gradients are recorded; not compiled ones if `compiled()`."""
    for name, method in methods.items():
        _set_attribute(module, name, _Replacement(module, name, method, compiled), undo)
    hide_marked(module, undo)


def _set_attribute(module: nn.Module, name: str, value: object, undo: ExitStack) -> None:
    """Set an attribute of the instance; it is deleted unless it was set again."""

    def delete() -> None:
        if module.__dict__.get(name) is value:
            del module.__dict__[name]

    module.__dict__[name] = value
    undo.callback(delete)


class _Replacement:
    """A replaced method of a module; a copy or pickle of it is the original method."""

    def __init__(self, module: nn.Module, name: str, traced: Forward, compiled: Callable[[], bool] | None) -> None:
        self._module, self._name, self._compiled = module, name, compiled
        self._plain, self._traced = getattr(module, name), traced
        self.__signature__ = inspect.signature(self._plain)
        mark(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._compiled is not None and torch.compiler.is_compiling() and self._compiled():
            return self._plain(*args, **kwargs)
        call = self._traced if torch.is_grad_enabled() or current() is not None else self._plain
        if torch.compiler.is_compiling():  # the sink is fed as the backward pass runs, not as it is traced
            call = torch.compiler.disable(call)
        return call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _original(memo.get(id(self._module), self._module), self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _original, (self._module, self._name)


def _original(module: nn.Module, name: str) -> Any:
    return MethodType(getattr(type(module), name), module)


# --- copies and files of a module ------------------------------------------------------------------------------------

_MARK: Final = "_accelerant_attached"
_STATE: Final = "__getstate__"
_HOOKS: Final = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
}  # torch's dictionaries of hooks by number, with its dictionaries of their options


def mark(call: _T) -> _T:
    """Mark a function or object as attached by a clipper, so that copies leave it out; return it."""
    setattr(call, _MARK, True)
    return call


@mark
def _no_op(module: nn.Module, args: Any) -> None:
    return None


def hide_marked(module: nn.Module, undo: ExitStack) -> None:
    """Make copies and files of a module leave out marked attributes and hooks."""

    def state() -> Any:
        state = type(module).__getstate__(module)
        if not isinstance(state, dict):
            return state
        kept = {name: value for name, value in state.items() if not getattr(value, _MARK, False)}
        for name, options in _HOOKS.items():
            marked = {number for number, hook in kept.get(name, {}).items() if getattr(hook, _MARK, False)}
            for key in (name, *options) if marked else ():
                kept[key] = OrderedDict((n, value) for n, value in kept[key].items() if n not in marked)
        return kept

    if _STATE not in module.__dict__:  # neither ours already nor the user's own
        _set_attribute(module, _STATE, mark(state), undo)
