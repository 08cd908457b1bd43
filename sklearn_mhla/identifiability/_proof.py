r"""A lower bound on the smallest eigenvalue that no rounding error can break.

The bound holds for the *exact* matrix of the given float64 tokens,

.. math:: \Lambda = \frac{1}{\sum_i w_i} \sum_i w_i H(Z_i) H(Z_i)^T,
          \qquad H[(j, k), l] = S_{jk} q_l \; (j \le k),

although it is computed from rounded moments. The derivation, step by step, is in docs/proof.md;
step numbers below refer to it. Assumed are IEEE double precision, round to nearest, and matrix
products that sum rounded or fused products of the entries in some order (no Strassen-like scheme,
no emulation in lower precision). Nothing is assumed of LAPACK and ARPACK: what they return is
verified.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import LinAlgError, cholesky, eigvalsh, solve_triangular
from scipy.sparse.linalg import LinearOperator, eigsh

from sklearn_mhla._backend import NumpyBackend
from sklearn_mhla._design import Design
from sklearn_mhla._features import pair_indices
from sklearn_mhla._gram import unpack_gram
from sklearn_mhla._sums import Sums

_UNIT = 2.0**-53  # unit roundoff u
_TINY = 2.0**-1022  # one underflow, gradual or flushed to zero, errs by less
# n roundings err by at most n u / (1 - n u). This factor covers the denominator and all other
# terms of second order as long as n < 2^38.
_SECOND_ORDER = 1.001
_MAX_ROUNDINGS = 2**38
# Bounds, per entry, all underflow in a matrix whose diagonal was scaled to one: that of scaling
# (the scale is below 2^508), of products and of squared residuals.
_SCALED_TINY = 2.0**-450
# By which fraction the shift stays below the estimate of the eigenvalue; tried in turn.
_MARGINS = (2.0**-14, 2.0**-8, 2.0**-4, 0.5, 0.9375)
# Below this order dense eigenvalues are cheaper than a Krylov space.
_DENSE_ORDER = 64
_RESIDUAL_ROWS = 512


@dataclass(frozen=True)
class LowerBound:
    """What is proved about the smallest eigenvalue.

    Attributes
    ----------
    value : float
        Never above the smallest eigenvalue, in the units of the data. Zero, which is always
        true, if nothing better could be shown, or if float64 cannot hold the bound.
    proven : bool
        Whether the eigenvalue was shown to be positive.
    """

    value: float
    proven: bool


def eigenvalue_lower_bound(design: Design, weights: np.ndarray | None = None) -> LowerBound:
    """Bound the smallest eigenvalue from below, from data.

    Parameters
    ----------
    design : Design
        With rescaled tokens (the default of :class:`Design`).
    weights : array of shape (rows,), optional
        Positive, on the design's backend.

    Returns
    -------
    LowerBound

    Raises
    ------
    ValueError
        If the tokens are not rescaled, or there are more than ``2 ** 38`` rows or tokens per
        sequence.
    """
    if np.ldexp(design.sequences.largest, -design.exponent) > 1.0:
        raise ValueError("The proof needs rescaled tokens; build the Design with rescale=True.")
    no_targets = design.backend.zeros((design.n_rows, 0))
    column = None if weights is None else weights[:, None]
    sums = Sums.from_design(design, no_targets, column)
    return sums_lower_bound(sums, int(design.sequences.lengths.max()))


def sums_lower_bound(sums: Sums, longest: int) -> LowerBound:
    """Bound the smallest eigenvalue from below, from accumulated moments.

    Costs two Cholesky factorisations, a product of factors that verifies the second (together
    ``2 p^3 / 3`` multiply-adds) and memory for two ``p x p`` matrices, three in passing.

    Parameters
    ----------
    sums : Sums
        Of any number of parts, added in any order, but not subtracted: errors of differences are
        relative to what they were taken from.
    longest : int
        Number of tokens of the longest sequence.

    Returns
    -------
    LowerBound

    Raises
    ------
    ValueError
        If there are more than ``2 ** 38`` rows or tokens per sequence.
    """
    n_rows = sums.n_rows
    if n_rows + 2 * longest + 10 > _MAX_ROUNDINGS:
        raise ValueError(
            f"The proof covers sums of up to 2**38 terms; these moments have n_rows={n_rows} and "
            f"longest={longest}."
        )
    backend = NumpyBackend()
    gram = unpack_gram(sums.backend.to_numpy(sums.gram), sums.token_dim, backend)
    diagonal = gram.diagonal().copy()
    if not diagonal.min() > 0.0:
        return LowerBound(0.0, False)
    total_weight = float(sums.weight + _relative(n_rows + 2, sums.weight))
    loss = _accumulation_loss(gram, sums, longest, total_weight)
    if not (loss < diagonal).all():  # nothing but rounding, or an overflow
        return LowerBound(0.0, False)
    scaling = backend.inverse_root_power_of_two(diagonal)
    gram *= scaling[:, None]
    gram *= scaling
    squares = scaling**2
    shift = _ScaledMatrix(gram, diagonal * squares, loss * squares, squares).largest_shift()
    if not shift > 0.0:
        return LowerBound(0.0, False)
    mean = np.nextafter(shift / _up(total_weight), 0.0)
    with np.errstate(over="ignore", under="ignore"):
        value = float(np.nextafter(np.ldexp(mean, 6 * sums.token_exponent), 0.0))
    return LowerBound(min(value, sys.float_info.max), True)


def _accumulation_loss(
    gram: np.ndarray, sums: Sums, longest: int, total_weight: float
) -> np.ndarray:
    """``h`` with ``computed Gram - exact Gram <= diag(h)`` as quadratic forms (steps 1 to 3).

    Entry ``S_jk`` of a state carries an error relative to ``sqrt(S_jj S_kk)``, which the
    entry ``((j, j), l), ((k, k), l)`` of the Gram matrix itself bounds in the mean; the sums
    over rows carry one relative to the diagonal.
    """
    left, right = pair_indices(sums.token_dim)
    same = np.flatnonzero(left == right)
    query = np.arange(sums.token_dim)
    rows = (same[right][:, None] * sums.token_dim + query).reshape(-1)
    columns = (same[left][:, None] * sums.token_dim + query).reshape(-1)
    of_states = _relative(2 * (longest + 1), gram[rows, columns])
    of_sums = _relative(sums.n_rows + 4, gram.diagonal())
    underflow = np.ldexp(64.0 * _TINY, max(0, -2 * sums.token_exponent))
    underflow = underflow * longest**2 * (sums.n_rows + total_weight)
    loss: np.ndarray = _SECOND_ORDER * len(gram) * (of_states + of_sums + 2.0 * underflow)
    return loss


class _ScaledMatrix:
    """``D (Gram - diag(loss) - s I) D``, of which semidefiniteness is to be verified.

    Parameters
    ----------
    lower : array of shape (p, p)
        ``D Gram D``; the lower triangle is read, the diagonal overwritten.
    diagonal, loss, squares : arrays of shape (p,)
        Diagonals of ``D Gram D``, ``D diag(loss) D`` and ``D^2``.
    """

    def __init__(
        self, lower: np.ndarray, diagonal: np.ndarray, loss: np.ndarray, squares: np.ndarray
    ) -> None:
        self.lower = lower
        self.diagonal = _down(diagonal - loss)
        self.squares = squares
        order = len(lower)
        # Set aside for the verification; generous, for a sound factorisation errs by a third.
        self.reserve = 3.0 * _relative(order + 4, float(diagonal.sum()))
        self.reserve += 3.0 * order * _SCALED_TINY

    def largest_shift(self) -> float:
        """A verified ``s`` close to the largest, zero if none is positive."""
        factor = self.cholesky(0.0)
        if factor is None:
            return 0.0
        estimate = _smallest_eigenvalue(factor, self.squares)
        for margin in _MARGINS:
            shift = (1.0 - margin) * estimate
            factor = self.cholesky(shift)
            # A NaN is not a proof: the comparison is false then (steps 4 and 5).
            if factor is not None and residual_bound(self.lower, factor) <= self.reserve:
                return shift
        return 0.0

    def cholesky(self, shift: float) -> np.ndarray | None:
        """Factor the matrix minus the reserve, which stays in ``lower``; None if not definite."""
        diagonal = _down(self.diagonal - _up(shift * self.squares))
        self.lower.reshape(-1)[:: len(self.lower) + 1] = _down(diagonal - self.reserve)
        try:
            factor: np.ndarray = cholesky(self.lower, lower=True, check_finite=False)
        except LinAlgError:
            return None
        return factor


def residual_bound(lower: np.ndarray, factor: np.ndarray) -> float:
    """Upper bound of ``||A - L L^T||_2``, rounding errors of its computation included.

    ``|fl(L L^T) - L L^T| <= gamma_p |L| |L|^T``, whose Frobenius norm is at most
    ``gamma_p ||L||_F^2`` (Higham, "Accuracy and Stability of Numerical Algorithms", section 3.5).

    Parameters
    ----------
    lower : array of shape (p, p)
        Lower triangle of ``A``.
    factor : array of shape (p, p)
        ``L``, zeros above its diagonal.
    """
    order = len(lower)
    squares = size = 0.0
    for start in range(0, order, _RESIDUAL_ROWS):
        stop = min(start + _RESIDUAL_ROWS, order)
        rows = factor[start:stop, :stop]
        residual = np.tril(lower[start:stop, :stop] - rows @ factor[:stop, :stop].T, start)
        squares += 2.0 * float((residual**2).sum())
        size += float((rows**2).sum())
    bound = _SECOND_ORDER * np.sqrt(squares) + _relative(order, size)
    return float(_SECOND_ORDER * bound + order * _SCALED_TINY)


def _smallest_eigenvalue(factor: np.ndarray, squares: np.ndarray) -> float:
    """Estimate of the smallest eigenvalue of ``D^-1 L L^T D^-1`` for given ``D^2``; not a bound.

    It is the inverse of the largest one of ``D L^-T L^-1 D``, whose relative error does not
    suffer from columns of very different size.
    """
    root = np.sqrt(squares)
    largest = root.max()
    root = root / largest

    def apply(vectors: Any) -> Any:
        columns = (root * vectors.T).T
        half = solve_triangular(factor, columns, lower=True, check_finite=False)
        whole = solve_triangular(factor, half, lower=True, trans=1, check_finite=False)
        return (root * whole.T).T

    order = len(factor)
    if order <= _DENSE_ORDER:
        top = eigvalsh(apply(np.eye(order)))[-1]
    else:
        operator = LinearOperator((order, order), matvec=apply, dtype=np.float64)
        start = np.random.default_rng(0).standard_normal(order)
        top = eigsh(operator, k=1, v0=start, tol=1e-5, return_eigenvectors=False)[0]
    return float(1.0 / top / largest**2)


def _relative(n_roundings: int, magnitude: Any) -> Any:
    """Bound of the error of that many roundings of a quantity of the given size."""
    return (_SECOND_ORDER * n_roundings * _UNIT) * magnitude


def _up(values: Any) -> Any:
    """Next larger float: not below the exact result of one operation."""
    return np.nextafter(values, np.inf)


def _down(values: Any) -> Any:
    """Next smaller float: not above the exact result of one operation."""
    return np.nextafter(values, -np.inf)
