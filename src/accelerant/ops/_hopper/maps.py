"""Tensor maps: how a tensor is described to Hopper's copy engine."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

import torch
from torch import Tensor

from accelerant.errors import LaunchError
from accelerant.runtime.providers.cuda_launch import make_ready

__all__ = ["tensor_map"]

_CHUNK = 64
"""Elements of a row that a box takes: 128 bytes, the width of the swizzle."""


def tensor_map(x: Tensor, rows: int) -> bytes:
    """Describe x to the copy engine, in boxes of 64 columns and some rows under the 128-byte swizzle.

    Args:
        x: (B, H, S, D) of bfloat16 or float16; last dimension contiguous, its address and the other strides multiples
            of 16 bytes.
        rows: of S that a box holds, up to 256.

    Raises:
        LaunchError: the driver takes no such tensor.
    """
    room = (ctypes.c_char * 192)()
    to = (ctypes.addressof(room) + 63) & -64  # the driver asks for a multiple of 64
    make_ready()  # the driver makes no map in a thread without a context
    fixed = _map_arguments(x.dtype, x.shape, x.stride(), rows)
    code = _encode()(to, fixed[0], _RANK, ctypes.c_void_p(x.data_ptr()), *fixed[1:], *_BOX_LAYOUT)
    if code:
        raise LaunchError(f"no tensor map of {tuple(x.shape)} with strides {x.stride()}: driver error {code}")
    return ctypes.string_at(to, 128)


_RANK = 4
_DATA_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_...
_BOX_LAYOUT = (0, 3, 3, 0)
"""CU_TENSOR_MAP_INTERLEAVE_NONE, _SWIZZLE_128B, _L2_PROMOTION_L2_256B, _FLOAT_OOB_FILL_NONE."""


@functools.lru_cache(maxsize=4096)
def _map_arguments(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], rows: int) -> tuple[Any, ...]:
    """What cuTensorMapEncodeTiled takes besides the address: innermost dimension first, strides in bytes.

    Source: CUDA driver API 13.0, cuTensorMapEncodeTiled.
    """
    batch, heads, length, width = shape
    # A dimension of one element is never stepped over, and may have a stride that the driver would not take.
    steps = [2 * strides[dim] if shape[dim] > 1 else 16 * width for dim in (2, 1, 0)]
    return (
        _DATA_TYPES[dtype],
        (ctypes.c_uint64 * 4)(width, length, heads, batch),
        (ctypes.c_uint64 * 3)(*steps),
        (ctypes.c_uint32 * 4)(_CHUNK, rows, 1, 1),
        (ctypes.c_uint32 * 4)(1, 1, 1, 1),
    )


@functools.cache
def _encode() -> Any:
    """The driver's cuTensorMapEncodeTiled; through ctypes, at 2 us a map, where cuda.bindings takes 8."""
    encode = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1").cuTensorMapEncodeTiled
    encode.argtypes = (
        ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int,
    )  # fmt: skip
    return encode
