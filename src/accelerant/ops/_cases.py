"""The types of every op's cases.py, which its tests and its benchmark read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from accelerant.runtime.compilation.kernel import KernelSource
from accelerant.runtime.compilation.triton import TritonKernel


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
    """One specialization of a kernel, to compile for each target, with the warps and stages that it is launched with.

    `types` has Triton types by argument, "*" for the pointers that are not named; other arguments are "i32".
    `constants` are those by name, absent tensors among them as None; row lengths and distances are multiples of
    `multiple`.
    """

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
    """One row of the benchmark: a sample, its dtype, and what to reach on one H200.

    Times are in milliseconds; where `both_ms` is set, forward and backward pass are measured together. `forward_x` and
    `backward_x` are speeds as multiples of the fastest peer's; `peak_mib` bounds the device memory of the forward pass
    above its arguments. `rotated` times a call among calls on copies of the arguments that exceed the L2, in a CUDA
    graph: alone after a flush, a call of some 20 us would also show what it costs to start one.
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
    """An op as its benchmark measures it; the functions take the op's arguments, options by keyword.

    Attributes:
        theirs: torch's function.
        peers: makers of the functions of torch's other back ends, by peer; UnsupportedCase where one is absent.
        flops: operations of the forward pass, from its inputs and its first result; None where bandwidth bounds it.
        backward_flops: the backward pass's, as a multiple of these.
        random: results differ from call to call, so they are not compared.
        constants, shared: indices of arguments without a gradient in training, and of those that all rows share.
        odd: whether torch's function takes one of the op's LARGE samples.
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
