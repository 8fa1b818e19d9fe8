"""Compiled libraries: which answer, how they are built, cached and diagnosed."""
