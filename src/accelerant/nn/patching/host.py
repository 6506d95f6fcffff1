"""What a forward pass does on the host beside its operations, and how a CUDA graph of it does the same.

Two kinds of work are noted in an eager call. Values that the host copies to the device (`torch.tensor(0.0,
device=x.device)`) are kept there, and copied from there in the capture. Draws that decide nothing (whether layers are
left out, at probability 0) are repeated in each replay, so that later draws are the same as without a graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_LARGEST_BYTES = 1 << 20  # of values that are kept on the device
_MOVES = (Tensor.to, Tensor.cuda, Tensor.type_as)
_LESS = (Tensor.__lt__, Tensor.lt, torch.lt)


class HostWork:
    """The draws and copies of the calls of one key.

    Attributes:
        draws: numbers that each call draws on the host, and that decide nothing.
    """

    def __init__(self, device: str) -> None:
        self.draws = 0
        self._device, self._constants = device, dict[Any, Tensor]()
        self._decided = True

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what an eager call does inside the block."""
        self.draws, self._decided = 0, True
        unused = dict[int, weakref.ref[Tensor]]()

        def note(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
            for x in pytree.tree_leaves((args, kwargs)) if unused else ():
                if id(x) in unused and unused.pop(id(x))() is x:
                    self._decided &= func in _LESS and x is args[0] and _is_certain(args[1])
            args = self._indexed(func, args, note=True)
            host, result = self._copied(func, args, kwargs), func(*args, **kwargs)
            if func is torch.rand and result.dim() == 0 and result.device.type == "cpu" and not kwargs:
                self.draws += 1
                unused[id(result)] = weakref.ref(result)
            elif host is not None and result.device.type == self._device:
                self._constants[_content(host)] = result.detach().clone()
            return result

        with _Calls(note):
            yield
        self._decided &= all(x() is None for x in unused.values())

    def is_noted(self) -> bool:
        """Return whether there is work that a capture has to repeat."""
        return bool(self.draws or self._constants)

    def explains(self, before: Tensor, after: Tensor) -> bool:
        """Return whether a call that changed the state of torch's generator on the host made only draws as noted."""
        if not self.draws or not self._decided:
            return torch.equal(before, after)
        generator = torch.Generator()
        generator.set_state(before)
        for _ in range(self.draws):
            torch.rand([], generator=generator)
        return torch.equal(generator.get_state(), after)

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Copy what was noted from the device, inside the block, and leave the host's generator as it was."""

        def repeat(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
            host = self._copied(func, args, kwargs)
            kept = None if host is None else self._constants.get(_content(host))
            if kept is None and host is not None and host.numel() == 1:  # only calls in a capture make this copy
                return torch.full(host.shape, host.item(), dtype=host.dtype, device=self._device)
            return func(*self._indexed(func, args, note=False), **kwargs) if kept is None else kept.clone()

        with torch.random.fork_rng(devices=(), enabled=self.draws > 0), _Calls(repeat):
            yield

    def draw(self) -> None:
        """Draw what a call draws."""
        for _ in range(self.draws):
            torch.rand([])

    def _copied(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Tensor | None:
        """Return the values that a call copies from the host to the device, in its dtype; None if it does not."""
        if func in (torch.tensor, torch.as_tensor):
            device, data = kwargs.get("device"), args[0] if args else kwargs.get("data")
            if device is None or torch.device(device).type != self._device or kwargs.get("requires_grad"):
                return None
            if any(isinstance(x, Tensor) for x in pytree.tree_leaves(data)):
                return None
            host = torch.tensor(data, dtype=kwargs.get("dtype"))
        elif func in _MOVES and args[0].device.type == "cpu" and not args[0].requires_grad:
            host = args[0]
            if func is not Tensor.cuda:
                other = args[1] if len(args) > 1 else kwargs.get("other")
                parsed = (other.device, other.dtype) if isinstance(other, Tensor) else _parsed(args[1:], kwargs)
                if parsed[0] is None or parsed[0].type != self._device:
                    return None
                host = host if parsed[1] is None else host.to(parsed[1])
        else:
            return None
        return host if host.numel() * host.element_size() <= _LARGEST_BYTES else None

    def _indexed(self, func: Callable[..., Any], args: Any, *, note: bool) -> Any:
        """Return the arguments of a call; of indexing on the device by lists, with tensors that are kept there."""
        if func is not Tensor.__getitem__ or args[0].device.type != self._device or not isinstance(args[1], tuple):
            return args
        index = list(args[1])
        for place, each in enumerate(index):
            if isinstance(each, list) and all(type(number) is int for number in each):
                host = torch.tensor(each, dtype=torch.int64)
                if note:
                    self._constants[_content(host)] = host.to(args[0].device)
                index[place] = self._constants.get(_content(host), each)
        return args[0], tuple(index)


class _Calls(TorchFunctionMode):
    """Hands each call of a function of torch to `run`."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run(func, args, kwargs or {})


def _parsed(args: Any, kwargs: dict[str, Any]) -> tuple[torch.device | None, torch.dtype | None]:
    """Return the device and the dtype that Tensor.to is given."""
    options = {name: value for name, value in kwargs.items() if name != "copy"}
    device, dtype, *_ = torch._C._nn._parse_to(*args[:3], **options)
    return device, dtype


def _is_certain(limit: object) -> bool:
    """Return whether every number in [0, 1) compares in the same way with a limit."""
    return isinstance(limit, int | float) and not 0 < limit < 1


def _content(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, x.shape, x.stride(), bytes(x.detach().flatten().view(torch.uint8).tolist())
