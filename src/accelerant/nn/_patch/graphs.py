"""A patched model's forward and backward pass as two CUDA graphs, for loops that call the model themselves.

A call in training mode is identified by its key: shapes, dtypes and values of the arguments, and autocast. The first
calls of a key run eagerly, because they compile kernels; the next one captures the forward pass, and with it the
backward pass of all outputs. From then on a call is one autograd function whose forward replays the first graph and
whose backward replays the second. The parameters are inputs of that function, so that autograd accumulates `.grad`,
and calls hooks of parameters and DDP's, as it does otherwise.

A graph is only correct while the model is as it was at the capture. Each call compares the model's fingerprint: its
modules, parameters, buffers, their memory, and attributes. Whatever cannot be captured runs eagerly, and the report
counts it with its reason.
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from accelerant.config import settings
from accelerant.errors import AccelerantError, FallbackWarning, LaunchError, UnsupportedCase
from accelerant.nn._patch.record import PARTS, RECORD, Forward, PatchReport, has_hooks
from accelerant.runtime.ledger import FallbackRecord, ledger
from accelerant.runtime.streams.graphs import Graph

__all__ = ["EAGER_CALLS", "MOST_GRAPHS", "Graphs", "graphed_forward"]

EAGER_CALLS = 3
"""Calls of a key before its capture: the first compiles kernels, the last is watched for synchronisation."""

MOST_GRAPHS = 4
"""Keys with graphs at one time; each has memory of its own for activations and gradients."""

_MOST_KEYS = 64
"""Keys whose calls are counted; beyond it, the one used longest ago is forgotten."""

_DEVICE = "cuda"

_PLAIN = (bool, int, float, str, type(None), torch.dtype)


def graphed_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a patched model, from its graphs if this call has been captured."""
    return self.__dict__[RECORD].graphs(self, args, kwargs)


class _Reason(UnsupportedCase):
    """Why a call runs eagerly."""


# --- one captured call -----------------------------------------------------------------------------------------------


class _Call:
    """A call of the autograd function; alive as long as its outputs may be differentiated."""

    done = False


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, captured: _Captured, call: _Call, *_: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.captured, ctx.call = captured, call
        outputs = captured.forward()
        ctx.mark_non_differentiable(
            *[out for out, grad in zip(outputs, captured.out_grads, strict=True) if grad is None]
        )
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.call.done:
            raise LaunchError(
                "a CUDA graph's backward pass runs once for a forward pass: patch(model, graph=False) allows "
                "backward(retain_graph=True) to be followed by another"
            )
        ctx.call.done = True
        return None, None, *ctx.captured.backward(grads)


class _Captured:
    """The two graphs of one key, and the tensors that they read and write."""

    def __init__(self, model: nn.Module, run: Forward, args: list[Any], names: tuple[str, ...], state: Any) -> None:
        self.state = state
        self._run, self._args, self._names = run, list(args), names
        self._live: list[Tensor] = []
        self._call: weakref.ref[_Call] | None = None
        self._dirty: list[bool] = []
        places = [place for place, value in enumerate(args) if isinstance(value, Tensor)]
        for place in places:
            source = self._args[place]
            self._args[place] = source.detach().clone().requires_grad_(source.requires_grad)
        self.inputs: list[Tensor] = [self._args[place] for place in places]
        self._places = places
        self._capture(model)

    def _capture(self, model: nn.Module) -> None:
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # copies made in a capture must not outlive it, nor enter it
        try:
            with _own_leaves(model) as leaves:
                self._needed = [x for x in (*self.inputs, *leaves) if x.requires_grad]
                self._forward_graph, self._backward_graph = Graph("patch: forward"), Graph("patch: backward")
                self.outputs = [out.detach() for out in self._forward_graph.capture(self._run_forward, warm_up=0)]
                self.out_grads = [torch.zeros_like(out) if out.requires_grad else None for out in self._live]
                if not any(grad is not None for grad in self.out_grads):
                    raise _Reason("no output requires a gradient")
                pool = self._forward_graph.pool
                grads = self._backward_graph.capture(self._run_backward, warm_up=0, pool=pool)
        finally:
            torch.set_autocast_cache_enabled(cached)
        self._dirty = [False] * len(self.out_grads)
        by_leaf = {id(leaf): grad for leaf, grad in zip(self._needed, grads, strict=True)}
        # What got no gradient is no input: its .grad stays None, and DDP counts it as unused.
        self.params = [param for leaf, param in leaves.items() if by_leaf.get(id(leaf)) is not None]
        self._grads = [by_leaf.get(id(x)) for x in self.inputs]
        self._grads += [grad for leaf in leaves if (grad := by_leaf.get(id(leaf))) is not None]
        self._live, self._needed = [], []
        self._storages = [None if grad is None else grad.untyped_storage() for grad in self._grads]
        self._uses = [_uses(storage) for storage in self._storages]

    def _run_forward(self) -> list[Tensor]:
        split = len(self._args) - len(self._names)
        result = self._run(*self._args[:split], **dict(zip(self._names, self._args[split:], strict=True)))
        self._live, self._rebuild = _flattened(result)
        return self._live

    def _run_backward(self) -> list[Tensor | None]:
        pairs = [(out, grad) for out, grad in zip(self._live, self.out_grads, strict=True) if grad is not None]
        outputs, out_grads = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, self._needed, out_grads, allow_unused=True)
        # Autograd takes a gradient as .grad without a copy if it is laid out as its parameter; none may be shared.
        taken = {grad.data_ptr() for _, grad in pairs} | {x.data_ptr() for x in (*self.inputs, *self.outputs)}
        grads: list[Tensor | None] = []
        for leaf, grad in zip(self._needed, found, strict=True):
            if grad is not None and (grad.stride() != leaf.stride() or grad.data_ptr() in taken):
                grad = torch.empty_like(leaf).copy_(grad)
            if grad is not None:
                taken.add(grad.data_ptr())
            grads.append(grad)
        return grads

    # --- replays -----------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether the backward pass of the last call may still come: its activations must stay."""
        call = None if self._call is None else self._call()
        return call is not None and not call.done

    def __call__(self, args: Sequence[Any]) -> Any:
        """Replay the forward pass of new arguments of the same key."""
        call = _Call()
        self._call = weakref.ref(call)
        given = [args[place] for place in self._places]
        with torch.no_grad():
            for static, value in zip(self.inputs, given, strict=True):
                if static.data_ptr() != value.data_ptr():
                    static.copy_(value, non_blocking=True)
        return self._rebuild(_Replay.apply(self, call, *given, *self.params))

    def forward(self) -> tuple[Tensor, ...]:
        """Replay the forward pass; return its outputs in new memory."""
        self._forward_graph.replay()
        return tuple([out.clone() for out in self.outputs])

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay the backward pass for gradients of the outputs; return those of the inputs and parameters.

        They are the graph's own memory, which a parameter's .grad then names. If anyone still has what an earlier
        replay left there (accumulated gradients), it keeps it, and the results are copies.
        """
        for place, (static, grad) in enumerate(zip(self.out_grads, grads, strict=True)):
            if static is None:
                continue
            if grad is not None:
                static.copy_(grad)
            elif self._dirty[place]:
                static.zero_()
            self._dirty[place] = grad is not None
        kept = [
            grad for grad, storage, uses in zip(self._grads, self._storages, self._uses, strict=True)
            if grad is not None and _uses(storage) > uses
        ]  # fmt: skip
        saved = [grad.clone() for grad in kept]
        self._backward_graph.replay()
        if not kept:
            return [None if grad is None else grad.detach() for grad in self._grads]
        fresh = {id(grad): grad.clone() for grad in kept}
        torch._foreach_copy_(kept, saved)
        return [None if grad is None else fresh.get(id(grad), grad.detach()) for grad in self._grads]


def _uses(storage: torch.UntypedStorage | None) -> int:
    return 0 if storage is None else int(torch._C._storage_Use_Count(storage._cdata))


@contextmanager
def _own_leaves(model: nn.Module) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
    """Give the model other parameters over the same memory inside the block; return {substitute: parameter}.

    The node that accumulates a parameter's gradient belongs to the stream of its first use. That is not the capture's
    stream while a graph of autograd from before is alive, and a capture must not wait for another stream.
    """
    by_id: dict[int, nn.Parameter] = {}
    leaves: dict[nn.Parameter, nn.Parameter] = {}
    replaced: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None:
                continue
            if id(param) not in by_id:
                leaf = nn.Parameter(param.detach(), requires_grad=param.requires_grad)
                by_id[id(param)], leaves[leaf] = leaf, param
            replaced.append((module._parameters, name, param))
    try:
        for table, name, param in replaced:
            table[name] = by_id[id(param)]
        yield leaves
    finally:
        for table, name, param in replaced:
            table[name] = param


def _flattened(result: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """Return the tensors of a model's output, and the function that makes an output of others."""
    make, tree = getattr(result, "__dict__", {}).get(PARTS, (None, result))
    leaves, spec = pytree.tree_flatten(tree)
    for leaf in leaves:
        if not isinstance(leaf, Tensor | bool | int | float | str | None):
            raise _Reason(f"its output contains a {type(leaf).__name__} (use_cache=False leaves out a cache)")
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def rebuild(tensors: Sequence[Tensor]) -> Any:
        values: list[Any] = list(constants)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        made = pytree.tree_unflatten(values, spec)
        return made if make is None else make(made)

    return [leaves[place] for place in places], rebuild


# --- all calls of a model --------------------------------------------------------------------------------------------


class _Key(NamedTuple):
    names: tuple[str, ...]
    values: tuple[Any, ...]
    autocast: tuple[Any, ...]


class Graphs:
    """The captured calls of a patched model; calls that cannot be captured run eagerly.

    Args:
        forward: the model's forward without graphs, called with the model first.
        report: counts calls by outcome.
        asked: whether the user asked for graphs: an obstacle then warns once.
    """

    def __init__(self, forward: Forward, report: PatchReport, *, asked: bool) -> None:
        self._forward, self._report, self._asked = forward, report, asked
        self._captured: OrderedDict[_Key, _Captured] = OrderedDict()
        self._calls: OrderedDict[_Key, int] = OrderedDict()
        self._refused: dict[_Key, str] = {}
        self._modules: list[nn.Module] = []
        self._evicted = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        """Return the same without captured calls: a copy of the model has other parameters."""
        return Graphs(self._forward, memo.get(id(self._report), self._report), asked=self._asked)

    def __reduce__(self) -> Any:
        return _unpickled, (self._forward, self._report, self._asked)

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model: from its graphs, or eagerly."""
        if not model.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._forward(model, *args, **kwargs)  # evaluation, generation: not a fallback
        try:
            return self._run(model, args, kwargs)
        except _Reason as reason:
            self._refuse(model, str(reason))
        return self._forward(model, *args, **kwargs)

    def _run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = [*args, *kwargs.values()]
        key = _key(values, tuple(kwargs))
        if key in self._refused:
            raise _Reason(self._refused[key])
        state = self._fingerprint(model)
        captured = self._captured.get(key)
        if captured is not None and captured.state == state:
            if captured.busy:
                raise _Reason("the backward pass of an earlier call is still to come")
            self._captured.move_to_end(key)
            self._report.graphs["replayed"] += 1
            return captured(values)
        if captured is not None:  # modules, parameters or their memory were replaced
            del self._captured[key]
            self._calls[key] = 0
        calls = self._calls[key] = self._calls.get(key, 0) + 1
        self._calls.move_to_end(key)
        if len(self._calls) > _MOST_KEYS:
            self._calls.popitem(last=False)
        if calls <= EAGER_CALLS:
            return self._warm_up(model, args, kwargs, key, state, watched=calls == EAGER_CALLS)
        return self._capture(model, key, values, state)(values)

    def _warm_up(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], key: _Key, state: Any, *, watched: bool
    ) -> Any:  # fmt: skip
        """Run a call eagerly; note what a capture would fail on."""
        self._report.graphs["eager: before the capture"] += 1
        if not watched:
            return self._forward(model, *args, **kwargs)
        with _synchronisations() as found:
            result = self._forward(model, *args, **kwargs)
        if found:
            self._refused[key] = "its forward waits for the device"
        elif self._fingerprint(model) != state:
            self._refused[key] = "its forward changes modules or their attributes"
        return result

    def _capture(self, model: nn.Module, key: _Key, values: list[Any], state: Any) -> _Captured:
        while len(self._captured) >= MOST_GRAPHS:
            self._captured.popitem(last=False)
        try:
            captured = _Captured(model, partial(self._forward, model), values, key.names, state)
        except _Reason as reason:
            self._refused[key] = str(reason)
            raise
        except (RuntimeError, AccelerantError) as raised:
            error: Exception = raised
            while isinstance(error.__context__, RuntimeError | AccelerantError):  # the capture's end raises another
                error = error.__context__
            self._refused[key] = f"the capture failed with {type(error).__name__}: {str(error).splitlines()[0]}"
            raise _Reason(self._refused[key]) from None
        self._captured[key] = captured
        self._report.graphs["captured"] += 1
        self._report.graphs["replayed"] += 1
        return captured

    def _fingerprint(self, model: nn.Module) -> Any:
        """Return what a captured call depends on besides its key; raise _Reason if that rules out a capture."""
        modules = list(model.modules())
        params = [p for module in modules for p in module._parameters.values() if p is not None]
        if not params or any(p.device.type != _DEVICE for p in params) or torch.version.hip is not None:
            raise _Reason(f"parameters are on {params[0].device if params else 'no device'}: graphs are CUDA's")
        for module in modules:
            if has_hooks(module, ignore_captures=True):
                raise _Reason(f"a {type(module).__name__} has hooks")
        return (
            [id(module) for module in modules], [module.training for module in modules],
            [(id(p), p.data_ptr(), p.requires_grad) for p in params],
        )  # fmt: skip

    def _refuse(self, model: nn.Module, reason: str) -> None:
        """Count a call that runs eagerly; report its reason, or raise if the fallback policy says so."""
        self._report.graphs[f"eager: {reason}"] += 1
        if not self._asked:
            return
        if settings().fallback == "forbid":
            raise LaunchError(f"a call of {type(model).__name__} cannot be a CUDA graph: {reason}")
        new = ledger().fallback(FallbackRecord("patch", type(model).__name__, "graph", "eager", reason))
        if new or settings().fallback == "warn":
            warnings.warn(
                f"{type(model).__name__}: no CUDA graph, runs eagerly: {reason}", FallbackWarning, stacklevel=6
            )


def _unpickled(forward: Forward, report: PatchReport, asked: bool) -> Graphs:
    return Graphs(forward, report, asked=asked)


def _key(values: Sequence[Any], names: tuple[str, ...]) -> _Key:
    """Return the key of a call's arguments; raise _Reason for one that no graph can take."""
    parts: list[Any] = []
    for place, value in enumerate(values):
        if isinstance(value, Tensor):
            if type(value) not in (Tensor, nn.Parameter) or value.device.type != _DEVICE:
                raise _Reason(f"an argument is a {type(value).__name__} on {value.device}")
            parts.append((value.shape, value.dtype, value.requires_grad))
        elif isinstance(value, _PLAIN):
            parts.append((type(value), value))
        else:
            name = names[place - len(values)] if place >= len(values) - len(names) else f"number {place}"
            raise _Reason(f"argument {name} is a {type(value).__name__}")
    low = torch.get_autocast_dtype(_DEVICE) if torch.is_autocast_enabled(_DEVICE) else None
    return _Key(names, tuple(parts), (low,))


@contextmanager
def _synchronisations() -> Iterator[list[str]]:
    """Yield a list that gets the places where the block waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for each in caught:
        if "synchronizing CUDA operation" in str(each.message):
            found.append(f"{each.filename}:{each.lineno}")
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
