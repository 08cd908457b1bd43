r"""The packed Gram matrix of cubic features: accumulation and unpacking.

The Gram matrix of the cubic features has more symmetry than a Gram matrix must have: its
entries

.. math:: G_{(a,l),(b,k)} = \sum_i w_i \, s_{ia} s_{ib} \, q_{il} q_{ik}

are symmetric in the state pair ``(a, b)`` and in the query pair ``(l, k)`` *separately*. Only
``P (P + 1) / 2 x d (d + 1) / 2`` of them are kept, a quarter of ``p^2``, and they are one
matrix product of products of state entries with products of query entries: half the
operations of ``Phi^T Phi`` with a symmetric rank-k update, and no row of ``Phi`` is formed.
Where several queries share a state (``output="sequence"``, ``causal=False``) their products
are summed first, so the cost does not depend on the number of tokens.
"""

from __future__ import annotations

import math

import numpy as np

from sklearn_mhla._backend import Array, Backend
from sklearn_mhla._design import Block
from sklearn_mhla._features import packed_products, pair_indices

# Rows of one matrix product in the Gram accumulation. Measured on two cores at d=16: products
# of about a thousand rows run at full BLAS speed while their left factor stays in the cache.
_GROUP_ROWS = 1024


def pair_offsets(pairs: int) -> np.ndarray:
    """Where the products of state entry ``a`` with ``b >= a`` start."""
    return np.concatenate([[0], np.cumsum(np.arange(pairs, 0, -1))])


def query_products(block: Block, weight: Array | None) -> Array:
    """``sum_r w_r q_rl q_rk`` for ``l <= k``, over the queries of each state."""
    backend = block.backend
    query = block.query if weight is None else block.query * weight
    if block.query.shape[1] == 1:
        products = packed_products(block.query[:, 0], backend)
        if weight is not None:
            products *= weight[:, 0]
        return products
    token_dim = block.query.shape[2]
    rows, columns = pair_indices(token_dim)
    sums = (query.mT @ block.query).reshape(len(query), token_dim * token_dim)
    return backend.take(sums, backend.index(rows * token_dim + columns))


def accumulate_gram(gram: Array, state: Array, products: Array, backend: Backend) -> None:
    """Add one block's ``sum_i (s_a s_b)_i (q_l q_k)_i`` to the packed Gram matrix, in place.

    Parameters
    ----------
    gram : array of shape (P (P + 1) / 2, D)
    state : array of shape (n, P)
    products : array of shape (n, D)
        Weighted query products.
    backend : Backend
    """
    n_states, pairs = state.shape
    by_pair = backend.asarray(state.mT)
    offsets = pair_offsets(pairs)
    buffer = backend.empty(((_GROUP_ROWS + pairs) * n_states,))
    first = 0
    while first < pairs:
        last = int(np.searchsorted(offsets, offsets[first] + _GROUP_ROWS, side="right")) - 1
        last = min(max(last, first + 1), pairs)
        size = int(offsets[last] - offsets[first])
        left = buffer[: size * n_states].reshape(size, n_states)
        for a in range(first, last):
            at = slice(int(offsets[a] - offsets[first]), int(offsets[a + 1] - offsets[first]))
            backend.multiply(by_pair[a:], by_pair[a], out=left[at])
        backend.add_product(gram[int(offsets[first]) : int(offsets[last])], left, products)
        first = last


def unpack_gram(
    gram: Array, token_dim: int, backend: Backend, squared_scale: np.ndarray | None = None
) -> Array:
    """Lower triangle of a ``(P d, P d)`` Gram matrix from its packed form.

    Parameters
    ----------
    gram : array of shape (P (P + 1) / 2, d (d + 1) / 2)
    token_dim : int
    backend : Backend
    squared_scale : ndarray of shape (P,), optional
        Squares of factors by which to multiply the state entries.
    """
    pairs = (math.isqrt(8 * gram.shape[0] + 1) - 1) // 2
    size = pairs * token_dim
    full = backend.zeros((size, size))
    offsets = pair_offsets(pairs)
    square = np.empty((token_dim, token_dim), dtype=np.intp)
    rows, columns = pair_indices(token_dim)
    square[rows, columns] = square[columns, rows] = np.arange(len(rows))
    query_index = backend.index(square.reshape(-1))
    for a in range(pairs):
        partners = np.arange(a + 1)  # b <= a; the pair (b, a) is stored under its smaller index
        entries = gram[offsets[partners] + (a - partners)]
        if squared_scale is not None:  # one root of both squares: exact where they are equal
            entries *= backend.asarray(np.sqrt(squared_scale[a] * squared_scale[: a + 1]))[:, None]
        stripe = backend.take(entries, query_index)
        stripe = stripe.reshape(a + 1, token_dim, token_dim).swapaxes(0, 1)
        full[a * token_dim : (a + 1) * token_dim, : (a + 1) * token_dim] = stripe.reshape(
            token_dim, (a + 1) * token_dim
        )
    return full


def gram_diagonal(gram: Array, token_dim: int) -> Array:
    """Diagonal of the Gram matrix, shape (P d,), from its packed form."""
    pairs = token_dim * (token_dim + 1) // 2
    same_pair, same_query = pair_offsets(pairs)[:-1], pair_offsets(token_dim)[:-1]
    return gram[same_pair][:, same_query].reshape(-1)


def gram_bounds(gram: Array, token_dim: int) -> Array:
    """Upper bounds of the diagonal, shape (P d,): ``sum S_jj S_kk q_l^2`` for ``S_jk q_l``.

    Rounding errors of the entries are relative to these: where coordinates ``j`` and ``k`` are
    orthogonal in every sequence, ``S_jk`` is about ``eps sqrt(S_jj S_kk)``, not zero.
    """
    rows, columns = pair_indices(token_dim)
    same = np.flatnonzero(rows == columns)  # the pair (j, j)
    first, second = same[rows], same[columns]
    pair_of_pairs = pair_offsets(len(rows))[first] + (second - first)
    return gram[pair_of_pairs][:, pair_offsets(token_dim)[:-1]].reshape(-1)
