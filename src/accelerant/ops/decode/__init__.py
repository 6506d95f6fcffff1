"""Attention of new queries to a cache of keys and values, in one piece or in blocks."""

from accelerant.ops.decode.op import attention_decode
from accelerant.ops.decode.paged import attention_paged

__all__ = ["attention_decode", "attention_paged"]
