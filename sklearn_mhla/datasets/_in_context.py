"""In-context regression: every sample is a small regression task."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import numpy as np
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import check_scalar


def make_in_context_regression(
    n_samples: int = 1000,
    n_features: int = 4,
    n_context: int = 16,
    noise: float = 0.0,
    *,
    covariance: Any = None,
    return_weights: bool = False,
    random_state: Any = None,
) -> Any:
    r"""Sequences of examples ``(x_i, y_i)`` of one linear function, and a query.

    For every sample a weight vector :math:`w \sim N(0, I)` is drawn, then inputs
    :math:`x_i \sim N(0, \Sigma)` and :math:`y_i = w^T x_i + \epsilon_i`. The last token is the
    query :math:`(x, 0)`, its target :math:`w^T x`, without noise.

    With :math:`n` = ``n_context`` examples in :math:`k` = ``n_features`` dimensions and noise of
    standard deviation :math:`s`, the best prediction of the form
    :math:`\sum_i y_i x_i^T \Gamma x` has

    .. math:: \Gamma = ((n + 1) \Sigma + (tr(\Sigma) + s^2) I)^{-1},

    which is :math:`I / (n + k + 1)` for :math:`\Sigma = I` and no noise. With :math:`M = \sum_i x_i
    x_i^T` its mean squared error is :math:`E |x^T (I - \Gamma^T M) w|^2 + n s^2 tr(\Sigma \Gamma^T
    \Sigma \Gamma)`, where :math:`E M = n \Sigma` and :math:`E M^2 = n (n + 1) \Sigma^2 + n \,
    tr(\Sigma) \Sigma`; the minimum is :math:`tr(\Sigma) - n \, tr(\Sigma \Gamma \Sigma)`. All other
    cubic features of the tokens are even in the :math:`y_i`, the target is odd, so no linear
    attention is better (Zhang et al. [1]_ and Ahn et al. [2]_ find the same :math:`\Gamma`).

    Parameters
    ----------
    n_samples : int, default=1000
        Number of tasks.
    n_features : int, default=4
        Number of regressors.
    n_context : int, default=16
        Examples per task.
    noise : float, default=0.0
        Standard deviation of the noise in the examples.
    covariance : array-like of shape (n_features, n_features), default=None
        Covariance of the inputs; None is the identity.
    return_weights : bool, default=False
        Whether to return the weight vectors as well.
    random_state : int, RandomState instance or None, default=None
        Seed; the same seed gives the same data.

    Returns
    -------
    X : ndarray of shape (n_samples, n_context + 1, n_features + 1)
        Tokens ``(x_i, y_i)``, then the query ``(x, 0)``.
    y : ndarray of shape (n_samples,)
        Targets.
    weights : ndarray of shape (n_samples, n_features)
        Only returned if ``return_weights`` is True.

    Raises
    ------
    ValueError
        If a number is out of range or the covariance is not symmetric positive semidefinite.

    References
    ----------
    .. [1] R. Zhang, S. Frei and P. L. Bartlett, "Trained Transformers Learn Linear Models
       In-Context", Journal of Machine Learning Research 25(49), 2024.
    .. [2] K. Ahn, X. Cheng, H. Daneshmand and S. Sra, "Transformers learn to implement
       preconditioned gradient descent for in-context learning", NeurIPS 2023.

    Examples
    --------
    >>> from sklearn_mhla.datasets import make_in_context_regression
    >>> X, y = make_in_context_regression(10, random_state=0)
    >>> X.shape, y.shape
    ((10, 17, 5), (10,))
    """
    for name, value in [
        ("n_samples", n_samples),
        ("n_features", n_features),
        ("n_context", n_context),
    ]:
        check_scalar(value, name, Integral, min_val=1)
    check_scalar(noise, "noise", Real, min_val=0.0)
    root = _covariance_root(covariance, n_features)
    random = check_random_state(random_state)
    weights = random.standard_normal((n_samples, n_features))
    inputs = random.standard_normal((n_samples, n_context + 1, n_features)) @ root
    outputs = (inputs @ weights[:, :, None])[:, :, 0]
    y = outputs[:, -1].copy()
    outputs[:, :-1] += noise * random.standard_normal((n_samples, n_context))
    outputs[:, -1] = 0.0
    X = np.concatenate([inputs, outputs[:, :, None]], axis=2)
    return (X, y, weights) if return_weights else (X, y)


def _covariance_root(covariance: Any, n_features: int) -> np.ndarray:
    """Symmetric square root."""
    if covariance is None:
        return np.eye(n_features)
    matrix = check_array(covariance, dtype=np.float64, input_name="covariance")
    if matrix.shape != (n_features, n_features) or not np.allclose(matrix, matrix.T):
        raise ValueError(
            f"covariance must be symmetric of shape ({n_features}, {n_features}); got shape "
            f"{matrix.shape}."
        )
    eigenvalues, vectors = np.linalg.eigh(matrix)
    if eigenvalues[0] < -1e-12 * max(eigenvalues[-1], 0.0):
        raise ValueError(
            f"covariance must be positive semidefinite; its smallest eigenvalue is "
            f"{eigenvalues[0]:.3g}."
        )
    root: np.ndarray = vectors * np.sqrt(np.maximum(eigenvalues, 0.0)) @ vectors.T
    return root
