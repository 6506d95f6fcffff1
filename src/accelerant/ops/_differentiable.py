"""A differentiable op as one declaration: from the public call to the kernels, autograd, and torch's registration.

An op's module states what is its own: the forward and backward Operations, what to save in between, and torch's
functions that compute the same. Everything else is here. Plain tensors go straight to the kernels, traced ones through
torch's dispatcher, and CPU tensors to torch's own function where that serves best (CpuFastPath).

    _cpu = CpuFastPath(lambda x, weight=None, *, eps=1e-6: torch.rms_norm(x, x.shape[-1:], weight, eps))

    @_cpu
    def rms_norm(x, weight=None, *, eps=1e-6):
        ...                           # checks the arguments
        return _rms_norm(x, weight, eps)

    _rms_norm = DifferentiableOp(
        "rms_norm(Tensor x, Tensor? weight, float eps) -> (Tensor y, Tensor rstd)",
        operation=rms_norm_fwd,       # (x, weight, eps) -> (y, rstd)
        case=_case,                   # (x, weight, eps) -> Case
        backward=_backward,           # (dy, x, weight, rstd, eps, needs) -> (dx, dweight)
        saves=("x", "weight", "rstd"),
        gradients={"x": "x", "weight": "weight"},
        composite=_composite,         # (x, weight, eps) -> y
        fake=_fake,                   # (x, weight, eps) -> (y, rstd)
        cpu=_cpu,
    )
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_, itemgetter
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling

from accelerant.config import choice_overrides
from accelerant.errors import UnsupportedCase
from accelerant.ops._library import (
    active_modes,
    below_autograd,
    define,
    is_ordinary,
    keys_of,
    ordinary_keys,
    transforming,
)
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation
from accelerant.runtime.dispatch.case import FEW_ELEMENTS, torch_wants_determinism
from accelerant.runtime.dispatch.plan import observers
from accelerant.runtime.ledger import SAMPLE_EVERY, ledger
from accelerant.runtime.streams.graphs import captures_ahead

P = ParamSpec("P")
R = TypeVar("R")

_TENSORS = frozenset({Tensor, torch.nn.Parameter})
"""Types whose CPU tensors are passed on to torch's functions."""

recorders: list[Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]] = []
"""The last of these is passed each call of a public function: a recorder of torch's functions sees no kernels."""

# --- CPU fast path ---------------------------------------------------------------------------------------------------

_CALLS_LIMIT = 4096
"""Maximum number of kinds of call that a fast path remembers."""

_VALUES = frozenset({int, float, bool, str, tuple, type(None)})
"""Types of options that are identified by their value and type. (Torch's functions refuse 2.0 in place of 2.)"""

_TORCH_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, OverflowError)
"""Errors of torch's functions. Checkpoint ends a call by an error of another kind, which must reach it."""

_autocasts: Callable[[], bool] = torch._C._is_any_autocast_enabled
_ledger = ledger()
_count_lock = _ledger.lock


FEW = 2**20
"""Elements of the first tensor on a GPU below which a call that records a gradient waits for the host."""

_REFUSED = object()
"""Stored for a kind of call that torch's function does not serve as the op does."""


_FEW_SAMPLE_EVERY = 16 * SAMPLE_EVERY
"""One call of few elements in so many is timed: two events and a watched backward pass cost more than the call."""

_guards: Callable[..., Any] | None = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)
"""What torch.compile compares tensors by; None in a torch that has moved it.

Its `check` compares type, dispatch keys (device, autocast and transforms among them), dtype, requires_grad, sizes and
strides of all tensors of a call at once. Torch's own modes, of fake tensors and tracing, pass it.
"""


class _Recent(NamedTuple):
    """A kind of call to recognize: its leading tensors, and the other arguments, which must be the same objects."""

    check: Callable[..., bool]
    tensors: int
    length: int
    names: tuple[str, ...]
    others: tuple[Any, ...]
    grad: bool
    few: bool
    record: Any
    apply: Callable[..., Any] | None = None
    """What the public function does with the leading tensors, if it is the op's autograd function and not torch's."""

    @classmethod
    def of(
        cls, args: tuple[Any, ...], options: Mapping[str, Any], grad: bool, few: bool, record: Any,
        apply: Callable[..., Any] | None = None,
    ) -> tuple[Any, ...] | None:  # fmt: skip
        """Return what recognizes the next call of a kind; None where other arguments precede a tensor.

        A plain tuple is unpacked in a fifth of the time.
        """
        values = (*args, *options.values())
        tensors = sum(isinstance(x, Tensor) for x in values)
        if _guards is None or not all(isinstance(x, Tensor) for x in values[:tensors]):
            return None
        check = _guards(*values[:tensors], dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return tuple(cls(check, tensors, len(values), tuple(options), values[tensors:], grad, few, record, apply))


@dataclass(slots=True)
class _Kind:
    """A kind of call that torch's function serves: the ledger's record, and how to recognize it at once."""

    record: Any
    recent: tuple[Any, ...] | None = None


_RECENT = object()
"""Key of the _Recent of the latest call."""

_NONE = tuple(_Recent(lambda: False, tensors=0, length=-1, names=(), others=(), grad=False, few=False, record=None))
"""What recognizes no call."""


class _Taken(threading.local):
    """A thread's last call left to torch, by record and Operation, and whether it is in one of few elements.

    While `watches`, `applied` becomes the op, its arguments and the results of a call of its autograd function.
    """

    last: Any = None
    few: bool = False
    watches: bool = False
    applied: Any = None


class CpuFastPath:
    """Leaves an op's CPU calls to torch's function and torch's own autograd, where torch alone serves them.

    An autograd function in Python costs several times a small call, and saves nothing that torch's does not. So where
    dispatch finds that torch's implementation alone serves a case, DifferentiableOp runs it with autograd recording
    (`run`). The ledger counts the forward call, with the reason, and observes a sample of the backward passes.

    Validation, the case and its plan then take another 2 to 15 us, and several times that after large tensors have
    passed through the caches. So the public function, decorated with this object, remembers each kind of call (dtypes,
    shapes, gradients to come, options) that took this path; the next one of the kind is counted and made by `function`,
    with the least effort if it is of the same kind as the one before. The public function itself runs for any other
    device, tensors that are not contiguous, subclasses, modes, transforms, torch.compile, autocast, settings that a
    choice depends on, `explain`, calls that are to be timed, and where `function` raises: errors are in the op's words.

    With `pure`, a call that reaches the op's own autograd function is recognized, too, and its arguments are not
    checked again. Kinds are learned at the 1st, 2nd, 4th, 8th, ... call that is not recognized, so that calls of
    alternating kinds do not pay for it.

    Both give the same bits in the same layout, and save the same for the gradient: torch's checkpoint compares what two
    runs save, which may take different paths.

    On a GPU, training on few elements waits for the host, of which torch's functions need half as much as our autograd
    function (H200, 64x1024 bfloat16, forward and backward: gelu 79 for 137 us, layer_norm 112 for 296). With `few`,
    calls that record a gradient are torch's there too, outside of captures, where the host does not count.

    Args:
        function: torch's function, with the parameters of the public one.
        serves: whether `function` gives what the public function gives, for these arguments; called once per kind.
            None: always.
        any_layout: `function` also takes tensors that are not contiguous; strides are then part of a kind.
        few: whether `function` gives on a GPU what the public function gives, but for rounding, and is differentiable
            as often; called once per kind. None: never.
        pure: beyond checks of everything but values of tensors, the public function does the same for all calls that
            differ in their tensors alone. (One that draws a seed does not.)
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        serves: Callable[..., bool] | None = None,
        any_layout: bool = False,
        few: Callable[..., bool] | None = None,
        pure: bool = False,
    ) -> None:
        self._function, self._serves, self._serves_few = function, serves, few
        self._any_layout, self._pure = any_layout, pure
        self._known: dict[Hashable, Any] = {}
        self._missed = 0
        self.taken = _Taken()

    def run(self, operation: Operation, case: Case, args: tuple[Any, ...]) -> Any:
        """Run a case by torch's implementation with autograd recording; NotImplemented where it is not to."""
        plan = None if choice_overrides or torch_wants_determinism() else operation.plans.usual.get(case)
        if plan is None:
            plan = operation.torch_autograd_plan(case)
        if plan is None or not plan.torch_autograd:
            return NotImplemented
        result = operation.execute(case, plan, args)
        self.taken.last = plan.record, operation
        return result

    def __call__(self, public: Callable[P, R]) -> Callable[P, R]:
        """Decorate the op's public function."""
        function, known = self._function, self._known
        any_layout, on_gpu = self._any_layout, self._serves_few is not None

        @functools.wraps(public)
        def call(*args: P.args, **options: P.kwargs) -> R:
            if recorders and not is_compiling():
                return recorders[-1](call, args, options)  # type: ignore[no-any-return]
            values: tuple[Any, ...] = (*args, *options.values()) if options else args
            recent = _NONE if is_dynamo_compiling() else known.get(_RECENT, _NONE)
            check, tensors, length, names, others, with_grad, few, record, apply = recent
            grad = is_grad_enabled()
            if not (
                len(values) == length
                and grad is with_grad
                and (length == tensors or all(map(is_, values[tensors:], others)))
                and (tuple(options) == names if options else not names)
                and check(*(values if length == tensors else values[:tensors]))
                and not (observers or choice_overrides or torch_wants_determinism() or active_modes())
                and forward_ad._current_level < 0
                and not (few and captures_ahead())
            ):
                if is_compiling():
                    return public(*args, **options)
                key: tuple[Any, ...] = (grad, *options)
                apply = None
                few = learns = False
                try:
                    for x in values:
                        kind = type(x)
                        if kind in _TENSORS:
                            if on_gpu and x.is_cuda and (few or 0 < x.numel() < FEW) and x.is_contiguous():
                                few, learns = True, learns or x.requires_grad
                                key += (x.get_device(),)
                            elif any_layout and x.is_cpu:
                                key += (x.stride(),)
                            elif not (x.is_cpu and x.is_contiguous()):
                                return self._watched(public, args, options, grad)  # type: ignore[no-any-return]
                            key += (x.dtype, x.shape, x.requires_grad)
                        elif kind in _VALUES:
                            key += (x,)
                        else:
                            return public(*args, **options)
                    if few and not (learns and grad):
                        return public(*args, **options)
                    known_kind = known.get(key)
                except (RuntimeError, TypeError):  # a sparse or nested tensor; a list within a tuple
                    return public(*args, **options)
                if (
                    known_kind is _REFUSED
                    or active_modes()
                    or forward_ad._current_level >= 0
                    or transforming()
                    or (observers and not few)
                    or choice_overrides
                    or torch_wants_determinism()
                    or _autocasts()
                    or (few and captures_ahead())
                ):
                    return public(*args, **options)
                if known_kind is None:
                    return self._learn(key, public, args, options, few)  # type: ignore[no-any-return]
                if few and observers:
                    return self._of_few(public, args, options)  # type: ignore[no-any-return]
                record = known_kind.record
                if known_kind.recent is None:
                    known_kind.recent = _Recent.of(args, options, grad, few, record)
                known[_RECENT] = known_kind.recent or _NONE
                if known.get(key) is not known_kind:  # another thread has dropped the choices meanwhile
                    known.pop(_RECENT, None)
            if apply is not None:
                return apply(*values[:tensors])  # type: ignore[no-any-return]
            with _count_lock:
                calls = record.calls + 1
                counted = calls > 4 and calls % (_FEW_SAMPLE_EVERY if few else SAMPLE_EVERY)
                if counted:
                    record.calls = calls
                    if grad:
                        record.recording += 1
            if counted:
                try:
                    return function(*args, **options)  # type: ignore[no-any-return]
                except _TORCH_ERRORS:
                    _ledger.discount(record)  # the public function says what is wrong, in its own words
                except BaseException:
                    _ledger.failed(record)
                    raise
            return self._of_few(public, args, options) if few else public(*args, **options)

        call.torch_function = function  # type: ignore[attr-defined]  # what the benchmark compares with
        return call

    def _of_few(self, public: Callable[..., Any], args: Any, options: Any) -> Any:
        """Call the public function, which leaves these arguments to torch's implementation."""
        self.taken.few = True
        try:
            return public(*args, **options)
        finally:
            self.taken.few = False

    def _learn(self, key: Hashable, public: Callable[..., Any], args: Any, options: Any, few: bool) -> Any:
        """Call the public function, and remember the kind of call if it was left to torch's autograd."""
        self.taken.last = None
        if few and not self._leaves_few(args, options):
            self._remember(key, _REFUSED)
            return public(*args, **options)
        grad = torch.is_grad_enabled()
        y = self._of_few(public, args, options) if few else self._watched(public, args, options, grad)
        if self.taken.last is not None:
            record, operation = self.taken.last
            operation.plans.add_dependent(self._known)
            served = few or self._serves is None or self._serves(*args, **options)
            self._remember(key, _Kind(record) if served else _REFUSED)
        return y

    def _watched(self, public: Callable[..., Any], args: Any, options: Any, grad: bool) -> Any:
        """Call the public function, and now and then recognize the next call that runs an autograd function like it.

        The function must get the tensors as they were given, and the public result must be its own, or its first.
        """
        self._missed += 1
        learns = self._pure and grad and not self._missed & (self._missed - 1)
        if not learns or active_modes() or forward_ad._current_level >= 0 or transforming() or _autocasts():
            return public(*args, **options)
        taken = self.taken
        taken.watches, taken.applied = True, None
        try:
            y = public(*args, **options)
            if taken.applied is None:
                return y
            bound, given, results = taken.applied
        finally:
            taken.watches, taken.applied = False, None
        first = isinstance(results, tuple) and y is results[0]
        values = (*args, *options.values())
        tensors = [x for x in values if isinstance(x, Tensor)]
        rest = given[len(tensors) :]
        # Tensors that are one object do not tell the order of keywords, and an array would be the same after a change
        same = len(set(map(id, tensors))) == len(tensors) <= len(given) and all(map(is_, tensors, given))
        fixed = all(isinstance(x, Tensor) or type(x) in _VALUES for x in values)
        if same and fixed and (first or y is results) and not any(isinstance(x, Tensor) for x in rest):
            op = bound(given, results, first)

            def apply(*tensors: Tensor) -> Any:
                return op(*tensors, *rest)

            self._known[_RECENT] = _Recent.of(args, options, grad, False, None, apply) or _NONE
        return y

    def _leaves_few(self, args: Any, options: Any) -> bool:
        """Return whether torch's function serves few elements on a GPU, for arguments that nothing has checked yet."""
        try:
            return self._serves_few is not None and self._serves_few(*args, **options)
        except _TORCH_ERRORS:  # the public function says what is wrong
            return False

    def _remember(self, key: Hashable, record: Any) -> None:
        if len(self._known) >= _CALLS_LIMIT:
            self._known.clear()
        self._known[key] = record


# --- differentiable ops ----------------------------------------------------------------------------------------------

_ARGUMENT = re.compile(r"(?P<type>[\w?\[\]]+) (?P<name>\w+)")


class DifferentiableOp:
    """An op with kernels for its value and its first derivative; see the module's docstring.

    Calling it takes the schema's arguments, positional, already validated, and returns the public results.

    Args:
        schema: of torch's registration, with a name for every result: "silu(Tensor x) -> (Tensor y)". Results after the
            public ones are for the backward pass alone.
        operation: the forward Operation: the arguments -> all results, a tuple unless there is one.
        case: the arguments -> the case of `operation`.
        infer_args: arguments of `operation` after the op's own where no gradient is needed.
        forward: replaces `operation` and `case` where the forward pass does more: the arguments -> all results.
        infer: replaces them where no gradient is needed: the arguments -> the public results.
        backward: (gradient of each differentiable result, None where nothing depends on it; the saved tensors; the
            arguments that are no tensors; needs) -> a gradient for each entry of `gradients`, None where it is not
            needed. `needs` is a tuple of bools, one for each.
        saves: names of the arguments and results that the backward pass takes, all of them tensors.
        only_for: saved argument -> the differentiable ones whose gradients alone need it; saved as None if none of
            these is needed.
        gradients: differentiable argument -> the saved tensor of its shape and dtype, or the result of its shape and
            dtype (whose gradient is at hand), so that nothing need be saved for the shape alone.
        shares: differentiable argument -> the entry of `gradients` whose gradient is its own too, as in a sum.
        composite: the arguments -> the public results, from torch's differentiable functions.
        fake: the arguments -> all results, empty, with the right shape, dtype and strides.
        public: number of results that the caller gets.
        differentiable: number of the public results that carry a gradient, the first ones.
        composite_backward: as `backward`, from torch's differentiable functions; None: composite is run again on the
            saved arguments and differentiated, which requires that every tensor argument is saved.
        keeps_layout: gradients have the strides of the tensor named in `gradients`, not only its shape.
        decomposes: torch.compile sees the composite rather than the op, to fuse it with its surroundings.
        cpu: leaves calls on a CPU to torch; None: never.
        cpu_case: replaces `case` for `cpu`; returns None for a call that torch's function does not serve.
        cpu_args: replaces `infer_args` for `cpu`.
        eager_gradient: makes the gradient together with the value, in one pass over the input: (needs, the arguments)
            -> None where this call does not; else all results (None for one that is no longer needed), the state that
            `finish_gradient` takes, and whether saved arguments were overwritten, so that there can be only one
            backward pass. Meant for losses, whose upstream gradient is nearly always 1.
        finish_gradient: (gradient of the first result, that state, the arguments that are no tensors, needs) -> as
            `backward`. The first backward pass gives the state away; another one (retain_graph=True), one that is
            differentiated itself, and traced calls use `backward`.
        bind: (the arguments, the public results) -> what replaces `forward`, `backward`, `eager_gradient` and
            `finish_gradient` in calls whose tensors differ from these in their memory alone, by Operation.bound. The
            gradients that it is called with may have other strides, and nothing but plain calls come to it.

    Attributes:
        forward, backward: for callers that differentiate several ops in one autograd function.
    """

    def __init__(
        self,
        schema: str,
        *,
        backward: Callable[..., Sequence[Tensor | None]],
        saves: Sequence[str],
        gradients: Mapping[str, str],
        composite: Callable[..., Any],
        fake: Callable[..., Any],
        operation: Operation | None = None,
        case: Callable[..., Case] | None = None,
        infer_args: tuple[Any, ...] = (),
        forward: Callable[..., Any] | None = None,
        infer: Callable[..., Any] | None = None,
        shares: Mapping[str, str] | None = None,
        only_for: Mapping[str, Sequence[str]] | None = None,
        public: int = 1,
        differentiable: int = 1,
        composite_backward: Callable[..., Sequence[Tensor | None]] | None = None,
        keeps_layout: bool = False,
        decomposes: bool = False,
        cpu: CpuFastPath | None = None,
        cpu_case: Callable[..., Case | None] | None = None,
        cpu_args: tuple[Any, ...] | None = None,
        eager_gradient: Callable[..., tuple[tuple[Tensor | None, ...], Any, bool] | None] | None = None,
        finish_gradient: Callable[..., Sequence[Tensor | None]] | None = None,
        bind: Callable[..., Mapping[str, Callable[..., Any]]] | None = None,
    ) -> None:
        head, _, results = schema.partition("->")
        self.name = head.partition("(")[0]
        arguments = [(match["type"], match["name"]) for match in _ARGUMENT.finditer(head.partition("(")[2])]
        names = [name for _, name in arguments]
        outputs = [match["name"] for match in _ARGUMENT.finditer(results)]
        self._width = len(arguments)
        self._tensors = tuple(i for i, (kind, _) in enumerate(arguments) if kind.startswith("Tensor"))
        self._options = tuple(i for i, (kind, _) in enumerate(arguments) if not kind.startswith("Tensor"))
        self._positions = tuple(names.index(name) for name in gradients)  # of differentiable arguments
        self._only_for = tuple(
            (list(saves).index(name), tuple(map(names.index, users))) for name, users in (only_for or {}).items()
        )
        self._shared = tuple((names.index(name), list(gradients).index(of)) for name, of in (shares or {}).items())
        inputs = [*(f"d_{name}" for name in outputs[:differentiable]), *saves]
        self._likes = tuple(inputs.index(like if like in saves else f"d_{like}") for like in gradients.values())
        self._saved = tuple((name in names, (names if name in names else outputs).index(name)) for name in saves)
        self._take_saved = _taker([at if given else self._width + at for given, at in self._saved])
        self._take_options = _taker(self._options)
        self._outputs, self._public, self._differentiable = len(outputs), public, differentiable
        self._backward_rank = (len(outputs[:differentiable]), len(saves))
        self._operation, self._case, self._infer_args = operation, case, infer_args
        self._forward, self._infer = forward, infer
        self.backward = backward
        self.composite_backward = composite_backward or self._recomputed
        self._composite, self._decomposes = composite, decomposes
        self._empty = torch.empty_like if keeps_layout else _contiguous
        self._cpu, self._cpu_case = cpu, cpu_case or case
        self._cpu_args = infer_args if cpu_args is None else cpu_args
        self._eager_gradient, self._finish_gradient = eager_gradient, finish_gradient
        self._bind = bind
        self._second = Operation(
            f"{self.name}_bwd_create_graph",
            (Implementation("torch", self.composite_backward),),
            cost=lambda _: Cost(0, 0),
        )
        self._apply = self._eager_function(public)
        self._op = define(
            schema,
            kernel=self.forward,
            fake=fake,
            differentiable=self._traced_function(),
            composite=self._padded(composite),
        )
        mark = "" if differentiable == 1 else "?"
        kinds = {name: kind for kind, name in arguments} | dict.fromkeys(outputs, "Tensor")
        kinds |= dict.fromkeys(only_for or (), "Tensor?")
        parts = [f"Tensor{mark} d_{name}" for name in outputs[:differentiable]]
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
        """Return the public results."""
        if is_compiling():
            return self._composite(*args) if self._decomposes else self._cut(self._op(*args))
        if active_modes() or forward_ad._current_level >= 0 or transforming():
            return self._cut(self._op(*args))
        cpu = self._cpu
        learns = False
        for position in self._tensors:
            x = args[position]
            if x is not None:
                if cpu is None or not x.is_cpu or type(x) not in _TENSORS:
                    if not ordinary_keys.get(keys_of(x).raw_repr()) and not is_ordinary(x):
                        return self._cut(self._op(*args))
                    cpu = None
                learns = learns or x.requires_grad
        few = cpu is None and self._cpu is not None and self._cpu.taken.few
        cpu = self._cpu if few else cpu
        if cpu is not None:
            case = self._cpu_case(*args)  # type: ignore[misc]  # comes with cpu
            if case is not None:
                case = case._replace(options=(*case.options, FEW_ELEMENTS)) if few else case
                result = cpu.run(self._operation, case, args + self._cpu_args)  # type: ignore[arg-type]  # as above
                if result is not NotImplemented:
                    return self._cut(result)
        if learns and torch.is_grad_enabled():
            results = self._apply(*args)
            if self._cpu is not None and self._cpu.taken.watches:
                self._cpu.taken.applied = self._bound, args, results
            return results
        if self._infer is not None:
            return self._infer(*args)
        if self._forward is not None:
            return self._cut(self._forward(*args))
        results = self._operation(self._case(*args), *args, *self._infer_args)  # type: ignore[misc]  # as in forward
        return results[0] if self._public == 1 and isinstance(results, tuple) else self._cut(results)

    def forward(self, *args: Any) -> Any:
        """Return all results, without autograd."""
        if self._forward is not None:
            return self._forward(*args)
        return self._operation(self._case(*args), *args)  # type: ignore[misc]  # one of the two is declared

    # --- autograd ----------------------------------------------------------------------------------------------------

    def _eager_function(
        self, shown: int, *, forward: Callable[..., Any] | None = None, backward: Callable[..., Any] | None = None,
        eager_gradient: Callable[..., Any] | None = None, finish_gradient: Callable[..., Any] | None = None,
    ) -> Callable[..., Any]:  # fmt: skip
        """Return the call of an autograd function for plain tensors that gives the first `shown` results."""
        run = forward or self._forward
        eager_gradient = eager_gradient or self._eager_gradient
        finish = finish_gradient or self._finish_gradient

        def eager_forward(ctx: Any, *args: Any) -> Any:
            if eager_gradient is None:
                if run is not None:
                    return self._save(ctx, args, run(*args), shown)
                results = self._operation(self._case(*args), *args)  # type: ignore[misc]  # as in forward
                return self._save(ctx, args, results, shown)
            ctx.eager, ctx.overwritten = None, False
            made = eager_gradient(self._needs(ctx), *args)
            if made is None:
                return self._save(ctx, args, self.forward(*args), shown)
            results, ctx.eager, ctx.overwritten = made
            return self._save(ctx, args, results, shown)

        def eager_backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
            dys = dys[: self._differentiable]
            dy = dys[0]
            if finish is None:
                return self._gradients(ctx, dys, backward)
            state = ctx.eager
            if state is None or dy is None or is_grad_enabled() or not _is_plain(dy):
                if ctx.overwritten:
                    raise UnsupportedCase(
                        f"{self.name} wrote its gradient over its input: there can be one backward pass, and none that "
                        "is differentiated itself (create_graph=True) or transformed; call it without the in-place "
                        "option for more"
                    )
                return self._gradients(ctx, dys, backward)
            ctx.eager = None  # the caller may keep or change the gradients
            needs = self._needs(ctx)
            return self._placed(finish(dy, state, *ctx.options, needs), needs)

        # Past Function.apply, which looks for transforms and dead wrappers in Python: plain tensors have neither.
        function = self._function(eager_forward, eager_backward)
        apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
        return apply

    def _traced_function(self) -> Callable[..., Any]:
        """Return the call of an autograd function for traced tensors, which see every result."""

        def forward(ctx: Any, *args: Any) -> Any:
            with below_autograd():
                results = self._op(*args)
            return self._save(ctx, args, results, self._outputs)

        def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
            return self._gradients(ctx, dys[: self._differentiable])

        apply: Callable[..., Any] = self._function(forward, backward, "Traced").apply
        return apply

    def _function(self, forward: Callable[..., Any], backward: Callable[..., Any], end: str = "") -> Any:
        title = "".join(part.capitalize() for part in self.name.split("_")) + end  # seen in profiles
        steps = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        return type(title, (torch.autograd.Function,), steps)

    def _bound(self, args: tuple[Any, ...], results: Any, first: bool) -> Callable[..., Any]:
        """Return what gives the results of `_apply`, or the first, for tensors that differ in their memory alone."""
        if self._bind is not None:
            return self._eager_function(1 if first else self._public, **self._bind(args, results))
        apply = self._apply
        return (lambda *args: apply(*args)[0]) if first else apply

    def _needs(self, ctx: Any) -> tuple[bool, ...]:
        needed = ctx.needs_input_grad
        return tuple(map(needed.__getitem__, self._positions))  # a comprehension is a call

    def _save(self, ctx: Any, args: tuple[Any, ...], results: Any, shown: int) -> Any:
        outputs = results if isinstance(results, tuple) else (results,)
        saved = self._take_saved(args + outputs)
        for at, users in self._only_for:
            if not any(ctx.needs_input_grad[position] for position in users):
                saved = (*saved[:at], None, *saved[at + 1 :])
        ctx.save_for_backward(*saved)
        ctx.options = self._take_options(args)
        if shown > self._differentiable:
            ctx.mark_non_differentiable(*outputs[self._differentiable : shown])
        if shown > 1:
            ctx.set_materialize_grads(False)
        return outputs[:shown] if shown > 1 else outputs[0]

    def _placed(self, found: Sequence[Tensor | None], needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """Return the gradients of all arguments, None where none is needed."""
        gradients: list[Tensor | None] = [None] * self._width
        for position, need, gradient in zip(self._positions, needs, found, strict=True):
            if need:
                gradients[position] = gradient
        for position, entry in self._shared:
            gradients[position] = gradients[self._positions[entry]]
        return tuple(gradients)

    def _gradients(
        self, ctx: Any, dys: tuple[Tensor | None, ...], bound: Callable[..., Any] | None = None
    ) -> tuple[Tensor | None, ...]:
        first = dys[0]
        if first is None:
            first = next((dy for dy in dys if dy is not None), None)
            if first is None:
                return (None,) * self._width
        needs = self._needs(ctx)
        for position, entry in self._shared:
            needs = (*needs[:entry], needs[entry] or ctx.needs_input_grad[position], *needs[entry + 1 :])
        args = (*dys, *ctx.saved_tensors, *ctx.options, needs)
        results: Sequence[Tensor | None]
        watched = active_modes() or forward_ad._current_level >= 0 or transforming()  # is_plain, inlined
        if watched or not (ordinary_keys.get(keys_of(first).raw_repr()) or is_ordinary(first)):
            traced = self._op_backward(*args[:-1], list(needs))
            results = traced if isinstance(traced, (tuple, list)) else (traced,)
        elif is_grad_enabled():
            results = self._second(Case(first.device, first.dtype, first.shape, ("create_graph",)), *args)
        else:
            results = (bound or self.backward)(*args)
        return self._placed(results, needs)

    def _recomputed(self, *args: Any) -> list[Tensor | None]:
        """Return the gradients from torch, by running the composite again on the saved arguments."""
        dys_end = self._backward_rank[0]
        saved_end = dys_end + self._backward_rank[1]
        dys, saved, options, needs = args[:dys_end], args[dys_end:saved_end], args[saved_end:-1], args[-1]
        whole: list[Any] = [None] * self._width
        for (argument, at), tensor in zip(self._saved, saved, strict=True):
            if argument:
                whole[at] = tensor
        for at, value in zip(self._options, options, strict=True):
            whole[at] = value
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            for position, need in zip(self._positions, needs, strict=True):
                if need:
                    x = whole[position]
                    whole[position] = (x.view_as(x) if create_graph else x.detach()).requires_grad_()
            results = self._composite(*whole)
            results = results if isinstance(results, tuple) else (results,)
            pairs = [(y, dy) for y, dy in zip(results, dys, strict=False) if dy is not None]
            found = iter(
                torch.autograd.grad(
                    [y for y, _ in pairs],
                    [whole[position] for position, need in zip(self._positions, needs, strict=True) if need],
                    [dy for _, dy in pairs],
                    create_graph=create_graph,
                    allow_unused=True,
                    materialize_grads=True,
                )
            )
        return [next(found) if need else None for need in needs]

    # --- registration ------------------------------------------------------------------------------------------------

    def _cut(self, results: Any) -> Any:
        """Return the public ones of all results."""
        if not isinstance(results, (tuple, list)):
            return results
        return results[0] if self._public == 1 else tuple(results[: self._public])

    def _padded(self, composite: Callable[..., Any]) -> Callable[..., Any]:
        """Return the composite with an empty tensor for each result that is not public, as the schema has it."""
        hidden = self._outputs - self._public
        if not hidden:
            return composite

        def run(*args: Any) -> Any:
            results = composite(*args)
            results = results if isinstance(results, tuple) else (results,)
            return (*results, *(results[0].new_empty(0) for _ in range(hidden)))

        return run

    def _all_tensors(self, backward: Callable[..., Sequence[Tensor | None]]) -> Callable[..., Any]:
        """Return the backward pass in the form of torch's registration.

        Results are tensors: one that is not needed is empty, and none shares memory with an argument.
        """

        def run(*args: Any) -> Any:
            whole: list[Tensor] = []
            for gradient, like, need in zip(backward(*args), self._present(args), args[-1], strict=True):
                if gradient is None or not need:
                    whole.append(args[like].new_empty(0))
                else:
                    own = all(gradient is not other for other in (*args, *whole))
                    whole.append(gradient if own else gradient.clone())
            return tuple(whole) if len(whole) > 1 else whole[0]

        return run

    def _present(self, args: Sequence[Any]) -> list[int]:
        """Return where to read dtype and device of each gradient; any tensor, if an argument is absent."""
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


def _is_plain(x: Tensor) -> bool:
    """Do what is_plain does, in one function."""
    watched = active_modes() or forward_ad._current_level >= 0 or transforming()
    return not watched and (ordinary_keys.get(keys_of(x).raw_repr()) or is_ordinary(x))


def _taker(positions: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return a function that takes these places of a tuple, in one call of C."""
    first = positions[0] if positions else 0
    if list(positions) == list(range(first, first + len(positions))):
        return itemgetter(slice(first, first + len(positions)))
    return itemgetter(*positions)
