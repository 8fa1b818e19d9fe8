"""fp32 masters of half-precision parameters, which any optimizer can step on."""

from accumext.masters._masters import Rounding as Rounding
from accumext.masters._masters import Target as Target
from accumext.masters._masters import masters as masters
from accumext.masters._masters import params_of as params_of
