"""BatchNorm that is a constant map of each example: in eval mode, with its running statistics, and not trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from accelerant.errors import UnsupportedCase
from accelerant.privacy.dp.clipping.copies import leave_out, mark

__all__ = ["BatchNorm", "require", "watch", "why_not"]

BatchNorm = nn.modules.batchnorm._BatchNorm
_FORWARDS = (BatchNorm.forward, nn.SyncBatchNorm.forward)


def why_not(module: nn.Module) -> str | None:
    """Why per-example gradients beside a BatchNorm cannot be exact; None where they can."""
    if module.training or not _has_statistics(module):
        return (
            "it mixes the examples of a batch: take GroupNorm or LayerNorm; or keep it as it is, in eval mode with "
            "its running statistics and frozen (eval(), requires_grad_(False))"
        )
    if any(each.requires_grad for each in module.parameters()):
        return "in eval mode it must be frozen as well: requires_grad_(False)"
    return None


def watch(name: str, module: nn.Module) -> Callable[[], None]:
    """Refuse each forward pass of a frozen BatchNorm that is so no longer; returns what ends that.

    In train mode its running statistics would take up what the examples hold, with gradients recorded or not.
    """

    def before(module: nn.Module, args: Any) -> None:
        require(name, module)

    hook, whole = module.register_forward_pre_hook(mark(before)), leave_out(module)

    def undo() -> None:
        hook.remove()
        whole()

    return undo


def require(name: str, module: nn.Module) -> None:
    """Check that a BatchNorm is in eval mode still, and has its running statistics.

    Raises:
        UnsupportedCase: it is not, or has none; by name.
    """
    if module.training:
        raise UnsupportedCase(
            f"{name} ({type(module).__name__}) was put into train mode, where it mixes the examples of a batch and "
            "keeps what they held: call its eval() after the model's train()"
        )
    if not _has_statistics(module):
        raise UnsupportedCase(
            f"{name} ({type(module).__name__}) has no running statistics any more, or another forward: it would mix "
            "the examples of a batch. Put back what it had when make_private was called"
        )


def _has_statistics(module: nn.Module) -> bool:
    """Whether in eval mode it normalises by numbers that are no batch's."""
    plain = type(module).forward in _FORWARDS and "forward" not in module.__dict__
    return plain and module.running_mean is not None
