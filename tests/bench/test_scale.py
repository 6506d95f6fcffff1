"""The cost model of several processes, on times that it must explain, and the suite on two real ones."""

import pytest

from accelerant.bench.suite import run_suite
from accelerant.bench.suites.scale import Link, ScaleSuite, predicted_step_ms
from accelerant.cli.app import main
from accelerant.nn.train.parallel import BUCKET_BYTES
from accelerant.runtime import registry


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "send_recv"])
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
    assert Link("send_recv", 1.0, 100.0).ms(8, 1000) == pytest.approx(11)
    only_large = {(2, 2**20): 1.0, (2, 2**21): 2.0, (2, 2**22): 4.1}
    assert Link.fitted("all_gather", only_large).latency_ms == 0.0


def test_what_the_backward_pass_does_not_hide():
    link = Link("all_reduce", 0.0, BUCKET_BYTES / 6.0)  # a bucket takes 6 ms over two processes
    assert predicted_step_ms(90.0, BUCKET_BYTES, 1, link) == (90.0, 0.0)
    assert predicted_step_ms(90.0, 2 * BUCKET_BYTES, 2, link) == pytest.approx((96.0, 6.0))
    assert predicted_step_ms(90.0, 2 * BUCKET_BYTES + BUCKET_BYTES // 2, 2, link) == pytest.approx((93.0, 3.0))
    assert predicted_step_ms(9.0, 2 * BUCKET_BYTES, 2, link) == pytest.approx((15.0, 6.0))
    assert predicted_step_ms(3.0, 2 * BUCKET_BYTES, 2, link) == pytest.approx((13.0, 10.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes", "0,2"], "--processes: wanted numbers from 1 to 64, got 0,2"),
        (["--processes", "two"], "got two"),
        (["--parameters", "7B"], "no size '7B'"),
    ],
)
def test_refuses(options, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "scale", "--device", "cpu", *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.soak
def test_two_processes():
    suite = ScaleSuite(processes=("2",), parameters="0.5M", batch=1, steps=3)
    record = run_suite(suite, registry.choose("cpu"))
    assert all(row.p50 for row in record.rows)
    assert [row.op for row in record.rows[16:]] == ["step without communication", "step", "step", "predicted step"]
    assert [row.runner for row in record.rows[17:19]] == ["accelerant", "torch"]
    assert "us a message" in record.notes[0]
    assert "communication is more than half of a step" in record.notes[-1]
