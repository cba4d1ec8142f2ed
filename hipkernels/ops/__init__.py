"""The operations: one module each, with kernel calls, fake kernels and autograd."""
