"""The suite of recurrent layers, on small ones."""

import pytest

from accelerant.bench.suite import run_suite
from accelerant.cli.bench import run_command
from accelerant.runtime import registry
from benchmarks.recurrent import RecurrentSuite


def test_both_directions_are_measured_and_compared():
    suite = RecurrentSuite(cell=("gru",), hidden=("32", "20"), batch=("2",), steps=("16",), budget_s=0.0)
    rows = run_suite(suite, registry.find_device("cpu")).rows
    timed = [(row.case, row.implementation) for row in rows if row.p50]
    assert timed == [
        ("2x16x32 float32", "llvm"), ("2x16x32 float32", "torch"), ("2x16x32 float32 and backward", "llvm"),
        ("2x16x32 float32 and backward", "torch"), ("2x16x20 float32", "torch"),
        ("2x16x20 float32 and backward", "torch"),
    ]  # fmt: skip
    assert all(row.speedup for row in rows if row.p50 and row.implementation == "llvm")
    assert "multiple of 32, got 20" in next(row.note for row in rows if row.implementation == "llvm" and not row.p50)


@pytest.mark.parametrize(("options", "message"), [
    (["--cell", "elman"], "no cell 'elman'; there are lstm, gru, tanh"),
    (["--hidden", "0"], "--hidden: wanted numbers of at least 1, got 0"),
    (["--dtype", "int8"], "no dtype 'int8'"),
])  # fmt: skip
def test_refuses(options, message, capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(RecurrentSuite, [*options, "--device", "cpu"])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
