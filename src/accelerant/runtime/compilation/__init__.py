"""Kernels before, during and after compilation: sources, compilers, the disk cache, inspection."""

from accelerant._lazy import lazy

TYPE_CHECKING = False  # of typing, whose import takes long: see accelerant/__init__.py
if TYPE_CHECKING:
    from accelerant.runtime.compilation.cuda import *
    from accelerant.runtime.compilation.kernel import *

__all__ = [
    "DEFAULT_BLOCK", "LIMITS", "CompileOptions", "CompilerMessage", "EntryPoint", "Inspection",
    "MultiprocessorLimits", "Occupancy", "amd_compiler", "inspect_amd", "inspect_cuda", "known_targets",
    "nvrtc_version", "occupancy", "read_messages",
]  # fmt: skip

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, __all__, ("kernel", "cuda"))
