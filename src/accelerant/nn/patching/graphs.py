"""A patched model's forward and backward pass as two CUDA graphs, for loops that call the model themselves.

A call in training mode has a key: shapes, dtypes and values of the arguments, and torch's settings. The first calls of
a key run eagerly; the next one captures the forward pass, and with it the backward pass of all outputs. From then on a
call is one autograd function that replays both. The parameters are its inputs, so that autograd accumulates `.grad` and
calls hooks, DDP's too. Outputs are copied out of the memory of the graphs. Gradients are in that memory: one that is
still in use at the next forward pass is moved first.

A graph is only correct while the model is as it was at the capture: each call compares modules, attributes, parameters,
buffers and their memory. Whatever cannot be captured runs eagerly, and is counted with its reason. A second backward
pass, or one that is differentiated, runs the call again, eagerly. By default (`automatic`) graphs are kept where they
make steps faster, by the device's clock, and fit into memory.
"""

from __future__ import annotations

import random
import sys
import threading
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from accelerant.config import settings
from accelerant.errors import FallbackWarning, LaunchError, UnsupportedCase
from accelerant.nn.patching.record import MARK, PARTS, RECORD, Capture, Forward, PatchReport, has_hooks
from accelerant.ops._library import is_watched
from accelerant.runtime.host import fork_safe
from accelerant.runtime.ledger import FallbackRecord, ledger
from accelerant.runtime.streams.graphs import Graph, ahead_of_capture

EAGER_CALLS = 3  # of a key before its capture: they compile kernels, and show what a replay would not do
MOST_GRAPHS = 4  # keys with graphs at one time; each has memory of its own for activations and gradients
_IDLE_CALLS = 64  # calls without a replay after which another key may take the place of a captured one
_MOST_KEYS = 64  # keys whose calls are counted
_CREDIT = 32  # eager calls that are watched by default; a capture counts as four, and a replay takes one back
_LAG = 3.0  # device time of an eager forward pass by its host time, above which the device does not wait for the host
_LAPS, _GAIN = 5, 0.97  # after so many replays their fastest step may take this much of the fastest eager one
_SHARE = 4  # by default a model's graphs hold at most 1 / 4 of the memory that was free without them
_KNOWN = ("torch.nn.", "transformers.", "peft.", "accelerate.", "accelerant.")  # a forward pass only does operations

_UNUSED = 2  # references to the storage of a gradient that nobody uses: its tensor's, and the one held here
_DEVICE = "cuda"

_PLAIN = (bool, int, float, str, type(None), torch.dtype)

_TENSORS = (Tensor, nn.Parameter)


def graphed_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a patched model, from its graphs if this call has been captured."""
    return self.__dict__[RECORD].graphs(self, args, kwargs)


class _Reason(UnsupportedCase):
    """Why a call runs eagerly."""


# --- one captured call -----------------------------------------------------------------------------------------------


_Again = tuple[Sequence[Tensor], list[int], Tensor | None, list[Tensor]]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, captured: _Captured, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.captured, ctx.done, ctx.spent = captured, False, set[int]()
        captured.pending = weakref.ref(ctx)
        given = tensors[: len(captured.inputs)]
        drawn = torch.cuda.get_rng_state() if captured.draws else None
        ctx.again = given, _versions(given), drawn, [x.clone() for x in captured.written]
        ctx.save_for_backward(*tensors[len(given) :])
        ctx.params = (tensors[len(given) :], _versions(tensors[len(given) :])) if captured.parted else None
        captured.forward_graph.replay()
        outputs = tuple([out.clone() for out in captured.outputs])
        ctx.mark_non_differentiable(*[out for out, to in zip(outputs, captured.out_grads, strict=True) if to is None])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        captured: _Captured = ctx.captured
        again, given = ctx.again, {place for place, grad in enumerate(grads) if grad is not None}
        if ctx.spent and not ctx.spent & given:  # these outputs have no history with those of earlier passes
            captured.check(given, *ctx.params)
            params = ctx.params[0]
        else:
            params = ctx.saved_tensors  # raises if one was changed in place, and after a pass that kept no graph
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.spent = ctx.spent.union(*[captured.tied[place] for place in given])
            if not captured.parted:
                ctx.again = None  # frees the arguments
        done, ctx.done = ctx.done, True
        if torch.is_grad_enabled() or done or [param.data_ptr() for param in params] != captured.addresses:
            return None, *captured.run_again(again, grads)
        return None, *captured.backward(grads)


class _Captured:
    """The two graphs of one key, and the tensors that they read and write."""

    def __init__(
        self, run: Forward, values: list[Any], key: tuple[Any, ...], full_masks: bool | None, state: _State,
        draws: bool, written: Sequence[Tensor], eager_laps: list[_Lap],
    ) -> None:  # fmt: skip
        self.last = self.held_bytes = 0
        self.eager_laps, self.laps = eager_laps, list[_Lap]()
        self.retired = False  # whether a backward pass had to run the call again: the graphs do not suit this loop
        self.draws, self.written = draws, written
        self._run, self._names, self._low, self._state = run, key[0], key[2], state
        self._live: list[Tensor] = []
        self.pending: Callable[[], Any] = lambda: None  # the autograd node of the last call, while it is alive
        copies = (x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in values)
        self._values = list(copies)
        self.inputs: list[Tensor] = [x for x in self._values if isinstance(x, Tensor)]
        with _capturable(state.model, draws, full_masks) as leaves:
            self._needed = [x for x in (*self.inputs, *leaves) if x.requires_grad]
            self.forward_graph, self._backward_graph = Graph("patch: forward"), Graph("patch: backward")
            self.outputs = [out.detach() for out in self.forward_graph.capture(self._run_forward, warm_up=0)]
            self.out_grads = [torch.zeros_like(out) if out.requires_grad else None for out in self._live]
            if all(grad is None for grad in self.out_grads):
                raise _Reason("no output requires a gradient")
            pool = self.forward_graph.pool
            grads = self._backward_graph.capture(self._run_backward, warm_up=0, pool=pool)
        by_leaf = dict(zip(map(id, self._needed), grads, strict=True))
        # What got no gradient is no input: its .grad stays None, and DDP counts it as unused.
        used = [leaf for leaf in leaves if by_leaf.get(id(leaf)) is not None]
        self.params = [leaves[leaf] for leaf in used]
        self.addresses = [param.data_ptr() for param in self.params]
        self._grads = [by_leaf.get(id(x)) for x in (*self.inputs, *used)]
        # Memory of its own is lent to .grad; of a gradient that shares memory with another tensor, copies are given.
        tensors = (*self.inputs, *self.params, *self.outputs, *self.out_grads, *self._grads)
        sharing = Counter(x.untyped_storage()._cdata for x in tensors if x is not None)
        places = range(len(self.inputs), len(self._grads))
        storages = {place: grad.untyped_storage() for place in places if (grad := self._grads[place]) is not None}
        self._lent = {
            place: found for place, found in storages.items()
            if sharing[found._cdata] == 1 and _holders(found) == _UNUSED
        }  # fmt: skip
        self._lends = True
        self._dirty = [False] * len(self.out_grads)
        reached, histories = zip(*[_history(out) for out in self._live], strict=True)
        self._reached = [{i for i, x in enumerate((*self.inputs, *used)) if id(x) in ids} for ids in reached]
        # Outputs without a common history can have backward passes of their own, none of which keeps the graph.
        self.tied = [{place for place, nodes in enumerate(histories) if nodes & own} for own in histories]
        self.parted = any(tied and len(tied) < sum(map(bool, histories)) for tied in self.tied)
        self._live, self._needed = [], []

    def is_slow(self) -> bool:
        """Return whether steps turned out no faster than eager ones were."""
        if len(self.laps) < _LAPS or not self.eager_laps:
            return False
        if not all(event.query() for lap in (*self.laps, *self.eager_laps) for event in lap):  # of several streams
            return False
        slow = _shortest_ms(self.laps) > _GAIN * _shortest_ms(self.eager_laps)
        self.eager_laps = []  # compared once
        return slow

    def check(self, outputs: set[int], params: Sequence[Tensor], versions: Sequence[int]) -> None:
        """Raise as torch does if a parameter that these outputs depend on has another version than in their call."""
        places = {place - len(self.inputs) for output in outputs for place in self._reached[output]}
        if any(place >= 0 and params[place]._version != versions[place] for place in places):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"parameter of {type(self._state.model).__name__}"
            )

    def _result(self, values: Sequence[Any]) -> Any:
        split = len(values) - len(self._names)
        return self._run(*values[:split], **dict(zip(self._names, values[split:], strict=True)))

    def _run_forward(self) -> list[Tensor]:
        self._live, self._rebuild = _flattened(self._result(self._values))
        return self._live

    def _run_backward(self) -> list[Tensor | None]:
        pairs = [(out, grad) for out, grad in zip(self._live, self.out_grads, strict=True) if grad is not None]
        outputs, out_grads = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, self._needed, out_grads, allow_unused=True)
        # Laid out as its parameter, a gradient becomes .grad without a copy. A view's base would hold its memory too.
        return [
            None if grad is None else grad.data if grad.stride() == x.stride() else torch.empty_like(x).copy_(grad)
            for x, grad in zip(self._needed, found, strict=True)
        ]

    def __call__(self, values: Sequence[Any]) -> Any:
        """Replay the forward pass of new arguments of the same key."""
        given = [x for x in values if isinstance(x, Tensor)]
        with torch.no_grad():
            for static, value in zip(self.inputs, given, strict=True):
                static.copy_(value, non_blocking=True)
        outputs: tuple[Tensor, ...] = _Replay.apply(self, *given, *self.params)  # type: ignore[no-untyped-call]
        return self._rebuild(outputs)

    def run_again(self, again: _Again, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of a call by running it eagerly: those may be differentiated, and computed repeatedly.

        `again` has the call's arguments that are tensors, their versions then, the state of the device's random number
        generator before it (if it draws), and of the buffers into which it writes.
        """
        given, versions, drawn, buffers = again
        if _versions(given) != versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: an "
                f"argument of {type(self._state.model).__name__} was changed before a second backward pass"
            )
        self.retired = True
        remaining = iter(given)
        values = [next(remaining) if isinstance(x, Tensor) else x for x in self._values]
        inputs = [*given, *self.params]
        wanted = [x for x in inputs if x.requires_grad]
        with (
            self._state.restored(), _drawing_from(drawn), _holding(self.written, buffers), ahead_of_capture(),
            torch.enable_grad(),
            torch.autocast(_DEVICE, dtype=self._low, enabled=self._low is not None),
        ):  # fmt: skip
            outputs, _ = _flattened(self._result(values))
        pairs = [pair for pair in zip(outputs, grads, strict=True) if pair[0].requires_grad and pair[1] is not None]
        if not pairs:
            return [None] * len(inputs)
        results, given_grads = zip(*pairs, strict=True)
        again_differentiable = torch.is_grad_enabled()
        found = torch.autograd.grad(results, wanted, given_grads, None, again_differentiable, allow_unused=True)
        by_input = dict(zip(map(id, wanted), found, strict=True))
        return [by_input.get(id(x)) for x in inputs]

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay the backward pass for gradients of the outputs; return those of inputs and parameters."""
        for place, (static, grad) in enumerate(zip(self.out_grads, grads, strict=True)):
            if grad is not None and static is not None:
                static.copy_(grad)
            elif static is not None and self._dirty[place]:
                static.zero_()
            self._dirty[place] = grad is not None
        self._backward_graph.replay()
        # A zero that flows from an output without gradient is none: it must not reach an optimizer's weight decay.
        reached = set().union(*[places for places, grad in zip(self._reached, grads, strict=True) if grad is not None])
        found = [grad if place in reached else None for place, grad in enumerate(self._grads)]
        # A hook may start work on another stream, and drop the gradient before that is done.
        hooked = any(param._post_accumulate_grad_hooks or param._backward_hooks for param in self.params)
        lent = self._lent if self._lends and not hooked else {}
        copied = [grad for place, grad in enumerate(found) if grad is not None and place not in lent]
        copies: dict[int, Tensor] = {}
        for dtype in {grad.dtype for grad in copied}:  # those of one dtype in few launches
            same = [grad for grad in copied if grad.dtype == dtype]
            copies |= zip(map(id, same), torch._foreach_mul(same, 1.0), strict=True)
        return [
            None if grad is None else grad.detach() if place in lent else copies[id(grad)]
            for place, grad in enumerate(found)
        ]

    def take_back(self) -> bool:
        """Give gradients that are still in use memory of their own; return False if not only .grad uses them.

        The loop accumulates gradients then, or keeps them over the next forward pass: from now on they are copied.
        """
        used = [place for place, storage in self._lent.items() if _holders(storage) > _UNUSED]
        if not used:
            return True
        for place in used:
            grad, viewed = self.params[place - len(self.inputs)].grad, _holders(self._lent[place]) > _UNUSED + 1
            if not viewed and grad is not None and grad.untyped_storage()._cdata == self._lent[place]._cdata:
                grad.data = grad.data.clone()
        self._lends = False
        self._lent = {place: self._lent[place] for place in used if _holders(self._lent[place]) > _UNUSED}
        return not self._lent


def _holders(storage: torch.UntypedStorage) -> int:
    return torch._C._storage_Use_Count(storage._cdata)


def _history(out: Tensor) -> tuple[set[int], set[Any]]:
    """Return the identities of the leaves that a tensor depends on, and the nodes of autograd between them."""
    found, seen, todo = {id(out)}, set(), [out.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.add(id(getattr(node, "variable", None)))
            todo += [following for following, _ in node.next_functions]
    return found, {node for node in seen if not hasattr(node, "variable")}


@contextmanager
def _drawing_from(state: Tensor | None) -> Iterator[None]:
    """Set the state of the device's random number generator inside the block; None leaves it."""
    if state is None:
        yield
        return
    now = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(state)
    try:
        yield
    finally:
        torch.cuda.set_rng_state(now)


@contextmanager
def _holding(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Give tensors other values inside the block, which autograd does not see."""
    now = [x.clone() for x in tensors]
    for x, value in zip(tensors, values, strict=True):
        x.data.copy_(value)
    try:
        yield
    finally:
        for x, value in zip(tensors, now, strict=True):
            x.data.copy_(value)


@contextmanager
def _capturable(model: nn.Module, draws: bool, full_masks: bool | None) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
    """Give the model other parameters over the same memory inside the block; yield {substitute: parameter}.

    The node that accumulates a parameter's gradient belongs to the stream of its first use. That is not the capture's
    stream while a graph of autograd from before is alive, and a capture must not wait for another stream.
    """
    replaced = [(m._parameters, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
    by_id = {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for _, _, p in replaced}
    leaves = {by_id[id(p)]: p for _, _, p in replaced}

    def no_states(*_: Any) -> tuple[list[int], list[Tensor]]:
        if draws:
            raise _Reason("it recomputes activations with dropout, whose random state a capture cannot read")
        return [], []

    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):  # it may make another mask itself
        full_masks = False
    cached, states = torch.is_autocast_cache_enabled(), checkpointing.get_device_states
    torch.set_autocast_cache_enabled(False)  # copies made in a capture must not outlive it, nor enter it
    checkpointing.get_device_states, Capture.full_masks = no_states, bool(full_masks)
    try:
        for table, name, param in replaced:
            table[name] = by_id[id(param)]
        yield leaves
    finally:
        for table, name, param in replaced:
            table[name] = param
        checkpointing.get_device_states, Capture.full_masks = states, None
        torch.set_autocast_cache_enabled(cached)


def _flattened(result: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """Return the tensors of a model's output, and the function that makes an output of others."""
    make, tree = getattr(result, "__dict__", {}).get(PARTS, (None, result))
    leaves, spec = pytree.tree_flatten(tree)
    for leaf in leaves:
        if not isinstance(leaf, Tensor | bool | int | float | str | None):
            raise _Reason(f"its output contains a {type(leaf).__name__} (use_cache=False leaves out a cache)")

    def rebuild(tensors: Sequence[Tensor]) -> Any:
        remaining = iter(tensors)
        filled = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in constants]
        made = pytree.tree_unflatten(filled, spec)
        return made if make is None else make(made)

    constants = [torch.empty(0) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], rebuild


# --- what a captured call depends on ---------------------------------------------------------------------------------


def _key(values: Sequence[Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the key of a call's arguments; raise _Reason for one that no graph can take."""
    parts: list[Any] = []
    for place, value in enumerate(values):
        if isinstance(value, Tensor):
            plain = type(value) in _TENSORS and value.layout == torch.strided
            if not plain or value.device.type != _DEVICE:
                raise _Reason(f"an argument is a {type(value).__name__} on {value.device}")
            parts.append((value.shape, value.dtype, value.requires_grad))
        elif isinstance(value, _PLAIN):
            parts.append((type(value), value))
        else:
            name = names[place - len(values)] if place >= len(values) - len(names) else f"number {place}"
            raise _Reason(f"argument {name} is a {type(value).__name__}")
    low = torch.get_autocast_dtype(_DEVICE) if torch.is_autocast_enabled(_DEVICE) else None
    chosen = settings().deterministic, settings().implementation, torch.are_deterministic_algorithms_enabled()
    numerics = torch.backends.cuda.matmul.fp32_precision, *chosen
    stream = torch.cuda.current_stream() if _DEVICE == "cuda" else None  # memory is only reused in a stream's order
    return names, tuple(parts), low, numerics, stream, threading.get_ident()


def _full_masks(values: Sequence[Any], names: tuple[str, ...]) -> bool | None:
    """Return whether attention masks have no padding, which the model itself looks up too; None without a mask."""
    named = zip(reversed(names), reversed(values), strict=False)
    masks = [x for name, x in named if name.endswith("attention_mask") and isinstance(x, Tensor) and x.dim() == 2]
    return all(bool(mask.all()) for mask in masks) if masks else None  # waits for the device


class _State:
    """A model's modules, attributes, hooks and tensors at one time."""

    _HOOKS = frozenset(f"_{kind}_hooks" for kind in ("forward", "forward_pre", "backward", "backward_pre"))
    _INTERNAL = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"} | {MARK}

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._modules, params = list(model.modules()), list(model.parameters())
        self._training = [module.training for module in self._modules]
        self._hooks: list[Any] = [vars(torch.nn.modules.module)[f"_global{name}"] for name in self._HOOKS]
        self._views: list[Any] = []
        for module in self._modules:
            if module is not model:  # its own hooks run outside of its forward
                self._hooks += [getattr(module, name) for name in self._HOOKS]
            for each in (vars(module), *[x for name, x in vars(module).items() if name not in self._INTERNAL]):
                if hasattr(each, "__dict__") and not callable(each) and not isinstance(each, Tensor):
                    each = vars(each)  # of a config
                if isinstance(each, dict | list | set | deque):
                    self._views.append(each.values() if isinstance(each, dict) else each)
        self._lengths, self._values = [*map(len, self._views)], [*chain.from_iterable(self._views)]
        held = {id(x): x for x in self._values if isinstance(x, Tensor)}
        self._tensors = [x for x in held.values() if type(x) in _TENSORS and x.layout is torch.strided]
        self._facts = self._of_tensors()
        kinds, self._devices = {type(x) for x in params}, {x.device for x in params}
        usual = kinds <= {Tensor, nn.Parameter} and len(self._devices) == 1 and torch.version.hip is None
        self._usual = usual and all(device.type == _DEVICE for device in self._devices)

    def _of_tensors(self) -> list[Any]:
        return [(x.data_ptr(), x.shape, x.stride(), x.dtype, x.requires_grad) for x in self._tensors]

    def _same_modules(self) -> bool:
        same = [*map(len, self._views)] == self._lengths
        return same and all(map(is_, chain.from_iterable(self._views), self._values))

    def holds(self) -> bool:
        """Return whether the model is still as it was."""
        return self._same_modules() and self._of_tensors() == self._facts

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Set the modules to training or evaluation as they were, inside the block; raise if more has changed."""
        now = [module.training for module in self._modules]
        try:
            for module, training in zip(self._modules, self._training, strict=True):
                module.training = training
            if not self._same_modules():
                raise LaunchError(
                    "modules or attributes were changed between the forward pass and a second backward pass of a "
                    "model that runs from CUDA graphs; patch(model, graph=False) allows it"
                )
            yield
        finally:
            for module, training in zip(self._modules, now, strict=True):
                module.training = training

    def obstacle(self) -> str | None:
        """Return why no call of the model can be captured at present, or None."""
        if not self._usual or (_DEVICE == "cuda" and {torch.cuda.current_device()} != {x.index for x in self._devices}):
            found = ", ".join(sorted(map(str, self._devices))) or "no device"
            return f"parameters are on {found}: graphs take plain ones on the current CUDA device"
        hooked = any(self._hooks) and [x for x in self._modules[1:] if has_hooks(x, ignore_captures=True)]
        if hooked:
            return f"a {type(hooked[0]).__name__} has hooks"
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return "saved tensors have hooks (a checkpoint around the model, or save_on_cpu)"
        if torch.is_anomaly_enabled():
            return "anomalies are looked for in each operation"
        return None


def _in_capture() -> bool:
    return _DEVICE == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _random_states() -> tuple[Any, Any]:
    """Return the states of the random number generators of the host, and of the device."""
    _, keys, place, *_ = np.random.get_state(legacy=True)
    host = random.getstate(), torch.get_rng_state().tolist(), np.asarray(keys).tolist(), place
    return host, torch.cuda.get_rng_state().tolist() if _DEVICE == "cuda" else None


def _bytes_of(x: Tensor) -> Tensor:
    return x.detach().flatten().view(torch.uint8)


def _versions(values: Sequence[Any]) -> list[int]:
    return [x._version for x in values if isinstance(x, Tensor) and not x.is_inference()]


# --- whether a graph helps ------------------------------------------------------------------------------------------


_Lap = tuple[torch.cuda.Event, torch.cuda.Event]


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _shortest_ms(laps: Sequence[_Lap]) -> float:
    times: list[float] = [began.elapsed_time(ended) for began, ended in laps]
    return min(times)


class _Trial:
    """An eager call: its time on the host and on the device, and the memory that it keeps for its backward pass.

    `laps` are from the start of the call to that of the model's next one, once that has begun.
    """

    def __init__(self) -> None:
        self.laps: list[_Lap] = []

    def __enter__(self) -> _Trial:
        self.kept_bytes = -_allocated_bytes()
        self._began, self._host_ms = _event(), -1e3 * time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._host_ms += 1e3 * time.perf_counter()
        self._ended = _event()
        self.kept_bytes += _allocated_bytes()

    def lags(self) -> bool:
        """Return whether the device was far behind the host, without waiting for it."""
        return not self._ended.query() or self._began.elapsed_time(self._ended) > _LAG * self._host_ms


def _allocated_bytes() -> int:
    return torch.cuda.memory_allocated()


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def _objection(trials: Sequence[_Trial], needed: int, held: int) -> str | None:
    """Return why no graph of `needed` bytes beside those held is captured by default after these calls, or None."""
    if any(trial.lags() for trial in trials[1:]):  # the first one compiles
        return "the device does not wait for the host"
    total, free = needed + held, held + _free_bytes()
    if total * _SHARE > free:
        return f"its graphs would hold {total / 2**30:.2g} GiB, more than 1 / {_SHARE} of the {free / 2**30:.2g} free"
    return None


def unknown_code(model: nn.Module) -> str | None:
    """Return what of a model's code may do more than its operations, which replays would leave out; None if known."""
    attention: Any = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", {})
    for module in model.modules():
        own = vars(module)
        attends = attention.get(getattr(own.get("config"), "_attn_implementation", None))
        replaced = own.get("forward"), own.get("_loss_function"), attends
        for each in (type(module), type(module).forward, *replaced):
            function = getattr(each, "__func__", each)
            if function is not None and not f"{getattr(function, '__module__', None)}.".startswith(_KNOWN):
                return f"the code of {getattr(function, '__qualname__', type(module).__name__)}"
    return None


def may_capture() -> bool:
    """Return whether this process can capture graphs; it can be forked afterwards, unlike after is_available()."""
    return _DEVICE != "cuda" or (torch.version.cuda is not None and torch.cuda.device_count() > 0)


# --- all calls of a model --------------------------------------------------------------------------------------------


class Graphs:
    """The captured calls of a patched model; calls that cannot be captured run eagerly.

    `automatic` captures only where a graph helps, and runs other calls eagerly without a warning.
    """

    def __init__(self, forward: Forward, report: PatchReport, automatic: bool) -> None:
        self._forward, self._report, self._automatic = forward, report, automatic
        self._credit, self._off = _CREDIT, ""
        self._lock = fork_safe(threading.RLock())
        self._running = 0  # eager calls, which a capture would give other parameters
        self._began: torch.cuda.Event | None = None  # the start of the last call
        self._laps: list[_Lap] | None = None  # to which the time until the next one is added
        self._forget()

    def _forget(self) -> None:
        """Discard all graphs, and what is known of calls."""
        self._captured: dict[Any, _Captured] = {}
        self._eager: dict[Any, list[_Trial]] = {}
        self._refused: dict[Any, str] = {}
        self._state: _State | None = None
        self._draws = False
        self._written: set[Tensor] = set()
        self._count = 0

    def __getstate__(self) -> Any:
        return self._forward, self._report, self._automatic  # a copy of the model has other parameters

    def __setstate__(self, state: Any) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model: from its graphs, or eagerly."""
        traced = torch.compiler.is_compiling() or torch._C._is_tracing()
        if not model.training or not torch.is_grad_enabled() or traced or _in_capture():
            return self._forward(model, *args, **kwargs)  # evaluation, generation, TrainStep: not a fallback
        try:
            with self._lock:
                if self._off:
                    raise _Reason(self._off)
                values = [*args, *kwargs.values()]
                if not self._automatic:
                    self._check(model)
                key = _key(values, tuple(kwargs))
                if self._automatic:
                    if key in self._refused:  # for good: nothing else is looked at
                        self._laps = None
                        raise _Reason(self._refused[key])
                    self._check(model)
                    self._lap()
                full_masks = _full_masks(values, key[0])
                captured = self._ready(model, key, full_masks, values)
        except _Reason as reason:
            self._refuse(model, str(reason))
            return self._run_eagerly(model, args, kwargs)
        if captured is None:
            return self._warm_up(model, args, kwargs, (key, full_masks), values)
        self._report.graphs["replayed"] += 1
        self._credit = min(self._credit + 2, _CREDIT)
        captured.last = self._count
        if captured.eager_laps:
            self._laps = captured.laps
        return captured(values)

    def _run_eagerly(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._lock:
            self._running += 1
            written = [(x, x.clone()) for x in self._written] if self._captured else []
        try:
            return self._forward(model, *args, **kwargs)
        except torch.OutOfMemoryError:
            if not self._automatic or not self._captured:
                raise
        finally:
            with self._lock:
                self._running -= 1
        self._forget()  # nobody asked for graphs that take this memory
        self._off = "memory ran out beside the graphs"
        for x, value in written:  # as if the call had not begun
            x.data.copy_(value)
        return self._forward(model, *args, **kwargs)

    def _lap(self) -> None:
        """End the time of the call before, and begin that of this one."""
        now = _event()
        if self._laps is not None and self._began is not None:
            self._laps.append((self._began, now))
        self._began, self._laps = now, None

    def _check(self, model: nn.Module) -> None:
        """Raise _Reason if no call can be captured at present; discard captured calls of a model that has changed."""
        if self._automatic and (settings().deterministic or torch.are_deterministic_algorithms_enabled()):
            raise _Reason("results may not depend on measured times (deterministic)")
        self._count += 1
        self._credit -= 1
        if self._automatic and self._credit < 0:
            self._forget()
            self._off = "few calls could run from graphs"
            raise _Reason(self._off)
        if is_watched():
            raise _Reason("a mode or a transform of torch is active, which has to see each operation")
        if self._state is not None and not self._state.holds():
            recent = self._count < _IDLE_CALLS
            self._forget()
            if recent:
                raise _Reason("modules, parameters or attributes of the model keep changing")
        if self._state is None and self._automatic and (unknown := unknown_code(model)) is not None:
            raise _Reason(f"{unknown} may do more than its operations")
        state = self._state = _State(model) if self._state is None else self._state
        if reason := state.obstacle():
            raise _Reason(reason)

    def _ready(self, model: nn.Module, key: Any, full_masks: bool | None, values: list[Any]) -> _Captured | None:
        """Return the graphs of a key, captured now if it is time; None before that."""
        reason, captured = self._refused.get(key), self._captured.get((key, full_masks))
        if captured is not None and captured.retired:
            del self._captured[key, full_masks]
            reason = self._refused[key] = "a backward pass ran twice, was differentiated, or came after a change"
        elif captured is not None and captured.is_slow():
            del self._captured[key, full_masks]
            reason = self._refused[key] = "its graphs make no step faster"
        if captured is not None and not getattr(captured.pending(), "done", True):  # it needs the activations
            reason = "the backward pass of an earlier call is still to come"
        elif captured is not None and not captured.take_back():
            reason = "gradients of an earlier call are kept"
        trials = self._eager.get((key, full_masks))
        if captured is None and trials is None and len(self._eager) >= _MOST_KEYS:
            del self._eager[next(iter(self._eager))]
            reason = f"more than {_MOST_KEYS} shapes and values of arguments"
        if reason is not None:
            raise _Reason(reason)
        if captured is None and trials is not None and len(trials) >= EAGER_CALLS:
            return self._capture(model, key, full_masks, values)
        return captured

    def _warm_up(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any, values: list[Any]
    ) -> Any:  # fmt: skip
        """Run a call eagerly; note what a replay would not do."""
        self._report.graphs["eager: before the capture"] += 1
        trials = self._eager.setdefault(key, [])
        state, (host, device), versions = _State(model), _random_states(), _versions(values)
        buffers = [] if trials else [(x, x.clone()) for x in model.buffers() if x.layout is torch.strided]
        with ahead_of_capture(), _Trial() as trial:
            result = self._run_eagerly(model, args, kwargs)
        trials.append(trial)
        self._laps = trial.laps
        host_after, device_after = _random_states()
        self._draws |= device_after != device
        self._written |= {x for x, then in buffers if not torch.equal(_bytes_of(x), _bytes_of(then))}  # waits
        if host_after != host:
            self._refused[key[0]] = "its forward draws random numbers on the host (layers left out at random)"
        elif _versions(values) != versions:
            self._refused[key[0]] = "its forward writes into its arguments"
        elif len(trials) == EAGER_CALLS and not state.holds():  # the first calls may create buffers and attributes
            self._refused[key[0]] = "its forward changes modules or their attributes"
        if not self._captured and not self._off:  # else the next call finds the change
            self._state = _State(model)
        return result

    def _capture(self, model: nn.Module, key: Any, full_masks: bool | None, values: list[Any]) -> _Captured:
        if self._running:
            raise _Reason("another thread runs the model")
        trials = self._eager[key, full_masks]
        gradients = sum(x.numel() * x.element_size() for x in model.parameters() if x.requires_grad)
        needed, held = trials[-1].kept_bytes + gradients, sum(each.held_bytes for each in self._captured.values())
        if self._automatic and (reason := _objection(trials, needed, held)) is not None:
            self._refused[key] = reason
            raise _Reason(reason)
        if len(self._captured) >= MOST_GRAPHS:
            idle = min(self._captured, key=lambda each: self._captured[each].last)
            if self._count - self._captured[idle].last < _IDLE_CALLS:
                raise _Reason(f"{MOST_GRAPHS} other shapes or values of arguments have graphs")
            del self._captured[idle]
        self._credit -= 4
        assert self._state is not None  # for the type checker: _check sets it, under the lock that is held since
        try:
            with ahead_of_capture():
                captured = _Captured(
                    partial(self._forward, model), values, key, full_masks, self._state, self._draws, [*self._written],
                    [lap for trial in trials[1:] for lap in trial.laps],
                )  # fmt: skip
        except Exception as raised:  # noqa: BLE001  whatever it is, the eager call that follows decides
            error: BaseException = raised
            while error.__context__ is not None:  # the capture's end raises another
                error = error.__context__
            failed = f"the capture failed with {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            self._refused[key] = str(error) if isinstance(error, _Reason) else failed
            raise _Reason(self._refused[key]) from None
        captured.held_bytes = needed
        self._captured[key, full_masks] = captured
        self._report.graphs["captured"] += 1
        return captured

    def _refuse(self, model: nn.Module, reason: str) -> None:
        """Count a call that runs eagerly, with its reason; warn or raise as the policy says if graphs were wanted."""
        self._report.graphs[f"eager: {reason}"] += 1
        if self._automatic:
            if self._report.graphs[f"eager: {reason}"] == 1:
                ledger().fallback(FallbackRecord("patch", type(model).__name__, "graph", "eager", reason))
            return
        if settings().fallback == "forbid":
            raise LaunchError(f"a call of {type(model).__name__} cannot be a CUDA graph: {reason}")
        new = ledger().fallback(FallbackRecord("patch", type(model).__name__, "graph", "eager", reason))
        if new or settings().fallback == "warn":
            warnings.warn(
                f"{type(model).__name__}: no CUDA graph, runs eagerly: {reason}", FallbackWarning, stacklevel=5
            )
