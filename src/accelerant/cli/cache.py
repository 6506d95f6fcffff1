"""`accelerant cache`: the compiled kernels on disk."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from accelerant.cli.help import Group, JsonOutput
from accelerant.cli.terminal import ProgressLine, print_table, span_text
from accelerant.errors import AccelerantError, ConfigError
from accelerant.runtime.files import escaped

if TYPE_CHECKING:
    from accelerant.runtime.compilation.cache import CacheEntry
    from accelerant.runtime.compilation.kernel import KernelSource
    from accelerant.runtime.provider import ComputeProvider

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
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    json_output: JsonOutput = False,
) -> None:
    """Remove compiled kernels; they are compiled again at their next use."""
    from accelerant.runtime.compilation.cache import KernelCache

    entries = _selected(KernelCache().entries(), names)
    if entries and not yes:
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
    arch: Annotated[
        list[str] | None,
        typer.Option(
            help="Compile for this NVIDIA architecture, without a GPU; may be repeated. all: every supported one."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Compile for this device.")] = "auto",
    model: Annotated[
        str | None,
        typer.Option(
            help="Compile instead what a patched language model of this configuration needs in training: a folder with "
            "config.json, or a type of transformers (gpt2). Needs the GPU, and the extra huggingface."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of the model's batch.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each sequence.")] = 256,
    dtype: Annotated[str, typer.Option(help="The dtype of autocast: bfloat16 or float16; float32: none.")] = "bfloat16",
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
    from accelerant.cli.compile import known_targets_of
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
