"""Names of a package that load on first use, so that importing the package costs little."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # of typing, whose import takes long: see accelerant/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

__all__ = ["lazy"]


def lazy(
    package: str, names: Sequence[str], modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__` (PEP 562).

    Args:
        package: the package's `__name__`.
        names: its `__all__`. Names that no module has are modules of the package.
        modules: module of the package -> names that it defines.
    """
    module_of = {name: module for module, defined in modules.items() for name in defined}

    def get(name: str) -> Any:
        if name in module_of:
            return getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)
        if name in names:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: sorted(names)
