r"""Coefficients and heads: two descriptions of one function.

A model with heads ``V_h`` (m, d) and ``Q_h`` (d, d) computes
``y[a] = sum_{jkl} W[a,j,k,l] S[j,k] q[l]`` with ``W[a,j,k,l] = sum_h V_h[a,j] Q_h[k,l]``. As ``S``
is symmetric, only the part of ``W`` symmetric in ``(j, k)`` matters; its packed form is what the
convex solvers fit. Conversely, any ``W`` unfolded to ``(m d) x (d^2)`` is a sum of at most
``min(m d, d^2)`` rank-one terms ``vec(V_h) vec(Q_h)^T`` (Yau et al., arXiv 2410.10101, section 2
and Algorithm 1).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import svd

from sklearn_mhla._features import pair_indices, pair_scale


class Heads(NamedTuple):
    """A multi-head linear attention model given by its heads.

    Parameters
    ----------
    value : ndarray of shape (n_heads, m, d)
        Value matrices ``V_h``.
    key_query : ndarray of shape (n_heads, d, d)
        Fused key-query matrices ``Q_h``.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_mhla import Heads
    >>> heads = Heads(value=np.ones((1, 2, 3)), key_query=np.ones((1, 3, 3)))
    >>> heads.coefficients().shape
    (2, 18)
    """

    value: np.ndarray
    key_query: np.ndarray

    def coefficients(self) -> np.ndarray:
        """Isometrically packed coefficients; see :func:`heads_to_coef`.

        Returns
        -------
        ndarray of shape (m, p)
            What a fitted estimator keeps in ``coef_``.
        """
        return heads_to_coef(self.value, self.key_query)


def heads_to_coef(value: np.ndarray, key_query: np.ndarray) -> np.ndarray:
    r"""Pack heads into the coefficients that act on ``svec(S) (x) q``.

    ``coef[a, (j, k), l] = scale_{jk} (W[a,j,k,l] + W[a,k,j,l]) / 2`` with ``scale = sqrt(2)``
    off the diagonal and 1 on it.

    Parameters
    ----------
    value : array of shape (n_heads, m, d)
    key_query : array of shape (n_heads, d, d)

    Returns
    -------
    ndarray of shape (m, p)
    """
    return tensor_to_coef(np.einsum("haj,hkl->ajkl", value, key_query, optimize=True))


def tensor_to_coef(tensor: np.ndarray) -> np.ndarray:
    """Packed coefficients (m, p) of the symmetric part of a coefficient tensor (m, d, d, d)."""
    rows, columns = pair_indices(tensor.shape[1])
    symmetric = 0.5 * (tensor[:, rows, columns] + tensor[:, columns, rows])
    symmetric *= pair_scale(tensor.shape[1])[:, None]
    coef: np.ndarray = symmetric.reshape(len(tensor), -1)
    return coef


def coef_to_tensor(coef: np.ndarray, token_dim: int) -> np.ndarray:
    """The coefficient tensor ``W`` (m, d, d, d), symmetric in its two middle axes."""
    rows, columns = pair_indices(token_dim)
    entries = coef.reshape(len(coef), len(rows), token_dim) / pair_scale(token_dim)[:, None]
    tensor = np.empty((len(coef), token_dim, token_dim, token_dim))
    tensor[:, rows, columns] = entries
    tensor[:, columns, rows] = entries
    return tensor


def tensor_to_heads(tensor: np.ndarray, n_heads: int | None = None) -> Heads:
    """Heads from the singular value decomposition of an unfolded coefficient tensor.

    Parameters
    ----------
    tensor : ndarray of shape (m, d, d, d)
        ``W[a,j,k,l]``; need not be symmetric in ``(j, k)``.
    n_heads : int, optional
        Keep that many leading terms. None keeps all above rounding level, at most
        ``min(m d, d^2)``.

    Returns
    -------
    Heads
        The two factors of a head have equal norms.
    """
    n_outputs, d = tensor.shape[:2]
    unfolded = tensor.reshape(n_outputs * d, d * d)
    left, singular, right = svd(unfolded, full_matrices=False, check_finite=False)
    if n_heads is None:
        floor = np.finfo(np.float64).eps * max(unfolded.shape) * singular[0]
        n_heads = int((singular > floor).sum())
    root = np.sqrt(singular[:n_heads])
    value = np.ascontiguousarray((left[:, : len(root)] * root).T)
    key_query = right[: len(root)] * root[:, None]
    return Heads(value.reshape(-1, n_outputs, d)[:n_heads], key_query.reshape(-1, d, d)[:n_heads])


def svd_heads(coef: np.ndarray, token_dim: int) -> Heads:
    """Heads by singular value decomposition of the symmetric coefficient tensor.

    The published conversion (Yau et al., arXiv 2410.10101, Algorithm 1): exact, with as many
    heads as the symmetric tensor's ``(m d) x (d^2)`` unfolding has rank, at most
    ``min(m d, d^2)``.

    Parameters
    ----------
    coef : ndarray of shape (m, p)
    token_dim : int

    Returns
    -------
    Heads
    """
    return tensor_to_heads(coef_to_tensor(coef, token_dim))


def function_distance(model_a: Any, model_b: Any) -> float:
    r"""How far two models are apart as functions.

    The Frobenius distance of the coefficients ``p`` of the distinct monomials
    ``S[j,k] q[l]``, ``j <= k``: ``p[a,{j,k},l] = sum_h V_h[a,j] Q_h[k,l] + V_h[a,k] Q_h[j,l]`` for
    ``j < k`` and ``sum_h V_h[a,j] Q_h[j,l]`` for ``j = k`` (Yau et al., arXiv 2410.10101,
    definition of ``d(Theta, Theta')``). It is zero iff the two models agree on every sequence up
    to a constant: intercepts are not compared.

    Parameters
    ----------
    model_a, model_b : fitted estimator, Heads or tuple (value, key_query)
        An estimator with ``coef_`` and ``token_dim_``, or heads with ``value`` of shape
        (n_heads, m, d) and ``key_query`` of shape (n_heads, d, d).

    Returns
    -------
    float
        Zero or more.

    Raises
    ------
    ValueError
        If the models differ in token width, in the number of outputs or in ``state``: the same
        coefficients mean another function of a sum than of a mean.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_mhla import function_distance
    >>> value, key_query = np.ones((1, 1, 2)), np.ones((1, 2, 2))
    >>> function_distance((value, key_query), (2 * value, key_query / 2))
    0.0
    """
    states = [model.state for model in (model_a, model_b) if hasattr(model, "state")]
    if len(set(states)) > 1:
        raise ValueError(
            f"The models cannot be compared: model_a has state={states[0]!r}, model_b has "
            f"state={states[1]!r}."
        )
    monomials_a = _monomial_coefficients(model_a, "model_a")
    monomials_b = _monomial_coefficients(model_b, "model_b")
    if monomials_a.shape != monomials_b.shape:
        raise ValueError(
            "The models cannot be compared: model_a has (outputs, pairs, token width) "
            f"{monomials_a.shape}, model_b has {monomials_b.shape}."
        )
    return float(np.linalg.norm(monomials_a - monomials_b))


def _monomial_coefficients(model: Any, name: str) -> np.ndarray:
    """``p(Theta)`` of shape (m, pairs, d)."""
    if hasattr(model, "coef_") and hasattr(model, "token_dim_"):
        coef, token_dim = model.coef_, model.token_dim_
    else:
        try:
            value, key_query = (np.asarray(part, dtype=np.float64) for part in model)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{name} must be a fitted estimator or heads (value, key_query); got "
                f"{type(model).__name__}."
            ) from error
        token_dim = value.shape[-1] if value.ndim == 3 else 0
        if value.ndim != 3 or key_query.shape != (len(value), token_dim, token_dim):
            raise ValueError(
                f"{name} must hold value (n_heads, m, d) and key_query (n_heads, d, d); got shapes "
                f"{value.shape} and {key_query.shape}."
            )
        coef = heads_to_coef(value, key_query)
    monomials: np.ndarray = coef.reshape(len(coef), -1, token_dim) * pair_scale(token_dim)[:, None]
    return monomials
