"""Many small calls in few launches, and one large call in parts, one after the other or on several GPUs.

>>> with acc.batch() as batch:
...     answers = [batch.gelu(x) for x in xs]        # recorded, not run
>>> [answer.result() for answer in answers]          # run at the end of the block

Small calls of the same operation with the same options become one call on joined arrays, as far as the operation allows
(ArrayMethod.merge), and the results are views of its result. A recorded call may be an argument of a later one. All
calls run, then the end of the block raises the first error. Results have the bits of single calls, except where sums
depend on the shape of a call (products, convolutions, attention) or measured choices differ by size (docs/choices.md).

A large call is divided by rows, images, attention's heads, transforms of a batch, or points of a sum of multiples. Each
GPU has a thread, which launches on the caller's current stream of that GPU. `devices_worth_using` weighs the work
against the copies.
"""

from __future__ import annotations

import contextvars
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from accelerant._renamed import renamed_arguments
from accelerant.accelerator import methods
from accelerant.accelerator.methods import METHODS, ArrayOrigin, Results, Tensors, joined_arguments, tensors_of
from accelerant.algebra.field.field import prime_field
from accelerant.errors import AccelerantError, ConfigError, ShapeError, TimeLimitExceeded, UnsupportedCase
from accelerant.zk.elliptic_curve import curve as curve_named

_PEER_BYTES_PER_S, _HOST_BYTES_PER_S = 2e11, 2.5e10
"""Speeds of a GPU's links to another one and to the host's pageable memory."""

_PART_S = 2e-4  # cost of a part: a thread that launches, and copies that wait for each other


@dataclass(frozen=True, slots=True)
class Split:
    """A call divided along the first dimension of its first `count` tensors, or the points of a sum on a `curve`."""

    tensors: Tensors
    count: int
    shape: tuple[int, ...]
    curve: str = ""

    @property
    def rows(self) -> int:
        """The number of rows, images, heads, transforms or points."""
        return math.prod(self.shape)

    def part(self, low: int, high: int) -> Tensors:
        """Return the arguments of some rows."""
        if self.curve:
            return self.tensors[0][..., low:high, :], self.tensors[1][low:high]
        return *[x[low:high] for x in self.tensors[: self.count]], *self.tensors[self.count :]

    def joined(self, parts: Iterable[Tensors]) -> Results:
        """Return the results of all rows, from those of consecutive parts."""
        if self.curve:
            group = curve_named(self.curve)
            return torch.as_tensor(functools.reduce(group.add, [total for (total,) in parts]))
        whole: list[torch.Tensor] = []
        low = 0
        for part in parts:
            whole = whole or [y.new_empty((self.rows, *y.shape[1:])) for y in part]
            high = low + part[0].shape[0]
            for target, y in zip(whole, part, strict=True):
                target[low:high] = y
            low = high
        if len(self.shape) > 1:
            whole = [y.reshape(*self.shape, *y.shape[2:]) for y in whole]
        return whole[0] if len(whole) == 1 else tuple(whole)


def split_along_rows(name: str, tensors: Tensors, options: Mapping[str, Any], *, heads: bool = True) -> Split | None:
    """Return a call as one that divides into parts, with `heads` attention's, too; None for one that cannot."""
    method, first = METHODS[name], tensors[0]
    if name == "msm" and first.ndim in (2, 3) and first.shape[-2:-1] == tensors[1].shape[:1]:
        return Split(tensors, 2, (first.shape[-2],), options.get("curve", methods.DEFAULT_CURVE))
    if name == "ntt" and first.ndim > 1 + (prime_field(options.get("field", methods.DEFAULT_FIELD)).limbs > 1):
        return Split(tensors, 1, (first.shape[0],))
    if method.merge in (None, "stack") or (method.whole is not None and method.whole(tensors, options)):
        return None
    count = methods.joined_arguments(name, tensors, options)
    one_row = first.ndim < 2 and (method.merge == "rows" or count < len(tensors))
    if not count or not first.ndim or (one_row and method.merge != "first"):
        return None
    if heads and name == "attention" and len({x.shape[1] for x in tensors}) == 1 and first.numel():
        each = tuple([x.reshape(-1, 1, *x.shape[2:]) for x in tensors])
        return Split(each, count, tuple(first.shape[:2]))
    return Split(tensors, count, (first.shape[0],))


# --- several devices -------------------------------------------------------------------------------------------------
def work_s(name: str, tensors: Tensors, options: Mapping[str, Any]) -> float:
    """Return the seconds that a call's work takes on one GPU, roughly."""
    spec = METHODS[name]
    return max(spec.flops(tensors, tensors[0], **options) / spec.per_s, sum(x.nbytes for x in tensors) / 4e12)


def devices_worth_using(seconds: float, size_bytes: int, rows: int, most: int, *, on_host: bool) -> int:
    """Return the number of devices, 1 to `most`, with which a call of `seconds` on one of them ends first.

    Arguments and result, of `size_bytes`, travel from the host over a link of each device, or from the first device.
    """

    def total_s(count: int) -> float:
        if on_host:
            copies = size_bytes / count / _HOST_BYTES_PER_S
        else:
            copies = size_bytes * (count - 1) / count / _PEER_BYTES_PER_S
        return seconds / count + copies + (count * _PART_S if count > 1 else 0.0)

    return min(range(1, max(1, min(rows, most)) + 1), key=total_s)


def run_on_devices(name: str, cut: Split, options: Mapping[str, Any], devices: Sequence[torch.device]) -> Results:
    """Run the parts of a call at once, one on each device; return the joined result where the arguments are."""
    home = cut.tensors[0].device
    bounds = [cut.rows * i // len(devices) for i in range(len(devices) + 1)]
    # Copies in the caller's thread, so that they follow what made the arguments.
    parts = [
        tuple(x.to(device, non_blocking=True) for x in cut.part(low, high))
        for device, (low, high) in zip(devices, pairwise(bounds), strict=True)
    ]
    streams = [torch.cuda.current_stream(device) if device.type == "cuda" else None for device in devices]

    def run(part: Tensors, stream: torch.cuda.Stream | None) -> Tensors:
        on_stream = nullcontext() if stream is None else torch.cuda.stream(stream)
        with torch.no_grad(), on_stream:
            return methods.tensors_of(METHODS[name].run(*part, **options))

    with ThreadPoolExecutor(len(devices), "accelerant-split") as threads:
        tasks = [
            threads.submit(contextvars.copy_context().run, run, part, stream)
            for part, stream in zip(parts, streams, strict=True)
        ]
        results = [task.result() for task in tasks]
    with torch.no_grad():
        return cut.joined(tuple(y.to(home) for y in result) for result in results)


_SMALL_BYTES = {"cpu": 1 << 16}
_SMALL_BYTES_ELSEWHERE = 1 << 22
"""Largest input that is joined with others. Joining reads and writes it once more, which takes longer than the launch
that it saves: a launch takes about 5 us, in which an H200 copies 12 MB and a core 30 kB."""

_untracked: Callable[[], Any] = torch._C._AutoDispatchBelowADInplaceOrView
"""Context in which views have no record of their base, which autograd would check at each change in place."""


class PendingCall:
    """A recorded call of a batch; `error` is what it raised, None if it succeeded or has not run.

    `index` is its number in the batch, from 0.
    """

    __slots__ = ("_state", "_value", "_wave", "arrays", "error", "index", "name", "options")

    def __init__(self, name: str, arrays: tuple[Any, ...], options: dict[str, Any], index: int = 0) -> None:
        self.name = name
        self.arrays = arrays
        self.options = options
        self.index = index
        self.error: Exception | None = None
        self._state = "this call's batch has not ended yet"
        self._value: Any = None
        self._wave = 0

    @renamed_arguments(timeout_s="timeout")
    def result(self, timeout: float | None = None) -> Any:
        """Return the result, in the kind of the inputs; or raise the call's error, or AccelerantError in its batch.

        There is nothing to wait for; the `timeout` of other futures is accepted.
        """
        if self.error is not None:
            raise self.error
        if self._state:
            raise AccelerantError(f"{self.name}: {self._state}")
        return self._value

    def __repr__(self) -> str:
        state = "failed" if self.error is not None else "pending" if self._state else "done"
        return f"PendingCall({self.index}, {self.name}, {state})"

    def done(self) -> bool:
        """Return whether the call has run."""
        return self.error is not None or not self._state

    def fail(self, error: Exception) -> None:
        """Set the error that result() raises; for the batch."""
        error.add_note(f"raised by call {self.index} of the batch, {self.name}")
        self.error = error


_Member = tuple[PendingCall, Tensors, ArrayOrigin]
"""A call of a group, its arrays as tensors where they are, and what they were."""


class Batch(methods.Operations):
    """Records calls until its block ends, then runs them in `launches` groups; see Accelerator.batch().

    `check` checks a call and returns its arrays, encoded if they are numbers, and the bytes of inputs and result. `run`
    moves tensors to the device and runs an operation that stands for a number of calls, or these calls in turn. A batch
    whose inputs, joined copies and results pass memory_limit_bytes runs in several parts.
    """

    def __init__(
        self, check: Callable[[str, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], int, int]],
        run: Callable[[str, Tensors, dict[str, Any], int, bool], Results], device_type: str = "cpu",
        memory_limit_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self._check, self._run = check, run
        self._device_type, self._limit = device_type, memory_limit_bytes
        self._calls: list[PendingCall] = []
        self._known: dict[tuple[Any, ...], tuple[tuple[Any, ...] | None, int, ArrayOrigin]] = {}  # by signature
        self._ended = False
        self.launches = 0

    def __repr__(self) -> str:
        return f"Batch({len(self._calls)} calls, {self.launches} launches)"

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._ended = True
        if error is not None:
            self._leave()
            return
        try:
            self._run_calls()
        except BaseException:
            self._leave()
            raise
        if failed := [call.error for call in self._calls if call.error is not None]:
            if len(failed) > 1:
                failed[0].add_note(f"{len(failed)} of the batch's {len(self._calls)} calls failed; this is the first")
            raise failed[0]

    def _leave(self) -> None:
        for call in self._calls:
            if call._state:
                call._state = "its batch was left by an error before this call ran"

    def _run_calls(self) -> None:
        """Run the calls: first those whose arguments are there, then those that need their results, and so on."""
        waves: dict[int, list[PendingCall]] = {}
        for call in self._calls:
            for x in call.arrays:
                if type(x) is PendingCall and x._wave >= call._wave and not x.done():
                    call._wave = x._wave + 1
            waves.setdefault(call._wave, []).append(call)
        for wave in sorted(waves):
            self._run_wave(waves[wave])

    def _call(self, name: str, arrays: tuple[Any, ...], options: dict[str, Any]) -> PendingCall:
        if self._ended:
            raise AccelerantError(f"{name}: this batch has ended; make a new one")
        call = PendingCall(name, arrays, options, len(self._calls))
        self._calls.append(call)
        return call

    def _run_wave(self, calls: list[PendingCall]) -> None:
        """Group the calls and run each group; start new groups where the next call would pass the memory limit."""
        groups: dict[tuple[Any, ...], list[_Member]] = {}
        alike: dict[tuple[Any, ...], list[_Member]] = {}  # by signature, for calls that share and check no argument
        held_bytes = 0
        for call in calls:
            signature = _signature(call, call.arrays)
            if (members := alike.get(signature)) is not None:
                members.append((call, call.arrays, members[0][2]))
                continue
            try:
                arrays, needed = call.arrays, 0
                for x in arrays:
                    if type(x) is PendingCall:
                        arrays = call.arrays = tuple(_value_of(x) for x in arrays)
                        break
                if checked := self._limit is not None or METHODS[call.name].prepare is not None:
                    arrays, inputs, result = self._check(call.name, arrays, call.options)
                    needed = inputs + max(inputs, result)  # joined inputs take as much
                    if self._limit is not None and held_bytes + needed > self._limit:
                        self._run_groups(groups)
                        groups, held_bytes = {}, 0
                if checked or not signature:
                    signature = _signature(call, arrays)  # of results of other calls, or of encoded numbers
                key, member, joined = self._grouped(call, arrays, signature)
            except Exception as error:  # noqa: BLE001 - raised at the end of the block
                call.fail(error)
                continue
            held_bytes += needed
            members = groups.setdefault(key, [])
            members.append(member)
            if joined and signature and not checked:
                alike[signature] = members
        self._run_groups(groups)

    def _grouped(
        self, call: PendingCall, arrays: tuple[Any, ...], signature: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], _Member, bool]:
        """Return the key of calls that become one with this one, its call on tensors, and whether all these join."""
        if (known := self._known.get(signature)) is None:
            tensors, origin = methods.to_tensors(call.name, arrays, None)
            known = (*self._key(call, tensors, origin), origin)
            if signature:
                self._known[signature] = known
        else:
            tensors, origin = arrays, known[2]
        key, count, _ = known
        if key is None:
            return (call.index,), (call, tensors, origin), False
        if count < len(arrays):  # the others are shared
            return (*key, *map(id, arrays[count:])), (call, tensors, origin), False
        return key, (call, tensors, origin), True

    def _key(self, call: PendingCall, tensors: Tensors, origin: ArrayOrigin) -> tuple[tuple[Any, ...] | None, int]:
        """Return the key of the calls that become one, None for a call by itself, and how many arguments are joined."""
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise UnsupportedCase(
                f"{call.name}: a batch records no gradient, which an argument requires: call "
                f"accelerant.ops.{call.name}, or end the batch under torch.no_grad()"
            )
        count, first = joined_arguments(call.name, tensors, call.options), tensors[0]
        if not count or first.nbytes > _SMALL_BYTES.get(first.device.type, _SMALL_BYTES_ELSEWHERE):
            return None, 0
        kinds = tuple((x.dtype, x.device) for x in tensors)
        key = (call.name, str(sorted(call.options.items())), origin.kind, count, kinds)
        if (merge := METHODS[call.name].merge) == "elements" and count == len(tensors):
            return key, count
        if merge in ("first", "stack"):
            return (*key, *[x.shape if merge == "stack" else x.shape[1:] for x in tensors[:count]]), count
        return (*key, first.shape[-1]), count

    def _run_groups(self, groups: dict[tuple[Any, ...], list[_Member]]) -> None:
        for members in groups.values():
            if len(members) == 1 or not self._run_together(members):
                for call, tensors, origin in members:
                    try:
                        self._succeed(
                            [(call, tensors, origin)], [self._run(call.name, tensors, call.options, 1, False)]
                        )
                        self.launches += 1
                    except Exception as error:  # noqa: BLE001 - as above
                        call.fail(error)

    def _run_together(self, members: list[_Member]) -> bool:
        """Run calls as one; False if that failed, so that each is to run by itself and show which is at fault."""
        try:
            results = self._run_joined(members)
        except TimeLimitExceeded as error:
            members[0][0].fail(error)
            for call, _, _ in members:
                call.error = error
            return True
        except Exception:  # noqa: BLE001 - each call then raises its own
            return False
        self.launches += 1
        self._succeed(members, results)
        return True

    def _run_joined(self, members: list[_Member]) -> Sequence[Results]:
        """Return the results of calls that run as one, on the devices of their inputs."""
        first, first_tensors, origin = members[0]
        name, options = first.name, first.options
        if METHODS[name].uneven and self._device_type == "cpu":
            every = tuple([x for _, tensors, _ in members for x in tensors])
            return [y.to(origin.device) for y in tensors_of(self._run(name, every, options, len(members), True))]
        count = joined_arguments(name, first_tensors, options)
        joined, split = _join(name, [tensors for _, tensors, _ in members], count)
        results = tensors_of(self._run(name, joined, options, len(members), False))
        del joined
        with torch.no_grad(), _untracked():
            columns = [split(y.to(origin.device)) for y in results]
        return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))

    def _succeed(self, members: list[_Member], results: Sequence[Results]) -> None:
        """Set the results of calls."""
        for (call, _, origin), result in zip(members, results, strict=True):
            try:
                call._value = result if origin.kind == "torch" else origin.wrap(result)
                call._state = ""
            except Exception as error:  # noqa: BLE001 - as above
                call.fail(error)


def _signature(call: PendingCall, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what is equal for calls of one kind on plain tensors that need no gradient; empty for others."""
    signature: tuple[Any, ...] = (call.name, id(call.options))
    for x in arrays:
        if type(x) is not torch.Tensor or x.requires_grad:
            return ()
        signature += (x.dtype, x.device, x.shape)
    return signature


def _value_of(x: Any) -> Any:
    """Return an argument, or the result of a call that stands for it."""
    if type(x) is not PendingCall:
        return x
    if x.error is not None:
        raise AccelerantError(f"an argument is the result of call {x.index}, {x.name}, which failed") from x.error
    value = x.result()
    if isinstance(value, tuple):
        raise ConfigError(f"an argument is the result of call {x.index}, {x.name}, which returns {len(value)} arrays")
    return value


def _join(
    name: str, calls: list[Tensors], count: int
) -> tuple[Tensors, Callable[[torch.Tensor], Sequence[torch.Tensor]]]:
    """Return the arguments of one call for all, and the function that splits its result; `count` are joined."""
    merge = METHODS[name].merge
    firsts = [tensors[0] for tensors in calls]
    shape, shared = firsts[0].shape, calls[0][count:]
    columns = list(zip(*calls, strict=True))[:count]
    if [x.shape for x in firsts].count(shape) == len(firsts):
        if merge == "elements" and shape and not shared:  # flat: measured choices depend on the shape
            flat = tuple([torch.cat(column).view(-1) for column in columns])
            return flat, lambda y: y.view(len(calls), *shape).unbind(0)
        if merge == "stack" or len(shape) < 2:
            return (*map(torch.stack, columns), *shared), lambda y: y.unbind(0)
        joined = (*map(torch.cat, columns), *shared)
        return joined, lambda y: y.view(len(calls), y.shape[0] // len(calls), *y.shape[1:]).unbind(0)
    shapes = [x.shape for x in firsts]
    if merge == "first":
        return (*map(torch.cat, columns), *shared), lambda y: y.split([shape[0] for shape in shapes])
    if merge == "elements" and not shared:
        row: tuple[int, ...] = ()
    elif merge in ("elements", "rows"):
        row = shape[-1:]
    else:
        raise ShapeError(f"calls of {name} cannot be joined")
    sizes = [shape[: len(shape) - len(row)].numel() for shape in shapes]
    joined = tuple([torch.cat([x.reshape(-1, *row) for x in column]) for column in columns])

    def split(y: torch.Tensor) -> list[torch.Tensor]:
        parts = zip(y.split(sizes), shapes, strict=True)  # a row's result may have another width, or none
        return [part.reshape(*shape[: len(shape) - len(row)], *part.shape[1:]) for part, shape in parts]

    return (*joined, *shared), split
