"""Providers, devices, kernels, dispatch, ledger; knows no op."""

TYPE_CHECKING = False  # of typing, whose import takes long: see accelerant/__init__.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

accelerator_on: "Callable[[str, int], Any]"
"""Makes an Accelerator without fallback on a device of a backend; the package above sets it."""
