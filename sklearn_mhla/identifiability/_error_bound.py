r"""How far two approximate minimisers of the empirical risk can be apart, input by input.

Let ``G = (1/n) sum_i phi_i phi_i^T`` and let two models with coefficients ``C`` and ``C'`` have
mean squared training errors ``(1/n) sum_i |f(Z_i) - y_i|^2 <= eps``. By the triangle inequality of
root mean squares

.. math:: tr((C - C') G (C - C')^T) = \frac{1}{n} \sum_i |f(Z_i) - f'(Z_i)|^2 \le 4 \epsilon .

For ``phi = phi(Z)`` in the range of ``G``, ``phi = G^{1/2} u`` with ``|u|^2 = phi^T G^+ phi``, the
*leverage* of ``Z``, so by the inequality of Cauchy and Schwarz

.. math:: |f(Z) - f'(Z)|^2 = |(C - C') G^{1/2} u|^2 \le 4 \epsilon \, \phi^T G^+ \phi .

If the unrestricted minimum ``L*`` of the mean squared error is known, ``eps - L*`` may replace
``eps``: at a minimiser ``C*`` the gradient is zero, so ``L(C) = L* + tr((C - C*) G (C - C*)^T)``
exactly, and both models lie in a ball around ``C*``. The distance to ``C*`` itself is at most half
of that between two models.

This is Lemma A.7 of Yau et al. (arXiv 2410.10101) with the leverage in place of
``|H|^2 / lambda_min``, which is never smaller, and with the square and the constant that its
proof gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import eigh

from sklearn_mhla._design import Design
from sklearn_mhla._features import pair_indices, predict_block

# Part of an input's features outside the span of the rows that is a rounding error.
_COVERED = 1e-7


@dataclass(frozen=True)
class SecondMoment:
    """The eigendecomposition of ``D G D`` that leverages need.

    ``D`` divides every feature by a bound of its root mean square, so that the units of the
    coordinates of the tokens do not decide which eigenvalues count.

    Attributes
    ----------
    scaling : ndarray of shape (p,)
        ``D``.
    vectors : ndarray of shape (p, p)
        Eigenvectors.
    eigenvalues : ndarray of shape (p,)
        Zero where they count as zero.
    exponent : int
        The rows' tokens were divided by ``2 ** exponent``.
    """

    scaling: np.ndarray
    vectors: np.ndarray
    eigenvalues: np.ndarray
    exponent: int

    @classmethod
    def from_matrix(
        cls, matrix: np.ndarray, token_dim: int, exponent: int = 0, tol: float = 1e-12
    ) -> SecondMoment:
        """Decompose a second moment of isometric features; ``9 p^3`` operations.

        Parameters
        ----------
        matrix : ndarray of shape (p, p)
            ``sum_i w_i phi_i phi_i^T / sum_i w_i``, both triangles.
        token_dim : int
        exponent : int
            That of the design it was summed over.
        tol : float
            Eigenvalues below this times the largest count as zero.
        """
        left, right = pair_indices(token_dim)
        same = np.flatnonzero(left == right)
        query = np.arange(token_dim)
        # H[(j,k),l]^2 <= S_jj S_kk q_l^2, whose mean is an entry of the matrix.
        rows = (same[left][:, None] * token_dim + query).reshape(-1)
        columns = (same[right][:, None] * token_dim + query).reshape(-1)
        bounds = matrix[rows, columns]
        scaling = np.sqrt(np.divide(1.0, bounds, out=np.ones_like(bounds), where=bounds > 0.0))
        eigenvalues, vectors = eigh(matrix * scaling * scaling[:, None], check_finite=False)
        eigenvalues[eigenvalues <= tol * max(eigenvalues[-1], 0.0)] = 0.0
        return cls(scaling, vectors, eigenvalues, exponent)


def leverage(design: Design, moment: SecondMoment) -> np.ndarray:
    """``phi^T G^+ phi`` of every row, infinite where ``phi`` is outside the span of the rows.

    Parameters
    ----------
    design : Design
        New inputs.
    moment : SecondMoment
        Of the training rows.

    Returns
    -------
    ndarray of shape (rows,)
        On the training rows themselves its mean is the rank of ``G``.
    """
    backend = design.backend
    # The rows may have been divided by another power of two.
    scale = np.ldexp(moment.scaling, 3 * (design.exponent - moment.exponent))
    vectors = backend.asarray((moment.vectors * scale[:, None]).T)
    inside = moment.eigenvalues > 0.0
    # For phi in the range of G, D (D G D)^+ D serves as well as G^+.
    inverse = np.divide(1.0, moment.eigenvalues, out=np.zeros(len(inside)), where=inside)
    sums = backend.asarray(np.stack([inverse, inside, ~inside], axis=1))
    found = backend.empty((design.n_rows, 3))
    for block in design.blocks():
        products = predict_block(block.state, block.query, vectors)
        block.scatter(products**2 @ sums, found)
    values, seen, unseen = backend.to_numpy(found).T
    covered: np.ndarray = unseen <= _COVERED**2 * (seen + unseen)
    return np.where(covered, values, np.inf)


def error_bound(leverages: np.ndarray, epsilon: float, minimum: float = 0.0) -> np.ndarray:
    """Bound on ``|f(Z) - f'(Z)|^2`` for all pairs of models with training error at most epsilon.

    Parameters
    ----------
    leverages : ndarray
        Of the inputs.
    epsilon : float
        Mean over rows of the squared norm of the residual, at most this for both models.
    minimum : float
        The least mean squared error of any model without a limit on heads, if known. A quarter of
        the result then bounds the squared distance from the minimiser to any such model.

    Returns
    -------
    ndarray
        ``4 (epsilon - minimum) leverage``; infinite where the input is not covered.

    Raises
    ------
    ValueError
        If ``0 <= minimum <= epsilon`` does not hold.
    """
    if not 0.0 <= minimum <= epsilon < np.inf:
        raise ValueError(
            "epsilon must be finite and at least the minimum, which is at least 0; got "
            f"epsilon={epsilon}, minimum={minimum}."
        )
    covered = np.isfinite(leverages)  # zero times infinity is not zero here
    bounds = np.full(np.shape(leverages), np.inf)
    bounds[covered] = 4.0 * (epsilon - minimum) * leverages[covered]
    return bounds
