"""The kernel cache as a list: what is in it, how old, how large; and filling it ahead of time.

Reading and writing single entries is cache.py's; this is for the people who look after the folder.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerant.errors import CompileError
from accelerant.runtime.compilation.cache import KernelCache
from accelerant.runtime.compilation.kernel import Binary, Kernel, KernelSource, Resources
from accelerant.runtime.files import decode_json
from accelerant.runtime.providers.cuda import CudaProvider

__all__ = ["AheadOfTime", "Entry", "entries", "remove", "remove_leftovers"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One compiled kernel source on disk.

    Attributes:
        key: name of its folder.
        name: of the kernel source; "" for a damaged entry.
        target: the architecture that it is for.
        compiler: with its version.
        size_bytes: of the entry's files.
        age_s: seconds since it was written.
        registers: the most that an entry point takes a thread; None where the compiler does not say.
        damage: why it cannot be read; "" for a sound one. The next use compiles it again.
    """

    key: str
    name: str
    target: str
    compiler: str
    size_bytes: int
    age_s: float
    registers: int | None
    damage: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)


def entries(root: Path | None = None) -> list[Entry]:
    """Every entry, by name and target; damaged ones first.

    Args:
        root: the folder; the settings' by default.
    """
    folder = KernelCache(root).root
    if not folder.is_dir():
        return []
    found = [_entry(each) for each in folder.iterdir() if each.is_dir() and not each.name.startswith(".")]
    return sorted(found, key=lambda entry: (entry.name, entry.target, entry.age_s))


def _entry(folder: Path) -> Entry:
    size, written = 0, time.time()
    for path in folder.iterdir():
        stat = path.stat()
        size += stat.st_size
        written = min(written, stat.st_mtime)
    age_s = max(0.0, time.time() - written)
    try:
        report = decode_json((folder / "report.json").read_bytes())
        counts = [each["registers"] for each in report["resources"].values() if each["registers"] is not None]
        name, target, compiler = (str(report.get(part, "")) for part in ("name", "target", "compiler"))
        if not (folder / "code").is_file():
            raise ValueError("no code")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Entry(folder.name, "", "", "", size, age_s, None, str(error) or type(error).__name__)
    return Entry(folder.name, name, target, compiler, size, age_s, max(counts, default=None))


def remove(doomed: Iterable[Entry], root: Path | None = None) -> int:
    """Remove entries; processes that have loaded them go on.

    Returns:
        the bytes that came free.

    Raises:
        OSError: the folder may not be written.
    """
    folder = KernelCache(root).root
    freed = 0
    for entry in doomed:
        try:
            shutil.rmtree(folder / entry.key)
        except FileNotFoundError:  # another process was first
            continue
        freed += entry.size_bytes
    return freed


def remove_leftovers(root: Path | None = None) -> int:
    """Remove the temporary folders of processes that died while writing; how many there were."""
    return KernelCache(root).remove_leftovers()


class AheadOfTime(CudaProvider):
    """The CUDA provider without a device: `compile` fills the disk cache for an architecture and loads nothing.

    Everything that decides an entry's key is the provider's own code, so a device of that architecture finds the entry.

    Args:
        target: "sm_90", "sm_90a".
    """

    def __init__(self, target: str) -> None:
        self.target = target

    def serves(self, source: KernelSource) -> bool:
        """Whether a source is meant for the architecture."""
        return not source.targets or bool({self.target, f"{self.target}a"} & set(source.targets))

    def _target(self, source: KernelSource, device: int) -> str:
        """As the provider chooses on a device of the architecture."""
        if not self.serves(source):
            raise CompileError(f"kernel {source.name!r} is for {', '.join(source.targets)}; asked for {self.target}")
        return self.target if not source.targets or self.target in source.targets else f"{self.target}a"

    def _load(
        self, source: KernelSource, entry: str, binary: Binary, target: str, device: int, from_cache: bool, began: float
    ) -> Kernel:
        """A description in place of a loaded kernel: it cannot be launched."""
        return Kernel(
            name=entry,
            backend=self.name,
            device=-1,
            target=target,
            arguments=source.entries[entry],
            resources=binary.resources.get(entry, Resources()),
            compile_ms=(time.perf_counter() - began) * 1e3,
            from_cache=from_cache,
            metadata=binary.metadata,
            handle=None,
        )
