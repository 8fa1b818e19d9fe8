"""Tensors and numbers as arguments: what they must be, where they lie, which memory they share, and
the names of torch that are not public."""
