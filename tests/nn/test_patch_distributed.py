"""patch under DistributedDataParallel and FSDP2: two processes on the CPU."""

import pytest
import torch.distributed as dist
from patch_models import transformers  # noqa: F401  # skips where there is none
from patch_workers import ddp_and_fsdp, fsdp, launch

pytestmark = [
    pytest.mark.slow,  # each process imports transformers anew
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo"),
]


FSDP = [("gpt2", 0), ("llama", 1), ("bert", 0)]
"""Families, and whether each leaf is sharded apart; the others are in the soak."""


def test_both(tmp_path):
    """In one launch: the processes take seconds to import transformers."""
    launch(ddp_and_fsdp, tmp_path, ("gpt2", "qwen3"), FSDP)


@pytest.mark.soak
def test_fsdp2_of_the_others(tmp_path):
    launch(fsdp, tmp_path, [("gpt2", 1), ("llama", 0), ("bert", 1)])
