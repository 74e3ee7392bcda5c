"""A kernel for processes that tests start; this module imports little, so that they start fast."""

from keytail.kernels.jit import kernel


@kernel
def add(a):
    total = 0
    for x in a:
        total += x
    return total
