"""What all ops share: registration with torch, queries of its state (modes, transforms, autocast), and checks.

Our kernels have reverse-mode derivatives of one level. Forward-mode derivatives and the transforms of torch.func are
served by torch's own functions, the composite of each op, outside the ledger.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.runtime.compilation.triton import refuses_triton
from accelerant.runtime.dispatch import Case
from accelerant.runtime.files import clipped

library = torch.library.Library("accelerant", "DEF")  # registrations live as long as this object

below_autograd: Callable[[], Any] = torch._C._AutoDispatchBelowAutograd
"""Context in which a call of an op bypasses its autograd formula."""

keys_of = torch._C._dispatch_keys
active_modes = torch._C._len_torch_dispatch_stack
transforming: Callable[[], bool] = torch._C._are_functorch_transforms_active
autocasts: Callable[[], bool] = torch._C._is_any_autocast_enabled
ordinary_keys: dict[int, bool] = {}
"""Dispatch keys of a tensor -> the answer of `is_ordinary`; hot paths look it up themselves."""

F = TypeVar("F", bound=Callable[..., Any])

# Asked once: the call costs 0.2 us, and torch.compile would trace it into its graph.
_WITHOUT_AUTOCAST = frozenset(kind for kind in ("meta", "lazy", "vulkan") if not torch.amp.is_autocast_available(kind))


def define(
    schema: str, *, kernel: Callable[..., Any], fake: Callable[..., Any], composite: Callable[..., Any],
    differentiable: Callable[..., Any] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Register an op with torch, and return it, to call with every argument positional.

    `schema` is "name(Tensor x, ...) -> Tensor". `kernel` computes on real tensors of any device; `fake` returns results
    of the right shape, dtype and strides. `composite`, of torch's own differentiable functions, is for tangents
    (forward mode), DTensors, and inside the transforms of torch.func. `differentiable` replaces the kernel where an
    argument requires a gradient; without it results have none.
    """
    name = schema.partition("(")[0]
    library.define(schema)
    op: Callable[..., Any] = getattr(torch.ops.accelerant, name).default

    def autograd(*args: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        dual = forward_ad._current_level >= 0
        if transforming() or any(
            (dual and forward_ad.unpack_dual(x).tangent is not None) or type(x) in composed or is_distributed(x)
            for x in tensors
        ):
            return composite(*args)
        if differentiable is not None and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return differentiable(*args)
        with below_autograd():
            return op(*args)

    library.impl(name, kernel, "CompositeExplicitAutograd")
    library.impl(name, autograd, "Autograd")
    library.impl(name, composite, "FuncTorchBatched")
    _composites[name] = composite_of[name] = composite
    torch.library.register_fake(f"accelerant::{name}", fake, lib=library)
    return op


def is_watched() -> bool:
    """Return whether a mode, a transform or forward-mode differentiation must see every call."""
    return bool(active_modes() or forward_ad._current_level >= 0 or transforming())


def is_plain(x: Tensor) -> bool:
    """Return whether x is ordinary memory and no mode, subclass, transform or tangent must see the call."""
    watched = active_modes() or forward_ad._current_level >= 0 or transforming()  # is_watched, inlined
    return not watched and (ordinary_keys.get(keys_of(x).raw_repr()) or is_ordinary(x))


composed: set[type] = set()  # subclasses of Tensor for which every op is its composite: their operations are torch's
composite_of: dict[str, Callable[..., Any]] = {}  # name of an op -> its composite

_composites: dict[str, Callable[..., Any]] = {}  # names and composites of ops that have no rule for DTensors yet


def is_distributed(x: object) -> bool:
    """Return whether x is a DTensor; the first one gives our ops the rules of torch's operations."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(x, module.DTensor):
        return False
    while _composites:
        name, composite = _composites.popitem()
        rule = partial(_run_composite, composite)
        torch.library.register_torch_dispatch(f"accelerant::{name}", module.DTensor, rule, lib=library)
    return True


def _run_composite(composite: Callable[..., Any], kind: type, op: object, types: object, args: Any, _: object) -> Any:
    return composite(*args)


def is_ordinary(x: Tensor) -> bool:
    """Return whether x is memory of a device, no subclass and no transform's wrapper."""
    keys = keys_of(x).raw_repr()
    if (ordinary := ordinary_keys.get(keys)) is None:
        usual = 0
        if x.device.type != "meta":
            with torch.inference_mode(False):  # tensors of inference mode lack autograd's keys
                usual = keys_of(torch.empty(0, device=x.device)).raw_repr()
        ordinary = not keys & ~usual
        if not is_watched():  # else the empty tensor may be a mode's own
            ordinary_keys[keys] = ordinary
    if not ordinary:
        is_distributed(x)  # gives the ops their rules
    return ordinary


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype that autocast computes in on a type of device; None where it is off or unavailable ("meta")."""
    if device in _WITHOUT_AUTOCAST or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def cast_for_autocast(*tensors: Any) -> tuple[Any, ...]:
    """Return tensors as torch's autocast casts them on the first one's device; float64 and what is no tensor stay."""
    if not autocasts():
        return tensors
    kind = tensors[0].device.type
    if kind in _WITHOUT_AUTOCAST or not torch.is_autocast_enabled(kind):
        return tensors
    low = torch.get_autocast_dtype(kind)
    kept = [not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64 for x in tensors]
    return tuple(x if keep else x.to(low) for x, keep in zip(tensors, kept, strict=True))


def rows_of(x: Tensor) -> Tensor:
    """Return a tensor as a matrix of its last dimension's rows, which may be empty."""
    if x.dim() == 2:
        return x
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name without the module: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


# --- checks of arguments, and cases that a kernel does not serve -----------------------------------------------------
FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Dtypes that the ops take; kernels compute in float32, and torch's functions serve float64."""


def check_dtype(op: str, x: Tensor, name: str = "x") -> None:
    """Raise UnsupportedDtype unless the dtype of x is one of FLOATING, TypeError unless x is a tensor."""
    try:
        supported = x.dtype in FLOATING
    except (AttributeError, TypeError):
        raise not_a_tensor(op, name, x) from None
    if not supported:
        if not isinstance(x, Tensor):
            raise not_a_tensor(op, name, x)
        raise UnsupportedDtype(f"{op} takes {', '.join(map(name_of, FLOATING))}; {name} is {name_of(x.dtype)}")


_WITH_WEIGHT = ("linear", "linear_gelu", "conv2d")


def check_matches(op: str, x: Tensor, name: str = "x", **others: Tensor | None) -> None:
    """Raise UnsupportedDtype, ShapeError or TypeError for another dtype or device than x's, or no tensor.

    None is skipped where an op takes it: for a bias, and for the weights of a loss.
    """
    for other_name, other in others.items():
        if other is None:
            if other_name in ("b", "target") or (other_name == "weight" and op in _WITH_WEIGHT):
                raise not_a_tensor(op, other_name, other)
            continue
        try:
            if other.dtype is x.dtype and other.device == x.device:
                continue
        except AttributeError:
            raise not_a_tensor(op, other_name, other) from None
        if not isinstance(other, Tensor):
            raise not_a_tensor(op, other_name, other)
        if other.dtype != x.dtype:
            names = f"{name_of(x.dtype)} and {name_of(other.dtype)}"
            raise UnsupportedDtype(f"{name} and {other_name} must have one dtype, got {names}")
        raise ShapeError(f"{name} and {other_name} must be on one device, got {x.device} and {other.device}")


def check_or_float32(name: str, other: Tensor, x: Tensor) -> None:
    """Raise UnsupportedDtype unless a tensor has x's dtype, or float32 with a narrower x; ShapeError off its device."""
    if other.dtype != x.dtype and (other.dtype != torch.float32 or x.dtype == torch.float64):
        allowed = name_of(x.dtype) + ("" if x.dtype in (torch.float32, torch.float64) else " or float32")
        raise UnsupportedDtype(f"{name} must be {allowed} for x of {name_of(x.dtype)}, got {name_of(other.dtype)}")
    if other.device != x.device:
        raise ShapeError(f"{name} must be on {x.device}, where x is; it is on {other.device}")


def checked_dim(op: str, x: Tensor, dim: int, axis: int | None) -> int:
    """Check x and return the dimension counted from 0, `axis` where it is given in place of `dim`."""
    check_dtype(op, x)
    if axis is not None:
        if dim not in (-1, axis):
            raise ConfigError(f"{op}: axis is another name of dim; got dim={dim} and axis={axis}")
        dim = axis
    dims = x.dim() or 1  # a scalar counts as one element along dimension 0, as in torch
    try:
        inside = -dims <= dim < dims
    except TypeError:
        raise ConfigError(f"{op}: dim must be an integer, got {type(dim).__name__}") from None
    if not inside:
        raise ShapeError(f"dim must be in [{-dims}, {dims - 1}] for x of shape {tuple(x.shape)}, got {clipped(dim)}")
    return dim % dims


def not_a_tensor(op: str, name: str, x: object) -> TypeError:
    """Return the error for an argument that is not a tensor."""
    kind = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
    return TypeError(
        f"{op} takes torch tensors; {name} is a {kind}: convert it with torch.as_tensor, or call {op} of an "
        "accelerant.Accelerator, which takes arrays of other libraries and numbers"
    )


def refuses_float64(dtype: torch.dtype) -> str | None:
    """Return why a kernel that computes in float32 does not serve a dtype; None if it does."""
    return "computes in float32, not float64" if dtype == torch.float64 else None


def refuses_triton_kernel(case: Case) -> str | None:
    """Return why a Triton kernel that computes in float32 does not serve a case; None if it does."""
    return refuses_float64(case.dtype) or refuses_triton(case.device)


# --- torch's names of arguments ---------------------------------------------------------------------------------------
_X = {"input": "x"}
_QUERY = {"query": "q", "is_causal": "causal"}
_IN_PLACE: dict[str, object] = {"inplace": False}
_REDUCED: dict[str, object] = {"size_average": None, "reduce": None}

TORCH_NAMES: dict[str, dict[str, str]] = {
    "attention": {**_QUERY, "key": "k", "value": "v", "attn_mask": "mask", "enable_gqa": ""},
    "attention_decode": {"query": "q", "key": "k_cache", "value": "v_cache"},
    "attention_paged": {"query": "q", "key": "k_blocks", "value": "v_blocks"},
    "attention_varlen": {**_QUERY, "key": "k", "value": "v"},
    "cross_entropy": {"input": "logits", "target": "targets"},
    "embedding": {"input": "indices"},
    "linear_cross_entropy": {"input": "hidden", "linear_weight": "weight", "target": "targets"},
    **{op: {"input": "a", "other": "b"} for op in ("add", "matmul", "mul")},
    **{op: {**_X, "normalized_shape": ""} for op in ("layer_norm", "rms_norm")},
    "swiglu": {"input": "gate"},
    **dict.fromkeys(
        ("add_layer_norm", "add_rms_norm", "avg_pool2d", "conv2d", "dropout", "gelu", "linear_gelu", "linear_int4",
         "linear_int8", "log_softmax", "max_pool2d", "quantize_int8", "relu", "rope", "sigmoid", "silu", "softmax",
         "tanh"), _X,
    ),
}  # fmt: skip
"""Op -> torch's name of an argument -> the op's, "" for one that the op infers from the tensors."""

TORCH_ONLY: dict[str, dict[str, object]] = {
    "add": {"alpha": 1, "out": None},
    "attention": {"dropout_p": 0.0},
    "binary_cross_entropy": _REDUCED,
    "binary_cross_entropy_with_logits": _REDUCED,
    "cross_entropy": {"weight": None, **_REDUCED},
    "dropout": _IN_PLACE,
    "embedding": {"max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False, "sparse": False},
    "l1_loss": {"weight": None, **_REDUCED},
    "linear_cross_entropy": {"linear_bias": None, "options": None},
    "mse_loss": {"weight": None, **_REDUCED},
    **{op: {"out": None} for op in ("matmul", "mul", "sigmoid", "tanh")},
    **{op: {"dtype": None, "_stacklevel": 3} for op in ("log_softmax", "softmax")},
    "relu": _IN_PLACE,
    "silu": _IN_PLACE,
}
"""Op -> arguments that only torch's function has -> the one value with which it does what the op does."""


def torch_keywords(op: str) -> frozenset[str]:
    """Return the keywords of torch's function that are not the op's own."""
    return frozenset({*TORCH_NAMES.get(op, ()), *TORCH_ONLY.get(op, ())})


def own_keywords(op: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's keywords by the op's own names; TypeError for both, ShapeError for another row length."""
    names, fixed = TORCH_NAMES.get(op, {}), TORCH_ONLY.get(op, {})
    own: dict[str, Any] = {}
    for name, value in options.items():
        if name in fixed:
            if value is not fixed[name] and value != fixed[name]:
                only = f"torch's function has it, here it must be {fixed[name]!r}"
                raise TypeError(f"{op}: got an unexpected keyword argument {name!r}: {only}")
        elif meant := names.get(name, name):
            if meant in own:
                raise TypeError(f"{op}() got {meant}= also by torch's name: give one of the two")
            own[meant] = value
    if "normalized_shape" in options:
        given, shape = options["normalized_shape"], getattr(args[0] if args else own.get("x"), "shape", None)
        sizes = (given,) if isinstance(given, int) else tuple(given)
        if shape is not None and sizes != tuple(shape[-1:]):
            raise ShapeError(
                f"{op} takes the last dimension of x: normalized_shape must be {tuple(shape[-1:])}, got {sizes}"
            )
    return own


def own_arguments(op: str, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments by the op's own names and in its own order; the errors are those of own_keywords."""
    if op in ("layer_norm", "rms_norm") and len(args) > 1 and isinstance(args[1], int | tuple | list):
        shape = (args[1],) if isinstance(args[1], int) else args[1]
        if all(isinstance(size, int | torch.SymInt) for size in shape):  # torch's order
            args, options = (args[0], *args[2:]), {**options, "normalized_shape": shape}
    if options and not torch_keywords(op).isdisjoint(options):
        options = own_keywords(op, args, options)
    return args, options


def with_torch_keywords(public: F) -> F:
    """Decorate a public function that has no CpuFastPath, which understands them too."""

    @functools.wraps(public)
    def call(*args: Any, **options: Any) -> Any:
        return public(*args, **own_keywords(public.__name__, args, options)) if options else public(*args)

    return cast("F", call)
