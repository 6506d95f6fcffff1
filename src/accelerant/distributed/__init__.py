"""Models split over the processes of torch.distributed: their parameters, their layers, or their sequences.

>>> mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (8,))
>>> accelerant.distributed.shard(model, mesh, precision=torch.bfloat16)      # each process keeps an eighth (FSDP2)
>>> accelerant.distributed.tensor_parallel(model, mesh)                      # each computes an eighth of every layer
>>> accelerant.distributed.context_parallel(model, mesh)                     # each reads an eighth of every sequence
"""

from accelerant.distributed.context_parallel import (
    context_parallel,
    context_parallel_attention,
    join_sequence,
    split_sequence,
)
from accelerant.distributed.tensor_parallel import (
    shard,
    tensor_parallel,
    vocabulary_parallel_cross_entropy,
    whole_state_dict,
)

__all__ = [
    "context_parallel", "context_parallel_attention", "join_sequence", "shard", "split_sequence", "tensor_parallel",
    "vocabulary_parallel_cross_entropy", "whole_state_dict",
]  # fmt: skip
