"""The operations that the service offers: inputs, parameters, checks, estimates, and the library's call.

The server process uses everything but `run`, and imports neither torch nor a driver for it; workers call `run`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from accelerant.algebra.curve.parameters import CURVES, curve_of
from accelerant.algebra.field import words as field_words
from accelerant.algebra.field.parameters import FIELDS, field_of
from accelerant.errors import FormatError, ShapeError
from accelerant.service.settings import ServiceSettings

if TYPE_CHECKING:
    from accelerant.accelerator import Accelerator
    from accelerant.service.jobs.worker import Context

__all__ = ["OPERATIONS", "SCOPES", "Parameters", "ServedOperation", "TensorSpec", "served"]

Arrays = Mapping[str, npt.NDArray[Any]]
Results = dict[str, npt.NDArray[Any]]

SCOPES = ("field", "zk", "neural", "generate", "privacy", "train", "monitor", "admin")
"""What an API key may allow: a group of operations, the metrics, or (admin) everything, with the jobs of all keys."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output: KServe's names of its dtypes, and its shape, with -1 for any size and one -1 for any shape.

    BYTES, a text or a file, is one array of uint8 in a process.
    """

    name: str
    datatypes: tuple[str, ...]
    shape: tuple[int, ...] = (-1,)
    optional: bool = False


class Parameters(BaseModel):
    """Parameters of an operation; unknown ones are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _sizes(inputs: Arrays, parameters: Any) -> int:
    return sum(x.nbytes for x in inputs.values())


def _dumped(parameters: Parameters) -> dict[str, Any]:
    return parameters.model_dump(mode="json")


@dataclass(frozen=True, slots=True)
class ServedOperation:
    """An operation of the service.

    Attributes:
        name: also that of its model in KServe's protocol.
        summary: one line.
        scope: which API keys may call it, one of SCOPES.
        inputs, outputs: tensors.
        parameters: model that validates the parameters.
        run: computes the outputs, in a worker.
        check: raises an AccelerantError for inputs that `run` would refuse, in the server.
        cost: rough seconds.
        result_bytes: size of the outputs.
        place: the parameters as JSON values for the worker, with what the settings say of them, such as folders.
        elementwise: whether calls with equal parameters, whose inputs all have one shape but for the first axis, may be
            joined along this axis and run as one.
        resumable: whether a job that was interrupted may go on from what it left in its folder.
    """

    name: str
    summary: str
    scope: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    parameters: type[Parameters]
    run: Callable[[Arrays, Any, Context], Results]
    check: Callable[[Arrays, Any], None]
    cost: Callable[[Arrays, Any], float]
    result_bytes: Callable[[Arrays, Any], int] = _sizes
    place: Callable[[Any], dict[str, Any]] = _dumped
    elementwise: bool = False
    resumable: bool = False


@functools.lru_cache(maxsize=16)
def _accelerator(device: str) -> Accelerator:
    from accelerant.accelerator import Accelerator

    return Accelerator(device)


# --- fields, transforms, curves --------------------------------------------------------------------------------------

_WORDS = ("UINT64", "UINT32")
_FIELD_NAME = Field(pattern=f"^({'|'.join(FIELDS)})$")
_CURVE_NAME = Field(pattern=f"^({'|'.join(CURVES)})$")


class FieldParameters(Parameters):
    """The field of the elements."""

    field: Annotated[str, _FIELD_NAME] = "goldilocks"


class TransformParameters(FieldParameters):
    """Options of zk.ntt."""

    inverse: bool = False
    coset: Annotated[int, Field(ge=1, lt=2**64)] | None = None
    order: Literal["natural", "natural_to_bit_reversed", "bit_reversed_to_natural"] = "natural"


class SumParameters(Parameters):
    """Options of zk.msm."""

    curve: Annotated[str, _CURVE_NAME] = "bn254_g1"
    check: Literal["curve", "subgroup"] = "curve"


def _elements(x: npt.NDArray[Any], field: str, name: str, *, nonzero: bool = False) -> tuple[int, ...]:
    """Check that an array holds reduced elements; return their shape."""
    parameters = field_of(field)
    field_words.check_words(parameters, x.dtype.name, x.shape, name)
    rows = x.reshape(-1, parameters.limbs)
    wrong = field_words.not_below(parameters, rows) if len(rows) else np.zeros(0, np.bool_)
    if wrong.any():
        raise FormatError(f"{name}[{int(wrong.argmax())}] (flattened) is not below the modulus of {field}")
    if nonzero and len(rows) and not (zero := rows.any(axis=1)).all():
        raise FormatError(f"{name}[{int(zero.argmin())}] (flattened) is 0, which has no inverse")
    return field_words.element_shape(parameters, x.shape)


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise ShapeError(f"shapes {' and '.join(map(str, shapes))} do not broadcast") from None


def _field_operation(name: str, summary: str, names: tuple[str, ...]) -> ServedOperation:
    def run(inputs: Arrays, parameters: FieldParameters, context: Context) -> Results:
        call = getattr(_accelerator(context.device), name)
        return {"z": np.asarray(call(*(inputs[x] for x in names), field=parameters.field))}

    def check(inputs: Arrays, parameters: FieldParameters) -> None:
        _broadcast(*(_elements(inputs[x], parameters.field, x, nonzero=name == "field_inv") for x in names))

    def result_bytes(inputs: Arrays, parameters: FieldParameters) -> int:
        shape = _broadcast(*(inputs[x].shape for x in names))
        return math.prod(shape) * inputs["x"].itemsize

    return ServedOperation(
        name, summary, "field", tuple(TensorSpec(x, _WORDS) for x in names), (TensorSpec("z", _WORDS),),
        FieldParameters, run, check, lambda inputs, parameters: result_bytes(inputs, parameters) / 1e9, result_bytes,
        elementwise=True,
    )  # fmt: skip


def _ntt() -> ServedOperation:
    def run(inputs: Arrays, parameters: TransformParameters, context: Context) -> Results:
        return {"y": np.asarray(_accelerator(context.device).ntt(inputs["x"], **parameters.model_dump()))}

    def check(inputs: Arrays, parameters: TransformParameters) -> None:
        shape = _elements(inputs["x"], parameters.field, "x")
        n, most = shape[-1] if shape else 0, min(27, field_of(parameters.field).two_adicity)
        if n < 2 or n & (n - 1) or n > 1 << most:
            raise ShapeError(f"the last axis of x must have 2^k points, k from 1 to {most}, got shape {shape}")

    spec = (TensorSpec("x", _WORDS),), (TensorSpec("y", _WORDS),)
    summary = "Number-theoretic transform along the last axis of elements"
    cost = lambda inputs, _: inputs["x"].nbytes * max(1, inputs["x"].size.bit_length()) / 2e9  # noqa: E731
    return ServedOperation("ntt", summary, "zk", *spec, TransformParameters, run, check, cost)


def _msm() -> ServedOperation:
    def run(inputs: Arrays, parameters: SumParameters, context: Context) -> Results:
        call = _accelerator(context.device).msm
        return {"sum": np.asarray(call(inputs["scalars"], inputs["points"], **parameters.model_dump()))}

    def check(inputs: Arrays, parameters: SumParameters) -> None:
        scalars, points, curve = inputs["scalars"], inputs["points"], curve_of(parameters.curve)
        wanted = curve.shape
        if points.dtype != np.uint64 or points.ndim < 2 or points.shape[1:] != wanted:
            raise ShapeError(f"points must be uint64 of shape (n, {', '.join(map(str, wanted))}), got {points.shape}")
        if scalars.dtype != np.uint64 or scalars.ndim not in (2, 3) or scalars.shape[-2:] != (len(points), 4):
            raise ShapeError(f"scalars must be uint64 of shape ({len(points)}, 4), got {scalars.shape}")

    def cost(inputs: Arrays, parameters: SumParameters) -> float:
        return inputs["scalars"].nbytes / 32 * 4e-6 * (5 if parameters.check == "subgroup" else 1)

    def result_bytes(inputs: Arrays, parameters: SumParameters) -> int:
        sums = len(inputs["scalars"]) if inputs["scalars"].ndim == 3 else 1
        return sums * 8 * math.prod(inputs["points"].shape[1:])

    return ServedOperation(
        "msm", "Sum of scalars[i] points[i] on a curve", "zk",
        (TensorSpec("scalars", ("UINT64",), (-1, 4)), TensorSpec("points", ("UINT64",), (-1, 2, -1))),
        (TensorSpec("sum", ("UINT64",), (2, -1)),), SumParameters, run, check, cost, result_bytes,
    )  # fmt: skip


_FIRST = (
    _field_operation("field_add", "Sums of field elements", ("x", "y")),
    _field_operation("field_sub", "Differences of field elements", ("x", "y")),
    _field_operation("field_mul", "Products of field elements", ("x", "y")),
    _field_operation("field_inv", "Inverses of nonzero field elements", ("x",)),
    _ntt(),
    _msm(),
)

OPERATIONS: dict[str, ServedOperation] = {operation.name: operation for operation in _FIRST}
"""The operations that need nothing of the settings."""


def served(settings: ServiceSettings) -> dict[str, ServedOperation]:
    """Return the operations of a service by name."""
    return OPERATIONS
