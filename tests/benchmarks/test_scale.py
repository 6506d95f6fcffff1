"""The cost model of several processes, on times that it must explain, and each case of the suite on two real ones."""

import pytest
import torch
from scale_process import measured

from accelerant.bench.record import BenchmarkRecord, Environment, Row
from accelerant.bench.suite import SuiteRun, run_suite
from accelerant.cli.bench import run_command
from accelerant.runtime import registry
from benchmarks.scale import ScaleSuite, rows
from benchmarks.scale_model import BESIDE, OPS, PEER_SUM, WAITS, Costs, Link, outlook


@pytest.mark.parametrize("op", OPS)
def test_latency_and_bandwidth_are_found(op):
    link = Link(op, 0.02, 3e5)
    sizes = [(p, size) for p in (2, 4, 8) for size in (2**10, 2**16, 2**24)]
    found = Link.fitted(op, {(p, size): link.ms(p, size) for p, size in sizes})
    assert found.op == op
    assert found[1:] == pytest.approx(link[1:])


def test_a_ring():
    """Two processes exchange halves twice; the share of the bytes that a link carries grows to twice all of them."""
    link = Link("all_reduce", 1.0, 100.0)
    assert link.ms(2, 1000) == pytest.approx(2 + 10)
    assert link.ms(1024, 1000) == pytest.approx(2 * 1023 + 20, rel=1e-3)
    assert Link("peer_sum", 1.0, 100.0).ms(4, 1000) == pytest.approx(1 + 60)  # twice the bytes, to each of three
    assert Link("send_recv", 1.0, 100.0).ms(8, 1000) == pytest.approx(11)
    only_large = {(2, 2**20): 1.0, (2, 2**21): 2.0, (2, 2**22): 4.1}
    assert Link.fitted("all_gather", only_large).latency_ms == 0.0


def costs(ms_per_byte=0.0, *, latency=0.0, **values):
    """Return costs of which every collective has this latency and time a byte."""
    return Costs({op: Link(op, latency, 1 / ms_per_byte if ms_per_byte else float("inf")) for op in OPS}, **values)


def test_what_the_backward_pass_does_not_hide():
    step = costs(0.06).data_parallel_ms  # 100 bytes take 6 ms over two processes
    assert step(90.0, [100], 1) == step(90.0, [], 2) == (90.0, 0.0)
    assert step(90.0, [100, 100], 2) == pytest.approx((96.0, 6.0))
    assert step(90.0, [100, 100, 50], 2) == pytest.approx((93.0, 3.0))
    assert step(90.0, [100, 1000], 2) == pytest.approx((150.0, 60.0))
    assert step(9.0, [100, 100], 2) == pytest.approx((15.0, 6.0))
    assert step(3.0, [100, 100], 2) == pytest.approx((13.0, 10.0))
    assert step(90.0, [100, 100], 2, 50) == pytest.approx((96.0 + 3, 6.0 + 3))  # gathers 50 of each
    slow = costs(0.06, copy_bytes_per_ms=200.0, host=2, lost=0.5).data_parallel_ms
    assert slow(90.0, [100, 100], 4) == pytest.approx((90.0 + 9 + 0.5 * 9, 9.0))  # all_reduce
    assert slow(90.0, [100, 100], 2) == pytest.approx((96.0 + 3.5, 6.0))  # by copy engines
    assert slow(90.0, [100, 100], 2, 50)[0] == pytest.approx(96.0 + 1 + 3.5 + 3 + 2.5)


def test_predictions_of_split_models():
    free, slow = costs(), costs(latency=1.0)
    assert free.sharded_ms(10.0, 100, 10, 2) == free.context_parallel_ms(20.0, 10, 5, 2) == pytest.approx(10.0)
    assert free.tensor_parallel_ms(20.0, 4, 8, 16, 2) == pytest.approx(10.0)
    assert slow.tensor_parallel_ms(20.0, 4, 8, 16, 2) == pytest.approx(10.0 + 9 + 1)
    reads = costs(copy_bytes_per_ms=10.0).tensor_parallel_ms
    assert reads(20.0, 4, 8, 16, 2, weight_bytes=150) == pytest.approx(5 + 15 / 2)
    assert reads(20.0, 4, 8, 16, 2, weight_bytes=999) == pytest.approx(10.0)
    assert slow.sharded_ms(10.0, 100, 10, 2) == pytest.approx(10.0 + 2)  # the two of the blocks are hidden
    assert slow.sharded_ms(1.0, 100, 10, 2) == pytest.approx(1.0 + 2 + 1)
    assert slow.context_parallel_ms(20.0, 10, 5, 2) == pytest.approx(10.0)
    assert slow.context_parallel_ms(1.0, 10, 5, 2) == pytest.approx(0.5 + 0.75)
    assert costs(copy_bytes_per_ms=28.0).sharded_ms(99.0, 6, 2, 2) == pytest.approx(99.0 - 4)  # half of the update


def test_exchanges_wait_for_the_last_process():
    """As often as a step has exchanges; of a number that was not measured the wait is that of the most below."""
    waits = costs(
        waits={(PEER_SUM, 2): 0.1, (PEER_SUM, 4): 0.5, ("send_recv", 2): 0.25, ("send_recv", 4): 3.0}, lost=0.5
    )
    for processes, (sums, exchange) in {2: (0.1, 0.25), 3: (0.1, 0.25), 4: (0.5, 3.0), 8: (0.5, 3.0)}.items():
        alone = 12.0
        assert waits.tensor_parallel_ms(alone, 4, 8, 16, processes) == pytest.approx(alone / processes + 9 * sums)
        found = waits.context_parallel_ms(alone, 10, 5, processes)
        assert found == pytest.approx(alone / processes + (processes - 1) * exchange)
    rows = [Row("scale", op, "1 B, 4 processes", "device", "nccl", bytes=1, p50=1.0) for op in OPS[:4]]
    rows += [
        Row("scale", each, f"1 B, {n} processes", "device", "nccl", p50=n / 8)
        for each in WAITS.values()
        for n in (2, 4)
    ]
    assert Costs.of(rows, None).waits == {(op, n): n / 8 for op in WAITS for n in (2, 4)}


def test_costs_need_every_collective_of_a_record():
    measured_rows = [
        Row("scale", op, f"{size} B, 2 processes", "device", "gloo", bytes=size, p50=size / 100)
        for op in OPS[:4]
        for size in (1000, 100000)
    ]
    measured_rows.append(
        Row("scale", BESIDE, "lost part of its time, 2 processes", "device", "gloo", unit="x", p50=0.25)
    )
    found = Costs.of(measured_rows, 2.0)
    assert (found.lost, found.copy_bytes_per_ms) == (0.25, 2e6)
    assert found.links["send_recv"].ms(2, 5000) == pytest.approx(50)
    assert Costs.of(measured_rows[2:], 2.0) is None
    text = outlook(100.0, [1 << 20] * 4, found)
    assert "2: " in text[0]
    assert "from 2 processes on" in text[1]


@pytest.mark.parametrize(("options", "message"), [
    (["--processes", "0", "--processes", "2"], "--processes: wanted numbers from 1 to 64, got 0,2"),
    (["--processes", "two"], "got two"),
    (["--parameters", "7B"], "no size '7B'"),
    (["--case", "data", "--case", "all"], "--case: no case 'all'; there are collectives"),
    (["--batch", "4", "--batch", "0"], "--batch: wanted numbers from 1 on, got 4,0"),
])  # fmt: skip
def test_refuses(options, message, capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(ScaleSuite, ["--device", "cpu", *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")

WANTED = {
    "collectives": [*(op for op in OPS[:4] for _ in range(4)), BESIDE, WAITS["send_recv"]],
    "data": ["step without communication", "step", "step"],
    "sharded": ["unsharded step without communication", "sharded step", "sharded step"],
    "tensor": ["decode on one device", "decode"],
    "context": ["causal attention on one device", "causal attention"] * 2,
}


def run_on_cpu():
    device = registry.find_device("cpu")
    return SuiteRun(device, BenchmarkRecord(Environment.of(device)))


@gloo
@pytest.mark.slow
@pytest.mark.parametrize("case", WANTED)
def test_a_case_in_two_processes(case, tmp_path):
    """Its processes compare their results themselves, and end with an error if they differ."""
    settings = {"case": case, "gpu": False, "steps": 3, "peer": True, "parameters": "0.5M", "batch": [1]}
    made = rows(measured(settings, tmp_path), 2, run_on_cpu())
    assert [row.op for row in made] == WANTED[case]
    assert all(row.p50 is not None and row.case.endswith(", 2 processes") for row in made)
    assert {row.runner for row in made} >= ({"device"} if case == "collectives" else {"device", "accelerant"})


@pytest.mark.slow
@pytest.mark.parametrize(("case", "wanted"), [
    ("msm", ["msm on one device", "msm"]),
    ("proof", ["proof on one device"]),
    pytest.param("many", ["many proofs on one device", "many proofs"], marks=pytest.mark.soak),
])  # fmt: skip
def test_sums_and_proofs(case, wanted):
    suite = ScaleSuite(case=(case,), log_points=6, constraints=30, proofs=2, steps=3)
    record = run_suite(suite, registry.find_device("cpu"))
    assert [row.op for row in record.rows if row.p50] == wanted


@pytest.mark.soak  # starts a cluster
def test_jobs_beside_tasks_of_ray():
    pytest.importorskip("ray")
    record = run_suite(ScaleSuite(case=("jobs",)), registry.find_device("cpu"))
    assert [(row.runner, row.implementation) for row in record.rows if row.p50] == [
        ("device", "local workers"), ("accelerant", "on Ray"), ("ray", "bare tasks")
    ]  # fmt: skip
    assert all(row.p50 > 5 for row in record.rows)  # two workers, 10 ms


@gloo
@pytest.mark.soak  # as the cases above, with launchers
def test_the_launcher_and_the_predictions():
    suite = ScaleSuite(case=("collectives", "data"), processes=("2",), parameters="0.5M", batch=("1",), steps=3)
    record = run_suite(suite, registry.find_device("cpu"))
    predicted = next(row for row in record.rows if row.op == "predicted step")
    assert "of the measured time" in predicted.note
    assert any("us a message" in note for note in record.notes)
    assert any("communication is more than half of a step" in note for note in record.notes)


@gloo
@pytest.mark.soak
def test_a_case_that_takes_too_long_keeps_the_rows_of_others(tmp_path):
    out = tmp_path / "record.json"
    with pytest.raises(SystemExit) as ended:
        run_command(ScaleSuite, ["--device", "cpu", "--case", "context", "--case", "msm", "--max-seconds-each", "1",
              "--log-points", "5", "--steps", "3", "--out", str(out)])  # fmt: skip
    assert ended.value.code != 0
    rows = BenchmarkRecord.load(out).rows
    assert any("did not end within 1 s" in row.note for row in rows)
    assert any(row.op == "msm" and row.p50 for row in rows)
