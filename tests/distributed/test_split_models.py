"""Context parallelism, tensor parallel and sharded models over gloo, against one process."""

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

import context_checks
import tensor_checks

from accelerant.distributed import context_parallel_attention
from accelerant.distributed.context_parallel import _merge
from accelerant.distributed.tensor_parallel import _summed
from accelerant.errors import ConfigError
from accelerant.runtime.processes import PeerSum
from processes import run

ALL = {"context": context_checks, "tensor": tensor_checks}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What each check says in two processes, by the module of checks; run when it is first asked."""
    return functools.cache(lambda of: run(ALL[of].CHECKS, 2, tmp_path_factory.mktemp(of)))


@pytest.mark.slow
@pytest.mark.parametrize(("of", "check"), [(of, check.__name__) for of in ALL for check in ALL[of].CHECKS])
def test_two_processes(outcomes, of, check):
    assert outcomes(of)[check] is None, outcomes(of)[check]


@pytest.mark.slow
@pytest.mark.parametrize("of", ALL)
def test_four_processes(of, tmp_path):
    assert run(ALL[of].OF_FOUR, 4, tmp_path) == {check.__name__: None for check in ALL[of].OF_FOUR}


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


def test_without_processes_the_error_says_how_to_start_them():
    x = torch.zeros(1, 1, 2, 2)
    with pytest.raises(ConfigError, match="start with torchrun"):
        context_parallel_attention(x, x, x)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_that_merges_equals_the_sums(dtype, monkeypatch):
    """Rows in the middle of a longer sequence; scores far apart; a width that is no power of 2."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    o, part = torch.randn(2, 3, 37, 24).to(dtype), torch.randn(2, 3, 17, 24).to(dtype)
    lse, part_lse = (30 * torch.randn(2, 3, rows) for rows in (37, 17))
    wide = [x.double() for x in (o, lse, part, part_lse)]
    rows = slice(20, 37)
    for into, log_sum, *other in ((o, lse, part, part_lse), wide):
        _merge(into[:, :, rows], log_sum[:, :, rows], *other)
    near = 1e-2 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(o.double(), wide[0], rtol=near, atol=near)
    torch.testing.assert_close(lse.double(), wide[1], rtol=1e-6, atol=1e-5)
