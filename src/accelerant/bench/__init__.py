"""Measures what stands below it, beside its peers, in one run."""

from accelerant.bench.record import Environment, Record, Row, compare
from accelerant.bench.timer import Timing, host_time_us, time_ms

__all__ = ["Environment", "Record", "Row", "Timing", "compare", "host_time_us", "time_ms"]
