"""Device memory: limits, owners, predicted and measured peaks, batch sizes that fit."""

from accelerant._lazy import lazy

TYPE_CHECKING = False  # of typing, whose import takes long: see accelerant/__init__.py
if TYPE_CHECKING:
    from accelerant.runtime.memory.limits import *
    from accelerant.runtime.memory.peak import *

__all__ = [
    "BatchSizeSearch", "LiveSet", "MemoryOwner", "MemoryStatistics", "PeakComparison", "PeakPrediction", "PeakRecord",
    "allocate", "apply_limit", "available_bytes", "bytes_asked_by", "compare_peak", "describe_out_of_memory",
    "is_out_of_memory", "largest_owners", "limit", "optimal_batch_size", "peak_recorded", "predict_peak", "size_text",
    "statistics", "trim",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, __all__, ("limits", "peak"))
