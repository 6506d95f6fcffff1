"""Each suite runs for real on the CPU, with hardly any time for each figure."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from accelerant.algebra.field.parameters import field_of
from accelerant.bench import BenchmarkRecord, Environment, Row, neural, suites, timer
from accelerant.bench.suite import SuiteCase, SuiteRun, measure_cases, run_suite, same_on_cpu
from accelerant.bench.suites import AlgebraSuite, BandwidthSuite, RuntimeSuite
from accelerant.bench.timer import cpu_time_ms
from accelerant.errors import AccelerantError, ConfigError
from accelerant.ops.registry import Benchmark, SampleInput
from accelerant.runtime import registry
from accelerant.runtime.provider import ComputeDevice
from accelerant.runtime.streams.transfer import ChunkedRun
from clock import Clock


@pytest.fixture(autouse=True)
def _quick(one_thread):
    pass


@pytest.fixture
def cpu():
    return registry.find_device("cpu")


# --- bandwidth -------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_bandwidth_has_every_direction_and_size(cpu):
    record = run_suite(BandwidthSuite(size=("1000B", "1MiB"), budget_s=0.0), cpu)
    assert {(row.op, row.case, row.runner) for row in record.rows} == {
        entry
        for size in ("1000 B", "1 MiB")
        for entry in (
            ("host to device", f"{size} pageable", "device"),
            ("host to device", f"{size} pageable", "accelerant"),
            ("device to host", f"{size} pageable", "device"),
            ("device to host", f"{size} to a new array", "device"),
            ("device to host", f"{size} to a new array", "accelerant"),
            ("device copy", size, "device"),
        )
    }
    assert all(row.p20 <= row.p50 <= row.p80 and row.percent_of_ceiling > 0 and row.wall_ms for row in record.rows)
    copy = next(row for row in record.rows if row.op == "device copy" and row.case == "1 MiB")
    assert copy.bytes == 2**21
    assert copy.rate_gb_s == pytest.approx(2**21 / copy.p50 / 1e6)
    assert copy.percent_of_ceiling == pytest.approx(100 * copy.rate_gb_s / record.ceilings["copy GB/s"])
    assert any("no pinned memory" in note for note in record.notes)


def test_bandwidth_counts_no_copy_that_brings_other_bytes(cpu, monkeypatch):
    def wrong(array, device):
        return SimpleNamespace(result=lambda: torch.roll(array, 1))

    monkeypatch.setattr(suites, "copy_async", wrong)
    with pytest.raises(AccelerantError, match="by copy_async: other bytes came than were sent"):
        run_suite(BandwidthSuite(size=("4096",), budget_s=0.0), cpu)


def test_sizes_are_read_and_named():
    assert suites.parse_sizes(["1MiB", " 64 kib", "3", "1GiB", "1MiB"]) == (3, 2**16, 2**20, 2**30)
    assert [suites.size_name(size) for size in (3, 2**16, 3 * 2**20, 2**30)] == ["3 B", "64 KiB", "3 MiB", "1 GiB"]


@pytest.mark.parametrize("text", ["", "1MB", "0", "-1MiB", "1.5GiB", "MiB"])
def test_what_is_no_size_is_named(text):
    with pytest.raises(ConfigError, match="wanted sizes like 64KiB"):
        suites.parse_sizes(["1MiB", text])


def test_a_size_beyond_the_memory_is_refused_before_anything_is_allocated(cpu):
    with pytest.raises(ConfigError, match="1048576 GiB needs 6 buffers"):
        run_suite(BandwidthSuite(size=("1048576GiB",), budget_s=0.0), cpu)


# --- algebra ---------------------------------------------------------------------------------------------------------
def test_algebra_stands_beside_numpy_and_torch(cpu, monkeypatch):
    monkeypatch.setattr(suites, "_CPU_SIZES", (4096,))
    record = run_suite(AlgebraSuite(budget_s=0.0, compiled=False), cpu)
    assert [(row.op, row.runner) for row in record.rows] == [
        ("field_add", "accelerant"), ("field_add", "torch"), ("field_add", "numpy"), ("field_add kernel", "accelerant"),
    ]  # fmt: skip
    assert record.rows[0].speedup > 0
    assert all(row.percent_of_ceiling > 0 and row.wall_ms == row.p50 for row in record.rows)
    assert "wall ms" in record.table()


def test_the_peers_of_the_field_are_exact():
    p = field_of("goldilocks").modulus
    x, y = suites.operands(5000)
    assert np.array_equal(x, suites.operands(5000)[0])  # the same in every run
    exact = [(a + b) % p for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    assert {0, 1, p - 1} <= set(x.tolist())
    assert suites._numpy_add(x, y).tolist() == exact
    signed = suites._torch_add(*(torch.from_numpy(each).view(torch.int64) for each in (x, y)))
    assert signed.view(torch.uint64).tolist() == exact


@pytest.mark.slow
def test_a_wrong_sum_is_an_error_and_a_wrong_peer_a_row_without_time(cpu, monkeypatch):
    monkeypatch.setattr(suites, "_CPU_SIZES", (4096,))
    monkeypatch.setattr(suites, "_numpy_add", lambda x, y: x + y)
    row = next(row for row in run_suite(AlgebraSuite(budget_s=0.0, compiled=False), cpu).rows if row.runner == "numpy")
    assert row.p50 is None
    assert "field_add by numpy" in row.note
    monkeypatch.setattr(suites, "_add", lambda x, y: x)
    with pytest.raises(AccelerantError, match="field_add by accelerant"):
        run_suite(AlgebraSuite(budget_s=0.0, compiled=False), cpu)


# --- runtime ---------------------------------------------------------------------------------------------------------
def test_streaming_is_measured_beside_the_same_chunks_in_sequence(cpu):
    record = BenchmarkRecord(Environment.of(cpu))
    rows = suites._streaming(SuiteRun(cpu, record), 0.0)
    assert {"host to device GB/s", "device to host GB/s"} <= set(record.ceilings)
    assert [(row.op, row.runner, row.unit, row.better) for row in rows] == [
        ("stream", "accelerant", "ms", "lower"),
        ("stream", "in sequence", "ms", "lower"),
        ("stream overlap", "accelerant", "x", "higher"),
    ]
    assert 0 < rows[2].p50 <= 3
    assert rows[0].bytes == 2**22
    assert [row.wall_ms == row.p50 for row in rows] == [True, True, False]  # a ratio has none
    assert "compute" in rows[0].note


def test_a_stream_that_computes_something_else_is_an_error(cpu, monkeypatch):
    def wrong(fn, array, *, out, **options):
        out.fill_(1.0)
        return ChunkedRun()

    monkeypatch.setattr(suites, "stream_chunks", wrong)
    with pytest.raises(AccelerantError, match="stream_chunks: relative error"):
        suites._streaming(SuiteRun(cpu, BenchmarkRecord(Environment.of(cpu))), 0.0)


class SmallAccelerator:
    """A batch that does its work at once in one call, each single call late by a tenth of a millisecond."""

    scale = 1.0
    clock = Clock()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def gelu(self, x):
        self.clock.sleep(1e-4)
        return F.gelu(x)

    @contextlib.contextmanager
    def batch(self):
        calls = []

        class Batch:
            def gelu(self, x):
                calls.append(SimpleNamespace(x=x))
                calls[-1].result = lambda call=calls[-1]: call.y
                return calls[-1]

        yield Batch()
        for call, y in zip(calls, F.gelu(torch.stack([call.x for call in calls])).unbind(), strict=True):
            call.y = self.scale * y


def test_the_gain_of_a_batch_is_single_calls_over_merged_ones(monkeypatch, cpu):
    monkeypatch.setattr(suites, "_BATCH_CALLS", 32)
    monkeypatch.setattr(timer, "time", SmallAccelerator.clock)
    run = SuiteRun(cpu, BenchmarkRecord(Environment.of(cpu)), accelerator=SmallAccelerator)
    rows = {(row.op, row.runner): row for row in suites._batches(run, 0.0)}
    merged, single, gain = rows["batch", "accelerant"], rows["batch", "one by one"], rows["batch gain", "accelerant"]
    assert single.p50 > 3.2  # 32 calls of at least 0.1 ms
    assert gain.p50 == pytest.approx(single.p50 / merged.p50)
    assert gain.p20 <= gain.p50 <= gain.p80
    assert gain.p50 > 1
    assert (gain.unit, gain.better) == ("x", "higher")


def test_a_batch_that_differs_is_an_error(cpu):
    class Wrong(SmallAccelerator):
        scale = 2.0

    with pytest.raises(AccelerantError, match=r"batch\(\) gave something else than single calls"):
        suites._batches(SuiteRun(cpu, BenchmarkRecord(Environment.of(cpu)), accelerator=Wrong), 0.0)


# --- the CPU column --------------------------------------------------------------------------------------------------
def test_the_cpu_column_measures_all_rows_where_they_are_quick(monkeypatch):
    monkeypatch.setattr(timer, "_ENOUGH_S", 60.0)
    sizes = []
    x = torch.randn(16, 8)

    def make(rows):
        sizes.append(rows)
        return lambda: x[:rows] + 1

    taken, note = cpu_time_ms(make, 16, budget_s=0.0)
    assert sizes == [1, 16]
    assert taken > 0
    assert note == "1 thread"


def test_the_cpu_column_scales_from_fewer_rows_and_skips_what_takes_too_long(monkeypatch):
    monkeypatch.setattr(timer, "time", clock := Clock())
    taken, note = cpu_time_ms(lambda rows: lambda: clock.sleep(rows * 1e-3), 8192, budget_s=0.0)
    assert note.startswith("scaled from 1/256 of the rows")
    assert taken == pytest.approx(8192, rel=1e-3)
    taken, note = cpu_time_ms(lambda rows: lambda: clock.sleep(rows * 0.025), 8192, budget_s=0.0)
    assert taken is None
    assert note == "skipped: 2.4 s for 1/1024 of the rows"


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_neural_cases_have_their_cpu_figure_in_float32(direction, monkeypatch):
    monkeypatch.setattr(timer, "_ENOUGH_S", 60.0)  # a pause of the machine leads to no fewer rows
    benchmark = Benchmark(SampleInput("x", ((64, 32), (32,), (32,))), torch.bfloat16)
    row = Row("neural", "layer_norm", f"64x32 bfloat16 {direction}", "accelerant", "triton (own)", p50=0.001)
    found = neural._with_cpu(row, "layer_norm", benchmark, 0.0)
    assert found.cpu_note == "float32, 1 thread"
    assert found.over_cpu == pytest.approx(found.cpu_ms / 0.001)


def test_each_suite_has_a_cpu_column_where_the_device_is_another(monkeypatch):
    row = Row("x", "copy", "8 B", "accelerant", "own", "us", 1.0, 2.0, 3.0)
    abacus = ComputeDevice("cuda", 0, "abacus", architecture="sm_90", torch_type="cuda")

    def measured(run):
        run.add(replace(row, p50=2.0 if run.gpu else 8.0), replace(row, runner="torch"))

    def broken(run):
        raise RuntimeError("no memory")

    run = SuiteRun(abacus, BenchmarkRecord(Environment.of(abacus)))
    cases = [SuiteCase("a", measured, on_cpu=same_on_cpu(measured)), SuiteCase("b", measured, on_cpu=broken)]
    monkeypatch.setattr(registry, "provider_of", lambda device: registry.create("cpu"))
    measure_cases("x", cases, run, cpu=True)
    ours, torch_row, failed, _ = run.record.rows
    assert (ours.cpu_ms, ours.over_cpu, ours.cpu_note) == (0.008, 4.0, "1 thread")
    assert torch_row.cpu_ms is None
    assert (failed.p50, failed.cpu_ms, failed.cpu_note) == (2.0, None, "RuntimeError: no memory")


@pytest.mark.gpu
def test_a_gpus_copies_and_launches_have_a_cpu_column():
    gpu = registry.find_device("cuda")
    for suite in (BandwidthSuite(size=("4MiB",), budget_s=0.01, cpu=True), RuntimeSuite(budget_s=0.01, cpu=True)):
        run = SuiteRun(gpu, BenchmarkRecord(Environment.of(gpu)))
        suite.resolve(gpu).measure(run)
        assert any(row.cpu_ms for row in run.record.rows if row.runner == "accelerant"), suite.name
        assert all(row.wall_ms for row in run.record.rows if row.unit != "x"), suite.name


def test_a_case_without_a_cpu_column_is_named(cpu):
    run = SuiteRun(cpu, BenchmarkRecord(Environment.of(cpu)))
    measure_cases("x", [SuiteCase("llama", lambda run: None)], run, cpu=True)
    assert run.record.notes == ["no CPU column: llama"]


def test_the_cpu_column_of_runtime_and_bandwidth_is_measured(cpu):
    run = SuiteRun(cpu, BenchmarkRecord(Environment.of(cpu)))
    columns = {
        case.key: case.on_cpu for case in (*RuntimeSuite().cases(run), *BandwidthSuite(size=("4KiB",)).cases(run))
    }
    assert [key for key, column in columns.items() if column is None] == ["streaming"]
    assert ("device copy", "4 KiB") not in columns["4 KiB"](run)  # torch's, not ours
    assert columns["4 KiB"](run)["host to device", "4 KiB pageable"][0] > 0
