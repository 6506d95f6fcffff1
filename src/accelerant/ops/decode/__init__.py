"""Attention of new queries to a cache of keys and values."""

from accelerant.ops.decode.op import attention_decode

__all__ = ["attention_decode"]
