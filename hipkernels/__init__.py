"""Fused kernels from one source for AMD GPUs, NVIDIA GPUs and CPUs."""
