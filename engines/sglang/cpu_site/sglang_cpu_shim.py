"""Declare operators of torchvision and sgl_kernel, so that `import sglang` works on a machine without CUDA.

SGLang imports torchvision, whose Python code registers shape functions for two operators. The operators themselves
cannot be loaded here, because torchvision's wheels are CUDA builds. Models that the image processor of Qwen-VL imports
read operators of sgl_kernel when they are imported. All are declared without implementations, because the models that
Penstock supports do not call them.
"""

import torch

if torch.cuda.is_available():
    raise ImportError("SGLang's CPU shim was imported on a machine with CUDA: remove cpu_site from PYTHONPATH")

torch.cuda.synchronize = lambda device=None: None  # SGLang's weight checksums call it on every device

_library = torch.library.Library("torchvision", "DEF")  # the declarations exist as long as this object
_kernels = torch.library.Library("sgl_kernel", "FRAGMENT")
for _name in (
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_qkvzba_split_reshape_cat_cpu",
    "fused_sigmoid_mul_cpu",
):
    _kernels.define(f"{_name}() -> ()")
_library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
