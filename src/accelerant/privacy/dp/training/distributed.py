"""Private training over several processes: clipped sums to rank 0, noise there, the result to all.

Each process clips the examples of its share of the data. The sums go to rank 0, the only one that draws noise and
writes the ledger, and that sends the noisy sum back: a reduction and a broadcast, together the traffic of one
all-reduce. The alternative, noise of std / sqrt(processes) in each process, is exact only for the continuous Gaussian:
a sum of discrete Gaussians is not one (Kairouz, Liu and Steinke 2021, arXiv:2102.06387, bound the difference), and each
process would know its share. Here every process is trusted, as the trainer is.

The noise covers what rank 0 knows, so the processes must agree on all that decides it: at the start on the settings of
`make_private`, before each step on its clipping norm, sampling, expected batch, precision and trained parameters. Each
of the two is one exchange of accelerant.runtime.processes.
"""

from __future__ import annotations

from torch import nn

from accelerant.errors import UnsupportedCase

__all__ = ["require_unwrapped"]

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def require_unwrapped(model: nn.Module) -> None:
    """Raise UnsupportedCase if a model is a DistributedDataParallel or DataParallel, or is called by one."""
    wrapper = model if isinstance(model, _WRAPPERS) else getattr(_WRAPPERS[0], "_active_ddp_module", None)
    if wrapper is None and not getattr(model, "_is_replica", False):
        return
    name = "DataParallel" if wrapper is None else type(wrapper).__name__
    raise UnsupportedCase(
        f"{name} adds gradients up before they are clipped: give its module to make_private, and call that; the "
        "private step sums over the processes of torch.distributed itself"
    )
