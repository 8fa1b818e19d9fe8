"""`decode_loss`: the loss of an autoregressive decoder with exact gradients in flat memory."""

from accumext.decoder._callable_heads import called_logits as called_logits
from accumext.decoder._decode_loss import DecodeOutput as DecodeOutput
from accumext.decoder._decode_loss import decode_loss as decode_loss
from accumext.decoder._fused_cross_entropy import rounded_head as rounded_head
from accumext.decoder._memory import decode_memory as decode_memory
from accumext.decoder._model import Model as Model
from accumext.decoder._model import model_from as model_from
from accumext.decoder._operators import define_cuda_operator as define_cuda_operator
from accumext.decoder._operators import define_operator as define_operator
from accumext.decoder._operators import head_forward as head_forward
from accumext.decoder._operators import head_forward_reference as head_forward_reference
from accumext.decoder._operators import logits_of as logits_of
from accumext.decoder._operators import of_chosen_rows as of_chosen_rows
from accumext.decoder._operators import softmax_stats as softmax_stats
from accumext.decoder._precision import no_autocast as no_autocast
from accumext.decoder._rnn_forward import StepsCall as StepsCall
from accumext.decoder._rnn_weights import RnnWeights as RnnWeights
from accumext.decoder._rnn_weights import dense_rows as dense_rows
from accumext.decoder._rnn_weights import module_state as module_state
from accumext.decoder._rnn_weights import operands as operands
from accumext.decoder._rnn_weights import states_from as states_from
from accumext.decoder._tokens import batch_size as batch_size
