"""Our attention as "accelerant" in transformers' AttentionInterface; modules that are not patched get that of "sdpa".

A mask whose content is known is a `Mask`, computed only if torch reads it; nothing of it is read on the host of a GPU.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    causal_mask_function,
    sdpa_mask,
)

from accelerant import ops
from accelerant.nn.patching.plain import EXPORT_REASON, SMALL_REASON, is_exported, is_small
from accelerant.nn.patching.record import ATTENTION_NAME, MARK
from accelerant.ops.attention import attend_masked, segments_mask
from accelerant.ops.attention.launch import MAX_WIDTH
from accelerant.runtime.compilation.triton import interpreting
from accelerant.runtime.streams.graphs import captures_ahead

_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten._to_copy.default)


class LazyTensor(Tensor):
    """A tensor that the first operation on it computes, but for those that change only its dtype or history."""

    def value(self) -> Tensor:
        """Return the tensor without a gradient, computed once."""
        raise NotImplementedError

    def whole(self) -> Tensor:
        """Return the tensor, with its gradient if it has one."""
        return self.value()

    def alias(self, dtype: torch.dtype) -> LazyTensor | None:
        """Return the same tensor in a dtype, not computed either; None if it has to be."""
        raise NotImplementedError

    def expose(self) -> None:
        """Note that others hold the tensor's memory from now on, and may write to it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        x = args[0] if args else None
        if isinstance(x, LazyTensor) and func in _ALIASES and set(kwargs) <= {"dtype"}:
            same = x.alias(kwargs.get("dtype") or x.dtype)
            if same is not None:
                return same
        if isinstance(x, LazyTensor) and any(each.alias_info is not None for each in func._schema.arguments):
            x.expose()
        args, kwargs = pytree.tree_map_only(LazyTensor, lambda lazy: lazy.value(), (args, kwargs))
        return func(*args, **kwargs)

    def numpy(self, *, force: bool = False) -> Any:  # what reads the memory is not dispatched
        """Return the tensor as an array."""
        self.expose()
        return self.whole().numpy(force=force)

    def tolist(self) -> Any:
        """Return the tensor as numbers."""
        return self.whole().tolist()

    def data_ptr(self) -> int:
        """Return the address of the tensor."""
        self.expose()
        return self.whole().data_ptr()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.whole(), memo)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__.lower()}({tuple(self.shape)}, {self.dtype}, computed when read)"


_bidirectional = getattr(masking_utils, "bidirectional_mask_function", None)  # from transformers 5

_OPTIONS = frozenset(("dropout", "scaling", "is_causal", "position_bias", "kwargs"))
_NEW_OPTIONS = frozenset(list(inspect.signature(sdpa_attention_forward).parameters)[5:]) - _OPTIONS
"""Options of transformers' function that ours does not know; it is transformers' that has to serve them."""

_REFUSES_CAPS = "softcap" in sdpa_attention_forward.__code__.co_consts  # from 5.21 on; before, it ignores them


@dataclass(eq=False)
class Pattern:
    """The content of an attention mask.

    Attributes:
        causal: whether a query attends to no later key; queries are aligned with the last keys.
        window: how many positions back a query attends; None for all.
        ahead: how many positions ahead a query attends, beside a window; None for all, or for none if causal.
        padding: (B, Skv) bool, False where a key is padding; None if there is no padding.
        sequences: (B, S) integers, for packed sequences: tokens attend to those of their own; None for one sequence.
        implied: whether the mask replaces the absence of one, for which the module's is_causal decides.
    """

    causal: bool
    window: int | None = None
    ahead: int | None = None
    padding: Tensor | None = None
    sequences: Tensor | None = None
    implied: bool = False
    _segments: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a query attends to all keys, or to all within a causal window."""
        return self.padding is None and self.sequences is None and self.ahead is None

    def segments(self, q: Tensor) -> Tensor | None:
        """Return what our ops take for more than a plain pattern (see `segments_mask`), made once for all layers."""
        if self._segments is None and self.sequences is not None:
            self._segments = segments_mask(self.sequences, self.sequences)
        elif self._segments is None and (self.padding is not None or self.ahead is not None):
            B, S = q.shape[0], q.shape[-2]
            of_queries = torch.zeros(B, S, dtype=torch.int32, device=q.device)
            of_keys = of_queries if self.padding is None else self.padding.to(torch.int32) - 1
            self._segments = segments_mask(of_queries, F.pad(of_keys, (0, self.ahead or 0), value=-1))
        return self._segments


class Mask(LazyTensor):
    """A mask (B, 1, S, Skv) bool for torch's attention whose content is known; computed when something reads it."""

    _state: _MaskState

    @staticmethod
    def of(state: _MaskState) -> Mask:
        """Return a mask in a state, which several may share."""
        mask: Mask = Tensor._make_wrapper_subclass(Mask, state.shape, dtype=torch.bool, device=state.device)
        mask._state = state
        return mask

    def value(self) -> Tensor:
        """Return the mask."""
        return self._state.tensor()

    def alias(self, dtype: torch.dtype) -> Mask | None:
        """Return the same mask; None in another dtype."""
        return Mask.of(self._state) if dtype is torch.bool else None

    def pattern(self) -> Pattern | None:
        """Return the content; None if the mask may have been written to."""
        return None if self._state.is_exposed else self._state.pattern

    def expose(self) -> None:
        """Note that the mask may be written to from now on."""
        self._state.is_exposed = True

    def for_torch(self) -> Tensor | None:
        """Return what transformers passes to torch's attention: None if its is_causal says the same."""
        return self._state.given()


class _MaskState:
    """A mask's pattern, and the arguments of transformers' `sdpa_mask` that make it."""

    def __init__(self, pattern: Pattern, arguments: dict[str, Any], device: torch.device) -> None:
        self.pattern, self.device, self._arguments = pattern, device, arguments
        self.shape = (arguments["batch_size"], 1, arguments["q_length"], arguments["kv_length"])
        self._tensor: Tensor | None = None
        self._is_absent = self.is_exposed = False

    def tensor(self) -> Tensor:
        if self._tensor is None:
            whole = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            self._tensor = sdpa_mask(**self._arguments | whole)
        assert self._tensor is not None  # sdpa_mask gives one where it may not skip it
        return self._tensor

    def given(self) -> Tensor | None:
        if self._tensor is None and not self._is_absent:
            self._tensor = sdpa_mask(**self._arguments)
            self._is_absent = self._tensor is None
        return self._tensor


def register() -> None:
    """Register attention and masks with transformers."""
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, attention_mask)
    if _find_packed is not None:
        masking_utils.find_packed_sequence_indices = _packed_sequences


# --- masks -----------------------------------------------------------------------------------------------------------
def attention_mask(**arguments: Any) -> Tensor | None:
    """Return transformers' mask for torch's attention: a `Mask` if its content is known."""
    if (
        torch.compiler.is_compiling() and arguments.get("attention_mask") is None
        and arguments.get("mask_function") is _bidirectional and arguments.get("allow_is_bidirectional_skip")
    ):  # fmt: skip
        return None  # as transformers does where nothing is traced
    pattern = None
    # transformers 4 passes positions in place of lengths; decoding is torch's
    if not torch.compiler.is_compiling() and arguments.get("q_length", 1) != 1:
        pattern = _pattern_of_arguments(**arguments)
    if pattern is None:
        return sdpa_mask(**arguments)  # type: ignore[no-any-return]
    state = _MaskState(pattern, arguments, torch.device(arguments.get("device", "cpu")))
    if pattern.is_plain and pattern.window is None and state.given() is None:
        return None
    return Mask.of(state)


def causal_mask(B: int, S: int, device: torch.device) -> Tensor:
    """Return the causal mask of S tokens, (B, 1, S, S), which models take as it is, and look for no padding then.

    Under torch.compile no Mask can be made: an empty mask then stands for the causal one.
    """
    if torch.compiler.is_compiling():
        return torch.ones(1, 1, 0, 0, dtype=torch.bool, device=device)
    arguments = {"batch_size": B, "q_length": S, "kv_length": S, "device": device}
    return Mask.of(_MaskState(Pattern(True, implied=True), arguments, device))


class _Packing(threading.local):
    assumed: bool | None = None


_packing = _Packing()


@contextlib.contextmanager
def assumed_packing(packed: bool) -> Iterator[None]:
    """Let transformers take positions for those of packed sequences, or of one each, without reading them.

    To build a mask, it otherwise reads on the host whether they restart, in each forward pass without a cache.
    """
    before, _packing.assumed = _packing.assumed, packed
    try:
        yield
    finally:
        _packing.assumed = before


def _packed_sequences(position_ids: Tensor) -> Tensor | None:
    """Return transformers' indices of packed sequences; None for one sequence a row."""
    if torch.compiler.is_compiling() or _packing.assumed is None:
        return _find_packed(position_ids)  # type: ignore[no-any-return]
    if not _packing.assumed:
        return None
    return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)


_find_packed: Any = getattr(masking_utils, "find_packed_sequence_indices", None)


def _code(make: str, *args: Any) -> CodeType | None:
    """Return the code of the mask functions that a function of transformers makes; None if it has no such function."""
    maker: Callable[..., Any] | None = getattr(masking_utils, make, None)
    return None if maker is None else maker(*args).__code__


_AND = _code("and_masks", causal_mask_function)
_WINDOW = _code("sliding_window_overlay", 1)
_BOTH_SIDES = _code("sliding_window_bidirectional_overlay", 1)
_PACKED = _code("packed_sequence_mask_function", None)
_REMAPPED = _code("remap_positions_for_packed_sequence", None, None)  # from transformers 5.24


def _parts(function: Any) -> list[tuple[Any, Any]]:
    """Return the mask functions whose intersection this one is, each as its code and what it was made from."""
    cells: tuple[Any, ...] = getattr(function, "__closure__", None) or ()
    code, made_from = getattr(function, "__code__", None), cells[0].cell_contents if len(cells) == 1 else None
    if code is _REMAPPED is not None:  # by positions, which count on within a sequence as places do
        return [*_parts(cells[0].cell_contents), (code, None)]
    if code is _AND and made_from is not None:
        return [part for each in made_from for part in _parts(each)]
    return [(code, made_from)] if made_from is not None else [(function, None)]


def _pattern_of_arguments(
    *, q_length: int, kv_length: int, mask_function: Any = causal_mask_function, q_offset: Any = 0, kv_offset: Any = 0,
    attention_mask: Tensor | None = None, **_: Any,
) -> Pattern | None:  # fmt: skip
    """Return the pattern of a mask made from these arguments; None if it is unknown."""
    causal, remapped, window, ahead, sequences = False, False, None, None, None
    for kind, made_from in _parts(mask_function):
        if kind is causal_mask_function:
            causal = True
        elif kind is _WINDOW:
            window = made_from - 1
        elif kind is _BOTH_SIDES:
            window = ahead = made_from
        elif kind is _PACKED:
            sequences = made_from
        elif kind is _REMAPPED is not None:
            remapped = True
        elif kind is not _bidirectional or kind is None:
            return None
    bounds = (q_offset, q_length, kv_offset, kv_length)
    if not all(isinstance(bound, int) for bound in bounds) or (window is not None and causal is (ahead is not None)):
        return None
    if remapped and sequences is None:
        return None
    if ahead is not None and (q_offset, q_length) != (kv_offset, kv_length):
        return None
    if ahead is not None and ahead >= kv_length - 1:  # it hides nothing
        window = ahead = None
    if causal and q_offset + q_length != kv_offset + kv_length:
        return None
    if sequences is not None and (attention_mask is not None or q_length != kv_length or q_offset or kv_offset):
        return None
    padding = None
    if attention_mask is not None:
        if attention_mask.shape[-1] < kv_offset + kv_length:  # transformers treats keys beyond it as padding
            return None
        padding = attention_mask[..., kv_offset : kv_offset + kv_length]
        if padding.device.type == "cpu" and not captures_ahead() and bool(padding.all()):
            padding = None
    return Pattern(causal, window, ahead, padding, sequences)


def known_pattern(mask: Tensor | None, causal: bool, lengths: tuple[int, int]) -> Pattern | None:
    """Return the pattern of a mask over `lengths` queries and keys; that of `causal` for no mask or an implied one.

    None if it is unknown, or the mask is of other lengths or may have been written to.
    """
    if mask is None or mask.shape[-2:] == (0, 0):  # see causal_mask
        return Pattern(causal, implied=True)
    pattern = mask.pattern() if isinstance(mask, Mask) and mask.shape[-2:] == lengths else None
    return Pattern(causal, implied=True) if pattern is not None and pattern.implied else pattern


def is_torchs(pattern: Pattern, x: Tensor) -> bool:
    """Return whether torch's function serves a pattern: one with segments where our kernels do not run."""
    runs = x.device.type != "cpu" or interpreting()
    return not pattern.is_plain and not (runs and x.shape[-1] <= MAX_WIDTH and x.dtype is not torch.float64)


# --- attention -------------------------------------------------------------------------------------------------------
def attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, position_bias: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute attention for a transformers module, by our op or by torch's.

    queries are (B, Hq, S, D), keys and values (B, Hkv, Skv, D), the mask (B or 1, 1, S, Skv); `is_causal` None takes
    the module's setting. Without a mask, queries are aligned with the first keys. Returns (B, S, Hq, D), and None in
    place of the weights.
    """
    mark = getattr(module, MARK, None)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    pattern = known_pattern(attention_mask, causal, (query.shape[-2], key.shape[-2]))
    if pattern is not None and pattern.implied:
        attention_mask = None
    if mark is not None and mark.attention:
        reason = _refuses(module, (query, key, value), dropout, position_bias, pattern, kwargs)
        if reason is None:
            assert pattern is not None  # otherwise _refuses gives a reason
            S = query.shape[2]
            if attention_mask is None and pattern.causal and key.shape[2] > S:  # a static cache with room left
                key, value = key[:, :, :S], value[:, :, :S]
            return _attend(query, key, value, pattern, scaling), None
        if not torch.compiler.is_compiling():
            mark.report.fallbacks[reason] += 1
    if isinstance(attention_mask, Mask):
        attention_mask = attention_mask.for_torch()
    y, weights = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal,
        position_bias=position_bias, **kwargs,
    )  # fmt: skip
    return y, weights


def _refuses(
    module: Any, qkv: tuple[Tensor, Tensor, Tensor], dropout: float, position_bias: Tensor | None,
    pattern: Pattern | None, kwargs: dict[str, Any],
) -> str | None:  # fmt: skip
    """Return why a call goes to torch; None if our op serves it."""
    query, key, value = qkv
    if is_exported():
        return EXPORT_REASON
    if is_small(query):
        return SMALL_REASON
    if query.shape[2] == 1:
        return "one query a sequence (decoding), where torch's own costs the host less"
    if dropout > 0.0:
        return f"dropout of the attention weights (p = {dropout})"
    if position_bias is not None:
        return "a bias of the scores by position"
    if kwargs.get("output_attentions"):
        return "output_attentions (only attn_implementation='eager' gives the weights)"
    if _REFUSES_CAPS and kwargs.get("softcap") is not None:
        return "a soft cap of the scores"
    if any(option in _NEW_OPTIONS for option in kwargs):  # torch.compile cannot trace an intersection of keys
        return "an option that this version of transformers added"
    groups = max(1, getattr(module, "num_key_value_groups", 1))
    if any(x.dim() != 4 for x in qkv) or key.shape != value.shape or query.shape[1] != key.shape[1] * groups:
        return "queries, keys and values of other shapes"
    if pattern is None:
        return "a mask of another kind than causal, window, padding and packed sequences (or torch.compile traces it)"
    if pattern.causal and key.shape[2] < query.shape[2]:
        return "fewer keys than queries, hidden from the first query on"
    return (
        "padding, packed sequences or windows of both sides where our kernels do not run"
        if is_torchs(pattern, query)
        else None
    )


def _attend(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scaling: float | None) -> Tensor:
    """Return our attention, (B, S, Hq, D)."""
    segments = pattern.segments(q)
    if segments is not None:
        causal, window = pattern.causal, pattern.window
        if pattern.ahead is not None:  # a causal window of keys that end later: none sees those appended
            assert window is not None  # beside a window
            causal, window = True, window + pattern.ahead
            k, v = (F.pad(x, (0, 0, 0, pattern.ahead)) for x in (k, v))
        return attend_masked(q, k, v, segments, causal=causal, scale=scaling, window=window).transpose(1, 2)
    plain = ops.attention(q, k, v, causal=pattern.causal, scale=scaling, window=pattern.window)
    assert isinstance(plain, Tensor)  # without the log-sum-exp
    return plain.transpose(1, 2)
