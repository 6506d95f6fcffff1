"""Parts of both schemes: heads of messages, private keys under a passphrase, arrays of any library; Paillier's numbers.

A message begins with six letters for its scheme, one for its kind, and a version in one byte. A number x of Paillier's
plaintexts is the integer round(x 16^-exponent). Nothing here is constant-time.
"""

from __future__ import annotations

import importlib
import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from accelerant.errors import ConfigError, FormatError, MissingDependency, RangeError, UnsupportedCase, UnsupportedDtype
from accelerant.privacy.messages import MessageReader
from accelerant.runtime.files import AtomicFile, clipped
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


# --- numbers of Paillier's plaintexts --------------------------------------------------------------------------------
SLOT_BITS, SLOT_VALUE = 31, 2**23
"""Bits of a slot of a packed plaintext, of which the value has 24 (sign included) and additions the others, and the
largest magnitude of a value: 66 slots in 2048 bits, 99 in 3072, and 127 additions."""

FLOATS = {"float16": (-6, 16), "bfloat16": (-16, 128), "float32": (-16, 128), "float64": (-24, 1024)}
"""Default exponent of each dtype, in powers of 16, and log2 of the largest magnitude. float16 is exact. float32 is
within 2^-65, exact from 2^-41 on; float64 is within 2^-97, exact from 2^-44 on."""

DTYPES = (*FLOATS, *INTEGERS)
EXPONENT_MOST = 1024


def scale_of(dtype: str, exponent: int | None, limit: Any, pack: bool) -> tuple[int, int]:
    """Return the exponent and the bound of encoded magnitudes."""
    if dtype not in DTYPES:
        raise UnsupportedDtype(f"wanted a dtype of {', '.join(DTYPES)}, got {clipped(dtype)}")
    if dtype in FLOATS and pack and exponent is None:
        raise ConfigError("packed floats need an exponent: values are multiples of 16^exponent, below 2^23 of them")
    default, bits = FLOATS[dtype] if dtype in FLOATS else (0, np.iinfo(dtype).bits - (dtype[0] == "i"))
    exponent = default if exponent is None else exponent
    if type(exponent) is not int or not -EXPONENT_MOST <= exponent <= (EXPONENT_MOST if dtype in FLOATS else 0):
        raise ConfigError(
            f"an exponent is from {-EXPONENT_MOST} to {EXPONENT_MOST}, of integers to 0; got {clipped(exponent)}"
        )
    if limit is not None and not (isinstance(limit, (int, float, np.number)) and 0 <= limit < math.inf):
        raise ConfigError(f"a limit is a finite number from 0 on, got {clipped(limit)}")
    if pack and limit is None:
        return exponent, SLOT_VALUE
    top = 2**bits if limit is None else math.ceil(limit)
    bound = top << -4 * exponent if exponent <= 0 else -(-top >> 4 * exponent)
    if pack and bound > SLOT_VALUE:
        raise ConfigError(f"packed values have 24 bits: the limit divided by 16^exponent must be at most {SLOT_VALUE}")
    return exponent, bound


def encode(array: npt.NDArray[Any], exponent: int, bound: int | None) -> list[int]:
    """Return round(x 16^-exponent), halves up; RangeError names the index of a value out of range."""
    if array.dtype.kind in "iu":
        numbers = [value << -4 * exponent for value in array.reshape(-1).tolist()]
    else:
        wholes, shifts = (part.tolist() for part in _mantissas(array.reshape(-1), exponent))
        numbers = [
            m << shift if shift >= 0 else (m + (1 << -shift - 1)) >> -shift
            for m, shift in zip(wholes, shifts, strict=True)
        ]
    if bound is not None:
        for i, number in enumerate(numbers):
            if abs(number) > bound:
                raise RangeError(f"the value at flat index {i} is beyond the limit, {bound} times 16^{exponent}")
    return numbers


def encode_words(array: npt.NDArray[Any], exponent: int, bound: int) -> tuple[npt.NDArray[Any], int]:
    """Return words of the same numbers plus an offset above all magnitudes, and the offset."""
    flat, columns = array.reshape(-1), bound.bit_length() // 32 + 1
    if array.dtype.kind in "iu":
        wide = flat.astype(np.int64 if array.dtype.kind == "i" else np.uint64)
        below, magnitudes = flat < 0, np.abs(wide).view(np.uint64)
        shifts = np.full(flat.shape, -4 * exponent)
    else:
        numbers, shifts = _mantissas(flat, exponent)
        right = np.clip(-shifts, 0, 60)  # of 53 bits nothing is left below half a unit
        numbers = np.where(right > 0, numbers + (np.int64(1) << np.maximum(right, 1) - 1) >> right, numbers)
        below, magnitudes, shifts = numbers < 0, np.abs(numbers).view(np.uint64), np.maximum(shifts, 0)
        shifts = np.where(magnitudes == 0, 0, shifts)
    words, rows = np.zeros((len(flat), columns + 3), np.uint32), np.arange(len(flat))
    column, bits = shifts // 32, (shifts % 32).astype(np.uint64)
    low, high = (half << bits for half in (magnitudes & np.uint64(2**32 - 1), magnitudes >> np.uint64(32)))
    middle = low >> np.uint64(32) | high & np.uint64(2**32 - 1)
    for i, part in enumerate((low, middle, high >> np.uint64(32))):
        words[rows, column + i] = part.astype(np.uint32)
    words[:, columns] = 1  # the offset, 2^(32 columns); what is below 0 is subtracted from it
    words[below] = ~words[below]
    words[below, columns:] = 0
    carry = below.astype(np.uint64)
    for i in range(columns + 1):
        carry += words[:, i]
        words[:, i] = carry.astype(np.uint32)
        carry >>= np.uint64(32)
    return words[:, : columns + 1].copy(), 1 << 32 * columns


def _mantissas(flat: npt.NDArray[Any], exponent: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """Return integers of 53 bits and powers of 2, whose products are x 16^-exponent; RangeError if one is infinite."""
    wide = flat.astype(np.float64)
    finite = np.isfinite(wide)
    if not finite.all():
        raise RangeError(f"the value at flat index {int(finite.argmin())} is not finite")
    mantissas, powers = np.frexp(wide)
    return (mantissas * 2.0**53).astype(np.int64), powers - 53 - 4 * exponent


def in_slots(numbers: Sequence[int], slots: int) -> list[int]:
    """Return the sums of `slots` numbers each, number i times 2^(31 i)."""
    return [
        sum(number << SLOT_BITS * i for i, number in enumerate(numbers[at : at + slots]))
        for at in range(0, len(numbers), slots)
    ]


def signed_numbers(words: npt.NDArray[Any]) -> Any:
    """Return numbers of words (count, columns) less 2^(32 columns - 1): as int64 if all fit, else as a list."""
    plain = words.astype("<u4")
    plain[:, -1] ^= np.uint32(2**31)  # two's complement
    low = plain[:, :2].copy().view("<i8")[:, 0].astype(np.int64)
    if (plain[:, 2:] == (low >> 63).astype(np.uint32)[:, None]).all():
        return low
    data, size = plain.tobytes(), 4 * plain.shape[1]
    return [int.from_bytes(data[at : at + size], "little", signed=True) for at in range(0, len(data), size)]


def out_of_slots(packed: Iterable[int], slots: int, count: int) -> list[int]:
    """Return the numbers of slots, magnitudes below 2^30."""
    numbers, half = list[int](), 1 << SLOT_BITS - 1
    offset = sum(half << SLOT_BITS * i for i in range(slots))
    for one in packed:
        shifted = int(one) + offset  # no slot is negative
        numbers += [(shifted >> SLOT_BITS * i & 2 * half - 1) - half for i in range(slots)]
    return numbers[:count]


def decode(numbers: Any, exponent: int, shape: tuple[int, ...], origin: Origin) -> Any:
    """Return numbers, a list or array, times 16^exponent as an array of an origin; RangeError if one does not fit."""
    down, up = 4 * max(0, -exponent), 4 * max(0, exponent)
    real, dtype = origin.dtype in FLOATS, origin.dtype
    if isinstance(numbers, np.ndarray):
        if not exponent and not real:
            limits = np.iinfo(dtype)
            if numbers.size and (numbers.min() < limits.min or numbers.max() > limits.max):
                raise RangeError(f"a decrypted value does not fit {dtype}: decrypt with a wider dtype")
            return in_kind(numbers.astype(dtype).reshape(shape), origin)
        numbers = numbers.tolist()
    stored = np.dtype("float32" if dtype == "bfloat16" else dtype)
    try:
        if real:
            values: list[Any] = [(number << up) / (1 << down) for number in numbers]  # rounded once
        elif any(number & (1 << down) - 1 for number in numbers):
            raise RangeError(f"a decrypted value is not an integer: decrypt with dtype='float64' instead of {dtype}")
        else:
            values = [number << up >> down for number in numbers]
        with np.errstate(over="ignore"):
            array = np.array(values, np.float64 if real else stored).astype(stored).reshape(shape)
        if real and not np.isfinite(array).all():
            raise OverflowError
    except OverflowError as error:
        if isinstance(error, RangeError):
            raise
        raise RangeError(f"a decrypted value does not fit {dtype}: decrypt with a wider dtype") from None
    return in_kind(array, origin)


def joint_dtype(x: str, y: str) -> str:
    """Return the dtype of a sum or product: of two integer dtypes int64, of two float dtypes the wider one."""
    real = [dtype for dtype in (x, y) if dtype in FLOATS]
    if x == y or len(real) == 1:
        return x if x == y else real[0]
    return max(real, key=list(FLOATS).index) if real and {x, y} != {"float16", "bfloat16"} else (
        "float32" if real else "int64"
    )  # fmt: skip
