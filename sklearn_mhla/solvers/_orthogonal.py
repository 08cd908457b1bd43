"""Triangular factors of tall matrices whose rows arrive in blocks."""

from __future__ import annotations

from collections.abc import Iterable

from sklearn_mhla._backend import Array, Backend

# Rows that are reduced at once, in units of the width. The triangle so far is factored anew with
# them, so a buffer of 4 wastes a quarter of the operations.
_BUFFER = 4


def triangle_of_rows(parts: Iterable[Array], width: int, backend: Backend) -> Array:
    """``R`` of the QR factorisation of stacked rows, which are never held together.

    The rows so far are replaced by their triangle, to which the next are appended (sequential
    TSQR; Demmel, Grigori, Hoemmen and Langou, "Communication-optimal parallel and sequential QR
    and LU factorizations", SIAM J. Sci. Comput. 34, 2012). ``R^T R`` is the Gram matrix of the
    rows, but singular values of ``R`` are accurate to ``eps`` times the largest, not ``sqrt(eps)``.

    Parameters
    ----------
    parts : iterable of arrays (rows_i, width)
    width : int
    backend : Backend

    Returns
    -------
    array of shape (min(rows, width), width)
    """
    buffer = backend.empty((_BUFFER * width, width))
    filled = 0
    for part in parts:
        start = 0
        while start < len(part):
            if filled == len(buffer):
                buffer[:width] = backend.triangle(buffer)
                filled = width
            taken = part[start : start + len(buffer) - filled]
            buffer[filled : filled + len(taken)] = taken
            filled += len(taken)
            start += len(taken)
    return backend.triangle(buffer[:filled])
