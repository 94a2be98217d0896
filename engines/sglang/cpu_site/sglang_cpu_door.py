"""The CPU door of SGLang: what must stand before `import sglang` on a machine without CUDA.

torchvision's wheels are CUDA builds, whose operators cannot load here, but its Python side insists on registering shapes for two
of them and SGLang insists on importing it. So the two are declared without bodies: no text model ever calls them.
"""

import torch

if torch.cuda.is_available():
    raise ImportError("the CPU door of SGLang was opened on a machine with CUDA: use torchvision as it is installed")

_library = torch.library.Library("torchvision", "DEF")  # dies with its last reference
_library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
