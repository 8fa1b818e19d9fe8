"""`decode_loss`: the loss of an autoregressive decoder with exact gradients in flat memory."""

from accumext.decoder._decode_loss import DecodeOutput as DecodeOutput
from accumext.decoder._decode_loss import decode_loss as decode_loss
from accumext.decoder._decode_loss import decode_memory as decode_memory
from accumext.decoder._generate import GenerateOutput as GenerateOutput
from accumext.decoder._generate import generate as generate
