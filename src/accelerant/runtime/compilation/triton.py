"""Triton as a compiler: a Triton function and its specialization become a KernelSource; a warm start imports no Triton.

A specialization consists of the element types of the pointers, whether each pointer and integer is a multiple of 16
(for row lengths and strides also 8, 4 or 2), and the compile-time constants.
"""

from __future__ import annotations

import atexit
import copy
import functools
import importlib
import importlib.metadata
import logging
import math
import os
import re
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from accelerant.errors import CompileError
from accelerant.runtime import registry
from accelerant.runtime.compilation.background import NotCompiledError
from accelerant.runtime.compilation.kernel import CUDA_TARGETS, Binary, Kernel, KernelSource, Resources, sources_hash
from accelerant.runtime.files import remove_folder_of
from accelerant.runtime.memory.limits import has_fakes, predictions
from accelerant.runtime.provider import noted

if TYPE_CHECKING:
    from accelerant.runtime.providers.cuda import CudaProvider
    from accelerant.runtime.providers.cuda_launch import PreparedLaunch

_POINTERS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float64: "*fp64", torch.int8: "*i8",
    torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1",
}  # fmt: skip
_FIXED = {"enable_fp_fusion": True}
"""Triton's options, but for kernels that round each operation; part of the cache's key."""

_PREPARED_LIMIT = 4096
_Argument = torch.Tensor | int | float | None
_AMD = re.compile(r"gfx\w+")


def interpreting() -> bool:
    """Return whether Triton functions run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _version() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def refuses_triton(device: torch.device) -> str | None:
    """Return why Triton kernels cannot run on a device; None if they can."""
    if device.type == "cuda":
        if torch.version.hip:
            return registry.reason_without_kernels(device)
        return None if _version() else "Triton is not installed"
    if interpreting():
        return None
    return f"no Triton on {device.type}"


@dataclass(frozen=True, slots=True)
class Specialization:
    """A Builder of one Triton function: Triton's types of the arguments, constants, and multiples of 16, 8, 4 or 2."""

    module: str
    name: str
    kinds: tuple[str, ...]
    constants: tuple[tuple[str | int, Any], ...]
    multiples: tuple[tuple[int, int], ...]
    num_warps: int
    num_stages: int
    contracts: bool = field(default=True, repr=False)

    @property
    def key(self) -> str:
        """Everything that the code depends on besides the target."""
        sources = sources_hash("", endings=("triton_kernels.py",))  # kernels may call one another across modules
        fixed = _FIXED if self.contracts else {"enable_fp_fusion": False}
        return f"{self!r} {fixed} triton {_version()} {sources}"

    def build(self, target: str) -> Binary:
        """Compile for an architecture ("sm_90", "gfx942"); raise CompileError with Triton's message."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        function = getattr(importlib.import_module(self.module), self.name)
        if _AMD.fullmatch(target):
            gpu = GPUTarget("hip", target, 64 if target.startswith("gfx9") else 32)
        else:
            gpu = GPUTarget("cuda", int(target.removeprefix("sm_").rstrip("a")), 32)
        names = list(function.arg_names)
        source = ASTSource(
            fn=function,
            signature=dict(zip(names, self.kinds, strict=True)),
            constexprs={(at if isinstance(at, int) else names.index(at),): value for at, value in self.constants},
            attrs={(position,): [["tt.divisibility", divisor]] for position, divisor in self.multiples},
        )
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        options |= {**_FIXED, "enable_fp_fusion": self.contracts}
        try:
            _require_cache()
            compiled = triton.compile(source, target=gpu, options=options)
        except Exception as error:
            raise CompileError(f"Triton kernel {self.name!r} does not compile for {target}", str(error)) from error
        return _binary(self.name, compiled, gpu.backend, gpu.warp_size)


@functools.cache
def _require_cache() -> None:
    """Give Triton a temporary cache where its own (~/.triton/cache) cannot be written: it compiles nothing without."""
    from triton import knobs

    folder = str(knobs.cache.dir)
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        private = tempfile.mkdtemp(prefix="accelerant-triton-")
        atexit.register(remove_folder_of, os.getpid(), private)
        os.environ["TRITON_CACHE_DIR"] = private
        text = "Triton's cache %s cannot be written (%s); this process uses a temporary one"
        logging.getLogger("accelerant.cache").warning(text, folder, error.strerror)


def _binary(name: str, compiled: Any, backend: str, warp_size: int) -> Binary:
    metadata = compiled.metadata
    if getattr(metadata, "global_scratch_size", 0):
        raise CompileError(f"Triton kernel {name!r} asks for {metadata.global_scratch_size} bytes of global scratch")
    if backend == "cuda":
        code = compiled.asm["cubin"]
        entry = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)", compiled.asm["ptx"], re.DOTALL)
        if entry is None:
            raise CompileError(f"Triton kernel {name!r}: no entry point in its PTX")
        parameters = entry.group(2).count(".param")
        overlaps = "griddepcontrol.wait" in compiled.asm["ptx"]
    else:
        code, parameters, overlaps = compiled.asm["hsaco"], 0, False
    return Binary(
        code=code,
        symbols={name: metadata.name},
        resources={name: Resources(shared_bytes=metadata.shared)},
        metadata={
            "parameters": parameters,
            "threads": metadata.num_warps * warp_size,
            "shared_bytes": metadata.shared,
            "overlaps": overlaps,
        },
    )


recorders: dict[int, list[tuple[PreparedLaunch, tuple[int, ...]]]] = {}
"""Lists that the launches of a thread, by its identity, are added to, with their pointers."""


class TritonKernel:
    """A Triton function that is compiled on demand and launched through the provider.

    `widths`: positions of the integers that are row lengths or strides, which bound the width of loads; of others only
    divisibility by 16 counts. `contracts`: a product and a sum may become one operation, rounded once.
    """

    def __init__(
        self, module: str, name: str, *, targets: tuple[str, ...] = CUDA_TARGETS, widths: Sequence[int] = (),
        contracts: bool = True,
    ) -> None:  # fmt: skip
        self.module = module
        self.contracts = contracts
        self.name = name
        self.targets = targets
        self.widths = frozenset(widths)
        self._kernels: dict[tuple[Any, ...], Kernel | CompileError] = {}
        self._prepared: dict[tuple[object, ...], PreparedLaunch] = {}

    def launch(
        self, grid: tuple[int, ...], args: Sequence[_Argument], constants: Mapping[str, Any], *, num_warps: int = 4,
        num_stages: int = 3,
    ) -> PreparedLaunch | None:  # fmt: skip
        """Run over the grid on the first tensor's current stream; None is an absent tensor, constants are by name.

        Returns the launch, to be started again with the pointers of like tensors; None where nothing was launched.
        """
        if predictions and has_fakes(args):
            return None
        if (first := args[0]) is None:
            first = next(arg for arg in args if isinstance(arg, torch.Tensor))
        if not isinstance(first, torch.Tensor) or not first.is_cuda:
            function = getattr(importlib.import_module(self.module), self.name)
            function[grid](*args, **constants)  # in the interpreter: refuses_triton excludes other devices
            noted()
            return None
        key: list[object] = [grid, num_warps, num_stages, first.get_device(), *constants.values()]
        pointers = []
        for arg in args:
            if isinstance(arg, torch.Tensor):
                pointer = arg.data_ptr()
                pointers.append(pointer)
                key += (arg.dtype, pointer & 15)
            else:
                key.append(arg)
        if (prepared := self._prepared.get(tuple(key))) is None:
            try:
                prepared = self._prepare(tuple(key), grid, args, constants, num_warps, num_stages)
            except NotCompiledError as error:
                if not error.skips:
                    raise
                return None
        prepared.start(pointers)
        if recorders:
            recorders.get(threading.get_ident(), []).append((prepared, tuple(pointers)))
        return prepared

    def _prepare(
        self, key: tuple[object, ...], grid: tuple[int, ...], args: Sequence[_Argument], constants: Mapping[str, Any],
        num_warps: int, num_stages: int,
    ) -> PreparedLaunch:  # fmt: skip
        """Return a launch that lacks only its pointers; kept under `key`."""
        device = next(arg for arg in args if isinstance(arg, torch.Tensor)).get_device()
        described = tuple(_describe(arg, at in self.widths) for at, arg in enumerate(args))
        variant = (device, num_warps, num_stages, *constants.values(), *described)
        if (kernel := self._kernels.get(variant)) is None:
            try:
                kernel = _cuda().compile(self.source_of(args, constants, num_warps, num_stages), device=device)
            except CompileError as error:
                kernel = copy.copy(error)  # without the traceback, whose frames hold tensors
            self._kernels[variant] = kernel
        if isinstance(kernel, CompileError):  # the code is the same for each shape: another attempt fails, too
            raise copy.copy(kernel)
        if len(self._prepared) >= _PREPARED_LIMIT:
            self._prepared.clear()
        present = [arg for arg in args if arg is not None]
        prepared: PreparedLaunch = kernel.handle.prepare(grid, present, device)
        self._prepared[key] = prepared
        return prepared

    def argument_names(self) -> list[str]:
        """Return the names of the function's arguments, constants included; imports Triton."""
        return list(getattr(importlib.import_module(self.module), self.name).arg_names)

    def source(
        self, types: Mapping[str, str], constants: Mapping[str, Any], *, multiple: int = 16, num_warps: int = 4,
        num_stages: int = 3,
    ) -> KernelSource:  # fmt: skip
        """Return a KernelSource for Triton types of the arguments; widths are multiples of `multiple`, others of 16."""
        names = self.argument_names()
        kinds = tuple(types.get(name, "constexpr") for name in names)
        divisors = [(i, multiple if i in self.widths else 16) for i, kind in enumerate(kinds) if kind[0] in "*i"]
        multiples = tuple((i, divisor) for i, divisor in divisors if divisor > 1)
        present = [(name, value) for name, value in constants.items() if value is not None]
        absent = sorted((names.index(name), None) for name, value in constants.items() if value is None)
        # In the order of _compile, so that the cache finds a precompiled kernel at run time.
        return self._source(kinds, (*present, *absent), multiples, num_warps, num_stages)

    def _source(
        self, kinds: tuple[str, ...], constants: tuple[tuple[str | int, Any], ...],
        multiples: tuple[tuple[int, int], ...], num_warps: int, num_stages: int,
    ) -> KernelSource:  # fmt: skip
        special = Specialization(
            self.module, self.name, kinds, constants, multiples, num_warps, num_stages, self.contracts
        )
        types = tuple(_LAUNCH_TYPES.get(kind, kind) for kind in kinds if kind != "constexpr")
        return KernelSource(self.name, {"triton": special}, {self.name: types}, targets=self.targets)

    def source_of(
        self, args: Sequence[_Argument], constants: Mapping[str, Any], num_warps: int = 4, num_stages: int = 3
    ) -> KernelSource:
        """Return the source of a launch's kernel."""
        described = [_describe(arg, at in self.widths) for at, arg in enumerate(args)]
        kinds = (*(kind for kind, _ in described), *("constexpr" for _ in constants))
        absent = [(at, None) for at, arg in enumerate(args) if arg is None]
        multiples = tuple((at, multiple) for at, (_, multiple) in enumerate(described) if multiple > 1)
        return self._source(kinds, (*constants.items(), *absent), multiples, num_warps, num_stages)


_LAUNCH_TYPES = {"fp32": "f32", "fp64": "f64"}


def _describe(arg: _Argument, width: bool = False) -> tuple[str, int]:
    """Return Triton's type of an argument and a divisor that its code may assume: 16 or 1; for a width also 8, 4, 2."""
    if arg is None:
        return "constexpr", 1
    if isinstance(arg, torch.Tensor):
        return _POINTERS[arg.dtype], 1 if arg.data_ptr() % 16 else 16
    if isinstance(arg, int):
        if not -(2**31) <= arg < 2**31:
            return "i64", 1
        return "i32", math.gcd(arg, 16) if width or arg % 16 == 0 else 1
    return "fp32", 1


@functools.cache
def _cuda() -> CudaProvider:
    return cast("CudaProvider", registry.create("cuda"))
