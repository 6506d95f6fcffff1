"""Torch tensors on OpenCL and WebGPU devices: a tensor subclass, and a table of aten operations on five kernels."""

from accelerant.ops.aten.device import TensorDevice, tensor_device
from accelerant.ops.aten.tensor import DeviceTensor, to

__all__ = ["DeviceTensor", "TensorDevice", "tensor_device", "to"]
