r"""Weighted sums over rows that determine every least-squares fit.

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
from dataclasses import dataclass

import numpy as np

from sklearn_mhla._backend import Array, Backend
from sklearn_mhla._design import Block, Design
from sklearn_mhla._features import adjoint_block, n_pairs, packed_products, pair_indices

# Rows of one matrix product in the Gram accumulation. Measured on two cores at d=16: products
# of about a thousand rows run at full BLAS speed while their left factor stays in the cache.
_GROUP_ROWS = 1024


@dataclass(frozen=True)
class Moments:
    """Second and first moments of features and targets, as sums over weighted rows.

    Attributes
    ----------
    gram : array of shape (P (P + 1) / 2, d (d + 1) / 2)
        ``sum_i w_i s_a s_b q_l q_k`` for ``a <= b`` and ``l <= k``; ``P = d (d + 1) / 2``.
    cross : array of shape (m, p)
        ``sum_i w_i y_i phi_i``.
    feature_sum : array of shape (p,)
        ``sum_i w_i phi_i``.
    weight : float
        ``sum_i w_i``.
    """

    gram: Array
    cross: Array
    feature_sum: Array
    weight: float
    token_dim: int
    backend: Backend

    @classmethod
    def from_design(cls, design: Design, targets: Array, weights: Array | None) -> Moments:
        """Accumulate over all rows of a design.

        Parameters
        ----------
        design : Design
        targets : array of shape (rows, m)
        weights : array of shape (rows, 1) or None
        """
        backend, token_dim = design.backend, design.token_dim
        pairs = n_pairs(token_dim)
        gram = backend.zeros((pairs * (pairs + 1) // 2, pairs))
        # The sums ride along as one more output whose target is 1.
        cross = backend.zeros((targets.shape[1] + 1, design.n_features))
        for block in design.blocks("moments"):
            weight = None if weights is None else block.gather(weights)
            accumulate_gram(gram, block.state, query_products(block, weight), backend)
            cross += adjoint_block(block.state, block.query, _dual(block, targets, weight))
        total = design.n_rows if weights is None else float(weights.sum())
        return cls(gram, cross[:-1], cross[-1], float(total), token_dim, backend)

    def mean(self) -> Array:
        """Weighted mean of the features, shape (1, p)."""
        return self.feature_sum[None] / self.weight

    def diagonal(self) -> Array:
        """``sum_i w_i phi_i^2`` of every feature, shape (p,)."""
        same_pair = _pair_offsets(n_pairs(self.token_dim))[:-1]
        same_query = _pair_offsets(self.token_dim)[:-1]
        return self.gram[same_pair][:, same_query].reshape(-1)

    def gram_matrix(self, mean: Array | None) -> Array:
        """The Gram matrix, shape (p, p), of features minus their ``mean`` if it is given.

        Only the lower triangle is meaningful.
        """
        full = unpack_gram(self.gram, self.token_dim, self.backend)
        if mean is not None:
            size = full.shape[0]
            step = max(1, 2**20 // size)
            for start in range(0, size, step):
                rows = slice(start, start + step)
                full[rows] -= (self.weight * mean[:, rows].mT) * mean
        return full


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
    offsets = _pair_offsets(pairs)
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


def unpack_gram(gram: Array, token_dim: int, backend: Backend) -> Array:
    """Lower triangle of a ``(P d, P d)`` Gram matrix from its packed form.

    Parameters
    ----------
    gram : array of shape (P (P + 1) / 2, d (d + 1) / 2)
    token_dim : int
    backend : Backend
    """
    pairs = (math.isqrt(8 * gram.shape[0] + 1) - 1) // 2
    size = pairs * token_dim
    full = backend.zeros((size, size))
    offsets = _pair_offsets(pairs)
    square = np.empty((token_dim, token_dim), dtype=np.intp)
    rows, columns = pair_indices(token_dim)
    square[rows, columns] = square[columns, rows] = np.arange(len(rows))
    query_index = backend.index(square.reshape(-1))
    for a in range(pairs):
        partners = np.arange(a + 1)  # b <= a; the pair (b, a) is stored under its smaller index
        stripe = backend.take(gram[offsets[partners] + (a - partners)], query_index)
        stripe = stripe.reshape(a + 1, token_dim, token_dim).swapaxes(0, 1)
        full[a * token_dim : (a + 1) * token_dim, : (a + 1) * token_dim] = stripe.reshape(
            token_dim, (a + 1) * token_dim
        )
    return full


def _pair_offsets(pairs: int) -> np.ndarray:
    """Where the products of state entry ``a`` with ``b >= a`` start."""
    return np.concatenate([[0], np.cumsum(np.arange(pairs, 0, -1))])


def _dual(block: Block, targets: Array, weight: Array | None) -> Array:
    """Weighted targets of a block with a column of ones appended: (K, R, m + 1)."""
    placed = block.gather(targets)
    extended = block.backend.empty((*placed.shape[:2], placed.shape[2] + 1))
    extended[..., :-1] = placed
    extended[..., -1] = 1.0  # absent queries are zero, so their one counts for nothing
    if weight is not None:
        extended *= weight
    return extended
