"""Solve with a symmetric positive semidefinite matrix plus ``alpha`` times the identity.

Cholesky where the matrix is safely positive definite. Otherwise a rank-revealing factorisation
``A = Q C C^T Q^T`` with orthonormal ``Q`` and small triangular ``C``, whose inverse on the range
of ``A`` is what gives the solution of minimum norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sklearn_mhla._backend import Array, Backend, NotPositiveDefiniteError

EPS = float(np.finfo(np.float64).eps)


def rank_tolerance(size: int) -> float:
    """Relative level below which a direction counts as absent from the data.

    Rounding leaves a few ``eps`` times the largest eigenvalue where exact arithmetic has
    zeros; factorisations of a matrix of order ``n`` add errors that grow like ``sqrt(n)``. The
    tolerance depends on the smaller side of the design and so does not grow with the number of
    rows beyond ``p``: more rows carry more information, not more noise.
    """
    return EPS * max(64.0, 4.0 * math.sqrt(size))


@dataclass(frozen=True)
class CholeskyFactor:
    """``A + alpha I = L L^T``.

    Attributes
    ----------
    condition : float
        Estimated condition number, including what was lost when ``A`` was centred.
    rank : int
        Number of directions that the data determine: all.
    """

    factor: Array
    condition: float
    rank: int
    backend: Backend

    def solve(self, rhs: Array) -> Array:
        """``(A + alpha I)^-1 rhs`` for ``rhs`` of shape (n, k)."""
        return self.backend.cholesky_solve(self.factor, rhs)


@dataclass(frozen=True)
class RangeFactor:
    """``A = Q C C^T Q^T``, and ``(C C^T + alpha I)^-1`` on the range of ``A``.

    The right-hand sides of least squares lie in the range of ``A``; their components outside it
    are rounding errors, and leaving them out makes the solution that of minimum norm for every
    ``alpha``.

    Attributes
    ----------
    basis : array of shape (n, rank)
        ``Q``.
    root : array of shape (rank, rank)
        Lower triangular with ``root root^T = C C^T + alpha I``.
    condition : float
    rank : int
    """

    basis: Array
    root: Array
    condition: float
    rank: int
    backend: Backend

    def solve(self, rhs: Array) -> Array:
        """Minimum-norm solution for ``rhs`` of shape (n, k)."""
        inner = self.backend.cholesky_solve(self.root, self.basis.mT @ rhs)
        return self.basis @ inner


Factor = CholeskyFactor | RangeFactor


def factorize(
    build: Callable[[], Array],
    alpha: float,
    size: int,
    offset: float,
    backend: Backend,
    diagonal: float | None = None,
) -> Factor:
    """Factor ``A + alpha I``.

    Parameters
    ----------
    build : callable
        Returns ``A`` (lower triangle, C-contiguous); called again if Cholesky, which works in
        place, does not succeed.
    alpha : float
        Not negative.
    size : int
        Smaller side of the design, for :func:`rank_tolerance`.
    offset : float
        Norm of what was subtracted from ``A`` by centring; rounding errors of the whole are
        relative to ``||A|| + offset``.
    backend : Backend
    diagonal : float, optional
        Largest diagonal entry before centring, to which rounding errors of one entry are
        relative. None: that of ``A`` plus ``offset``.

    Returns
    -------
    CholeskyFactor or RangeFactor
    """
    matrix = build()
    order = matrix.shape[0]
    scale = symmetric_one_norm(matrix, backend) + offset
    floor = rank_tolerance(size) * scale
    if diagonal is None:
        diagonal = float(matrix.diagonal().max()) + offset
    if size >= order or alpha > 0.0:  # otherwise singular by its dimensions
        factor = _safe_cholesky(matrix, alpha, floor, scale, backend)
        if factor is not None:
            return factor
        del matrix  # overwritten; let go of it before it is built again
        matrix = build()
    basis, root = backend.range_factor(matrix, rank_tolerance(size) * diagonal)
    rank = basis.shape[1]
    if rank == 0:
        return RangeFactor(basis, root, 1.0, 0, backend)
    if alpha > 0.0:
        # [C, sqrt(alpha) I] has the Gram matrix C C^T + alpha I; its QR squares nothing.
        root = backend.append_identity(root, alpha**0.5)
    pivots = abs(root.diagonal())
    condition = (scale + alpha) / float(pivots.min()) ** 2
    return RangeFactor(basis, root, condition, rank, backend)


def _safe_cholesky(
    matrix: Array, alpha: float, floor: float, scale: float, backend: Backend
) -> CholeskyFactor | None:
    """Factor ``A + alpha I`` in place; None where its smallest eigenvalue is in doubt."""
    order = matrix.shape[0]
    matrix.reshape(-1)[:: order + 1] += alpha
    try:
        factor = backend.cholesky(matrix)
    except NotPositiveDefiniteError:
        return None
    smallest = 1.0 / backend.inverse_one_norm(factor)
    if smallest <= max(floor, EPS * (scale + alpha)):
        return None
    return CholeskyFactor(factor, (scale + alpha) / smallest, order, backend)


def symmetric_one_norm(lower: Array, backend: Backend) -> float:
    """1-norm of a symmetric matrix of which only the lower triangle is stored."""
    order = lower.shape[0]
    columns = backend.zeros((order,))
    step = max(1, 2**20 // order)
    for start in range(0, order, step):
        stop = min(start + step, order)
        left, corner = abs(lower[start:stop, :start]), abs(lower[start:stop, start:stop])
        corner = backend.tril(corner)
        columns[:start] += left.sum(0)
        columns[start:stop] += left.sum(1) + corner.sum(0) + corner.sum(1) - corner.diagonal()
    return float(columns.max())
