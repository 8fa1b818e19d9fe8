"""`generate`: tokens of a decoder, greedily, by sampling or by beam search."""

from accumext.generation._generate import GenerateOutput as GenerateOutput
from accumext.generation._generate import generate as generate
from accumext.generation._token_filters import TokenFilter as TokenFilter
from accumext.generation._token_filters import largest as largest
