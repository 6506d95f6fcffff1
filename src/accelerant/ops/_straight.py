"""Calls that go straight to torch's function for an op: on a CPU, of a kind that was checked and left to torch before.

A small call of torch's takes a microsecond or two. To check its arguments, build its case and look up its plan took
another 2 to 15, and several times that where large tensors have just passed through the caches. So a public function
remembers each kind of call (dtypes, shapes, options) that dispatch left to torch and its autograd; the next one of that
kind is counted and made.

    @straight("softmax_fwd", lambda x, dim=-1: torch.softmax(x, dim))
    def softmax(x: Tensor, dim: int = -1) -> Tensor:
        ...

The function itself runs, as if there were nothing here, for whatever is not that plain: another device, a tensor that
is not contiguous, a subclass, a mode or a transform that watches, torch.compile, autocast, settings that a choice
depends on, somebody who asks for the reasons, a call whose turn it is to be timed. And where torch's function raises:
so errors are in the op's words.

Which of the two runs makes no difference to a program: both give the same bits in the same layout, and keep the same
for the gradient. (Torch's checkpoint compares what two runs keep, of which one may go straight and the other not.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from accelerant.config import choice_overrides
from accelerant.ops._library import is_watched
from accelerant.runtime.dispatch import operations, taken_by_torch
from accelerant.runtime.dispatch.decisions import observers
from accelerant.runtime.dispatch.rules import torch_wants_determinism
from accelerant.runtime.ledger import OpRecord, ledger

__all__ = ["straight"]

P = ParamSpec("P")
R = TypeVar("R")

_KINDS_LIMIT = 4096
"""The most kinds of call that a function remembers."""

_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_VALUES = frozenset({int, float, bool, str, tuple, type(None)})
"""Types of options that say all by what they equal. (Torch's functions refuse a 2.0 in place of a 2.)"""
_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, OverflowError)
"""What torch's functions raise. Checkpoint ends a call by an error of another kind, which is to reach it."""

_count, _discount, _failed = ledger().count, ledger().discount, ledger().failed
_autocasts: Callable[[], bool] = torch._C._is_any_autocast_enabled


def straight(
    op: str,
    torchs: Callable[..., Any],
    *,
    serves: Callable[..., bool] | None = None,
    learns: bool = False,
    strided: bool = False,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a public function's calls go straight to torch's, once they are known to end there; see the module.

    Args:
        op: the Operation of the forward pass, by its name in the ledger; a call is learnt if its `by_torch` ran.
        torchs: takes what the public function takes; gives what it gives, and keeps for the gradient what it keeps, for
            contiguous tensors of one kind.
        serves: whether torchs does so for these arguments; asked once for each kind. None: always.
        learns: whether the choice depends on which of the tensors autograd listens to.
        strided: whether torchs takes what is not contiguous, too; then strides are part of a kind.
    """

    def decorate(public: Callable[P, R]) -> Callable[P, R]:
        known: dict[Hashable, OpRecord] = {}

        def learnt(key: Hashable, /, *args: P.args, **options: P.kwargs) -> R:
            taken_by_torch.clear()
            y = public(*args, **options)
            record = taken_by_torch.record
            if record is not None and record.op == op and (serves is None or serves(*args, **options)):
                if len(known) >= _KINDS_LIMIT:
                    known.clear()
                operations()[op].also_forgets(known)
                known[key] = record
            return y

        @functools.wraps(public)
        def call(*args: P.args, **options: P.kwargs) -> R:
            if is_compiling():
                return public(*args, **options)
            key: tuple[Any, ...] = (torch.is_grad_enabled(),) if learns else ()
            given: tuple[Any, ...] = (*args, *options, *options.values()) if options else args
            record, plain = None, False
            try:
                for x in given:
                    kind = type(x)
                    if kind in _TENSORS:
                        if strided and x.is_cpu:
                            key += (x.stride(),)
                        elif not (x.is_cpu and x.is_contiguous()):
                            break
                        key += (x.dtype, x.shape, x.requires_grad) if learns else (x.dtype, x.shape)
                    elif kind in _VALUES:
                        key += (x,)
                    else:
                        break
                else:
                    record, plain = known.get(key), True
            except (RuntimeError, TypeError):  # a sparse or nested tensor; a list within a tuple
                pass
            if not plain or is_watched() or observers or choice_overrides or torch_wants_determinism() or _autocasts():
                return public(*args, **options)
            if record is None:
                return learnt(key, *args, **options)
            if _count(record):
                try:
                    found: R = torchs(*args, **options)
                except _ERRORS:
                    _discount(record)  # the function itself says what is wrong, in its own words
                except BaseException:
                    _failed(record)
                    raise
                else:
                    return found
            return public(*args, **options)

        return call

    return decorate
