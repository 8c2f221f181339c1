"""Products of few tokens with int8 and int4 weights on a CPU, in C.

``build`` compiles ``lowbit.c`` with the system's compiler, ``library`` checks tensors and calls it, ``choice`` times it
against ATen's kernels for a shape. Without a compiler, or with PODA_KERNELS=off, layers run as they do without it.
"""
