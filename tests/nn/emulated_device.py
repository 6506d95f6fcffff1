"""A device whose stream is being captured, emulated on the CPU: what a CUDA graph of a training step would refuse."""

from __future__ import annotations

import random
from contextlib import contextmanager, nullcontext
from unittest import mock

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from accelerant.nn.patching import capture
from accelerant.nn.patching.attention import LazyTensor
from accelerant.nn.patching.capture import HostWork

aten = torch.ops.aten
DEVICE = torch.device("lazy", 0)
VALUES = (aten._local_scalar_dense, aten.equal, aten.is_nonzero)
SHAPES = (
    aten.nonzero, aten.masked_select, aten._unique, aten._unique2, aten.unique_dim, aten.unique_consecutive,
    aten.bincount, aten.argwhere,
)  # fmt: skip


class OnDevice(torch.Tensor):
    """A tensor of the device; `held` has its values."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(held):
        made = torch.Tensor._make_wrapper_subclass(
            OnDevice, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=DEVICE,
        )  # fmt: skip
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    def tolist(self):
        return [x.tolist() for x in self] if self.dim() else self.item()

    def numpy(self, *, force=False):
        return self.cpu().numpy()

    def __format__(self, spec):
        return format(self.item() if self.dim() == 0 else repr(self), spec)

    def __repr__(self, *, tensor_contents=None):
        return f"OnDevice({self.held})"


def _is_here(func, args, kwargs, here):
    """Return whether an operation's results are tensors of the device."""
    if func.overloadpacket in VALUES:
        return False
    target = kwargs.get("device")
    return bool(here) if target is None else torch.device(target).type == DEVICE.type


def _run(func, args, kwargs):
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    here = [x for x in tensors if isinstance(x, OnDevice)]
    held_args, held_kwargs = pytree.tree_map_only(OnDevice, lambda x: x.held, (args, kwargs))
    if kwargs.get("device") is not None:
        held_kwargs["device"] = torch.device("cpu")
    if torch.Tag.nondeterministic_seeded in func.tags and _is_here(func, args, kwargs, here):
        with torch.random.fork_rng():  # the device has a generator of its own
            results = func(*held_args, **held_kwargs)
    elif func.overloadpacket is aten.histc and not held_args[0].is_floating_point():  # as on a GPU
        results = func(held_args[0].float(), *held_args[1:], **held_kwargs).to(held_args[0].dtype)
    else:
        results = func(*held_args, **held_kwargs)
    if not _is_here(func, args, kwargs, here):
        return results
    known = {id(x.held): x for x in here}  # an operation in place returns its argument
    return pytree.tree_map_only(
        torch.Tensor, lambda x: known[id(x)] if id(x) in known else OnDevice.of(x), results
    )  # fmt: skip


class Watch(TorchDispatchMode):
    """Notes in `reasons` why a stream that captures would refuse operations, with the first operation of each."""

    def __init__(self):
        super().__init__()
        self.reasons = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(isinstance(x, LazyTensor) for x in pytree.tree_leaves((args, kwargs))):
            with self:  # it may be computed now
                return LazyTensor.__torch_dispatch__(func, types, args, kwargs)
        reason = self._refused(func, args, kwargs)
        if reason is not None:
            self.reasons.setdefault(reason, func)
        return _run(func, args, kwargs)

    def _refused(self, func, args, kwargs):
        op = func.overloadpacket
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        here = [x for x in tensors if isinstance(x, OnDevice)]
        on_device = _is_here(func, args, kwargs, here)
        if not here and not on_device:
            return None
        if op in VALUES:
            return "the host reads a value"
        if op is aten._grouped_mm and args[0].dtype != torch.bfloat16:
            return "torch's grouped products of other dtypes than bfloat16 read offsets on the host"
        if op in SHAPES or (op is aten.repeat_interleave and kwargs.get("output_size") is None):
            return "a shape depends on values"
        if op in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
            indices = [x for x in args[1] if x is not None]
            if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
                masked_fill = op is not aten.index and len(indices) == 1 and args[2].numel() == 1
                return None if masked_fill else "a shape depends on values"
            if not all(isinstance(x, OnDevice) for x in indices):
                return "copies from the host"
        if op is aten._to_copy and isinstance(args[0], OnDevice) != on_device:
            return "copies from the host" if on_device else "copies to the host"
        if op is aten.copy_ and isinstance(args[0], OnDevice) != isinstance(args[1], OnDevice):
            return "copies from the host" if on_device else "copies to the host"
        return None


def move(model):
    """Move a model to the device, tied parameters as one."""
    made = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, x in table.items():
                if x is not None and id(x) not in made:
                    held = OnDevice.of(x.detach())
                    made[id(x)] = torch.nn.Parameter(held, x.requires_grad) if table is module._parameters else held
                if x is not None:
                    table[name] = made[id(x)]
    return model


@contextmanager
def _told_of_capture():
    """Tell transformers and us that the stream is being captured; autocast does not know the device."""
    enabled, lifts = torch.is_autocast_enabled, torch._C._only_lift_cpu_tensors()
    autocast = torch.autocast
    queried = mock.patch("torch.is_autocast_enabled", lambda *kind: kind != (DEVICE.type,) and enabled(*kind))
    entered = mock.patch(
        "torch.autocast", lambda kind, **options: nullcontext() if kind == DEVICE.type else autocast(kind, **options)
    )
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with queried, entered, mock.patch("torch.cuda.is_current_stream_capturing", return_value=True):
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts)


def _others():
    _, keys, place, *_ = np.random.get_state()
    return random.getstate(), keys.tolist(), place


def refusals(model, inputs):
    """Return why no CUDA graph takes a training step of a model, which is moved to the device: sorted reasons."""
    move(model)
    inputs = {name: OnDevice.of(value) for name, value in inputs.items()}
    work, reasons = HostWork(DEVICE.type), set()
    np.random.seed(12345)  # so that a model that seeds the generator itself changes its state
    host, others = torch.get_rng_state(), _others()
    with _told_of_capture(), Watch(), work.noted():
        model(**inputs)["loss"].backward()
    if not work.explains(host, torch.get_rng_state()) or others != _others():
        reasons.add("draws random numbers on the host")
    state = capture.State(model)
    with _told_of_capture(), Watch() as watch, work.repeated():
        output = model(**inputs)
        output["loss"].backward()
    if not state.holds():
        reasons.add("its forward changes modules or their attributes")
    try:
        capture.flattened(output)
    except capture.Reason as reason:
        reasons.add(str(reason))
    return sorted(reasons | watch.reasons.keys())
