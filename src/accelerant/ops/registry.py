"""The public ops by name: each package declares its ops once, and tests, benchmarks and documentation read it here.

A package of one op is a folder of at most three files, which CONTRIBUTING.md describes: `__init__.py`, the declaration
(a folder with more modules may have it in `op.py`), `triton_kernels.py` and `cases.py`.

Other packages add ops by an entry point of the group "accelerant.ops" (`NAME = "package"`), or by `register`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from accelerant.errors import ConfigError
from accelerant.runtime.compilation.kernel import KernelSource
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.dispatch import operations


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds on |result - reference| <= absolute + relative |reference|, the reference in float64."""

    relative: float
    absolute: float


def tolerances(**bounds: tuple[float, float]) -> dict[torch.dtype, Tolerance]:
    """Return Tolerances by dtype, of (relative, absolute) pairs by the dtype's name."""
    return {getattr(torch, dtype): Tolerance(*pair) for dtype, pair in bounds.items()}


def size_name(shape: Sequence[int]) -> str:
    """Return a shape as samples are named: "33x257", "scalar"."""
    return "x".join(map(str, shape)) or "scalar"


@dataclass(frozen=True, slots=True)
class Indices:
    """A tensor argument of integers in [low, high): classes, rows of a table, quantized numbers."""

    shape: tuple[int, ...]
    high: int
    low: int = 0
    dtype: torch.dtype = torch.int64


@dataclass(frozen=True, slots=True)
class Stated:
    """A tensor argument of given int32 numbers, for example the starts or lengths of sequences."""

    numbers: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape, of one dimension."""
        return (len(self.numbers),)


@dataclass(frozen=True, slots=True)
class Fractions:
    """A tensor argument of numbers in (0, 1), for example probabilities."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SampleInput:
    """One call of an op: a name, tensor arguments (a shape, Fractions, Indices, Stated; None: absent), and options."""

    name: str
    arguments: tuple[tuple[int, ...] | Fractions | Indices | Stated | None, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shapes(self) -> tuple[tuple[int, ...] | None, ...]:
        """The shape of each argument."""
        return tuple(each.shape if isinstance(each, (Fractions, Indices, Stated)) else each for each in self.arguments)

    def tensors(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> list[torch.Tensor | None]:
        """Return the arguments with reproducible numbers: normal ones of a dtype, and indices."""
        tensors: list[torch.Tensor | None] = []
        for seed, given in enumerate(self.arguments):
            match given:
                case None:
                    tensors.append(None)
                case Fractions(shape):
                    tensors.append(torch.sigmoid(draw(shape, dtype, device, seed)))
                case Stated(numbers):
                    tensors.append(torch.tensor(numbers, dtype=torch.int32, device=device))
                case Indices(shape, high, low, kind):
                    generator = torch.Generator(device).manual_seed(seed)
                    tensors.append(torch.randint(low, high, shape, generator=generator, device=device, dtype=kind))
                case shape:
                    tensors.append(draw(shape, dtype, device, seed))
        return tensors


@dataclass(frozen=True, slots=True)
class Compilation:
    """One specialization of a kernel to compile for each target; `types` has Triton types, "*" for unnamed pointers."""

    kernel: TritonKernel
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int = 3
    multiple: int = 16

    def argument_types(self) -> dict[str, str]:
        """Return the Triton type of each argument that is no constant; imports Triton."""
        usual = self.types.get("*", "")
        names = [name for name in self.kernel.argument_names() if name not in self.constants]
        return {name: self.types.get(name) or (usual if name.endswith("_ptr") else "i32") for name in names}

    @property
    def name(self) -> str:
        """The kernel and what distinguishes this specialization."""
        kinds = sorted({kind for kind in self.argument_types().values() if kind.startswith("*")})
        widths = [f"widths of {self.multiple}"] if self.multiple != 16 else []
        fixed = (f"{key}={value}" for key, value in self.constants.items())
        return " ".join([self.kernel.name, *kinds, *widths, *fixed])

    def source(self) -> KernelSource:
        """Return the source that a provider compiles."""
        return self.kernel.source(
            self.argument_types(), self.constants, multiple=self.multiple, num_warps=self.num_warps,
            num_stages=self.num_stages,
        )  # fmt: skip


def specialized(
    kernel: TritonKernel, types: Mapping[str, str | None], constants: Mapping[str, Any], num_warps: int,
    num_stages: int = 3,
) -> Compilation:  # fmt: skip
    """Return a Compilation; an argument whose type is None is an absent tensor."""
    present = {name: kind for name, kind in types.items() if kind is not None}
    absent = dict.fromkeys(types.keys() - present.keys())
    return Compilation(kernel, present, {**constants, **dict(sorted(absent.items()))}, num_warps, num_stages)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One row of the benchmark: a sample, its dtype, and what to reach on one H200, in ms or as a multiple of the peer.

    `rotated` times a call among calls on copies of the arguments that exceed the L2, in a CUDA graph.
    """

    sample: SampleInput
    dtype: torch.dtype
    forward_ms: float | None = None
    backward_ms: float | None = None
    both_ms: float | None = None
    forward_x: float | None = None
    backward_x: float | None = None
    peak_mib: float | None = None
    rotated: bool = False


@dataclass(frozen=True, slots=True)
class Subject:
    """An op as its benchmark measures it: torch's function, makers of its other back ends' by peer, and flops.

    `constants` and `shared` are indices of arguments without a gradient in training, and of those that all rows share;
    `odd` says whether torch's function takes one of the op's LARGE samples.
    """

    theirs: Callable[..., Any]
    peers: Mapping[str, Callable[[], Callable[..., Any]]] = field(default_factory=dict)
    flops: Callable[[Sequence[torch.Tensor], torch.Tensor], int] | None = None
    backward_flops: float = 2.0
    random: bool = False
    constants: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    odd: Callable[[SampleInput], bool] = lambda sample: True


@dataclass(frozen=True, slots=True)
class OpCases:
    """The cases of one op of a family; a folder of one op has these names in its cases.py instead."""

    SAMPLES: tuple[SampleInput, ...]
    LARGE: tuple[SampleInput, ...]
    BENCHMARKS: tuple[Benchmark, ...]
    TOLERANCES: Mapping[torch.dtype, Tolerance]
    TORCH_TOLERANCES: Mapping[torch.dtype, Tolerance] | None = None
    ON_CPU: str = "torch"


def draw(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> torch.Tensor:
    """Return normal numbers that are the same in every run on a device."""
    generator = torch.Generator(device).manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.randn(shape, generator=generator, device=device, dtype=wide).to(dtype)


_OWN = "accelerant.ops"
_LIBRARIES = {"cublaslt": "cuBLASLt", "cudnn": "cuDNN", "torch": "torch"}
_KERNELS = {"triton": "Triton", "hopper": "CUDA C++ for Hopper", "llvm": "LLVM on a CPU"}


@dataclass(frozen=True, slots=True)
class PublicOp:
    """A public op of a package ("accelerant.ops.gelu"), whose modules are imported on first access."""

    name: str
    package: str

    @property
    def function(self) -> Callable[..., Any]:
        """The public function."""
        exporting = importlib.import_module(self.package)
        if not hasattr(exporting, self.name):  # it is of another module of the package
            exporting = importlib.import_module(_OWN)
        function: Callable[..., Any] = getattr(exporting, self.name)
        return function

    @property
    def reference(self) -> Callable[..., Any]:
        """The oracle of its tests, for any dtype."""
        home = importlib.import_module(self.function.__module__)
        oracle: Callable[..., Any] = getattr(home, f"{self.name}_reference")
        return oracle

    @property
    def cases(self) -> Any:
        """The samples, tolerances, benchmarks and kernels of its cases.py."""
        module = importlib.import_module(f"{self.package}.cases")
        return module.FAMILY[self.name] if hasattr(module, "FAMILY") else module

    @property
    def row(self) -> str:
        """Its row in a table of ops: name, first sentence of the docstring, own kernels, libraries."""
        summary = (self.function.__doc__ or "").partition("\n")[0].rstrip(".")
        forward = operations().get(f"{self.name}_fwd") or operations().get(self.name)
        implementations = forward.implementations if forward is not None else ()
        kernels = [_KERNELS.get(each.name, each.name) for each in implementations if each.own]
        libraries = [_LIBRARIES.get(each.name, each.name) for each in implementations if not each.own]
        return f"| `{self.name}` | {summary} | {', '.join(kernels) or 'none'} | {', '.join(libraries)} |"


_ENTRY_POINTS = "accelerant.ops"
_ops: dict[str, PublicOp] = {}
_watching: list[Callable[[PublicOp], None]] = []


def register(package: str) -> None:
    """Add the ops of a package outside accelerant.ops, which are the functions that it exports.

    Accelerators, the service, `accelerant bench` and the table of ops have them from then on. Raises ConfigError where
    another op has the name of one.
    """
    known, names = public_ops(), importlib.import_module(package).__all__
    found = [PublicOp(name, package) for name in names]
    if taken := [op.name for op in found if known.get(op.name, op) != op]:
        raise ConfigError(f"register: {package} exports {taken[0]}, which is an op of {known[taken[0]].package}")
    _add([op for op in found if op.name not in known])


def _add(added: list[PublicOp]) -> None:
    _ops.update({op.name: op for op in added})
    for watcher in _watching:
        for op in added:
            watcher(op)


def watch(watcher: Callable[[PublicOp], None]) -> None:
    """Call a function with every public op, and with those that are added later."""
    for op in public_ops().values():
        watcher(op)
    _watching.append(watcher)


def public_ops() -> dict[str, PublicOp]:
    """Return every public op by name: those of accelerant.ops, of installed packages, and the registered ones."""
    if not _ops:
        from importlib.metadata import entry_points  # 10 ms

        root = importlib.import_module(_OWN)
        _add([PublicOp(name, ".".join(getattr(root, name).__module__.split(".")[:3])) for name in root.__all__])
        for point in entry_points(group=_ENTRY_POINTS):
            try:
                register(point.value)
            except Exception as error:  # noqa: BLE001 - whatever another package raises
                text = "ops of the entry point %r (%s) are left out: %s: %s"
                logging.getLogger("accelerant").warning(text, point.name, point.value, type(error).__name__, error)
    return dict(sorted(_ops.items()))


def public_op(name: str) -> PublicOp:
    """Return the public op of a name; KeyError if there is none."""
    return public_ops()[name]
