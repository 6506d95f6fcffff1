"""The operations of the facade: what runs, how calls may be cut or merged, what they cost."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from accelerant import ops
from accelerant.algebra.field import prime_field
from accelerant.algebra.field.words import check_words, encode
from accelerant.errors import ConfigError, ShapeError
from accelerant.runtime.arrays import kind_of
from accelerant.zk.elliptic_curve import curve as curve_named
from accelerant.zk.msm.op import msm
from accelerant.zk.operands import plain_scalars, scalar_words
from accelerant.zk.transform import ntt

__all__ = ["METHODS", "Method", "Operations", "result_bytes"]

Tensors = tuple[torch.Tensor, ...]
_DEFAULT_FIELD = "goldilocks"
_DEFAULT_CURVE = "bn254_g1"


@dataclass(frozen=True, slots=True)
class Method:
    """One operation.

    Attributes:
        run: on tensors of one device.
        merge: how many calls become one. "elements": each element for itself, so that flattened arguments are joined;
            "rows": each row (last dimension) for itself, further arguments shared; "stack": calls of one shape become
            a batch; None: they do not.
        example: arguments for Accelerator.benchmark: random, on a device, of so many rows.
        flops: operations of a call, from the tensors, the result and the options.
        dtype: what plain Python numbers become.
        prepare: what is moved to the device, of an argument, its name and the call's options; the argument by default.
        whole: whether a call, by its tensors and options, is never done in batches of rows.
    """

    run: Callable[..., torch.Tensor]
    merge: Literal["elements", "rows", "stack"] | None
    example: Callable[[torch.device, int], Tensors]
    flops: Callable[..., int]
    dtype: type[np.generic] = np.float32
    prepare: Callable[[Any, str, Mapping[str, Any]], Any] | None = None
    whole: Callable[[Tensors, Mapping[str, Any]], bool] | None = None


def _floats(*shapes: tuple[int, ...]) -> Callable[[torch.device, int], Tensors]:
    """Random float32 tensors; a dimension of -1 is the number of rows that is asked for."""

    def make(device: torch.device, rows: int) -> Tensors:
        return tuple(torch.randn([rows if n < 0 else n for n in shape], device=device) for shape in shapes)

    return make


# --- fields ----------------------------------------------------------------------------------------------------------


def _elements(count: int) -> Callable[[torch.device, int], Tensors]:
    """So many arrays of random elements of the default field, but 0."""

    def make(device: torch.device, rows: int) -> Tensors:
        return tuple(torch.randint(1, 2**62, (rows * 1024,), device=device).view(torch.uint64) for _ in range(count))

    return make


def _field_words(x: Any, name: str, options: Mapping[str, Any]) -> Any:
    """Integers as words of their field; of arrays, dtype and shape checked before anything is moved."""
    field = prime_field(options["field"]).parameters
    kind = kind_of(x)
    if not hasattr(x, "dtype"):
        return encode(field, x, name=name)
    dtype = str(x.dtype).removeprefix("torch.") if kind != "numpy" or x.dtype.isnative else x.dtype.str
    check_words(field, dtype, tuple(x.shape), name)
    return x


def _field_method(name: str, arguments: int) -> Method:
    """A function of fields. Its tensors may come flattened to one axis of words, as batches join them."""

    def run(*tensors: torch.Tensor, field: str = _DEFAULT_FIELD) -> torch.Tensor:
        found = prime_field(field)
        flat = found.limbs > 1 and all(x.ndim == 1 for x in tensors)
        words = [x.reshape(-1, found.limbs) for x in tensors] if flat else tensors
        result: torch.Tensor = getattr(found, name)(*words)
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


def _transform(x: torch.Tensor, *, field: str = _DEFAULT_FIELD, **options: Any) -> torch.Tensor:
    return torch.as_tensor(ntt(x, field, **options))


def _transform_flops(args: Tensors, y: torch.Tensor, *, field: str = _DEFAULT_FIELD, **_: Any) -> int:
    """Products: half a one for each point and level."""
    limbs = prime_field(field).limbs
    return y.numel() // limbs * (y.shape[-1 if limbs == 1 else -2].bit_length() - 1) // 2


def _multiples(
    scalars: torch.Tensor, points: torch.Tensor, *, curve: str = _DEFAULT_CURVE, **options: Any
) -> torch.Tensor:
    return torch.as_tensor(msm(scalars, points, curve, **options))


def _multiples_words(x: Any, name: str, options: Mapping[str, Any]) -> Any:
    """Scalars, the first argument, as words of their field, and never in a message; points as they are."""
    if name != "x":
        return x
    field = curve_named(options["curve"]).scalar_field.parameters
    if isinstance(x, (list, tuple)):
        return scalar_words(x, field.modulus, "the curve's order")
    return _field_words(plain_scalars(field, x), "scalars", {"field": field.name})


def _multiples_example(device: torch.device, rows: int) -> Tensors:
    """Random scalars below 2^252; points that are 1, 2, ... times the generator."""
    group = curve_named(_DEFAULT_CURVE)
    points = torch.from_numpy(group.mul(group.generator, list(range(1, rows + 1))).view(np.int64)).to(device)
    scalars = torch.randint(0, 2**60, (rows, 4), device=device)
    return scalars.view(torch.uint64), points.view(torch.uint64)


def _multiples_flops(args: Tensors, y: torch.Tensor, *, curve: str = _DEFAULT_CURVE, **_: Any) -> int:
    """Additions of a plain sum: one a bit of each scalar."""
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
        ops.matmul,
        "stack",
        _floats((-1, 1024), (1024, 1024)),
        lambda args, y, **_: 2 * y.numel() * args[0].shape[-1],
    ),
    "field_add": _field_method("add", 2),
    "field_sub": _field_method("sub", 2),
    "field_mul": _field_method("mul", 2),
    "field_inv": _field_method("inv", 1),
    "ntt": Method(
        _transform,
        "stack",
        lambda device, rows: (_elements(1)(device, rows)[0].view(rows, 1024),),
        _transform_flops,
        np.uint64,
        _field_words,
        lambda args, options: True,
    ),
    "msm": Method(
        _multiples,
        None,
        _multiples_example,
        _multiples_flops,
        np.uint64,
        _multiples_words,
        lambda args, options: True,
    ),
    "attention": Method(
        _attention,
        None,
        _floats((1, 8, -1, 64), (1, 8, -1, 64), (1, 8, -1, 64)),
        lambda args, y, causal=False, **_: 4 * args[0].numel() * args[1].shape[-2] // (2 if causal else 1),
        whole=lambda args, options: True,
    ),
}


class Operations(ABC):
    """The operations by name, for whatever can call them."""

    @abstractmethod
    def _call(self, name: str, arrays: tuple[Any, ...], **options: Any) -> Any:
        """Do or note a call."""

    def gelu(self, x: Any, approximate: str = "none") -> Any:
        """Multiply x by the normal distribution function at x; see accelerant.ops.gelu."""
        return self._call("gelu", (x,), approximate=approximate)

    def softmax(self, x: Any, dim: int = -1) -> Any:
        """Exponentials of x over their sum along dim; see accelerant.ops.softmax."""
        return self._call("softmax", (x,), dim=dim)

    def layer_norm(self, x: Any, weight: Any, bias: Any = None, *, eps: float = 1e-5) -> Any:
        """Rows of x at mean 0 and variance 1, times weight, plus bias; see accelerant.ops.layer_norm."""
        return self._call("layer_norm", (x, weight) if bias is None else (x, weight, bias), eps=eps)

    def matmul(self, a: Any, b: Any) -> Any:
        """The matrix product; see accelerant.ops.matmul."""
        return self._call("matmul", (a, b))

    def field_add(self, x: Any, y: Any, *, field: str = _DEFAULT_FIELD) -> Any:
        """The sum of field elements, canonical words or integers; see accelerant.zk.field."""
        return self._call("field_add", (x, y), field=field)

    def field_sub(self, x: Any, y: Any, *, field: str = _DEFAULT_FIELD) -> Any:
        """The difference of field elements; as field_add."""
        return self._call("field_sub", (x, y), field=field)

    def field_mul(self, x: Any, y: Any, *, field: str = _DEFAULT_FIELD) -> Any:
        """The product of field elements; as field_add."""
        return self._call("field_mul", (x, y), field=field)

    def field_inv(self, x: Any, *, field: str = _DEFAULT_FIELD) -> Any:
        """The inverse of field elements, of which none may be 0; as field_add."""
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
        """Number-theoretic transforms along the last axis of elements; see accelerant.zk.ntt.

        Words or integers, of a field that is named; a coset is an integer.

        Raises:
            ConfigError: the coset is no integer.
        """
        if coset is not None and not isinstance(coset, int):
            raise ConfigError(
                f"coset must be a Python integer here, got {type(coset).__name__}: zk.ntt takes words too"
            )
        return self._call("ntt", (x,), field=field, inverse=inverse, coset=coset, order=order)

    def msm(self, scalars: Any, points: Any, *, curve: str = _DEFAULT_CURVE, check: bool = True) -> Any:
        """The sum of scalars[i] points[i], in the library of the scalars; see accelerant.zk.msm."""
        return self._call("msm", (scalars, points), curve=curve, check=check)

    def attention(self, q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None) -> Any:
        """Softmax of scaled products of queries and keys, times values; see accelerant.ops.attention."""
        return self._call("attention", (q, k, v), causal=causal, scale=scale)


def result_bytes(name: str, arrays: tuple[Any, ...]) -> int:
    """Bytes of a call's inputs and result, from the inputs alone.

    Raises:
        ShapeError: matmul of scalars.
    """
    sizes = [_nbytes(array) for array in arrays]
    if name != "matmul":
        return sum(sizes) + max(sizes)  # the largest: field elements broadcast
    a, b = (x if hasattr(x, "shape") else np.asarray(x) for x in arrays)
    if a.ndim < 1 or b.ndim < 1:
        raise ShapeError(f"matmul wants at least one dimension, got shapes {tuple(a.shape)} and {tuple(b.shape)}")
    rows, columns = math.prod(a.shape[:-1]), b.shape[-1] if b.ndim > 1 else 1
    return sum(sizes) + int(rows * columns * sizes[0] // max(1, math.prod(a.shape)))


def _nbytes(x: Any) -> int:
    return int(x.nbytes) if hasattr(x, "nbytes") else int(np.asarray(x).nbytes)
