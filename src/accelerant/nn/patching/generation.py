"""Calls of a patched model that add one token to transformers' DynamicCache, run from CUDA graphs.

A room is memory for keys and values up to a number of tokens, and the graph of the call that adds a token there. The
tensors of a cache that moved in are views of it: one that was cropped, reordered or kept otherwise moves in again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from accelerant.config import settings
from accelerant.nn.patching import capture, graphs
from accelerant.nn.patching.buckets import near, rotates_by_length
from accelerant.nn.patching.capture import UNUSED, Captured, Padding, Reason, flattened, holders
from accelerant.nn.patching.record import PARTS, Forward, PatchReport
from accelerant.ops._library import is_watched
from accelerant.runtime.compilation import background
from accelerant.runtime.host import fork_safe

CACHE = "past_key_values"

_SMALLEST, _AHEAD = 128, 32  # tokens of the smallest room; those that a room has space for when a cache moves in
_MOST_ROOMS = 8
_MOST_EAGER = 8  # calls in a room without a graph, after which no call of its kind runs in one
_PLACEHOLDER = "the caller's cache"  # in the constants of a graph


class _Layer(StaticLayer):  # type: ignore[misc]
    """Keys and values of one layer in a room, (B, H, capacity, D): a call writes those of its token at `place`."""

    def __init__(self, keys: Tensor, values: Tensor, place: Tensor) -> None:
        super().__init__(keys.shape[2])
        self.keys, self.values, self.cumulative_length = keys, values, place
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        for to, states in ((self.keys, key_states), (self.values, value_states)):
            to.index_copy_(2, self.cumulative_length, states)
        return self.keys, self.values


class _Room:
    """Memory for caches of one shape, and the graph of the call that adds a token."""

    def __init__(self, forward: Forward, report: PatchReport, layers: Sequence[Any], capacity: int) -> None:
        self._forward, self._report, self.capacity = forward, report, capacity
        self.graphs = graphs.Graphs(self._run, report, automatic=True, training=False)
        self.captured: Captured | None = None
        self.state: Any = None
        self.checked, self._eager = False, 0
        self._views: list[tuple[Any, Tensor, Tensor]] = []  # layer of the cache that lives here, keys and values
        with torch.inference_mode(False):
            self._place = torch.zeros(1, dtype=torch.int64, device=layers[0].keys.device)
            shapes = [[(*x.shape[:2], capacity, x.shape[3]) for x in (each.keys, each.values)] for each in layers]
            self.layers = [
                _Layer(each.keys.new_zeros(keys), each.values.new_zeros(values), self._place)
                for each, (keys, values) in zip(layers, shapes, strict=True)
            ]
        self._cache = Cache(layers=self.layers)

    def _run(self, model: nn.Module, **kwargs: Any) -> Any:
        output = self._forward(model, **kwargs, **{CACHE: self._cache})
        if not isinstance(output, dict) or PARTS in output.__dict__ or output.get(CACHE) is not self._cache:
            raise Reason("its output has no cache")
        output[CACHE] = _PLACEHOLDER
        return output

    def holds(self, layers: Sequence[Any]) -> bool:
        """Return whether a cache lives here, unchanged since its last call."""
        return len(layers) == len(self._views) and all(
            layer is known() and layer.keys is keys and layer.values is values
            for layer, (known, keys, values) in zip(layers, self._views, strict=True)
        )

    def take(self, layers: Sequence[Any], length: int) -> bool:
        """Copy a cache's keys and values here; return False if others than the cache before use the memory."""
        self.leave()
        if any(holders(x.untyped_storage()) > UNUSED for each in self.layers for x in (each.keys, each.values)):
            return False
        pairs = [
            (to[:, :, length - x.shape[2] : length], x) for here, layer in zip(self.layers, layers, strict=True)
            for to, x in ((here.keys, layer.keys), (here.values, layer.values))
        ]  # fmt: skip
        with torch.no_grad():
            torch._foreach_copy_([to for to, _ in pairs], [x for _, x in pairs])
        return True

    def leave(self) -> None:
        """Give the cache that lives here memory of its own."""
        own = {x.untyped_storage()._cdata for each in self.layers for x in (each.keys, each.values)}
        views, self._views = self._views, []
        for known, *_ in views:
            layer = known()
            if layer is None:
                continue
            for name in ("keys", "values"):
                x = getattr(layer, name)
                if isinstance(x, Tensor) and x.untyped_storage()._cdata in own:
                    copied = x.clone()
                    if getattr(layer, name) is x:  # else a call in another thread has added tokens since
                        setattr(layer, name, copied)

    def extend(self, layers: Sequence[Any], length: int) -> None:
        """Let a cache have the tokens here, `length` of them."""
        views = []
        for here, layer in zip(self.layers, layers, strict=True):
            first = 0
            if layer.is_sliding:
                first, layer.cumulative_length = max(0, length - layer.sliding_window + 1), length
            layer.keys, layer.values = here.keys[:, :, first:length], here.values[:, :, first:length]
            views.append((weakref.ref(layer), layer.keys, layer.values))
        self._views = views

    def run(self, model: nn.Module, kwargs: dict[str, Any], length: int) -> Any:
        """Add a token to the `length` here: from the graph, or eagerly before its capture."""
        self._place.fill_(length)
        if self.captured is None:
            return self._run_eagerly(model, kwargs)
        if self.state.has_memory():  # else what the graph reads may be gone
            output = self.captured([*kwargs.values()], (length + 1,))
            if self.state.has_modules() and self.state.obstacle() is None:  # looked at while the device works
                self._report.graphs["replayed"] += 1
                return output
        self.captured = None
        self.graphs.release()
        raise Reason("modules, parameters or attributes of the model have changed")

    def _run_eagerly(self, model: nn.Module, kwargs: dict[str, Any]) -> Any:
        """Run a call that has no graph yet, or capture it."""
        fills = [(0, 0) if name == "attention_mask" else None for name, x in kwargs.items() if isinstance(x, Tensor)]
        padded = Padding((self.capacity,), tuple(fills), ()).padded([*kwargs.values()])
        output = self.graphs._run(model, (), dict(zip(kwargs, padded, strict=True)))
        self._eager += background.is_ready()  # while kernels are compiled nothing is captured
        for captured in self.graphs._captured.values():
            captured.padding = Padding((self.capacity,), tuple(fills), (None,) * len(captured.outputs))
            self.captured, self.state, self._eager = captured, self.graphs._state, 0
        return output

    @property
    def reason(self) -> str | None:
        """Why the call is not captured, for good."""
        found = self.graphs._off or next(iter(self.graphs._refused.values()), None)
        return found or ("its calls were not captured" if self._eager >= _MOST_EAGER else None)


class Decoding:
    """The calls of a patched model that add one token to a cache."""

    def __init__(self, forward: Forward, report: PatchReport) -> None:
        self._forward, self._report = forward, report
        self._lock = fork_safe(threading.RLock())
        self.release()

    def release(self) -> None:
        """Discard all rooms."""
        with self._lock:
            for room in getattr(self, "_rooms", {}).values():
                room.leave()
            self._rooms: dict[Any, _Room] = {}
            self._last: tuple[Any, _Room] | None = None
            self._refused: dict[Any, str] = {}

    def __getstate__(self) -> Any:
        return self._forward, self._report  # a copy of the model has other parameters

    def __setstate__(self, state: Any) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def __call__(self, model: nn.Module, kwargs: dict[str, Any]) -> Any:
        """Run a call with a cache: in a room if it adds one token and rooms suit the model."""
        cache, tokens, mask = kwargs.get(CACHE), kwargs.get("input_ids"), kwargs.get("attention_mask")
        one = isinstance(tokens, Tensor) and tokens.dim() == 2 and tokens.shape[1] == 1
        suits = mask is None or isinstance(mask, Tensor)  # some models take a mask of each kind of layer
        if not one or not suits or type(cache) is not DynamicCache or is_watched():
            return self._forward(model, **kwargs)
        given = {name: x for name, x in kwargs.items() if name != CACHE}
        try:
            with self._lock:
                rest = {name: x for name, x in given.items() if name != "attention_mask"}
                key = graphs.key_of([*rest.values()], tuple(rest)), tuple(given), None if mask is None else mask.dtype
                return self._add(model, cache, given, key)
        except torch.OutOfMemoryError:
            self.release()
        except Reason:
            pass
        return self._forward(model, **kwargs)

    def _add(self, model: nn.Module, cache: Any, given: dict[str, Any], key: Any) -> Any:
        """Run a call in the room of its cache; raise Reason if there is none."""
        layers, length, mask = cache.layers, cache.get_seq_length(), given.get("attention_mask")
        if mask is not None and mask.shape != (given["input_ids"].shape[0], length + 1):
            raise Reason("its mask is of another shape")
        if (
            self._last is None
            or self._last[0] != key
            or length >= self._last[1].capacity
            or not self._last[1].holds(layers)
        ):
            if key in self._refused:
                raise Reason(self._refused[key])
            _check(layers, length)
            self._last = None
            room = self._move(model, layers, key, length)
            if not room.checked:
                return self._compared(room, model, cache, given, key)
            self._last = key, room
        room = self._last[1]
        output = room.run(model, given, length)
        room.extend(layers, length + 1)
        if room.captured is None and room.reason is not None:
            self._refuse(key, room.reason)
        if output.get(CACHE) == _PLACEHOLDER:
            output[CACHE] = cache
        return output

    def _refuse(self, key: Any, reason: str) -> None:
        """Let calls of a kind run without rooms."""
        self._refused[key] = reason
        for name in [name for name in self._rooms if name[0] == key]:
            self._rooms.pop(name).leave()
        self._last = None

    def _move(self, model: nn.Module, layers: Sequence[Any], key: Any, length: int) -> _Room:
        """Return a room with a copy of a cache."""
        shapes = [(x.shape[:2], x.shape[3], x.dtype) for each in layers for x in (each.keys, each.values)]
        capacity = _capacity(length + _AHEAD)
        name = key, capacity, tuple(shapes)
        room = self._rooms.pop(name, None)
        if room is not None and not room.take(layers, length):
            room = None  # its memory is left to those who use it
        if room is None:
            if (reason := _obstacle(model)) is not None:
                self._refuse(key, reason)
                raise Reason(reason)
            size = sum(shape[0] * shape[1] * width * dtype.itemsize for shape, width, dtype in shapes) * capacity
            if (len(self._rooms) + 1) * size * graphs.SHARE > graphs._free_bytes():
                raise Reason("its memory would be a large part of what is free")
            while len(self._rooms) >= _MOST_ROOMS:
                self._rooms.pop(next(iter(self._rooms))).leave()
            room = _Room(self._forward, self._report, layers, capacity)
            room.take(layers, length)
        self._rooms[name] = room  # the last one used
        return room

    def _compared(self, room: _Room, model: nn.Module, cache: Any, given: dict[str, Any], key: Any) -> Any:
        """Run a call as without the room, and in the room: if that differs, no call of the kind runs in one."""
        length = cache.get_seq_length()
        output = self._forward(model, **given, **{CACHE: cache})
        try:
            found, layers = room.run(model, given, length), cache.layers
            there = [x[:, :, length] for each in room.layers for x in (each.keys, each.values)]
            here = [x[:, :, -1] for each in layers for x in (each.keys, each.values)]
            pairs = list(zip((*_tensors(output), *here), (*_tensors(found), *there), strict=True))
            if any(one.shape != two.shape for one, two in pairs):  # as attention weights have
                raise Reason("an output has the size of the cache")
            if not all(near(one, two, 1e-4, 5e-2) for one, two in pairs):
                raise Reason("results in a cache of fixed size differ")
        except Exception as error:  # noqa: BLE001  whatever it is, the model runs as without rooms
            self._refuse(key, str(error))
        else:
            room.checked, self._last = True, (key, room)
            room.extend(layers, length + 1)
        return output


def _tensors(output: Any) -> list[Tensor]:
    """Return the tensors of an output but for its cache."""
    return flattened({name: x for name, x in output.items() if name != CACHE})[0]


def _check(layers: Sequence[Any], length: int) -> None:
    """Raise Reason if a room cannot take a cache."""
    for layer in layers:
        kind, kept = type(layer), length
        if kind is DynamicSlidingWindowLayer and layer.sliding_window > 1 and not layer.record_past:
            kept = min(length, layer.sliding_window - 1)
        elif kind is not DynamicLayer:
            raise Reason(f"its cache has a {kind.__name__}")
        if layer.get_seq_length() != length or any(
            not isinstance(x, Tensor) or x.dim() != 4 or x.shape[2] != kept or x.device.type != capture.DEVICE
            for x in (layer.keys, layer.values)
        ):
            raise Reason("layers of its cache differ in their lengths")
    if not layers:
        raise Reason("its cache has no layers")
    if settings().deterministic or torch.are_deterministic_algorithms_enabled():
        raise Reason("results may not depend on measured times (deterministic)")


def _capacity(length: int) -> int:
    """Return the number of tokens of the smallest room for a length: a fourth of a power of two apart from 512 on."""
    step = max(_SMALLEST, 1 << max(0, (length - 1).bit_length() - 3))
    return -(-length // step) * step


def _obstacle(model: nn.Module) -> str | None:
    """Return why a model does not run in rooms; None if it may."""
    if (unknown := graphs.unknown_code(model)) is not None:
        return f"{unknown} may do more than its operations"
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return "an encoder and a decoder have a length each"
    return rotates_by_length(model)
