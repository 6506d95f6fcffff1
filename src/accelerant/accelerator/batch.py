"""Many small calls in one launch.

>>> with acc.batch() as batch:
...     answers = [batch.gelu(x) for x in xs]        # recorded, not run
>>> [answer.result() for answer in answers]          # run at the end of the block

Calls of the same operation with the same options become one call on joined arrays, as far as the operation allows
(Method.merge), and the result is split again. Other calls run one by one. A call that fails does not affect the others:
all run, and then the end of the block raises the first error. result() raises that of its own call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch

from accelerant.accelerator.methods import METHODS, ArrayOrigin, Operations, Results, Tensors, tensors_of
from accelerant.errors import AccelerantError, ShapeError, TimeLimitExceeded

__all__ = ["Batch", "PendingCall"]


class PendingCall:
    """A recorded call of a batch; `error` is what it raised, None if it succeeded or has not run."""

    def __init__(self, name: str, arrays: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.name = name
        self.arrays = arrays
        self.options = options
        self.error: Exception | None = None
        self._outcome: Callable[[], Any] | None = None

    def result(self, timeout_s: float | None = None, *, timeout: float | None = None) -> Any:
        """Return the result, in the kind of the inputs; or raise the call's error, or AccelerantError in its batch.

        There is nothing to wait for; the time limits of other futures are accepted.
        """
        if self._outcome is None:
            raise AccelerantError(f"{self.name}: this call's batch has not ended yet")
        return self._outcome()

    def done(self) -> bool:
        """Return whether the batch has ended."""
        return self._outcome is not None

    def succeed(self, outcome: Callable[[], Any]) -> None:
        """Set the function that returns the result; for the batch."""
        self._outcome = outcome

    def fail(self, error: Exception) -> None:
        """Set the error that result() raises; for the batch."""
        self.error = error

        def outcome() -> Any:
            raise error

        self._outcome = outcome


@dataclass(slots=True)
class _Member:
    """A call of a group: its arrays, also on the device until they are joined with those of others."""

    call: PendingCall
    arrays: tuple[Any, ...]
    tensors: Tensors
    origin: ArrayOrigin


class Batch(Operations):
    """Records calls until its block ends, then runs them in `launches` calls of operations; see Accelerator.batch().

    Args:
        check: checks a call; returns the arrays to move to the device, and the bytes of its inputs and of its result.
        move: moves arrays to the device; returns them and their origin.
        run: runs an operation on tensors for a number of calls.
        memory_limit_bytes: for inputs, their joined copies and results on the device together. A batch beyond it runs
            in several parts, and each part's results are where its inputs came from before the next begins.
    """

    def __init__(
        self, check: Callable[[str, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], int, int]],
        move: Callable[[str, tuple[Any, ...]], tuple[Tensors, ArrayOrigin]],
        run: Callable[[str, Tensors, dict[str, Any], int], Results], memory_limit_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self._check, self._move = check, move
        self._run = run
        self._limit = memory_limit_bytes
        self._calls: list[PendingCall] = []
        self.launches = 0

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            return
        self._finish()
        failed = [call.error for call in self._calls if call.error is not None]
        if failed:
            if len(failed) > 1:
                failed[0].add_note(f"{len(failed)} of the batch's {len(self._calls)} calls failed; this is the first")
            raise failed[0]

    def _call(self, name: str, arrays: tuple[Any, ...], **options: Any) -> PendingCall:
        call = PendingCall(name, arrays, options)
        self._calls.append(call)
        return call

    def _finish(self) -> None:
        """Group the calls and run each group; start a new group where the next call would pass the memory limit."""
        groups: dict[tuple[Any, ...], list[_Member]] = {}
        held_bytes = 0
        for call in self._calls:
            try:
                arrays, inputs, result = self._check(call.name, call.arrays, call.options)
                needed = inputs + max(inputs, result)  # joined inputs take as much, and go before the results come
                if self._limit is not None and held_bytes + needed > self._limit:
                    self._run_groups(groups)
                    groups, held_bytes = {}, 0
                member = _Member(call, arrays, *self._move(call.name, arrays))
                key = _key(call, member.tensors)
            except Exception as error:  # noqa: BLE001 - raised at the end of the block
                call.fail(error)
                continue
            groups.setdefault(key, []).append(member)
            held_bytes += needed
        self._run_groups(groups)

    def _run_groups(self, groups: dict[tuple[Any, ...], list[_Member]]) -> None:
        for members in groups.values():
            if len(members) == 1 or not self._run_joined(members):
                for member in members:
                    call = member.call
                    try:
                        tensors = member.tensors or self._move(call.name, member.arrays)[0]
                        self._succeed(call, member.origin, self._run(call.name, tensors, call.options, 1))
                        self.launches += 1
                    except Exception as error:  # noqa: BLE001 - as above
                        call.fail(error)
                    member.tensors = ()

    def _succeed(self, call: PendingCall, origin: ArrayOrigin, tensor: Results) -> None:
        """Set a call's result. Under a memory limit it leaves the device now, if its inputs came from elsewhere."""
        if self._limit is None:
            call.succeed(partial(origin.wrap, tensor))
            return
        try:
            value = origin.wrap(tensor)
        except Exception as error:  # noqa: BLE001 - as above
            call.fail(error)
        else:
            call.succeed(lambda: value)

    def _run_joined(self, members: list[_Member]) -> bool:
        """Run calls as one; False if that failed, so that each is to run by itself and show which is at fault."""
        first = members[0].call
        try:
            joined, split = _join(first.name, [member.tensors for member in members])
            for member in members:
                member.tensors = ()
            results = split(*tensors_of(self._run(first.name, joined, first.options, len(members))))
        except TimeLimitExceeded as error:
            for member in members:
                member.call.fail(error)
            return True
        except Exception:  # noqa: BLE001 - each call then raises its own
            return False
        self.launches += 1
        for member, result in zip(members, results, strict=True):
            self._succeed(member.call, member.origin, result)
        return True


def _key(call: PendingCall, tensors: Tensors) -> tuple[Any, ...]:
    """Return the key that calls share which become one."""
    merge = METHODS[call.name].merge
    first, rest = tensors[0], tensors[1:]
    kinds = tuple((x.dtype, x.device) for x in tensors)
    common = (call.name, str(sorted(call.options.items())), kinds)
    if merge == "elements" and all(x.shape == first.shape for x in rest):
        return common
    last = call.options.get("dim", -1) in (-1, first.ndim - 1)
    if merge == "rows" and first.ndim and last:
        return (*common, first.shape[-1], *(id(array) for array in call.arrays[1:]))
    if merge == "stack" and all(x.ndim == 2 for x in tensors):
        return (*common, *(tuple(x.shape) for x in tensors))
    return (*common, id(call))


def _join(name: str, calls: list[Tensors]) -> tuple[Tensors, Callable[[torch.Tensor], list[torch.Tensor]]]:
    """Return the arguments of one call for all, and the function that splits its result."""
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

    def split(y: torch.Tensor) -> list[torch.Tensor]:
        parts = zip(y.split(sizes), shapes, strict=True)  # a row's result may have another width
        return [part.reshape(shape if merge == "elements" else (*shape[:-1], part.shape[-1])) for part, shape in parts]

    return joined, split
