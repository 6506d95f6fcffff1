"""The suite secagg: a small one for real."""

from accelerant.bench.record import BenchmarkRecord, Environment
from accelerant.bench.suite import SuiteRun
from accelerant.runtime import registry
from benchmarks.secagg import SecaggSuite


def test_masks_cancel_and_are_timed():
    cpu = registry.find_device("cpu")
    suite = SecaggSuite(clients=3, size=1000, budget_s=0.0).resolve(cpu)
    record = BenchmarkRecord(Environment.of(cpu), {"copy GB/s": 1.0})
    suite.measure(SuiteRun(cpu, record))
    assert [row.runner for row in record.rows] == ["accelerant", "numpy"]
    assert all(row.case == "3 clients, 1,000 elements" and row.p50 > 0 and suite.covers(row) for row in record.rows)
