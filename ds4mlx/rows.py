"""Rows never see their neighbours: a block of a few rows is evaluated one row at a time.

MLX's kernels choose another order of summation for another number of rows. An op that sums
goes through `each_row`, so that a row in a block is, bit for bit, that row alone.
"""

from collections.abc import Callable

import mlx.core as mx

FEW = 8  # decode, and verify with up to 7 drafts, are blocks of at most this many rows


def each_row(op: Callable, *arrays: mx.array):
    """`op(*arrays)` where every array and result has the rows as its first axis.

    Blocks of 2 to FEW rows are split; one row, and the large blocks of prefill, go through
    whole. `op` returns an array or a tuple of arrays.
    """
    N = arrays[0].shape[0]
    if N == 1 or N > FEW:
        return op(*arrays)
    results = [op(*(a[i : i + 1] for a in arrays)) for i in range(N)]
    if isinstance(results[0], tuple):
        return tuple(mx.concatenate(parts) for parts in zip(*results, strict=True))
    return mx.concatenate(results)
