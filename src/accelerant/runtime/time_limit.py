"""A time limit of a block, which long computations in it keep between their parts.

    with time_limit(30, "the proof"):
        y = zk.ntt(x, "bn254_fr")          # TimeLimitExceeded after a pass, if the 30 s are over
        fit(model, data)                   # after a step, which a checkpoint follows

Running work is not interrupted, and no partial result is returned. Transforms check the limit between passes, sums of
multiples between tasks and rows, trainings between steps, an Accelerator's calls between batches of rows. The limit
holds for the thread or asyncio task that entered the block, and for what it submits.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from accelerant._renamed import renamed_arguments
from accelerant.errors import ConfigError, TimeLimitExceeded

__all__ = ["check_time", "is_limited", "time_limit"]


class _Limit(NamedTuple):
    name: str
    timeout_s: float
    began_s: float


_limit: ContextVar[_Limit | None] = ContextVar("time_limit", default=None)


@renamed_arguments(timeout_s="timeout")
@contextmanager
def time_limit(timeout: float | None, name: str = "the block") -> Iterator[None]:
    """Limit the time of a block; of two nested limits the one that ends earlier holds.

    Args:
        timeout: seconds from now, above 0; None for no further limit.
        name: of the block, for the error.

    Raises:
        ConfigError: timeout is not above 0.
        TimeLimitExceeded: in the block, says how far it came.
    """
    if timeout is None:
        yield
        return
    if isinstance(timeout, bool) or not timeout > 0:
        raise ConfigError(f"timeout must be above 0, or None for no limit; got {timeout!r}")
    new, outer = _Limit(name, timeout, time.monotonic()), _limit.get()
    ends_first = outer is None or new.began_s + timeout < outer.began_s + outer.timeout_s
    token = _limit.set(new if ends_first else outer)
    try:
        yield
    finally:
        _limit.reset(token)


def is_limited() -> bool:
    """Return whether a limit is in force, so that long work is to be divided."""
    return _limit.get() is not None


def check_time(reached: str, wait: Callable[[], object] | None = None) -> None:
    """Raise TimeLimitExceeded if the time, with that of `wait`, is over; `reached` says "after 2 of 3 passes"."""
    if (limit := _limit.get()) is None:
        return
    if wait is not None:
        wait()
    if (spent := time.monotonic() - limit.began_s) > limit.timeout_s:
        raise TimeLimitExceeded(f"{limit.name}: {spent:.3g} s of at most {limit.timeout_s:g} s {reached}")
