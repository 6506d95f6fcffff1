"""Settings of the service: a TOML file, the environment and arguments, in rising order of precedence.

    host = "127.0.0.1"            # another address needs API keys (`accelerant keys create`)
    port = 8080
    state_url = "sqlite:////var/lib/accelerant/jobs.db"     # or postgresql://user:password@host/name
    directory = "/var/lib/accelerant"     # private files of jobs, keys.json
    devices = ["cuda:0", "cuda:1"]        # one worker process each

    [models]                      # folders that `generate` may use, by the name that clients give
    tiny = "/srv/models/tiny"

    [served]                      # folders behind OpenAI's routes, as `accelerant serve --model NAME=FOLDER`
    chat = "/srv/models/llama"

    [data]                        # text files and folders that `train` may use
    books = "/srv/data/books"

    [collections]                 # folders or URLs, each ending with a collection's name, that `search` may use
    papers = "/srv/library/papers"

Every setting but the four tables is also a variable ACCELERANT_SERVE_<NAME>, lists with commas. (Kubernetes itself
sets ACCELERANT_SERVICE_HOST in each container beside a service of that name.)
"""

import ipaddress
import os
import sys
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from accelerant.config import read_toml, similar
from accelerant.errors import ConfigError
from accelerant.runtime.registry import backend_named

PREFIX = "ACCELERANT_SERVE_"


def _state_folder() -> Path:
    home = Path(os.path.expanduser("~"))
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "accelerant" / "service"
    if sys.platform == "darwin":
        return home / "Library" / "Application Support" / "accelerant" / "service"
    return Path(os.environ.get("XDG_STATE_HOME") or home / ".local" / "state") / "accelerant" / "service"


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Settings and their defaults.

    Attributes:
        host, port: address to listen on.
        directory: private folder (0700) of jobs' inputs, results and checkpoints, the default job store, and keys.json.
        state_url: job store, a URL of SQLAlchemy; empty for SQLite in `directory`.
        keys_file: file of the hashed API keys; empty for keys.json in `directory`.
        devices: one worker process each, as "cpu" or "cuda:0"; empty for the automatic choice.
        ops: public ops, also those of installed packages, that are offered besides the usual operations; the server
            then imports torch.
        models, data: folders of models for `generate` and of texts for `train`, by name.
        collections: folders or URLs for `search`, by name, each ending with the name of a collection.
        served: folders of language models and sentence encoders behind OpenAI's routes, by name; a process each.
        quantize: "int8" or "int4" for served language models; empty for the weights as they are.
        gpus: devices over which a served language model is split: the first of `devices`, or of the machine's GPUs.
        fast: whether a served answer may depend, in rounding, on what else is computed beside it.
        cache_tokens: tokens that the cache of a served model holds; 0 for what memory allows.
        block_size: tokens of a block of that cache.
        max_batch_tokens: most tokens that a step of a served model computes.
        speculate: most tokens that are proposed from the text so far and checked in one step; 0 for none.
        tls_certificate, tls_key: PEM files; both or none.
        body_bytes, json_bytes: largest request body, and largest JSON of one; json_bytes bounds results in JSON, too.
        bodies_bytes: the most that all bodies and results take in memory, until they are answered; more get 503.
        header_bytes: largest request line and headers together.
        header_timeout_s, body_timeout_s: within which headers, and then a body, must have arrived.
        body_rate_bytes_s: slowest average rate of a body beyond body_timeout_s, also of one that a client reads.
        connections: most open connections. A new one ends the one without a key that has been silent for longest, or an
            idle one. A quarter more, at least 512, are a reserve: without a key they get 503, except for health.
        connections_per_address: the same of one address without a valid key; an address of IPv6 is its network of 64
            bits. A proxy's clients share its address: those with keys are not counted.
        concurrency: most requests in progress; more get 503, except those of health and metrics.
        queue_jobs, queue_bytes: bounds of the queue; more get 429.
        short_s: calls that are estimated to take longer become jobs, answered with 202.
        deadline_s: longest time of a call or job from acceptance to its end, training excepted.
        train_deadline_s: the same of training.
        result_bytes: largest result.
        stored_bytes: bound of all stored results together; beyond it the oldest of the key with most bytes are removed.
        retention_s: seconds for which ended jobs and their results are kept.
        lease_s: seconds without a sign of life after which another server on the same store takes over a server's jobs.
        drain_s: seconds that jobs get to end or save a checkpoint at shutdown.
        log: "json" (one object a line) or "text".
    """

    host: str = "127.0.0.1"
    port: int = 8080
    directory: Path = field(default_factory=_state_folder)
    state_url: str = field(default="", repr=False)  # may have a password
    keys_file: str = ""
    devices: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    models: Mapping[str, Path] = field(default_factory=dict)
    data: Mapping[str, Path] = field(default_factory=dict)
    served: Mapping[str, Path] = field(default_factory=dict)
    collections: Mapping[str, str] = field(default_factory=dict)
    quantize: str = ""
    gpus: int = 1
    fast: bool = False
    cache_tokens: int = 0
    block_size: int = 16
    max_batch_tokens: int = 512
    speculate: int = 0
    tls_certificate: str = ""
    tls_key: str = ""
    body_bytes: int = 256 << 20
    json_bytes: int = 4 << 20
    bodies_bytes: int = 1 << 30
    header_bytes: int = 32 << 10
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    body_rate_bytes_s: int = 64 << 10
    connections: int = 1024
    connections_per_address: int = 128
    concurrency: int = 1024
    queue_jobs: int = 1000
    queue_bytes: int = 1 << 30
    short_s: float = 0.5
    deadline_s: float = 300.0
    train_deadline_s: float = 7 * 86400.0
    result_bytes: int = 256 << 20
    stored_bytes: int = 8 << 30
    retention_s: float = 86400.0
    lease_s: float = 10.0
    drain_s: float = 30.0
    log: str = "json"

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            least_is_0 = setting.name in ("port", "cache_tokens", "speculate")
            if setting.type in (int, float) and not (value > 0 or (least_is_0 and value == 0)):
                raise ConfigError(f"setting {setting.name} must be above 0, got {value!r}")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"setting port must be 0 to 65535, got {self.port}")
        if self.log not in ("json", "text"):
            raise ConfigError(f"setting log must be json or text, got {self.log!r}")
        if self.quantize not in ("", "int8", "int4"):
            raise ConfigError(f"setting quantize must be int8 or int4, got {self.quantize!r}")
        if self.gpus > 1 and self.quantize == "int4":
            raise ConfigError("setting gpus: weights in 4-bit integers are not split: quantize them as int8")
        if 1 < len(self.devices) < self.gpus:
            raise ConfigError(f"setting gpus: {self.gpus} devices are wanted, and {len(self.devices)} given")
        if "" in self.served:
            raise ConfigError(f"setting served: {self.served['']} needs a name: write NAME=FOLDER")
        for device in self.devices:
            if (name := device.partition(":")[0]).lower() != "gpu":  # for which the GPUs would be looked for
                backend_named(name)
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ConfigError("settings tls_certificate and tls_key belong together: give both or none")
        if not self.state_url:
            object.__setattr__(self, "state_url", f"sqlite:///{self.directory / 'jobs.db'}")
        if not self.keys_file:
            object.__setattr__(self, "keys_file", str(self.directory / "keys.json"))

    @property
    def is_loopback(self) -> bool:
        """Whether only programs of this machine reach the service."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


_TYPES = typing.get_type_hints(ServiceSettings)


def load(path: str | Path | None = None, environ: Mapping[str, str] | None = None, **arguments: Any) -> ServiceSettings:
    """Return the settings of file, environment and arguments that are not None; ConfigError names the origin."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    if path is not None:
        values |= {name: _converted(name, value, str(path)) for name, value in read_toml(Path(path)).items()}
    for variable, text in environ.items():
        if variable == f"{PREFIX}STATE_URL" and not text:  # SQLite instead would lose the jobs of a cluster
            raise ConfigError(f"{variable} must not be empty: unset it for SQLite in the service's folder")
        # "tcp://..." is what Kubernetes sets as the PORT of a service named accelerant-serve
        if variable.startswith(PREFIX) and text and not text.startswith("tcp://"):
            name = variable.removeprefix(PREFIX).lower()
            values[name] = _converted(name, text, variable)
    given = {name: value for name, value in arguments.items() if value is not None}
    return ServiceSettings(**values | {name: _converted(name, value, "argument") for name, value in given.items()})


def _converted(name: str, value: Any, origin: str) -> Any:
    """Return a value as its setting's type; numbers and lists may be text."""
    if name not in _TYPES:
        raise ConfigError(f"{origin}: unknown setting {name!r}{similar(name, _TYPES)}")
    kind = _TYPES[name]
    try:
        if kind is Path and isinstance(value, (str, Path)) and value:
            return Path(value).expanduser().absolute()
        if kind is bool and (value is True or value is False or value in ("true", "false")):
            return value in (True, "true")
        if kind in (int, float) and isinstance(value, (int, str, kind)) and not isinstance(value, bool):
            return kind(value)
        if kind is str and isinstance(value, str):
            return value
        if typing.get_origin(kind) is tuple:
            parts = value.split(",") if isinstance(value, str) else value
            return tuple(part.strip() for part in parts if part.strip())
        if isinstance(value, Mapping):
            places = {key: str(Path(folder).expanduser().absolute()) for key, folder in value.items()}
            if kind == Mapping[str, str]:
                return {key: value[key] if "://" in str(value[key]) else place for key, place in places.items()}
            return {key: Path(place) for key, place in places.items()}
    except (ValueError, TypeError, AttributeError):
        pass
    wanted = getattr(kind, "__name__", str(kind))
    raise ConfigError(f"{origin}: {name} must be {'a table' if wanted == 'Mapping' else wanted}, got {value!r}")
