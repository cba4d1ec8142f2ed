"""The engine: runs a proven program on real stages, and keeps the layout out of the numbers."""
