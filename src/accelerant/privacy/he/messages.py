"""Shared by the schemes: heads of messages, private keys under a passphrase, and arrays of any library.

A message begins with six letters for its scheme, one for its kind, and a version in one byte.
"""

from __future__ import annotations

import importlib
import secrets
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from accelerant.errors import ConfigError, FormatError, MissingDependency, UnsupportedCase, UnsupportedDtype
from accelerant.privacy.messages import MessageReader
from accelerant.runtime.files import AtomicFile
from accelerant.runtime.host import refuse_masked, refuse_without_values

KINDS = ("torch", "numpy", "cupy", "jax")  # Libraries of arrays


_SCHEMES = {"PAI": "Paillier", "BFV": "BFV"}
_MESSAGES = {"n": "public key", "s": "private key", "c": "ciphertexts"}
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def head_of(scheme: str, kind: str) -> bytes:
    """Return the first eight bytes of messages of a scheme's kind, of which the last is the version."""
    return f"ACL{scheme}{kind}\1".encode()


def reader_of(data: bytes, scheme: str, kind: str) -> MessageReader:
    """Return a reader after the head of a message; FormatError for another kind or version."""
    reader, head = MessageReader(data), head_of(scheme, kind)
    if reader.take(7) != head[:7]:
        raise FormatError(f"not a message of {_SCHEMES[scheme]}'s {_MESSAGES[kind]}: it begins with other bytes")
    if (version := reader.number(1, 255)) != head[7]:
        raise FormatError(f"the message has version {version}, this program reads version {head[7]}")
    return reader


def _cipher(passphrase: str, salt: bytes) -> Any:
    """Return the AEAD of a passphrase."""
    if not isinstance(passphrase, str) or not passphrase:
        raise ConfigError("a private key is saved with a passphrase: a string that is not empty")
    try:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
        from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
    except ImportError:
        raise MissingDependency("cryptography", "privacy", "a passphrase") from None
    return ChaCha20Poly1305(Scrypt(salt, length=32, n=2**16, r=8, p=1).derive(passphrase.encode()))


def sealed(head: bytes, plain: bytes, passphrase: str) -> bytes:
    """Return a message with a private key: ChaCha20-Poly1305 under scrypt (2^16, 8, 1: 64 MiB); head is not secret."""
    salt, nonce = secrets.token_bytes(16), secrets.token_bytes(12)
    head += salt + nonce
    box: bytes = _cipher(passphrase, salt).encrypt(nonce, plain, head)
    return head + box


def open_box(reader: MessageReader, data: bytes, passphrase: str, most: int) -> bytes:
    """Return what `sealed` hid, at most so many bytes, of a message whose head is read; FormatError if it differs."""
    salt, nonce, box = reader.take(16), reader.take(12), reader.rest()
    if not 16 < len(box) <= 16 + most:
        raise FormatError(f"a private key's message of {len(data)} bytes is too short or too long")
    cipher = _cipher(passphrase, salt)
    from cryptography.exceptions import InvalidTag

    try:
        plain: bytes = cipher.decrypt(nonce, box, bytes(data[: -len(box)]))
    except InvalidTag:
        raise FormatError("the private key does not open: wrong passphrase, or damaged bytes") from None
    return plain


class SecretKey(ABC):
    """A private key, which leaves the process under a passphrase only."""

    @abstractmethod
    def to_bytes(self, passphrase: str) -> bytes:
        """Return the key encrypted with a passphrase; see `sealed`."""

    def save(self, path: str | Path, passphrase: str) -> None:
        """Write to_bytes(passphrase) to a file that only its owner reads (mode 0600), whole or not at all."""
        with AtomicFile(Path(path), mode=0o600) as file:
            file.write(self.to_bytes(passphrase))

    def __reduce__(self) -> NoReturn:
        raise ConfigError("a private key is not pickled or copied: to_bytes(passphrase) or save(path, passphrase)")


@dataclass(frozen=True, slots=True)
class Origin:
    """The library, dtype and torch device of an array, to which decryption returns."""

    kind: str
    dtype: str
    device: str = "cpu"


def host_array(x: Any, dtypes: tuple[str, ...], scheme: str) -> tuple[npt.NDArray[Any], Origin]:
    """Return an array of any library on the host, and its origin; UnsupportedDtype unless of one of the dtypes."""
    refuse_masked(x, "the array")
    refuse_without_values(x, "the array")
    if getattr(type(x), "__array_ufunc__", ...) is None:  # encrypted tensors and shares are so marked
        raise UnsupportedCase(f"{scheme} takes plain arrays, got {x!r}")
    kind = type(x).__module__.partition(".")[0]
    if isinstance(x, torch.Tensor):
        dtype, device, x = str(x.dtype).removeprefix("torch."), str(x.device), x.detach().cpu().resolve_neg()
        origin = Origin("torch", dtype, device)
        array = (x.float() if dtype == "bfloat16" else x).numpy() if dtype in dtypes else np.empty(0, bool)
    else:
        try:
            array = x.get() if kind == "cupy" else np.asarray(x)
        except (TypeError, ValueError):
            raise UnsupportedDtype(f"{scheme} encrypts arrays, numbers and nested lists of equal lengths") from None
        origin = Origin({"jaxlib": "jax"}.get(kind, kind) if kind in ("cupy", "jax", "jaxlib") else "numpy", "")
        origin = replace(origin, dtype=array.dtype.name)
    if origin.dtype not in dtypes:
        raise UnsupportedDtype(f"{scheme} encrypts {', '.join(dtypes)}; got {origin.dtype}")
    return (array.astype(np.float32) if array.dtype.name == "bfloat16" else array), origin


def in_kind(array: npt.NDArray[Any], origin: Origin) -> Any:
    """Return an array of the library, dtype and device of an origin."""
    if origin.kind == "numpy":
        if origin.dtype == "bfloat16":
            raise UnsupportedDtype("NumPy has no bfloat16: decrypt with dtype='float32'")
        return array
    if origin.kind == "torch":
        return torch.from_numpy(array).to(origin.device, getattr(torch, origin.dtype))
    try:  # a message may name a library that this process has not loaded
        library = importlib.import_module(origin.kind)
    except ImportError:
        raise UnsupportedCase(f"the tensor was an array of {origin.kind}, which is not installed here") from None
    if origin.kind == "cupy":
        return library.asarray(array)
    if array.dtype.itemsize == 8 and not library.config.jax_enable_x64:
        raise UnsupportedDtype(f"JAX holds {origin.dtype} only after jax.config.update('jax_enable_x64', True)")
    return library.numpy.asarray(array, dtype=origin.dtype)
