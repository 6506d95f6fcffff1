"""Checks that a loss outside of the model treats each example by itself.

A loss that divides by a number of the batch (a sum of class weights, a count of labels) gives each example a gradient
that all others change. So torch's functions between a draw, the model's result and `backward` are recorded, but for the
model's, and called again with about half of the rows replaced: the gradient at the result of each row that was kept
must be as it was. Without the others it must be what the reduction says. Rows of the batch that was checked before must
have the gradients that they had in it, whatever Python did with sizes and values of the two. That is done in the first
passes, and then at random. Means that divide by class weights, or by a count of labels, are known by their arguments.
"""

from __future__ import annotations

import inspect
import math
import random
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from accelerant.errors import ConfigError, UnsupportedCase
from accelerant.ops._differentiable import recorders
from accelerant.privacy.dp.clipping import PerExampleClipper
from accelerant.privacy.dp.clipping.rules import tensors_of
from accelerant.privacy.dp.training.separation import caller_literals, compiled, misfit, rows_of

_FIRST = 10  # Backward passes whose loss is repeated
_SHARE = 1 / 512  # of the later passes: repeating a loss takes about as long as five losses
_TOLERANCE = 1e-4  # Largest change of a row's gradient that counts as none, relative to the largest
_IGNORE_INDEX = -100  # torch's default
_MOST_OPS = 4000  # Recorded calls after which recording ends: a loop that never calls backward

_REMEDY = (
    "The loss must be a sum of the examples' losses with loss_reduction='sum', or that sum over a number that no "
    "example changes: the rows of the batch, not those that count. Average the tokens of a row first, then the rows"
)

_WEIGHTS = (
    "the loss is a mean that weight= of cross_entropy or nll_loss divides by the sum of its labels' weights. Give "
    "reduction='none' and take the mean of that, or reduction='sum' and loss_reduction='sum'"
)

_IGNORED = (
    "the loss is a mean over the labels that are not ignore_index, and rows have different numbers of them. Give "
    "reduction='none' and take the mean of that, or reduction='sum' and loss_reduction='sum'"
)

_HOSTED = (
    "Python or NumPy read values of the batch before it, and its numbers, tensors or choices may depend on those values"
)

_CHANGING = "its numbers or operations are not those of the batch before, and may follow sizes or values of the two"

_GIVEN = "the model is given what Python or NumPy may have made of the batch's values"

_ROWS = "Each example changes the share of all others, and one row could move the sum by many times max_grad_norm"


class LossCheck:
    """Records the loss of a pass of a clipper's model, and repeats it with other rows."""

    def __init__(self, clipper: PerExampleClipper) -> None:
        self._clipper = clipper
        self._left, self._begun, self._chance = _FIRST, 0, random.Random()
        self._trace: _LossTrace | None = None
        self._calls = 0  # of the model that have not returned
        self._warned = False
        self._doubted = 0  # rows of a pass whose loss seemed reduced otherwise by a number that was perhaps another
        self._witness: _Witness | None = None

    # --- recording ---------------------------------------------------------------------------------------------------

    def begin(self, inputs: Any) -> None:
        """Record from here on, if it is time to: the batch is in use."""
        self.end()
        if self._due():
            self._trace = _LossTrace(self._clipper, pytree.tree_leaves(inputs), drawn=True)
            _LossTrace.remove(instead=self._trace)

    def enter_model(self, inputs: Any, *, trial: bool) -> None:
        """Leave out what the model calls, and note its inputs."""
        if torch._C._current_graph_task_id() == -1:  # else of a checkpoint
            if self._trace is not None and not self._calls and not trial:
                self._trace.add_inputs(pytree.tree_leaves(inputs))
            self._calls += 1
            _LossTrace.remove()

    def leave_model(self, inputs: Any, result: Any, *, trial: bool) -> None:
        """Go on recording, with the model's results as what the loss depends on."""
        if torch._C._current_graph_task_id() != -1:
            return
        self._calls = max(0, self._calls - 1)
        if self._calls or trial:
            return
        if self._trace is None and torch.is_grad_enabled() and self._due():
            self._trace = _LossTrace(self._clipper, pytree.tree_leaves(inputs), drawn=False)
        if self._trace is not None:
            self._trace.add_results(tensors_of(result))
            _LossTrace.remove(instead=self._trace)

    def end(self) -> None:
        """Stop recording."""
        self._calls = 0
        self._trace = None
        _LossTrace.remove()

    def _due(self) -> bool:
        if (self._left > 0 and self._begun < 4 * _FIRST) or self._chance.random() < _SHARE:
            self._begun += 1  # captured parts begin, and are not checked
            return not compiled()
        return False

    # --- checking ----------------------------------------------------------------------------------------------------

    def check(self, losses: Callable[[], Sequence[tuple[Tensor, Tensor | None]]], known: str) -> None:
        """Check the losses of a backward pass that begins; UnsupportedCase if a row's gradient mixes rows.

        `known` is what is wrong with the reduction of a loss that the model returns.
        """
        trace, self._trace = self._trace, None
        _LossTrace.remove()
        rows = self._clipper.examples
        captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if trace is None or rows is None or rows < 2 or captured:
            return
        self._left -= self._left > 0
        if known and trace.returned(each for each, _ in losses()):
            raise ConfigError(known)
        if not (trace.results or trace.inputs):  # the model returns the loss, and the check of its rows sees that
            return
        try:
            mixes = trace.mixes([trace.weighted(*each) for each in losses()], rows, self._witness)
        except torch.OutOfMemoryError:
            self._warn("there is not enough memory to repeat it")
        except _NotRepeatable as error:
            self._warn(str(error))
        except (RuntimeError, ValueError, IndexError, TypeError, KeyError, AttributeError) as error:
            self._warn(f"it cannot be repeated ({type(error).__name__})")
        else:
            if trace.misfit and (not trace.doubtful or self._doubted not in (0, rows)):
                raise ConfigError(trace.misfit)
            if mixes or trace.differs:
                reason = trace.blame or (
                    "the loss mixes the examples of a batch: with some rows replaced (labels, masks and the model's "
                    "results), the gradients of others changed"
                )
                raise UnsupportedCase(f"{reason}. {_ROWS}. {_REMEDY}")
            self._doubted = rows if trace.misfit else self._doubted
        finally:
            self._witness = trace.witness or self._witness

    def check_labels(self, labels: Tensor, ignored: int = _IGNORE_INDEX) -> None:
        """Check the labels of a mean that a model of accelerant.nn takes itself, over those that are not ignored."""
        rows = labels.shape[0] if labels.dim() else 0
        if self._clipper.loss_reduction != "mean" or rows < 2 or compiled():
            return
        if (self._left > 0 or self._chance.random() < _SHARE) and not _even(labels != ignored, rows):
            raise UnsupportedCase(f"{_IGNORED}. {_ROWS}. {_REMEDY}")
        self._left -= self._left > 0

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"it was not checked whether the loss treats each example by itself: {reason}. {_REMEDY}",
                UserWarning,
                stacklevel=2,
            )


class _NotRepeatable(Exception):  # noqa: N818  not an error of the user
    """The reason for which a loss cannot be repeated."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """The place of a tensor among those of a trace."""

    number: int


class _Witness(NamedTuple):
    """Two rows of a batch, in the order of their uses, with their gradients, and the numbers that the loss has."""

    rows: int
    values: list[Tensor]
    results: list[bool]
    gradients: list[Tensor]
    calls: frozenset[Any]
    others: list[float]


@dataclass(slots=True)
class _Leaf:
    """A tensor that no recorded call made: with rows of examples or without, or a result of the model."""

    tensor: Tensor
    version: int
    rows: bool
    result: bool = False


@dataclass(frozen=True, slots=True)
class _RecordedCall:
    """A recorded call, with slots for tensors."""

    function: Callable[..., Any]
    args: Any
    results: list[int | None]
    autocast: tuple[bool, torch.dtype]
    grad: bool
    random: Tensor | None


@dataclass(frozen=True, slots=True)
class _Number(_Slot):
    """A number that the host read from a tensor, or from its shape, or the inverse of one."""

    value: float
    read: Callable[[Tensor], float]
    inverse: bool = False
    kind: type[float] = float

    @property
    def kept(self) -> float:
        """The number as the host read it, in the place that it was given for."""
        return self.kind(1.0 / self.value if self.inverse else self.value)

    def now(self, tensor: Tensor) -> float:
        """Return what the host would read now."""
        found = self.read(tensor)
        return self.kind(1.0 / found if self.inverse else found)


_SCALING = {
    f"{before}{name}{after}"
    for name in ("mul", "div", "truediv", "true_divide", "divide", "multiply", "floordiv")
    for before, after in (("", ""), ("", "_"), ("__", "__"), ("__r", "__"), ("__i", "__"))
}  # Functions that a number from the batch may divide, or multiply, a loss by

_FACTORIES = {"tensor", "as_tensor", "from_numpy", "asarray", "new_tensor", "scalar_tensor"}
"""Functions that make a tensor from numbers of the host."""

_SIZING = {  # by which a number from the batch may change a loss in other ways
    "add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "pow", "__pow__", "__rpow__", "float_power", "clamp",
    "clip", "clamp_min", "clamp_max", "full", "full_like", "new_full", "fill_", "ones", "zeros", "repeat", "expand",
    "topk", "kthvalue", "quantile", "lerp", "logspace", "linspace",
}  # fmt: skip

_NUMERIC = _SCALING | _FACTORIES | _SIZING  # Functions whose numbers may come from the batch

_JOINING = {"stack", "cat", "concat", "concatenate", "hstack", "vstack"}
_READING = {  # that give the host a tensor's values, as a shape does that depends on them
    "item", "tolist", "numpy", "equal", "allclose", "is_nonzero",
    *(f"__{name}__" for name in ("float", "int", "index", "bool", "complex", "array", "dlpack", "contains")),
}  # fmt: skip

_RAGGED = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "where"}
_MEANS = {"cross_entropy", "nll_loss", "linear_cross_entropy"}
_WEIGHTED = {"cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"}
_DRAWING = ("drop", "gumbel", "rrelu", "rand", "bernoulli")
_RANDOM = {"bernoulli", "multinomial", "rand_like", "randn_like", "randint_like", "normal"}


class _LossTrace(TorchFunctionMode):
    """The calls of torch's functions in a loss.

    It lies below all other modes. If `drawn`, the inputs are the whole batch: other tensors are of no example. `inputs`
    and `results` are slots of what the model was given and returned; `blame` is what a known loss divides by, `misfit`
    the way in which it is not reduced as was said.
    """

    def __init__(self, clipper: PerExampleClipper, inputs: Iterable[Any], *, drawn: bool) -> None:
        super().__init__()
        self._clipper, self._drawn = clipper, drawn
        self._device = clipper.parameters[0][1].device.type
        self._slots: Any = WeakIdKeyDictionary()
        self._leaves: dict[int, _Leaf] = {}
        self._calls: list[_RecordedCall] = []
        self._numbers: list[_Number] = []
        self._count = 0
        self._follows: dict[int, int] = {}  # depends on 1: the batch alone, as labels do; 2: the model's results
        self._ragged = set[int]()  # tensors whose shape may depend on values
        self._hosted: dict[int, str] = {}  # why a tensor may depend on values that the host read, and other doubts
        self._read = 0  # the host has read values: 1 of results, 2 of the batch alone
        self._rows: dict[int, int] = {}  # of the tensors of the batch
        self._given = False  # the model is given what the host may have made of the batch
        self._changes = False  # some call writes into a tensor
        self._quiet = set[int]()  # results of calls without gradients
        self._opened = False  # some of them have gradients: those of a torch.autograd.Function's forward
        self._active = True
        self.inputs: list[int] = []
        self.results: list[int] = []
        self.blame = self.misfit = ""
        self.witness: _Witness | None = None
        self._choices: list[tuple[int, bool]] = []  # truth values that the host read, and of which slots
        self._chosen = False  # some of them are others with other rows
        self.differs = False  # rows of an earlier batch had other gradients there
        self._eps = 0.0  # of the lowest precision in the loss
        self.doubtful = self._kept = False  # whether `misfit` is none if numbers are constants; whether they are now
        for each in inputs:
            if isinstance(each, Tensor) and each.dim():
                self._rows[self._add_leaf(each, rows=True)] = len(each)

    # --- the stack of modes ------------------------------------------------------------------------------------------

    @staticmethod
    def remove(instead: _LossTrace | None = None) -> None:
        """Take traces off this thread's stack of modes, and put one below all others."""
        count = torch._C._len_torch_function_stack()
        modes = [torch._C._pop_torch_function_stack() for _ in range(count)]
        for each in modes:
            if isinstance(each, _LossTrace):
                each._active = False
                if each.call in recorders:
                    recorders.remove(each.call)
        kept = [each for each in reversed(modes) if not isinstance(each, _LossTrace)]
        for mode in kept if instead is None else [instead, *kept]:
            torch._C._push_on_torch_function_stack(mode)
        if instead is not None:
            instead._active = True
            recorders.append(instead.call)

    # --- recording ---------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._active or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if self._device == "cuda" and torch.cuda.is_current_stream_capturing():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "register_hook" and args[0] in self._slots:
            self._hosted[self._slots[args[0]]] = "a hook may change its gradients"
        if func is Tensor.backward or len(self._calls) >= _MOST_OPS:
            self._active = False
        names = ("backward", "__set__", "__delete__", "requires_grad_", "register_hook", "retain_grad")
        if not self._active or name in names:
            return func(*args, **kwargs)
        writes = (
            (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or kwargs.get("out") is not None
            or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
        )  # fmt: skip
        if writes and isinstance(target := kwargs.get("out", args[0] if args else None), Tensor):
            self._changes = True
            self._keep(target)
        # The class weights of a loss may be as many as the rows, and the labels of a data set several times as many.
        fixed = {id(each) for each in (*args[2:], *kwargs.values())} if name in _WEIGHTED else set[int]()
        if name in ("__getitem__", "index_select", "take") and len(args[0]) != self._clipper.examples:
            index = [each for each in pytree.tree_leaves(args[1:]) if isinstance(each, Tensor)]
            fixed |= {id(args[0])} if any(each.dtype != torch.bool for each in index) else set()
        scales = name in _NUMERIC
        literals = caller_literals() if self._numbers or self._read else frozenset[float]()

        def slot(each: Any) -> Any:
            if isinstance(each, Tensor):
                return self._slot(each, fixed)
            known = not scales or not isinstance(each, (int, float)) or each in literals
            return each if known else self._number(each)

        given = pytree.tree_map(slot, (args, kwargs))
        hosted = self._read > 0 and self._is_hosted(name, given, literals)
        source: Any = torch.cuda if self._device == "cuda" else torch
        random = source.get_rng_state() if any(part in name for part in _DRAWING) else None
        result = func(*args, **kwargs)
        self._add(name, func, given, args, result, writes, random)
        self._follow(name, args, given, result, hosted)
        return result

    def call(self, public: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Record a call of an op of this package, whose kernels call no function of torch."""
        recorders.remove(self.call)
        try:
            with torch._C.DisableTorchFunction():
                return self.__torch_function__(public, (), args, options)
        finally:
            if self._active:
                recorders.append(self.call)

    def _number(self, given: float) -> Any:
        """Return the number that the host read last from a tensor, if it is this one or its inverse."""
        if isinstance(given, bool) or given in (0, 1, -1) or not math.isfinite(given):
            return given
        for known in reversed(self._numbers):
            if math.isclose(known.value, given, rel_tol=1e-7):
                return replace(known, kind=type(given))
            if known.value and math.isclose(1.0 / known.value, given, rel_tol=1e-7):
                return replace(known, kind=type(given), inverse=True)
        return given

    def _is_ambiguous(self, number: _Number) -> bool:
        """Return whether a number may be another of the same value, as where there are as many rows as classes."""
        of = getattr(number.read, "keywords", None)
        return any(each.value == number.value and getattr(each.read, "keywords", None) != of for each in self._numbers)

    def _slot(self, tensor: Tensor, fixed: Container[int] = ()) -> _Slot:
        if (known := self._slots.get(tensor)) is not None:
            self._opened = self._opened or (known in self._quiet and tensor.requires_grad)
            return _Slot(known)
        if tensor.grad_fn is not None and tensor.requires_grad and self._has_rows(tensor):  # one that the model keeps
            self.add_results([tensor])
            return _Slot(self._slots[tensor])
        rows = not self._drawn and not isinstance(tensor, nn.Parameter) and id(tensor) not in fixed
        number = self._add_leaf(tensor, rows=rows and self._has_rows(tensor))
        if self._read == 2 and not (self._leaves[number].rows or isinstance(tensor, nn.Parameter)):
            self._hosted[number] = _HOSTED
        return _Slot(number)

    def _has_rows(self, tensor: Tensor) -> bool:
        """Return whether a tensor of unknown origin has a row for each example, or several."""
        rows, examples = tensor.shape[0] if tensor.dim() else 0, self._clipper.examples or 0
        if not rows or not examples:
            return False
        return rows == examples or (rows % examples == 0 and not tensor.is_floating_point())

    def _add_leaf(self, tensor: Tensor, *, rows: bool, result: bool = False) -> int:
        number = self._new(tensor)
        self._leaves[number] = _Leaf(tensor.detach() if result else tensor, tensor._version, rows, result)
        self._follows[number] = 2 if result else int(rows)
        return number

    def _new(self, tensor: Tensor) -> int:
        self._count += 1
        self._slots[tensor] = self._count
        return self._count

    def _keep(self, target: Tensor) -> None:
        """Copy a leaf that is about to be written to."""
        number = self._slot(target).number
        leaf = self._leaves.get(number)
        if leaf is not None and leaf.version == target._version:
            copied = target.detach().clone()
            self._leaves[number] = _Leaf(copied, copied._version, leaf.rows, leaf.result)

    def add_inputs(self, inputs: Iterable[Any]) -> None:
        """Take what the model is given."""
        for each in inputs:
            number = self._slots.get(each) if isinstance(each, Tensor) else None
            if number is not None and number not in self._leaves and self._follows.get(number) == 1:
                self.inputs.append(number)
            if isinstance(each, Tensor):  # with as many rows, and made elsewhere
                made = each.dim() and len(each) in self._rows.values() and number not in self._rows
                known = not made or (number is not None and number not in self._leaves)
            else:
                known = isinstance(each, bool) or not isinstance(each, (int, float)) or each in (0, 1, -1)
            self._given = self._given or (self._read == 2 and not known)

    def add_results(self, results: Iterable[Tensor]) -> None:
        """Take the model's results for what the loss depends on."""
        for each in results:
            number = self._add_leaf(each, rows=each.dim() > 0, result=each.requires_grad)
            self._follows[number] = 2
            if each.requires_grad and each.dim():
                self.results.append(number)

    def _add(
        self, name: str, func: Any, given: Any, args: Any, result: Any, writes: bool, random: Tensor | None
    ) -> None:
        leaves = pytree.tree_leaves(result)
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        if not tensors and not writes:
            self._add_numbers(name, args, result)
            return
        depends = any(isinstance(each, _Slot) for each in pytree.tree_leaves(given))
        if not writes and (name in _RANDOM or not depends):  # its result is made once, and stays
            for each in tensors:
                if self._slots.get(each) is None:
                    rows = name in _FACTORIES and self._has_rows(each)
                    self._add_leaf(each, rows=rows and not (each.is_floating_point() and each.dim() == 1))
            return
        results: list[int | None] = []
        for each in leaves:
            known = self._slots.get(each) if isinstance(each, Tensor) else None
            results.append((known or self._new(each)) if isinstance(each, Tensor) else None)
        grad = torch.is_grad_enabled()
        if not grad:
            self._quiet.update(number for number in results if number is not None)
        state = torch.is_autocast_enabled(self._device), torch.get_autocast_dtype(self._device)
        self._calls.append(_RecordedCall(func, given, results, state, grad, random))

    def _add_numbers(self, name: str, args: Any, result: Any) -> None:
        """Remember numbers that a later call may scale a loss by."""
        if not args or not isinstance(args[0], Tensor) or (slot := self._slots.get(args[0])) is None:
            return
        tensor = args[0]

        def add(value: float, read: Callable[[Tensor], Any]) -> None:
            self._numbers.append(_Number(slot, value, read))

        if isinstance(result, torch.Size):
            for at, size in enumerate(result):
                add(size, partial(Tensor.size, dim=at))
            if len(result) != 1:
                add(result.numel(), Tensor.numel)
        elif name == "tolist" and tensor.dim() == 1 and not tensor.is_complex():
            add(sum(result), lambda now: now.sum().item())
        elif name == "__len__" or (name == "size" and len(args) > 1):
            add(result, partial(Tensor.size, dim=args[1] if len(args) > 1 else 0))
        elif name in ("numel", "nelement"):
            add(result, Tensor.numel)
        elif name in ("__bool__", "is_nonzero") and self._follows.get(slot):
            self._choices.append((slot, bool(result)))
        elif name in ("item", "__float__", "__int__", "__index__") and isinstance(result, (int, float)):
            add(result, Tensor.item)

    # --- what the host makes of values -------------------------------------------------------------------------------

    def _is_hosted(self, name: str, given: Any, literals: Container[float]) -> bool:
        """Return whether a call takes numbers, or a choice of tensors, that may come from what the host read.

        Of the model's results a loop reads losses and accuracies to show them: a short number is then its own.
        """

        def unknown(each: Any) -> bool:
            if isinstance(each, _Number) or not isinstance(each, (int, float, np.generic)):
                return isinstance(each, np.ndarray)
            if isinstance(each, (bool, np.bool_)) or each in (0, 1, -1) or each in literals:
                return False
            rows, number = self._clipper.examples or 1, float(each)
            found = (number, number * rows, number / rows)  # those of settings have few digits
            return self._read == 2 or not any(math.isclose(x, float(f"{x:.6g}"), rel_tol=1e-12) for x in found)

        args, kwargs = given
        if name == "__getitem__":
            parts = args[1] if isinstance(args[1], tuple) else args[1:]
            if isinstance(args[1], int):
                return self._read == 2 and unknown(self._number(args[1]))
            return any(isinstance(each, (list, np.ndarray)) for each in parts)
        if name in _JOINING:
            return self._read == 2
        return name in _NUMERIC and any(map(unknown, pytree.tree_leaves((args, kwargs))))

    def _follow(self, name: str, args: Any, given: Any, result: Any, hosted: bool) -> None:
        """Note what a call's results depend on, and what the host learns by it."""
        slots = [each.number for each in pytree.tree_leaves(given) if isinstance(each, _Slot)]
        follows = max((self._follows.get(number, 0) for number in slots), default=0)
        ragged = not self._ragged.isdisjoint(slots)
        if follows and (name in _READING or (ragged and isinstance(result, (int, torch.Size)))):
            many = args[0].numel() > 1 and args[0].is_floating_point()  # no predictions
            self._read = max(self._read, 2 if many else 3 - follows)
        if name == "__getitem__":
            index = pytree.tree_leaves(args[1])
            ragged = ragged or any(isinstance(each, Tensor) and each.dtype == torch.bool for each in index)
        ragged = ragged or name in _RAGGED
        for each in pytree.tree_leaves(result if result is not None else args[:1]):
            number = self._slots.get(each) if isinstance(each, Tensor) else None
            if number is None:
                continue
            leaf = self._leaves.get(number)
            self._follows[number] = max(follows, self._follows.get(number, 0), int(hosted))
            if ragged:
                self._ragged.add(number)
            if hosted and not (leaf is not None and leaf.rows):
                self._hosted[number] = _HOSTED

    # --- repeating ---------------------------------------------------------------------------------------------------

    def weighted(self, loss: Tensor, gradient: Tensor | None) -> Tensor:
        """Return the loss times the gradient that backward was given for it; _NotRepeatable if that is not known."""
        if gradient is None or loss not in self._slots or bool((gradient == 1).all()):
            return loss
        if gradient not in self._slots:
            raise _NotRepeatable("the gradient that backward was given is made elsewhere")
        self._active = True
        with torch.enable_grad():
            return self.__torch_function__(torch.mul, (), (loss, gradient))  # type: ignore[no-any-return]

    def returned(self, losses: Iterable[Tensor]) -> bool:
        """Return whether losses are, as they are, all numbers that the model returns: others may be logged alone."""
        numbers = {number for number, leaf in self._leaves.items() if leaf.result and not leaf.tensor.dim()}
        return numbers == {self._slots.get(each) for each in losses}

    def mixes(self, losses: Sequence[Tensor], rows: int, earlier: _Witness | None) -> bool:
        """Return whether a row's gradient changes when others are replaced; UnsupportedCase if the inputs' rows do.

        `differs` tells whether rows of an earlier batch had another one there.
        """
        if self._mixes_inputs(rows):
            raise UnsupportedCase(
                "rows of the batch are mixed before the model: with some replaced, its inputs for others changed. "
                "Normalize by constants, or within a row, and combine no rows"
            )
        if self._given:
            raise _NotRepeatable(_GIVEN)
        wanted = [self._slots.get(each) for each in losses]
        self._opened = self._opened or not self._quiet.isdisjoint(wanted)
        if None in wanted:
            raise _NotRepeatable("its last operation was not seen")
        calls = self._needed([*wanted, *(number for number, _ in self._choices)])
        used = _used(calls, wanted)
        for number in used & self._leaves.keys():
            leaf = self._leaves[number]
            if not leaf.result and leaf.tensor.grad_fn is not None and leaf.tensor.requires_grad:
                raise _NotRepeatable(f"a part of it, of {leaf.tensor.grad_fn.name()}, is made elsewhere")
            if leaf.tensor._version != leaf.version:
                raise _NotRepeatable("a tensor that it uses was written to")
        results = [number for number in self.results if number in used]
        if not results:
            return False
        if any(self._leaves[number].tensor.shape[0] % rows for number in results):
            raise _NotRepeatable("the model's result does not have the examples in its first dimension")
        before, found = self._repeat(calls, wanted, results, used, None, rows)
        for loss, again in zip(losses, found, strict=True):
            low = torch.finfo(loss.dtype).eps
            if not torch.allclose(loss.detach().double(), again.double(), 100 * max(low, 1e-6), 1e-6, equal_nan=True):
                raise _NotRepeatable("repeated, it has another value")
        for index, kept in self._replacements(used, rows):
            after, _ = self._repeat(calls, wanted, results, used, index, rows)
            if _moved(before, after, kept):
                return True
        self.differs = self._other_than(earlier, before, calls, wanted, results, used, rows)
        doubts = [_HOSTED] * self._chosen + [self._hosted[number] for number in self._hosted.keys() & used]
        if doubts and not self.differs:
            raise _NotRepeatable(doubts[0])
        if any(call.random is not None for call in calls):
            return False
        given = [each for call in calls for each in pytree.tree_leaves(call.args)]
        constants = [each for each in given if not isinstance(each, _Slot)]
        constants += [each.value for each in given if isinstance(each, _Number) and self._is_ambiguous(each)]
        for each in (self._leaves[number].tensor for number in used & self._leaves.keys()):
            if (
                each.numel()
                and each.layout == torch.strided
                and not each.is_complex()
                and bool((each == each.flatten()[0]).all())
            ):
                constants.append(float(each.flatten()[0]))
        self.misfit = self._misfit(
            [each[: (rows + 1) // 2] for each in before],
            lambda index: self._repeat(calls, wanted, results, used, index, rows)[0], constants, rows,
        )  # fmt: skip
        return False

    def _other_than(
        self, earlier: _Witness | None, before: Sequence[Tensor], calls: Sequence[_RecordedCall],
        wanted: Sequence[int | None], results: Sequence[int], used: set[int], rows: int,
    ) -> bool:  # fmt: skip
        """Return whether rows of an earlier batch have other gradients in this one; keep two of it for a later one."""
        leaves = {number: self._leaves[number] for number in used & self._leaves.keys()}
        used_first = dict.fromkeys(each.number for call in calls for each in _slots(call) if each.number in leaves)
        ordered = {number: leaves[number] for number in used_first}
        mine = {n: x for n, x in ordered.items() if x.rows and x.tensor.dim() and len(x.tensor) % rows == 0}
        others = [x.tensor for number, x in leaves.items() if number not in mine]
        if any(call.random is not None for call in calls) or any(x.layout != torch.strided for x in others):
            return False
        index = torch.tensor(self._unlike(used, rows), device="cpu")
        share = float(rows if self._clipper.loss_reduction == "mean" else 1)
        known = {(call.function, _constants(call.args)) for call in calls}
        self.witness = now = _Witness(
            rows, [rows_of(x.tensor, index, rows).cpu() for x in mine.values()], [x.result for x in mine.values()],
            [x.double().mul(share)[index.to(x.device)].cpu() for x in before], frozenset(known),
            [float((torch.view_as_real(x) if x.is_complex() else x).double().nan_to_num().sum()) for x in others],
        )  # fmt: skip
        kinds = [
            ([(x.shape, x.dtype) for x in each.values], each.results, each.others) for each in (earlier or now, now)
        ]
        if earlier is None or kinds[0] != kinds[1]:
            return False
        first = dict(zip(mine, earlier.values, strict=True))
        after, _ = self._repeat(calls, wanted, results, used, torch.arange(rows, device="cpu"), rows, first)
        two, both = [x[:2].double().mul(share).cpu() for x in after], torch.ones(2, dtype=torch.bool, device="cpu")
        if not _moved(earlier.gradients, two, both, 4 * self._eps, 4.0):
            return False
        pairs = ((earlier, now), (now, earlier))
        changed = [(each, batch.rows) for batch, other in pairs for _, each in batch.calls - other.calls]
        if self._chosen or all(_counts(each, count) for each, count in changed):
            self.blame = self.blame or (
                f"in a batch of {rows} rows, two of the batch before, of {earlier.rows}, have other gradients"
            )
            return True
        if self._read or earlier.rows != rows:
            raise _NotRepeatable(_CHANGING)
        return False  # as by a schedule

    def _misfit(
        self, before: Sequence[Tensor], repeated: Callable[[Tensor], Sequence[Tensor]], constants: Iterable[Any],
        rows: int,
    ) -> str:  # fmt: skip
        """Return what is wrong if half of the rows, without the others, show another reduction than was given."""
        few = (rows + 1) // 2
        if few < 2 or any(_counts(each, rows) for each in constants):
            return ""
        given, kept = self._clipper.loss_reduction, torch.ones(few, dtype=torch.bool, device="cpu")
        shares, rounding = {"sum": 1.0, "mean": few / rows}, 4.0 / (1 if given == "sum" else rows)

        def found() -> list[str]:
            after = repeated(torch.arange(few, device="cpu"))
            scaled = {name: [x.double() * share for x in after] for name, share in shares.items()}
            return [name for name in shares if not _moved(before, scaled[name], kept, 4 * self._eps, rounding)]

        try:
            shown = found()
            if given not in shown:
                self._kept = True
                self.doubtful = given in found()
        except (RuntimeError, ValueError, IndexError, TypeError, KeyError, AttributeError):
            if not self._kept:
                return ""  # it is written for so many rows
        return misfit(given, shown)

    def _mixes_inputs(self, rows: int) -> bool:
        """Return whether what the model is given for a row changes when others are replaced."""
        calls = self._needed(self.inputs)
        used = _used(calls, self.inputs)
        if not self.inputs or any(
            self._leaves[each].tensor._version != self._leaves[each].version for each in used & self._leaves.keys()
        ):
            return False
        _, before = self._repeat(calls, self.inputs, [], used, None, rows)
        for index, kept in self._replacements(used, rows):
            _, after = self._repeat(calls, self.inputs, [], used, index, rows)
            for pair in zip(before, after, strict=True):
                one, two = (each if each.layout == torch.strided else each.to_dense() for each in pair)
                if one.shape == two.shape and one.dim() and len(one) % rows == 0:
                    if _moved([one.reshape(rows, -1).double()], [two.reshape(rows, -1).double()], kept):
                        return True
                elif one.shape == two.shape and not torch.equal(one, two):
                    self._given = True
        return False

    def _needed(self, wanted: Sequence[int | None]) -> list[_RecordedCall]:
        """Return the calls that the losses depend on; all, if some write into tensors, of which others may be views."""
        if self._changes:
            return self._calls
        needed, calls = set(wanted), []
        for call in reversed(self._calls):
            if needed.intersection(call.results):
                calls.append(call)
                needed |= _used([call], ())
        return calls[::-1]

    def _replacements(self, used: set[int], rows: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield indices in which every other row is one of two unlike rows, and which rows are kept."""
        numbers = torch.arange(rows, device="cpu")
        finite = torch.ones(rows, dtype=torch.bool, device="cpu")
        for leaf in (self._leaves[number] for number in used & self._leaves.keys()):
            if leaf.rows and leaf.tensor.dim() and leaf.tensor.shape[0] % rows == 0:
                finite &= leaf.tensor.isfinite().reshape(rows, -1).all(1).cpu()
        if bool(finite.any()) and not bool(finite.all()):  # such rows may hide what others change
            yield torch.where(finite, numbers, int(finite.int().argmax())), finite
        for row in self._unlike(used, rows):
            for odd in (0, 1):
                kept = numbers % 2 != odd
                yield torch.where(kept, numbers, row), kept

    def _unlike(self, used: set[int], rows: int) -> list[int]:
        """Return two rows whose labels, masks and inputs have different sums; any two if all have the same."""
        sums = torch.zeros(rows, dtype=torch.float64, device="cpu")
        for number, leaf in self._leaves.items():
            if number in used and leaf.rows and not leaf.result and leaf.tensor.shape[0] % rows == 0:
                each = leaf.tensor.reshape(rows, -1)
                sums += each.to(torch.float64).nan_to_num().sum(1).cpu() if not each.is_complex() else 0.0
        order = sums.argsort()
        first, last = int(order[0]), int(order[-1])
        return [first, last] if first != last else [0, 1]

    def _repeat(
        self, calls: Sequence[_RecordedCall], wanted: Sequence[int | None], results: Sequence[int], used: set[int],
        index: Tensor | None, rows: int, first: Mapping[int, Tensor] | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
        """Return the gradients at the model's results, and the losses, with the rows of an index, or others first."""
        values: dict[int, Tensor] = {}
        inputs = []
        devices = [torch.cuda.current_device()] if self._device == "cuda" else []
        with torch.enable_grad(), torch.random.fork_rng(devices):
            for number in used & self._leaves.keys():
                leaf = self._leaves[number]
                value = leaf.tensor.detach()
                if leaf.rows and index is not None and value.dim() and value.shape[0] % rows == 0:
                    value = rows_of(value, index, rows)
                    if first is not None and number in first:
                        value[: len(first[number])] = first[number]
                elif self._changes and not leaf.result:
                    value = value.clone()
                values[number] = value
            for number in results:
                inputs.append(values[number].requires_grad_())
                values[number] = inputs[-1].clone() if self._changes else inputs[-1]
            for call in calls:
                self._call(call, values, rows if index is None else None)
            self._chosen |= any(bool(values[number]) != value for number, value in self._choices)
            losses = [values[number] for number in wanted if number is not None]
            gradients: Sequence[Tensor | None] = ()
            if inputs:
                total = torch.stack([each.sum().double() for each in losses]).sum()
                gradients = torch.autograd.grad(total, inputs, allow_unused=True)
        floats = [x.dtype for x in values.values() if x.is_floating_point()]
        self._eps = max(torch.finfo(dtype).eps for dtype in {*floats, torch.float64})
        found = [torch.zeros_like(x) if dx is None else dx for x, dx in zip(inputs, gradients, strict=True)]
        rows = rows if index is None else len(index)
        return [each.reshape(rows, -1) for each in found], [each.detach() for each in losses]

    def _call(self, call: _RecordedCall, values: dict[int, Tensor], rows: int | None) -> None:
        def given(each: Any) -> Any:
            if isinstance(each, _Number):
                return each.kept if self._kept else each.now(values[each.number])
            return values[each.number] if isinstance(each, _Slot) else each

        args, kwargs = pytree.tree_map(given, call.args)
        if rows is not None and getattr(call.function, "__name__", "") in _MEANS:
            self.blame = _blame(call, args, kwargs, rows) or self.blame
        if call.random is not None:
            (torch.cuda if self._device == "cuda" else torch).set_rng_state(call.random)
        enabled, dtype = call.autocast
        with (
            torch.autocast(self._device, dtype, enabled=enabled, cache_enabled=False),
            torch.set_grad_enabled(call.grad or self._opened),
        ):
            result = call.function(*args, **kwargs)
        for number, each in zip(call.results, pytree.tree_leaves(result), strict=True):
            if number is not None:
                values[number] = each


def _slots(call: _RecordedCall) -> list[_Slot]:
    return [each for each in pytree.tree_leaves(call.args) if isinstance(each, _Slot)]


def _used(calls: Iterable[_RecordedCall], wanted: Iterable[int | None]) -> set[int]:
    """Return the slots of calls' arguments and of what is wanted."""
    return {slot.number for call in calls for slot in _slots(call)} | {
        number for number in wanted if number is not None
    }


def _constants(args: Any) -> tuple[float | None, ...]:
    """Return the numbers of a call in their order, with those of slices."""
    found = list[Any]()
    for each in pytree.tree_leaves(args):
        found += (each.start, each.stop, each.step) if isinstance(each, slice) else (each,)
    return tuple([each for each in found if each is None or isinstance(each, (int, float))])


def _counts(constant: Any, rows: int) -> bool:
    """Return whether a constant of a call may be made from the number of rows."""
    if isinstance(constant, slice):
        return _counts(constant.start, rows) or _counts(constant.stop, rows)
    if isinstance(constant, tuple):
        return any(_counts(each, rows) for each in constant)
    if isinstance(constant, bool) or not isinstance(constant, (int, float)) or not math.isfinite(constant):
        return False
    size = abs(constant if abs(constant) >= 1 or not constant else 1.0 / constant) / rows
    return constant != _IGNORE_INDEX and size > 0.5 and math.isclose(size, round(size), rel_tol=1e-6)


def _moved(
    before: Sequence[Tensor], after: Sequence[Tensor], kept: Tensor, eps: float = 0.0, rounding: float = 0.0
) -> bool:
    """Return whether the gradient of a row that was kept has changed, by more than so many units of rounding of 1."""
    for one, two in zip(before, after, strict=True):
        rows = kept.to(one.device)
        one, two = one[rows].double(), two[rows].double()
        scale = torch.linalg.vector_norm(one.nan_to_num(0.0, 0.0, 0.0), dim=1).amax()
        eps = max(eps, torch.finfo(before[0].dtype).eps)
        tolerance = max(_TOLERANCE, 2 * eps)
        same = (one == two) | (one.isnan() & two.isnan())
        change = torch.linalg.vector_norm((two - one).masked_fill(same, 0.0), dim=1)
        if not bool((change <= tolerance * scale + rounding * eps).all()):  # NaN has changed
            return True
    return False


def _blame(call: _RecordedCall, args: Any, kwargs: Any, rows: int) -> str:
    """Return what is wrong with a mean that class weights, or ignored labels, divide; raise for such weights."""
    given = inspect.signature(call.function).bind(*args, **kwargs)
    given.apply_defaults()
    reduction, weight, ignored = (given.arguments.get(name) for name in ("reduction", "weight", "ignore_index"))
    labels = given.arguments.get("target", given.arguments.get("targets"))
    if reduction != "mean" or labels is None or labels.is_floating_point():
        return ""
    counted = labels != ignored
    if isinstance(weight, Tensor) and "targets" not in given.arguments and bool((weight != weight.flatten()[0]).any()):
        shares = weight[labels.where(counted, 0)] * counted
        if _even(shares, rows):
            raise UnsupportedCase(f"{_WEIGHTS}. {_ROWS}")
        return _WEIGHTS
    return "" if _even(counted, rows) else _IGNORED


def _even(shares: Tensor, rows: int) -> bool:
    """Return whether each row has the same share."""
    if shares.numel() % rows:
        return bool((shares == shares.flatten()[0]).all())
    each = shares.reshape(rows, -1).double().sum(1)
    return bool(((each - each[0]).abs() <= 1e-6 * each[0].abs()).all())
