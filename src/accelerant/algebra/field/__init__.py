"""Prime fields, element by element.

parameters.py     the fields and every constant derived from them field.py          PrimeField, functions of arrays of
canonical words; FieldArray, elements that stay on their device words.py          words of Python integers and back, on
the host memory_space.py   memory of the host, of torch devices, of backends without tensors launch.py         kernel
launches, recorded in the ledger program.py        programs in C, CUDA (ptx.py: carry chains) and WGSL llvm_kernels.py
programs of the CPU, over packs of elements (llvm_packed.py)
"""

from accelerant.algebra.field.field import FieldArray, PrimeField, prime_field, register_field
from accelerant.algebra.field.program import field_add_source

__all__ = ["FieldArray", "PrimeField", "field_add_source", "prime_field", "register_field"]
