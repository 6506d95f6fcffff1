"""What dispatch chooses for and among: a case, its least cost, the ways to run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

__all__ = ["Case", "Cost", "Implementation", "case_of", "group_of", "saved_by"]


class Case(NamedTuple):
    """What a choice may depend on; hashable and cheap.

    Attributes:
        device: where the inputs are.
        dtype: of the main input.
        shape: the sizes that matter to the op, for example (M, N).
        options: what else matters, for example ("tanh",) or strides.
    """

    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]
    options: tuple[Any, ...] = ()

    def __str__(self) -> str:
        parts = ["x".join(map(str, self.shape)) or "scalar", str(self.dtype).removeprefix("torch.")]
        return " ".join(parts + [str(option) for option in self.options if option != ""])


case_of: Callable[[tuple[torch.device, torch.dtype, tuple[int, ...], tuple[Any, ...]]], Case]
case_of = partial(tuple.__new__, Case)
"""A Case of its four fields, in a quarter of the time that the class takes in Python: for what each call makes."""


class Cost(NamedTuple):
    """The least work of a call: bytes with each input read once and each output written once; operations."""

    bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to run an op.

    Attributes:
        name: "triton", "torch", "cublaslt", ...
        run: takes what the Operation is called with after the Case.
        refuses: the reason why it cannot serve a case, or None; None altogether if it serves all.
        own: Accelerant's own kernel, not a library's.
        deterministic: the same inputs give the same bits; False for one that sums with atomics, which is refused where
            the setting `deterministic` holds.
        mutates: it changes its arguments, and so is never raced: a second run would start from other ones. Where it
            fails, another one runs only if it is our own and had launched no kernel yet: a fallback starts from the
            arguments, and what a library had written by then cannot be known.
        differentiable: made of torch's differentiable functions, so that on a CPU, where nothing else serves a case,
            the op can leave the gradient to torch's own autograd, which gives the same bits each time there.
        group: of implementations of an op and its backward that read each other's saved tensors, for example "cudnn";
            "" for those that share the op's own form of them. See saved_by.
    """

    name: str
    run: Callable[..., Any]
    refuses: Callable[[Case], str | None] | None = None
    own: bool = False
    deterministic: bool = True
    mutates: bool = False
    differentiable: bool = False
    group: str = ""


_SAVED_BY = "saved by "


def saved_by(group: str) -> str:
    """The option of a backward case that says whose saved tensors it has.

    An implementation with a group gives it back with what it saves, so that the op knows which ran, also after a
    fallback. The backward Operation is declared with `pairs_with`, and refuses the implementations of other groups.
    """
    return f"{_SAVED_BY}{group}" if group else ""


def group_of(case: Case) -> str:
    """Whose saved tensors a backward case has; see saved_by."""
    for option in case.options:
        if isinstance(option, str) and option.startswith(_SAVED_BY):
            return option.removeprefix(_SAVED_BY)
    return ""
