"""Which kernels answer, and how they come to be compiled."""

from accumext.backend._build import load_arguments as load_arguments
from accumext.backend._libraries import backend as backend
from accumext.backend._libraries import backend_reason as backend_reason
