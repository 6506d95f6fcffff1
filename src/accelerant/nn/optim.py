"""AdamW, Adam and SGD that update all parameters in one launch, and clipping by the global norm.

They are used as torch's are, and state dictionaries are interchangeable in both directions; every other name of
torch.optim is torch's. `optimizer.grad_norm` is the norm before clipping, on the device: nothing waits for it.

Under CUDA graph capture, run at least one step before the capture so that the state exists. Each replay then counts a
step on the device. A learning rate in a float32 tensor is read at each replay (schedulers fill it in place); after
changing a plain number, call `refresh()` before the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from accelerant._renamed import understood_arguments
from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.nn.layers import dtype_of
from accelerant.ops import multi_tensor
from accelerant.ops._library import is_distributed, is_ordinary, is_plain, name_of
from accelerant.runtime.dispatch import Operation
from accelerant.runtime.streams.stream import capturing

__all__ = ["SGD", "Adam", "AdamW", "clip_grad_norm_"]

_F = TypeVar("_F", bound=Callable[..., Any])
_without_dynamo: Callable[[_F], _F] = getattr(torch, "_disable_dynamo")  # noqa: B009  torch does not declare it
_LOW = (torch.float16, torch.bfloat16)
_SUBSETS_LIMIT = 64  # cached subsets of parameters that had a gradient


@dataclass(slots=True)
class _DeviceParameters:
    """The parameters on one device, their states and the indices of their groups.

    `complete`: each state has all tensors that its group needs. `ordinary`: no parameter, or local part of one, is a
    tensor subclass or on the meta device. `distributed`: a parameter is a DTensor, of which this process updates its
    part.
    """

    params: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    complete: bool = False
    ordinary: bool = True
    distributed: bool = False

    def subset(self, indices: list[int]) -> _DeviceParameters:
        """Return the parameters at these indices."""
        params, states, groups = ([field[i] for i in indices] for field in (self.params, self.states, self.groups))
        return _DeviceParameters(params, states, groups, self.complete, self.ordinary, self.distributed)  # type: ignore[arg-type]


class MultiTensorOptimizer(torch.optim.Optimizer):
    """Base class of the optimizers: collects parameters, gradients and state, and calls the multi-tensor op."""

    _step_supports_amp_scaling = True  # torch.amp.GradScaler leaves unscaling and the check for infinities to us
    _names: ClassVar[tuple[str, ...]]  # tensors of a parameter's state
    _non_negative: ClassVar[tuple[str, ...]]  # values of a group
    _op: ClassVar[Operation]
    _option: ClassVar[str] = ""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        _check_non_negative("lr", defaults["lr"])
        if defaults["max_grad_norm"] is not None:
            _check_non_negative("max_grad_norm", defaults["max_grad_norm"])
        defaults["state_dtype"] = dtype_of(defaults["state_dtype"])
        self._reset()
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as torch.optim.Optimizer does; raise as the constructor does."""
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise
        self._reset()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            self._check_group(group)
        self._reset()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of torch's; moments keep their dtype, counters move to the device."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            saved, state = state_dict["state"].get(number), self.state.get(param)
            if not saved or not state:
                continue
            for name in (*self._names, "master"):  # torch has cast them to the parameter's dtype
                if name != "step" and isinstance(saved.get(name), Tensor):
                    dtype = torch.float32 if name == "master" else self._state_dtype(param)
                    state[name] = torch.empty_like(param, dtype=dtype, requires_grad=False).copy_(saved[name])
            if "step" in state:
                state["step"] = torch.as_tensor(state["step"]).to(param.device, torch.float32, copy=True)
        self._reset()

    @property
    def grad_norm(self) -> Tensor | None:
        """The global gradient norm before clipping, float32 on the device; None unless max_grad_norm is set.

        The next step overwrites it: clone it to keep it.
        """
        workspaces = list(self._workspaces.values())
        return workspaces[0].norm if workspaces and self.defaults["max_grad_norm"] is not None else None

    def refresh(self) -> None:
        """Copy the groups' current hyperparameters to the device, where replays of a captured step read them."""
        for device, workspace in self._workspaces.items():
            workspace.values.refresh(tuple([self._group(group, device).row() for group in self.param_groups]))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return the result of `closure`, which re-evaluates the model.

        Raises ConfigError for sparse gradients, the first step inside a graph capture, and clipping over several
        devices; ShapeError or UnsupportedDtype for a gradient that does not match its parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    # --- hooks for subclasses ---
    def _check_group(self, group: dict[str, Any]) -> None:
        if group["differentiable"]:
            raise ConfigError(f"differentiable=True is not supported: use torch.optim.{type(self).__name__}")
        for name in self._non_negative:
            _check_non_negative(name, group[name])
        for i, param in enumerate(group["params"]):
            if param.dtype not in multi_tensor.DTYPES:
                supported = ", ".join(map(name_of, multi_tensor.DTYPES))
                raise UnsupportedDtype(f"optimizers take {supported}; parameter {i} is {name_of(param.dtype)}")

    def _group(self, group: dict[str, Any], device: torch.device) -> multi_tensor.AdamWGroup | multi_tensor.SGDGroup:
        raise NotImplementedError

    def _needs(self, param: Tensor, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the state tensors that a parameter needs."""
        has_master = self.defaults["master_weights"] and param.dtype in _LOW
        return (*self._names, "master") if has_master else self._names

    def _tensors(self, owned: _DeviceParameters, grads: list[Tensor], new: tuple[int, ...]) -> multi_tensor.Tensors:
        raise NotImplementedError

    def _added_decays(self, owned: _DeviceParameters) -> list[float]:
        """Return the weight decay to add to each gradient, after clipping; empty if there is none."""
        return []

    # --- a step ---
    def _reset(self) -> None:
        """Drop what was derived from groups and state; pointer tables stay valid, since addresses key them."""
        self._by_device: dict[torch.device, _DeviceParameters] = {}
        self._subsets: dict[tuple[torch.device, tuple[int, ...]], _DeviceParameters] = {}
        self._seen: tuple[Any, ...] = ()
        if not hasattr(self, "_workspaces"):
            self._workspaces: dict[torch.device, multi_tensor.Workspace] = {}

    @_without_dynamo
    def _update(self) -> None:
        groups = self.param_groups
        seen = (
            id(self.state),
            tuple(map(id, self.state.values())),  # a caller may replace a parameter's state
            tuple([(id(param), param.device) for group in groups for param in group["params"]]),
            tuple([(len(group["params"]), bool(group.get("momentum"))) for group in groups]),
        )
        if seen != self._seen:
            self._by_device, self._subsets, self._seen = {}, {}, seen
            for index, group in enumerate(groups):
                for param in group["params"]:
                    owned = self._by_device.setdefault(param.device, _DeviceParameters())
                    owned.params.append(param)
                    owned.states.append(self.state.get(param, {}))
                    owned.groups.append(index)
                    owned.ordinary = owned.ordinary and is_ordinary(_local(param))
                    owned.distributed = owned.distributed or is_distributed(param)
        if len(self._by_device) > 1 and self.defaults["max_grad_norm"] is not None:
            found = f"parameters are on {', '.join(map(str, self._by_device))}"
            raise ConfigError(
                f"max_grad_norm clips over one device; {found}: call clip_grad_norm_ before the step instead"
            )
        for device, owned in self._by_device.items():
            grads: list[Tensor] = [param.grad for param in owned.params]  # type: ignore[misc]
            present = [i for i, grad in enumerate(grads) if grad is not None]
            if len(present) < len(grads):
                key = (device, tuple(present))
                if (subset := self._subsets.get(key)) is None:
                    if len(self._subsets) >= _SUBSETS_LIMIT:
                        self._subsets.clear()
                    subset = self._subsets[key] = owned.subset(present)
                owned, grads = subset, [grads[i] for i in present]
            if grads:
                self._update_on(device, owned, grads)

    def _update_on(self, device: torch.device, owned: _DeviceParameters, grads: list[Tensor]) -> None:
        new = self._complete(device, owned, grads)
        if device.type == "meta":  # predictions of memory step so: there is state, and no value to update
            return
        tensors = self._tensors(owned, grads, new)
        if owned.distributed:
            columns: dict[str, Any] = dict(zip(multi_tensor.Tensors._fields[:6], tensors[:6], strict=True))
            columns = {name: [None if x is None else _local(x) for x in each] for name, each in columns.items()}
            tensors = tensors._replace(**columns)
        if (workspace := self._workspaces.get(device)) is None:
            workspace = self._workspaces[device] = multi_tensor.Workspace(device)
        groups = [self._group(group, device) for group in self.param_groups]
        scale, found_inf = (  # of torch.amp.GradScaler
            None if value is None else value.to(device, torch.float32, non_blocking=True)
            for value in (getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        )
        most = self.defaults["max_grad_norm"]
        update = multi_tensor.Update(tensors, groups, workspace, max_norm=most, grad_scale=scale, found_inf=found_inf)
        decays = self._added_decays(owned)
        if update.max_norm is not None and (owned.distributed or decays):
            norm = _norm_over_processes(grads)
            if update.grad_scale is not None:
                norm = norm / update.grad_scale
                if update.found_inf is None:
                    update.found_inf = norm.isfinite().logical_not().float().reshape(())
            update.workspace.norm.copy_(norm)
            factor = ((norm + 1e-6) / update.max_norm).clamp(min=1.0).float()
            update.grad_scale = factor if update.grad_scale is None else factor * update.grad_scale
            update.max_norm = None
        if decays:
            params = torch._foreach_mul(tensors.params, decays)
            if update.grad_scale is not None:  # by which the kernels divide
                params = torch._foreach_mul(params, update.grad_scale)
            update.tensors = tensors = tensors._replace(grads=list(torch._foreach_add(tensors.grads, params)))
        if not owned.ordinary or not is_plain(tensors.params[0]):
            (multi_tensor.torch_adamw if self._op is multi_tensor.adamw_step else multi_tensor.torch_sgd)(update)
            return
        update.table = workspace.table(tensors)
        options = (*((self._option,) if self._option else ()), *(("clipped",) if update.max_norm is not None else ()))
        self._op(multi_tensor.case_of(update.table, device, *options), update)
        torch.autograd.graph.increment_version(owned.params)

    def _complete(self, device: torch.device, owned: _DeviceParameters, grads: list[Tensor]) -> tuple[int, ...]:
        """Create missing state tensors; return the indices of parameters whose momentum buffer is new."""
        if owned.complete:
            return ()
        multi_tensor.check(multi_tensor.Tensors(owned.params, grads, [], [], [], [], []))
        new = []
        for i, (param, state) in enumerate(zip(owned.params, owned.states, strict=True)):
            names = self._needs(param, self.param_groups[owned.groups[i]])
            missing = [name for name in names if state.get(name) is None]
            if missing and capturing(device):
                raise ConfigError(
                    "the first step of a parameter is inside a graph capture, where each replay would start its state "
                    "afresh: run a step before the capture"
                )
            for name in missing:
                if name == "step":
                    state[name] = torch.zeros((), dtype=torch.float32, device=param.device)
                elif name == "master":
                    state[name] = param.detach().to(torch.float32, copy=True)
                else:
                    state[name] = torch.zeros_like(param, dtype=self._state_dtype(param), requires_grad=False)
            if missing:
                self.state[param] = state
            if "momentum_buffer" in missing:
                new.append(i)
        self._seen = (id(self.state), tuple(map(id, self.state.values())), *self._seen[2:])
        owned.complete = True
        return tuple(new)

    def _state_dtype(self, param: Tensor) -> torch.dtype:
        wide = self.defaults["state_dtype"] if param.dtype in _LOW else None
        return param.dtype if wide is None else cast("torch.dtype", wide)

    def _masters(self, owned: _DeviceParameters) -> list[Tensor | None]:
        """Return the float32 master copies; None for a parameter in float32."""
        return [state.get("master") for state in owned.states] if self.defaults["master_weights"] else []


@understood_arguments(learning_rate="lr")
class AdamW(MultiTensorOptimizer):
    """Adam with decoupled weight decay, all parameters in one launch.

    Takes the arguments of torch.optim.AdamW and three of its own. All parameters are updated in one launch whatever
    foreach, capturable and fused are; amsgrad and differentiable are refused.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2.

    Args:
        params: parameters, named parameters, or groups of them with values of their own.
        lr: learning rate; a number, or a tensor of one element: float32 on the parameters' device, or on the CPU.
        betas: decay rates of the two moments, each in [0, 1).
        eps: added to the square root of the second moment.
        weight_decay: multiplied by lr and subtracted from the parameter.
        maximize: maximize the objective instead of minimizing it.
        max_grad_norm: clip all gradients together to this norm, as clip_grad_norm_ does, without another pass over
            them and without modifying them.
        master_weights: keep a float32 copy of each float16 or bfloat16 parameter (state["master"]) and update that.
        state_dtype: dtype of the moments of float16 and bfloat16 parameters; None: the parameter's own, as in torch.

    Raises:
        ConfigError: a value is out of range.
        UnsupportedDtype: a parameter other than float16, bfloat16, float32 or float64.

    Computes in float32 (float64 for float64 parameters); bias corrections in float64.
    """

    _names = ("step", "exp_avg", "exp_avg_sq")
    _non_negative = ("lr", "eps", "weight_decay")
    _op = multi_tensor.adamw_step

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False, foreach: bool | None = None,
        capturable: bool = False, differentiable: bool = False, fused: bool | None = None,
        max_grad_norm: float | None = None, master_weights: bool = False,
        state_dtype: torch.dtype | str | None = torch.float32,
    ) -> None:  # fmt: skip
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize,
            "max_grad_norm": max_grad_norm, "master_weights": master_weights, "state_dtype": state_dtype,
            # Keys that torch.optim.AdamW expects when it loads this state:
            "amsgrad": amsgrad, "foreach": foreach, "capturable": capturable, "differentiable": differentiable,
            "fused": True, "decoupled_weight_decay": True,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        for i, beta in enumerate(group["betas"]):
            if isinstance(beta, Tensor) or not 0.0 <= beta < 1.0:
                raise ConfigError(f"betas[{i}] must be a number, at least 0 and below 1; got {beta!r}")
        if group["amsgrad"]:
            raise ConfigError(f"amsgrad=True is not supported: use torch.optim.{type(self).__name__}")

    def _group(self, group: dict[str, Any], device: torch.device) -> multi_tensor.AdamWGroup:
        beta1, beta2 = group["betas"]
        rate = _learning_rate(group["lr"], device)
        return multi_tensor.AdamWGroup(rate, beta1, beta2, group["eps"], group["weight_decay"], group["maximize"])

    def _tensors(self, owned: _DeviceParameters, grads: list[Tensor], new: tuple[int, ...]) -> multi_tensor.Tensors:
        states = owned.states
        first, second = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
        counters = [state["step"] for state in states]
        return multi_tensor.Tensors(owned.params, grads, first, second, self._masters(owned), counters, owned.groups)


@understood_arguments(learning_rate="lr")
class Adam(AdamW):
    """Adam, with AdamW's launch and arguments; as in torch.optim.Adam, weight_decay is added to the clipped gradients.

    Source: Kingma and Ba 2015, arXiv:1412.6980, algorithm 1.
    """

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, amsgrad: bool = False, *, decoupled_weight_decay: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)
        for group in (self.defaults, *self.param_groups):
            group["decoupled_weight_decay"] = decoupled_weight_decay

    def _group(self, group: dict[str, Any], device: torch.device) -> multi_tensor.AdamWGroup:
        return super()._group(group if group["decoupled_weight_decay"] else {**group, "weight_decay": 0.0}, device)

    def _added_decays(self, owned: _DeviceParameters) -> list[float]:
        groups = [self.param_groups[number] for number in owned.groups]
        decays = [0.0 if group["decoupled_weight_decay"] else group["weight_decay"] for group in groups]
        if not any(decays):
            return []
        return [-decay if group["maximize"] else decay for decay, group in zip(decays, groups, strict=True)]


@understood_arguments(learning_rate="lr")
class SGD(MultiTensorOptimizer):
    """Stochastic gradient descent with momentum, all parameters in one launch.

    Takes the arguments of torch.optim.SGD; the others are as in AdamW, with `state_dtype` the dtype of the momentum
    buffers. Raises as AdamW does. Source: Sutskever et al. 2013, in the form of torch.optim.SGD.
    """

    _names = ("momentum_buffer",)
    _non_negative = ("lr", "momentum", "weight_decay")
    _op = multi_tensor.sgd_step
    _option = "sgd"

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-3, momentum: float = 0.0, dampening: float = 0.0,
        weight_decay: float = 0.0, nesterov: bool = False, *, maximize: bool = False, foreach: bool | None = None,
        differentiable: bool = False, fused: bool | None = None, max_grad_norm: float | None = None,
        master_weights: bool = False, state_dtype: torch.dtype | str | None = torch.float32,
    ) -> None:  # fmt: skip
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov,
            "maximize": maximize, "max_grad_norm": max_grad_norm, "master_weights": master_weights,
            "state_dtype": state_dtype, "foreach": foreach, "differentiable": differentiable, "fused": True,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            got = f"{group['momentum']} and {group['dampening']}"
            raise ConfigError(f"nesterov needs a momentum above 0 and no dampening; got {got}")

    def _group(self, group: dict[str, Any], device: torch.device) -> multi_tensor.SGDGroup:
        names = ("momentum", "dampening", "nesterov", "weight_decay", "maximize")
        return multi_tensor.SGDGroup(_learning_rate(group["lr"], device), *(group[name] for name in names))

    def _needs(self, param: Tensor, group: dict[str, Any]) -> tuple[str, ...]:
        names = super()._needs(param, group)
        return names if group["momentum"] else names[1:]

    def _tensors(self, owned: _DeviceParameters, grads: list[Tensor], new: tuple[int, ...]) -> multi_tensor.Tensors:
        first: list[Tensor | None] = []
        if any([group["momentum"] for group in self.param_groups]):  # noqa: C419  a list is faster
            first = [
                state.get("momentum_buffer") if self.param_groups[number]["momentum"] else None
                for state, number in zip(owned.states, owned.groups, strict=True)
            ]
        return multi_tensor.Tensors(owned.params, grads, first, [], self._masters(owned), [], owned.groups, new)


# --- clipping --------------------------------------------------------------------------------------------------------
_clipping: dict[torch.device, multi_tensor.Workspace] = {}


def _local(x: Tensor) -> Tensor:
    """Return this process's part of a DTensor, any other tensor itself."""
    return x._local_tensor if is_distributed(x) else x  # type: ignore[attr-defined]  # a DTensor's


def _norm_over_processes(grads: Iterable[Tensor]) -> Tensor:
    """Return the norm of gradients of which each process may hold a part, the same in each.

    One number is summed over the processes for each way in which parameters are split; repeated parts count once.
    """
    parts: dict[tuple[Any, ...], list[Tensor]] = {}
    for grad in grads:
        groups: tuple[Any, ...] = ()
        if is_distributed(grad):
            mesh, placements = grad.device_mesh, grad.placements  # type: ignore[attr-defined]  # a DTensor's
            if any(placement.is_partial() for placement in placements):
                raise ConfigError(f"gradients must be summed over the processes first, got placements {placements}")
            groups = tuple(mesh.get_group(i) for i, each in enumerate(placements) if not each.is_replicate())
        parts.setdefault(groups, []).append(_local(grad))
    squares = []
    for groups, local in parts.items():
        square = multi_tensor.torch_norm(local)[0].double().square()
        for group in groups:
            torch.distributed.all_reduce(square, group=group)
        squares.append(square)
    return torch.stack(squares).sum().sqrt()


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale all gradients together, in place, so that their Euclidean norm is at most max_norm.

    scale = min(1, max_norm / (norm + 1e-6))

    Args:
        parameters: a tensor or several; those without a gradient are skipped.
        max_norm: at least 0.
        error_if_nonfinite: raise if the norm is not finite; synchronizes with the device.

    Returns:
        the norm before clipping, a float32 scalar on the first gradient's device (float64 for float64); 0 on the CPU if
        there are no gradients. Does not synchronize with the device. A NaN norm makes every gradient NaN; an infinite
        one makes finite entries 0 and infinite ones NaN.

    Raises:
        ConfigError: max_norm is negative or NaN; sparse gradients.
        UnsupportedDtype: gradients other than float16, bfloat16, float32 or float64.
        RuntimeError: the norm is not finite and error_if_nonfinite is set.

    Source: Pascanu, Mikolov and Bengio 2013, arXiv:1211.5063, algorithm 1.
    """
    _check_non_negative("max_norm", max_norm)
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not (grads := [param.grad for param in params if param.grad is not None]):
        return torch.tensor(0.0)
    norm: Tensor
    if any(map(is_distributed, grads)):
        norm = _norm_over_processes(grads).to(torch.promote_types(grads[0].dtype, torch.float32))
        _require_finite(norm, error_if_nonfinite)
        multi_tensor.torch_clip([_local(grad) for grad in grads], (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm
    if not is_plain(grads[0]) or not all(map(is_ordinary, grads)):
        norm, scale = multi_tensor.torch_norm(grads, max_norm)
        _require_finite(norm, error_if_nonfinite)
        multi_tensor.torch_clip(grads, scale)
        return norm
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).append(grad)
    calls = []
    for device, local in by_device.items():
        if (workspace := _clipping.get(device)) is None:
            workspace = _clipping[device] = multi_tensor.Workspace(device)
        table = workspace.table(multi_tensor.Tensors([], local, [], [], [], [], []))
        case = multi_tensor.case_of(table, device)
        calls.append((case, local, table, multi_tensor.global_norm(case, local, table, float(max_norm))))
    norm, scale = calls[0][3]
    if len(calls) > 1:
        norm = torch.linalg.vector_norm(torch.stack([partial[0].to(norm) for *_, partial in calls]))
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    _require_finite(norm, error_if_nonfinite)
    for case, local, table, _ in calls:
        multi_tensor.clip_step(case, local, table, scale.to(case.device))
        torch.autograd.graph.increment_version(local)
    return norm


def _require_finite(norm: Tensor, error_if_nonfinite: bool) -> None:
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(f"the norm of the gradients is {norm.item()}: not clipped (error_if_nonfinite=True)")


def __getattr__(name: str) -> Any:
    if name.startswith("_") or not hasattr(torch.optim, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(torch.optim, name)


# --- validation ------------------------------------------------------------------------------------------------------
def _check_non_negative(name: str, value: Any) -> None:
    """Raise unless a value is a number of at least 0, or an lr tensor of one element."""
    if isinstance(value, Tensor) and name == "lr":
        if value.numel() != 1:
            raise ShapeError(f"lr must have one element, got {tuple(value.shape)}")
        return
    if not isinstance(value, (int, float)) or not value >= 0:
        raise ConfigError(f"{name} must be a number, at least 0; got {value!r}")


def _learning_rate(lr: float | Tensor, device: torch.device) -> float | Tensor:
    """Return the learning rate as a number, or as a tensor that the kernels read on `device`."""
    if not isinstance(lr, Tensor):
        return lr
    if lr.device.type == "cpu" and device.type != "cpu":
        return float(lr)
    if lr.device != device or lr.dtype != torch.float32:
        got = f"{name_of(lr.dtype)} on {lr.device}"
        raise ConfigError(f"lr as a tensor must be float32 on {device} or on the CPU; got {got}")
    return lr
