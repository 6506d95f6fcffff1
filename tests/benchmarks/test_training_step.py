"""The training suite on a CPU: rows, the plain model, and what it refuses."""

from unittest.mock import Mock

import pytest
import torch

from accelerant.bench.record import BenchmarkRecord, Environment
from accelerant.bench.suite import SuiteRun, run_suite
from accelerant.errors import AccelerantError, ConfigError
from accelerant.nn import GPT, GPTConfig
from accelerant.runtime import registry
from benchmarks import cpu_steps, step_kernels, training
from benchmarks.gpt_steps import PlainGPT, own_step, plain_step
from benchmarks.step_kernels import KernelShare, kernel_table
from benchmarks.training import TrainingSuite

TINY = GPTConfig(vocab_size=50, context=8, layers=2, heads=2, width=16)


def test_the_plain_model_is_the_same_model():
    torch.manual_seed(0)
    model = GPT(TINY)
    plain = PlainGPT.like(model)
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in model.named_parameters()]
    tokens, targets = torch.randint(0, 50, (2, 3, 8))
    torch.testing.assert_close(plain(tokens, targets), model.loss(tokens, targets))


def test_steps_go_the_same_way():
    torch.manual_seed(0)
    model = GPT(TINY)
    plain = PlainGPT.like(model)
    ours, theirs = own_step(model, precision=None), plain_step(plain, precision=None)
    tokens, targets = torch.randint(0, 50, (2, 3, 8))
    for _ in range(4):
        torch.testing.assert_close(ours(tokens, targets), theirs(tokens, targets), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_rows():
    record = run_suite(TrainingSuite((2,), ("torch",), 0.01, TINY), registry.find_device("cpu"))
    ours, theirs = record.rows
    assert (ours.runner, theirs.runner) == ("accelerant", "torch")
    assert ours.key[:3] == theirs.key[:3] == ("training", "gpt step", "2x8 2 layers of 16 bf16 autocast")
    assert ours.speedup == pytest.approx(theirs.p50 / ours.p50)
    assert ours.target is None  # of an H200
    assert "tokens/s" in ours.note
    # 6 operations a token for each weight of a product, 12 T W a layer for causal attention, all halves: 6 L T W.
    assert ours.flops == 16 * (6 * (12 * 2 * 16**2 + 50 * 16) + 6 * 2 * 8 * 16)


@pytest.mark.slow
def test_a_peer_that_fails_says_why_and_costs_no_other_row(monkeypatch):
    monkeypatch.setattr(torch, "compile", Mock(side_effect=RuntimeError("no compiler here\nand much more")))
    device = registry.find_device("cpu")
    record = BenchmarkRecord(Environment.of(device))
    TrainingSuite((2,), ("compile", "torch"), 0.0, TINY).measure(SuiteRun(device, record))
    assert [(row.runner, row.p50 is None) for row in record.rows] == [
        ("accelerant", False), ("compile", True), ("torch", False),
    ]  # fmt: skip
    assert record.rows[1].note == "RuntimeError: no compiler here"
    assert record.rows[1].case == record.rows[0].case
    assert "no compiler here" in record.table()


def test_a_peer_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="no peer 'jax'"):
        TrainingSuite(against=("jax",)).resolve(registry.find_device("cpu"))


@pytest.mark.parametrize("losses", [
    {"accelerant": [float("nan")], "torch": [4.0]},
    {"accelerant": [4.0, 3.9], "torch": [4.1, 3.9]},
    {"accelerant": [4.0, 3.9], "torch": [4.0, 3.5]},
])  # fmt: skip
def test_wrong_losses_end_the_run(losses):
    with pytest.raises(AccelerantError, match="training step"):
        training._check_losses(losses.pop("accelerant"), losses)


@pytest.mark.parametrize(("name", "kind"), [
    ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "matmul"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int>", "matmul"),
    ("linear_gelu", "matmul"),
    ("transformer_dz", "matmul"),
    ("attention_bwd_rows", "attention"),
    ("norm_bwd", "own"),
    ("linear_fp8_rows", "own"),
    ("transformer_columns", "own"),
    ("cross_entropy_row", "own"),
    ("multi_tensor_adamw", "own"),
    ("void at::native::elementwise_kernel<128, 4>", "other"),
    ("Memset (Device)", "other"),
])  # fmt: skip
def test_kinds_of_kernels(name, kind):
    assert step_kernels._kind(name) == kind


def test_the_table_sums_by_kind():
    shares = [KernelShare("nvjet", "matmul", 6.0, 3), KernelShare("norm_bwd", "own", 3.0, 2)]
    shares.append(KernelShare("Memset", "other", 1.0, 1))
    shares += [KernelShare("a step, back to back", "clock", 12.0, 1), KernelShare("aten::mm", "host", 0.5, 3)]
    table = kernel_table(shares)
    assert "10.000 ms in all; of 4.000 ms besides products and attention 75.0% are ours" in table
    assert table.splitlines()[0].endswith("clock      a step, back to back")
    assert table.splitlines()[1].endswith("host       aten::mm")


@pytest.mark.parametrize(("precision", "most"), [(None, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
def test_steps_on_a_cpu_have_the_losses_of_a_plain_loop(precision, most):
    plain_ms, ours_ms, difference = cpu_steps.measure((2, 8, 16, 1), precision, steps=2)
    assert min(plain_ms, ours_ms) > 0
    assert difference < most
