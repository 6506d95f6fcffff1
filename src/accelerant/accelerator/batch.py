"""Many small calls in one launch.

>>> with acc.batch() as batch:
...     answers = [batch.gelu(x) for x in xs]        # noted, not done
>>> [answer.result() for answer in answers]          # done when the block ended

Calls of the same operation with the same options become one call on joined arrays, as far as the operation allows
(Method.merge); the result is cut apart again. What cannot be joined is called one by one. A call whose arguments do
not fit fails alone, when its result is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from accelerant.accelerator.methods import METHODS, Operations
from accelerant.errors import AccelerantError, ShapeError
from accelerant.runtime.arrays import Foreign

__all__ = ["Batch", "PendingCall"]

Tensors = tuple[torch.Tensor, ...]


class PendingCall:
    """A call that its batch does."""

    def __init__(self, name: str, arrays: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.name = name
        self.arrays = arrays
        self.options = options
        self._outcome: Callable[[], Any] | None = None

    def result(self) -> Any:
        """The answer, in kind.

        Raises:
            AccelerantError: the batch has not ended; or what the call raised.
        """
        if self._outcome is None:
            raise AccelerantError(f"{self.name}: this call's batch has not ended yet")
        return self._outcome()

    def done(self) -> bool:
        """Whether the batch has ended."""
        return self._outcome is not None

    def settle(self, outcome: Callable[[], Any]) -> None:
        """Set what result() gives or raises; for the batch."""
        self._outcome = outcome


class Batch(Operations):
    """Notes calls until its block ends, then does them; made by Accelerator.batch()."""

    def __init__(
        self,
        move: Callable[[str, tuple[Any, ...], dict[str, Any]], tuple[Tensors, Foreign]],
        run: Callable[[str, Tensors, dict[str, Any], int], torch.Tensor],
    ) -> None:
        self._move = move
        self._run = run
        self._calls: list[PendingCall] = []
        self.launches = 0

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._finish()

    def _call(self, name: str, arrays: tuple[Any, ...], **options: Any) -> PendingCall:
        call = PendingCall(name, arrays, options)
        self._calls.append(call)
        return call

    def _finish(self) -> None:
        """Group the calls, do each group, hand out the answers."""
        groups: dict[tuple[Any, ...], list[tuple[PendingCall, Tensors, Foreign]]] = {}
        for call in self._calls:
            try:
                tensors, origin = self._move(call.name, call.arrays, call.options)
            except AccelerantError as error:
                call.settle(_raising(error))
                continue
            groups.setdefault(_key(call, tensors), []).append((call, tensors, origin))
        for key, members in groups.items():
            self._do(key[0], members)

    def _do(self, name: str, members: list[tuple[PendingCall, Tensors, Foreign]]) -> None:
        options = members[0][0].options
        arguments = [tensors for _, tensors, _ in members]
        if len(members) > 1:
            try:
                joined, cut = _join(name, arguments)
                results = cut(self._run(name, joined, options, len(members)))
                self.launches += 1
            except AccelerantError:
                results = []  # one of them does not fit: find out which, one by one
            if results:
                for (call, _, origin), result in zip(members, results, strict=True):
                    call.settle(_returning(origin, result))
                return
        for call, tensors, origin in members:
            try:
                call.settle(_returning(origin, self._run(name, tensors, options, 1)))
                self.launches += 1
            except AccelerantError as error:
                call.settle(_raising(error))


def _returning(origin: Foreign, tensor: torch.Tensor) -> Callable[[], Any]:
    return lambda: origin.wrap(tensor)


def _raising(error: Exception) -> Callable[[], Any]:
    def outcome() -> Any:
        raise error

    return outcome


def _key(call: PendingCall, tensors: Tensors) -> tuple[Any, ...]:
    """Calls with the same key become one."""
    merge = METHODS[call.name].merge
    first, rest = tensors[0], tensors[1:]
    common = (call.name, tuple(sorted(call.options.items())), tuple(x.dtype for x in tensors), len(tensors))
    if merge == "elements" and all(x.shape == first.shape for x in rest):
        return common
    last = call.options.get("dim", -1) in (-1, first.ndim - 1)
    if merge == "rows" and first.ndim and last:
        return (*common, first.shape[-1], *(id(array) for array in call.arrays[1:]))
    if merge == "stack" and all(x.ndim == 2 for x in tensors):
        return (*common, *(tuple(x.shape) for x in tensors))
    return (*common, id(call))


def _join(name: str, calls: list[Tensors]) -> tuple[Tensors, Callable[[torch.Tensor], list[torch.Tensor]]]:
    """The arguments of one call for all, and what cuts its result apart."""
    merge = METHODS[name].merge
    firsts = [tensors[0] for tensors in calls]
    shapes = [x.shape for x in firsts]
    if merge == "elements":
        joined = tuple(torch.cat([x.reshape(-1) for x in column]) for column in zip(*calls, strict=True))
        sizes = [x.numel() for x in firsts]
    elif merge == "rows":
        width = shapes[0][-1]
        joined = (torch.cat([x.reshape(-1, width) for x in firsts]), *calls[0][1:])
        sizes = [shape[:-1].numel() for shape in shapes]
    elif merge == "stack":
        return tuple(torch.stack(column) for column in zip(*calls, strict=True)), lambda y: list(y.unbind(0))
    else:
        raise ShapeError(f"calls of {name} cannot be joined")

    def cut(y: torch.Tensor) -> list[torch.Tensor]:
        return [part.reshape(shape) for part, shape in zip(y.split(sizes), shapes, strict=True)]

    return joined, cut
