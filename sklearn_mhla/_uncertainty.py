r"""Uncertainty of ridge predictions, in the view of Bayesian linear regression.

With noise of variance :math:`\sigma^2` and a prior :math:`W \sim N(0, \sigma^2 / \alpha \, I)` the
ridge solution is the mean of the posterior, and an output at features :math:`\phi` is normal with
variance

.. math:: \sigma^2 (1 + h), \qquad h = \phi^T (G + \alpha I)^{-1} \phi ,

``G`` the Gram matrix of the training features (Bishop, "Pattern Recognition and Machine Learning",
section 3.3.2). An intercept is a feature of its own with a flat prior: ``phi`` and ``G`` are then
centred and ``1 / sum_i w_i`` is added to ``h``. The noise is estimated from the residuals,
``RSS / (sum_i w_i - dof)`` with ``dof`` the trace of the hat matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sklearn_mhla._backend import Array
from sklearn_mhla._design import Design
from sklearn_mhla._features import predict_block
from sklearn_mhla._sums import Sums
from sklearn_mhla.solvers._path import Spectrum

# A feature vector belongs to the span of the training features if its squared distance from it,
# relative to its squared norm, is below the square root of rounding.
_OUTSIDE = 1e-9


@dataclass(frozen=True)
class Posterior:
    """What the variance of predictions needs.

    Attributes
    ----------
    spectrum : Spectrum
        Of the Gram matrix, centred if there is an intercept, in the units of the moments.
    alpha : float
        Penalty in these units.
    mean : array of shape (1, p) or None
        Mean of the features if there is an intercept.
    weight : float
        Sum of the weights.
    exponent : int
        Tokens are in units of ``2 ** exponent``.
    noise : ndarray of shape (m,)
        Standard deviation of the noise of every output, in the user's units.
    """

    spectrum: Spectrum
    alpha: float
    mean: Array | None
    weight: float
    exponent: int
    noise: np.ndarray

    @classmethod
    def of(cls, moments: Sums, alpha: float, fit_intercept: bool) -> Posterior:
        """Decompose the Gram matrix, ``9 p^3`` operations, and estimate the noise.

        Parameters
        ----------
        moments : Sums
            Of the training rows.
        alpha : float
            Penalty in their units.
        fit_intercept : bool

        Raises
        ------
        ValueError
            If the rows leave no residual degrees of freedom.
        """
        backend = moments.backend
        mean = moments.mean() if fit_intercept else None
        offset = 0.0 if mean is None else moments.weight * float((mean**2).sum())
        size = min(moments.n_rows, moments.n_features)
        spectrum = Spectrum.of(moments.gram_matrix(mean), size, offset, backend)
        inverse = spectrum.inverse(backend.zeros((1,)) + alpha)[:, 0]
        dof = float((spectrum.eigenvalues * inverse).sum()) + (1.0 if fit_intercept else 0.0)
        left = moments.weight - dof
        if not left > 1e-9 * moments.weight:
            raise ValueError(
                "return_std needs rows to estimate the noise from, but the model fits "
                f"{moments.weight:g} (weighted) rows with {dof:g} degrees of freedom. Use more "
                "rows or alpha > 0."
            )
        # RSS = |y|^2 - sum_k (q_k . x)^2 (lambda_k + 2 alpha) / (lambda_k + alpha)^2, x = Phi^T y.
        cross = moments.cross_matrix(mean) @ spectrum.basis
        explained = inverse**2 * (spectrum.eigenvalues + 2.0 * alpha)
        residual = moments.squares(fit_intercept) - (cross**2 * explained).sum(1)
        squares = np.maximum(backend.to_numpy(residual), 0.0) / left
        noise = np.ldexp(np.sqrt(squares), moments.target_exponent)
        return cls(spectrum, alpha, mean, moments.weight, moments.token_exponent, noise)

    def deviation(self, design: Design) -> np.ndarray:
        """Standard deviation of outputs at new inputs, noise included.

        Parameters
        ----------
        design : Design
            New inputs; its exponent may differ.

        Returns
        -------
        ndarray of shape (rows, m)
            In the user's units. Infinite for ``alpha = 0`` where an input is outside the span of
            the training features: nothing is known there.
        """
        spectrum, backend = self.spectrum, design.backend
        vectors = backend.asarray(spectrum.basis.mT)
        centre = 0.0 if self.mean is None else backend.asarray(self.mean @ spectrum.basis)
        scale = 2.0 ** (3 * (design.exponent - self.exponent))
        inside = spectrum.eigenvalues > spectrum.floor
        if self.alpha > 0.0:
            inverse = 1.0 / (spectrum.eigenvalues + self.alpha)
        else:
            inverse = inside / (spectrum.eigenvalues + (1.0 - 1.0 * inside))
        sums = backend.asarray(np.stack([*map(backend.to_numpy, (inverse, 1.0 * inside))], axis=1))
        found = backend.empty((design.n_rows, 3))
        for block in design.blocks():
            products = scale * predict_block(block.state, block.query, vectors)
            squares = (products - centre) ** 2
            parts = backend.empty((*squares.shape[:2], 3))
            parts[..., :2] = squares @ sums
            parts[..., 2] = squares.sum(-1)
            block.scatter(parts, found)
        leverage, seen, total = backend.to_numpy(found).T
        if self.alpha == 0.0:
            leverage = np.where(total - seen > _OUTSIDE * total, np.inf, leverage)
        if self.mean is not None:
            leverage = leverage + 1.0 / self.weight
        deviation: np.ndarray = np.sqrt(1.0 + leverage)[:, None] * self.noise
        return deviation
