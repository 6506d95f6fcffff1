"""The operations of the Accelerator: implementation, merging of calls, cost; arrays of other libraries as tensors.

Memory is shared through DLPack if an array is already on the device; the protocol orders the producer's and the
consumer's streams (each side passes its current one). NumPy shares memory with CPU tensors.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.utils.dlpack

from accelerant import ops
from accelerant.algebra.field import prime_field
from accelerant.algebra.field.words import check_words, encode
from accelerant.errors import ConfigError, UnsupportedDtype
from accelerant.runtime.host import refuse_masked
from accelerant.zk.elliptic_curve import curve as curve_named
from accelerant.zk.multi_scalar.op import msm
from accelerant.zk.operands import encoded_points, plain_scalars, scalar_words
from accelerant.zk.transform import ntt

__all__ = ["METHODS", "ArrayOrigin", "Method", "Operations", "sizes_of", "to_torch"]

Tensors = tuple[torch.Tensor, ...]
_DEFAULT_FIELD = "goldilocks"
_DEFAULT_CURVE = "bn254_g1"


@dataclass(frozen=True, slots=True)
class ArrayOrigin:
    """The library ("numpy", "torch", "cupy" or "jax") and device of an array, to which results are converted back.

    `context` is the library's own device object, if it has one.
    """

    kind: str
    device: torch.device
    context: Any = None

    def wrap(self, tensor: torch.Tensor) -> Any:
        """Return the tensor as an array of this kind, on the input's device."""
        if self.kind == "torch":
            return tensor.to(self.device)
        tensor = tensor.detach()
        if self.kind == "numpy":
            return tensor.cpu().numpy()[
                ()
            ]  # a NumPy scalar for a result without dimensions, as NumPy's functions return
        if self.kind == "cupy":
            return sys.modules["cupy"].from_dlpack(tensor.to(self.device))
        jax = sys.modules["jax"]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype in ("int64", "uint64", "float64") and not jax.config.jax_enable_x64:
            raise UnsupportedDtype(f"JAX holds {dtype} only after jax.config.update('jax_enable_x64', True)")
        return jax.dlpack.from_dlpack(tensor.to(self.device).contiguous())


def kind_of(x: object) -> str:
    """Return the library of an array, "numpy" for numbers and sequences of them; or raise UnsupportedDtype."""
    refuse_masked(x, "the array")
    if isinstance(x, torch.Tensor):
        return "torch"
    if isinstance(x, (np.ndarray, np.generic, int, float, Sequence)) and not isinstance(x, (str, bytes)):
        return "numpy"
    root = type(x).__module__.partition(".")[0]
    if root == "cupy":
        return "cupy"
    if root in ("jax", "jaxlib"):
        return "jax"
    raise UnsupportedDtype(f"wanted an array of NumPy, torch, CuPy or JAX, got {type(x).__module__}.{type(x).__name__}")


def to_torch(x: Any, device: torch.device, dtype: np.dtype[Any] | None = None) -> tuple[torch.Tensor, ArrayOrigin]:
    """Return an array as a tensor on the device, and its origin; memory on the device is shared.

    `dtype` is that of plain Python numbers, NumPy's own choice by default. Anything but an array or numbers, and a
    dtype that torch lacks, raises UnsupportedDtype.
    """
    kind = kind_of(x)
    try:
        if kind == "torch":
            return x.to(device, non_blocking=False), ArrayOrigin(kind, x.device)
        if kind == "numpy":
            array = np.asarray(x, dtype if not isinstance(x, np.ndarray) else None, order="C")  # keeps 0 dimensions
            tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
            return tensor.to(device), ArrayOrigin(kind, torch.device("cpu"))
        tensor = torch.utils.dlpack.from_dlpack(x)
        context = next(iter(x.devices())) if kind == "jax" else None
        return tensor.to(device), ArrayOrigin(kind, tensor.device, context)
    except (TypeError, ValueError, BufferError, OverflowError) as error:
        raise UnsupportedDtype(f"cannot take this {kind} array: {error}") from None


@dataclass(frozen=True, slots=True)
class Method:
    """One operation.

    Attributes:
        run: on tensors of one device.
        merge: how several calls become one. "elements": elementwise, flattened arguments are concatenated; "rows":
            each row (last dimension) by itself, further arguments shared; "stack": calls of one shape are stacked;
            None: not merged.
        example: makes random arguments for Accelerator.benchmark, from a device and a number of rows.
        flops: operations of a call, from the tensors, the result and the options.
        dtype: of plain Python numbers.
        prepare: converts an argument before it is moved, from its value, its name and the call's options.
        whole: whether a call, by its tensors and options, is never split into batches of rows.
    """

    run: Callable[..., torch.Tensor]
    merge: Literal["elements", "rows", "stack"] | None
    example: Callable[[torch.device, int], Tensors]
    flops: Callable[..., int]
    dtype: type[np.generic] = np.float32
    prepare: Callable[[Any, str, Mapping[str, Any]], Any] | None = None
    whole: Callable[[Tensors, Mapping[str, Any]], bool] | None = None


def _floats(*shapes: tuple[int, ...]) -> Callable[[torch.device, int], Tensors]:
    """Return a maker of random float32 tensors; -1 is replaced by the number of rows."""

    def make(device: torch.device, rows: int) -> Tensors:
        return tuple(torch.randn([rows if n < 0 else n for n in shape], device=device) for shape in shapes)

    return make


def _elements(count: int) -> Callable[[torch.device, int], Tensors]:
    """Return a maker of arrays of random nonzero elements of the default field."""

    def make(device: torch.device, rows: int) -> Tensors:
        return tuple(torch.randint(1, 2**62, (rows * 1024,), device=device).view(torch.uint64) for _ in range(count))

    return make


def _field_words(x: Any, name: str, options: Mapping[str, Any]) -> Any:
    """Encode integers as words of their field; check an array's dtype and shape before anything is moved."""
    field = prime_field(options["field"]).parameters
    kind = kind_of(x)
    if not hasattr(x, "dtype"):
        return encode(field, x, name=name)
    dtype = str(x.dtype).removeprefix("torch.") if kind != "numpy" or x.dtype.isnative else x.dtype.str
    check_words(field, dtype, tuple(x.shape), name)
    return x


def _field_method(name: str, arguments: int) -> Method:
    """Return the Method of a field operation. Batches pass its tensors flattened to one axis of words."""

    def run(*tensors: torch.Tensor, field: str = _DEFAULT_FIELD) -> torch.Tensor:
        prime = prime_field(field)
        flat = prime.limbs > 1 and all(x.ndim == 1 for x in tensors)
        words = [x.reshape(-1, prime.limbs) for x in tensors] if flat else tensors
        result: torch.Tensor = getattr(prime, name)(*words)
        return result.reshape(-1) if flat else result

    return Method(
        run,
        "elements",
        _elements(arguments),
        lambda args, y, field=_DEFAULT_FIELD: y.numel() // prime_field(field).limbs,
        np.uint64,
        _field_words,
        lambda args, options: prime_field(options.get("field", _DEFAULT_FIELD)).limbs > 1 and args[0].ndim < 2,
    )


def _transform_flops(args: Tensors, y: torch.Tensor, *, field: str = _DEFAULT_FIELD, **_: Any) -> int:
    """Return the number of products: half a product for each point and level."""
    limbs = prime_field(field).limbs
    return y.numel() // limbs * (y.shape[-1 if limbs == 1 else -2].bit_length() - 1) // 2


def _msm(scalars: torch.Tensor, points: torch.Tensor, *, curve: str = _DEFAULT_CURVE, **options: Any) -> torch.Tensor:
    return torch.as_tensor(msm(scalars, points, curve, **options))


def _msm_words(x: Any, name: str, options: Mapping[str, Any]) -> Any:
    """Encode scalars ("x") and points given as Python integers; no message shows a scalar."""
    group = curve_named(options["curve"])
    if name != "x":
        return encoded_points(group.parameters, x, "points") if isinstance(x, (list, tuple)) else x
    field = group.scalar_field.parameters
    if isinstance(x, (list, tuple)):
        return scalar_words(x, field.modulus, "the curve's order")
    return _field_words(plain_scalars(field, x), "scalars", {"field": field.name})


def _msm_example(device: torch.device, rows: int) -> Tensors:
    """Return random scalars below 2^252, and the multiples 1, 2, ... of the generator."""
    group = curve_named(_DEFAULT_CURVE)
    points = torch.from_numpy(group.mul(group.generator, list(range(1, rows + 1))).view(np.int64)).to(device)
    scalars = torch.randint(0, 2**60, (rows, 4), device=device)
    return scalars.view(torch.uint64), points.view(torch.uint64)


def _msm_flops(args: Tensors, y: torch.Tensor, *, curve: str = _DEFAULT_CURVE, **_: Any) -> int:
    """Return the additions of a plain sum: one a bit of each scalar."""
    return math.prod(args[0].shape[:-1]) * curve_named(curve).order.bit_length()


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    result = ops.attention(q, k, v, **options)
    return result[0] if isinstance(result, tuple) else result


METHODS: dict[str, Method] = {
    "gelu": Method(ops.gelu, "elements", _floats((-1, 1024)), lambda args, y, **_: 10 * y.numel()),
    "softmax": Method(ops.softmax, "rows", _floats((-1, 1024)), lambda args, y, **_: 5 * y.numel()),
    "layer_norm": Method(
        ops.layer_norm, "rows", _floats((-1, 1024), (1024,), (1024,)), lambda args, y, **_: 8 * y.numel()
    ),
    "matmul": Method(
        ops.matmul, "stack", _floats((-1, 1024), (1024, 1024)), lambda args, y, **_: 2 * y.numel() * args[0].shape[-1]
    ),
    "field_add": _field_method("add", 2),
    "field_sub": _field_method("sub", 2),
    "field_mul": _field_method("mul", 2),
    "field_inv": _field_method("inv", 1),
    "ntt": Method(
        lambda x, field=_DEFAULT_FIELD, **options: torch.as_tensor(ntt(x, field, **options)),
        "stack",
        lambda device, rows: (_elements(1)(device, rows)[0].view(rows, 1024),),
        _transform_flops,
        np.uint64,
        _field_words,
        lambda args, options: True,
    ),
    "msm": Method(_msm, None, _msm_example, _msm_flops, np.uint64, _msm_words, lambda args, options: True),
    "attention": Method(
        _attention,
        None,
        _floats((1, 8, -1, 64), (1, 8, -1, 64), (1, 8, -1, 64)),
        lambda args, y, causal=False, **_: 4 * args[0].numel() * args[1].shape[-2] // (2 if causal else 1),
        whole=lambda args, options: True,
    ),
}


class Operations(ABC):
    """The operations as methods; subclasses run or record the calls."""

    @abstractmethod
    def _call(self, name: str, arrays: tuple[Any, ...], **options: Any) -> Any:
        """Run or record a call."""

    def gelu(self, x: Any, approximate: str = "none") -> Any:
        """Multiply x by the normal distribution function at x; see accelerant.ops.gelu."""
        return self._call("gelu", (x,), approximate=approximate)

    def softmax(self, x: Any, dim: int = -1) -> Any:
        """Divide the exponentials of x by their sum along dim; see accelerant.ops.softmax."""
        return self._call("softmax", (x,), dim=dim)

    def layer_norm(self, x: Any, weight: Any, bias: Any = None, *, eps: float = 1e-5) -> Any:
        """Normalise rows of x to mean 0 and variance 1, scale and shift; see accelerant.ops.layer_norm."""
        return self._call("layer_norm", (x, weight) if bias is None else (x, weight, bias), eps=eps)

    def matmul(self, a: Any, b: Any) -> Any:
        """Multiply matrices; see accelerant.ops.matmul."""
        return self._call("matmul", (a, b))

    def field_add(self, x: Any, y: Any, *, field: str = _DEFAULT_FIELD) -> Any:
        """Add field elements, canonical words or integers; see accelerant.zk.field."""
        return self._call("field_add", (x, y), field=field)

    def field_sub(self, x: Any, y: Any, *, field: str = _DEFAULT_FIELD) -> Any:
        """Subtract field elements; arguments as for field_add."""
        return self._call("field_sub", (x, y), field=field)

    def field_mul(self, x: Any, y: Any, *, field: str = _DEFAULT_FIELD) -> Any:
        """Multiply field elements; arguments as for field_add."""
        return self._call("field_mul", (x, y), field=field)

    def field_inv(self, x: Any, *, field: str = _DEFAULT_FIELD) -> Any:
        """Invert nonzero field elements; arguments as for field_add."""
        return self._call("field_inv", (x,), field=field)

    def ntt(
        self,
        x: Any,
        *,
        field: str = _DEFAULT_FIELD,
        inverse: bool = False,
        coset: int | None = None,
        order: str = "natural",
    ) -> Any:
        """Apply the number-theoretic transform along the last axis of elements; see accelerant.zk.ntt.

        Takes words or integers of the named field. A coset that is no integer raises ConfigError.
        """
        if coset is not None and not isinstance(coset, int):
            raise ConfigError(
                f"coset must be a Python integer here, got {type(coset).__name__}: zk.ntt takes words too"
            )
        return self._call("ntt", (x,), field=field, inverse=inverse, coset=coset, order=order)

    def msm(self, scalars: Any, points: Any, *, curve: str = _DEFAULT_CURVE, check: bool = True) -> Any:
        """Sum scalars[i] points[i], arguments as accelerant.zk.msm takes them; the result is of the scalars' kind."""
        return self._call("msm", (scalars, points), curve=curve, check=check)

    def attention(self, q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None) -> Any:
        """Multiply the softmax of scaled queries times keys by the values; see accelerant.ops.attention."""
        return self._call("attention", (q, k, v), causal=causal, scale=scale)


def sizes_of(name: str, arrays: tuple[Any, ...]) -> tuple[int, int]:
    """Return the bytes of a call's inputs on the device and of its result, computed from the inputs' shapes."""
    plain = np.dtype(METHODS[name].dtype)
    read = [x if hasattr(x, "nbytes") else np.asarray(x, plain) for x in arrays]
    inputs, shapes = [int(x.nbytes) for x in read], [tuple(x.shape) for x in read]
    item = max((size // max(1, math.prod(shape)) for size, shape in zip(inputs, shapes, strict=True)), default=0)
    try:
        shape = _result_shape(name, shapes)
    except (ValueError, IndexError):  # shapes that the operation refuses, with its own words
        return sum(inputs), max(inputs)
    return sum(inputs), math.prod(shape) * item


def _result_shape(name: str, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    first, last = shapes[0], shapes[-1]
    if name == "matmul":
        rows, columns = first[-2:-1], last[-1:] if len(last) > 1 else ()
        return (*np.broadcast_shapes(first[:-2], last[:-2]), *rows, *columns)
    if name == "attention":
        return (*first[:-1], last[-1])
    if name == "msm":
        return last[1:]
    return np.broadcast_shapes(*shapes) if METHODS[name].merge == "elements" else first
