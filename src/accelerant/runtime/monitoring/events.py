"""Events of devices: slowed clocks, memory errors, a lost device; as callbacks and as counts.

>>> with watch_devices(lambda event: log.warning("%s", event)):
...     serve()
>>> event_counts()                                  # {("cuda:0", "slow_down"): 2}

A watch reads the devices' figures at intervals, in a thread of its own. A DeviceLost error of this process is an event
as well, without a watch, for the functions given to `subscribe`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from accelerant.errors import ConfigError
from accelerant.runtime.files import JsonRecord
from accelerant.runtime.host import fork_safe

if TYPE_CHECKING:
    from accelerant.runtime.monitoring.monitor import Sample
    from accelerant.runtime.registry import DeviceLike

EventKind = Literal["slow_down", "ecc_corrected", "ecc_uncorrected", "lost"]


@dataclass(frozen=True, slots=True)
class DeviceEvent(JsonRecord):
    """Something that happened to a device.

    Attributes:
        device: "cuda:0", or the backend ("cuda") where an error names no device.
        kind: "slow_down" when a device begins to lower its clocks; "ecc_corrected" and "ecc_uncorrected" for new errors
            of its memory; "lost" when it can no longer be used, once for each device.
        detail: the reasons ("power", "thermal"), the number of new errors, or the error's text.
        time_s: seconds since 1970.
    """

    device: str
    kind: EventKind
    detail: str
    time_s: float

    def __str__(self) -> str:
        return f"{self.device} {self.kind}: {self.detail}"


_lock = fork_safe(threading.RLock())
_counts: Counter[tuple[str, str]] = Counter()
_listeners: list[Callable[[DeviceEvent], None]] = []


def publish(device: str, kind: EventKind, detail: str) -> None:
    """Count an event and call the listeners, in this thread; their errors are logged. A device is lost only once."""
    with _lock:
        if kind == "lost" and _counts[device, kind]:
            return
        _counts[device, kind] += 1
        listeners = list(_listeners)
    event = DeviceEvent(device, kind, detail, time.time())
    for listener in listeners:
        try:
            listener(event)
        except Exception:
            logging.getLogger("accelerant").exception("a listener failed for the event %s", event)


def event_counts() -> dict[tuple[str, str], int]:
    """Return the events of this process so far, by device and kind."""
    with _lock:
        return {key: count for key, count in _counts.items() if count}


@contextmanager
def subscribe(listener: Callable[[DeviceEvent], None]) -> Iterator[None]:
    """Call a function with each event of a block of code, in the thread that finds it."""
    with _lock:
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)


def events_between(before: Sample, now: Sample) -> list[tuple[EventKind, str]]:
    """Return the kinds and details of what happened to a device between two samples."""
    found: list[tuple[EventKind, str]] = []
    began = sorted(set(now.slow_down or ()) - set(before.slow_down or ()))
    if began:
        found.append(("slow_down", ", ".join(began)))
    for kind in ("ecc_corrected", "ecc_uncorrected"):
        new = (getattr(now, kind) or 0) - (getattr(before, kind) or 0)
        if new > 0 and getattr(before, kind) is not None:
            found.append((kind, f"{new} new"))
    lost = next((reason for reason in now.reasons.values() if _is_loss(reason)), "")
    if lost and not any(map(_is_loss, before.reasons.values())):
        found.append(("lost", lost))
    return found


def _is_loss(reason: str) -> bool:
    """Return whether a reason is NVML's for a device that fell off the bus, or needs a reset."""
    return "GPU is lost" in reason or "GPU requires re" in reason  # reset or restart, by version


@contextmanager
def watch_devices(
    listener: Callable[[DeviceEvent], None] | None = None, devices: DeviceLike | Iterable[DeviceLike] = None,
    interval_s: float = 1.0, samples: Callable[[Sample], None] | None = None,
) -> Iterator[None]:  # fmt: skip
    """Read devices at intervals during a block of code, and count their events; call a function with each.

    Args:
        listener: called in the watching thread, or in the one that loses a device. Without one, events are counted.
        devices: to read; by default the available ones.
        interval_s: seconds between two readings, above 0 to 3600. A slow-down that ends sooner may pass unseen.
        samples: called with each reading, which has no processes, in the watching thread and before the block.

    Raises:
        ConfigError: the interval is not in that range.
        BackendUnavailable: a device is the entry of an absent backend.
    """
    if not (math.isfinite(interval_s) and 0.0 < interval_s <= 3600.0):
        raise ConfigError(f"interval_s must be above 0 to 3600 seconds, got {interval_s}")
    from accelerant.runtime import registry
    from accelerant.runtime.monitoring.monitor import sample

    available = [device for device in registry.devices() if device.available] if devices is None else devices
    watched = registry.find_devices(available)
    latest: dict[str, Sample] = {}

    def read() -> None:
        for device in watched:
            now = sample(device, processes=False)
            for kind, detail in events_between(latest.get(device.label, now), now):
                publish(device.label, kind, detail)
            latest[device.label] = now
            if samples is not None:
                samples(now)

    read()
    with subscribe(listener or (lambda event: None)):
        try:
            with every(interval_s, read, "accelerant-events"):
                yield
        finally:
            read()


@contextmanager
def every(interval_s: float, call: Callable[[], object], name: str) -> Iterator[None]:
    """Call a function at intervals during a block of code, in a thread of a name."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(interval_s):
            call()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
