"""Number-theoretic transforms over the prime fields."""

from accelerant.algebra.ntt.launch import LOG_MOST, transform
from accelerant.algebra.ntt.plan import ORDERS

__all__ = ["LOG_MOST", "ORDERS", "transform"]
