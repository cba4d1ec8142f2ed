"""What every kernel computes, in torch: for other dtypes and devices, machines without a compiler, and tests."""
