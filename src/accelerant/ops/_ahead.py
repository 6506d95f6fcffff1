"""An op that makes its gradient beside its value, in one pass over its input.

A loss is a scalar and its upstream gradient nearly always 1. So the gradient can be made while the input is on chip,
and the backward pass multiplies it by what comes from upstream, which costs nothing where that is 1. The first backward
pass gives that memory away; another one (retain_graph=True), one that is itself differentiated, and traced calls take
the op's usual way, from what it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from accelerant.errors import UnsupportedCase
from accelerant.ops._differentiable import DifferentiableOp
from accelerant.ops._library import is_plain

__all__ = ["AheadOp"]


class AheadOp(DifferentiableOp):
    """A DifferentiableOp whose eager calls may make their gradients ahead.

    Args:
        ahead: (needs, the arguments) -> None where this call's gradients are not made ahead; else all results (None
            for one that is not needed any more), what `finish` takes, and whether the saved arguments were overwritten,
            so that only one backward pass can be.
        finish: (gradient of the first result, what `ahead` gave it, the arguments that are no tensors, needs) -> a
            gradient for each entry of `gradients`.
    """

    def __init__(
        self,
        schema: str,
        *,
        ahead: Callable[..., tuple[tuple[Tensor | None, ...], Any, bool] | None],
        finish: Callable[..., Sequence[Tensor | None]],
        **parts: Any,
    ) -> None:
        super().__init__(schema, **parts)
        self._ahead, self._finish = ahead, finish
        self._apply = self._eager_function().apply

    def _eager_function(self) -> type[torch.autograd.Function]:
        def forward(ctx: Any, *args: Any) -> Any:
            needed = ctx.needs_input_grad
            made = self._ahead(tuple([needed[place] for place in self._places]), *args)
            if made is None:
                ctx.ahead, ctx.once = None, False
                return self._keep(ctx, args, self._forward(*args), self._public)
            results, ctx.ahead, ctx.once = made
            return self._keep(ctx, args, results, self._public)

        def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
            dy, ahead = dys[0], ctx.ahead
            if ahead is None or dy is None or torch.is_grad_enabled() or not is_plain(dy):
                if ctx.once:
                    raise UnsupportedCase(
                        f"{self.name} wrote its gradient over its input: there can be one backward pass, and none that "
                        "is differentiated itself (create_graph=True) or transformed; call it without the in-place "
                        "option for more"
                    )
                return self._gradients(ctx, dys[: self._differentiable])
            ctx.ahead = None  # given away: what comes out may be kept, or changed, by whoever gets it
            needs = tuple([ctx.needs_input_grad[place] for place in self._places])
            gradients: list[Tensor | None] = [None] * self._width
            for place, gradient in zip(self._places, self._finish(dy, ahead, *ctx.options, needs), strict=True):
                gradients[place] = gradient
            return tuple(gradients)

        title = "".join(part.capitalize() for part in self.name.split("_"))
        functions = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        return type(f"{title}Ahead", (torch.autograd.Function,), functions)
