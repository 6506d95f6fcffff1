"""Attention: dense sequences, and packed ones of several lengths."""

from accelerant.ops.attention.op import attention
from accelerant.ops.attention.varlen import attention_varlen

__all__ = ["attention", "attention_varlen"]
