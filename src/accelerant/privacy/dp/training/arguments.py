"""The arguments of `make_private`, checked before anything is attached."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import nn

from accelerant.errors import ConfigError, UnsupportedCase
from accelerant.privacy.dp.ledger.events import check_number
from accelerant.privacy.dp.training.adaptive import AdaptiveClipping
from accelerant.privacy.dp.training.optimizer import PrivateOptimizer, require_wide

__all__ = ["Arguments", "clipping_of", "require_fit"]


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """The numbers of `make_private`; noise_multiplier is -1 until it is found for a target."""

    noise_multiplier: float
    target_epsilon: float | None
    steps: int | None
    delta: float
    sensitivity: float
    sample_rate: float
    expected_batch_size: float | None
    microbatch: int | None

    @classmethod
    def checked(
        cls,
        noise_multiplier: float | None,
        target_epsilon: float | None,
        steps: int | None,
        delta: float,
        max_grad_norm: float | Mapping[str, float],
        sample_rate: float,
        expected_batch_size: float | None,
        microbatch: int | None,
    ) -> Arguments:
        """The numbers, if each has a meaning.

        Raises:
            ConfigError: naming the first that has none.
        """
        if (noise_multiplier is None) == (target_epsilon is None):
            given = f"got noise_multiplier={noise_multiplier!r} and target_epsilon={target_epsilon!r}"
            raise ConfigError(f"give either noise_multiplier or target_epsilon (with steps); {given}")
        if target_epsilon is not None:
            check_number("target_epsilon", target_epsilon)
            if steps is None:
                raise ConfigError("target_epsilon needs the planned number of steps: give steps")
        for name, value in (("steps", steps), ("microbatch", microbatch)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name} must be a whole number, at least 1, or None; got {value!r}")
        check_number("delta", delta, most=0.5)
        norms = dict(max_grad_norm) if isinstance(max_grad_norm, Mapping) else {"max_grad_norm": max_grad_norm}
        squares = [check_number(name, value) ** 2 for name, value in norms.items()]
        if not squares:
            raise ConfigError("max_grad_norm names no layer")
        if expected_batch_size is not None:
            check_number("expected_batch_size", expected_batch_size)
        return cls(
            -1.0 if noise_multiplier is None else check_number("noise_multiplier", noise_multiplier, open_below=False),
            target_epsilon,
            steps,
            float(delta),
            sum(squares) ** 0.5,
            check_number("sample_rate", sample_rate, most=1.0),
            expected_batch_size,
            microbatch,
        )


def require_fit(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Check model and optimiser before anything is attached; the numbers in the parameters to train.

    Raises:
        ConfigError, UnsupportedCase: naming what does not fit.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise UnsupportedCase(
            f"{type(model).__name__} adds gradients up before they are clipped: give its module; the private step "
            f"sums over "
            "the processes of torch.distributed itself"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, PrivateOptimizer):
        raise ConfigError("the optimizer is private already: detach() the PrivateTraining first")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedCase("LBFGS evaluates the loss several times a step: take another optimizer")
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    wanted = {id(parameter): parameter for parameter in model.parameters() if parameter.requires_grad}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for place, parameter in enumerate(held):
        if id(parameter) not in named:
            raise ConfigError(
                f"parameter {place} of the optimizer, {tuple(parameter.shape)}, is not the model's: it would be "
                f"updated by a "
                "gradient that is not clipped"
            )
    for key in wanted.keys() - {id(parameter) for parameter in held}:
        raise ConfigError(
            f"{named[key]} requires a gradient and is not in the optimizer: freeze it by requires_grad_(False), or "
            f"add it"
        )
    for key, parameter in wanted.items():
        require_wide(named[key], parameter)
    if not wanted:
        raise ConfigError(f"{type(model).__name__} has no parameter that requires a gradient")
    return sum(parameter.numel() for parameter in wanted.values())


def clipping_of(clipping: object, max_grad_norm: float | Mapping[str, float]) -> AdaptiveClipping | None:
    """The settings of adaptive clipping; None where the norm stays.

    Raises:
        ConfigError: it is no way of clipping, or adaptive clipping from several norms.
    """
    adaptive = AdaptiveClipping() if clipping == "adaptive" else clipping
    if isinstance(adaptive, AdaptiveClipping):
        if isinstance(max_grad_norm, Mapping):
            raise ConfigError(f"adaptive clipping starts from one max_grad_norm, got {max_grad_norm!r}")
        return adaptive
    if clipping not in ("flat", "per_layer"):
        raise ConfigError(f"clipping must be flat, per_layer, adaptive or an AdaptiveClipping, got {clipping!r}")
    return None
