"""Calls without a choice in the ledger: where an op has one implementation for each backend.

This is dispatch without torch, which runtime/dispatch.py needs; ledger and `explain` see such a call like any op's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from accelerant.algebra.field.places import Place
from accelerant.runtime.ledger import OpRecord, ledger

__all__ = ["counted"]


@contextmanager
def counted(place: Place, record: OpRecord) -> Iterator[None]:
    """Count and now and then time what the block launches.

    Args:
        place: where.
        record: the ledger's own, as `ledger().record` gives it; callers keep it, since it is found by all its fields.

    Raises:
        DeviceLost: the block raised, and the device is of no more use to this process.
    """
    provider, book = place.provider, ledger()
    start = book.begin(record, provider, place.index)
    try:
        yield
    except Exception as error:
        book.failed(record)
        lost = provider.lost(error)
        if lost is None:
            raise
        raise lost from error
    if start is not None:
        book.end(record, start, provider, place.index)
    decisions = sys.modules.get("accelerant.runtime.dispatch.decisions")
    if decisions is not None and decisions.observers:
        decision = decisions.Decision(
            op=record.op,
            case=record.case,
            device=record.device,
            implementation=record.implementation,
            own=True,
            refused=(),
            not_tried=(),
            reason=record.reason,
        )
        for observer in list(decisions.observers):
            observer(decision)
