"""Lets torchvision and torchaudio be imported beside a CPU build of torch, if they are for CUDA.

Their libraries do not load there. The trainers call none of their operators.
"""

import importlib.util
import sys
import types

import torch

if not torch.cuda.is_available():
    extension = types.ModuleType("torchaudio._extension")  # which would load its library
    extension.__dict__["fail_if_no_align"] = lambda function: function
    extension.__dict__["_IS_TORCHAUDIO_EXT_AVAILABLE"] = False
    sys.modules[extension.__name__] = extension
    if importlib.util.find_spec("torchvision"):
        LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):  # which the import of torchvision asks for
            LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
