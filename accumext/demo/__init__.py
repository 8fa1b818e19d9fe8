"""`python -m accumext demo`: a word-level decoder trained on real text, beside plain PyTorch."""

from accumext.demo.cli import add_arguments as add_arguments
from accumext.demo.cli import main as main
