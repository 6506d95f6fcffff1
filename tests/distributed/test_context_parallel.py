"""Context parallelism over gloo, against one process."""

import pytest
import torch
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

import context_checks

from accelerant.distributed import context_parallel_attention
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
