"""`decode_loss`: the loss of an autoregressive decoder with exact gradients in flat memory."""

from accumext.decoder._arguments import batch_size as batch_size
from accumext.decoder._arguments import context_of as context_of
from accumext.decoder._decode_loss import DecodeOutput as DecodeOutput
from accumext.decoder._decode_loss import decode_loss as decode_loss
from accumext.decoder._decode_loss import decode_memory as decode_memory
from accumext.decoder._fused_cross_entropy import rounded_head as rounded_head
from accumext.decoder._modules import DecoderModules as DecoderModules
from accumext.decoder._modules import check_vector as check_vector
from accumext.decoder._modules import modules_of as modules_of
from accumext.decoder._modules import same_device as same_device
from accumext.decoder._operators import decode_steps as decode_steps
from accumext.decoder._operators import define_operator as define_operator
from accumext.decoder._operators import head_forward as head_forward
from accumext.decoder._operators import logits_of as logits_of
from accumext.decoder._operators import softmax_stats as softmax_stats
