"""The choice between compiled kernels and plain PyTorch, and the compilation of kernels."""

from accumext.backends._build import load_arguments as load_arguments
from accumext.backends._libraries import backend as backend
from accumext.backends._libraries import backend_reason as backend_reason
