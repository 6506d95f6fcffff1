"""Context parallelism over gloo, against one process."""

import pytest
import torch
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

import context_checks

from accelerant.distributed import context_parallel_attention
from accelerant.distributed.context_parallel import _merge
from accelerant.errors import ConfigError
from processes import run


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run(context_checks.CHECKS, 2, tmp_path_factory.mktemp("two"))


@pytest.mark.slow
@pytest.mark.parametrize("check", [check.__name__ for check in context_checks.CHECKS])
def test_two_processes(outcomes, check):
    assert outcomes[check] is None, outcomes[check]


@pytest.mark.slow
def test_four_processes(tmp_path):
    assert run(context_checks.OF_FOUR, 4, tmp_path) == {check.__name__: None for check in context_checks.OF_FOUR}


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
