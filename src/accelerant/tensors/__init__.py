"""Torch tensors on OpenCL and WebGPU devices: a tensor subclass, and a table of aten operations on five kernels."""

from accelerant.tensors.device import TensorDevice, tensor_device
from accelerant.tensors.tensor import DeviceTensor, to

__all__ = ["DeviceTensor", "TensorDevice", "tensor_device", "to"]
