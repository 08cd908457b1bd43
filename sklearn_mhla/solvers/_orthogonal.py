"""Orthogonal factorisations, for features so ill-conditioned that their squares hide directions.

The eigenvalues of a Gram matrix or kernel are known to ``eps`` times the largest, so directions
whose singular values are below ``sqrt(eps)`` times the largest look like zeros. A triangular factor
of the features themselves, computed block by block, tells them from zeros down to ``eps``, at
several times the cost of the Gram matrix. Data whose features are exactly dependent are the
common case and lose nothing without it, so one random vector of the supposed null space is
multiplied with the features first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from sklearn_mhla._backend import Array, Backend
from sklearn_mhla._features import cubic_features
from sklearn_mhla.solvers._base import LeastSquaresProblem, Solution
from sklearn_mhla.solvers._factor import Factor, RangeFactor

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


def hides_directions(
    factor: Factor,
    alpha: float,
    tolerance: float,
    offset: float,
    square: Callable[[Array], Array],
    order: int,
    backend: Backend,
) -> bool:
    """Whether the factor of a squared matrix left out directions that are in the data.

    Parameters
    ----------
    factor : CholeskyFactor or RangeFactor
        Of ``A^T A + alpha I``.
    alpha : float
    tolerance : float
        Relative level below which a singular value of ``A`` counts as zero.
    offset : float
        As in :func:`factorize`.
    square : callable
        Maps ``v`` (n, 1) to ``A^T A v``, computed from ``A``.
    order : int
        ``n``.
    backend : Backend

    Returns
    -------
    bool
        False if ``A`` is zero, to rounding, on what was left out. If it is not but the triangular
        factor does not fit into memory, warns and returns False too.
    """
    if not isinstance(factor, RangeFactor) or factor.rank == order:
        return False
    basis, kept = factor.basis, factor.shifted[:, None] - alpha
    vector = backend.asarray(np.random.RandomState(0).standard_normal((order, 1)))
    vector = vector - basis @ (basis.mT @ vector)
    for _ in range(2):  # the basis is accurate to eps over the squared condition number only
        vector = vector - basis @ ((basis.mT @ square(vector)) / kept)
    squares = float((vector**2).sum())
    seen = float((vector * square(vector)).sum())
    largest = (float(kept.max()) if factor.rank else 0.0) + offset
    if seen <= tolerance**2 * largest * squares:
        return False
    needed = 8 * (2 * _BUFFER + 4) * order**2
    if needed > backend.available_memory():
        warnings.warn(
            "Features have directions with singular values of the order of "
            f"{(seen / squares / largest) ** 0.5:.1e} times the largest, which were left out: a "
            f"factorisation that resolves them would take {needed / 1e9:.3g} GB of memory. Remove "
            "nearly dependent token coordinates or use alpha > 0.",
            ConvergenceWarning,
            stacklevel=6,
        )
        return False
    return True


@dataclass(frozen=True)
class PseudoInverse:
    """``A = U diag(s) V^T D^-1``, with small singular values left out.

    Attributes
    ----------
    left : array of shape (k, r)
        ``U``.
    singular : array of shape (r,)
    right : array of shape (n, r)
        ``D V``. ``D`` is the identity unless ``A`` has full column rank; then it makes columns
        of about unit norm, which changes nothing but the rounding.
    alpha : float
    """

    left: Array
    singular: Array
    right: Array
    alpha: float

    @property
    def rank(self) -> int:
        """Number of singular values."""
        return len(self.singular)

    @property
    def condition(self) -> float:
        """Largest over smallest singular value."""
        return float(self.singular[0] / self.singular[-1]) if self.rank else 1.0

    def solve(self, rhs: Array) -> Array:
        """``(A^T A + alpha I)^-1 A^T rhs`` on the range, for ``rhs`` (k, j)."""
        filtered = self.singular / (self.singular**2 + self.alpha)
        return self.right @ (filtered[:, None] * (self.left.mT @ rhs))

    def solve_square(self, rhs: Array) -> Array:
        """``(A^T A + alpha I)^-1 rhs`` on the range, for ``rhs`` (n, j)."""
        return self.right @ ((self.right.mT @ rhs) / (self.singular**2 + self.alpha)[:, None])


def pseudo_inverse(
    matrix: Array,
    alpha: float,
    tolerance: float,
    offset: float,
    backend: Backend,
    bounds: Array | None = None,
) -> PseudoInverse:
    """Singular value decomposition of what is not rounding.

    Parameters
    ----------
    matrix : array of shape (k, n)
    alpha : float
    tolerance : float
        Relative level below which a singular value counts as zero.
    offset : float
        Squared norm of what centring subtracted; rounding is relative to it too.
    backend : Backend
    bounds : array of shape (n,), optional
        What the rounding of the squared norms of columns is relative to. If it is known, columns
        above it count whatever their size.
    """
    squares = (matrix**2).sum(0)
    distinct = bounds is not None and bool((squares > tolerance**2 * bounds).all())
    if alpha == 0.0 and offset == 0.0 and len(matrix) >= matrix.shape[1] and distinct:
        scaling = backend.inverse_root_power_of_two(squares)
        left, singular, right = backend.svd(matrix * scaling)
        if singular[-1] > tolerance * singular[0]:
            return PseudoInverse(left, singular, scaling[:, None] * right.mT, alpha)
    left, singular, right = backend.svd(matrix)
    largest = (float(singular[0]) ** 2 + offset) ** 0.5
    kept = int((singular > tolerance * largest).sum())
    return PseudoInverse(left[:, :kept], singular[:kept], right[:kept].mT, alpha)


def solve_by_rows(
    problem: LeastSquaresProblem,
    alpha: float,
    mean: Array | None,
    tolerance: float,
    offset: float,
    bounds: Array | None,
) -> Solution:
    """Least squares by a triangular factor of features and targets side by side.

    With ``[Phi_c, y_c] = Q [R, c]`` the coefficients are ``R^+ c``; no matrix is squared. Takes
    ``2 rows p^2`` multiply-adds and a buffer of ``4 p^2`` numbers.
    """
    p, backend = problem.size.n_features, problem.backend
    triangle = triangle_of_rows(_centred_rows(problem, mean), p + problem.size.n_outputs, backend)
    inverse = pseudo_inverse(triangle[:, :p], alpha, tolerance, offset, backend, bounds)
    coef = inverse.solve(triangle[:, p:]).mT
    return Solution(coef, problem.intercept(coef, mean), inverse.rank, inverse.condition, 0)


def _centred_rows(problem: LeastSquaresProblem, mean: Array | None) -> Iterator[Array]:
    """``W^(1/2) [Phi_c, y_c]``, about ``p`` rows at a time."""
    p = problem.size.n_features
    for block in problem.design.blocks("orthogonal factorisation"):
        step = max(1, p // block.query.shape[1])
        targets = block.gather(problem.targets)
        weights = None if problem.weights is None else block.gather(problem.weights)
        for start in range(0, len(block.state), step):
            part = slice(start, start + step)
            features = cubic_features(block.state[part], block.query[part])
            rows = problem.backend.empty((len(features), p + targets.shape[2]))
            rows[:, :p] = features if mean is None else features - mean
            rows[:, p:] = targets[part].reshape(len(rows), -1)
            if weights is not None:
                rows *= weights[part].reshape(-1, 1) ** 0.5
            if block.present is not None:
                kept = block.present.reshape(len(block.state), -1)[part].reshape(-1)
                rows = rows[np.flatnonzero(kept)]
            yield rows
