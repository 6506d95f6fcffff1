"""Private training over several processes: clipped sums to rank 0, noise there, the result to all.

Each process clips the examples of its share of the data. The sums go to rank 0, the only one that draws noise and
writes the ledger, and that sends the noisy sum back: a reduction and a broadcast, together the traffic of one
all-reduce. The alternative, noise of std / sqrt(processes) in each process, is exact only for the continuous Gaussian:
a sum of discrete Gaussians is not one (Kairouz, Liu and Steinke 2021, arXiv:2102.06387, bound the difference), and each
process would know its share. Here every process is trusted, as the trainer is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from accelerant import errors

__all__ = ["Processes"]

_T = TypeVar("_T")


class Processes:
    """The processes that train together; one if torch.distributed is not initialised.

    Attributes:
        rank, size: of this process, and their number.
    """

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.rank, self.size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    @property
    def first(self) -> bool:
        """Whether this process draws the noise and writes the ledger."""
        return self.rank == 0

    def on_first(self, action: Callable[[], _T]) -> _T:
        """Return an action's result on rank 0, in every process; raise its error in each, so that none waits."""
        if self.size == 1:
            return action()
        answer: list[Any] = [None, None, None]
        failed: BaseException | None = None
        if self.first:
            try:
                answer[0] = action()
            except Exception as error:  # noqa: BLE001  raised again below, here and in the others
                failed = error
                answer[1:] = [type(error).__name__, str(error)]
        torch.distributed.broadcast_object_list(answer, src=0)
        if failed is not None:
            raise failed
        if answer[1] is not None:
            raise getattr(errors, answer[1], errors.ProtocolError)(f"rank 0: {answer[2]}")
        result: _T = answer[0]
        return result

    def agree(self, value: str) -> bool:
        """Return whether every process passes the same text."""
        values = [value] * self.size
        if self.size > 1:
            torch.distributed.all_gather_object(values, value)
        return len(set(values)) == 1

    def sum_to_first_(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over the processes into that of rank 0; elsewhere the values are undefined afterwards."""
        self._all(torch.distributed.reduce, tensors)

    def from_first_(self, tensors: Sequence[Tensor]) -> None:
        """Copy rank 0's values into each tensor."""
        self._all(torch.distributed.broadcast, tensors)

    def _all(self, collective: Callable[..., Any], tensors: Sequence[Tensor]) -> None:
        if self.size == 1:
            return
        whole = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]
        for work in [collective(tensor, 0, async_op=True) for tensor in whole]:
            work.wait()
        for tensor, sent in zip(tensors, whole, strict=True):
            if sent is not tensor:
                tensor.copy_(sent)
