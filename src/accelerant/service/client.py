"""Clients of the service, with the library's own calls.

    with Client("http://127.0.0.1:8080") as client:     # or: async with AsyncClient(...)
        client.field_mul([1, 2], [3, 4])                # array([3, 8], dtype=uint64)
        job = client.submit("ntt", {"x": x}, field="goldilocks")
        client.result(job.id)

Arrays travel as bytes (KServe v2's binary tensor extension). A call that the service answers with a job waits for it.
What a call does is a generator of steps, requests and waits, which the two clients take in their own ways.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload
from urllib.parse import quote, urlsplit

import numpy as np
import numpy.typing as npt

from accelerant._renamed import renamed_arguments, understood_arguments
from accelerant._version import __version__
from accelerant.algebra.curve.parameters import Curve, curve_of
from accelerant.algebra.field.field import FieldArray
from accelerant.algebra.field.memory_space import stacked
from accelerant.algebra.field.parameters import field_of
from accelerant.algebra.field.words import encode
from accelerant.errors import ConfigError, FormatError, MissingDependency, TimeLimitExceeded, UnsupportedDtype
from accelerant.runtime.host import refuse_masked, refuse_other_than_real, refuse_without_values
from accelerant.service.bodies import BINARY, read_kserve, write_kserve
from accelerant.service.errors import Cancelled, JobFailed, Refused, error_named
from accelerant.service.jobs.wire import Job, JobState

try:
    import httpx
except ImportError:
    raise MissingDependency("httpx", "service", "accelerant.service.Client") from None

if TYPE_CHECKING:
    from accelerant.privacy.he.paillier import EncryptedTensor, PublicKey
    from accelerant.zk.groth16 import Proof
    from accelerant.zk.inference import ModelCommitment

DEFAULT_URL = "http://127.0.0.1:8080"

_P = ParamSpec("_P")
_T = TypeVar("_T")
Array = npt.NDArray[Any]
Outputs = dict[str, Any]
_File = bytes | str | os.PathLike[str]
Steps = Generator[httpx.Request | float, Any, _T]
"""A call: yields requests, whose responses are sent back, and seconds to wait; returns the result."""

_LENGTH = "inference-header-content-length"
_POLL_S = (0.05, 2.0)  # wait before the first look at a job, and the longest between two; it grows by half
_AWAY_S = (1.0, 60.0)
"""Time for which a read is repeated while the service is out of reach: of one that never answered, and of others."""


@dataclass(frozen=True, slots=True)
class _Result(Generic[_T]):
    """The result of a call, after its last step."""

    value: _T


class _ClientMethod(Generic[_P, _T]):
    """A method of both clients: of Client it returns the result, of AsyncClient an awaitable."""

    def __init__(self, steps: Callable[Concatenate[Any, _P], Steps[_T]]) -> None:
        self._steps = steps
        self.__doc__ = steps.__doc__

    @overload
    def __get__(self, client: Client, owner: type) -> Callable[_P, _T]: ...
    @overload
    def __get__(self, client: AsyncClient, owner: type) -> Callable[_P, Coroutine[Any, Any, _T]]: ...
    @overload
    def __get__(self, client: None, owner: type) -> _ClientMethod[_P, _T]: ...
    def __get__(self, client: Any, owner: type) -> Any:
        if client is None:
            return self

        def call(*args: _P.args, **kwargs: _P.kwargs) -> Any:
            return client._run(self._steps(client, *args, **kwargs))

        return update_wrapper(call, self._steps)


class _ClientMethods:
    """The calls of both clients.

    Args:
        url: of the service; by default that of ACCELERANT_URL, or http://127.0.0.1:8080. It may end with /v2.
        key: API key; by default that of ACCELERANT_API_KEY. It is sent to this URL only.
        timeout: longest seconds of a call, with its retries, and with the job where it becomes one.
        progress: called with the job whenever a call that waits for one has looked at it.
        options: of httpx's client, as `verify` for the certificates of TLS.
    """

    _http: httpx.Client | httpx.AsyncClient

    def __init__(
        self, url: str | None = None, *, key: str | None = None, timeout: float = 600.0,
        progress: Callable[[Job], object] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.url = (url or os.environ.get("ACCELERANT_URL") or DEFAULT_URL).rstrip("/").removesuffix("/v2")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"the service's URL must begin with http:// or https://, got {self.url!r}")
        try:
            listening = urlsplit(self.url).port != 0
        except ValueError:  # no number, or above 65535
            listening = False
        if not listening:
            raise ConfigError(f"the port of the service's URL must be 1 to 65535, got {self.url!r}")
        if not timeout > 0:
            raise ConfigError(f"timeout must be above 0 seconds, got {timeout}")
        self.timeout, self.progress, self._was_there = timeout, progress, False
        headers = {"User-Agent": f"accelerant/{__version__}"}
        if key := (key or os.environ.get("ACCELERANT_API_KEY") or "").strip():
            if not (key.isascii() and key.isprintable()):
                raise ConfigError("the API key must be one line of ASCII, as `accelerant keys create` printed it")
            headers["Authorization"] = f"Bearer {key}"
        kind = httpx.Client if isinstance(self, Client) else httpx.AsyncClient
        given: dict[str, Any] = {"base_url": self.url, "headers": headers, "timeout": timeout, **options}
        self._connect: Callable[[], Any] = partial(kind, follow_redirects=False, **given)
        self._http, self._process = self._connect(), os.getpid()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    # --- fields, transforms, curves; arguments and results as those of accelerant.Accelerator -------------------------
    @_ClientMethod
    def field_add(self, x: Any, y: Any, *, field: str = "goldilocks") -> Steps[Array]:
        """Add field elements: canonical words, or Python integers."""
        return (yield from self._array("z", "field_add", _elements(field, x=x, y=y), {"field": field}))

    @_ClientMethod
    def field_sub(self, x: Any, y: Any, *, field: str = "goldilocks") -> Steps[Array]:
        """Subtract field elements."""
        return (yield from self._array("z", "field_sub", _elements(field, x=x, y=y), {"field": field}))

    @_ClientMethod
    def field_mul(self, x: Any, y: Any, *, field: str = "goldilocks") -> Steps[Array]:
        """Multiply field elements."""
        return (yield from self._array("z", "field_mul", _elements(field, x=x, y=y), {"field": field}))

    @_ClientMethod
    def field_inv(self, x: Any, *, field: str = "goldilocks") -> Steps[Array]:
        """Invert nonzero field elements."""
        return (yield from self._array("z", "field_inv", _elements(field, x=x), {"field": field}))

    @_ClientMethod
    def ntt(
        self, x: Any, *, field: str = "goldilocks", inverse: bool = False, coset: int | None = None,
        order: str = "natural",
    ) -> Steps[Array]:  # fmt: skip
        """Transform elements along the last axis; see accelerant.zk.ntt."""
        options = {"field": field, "inverse": inverse, "coset": coset, "order": order}
        return (yield from self._array("y", "ntt", _elements(field, x=x), options))

    @_ClientMethod
    def msm(self, scalars: Any, points: Any, *, curve: str = "bn254_g1", check: str = "curve") -> Steps[Array]:
        """Sum scalars[i] points[i]; see accelerant.zk.msm."""
        parameters = curve_of(curve)
        from accelerant.zk.operands import swapped

        if swapped(parameters, scalars, points):
            scalars, points = points, scalars
        inputs = {"scalars": _words(parameters.scalars.name, scalars), "points": _points(parameters, points)}
        return (yield from self._array("sum", "msm", inputs, {"curve": curve, "check": check}))

    # --- proofs ------------------------------------------------------------------------------------------------------
    @_ClientMethod
    def prove(self, zkey: _File, witness: _File) -> Steps[Proof]:
        """Prove with a .zkey and a .wtns, paths or bytes; see accelerant.zk.groth16.prove."""
        from accelerant.zk.groth16 import Proof

        found = yield from self._infer("groth16_prove", {"zkey": _bytes(zkey), "witness": _bytes(witness)}, {})
        return Proof.from_json(found["proof"], found["public"])

    @_ClientMethod
    def verify(self, verification_key: _File, public: Sequence[int], proof: Proof) -> Steps[bool]:
        """Return whether a proof verifies; the key is snarkjs's JSON, a path or bytes."""
        texts = {"public": json.dumps([str(value) for value in public]).encode(), "proof": proof.to_json().encode()}
        inputs = {"verification_key": _bytes(verification_key), **texts}
        return bool((yield from self._array("valid", "groth16_verify", inputs, {}))[0])

    @_ClientMethod
    def prove_inference(self, network: _File, x: Any) -> Steps[tuple[Array, bytes, ModelCommitment]]:
        """Return the output of int8 x, the proof and the commitment, which have been verified here.

        The network is a file of IntegerNetwork.save, a path or bytes; the service sees its weights.
        """
        from accelerant.zk.inference import ModelCommitment, check

        found = yield from self._infer("prove_inference", {"network": _bytes(network), "x": x}, {})
        y, proof, commitment = found["y"], found["proof"], ModelCommitment(found["commitment"])
        check(commitment, _numpy(x), y, proof)
        return y, proof, commitment

    # --- neural operations, as accelerant.ops has them; arrays of float16, float32 or float64 ------------------------
    @_ClientMethod
    @understood_arguments(input="x")
    def gelu(self, x: Any, *, approximate: str = "none") -> Steps[Array]:
        """Apply the Gaussian error linear unit."""
        return (yield from self._array("y", "gelu", _floats(x=x), {"approximate": approximate}))

    @_ClientMethod
    @understood_arguments(input="x")
    def softmax(self, x: Any, *, dim: int = -1) -> Steps[Array]:
        """Apply softmax along an axis."""
        return (yield from self._array("y", "softmax", _floats(x=x), {"dim": dim}))

    @_ClientMethod
    @understood_arguments(input="x")
    def layer_norm(self, x: Any, weight: Any = None, bias: Any = None, *, eps: float = 1e-5) -> Steps[Array]:
        """Normalize rows."""
        given = {"x": x, "weight": weight, "bias": bias}
        inputs = {name: value for name, value in given.items() if value is not None}
        return (yield from self._array("y", "layer_norm", _floats(**inputs), {"eps": eps}))

    @_ClientMethod
    @understood_arguments(input="a", other="b")
    def matmul(self, a: Any, b: Any) -> Steps[Array]:
        """Multiply matrices."""
        return (yield from self._array("y", "matmul", _floats(a=a, b=b), {}))

    @_ClientMethod
    @understood_arguments(query="q", key="k", value="v", is_causal="causal")
    def attention(self, q: Any, k: Any, v: Any, *, causal: bool = False, scale: float | None = None) -> Steps[Array]:
        """Attend with q (B, Hq, S, D), k and v (B, Hkv, T, D)."""
        inputs = _floats(q=q, k=k, v=v)
        return (yield from self._array("y", "attention", inputs, {"causal": causal, "scale": scale}))

    @_ClientMethod
    def generate(self, model: str, prompt: str = "", /, **options: Any) -> Steps[str]:
        """Continue a prompt by a model of the service; options: `tokens`, `temperature`, `top_k`, `top_p`, `seed`."""
        inputs = {"prompt": prompt.encode()} if prompt else {}
        text: bytes = (yield from self._infer("generate", inputs, {"model": model, **options}))["text"]
        return text.decode(errors="replace")

    @_ClientMethod
    def search(
        self, collection: str, queries: Any, k: int = 10, *, filter: Mapping[str, Any] | None = None,
        payloads: bool = False,
    ) -> Steps[dict[str, Any]]:  # fmt: skip
        """Search a collection of the service; returns `scores` (an array), `ids`, `selected`, `age_s`, `payloads`."""
        options = {"collection": collection, "k": k, "filter": filter and json.dumps(filter), "payloads": payloads}
        found = yield from self._infer("search", {"queries": queries}, options)
        matches: dict[str, Any] = json.loads(found["matches"])
        return matches | {"scores": found["scores"]}

    # --- privacy -----------------------------------------------------------------------------------------------------
    @_ClientMethod
    @understood_arguments(sigma="noise_multiplier", q="sample_rate")
    def privacy_epsilon(
        self, *, noise_multiplier: float, sample_rate: float, steps: int, delta: float, method: str = "pld"
    ) -> Steps[float]:
        """Return the epsilon of steps of DP-SGD; also with `sigma` and `q` for noise multiplier and sample rate."""
        noise = {"noise_multiplier": noise_multiplier, "sample_rate": sample_rate}
        options = {**noise, "steps": steps, "delta": delta, "method": method}
        return float((yield from self._array("epsilon", "privacy_epsilon", {}, options))[0])

    @_ClientMethod
    def paillier_encrypt(self, public: PublicKey, x: Any, /, **options: Any) -> Steps[EncryptedTensor]:
        """Encrypt numbers on the service, which sees them; options are those of PublicKey.encrypt."""
        from accelerant.privacy.he.paillier import EncryptedTensor

        inputs = {"public_key": public.to_bytes(), "x": x}
        return EncryptedTensor.from_bytes(
            (yield from self._infer("paillier_encrypt", inputs, options))["ciphertext"], public
        )

    @_ClientMethod
    def paillier_add(self, a: EncryptedTensor, b: EncryptedTensor) -> Steps[EncryptedTensor]:
        """Add encrypted tensors of one key, without decrypting them."""
        from accelerant.privacy.he.paillier import EncryptedTensor

        inputs = {"public_key": a.public.to_bytes(), "a": a.to_bytes(), "b": b.to_bytes()}
        return EncryptedTensor.from_bytes((yield from self._infer("paillier_add", inputs, {}))["ciphertext"], a.public)

    # --- any operation -----------------------------------------------------------------------------------------------
    @_ClientMethod
    def call(self, operation: str, inputs: Mapping[str, Any], /, **parameters: Any) -> Steps[Outputs]:
        """Run an operation of `operations` and return its outputs; inputs are arrays, and bytes for a text or a file.

        Raises:
            ServiceError: the service refused the call, or its job failed.
            AccelerantError: what the operation raised.
            TimeLimitExceeded: there is no result within `timeout`.
            ConnectionError: the service cannot be reached, or closed the connection.
        """
        return (yield from self._infer(operation, inputs, parameters))

    @_ClientMethod
    def operations(self) -> Steps[list[dict[str, Any]]]:
        """Return name, summary and scope of each operation of the service."""
        found: list[dict[str, Any]] = (yield from self._json("GET", "/v2/models", until=self._until()))["models"]
        return found

    @_ClientMethod
    def describe(self, operation: str) -> Steps[dict[str, Any]]:
        """Return an operation's inputs and outputs, and the JSON schema of its parameters."""
        found: dict[str, Any] = yield from self._json("GET", f"/v2/models/{_segment(operation)}", until=self._until())
        return found

    @_ClientMethod
    def ready(self) -> Steps[bool]:
        """Return whether the service takes calls."""
        answer = yield self._http.build_request("GET", "/v2/health/ready")
        return bool(answer.status_code == 200)

    @_ClientMethod
    def devices(self) -> Steps[list[dict[str, Any]]]:
        """Return the service's devices with their latest figures."""
        found: list[dict[str, Any]] = (yield from self._json("GET", "/devices", until=self._until()))["devices"]
        return found

    # --- jobs --------------------------------------------------------------------------------------------------------
    @_ClientMethod
    def submit(self, operation: str, inputs: Mapping[str, Any], /, **parameters: Any) -> Steps[Job]:
        """Start an operation as a job, which outlives this client."""
        answer = yield from self._post(operation, inputs, parameters, self._until(), Prefer="respond-async")
        return _job(_decoded(answer)["job"])

    @_ClientMethod
    def job(self, id: str) -> Steps[Job]:
        """Return a job."""
        return _job((yield from self._json("GET", f"/jobs/{_segment(id)}", until=self._until())))

    @_ClientMethod
    def jobs(self, *, state: str | None = None, limit: int = 100, before: str | None = None) -> Steps[list[Job]]:
        """Return jobs, the newest first; `before` is the id of the last one of the page before."""
        given = {"state": state, "limit": limit, "before": before}
        query = {name: value for name, value in given.items() if value is not None}
        return [_job(row) for row in (yield from self._json("GET", "/jobs", query, until=self._until()))["jobs"]]

    @_ClientMethod
    def cancel(self, id: str) -> Steps[Job]:
        """Cancel a job: at once if it waits, else between its parts; one that has ended stays as it is."""
        return _job((yield from self._json("DELETE", f"/jobs/{_segment(id)}", until=self._until())))

    @_ClientMethod
    def result(self, id: str) -> Steps[Outputs]:
        """Wait for a job and return its outputs; raises as `call`."""
        return (yield from self._wait(id, self._until()))

    # --- steps -------------------------------------------------------------------------------------------------------
    def _next(self, steps: Steps[_T], found: Any) -> httpx.Request | float | _Result[_T]:
        """Return the step after a response or an error of the one before; the result after the last."""
        if self._process != os.getpid():  # in which another process would read this one's answers
            self._http, self._process = self._connect(), os.getpid()
        try:
            return steps.throw(found) if isinstance(found, httpx.TransportError) else steps.send(found)
        except StopIteration as end:
            return _Result(end.value)
        except httpx.TransportError as error:
            raise self._unreachable(error) from None

    def _until(self) -> float:
        return time.monotonic() + self.timeout

    def _array(
        self, output: str, operation: str, inputs: Mapping[str, Any], parameters: Mapping[str, Any]
    ) -> Steps[Array]:
        found: Array = (yield from self._infer(operation, inputs, parameters))[output]
        return found

    def _infer(self, operation: str, inputs: Mapping[str, Any], parameters: Mapping[str, Any]) -> Steps[Outputs]:
        until = self._until()
        answer = yield from self._post(operation, inputs, parameters, until)
        if answer.status_code == 202:
            return (yield from self._wait(_decoded(answer)["job"]["id"], until))
        return _outputs(answer)

    def _post(
        self, operation: str, inputs: Mapping[str, Any], parameters: Mapping[str, Any], until: float, **headers: str
    ) -> Steps[httpx.Response]:
        values = {name: x if isinstance(x, bytes) else _numpy(x) for name, x in inputs.items()}
        given = {name: value for name, value in parameters.items() if value is not None}
        content, length = write_kserve({"parameters": {**given, "binary_data_output": True}}, "inputs", values)
        headers |= {"Content-Type": BINARY, "Accept": BINARY}
        headers[_LENGTH] = str(len(content) if length is None else length)
        path = f"/v2/models/{_segment(operation)}/infer"
        return (yield from self._answered("POST", path, until, content=content, headers=headers))

    def _wait(self, id: str, until: float) -> Steps[Outputs]:
        pause, longest = _POLL_S
        while True:
            job = _job((yield from self._json("GET", f"/jobs/{_segment(id)}", until=until)))
            if self.progress is not None:
                self.progress(job)
            if job.state.final:
                break
            if time.monotonic() + pause > until:
                raise TimeLimitExceeded(f"job {id} is {job.state} ({job.progress:.0%}) after {self.timeout:g} s")
            yield pause
            pause = min(longest, 1.5 * pause)
        if job.state is JobState.CANCELLED:
            raise Cancelled(f"job {id} was cancelled")
        if job.state is JobState.FAILED:
            kind, _, message = (job.error or "JobFailed: it failed").partition(": ")
            raise error_named(kind, message) or JobFailed(f"job {id}: {job.error}")
        path = f"/jobs/{_segment(id)}/result"
        return _outputs((yield from self._answered("GET", path, until, headers={"Accept": BINARY})))

    def _json(self, method: str, path: str, query: Mapping[str, Any] | None = None, *, until: float) -> Steps[Any]:
        return _decoded((yield from self._answered(method, path, until, params=query)))

    def _answered(self, method: str, path: str, until: float, **options: Any) -> Steps[httpx.Response]:
        """Send a request, again if the service says when, and return the response; raise if it is an error.

        A read is also repeated while the service, or a proxy's way to it, is away: it may be starting again. So is what
        did not reach it, once it has answered: a server that drains says 503 and then refuses connections.
        """
        pause_s, longest_s = _POLL_S
        patience = time.monotonic() + _AWAY_S[self._was_there]
        while True:
            left = until - time.monotonic()
            request = self._http.build_request(method, path, timeout=max(0.001, left), **options)
            again_at = time.monotonic() + pause_s
            in_time, is_read = again_at < min(until, patience), method == "GET"
            try:
                answer: httpx.Response = yield request
            except httpx.TimeoutException:
                raise
            except httpx.TransportError as error:
                unsent = self._was_there and isinstance(error, httpx.ConnectError)
                if not in_time or not (is_read or unsent):
                    raise
            else:
                if answer.status_code < 400:
                    self._was_there = True
                    return answer
                wait_s = _retry_after_s(answer)
                if answer.status_code in (429, 503) and wait_s is not None and time.monotonic() + wait_s <= until:
                    self._was_there, patience = True, time.monotonic() + wait_s + _AWAY_S[True]
                    yield wait_s
                    continue
                if (
                    answer.status_code not in (502, 503, 504)
                    or not (in_time and is_read and self._was_there)
                    or wait_s is not None
                ):
                    raise _error(answer)
            yield pause_s
            pause_s = min(longest_s, 1.5 * pause_s)

    def _unreachable(self, error: httpx.TransportError) -> Exception:
        if isinstance(error, httpx.TimeoutException):
            return TimeLimitExceeded(f"{self.url} did not answer within {self.timeout:g} s")
        return ConnectionError(f"{self.url}: {error or type(error).__name__}; is `accelerant serve` running there?")


@renamed_arguments(timeout_s="timeout")
class Client(_ClientMethods):
    """A client of the service. Its connections are kept; use it as a context manager, or `close` it."""

    _http: httpx.Client

    def _run(self, steps: Steps[_T]) -> _T:
        found: Any = None
        while not isinstance(step := self._next(steps, found), _Result):
            found = None
            if isinstance(step, float):
                time.sleep(step)
                continue
            try:
                found = self._http.send(step)
            except httpx.TransportError as error:
                found = error
        return step.value

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@renamed_arguments(timeout_s="timeout")
class AsyncClient(_ClientMethods):
    """The same calls for asyncio. Use it as an asynchronous context manager, or `close` it."""

    _http: httpx.AsyncClient

    async def _run(self, steps: Steps[_T]) -> _T:
        found: Any = None
        while not isinstance(step := self._next(steps, found), _Result):
            found = None
            if isinstance(step, float):
                await asyncio.sleep(step)
                continue
            try:
                found = await self._http.send(step)
            except httpx.TransportError as error:
                found = error
        return step.value

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


# --- values ----------------------------------------------------------------------------------------------------------
def _numpy(x: Any) -> Array:
    """Return an array of any library, or numbers, as NumPy's."""
    refuse_masked(x, "the array")
    refuse_without_values(x, "the array")
    if hasattr(x, "detach"):  # torch's, which may record gradients, or be on a device
        x = x.detach().cpu().resolve_neg().resolve_conj()
        if str(x.dtype) == "torch.bfloat16":
            raise UnsupportedDtype("dtype bfloat16 is not one of NumPy's: send float32")
        x = x.numpy()
    try:
        array = np.asarray(x.get() if type(x).__module__.startswith("cupy") else x, order="C")
    except ValueError as error:  # lists of several lengths
        raise UnsupportedDtype(f"cannot take this {type(x).__name__}: {error}") from None
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _words(field: str, x: Any) -> Array:
    """Return an array, or a list of arrays, as it is, a FieldArray and Python integers as canonical words."""
    x = stacked(x, "x")
    if isinstance(x, FieldArray):
        if x.field.name != field:
            raise ConfigError(f"elements must be of {field}, got a FieldArray of {x.field.name}")
        return _numpy(x.canonical())
    return _numpy(x) if hasattr(x, "dtype") and x.dtype != object else encode(field_of(field), x)


def _points(curve: Curve[Any], points: Any) -> Array:
    """Return an array, or a list of arrays, as it is, and Python points as canonical words."""
    from accelerant.zk.operands import encoded_points

    points = stacked(points, "points")
    return _numpy(points) if hasattr(points, "dtype") else encoded_points(curve, list(points), "points")


def _floats(**inputs: Any) -> dict[str, Array]:
    """Return arrays as they are; lists and numbers have the dtype of the first floating array, or else float32."""
    arrays = {name: _numpy(x) for name, x in inputs.items()}
    numbers = {name for name, x in inputs.items() if not hasattr(x, "dtype")}
    usual = next((x.dtype for name, x in arrays.items() if x.dtype.kind == "f" and name not in numbers), np.float32)
    for name in numbers:
        refuse_other_than_real(arrays[name])
        try:
            arrays[name] = arrays[name].astype(usual)
        except TypeError as error:
            raise UnsupportedDtype(f"{name} must be an array or real numbers: {error}") from None
    return arrays


def _elements(field: str, **inputs: Any) -> dict[str, Array]:
    return {name: _words(field, x) for name, x in inputs.items()}


def _bytes(file: _File) -> bytes:
    return file if isinstance(file, bytes) else Path(file).read_bytes()


def _segment(name: str) -> str:
    if not name.strip(".") or "/" in name:
        raise ConfigError(f"{name!r} is not the name of an operation or a job")
    return quote(name, safe="")


def _job(row: Mapping[str, Any]) -> Job:
    return Job(**{**row, "state": JobState(row["state"])})


def _decoded(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        raise FormatError(f"{answer.url} answered {answer.status_code} without JSON; is it the service?") from None


def _outputs(answer: httpx.Response) -> Outputs:
    length = answer.headers.get(_LENGTH)
    outputs: Outputs = read_kserve(answer.content, None if length is None else int(length), "outputs")[1]
    return outputs


def _retry_after_s(answer: httpx.Response) -> float | None:
    text = answer.headers.get("retry-after", "")
    return float(text) if text.isdigit() else None


def _error(answer: httpx.Response) -> Exception:
    """Return the error that an answer describes, with the id of the request as a note."""
    try:
        body = answer.json()
        kind, message, request = str(body["type"]), str(body["error"]), str(body.get("request_id", ""))
    except (ValueError, KeyError, TypeError):
        kind, message, request = "", f"{answer.status_code} {answer.reason_phrase}".strip(), ""
    if answer.status_code == 404 and kind in ("", "HttpError"):
        message = (
            f"{answer.url} is not there ({message}): the service's URL is like {DEFAULT_URL}, without a page's path"
        )
    error = error_named(kind, message) or Refused(answer.status_code, kind, message, _retry_after_s(answer))
    error.add_note(f"{answer.request.method} {answer.url}: {answer.status_code}, request {request}")
    return error
