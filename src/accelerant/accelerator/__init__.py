"""Accelerator: one device behind one object, for arrays of any library.

>>> with Accelerator() as acc:                       # the best device there is
...     acc.field_add([1, 2, 3, 4], [5, 6, 7, 8])    # array([ 6,  8, 10, 12], dtype=uint64)
...     y = acc.gelu(x)                              # NumPy, torch, CuPy or JAX in; the same kind out
"""

from accelerant.accelerator.batch import Batch, PendingCall, devices_worth_using
from accelerant.accelerator.facade import Accelerator, AcceleratorConfig

__all__ = ["Accelerator", "AcceleratorConfig", "Batch", "PendingCall", "devices_worth_using"]
