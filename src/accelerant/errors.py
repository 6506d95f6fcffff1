"""The errors Accelerant raises, one tree.

    AccelerantError
    ├── BackendUnavailable      an explicitly chosen backend is not on this machine
    ├── MissingDependency       an optional package is needed; the message names it (also ImportError)
    ├── CompileError            a kernel did not compile; carries the compiler's log
    ├── LaunchError             the device refused a launch; nothing ran
    ├── BoundsError             a kernel passed the end of an array (setting debug)   (also IndexError)
    ├── OutOfMemory             an allocation failed or would pass a limit  (also MemoryError)
    ├── DeviceLost              a sticky device error: this process can no longer use the device
    ├── ShapeError              incompatible shapes                         (also ValueError)
    ├── UnsupportedDtype        a dtype that the operation does not take    (also TypeError)
    ├── UnsupportedCase         valid input that no implementation serves
    ├── FormatError             a malformed file or message                 (also ValueError)
    ├── ConfigError             an invalid setting or argument              (also ValueError)
    ├── IndexOutOfRange         an index or a class that is not there (also ConfigError and IndexError)
    ├── MissingFile             no such file or folder (also FormatError, ConfigError and FileNotFoundError)
    ├── RangeError              a number beyond what its encoding holds     (also OverflowError)
    ├── DivergenceError         a loss, a gradient or, in debug mode, a result is not finite
    ├── ProtocolError           a multi-party protocol was not followed
    ├── TimeLimitExceeded       a call or a wait passed its time limit      (also TimeoutError)
    ├── BudgetExceeded          a privacy budget would be overspent, or a noise budget is
    └── ServiceError            the service refused a request or cannot serve it (accelerant.service.errors)

and one warning, FallbackWarning: another implementation or device ran than the preferred one.
Messages state what was expected, what was given and what to do.
"""

from typing import Any

__all__ = [
    "AccelerantError", "BackendUnavailable", "BoundsError", "BudgetExceeded", "CompileError", "ConfigError",
    "DeviceLost", "DivergenceError", "FallbackWarning", "FormatError", "IndexOutOfRange", "LaunchError",
    "MissingDependency", "MissingFile", "OutOfMemory", "ProtocolError", "RangeError", "ShapeError",
    "TimeLimitExceeded", "UnsupportedCase", "UnsupportedDtype",
]  # fmt: skip


class AccelerantError(Exception):
    """Base class of the errors that this library raises; they pickle, and so cross processes."""

    def __reduce__(self) -> Any:
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[AccelerantError], args: tuple[Any, ...], attributes: dict[str, Any]) -> AccelerantError:
    """Return a pickled error; its class may be made from other arguments than those that Exception keeps."""
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class BackendUnavailable(AccelerantError):
    """An explicitly chosen backend ("cuda") is absent, for a reason ("no NVIDIA driver: libcuda.so.1 not found")."""

    def __init__(self, backend: str, reason: str) -> None:
        self.backend = backend
        self.reason = reason
        super().__init__(f"backend {backend!r} is not available: {reason}")


class MissingDependency(ImportError, AccelerantError):
    """An optional package is needed and could not be imported; the extra of Accelerant installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        self.package = package
        self.extra = extra
        super().__init__(f"{purpose} needs {package}: pip install 'accelerant[{extra}]'")

    __reduce__ = AccelerantError.__reduce__  # ImportError's would call __init__ with the message


class CompileError(AccelerantError):
    """A kernel did not compile; `log` is the compiler's."""

    def __init__(self, message: str, log: str = "") -> None:
        self.log = log
        super().__init__(f"{message}\n{log}" if log else message)


class LaunchError(AccelerantError):
    """The device refused a launch; nothing ran and nothing was written."""


class BoundsError(AccelerantError, IndexError):
    """A kernel accessed an element outside of an array, under the setting `debug`; its results are wrong."""


class OutOfMemory(MemoryError, AccelerantError):
    """An allocation failed or would pass a limit."""


class DeviceLost(AccelerantError):
    """A sticky device error (illegal access, trap): this process can no longer use the device."""


class ShapeError(AccelerantError, ValueError):
    """Incompatible shapes."""


class UnsupportedDtype(AccelerantError, TypeError):
    """A dtype that the operation does not take."""


class UnsupportedCase(AccelerantError):
    """Valid input that no implementation serves on this device."""


class RangeError(AccelerantError, OverflowError):
    """A number is, or may be, beyond what its encoding holds; nothing wraps around."""


class DivergenceError(AccelerantError):
    """A loss or gradient of training is not finite, or with the setting `debug` a result of an op."""


class FormatError(AccelerantError, ValueError):
    """A malformed file or message."""


class ConfigError(AccelerantError, ValueError):
    """An invalid setting or argument; the message names it and the allowed values."""


class IndexOutOfRange(ConfigError, IndexError):
    """An index of a row, or a target class, that is not in the range that the message names."""


class MissingFile(FileNotFoundError, FormatError, ConfigError):
    """A file or folder that was named does not exist."""


class ProtocolError(AccelerantError):
    """A multi-party protocol was not followed by a peer."""


class TimeLimitExceeded(AccelerantError, TimeoutError):
    """A call or a wait passed its time limit; the message names the limit and the progress made."""


class BudgetExceeded(AccelerantError):
    """A privacy budget would be overspent, or the noise budget of a ciphertext is spent."""


class FallbackWarning(UserWarning):
    """Another implementation or device ran than the preferred one; the message names both and the reason."""
