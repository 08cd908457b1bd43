"""Associative memories: sequences of keys and values, and a query that asks for one value."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import numpy as np
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_scalar

from sklearn_mhla._heads import Heads


def make_associative_memory(
    n_samples: int = 100,
    n_pairs: int = 2,
    *,
    p_orthogonal: float = 0.95,
    orthogonal: str = "haar",
    noise: float = 0.0,
    return_teacher: bool = False,
    random_state: Any = None,
) -> Any:
    r"""Associative memories whose certificate is as weak as wanted.

    Each sequence holds ``k = n_pairs`` tokens ``(key, value)`` and a last token
    ``(query, noise)``, where the query is one of the keys, uniformly, and the noise is
    :math:`N(0, I_k)`. Keys and values are the columns of two independent ``k x k`` matrices: with
    probability ``p_orthogonal`` both orthogonal, otherwise Gaussian with columns of unit norm.
    One head computes the target :math:`\sum_t v_t \langle k_t, q \rangle`, which is the value
    of the query plus the noise if the keys are orthogonal (the experiment of Yau et al. [1]_,
    Figure 2). The smallest eigenvalue of the second moment falls to zero as ``p_orthogonal``
    goes to 1: the states of orthogonal keys are the identity and carry no information.

    Parameters
    ----------
    n_samples : int, default=100
        Number of sequences.
    n_pairs : int, default=2
        Pairs ``k`` per sequence, and half the width of a token.
    p_orthogonal : float, default=0.95
        Share of sequences with orthogonal keys and values, from 0 to 1.
    orthogonal : {"haar", "qr"}, default="haar"
        Distribution of the orthogonal matrices: uniform, or the first factor of LAPACK's QR
        decomposition of a Gaussian matrix as it comes. The latter is not uniform; for ``k = 2``
        it is always a reflection.
    noise : float, default=0.0
        Standard deviation of Gaussian noise added to the targets.
    return_teacher : bool, default=False
        Whether to return the teacher as well.
    random_state : int, RandomState instance or None, default=None
        Seed; the same seed gives the same data.

    Returns
    -------
    X : ndarray of shape (n_samples, n_pairs + 1, 2 n_pairs)
        The sequences.
    y : ndarray of shape (n_samples, n_pairs)
        The targets.
    teacher : Heads
        One head: ``value`` (1, k, 2 k) is ``[0, I]``, ``key_query`` (1, 2 k, 2 k) is
        ``diag(I, 0)``. Only returned if ``return_teacher`` is True.

    Raises
    ------
    ValueError
        If a number is out of range or an option is unknown.

    See Also
    --------
    make_key_value : Memories of symbols, with integer tokens.

    References
    ----------
    .. [1] M. Yau, E. Akyurek, J. Mao, J. B. Tenenbaum, S. Jegelka and J. Andreas, "Learning
       Linear Attention in Polynomial Time", NeurIPS 2025, arXiv:2410.10101.

    Examples
    --------
    >>> from sklearn_mhla import certify_identifiable
    >>> from sklearn_mhla.datasets import make_associative_memory
    >>> X, y = make_associative_memory(500, p_orthogonal=1.0, random_state=0)
    >>> X.shape, y.shape
    ((500, 3, 4), (500, 2))
    >>> certify_identifiable(X).nullity
    4
    """
    check_scalar(n_samples, "n_samples", Integral, min_val=1)
    check_scalar(n_pairs, "n_pairs", Integral, min_val=1)
    check_scalar(p_orthogonal, "p_orthogonal", Real, min_val=0.0, max_val=1.0)
    check_scalar(noise, "noise", Real, min_val=0.0)
    for name, number in [("p_orthogonal", p_orthogonal), ("noise", noise)]:
        if not np.isfinite(number):
            raise ValueError(f"{name} must be finite; got {number}.")
    if orthogonal not in ("haar", "qr"):
        raise ValueError(f"orthogonal must be 'haar' or 'qr'; got {orthogonal!r}.")

    random = check_random_state(random_state)
    k = n_pairs
    gaussian = random.standard_normal((2, n_samples, k, k))
    is_orthogonal = random.uniform(size=n_samples) < p_orthogonal
    columns = gaussian / np.linalg.norm(gaussian, axis=2, keepdims=True)
    columns[:, is_orthogonal] = _orthogonal(gaussian[:, is_orthogonal], orthogonal)
    keys, values = columns.swapaxes(2, 3)  # a key or value per row from here on
    X = np.empty((n_samples, k + 1, 2 * k))
    X[:, :k, :k], X[:, :k, k:] = keys, values
    X[:, k, :k] = keys[np.arange(n_samples), random.randint(k, size=n_samples)]
    X[:, k, k:] = random.standard_normal((n_samples, k))
    similarity = (X[:, :, :k] @ X[:, k, :k, None])[:, :, 0]
    y = (similarity[:, None] @ X[:, :, k:])[:, 0]
    y += noise * random.standard_normal(y.shape)
    return (X, y, _memory_teacher(k, k)) if return_teacher else (X, y)


def make_key_value(
    n_samples: int = 100,
    n_keys: int = 4,
    n_values: int = 3,
    *,
    n_pairs: int | None = None,
    return_teacher: bool = False,
    random_state: Any = None,
) -> Any:
    r"""Look-up tables of symbols, as integer one-hot tokens.

    Each sequence holds ``n_pairs`` tokens ``(one-hot key, one-hot value)`` of different keys with
    values drawn uniformly, and a last token ``(one-hot query, 0)`` that asks for one of these
    keys. The target is the one-hot value of that key, which one head looks up exactly. With all
    keys in every sequence, ``n_pairs=n_keys``, the second moment of enough sequences has rank
    ``K (1 + K (V - 1))`` for ``K`` keys and ``V`` values, far below the number of features; yet it
    covers every other such table.

    Parameters
    ----------
    n_samples : int, default=100
        Number of sequences.
    n_keys : int, default=4
        Number of different keys ``K``.
    n_values : int, default=3
        Number of different values ``V``.
    n_pairs : int, optional
        Pairs per sequence, at most ``n_keys``. None: all keys.
    return_teacher : bool, default=False
        Whether to return the teacher as well.
    random_state : int, RandomState instance or None, default=None
        Seed; the same seed gives the same data.

    Returns
    -------
    X : ndarray of shape (n_samples, n_pairs + 1, n_keys + n_values)
        The sequences, zeros and ones of type int8.
    y : ndarray of shape (n_samples, n_values)
        One-hot values, of type int8.
    teacher : Heads
        One head that computes ``y``; only returned if ``return_teacher`` is True.

    Raises
    ------
    ValueError
        If a number is out of range.

    See Also
    --------
    make_associative_memory : Memories of vectors.

    Examples
    --------
    >>> from sklearn_mhla.datasets import make_key_value
    >>> X, y = make_key_value(1, n_keys=2, n_values=2, random_state=0)
    >>> X[0]
    array([[1, 0, 0, 1],
           [0, 1, 0, 1],
           [0, 1, 0, 0]], dtype=int8)
    >>> y
    array([[0, 1]], dtype=int8)
    """
    for name, number in [("n_samples", n_samples), ("n_keys", n_keys), ("n_values", n_values)]:
        check_scalar(number, name, Integral, min_val=1)
    n_pairs = n_keys if n_pairs is None else n_pairs
    check_scalar(n_pairs, "n_pairs", Integral, min_val=1, max_val=n_keys)

    random = check_random_state(random_state)
    keys = random.uniform(size=(n_samples, n_keys)).argsort(1)[:, :n_pairs]
    values = random.randint(n_values, size=(n_samples, n_pairs))
    sample, asked = np.arange(n_samples), random.randint(n_pairs, size=n_samples)
    one_hot_values = np.eye(n_values, dtype=np.int8)
    X = np.zeros((n_samples, n_pairs + 1, n_keys + n_values), dtype=np.int8)
    X[:, :n_pairs, :n_keys] = np.eye(n_keys, dtype=np.int8)[keys]
    X[:, :n_pairs, n_keys:] = one_hot_values[values]
    X[sample, n_pairs, keys[sample, asked]] = 1
    y = one_hot_values[values[sample, asked]]
    return (X, y, _memory_teacher(n_keys, n_values)) if return_teacher else (X, y)


def _orthogonal(gaussian: np.ndarray, distribution: str) -> np.ndarray:
    """Orthogonal factors of QR decompositions; uniform with the signs of R's diagonal."""
    basis, upper = np.linalg.qr(gaussian)
    if distribution == "haar":
        basis = basis * np.sign(np.diagonal(upper, axis1=-2, axis2=-1))[..., None, :]
    return basis


def _memory_teacher(n_keys: int, n_values: int) -> Heads:
    """``V = [0, I]`` reads the values, ``Q = diag(I, 0)`` compares the keys."""
    width = n_keys + n_values
    value, key_query = np.zeros((1, n_values, width)), np.zeros((1, width, width))
    value[0, :, n_keys:] = np.eye(n_values)
    key_query[0, :n_keys, :n_keys] = np.eye(n_keys)
    return Heads(value, key_query)
