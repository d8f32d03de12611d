"""Adapt DeepSpeed ZeRO-3 to interleaved offloading: the only package that depends on its internals."""
