"""Solve with a symmetric positive semidefinite matrix plus ``alpha`` times the identity.

Cholesky where the matrix is safely positive definite after its rows and columns have been divided
by powers of two that bring the diagonal to about one: the solution is unique then, so the scaling
changes nothing but the rounding. Otherwise the eigenvectors of the range, whose inverse is what
gives the solution of minimum norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sklearn_mhla._backend import Array, Backend, NotPositiveDefiniteError
from sklearn_mhla._rounding import rank_tolerance


@dataclass(frozen=True)
class CholeskyFactor:
    """``D (A + alpha I) D = L L^T`` with a diagonal ``D`` of powers of two.

    Attributes
    ----------
    factor : array of shape (n, n)
    scaling : array of shape (n, 1)
        ``D``.
    condition : float
        Estimated condition number of the scaled matrix, including what was lost when ``A`` was
        centred.
    rank : int
        Number of directions that the data determine: all.
    """

    factor: Array
    scaling: Array
    condition: float
    rank: int
    backend: Backend

    def solve(self, rhs: Array) -> Array:
        """``(A + alpha I)^-1 rhs`` for ``rhs`` of shape (n, k)."""
        return self.scaling * self.backend.cholesky_solve(self.factor, self.scaling * rhs)


@dataclass(frozen=True)
class RangeFactor:
    """``A = Q diag(lambda) Q^T`` on its range, and ``(A + alpha I)^-1`` there.

    The right-hand sides of least squares lie in the range of ``A``; their components outside it
    are rounding errors, and leaving them out makes the solution that of minimum norm for every
    ``alpha``.

    Attributes
    ----------
    basis : array of shape (n, rank)
        ``Q``.
    shifted : array of shape (rank,)
        ``lambda + alpha``.
    condition : float
    rank : int
    """

    basis: Array
    shifted: Array
    condition: float
    rank: int

    def solve(self, rhs: Array) -> Array:
        """Minimum-norm solution for ``rhs`` of shape (n, k)."""
        return self.basis @ ((self.basis.mT @ rhs) / self.shifted[:, None])


Factor = CholeskyFactor | RangeFactor


def factorize(
    build: Callable[[], Array],
    alpha: float,
    size: int,
    offset: float,
    backend: Backend,
    diagonal: Array | None = None,
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
    diagonal : array of shape (n,), optional
        What rounding errors of the entries are relative to, not below the diagonal before
        centring. None: the diagonal of ``A`` plus ``offset``.

    Returns
    -------
    CholeskyFactor or RangeFactor
    """
    matrix = build()
    if diagonal is None:
        diagonal = matrix.diagonal() + offset
    tolerance = rank_tolerance(size)
    if size >= len(matrix) or alpha > 0.0:  # otherwise singular by its dimensions
        factor = safe_cholesky(matrix, alpha, tolerance, diagonal, backend)
        if factor is not None:
            return factor
        del matrix  # overwritten; let go of it before it is built again
        matrix = build()
    needed = 4 * 8 * len(matrix) ** 2
    if needed > backend.available_memory():
        raise MemoryError(
            f"The system of order {len(matrix)} is singular, and the solution of minimum norm "
            f"would take {needed / 1e9:.3g} GB more. Use alpha > 0, which needs no more memory."
        )
    # Pivots of rounding size do no harm here: the eigenvalues decide, by the same rule in the
    # primal and in the dual form, whose matrices share them.
    floor = 0.25 * tolerance * float(diagonal.max())
    basis, eigenvalues = backend.range_eigh(matrix, floor)
    largest = float(eigenvalues.max()) if len(eigenvalues) else 0.0
    rank = int((eigenvalues > tolerance * (largest + offset)).sum())
    if rank == 0:
        return RangeFactor(basis[:, :0], eigenvalues[:0], 1.0, 0)
    shifted = eigenvalues[:rank] + alpha
    condition = (largest + offset + alpha) / float(shifted[-1])
    return RangeFactor(basis[:, :rank], shifted, condition, rank)


def safe_cholesky(
    matrix: Array, alpha: float, tolerance: float, diagonal: Array, backend: Backend
) -> CholeskyFactor | None:
    """Factor ``A + alpha I`` in place; None where its smallest eigenvalue is in doubt."""
    order = len(matrix)
    matrix.reshape(-1)[:: order + 1] += alpha
    scaling = backend.inverse_root_power_of_two(matrix.diagonal())
    matrix *= scaling[:, None]
    matrix *= scaling
    norm = symmetric_one_norm(matrix, backend)
    # What centring or sums over tokens cancelled, relative to what they left.
    lost = max(1.0, float((scaling**2 * diagonal).max()))
    try:
        factor = backend.cholesky(matrix)
    except NotPositiveDefiniteError:
        return None
    smallest = 1.0 / backend.inverse_one_norm(factor)
    if smallest <= 4.0 * tolerance * norm * lost:  # the estimate may be 3 times too large
        return None
    return CholeskyFactor(factor, scaling[:, None], norm * lost / smallest, order, backend)


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
