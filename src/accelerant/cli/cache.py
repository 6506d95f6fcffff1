"""`accelerant cache` and `compile`: the compiled kernels on disk; a kernel's resources on each architecture."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import typer

from accelerant.cli.help import Group, JsonOutput, examples, option
from accelerant.cli.terminal import ProgressLine, print_table, span_text
from accelerant.errors import AccelerantError, CompileError, ConfigError, MissingFile
from accelerant.runtime.compilation.kernel import CompileOptions
from accelerant.runtime.files import escaped

if TYPE_CHECKING:
    from rich.text import Text

    from accelerant.runtime.compilation.cache import CacheEntry
    from accelerant.runtime.compilation.cuda import CompilerMessage, EntryPoint, Inspection
    from accelerant.runtime.compilation.kernel import KernelSource
    from accelerant.runtime.provider import ComputeProvider

_Failed: TypeAlias = "dict[str, tuple[str, list[CompilerMessage]]]"
"""Architecture -> the compiler's log, and its errors."""

_MOST_BYTES = 1 << 26  # of a source file

TEMPLATES = ("matmul", "relu", "attention")  # example kernels in the folder templates

_EXAMPLES = """\
accelerant compile --template matmul --out mine.cu
accelerant compile mine.cu
accelerant compile mine.cu --arch sm_90a --block 128 --json
accelerant compile mine.cu --fast-math -D WIDTH=8 -I include --entry 'scale<float, 4>'
accelerant compile mine.cu --arch sm_80 --ptx"""


_code = partial(option, panel="Code")


@examples(_EXAMPLES)
@dataclass(frozen=True, kw_only=True)
class CompileCommand:
    """Compile a CUDA file and show its entry points: registers, spills, shared memory, occupancy.

    Occupancy is for the threads of __launch_bounds__, of --block, or 256. Exit status 1 if it does not compile.
    """

    file: Annotated[Path | None, typer.Argument(metavar="FILE.cu", help="CUDA C++, or C in the portable dialect.")] = (
        None
    )
    arch: list[str] | None = option(
        "sm_90, sm_90a, ..., or gfx90a, ... (portable C); may be repeated. all: every sm_ of our ops."
    )
    block: int | None = option("Threads a block, for occupancy.")
    shared: int = option("Bytes of dynamic shared memory a block, for occupancy.", default=0)
    include: list[Path] | None = option("A folder with headers; may be repeated.", "--include", "-I")
    entry: list[str] | None = option("A template to instantiate, like 'scale<float, 4>'; may be repeated.")
    optimize: int | None = _code("Level of the assembler, 0 to 3.", "--optimize", "-O")
    fast_math: bool = _code("Faster, less precise arithmetic in float32.", default=False)
    ftz: bool | None = _code("Flush subnormal numbers to zero.")
    prec_div: bool | None = _code("Correctly rounded division.")
    prec_sqrt: bool | None = _code("Correctly rounded square root.")
    fmad: bool | None = _code("Contract a * b + c to one operation.")
    define: list[str] | None = option("A macro; may be repeated.", "--define", "-D", metavar="NAME=VALUE", panel="Code")
    nvrtc: list[str] | None = option("Any option of NVRTC; may be repeated.", metavar="OPTION", panel="Code")
    ptxas: list[str] | None = option("Any option of ptxas; may be repeated.", metavar="OPTION", panel="Code")
    ptx: bool = option("Print the PTX instead of the report.", default=False)
    json_output: bool = option("Print the report as JSON.", "--json", default=False)
    template: str | None = option(f"Print an example kernel: {', '.join(TEMPLATES)}.")
    out: Path | None = option("Write the template there; stdout by default.", metavar="FILE")

    def run(self) -> None:
        """Check the options, then compile for each architecture and print what was found."""
        if self.template is not None:
            _write_template(self.template, self.file, self.out)
            return
        if self.file is None:
            raise ConfigError("name a file to compile, or --template matmul, relu or attention")
        if self.out is not None:
            raise ConfigError("--out goes with --template")
        if self.block is not None and not 1 <= self.block <= 1024:
            raise ConfigError(f"--block must be 1 to 1024 threads, got {self.block}")
        if self.shared < 0:
            raise ConfigError(f"--shared must be at least 0 bytes, got {self.shared}")
        text = _read(self.file)
        for folder in self.include or ():
            if not folder.is_dir():
                raise MissingFile(f"--include {folder}: no such folder")
        names = self.arch or ["all"]
        known = known_targets_of([each for each in names if not each.startswith("gfx")])
        targets = [*known, *(each for each in dict.fromkeys(names) if each.startswith("gfx"))]
        done, failed = self._compiled(self.file, text, targets)
        if self.json_output:
            print(json.dumps(_to_dict(str(self.file), targets, done, failed, self.ptx), indent=1))
        else:
            _print_messages(str(self.file), targets, done, failed)
            if self.ptx:
                for inspection in done:
                    print(inspection.ptx.strip())
            elif done:
                titles = ("registers", "spills", "stack", "shared", "block", "blocks/SM", "occupancy")
                rows = [(one.target, entry.name, *_cells(entry, self.shared)) for one in done for entry in one.entries]
                print_table(("arch", "entry point", *titles, "limited by"), rows, right=titles)
        if failed:
            raise typer.Exit(1)

    def _compiled(self, file: Path, text: str, targets: Sequence[str]) -> tuple[list[Inspection], _Failed]:
        from accelerant.runtime.compilation.cuda import CompilerMessage, inspect_amd, inspect_cuda, read_messages

        macros = (macro.partition("=") for macro in self.define or ())
        options = CompileOptions(
            optimize=self.optimize, fast_math=self.fast_math, ftz=self.ftz, prec_div=self.prec_div,
            prec_sqrt=self.prec_sqrt, fmad=self.fmad, include=self.include or (), nvrtc=self.nvrtc or (),
            ptxas=self.ptxas or (), defines=tuple((name, value if eq else "1") for name, eq, value in macros),
        )  # fmt: skip
        about: dict[str, Any] = {"name": str(file), "include": [file.resolve().parent], "options": options}
        done: list[Inspection] = []
        failed: _Failed = {}
        for target in targets:
            try:
                done.append(
                    inspect_amd(text, target, **about)
                    if target.startswith("gfx")
                    else inspect_cuda(
                        text, target, **about, entries=self.entry or (), block=self.block,
                        dynamic_shared_bytes=self.shared,
                    )
                )  # fmt: skip
            except CompileError as error:
                errors = [one for one in read_messages(error.log, str(file)) if one.severity == "error"]
                errors = errors or [CompilerMessage("error", str(file), None, error.log or str(error))]
                failed[target] = error.log, errors
        return done, failed


def _read(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            content = stream.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:  # /dev/zero has no end
            raise ConfigError(f"{file} has more than {_MOST_BYTES >> 20} MiB")
        return content.decode()
    except FileNotFoundError:
        raise MissingFile(f"no file {file}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not text in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None


def known_targets_of(names: list[str]) -> list[str]:
    """Return the named architectures; ConfigError for one that the compiler does not know."""
    from accelerant.runtime.compilation.cuda import known_targets
    from accelerant.runtime.compilation.kernel import CUDA_TARGETS

    known = known_targets() if names else ()
    targets: list[str] = []
    for name in names:
        plain, suffix = (name[:-1], name[-1]) if name[-1:] in ("a", "f") else (name, "")
        least = {"": 0, "a": 90, "f": 100}[suffix]  # variants with special instructions exist from there on
        if name == "all":
            targets += [target for target in CUDA_TARGETS if target in known]
        elif plain in known and int(plain.removeprefix("sm_")) >= least:
            targets.append(name)
        else:
            raise ConfigError(
                f"--arch: unknown architecture {name!r}; known are all, {', '.join(known)}, "
                "and with the suffix a from sm_90 on, f from sm_100 on"
            )
    return list(dict.fromkeys(targets))


def _write_template(name: str, file: Path | None, out: Path | None) -> None:
    if file is not None:
        raise ConfigError(f"--template takes no file to compile, got {file}")
    if name not in TEMPLATES:
        raise ConfigError(f"--template: unknown template {name!r}; known are {', '.join(TEMPLATES)}")
    text = (Path(__file__).parents[1] / "templates" / f"{name}.cu").read_text(encoding="utf-8")
    if out is None:
        print(text, end="")
        return
    try:
        with out.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise ConfigError(f"--out {out}: the file exists already") from None
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from None
    print(f"wrote {out}; next:  accelerant compile {out}", file=sys.stderr)


def _print_messages(file: str, targets: list[str], done: list[Inspection], failed: _Failed) -> None:
    """Print each message once, with its architectures unless it concerns all."""
    targets_of: dict[CompilerMessage, list[str]] = {}
    by_target: list[tuple[str, Sequence[CompilerMessage]]] = [(one.target, one.warnings) for one in done]
    by_target += [(target, messages) for target, (_, messages) in failed.items()]
    for target, messages in by_target:
        for message in messages:
            targets_of.setdefault(message, []).append(target)
    for message, concerned in targets_of.items():
        scope = "" if len(concerned) == len(targets) else f"for {', '.join(concerned)}: "
        print("\n".join(escaped(line.expandtabs()) for line in f"{scope}{message}".splitlines()), file=sys.stderr)
    if done and not done[0].entries:
        print(
            f"{escaped(file)}: no entry point: nothing is marked __global__, or no template is instantiated "
            "(--entry 'NAME<float>')",
            file=sys.stderr,
        )


def _cells(entry: EntryPoint, dynamic_bytes: int) -> tuple[str | Text, ...]:
    from rich.text import Text

    def shown(number: int | None) -> str:
        return "-" if number is None else str(number)

    used, occupancy = entry.resources, entry.occupancy
    spills = Text(shown(used.spill_bytes), style="red" if used.spill_bytes else "")
    shared = "-" if used.shared_bytes is None else str(used.shared_bytes + dynamic_bytes)
    cells = (shown(used.registers), spills, shown(used.stack_bytes), shared)
    if occupancy is None:
        return *cells, "-", "-", "-", "its limits are not known"
    return *cells, str(occupancy.threads), str(occupancy.blocks), f"{occupancy.percent:.0f} %", occupancy.limited_by


def _to_dict(file: str, targets: list[str], done: list[Inspection], failed: _Failed, ptx: bool) -> dict[str, Any]:
    from accelerant.runtime.compilation.cuda import amd_compiler, nvrtc_version

    rows: list[dict[str, Any]] = [
        {
            "target": inspection.target,
            "compiled": True,
            "compile_ms": inspection.compile_ms,
            "entries": [entry.to_dict() for entry in inspection.entries],
            "messages": [asdict(message) for message in inspection.warnings],
            **({"ptx": inspection.ptx} if ptx else {}),
        }
        for inspection in done
    ]
    rows += [
        {"target": target, "compiled": False, "messages": [asdict(message) for message in messages], "log": log}
        for target, (log, messages) in failed.items()
    ]
    rows.sort(key=lambda row: targets.index(row["target"]))
    compiler = amd_compiler() if all(target.startswith("gfx") for target in targets) else nvrtc_version()
    return {"file": file, "compiler": compiler, "targets": rows}


compile = CompileCommand


_Names = Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Names of kernels; * matches any text.")]
_Named = TypeVar("_Named", "CacheEntry", "Shipped")


def list_entries(names: _Names = None, json_output: JsonOutput = False) -> None:
    """List the compiled kernels on disk."""
    from accelerant.config import settings
    from accelerant.runtime.compilation.cache import KernelCache

    entries = _selected(KernelCache().entries(), names)
    if json_output:
        print(json.dumps([entry.to_dict() for entry in entries], indent=1))
        return
    titles = ("kernel", "target", "compiler", "size", "age", "registers", "key")
    rows = [
        (
            f"damaged: {escaped(entry.damage)}" if entry.damage else escaped(entry.name), escaped(entry.target),
            escaped(entry.compiler), _size(entry.size_bytes), span_text(entry.age_s),
            "-" if entry.registers is None else str(entry.registers), entry.key[:12],
        )
        for entry in entries
    ]  # fmt: skip
    if rows:
        print_table(titles, rows, right=("size", "age", "registers"))
    print(
        f"{_total(entries, sum(entry.size_bytes for entry in entries))}, in {escaped(settings().cache_dir / 'kernels')}"
    )


def clear(
    names: _Names = None,
    yes: bool = option("Do not ask for confirmation.", default=False),
    json_output: JsonOutput = False,
) -> None:
    """Remove compiled kernels; they are compiled again at their next use."""
    from accelerant.runtime.compilation.cache import KernelCache

    if (entries := _selected(KernelCache().entries(), names)) and not yes:
        if json_output or not sys.stdin.isatty():
            raise ConfigError(
                f"clearing {len(entries)} of the cache's entries needs --yes without a terminal to ask on"
            )
        typer.confirm(f"Remove {len(entries)} of the cache's entries?", abort=True)
    removed = KernelCache().clear(entries)
    freed = sum(entry.size_bytes for entry in removed)
    leftovers = 0 if names else KernelCache().remove_leftovers()
    if json_output:
        print(json.dumps({"removed": len(removed), "freed_bytes": freed, "leftovers": leftovers}))
    else:
        print(f"removed {_total(removed, freed)}")


def warm(
    names: _Names = None,
    arch: list[str] | None = option(
        "Compile for this NVIDIA architecture, without a GPU; may be repeated. all: every supported one."
    ),
    device: str = option("Compile for this device.", default="auto"),
    model: str | None = option(
        "Compile instead what a patched language model of this configuration needs in training: a folder with "
        "config.json, or a type of transformers (gpt2). Needs the GPU, and the extra huggingface."
    ),
    batch: int = option("Sequences of the model's batch.", min=1, default=8),
    tokens: int = option("Tokens of each sequence.", min=1, default=256),
    dtype: str = option("The dtype of autocast: bfloat16 or float16; float32: none.", default="bfloat16"),
    json_output: JsonOutput = False,
) -> None:
    """Compile the shipped kernels in advance, so that first calls load machine code instead of compiling.

    A call whose sizes are not multiples of 16 may still compile its own variant. With --model, a model of that
    configuration with random weights takes a step on the GPU, and every kernel that it asks for is compiled.
    """
    if arch and device != "auto":
        raise ConfigError(f"--arch and --device {device} exclude each other")
    from accelerant.bench.suite import dtypes_named
    from accelerant.runtime.compilation.cache import KernelCache

    (low,) = dtypes_named((dtype,)).values()
    KernelCache().require_writable()
    if model is not None:
        _warm_model(model, device, batch, tokens, low, json_output, excluded=(names or []) + (arch or []))
        return
    kernels = _selected(shipped_kernels(), names)
    providers = _providers(arch, device)
    jobs = [(kernel, *target) for target in providers for kernel in kernels if _serves(target[1], kernel.source)]
    results: list[dict[str, Any]] = []
    progress: Callable[[str], None] = (lambda text: None) if json_output else ProgressLine(every_s=0.0)
    for number, (kernel, label, provider) in enumerate(jobs, 1):
        progress(f"[{number}/{len(jobs)}] {label} {kernel.name} {kernel.detail}")
        results.append(_compile(kernel, label, provider))
    progress("")
    failed = [row for row in results if row["error"]]
    if json_output:
        print(json.dumps(results, indent=1))
    else:
        for row in failed:
            print(f"failed: {row['kernel']} {row['detail']} for {row['target']}: {row['error']}", file=sys.stderr)
        fresh = [row["compile_ms"] for row in results if not row["error"] and not row["from_cache"]]
        skipped = len(kernels) * len(providers) - len(jobs)
        rest = f", {skipped} are for other devices" if skipped else ""
        labels = ", ".join(label for label, _ in providers)
        known = len(results) - len(failed) - len(fresh)
        print(f"{labels}: {len(fresh)} compiled in {sum(fresh) / 1e3:.1f} s, {known} were there already{rest}")
    if failed:
        raise typer.Exit(1)


def _warm_model(
    name: str, device: str, batch: int, tokens: int, low: Any, json_output: bool, excluded: Sequence[str]
) -> None:
    import torch

    from accelerant.nn.patching.api import compile_kernels, model_of
    from accelerant.runtime import registry

    if excluded:
        raise ConfigError(f"--model takes neither names of kernels nor --arch: leave out {', '.join(excluded)}")
    chosen = registry.find_device(device)
    if chosen.backend != "cuda":
        raise ConfigError(f"--model takes a training step on an NVIDIA GPU; the chosen device is {chosen.label}")
    progress: Callable[[str], None] = (lambda text: None) if json_output else ProgressLine(every_s=0.0)
    built = model_of(name, torch.device(chosen.torch_device))
    compiled = compile_kernels(built, batch, tokens, None if low == torch.float32 else low, progress)
    progress("")
    if json_output:
        print(json.dumps({"model": type(built).__name__, "target": chosen.architecture, "compiled": compiled}))
    else:
        print(f"{type(built).__name__} on {chosen.architecture}: {len(compiled)} kernels compiled")


def _providers(arch: list[str] | None, device: str) -> list[tuple[str, ComputeProvider]]:
    from accelerant.runtime import registry
    from accelerant.runtime.providers.cuda import OfflineCudaProvider

    if arch:
        return [(target, OfflineCudaProvider(target)) for target in known_targets_of(arch)]
    chosen = registry.find_device(device)
    if chosen.backend == "cuda":
        return [(chosen.architecture, OfflineCudaProvider(chosen.architecture))]
    return [(chosen.backend, registry.create(chosen.backend))]


def _serves(provider: ComputeProvider, source: KernelSource) -> bool:
    from accelerant.runtime.providers.cuda import OfflineCudaProvider

    known = ("llvm",) if provider.name == "cpu" else provider.dialects  # there may be no C compiler
    if not any(dialect in source.dialects for dialect in known):
        return False
    return not isinstance(provider, OfflineCudaProvider) or provider.serves(source)


def _compile(kernel: Shipped, label: str, provider: ComputeProvider) -> dict[str, Any]:
    row: dict[str, Any] = {"kernel": kernel.name, "detail": kernel.detail, "target": label, "error": ""}
    try:
        compiled = provider.compile(kernel.source, entry=next(iter(kernel.source.entries)))
    except AccelerantError as error:
        return {**row, "error": str(error)}
    return {**row, "target": compiled.target, "from_cache": compiled.from_cache, "compile_ms": compiled.compile_ms}


@dataclass(frozen=True, slots=True)
class Shipped:
    """A specialization of a kernel that the package ships; `detail` has its element types and constants."""

    name: str
    detail: str
    source: KernelSource


def shipped_kernels() -> list[Shipped]:
    """Return the kernels that the package ships; imports Triton, if installed, for the signatures of its functions.

    Ops list theirs in `KERNELS` of their folder's cases.py. Of algebra's kernels, which are compiled for each field and
    curve, only the sum in Goldilocks is among them.
    """
    import importlib.util
    import pkgutil

    from accelerant.algebra.field.program import field_add_source
    from accelerant.runtime.compilation.kernel import KernelSource

    kernels = []
    has_triton = importlib.util.find_spec("triton") is not None
    modules = pkgutil.iter_modules(importlib.import_module("accelerant.ops").__path__)
    for folder in sorted(entry.name for entry in modules if entry.ispkg and not entry.name.startswith("_")):
        name = f"accelerant.ops.{folder}.cases"
        if importlib.util.find_spec(name) is None:
            continue
        for kernel in getattr(importlib.import_module(name), "KERNELS", ()):
            if isinstance(kernel, KernelSource):
                kernels.append(Shipped(kernel.name, "", kernel))
            elif has_triton:
                source: KernelSource = kernel.source()
                kernels.append(Shipped(source.name, str(kernel.name).removeprefix(source.name).strip(), source))
    return [*kernels, Shipped("field_add", "", field_add_source())]


def _selected(entries: list[_Named], names: list[str] | None) -> list[_Named]:
    """Return the entries whose name matches a pattern; ConfigError for a pattern that matches none."""
    if not names:
        return entries
    for pattern in names:
        if not any(fnmatchcase(entry.name, pattern) for entry in entries):
            known = sorted({entry.name for entry in entries if entry.name})
            raise ConfigError(f"no kernel {pattern!r} here; there are {', '.join(known) or 'none'}")
    return [entry for entry in entries if any(fnmatchcase(entry.name, pattern) for pattern in names)]


def _total(entries: Sequence[CacheEntry], size_bytes: int) -> str:
    return f"{len(entries)} {'entry' if len(entries) == 1 else 'entries'}, {_size(size_bytes)}"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**10:.1f} KiB" if size_bytes < 2**20 else f"{size_bytes / 2**20:.1f} MiB"


cache = Group(
    "Compiled kernels on disk: list, remove, compile in advance.",
    {
        list_entries: "list\naccelerant cache list 'softmax*' --json",
        clear: "clear --yes\naccelerant cache clear 'gelu*'",
        warm: "warm\naccelerant cache warm --arch sm_90 --arch sm_80\naccelerant cache warm field_add --device cpu\n"
        "accelerant cache warm --model gpt2 --batch 8 --tokens 256",
    },
)
