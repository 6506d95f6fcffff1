"""Tensors that are computed when something reads them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten._to_copy.default)


class LazyTensor(Tensor):
    """A tensor that the first operation on it computes, but for those that change only its dtype or history."""

    def value(self) -> Tensor:
        """Return the tensor without a gradient, computed once."""
        raise NotImplementedError

    def whole(self) -> Tensor:
        """Return the tensor, with its gradient if it has one."""
        return self.value()

    def alias(self, dtype: torch.dtype) -> LazyTensor | None:
        """Return the same tensor in a dtype, not computed either; None if it has to be."""
        raise NotImplementedError

    def expose(self) -> None:
        """Note that others hold the tensor's memory from now on, and may write to it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        x = args[0] if args else None
        if isinstance(x, LazyTensor) and func in _ALIASES and set(kwargs) <= {"dtype"}:
            same = x.alias(kwargs.get("dtype") or x.dtype)
            if same is not None:
                return same
        if isinstance(x, LazyTensor) and any(each.alias_info is not None for each in func._schema.arguments):
            x.expose()
        args, kwargs = pytree.tree_map_only(LazyTensor, lambda lazy: lazy.value(), (args, kwargs))
        return func(*args, **kwargs)

    def numpy(self, *, force: bool = False) -> Any:  # what reads the memory is not dispatched
        """Return the tensor as an array."""
        self.expose()
        return self.whole().numpy(force=force)

    def tolist(self) -> Any:
        """Return the tensor as numbers."""
        return self.whole().tolist()

    def data_ptr(self) -> int:
        """Return the address of the tensor."""
        self.expose()
        return self.whole().data_ptr()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.whole(), memo)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__.lower()}({tuple(self.shape)}, {self.dtype}, computed when read)"
