"""The model classes that SGLang imports on a machine without CUDA; `launch.py` sets SGLANG_EXTERNAL_MODEL_PACKAGE to
this package.

SGLang then imports only these classes at the start instead of all its 200 model files, which it still imports for an
architecture that this package does not define.
"""
