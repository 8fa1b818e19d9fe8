"""fp32 masters of half-precision parameters, which any optimizer can step on."""

from accumext.master_weights._masters import Rounding as Rounding
from accumext.master_weights._masters import SteppedTensors as SteppedTensors
from accumext.master_weights._masters import masters as masters
from accumext.master_weights._masters import params_of as params_of
