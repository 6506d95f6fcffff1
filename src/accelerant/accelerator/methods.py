"""The operations of the Accelerator: implementation, merging of calls, cost, benchmark; other libraries' arrays.

The public ops become methods with their own signatures: arguments that an op declares as tensors are arrays or numbers.
Memory is shared through DLPack if an array is already on the device; the protocol orders the producer's and the
consumer's streams. NumPy shares memory with CPU tensors.
"""

import functools
import inspect
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.utils.dlpack

from accelerant import ops
from accelerant.algebra.field.field import PrimeField, prime_field
from accelerant.algebra.field.memory_space import space_at
from accelerant.algebra.field.words import check_words, element_shape, encode
from accelerant.algebra.ntt.launch import scratch_bytes as ntt_scratch_bytes
from accelerant.errors import AccelerantError, ConfigError, UnsupportedDtype
from accelerant.ops._library import own_keywords
from accelerant.ops.registry import Fractions, Indices, PublicOp, SampleInput, Stated, public_op, watch
from accelerant.runtime.dispatch import force, operations
from accelerant.runtime.dispatch.plan import explain_quietly
from accelerant.runtime.files import JsonRecord, clipped, plain
from accelerant.runtime.host import as_torch_takes_it, refuse_masked, refuse_other_than_real, refuse_without_values
from accelerant.runtime.html_page import text_table
from accelerant.runtime.ledger import Decision, quantile
from accelerant.runtime.memory.peak import ModelStep, predict_step
from accelerant.runtime.provider import ComputeDevice
from accelerant.zk.elliptic_curve import curve as curve_named
from accelerant.zk.multi_scalar import msm, ntt
from accelerant.zk.multi_scalar import scratch_bytes as msm_scratch_bytes
from accelerant.zk.operands import either_order, encoded_points, plain_scalars, scalar_words

Tensors = tuple[torch.Tensor, ...]
Results = torch.Tensor | Tensors
Merge = Literal["elements", "rows", "first", "stack"]
Example = Callable[[torch.device, int], tuple[Tensors, dict[str, Any]]]
DEFAULT_FIELD = "goldilocks"
DEFAULT_CURVE = "bn254_g1"
_TENSOR = frozenset((torch.Tensor,))
_ARRAYS = frozenset((torch.Tensor, np.ndarray))
_INTERFACES = ("__cuda_array_interface__", "__dlpack__")
"""Attributes of other libraries' arrays (Numba, PyCUDA) whose memory torch can share."""


@dataclass(frozen=True, slots=True)
class ArrayOrigin:
    """The library ("numpy", "torch", "cupy", "jax") and device of an array, to which results are converted back."""

    kind: str
    device: torch.device
    context: Any = None

    def wrap(self, tensor: Results) -> Any:
        """Return the tensor, or each of several, as an array of this kind, on the input's device."""
        if isinstance(tensor, tuple):
            return tuple(map(self.wrap, tensor))
        if self.kind == "torch":
            return tensor.to(self.device)
        tensor = tensor.detach()
        if self.kind == "numpy":
            return tensor.cpu().numpy()[()]  # without dimensions a NumPy scalar, as NumPy's functions return
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
        refuse_without_values(x, "the array")
        return "torch"
    if isinstance(x, (np.ndarray, np.generic, int, float, Sequence)) and not isinstance(x, (str, bytes)):
        return "numpy"
    if (root := type(x).__module__.partition(".")[0]) == "cupy":
        return "cupy"
    if root in ("jax", "jaxlib"):
        return "jax"
    remedy = "; torch.as_tensor(x) shares its memory" * any(hasattr(x, each) for each in _INTERFACES)
    name = f"{type(x).__module__}.{type(x).__name__}"
    raise UnsupportedDtype(f"wanted an array of NumPy, torch, CuPy or JAX, got {name}{remedy}")


def to_torch(
    x: Any, device: torch.device | None, dtype: torch.dtype | None = None, *, order: Literal["C", "K"] = "C"
) -> tuple[torch.Tensor, ArrayOrigin]:
    """Return an array as a tensor on the device, or where it is, and its origin; memory on the device is shared.

    `dtype` is that of plain Python numbers, NumPy's own choice by default. Anything but an array or numbers, a dtype
    that torch lacks, and fractions where `dtype` is one of integers raise UnsupportedDtype. NumPy's arrays are copied
    for C's order, unless `order` is "K".
    """
    if type(x) is torch.Tensor and x.device == device and x.layout is torch.strided and not x.is_nested:
        return x, ArrayOrigin("torch", device)
    kind = kind_of(x)
    try:
        if kind == "torch":
            return x if device is None else x.to(device, non_blocking=False), ArrayOrigin(kind, x.device)
        if kind == "numpy":
            array = as_torch_takes_it(np.asarray(x, order=order))  # keeps 0 dimensions
            wanted = None if hasattr(x, "dtype") else dtype
            if wanted is not None:
                if not wanted.is_floating_point and array.size and array.dtype.kind not in "iu":
                    raise UnsupportedDtype(f"wanted integers, got {array.dtype}")
                refuse_other_than_real(array)
                array = array.astype(np.float64 if wanted.is_floating_point else str(wanted).removeprefix("torch."))
            tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
            return tensor.to(device, wanted or tensor.dtype), ArrayOrigin(kind, tensor.device)
        tensor = torch.utils.dlpack.from_dlpack(x)
        context = next(iter(x.devices())) if kind == "jax" else None
        return tensor if device is None else tensor.to(device), ArrayOrigin(kind, tensor.device, context)
    except (TypeError, ValueError, BufferError, OverflowError) as error:
        if isinstance(error, UnsupportedDtype):
            raise
        raise UnsupportedDtype(f"cannot take this {kind} array: {error}") from None


def to_tensors(name: str, arrays: tuple[Any, ...], device: torch.device | None) -> tuple[Tensors, ArrayOrigin]:
    """Return a call's arrays as tensors on a device, or where they are, and the origin of the first array."""
    if device is None and _TENSOR.issuperset(map(type, arrays)):
        return arrays, ArrayOrigin("torch", arrays[0].device)
    dtypes: Sequence[torch.dtype | None] = (None,) * len(arrays)
    first = 0
    if not all(hasattr(x, "dtype") for x in arrays):
        dtypes = dtypes_of(name, arrays)
        first = next((i for i, x in enumerate(arrays) if hasattr(x, "dtype")), 0)
    moved = [to_torch(x, device, dtype) for x, dtype in zip(arrays, dtypes, strict=True)]
    return tuple(tensor for tensor, _ in moved), moved[first][1]


def tensors_of(result: Results) -> Tensors:
    """Return the tensors of an operation's result."""
    return result if isinstance(result, tuple) else (result,)


@dataclass(frozen=True, slots=True)
class ArrayMethod:
    """One operation on arrays; `run` takes tensors of one device.

    Attributes:
        merge: how several calls become one: "elements" are concatenated flat, "rows" along rows, "first" along the
            first dimension, "stack" stacks calls of one shape; None: not merged.
        joined: number of arguments that are joined, the first ones; calls that become one share the others.
        example: makes random arguments and options for Accelerator.benchmark, from a device and a number of rows.
        flops: operations of a call, from the tensors, the first result and the options; per_s: an H200's of a second.
        integers: dtypes of the arguments that are integers, by position.
        prepare: converts an argument before it is moved, from its value, its name and the call's options.
        whole: whether a call, by its tensors and options, is never split into batches of rows.
        is_op: `run` is a public op, which computes shapes and dtypes on torch's meta device.
        dimensions: of the first argument of calls that can be joined; None for any number.
        scratch: whether a call allocates more than its result and statistics of rows.
        uneven: whether results on a CPU depend on an element's place in the tensor; calls that become one run in turn.
    """

    run: Callable[..., Results]
    merge: Merge | None
    example: Example
    flops: Callable[..., int]
    joined: int = 1
    integers: Mapping[int, torch.dtype] = field(default_factory=dict)
    prepare: Callable[[Any, str, Mapping[str, Any]], Any] | None = None
    whole: Callable[[Tensors, Mapping[str, Any]], bool] | None = None
    is_op: bool = False
    dimensions: int | None = None
    scratch: bool = False
    uneven: bool = False
    per_s: float = 3e12


def _elements(count: int, *shape: int) -> Example:
    """Return a maker of arrays of random nonzero elements of the default field; -1 means the number of rows."""

    def make(device: torch.device, rows: int) -> tuple[Tensors, dict[str, Any]]:
        size = [rows if n < 0 else n for n in shape]
        return tuple(torch.randint(1, 2**62, size, device=device).view(torch.uint64) for _ in range(count)), {}

    return make


def _field_words(x: Any, name: str, options: Mapping[str, Any]) -> Any:
    """Encode integers as words of their field; check an array's dtype and shape before anything is moved."""
    field = prime_field(options["field"]).parameters
    kind = kind_of(x)
    if not hasattr(x, "dtype"):
        return encode(field, x, name=name)[()]  # a number stays one
    dtype = str(x.dtype).removeprefix("torch.") if kind != "numpy" or x.dtype.isnative else x.dtype.str
    check_words(field, dtype, tuple(x.shape), name)
    return x


def _field_spec(name: str, arguments: int) -> ArrayMethod:
    """Return a field operation. Batches pass its tensors flattened to one axis of words."""

    def run(*tensors: torch.Tensor, field: str = DEFAULT_FIELD) -> torch.Tensor:
        prime = prime_field(field)
        flat = prime.limbs > 1 and all(x.ndim == 1 for x in tensors)
        words = [x.reshape(-1, prime.limbs) for x in tensors] if flat else tensors
        result: torch.Tensor = getattr(prime, name)(*words)
        return result.reshape(-1) if flat else result

    return ArrayMethod(
        run, "elements", _elements(arguments, -1, 1024),
        lambda args, y, field=DEFAULT_FIELD: y.numel() // prime_field(field).limbs, joined=arguments,
        prepare=_field_words,
        whole=lambda args, options: prime_field(options.get("field", DEFAULT_FIELD)).limbs > 1 and args[0].ndim < 2,
    )  # fmt: skip


def _transform_flops(args: Tensors, y: torch.Tensor, *, field: str = DEFAULT_FIELD, **_: Any) -> int:
    """Return the number of products: half a product for each point and level."""
    limbs = prime_field(field).limbs
    return y.numel() // limbs * (y.shape[-1 if limbs == 1 else -2].bit_length() - 1) // 2


def _msm_words(x: Any, name: str, options: Mapping[str, Any]) -> Any:
    """Encode scalars ("x") and points given as Python integers; no message shows a scalar."""
    group = curve_named(options["curve"])
    if name != "x":
        return encoded_points(group.parameters, x, "points") if isinstance(x, (list, tuple)) else x
    field = group.scalar_field.parameters
    if isinstance(x, (list, tuple)):
        return scalar_words(x, field.modulus, "the curve's order")
    return _field_words(plain_scalars(field, x), "scalars", {"field": field.name})


def _msm_example(device: torch.device, rows: int) -> tuple[Tensors, dict[str, Any]]:
    """Return random scalars below 2^252, and the multiples 1, 2, ... of the generator."""
    group = curve_named(DEFAULT_CURVE)
    points = torch.from_numpy(group.mul(group.generator, list(range(1, rows + 1))).view(np.int64)).to(device)
    scalars = torch.randint(0, 2**60, (rows, 4), device=device)
    return (scalars.view(torch.uint64), points.view(torch.uint64)), {}


# --- the public ops --------------------------------------------------------------------------------------------------
def _op(
    name: str, flops: int | Callable[..., int],
    arguments: Callable[[int], tuple[tuple[int, ...] | Fractions | Indices | Stated, ...]],
    merge: Merge | None = None, joined: int = 1, *, options: Mapping[str, Any] | None = None, **more: Any,
) -> ArrayMethod:  # fmt: skip
    """Return a public op, from an example's arguments and options; `flops` may be operations for each element."""
    function = public_op(name).function
    declared = inspect.signature(function).parameters.values()
    arrays = [each for each in declared if str(each.annotation).startswith("Tensor")]
    by_name = [each.name for each in arrays if each.kind is inspect.Parameter.KEYWORD_ONLY]
    first = len(arrays) - len(by_name)

    def run(*tensors: torch.Tensor, fixed: tuple[tuple[int, Any], ...] = (), **options: Any) -> Results:
        values: list[Any] = list(tensors)
        for position, value in fixed:
            values.insert(position, value)
        if len(values) > first:
            options |= dict(zip(by_name, values[first:], strict=False))
        result: Results = function(*values[:first], **options)
        return result

    def example(device: torch.device, rows: int) -> tuple[Tensors, dict[str, Any]]:
        sample = SampleInput(name, arguments(rows))
        return tuple(x for x in sample.tensors(torch.float32, device) if x is not None), dict(options or {})

    kinds = {i: x.dtype for i, x in enumerate(arguments(1)) if isinstance(x, Indices)}
    kinds |= {i: torch.int32 for i, x in enumerate(arguments(1)) if isinstance(x, Stated)}
    count = (lambda args, y, **_: flops * y.numel()) if isinstance(flops, int) else flops
    return ArrayMethod(run, merge, example, count, joined, kinds, is_op=True, **more)


def _product_flops(args: Tensors, y: torch.Tensor, **_: Any) -> int:
    return 2 * y.numel() * args[0].shape[-1]


def _window_flops(args: Tensors, y: torch.Tensor, *, kernel_size: Any, **_: Any) -> int:
    high, wide = np.broadcast_to(kernel_size, 2).tolist()
    return int(y.numel() * high * wide)


def _attention_flops(args: Tensors, y: torch.Tensor, *, causal: bool = False, **_: Any) -> int:
    return 4 * args[0].numel() * args[1].shape[-2] // (2 if causal else 1)


def _wide(n: int) -> tuple[int, ...]:
    return n, 1024


def _heads(n: int) -> tuple[int, ...]:
    return 1, 8, n, 64


def _image(n: int) -> tuple[int, ...]:
    return 1, 16, n, 32


METHODS: dict[str, ArrayMethod] = {
    **{name: _op(name, flops, lambda n: (_wide(n),), "elements", uneven=uneven) for name, flops, uneven in (
        ("gelu", 10, True), ("relu", 1, False), ("sigmoid", 3, True), ("silu", 3, True), ("tanh", 15, False),
    )},
    **{name: _op(name, 1, lambda n: (_wide(n), _wide(n)), "elements", 2) for name in ("add", "mul")},
    **{name: _op(name, 5, lambda n: (_wide(n),), "rows") for name in ("softmax", "log_softmax")},
    "layer_norm": _op("layer_norm", 8, lambda n: (_wide(n), (1024,), (1024,)), "rows"),
    "rms_norm": _op("rms_norm", 5, lambda n: (_wide(n), (1024,)), "rows"),
    "add_layer_norm": _op("add_layer_norm", 9, lambda n: (_wide(n), _wide(n), (1024,), (1024,)), "rows", 2),
    "add_rms_norm": _op("add_rms_norm", 6, lambda n: (_wide(n), _wide(n), (1024,)), "rows", 2),
    "dropout": _op("dropout", 2, lambda n: (_wide(n),)),
    "swiglu": _op("swiglu", 5, lambda n: (_wide(n), _wide(n)), "rows", 2, uneven=True),
    "quantize_int8": _op("quantize_int8", 4, lambda n: (_wide(n),), "rows"),
    "matmul": _op(
        "matmul", _product_flops, lambda n: (_wide(n), (1024, 1024)), "stack", 2, dimensions=2, scratch=True,
    ),
    "linear_gelu": _op(
        "linear_gelu", _product_flops, lambda n: (_wide(n), (1024, 1024), (1024,)), "rows", scratch=True, per_s=3e13,
    ),
    "linear_int4": _op(
        "linear_int4", _product_flops, lambda n: (_wide(n), Indices((1024, 512), 256, 0, torch.uint8), (1024, 8)),
        "rows", scratch=True,
    ),
    "linear_int8": _op(
        "linear_int8", _product_flops, lambda n: (_wide(n), Indices((1024, 1024), 128, -127, torch.int8), (1024,)),
        "rows", scratch=True,
    ),
    "embedding": _op("embedding", 0, lambda n: (Indices((n,), 1024), (1024, 1024)), "first"),
    "cross_entropy": _op(
        "cross_entropy", lambda args, y, **_: 5 * args[0].numel(), lambda n: (_wide(n), Indices((n,), 1024)),
        scratch=True,
    ),
    **{
        name: _op(name, lambda args, y, **_: 8 * args[0].numel(), lambda n: (Fractions(_wide(n)), Fractions(_wide(n))))
        for name in ("mse_loss", "l1_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
    },
    "linear_cross_entropy": _op(
        "linear_cross_entropy",
        lambda args, y, **_: 2 * args[0].numel() * args[1].shape[0],
        lambda n: (_wide(n), (1024, 1024), Indices((n,), 1024)), scratch=True,
    ),
    "conv2d": _op(
        "conv2d", lambda args, y, **_: 2 * y.numel() * args[1].shape[1:].numel(),
        lambda n: (_image(n), (16, 16, 3, 3), (16,)), "first", options={"padding": 1}, dimensions=4, scratch=True,
        per_s=2e13,
    ),
    **{name: _op(name, _window_flops, lambda n: (_image(n + 1),), "first", options={"kernel_size": 2})
       for name in ("max_pool2d", "avg_pool2d")},
    "rope": _op("rope", 3, lambda n: (_heads(n), (n, 32), (n, 32)), "first", dimensions=4),
    "attention": _op(
        "attention", _attention_flops, lambda n: (_heads(n), _heads(n), _heads(n)), "first", 3, dimensions=4,
        scratch=True, per_s=3e14,
    ),
    "attention_decode": _op(
        "attention_decode", _attention_flops, lambda n: (_heads(1), _heads(n), _heads(n), Indices((1,), n + 1)),
        "first", 4, dimensions=4, scratch=True,
    ),
    "attention_paged": _op(
        "attention_paged", lambda args, y, **_: 4 * args[0].numel() * args[3].shape[-1] * args[1].shape[1],
        lambda n: ((1, 8, 64), (n, 16, 8, 64), (n, 16, 8, 64), Indices((1, n), n, 0, torch.int32), Stated((16 * n,))),
        scratch=True,
    ),
    "attention_varlen": _op(
        "attention_varlen", lambda args, y, max_seqlen_k=0, **_: 4 * args[0].numel() * max_seqlen_k,
        lambda n: ((16, 8, 64), (16, 8, 64), (16, 8, 64), Stated((0, 16)), Stated((0, 16))),
        options={"max_seqlen_q": 16, "max_seqlen_k": 16}, scratch=True,
    ),
    **{f"field_{name}": _field_spec(name, arguments) for name, arguments in
       (("add", 2), ("sub", 2), ("mul", 2), ("inv", 1))},
    "ntt": ArrayMethod(
        lambda x, field=DEFAULT_FIELD, **options: torch.as_tensor(ntt(x, field, **options)), "stack",
        _elements(1, -1, 1024), _transform_flops, prepare=_field_words, scratch=True, per_s=4e11,
    ),
    "msm": ArrayMethod(
        lambda scalars, points, curve=DEFAULT_CURVE, **options: torch.as_tensor(msm(scalars, points, curve, **options)),
        "stack", _msm_example,  # operations: the additions of a plain sum, one a bit of each scalar
        lambda args, y, curve=DEFAULT_CURVE, **_: math.prod(args[0].shape[:-1]) * curve_named(curve).order.bit_length(),
        prepare=_msm_words, dimensions=2, scratch=True, per_s=6e10,
    ),
}  # fmt: skip


def joined_arguments(name: str, tensors: Tensors, options: Mapping[str, Any]) -> int:
    """Return how many arguments, the first ones, are joined with those of other calls; 0 for a call that is not."""
    method, first = METHODS[name], tensors[0]
    count = min(method.joined, len(tensors))
    masked = name == "attention" and len(tensors) > count  # its mask may differ along the batch
    if masked or method.merge is None or method.dimensions not in (None, first.ndim):
        return 0
    if method.merge == "elements" and count == 2 and tensors[1].shape != first.shape:
        count = 1 if name in ("add", "mul") and first.ndim and tensors[1].shape == first.shape[-1:] else 0
    elif method.merge == "rows":
        like = all(x.shape == first.shape for x in tensors[1:count])
        last = options.get("dim", -1) in (-1, first.ndim - 1)
        count = count if first.ndim and last and like else 0
    elif method.merge == "first":
        joined = all(x.ndim and x.shape[0] == first.shape[0] for x in tensors[:count])
        single = name == "rope" and any(x.ndim != 2 for x in tensors[1:])  # tables of each sequence
        count = count if joined and not single else 0
    elif name == "matmul" and tensors[1].ndim != 2:
        count = 0
    return count


def _op_method(name: str) -> Callable[..., Any]:
    """Return the method of a public op, with the op's signature."""
    function = public_op(name).function
    signature = inspect.signature(function)
    declared = list(signature.parameters.values())
    arrays = {each.name: each for each in declared if str(each.annotation).startswith("Tensor")}
    names = {each.name for each in declared}
    positional = [each.name for each in declared if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    defaults = {each.name: each.default for each in declared if each.default is not inspect.Parameter.empty}
    leading = next((i for i, each in enumerate(positional) if each not in arrays), len(positional))
    usual: dict[int, dict[str, Any]] = {}  # number of arguments, all of them arrays -> the options of such a call

    def method(self: Operations, *args: Any, **options: Any) -> Any:
        plain = not options and len(args) <= leading and _ARRAYS.issuperset(map(type, args))
        if plain and len(args) in usual:
            return self._call(name, args, usual[len(args)])
        given = {**defaults, **dict(zip(positional, args, strict=False)), **options}
        if (
            len(args) > len(positional)
            or given.keys() != names
            or not options.keys().isdisjoint(positional[: len(args)])
        ):
            own_names = own_keywords(name, args, options)
            if own_names.keys() != options.keys():
                return method(self, *args, **own_names)
            try:
                signature.bind(*args, **options)  # slow, and has the words for what is wrong
            except TypeError as error:
                raise TypeError(f"{name}: {error}") from None
        if "axis" in given and (given["axis"] is None or given["dim"] in (-1, given["axis"])):
            axis = given.pop("axis")
            given["dim"] = given["dim"] if axis is None else axis
        taken: list[Any] = []
        fixed: list[tuple[int, float | None]] = []
        for position, (argument, parameter) in enumerate(arrays.items()):
            if (value := given.pop(argument)) is None and parameter.default is None:
                if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:  # the last ones
                    fixed.append((position, None))
            elif "float" in parameter.annotation and isinstance(value, (int, float, np.generic)):
                fixed.append((position, float(value)))
            else:
                taken.append(value)
        if fixed:
            given["fixed"] = tuple(fixed)
        if plain:
            usual[len(args)] = given
        return self._call(name, tuple(taken), given)

    parameters = [each.replace(annotation=Any) if each.name in arrays else each for each in declared]
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__name__, method.__qualname__ = name, f"Operations.{name}"
    method.__signature__ = inspect.Signature([own, *parameters])  # type: ignore[attr-defined]  # what inspect reads
    method.__doc__ = f"Call accelerant.ops.{name} on arrays of any library or numbers.\n\n{inspect.getdoc(function)}"
    return method


class Operations(ABC):
    """The operations as methods; subclasses run or record the calls."""

    @abstractmethod
    def _call(self, name: str, arrays: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run or record a call; the options may be those of other calls, too, and are not changed."""

    if TYPE_CHECKING:  # `_add_op` makes them of every public op
        (
            add, add_layer_norm, add_rms_norm, attention, attention_decode, attention_paged, attention_varlen,
            avg_pool2d, binary_cross_entropy, binary_cross_entropy_with_logits, conv2d, cross_entropy, dropout,
            embedding, gelu, l1_loss, layer_norm, linear_cross_entropy, linear_gelu, linear_int4, linear_int8,
            log_softmax, matmul, max_pool2d, mse_loss, mul, quantize_int8, relu, rms_norm, rope, sigmoid, silu, softmax,
            swiglu, tanh,
        ) = map(_op_method, ops.__all__)  # fmt: skip

    def field_add(self, x: Any, y: Any, field: str | PrimeField = DEFAULT_FIELD) -> Any:
        """Add field elements, canonical words or integers; see accelerant.zk.field."""
        return self._call("field_add", (x, y), {"field": field})

    def field_sub(self, x: Any, y: Any, field: str | PrimeField = DEFAULT_FIELD) -> Any:
        """Subtract field elements; arguments as for field_add."""
        return self._call("field_sub", (x, y), {"field": field})

    def field_mul(self, x: Any, y: Any, field: str | PrimeField = DEFAULT_FIELD) -> Any:
        """Multiply field elements; arguments as for field_add."""
        return self._call("field_mul", (x, y), {"field": field})

    def field_inv(self, x: Any, field: str | PrimeField = DEFAULT_FIELD) -> Any:
        """Invert nonzero field elements; arguments as for field_add."""
        return self._call("field_inv", (x,), {"field": field})

    def ntt(
        self, x: Any, field: str | PrimeField = DEFAULT_FIELD, *, inverse: bool = False, coset: int | None = None,
        order: str = "natural",
    ) -> Any:  # fmt: skip
        """Apply the number-theoretic transform along the last axis of elements; see accelerant.zk.ntt.

        Takes words or integers of the named field. A coset that is no integer raises ConfigError.
        """
        if coset is not None and not isinstance(coset, int):
            raise ConfigError(
                f"coset must be a Python integer here, got {type(coset).__name__}: zk.ntt takes words too"
            )
        return self._call("ntt", (x,), {"field": field, "inverse": inverse, "coset": coset, "order": order})

    @either_order("scalars", "points", lambda *_, curve=DEFAULT_CURVE, **__: curve_named(curve).parameters, own=1)
    def msm(self, scalars: Any, points: Any, curve: str = DEFAULT_CURVE, *, check: bool | str = "curve") -> Any:
        """Sum scalars[i] points[i], arguments as accelerant.zk.msm takes them; the result is of the scalars' kind."""
        return self._call("msm", (scalars, points), {"curve": curve, "check": check})


def _add_op(op: PublicOp) -> None:
    """Make an operation of a public op; one without an entry in METHODS is never merged with other calls."""
    if op.name not in METHODS:
        sample = op.cases.SAMPLES[0]
        METHODS[op.name] = _op(op.name, 1, lambda n: sample.arguments, options=sample.options)
    setattr(Operations, op.name, _op_method(op.name))


watch(_add_op)


def dtypes_of(name: str, arrays: tuple[Any, ...]) -> list[torch.dtype | None]:
    """Return the dtypes of a call's tensors, None where torch lacks it; plain numbers follow the first floating one."""
    own = [getattr(torch, str(x.dtype).removeprefix("torch."), None) if hasattr(x, "dtype") else None for x in arrays]
    dtypes = [dtype if isinstance(dtype, torch.dtype) else None for dtype in own]
    usual = next((dtype for dtype in dtypes if dtype is not None and dtype.is_floating_point), torch.float32)
    integers = METHODS[name].integers
    return [
        dtype if hasattr(x, "dtype") else integers.get(i, usual)
        for i, (x, dtype) in enumerate(zip(arrays, dtypes, strict=True))
    ]


def metas_of(name: str, arrays: tuple[Any, ...]) -> Tensors:
    """Return tensors without memory of the shapes and dtypes that a call has on the device."""
    dtypes = [dtype or torch.uint8 for dtype in dtypes_of(name, arrays)]
    return tuple(
        torch.empty(tuple(np.shape(x)), dtype=dtype, device="meta") for x, dtype in zip(arrays, dtypes, strict=True)
    )


def sizes_of(name: str, arrays: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[int, int]:
    """Return the bytes of a call's inputs on the device and of its result, computed from the inputs' shapes."""
    inputs: list[int] = []
    try:
        metas = metas_of(name, arrays)
        inputs += [x.nbytes for x in metas]
        if METHODS[name].is_op:
            return sum(inputs), sum(x.nbytes for x in tensors_of(METHODS[name].run(*metas, **options)))
        shapes = [x.shape for x in metas]
        shape = shapes[-1][1:] if name == "msm" else np.broadcast_shapes(*shapes) if name != "ntt" else shapes[0]
        return sum(inputs), math.prod(shape) * max(x.itemsize for x in metas)
    except Exception:  # noqa: BLE001 - a call that the operation refuses, with its own words, when it runs
        return sum(inputs), max(inputs, default=0)


_SMALL_SCRATCH_BYTES = 1 << 16  # scratch up to this size does not count
_SCRATCH_LIMIT = 4096  # kinds of call whose scratch is remembered

_scratch: dict[tuple[Any, ...], int] = {}


def scratch_of(name: str, metas: Tensors, options: Mapping[str, Any], device: ComputeDevice) -> int:
    """Return the bytes that a call allocates besides its result, predicted from shapes; 0 if that is not known."""
    if not METHODS[name].scratch:
        return 0
    shapes = tuple((tuple(x.shape), x.dtype) for x in metas)
    key = (name, shapes, str(sorted(options.items())), device.backend, device.index)
    if key not in _scratch:
        if len(_scratch) >= _SCRATCH_LIMIT:
            _scratch.clear()
        try:
            size = _predict_scratch(name, metas, options, device)
        except AccelerantError:  # no prediction, or a call that the operation refuses, with its own words
            size = 0
        _scratch[key] = size if size > _SMALL_SCRATCH_BYTES else 0
    return _scratch[key]


def _predict_scratch(name: str, metas: Tensors, options: Mapping[str, Any], device: ComputeDevice) -> int:
    if name == "msm":
        points = metas[1].shape[0] if metas[1].ndim else 0
        return msm_scratch_bytes(options.get("curve", DEFAULT_CURVE), points, device)
    if name == "ntt":
        parameters = prime_field(options.get("field", DEFAULT_FIELD)).parameters
        shape = element_shape(parameters, tuple(metas[0].shape))
        return ntt_scratch_bytes(space_at(device), parameters, shape, options.get("order", "natural"))
    where = torch.device(device.torch_device)
    run = functools.partial(METHODS[name].run, **options)

    def inputs(_: object) -> Tensors:
        return tuple(torch.empty(x.shape, dtype=x.dtype, device=where) for x in metas)

    predicted = predict_step(ModelStep(run, None, False), inputs, where)
    kept = 0 if name == "conv2d" else predicted.workspace  # cuBLAS's, which the process keeps
    return predicted.total - kept - predicted.inputs - sum(x.nbytes for x in tensors_of(run(*metas)))


_MOST_S, _LEAST = 2.0, 3  # seconds after which a slow call is not repeated, once it has run a few times
_LEAST_SAMPLES = {95: 20, 99: 100}  # samples without which a percentile would be the slowest call, whatever its share


@dataclass(frozen=True, slots=True)
class OpTiming:
    """One implementation on the given arrays; "whole call" includes the copies of arrays to the device and back.

    `own`: it is a kernel of Accelerant; `chosen`: a call of the operation runs it. Percentiles are of the calls, in
    milliseconds: None where it did not run, p95 of fewer than 20 calls, p99 of fewer than 100. `first_ms` is the first
    call in this process. `note` says why it is chosen, or did not run.
    """

    name: str
    own: bool = False
    chosen: bool = False
    p50_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    first_ms: float | None = None
    calls: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class OpBenchmark(JsonRecord):
    """The times of an operation on the user's arrays; prints as a table.

    `timings` has the chosen implementation, the others that serve the arrays or refuse them, and the whole call.
    """

    op: str
    case: str
    device: str
    timings: tuple[OpTiming, ...]
    size_bytes: int
    flops: int

    def __str__(self) -> str:
        unit = "GFLOP/s" if METHODS[self.op].is_op else "GOp/s"
        rows: list[tuple[str, ...]] = [
            ("", "implementation", "p50 ms", "p95 ms", "p99 ms", "first call ms", "GB/s", unit, "note")
        ]
        for one in self.timings:
            kind = "" if one.name == "whole call" else " (own)" if one.own else " (library)"
            rate = 1e6 * one.p50_ms if one.p50_ms else None
            rates = [plain(amount / rate) if amount and rate else "-" for amount in (self.size_bytes, self.flops)]
            times = map(plain, (one.p50_ms, one.p95_ms, one.p99_ms, one.first_ms))
            rows.append(("*" if one.chosen else "", one.name + kind, *times, *rates, one.note))
        return "\n".join([f"{self.op}  {self.case}  on {self.device}", *text_table(rows, numbers=rows[0][2:8])])

    __repr__ = __str__


class _Recorder(Operations):
    """Takes the call of a method apart, without running it."""

    def _call(self, name: str, arrays: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return name, arrays, options


def named_call(
    op: object, arrays: Sequence[Any], options: dict[str, Any]
) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Return name, arrays and options of a call; ConfigError for an unknown operation, TypeError for arguments."""
    name = op if isinstance(op, str) else getattr(op, "__name__", "")
    if name not in METHODS:
        raise ConfigError(f"benchmark: no operation {clipped(op)}; there are {', '.join(METHODS)}")
    found: tuple[str, tuple[Any, ...], dict[str, Any]] = getattr(_Recorder(), name)(*arrays, **options)
    return found


def sample_ms(call: Callable[[], object], wait: Callable[[], object], iterations: int) -> list[float]:
    """Return the sorted milliseconds of calls, each from an idle device to an idle device."""
    samples: list[float] = []
    until = time.perf_counter() + _MOST_S
    while len(samples) < iterations and (len(samples) < _LEAST or time.perf_counter() < until):
        wait()
        began = time.perf_counter()
        call()
        wait()
        samples.append((time.perf_counter() - began) * 1e3)
    return sorted(samples)


def _timing(
    name: str, call: Callable[[], object], wait: Callable[[], object], iterations: int, **more: Any
) -> OpTiming:
    if (first := more.pop("first_ms", None)) is None:
        (first,) = sample_ms(call, wait, 1)
    samples = sample_ms(call, wait, iterations)
    p95, p99 = (quantile(samples, q / 100) if len(samples) >= least else None for q, least in _LEAST_SAMPLES.items())
    return OpTiming(
        name, p50_ms=quantile(samples, 0.5), p95_ms=p95, p99_ms=p99, first_ms=first, calls=len(samples), **more
    )


def time_implementations(
    name: str, run: Callable[[], object], whole: Callable[[], object], wait: Callable[[], object], iterations: int,
    backend: str,
) -> tuple[OpTiming, ...]:  # fmt: skip
    """Time a call by the chosen implementation, by each other one that takes it, and with its arrays' copies."""
    with torch.no_grad():
        explained = explain_quietly(run)
        decision = next((one for one in explained.decisions if one.op.startswith(name)), None)
        chosen = decision.implementation if decision is not None else backend
        own, why = (decision.own, decision.reason) if decision is not None else (True, "the only one")
        settled = {"own": own, "chosen": True, "first_ms": explained.total_ms, "note": why}
        timings = [_timing(chosen, run, wait, iterations, **settled)]
        if decision is not None and decision.op in operations():
            timings += _others(decision, run, wait, iterations)
        return (*timings, _timing("whole call", whole, wait, iterations, note="with copies to and from the device"))


def _others(
    decision: Decision, run: Callable[[], object], wait: Callable[[], object], iterations: int
) -> list[OpTiming]:
    refused, timings = dict(decision.refused), []
    for other in operations()[decision.op].implementations:
        if other.name == decision.implementation:
            continue
        try:
            with force(**{decision.op: other.name}):
                timings.append(_timing(other.name, run, wait, iterations, own=other.own))
        except AccelerantError as error:  # it serves other calls
            reason = refused.get(other.name) or str(error).rpartition(": ")[2]
            timings.append(OpTiming(other.name, other.own, note=reason.splitlines()[0]))
    return timings
