"""One captured call of a patched model: its forward and its backward pass as two CUDA graphs.

A call is one autograd function that replays both, with the parameters as inputs: autograd accumulates `.grad` and calls
hooks, DDP's too. A second backward pass, or one that is differentiated, runs the call again, eagerly.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from accelerant.errors import LaunchError, UnsupportedCase
from accelerant.nn.patching.record import MARK, PARTS, Forward, has_hooks
from accelerant.runtime.streams.graphs import Graph, ahead_of_capture

_LARGEST_BYTES = 1 << 20  # of values that are kept on the device
_LARGE_BYTES = 1 << 22  # of a gradient that is copied to shared memory as soon as it is computed
_MOVES = (Tensor.to, Tensor.cuda, Tensor.type_as)
_SELECTIONS = (torch.topk, Tensor.topk)
_RESHAPES = (Tensor.reshape, Tensor.view, Tensor.flatten, torch.reshape, torch.flatten)
_CACHE_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")
_LESS = (Tensor.__lt__, Tensor.lt, torch.lt)


class HostWork:
    """The draws and copies to the device that calls of one key make on the host, repeated for a CUDA graph of them.

    Values that the host copies (`torch.tensor(0.0, device=x.device)`) are kept on the device, and copied from there in
    the capture. Draws that decide nothing (whether layers are left out, at probability 0) are repeated in each replay,
    so that later draws are the same as without a graph. torch.bincount does not read how long its result is where it
    counts indices of torch.topk over at most `minlength` elements, as losses of routing do: no replay has larger ones.
    """

    def __init__(self, device: str) -> None:
        self.draws = 0  # numbers that each call draws on the host, and that decide nothing
        self._device, self._constants = device, dict[Any, Tensor]()
        self._decided = True
        self._bounds = dict[int, tuple[weakref.ref[Tensor], int, int]]()  # indices -> limit, version

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what an eager call does inside the block."""
        self.draws, self._decided = 0, True
        unused = dict[int, weakref.ref[Tensor]]()

        def note(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
            for x in pytree.tree_leaves((args, kwargs)) if unused else ():
                if id(x) in unused and unused.pop(id(x))() is x:
                    self._decided &= func in _LESS and x is args[0] and _is_certain(args[1])
            args = self._indexed(func, args, note=True)
            host, result = self._copied(func, args, kwargs), func(*args, **kwargs)
            if func is torch.rand and result.dim() == 0 and result.device.type == "cpu" and not kwargs:
                self.draws += 1
                unused[id(result)] = weakref.ref(result)
            elif host is not None and result.device.type == self._device:
                self._constants[_content(host)] = result.detach().clone()
            return result

        with _Calls(note):
            yield
        self._decided &= all(x() is None for x in unused.values())

    def is_noted(self) -> bool:
        """Return whether there is work that a capture has to repeat."""
        return bool(self.draws or self._constants)

    def explains(self, before: Tensor, after: Tensor) -> bool:
        """Return whether a call that changed the state of torch's generator on the host made only draws as noted."""
        if not self.draws or not self._decided:
            return torch.equal(before, after)
        generator = torch.Generator()
        generator.set_state(before)
        for _ in range(self.draws):
            torch.rand([], generator=generator)
        return torch.equal(generator.get_state(), after)

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Copy what was noted from the device, inside the block, and leave the host's generator as it was."""

        def repeat(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
            if func is torch.bincount and len(args) == len(kwargs) == 1:
                limit, length = self._limit(args[0]), kwargs.get("minlength")
                if limit is not None and length is not None and limit <= length:
                    return _counted(args[0], length)
            if func in _SELECTIONS or func in _RESHAPES:
                return self._bounded(func, args, kwargs)
            host = self._copied(func, args, kwargs)
            kept = None if host is None else self._constants.get(_content(host))
            if kept is None and host is not None and host.numel() == 1:  # only calls in a capture make this copy
                return torch.full(host.shape, host.item(), dtype=host.dtype, device=self._device)
            return func(*self._indexed(func, args, note=False), **kwargs) if kept is None else kept.clone()

        self._bounds.clear()
        with torch.random.fork_rng(devices=(), enabled=self.draws > 0), _Calls(repeat):
            yield

    def draw(self) -> None:
        """Draw what a call draws."""
        for _ in range(self.draws):
            torch.rand([])

    def _limit(self, values: Tensor) -> int | None:
        """Return the number below which values are in every replay; None if that is not known."""
        of, limit, version = self._bounds.get(id(values), (None, 0, 0))
        return limit if of is not None and of() is values and values._version == version else None

    def _bounded(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the result of a selection or a change of shape, and note the limit of its indices."""
        limit = self._limit(args[0]) if args and func in _RESHAPES else None
        result = func(*args, **kwargs)
        if func in _SELECTIONS and args:
            dim = kwargs.get("dim", args[2] if len(args) > 2 else -1)
            indices, limit = result[1], args[0].shape[dim] if args[0].dim() else 1
        else:
            indices = result
        if limit is not None and not indices.is_inference():
            self._bounds[id(indices)] = weakref.ref(indices), limit, indices._version
        return result

    def _copied(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Tensor | None:
        """Return the values that a call copies from the host to the device, in its dtype; None if it does not."""
        if func in (torch.tensor, torch.as_tensor):
            device, data = kwargs.get("device"), args[0] if args else kwargs.get("data")
            if device is None or torch.device(device).type != self._device or kwargs.get("requires_grad"):
                return None
            if any(isinstance(x, Tensor) for x in pytree.tree_leaves(data)):
                return None
            host = torch.tensor(data, dtype=kwargs.get("dtype"))
        elif func in _MOVES and args[0].device.type == "cpu" and not args[0].requires_grad:
            host = args[0]
            if func is not Tensor.cuda:
                other = args[1] if len(args) > 1 else kwargs.get("other")
                parsed = (other.device, other.dtype) if isinstance(other, Tensor) else _parsed(args[1:], kwargs)
                if parsed[0] is None or parsed[0].type != self._device:
                    return None
                host = host if parsed[1] is None else host.to(parsed[1])
        else:
            return None
        return host if host.numel() * host.element_size() <= _LARGEST_BYTES else None

    def _indexed(self, func: Callable[..., Any], args: Any, *, note: bool) -> Any:
        """Return the arguments of a call; of indexing on the device by lists, with tensors that are kept there."""
        if func is not Tensor.__getitem__ or args[0].device.type != self._device or not isinstance(args[1], tuple):
            return args
        index = list(args[1])
        for place, each in enumerate(index):
            if isinstance(each, list) and all(type(number) is int for number in each):
                host = torch.tensor(each, dtype=torch.int64)
                if note:
                    self._constants[_content(host)] = host.to(args[0].device)
                index[place] = self._constants.get(_content(host), each)
        return args[0], tuple(index)


class _Calls(TorchFunctionMode):
    """Hands each call of a function of torch to `run`."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run(func, args, kwargs or {})


def _parsed(args: Any, kwargs: dict[str, Any]) -> tuple[torch.device | None, torch.dtype | None]:
    """Return the device and the dtype that Tensor.to is given."""
    options = {name: value for name, value in kwargs.items() if name != "copy"}
    device, dtype, *_ = torch._C._nn._parse_to(*args[:3], **options)
    return device, dtype


def _counted(values: Tensor, length: int) -> Tensor:
    """Return how many values, all below a length, are 0, 1, ..., as torch.bincount, without a look at the largest."""
    counts = torch.zeros(length, dtype=torch.int64, device=values.device)
    return counts.scatter_add_(0, values, torch.ones_like(values))


def _is_certain(limit: object) -> bool:
    """Return whether every number in [0, 1) compares in the same way with a limit."""
    return isinstance(limit, int | float) and not 0 < limit < 1


def _content(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, x.shape, x.stride(), bytes(x.detach().flatten().view(torch.uint8).tolist())


DEVICE = "cuda"
PLAIN_TENSORS = (Tensor, nn.Parameter)

UNUSED = 2  # references to the storage of a gradient that nobody uses: its tensor's, and the one held here


class Reason(UnsupportedCase):
    """Why a call runs eagerly."""


# --- what graphs share -----------------------------------------------------------------------------------------------


class Pool:
    """Memory of graphs of which one is in use at a time: activations, and the gradients of parameters."""

    def __init__(self) -> None:
        self.handle: Any = None
        self.pending: Callable[[], Any] = lambda: None  # the autograd node of the last call, while it is alive
        self.grads: dict[nn.Parameter, Tensor] = {}  # whose memory is their own, so that it can be lent to .grad
        self._lent: dict[nn.Parameter, torch.UntypedStorage] = {}
        self.lends = True
        self._out_grads: dict[Any, Tensor] = {}
        self.dirty: set[int] = set()  # places of outputs whose gradients are not zero there

    def out_grad(self, place: int, out: Tensor) -> Tensor:
        """Return memory for an output's gradient, which graphs share."""
        flat = self._out_grads.get((place, out.dtype))
        if flat is None or flat.numel() < out.numel():
            flat = self._out_grads[place, out.dtype] = torch.zeros(out.numel(), dtype=out.dtype, device=out.device)
        return flat[: out.numel()].view(out.shape)

    def clear(self) -> None:
        """Forget all tensors, of graphs that are gone."""
        for each in (self.grads, self._lent, self._out_grads):
            each.clear()

    def is_busy(self) -> bool:
        """Return whether the backward pass of the last call is still to come, which needs the activations."""
        return not getattr(self.pending(), "done", True)

    def add(self, grads: dict[nn.Parameter, Tensor]) -> None:
        """Add gradients that one graph writes; others write there too."""
        storages = {param: grad.untyped_storage() for param, grad in grads.items()}
        own = {param: found for param, found in storages.items() if holders(found) == UNUSED}
        self._lent |= own
        self.grads |= {param: grads[param] for param in own}

    def take_back(self) -> bool:
        """Give gradients that are still in use memory of their own; return False if not only .grad uses them.

        The loop accumulates gradients then, or keeps them over the next forward pass: from now on they are copied.
        """
        used = [param for param, storage in self._lent.items() if holders(storage) > UNUSED]
        if not used:
            return True
        for param in used:
            grad, viewed = param.grad, holders(self._lent[param]) > UNUSED + 1
            if not viewed and grad is not None and grad.untyped_storage()._cdata == self._lent[param]._cdata:
                grad.data = grad.data.clone()
        self.lends = False
        return not any(holders(self._lent[param]) > UNUSED for param in used)


def holders(storage: torch.UntypedStorage) -> int:
    """Return the number of references to a storage, that of the caller included."""
    return torch._C._storage_Use_Count(storage._cdata)


POSITIONS = "positions"  # pads positions: a sequence of its own, from 0 on


@dataclass(frozen=True)
class Padding:
    """Rules that pad shorter calls to a graph's lengths: on the right, along dimension 1 of arguments."""

    lengths: tuple[int, ...]  # those of the graph
    fills: tuple[tuple[int, Any] | None, ...]  # of each tensor: which of them it has, and what pads it
    dims: tuple[tuple[int, int] | None, ...]  # of each output: its dimension that has one, and which

    def write(self, to: Tensor, value: Tensor, place: int) -> None:
        """Write an argument, by its place among the tensors, padded to its length."""
        which, fill = self.fills[place] or (0, None)
        if fill is None or self.lengths[which] == value.shape[1]:
            to.copy_(value, non_blocking=True)
            return
        length, longer = value.shape[1], self.lengths[which]
        to[:, :length].copy_(value, non_blocking=True)
        if fill is POSITIONS:
            to[:, length:] = torch.arange(longer - length, device=to.device)
        else:
            to[:, length:] = fill

    def padded(self, values: Sequence[Any]) -> list[Any]:
        """Return arguments padded to the lengths."""
        found, place = list(values), 0
        for i, value in enumerate(values):
            if not isinstance(value, Tensor):
                continue
            fill = self.fills[place]
            if fill is not None and value.shape[1] < self.lengths[fill[0]]:
                longer = value.new_empty(value.shape[0], self.lengths[fill[0]], *value.shape[2:])
                with torch.no_grad():
                    self.write(longer, value, place)
                found[i] = longer.requires_grad_(value.requires_grad)
            place += 1
        return found

    def fits(self, outputs: Sequence[Tensor]) -> bool:
        """Return whether a graph's outputs have its lengths where those of a call have the call's."""
        pairs = zip(outputs, self.dims, strict=True)
        return all(found is None or out.shape[found[0]] == self.lengths[found[1]] for out, found in pairs)

    def cut(self, out: Tensor, place: int, lengths: tuple[int, ...]) -> Tensor:
        """Return an output, or its gradient, without what a call of these lengths does not have."""
        if (found := self.dims[place]) is None:
            return out
        dim, which = found
        return out.narrow(dim, 0, lengths[which])


# --- one captured call -----------------------------------------------------------------------------------------------


_Again = tuple[Sequence[Tensor], list[int], Tensor | None, list[Tensor]]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, captured: Captured, lengths: tuple[int, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.captured, ctx.lengths, ctx.done, ctx.spent = captured, lengths, False, set[int]()
        captured.pool.pending = weakref.ref(ctx)
        given = tensors[: len(captured.inputs)]
        drawn = torch.cuda.get_rng_state() if captured.draws else None
        ctx.again = given, versions(given), drawn, [x.clone() for x in captured.written]
        ctx.save_for_backward(*tensors[len(given) :])
        ctx.params = (tensors[len(given) :], versions(tensors[len(given) :])) if captured.parted else None
        captured.forward_graph.replay()
        outputs = tuple([out.clone() for out in captured.outputs_of(lengths)])
        ctx.mark_non_differentiable(*[out for out, to in zip(outputs, captured.out_grads, strict=True) if to is None])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        captured: Captured = ctx.captured
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
        again_only = torch.is_grad_enabled() or done or captured.released
        if again_only or [param.data_ptr() for param in params] != captured.addresses:
            return None, None, *captured.run_again(again, grads)
        return None, None, *captured.backward(grads, ctx.lengths)


class Captured:
    """The two graphs of one key, without gradients the first, and the tensors that they read and write."""

    def __init__(
        self, run: Forward, values: list[Any], key: tuple[Any, ...], state: State,
        draws: bool, written: Sequence[Tensor], work: HostWork, pool: Pool,
        padding: Padding | None = None,
    ) -> None:  # fmt: skip
        self.last = self.held_bytes = 0
        self.pool, self.padding = pool, padding
        self.retired = False  # whether a backward pass had to run the call again: the graphs do not suit this loop
        self.released = False
        self.draws, self.written, self._work = draws, written, work
        self._run, self._names, self._low, self._state = run, key[0], key[2], state
        self._graded = torch.is_grad_enabled()
        self._live: list[Tensor] = []
        self.out_grads, self._grads = list[Tensor | None](), list[Tensor | None]()
        # Tensors made in inference mode could not be written to outside of it.
        with (
            torch.inference_mode(False), torch.set_grad_enabled(self._graded),
            _capturable(state.model, draws) as leaves, work.repeated(),
        ):  # fmt: skip
            self._values = [
                x.detach().clone().requires_grad_(x.requires_grad and self._graded) if isinstance(x, Tensor) else x
                for x in values
            ]
            self.inputs: list[Tensor] = [x for x in self._values if isinstance(x, Tensor)]
            self._needed = [x for x in (*self.inputs, *leaves) if x.requires_grad]
            self._shared = [pool.grads.get(leaves[x]) if isinstance(x, nn.Parameter) else None for x in self._needed]
            self.forward_graph = Graph("patch: forward")
            held = self.forward_graph.capture(self._run_forward, warm_up=0, pool=pool.handle, quick=True)
            self.outputs = [out.detach() for out in held]
            pool.handle = self.forward_graph.pool
            if self._graded:
                self._capture_backward(leaves)
        self._live, self._needed = [], []

    def release(self) -> None:
        """Give the graphs' memory back, though an output of a call may keep this object."""
        self.released, self.forward_graph, self._backward_graph = True, Graph("released"), Graph("released")
        for each in (self.outputs, self.out_grads, self._grads):
            each.clear()
        self.pool.clear()

    def _capture_backward(self, leaves: dict[nn.Parameter, nn.Parameter]) -> None:
        """Capture the backward pass of all outputs; note which parameters and outputs it joins."""
        pool = self.pool
        self.out_grads = [
            pool.out_grad(place, out) if out.requires_grad else None for place, out in enumerate(self._live)
        ]
        if all(grad is None for grad in self.out_grads):
            raise Reason("no output requires a gradient")
        self._backward_graph = Graph("patch: backward")
        grads = self._backward_graph.capture(self._run_backward, warm_up=0, pool=pool.handle, quick=True)
        by_leaf = dict(zip(map(id, self._needed), grads, strict=True))
        # What got no gradient is no input: its .grad stays None, and DDP counts it as unused.
        used = [leaf for leaf in leaves if by_leaf.get(id(leaf)) is not None]
        self.params = [leaves[leaf] for leaf in used]
        self.addresses = [param.data_ptr() for param in self.params]
        self._grads = [by_leaf.get(id(x)) for x in (*self.inputs, *used)]
        # Memory of its own is lent to .grad; of a gradient that shares memory with another tensor, copies are given.
        tensors = (*self.inputs, *self.params, *self.outputs, *self.out_grads, *self._grads)
        sharing = Counter(x.untyped_storage()._cdata for x in tensors if x is not None)
        new = zip(self.params, self._grads[len(self.inputs) :], strict=True)
        pool.add({
            param: grad for param, grad in new
            if grad is not None and param not in pool.grads and sharing[grad.untyped_storage()._cdata] == 1
        })  # fmt: skip
        reached, histories = zip(*[_history(out) for out in self._live], strict=True)
        self._reached = [{i for i, x in enumerate((*self.inputs, *used)) if id(x) in ids} for ids in reached]
        # Outputs without a common history can have backward passes of their own, none of which keeps the graph.
        self.tied = [{place for place, nodes in enumerate(histories) if nodes & own} for own in histories]
        self.parted = any(tied and len(tied) < sum(map(bool, histories)) for tied in self.tied)

    def check(self, outputs: set[int], params: Sequence[Tensor], then: Sequence[int]) -> None:
        """Raise as torch does if a parameter that these outputs depend on has another version than in their call."""
        places = {place - len(self.inputs) for output in outputs for place in self._reached[output]}
        if any(place >= 0 and params[place]._version != then[place] for place in places):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"parameter of {type(self._state.model).__name__}"
            )

    def _result(self, values: Sequence[Any]) -> Any:
        split = len(values) - len(self._names)
        return self._run(*values[:split], **dict(zip(self._names, values[split:], strict=True)))

    def _run_forward(self) -> list[Tensor]:
        self._live, self._rebuild = flattened(self._result(self._values))
        return self._live

    def _run_backward(self) -> list[Tensor | None]:
        pairs = [(out, grad) for out, grad in zip(self._live, self.out_grads, strict=True) if grad is not None]
        outputs, out_grads = zip(*pairs, strict=True)
        # A large gradient leaves its own memory at once, which the next one takes; small ones share a launch.
        hooks = [
            x.register_hook(to.copy_) for x, to in zip(self._needed, self._shared, strict=True)
            if to is not None and to.numel() * to.element_size() >= _LARGE_BYTES
        ]  # fmt: skip
        try:
            found = torch.autograd.grad(outputs, self._needed, out_grads, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        pairs = [
            (to, grad) for to, grad in zip(self._shared, found, strict=True)
            if to is not None and grad is not None and grad is not to
        ]  # fmt: skip
        if pairs:
            torch._foreach_copy_([to for to, _ in pairs], [grad for _, grad in pairs])
        # Laid out as its parameter, a gradient becomes .grad without a copy. A view's base would hold its memory too.
        return [
            None if grad is None else to if to is not None
            else grad.data if grad.stride() == x.stride() else torch.empty_like(x).copy_(grad)
            for x, to, grad in zip(self._needed, self._shared, found, strict=True)
        ]  # fmt: skip

    def __call__(self, values: Sequence[Any], lengths: tuple[int, ...] = ()) -> Any:
        """Replay the forward pass of new arguments of the same key, of these lengths if they are to be padded."""
        given = [x for x in values if isinstance(x, Tensor)]
        self._work.draw()
        with torch.no_grad():
            for place, (static, value) in enumerate(zip(self.inputs, given, strict=True)):
                if self.padding is None:
                    static.copy_(value, non_blocking=True)
                else:
                    self.padding.write(static, value, place)
        if not self._graded:
            self.forward_graph.replay()
            return self._rebuild([out.clone() for out in self.outputs_of(lengths)])
        outputs: tuple[Tensor, ...] = _Replay.apply(self, lengths, *given, *self.params)  # type: ignore[no-untyped-call]
        return self._rebuild(outputs)

    def outputs_of(self, lengths: tuple[int, ...]) -> list[Tensor]:
        """Return the outputs of a call of these lengths, in the graph's memory."""
        if self.padding is None:
            return self.outputs
        return [self.padding.cut(out, place, lengths) for place, out in enumerate(self.outputs)]

    def run_again(self, again: _Again, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of a call by running it eagerly: those may be differentiated, and computed repeatedly.

        `again` has the call's arguments that are tensors, their versions then, the state of the device's random number
        generator before it (if it draws), and of the buffers into which it writes.
        """
        given, then, drawn, buffers = again
        if versions(given) != then:
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
            torch.enable_grad(), torch.random.fork_rng(devices=(), enabled=self._work.draws > 0),
            torch.autocast(DEVICE, dtype=self._low, enabled=self._low is not None),
        ):  # fmt: skip
            outputs, _ = flattened(self._result(values))
        pairs = [pair for pair in zip(outputs, grads, strict=True) if pair[0].requires_grad and pair[1] is not None]
        if not pairs:
            return [None] * len(inputs)
        results, given_grads = zip(*pairs, strict=True)
        again_differentiable = torch.is_grad_enabled()
        found = torch.autograd.grad(results, wanted, given_grads, None, again_differentiable, allow_unused=True)
        by_input = dict(zip(map(id, wanted), found, strict=True))
        return [by_input.get(id(x)) for x in inputs]

    def backward(self, grads: Sequence[Tensor | None], lengths: tuple[int, ...]) -> list[Tensor | None]:
        """Replay the backward pass for gradients of the outputs; return those of inputs and parameters."""
        for place, (static, grad) in enumerate(zip(self.out_grads, grads, strict=True)):
            if grad is not None and static is not None:
                part = static if self.padding is None else self.padding.cut(static, place, lengths)
                if part.shape != static.shape:
                    static.zero_()
                part.copy_(grad)
                self.pool.dirty.add(place)
            elif static is not None and place in self.pool.dirty:
                static.zero_()
        self._backward_graph.replay()
        # A zero that flows from an output without gradient is none: it must not reach an optimizer's weight decay.
        reached = set().union(*[places for places, grad in zip(self._reached, grads, strict=True) if grad is not None])
        found = [grad if place in reached else None for place, grad in enumerate(self._grads)]
        if self.padding is not None:
            for place, (fill, x) in enumerate(zip(self.padding.fills, self.inputs, strict=True)):
                grad = found[place]
                if grad is not None and fill is not None and x.shape[1] != lengths[fill[0]]:
                    found[place] = grad[:, : lengths[fill[0]]]
        # A hook may start work on another stream, and drop the gradient before that is done.
        hooked = any(param._post_accumulate_grad_hooks or param._backward_hooks for param in self.params)
        owners = [None] * len(self.inputs) + self.params
        lent = [self.pool.lends and not hooked and owner in self.pool.grads for owner in owners]
        copied = [grad for grad, is_lent in zip(found, lent, strict=True) if grad is not None and not is_lent]
        copies: dict[int, Tensor] = {}
        for dtype in {grad.dtype for grad in copied}:  # those of one dtype in few launches
            same = [grad for grad in copied if grad.dtype == dtype]
            copies |= zip(map(id, same), torch._foreach_mul(same, 1.0), strict=True)
        return [
            None if grad is None else grad.detach() if is_lent else copies[id(grad)]
            for grad, is_lent in zip(found, lent, strict=True)
        ]


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
def _capturable(model: nn.Module, draws: bool) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
    """Give the model other parameters over the same memory inside the block; yield {substitute: parameter}.

    The node that accumulates a parameter's gradient belongs to the stream of its first use. That is not the capture's
    stream while a graph of autograd from before is alive, and a capture must not wait for another stream.
    """
    replaced = [(m._parameters, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
    by_id = {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for _, _, p in replaced}
    leaves = {by_id[id(p)]: p for _, _, p in replaced}

    def no_states(*_: Any) -> tuple[list[int], list[Tensor]]:
        if draws:
            raise Reason("it recomputes activations with dropout, whose random state a capture cannot read")
        return [], []

    cached, states = torch.is_autocast_cache_enabled(), checkpointing.get_device_states
    torch.set_autocast_cache_enabled(False)  # copies made in a capture must not outlive it, nor enter it
    checkpointing.get_device_states = no_states
    try:
        for table, name, param in replaced:
            table[name] = by_id[id(param)]
        yield leaves
    finally:
        for table, name, param in replaced:
            table[name] = param
        checkpointing.get_device_states = states
        torch.set_autocast_cache_enabled(cached)


def flattened(result: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """Return the tensors of a model's output, and the function that makes an output of others."""
    make, tree = getattr(result, "__dict__", {}).get(PARTS, (None, result))
    leaves, spec = pytree.tree_flatten(tree)
    tensors, makers = list[Tensor](), list[Callable[[Iterator[Tensor]], Any]]()
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            makers.append(next)
        elif isinstance(leaf, bool | int | float | str | None):
            makers.append(partial(_constant, leaf))
        elif (parts := _parts_of_cache(leaf)) is not None:
            tensors += parts[0]
            makers.append(parts[1])
        else:
            raise Reason(f"its output contains a {type(leaf).__name__} (use_cache=False leaves out a cache)")

    unflatten = _maker(tree, leaves) or partial(pytree.tree_unflatten, treespec=spec)

    def rebuild(tensors: Sequence[Tensor]) -> Any:
        remaining = iter(tensors)
        made = unflatten([each(remaining) for each in makers])
        return made if make is None else make(made)

    return tensors, rebuild


def _constant(value: Any, _: Iterator[Tensor]) -> Any:
    return value


def _parts_of_cache(cache: Any) -> tuple[list[Tensor], Callable[[Iterator[Tensor]], Any]] | None:
    """Return the keys and values of a call that adds to no cache, and what makes one of others; None for other caches.

    With gradients its tensors would have a history.
    """
    layers: Any = getattr(cache, "layers", None) or ()
    known = type(cache).__name__ == "DynamicCache" and all(type(each).__name__ in _CACHE_LAYERS for each in layers)
    if torch.is_grad_enabled() or not known or not layers or getattr(cache, "offloading", False):
        return None
    tensors, bare = [x for each in layers for x in (each.keys, each.values)], [copy.copy(each) for each in layers]
    if not all(isinstance(x, Tensor) for x in tensors) or any(getattr(each, "record_past", False) for each in layers):
        return None
    kept = [each.keys.shape[-2] for each in layers]
    for each in bare:
        each.keys = each.values = None
    empty = copy.copy(cache)
    empty.layers = bare

    def make(tensors: Iterator[Tensor]) -> Any:
        made = copy.copy(empty)
        made.layers = [copy.copy(each) for each in bare]
        for each, length in zip(made.layers, kept, strict=True):
            each.keys, each.values = next(tensors), next(tensors)
            if each.is_sliding:
                each.cumulative_length += each.keys.shape[-2] - length
        return made

    return tensors, make


def _maker(output: Any, leaves: Sequence[Any]) -> Callable[[Sequence[Any]], Any] | None:
    """Return what makes an output like one of transformers' from its leaves, past checks that cost as ten launches.

    None for another output, or a nested one.
    """
    fields: dict[str, Any] = getattr(output, "__dict__", {})
    flat = isinstance(output, OrderedDict) and len(output) == len(leaves) and all(map(is_, output.values(), leaves))
    if not flat or not output.keys() <= fields.keys():
        return None
    kind: Any = type(output)
    names, absent = [*output], {name: None for name in fields if name not in output}
    if any(fields[name] is not None for name in absent):
        return None

    def make(leaves: Sequence[Any]) -> Any:
        made = kind.__new__(kind)
        made.__dict__.update(absent)
        made.__dict__.update(zip(names, leaves, strict=True))
        for name, leaf in zip(names, leaves, strict=True):
            OrderedDict.__setitem__(made, name, leaf)
        return made

    return make


def versions(values: Sequence[Any]) -> list[int]:
    """Return the versions of tensors among arguments, which writes in place raise."""
    return [x._version for x in values if isinstance(x, Tensor) and not x.is_inference()]


# --- what it depends on -----------------------------------------------------------------------------------------------


class State:
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
        self._tensors = [x for x in held.values() if type(x) in PLAIN_TENSORS and x.layout is torch.strided]
        self._on_host = [x for x in self._tensors if x.device.type != DEVICE]
        self._facts = self._of_tensors()
        kinds, self._devices = {type(x) for x in params}, {x.device for x in params}
        usual = kinds <= {Tensor, nn.Parameter} and len(self._devices) == 1 and torch.version.hip is None
        self._usual = usual and all(device.type == DEVICE for device in self._devices)

    def _of_tensors(self) -> list[Any]:
        # A graph reads values on the device; of the host's tensors, it has those of the capture.
        return [
            versions(self._on_host),
            *[(x.data_ptr(), x.shape, x.stride(), x.dtype, x.requires_grad) for x in self._tensors],
        ]

    def has_memory(self) -> bool:
        """Return whether the tensors have the memory that they had."""
        return self._of_tensors() == self._facts

    def has_modules(self) -> bool:
        """Return whether modules have the attributes, parameters and buffers that they had."""
        same = [*map(len, self._views)] == self._lengths
        return same and all(map(is_, chain.from_iterable(self._views), self._values))

    def holds(self) -> bool:
        """Return whether the model is still as it was."""
        return self.has_modules() and self.has_memory()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Set the modules to training or evaluation as they were, inside the block; raise if more has changed."""
        now = [module.training for module in self._modules]
        try:
            for module, training in zip(self._modules, self._training, strict=True):
                module.training = training
            if not self.has_modules():
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
        if not self._usual or (DEVICE == "cuda" and {torch.cuda.current_device()} != {x.index for x in self._devices}):
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
