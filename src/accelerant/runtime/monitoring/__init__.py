"""State of the devices: load, memory, power, temperature, peers."""

from accelerant._lazy import lazy

TYPE_CHECKING = False  # of typing, whose import takes long: see accelerant/__init__.py
if TYPE_CHECKING:
    from accelerant.runtime.monitoring.monitor import *
    from accelerant.runtime.monitoring.readers import *

__all__ = [
    "DeviceEvent", "EventKind", "KernelTime", "Measurement", "OpEnergy", "ProcessMemory", "Sample", "event_counts",
    "events_between", "free_memory", "measure", "peer_access", "publish", "sample", "subscribe", "to_prometheus",
    "watch_devices",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, __all__, ("monitor",))
