"""An op with kernels for its value and its first derivative, as one object.

An op's module says what is its own: how to run forward and backward, what to keep in between, and torch's functions
that compute the same. What is the same for all ops is here: the way from a public call to the kernels (plain tensors go
straight there, traced ones through torch's dispatcher), the autograd functions, and the registration with torch.

    _rms_norm = DifferentiableOp(
        "rms_norm(Tensor x, Tensor? weight, float eps) -> (Tensor y, Tensor rstd)",
        forward=_forward,             # (x, weight, eps) -> (y, rstd)
        infer=_infer,                 # (x, weight, eps) -> y, where no gradient is asked
        backward=_backward,           # (dy, x, weight, rstd, eps, needs) -> (dx, dweight)
        saves=("x", "weight", "rstd"),
        gradients={"x": "x", "weight": "weight"},
        composite=_torch_forward,     # (x, weight, eps) -> y
        fake=_fake,                   # (x, weight, eps) -> (y, rstd)
    )
    ...
    return _rms_norm(x, weight, eps)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accelerant.ops._library import below_autograd, define, is_ordinary, is_plain, is_watched
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation

__all__ = ["ByTorch", "DifferentiableOp"]

_ARGUMENT = re.compile(r"(?P<type>[\w?\[\]]+) (?P<name>\w+)")
_TENSORS = frozenset({Tensor, torch.nn.Parameter})
"""Types whose tensors on a CPU torch's functions take as they are."""


@dataclass(frozen=True, slots=True)
class ByTorch:
    """How to call an op where torch's function for it, with torch's own autograd, is the best there is: on a CPU.

    An autograd function in Python costs several times a small call, and saves nothing that torch's does not. So where
    dispatch finds that torch alone serves a case, its function is called with autograd listening. The ledger counts
    the forward call, with the reason; the backward pass is then torch's and not counted.

    Attributes:
        forward: the forward pass. Its implementation by torch is marked `differentiable`.
        case: the arguments -> its case, or None for a call that torch's function does not serve.
        more: further arguments of the Operation, after the op's.
        cut: the Operation gives a tuple, of which the caller gets the public results.
    """

    forward: Operation
    case: Callable[..., Case | None]
    more: tuple[Any, ...] = ()
    cut: bool = False


class DifferentiableOp:
    """See the module's docstring. Calling it takes the schema's arguments, positional, already validated.

    Args:
        schema: of torch's registration, with a name for every result: "silu(Tensor x) -> (Tensor y)". Results after the
            public ones are for the backward pass alone.
        forward: the arguments -> all results, a tuple unless there is one.
        backward: (gradient of each differentiable result, None where nothing depends on it; the saved tensors; the
            arguments that are no tensors; needs) -> a gradient for each entry of `gradients`, None where it is not
            needed. `needs` is a tuple of bools, one for each.
        saves: names of arguments and results that the backward pass takes, tensors all of them.
        only_for: saved argument -> the differentiable ones whose gradients alone need it; absent where none is asked.
        gradients: differentiable argument -> the saved tensor that has its shape and dtype, or the result that has
            (its gradient is at hand): then nothing need be saved for the shape alone.
        shares: differentiable argument -> the entry of `gradients` whose gradient is its own too, as in a sum.
        composite: the arguments -> the public results, from torch's own differentiable functions.
        fake: the arguments -> all results, empty, with the right shape, dtype and strides.
        infer: the arguments -> the public results, where no gradient is asked; None: forward serves.
        public: how many results the caller gets.
        differentiable: how many of the public results carry a gradient, the first ones.
        composite_backward: as backward, from torch's own differentiable functions; None: composite is run again on the
            saved arguments and differentiated, which takes that every tensor argument is saved.
        keeps_layout: whether gradients have the strides of what they are like, not only its shape.
        decomposes: whether torch.compile is to see the composite rather than the op, to fuse it with what is around.
        by_torch: how to leave a call on the CPU to torch and its autograd; None: never.

    Attributes:
        forward, backward: as given, for whoever differentiates several ops in one autograd function.
    """

    def __init__(
        self,
        schema: str,
        *,
        forward: Callable[..., Any],
        backward: Callable[..., Sequence[Tensor | None]],
        saves: Sequence[str],
        gradients: Mapping[str, str],
        composite: Callable[..., Any],
        fake: Callable[..., Any],
        shares: Mapping[str, str] | None = None,
        only_for: Mapping[str, Sequence[str]] | None = None,
        infer: Callable[..., Any] | None = None,
        public: int = 1,
        differentiable: int = 1,
        composite_backward: Callable[..., Sequence[Tensor | None]] | None = None,
        keeps_layout: bool = False,
        decomposes: bool = False,
        by_torch: ByTorch | None = None,
    ) -> None:
        head, _, results = schema.partition("->")
        self.name = head.partition("(")[0]
        arguments = [(match["type"], match["name"]) for match in _ARGUMENT.finditer(head.partition("(")[2])]
        names = [name for _, name in arguments]
        outputs = [match["name"] for match in _ARGUMENT.finditer(results)]
        self._tensors = tuple(i for i, (kind, _) in enumerate(arguments) if kind.startswith("Tensor"))
        self._options = tuple(i for i, (kind, _) in enumerate(arguments) if not kind.startswith("Tensor"))
        self._places = tuple(names.index(name) for name in gradients)
        self._only_for = tuple(
            (list(saves).index(name), tuple(map(names.index, users))) for name, users in (only_for or {}).items()
        )
        self._shared = tuple((names.index(name), list(gradients).index(of)) for name, of in (shares or {}).items())
        inputs = [*(f"d_{name}" for name in outputs[:differentiable]), *saves]
        self._likes = tuple(inputs.index(like if like in saves else f"d_{like}") for like in gradients.values())
        self._saved_arguments = tuple(names.index(name) for name in saves if name in names)
        self._saved = tuple((name in names, (names if name in names else outputs).index(name)) for name in saves)
        self._outputs, self._public, self._differentiable = len(outputs), public, differentiable
        self._width = len(arguments)
        self._forward, self._infer, self._backward = forward, infer or self._public_forward, backward
        self.forward, self.backward = forward, backward
        self._composite = composite
        self.composite_backward = composite_backward or self._recomputed
        self._rank = (len(outputs[:differentiable]), len(saves))
        self._empty = torch.empty_like if keeps_layout else _contiguous
        self._decomposes = decomposes
        self._by_torch = by_torch
        self._second = Operation(
            f"{self.name}_bwd_create_graph",
            (Implementation("torch", self.composite_backward),),
            cost=lambda _: Cost(0, 0),
        )
        self._names = names
        eager, traced = self._functions()
        # Past Function.apply, which looks for transforms and dead wrappers in Python: plain tensors have neither.
        self._apply: Callable[..., Any] = super(torch.autograd.Function, eager).apply  # type: ignore[misc]
        self._op = define(
            schema, kernel=forward, fake=fake, differentiable=traced.apply, composite=self._padded(composite)
        )
        mark = "" if differentiable == 1 else "?"
        kinds = {name: kind for kind, name in arguments} | dict.fromkeys(outputs, "Tensor")
        parts = [f"Tensor{mark} d_{name}" for name in outputs[:differentiable]]
        kinds |= dict.fromkeys(only_for or (), "Tensor?")
        parts += [f"{kinds[name]} {name}" for name in saves]
        parts += [f"{arguments[i][0]} {names[i]}" for i in self._options]
        returns = ", ".join(["Tensor"] * len(gradients))
        self._op_backward = define(
            f"{self.name}_backward({', '.join([*parts, 'bool[] needs'])}) -> "
            + (f"({returns})" if len(gradients) > 1 else returns),
            kernel=self._all_tensors(backward),
            fake=self._fake_backward,
            differentiable=self._all_tensors(self.composite_backward),
            composite=self._all_tensors(self.composite_backward),
        )

    def __call__(self, *args: Any) -> Any:
        """The public results."""
        if torch.compiler.is_compiling():
            return self._composite(*args) if self._decomposes else self._cut(self._op(*args))
        if is_watched():
            return self._cut(self._op(*args))
        by_torch = self._by_torch
        wants = False
        for place in self._tensors:
            x = args[place]
            if x is not None:
                if by_torch is None or not x.is_cpu or type(x) not in _TENSORS:
                    if not is_ordinary(x):
                        return self._cut(self._op(*args))
                    by_torch = None
                wants = wants or x.requires_grad
        if by_torch is not None:
            case = by_torch.case(*args)
            found = NotImplemented if case is None else by_torch.forward.by_torch(case, args + by_torch.more)
            if found is not NotImplemented:
                return self._cut(found) if by_torch.cut else found
        if wants and torch.is_grad_enabled():
            return self._apply(*args)
        return self._infer(*args)

    # --- autograd ----------------------------------------------------------------------------------------------------

    def _functions(self) -> tuple[type[torch.autograd.Function], type[torch.autograd.Function]]:
        """The autograd functions for plain tensors and for traced ones, which see every result; named for profiles."""

        def eager_forward(ctx: Any, *args: Any) -> Any:
            return self._keep(ctx, args, self._forward(*args), self._public)

        def traced_forward(ctx: Any, *args: Any) -> Any:
            with below_autograd():
                results = self._op(*args)
            return self._keep(ctx, args, results, self._outputs)

        def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
            return self._gradients(ctx, dys[: self._differentiable])

        title = "".join(part.capitalize() for part in self.name.split("_"))
        eager, traced = (
            type(name, (torch.autograd.Function,), {"forward": staticmethod(f), "backward": staticmethod(backward)})
            for name, f in ((title, eager_forward), (f"{title}Traced", traced_forward))
        )
        return eager, traced

    def _keep(self, ctx: Any, args: tuple[Any, ...], results: Any, shown: int) -> Any:
        outputs = results if isinstance(results, tuple) else (results,)
        saved = [(args if argument else outputs)[at] for argument, at in self._saved]
        for at, users in self._only_for:
            if not any(ctx.needs_input_grad[place] for place in users):
                saved[at] = None
        ctx.save_for_backward(*saved)
        ctx.options = [args[i] for i in self._options]
        if shown > self._differentiable:
            ctx.mark_non_differentiable(*outputs[self._differentiable : shown])
        if shown > 1:
            ctx.set_materialize_grads(False)
        return outputs[:shown] if shown > 1 else outputs[0]

    def _gradients(self, ctx: Any, dys: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = [None] * self._width
        given = next((dy for dy in dys if dy is not None), None)
        if given is None:
            return tuple(gradients)
        needed = ctx.needs_input_grad
        needs = tuple([needed[place] for place in self._places])
        for place, entry in self._shared:
            needs = (*needs[:entry], needs[entry] or needed[place], *needs[entry + 1 :])
        saved = ctx.saved_tensors
        args = (*dys, *saved, *ctx.options, needs)
        found: Sequence[Tensor | None]
        if not is_plain(given):
            result = self._op_backward(*args[:-1], list(needs))
            found = result if isinstance(result, (tuple, list)) else (result,)
        elif torch.is_grad_enabled():
            found = self._second(Case(given.device, given.dtype, given.shape, ("create_graph",)), *args)
        else:
            found = self._backward(*args)
        for place, need, gradient in zip(self._places, needs, found, strict=True):
            if need:
                gradients[place] = gradient
        for place, entry in self._shared:
            gradients[place] = gradients[self._places[entry]]
        return tuple(gradients)

    def _recomputed(self, *args: Any) -> list[Tensor | None]:
        """The gradients from torch: the composite is run once more, on the saved arguments."""
        dys, saved, options, needs = self._split(args)
        whole: list[Any] = [None] * self._width
        for (argument, at), tensor in zip(self._saved, saved, strict=True):
            if argument:
                whole[at] = tensor
        for at, value in zip(self._options, options, strict=True):
            whole[at] = value
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            for place, need in zip(self._places, needs, strict=True):
                if need:
                    whole[place] = whole[place].view_as(whole[place]) if again else whole[place].detach()
                    whole[place].requires_grad_()
            results = self._composite(*whole)
            results = results if isinstance(results, tuple) else (results,)
            pairs = [(y, dy) for y, dy in zip(results, dys, strict=False) if dy is not None]
            wanted = [whole[place] for place, need in zip(self._places, needs, strict=True) if need]
            found = iter(
                torch.autograd.grad(
                    [y for y, _ in pairs],
                    wanted,
                    [dy for _, dy in pairs],
                    create_graph=again,
                    allow_unused=True,
                    materialize_grads=True,
                )
            )
        return [next(found) if need else None for need in needs]

    # --- registration ------------------------------------------------------------------------------------------------

    def _public_forward(self, *args: Any) -> Any:
        return self._cut(self._forward(*args))

    def _cut(self, results: Any) -> Any:
        """The public ones of all results."""
        if not isinstance(results, (tuple, list)):
            return results
        return results[0] if self._public == 1 else tuple(results[: self._public])

    def _padded(self, composite: Callable[..., Any]) -> Callable[..., Any]:
        """The composite as an op may give it: with an empty tensor for each result that is not public."""
        hidden = self._outputs - self._public
        if not hidden:
            return composite

        def run(*args: Any) -> Any:
            results = composite(*args)
            results = results if isinstance(results, tuple) else (results,)
            return (*results, *(results[0].new_empty(0) for _ in range(hidden)))

        return run

    def _split(self, args: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[bool]]:
        """What a backward pass is called with: gradients, saved tensors, options, needs."""
        count, saved = self._rank
        return args[:count], args[count : count + saved], args[count + saved : -1], args[-1]

    def _all_tensors(self, backward: Callable[..., Sequence[Tensor | None]]) -> Callable[..., Any]:
        """The same backward pass as an op may give it.

        Its results are tensors, so what is not needed is an empty one; and memory of their own, no argument's.
        """

        def run(*args: Any) -> Any:
            found = backward(*args)
            needs = args[-1]
            whole: list[Tensor] = []
            for gradient, like, need in zip(found, self._present(args), needs, strict=True):
                if gradient is None or not need:
                    whole.append(args[like].new_empty(0))
                else:
                    own = all(gradient is not other for other in (*args, *whole))
                    whole.append(gradient if own else gradient.clone())
            return tuple(whole) if len(whole) > 1 else whole[0]

        return run

    def _present(self, args: Sequence[Any]) -> list[int]:
        """Where to read dtype and device of each gradient: an absent argument's is no one's, so any tensor serves."""
        some = next(i for i, arg in enumerate(args) if isinstance(arg, Tensor))
        return [like if isinstance(args[like], Tensor) else some for like in self._likes]

    def _fake_backward(self, *args: Any) -> Any:
        whole = [
            self._empty(args[like]) if need else args[like].new_empty(0)
            for like, need in zip(self._present(args), args[-1], strict=True)
        ]
        return tuple(whole) if len(whole) > 1 else whole[0]


def _contiguous(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)
