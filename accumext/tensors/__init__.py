"""Tensors and numbers as arguments: checks, error messages, devices and shared memory; and the
private names of torch."""
