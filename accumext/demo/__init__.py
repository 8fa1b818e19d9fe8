"""`python -m accumext demo`: a decoder learns docstrings by heart, beside plain PyTorch."""

from accumext.demo.cli import add_arguments as add_arguments
from accumext.demo.cli import main as main
