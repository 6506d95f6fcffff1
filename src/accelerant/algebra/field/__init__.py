"""Prime fields, element by element.

parameters.py   the fields, one table; every constant derived
reference.py    the same arithmetic on Python integers
field.py        PrimeField: functions of arrays of canonical words
array.py        FieldArray: elements that stay on their device, with operators
words.py        words of Python integers and back, on the host
memory_space.py      memory of the host, of torch's devices, of backends without tensors
launch.py       the kernels' launches and their count in the ledger
"""

from accelerant.algebra.field.array import FieldArray
from accelerant.algebra.field.field import PrimeField, prime_field, register_field
from accelerant.algebra.field.op import add, add_on

__all__ = ["FieldArray", "PrimeField", "add", "add_on", "prime_field", "register_field"]
