"""Names of a package that load on first use, so that importing the package costs little."""

from __future__ import annotations

import importlib.util

TYPE_CHECKING = False  # of typing, whose import takes long: see accelerant/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

__all__ = ["lazy"]


def lazy(
    package: str, names: Sequence[str], modules: Mapping[str, Sequence[str]] | Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__` (PEP 562) for its `__all__`. Its modules are attributes, too.

    `modules` has the names that each module of the package defines, or the modules to search, in this order.
    """

    def get(name: str) -> Any:
        for module in modules if name in names else ():
            if not isinstance(modules, dict) or name in modules[module]:
                found = importlib.import_module(f"{package}.{module}")
                if hasattr(found, name):
                    return getattr(found, name)
        if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}"):
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: sorted(names)
