"""The models that SGLang serves on a machine without CUDA: `launch.py` names this package in SGLANG_EXTERNAL_MODEL_PACKAGE.

SGLang then imports these instead of all its 200 models, and looks among the others only for an architecture that is not here.
"""
