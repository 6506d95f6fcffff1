"""What every op's registration with torch shares.

An op is known to torch as `torch.ops.accelerant.<op>` with a schema, a fake implementation and an autograd formula, so
that torch.compile, fake tensors, dispatch modes and tensor subclasses see it as they see torch's own. Plain tensors in
eager mode need none of these: the public function then goes straight to the autograd function, or to the Operation
where autograd does not listen. That saves the dispatcher's passes through Python, a third of an eager call's host time.

Our kernels know reverse-mode derivatives of one level. Forward-mode derivatives and the transforms of torch.func (grad,
jvp, vmap and what is made of them) are served by torch's own functions, which know them all: each op names such a
composite. They run outside the ledger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = [
    "autocast_dtype",
    "below_autograd",
    "cast_for_autocast",
    "define",
    "is_ordinary",
    "is_plain",
    "is_watched",
    "name_of",
]

library = torch.library.Library("accelerant", "DEF")
"""The registrations live as long as this does."""

below_autograd: Callable[[], Any] = torch._C._AutoDispatchBelowAutograd
"""Context in which a call of an op goes past its autograd formula."""

_keys_of = torch._C._dispatch_keys
_active_modes = torch._C._len_torch_dispatch_stack
_transforming: Callable[[], bool] = torch._C._are_functorch_transforms_active
_ordinary: dict[int, bool] = {}

# Asked once: the question costs 0.2 us, and torch.compile would write it into its graph.
_WITHOUT_AUTOCAST = frozenset(kind for kind in ("meta", "lazy", "vulkan") if not torch.amp.is_autocast_available(kind))


def define(
    schema: str,
    *,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    differentiable: Callable[..., Any],
    composite: Callable[..., Any],
) -> Callable[..., Any]:
    """Register an op with torch.

    Args:
        schema: "name(Tensor x, ...) -> Tensor".
        kernel: computes on real tensors of any device.
        fake: gives results of the right shape, dtype and strides.
        differentiable: called in place of kernel where autograd listens to an argument.
        composite: the same from torch's own differentiable functions, called for a tensor that carries a tangent
            (forward-mode derivatives) and inside the transforms of torch.func.

    Returns:
        the op, to call with every argument positional.
    """
    name = schema.partition("(")[0]
    library.define(schema)
    op: Callable[..., Any] = getattr(torch.ops.accelerant, name).default

    def autograd(*args: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if _transforming() or any(map(_has_tangent, tensors)):
            return composite(*args)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return differentiable(*args)
        with below_autograd():
            return op(*args)

    library.impl(name, kernel, "CompositeExplicitAutograd")
    library.impl(name, autograd, "Autograd")
    library.impl(name, composite, "FuncTorchBatched")
    torch.library.register_fake(f"accelerant::{name}", fake, lib=library)
    return op


def _has_tangent(x: Tensor) -> bool:
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def is_watched() -> bool:
    """Whether a mode, a transform or forward-mode differentiation wants to see calls, whatever their arguments are."""
    return bool(_active_modes() or forward_ad._current_level >= 0 or _transforming())


def is_plain(x: Tensor) -> bool:
    """Whether x is ordinary memory, and nothing (a mode, a subclass, a transform, a tangent) wants to see the call."""
    return not is_watched() and is_ordinary(x)


def is_ordinary(x: Tensor) -> bool:
    """Whether x is memory of a device, no subclass and no transform's wrapper: for the arguments after a plain one."""
    keys = _keys_of(x).raw_repr()
    ordinary = _ordinary.get(keys)
    if ordinary is None:
        usual = 0
        if x.device.type != "meta":
            with torch.inference_mode(False):  # what is made in inference mode lacks the keys of autograd
                usual = _keys_of(torch.empty(0, device=x.device)).raw_repr()
        ordinary = not keys & ~usual
        if not is_watched():  # else the empty one may be a mode's own, which says nothing of later calls
            _ordinary[keys] = ordinary
    return ordinary


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype that autocast computes in on a type of device; None where it is off, or not to be had ("meta")."""
    if device in _WITHOUT_AUTOCAST or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def cast_for_autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast x as torch's autocast does: floating dtypes other than float64."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x  # what is not a tensor is reported by the check that follows
    return x.to(dtype)


def name_of(dtype: torch.dtype) -> str:
    """The dtype's name without torch's: "bfloat16"."""
    return str(dtype).removeprefix("torch.")
