"""One vocabulary: rules for the signatures and the values of everything that a package exports."""

import collections.abc
import copy
import dataclasses
import enum
import functools
import importlib
import inspect
import itertools
import os
import pickle
import pkgutil
import types
import typing
from pathlib import Path

import pytest
import torch

import accelerant
from accelerant import zk
from accelerant.algebra.curve import Curve, curve_of
from accelerant.nn import train
from accelerant.privacy import mpc
from accelerant.privacy.he import bfv

NOT_FOR_USERS = ("accelerant.cli", "accelerant.templates")

ONE_NAME = {
    "dev": "device", "torch_device": "device", "lr": "learning_rate", "beta1": "betas", "beta2": "betas",
    "clip": "max_grad_norm, or max_abs of elements", "clip_norm": "max_grad_norm", "grad_clip": "max_grad_norm",
    "max_norm": "max_grad_norm", "micro_batch": "microbatch", "micro_batch_size": "microbatch",
    "accumulation": "accumulate", "accumulation_steps": "accumulate", "max_seconds": "timeout",
    "directory": "path to read, out to write", "folder": "path to read, out to write",
    "file": "path to read, out to write", "filename": "path to read, out to write", "output": "out",
    "timeout_s": "timeout", "limit_s": "timeout", "self_verify": "verify", "verified": "verify", "validate": "check",
    "checked": "check", "random_seed": "seed", "rng_seed": "seed", "sigma": "noise_multiplier", "secure": "insecure",
    "insecure_noise": "insecure",
}  # fmt: skip
"""A name that no public argument has, and the one for it."""

UNITS = "a field of a configuration has its unit in its name"
FORMULA = "the symbol of the proof system's key"
NORM = "the norm of a person's vector, not of a gradient"
TORCH = "torch's own name, position and default"
ALLOWED = {
    ("AcceleratorConfig", "timeout_s"): UNITS,
    ("nn.train.TrainConfig", "timeout_s"): UNITS,
    ("nn.optim.SGD", "lr"): TORCH,
    ("nn.optim.Adam", "lr"): TORCH,
    ("nn.optim.AdamW", "lr"): TORCH,
    ("nn.optim.clip_grad_norm_", "max_norm"): TORCH,
    ("privacy.dp.LocalGaussian", "max_norm"): NORM,
    ("privacy.federated.simulate", "max_norm"): NORM,
    ("privacy.mpc.SecureAggregation", "max_norm"): NORM,
    ("privacy.mpc.secure_aggregate", "max_norm"): NORM,
    ("privacy.dp.PrivacyEvent", "secure"): "the ledger's files have this field",
    ("privacy.dp.make_private", "secure"): "a stable name beside insecure",
    ("runtime.compilation.CompilerMessage", "file"): "the name that a compiler's message has for the source",
    ("zk.formats.write_zkey", "beta1"): FORMULA,
    ("zk.formats.write_zkey", "beta2"): FORMULA,
}
"""(public name, argument) -> why it keeps a name of ONE_NAME."""

RESULTS = {
    "bench.Row", "bench.Timing", "nn.train.StepRecord", "privacy.dp.noise.Charge", "runtime.monitoring.Measurement",
    "runtime.monitoring.OpEnergy", "runtime.monitoring.Sample", "runtime.streams.ChunkedRun",
}  # fmt: skip
"""Classes that the library makes, not its users."""

POSITIONAL_FLOATS = {
    "nn.optim.SGD": TORCH,
    "nn.optim.Adam": TORCH,
    "nn.optim.AdamW": TORCH,
    "privacy.dp.LocalLaplace": "the ends of an interval, the lower one first",
}
"""Public name -> why two numbers may be given by position."""


def _packages():
    """Yield the packages, and the modules that they export."""
    yield accelerant
    for module in pkgutil.walk_packages(accelerant.__path__, "accelerant."):
        private = any(part.startswith("_") for part in module.name.split("."))
        if module.ispkg and not private and not module.name.startswith(NOT_FOR_USERS):
            try:
                package = importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if os.environ.get("CI") or str(error.name).startswith("accelerant"):
                    raise
                continue  # of an extra that is not installed
            yield package
            exported = (getattr(package, name) for name in getattr(package, "__all__", ()))
            yield from (each for each in exported if isinstance(each, types.ModuleType) and hasattr(each, "__all__"))


def _public():
    """Return every function and class that a package exports, by its shortest name."""
    found = {}
    for package in _packages():
        for name in getattr(package, "__all__", ()):
            thing = getattr(package, name)
            if getattr(thing, "__module__", "").startswith("accelerant") and not isinstance(thing, types.ModuleType):
                found.setdefault(id(thing), (f"{package.__name__}.{name}".removeprefix("accelerant."), thing))
    return dict(found.values())


PUBLIC = _public()
CLASSES = {name: thing for name, thing in PUBLIC.items() if inspect.isclass(thing)}
DATACLASSES = {name: kind for name, kind in CLASSES.items() if dataclasses.is_dataclass(kind)}


def _functions():
    """Return public functions, constructors and public methods that accelerant defines, by name."""
    found = {}
    for name, thing in PUBLIC.items():
        if not inspect.isclass(thing):
            if callable(thing):
                found[name] = thing
            continue
        if "__init__" in vars(thing):
            found[name] = thing.__init__
        for method, value in vars(thing).items():
            function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            if not method.startswith("_") and inspect.isroutine(function):
                found[f"{name}.{method}"] = function
    return found


FUNCTIONS = _functions()


def _parameters(function):
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []


def test_much_is_public():
    assert len(FUNCTIONS) > 500
    assert len(CLASSES) > 130
    assert len(DATACLASSES) > 60


def test_one_concept_has_one_name():
    wrong = {
        (name, parameter.name): ONE_NAME[parameter.name]
        for name, function in FUNCTIONS.items()
        for parameter in _parameters(function)
        if parameter.name in ONE_NAME
    }
    assert {key: one for key, one in wrong.items() if key not in ALLOWED} == {}
    assert set(ALLOWED) <= set(wrong), "remove the exceptions that are none any more"


def _is_number(annotation):
    return str(annotation).replace(" ", "") in ("float", "<class'float'>", "float|None", "int|float", "float|int")


def test_numbers_that_could_be_exchanged_are_keywords():
    """Two numbers that follow each other in a call by position; results, which users do not make, may have them."""
    wrong = {}
    for name, function in FUNCTIONS.items():
        positional = [each for each in _parameters(function) if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        for one, two in itertools.pairwise(positional):
            if _is_number(one.annotation) and _is_number(two.annotation) and name not in RESULTS:
                wrong.setdefault(name, f"{one.name}, {two.name}")
    assert {name: given for name, given in wrong.items() if name not in POSITIONAL_FLOATS} == {}
    assert set(POSITIONAL_FLOATS) <= set(wrong), "remove the exceptions that are none any more"


def test_every_class_has_a_repr_that_says_what_it_is():
    wrong = {
        name
        for name, kind in CLASSES.items()
        if kind.__repr__ is object.__repr__
        and not inspect.isabstract(kind)
        and not getattr(kind, "_is_protocol", False)
    }
    assert wrong == set()


# --- values ----------------------------------------------------------------------------------------------------------
class NotMadeError(Exception):
    """A class whose arguments cannot be made up."""


def _sample(annotation, depth=0):
    """Return a value of an annotation."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    simple = {int: 3, float: 0.5, str: "text", bool: True, bytes: b"bytes", Path: Path("folder"), object: 1}
    if annotation in simple:
        return simple[annotation]
    if annotation in (None, type(None), typing.Any):
        return None
    if origin is typing.Literal:
        return parts[0]
    if origin in (typing.Union, types.UnionType):
        return _sample(next(part for part in parts if part is not type(None)), depth)
    if origin is tuple:
        return tuple(_sample(part, depth) for part in parts if part is not ...)
    if origin in (list, collections.abc.Sequence, collections.abc.Iterable):
        return [_sample(parts[0], depth)]
    if origin in (dict, collections.abc.Mapping):
        return {_sample(parts[0], depth): _sample(parts[1], depth)}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return next(iter(annotation))
    if dataclasses.is_dataclass(annotation) and depth < 3:
        return _made(annotation, depth + 1)
    raise NotMadeError(str(annotation))


def _made(kind, depth=0):
    """Return an instance of a dataclass with made-up values of the fields without a default."""
    if kind in EXAMPLES:
        return EXAMPLES[kind]()
    try:
        hints = typing.get_type_hints(kind)
        required = [
            each
            for each in dataclasses.fields(kind)
            if each.init and each.default is each.default_factory is dataclasses.MISSING
        ]
        return kind(**{each.name: _sample(hints[each.name], depth) for each in required})
    except NotMadeError:
        raise
    except Exception as error:
        raise NotMadeError(f"{type(error).__name__}: {error}") from error


def _verification_key():
    path = Path(__file__).parent / "vectors" / "groth16" / "poseidon" / "verification_key.json"
    return zk.groth16.VerificationKey.from_json(path.read_text())


EXAMPLES = {
    Curve: lambda: curve_of("bn254_g1"),
    zk.PairingValue: lambda: zk.pairing([(1, 2)], [zk.curve("bn254_g2").decode(zk.curve("bn254_g2").generator)]),
    zk.groth16.VerificationKey: _verification_key,
    train.RunConfig: lambda: train.preset("tiny"),
    mpc.SecureAggregation: lambda: mpc.SecureAggregation(clients=3, threshold=2, size=4, max_abs=1.0),
    mpc.shamir.Share: functools.cache(lambda: mpc.shamir.split(torch.arange(3), threshold=2, count=2)[0]),
    bfv.EncryptionParameters: lambda: bfv.EncryptionParameters(n=4096, plain_modulus=65537),
}
"""Class -> function that makes an instance, where made-up values do not do."""

NOT_MADE = {
    "nn.QuantizationReport": "it has the model's modules",
    "privacy.dp.DrawnBatch": "a sampler makes it, of one draw, which is spent once",
    "runtime.dispatch.DispatchEntry": "it has the functions of an implementation, and a place in this process",
    "runtime.dispatch.Implementation": "it has functions",
    "privacy.he.bfv.Ciphertext": "tests/privacy/he/test_bfv.py: it has its key",
    "privacy.he.paillier.EncryptedTensor": "tests/privacy/he/test_paillier.py: it has its key",
    "privacy.mpc.beaver.Triple": "a dealer makes it, for one use",
    "privacy.mpc.beaver.Truncation": "a dealer makes it, for one use",
    "zk.formats.PtauContribution": "it has arrays of a file that is open",
    "zk.formats.ZkeyContribution": "it has arrays of a file that is open",
}
"""Public dataclass -> why none is made here."""


@pytest.mark.parametrize("name", DATACLASSES)
def test_values_compare_copy_and_pickle(name):
    kind = DATACLASSES[name]
    if inspect.isabstract(kind) or name in NOT_MADE:
        return
    first, second = _made(kind), _made(kind)
    assert " object at 0x" not in repr(first)
    assert first == second
    for again in (copy.copy(first), copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert type(again) is kind
        assert again == first
