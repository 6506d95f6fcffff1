"""What every op's registration with torch shares.

An op is known to torch as `torch.ops.accelerant.<op>` with a schema, a fake implementation and an autograd formula, so
that torch.compile, fake tensors, dispatch modes and tensor subclasses see it as they see torch's own. Plain tensors in
eager mode need none of these: the public function then goes straight to the autograd function, or to the Operation
where autograd does not listen. That saves the dispatcher's passes through Python, a third of an eager call's host time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["below_autograd", "define", "is_plain", "name_of"]

library = torch.library.Library("accelerant", "DEF")
"""The registrations live as long as this does."""

below_autograd: Callable[[], Any] = torch._C._AutoDispatchBelowAutograd
"""Context in which a call of an op goes past its autograd formula."""

_keys_of = torch._C._dispatch_keys
_active_modes = torch._C._len_torch_dispatch_stack
_plain: dict[int, bool] = {}


def define(
    schema: str,
    *,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    autograd: Callable[..., Any],
) -> Callable[..., Any]:
    """Register an op with torch.

    Args:
        schema: "name(Tensor x, ...) -> Tensor".
        kernel: computes on real tensors of any device.
        fake: gives results of the right shape, dtype and strides.
        autograd: called in place of kernel while autograd may listen.

    Returns:
        the op, to call with every argument positional.
    """
    name = schema.partition("(")[0]
    library.define(schema)
    library.impl(name, kernel, "CompositeExplicitAutograd")
    library.impl(name, autograd, "Autograd")
    torch.library.register_fake(f"accelerant::{name}", fake, lib=library)
    op: Callable[..., Any] = getattr(torch.ops.accelerant, name).default
    return op


def is_plain(x: Tensor) -> bool:
    """Whether x is ordinary memory, and nothing (a dispatch mode, a subclass, a transform) wants to see the call."""
    if _active_modes():
        return False
    keys = _keys_of(x).raw_repr()
    plain = _plain.get(keys)
    if plain is None:
        ordinary = _keys_of(torch.empty(0, device=x.device)).raw_repr() if x.device.type != "meta" else 0
        plain = _plain[keys] = not keys & ~ordinary
    return plain


def name_of(dtype: torch.dtype) -> str:
    """The dtype's name without torch's: "bfloat16"."""
    return str(dtype).removeprefix("torch.")
