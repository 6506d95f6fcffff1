"""Benchmarks: timers, records, comparison with a baseline, suites and reports."""

from typing import TYPE_CHECKING

from accelerant._renamed import renamed_names
from accelerant.bench.record import BenchmarkRecord, Environment, Row
from accelerant.bench.report import Comparison, compare
from accelerant.bench.timer import Timing, host_time_us, time_ms, wall_ms

__all__ = [
    "BenchmarkRecord",
    "Comparison",
    "Environment",
    "Row",
    "Timing",
    "compare",
    "host_time_us",
    "time_ms",
    "wall_ms",
]

if not TYPE_CHECKING:  # a type checker reports the names that are not there
    __getattr__ = renamed_names(__name__, {"Record": "accelerant.bench.BenchmarkRecord"})
