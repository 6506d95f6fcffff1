"""Tensor parallel and sharded models over gloo, against one process."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

import tensor_checks

from accelerant.distributed.tensor_parallel import _summed
from accelerant.runtime.processes import PeerSum
from processes import run


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run(tensor_checks.CHECKS, 2, tmp_path_factory.mktemp("two"))


@pytest.mark.slow
@pytest.mark.parametrize("check", [check.__name__ for check in tensor_checks.CHECKS])
def test_two_processes(outcomes, check):
    assert outcomes[check] is None, outcomes[check]


@pytest.mark.slow
def test_four_processes(tmp_path):
    assert run(tensor_checks.OF_FOUR, 4, tmp_path) == dict.fromkeys(["two_dimensions_of_a_mesh"])


def test_a_product_that_sums_itself_of_one_process(monkeypatch):
    """In the interpreter, which has no memory of other processes; tests of GPUs have."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    N, K, sums = 48, 96, PeerSum.__new__(PeerSum)
    sums._memory, sums._addresses = SimpleNamespace(rank=0, size=1), torch.zeros(3, dtype=torch.int64)
    sums._output_numbers = torch.zeros(N, dtype=torch.int32)
    x, weight, residual = torch.randn(1, K), torch.randn(N, K), torch.randn(1, N)
    for call in (1, 2):
        torch.testing.assert_close(_summed(x, weight, residual, sums), residual + x @ weight.t(), rtol=1e-5, atol=1e-4)
        assert sums._output_numbers.tolist() == [call] * N
    assert [sums.takes_outputs(N, dtype) for dtype in (torch.bfloat16, torch.float64)] == [True, False]  # in float32
