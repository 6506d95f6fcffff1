"""Kernels of the user: a text or file, found, compiled on first use, and called on arrays of any library."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import logging
import math
import operator
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.config import settings
from accelerant.errors import BackendUnavailable, CompileError, ConfigError, LaunchError, UnsupportedDtype
from accelerant.runtime import registry
from accelerant.runtime.compilation import signatures
from accelerant.runtime.compilation.kernel import CompileOptions, Kernel, KernelSource
from accelerant.runtime.compilation.signatures import REPORT_BYTES, Parameter
from accelerant.runtime.files import read_regular, reason_of
from accelerant.runtime.host import refuse_masked
from accelerant.runtime.ledger import OpRecord, RecordedLaunch, sole_record
from accelerant.runtime.provider import SCALAR_CTYPES, Buffer, ComputeDevice, ComputeProvider, check_scalar

_DTYPES = {
    "bool": "bool", "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64",
    **{f"{sign}{bits}": f"{'u' * (sign == 'u')}int{bits}" for sign in "iu" for bits in (8, 16, 32, 64)},
}  # fmt: skip
"""Element type of a pointer -> dtype of its array."""

_SECOND_AXIS = {
    "portable": r"\bacl_(?:(?:global|group|local)_id|local_size)_y\b", "cuda": r"\b(?:threadIdx|blockIdx)\s*\.\s*y\b",
    "opencl": r"\bget_(?:global|group|local)_id\s*\(\s*1\s*\)",
}  # fmt: skip
"""Dialect -> what reads the second index of a thread."""

_LANGUAGES = {"cuda": "CUDA C++", "opencl": "OpenCL C", "portable": "portable C"}
_log = logging.getLogger("accelerant")
_IMMUTABLE = ("jax", "jaxlib")
_LARGEST_F32 = float(np.finfo(np.float32).max)


def kernel(
    source: str | os.PathLike[str],
    name: str | None = None,
    *,
    device: registry.DeviceLike = None,
    options: CompileOptions | None = None,
    arguments: Sequence[str] | None = None,
    shared_bytes: int = 0,
) -> UserKernel:
    """Return a kernel of a text or file, to be called on arrays.

    Args:
        source: CUDA C++, OpenCL C or portable C (ACL_KERNEL); a text with a brace in it, or a file's path.
        name: of the kernel, with template arguments if it is a template: "scale<float, 4>"; optional for the only one.
        device: to run on; by default that of the arrays. For arrays of the host, the default device if it takes the
            language, else the first that does; portable C runs on the CPU too.
        options: for the compiler.
        arguments: types of the arguments, for a kernel whose text does not say them (macros, structs): "f32", "i64",
            "*f32", "const *f32" for an array that the kernel only reads.
        shared_bytes: dynamic shared memory a block, in CUDA C++.

    Raises:
        CompileError: no such kernel, or an argument that cannot be passed.
        ConfigError: the file cannot be read, or an argument of this function is invalid.
    """
    text, path = _read(source)
    dialect = signatures.dialect_of(text, str(path or "the text"))
    chosen = options or CompileOptions()
    if not isinstance(chosen, CompileOptions):
        raise ConfigError(f"options must be CompileOptions, got {options!r}")
    if isinstance(shared_bytes, bool) or not isinstance(shared_bytes, int) or not 0 <= shared_bytes < 2**31:
        raise ConfigError(f"shared_bytes must be a number of bytes, got {shared_bytes!r}")
    if path is not None and "#" in text:
        chosen = dataclasses.replace(chosen, include=(*chosen.include, path.absolute().parent))
    if arguments is None:
        entry, parameters = signatures.entry_of(text, dialect, name, chosen.macros)
    elif name is None:
        raise ConfigError("arguments= are those of a kernel: name it")
    else:
        entry, parameters = name, tuple(_stated(i, each) for i, each in enumerate(arguments))
    kinds = tuple(each.kind for each in parameters)
    made = KernelSource(str(path or entry), {dialect: text}, {entry: kinds}, (), chosen, shared_bytes)
    return UserKernel(
        made, dialect, parameters, None if registry.is_automatic(device) else registry.find_device(device)
    )


@dataclass(slots=True)
class _Array:
    """An array of a launch; `result` is the tensor to write to (for JAX a copy), `strides` are in elements."""

    pointer: int
    size_bytes: int
    owner: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    packed: bool
    device: str = ""
    result: Any = None
    stream: int | None = None
    buffer: Buffer | None = None

    def data_ptr(self) -> int:
        return self.pointer

    def host_bytes(self) -> npt.NDArray[np.uint8]:
        """Return the bytes of an array of the host, which shares them if it is packed."""
        if isinstance(self.owner, np.ndarray):
            return np.ascontiguousarray(self.owner).reshape(-1).view(np.uint8)
        import torch

        tensor: torch.Tensor = self.owner[1].detach()
        if not self.packed:
            tensor = tensor.contiguous()
        shared: npt.NDArray[np.uint8] = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
        return shared

    def write(self, content: npt.NDArray[np.uint8]) -> None:
        """Write the bytes of a packed copy into an array of the host."""
        if self.packed:
            self.host_bytes()[:] = content
            return
        import torch

        host = self.owner if isinstance(self.owner, np.ndarray) else None
        if host is not None:
            host[...] = content.view(host.dtype).reshape(host.shape)
        else:
            given: torch.Tensor = self.owner[1]
            given.detach().copy_(torch.from_numpy(content).view(given.dtype).view(given.shape))

    def measure(self, name: str, dim: int, staged: bool) -> int | None:
        """Return the size or the stride of a dimension, of the packed copy if `staged`; None without the dimension."""
        if dim >= len(self.shape):
            return None
        if name == "size":
            return self.shape[dim]
        return int(np.prod(self.shape[dim + 1 :], dtype=np.int64)) if staged else self.strides[dim]


class UserKernel:
    """A kernel with its `parameters` that is called with a grid, a block and its arguments; see `kernel`."""

    def __init__(
        self, source: KernelSource, dialect: str, parameters: tuple[Parameter, ...], device: ComputeDevice | None
    ) -> None:
        (self.name,) = source.entries
        self.dialect = dialect
        self.parameters = parameters
        self._source = source
        self._device = device
        self._defaults: dict[str, ComputeDevice] = {}
        bases = [each.kind.removeprefix("*").partition("x") for each in parameters]
        self._dtypes = [_DTYPES.get(base, base) for base, _, _ in bases]
        self._alignments = {
            i: min(16, int(lanes) * np.dtype(_DTYPES[base]).itemsize)
            for i, (base, _, lanes) in enumerate(bases)
            if lanes in ("2", "4", "8", "16")
        }
        """Position of a pointer to vectors -> the bytes that its address must be a multiple of."""
        pointers = {each.name: i for i, each in enumerate(parameters) if each.kind.startswith("*")}
        self._measures: dict[int, tuple[int, str, int]] = {}
        """Position of a number that is a measure of an array -> the array's position, "size" or "stride", dimension."""
        for i, each in enumerate(parameters):
            found = re.fullmatch(r"(\w+)_(size|stride)([0-9])", each.name)
            if found and found[1] in pointers and each.kind in ("i32", "u32", "i64", "u64"):
                self._measures[i] = (pointers[found[1]], found[2], int(found[3]))
        self._strided = {array for array, name, _ in self._measures.values() if name == "stride"}
        self._given = len(parameters) - len(self._measures)
        text = signatures.without_comments(str(source.dialects[dialect]))
        self._by_rows = re.search(_SECOND_AXIS[dialect], text) is not None
        limit = re.search(r"(?:ACL_BLOCK|__launch_bounds__)\s*\(\s*(\d+)", text)
        self._most_threads = min(int(limit[1]), 1024) if limit else 1024
        self._kernels: dict[tuple[str, bool], tuple[ComputeDevice, ComputeProvider, Kernel]] = {}

    def __repr__(self) -> str:
        listed = ", ".join(f"{each.name}: {'const ' * each.constant}{each.kind}" for each in self.parameters)
        return f"<kernel {self.name}({listed}) in {_LANGUAGES[self.dialect]}>"

    def __call__(self, *args: Any, shape: int | Sequence[int] | None = None) -> Any:
        """Launch on the arguments; does not wait, except for copies to arrays of the host.

        Args:
            args: the grid and the block, each of one to three numbers, first; or neither. Then an array for each
                pointer, of its dtype (NumPy, torch, CuPy, JAX, or DLPack), and a number for each other argument. All
                arrays on devices are on one device. Arguments named after a pointer x, `x_size0`, `x_stride1`, are not
                given: they are the sizes and strides of its array, in elements. An array without such strides is
                contiguous.
            shape: in place of grid and block: at least a thread for each element, in rows and columns if the kernel has
                two axes. By default that of the first array that the kernel writes.

        Returns:
            None; for each JAX array that the kernel writes a new array (one, or a tuple), since JAX's do not change.

        Raises:
            LaunchError: a number of arguments, array, number, grid or block that does not fit; nothing ran.
            UnsupportedDtype: an array of another dtype.
            BackendUnavailable: no device here takes the kernel's language.
            CompileError: with the compiler's log.
            BoundsError, DivergenceError: an access out of bounds, or a NaN that was not there before; checked under the
                setting `debug`, which waits for the kernel.
        """
        if not (with_grid := len(args) == self._given + 2) and len(args) != self._given:
            filled = f" and fills in {len(self._measures)}" if self._measures else ""
            raise LaunchError(
                f"{repr(self)[1:-1]} takes {self._given} arguments{filled}, got {max(0, len(args) - 2)} after the grid "
                f"and the block, or {len(args)} without"
            )
        if with_grid:
            sizes, threads = self._sizes("grid", args[0]), self._sizes("block", args[1])
            if shape is not None:
                raise LaunchError(f"kernel {self.name!r}: give the grid and the block, or shape=, not both")
        left = iter(args[2:] if with_grid else args)
        values = [
            None
            if i in self._measures
            else self._array(i, each, next(left))
            if each.kind.startswith("*")
            else self._number(i, each, next(left))
            for i, each in enumerate(self.parameters)
        ]
        arrays = [value for value in values if isinstance(value, _Array)]
        debug = settings().debug
        chosen = self._device_of(arrays)
        for i, (position, name, dim) in self._measures.items():
            array = values[position]
            assert isinstance(array, _Array)  # for the type checker: the position is a pointer's
            measure = array.measure(name, dim, chosen.backend != "cpu" and not array.device)
            if measure is None:
                wanted = f"{self.parameters[i].name} wants {dim + 1} dimensions"
                raise self._refused(position, f"{wanted}, got {len(array.shape)}")
            if debug and measure < 0:
                raise self._refused(position, "the setting debug checks no strides below 0; pass a copy")
            values[i] = self._number(i, self.parameters[i], measure)
        if not with_grid:
            sizes, threads = self._grid(values, shape, chosen.backend)
        if 0 in sizes:
            return self._finish(values, {}, registry.create(chosen.backend))
        device, provider, compiled = self._on(chosen, debug)
        stream = self._stream(arrays)
        staged = {} if device.backend == "cpu" else self._staged(values, provider, device.index)
        passed = [
            value
            if not isinstance(value, _Array)
            else value.buffer or value
            if value.device
            else staged.get((value.pointer, value.size_bytes), value)
            for value in values
        ]
        self._check_alignment(passed)
        case = f"grid {'x'.join(map(str, sizes))} block {'x'.join(map(str, threads))}"
        size_bytes = sum(array.size_bytes for array in arrays)
        record = sole_record(self.name, self.dialect, device.backend, device.label, case, size_bytes=size_bytes)
        if debug:
            return self._checked(device, provider, compiled, record, (sizes, threads), values, passed, staged, stream)
        with RecordedLaunch(record, provider, device.index):
            provider.launch(compiled, sizes, threads, passed, stream)
        return self._finish(values, staged, provider)

    def _checked(
        self, device: ComputeDevice, provider: ComputeProvider, compiled: Kernel, record: OpRecord,
        sizes: tuple[tuple[int, ...], tuple[int, ...]], values: list[Any], passed: list[Any],
        staged: dict[tuple[int, int], Buffer], stream: int | None,
    ) -> Any:  # fmt: skip
        """Launch under the setting `debug`: check bounds, and the arrays for numbers that are not finite."""
        from accelerant.runtime.dispatch.plan import checked

        arrays = [value for value in values if isinstance(value, _Array)]
        report, instead = (provider.copy_to_device(np.zeros(REPORT_BYTES, np.uint8), device.index) for _ in range(2))
        if len(compiled.arguments) > len(values):
            pairs = zip(values, passed, strict=True)  # an array without elements has no memory for an index of 0
            passed = [instead if isinstance(x, _Array) and not x.size_bytes else given for x, given in pairs]
            passed = [*passed, *(array.size_bytes for array in arrays), report]

        def launch(*_: Any) -> Any:
            provider.synchronize(device.index)  # the stream may be CuPy's
            with RecordedLaunch(record, provider, device.index):
                provider.launch(compiled, *sizes, passed, stream)
            provider.synchronize(device.index)
            found = provider.copy_to_host(report, np.uint8, (REPORT_BYTES,))
            result = self._finish(values, staged, provider)
            signatures.raise_if_out_of_bounds(found, self.name, self.parameters)
            return result

        named = f"kernel {self.name!r} ({record.case} on {record.device})"
        return checked(launch, named, mutates=True)(*map(_tensor_of, arrays))

    def compile(self, device: registry.DeviceLike = None) -> Kernel:
        """Compile for a device, by default that for arrays of the host; the result has registers and memory."""
        return self._on(self._default() if registry.is_automatic(device) else registry.find_device(device))[2]

    def _where(self, position: int) -> str:
        name = self.parameters[position].name
        shown = "" if name.startswith("argument ") else f" ({name})"
        return f"kernel {self.name!r}, argument {position}{shown}"

    def _sizes(self, name: str, given: int | Sequence[int]) -> tuple[int, ...]:
        try:
            sizes = (given,) if isinstance(given, (int, np.integer)) else tuple(given)
            if 1 <= len(sizes) <= 3 and min(map(operator.index, sizes)) >= 1:
                return tuple(map(operator.index, sizes))
        except TypeError:
            pass
        text = f"{name} must be one to three numbers of at least 1, got {given!r}"
        raise LaunchError(f"kernel {self.name!r}: {text}") from None

    def _grid(
        self, values: Sequence[Any], shape: int | Sequence[int] | None, backend: str
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the grid and the block of a launch over a shape, by default that of the array that is written."""
        if shape is None:
            pairs = [
                (each, value) for each, value in zip(self.parameters, values, strict=True) if isinstance(value, _Array)
            ]
            if not pairs:
                raise LaunchError(f"kernel {self.name!r} has no array: give the grid and the block, or shape=")
            extents = next((value.shape for each, value in pairs if not each.constant), pairs[0][1].shape)
        else:
            try:
                extents = tuple(map(operator.index, shape if isinstance(shape, Sequence) else (shape,)))
            except TypeError:
                extents = (-1,)
            if min(extents, default=0) < 0:
                raise LaunchError(f"kernel {self.name!r}: shape must be numbers of at least 0, got {shape!r}")
        rows, columns = 1, math.prod(extents)
        if self._by_rows and extents:
            rows, columns = math.prod(extents[:-1]), extents[-1]
        most = self._most_threads if backend == "cpu" else min(self._most_threads, 256)
        wide = most if backend == "cpu" or not self._by_rows else min(most, 32)
        wide = max(1, min(wide, columns))
        high = max(1, min(most // wide, rows)) if self._by_rows else 1
        return (-(-columns // wide), -(-rows // high)), (wide, high)

    def _number(self, position: int, parameter: Parameter, arg: object) -> int | float:
        kind = parameter.kind
        try:
            if isinstance(arg, np.bool_):
                arg = bool(arg)
            value = check_scalar(self.name, position, kind, arg)
            if kind == "f32" and abs(value) > _LARGEST_F32 and abs(value) != float("inf"):
                raise OverflowError
        except (LaunchError, OverflowError):
            raise self._refused(position, f"wanted a number that {kind} holds, got {_shown(arg)}") from None
        return value

    def _array(self, position: int, parameter: Parameter, arg: Any) -> _Array:
        """Return what a launch needs of an array, after its checks."""
        written = not parameter.constant
        torch: Any = sys.modules.get("torch")  # NumPy's arrays do not need it
        if isinstance(arg, np.ndarray):
            if type(arg) is not np.ndarray:
                refuse_masked(arg, self._where(position))
            if written and not arg.flags.writeable:
                raise self._refused(position, "the kernel may write it, and the array is read-only; pass a copy")
            if arg.dtype != self._dtypes[position] or not arg.flags.aligned:
                native = arg.dtype.isnative and arg.flags.aligned
                dtype = arg.dtype.name if native else f"unaligned or swapped {arg.dtype}"
                self._check_dtype(position, "object" if arg.dtype.hasobject else dtype)
        library = "" if isinstance(arg, np.ndarray) else type(arg).__module__.partition(".")[0]
        if library == "cupy":
            self._check_dtype(position, arg.dtype.name)
        if library in ("cupy", ""):
            packed = self._check_layout(position, arg.flags.c_contiguous, arg.shape)
            steps = tuple(step // arg.itemsize for step in arg.strides)
            layout = _span(arg.shape, steps, arg.itemsize), arg, arg.shape, steps, packed
            if not library:
                return _Array(arg.ctypes.data, *layout)
            stream = sys.modules["cupy"].cuda.get_current_stream().ptr
            return _Array(arg.data.ptr, *layout, f"cuda:{arg.device.id}", stream=stream)
        tensor = arg
        if torch is None or not isinstance(arg, torch.Tensor):
            if not hasattr(arg, "__dlpack__"):
                remedy = "; torch.as_tensor(x) shares its memory" * hasattr(arg, "__cuda_array_interface__")
                raise self._refused(position, f"wanted an array ({parameter.kind}), got {_shown(arg)}{remedy}")
            torch = importlib.import_module("torch")
            try:
                tensor = torch.utils.dlpack.from_dlpack(arg)
            except (AttributeError, TypeError, ValueError, BufferError, RuntimeError) as error:
                raise UnsupportedDtype(f"{self._where(position)}: cannot take this array: {error}") from None
        self._check_dtype(position, _name_of(tensor.dtype))
        dense = tensor.layout == torch.strided
        packed = self._check_layout(position, dense and tensor.is_contiguous(), tensor.shape, dense)
        if written and tensor.requires_grad and torch.is_grad_enabled():
            raise self._refused(position, "the kernel may write it, and it requires a gradient; pass x.detach()")
        if tensor.is_meta:
            raise self._refused(position, "the tensor has no memory (device meta)")
        if tensor.is_neg() or tensor.is_conj():
            raise self._refused(position, "a negated view, whose memory has other numbers; pass x.resolve_neg()")
        if library in _IMMUTABLE and written:
            tensor = tensor.clone()
        shape, steps, result = tuple(tensor.shape), tensor.stride(), tensor if written else None
        if isinstance(getattr(tensor, "buffer", None), Buffer):
            if tensor.storage_offset():
                raise self._refused(position, "a view that begins within another tensor; pass a copy: x.clone()")
            layout = tensor.nbytes, (arg, tensor), shape, steps, packed
            return _Array(0, *layout, tensor.place.label, result, buffer=tensor.buffer)
        layout = _span(shape, steps, tensor.itemsize), (arg, tensor), shape, steps, packed
        return _Array(tensor.data_ptr(), *layout, "" if tensor.is_cpu else _label_of(tensor.device), result)

    def _refused(self, position: int, reason: str) -> LaunchError:
        return LaunchError(f"{self._where(position)}: {reason}")

    def _check_dtype(self, position: int, dtype: str) -> None:
        wanted = self._dtypes[position]
        if dtype == "object" or (wanted != "void" and wanted != dtype):
            shown = "numbers" if wanted == "void" else wanted
            raise UnsupportedDtype(f"{self._where(position)}: wanted an array of {shown}, got {dtype}")

    def _check_layout(self, position: int, contiguous: bool, shape: Sequence[int], dense: bool = True) -> bool:
        """Return whether an array is contiguous; refuse one that is not, but for a kernel that takes its strides."""
        if not contiguous and not (dense and position in self._strided):
            name, last = self.parameters[position].name, max(0, len(shape) - 1)
            raise self._refused(
                position, f"wanted a contiguous array, in C order; one of shape {tuple(shape)} is not: pass a copy, or "
                f"let the kernel take i64 {name}_stride0" + f" to {name}_stride{last}" * (last > 0)
            )  # fmt: skip
        return contiguous

    def _check_alignment(self, passed: Sequence[Any]) -> None:
        """Refuse addresses that the loads of vectors (float4) do not take."""
        for position, size in self._alignments.items():
            value = passed[position]
            if isinstance(value, _Array) and value.pointer % size:
                raise self._refused(position, f"its address must be a multiple of {size} bytes; copy it")

    def _device_of(self, arrays: Sequence[_Array]) -> ComputeDevice:
        labels = sorted({array.device for array in arrays if array.device})
        if len(labels) > 1:
            where = " and ".join(labels)
            raise LaunchError(f"kernel {self.name!r}: its arrays are on {where}; move them to one device")
        if labels and self._device is not None and labels[0] != self._device.label:
            raise LaunchError(f"kernel {self.name!r} is for {self._device.label}; its arrays are on {labels[0]}")
        return _device_named(labels[0]) if labels else self._device or self._default()

    def _default(self) -> ComputeDevice:
        """Return the device for arrays of the host."""
        if (setting := settings().backend) not in self._defaults:
            self._defaults[setting] = self._first_device()
        return self._defaults[setting]

    def _first_device(self) -> ComputeDevice:
        preferred = registry.find_device()
        for name in (preferred.backend, *registry.BACKENDS):
            if not registry.reason_absent(name) and self.dialect in registry.create(name).dialects:
                return preferred if name == preferred.backend else registry.find_device(name)
        wanted = "opencl" if self.dialect == "opencl" else "cuda"
        reason = registry.reason_absent(wanted)
        language = _LANGUAGES[self.dialect]
        raise BackendUnavailable(wanted, f"{reason}; {self.name!r} is {language}: only portable C runs on the CPU")

    def _on(self, device: ComputeDevice, debug: bool = False) -> tuple[ComputeDevice, ComputeProvider, Kernel]:
        if (found := self._kernels.get((device.label, debug))) is None:
            provider = registry.create(device.backend)
            if self.dialect not in provider.dialects:
                known = ", ".join(_LANGUAGES[each] for each in provider.dialects if each in _LANGUAGES) or "no kernels"
                raise CompileError(
                    f"kernel {self.name!r} is {_LANGUAGES[self.dialect]}; {device.backend} takes {known}; pass arrays "
                    "of the host (x.cpu()), or of a device that takes it"
                )
            source = signatures.checked_source(self._source, self.dialect, self.parameters) if debug else self._source
            if source is None:
                _log.warning("kernel %s: its text does not show its arguments, so bounds are not checked", self.name)
            compiled = provider.compile(source or self._source, entry=self.name, device=device.index)
            found = self._kernels[device.label, debug] = (device, provider, compiled)
        return found

    def _stream(self, arrays: Sequence[_Array]) -> int | None:
        if not (streams := {array.stream for array in arrays if array.stream is not None}):
            return None
        import torch

        (stream,) = streams
        others = any(array.stream is None for array in arrays)
        if others and stream != torch.cuda.current_stream().cuda_stream:
            raise LaunchError(
                f"kernel {self.name!r}: CuPy's arrays are on a stream of their own; launch in one stream: "
                "with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr))"
            )
        return stream

    def _staged(self, values: Sequence[Any], provider: ComputeProvider, device: int) -> dict[tuple[int, int], Buffer]:
        hosts = [(i, value) for i, value in enumerate(values) if isinstance(value, _Array) and not value.device]
        for (i, one), (j, other) in itertools.combinations(hosts, 2):
            same = (one.pointer, one.size_bytes) == (other.pointer, other.size_bytes)
            apart = one.pointer + one.size_bytes <= other.pointer or other.pointer + other.size_bytes <= one.pointer
            if not (same or apart or (self.parameters[i].constant and self.parameters[j].constant)):
                raise LaunchError(f"{self._where(i)} shares memory with argument {j}, and is copied; pass a copy")
        staged: dict[tuple[int, int], Buffer] = {}
        for _, array in hosts:
            if (array.pointer, array.size_bytes) not in staged:
                staged[array.pointer, array.size_bytes] = provider.copy_to_device(array.host_bytes(), device)
        return staged

    def _finish(self, values: Sequence[Any], staged: dict[tuple[int, int], Buffer], provider: ComputeProvider) -> Any:
        """Copy arrays that the kernel may have written back to the host; return JAX's."""
        results = []
        for parameter, value in zip(self.parameters, values, strict=True):
            if parameter.constant or not isinstance(value, _Array):
                continue
            buffer = staged.get((value.pointer, value.size_bytes))
            if buffer is not None and not value.device:
                value.write(provider.copy_to_host(buffer, np.uint8, (buffer.size_bytes,)))
            if value.result is not None:
                if (given := value.owner[0]) is value.result:
                    import torch

                    if not given.is_inference():
                        torch.autograd.graph.increment_version(given)
                elif type(given).__module__.partition(".")[0] in _IMMUTABLE:
                    results.append(sys.modules["jax"].dlpack.from_dlpack(value.result))
        return None if not results else results[0] if len(results) == 1 else tuple(results)


def _span(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Return the bytes from the first element of an array to the end of its last one in memory."""
    if 0 in shape:
        return 0
    return (1 + sum((size - 1) * max(0, step) for size, step in zip(shape, strides, strict=True))) * itemsize


def _tensor_of(array: _Array) -> Any:
    import torch

    if array.result is not None:
        return array.result
    if isinstance(array.owner, tuple):
        return array.owner[1]
    is_numpy = isinstance(array.owner, np.ndarray)
    return torch.from_numpy(array.owner) if is_numpy else torch.utils.dlpack.from_dlpack(array.owner)


@functools.cache
def _name_of(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _label_of(device: Any) -> str:
    return f"{registry.provider_of(device).name}:{device.index or 0}"


@functools.cache
def _device_named(label: str) -> ComputeDevice:
    return registry.find_device(label)


def _shown(arg: object) -> str:
    if isinstance(arg, (int, float, str, np.generic)) or arg is None:
        return repr(arg)[:80]
    return f"{type(arg).__module__}.{type(arg).__name__}"


def _stated(position: int, text: object) -> Parameter:
    kind = text.removeprefix("const ").strip() if isinstance(text, str) else ""
    base = kind[1:].partition("x")[0]
    known = base in (*_DTYPES, "void") if kind.startswith("*") else kind in SCALAR_CTYPES
    if not known:
        wanted = "wanted a type like 'f32', 'i64', '*f32' or 'const *f32'"
        raise ConfigError(f"arguments, {position}: {wanted}, got {text!r}")
    return Parameter(f"argument {position}", kind, kind.startswith("*") and str(text).startswith("const "))


def _read(source: str | os.PathLike[str]) -> tuple[str, Path | None]:
    if isinstance(source, str) and "{" in source:
        return source, None
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"wanted a kernel's text or the path of a file, got {_shown(source)}")
    path = Path(source)
    try:
        return read_regular(path).decode("utf-8-sig").replace("\r\n", "\n"), path
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the kernel's file {str(path)[:200]!r}: {reason_of(error)}") from None
