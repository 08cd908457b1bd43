r"""The cubic features of linear attention: pure functions on blocks of sequences.

A sequence :math:`Z` of tokens :math:`z_1, \dots, z_T \in R^d` enters the model through its
state :math:`S = \sum_t z_t z_t^T` and its query :math:`q = z_T` only, and the output is linear
in :math:`\phi(Z) = svec(S) \otimes q` (Yau et al., "Learning Linear Attention in Polynomial
Time", arXiv 2410.10101, section 2 and Algorithm 2). Here ``svec`` packs the upper triangle of a
symmetric matrix, off-diagonal entries times :math:`\sqrt 2`, so that

.. math:: \langle \phi(Z), \phi(Z') \rangle = \langle S, S' \rangle_F \, \langle q, q' \rangle.

Features are indexed ``(pair, l)`` with ``l``, the coordinate of the query, running fastest.
Nothing here materialises features: contractions go through the two small factors.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sklearn_mhla._backend import Array, Backend


def n_pairs(token_dim: int) -> int:
    """Number of unordered index pairs, ``d (d + 1) / 2``."""
    return token_dim * (token_dim + 1) // 2


def n_cubic_features(token_dim: int) -> int:
    """Length of the feature vector, ``p = d^2 (d + 1) / 2``."""
    return token_dim * n_pairs(token_dim)


@lru_cache(maxsize=32)
def pair_indices(token_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows ``j`` and columns ``k >= j`` of the packed upper triangle, in packing order."""
    rows, columns = np.triu_indices(token_dim)
    rows.flags.writeable = columns.flags.writeable = False
    return rows, columns


@lru_cache(maxsize=32)
def pair_scale(token_dim: int) -> np.ndarray:
    """The isometric weights: 1 on the diagonal and sqrt(2) off it."""
    rows, columns = pair_indices(token_dim)
    scale = np.where(rows == columns, 1.0, np.sqrt(2.0))
    scale.flags.writeable = False
    return scale


def svec(symmetric: Array, backend: Backend, isometric: bool = True) -> Array:
    """Pack symmetric matrices, by default isometrically.

    Parameters
    ----------
    symmetric : array of shape (n, d, d)
    backend : Backend
    isometric : bool
        Whether off-diagonal entries are multiplied by sqrt(2).

    Returns
    -------
    array of shape (n, d (d + 1) / 2)
    """
    n_samples, token_dim, _ = symmetric.shape
    rows, columns = pair_indices(token_dim)
    flat = symmetric.reshape(n_samples, token_dim * token_dim)
    packed = backend.take(flat, backend.index(rows * token_dim + columns))
    if isometric:
        packed *= backend.asarray(pair_scale(token_dim))
    return packed


def smat(packed: Array, token_dim: int, backend: Backend) -> Array:
    """Unpack what :func:`svec` packed: (n, d (d + 1) / 2) to symmetric (n, d, d)."""
    rows, columns = pair_indices(token_dim)
    position = np.empty((token_dim, token_dim), dtype=np.intp)
    position[rows, columns] = position[columns, rows] = np.arange(len(rows))
    unscaled = packed / backend.asarray(pair_scale(token_dim))
    full = backend.take(unscaled, backend.index(position.reshape(-1)))
    return full.reshape(-1, token_dim, token_dim)


def packed_products(vectors: Array, backend: Backend) -> Array:
    """Products ``v_j v_k`` for ``j <= k``, without the sqrt(2): shape (n, d (d + 1) / 2)."""
    rows, columns = pair_indices(vectors.shape[-1])
    products = backend.take(vectors, backend.index(rows))
    products *= backend.take(vectors, backend.index(columns))
    return products


def full_state(tokens: Array, backend: Backend, isometric: bool = True) -> Array:
    """``svec(S)`` with ``S = sum_t z_t z_t^T`` of whole sequences.

    Parameters
    ----------
    tokens : array of shape (n, T, d)
        Zero tokens in front change nothing, so ragged sequences are padded there.
    backend : Backend
    isometric : bool
        Whether off-diagonal entries are multiplied by sqrt(2).

    Returns
    -------
    array of shape (n, d (d + 1) / 2)
    """
    return svec(tokens.mT @ tokens, backend, isometric)


def prefix_states(
    tokens: Array, backend: Backend, initial: Array | None = None, isometric: bool = True
) -> Array:
    """``svec(S_t)`` with ``S_t = sum_{s <= t} z_s z_s^T`` for every position ``t``.

    Parameters
    ----------
    tokens : array of shape (n, T, d)
    backend : Backend
    initial : array of shape (n, d (d + 1) / 2), optional
        Packed state before the first token (continues a sequence that was cut).
    isometric : bool
        Whether off-diagonal entries are multiplied by sqrt(2).

    Returns
    -------
    array of shape (n, T, d (d + 1) / 2)
    """
    states = packed_products(tokens, backend)
    if isometric:
        states *= backend.asarray(pair_scale(tokens.shape[-1]))
    if initial is not None:
        states[:, 0] += initial
    return backend.cumulative_sum(states, axis=1)


def predict_block(state: Array, query: Array, coef: Array) -> Array:
    """``phi @ coef.T`` without ``phi``.

    The state is contracted first: ``(n, pairs) @ (pairs, m d)``, then each row's ``(m, d)``
    result meets its queries. The second step costs ``m d`` per row against the first's
    ``m p``, so the whole is one matrix product.

    Parameters
    ----------
    state : array of shape (n, pairs)
    query : array of shape (n, R, d)
        ``R`` queries share one state.
    coef : array of shape (m, p)

    Returns
    -------
    array of shape (n, R, m)
    """
    return predict_by_pair(state, query, by_pair(coef, query.shape[-1]))


def adjoint_block(state: Array, query: Array, dual: Array) -> Array:
    """``dual.T @ phi`` without ``phi``.

    Parameters
    ----------
    state : array of shape (n, pairs)
    query : array of shape (n, R, d)
    dual : array of shape (n, R, m)

    Returns
    -------
    array of shape (m, p)
    """
    shape = state.shape[1], dual.shape[-1], query.shape[-1]  # none at all of pairs, maybe
    return by_output((state.mT @ read_out(query, dual)).reshape(shape))


def by_pair(coef: Array, token_dim: int) -> Array:
    """Coefficients (m, p) as (pairs, m, d): the layout of one product with packed states."""
    return coef.reshape(len(coef), -1, token_dim).swapaxes(0, 1)


def by_output(coef: Array) -> Array:
    """The inverse of :func:`by_pair`: (pairs, m, d) to (m, p)."""
    pairs, n_outputs, token_dim = coef.shape
    return coef.swapaxes(0, 1).reshape(n_outputs, pairs * token_dim)


def predict_by_pair(state: Array, query: Array, coef: Array) -> Array:
    """:func:`predict_block` for coefficients of shape (pairs, m, d)."""
    _, n_outputs, token_dim = coef.shape
    read = state @ coef.reshape(len(coef), n_outputs * token_dim)
    return query @ read.reshape(len(state), n_outputs, token_dim).mT


def read_out(query: Array, dual: Array) -> Array:
    """``sum_r dual_ra q_rl``: queries (n, R, d) and duals (n, R, m) to (n, m d).

    Its product with the transposed states is the adjoint, by pairs.
    """
    n_states, n_queries, n_outputs = dual.shape
    # One query is an outer product, for which batched BLAS calls would cost more.
    single = n_queries == 1
    weighted = dual.reshape(n_states, n_outputs, 1) * query if single else dual.mT @ query
    return weighted.reshape(n_states, n_outputs * query.shape[-1])


def used_pairs(present: Array, backend: Backend) -> Array | None:
    """Pairs of coordinates worth computing with: most products of one-hot blocks never occur.

    Parameters
    ----------
    present : array of bool of shape (pairs,)
        Whether anything but zeros goes with a pair.
    backend : Backend

    Returns
    -------
    array of int or None
        None if leaving out the others would save less than half.
    """
    pairs = np.flatnonzero(backend.to_numpy(present))
    return backend.index(pairs) if 2 * len(pairs) < len(present) else None


def cubic_features(state: Array, query: Array) -> Array:
    """The feature rows themselves, ``svec(S) (x) q``.

    Only for small problems and tests: the result has ``p = d^2 (d + 1) / 2`` columns.

    Parameters
    ----------
    state : array of shape (n, pairs)
    query : array of shape (n, R, d)

    Returns
    -------
    array of shape (n * R, p)
    """
    features = state[:, None, :, None] * query[:, :, None, :]
    return features.reshape(-1, state.shape[1] * query.shape[2])
