"""Generators: pure functions from ranks, micro-batches and chunks to a `Schedule`."""
