"""Shared parts of the CUDA C++ kernels for Hopper (sm_90a): program text, tensor maps, prepared launches, tiles."""
