"""The errors Accelerant raises, one tree.

    AccelerantError
    ├── BackendUnavailable      an explicitly chosen backend is not on this machine
    ├── MissingDependency       an optional package is needed; the message names the extra
    ├── CompileError            a kernel did not compile; carries the compiler's log
    ├── LaunchError             the device refused a launch; nothing ran
    ├── OutOfMemory             an allocation failed or would pass a limit
    ├── DeviceLost              a sticky device error: this process is done with the device
    ├── ShapeError              shapes do not fit one another               (also ValueError)
    ├── UnsupportedDtype        a dtype the operation does not take         (also TypeError)
    ├── UnsupportedCase         valid input that no implementation serves
    ├── FormatError             a file or message is not what it claims     (also ValueError)
    ├── ConfigError             a setting or argument has no meaning        (also ValueError)
    ├── DivergenceError         a loss or gradient is no longer finite
    ├── ProtocolError           a multi-party protocol was not followed
    ├── TimeLimitExceeded       a call or a wait passed its time limit      (also TimeoutError)
    └── BudgetExceeded          the privacy budget would be overspent

and one warning, FallbackWarning, where something else than the first choice ran.
Messages say what was wanted, what came and what to do.
"""

from __future__ import annotations

__all__ = [
    "AccelerantError",
    "BackendUnavailable",
    "BudgetExceeded",
    "CompileError",
    "ConfigError",
    "DeviceLost",
    "DivergenceError",
    "FallbackWarning",
    "FormatError",
    "LaunchError",
    "MissingDependency",
    "OutOfMemory",
    "ProtocolError",
    "ShapeError",
    "TimeLimitExceeded",
    "UnsupportedCase",
    "UnsupportedDtype",
]


class AccelerantError(Exception):
    """The root: `except AccelerantError` catches whatever this library raises on purpose."""


class BackendUnavailable(AccelerantError):
    """An explicitly chosen backend is not there.

    Attributes:
        backend: its name, for example "cuda".
        reason: why, for example "no NVIDIA driver: libcuda.so.1 not found".
    """

    def __init__(self, backend: str, reason: str) -> None:
        self.backend = backend
        self.reason = reason
        super().__init__(f"backend {backend!r} is not available: {reason}")


class MissingDependency(AccelerantError):
    """An optional package is needed.

    Attributes:
        package: the package that could not be imported.
        extra: the extra of Accelerant that installs it.
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        self.package = package
        self.extra = extra
        super().__init__(f"{purpose} needs {package}: pip install 'accelerant[{extra}]'")


class CompileError(AccelerantError):
    """A kernel did not compile.

    Attributes:
        log: the compiler's own words.
    """

    def __init__(self, message: str, log: str = "") -> None:
        self.log = log
        super().__init__(f"{message}\n{log}" if log else message)


class LaunchError(AccelerantError):
    """The device refused a launch; nothing ran and nothing was written."""


class OutOfMemory(AccelerantError):
    """An allocation failed or would pass a limit."""


class DeviceLost(AccelerantError):
    """A sticky device error (illegal access, trap): this process can no longer use the device."""


class ShapeError(AccelerantError, ValueError):
    """Shapes do not fit one another."""


class UnsupportedDtype(AccelerantError, TypeError):
    """A dtype that the operation does not take."""


class UnsupportedCase(AccelerantError):
    """Valid input that no implementation serves on this device."""


class DivergenceError(AccelerantError):
    """Training went to a loss or gradient that is not finite; names the step and the last good checkpoint."""


class FormatError(AccelerantError, ValueError):
    """A file or message is not what it claims to be."""


class ConfigError(AccelerantError, ValueError):
    """A setting or argument has no meaning; the message names it and what is allowed."""


class ProtocolError(AccelerantError):
    """A multi-party protocol was not followed by a peer."""


class TimeLimitExceeded(AccelerantError, TimeoutError):
    """A call or a wait passed its time limit; the message names the limit and how far it came."""


class BudgetExceeded(AccelerantError):
    """The privacy budget would be overspent."""


class FallbackWarning(UserWarning):
    """Something else than the first choice ran; the message names both and the reason."""
