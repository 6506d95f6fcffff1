"""A prime field for users: vectorised arithmetic on NumPy arrays and torch tensors.

Arrays hold canonical words (words.py): (..., limbs) of uint64, the least significant first; one-limb fields have no
axis of limbs, and BabyBear's words are uint32. Python integers, also in lists, stand for elements. Arrays decide where
a call runs: NumPy's on the CPU, tensors on CUDA there; `device=` sends it elsewhere and brings the answer back.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field import launch, parameters
from accelerant.algebra.field import words as host
from accelerant.algebra.field.array import FieldArray, exponent_of
from accelerant.algebra.field.memory_space import HOST, MemorySpace, in_kind, is_tensor, signed_view, space_at, space_of
from accelerant.algebra.field.parameters import Field, field_of
from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.runtime.provider import ComputeDevice

__all__ = ["PrimeField", "prime_field", "register_field"]

Device = str | ComputeDevice | None


@dataclass(frozen=True, slots=True)
class _Operand:
    """An argument.

    Attributes:
        words: of it.
        place: where they are.
        tensor: that it came from, if it was one.
        free: made of Python's integers, which go where the other argument is.
    """

    words: Any
    place: MemorySpace
    tensor: Any = None
    free: bool = False


class PrimeField:
    """A prime field; prime_field(name) makes the one of a name.

    Every function of arrays takes, besides the arrays, `device=` (where to compute: "cpu", "cuda:1", "opencl", ...) and
    `reduce=` (take what is not below the modulus modulo it, where it would be an error), and raises

        UnsupportedDtype    not the field's words, nor integers
        ShapeError          shapes that do not broadcast, a last axis that is not the limbs, arrays on two devices
        FormatError         an element not below the modulus, or 0 to be inverted; names the flattened index
        BackendUnavailable  the device is not there; says why

    Leading dimensions broadcast as NumPy's. What comes back is of the first array's library, on its device.

    Attributes:
        parameters: the row of the table that all follows from.
    """

    def __init__(self, parameters: Field) -> None:
        self.parameters = parameters

    def __repr__(self) -> str:
        return f"field({self.name!r})"

    def __reduce__(self) -> tuple[Callable[[str], PrimeField], tuple[str]]:
        return prime_field, (self.name,)

    # --- facts ---------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """As prime_field takes it."""
        return self.parameters.name

    @property
    def modulus(self) -> int:
        """p, the number of elements."""
        return self.parameters.modulus

    @property
    def limbs(self) -> int:
        """Words of an element."""
        return self.parameters.limbs

    @property
    def generator(self) -> int:
        """Of the multiplicative group: its powers are all elements but 0."""
        return self.parameters.generator

    @property
    def two_adicity(self) -> int:
        """The largest k such that 2^k divides p - 1."""
        return self.parameters.two_adicity

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of a word."""
        return host.dtype_of(self.parameters)

    # --- in and out ----------------------------------------------------------------------------------------------

    def encode(self, ints: Any, *, reduce: bool = False) -> npt.NDArray[Any]:
        """Canonical words of integers.

        Args:
            ints: a Python integer, a nested list of such, or an array of integers (any dtype of them, or objects).
            reduce: take them modulo the modulus; negative ones too.

        Returns:
            the integers' shape and the limbs, on the host.

        Raises:
            UnsupportedDtype: not integers; names the flattened index.
            FormatError: not from 0 to below the modulus; names the flattened index and the value.
        """
        return host.encode(self.parameters, ints, reduce=reduce)

    def decode(self, array: Any, *, reduce: bool = False) -> Any:
        """Python integers of words: one, or nested lists in the elements' shape.

        Args:
            array: canonical words, NumPy's or torch's; or a FieldArray.
            reduce: as everywhere.
        """
        if isinstance(array, FieldArray):
            return array.ints()
        operand = self._operand(array, "x", reduce)
        return host.decode(self.parameters, operand.place.store(operand.words))

    def random(self, shape: int | Sequence[int]) -> npt.NDArray[Any]:
        """Uniform elements from the system's entropy, by rejection; canonical words on the host.

        Raises:
            ShapeError: a negative size.
        """
        sizes = (shape,) if isinstance(shape, int) else tuple(map(operator.index, shape))
        if min(sizes, default=0) < 0:
            raise ShapeError(f"sizes must be 0 or more, got {sizes}")
        return host.random(self.parameters, sizes)

    def array(self, x: Any, *, device: Device = None, reduce: bool = False) -> FieldArray:
        """The elements as a FieldArray, which stays on its device in Montgomery form between calls.

        Args:
            x: canonical words, integers, or a FieldArray of this field.
            device: where it shall be; where x is by default.
            reduce: as everywhere.
        """
        if isinstance(x, FieldArray):
            if x.field is not self:
                raise ConfigError(f"this is an array of {x.field.name}, not of {self.name}")
            place = x.place if device is None else space_at(device)
            return x.moved(place)
        operand = self._operand(x, "x", reduce)
        place = operand.place if device is None else space_at(device)
        words = _moved(operand, place)
        made = launch.unary(place, self.parameters, "to_montgomery", words, "canonical")
        return FieldArray(self, place, made, home=None if operand.tensor is None else operand.tensor.device)

    # --- arithmetic ----------------------------------------------------------------------------------------------

    def add(self, x: Any, y: Any, *, device: Device = None, reduce: bool = False) -> Any:
        """The sum, (x + y) mod p."""
        return self._binary("add", x, y, device, reduce)

    def sub(self, x: Any, y: Any, *, device: Device = None, reduce: bool = False) -> Any:
        """The difference, (x - y) mod p."""
        return self._binary("sub", x, y, device, reduce)

    def mul(self, x: Any, y: Any, *, device: Device = None, reduce: bool = False) -> Any:
        """The product, x y mod p."""
        return self._binary("mul", x, y, device, reduce)

    def square(self, x: Any, *, device: Device = None, reduce: bool = False) -> Any:
        """The square, x^2 mod p."""
        return self._unary("square", x, device, reduce)

    def neg(self, x: Any, *, device: Device = None, reduce: bool = False) -> Any:
        """The negative, -x mod p."""
        return self._unary("neg", x, device, reduce)

    def inv(self, x: Any, *, device: Device = None, reduce: bool = False) -> Any:
        """The inverse, x^-1 mod p, many with one inversion; a 0 among them is a FormatError that names its index."""
        return self._each(launch.inverse, (x,), device, reduce, "canonical", "x")

    def pow(self, x: Any, exponent: int, *, device: Device = None, reduce: bool = False) -> Any:
        """The power, x^exponent mod p, one Python integer for all, below 0 too; x^0 = 1, also of 0.

        The exponent is public: the time depends on it.
        """
        return self._each(launch.power, (x,), device, reduce, exponent_of(exponent), "canonical", "x")

    def sum(self, x: Any, axis: int | None = None, *, device: Device = None, reduce: bool = False) -> Any:
        """The sum of all elements, or along an axis of the elements' shape; 0 of none."""
        return self._each(launch.summed, (x,), device, reduce, axis, "canonical")

    def dot(self, x: Any, y: Any, *, device: Device = None, reduce: bool = False) -> Any:
        """The sum of the products along the last axis of the elements' shape."""
        return self._each(launch.dotted, (x, y), device, reduce, "canonical")

    # --- parts ---------------------------------------------------------------------------------------------------

    def _binary(self, op: str, x: Any, y: Any, device: Device, reduce: bool) -> Any:
        def run(place: MemorySpace, field: Field, a: Any, b: Any) -> Any:
            return launch.binary(place, field, op, a, b, "canonical")

        return self._each(run, (x, y), device, reduce)

    def _unary(self, op: str, x: Any, device: Device, reduce: bool) -> Any:
        def run(place: MemorySpace, field: Field, a: Any) -> Any:
            return launch.unary(place, field, op, a, "canonical")

        return self._each(run, (x,), device, reduce)

    def _each(self, run: Callable[..., Any], arrays: Sequence[Any], device: Device, reduce: bool, *options: Any) -> Any:
        """Bring the arguments together, run(place, field, *words, *options), answer in kind."""
        names = ("x", "y")
        operands = [self._operand(x, name, reduce) for x, name in zip(arrays, names, strict=False)]
        placed = [each for each in operands if not each.free]
        home = placed[0].place if placed else HOST
        for each in placed:
            if each.place != home:
                raise ShapeError(f"x and y must be on one device, got {home.label} and {each.place.label}")
        place = home if device is None else space_at(device)
        words = _broadcast(self.parameters, place, [_moved(each, place) for each in operands])
        answer = run(place, self.parameters, *words, *options)
        tensor = next((each.tensor for each in placed), None)
        return in_kind(answer, place, tensor.device if tensor is not None else None)

    def _operand(self, x: Any, name: str, reduce: bool) -> _Operand:
        """Contiguous words below the modulus, or the error that the class documents."""
        field = self.parameters
        if isinstance(x, (int, np.integer, list, tuple)) or (isinstance(x, np.ndarray) and x.dtype == object):
            return _Operand(host.encode(field, x, reduce=reduce, name=name), HOST, free=True)
        if is_tensor(x):
            host.check_words(field, str(x.dtype).removeprefix("torch."), x.shape, name)
            place, tensor = space_of(x), x
            words = x.detach().numpy() if place is HOST else signed_view(x)
        elif isinstance(x, np.ndarray):
            if x.dtype != self.dtype or field.limbs > 1:  # a dtype's name takes longer than a small sum
                host.check_words(field, x.dtype.name if x.dtype.isnative else x.dtype.str, x.shape, name)
            place, words, tensor = HOST, x, None
        elif isinstance(x, FieldArray):
            raise UnsupportedDtype(
                f"{name} is a FieldArray: use its operators, or give its .canonical() words to the field's functions"
            )
        else:
            raise UnsupportedDtype(
                f"{name} must be a NumPy array, a torch tensor or Python integers, got {type(x).__name__}"
            )
        words = place.contiguous(words)
        if reduce:
            words = launch.reduced(place, field, words)
        else:
            launch.check_reduced(place, field, words, name)
        return _Operand(words, place, tensor)


def _moved(operand: _Operand, place: MemorySpace) -> Any:
    return operand.words if operand.place == place else place.load(operand.place.store(operand.words))


def _broadcast(field: Field, place: MemorySpace, words: list[Any]) -> list[Any]:
    shapes = [host.element_shape(field, each.shape) for each in words]
    try:
        shape = (*np.broadcast_shapes(*shapes), *host.tail_of(field))
    except ValueError:
        raise ShapeError(f"x and y must have shapes that broadcast, got {shapes[0]} and {shapes[1]}") from None
    return [each if tuple(each.shape) == shape else place.broadcast(each, shape) for each in words]


@functools.cache
def prime_field(name: str) -> PrimeField:
    """Return the field of a name: goldilocks, babybear, bn254_fr, bn254_fq, bls12_381_fr, bls12_381_fq, or registered.

    Raises:
        ConfigError: no field has that name; lists those there are.
    """
    return PrimeField(field_of(name))


def register_field(name: str, modulus: int, generator: int) -> PrimeField:
    """Register a prime field for this process, and return it; `field` and `ntt` take its name from then on.

    Args:
        name: an identifier.
        modulus: p, a prime of an even number of 64-bit words, at least one bit below that.
        generator: of the multiplicative group, or any quadratic non-residue if roots of unity of orders 2^k suffice.
            Roots of unity are generator^((p - 1) / n).

    Raises:
        ConfigError: another field has the name, or a parameter is out of these limits.
    """
    return PrimeField(parameters.register_field(name, modulus, generator))
