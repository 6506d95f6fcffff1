"""Whether a CUDA graph is being captured where a tensor is.

torch.cuda.is_current_stream_capturing asks the current stream of the current device. Work goes to the current stream of
its tensors' device, which is another where a program uses several devices.
"""

from __future__ import annotations

import torch

__all__ = ["capturing"]


def capturing(device: torch.device | int) -> bool:
    """Whether the current stream of a device is being captured.

    Args:
        device: of the tensors; its index for a CUDA device. Devices other than CUDA's capture nothing.
    """
    if isinstance(device, torch.device):
        if device.type != "cuda":
            return False
        index = torch.cuda.current_device() if device.index is None else device.index
    else:
        index = device
    if index == torch._C._cuda_getDevice():
        return torch._C._cuda_isCurrentStreamCapturing()
    with torch.cuda.device(index):
        return torch._C._cuda_isCurrentStreamCapturing()
