"""AdamW and SGD that update all parameters in one launch, and clipping by the global norm.

They are used as torch's are, and their state moves between ours and torch's in both directions:

    optimizer = AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, max_grad_norm=1.0)
    loss.backward()
    optimizer.step()            # norm, clipping and update; nothing waits for the device
    optimizer.grad_norm         # of the gradients before clipping, on the device

Under CUDA graph capture: run a step or more before the capture, so that the state is there. Each replay then counts a
step on the device. The values of the parameter groups live on the device too: a learning rate in a float32 tensor
there is read at each replay (schedulers fill it in place); after a change of a plain number call `refresh()` before
the replay.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from accelerant.errors import ConfigError
from accelerant.nn._optimizer import Entry, MultiTensorOptimizer, check_common, check_not_negative, rate_of
from accelerant.ops._library import is_ordinary, is_plain
from accelerant.ops.multi_tensor.op import (
    AdamWGroup,
    SGDGroup,
    Tensors,
    Workspace,
    adamw_step,
    case_of,
    clip_step,
    global_norm,
    sgd_step,
)
from accelerant.ops.multi_tensor.torch_steps import torch_clip, torch_norm

__all__ = ["SGD", "AdamW", "clip_grad_norm_"]


class AdamW(MultiTensorOptimizer):
    """Adam with decoupled weight decay, all parameters in one launch.

    Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2; the arguments of torch.optim.AdamW, and these:

    Args:
        params: parameters, named parameters, or groups of them with values of their own.
        lr: learning rate; a number, or a tensor of one element: float32 on the parameters' device, or on the CPU.
        betas: decay of the two moments, each at least 0 and below 1.
        eps: added to the root of the second moment.
        weight_decay: times lr, taken off the parameter.
        maximize: ascend.
        max_grad_norm: clip all gradients together to this norm, as clip_grad_norm_ does, without a pass over them and
            without changing them.
        master_weights: keep a float32 copy of each float16 or bfloat16 parameter (state["master"]) and update that.
        state_dtype: of the moments of float16 and bfloat16 parameters; None: the parameter's own, as torch has it.

    Raises:
        ConfigError: a value that has no meaning.
        UnsupportedDtype: a parameter other than float16, bfloat16, float32 or float64.

    Arithmetic is float32 (float64 for float64); bias corrections float64.
    """

    _names = ("step", "exp_avg", "exp_avg_sq")
    _op = adamw_step

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        master_weights: bool = False,
        state_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "max_grad_norm": max_grad_norm,
            "master_weights": master_weights,
            "state_dtype": state_dtype,
            # What torch.optim.AdamW looks for when it takes our state:
            "amsgrad": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": True,
            "decoupled_weight_decay": True,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_common(group, ("lr", "eps", "weight_decay"))
        for place, beta in enumerate(group["betas"]):
            if isinstance(beta, Tensor) or not 0.0 <= beta < 1.0:
                raise ConfigError(f"betas[{place}] must be a number, at least 0 and below 1; got {beta!r}")
        if group["amsgrad"]:
            raise ConfigError("amsgrad=True is not served: use torch.optim.AdamW")

    def _group(self, group: dict[str, Any], device: torch.device) -> AdamWGroup:
        beta1, beta2 = group["betas"]
        rate = rate_of(group["lr"], device)
        return AdamWGroup(rate, beta1, beta2, group["eps"], group["weight_decay"], group["maximize"])

    def _tensors(self, entry: Entry, grads: list[Tensor], new: tuple[int, ...]) -> Tensors:
        states = entry.states
        first, second = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
        counters = [state["step"] for state in states]
        return Tensors(entry.params, grads, first, second, self._masters(entry), counters, entry.groups)


class SGD(MultiTensorOptimizer):
    """Stochastic gradient descent with momentum, all parameters in one launch.

    Sutskever et al. 2013 in the form of torch.optim.SGD, with its arguments; the others as AdamW's. `state_dtype` is
    that of the momentum buffers.

    Raises:
        ConfigError: a value that has no meaning.
        UnsupportedDtype: a parameter other than float16, bfloat16, float32 or float64.
    """

    _names = ("momentum_buffer",)
    _op = sgd_step
    _option = "sgd"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        master_weights: bool = False,
        state_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "max_grad_norm": max_grad_norm,
            "master_weights": master_weights,
            "state_dtype": state_dtype,
            "foreach": None,
            "differentiable": False,
            "fused": True,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_common(group, ("lr", "momentum", "weight_decay"))
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ConfigError(
                f"nesterov needs a momentum above 0 and no dampening; got {group['momentum']} and {group['dampening']}"
            )

    def _group(self, group: dict[str, Any], device: torch.device) -> SGDGroup:
        names = ("momentum", "dampening", "nesterov", "weight_decay", "maximize")
        return SGDGroup(rate_of(group["lr"], device), *(group[name] for name in names))

    def _needs(self, param: Tensor, group: dict[str, Any]) -> tuple[str, ...]:
        names = super()._needs(param, group)
        return names if group["momentum"] else names[1:]

    def _tensors(self, entry: Entry, grads: list[Tensor], new: tuple[int, ...]) -> Tensors:
        first: list[Tensor | None] = []
        if any([group["momentum"] for group in self.param_groups]):  # noqa: C419  a list is faster
            first = [
                state.get("momentum_buffer") if self.param_groups[number]["momentum"] else None
                for state, number in zip(entry.states, entry.groups, strict=True)
            ]
        return Tensors(entry.params, grads, first, [], self._masters(entry), [], entry.groups, new)


# --- clipping --------------------------------------------------------------------------------------------------------

_clipping: dict[torch.device, Workspace] = {}


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients together, in place, so that their Euclidean norm is max_norm at most.

    scale = min(1, max_norm / (norm + 1e-6))

    Args:
        parameters: a tensor or several; those without a gradient are passed over.
        max_norm: at least 0.
        error_if_nonfinite: raise where the norm is not finite; waits for the device.

    Returns:
        the norm before, a float32 scalar on the first gradient's device (float64 for float64); 0 on the CPU where there
        are no gradients. Nothing waits for the device. A norm that is NaN makes every gradient NaN, an infinite one
        makes them 0, infinities NaN.

    Raises:
        ConfigError: max_norm is negative or NaN; sparse gradients.
        UnsupportedDtype: gradients other than float16, bfloat16, float32 or float64.
        RuntimeError: the norm is not finite, where that was asked.

    Source: Pascanu, Mikolov and Bengio 2013, arXiv:1211.5063, algorithm 1.
    """
    check_not_negative("max_norm", max_norm)
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [param.grad for param in params if param.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    if not is_plain(grads[0]) or not all(map(is_ordinary, grads)):
        found = torch_norm(grads, max_norm)
        _checked(found[0], error_if_nonfinite)
        torch_clip(grads, found[1])
        return found[0]
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).append(grad)
    calls = []
    for device, own in by_device.items():
        workspace = _clipping.get(device)
        if workspace is None:
            workspace = _clipping[device] = Workspace(device)
        table = workspace.table(Tensors([], own, [], [], [], [], []))
        case = case_of(table, device)
        calls.append((case, own, table, global_norm(case, own, table, float(max_norm))))
    norm, scale = calls[0][3]
    if len(calls) > 1:
        norm = torch.linalg.vector_norm(torch.stack([found[0].to(norm) for *_, found in calls]))
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    _checked(norm, error_if_nonfinite)
    for case, own, table, _ in calls:
        clip_step(case, own, table, scale.to(case.device))
        torch.autograd.graph.increment_version(own)
    return cast(Tensor, norm)


def _checked(norm: Tensor, error_if_nonfinite: bool) -> None:
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(f"the norm of the gradients is {norm.item()}: not clipped (error_if_nonfinite=True)")
