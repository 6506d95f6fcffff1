"""Tensor parallel and sharded models over gloo, against one process."""

import pytest
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

import tensor_checks

from processes import run

pytestmark = pytest.mark.slow  # each process takes seconds


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run(tensor_checks.CHECKS, 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("check", [check.__name__ for check in tensor_checks.CHECKS])
def test_two_processes(outcomes, check):
    assert outcomes[check] is None, outcomes[check]


def test_four_processes(tmp_path):
    assert run(tensor_checks.OF_FOUR, 4, tmp_path) == dict.fromkeys(["two_dimensions_of_a_mesh"])
