"""The doors: the only code that knows Ray, Megatron-core and SGLang from inside."""
