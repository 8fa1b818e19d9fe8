"""A fixture of several files here."""

from your_loops import forget_accelerate as forget_accelerate
