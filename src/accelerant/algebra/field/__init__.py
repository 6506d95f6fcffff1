"""Prime fields, element by element; `accelerant.zk.field` is the function for users.

parameters.py     the fields and every constant derived from them
field.py          PrimeField, functions of arrays of canonical words; FieldArray, elements that stay on their device
words.py          words of Python integers and back, on the host
memory_space.py   memory of the host, of torch devices, of backends without tensors
launch.py         kernel launches, recorded in the ledger
program.py        programs in C, CUDA (ptx.py: carry chains) and WGSL
llvm_kernels.py   programs of the CPU, over packs of elements (llvm_packed.py)
"""

from typing import TYPE_CHECKING

from accelerant._renamed import renamed_names
from accelerant.algebra.field.program import field_add_source

__all__ = ["field_add_source"]

if not TYPE_CHECKING:  # a type checker reports the names that are not there
    __getattr__ = renamed_names(
        __name__,
        {
            "FieldArray": "accelerant.zk.FieldArray",
            "PrimeField": "accelerant.zk.PrimeField",
            "prime_field": "accelerant.zk.field",
            "register_field": "accelerant.zk.register_field",
        },
    )
