"""What the optimisers share: which tensors a step takes, their state, and the call of the op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.ops._library import is_ordinary, is_plain, name_of
from accelerant.ops.multi_tensor.op import AdamWGroup, SGDGroup, Tensors, Update, Workspace, adamw_step, case_of, check
from accelerant.ops.multi_tensor.tables import DTYPES, capturing
from accelerant.ops.multi_tensor.torch_steps import torch_adamw, torch_sgd
from accelerant.runtime.dispatch import Operation

__all__ = ["Entry", "MultiTensorOptimizer", "check_common", "check_not_negative", "rate_of"]

_F = TypeVar("_F", bound=Callable[..., Any])
_without_dynamo: Callable[[_F], _F] = getattr(torch, "_disable_dynamo")  # noqa: B009  torch does not declare it
_LOW = (torch.float16, torch.bfloat16)
_PARTS_LIMIT = 64  # sets of parameters that had a gradient


@dataclass(slots=True)
class Entry:
    """The parameters of one device, with their states and the numbers of their groups.

    Attributes:
        complete: each state has what its group needs.
        ordinary: no parameter is a tensor subclass or without memory.
    """

    params: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    complete: bool = False
    ordinary: bool = True

    def only(self, places: list[int]) -> Entry:
        """The parameters in these places."""
        params, states, groups = ([each[i] for i in places] for each in (self.params, self.states, self.groups))
        return Entry(params, states, groups, self.complete, self.ordinary)  # type: ignore[arg-type]


class MultiTensorOptimizer(torch.optim.Optimizer):
    """What AdamW and SGD share: which tensors there are, and the call of the op."""

    _step_supports_amp_scaling = True  # torch.amp.GradScaler leaves scale and finding to us
    _names: ClassVar[tuple[str, ...]]  # of the state's tensors
    _op: ClassVar[Operation]
    _option: ClassVar[str] = ""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        for name, allowed in (("max_grad_norm", (None,)), ("lr", ())):
            check_not_negative(name, defaults[name], allowed)
        self._reset()
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, with the values checked.

        Raises:
            ConfigError: a value that has no meaning.
            UnsupportedDtype: a parameter other than float16, bfloat16, float32 or float64.
        """
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
        """Take the state of another, torch's included; moments keep their dtype, counters go to the device."""
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
        """The norm of all gradients before clipping, float32 on the device; None unless max_grad_norm is set.

        The next step writes over it: clone it to keep it.
        """
        workspaces = list(self._workspaces.values())
        return workspaces[0].norm if workspaces and self.defaults["max_grad_norm"] is not None else None

    def refresh(self) -> None:
        """Put the groups' present numbers on the device, for replays of a captured step to read."""
        for device, workspace in self._workspaces.items():
            workspace.values.refresh(tuple([self._group(group, device).row() for group in self.param_groups]))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            what the closure returned.

        Raises:
            ConfigError: sparse gradients; the first step inside a graph capture; clipping over several devices.
            ShapeError, UnsupportedDtype: a gradient does not fit its parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    # --- for the subclasses ---

    def _check_group(self, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _group(self, group: dict[str, Any], device: torch.device) -> AdamWGroup | SGDGroup:
        raise NotImplementedError

    def _needs(self, param: Tensor, group: dict[str, Any]) -> tuple[str, ...]:
        """The names of a parameter's state."""
        return (*self._names, "master") if self._has_master(param) else self._names

    def _tensors(self, entry: Entry, grads: list[Tensor], new: tuple[int, ...]) -> Tensors:
        raise NotImplementedError

    # --- a step ---

    def _reset(self) -> None:
        """Forget what was derived from groups and state. Tables stay: they are found by addresses."""
        self._entries: dict[torch.device, Entry] = {}
        self._parts: dict[tuple[torch.device, tuple[int, ...]], Entry] = {}
        self._seen: tuple[Any, ...] = ()
        if not hasattr(self, "_workspaces"):
            self._workspaces: dict[torch.device, Workspace] = {}

    @_without_dynamo
    def _update(self) -> None:
        groups = self.param_groups
        seen = (
            id(self.state),
            len(self.state),
            tuple([(id(param), param.device) for group in groups for param in group["params"]]),
            tuple([(len(group["params"]), bool(group.get("momentum"))) for group in groups]),
        )
        if seen != self._seen:
            self._entries, self._parts = self._sort(), {}
            self._seen = seen
        if len(self._entries) > 1 and self.defaults["max_grad_norm"] is not None:
            raise ConfigError(
                f"max_grad_norm clips over one device; parameters are on {', '.join(map(str, self._entries))}: "
                "call clip_grad_norm_ before the step instead"
            )
        for device, entry in self._entries.items():
            grads: list[Tensor] = [param.grad for param in entry.params]  # type: ignore[misc]
            there = [place for place, grad in enumerate(grads) if grad is not None]
            if len(there) < len(grads):
                key = (device, tuple(there))
                part = self._parts.get(key)
                if part is None:
                    if len(self._parts) >= _PARTS_LIMIT:
                        self._parts.clear()
                    part = self._parts[key] = entry.only(there)
                entry, grads = part, [grads[place] for place in there]
            if grads:
                self._update_on(device, entry, grads)

    def _sort(self) -> dict[torch.device, Entry]:
        entries: dict[torch.device, Entry] = {}
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                entry = entries.setdefault(param.device, Entry())
                entry.params.append(param)
                entry.states.append(self.state.get(param, {}))
                entry.groups.append(number)
                entry.ordinary = entry.ordinary and is_ordinary(param)
        return entries

    def _update_on(self, device: torch.device, entry: Entry, grads: list[Tensor]) -> None:
        new = self._complete(device, entry, grads)
        tensors = self._tensors(entry, grads, new)
        workspace = self._workspaces.get(device)
        if workspace is None:
            workspace = self._workspaces[device] = Workspace(device)
        groups = [self._group(group, device) for group in self.param_groups]
        update = Update(
            tensors,
            groups,
            workspace,
            max_norm=self.defaults["max_grad_norm"],
            grad_scale=_on(device, getattr(self, "grad_scale", None)),
            found_inf=_on(device, getattr(self, "found_inf", None)),
        )
        if not entry.ordinary or not is_plain(entry.params[0]):
            (torch_adamw if self._op is adamw_step else torch_sgd)(update)
            return
        update.table = workspace.table(tensors)
        options = (*((self._option,) if self._option else ()), *(("clipped",) if update.max_norm is not None else ()))
        self._op(case_of(update.table, device, *options), update)
        torch.autograd.graph.increment_version(entry.params)

    def _complete(self, device: torch.device, entry: Entry, grads: list[Tensor]) -> tuple[int, ...]:
        """Make what state is lacking; the places where that is the momentum buffer."""
        if entry.complete:
            return ()
        check(Tensors(entry.params, grads, [], [], [], [], []))
        new = []
        for place, (param, state) in enumerate(zip(entry.params, entry.states, strict=True)):
            names = self._needs(param, self.param_groups[entry.groups[place]])
            lacking = [name for name in names if state.get(name) is None]
            if lacking and capturing(device):
                raise ConfigError(
                    "the first step of a parameter is inside a graph capture, where each replay would start its state "
                    "afresh: run a step before the capture"
                )
            for name in lacking:
                state[name] = self._make(name, param)
            if lacking:
                self.state[param] = state
            if "momentum_buffer" in lacking:
                new.append(place)
        self._seen = (id(self.state), len(self.state), *self._seen[2:])
        entry.complete = True
        return tuple(new)

    def _make(self, name: str, param: Tensor) -> Tensor:
        if name == "step":
            return torch.zeros((), dtype=torch.float32, device=param.device)
        if name == "master":
            return param.detach().to(torch.float32, copy=True)
        return torch.zeros_like(param, dtype=self._state_dtype(param), requires_grad=False)

    def _state_dtype(self, param: Tensor) -> torch.dtype:
        wide = self.defaults["state_dtype"] if param.dtype in _LOW else None
        return param.dtype if wide is None else cast("torch.dtype", wide)

    def _has_master(self, param: Tensor) -> bool:
        return bool(self.defaults["master_weights"]) and param.dtype in _LOW

    def _masters(self, entry: Entry) -> list[Tensor | None]:
        """The float32 copies; none of a parameter of float32."""
        return [state.get("master") for state in entry.states] if self.defaults["master_weights"] else []


# --- values ----------------------------------------------------------------------------------------------------------


def check_common(group: dict[str, Any], names: tuple[str, ...]) -> None:
    """A group's values that may not be negative, and its parameters' dtypes.

    Raises:
        ConfigError, ShapeError, UnsupportedDtype: naming what is wrong.
    """
    for name in names:
        check_not_negative(name, group[name])
    for place, param in enumerate(group["params"]):
        if param.dtype not in DTYPES:
            wanted = ", ".join(map(name_of, DTYPES))
            raise UnsupportedDtype(f"optimisers take {wanted}; parameter {place} is {name_of(param.dtype)}")


def check_not_negative(name: str, value: Any, allowed: tuple[Any, ...] = ()) -> None:
    """That a value is a number and at least 0, or one of `allowed`, or a learning rate of one element.

    Raises:
        ConfigError, ShapeError: it is not.
    """
    if isinstance(value, Tensor) and name == "lr":
        if value.numel() != 1:
            raise ShapeError(f"lr must have one element, got {tuple(value.shape)}")
        return
    if any(value is each for each in allowed):
        return
    if not isinstance(value, (int, float)) or not value >= 0:
        raise ConfigError(f"{name} must be a number, at least 0; got {value!r}")


def rate_of(lr: float | Tensor, device: torch.device) -> float | Tensor:
    """A number, or what the kernels read at its address.

    Raises:
        ConfigError: a tensor of another dtype, or on another device.
    """
    if not isinstance(lr, Tensor):
        return lr
    if lr.device.type == "cpu" and device.type != "cpu":
        return float(lr)
    if lr.device != device or lr.dtype != torch.float32:
        raise ConfigError(
            f"lr as a tensor must be float32 on {device} or on the CPU; got {name_of(lr.dtype)} on {lr.device}"
        )
    return lr


def _on(device: torch.device, value: Tensor | None) -> Tensor | None:
    """What torch.amp.GradScaler gives, on a device."""
    return None if value is None else value.to(device, torch.float32, non_blocking=True)
