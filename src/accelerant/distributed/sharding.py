"""Fully sharded models: each of N processes keeps 1/N of every parameter, gradient and optimizer state.

A block's parameters are gathered before its forward and its backward pass and freed afterwards, its gradients reduced
and scattered: torch's FSDP2. While a block computes, its parameters are plain tensors, so the fused blocks of
accelerant.nn and of patched models run as they do in one process. Between steps parameters are DTensors, which the
optimizers of accelerant.nn update by their local parts, and whose norm they take over all processes.

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.3; Zhao et al. 2023, arXiv:2304.11277.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from accelerant.errors import ConfigError, UnsupportedCase

M = TypeVar("M", bound=nn.Module)


def group_of(mesh: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """Return the processes of a group or of a mesh of one dimension, all for None; ConfigError for others."""
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError("torch.distributed is not initialized: start with torchrun and call init_process_group")
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ConfigError(f"expected a mesh of one dimension, got {mesh.mesh_dim_names}: pass one, as mesh['name']")
        return mesh.get_group()
    if mesh is None:
        return dist.group.WORLD  # type: ignore[return-value]  # initialized, as checked above
    return mesh


def shard(model: M, mesh: DeviceMesh, *, precision: torch.dtype | None = None, reshard_after_forward: bool = True) -> M:
    """Shard a model's parameters over processes by FSDP2, block by block.

    Every process calls it with the same parameters and from then on calls the model on its own examples. Gradients are
    the mean over the processes. Create the optimizer afterwards: accelerant.nn.optim clips by the norm over all
    processes. Call `loss` or the model itself; other methods see parts of the parameters.

    Args:
        model: a model of accelerant.nn, a patched Hugging Face model, or another module whose blocks are in an
            nn.ModuleList; modified in place. It may be a Llama that `tensor_parallel` split over another dimension of
            the mesh.
        mesh: of one dimension; or two, of which parameters are sharded over the last and repeated over the first.
        precision: dtype in which parameters are gathered and layers compute, bfloat16 or float16; gradients are reduced
            and parameters updated in their own dtype. None: their own. TrainStep(precision=) of the same dtype adds a
            loss in float32.
        reshard_after_forward: free a block's parameters after its forward pass. False keeps those of all blocks for the
            backward pass, in `precision`: one gather less in a step.

    Returns:
        the model.

    Raises:
        ConfigError: torch.distributed is not initialized; a precision or number of dimensions not listed above.
        UnsupportedCase: the model is sharded already, or has no blocks.
    """
    group_of(None)  # raises without processes
    if mesh.ndim > 2:
        raise ConfigError(f"shard takes a mesh of one or two dimensions, got {mesh.mesh_dim_names}")
    if precision not in (None, torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"precision must be bfloat16, float16, float32 or None, got {precision}")
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise UnsupportedCase(f"this {type(model).__name__} is sharded already")
    blocks = _blocks(model)
    if not blocks:
        raise UnsupportedCase(
            f"shard takes a model with blocks in an nn.ModuleList, {type(model).__name__} has none: call torch's "
            "fully_shard on its parts"
        )
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=None if precision is None else torch.float32)
    # A block's inputs have the right dtype already; the rotary tables among them stay in float32.
    inner = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, cast_forward_inputs=False)
    for block in blocks:  # the backward pass begins with the last one
        free = reshard_after_forward and block is not blocks[-1]
        fully_shard(block, mesh=mesh, mp_policy=inner, reshard_after_forward=free)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    changed: Any = model
    for name in ("loss", "prefill"):
        if hasattr(model, name):
            register_fsdp_forward_method(changed, name)
    return model


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the outermost lists of modules of one class, with parameters."""
    blocks: list[nn.Module] = []
    lists: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in lists)
        if not isinstance(module, nn.ModuleList) or inside or len({type(each) for each in module}) != 1:
            continue
        if all(next(each.parameters(), None) is not None for each in module):
            lists.append(name)
            blocks += module
    return blocks
