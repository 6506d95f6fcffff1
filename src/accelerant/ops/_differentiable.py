"""A differentiable op as one declaration: from the public call to the kernels, autograd, and torch's registration.

Plain tensors go straight to the kernels, traced ones through torch's dispatcher, and CPU tensors to torch's own
function where that serves best (CpuFastPath). ops/softmax is an example.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from operator import is_, itemgetter
from typing import Any, ClassVar, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling

from accelerant.config import choice_overrides
from accelerant.ops import _library
from accelerant.ops._library import active_modes, autocasts, define, is_ordinary, keys_of, own_arguments, transforming
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation
from accelerant.runtime.dispatch.plan import FEW_ELEMENTS, observers, torch_wants_determinism
from accelerant.runtime.host import refuse_without_values
from accelerant.runtime.ledger import RARELY, SAMPLE_EVERY, ledger
from accelerant.runtime.streams.graphs import captures_ahead

P = ParamSpec("P")
R = TypeVar("R")
CaseOf = TypeVar("CaseOf", bound=Callable[..., Case | None])

_TENSORS = frozenset({Tensor, torch.nn.Parameter})  # types whose CPU tensors are passed on to torch's functions

recorders: list[Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]] = []
"""The last of these is passed each call of a public function: a recorder of torch's functions sees no kernels."""

# --- CPU fast path ---------------------------------------------------------------------------------------------------
_CALLS_LIMIT = 4096
_KINDS_LIMIT = 8  # shapes of the first tensor that a fast path remembers, and kinds of call of each
_SIZES = (int, tuple, list)  # types of the second argument that may be torch's normalized_shape

_VALUES = frozenset({int, float, bool, str, tuple, type(None)})
"""Types of options that are identified by their value and type. (Torch's functions refuse 2.0 in place of 2.)"""

_TORCH_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, OverflowError)
"""Errors of torch's functions. Checkpoint ends a call by an error of another kind, which must reach it."""

_ledger = ledger()

SMALL = 2**20
"""Elements of the first tensor on a GPU below which a call waits for the host."""

_guards: Callable[..., Any] | None = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)
"""What torch.compile compares tensors by; None in a torch that has moved it.

Its `check` compares type, dispatch keys (device, autocast and transforms among them), dtype, requires_grad, sizes and
strides of all tensors of a call at once. Torch's own modes, of fake tensors and tracing, pass it.
"""


class _Kind(NamedTuple):
    """The functions that recognize the calls of a kind and serve them; kept as a plain tuple, faster to unpack.

    `grad` is whether gradients are recorded, None if no tensor requires one.
    """

    length: int
    tensors: int
    check: Callable[..., bool]
    last: object
    names: tuple[str, ...]
    grad: bool | None
    small: bool = False
    run: Callable[..., Any] | None = None
    record: Any = None
    apply: Callable[[tuple[Any, ...]], Any] | None = None


_NO_KIND = tuple(_Kind(-1, -1, lambda *_: False, None, (), False))


def _check_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return what tells whether other tensors differ from these in their memory alone."""
    firsts = [next(at for at, other in enumerate(tensors) if other is x) for x in tensors]
    if _guards is not None:
        distinct = sorted(set(firsts))
        check: Callable[..., bool] = _guards(
            *[tensors[at] for at in distinct], dynamic_dims_sizes=None, dynamic_dims_strides=None
        ).check
        if len(distinct) == len(tensors):
            return check
        take = _taker(distinct)  # guards take no tensor twice
        return lambda *xs: all(map(is_, xs, map(xs.__getitem__, firsts))) and check(*take(xs))

    def description(x: Tensor) -> tuple[object, ...]:
        strides = x.stride() if x.layout is torch.strided else ()
        return type(x), keys_of(x).raw_repr(), x.device, x.dtype, x.requires_grad, x.shape, strides

    expected = [description(x) for x in tensors]
    return lambda *xs: (
        not (transforming() or autocasts())
        and all(type(x) in _TENSORS and description(x) == each for x, each in zip(xs, expected, strict=True))
    )


def _are(values: Sequence[object], others: Sequence[object]) -> bool:
    """Return whether options equal the others, in type and value."""
    return all(type(x) is type(y) and x == y for x, y in zip(values, others, strict=True))


class _ThreadState(threading.local):
    """The state of a thread that an op shares with the CpuFastPath of its public function."""

    by_torch: Any = None
    small: bool = False
    watching: bool = False
    applied: Any = None


class CpuFastPath:
    """Leaves an op's CPU calls to torch's function and torch's own autograd, where torch alone serves them.

    The public function, decorated with this object, remembers each kind of call (the tensors' _check_of, the options,
    whether gradients are recorded) that dispatch left to torch; `function`, with the same parameters, makes the next
    one. Everything else is the public function's. Both give the same bits and save the same.

    `serves` and `small`, asked once per kind, say whether `function` gives the same on a CPU (None: always) and, but
    for rounding, for few elements of a GPU outside of captures (None: never; of any number with `any_size`). With
    `pure`, calls that differ in their tensors alone are the same to the public function, so that the kind that reached
    the op's autograd function is recognized too. `bind`, asked once per kind, returns a faster `function` for it, or
    None. `args` follow the op's own where torch's implementation runs.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        bind: Callable[..., Callable[..., Any] | None] | None = None,
        serves: Callable[..., bool] = lambda *_, **__: True,
        any_layout: bool = False,
        small: Callable[..., bool] | None = None,
        any_size: bool = False,
        pure: bool = False,
        args: tuple[Any, ...] = (),
    ) -> None:
        self.args = args
        self.case_of: Callable[..., Case | None] | None = None
        self._function, self._bind, self._serves, self._serves_small = function, bind, serves, small
        self._few = sys.maxsize if any_size else SMALL
        self._any_layout, self._pure = any_layout, pure
        self._known: dict[object, tuple[tuple[Any, ...], ...]] = {}  # shape of a tensor -> options, _Kind
        self._usual: tuple[Any, ...] = _NO_KIND  # of two calls in a row, compared first
        self._last: tuple[Any, ...] = _NO_KIND
        self._missed = 0
        self.thread = _ThreadState()

    def clear(self) -> None:
        """Forget all kinds of calls, as the plans that they depend on are dropped."""
        self._known.clear()
        self._usual = self._last = _NO_KIND

    def case(self, function: CaseOf) -> CaseOf:
        """Decorate what replaces the op's case here: it gives None for a call that torch's function does not serve."""
        self.case_of = function
        return function

    def run(self, operation: Operation, case: Case, args: tuple[Any, ...]) -> Any:
        """Run a case by torch's implementation with autograd recording; NotImplemented where it is not to."""
        plan = None if choice_overrides or torch_wants_determinism() else operation.plans.usual.get(case)
        if plan is None:
            plan = operation.torch_autograd_plan(case)
        if plan is None or not plan.torch_autograd:
            return NotImplemented
        result = operation.execute(case, plan, args)
        self.thread.by_torch = plan.record, operation
        return result

    def __call__(self, public: Callable[P, R]) -> Callable[P, R]:
        """Decorate the op's public function."""
        name, known = public.__name__, self._known
        takes_shape = "normalized_shape" in _library.TORCH_NAMES.get(name, ())

        @functools.wraps(public)
        def call(*args: P.args, **options: P.kwargs) -> Any:
            if is_dynamo_compiling():
                args, options = own_arguments(name, args, options)  # type: ignore[assignment]
                return public(*args, **options)
            length, count, check, last, names, grad, small, run, record, _ = kind = self._usual
            values: tuple[Any, ...] = (*args, *options.values()) if options else args
            try:
                usual = (
                    len(values) == length
                    # The guards' check of a nested tensor would end the process.
                    and not (values[0].is_nested or (count > 1 and values[count - 1].is_nested))
                    and (count < 3 or not (values[1].is_nested or (count > 3 and values[2].is_nested)))
                    and (tuple(options) == names if options else not names)
                    and (check(*values) if length == count else values[-1] is last and check(*values[:-1]))
                    and (grad is None or is_grad_enabled() is grad)
                )
            except (AttributeError, RuntimeError, TypeError):  # no tensor, or of a subclass that knows no `is_nested`
                usual = False
            if not usual:
                plain = values and type(values[0]) in _TENSORS and not values[0].is_nested
                kinds = known.get(values[0].shape, ()) if plain else ()
                for others, kind in kinds:
                    length, count, check, _, names, grad, small, run, record, _ = kind
                    if (
                        len(values) == length
                        and (grad is None or is_grad_enabled() is grad)
                        and (length == count or all(map(is_, values[count:], others)) or _are(values[count:], others))
                        and (tuple(options) == names if options else not names)
                        and not any([type(x) in _TENSORS and x.is_nested for x in values])  # noqa: C419 - faster
                        and check(*(values if length == count else values[:count]))
                    ):
                        break
                else:
                    tells = options or recorders or (args and type(args[0]) in _TENSORS)
                    if takes_shape and tells and len(args) > 1 and type(args[1]) is tuple and not recorders:
                        x: Any = args[0]
                        named = "normalized_shape" in options or type(x) not in _TENSORS
                        if not named and args[1] and args[1] == x.shape[-1:] and type(args[1][0]) is int:
                            return call(x, *args[2:], **options)  # type: ignore[arg-type]  # torch's order
                    if tells or (len(args) > 1 and isinstance(args[1], _SIZES)):
                        return self._unrecognized(public, call, args, options)
                    return public(*args, **options)
                self._usual = kind if kind is self._last and len(others) < 2 else _NO_KIND
                self._last = kind
            asked = recorders or observers or choice_overrides or active_modes() or torch_wants_determinism()
            if asked or record is None or forward_ad._current_level >= 0 or (small and captures_ahead()):
                return self._call(public, call, args, options, kind)
            calls = record.calls + 1
            if calls > 4 and (calls % SAMPLE_EVERY or ((small or calls > RARELY) and calls % RARELY)):
                record.calls = calls  # without the ledger's lock: CPython changes threads at calls and jumps back alone
                if grad:
                    record.recording += 1
                try:
                    return run(*args, **options) if options else run(*args)
                except _TORCH_ERRORS:
                    _ledger.discount(record, bool(grad))  # the public function says what is wrong, in its own words
                except BaseException:
                    _ledger.failed(record)
                    raise
            return self._call(public, call, args, options, kind)

        call.torch_function = self._function  # type: ignore[attr-defined]  # what the benchmark compares with
        return call

    def _call(
        self, public: Callable[..., Any], call: Callable[..., Any], args: Any, options: Any, kind: tuple[Any, ...]
    ) -> Any:
        """Serve a known call by the op's autograd function, or by the public one, which settings and the count ask."""
        *_, small, _, _, apply = kind
        if recorders:
            return self._unrecognized(public, call, args, options)
        watched = active_modes() or forward_ad._current_level >= 0
        if choice_overrides or torch_wants_determinism() or watched or (small and captures_ahead()):
            return public(*args, **options)
        if apply is not None and not observers:
            return apply((*args, *options.values()))
        self.thread.small = small
        try:
            return public(*args, **options)
        finally:
            self.thread.small = False

    def _unrecognized(self, public: Callable[..., Any], call: Callable[..., Any], args: Any, options: Any) -> Any:
        """Learn the kind of a call, in the op's own words."""
        if recorders and not is_compiling():
            return recorders[-1](call, args, options)
        values = (*args, *options.values())
        try:
            x = values[0]
            taken = self._pure or self._any_layout or x.is_contiguous()
            learns = type(x) in _TENSORS and (taken if x.is_cpu else self._may_learn(x, values))
        except (AttributeError, IndexError, RuntimeError):  # no tensor, a sparse or a nested one
            learns = False
        if options or (len(args) > 1 and isinstance(args[1], _SIZES)):
            own_args, own = own_arguments(public.__name__, args, options)
            if own is not options:
                return call(*own_args, **own)
        try:
            return self._learn(public, args, options, values) if learns else public(*args, **options)
        except RuntimeError:
            for x in values:
                if type(x) in _TENSORS and not x.is_meta:
                    refuse_without_values(x, f"an argument of {public.__name__}")
            raise

    def _may_learn(self, x: Tensor, values: tuple[Any, ...]) -> bool:
        """Return whether a call elsewhere than on a CPU may teach a kind; this costs little where it may not."""
        if self._serves_small is not None and 0 < x.numel() < self._few:
            return self._any_layout or x.is_contiguous()
        missed = self._missed + 1
        if not self._pure or missed & (missed - 1):  # see _watched
            self._missed = missed
            return False
        return True

    def _learn(self, public: Callable[..., Any], args: Any, options: Any, values: tuple[Any, ...]) -> Any:
        """Call the public function, and remember what served the call, if another of its kind may be served so."""
        tensors = [x for x in values if type(x) in _TENSORS]
        traced = is_compiling() or active_modes() or transforming() or forward_ad._current_level >= 0
        if traced or autocasts() or not _VALUES.issuperset(map(type, values[len(tensors) :])):
            return public(*args, **options)
        on_cpu = all(x.is_cpu and (self._any_layout or _is_contiguous(x)) for x in tensors)
        if not on_cpu and self._serves_small is not None:
            return self._learn_small(public, args, options, tensors)
        if not (on_cpu or self._pure) or observers or choice_overrides or torch_wants_determinism():
            return public(*args, **options)
        self.thread.by_torch = None
        y = self._watched(public, args, options)
        if on_cpu:
            self._remember_torch(args, options, small=False)
        return y

    def _learn_small(self, public: Callable[..., Any], args: Any, options: Any, tensors: Sequence[Tensor]) -> Any:
        """Do the same on a GPU, for calls on few elements."""
        dense = self._any_layout or all(map(_is_contiguous, tensors))
        learns = 0 < tensors[0].numel() < self._few and dense and all(x.is_cuda for x in tensors)
        if not learns or choice_overrides or torch_wants_determinism() or captures_ahead():
            return public(*args, **options)
        try:
            serves = self._serves_small is not None and self._serves_small(*args, **options)
        except _TORCH_ERRORS:  # nothing has checked these arguments yet: the public function says what is wrong
            serves = False
        if not serves:
            self._remember(args, options)
            return public(*args, **options)
        self.thread.by_torch, self.thread.small = None, True
        try:
            y = public(*args, **options)
        finally:
            self.thread.small = False
        self._remember_torch(args, options, small=True)
        return y

    def _watched(self, public: Callable[..., Any], args: Any, options: Any) -> Any:
        """Call the public function, and now and then recognize the next call that runs kernels of ours like it."""
        self._missed += 1
        thread = self.thread
        if not self._pure or self._missed & (self._missed - 1):
            return public(*args, **options)
        thread.watching, thread.applied = True, None
        try:
            y = public(*args, **options)
            if thread.applied is None:
                return y
            bound, given, results = thread.applied
        finally:
            thread.watching, thread.applied = False, None
        first = isinstance(results, tuple) and y is results[0]
        tensors = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
        count = len(tensors)
        rest = given[count:]
        # Tensors that are one object do not tell the order of keywords.
        same = len(set(map(id, tensors))) == count <= len(given) and all(map(is_, tensors, given))
        if same and (first or y is results) and not any(isinstance(x, Tensor) for x in rest):
            if (op := bound(given, results, first)) is None:
                return y
            for shape, known in list(self._known.items()):
                self._known[shape] = tuple(each for each in known if each[-1][-1] is None)
            self._remember(args, options, apply=lambda values: op(*values[:count], *rest))
        return y

    def _remember_torch(self, args: Any, options: Any, *, small: bool) -> None:
        """Remember the kind of a call that torch's implementation served, if it did."""
        if self.thread.by_torch is not None:
            record, operation = self.thread.by_torch
            operation.plans.add_dependent(self)
            serves = small or self._serves(*args, **options)
            bind = self._bind if serves and args else None  # torch's functions name their first argument otherwise
            run = bind(*args, **options) if bind else None
            self._remember(args, options, small, run=run or self._function, record=record if serves else None)

    def _remember(self, args: Any, options: Any, small: bool = False, **serves: Any) -> None:
        values = (*args, *options.values())
        tensors = [x for x in values if isinstance(x, Tensor)]
        others = values[len(tensors) :]
        try:
            hash(others)
        except TypeError:  # a list within a tuple
            return
        if len(self._known) >= _CALLS_LIMIT:
            self._known.clear()
        self._usual = self._last = _NO_KIND
        check, grad = _check_of(tensors), is_grad_enabled() if any(x.requires_grad for x in tensors) else None
        last = values[-1] if others else None  # a tensor would be kept, with the graph that it is the result of
        kind = _Kind(len(values), len(tensors), check, last, tuple(options), grad, small, **serves)
        earlier = self._known.get(tensors[0].shape, ())[: _KINDS_LIMIT - 1]
        self._known[tensors[0].shape] = ((others, tuple(kind)), *earlier)


def _is_contiguous(x: Tensor) -> bool:
    return x.layout is torch.strided and x.is_contiguous()


# --- differentiable ops ----------------------------------------------------------------------------------------------
_ARGUMENT = re.compile(r"(?P<type>[\w?\[\]]+) (?P<name>\w+)")


class DifferentiableOp:
    """An op with kernels for its value and its first derivative; see the module's docstring.

    Calling it takes the schema's arguments, positional, already validated, and returns the public results.

    Args:
        schema: of torch's registration, with a name for every result: "silu(Tensor x) -> (Tensor y)". Results after the
            public ones are for the backward pass alone.
        operation: the forward Operation: the arguments -> all results, a tuple unless there is one.
        case: the arguments -> the case of `operation`; None for a call that only a subclass's `forward` serves.
        backward: (gradient of each differentiable result, None where nothing depends on it; the saved tensors; the
            arguments that are no tensors; needs) -> a gradient for each entry of `gradients`, None where it is not
            needed. `needs` is a tuple of bools, one for each.
        saves: names of the arguments and results that the backward pass takes, all of them tensors.
        gradients: differentiable argument -> the saved tensor of its shape and dtype, or the result of its shape and
            dtype (whose gradient is at hand), so that nothing need be saved for the shape alone; or another
            such argument, whose gradient is its own too, as in a sum.
        composite: the arguments -> the public results, from torch's differentiable functions.
        fake: the arguments -> all results, empty, with the right shape, dtype and strides.
        composite_backward: as `backward`, from torch's differentiable functions; None: composite is run again on the
            saved arguments and differentiated, which requires that every tensor argument is saved.
        keeps_layout: gradients have the strides of the tensor named in `gradients`, not only its shape.
        cpu: leaves calls on a CPU to torch; None: never.

    An op that does more is a subclass, with attributes and methods of its own.

    Attributes:
        backward: for callers that differentiate several ops in one autograd function, as the method `forward`.
        public: number of results that the caller gets.
        differentiable: number of the public results that carry a gradient, the first ones.
        needed_by: saved argument -> the differentiable ones whose gradients alone need it; saved as None if none of
            these is needed.
        decomposes: torch.compile sees the composite rather than the op, to fuse it with its surroundings.
    """

    public = 1
    differentiable = 1
    needed_by: ClassVar[Mapping[str, Sequence[str]]] = {}
    decomposes = False

    def __init__(
        self,
        schema: str,
        *,
        backward: Callable[..., Sequence[Tensor | None]],
        saves: Sequence[str],
        gradients: Mapping[str, str],
        composite: Callable[..., Any],
        fake: Callable[..., Any],
        operation: Operation,
        case: Callable[..., Case | None],
        composite_backward: Callable[..., Sequence[Tensor | None]] | None = None,
        keeps_layout: bool = False,
        cpu: CpuFastPath | None = None,
    ) -> None:
        head, _, results = schema.partition("->")
        self.name = head.partition("(")[0]
        arguments = [(match["type"], match["name"]) for match in _ARGUMENT.finditer(head.partition("(")[2])]
        names = [name for _, name in arguments]
        outputs = [match["name"] for match in _ARGUMENT.finditer(results)]
        self._width = len(arguments)
        self._tensors = tuple(i for i, (kind, _) in enumerate(arguments) if kind.startswith("Tensor"))
        self._options = tuple(i for i, (kind, _) in enumerate(arguments) if not kind.startswith("Tensor"))
        self._needed_by = tuple(
            (list(saves).index(name), tuple(map(names.index, users))) for name, users in self.needed_by.items()
        )
        shares = {name: of for name, of in gradients.items() if of in gradients and of not in (*saves, *outputs)}
        gradients = {name: of for name, of in gradients.items() if name not in shares}
        self._positions = tuple(names.index(name) for name in gradients)  # of differentiable arguments
        self._shared = tuple((names.index(name), list(gradients).index(of)) for name, of in shares.items())
        inputs = [*(f"d_{name}" for name in outputs[: self.differentiable]), *saves]
        self._likes = tuple(inputs.index(like if like in saves else f"d_{like}") for like in gradients.values())
        self._saved = tuple((name in names, (names if name in names else outputs).index(name)) for name in saves)
        self._take_saved = _taker([at if given else self._width + at for given, at in self._saved])
        self._take_options = _taker(self._options)
        self._outputs = len(outputs)
        self._backward_rank = (len(outputs[: self.differentiable]), len(saves))
        self._operation = operation
        self._case: Callable[..., Any] = case
        self.backward = backward
        self.composite_backward = composite_backward or self._recomputed
        self._composite = composite
        self._empty = torch.empty_like if keeps_layout else _contiguous
        self._cpu = cpu
        self._cpu_case = case if cpu is None or cpu.case_of is None else cpu.case_of
        self._second = Operation(
            f"{self.name}_bwd_create_graph",
            (Implementation("torch", self.composite_backward),),
            cost=lambda _: Cost(0, 0),
        )
        self._apply = self.autograd_function(self.public)
        self._op = define(
            schema,
            kernel=self.forward,
            fake=fake,
            differentiable=self._traced_function(),
            composite=self._padded(composite),
        )
        kinds = {name: kind for kind, name in arguments} | dict.fromkeys(outputs, "Tensor")
        kinds |= dict.fromkeys(self.needed_by, "Tensor?")
        self._op_backward = self._define_backward(
            [f"Tensor{'' if self.differentiable == 1 else '?'} d_{name}" for name in outputs[: self.differentiable]]
            + [f"{kinds[name]} {name}" for name in saves]
            + [f"{arguments[i][0]} {names[i]}" for i in self._options],
            len(gradients),
        )

    def _define_backward(self, parameters: Sequence[str], results: int) -> Callable[..., Any]:
        returns = ", ".join(["Tensor"] * results)
        return define(
            f"{self.name}_backward({', '.join([*parameters, 'bool[] needs'])}) -> "
            + (f"({returns})" if results > 1 else returns),
            kernel=self._all_tensors(self.backward),
            fake=self._fake_backward,
            differentiable=self._all_tensors(self.composite_backward),
            composite=self._all_tensors(self.composite_backward),
        )

    def __repr__(self) -> str:
        """Name the op, and the Operation of its forward pass."""
        return f"<{type(self).__name__} {self.name}: {self._operation!r}>"

    def __call__(self, *args: Any) -> Any:
        """Return the public results."""
        if is_compiling():
            return self._composite(*args) if self.decomposes else self._cut(self._op(*args))
        if active_modes() or forward_ad._current_level >= 0 or transforming():
            return self._cut(self._op(*args))
        cpu = self._cpu
        learns = False
        for position in self._tensors:
            if (x := args[position]) is not None:
                if cpu is None or not x.is_cpu or type(x) not in _TENSORS:
                    if not _library.ordinary_keys.get(keys_of(x).raw_repr()) and not is_ordinary(x):
                        return self._cut(self._op(*args))
                    cpu = None
                learns = learns or x.requires_grad
        small = cpu is None and self._cpu is not None and self._cpu.thread.small
        cpu = self._cpu if small else cpu
        if cpu is not None and (case := self._cpu_case(*args)) is not None:
            case = case._replace(options=(*case.options, FEW_ELEMENTS)) if small else case
            result = cpu.run(self._operation, case, args + cpu.args)
            if result is not NotImplemented:
                return self._cut(result)
        learns = learns and torch.is_grad_enabled()
        results = self._apply(*args) if learns else self.infer(*args)
        if self._cpu is not None and self._cpu.thread.watching:
            self._cpu.thread.applied = (self.bound if learns else self.bound_inference), args, results
        return results

    def forward(self, *args: Any) -> Any:
        """Return all results, without autograd."""
        return self._operation(self._case(*args), *args)

    def infer(self, *args: Any) -> Any:
        """Return the public results where no gradient is needed."""
        results = self.forward(*args)
        return results[0] if self.public == 1 and isinstance(results, tuple) else self._cut(results)

    # --- autograd ----------------------------------------------------------------------------------------------------
    def autograd_function(
        self, shown: int, forward: Callable[..., Any] | None = None, backward: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """Return the call of an autograd function for plain tensors that gives the first `shown` results."""
        run, operation, case = forward or self.forward, self._operation, self._case
        plain = getattr(run, "__func__", None) is DifferentiableOp.forward  # whose call is saved

        def eager_forward(ctx: Any, *args: Any) -> Any:
            results = operation(case(*args), *args) if plain else run(*args)
            return self._save(ctx, args, results, shown)

        def eager_backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
            return self._gradients(ctx, dys[: self.differentiable], backward)

        return self._applied(eager_forward, eager_backward)

    def _applied(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
        # Past Function.apply, which looks for transforms and dead wrappers in Python: plain tensors have neither.
        function = self._function(forward, backward)
        apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
        return apply

    def _traced_function(self) -> Callable[..., Any]:
        """Return the call of an autograd function for traced tensors, which see every result."""

        def forward(ctx: Any, *args: Any) -> Any:
            with _library.below_autograd():
                results = self._op(*args)
            return self._save(ctx, args, results, self._outputs)

        def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
            return self._gradients(ctx, dys[: self.differentiable])

        apply: Callable[..., Any] = self._function(forward, backward, "Traced").apply
        return apply

    def _function(self, forward: Callable[..., Any], backward: Callable[..., Any], end: str = "") -> Any:
        title = "".join(part.capitalize() for part in self.name.split("_")) + end  # seen in profiles
        steps = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        return type(title, (torch.autograd.Function,), steps)

    def bound(self, args: tuple[Any, ...], results: Any, first: bool) -> Callable[..., Any]:
        """Return what gives a plain call's results for tensors that differ in memory alone."""
        apply = self._apply
        return (lambda *args: apply(*args)[0]) if first else apply

    def bound_inference(self, args: tuple[Any, ...], results: Any, first: bool) -> Callable[..., Any] | None:
        """Return the same where no gradient is needed; None if `infer` does more than the Operation."""
        run = self._operation.bound(self._case(*args))
        return (lambda *args: run(*args)[0]) if first else None

    def _needs(self, ctx: Any) -> tuple[bool, ...]:
        needed = ctx.needs_input_grad
        return tuple(map(needed.__getitem__, self._positions))  # a comprehension is a call

    def _save(self, ctx: Any, args: tuple[Any, ...], results: Any, shown: int) -> Any:
        outputs = results if isinstance(results, tuple) else (results,)
        saved = self._take_saved(args + outputs)
        for at, users in self._needed_by:
            if not any(ctx.needs_input_grad[position] for position in users):
                saved = (*saved[:at], None, *saved[at + 1 :])
        ctx.save_for_backward(*saved)
        ctx.options = self._take_options(args)
        if shown > self.differentiable:
            ctx.mark_non_differentiable(*outputs[self.differentiable : shown])
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
        if first is None and (first := next((dy for dy in dys if dy is not None), None)) is None:
            return (None,) * self._width
        needs = self._needs(ctx)
        for position, entry in self._shared:
            needs = (*needs[:entry], needs[entry] or ctx.needs_input_grad[position], *needs[entry + 1 :])
        args = (*dys, *ctx.saved_tensors, *ctx.options, needs)
        results: Sequence[Tensor | None]
        watched = active_modes() or forward_ad._current_level >= 0 or transforming()  # is_plain, inlined
        if watched or not (_library.ordinary_keys.get(keys_of(first).raw_repr()) or is_ordinary(first)):
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
        if not isinstance(results, (tuple, list)):
            return results
        return results[0] if self.public == 1 else tuple(results[: self.public])

    def _padded(self, composite: Callable[..., Any]) -> Callable[..., Any]:
        """Return the composite with an empty tensor for each result that is not public, as the schema has it."""
        if not (hidden := self._outputs - self.public):
            return composite

        def run(*args: Any) -> Any:
            results = composite(*args)
            results = results if isinstance(results, tuple) else (results,)
            return (*results, *(results[0].new_empty(0) for _ in range(hidden)))

        return run

    def _all_tensors(self, backward: Callable[..., Sequence[Tensor | None]]) -> Callable[..., Any]:
        """Return the backward pass as torch registers it: empty tensors for None, no memory shared with arguments."""

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


class DecomposedOp(DifferentiableOp):
    """An op that torch.compile sees as its composite, to fuse it with its surroundings."""

    decomposes = True


def _contiguous(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _taker(positions: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return a function that takes the elements of a tuple at these positions, in one call of C."""
    first = positions[0] if positions else 0
    if list(positions) == list(range(first, first + len(positions))):  # one alone, too: itemgetter gives it bare
        return itemgetter(slice(first, first + len(positions)))
    return itemgetter(*positions)
