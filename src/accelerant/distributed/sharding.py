"""Fully sharded models: each process keeps an equal part of every parameter, gradient and optimiser state."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accelerant.errors import ConfigError

__all__ = ["group_of"]


def group_of(mesh: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """Return the processes of a group or of a mesh of one dimension; None for all.

    Raises ConfigError if torch.distributed is not initialised, or for a mesh of several dimensions.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError("torch.distributed is not initialised: start with torchrun and call init_process_group")
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ConfigError(f"expected a mesh of one dimension, got {mesh.mesh_dim_names}: pass one, as mesh['name']")
        return mesh.get_group()
    if mesh is None:
        return dist.group.WORLD  # type: ignore[return-value]  # initialised, as checked above
    return mesh
