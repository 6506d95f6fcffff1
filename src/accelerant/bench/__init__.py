"""Benchmarks: timers, records, comparison with a baseline, suites and reports."""

from accelerant.bench.compare import Comparison, compare
from accelerant.bench.record import Environment, Record, Row
from accelerant.bench.timer import Timing, host_time_us, time_ms, wall_ms

__all__ = ["Comparison", "Environment", "Record", "Row", "Timing", "compare", "host_time_us", "time_ms", "wall_ms"]
