"""The neural suite: every op has its subject, sizes of a sweep, peers that are absent, the CSV and the roofline."""

import csv
from dataclasses import replace

import pytest
import torch

import accelerant.ops
from accelerant.bench import peers, subjects
from accelerant.bench.record import OWN, Environment, Record, Row
from accelerant.bench.roofline import roofline
from accelerant.bench.suites import neural
from accelerant.errors import ConfigError, UnsupportedCase
from accelerant.ops._cases import Benchmark, Indices, Sample
from accelerant.runtime import registry

NOT_MEASURED_HERE = {"attention_varlen", "attention_decode"}


def environment():
    return Environment.of(registry.choose("cpu"))


def test_every_op_has_a_subject():
    assert set(accelerant.ops.__all__) - NOT_MEASURED_HERE <= set(subjects.OPS)


@pytest.mark.parametrize("name", sorted(subjects.OPS))
def test_what_the_peers_are_called_is_known(name):
    assert set(subjects.OPS[name].peers) <= set(peers.NAMES)


def test_an_absent_library_is_named():
    with pytest.raises(UnsupportedCase, match="no-such-library cannot be used here: ModuleNotFoundError"):
        peers._module("no_such_library", "no-such-library")


def test_an_unknown_peer_is_refused():
    with pytest.raises(ConfigError, match="no peer 'torhc'; there are torch, compile"):
        neural.check_against(["torch", "torhc"])


def test_a_sweep_has_odd_sizes_and_both_ends():
    sizes = neural.sweep_sizes()
    assert (sizes[0], sizes[-1]) == (2**10, 2**28)
    assert sum(size % 2 for size in sizes) >= 5


def test_a_case_of_another_size_keeps_its_rows():
    sample = Sample("loss", ((64, 16), Indices((64,), 16)))
    found = neural._resized(Benchmark(sample, torch.float32), 128)
    assert found.sample.shapes == ((8, 16), (8,))
    odd = neural._resized(Benchmark(Sample("norm", ((64, 16), (16,), None)), torch.float32), 127)
    assert odd is None or odd.sample.shapes == ((1, 127), (127,), None)
    assert neural._resized(Benchmark(Sample("product", ((64, 16), (16, 8))), torch.float32), 128) is None


def rows():
    ours = Row("neural", "matmul", "8x8 forward", "accelerant", "torch (library)", p20=1.0, p50=2.0, p80=3.0,
               bytes=10**6, flops=10**9, ceiling="matmul", target_x=1.5, samples=(2.0, 2.5))  # fmt: skip
    return [ours, replace(ours, runner=OWN, implementation="triton (own)", p50=4.0, target_x=None),
            replace(ours, runner="torch", p50=3.0, target_x=None)]  # fmt: skip


def test_speed_is_aimed_at_beside_the_fastest_peer():
    record = Record(environment(), {"copy GB/s": 1000.0, "matmul TFLOP/s": 10.0}, rows())
    record.conclude()
    ours, own, _ = record.rows
    assert (ours.speedup, own.speedup) == (1.5, 0.75)
    assert ours.reached is True
    assert own.reached is None
    assert "1.50x the best" in record.table()


def test_csv_has_every_row_without_samples(tmp_path):
    record = Record(environment(), {}, rows())
    record.save_csv(tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["runner"] for row in found] == ["accelerant", OWN, "torch"]
    assert float(found[0]["tflop_s"]) == pytest.approx(0.5)
    assert "samples" not in found[0]


def test_samples_survive_the_file(tmp_path):
    record = Record(environment(), {}, rows())
    record.save(tmp_path / "rows.json")
    assert Record.load(tmp_path / "rows.json").rows[0].samples == (2.0, 2.5)


def test_roofline_draws_each_row_once():
    record = Record(environment(), {"copy GB/s": 1000.0, "matmul TFLOP/s": 10.0}, rows())
    drawn = roofline(record)
    assert drawn.count("<circle") == 3
    assert drawn.count('class="peer-dot"') == 1
    assert roofline(Record(environment(), {}, rows())) == ""
