"""Solve with a symmetric positive semidefinite matrix plus ``alpha`` times the identity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sklearn_mhla._backend import Array, Backend, NotPositiveDefiniteError

EPS = float(np.finfo(np.float64).eps)


def rank_tolerance(size: int) -> float:
    """Relative eigenvalue below which a direction counts as absent from the data.

    Rounding leaves eigenvalues of about ``eps`` times the largest where exact arithmetic has
    zeros. The tolerance depends on the smaller side of the design, never on the number of rows
    beyond ``p``: more rows carry more information, not more noise.
    """
    return EPS * max(size, 64)


@dataclass(frozen=True)
class CholeskyFactor:
    """``A + alpha I = L L^T``.

    Attributes
    ----------
    condition : float
        Estimated condition number, including what was lost when ``A`` was centred.
    rank : int
        Number of directions that the data determine.
    """

    factor: Array
    condition: float
    rank: int
    backend: Backend

    def solve(self, rhs: Array) -> Array:
        """``(A + alpha I)^-1 rhs`` for ``rhs`` of shape (size, k)."""
        return self.backend.cholesky_solve(self.factor, rhs)


@dataclass(frozen=True)
class EigenFactor:
    """``A = V diag(lambda) V^T`` with the directions below the tolerance left out.

    The right-hand sides of least squares lie in the range of ``A``; their components along the
    left-out directions are rounding errors, so leaving them out is what makes the solution of
    minimum norm, with any ``alpha``.
    """

    eigenvectors: Array
    shifted: Array
    condition: float
    rank: int

    def solve(self, rhs: Array) -> Array:
        """Minimum-norm solution for ``rhs`` of shape (size, k)."""
        return self.eigenvectors @ ((self.eigenvectors.mT @ rhs) / self.shifted[:, None])


Factor = CholeskyFactor | EigenFactor


def factorize(
    build: Callable[[], Array], alpha: float, size: int, offset: float, backend: Backend
) -> Factor:
    """Factor ``A + alpha I``: Cholesky, or a truncated eigendecomposition when singular.

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
        Norm of what was subtracted from ``A`` by centring; rounding errors are relative to
        ``||A|| + offset``.
    backend : Backend

    Returns
    -------
    CholeskyFactor or EigenFactor
    """
    tolerance = rank_tolerance(size)
    matrix = build()
    order = matrix.shape[0]
    norm = symmetric_one_norm(matrix, backend) + alpha
    matrix.reshape(-1)[:: order + 1] += alpha
    try:
        factor = backend.cholesky(matrix)
        smallest = backend.reciprocal_condition(factor, norm) * norm
    except NotPositiveDefiniteError:
        smallest = 0.0
    if smallest > tolerance * (norm + offset):
        return CholeskyFactor(factor, (norm + offset) / smallest, order, backend)
    del matrix
    eigenvalues, eigenvectors = backend.eigh(build())
    largest = float(eigenvalues[-1])
    kept = eigenvalues > max(tolerance * (max(largest, 0.0) + offset), 0.0)
    rank = int(kept.sum())
    shifted = eigenvalues[order - rank :] + alpha
    condition = (float(shifted[-1]) + offset) / float(shifted[0]) if rank else 1.0
    return EigenFactor(eigenvectors[:, order - rank :], shifted, condition, rank)


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
