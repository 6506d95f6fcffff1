"""The operations that the service offers: inputs, parameters, checks, estimates, and the library's call.

The server process uses everything but `run`, and imports neither torch nor a driver for it; workers call `run`. Other
packages add operations by an entry point of the group "accelerant.operations" (`NAME = "module:SPEC"`, an OpSpec).
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import math
import os
import secrets
import signal
import tempfile
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, create_model, field_validator

from accelerant import zk
from accelerant.algebra.curve.parameters import CURVES, curve_of
from accelerant.algebra.field import words as field_words
from accelerant.algebra.field.parameters import FIELDS, field_of
from accelerant.config import override, similar
from accelerant.errors import AccelerantError, ConfigError, FormatError, RangeError, ShapeError
from accelerant.runtime.files import clipped, decode_json
from accelerant.service.settings import ServiceSettings

if TYPE_CHECKING:
    from accelerant.accelerator import Accelerator
    from accelerant.ops.registry import PublicOp
    from accelerant.service.jobs.worker import Context

Arrays = Mapping[str, npt.NDArray[Any]]
Results = dict[str, npt.NDArray[Any]]

SCOPES = ("field", "zk", "neural", "generate", "search", "privacy", "train", "monitor", "admin")
"""What an API key may allow: a group of operations, the metrics, or (admin) everything, with the jobs of all keys."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output: KServe's dtypes, and a shape with -1 for any size or shape; BYTES is uint8 here."""

    name: str
    datatypes: tuple[str, ...]
    shape: tuple[int, ...] = (-1,)
    optional: bool = False


class Parameters(BaseModel):
    """Parameters of an operation; unknown ones are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    @functools.cache
    def names(cls) -> dict[str, str]:
        """Return the name of each parameter, by the names that are understood for it."""
        found: dict[str, str] = {}
        for name, declared in cls.model_fields.items():
            alias = declared.validation_alias
            found |= dict.fromkeys(map(str, alias.choices) if isinstance(alias, AliasChoices) else (name,), name)
        return found


def _sizes(inputs: Arrays, parameters: Any) -> int:
    return sum(x.nbytes for x in inputs.values())


@dataclass(frozen=True, slots=True)
class OpSpec:
    """An operation of the service, and the type of its jobs; its name is also that of its model in KServe's protocol.

    Attributes:
        scope: which API keys may call it, one of SCOPES.
        parameters: model that validates the parameters.
        run: computes the outputs, in a worker.
        cost: rough seconds.
        check: raises an AccelerantError, in the server, for inputs that `run` would refuse.
        result_bytes: size of the outputs; by default that of the inputs.
        place: returns what the settings add to the parameters for the worker, named by `placed`: a model's folder.
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
    cost: Callable[[Arrays, Any], float]
    check: Callable[[Arrays, Any], None] = lambda inputs, parameters: None
    result_bytes: Callable[[Arrays, Any], int] = _sizes
    place: Callable[[Any, ServiceSettings], dict[str, Any]] = lambda parameters, settings: {}
    placed: tuple[str, ...] = ()
    elementwise: bool = False
    resumable: bool = False


OPERATIONS: dict[str, OpSpec] = {}
"""The operations by name."""

_Run = TypeVar("_Run", bound=Callable[..., Results])


def _operation(
    scope: str, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], cost: Callable[[Arrays, Any], float],
    **more: Any,
) -> Callable[[_Run], _Run]:  # fmt: skip
    """Add an operation whose name, summary and parameters are those of the decorated function."""

    def add(run: _Run) -> _Run:
        parameters = typing.get_type_hints(run, localns={"Context": Any})["parameters"]
        summary = (run.__doc__ or "").removesuffix(".")
        OPERATIONS[run.__name__] = OpSpec(run.__name__, summary, scope, inputs, outputs, parameters, run, cost, **more)
        return run

    return add


@functools.lru_cache(maxsize=16)
def accelerator_on(device: str) -> Accelerator:
    """Return a worker's Accelerator of a device."""
    from accelerant.accelerator import Accelerator

    return Accelerator(device)


def _integers(device: str, name: str, *arrays: npt.NDArray[Any], **options: Any) -> npt.NDArray[Any]:
    """Run an operation on integers; on the CPU without an Accelerator, whose import of torch takes seconds."""
    if device != "cpu":
        call = getattr(accelerator_on(device), name)
    elif name in ("ntt", "msm"):
        call = getattr(zk, name)
    else:
        call = getattr(zk.field(options.pop("field")), name.removeprefix("field_"))
    return np.asarray(call(*arrays, **options))


def warm(device: str) -> None:
    """Load in a worker what its first call of a field would wait for."""
    x = np.ones(1, np.uint64)
    _integers(device, "field_mul", x, x, field="goldilocks")


# --- fields, transforms, curves --------------------------------------------------------------------------------------
_FIELD_NAME = Field(pattern=f"^({'|'.join(FIELDS)})$")
_CURVE_NAME = Field(pattern=f"^({'|'.join(CURVES)})$")


def _words(*names: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, ("UINT64", "UINT32")) for name in names)


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
    limbs = field_words.tail_of(parameters)  # names of dtypes cost 10 us each
    if x.dtype != field_words.dtype_of(parameters) or (limbs and x.shape[-1:] != limbs):
        field_words.check_words(parameters, x.dtype.name, x.shape, name)
    rows = x.reshape(-1, parameters.limbs)
    if (wrong := field_words.not_below(rows, parameters.modulus)).size:
        raise FormatError(f"{name}[{wrong[0]}] (flattened) is not below the modulus of {field}")
    if nonzero and len(rows) and not (zero := rows.any(axis=1)).all():
        raise FormatError(f"{name}[{int(zero.argmin())}] (flattened) is 0, which has no inverse")
    return field_words.element_shape(parameters, x.shape)


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(shapes)) == 1:
        return shapes[0]
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise ShapeError(f"shapes {' and '.join(map(str, shapes))} do not broadcast") from None


def _field_operation(name: str, summary: str, *names: str) -> None:
    def run(inputs: Arrays, parameters: FieldParameters, context: Context) -> Results:
        return {"z": _integers(context.device, name, *(inputs[x] for x in names), field=parameters.field)}

    def check(inputs: Arrays, parameters: FieldParameters) -> None:
        _broadcast(*(_elements(inputs[x], parameters.field, x, nonzero=name == "field_inv") for x in names))

    def result_bytes(inputs: Arrays, parameters: FieldParameters) -> int:
        return math.prod(_broadcast(*(inputs[x].shape for x in names))) * inputs["x"].itemsize

    OPERATIONS[name] = OpSpec(
        name, summary, "field", _words(*names), _words("z"), FieldParameters, run,
        lambda inputs, parameters: result_bytes(inputs, parameters) / 1e9, check, result_bytes, elementwise=True,
    )  # fmt: skip


_field_operation("field_add", "Sums of field elements", "x", "y")
_field_operation("field_sub", "Differences of field elements", "x", "y")
_field_operation("field_mul", "Products of field elements", "x", "y")
_field_operation("field_inv", "Inverses of nonzero field elements", "x")


def _check_ntt(inputs: Arrays, parameters: TransformParameters) -> None:
    shape = _elements(inputs["x"], parameters.field, "x")
    n, most = shape[-1] if shape else 0, min(27, field_of(parameters.field).two_adicity)
    if n < 2 or n & (n - 1) or n > 1 << most:
        raise ShapeError(f"the last axis of x must have 2^k points, k from 1 to {most}, got shape {shape}")


@_operation(
    "zk", _words("x"), _words("y"), lambda inputs, _: inputs["x"].nbytes * max(1, inputs["x"].size.bit_length()) / 2e9,
    check=_check_ntt,
)  # fmt: skip
def ntt(inputs: Arrays, parameters: TransformParameters, context: Context) -> Results:
    """Number-theoretic transform along the last axis of elements."""
    return {"y": _integers(context.device, "ntt", inputs["x"], **parameters.model_dump())}


_MOST_SUMS = 4096  # most sums of a call of zk.msm, each of which takes time and a result however few its terms are


def _sums_of(inputs: Arrays) -> int:
    return len(inputs["scalars"]) if inputs["scalars"].ndim == 3 else 1


def _check_msm(inputs: Arrays, parameters: SumParameters) -> None:
    scalars, points, wanted = inputs["scalars"], inputs["points"], curve_of(parameters.curve).shape
    if points.dtype != np.uint64 or points.ndim < 2 or points.shape[1:] != wanted:
        raise ShapeError(f"points must be uint64 of shape (n, {', '.join(map(str, wanted))}), got {points.shape}")
    if scalars.dtype != np.uint64 or scalars.ndim not in (2, 3) or scalars.shape[-2:] != (len(points), 4):
        raise ShapeError(f"scalars must be uint64 of shape ({len(points)}, 4), got {scalars.shape}")
    if _sums_of(inputs) > _MOST_SUMS:
        raise ShapeError(f"scalars may be of at most {_MOST_SUMS:,} sums, got shape {scalars.shape}")


def _msm_cost(inputs: Arrays, parameters: SumParameters) -> float:
    terms_s = inputs["scalars"].nbytes / 32 * 4e-6 * (5 if parameters.check == "subgroup" else 1)
    return _sums_of(inputs) * 1e-3 + terms_s


@_operation(
    "zk", (TensorSpec("scalars", ("UINT64",), (-1, 4)), TensorSpec("points", ("UINT64",), (-1, 2, -1))),
    (TensorSpec("sum", ("UINT64",), (2, -1)),), _msm_cost, check=_check_msm,
    result_bytes=lambda inputs, _: _sums_of(inputs) * 8 * math.prod(inputs["points"].shape[1:]),
)  # fmt: skip
def msm(inputs: Arrays, parameters: SumParameters, context: Context) -> Results:
    """Sum of scalars[i] points[i] on a curve."""
    return {"sum": _integers(context.device, "msm", inputs["scalars"], inputs["points"], **parameters.model_dump())}


# --- proofs ----------------------------------------------------------------------------------------------------------
class NoParameters(Parameters):
    """None."""


def _bytes(*names: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, ("BYTES",), (1,)) for name in names)


def _text(value: str | bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(value.encode() if isinstance(value, str) else value, np.uint8)


def _decoded(text: npt.NDArray[Any], name: str) -> str:
    try:
        return text.tobytes().decode()
    except UnicodeDecodeError:
        raise FormatError(f"{name} is not UTF-8 text") from None


@contextmanager
def _memory_file(inputs: Arrays, name: str) -> Iterator[str]:
    """Yield the path of a file with an input's bytes, in memory where the system can; errors name the input instead."""
    descriptor = os.memfd_create("accelerant") if hasattr(os, "memfd_create") else None
    with tempfile.NamedTemporaryFile() if descriptor is None else open(descriptor, "wb") as file:
        file.write(inputs[name].data)
        file.flush()
        path = file.name if descriptor is None else f"/proc/self/fd/{descriptor}"
        try:
            yield path
        except FormatError as error:
            raise FormatError(str(error).replace(path, name)) from None


@_operation(
    "zk", _bytes("zkey", "witness"), _bytes("proof", "public"), lambda inputs, _: 0.1 + inputs["zkey"].nbytes / 2e7
)
def groth16_prove(inputs: Arrays, parameters: NoParameters, context: Context) -> Results:
    """Groth16 proof from a .zkey and a .wtns file of circom and snarkjs."""
    from accelerant.zk.groth16 import Prover

    with _memory_file(inputs, "zkey") as zkey, _memory_file(inputs, "witness") as witness:
        context.progress(0.0, "reading the key")
        prover = Prover(zkey, device=context.device)
        context.progress(0.3, "proving")
        proof = prover.prove(witness)
    return {"proof": _text(proof.to_json()), "public": _text(proof.public_json())}


@_operation(
    "zk", _bytes("verification_key", "public", "proof"), (TensorSpec("valid", ("BOOL",), (1,)),),
    lambda inputs, parameters: 0.05 + 1e-7 * _sizes(inputs, parameters),
)  # fmt: skip
def groth16_verify(inputs: Arrays, parameters: NoParameters, context: Context) -> Results:
    """Validity of a Groth16 proof, from snarkjs's JSON files."""
    from accelerant.zk.groth16 import Proof, VerificationKey, verify

    key, public, text = (inputs[name].tobytes() for name in ("verification_key", "public", "proof"))
    trusted = VerificationKey.from_json(key)
    proof = Proof.from_json(text, public, n_public=trusted.n_public)
    return {"valid": np.array([verify(trusted, proof.public or (), proof)])}


def _check_inference(inputs: Arrays, parameters: NoParameters) -> None:
    from accelerant.zk.inference.proofs import require_memory

    require_memory(*_inference_sizes(inputs))


def _inference_sizes(inputs: Arrays) -> tuple[Any, int]:
    """Return the public part of a network and the batch size, which are checked."""
    from accelerant.zk.inference.proofs import checked_input, read_public

    network, _ = read_public(inputs["network"].tobytes())
    return network, len(checked_input(network, inputs["x"]))


def _predicted_inference(inputs: Arrays) -> tuple[float, int]:
    from accelerant.zk.inference.proofs import prediction

    return prediction(*_inference_sizes(inputs))


@_operation(
    "zk", (*_bytes("network"), TensorSpec("x", ("INT8",))),
    (TensorSpec("y", ("INT8",)), *_bytes("proof", "commitment")),
    lambda inputs, _: _predicted_inference(inputs)[0], check=_check_inference,
    result_bytes=lambda inputs, _: _predicted_inference(inputs)[1],
)  # fmt: skip
def prove_inference(inputs: Arrays, parameters: NoParameters, context: Context) -> Results:
    """Output of a network of 8-bit integers for x, with the proof of it and the commitment to the network."""
    from accelerant.zk.inference import IntegerNetwork, Prover

    network = IntegerNetwork.from_bytes(inputs["network"].tobytes())
    context.progress(0.0, "committing to the weights")
    prover = Prover(network)
    context.progress(0.8, "proving")
    y, proof = prover.prove(inputs["x"])
    return {"y": y, "proof": _text(proof), "commitment": _text(prover.commitment.to_bytes())}


# --- neural operations -----------------------------------------------------------------------------------------------
_FLOATS = ("FP32", "FP16", "FP64")
_CPU_FLOPS_S = 2e10
_CPU_ELEMENTS_S = 1e8


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ShapeError(message)


def _check_softmax(inputs: Arrays, parameters: Any) -> None:
    n = inputs["x"].ndim
    _require(-n <= parameters.dim < n, f"dim {parameters.dim} is no axis of x of shape {inputs['x'].shape}")


def _check_norm(inputs: Arrays, parameters: Any) -> None:
    x = inputs["x"]
    _require(x.ndim > 0, "x must have an axis")
    for name in ("weight", "bias"):
        if name in inputs:
            _require(inputs[name].shape == x.shape[-1:], f"{name} must be {x.shape[-1:]}, got {inputs[name].shape}")


def _check_matmul(inputs: Arrays, parameters: NoParameters) -> None:
    a, b = inputs["a"], inputs["b"]
    fits = a.ndim >= 2 and b.ndim >= 2 and a.shape[-1] == b.shape[-2] and a.dtype == b.dtype
    _require(fits, f"a (..., M, K) and b (..., K, N) must fit, and have one dtype; got {a.shape} and {b.shape}")
    _broadcast(a.shape[:-2], b.shape[:-2])


def _matmul_bytes(inputs: Arrays, parameters: NoParameters) -> int:
    a, b = inputs["a"], inputs["b"]
    size: int = math.prod(_broadcast(a.shape[:-2], b.shape[:-2])) * a.shape[-2] * b.shape[-1] * a.itemsize
    return size


def _matmul_cost(inputs: Arrays, parameters: NoParameters) -> float:
    a = inputs["a"]
    operations: float = 2.0 * (_matmul_bytes(inputs, parameters) // a.itemsize) * a.shape[-1]
    return operations / _CPU_FLOPS_S


def _check_attention(inputs: Arrays, parameters: Any) -> None:
    q, k, v = (inputs[name] for name in "qkv")
    good = q.ndim == k.ndim == 4 and k.shape == v.shape and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    good = good and k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0 and q.dtype == k.dtype == v.dtype
    shapes = f"{q.shape}, {k.shape}, {v.shape}"
    _require(good, f"q (B, Hq, S, D), k and v (B, Hkv, T, D) must fit, Hkv divide Hq, and dtypes agree; got {shapes}")


def _attention_cost(inputs: Arrays, parameters: Any) -> float:
    q, k = inputs["q"], inputs["k"]
    return 4.0 * float(q.size * k.shape[2]) / _CPU_FLOPS_S


def _neural(
    name: str, summary: str, inputs: Sequence[str], options: dict[str, Any],
    cost: Callable[[Arrays, Any], float] | None = None, *, optional: Sequence[str] = (), **more: Any,
) -> None:  # fmt: skip
    """Add an operation whose inputs are the op's tensors, in order, its parameters the op's options."""

    def run(given: Arrays, parameters: Any, context: Context) -> Results:
        tensors = [given.get(each) for each in inputs]
        return {"y": np.asarray(getattr(accelerator_on(context.device), name)(*tensors, **parameters.model_dump()))}

    first, parameters = inputs[0], create_model(f"{name}_parameters", __base__=Parameters, **options)
    OPERATIONS[name] = OpSpec(
        name, summary, "neural", tuple(TensorSpec(each, _FLOATS, optional=each in optional) for each in inputs),
        (TensorSpec("y", _FLOATS),), parameters, run, cost or (lambda given, _: given[first].size / _CPU_ELEMENTS_S),
        **{"result_bytes": lambda given, _: given[first].nbytes, **more},
    )  # fmt: skip


_neural(
    "gelu", "Gaussian error linear unit", ["x"], {"approximate": (Literal["none", "tanh"], "none")}, elementwise=True
)
_neural(
    "softmax", "Softmax along an axis", ["x"], {"dim": (Annotated[int, Field(ge=-8, lt=8)], -1)}, check=_check_softmax
)
_neural(
    "layer_norm", "Layer normalization of rows", ["x", "weight", "bias"],
    {"eps": (Annotated[float, Field(gt=0, lt=1)], 1e-5)}, check=_check_norm, optional=("weight", "bias"),
)  # fmt: skip
_neural(
    "matmul", "Product of matrices", ["a", "b"], {}, _matmul_cost, check=_check_matmul,
    result_bytes=_matmul_bytes,
)  # fmt: skip
_neural(
    "attention", "Scaled dot-product attention, also with fewer heads of keys", ["q", "k", "v"],
    {
        "causal": (Annotated[bool, Field(validation_alias=AliasChoices("causal", "is_causal"))], False),
        "scale": (Annotated[float, Field(gt=0, allow_inf_nan=False)] | None, None),
    },
    _attention_cost, check=_check_attention,
)  # fmt: skip


# --- private computing -----------------------------------------------------------------------------------------------
_NUMBERS = ("FP64", "FP32", "FP16", "INT64", "INT32", "INT16", "INT8", "UINT8")


class EncryptParameters(Parameters):
    """Options of PublicKey.encrypt."""

    exponent: Annotated[int, Field(ge=-256, le=256)] | None = None
    limit: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    pack: bool = False


class EpsilonParameters(Parameters):
    """Steps of DP-SGD with Poisson sampling, one record added or removed."""

    noise_multiplier: Annotated[
        float, Field(ge=0, allow_inf_nan=False, validation_alias=AliasChoices("noise_multiplier", "sigma"))
    ]
    sample_rate: Annotated[float, Field(gt=0, le=1, validation_alias=AliasChoices("sample_rate", "q"))]
    steps: Annotated[int, Field(ge=1, le=10**9)]
    delta: Annotated[float, Field(gt=0, lt=1)]
    method: Literal["pld", "rdp"] = "pld"


@_operation(
    "privacy", (*_bytes("public_key"), TensorSpec("x", _NUMBERS)), _bytes("ciphertext"),
    lambda inputs, _: 0.01 + inputs["x"].size * 0.01, result_bytes=lambda inputs, _: 4096 + 2048 * inputs["x"].size,
)  # fmt: skip
def paillier_encrypt(inputs: Arrays, parameters: EncryptParameters, context: Context) -> Results:
    """Encrypt numbers with a Paillier public key (PublicKey.to_bytes)."""
    from accelerant.privacy.he.paillier import PublicKey

    key = PublicKey.from_bytes(inputs["public_key"].tobytes())
    found = key.encrypt(inputs["x"], device=context.device, **parameters.model_dump())
    return {"ciphertext": _text(found.to_bytes())}


@_operation(
    "privacy", _bytes("public_key", "a", "b"), _bytes("ciphertext"), lambda inputs, _: 0.01 + inputs["a"].nbytes * 2e-6
)
def paillier_add(inputs: Arrays, parameters: NoParameters, context: Context) -> Results:
    """Sum of two encrypted arrays (EncryptedTensor.to_bytes)."""
    from accelerant.privacy.he.paillier import EncryptedTensor, PublicKey

    key = PublicKey.from_bytes(inputs["public_key"].tobytes())
    a, b = (EncryptedTensor.from_bytes(inputs[name].tobytes(), key, device=context.device) for name in "ab")
    return {"ciphertext": _text((a + b).to_bytes())}


@_operation(
    "privacy", _bytes("private_key", "passphrase", "ciphertext"), (TensorSpec("x", _NUMBERS),),
    lambda inputs, _: 0.3 + inputs["ciphertext"].nbytes * 1e-5,
)  # fmt: skip
def paillier_decrypt(inputs: Arrays, parameters: NoParameters, context: Context) -> Results:
    """Decrypt with a private key (PrivateKey.to_bytes) and its passphrase."""
    from accelerant.privacy.he.paillier import EncryptedTensor, PrivateKey

    key = PrivateKey.from_bytes(inputs["private_key"].tobytes(), _decoded(inputs["passphrase"], "the passphrase"))
    found = EncryptedTensor.from_bytes(inputs["ciphertext"].tobytes(), key.public, device=context.device)
    return {"x": np.asarray(key.decrypt(found))}


@_operation("privacy", (), (TensorSpec("epsilon", ("FP64",), (1,)),), lambda inputs, _: 0.3)
def privacy_epsilon(inputs: Arrays, parameters: EpsilonParameters, context: Context) -> Results:
    """Epsilon of steps of DP-SGD."""
    from accelerant.privacy.dp.ledger.accounting import PrivacyEvent, spent

    steps = PrivacyEvent("gaussian", parameters.noise_multiplier, "poisson", parameters.sample_rate, parameters.steps)
    return {"epsilon": np.array([spent([steps], parameters.delta, method=parameters.method).epsilon])}


# --- models ----------------------------------------------------------------------------------------------------------
class GenerateParameters(Parameters):
    """The model, by its name in the service's settings, and how tokens are drawn."""

    model: Annotated[str, Field(max_length=200)]
    tokens: Annotated[int, Field(ge=1, le=1 << 16, validation_alias=AliasChoices("tokens", "max_tokens"))] = 200
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.8
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 50
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None


class TrainParameters(Parameters):
    """The training of a small language model: a preset, data by their name in the settings, and changes of the preset.

    Without data it reads the input `text`, and without that Python's standard library.
    """

    preset: Annotated[str, Field(max_length=80)] = "tiny"
    data: Annotated[str, Field(max_length=200)] | None = None
    steps: Annotated[int, Field(ge=1, le=10**7)] | None = None
    batch_size: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    learning_rate: Annotated[
        Annotated[float, Field(gt=0, le=10)] | None, Field(validation_alias=AliasChoices("learning_rate", "lr"))
    ] = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None


@functools.lru_cache(maxsize=2)
def _model(folder: str, device: str) -> Any:
    import torch

    from accelerant.nn.models.tokenizer import load_text_model

    return load_text_model(Path(folder), torch.device(device))


def _named(table: Mapping[str, Any], name: str, what: str) -> str:
    """Return the place that the settings give a name of a table; ConfigError if they have none."""
    if name not in table:
        known = ", ".join(table) or f"none: the service's setting `{'models' if what == 'model' else what}` names them"
        raise ConfigError(f"{what}: there is no {clipped(name)} here; there are {known}")
    return str(table[name])


@_operation(
    "generate", (TensorSpec("prompt", ("BYTES",), (1,), optional=True),),
    (*_bytes("text"), TensorSpec("seed", ("INT64",), (1,))), lambda inputs, parameters: 0.02 * parameters.tokens,
    result_bytes=lambda inputs, parameters: 64 * parameters.tokens, placed=("folder",),
    place=lambda parameters, settings: {"folder": _named(settings.models, parameters.model, "model")},
)  # fmt: skip
def generate(inputs: Arrays, parameters: GenerateParameters, context: Context) -> Results:
    """Text that continues a prompt, by a model of the service."""
    model = _model(context.placed["folder"], context.device)
    ids = model.prompt(_decoded(inputs["prompt"], "the prompt") if "prompt" in inputs else "")
    seed = secrets.randbelow(2**31) if parameters.seed is None else parameters.seed
    tokens = model.generate(
        ids, parameters.tokens, temperature=parameters.temperature, top_k=parameters.top_k or None,
        top_p=parameters.top_p if parameters.top_p < 1 else None, seed=seed,
        watch=lambda found: context.progress((found.shape[1] - len(ids)) / parameters.tokens),
    )  # fmt: skip
    return {"text": _text(model.text(tokens, len(ids))), "seed": np.array([seed])}


class _Stopper:
    """The progress of a training; asked to stop, it lets the training write a checkpoint first."""

    def __init__(self, context: Context) -> None:
        self._context, self._total, self._begun = context, 1, False
        self.stopped: Exception | None = None

    def phase(self, text: str) -> None:
        self._context.progress(0.0 if not self._begun else 0.99, text)

    def advance(self, share: float, text: str = "") -> None:
        if not self._begun:
            self._context.progress(0.0, text)

    def note(self, text: str) -> None:
        pass

    def begin(self, *, done: int, total: int, device: str, predicted_bytes: int | None) -> None:
        self._total, self._begun = total, True

    def records(self, records: Sequence[Any]) -> None:
        last = records[-1]
        try:
            self._context.progress(0.99 * last.step / self._total, f"step {last.step}, loss {last.loss:.4f}")
        except Exception as error:  # noqa: BLE001 - the reason to stop
            if self.stopped is None:
                self.stopped = error
                signal.raise_signal(signal.SIGTERM)  # the training ends after a checkpoint

    def end(self) -> None:
        pass


_CHECKPOINT_S = 20.0  # seconds between checkpoints: the work of a training that is lost with its worker


def _place_data(parameters: TrainParameters, settings: ServiceSettings) -> dict[str, Any]:
    return {"path": None if parameters.data is None else _named(settings.data, parameters.data, "data")}


@_operation(
    "train", (TensorSpec("text", ("BYTES",), (1,), optional=True),), _bytes("summary", "config", "model", "tokenizer"),
    lambda inputs, parameters: 60.0, resumable=True, placed=("path",), place=_place_data,
)  # fmt: skip
def train(inputs: Arrays, parameters: TrainParameters, context: Context) -> Results:
    """Training of a small language model on text."""
    # The library caches tokenizers, from which a text could be told: that of an upload goes with the job's folder.
    with override(cache_dir=context.directory / "cache") if "text" in inputs else nullcontext():
        return _trained(inputs, parameters, context)


def _trained(inputs: Arrays, parameters: TrainParameters, context: Context) -> Results:
    import torch

    from accelerant.nn.train import preset, resume_training, run_training
    from accelerant.nn.train.history import RunFolder

    changes = parameters.model_dump(include={"steps", "learning_rate", "seed"}, exclude_none=True)
    changes["checkpoint_every_s"] = _CHECKPOINT_S
    folder, device, stopper = RunFolder(context.directory / "run"), torch.device(context.device), _Stopper(context)
    if folder.checkpoint.exists() or folder.finished:
        outcome = resume_training(folder.path, device, progress=stopper)
    else:
        run = preset(parameters.preset).resized(parameters.batch_size, None)
        if path := context.placed["path"]:
            changes["data"] = (path,)
        elif "text" in inputs:
            text = context.directory / "text.txt"
            text.write_bytes(inputs["text"].tobytes())
            changes["data"] = (str(text),)
        outcome = run_training(run.replaced(**changes), folder.path, device, overwrite=True, progress=stopper)
    if outcome.signal is not None:
        raise stopper.stopped or RuntimeError("the training was interrupted")
    summary = {name: value for name, value in outcome.summary.items() if name not in ("out", "report")}
    files = {"config": folder.config, "model": folder.model, "tokenizer": folder.tokenizer}
    return {"summary": _text(json.dumps(summary))} | {
        name: _text(path.read_bytes()) for name, path in files.items() if path.exists()
    }


# --- search ----------------------------------------------------------------------------------------------------------
class SearchParameters(Parameters):
    """The collection, by its name in the service's settings; a filter of Qdrant's filter language, as JSON."""

    collection: Annotated[str, Field(max_length=200)]
    k: Annotated[int, Field(ge=1, le=1000)] = 10
    filter: Annotated[str, Field(max_length=1 << 16)] | None = None
    payloads: bool = False

    @field_validator("filter")
    @classmethod
    def _json_object(cls, text: str | None) -> str | None:
        if text is not None and not isinstance(decode_json(text), dict):
            raise ValueError("a filter is a JSON object")
        return text


@functools.lru_cache(maxsize=16)
def _collection(place: str, device: str) -> Any:
    from accelerant.search import Collection

    location, _, name = place.rpartition("/")
    return Collection(location, name, device=device)


def _check_search(inputs: Arrays, parameters: SearchParameters) -> None:
    if not np.isfinite(inputs["queries"]).all():
        raise RangeError("queries have NaN or infinity")


def _matches_bytes(inputs: Arrays, parameters: SearchParameters) -> int:
    return len(inputs["queries"]) * parameters.k * (1024 if parameters.payloads else 48)


@_operation(
    "search", (TensorSpec("queries", ("FP32", "FP16", "FP64"), (-1, -1)),),
    (*_bytes("matches"), TensorSpec("scores", ("FP32",), (-1, -1))),
    lambda inputs, _: 0.01 + len(inputs["queries"]) * 1e-3, check=_check_search, result_bytes=_matches_bytes,
    placed=("location",),
    place=lambda parameters, settings: {
        "location": _named(settings.collections, parameters.collection, "collections")
    },
)  # fmt: skip
def search(inputs: Arrays, parameters: SearchParameters, context: Context) -> Results:
    """Nearest vectors of a collection of the service; `matches` is JSON with ids, selected, age_s and payloads."""
    condition = None if parameters.filter is None else decode_json(parameters.filter)
    collection = _collection(context.placed["location"], context.device)
    found = collection.search(inputs["queries"], parameters.k, filter=condition, payloads=parameters.payloads)
    matches = {"ids": found.ids, "selected": found.selected, "age_s": found.age_s, "payloads": found.payloads}
    scores = np.array(found.scores, np.float32).reshape(len(inputs["queries"]), -1)
    return {"matches": _text(json.dumps(matches)), "scores": scores}


# --- any public op: its tensors are the inputs, its options the parameters -------------------------------------------
#
# The setting `ops` names those that are offered. Their shapes are computed without memory, on torch's meta device, so
# that the server refuses what the op would refuse, and knows the size of the result. For that it imports torch.

_INTEGERS = ("INT64", "INT32", "INT8")
_CPU_OP_ELEMENTS_S = 1e7


class OpParameters(Parameters):
    """Options of an op."""

    model_config = ConfigDict(arbitrary_types_allowed=True)  # a type that JSON has no value for keeps its default


def op_spec(name: str) -> OpSpec:
    """Return the operation of a public op, whose outputs are y, y1, ...; ConfigError for a name that is no op's."""
    from accelerant.ops.registry import public_ops

    if name not in public_ops():
        raise ConfigError(f"ops: there is no op {clipped(name)}{similar(name, public_ops())}")
    op = public_ops()[name]
    signature = inspect.signature(op.function, eval_str=True)
    declared = inspect.signature(op.function).parameters.values()
    tensors = {each.name: each for each in declared if str(each.annotation).startswith("Tensor")}
    options: dict[str, Any] = {
        each.name: (each.annotation, ... if each.default is inspect.Parameter.empty else each.default)
        for each in signature.parameters.values()
        if each.name not in tensors
    }

    def shaped(given: Arrays, parameters: Any) -> tuple[Any, ...]:
        return _shaped(op, given, {each: getattr(parameters, each) for each in options})

    def run(given: Arrays, parameters: Any, context: Context) -> Results:
        arguments = {each: given.get(each) for each in tensors} | {each: getattr(parameters, each) for each in options}
        found = getattr(accelerator_on(context.device), name)(**arguments)
        return {f"y{i or ''}": np.asarray(y) for i, y in enumerate(found if isinstance(found, tuple) else (found,))}

    outputs = ("y", "y1") if str(signature.return_annotation).startswith("tuple") else ("y",)
    return OpSpec(
        name, (op.function.__doc__ or "").partition("\n")[0].rstrip("."), "neural", _inputs(op, tensors),
        tuple(TensorSpec(each, (*_FLOATS, *_INTEGERS)) for each in outputs),
        create_model(f"{name}_parameters", __base__=OpParameters, **options), run,
        lambda given, parameters: sum(x.size for x in given.values()) / _CPU_OP_ELEMENTS_S,
        check=lambda given, parameters: [*shaped(given, parameters)].clear(),
        result_bytes=lambda given, parameters: sum(y.nbytes for y in shaped(given, parameters)),
    )  # fmt: skip


def _inputs(op: PublicOp, tensors: Mapping[str, inspect.Parameter]) -> tuple[TensorSpec, ...]:
    """Return an op's inputs: integers where its first sample has them, else floating-point numbers."""
    from accelerant.ops.registry import Indices, Stated

    sample = op.cases.SAMPLES[0].arguments
    integers = {each for each, one in zip(tensors, sample, strict=False) if isinstance(one, (Indices, Stated))}
    return tuple(
        TensorSpec(
            name, _INTEGERS if name in integers else _FLOATS, optional=each.default is not inspect.Parameter.empty
        )
        for name, each in tensors.items()
    )


def _shaped(op: PublicOp, given: Arrays, options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the results of a call as tensors without memory; raise what the op raises, or ShapeError."""
    import torch

    metas = {
        name: torch.empty(x.shape, dtype=torch.from_numpy(np.empty(0, x.dtype)).dtype, device="meta")
        for name, x in given.items()
    }
    try:
        with torch.no_grad():
            found = op.function(**metas, **options)
    except AccelerantError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever torch raises for these shapes
        raise ShapeError(f"{op.name}: {(str(error).splitlines() or [type(error).__name__])[0]}") from None
    return found if isinstance(found, tuple) else (found,)


# --- operations of other packages -------------------------------------------------------------------------------------
_ENTRY_POINTS = "accelerant.operations"


def _add_installed() -> None:
    """Add the OpSpecs that installed packages name; one that does not load is left out, with a warning."""
    from importlib.metadata import entry_points

    for point in entry_points(group=_ENTRY_POINTS):
        try:
            found = point.load()
            if not isinstance(found, OpSpec) or found.name != point.name or point.name in OPERATIONS:
                raise TypeError(f"wanted an OpSpec of this name, which no other has, got {clipped(found)}")
            OPERATIONS[point.name] = found
        except Exception as error:  # noqa: BLE001 - whatever another package raises
            text = "operation %r (%s) is left out: %s: %s"
            logging.getLogger("accelerant.service").warning(text, point.name, point.value, type(error).__name__, error)


_add_installed()
