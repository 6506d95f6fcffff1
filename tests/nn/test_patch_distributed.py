"""patch under DistributedDataParallel and FSDP2: two processes on the CPU."""

import pytest
import torch.distributed as dist
from patch_models import transformers  # noqa: F401  # skips where there is none
from patch_workers import ddp, fsdp, launch

pytestmark = [
    pytest.mark.slow,  # each process imports torch and transformers anew
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo"),
]


def test_ddp(tmp_path):
    launch(ddp, tmp_path / "store", ("gpt2", "qwen3"))


def test_fsdp2(tmp_path):
    launch(fsdp, tmp_path / "store", [(family, leaves) for family in ("gpt2", "llama", "bert") for leaves in (0, 1)])
