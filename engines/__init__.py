"""Engines for training (Megatron-core) and generation (SGLang), and their placement with Ray.

Only this package uses the internals of Ray, Megatron-core and SGLang.
"""
