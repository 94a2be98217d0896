"""Declare two operators of torchvision, so that `import sglang` works on a machine without CUDA.

SGLang imports torchvision, whose Python code registers shape functions for these operators. The operators themselves
cannot be loaded here, because torchvision's wheels are CUDA builds. They are declared without implementations, because
text models do not call them.
"""

import torch

if torch.cuda.is_available():
    raise ImportError("SGLang's CPU shim was imported on a machine with CUDA: remove cpu_site from PYTHONPATH")

torch.cuda.synchronize = lambda device=None: None  # SGLang's weight checksums call it on every device

_library = torch.library.Library("torchvision", "DEF")  # the declarations exist as long as this object
_library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
