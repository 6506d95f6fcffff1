"""Prime fields for users: vectorized arithmetic on NumPy arrays and torch tensors, and arrays that stay on a device.

Arrays hold canonical words (words.py): (..., limbs) of uint64, the least significant first; one-limb fields have no
axis of limbs, and BabyBear's words are uint32. Python integers, also in lists, represent elements. Arrays decide where
a call runs: NumPy arrays on the CPU, CUDA tensors on their GPU; `device=` computes elsewhere and returns the result.

>>> fr = accelerant.zk.field("bn254_fr")
>>> fr.add(fr.encode([1, 2]), fr.random(2))      # canonical words in and out
>>> x = fr(fr.random(1000))                      # a FieldArray, in Montgomery form on its device
>>> y = (x**5 + 3 * x - 1) / x                   # nothing leaves the device
>>> y.canonical()                                # words as the field's functions take them
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field import launch, memory_space, parameters
from accelerant.algebra.field import words as host
from accelerant.algebra.field.memory_space import HOST, ArrayOperand, MemorySpace, in_kind, space_at
from accelerant.algebra.field.parameters import Field, field_of
from accelerant.errors import ConfigError, ShapeError, UnsupportedCase, UnsupportedDtype
from accelerant.runtime.files import clipped
from accelerant.runtime.registry import DeviceLike


class PrimeField:
    """A prime field; prime_field(name) returns it.

    Every function of arrays also takes `device=` (the device that computes: "cpu", "cuda:1", "opencl", ...) and
    `reduce=` (reduce elements that are not below the modulus, which are an error by default), and raises

        UnsupportedDtype    neither the field's words nor integers
        ShapeError          shapes that do not broadcast, a last axis that is not the limbs, arrays on two devices
        FormatError         an element not below the modulus, or the inverse of 0; names the flattened index
        BackendUnavailable  the device is not available; says why

    Leading dimensions broadcast as NumPy's. The result is an array of the first argument's library, on its device.

    Attributes:
        parameters: the field's parameters.
        name: the name that prime_field takes.
        modulus: p, the number of elements; also `order` and `characteristic`.
        limbs: words per element.
        generator: of the multiplicative group; its powers are all elements except 0.
        two_adicity: the largest k such that 2^k divides p - 1.
        dtype: of a word.
    """

    def __init__(self, parameters: Field) -> None:
        self.parameters = parameters
        self.name = parameters.name
        self.modulus = self.order = self.characteristic = parameters.modulus
        self.limbs = parameters.limbs
        self.generator = parameters.generator
        self.two_adicity = parameters.two_adicity
        self.dtype = host.dtype_of(parameters)

    def __repr__(self) -> str:
        return f"field({self.name!r})"

    def __reduce__(self) -> tuple[Callable[[str], PrimeField], tuple[str]]:
        return prime_field, (self.name,)

    def encode(self, ints: Any, *, reduce: bool = False) -> npt.NDArray[Any]:
        """Return the canonical words of integers.

        Args:
            ints: a Python integer, a nested list of such, or an array of any integer dtype or of objects.
            reduce: take them modulo p; negative ones too.

        Returns:
            words on the host, with the integers' shape and the axis of limbs.

        Raises:
            UnsupportedDtype: not integers; names the flattened index.
            FormatError: not from 0 to below the modulus; names the flattened index and the value.
        """
        return host.encode(self.parameters, ints, reduce=reduce)

    def decode(self, array: Any, *, reduce: bool = False) -> Any:
        """Return the Python integers of canonical words or a FieldArray: one, or nested lists of their shape."""
        if isinstance(array, FieldArray):
            return array.ints()
        operand = self._operand(array, "x", reduce)
        return host.decode(self.parameters, operand.space.store(operand.words))

    def random(self, shape: int | Sequence[int] = ()) -> npt.NDArray[Any]:
        """Draw uniform elements from the system's entropy, by rejection; return canonical words on the host.

        UnsupportedDtype for sizes that are no integers, ShapeError for negative ones, OutOfMemory for too many.
        """
        return host.random(self.parameters, host.sizes_of(shape))

    def __call__(self, x: Any, *, device: DeviceLike = None, reduce: bool = False) -> FieldArray:
        """Return canonical words, integers or a FieldArray as a FieldArray, which stays on its device between calls."""
        if isinstance(x, FieldArray):
            if x.field is not self:
                raise ConfigError(f"this is an array of {x.field.name}, not of {self.name}")
            return x.moved(x.space if device is None else space_at(device))
        if isinstance(x, np.ndarray) and x.dtype.kind == "i":
            x = self.encode(x, reduce=reduce)
        operand = self._operand(x, "x", reduce)
        space = operand.space if device is None else space_at(device)
        montgomery = launch.elementwise(space, self.parameters, "to_montgomery", "canonical", operand.moved(space))
        return FieldArray(self, space, montgomery, home=None if operand.tensor is None else operand.tensor.device)

    array = __call__

    def zeros(self, shape: int | Sequence[int], *, device: DeviceLike = None) -> FieldArray:
        """Return a FieldArray of zeros."""
        words = np.zeros((*host.sizes_of(shape), *host.tail_of(self.parameters)), self.dtype)
        return self(FieldArray(self, HOST, words), device=device)

    def ones(self, shape: int | Sequence[int], *, device: DeviceLike = None) -> FieldArray:
        """Return a FieldArray of ones."""
        return self.zeros(shape, device=device) + 1

    def uniform(self, shape: int | Sequence[int] = (), *, device: DeviceLike = None) -> FieldArray:
        """Return a FieldArray of `random` elements."""
        return self(self.random(shape), device=device)

    Zeros, Ones, Random = zeros, ones, uniform  # as in galois

    def Range(self, start: int, stop: int, step: int = 1, *, device: DeviceLike = None) -> FieldArray:  # noqa: N802  galois
        """Return start, start + step, ... below stop as a FieldArray."""
        return self(list(range(start, stop, step)), device=device)

    def Identity(self, size: int, *, device: DeviceLike = None) -> FieldArray:  # noqa: N802  galois
        """Return an identity matrix, (size, size), as a FieldArray."""
        return self(np.eye(size, dtype=np.int64), device=device)

    @property
    def primitive_element(self) -> FieldArray:
        """The generator of the multiplicative group, as a single element."""
        return self(self.generator)

    def add(self, x: Any, y: Any, *, device: DeviceLike = None, reduce: bool = False) -> Any:
        """Return (x + y) mod p."""
        return self._map("add", (x, y), device, reduce)

    def sub(self, x: Any, y: Any, *, device: DeviceLike = None, reduce: bool = False) -> Any:
        """Return (x - y) mod p."""
        return self._map("sub", (x, y), device, reduce)

    def mul(self, x: Any, y: Any, *, device: DeviceLike = None, reduce: bool = False) -> Any:
        """Return x y mod p."""
        return self._map("mul", (x, y), device, reduce)

    def square(self, x: Any, *, device: DeviceLike = None, reduce: bool = False) -> Any:
        """Return x^2 mod p."""
        return self._map("square", (x,), device, reduce)

    def neg(self, x: Any, *, device: DeviceLike = None, reduce: bool = False) -> Any:
        """Return -x mod p."""
        return self._map("neg", (x,), device, reduce)

    def inv(self, x: Any, *, device: DeviceLike = None, reduce: bool = False) -> Any:
        """Return x^-1 mod p, many by one inversion; a 0 among them raises FormatError, which names its index."""
        return self._each(launch.inverse, (x,), device, reduce, "canonical", "x")

    def pow(self, x: Any, exponent: int, *, device: DeviceLike = None, reduce: bool = False) -> Any:
        """Return x^exponent mod p for one Python integer, which may be negative; x^0 = 1, also of 0.

        The exponent is public: the time depends on it.
        """
        return self._each(launch.power, (x,), device, reduce, _exponent(exponent), "canonical", "x")

    def sum(self, x: Any, axis: int | None = None, *, device: DeviceLike = None, reduce: bool = False) -> Any:
        """Return the sum of all elements, or along an axis of the elements' shape; 0 of none."""
        return self._each(launch.summed, (x,), device, reduce, axis, "canonical")

    def dot(self, x: Any, y: Any, *, device: DeviceLike = None, reduce: bool = False) -> Any:
        """Return the sum of the products along the last axis of the elements' shape."""
        return self._each(launch.dotted, (x, y), device, reduce, "canonical")

    def _map(self, op: str, arrays: Sequence[Any], device: DeviceLike, reduce: bool) -> Any:
        if device is None and reduce is False:
            z = launch.checked_at_once(self.parameters, op, *arrays)
            if z is not None:
                return z
        return self._each(
            lambda space, field, *words: launch.elementwise(space, field, op, "canonical", *words),
            arrays,
            device,
            reduce,
        )

    def _each(
        self, run: Callable[..., Any], arrays: Sequence[Any], device: DeviceLike, reduce: bool, *options: Any
    ) -> Any:
        """Return run(space, field, *words, *options) with all arguments in one space, in the first array's library."""
        operands = [self._operand(x, name, reduce) for x, name in zip(arrays, ("x", "y"), strict=False)]
        space = memory_space.common_space(device, ("x", "y"), operands)
        words = _broadcast(self.parameters, space, [operand.moved(space) for operand in operands])
        result = run(space, self.parameters, *words, *options)
        tensor = next((operand.tensor for operand in operands if not operand.free), None)
        return in_kind(result, space, None if tensor is None else tensor.device)

    def _operand(self, x: Any, name: str, reduce: bool) -> ArrayOperand:
        """Return contiguous words below the modulus, or raise the error that the class documents."""
        if not isinstance(reduce, bool | np.bool_):  # "no" would mean yes
            raise ConfigError(f"reduce must be True or False, got {clipped(reduce)}")
        field, x = self.parameters, memory_space.stacked(x, name)
        if isinstance(x, (int, np.integer, list, tuple)) or (isinstance(x, np.ndarray) and x.dtype == object):
            return ArrayOperand(host.encode(field, x, reduce=reduce, name=name), HOST, free=True)
        if isinstance(x, FieldArray):
            raise UnsupportedDtype(
                f"{name} is a FieldArray: use its operators, or give its .canonical() words to the field's functions"
            )
        operand = memory_space.array_operand(field, x, name, "Python integers")
        if reduce:
            words = launch.elementwise(operand.space, field, "reduce", "canonical", operand.words)
            return operand._replace(words=words)
        launch.check_reduced(operand.space, field, operand.words, name)
        return operand


class FieldArray:
    """Elements that stay on their device in Montgomery form, with Python's operators and NumPy's functions.

    PrimeField.array returns them. Arrays do not change: every operation returns a new one, indexing may share memory.
    An operand may be a FieldArray of the same field on the same device, Python integers, or canonical words, which are
    moved to the device first.

    Attributes:
        field: the field of the elements.
        space: the memory space of the words.
        words: Montgomery form x R mod p with R = 2^(bits of an element's words), below p; R = 1 for two fields.
        home: the torch device of the original tensor, to which canonical() moves the words; None for NumPy arrays.
    """

    __slots__ = ("field", "home", "space", "words")
    __hash__ = None  # type: ignore[assignment]  # == is element by element

    def __init__(self, field: PrimeField, space: MemorySpace, words: Any, *, home: Any = None) -> None:
        self.field, self.space, self.words, self.home = field, space, words, home

    # --- properties ----------------------------------------------------------------------------------------------
    @property
    def shape(self) -> tuple[int, ...]:
        """The elements' shape, without the axis of limbs."""
        return host.element_shape(self.field.parameters, self.words.shape)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the words."""
        return self.size * self.field.parameters.size_bytes

    @property
    def device(self) -> str:
        """The device: "cpu", "cuda:0", "opencl:0"."""
        return self.space.label

    def __repr__(self) -> str:
        return f"FieldArray({self.field.name}, shape {self.shape}, {self.device})"  # no values: they may be secret

    def __reduce__(self) -> Any:
        return _loaded_array, (self.field, self.space, self.space.store(self.words), self.home)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a single element has no length")
        return self.shape[0]

    def __int__(self) -> int:
        """Return the integer of a single element."""
        if self.shape:
            raise TypeError(f"int() takes a single element, got an array of shape {self.shape}: .tolist() makes a list")
        return int(self.tolist())

    item = __int__

    def __bool__(self) -> bool:
        """Return whether a single element is not 0; NumPy's ValueError for several."""
        return bool(self != 0)

    def canonical(self) -> Any:
        """Return canonical words: a NumPy array, or a torch tensor if the array was made from one."""
        return in_kind(self.plain_words(), self.space, self.home)

    def tolist(self) -> Any:
        """Return Python integers: one, or nested lists."""
        return host.decode(self.field.parameters, self.space.store(self.plain_words()))

    ints = tolist

    def plain_words(self) -> Any:
        """Return canonical words in the array's memory space."""
        return launch.elementwise(self.space, self.field.parameters, "from_montgomery", "montgomery", self.words)

    def copy(self) -> FieldArray:
        """Return the elements in memory of their own."""
        return self + 0

    def moved(self, space: MemorySpace) -> FieldArray:
        """Return the elements in another memory space."""
        if space == self.space:
            return self
        return FieldArray(self.field, space, space.load(self.space.store(self.words)), home=self.home)

    # --- shape ---------------------------------------------------------------------------------------------------
    def __getitem__(self, key: Any) -> FieldArray:
        """Index as NumPy does, over the elements; the result is copied unless its memory is contiguous."""
        keys = key if isinstance(key, tuple) else (key,)
        if host.tail_of(self.field.parameters):
            dots = any(each is Ellipsis for each in keys)
            keys = (*keys, slice(None)) if dots else (*keys, Ellipsis, slice(None))
        return self._of(self.space.getitem(self.words, keys))

    def __iter__(self) -> Iterator[FieldArray]:
        return (self[i] for i in range(len(self)))

    def reshape(self, *shape: int | Sequence[int]) -> FieldArray:
        """Return the same elements in another shape; one size may be -1. ShapeError for another number of elements."""
        flat = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        sizes = [host.index_of(size, "a size") for size in flat]
        known = math.prod(size for size in sizes if size != -1)
        if sizes.count(-1) == 1 and known > 0 and self.size % known == 0:
            sizes[sizes.index(-1)] = self.size // known
        if min(sizes, default=0) < 0 or math.prod(sizes) != self.size:
            wanted = ", ".join(map(clipped, sizes))
            raise ShapeError(f"{self.size} elements of shape {self.shape} cannot be reshaped to ({wanted})")
        return self._of(self.words.reshape((*sizes, *host.tail_of(self.field.parameters))))

    def transpose(self) -> FieldArray:
        """Return the array with its axes in reverse order."""
        words = self.words
        for axis in reversed(range(self.ndim - 1)):
            words = self.space.move_axis(words, axis, len(host.tail_of(self.field.parameters)))
        return self._of(words)

    T = property(transpose)

    def flatten(self) -> FieldArray:
        """Return the elements along one axis."""
        return self.reshape(-1)

    # --- arithmetic ----------------------------------------------------------------------------------------------
    def __add__(self, other: Any) -> FieldArray:
        return self._binary("add", self, other)

    def __radd__(self, other: Any) -> FieldArray:
        return self._binary("add", other, self)

    def __sub__(self, other: Any) -> FieldArray:
        return self._binary("sub", self, other)

    def __rsub__(self, other: Any) -> FieldArray:
        return self._binary("sub", other, self)

    def __mul__(self, other: Any) -> FieldArray:
        return self._binary("mul", self, other)

    def __rmul__(self, other: Any) -> FieldArray:
        return self._binary("mul", other, self)

    def __truediv__(self, other: Any) -> FieldArray:
        return self._binary("mul", self, self._like(other, "y")._inverse("y"))

    def __rtruediv__(self, other: Any) -> FieldArray:
        return self._binary("mul", other, self.inv())

    def __neg__(self) -> FieldArray:
        return self._unary("neg")

    def __pos__(self) -> FieldArray:
        return self

    def __pow__(self, exponent: Any) -> FieldArray:
        """Raise to one public Python integer: the time depends on it. x^0 = 1, also of 0."""
        field = self.field.parameters
        return self._of(launch.power(self.space, field, self.words, _exponent(exponent), "montgomery", "x"))

    def square(self) -> FieldArray:
        """Return the squares."""
        return self._unary("square")

    def inv(self) -> FieldArray:
        """Return the inverses, many by one inversion; a 0 raises FormatError, which names its flattened index."""
        return self._inverse("x")

    def _inverse(self, name: str) -> FieldArray:
        return self._of(launch.inverse(self.space, self.field.parameters, self.words, "montgomery", name))

    def sum(self, axis: int | None = None, dtype: None = None, out: None = None) -> FieldArray:
        """Return the sum of all elements, or along an axis. NumPy's dtype and out must be left out."""
        if dtype is not None or out is not None:
            raise UnsupportedCase("the sum of field elements takes no dtype and no out")
        return self._of(launch.summed(self.space, self.field.parameters, self.words, axis, "montgomery"))

    def dot(self, other: Any) -> FieldArray:
        """Return the sum of the products along the last axis."""
        x, y = self._together(self, other)
        return self._of(launch.dotted(self.space, self.field.parameters, x, y, "montgomery"))

    def __matmul__(self, other: Any) -> FieldArray:
        """Return the product of vectors or matrices; leading axes broadcast, as in np.matmul."""
        y = self._like(other, "y")
        if not self.ndim or not y.ndim or self.shape[-1] != y.shape[-2:][0]:
            raise ShapeError(f"@ takes (..., n, k) and (..., k, m), or vectors of k; got {self.shape} and {y.shape}")
        if y.ndim == 1:
            return self.dot(y)
        columns = y._of(self.space.move_axis(y.words, y.ndim - 2, len(host.tail_of(self.field.parameters))))
        if self.ndim == 1:
            return self.dot(columns)
        rows = self.reshape(*self.shape[:-1], 1, self.shape[-1])
        return rows.dot(columns.reshape(*columns.shape[:-2], 1, *columns.shape[-2:]))

    def __rmatmul__(self, other: Any) -> FieldArray:
        return self._like(other, "x") @ self

    def __eq__(self, other: object) -> Any:
        """Compare element by element; return booleans of NumPy, or of torch on its device."""
        if not isinstance(other, (int, np.integer, list, tuple, np.ndarray, FieldArray)) and not memory_space.is_tensor(
            other
        ):
            return NotImplemented
        x, y = self._together(self, other)
        return self.space.equal(x, y, len(host.tail_of(self.field.parameters)))

    def __ne__(self, other: object) -> Any:
        return same if (same := self.__eq__(other)) is NotImplemented else ~same

    # --- NumPy ---------------------------------------------------------------------------------------------------
    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if method == "reduce" and ufunc is np.add and not set(options) - {"axis"}:
            return self.sum(options.get("axis", 0))
        function = _UFUNCS.get(ufunc.__name__)
        if method != "__call__" or function is None or options:
            called = f".{method}" * (method != "__call__") + f" with {', '.join(options)}" * bool(options)
            raise UnsupportedCase(
                f"np.{ufunc.__name__}{called} is not defined on field elements; defined are {', '.join(_UFUNCS)} and "
                "np.sum. For words call .canonical(), for Python integers .ints()"
            )
        first = inputs[0] if isinstance(inputs[0], FieldArray) else self._like(inputs[0], "x")
        return function(first, *inputs[1:])

    def __array_function__(self, function: Any, types: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call NumPy's function; array_equal is ours, since NumPy's is False for what is no array of NumPy."""
        if function is np.array_equal:
            return self._array_equal(*args, **options)
        implementation = getattr(function, "_implementation", None)  # has no documented name
        if implementation is None or function is np.array_equiv:  # which is False, too
            raise UnsupportedCase(f"np.{function.__name__} is not defined on field elements")
        return implementation(*args, **options)

    def _array_equal(self, a1: Any, a2: Any, equal_nan: bool = False) -> bool:
        x, y = self._like(a1, "a1"), self._like(a2, "a2")
        return x.shape == y.shape and bool((x == y).all())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Refuse the conversion: it could mean words or integers."""
        raise UnsupportedDtype("NumPy cannot know the form: call .canonical() for words, .ints() for Python integers")

    # --- helpers ---------------------------------------------------------------------------------------------------
    def _of(self, words: Any) -> FieldArray:
        return FieldArray(self.field, self.space, words, home=self.home)

    def _like(self, other: Any, name: str) -> FieldArray:
        """Return an operand as an array of this field in this space."""
        if isinstance(other, FieldArray) and other.field is not self.field:
            raise ConfigError(f"{self.field.name} and {other.field.name} are different fields")
        array = self.field.array(other)
        if array.space != self.space:
            if isinstance(other, FieldArray) or array.space is not HOST:
                raise ShapeError(f"x and y must be on one device, got {self.device} and {array.device}")
            array = array.moved(self.space)
        return array

    def _together(self, x: Any, y: Any) -> tuple[Any, Any]:
        ours = isinstance(x, FieldArray) and isinstance(y, FieldArray) and x.field is y.field is self.field
        if ours and x.space == y.space == self.space and x.words.shape == y.words.shape:
            return x.words, y.words
        x, y = _broadcast(self.field.parameters, self.space, [self._like(x, "x").words, self._like(y, "y").words])
        return x, y

    def _binary(self, op: str, x: Any, y: Any) -> FieldArray:
        a, b = self._together(x, y)
        return self._of(launch.elementwise(self.space, self.field.parameters, op, "montgomery", a, b))

    def _unary(self, op: str) -> FieldArray:
        return self._of(launch.elementwise(self.space, self.field.parameters, op, "montgomery", self.words))


def _loaded_array(field: PrimeField, space: MemorySpace, words: npt.NDArray[Any], home: Any) -> FieldArray:
    """Return an array that was pickled or copied."""
    return FieldArray(field, space, space.load(words), home=home)


def _broadcast(field: Field, space: MemorySpace, words: list[Any]) -> list[Any]:
    shapes = [host.element_shape(field, array.shape) for array in words]
    try:
        shape = (*np.broadcast_shapes(*shapes), *host.tail_of(field))
    except ValueError:
        raise ShapeError(f"x and y must have shapes that broadcast, got {shapes[0]} and {shapes[1]}") from None
    return [array if tuple(array.shape) == shape else space.broadcast(array, shape) for array in words]


def prime_field(name: str) -> PrimeField:
    """Return the field of a name: goldilocks, babybear, mersenne61, bn254_fr, _fq, bls12_381_fr, _fq, or registered.

    A known modulus is a name, too. ConfigError for another name lists the known ones.
    """
    return _prime_field(field_of(name).name)


@functools.cache
def _prime_field(name: str) -> PrimeField:
    return PrimeField(field_of(name))


def register_field(name: str, modulus: int, generator: int) -> PrimeField:
    """Register a prime field for this process, and return it; `field` and `ntt` take its name from then on.

    Args:
        name: an identifier.
        modulus: p, a prime of an even number of 64-bit words, at least one bit below that.
        generator: of the multiplicative group, or any quadratic non-residue if roots of unity of orders 2^k suffice.
            Roots of unity are generator^((p - 1) / n).

    Raises:
        ConfigError: another field has the name, or a parameter violates these limits.
    """
    return prime_field(parameters.register_field(name, modulus, generator).name)


def _exponent(exponent: object) -> int:
    if isinstance(exponent, (int, np.integer)) and not isinstance(exponent, bool):
        return int(exponent)
    raise UnsupportedDtype(f"the exponent must be one Python integer for all elements, got {type(exponent).__name__}")


_UFUNCS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "matmul": operator.matmul,
    "divide": operator.truediv,
    "power": operator.pow,
    "negative": operator.neg,
    "positive": operator.pos,
    "square": FieldArray.square,
    "reciprocal": FieldArray.inv,
    "equal": operator.eq,
    "not_equal": operator.ne,
}  # NumPy function -> the method or operator. np.true_divide is np.divide.
