"""Transforms of words at a place: plans, kept with their twiddles, and the ledger.

Words are what algebra/field/places.py keeps, every element below the modulus, canonical or in Montgomery form: a
transform is a sum of products with constants, so it leaves either form as it is.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from accelerant.algebra.counted import counted
from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.places import HOST, Place
from accelerant.algebra.field.words import dtype_of, element_shape
from accelerant.algebra.ntt.device import DevicePasses
from accelerant.algebra.ntt.host import HostPasses
from accelerant.runtime.ledger import OpRecord, ledger

__all__ = ["LOG_MOST", "transform"]

LOG_MOST = 27
"""Log2 of the points of a transform, at most."""

Plan = HostPasses | DevicePasses

_TABLES_LIMIT_BYTES = 2 * 1024**3
"""Of the tables of all plans kept; twiddles of 2^24 points of four words are 512 MiB."""

_PLANS_LIMIT = 256
"""Plans kept, at most: small ones, of a new coset each time, are 2 KB beside their tables and would pile up."""

_RECORDS_LIMIT = 4096


def transform(place: Place, field: Field, x: Any, *, inverse: bool, coset: int, order: str, out: Any = None) -> Any:
    """Transforms along the last axis of the elements' shape; see accelerant.zk.ntt.

    Args:
        place: where the words are.
        field: of the elements.
        x: words; the last axis of the elements' shape has 2^k points, k from 1 to LOG_MOST.
        inverse: the inverse transform.
        coset: g, not 0; 1 for none.
        order: one of plan.ORDERS.
        out: words for the answer, which may be x; new ones by default.
    """
    shape = element_shape(field, x.shape)
    n, batch = shape[-1], math.prod(shape[:-1])
    out = place.empty(tuple(x.shape), dtype_of(field)) if out is None else out
    if not batch:
        return out
    plan = _plan(place, field, n.bit_length() - 1, math.gcd(batch, 16), inverse, coset, order)
    with counted(place, _record(place, field, tuple(shape), inverse, coset != 1, order)):
        run(plan, place, x, out, n * batch)
    if plan.given_up:  # by another thread, whose wait for the device may have come before these launches
        place.provider.synchronize(place.index)
    return out


def run(plan: Plan, place: Place, x: Any, out: Any, elements: int) -> None:
    """The passes of a plan; where the last one moves elements, those before it work in memory of their own."""
    last = len(plan.passes) - 1
    moves = not plan.passes[last].in_place
    work = place.empty(tuple(x.shape), dtype_of(plan.field)) if moves else out
    for number in range(last + 1):
        plan.launch(number, x, out if moves and number == last else work, elements)
        x = work


class _Plans:
    """Plans by what they are for; where they or their tables are too many, the longest unused are given up."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Plan] = OrderedDict()
        self._size_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Plan]) -> Plan:
        """The plan of a key, made where there is none: without the lock, since it takes up to seconds.

        Two threads may make the same plan; both get that of the first to be done.
        """
        plan = self._known(key)
        if plan is not None:
            return plan
        made = make()
        with self._lock:
            plan = self._kept.setdefault(key, made)
            self._kept.move_to_end(key)
            self._size_bytes += made.size_bytes * (plan is made)
            given_up = list(self._beyond_limits())
        for each in given_up:
            each.give_up()
        return plan

    def _known(self, key: Hashable) -> Plan | None:
        with self._lock:
            plan = self._kept.get(key)
            if plan is not None:
                self._kept.move_to_end(key)
            return plan

    def _beyond_limits(self) -> Iterator[Plan]:
        while len(self._kept) > 1 and (self._size_bytes > _TABLES_LIMIT_BYTES or len(self._kept) > _PLANS_LIMIT):
            _, plan = self._kept.popitem(last=False)
            self._size_bytes -= plan.size_bytes
            yield plan


_plans = _Plans()


def _plan(place: Place, field: Field, log_n: int, batch: int, inverse: bool, coset: int, order: str) -> Plan:
    def make() -> Plan:
        if place is HOST:
            return HostPasses(field, log_n, batch, inverse=inverse, coset=coset, order=order)
        return DevicePasses(place, field, log_n, inverse=inverse, coset=coset, order=order)

    return _plans.get((place, field, log_n, batch if place is HOST else 0, inverse, coset, order), make)


@functools.lru_cache(maxsize=_RECORDS_LIMIT)
def _record(place: Place, field: Field, shape: Sequence[int], inverse: bool, coset: bool, order: str) -> OpRecord:
    words = [" inverse" * inverse, " coset" * coset, f" {order}" * (order != "natural")]
    size = math.prod(shape)
    return ledger().record(
        OpRecord(
            op="ntt",
            implementation=next(name for name in ("llvm", "cuda", "portable") if name in place.provider.dialects),
            backend=place.backend,
            device=place.label,
            case=f"{'x'.join(map(str, shape))} {field.name}{''.join(words)}",
            own=True,
            bytes_per_call=2 * size * field.size_bytes,
            flops_per_call=size * (shape[-1].bit_length() - 1) // 2,
            reason=f"the only one on {place.backend}",
        )
    )
