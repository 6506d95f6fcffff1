"""Torch tensors on OpenCL and WebGPU devices: a tensor subclass, and a table of aten operations on five kernels."""

from accelerant.tensors.tensor import DeviceTensor, TensorDevice, tensor_device, to

__all__ = ["DeviceTensor", "TensorDevice", "tensor_device", "to"]
