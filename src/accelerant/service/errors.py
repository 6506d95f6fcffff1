"""The errors of the service, each with the HTTP status that the application answers.

    ServiceError
    ├── Refused                 401 to 503, its own   a request that no operation sees: no key, too large, unknown
    ├── QueueFull               429   the queue has reached its bound; `retry_after_s` says when to come back
    ├── Draining                503   the server is stopping and takes no new work
    ├── StoreUnavailable        503   the job store cannot be reached
    ├── DeadlineExceeded        504   the request's own deadline passed before its result was there
    ├── Cancelled               409   the job was cancelled
    ├── JobNotFound             404   no job of this id belongs to this key
    ├── JobNotFinished          409   a result is asked for that is not there yet
    ├── ResultGone              410   the result's retention or the limit on stored results has passed
    └── JobFailed               409   the job ended without a result; the message is the reason
        └── WorkerLost          503   the worker process or its device failed, and so did the repetition

Errors of the input are the library's own (accelerant.errors), also where a worker raised them.
"""

from accelerant import errors as library


class ServiceError(library.AccelerantError):
    """Base class of the service's errors."""

    status: int = 500
    retry_after_s: float | None = None


class Refused(ServiceError):
    """A request that the protocol refuses; `kind` names the error, `param` a parameter of OpenAI's routes."""

    def __init__(
        self, status: int, kind: str, message: str, retry_after_s: float | None = None, *, param: str | None = None
    ) -> None:
        self.status, self.kind, self.retry_after_s, self.param = status, kind, retry_after_s, param
        super().__init__(message)


class QueueFull(ServiceError):
    """The queue holds as many requests or bytes as it may; `retry_after_s` estimates when there is room."""

    status = 429

    def __init__(self, message: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class Draining(ServiceError):
    """The server is stopping: it finishes what it has and takes no new work."""

    status = 503
    retry_after_s = 5.0


class StoreUnavailable(ServiceError):
    """The job store cannot be reached."""

    status = 503
    retry_after_s: float | None = 5.0


class DeadlineExceeded(ServiceError):
    """The deadline of a request passed before its result was there."""

    status = 504


class Cancelled(ServiceError):
    """The job was cancelled."""

    status = 409


class JobNotFound(ServiceError):
    """No job of this id belongs to this key."""

    status = 404


class JobNotFinished(ServiceError):
    """The result of a job was requested that is still queued or running."""

    status = 409


class ResultGone(ServiceError):
    """The result of a job was removed after its retention, or for the limit on the bytes of stored results."""

    status = 410


class JobFailed(ServiceError):
    """A job ended without a result; the message is the reason."""

    status = 409


class WorkerLost(JobFailed):
    """The worker process or its device failed while it had the request, and so did the repetition."""

    status = 503


def error_named(kind: str, message: str) -> Exception | None:
    """Return the library's or the service's error of a name, as another process raised it; None for other names."""
    found = getattr(library, kind, None) or globals().get(kind)
    if not (isinstance(found, type) and issubclass(found, library.AccelerantError)) or found is Refused:
        return None
    error = found.__new__(found, message)  # some take other arguments than their message
    error.args = (message,)
    return error


_UNAVAILABLE = (
    library.BackendUnavailable, library.CompileError, library.DeviceLost, library.LaunchError, library.OutOfMemory,
)  # fmt: skip
_STATUSES: tuple[tuple[int, type[Exception] | tuple[type[Exception], ...]], ...] = (
    (504, library.TimeLimitExceeded), (503, _UNAVAILABLE), (501, library.MissingDependency), (400, library.FormatError),
    (422, library.AccelerantError),
)  # fmt: skip


def refusal_of(error: Exception) -> Refused:
    """Return the answer to a request that ended with an error; what an unforeseen one says stays in the log."""
    if isinstance(error, Refused):
        return error
    kind, message = type(error).__name__, str(error)
    if isinstance(error, ServiceError):
        return Refused(error.status, kind, message, error.retry_after_s)
    if callable(listed := getattr(error, "errors", None)):  # of pydantic, or of FastAPI for a query
        wrong = [f"{'.'.join(map(str, one['loc']))[:80]}: {one['msg']}" for one in listed()[:5]]
        return Refused(422, "ParameterError", f"parameters: {'; '.join(wrong)}")
    for status, kinds in _STATUSES:
        if isinstance(error, kinds):
            return Refused(status, kind, message)
    return Refused(500, "InternalError", "the server failed; its log has the reason")
