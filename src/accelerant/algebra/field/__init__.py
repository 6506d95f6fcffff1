"""Prime fields, element by element; `accelerant.zk.field` is the function for users."""

from typing import TYPE_CHECKING

from accelerant._renamed import renamed_names
from accelerant.algebra.field.program import field_add_source

__all__ = ["field_add_source"]

if not TYPE_CHECKING:  # a type checker reports the names that are not there
    __getattr__ = renamed_names(
        __name__,
        {
            "FieldArray": "accelerant.zk.FieldArray", "PrimeField": "accelerant.zk.PrimeField",
            "prime_field": "accelerant.zk.field", "register_field": "accelerant.zk.register_field",
        },
    )  # fmt: skip
