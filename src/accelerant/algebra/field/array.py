"""FieldArray: elements that stay on their device in Montgomery form, with Python's operators and NumPy's functions.

>>> fr = accelerant.zk.field("bn254_fr")
>>> x = fr.array(fr.random(1000))
>>> y = (x**5 + 3 * x - 1) / x                   # nothing leaves the device
>>> y.canonical()                                # words as the field's functions take them

Arrays do not change: every operation makes a new one, indexing may share memory. An operand may be a FieldArray of the
same field on the same device, Python integers, or canonical words, which are brought to the device first.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from accelerant.algebra.field import launch
from accelerant.algebra.field import words as host
from accelerant.algebra.field.memory_space import HOST, MemorySpace, in_kind, is_tensor
from accelerant.errors import ConfigError, ShapeError, UnsupportedCase, UnsupportedDtype

if TYPE_CHECKING:
    from accelerant.algebra.field.field import PrimeField

__all__ = ["FieldArray"]


class FieldArray:
    """See the module's docstring; PrimeField.array makes them.

    Attributes:
        field: whose elements.
        place: the memory that they are in.
        words: there, Montgomery form x R mod p with R = 2^(bits of an element's words), below p; R = 1 for Goldilocks.
        home: the torch device of the tensor it was made of, where canonical() brings it; None of NumPy's or integers.
    """

    __slots__ = ("field", "home", "place", "words")
    __hash__ = None  # type: ignore[assignment]  # == is element by element

    def __init__(self, field: PrimeField, place: MemorySpace, words: Any, *, home: Any = None) -> None:
        self.field = field
        self.place = place
        self.words = words
        self.home = home

    # --- what it is ----------------------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the elements."""
        return host.element_shape(self.field.parameters, self.words.shape)

    @property
    def ndim(self) -> int:
        """Axes of the elements' shape."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the words."""
        return self.size * self.field.parameters.size_bytes

    @property
    def device(self) -> str:
        """Where it is: "cpu", "cuda:0", "opencl:0"."""
        return self.place.label

    def __repr__(self) -> str:
        return f"FieldArray({self.field.name}, shape {self.shape}, {self.device})"  # no values: they may be secret

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a single element has no length")
        return self.shape[0]

    def canonical(self) -> Any:
        """Canonical words: a NumPy array, or a tensor where it was made of one."""
        return in_kind(self._plain(), self.place, self.home)

    def ints(self) -> Any:
        """Python integers: one, or nested lists."""
        return host.decode(self.field.parameters, self.place.store(self._plain()))

    def _plain(self) -> Any:
        return launch.unary(self.place, self.field.parameters, "from_montgomery", self.words, "montgomery")

    def moved(self, place: MemorySpace) -> FieldArray:
        """The same elements at a place."""
        if place == self.place:
            return self
        return FieldArray(self.field, place, place.load(self.place.store(self.words)), home=self.home)

    # --- shape ---------------------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> FieldArray:
        """As NumPy's, over the elements; what is not one slice of memory is copied."""
        keys = key if isinstance(key, tuple) else (key,)
        if host.tail_of(self.field.parameters):
            dots = any(each is Ellipsis for each in keys)
            keys = (*keys, slice(None)) if dots else (*keys, Ellipsis, slice(None))
        return self._of(self.place.getitem(self.words, keys))

    def __iter__(self) -> Iterator[FieldArray]:
        return (self[i] for i in range(len(self)))

    def reshape(self, *shape: int | Sequence[int]) -> FieldArray:
        """The same elements in another shape; one size may be -1.

        Raises:
            ShapeError: it holds another number of elements.
        """
        flat = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        sizes = [operator.index(size) for size in flat]  # type: ignore[arg-type]  # of either spelling
        known = math.prod(size for size in sizes if size != -1)
        if sizes.count(-1) == 1 and known > 0 and self.size % known == 0:
            sizes[sizes.index(-1)] = self.size // known
        if min(sizes, default=0) < 0 or math.prod(sizes) != self.size:
            raise ShapeError(f"{self.size} elements of shape {self.shape} cannot be reshaped to {tuple(flat)}")
        return self._of(self.place.reshape(self.words, (*sizes, *host.tail_of(self.field.parameters))))

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
        """One Python integer for all, public: the time depends on it. x^0 = 1, also of 0."""
        field = self.field.parameters
        return self._of(launch.power(self.place, field, self.words, exponent_of(exponent), "montgomery", "x"))

    def square(self) -> FieldArray:
        """The square."""
        return self._unary("square")

    def inv(self) -> FieldArray:
        """The inverse, many with one inversion.

        Raises:
            FormatError: an element is 0; names its flattened index.
        """
        return self._inverse("x")

    def _inverse(self, name: str) -> FieldArray:
        return self._of(launch.inverse(self.place, self.field.parameters, self.words, "montgomery", name))

    def sum(self, axis: int | None = None, dtype: None = None, out: None = None) -> FieldArray:
        """The sum of all elements, or along an axis. NumPy's dtype and out must be left out."""
        if dtype is not None or out is not None:
            raise UnsupportedCase("the sum of field elements takes no dtype and no out")
        return self._of(launch.summed(self.place, self.field.parameters, self.words, axis, "montgomery"))

    def dot(self, other: Any) -> FieldArray:
        """The sum of the products along the last axis."""
        x, y = self._together(self, other)
        return self._of(launch.dotted(self.place, self.field.parameters, x, y, "montgomery"))

    def __eq__(self, other: object) -> Any:
        """Element by element: booleans of NumPy, or of torch on its device."""
        if not isinstance(other, (int, np.integer, list, tuple, np.ndarray, FieldArray)) and not is_tensor(other):
            return NotImplemented
        x, y = self._together(self, other)
        return self.place.equal(x, y, len(host.tail_of(self.field.parameters)))

    def __ne__(self, other: object) -> Any:
        same = self.__eq__(other)
        return same if same is NotImplemented else ~same

    # --- NumPy ---------------------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if method == "reduce" and ufunc is np.add and not set(options) - {"axis"}:
            return self.sum(options.get("axis", 0))
        function = _UFUNCS.get(ufunc.__name__)
        if method != "__call__" or function is None or options:
            called = (
                ufunc.__name__ + f".{method}" * (method != "__call__") + f" with {', '.join(options)}" * bool(options)
            )
            raise UnsupportedCase(
                f"np.{called} is not defined on field elements; defined are {', '.join(_UFUNCS)} and np.sum. "
                "For words call .canonical(), for Python integers .ints()"
            )
        return function(
            *(each if isinstance(each, FieldArray) else self._like(each, "x") for each in inputs[:1]), *inputs[1:]
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Refused: whether words or integers are meant must be said."""
        raise UnsupportedDtype(
            "NumPy cannot know what is meant: call .canonical() for words, .ints() for Python integers"
        )

    # --- parts ---------------------------------------------------------------------------------------------------

    def _of(self, words: Any) -> FieldArray:
        return FieldArray(self.field, self.place, words, home=self.home)

    def _like(self, other: Any, name: str) -> FieldArray:
        """An operand as an array of this field at this place."""
        if isinstance(other, FieldArray) and other.field is not self.field:
            raise ConfigError(f"{self.field.name} and {other.field.name} are different fields")
        made = self.field.array(other)
        if made.place != self.place:
            if isinstance(other, FieldArray) or made.place is not HOST:
                raise ShapeError(f"x and y must be on one device, got {self.device} and {made.device}")
            made = made.moved(self.place)
        return made

    def _together(self, x: Any, y: Any) -> tuple[Any, Any]:
        """Words of one shape."""
        first, second = self._like(x, "x"), self._like(y, "y")
        try:
            shape = np.broadcast_shapes(first.shape, second.shape)
        except ValueError:
            raise ShapeError(f"x and y must have shapes that broadcast, got {first.shape} and {second.shape}") from None
        full = (*shape, *host.tail_of(self.field.parameters))
        a, b = (
            each.words if each.shape == shape else self.place.broadcast(each.words, full) for each in (first, second)
        )
        return a, b

    def _binary(self, op: str, x: Any, y: Any) -> FieldArray:
        a, b = self._together(x, y)
        return self._of(launch.binary(self.place, self.field.parameters, op, a, b, "montgomery"))

    def _unary(self, op: str) -> FieldArray:
        return self._of(launch.unary(self.place, self.field.parameters, op, self.words, "montgomery"))


def exponent_of(exponent: object) -> int:
    """A Python integer.

    Raises:
        UnsupportedDtype: something else.
    """
    if isinstance(exponent, (int, np.integer)) and not isinstance(exponent, bool):
        return int(exponent)
    raise UnsupportedDtype(f"the exponent must be one Python integer for all elements, got {type(exponent).__name__}")


_UFUNCS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "power": operator.pow,
    "negative": operator.neg,
    "positive": operator.pos,
    "square": FieldArray.square,
    "reciprocal": FieldArray.inv,
    "equal": operator.eq,
    "not_equal": operator.ne,
}
"""NumPy's function -> what it means here. np.true_divide is np.divide."""
