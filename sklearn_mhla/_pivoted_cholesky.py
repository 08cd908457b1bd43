r"""Pivoted Cholesky of the kernel of feature rows, which is never formed.

.. math:: K_{ij} = \langle S_i, S_j \rangle_F \, \langle q_i, q_j \rangle

of rows scaled to unit norm becomes ``K = L L^T`` with ``r`` pivots, and ``B = L_p^{-1} \Phi_p`` is
an orthonormal basis of the span of the rows (Higham, "Accuracy and Stability of Numerical
Algorithms", section 10.3). It costs ``rows r (r + P + d)`` multiply-adds, ``P = d (d + 1) / 2``,
whatever the number of features. Three properties of the lift are used:

* Pivots are taken in blocks: the rows of largest residual are factored among themselves by
  LAPACK, and the best of them extend ``L`` by matrix products.
* Rows that are already in the span are put aside.
* Queries that share no coordinate are orthogonal, so the kernel falls into independent blocks
  (one for every symbol when queries are one-hot), and pairs of coordinates that never occur
  together in a state drop out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.linalg import lapack
from scipy.sparse.csgraph import connected_components
from tqdm import tqdm

from sklearn_mhla._backend import Array, Backend
from sklearn_mhla._design import Block, Design
from sklearn_mhla._features import (
    adjoint_block,
    cubic_features,
    n_pairs,
    pair_indices,
    predict_block,
)

# Length, relative to that of the row, of what is told from rounding.
COVERED = 5e-7
# Pivots below are rounding or not; they are measured before they count.
_DOUBTFUL = 1e-10
_MAX_CORRECTIONS = 10
# Numbers in the residuals that are written out at a time.
_EXPLICIT_BUDGET = 2**22
# Candidates per pivot of a block, and how far below the largest residual a pivot may be: rounding
# of a column of L is relative to the root of its pivot.
_CANDIDATES = 4
_SMALLEST = 0.05
# Rows in the span are put aside once they are this share of those carried along.
_FINISHED = 0.2


@dataclass(frozen=True)
class UnitRows:
    """Rows of a design in factored form, states and queries of unit norm.

    Attributes
    ----------
    state : array of shape (n, P)
    query : array of shape (n, d)
    norm : array of shape (n,)
        ``||phi||`` in the units of the design. Rows of norm zero are zero.
    """

    state: Array
    query: Array
    norm: Array

    def kernel(self, other: UnitRows) -> Array:
        """Inner products of features, shape (n, n')."""
        products = self.state @ other.state.mT
        products *= self.query @ other.query.mT
        return products

    def take(self, chosen: Array) -> UnitRows:
        """The chosen rows."""
        return UnitRows(self.state[chosen], self.query[chosen], self.norm[chosen])


@dataclass(frozen=True)
class Basis:
    """Linearly independent rows and the Cholesky factor of their kernel.

    Attributes
    ----------
    rows : UnitRows
    lower : array of shape (r, r)
    backend : Backend
    """

    rows: UnitRows
    lower: Array
    backend: Backend

    @property
    def condition(self) -> float:
        """Estimated condition number, in the 1-norm, of the kernel of the rows."""
        norm = float(abs(self.rows.kernel(self.rows)).sum(0).max())
        return norm * self.backend.inverse_one_norm(self.lower)

    def coordinates(self, rows: UnitRows) -> Array:
        """``L^-1 Phi_p phi``: features in an orthonormal basis, shape (r, n)."""
        return self.backend.solve_triangular(self.lower, self.rows.kernel(rows))

    def combination(self, coordinates: Array) -> Array:
        """``c`` with the given coordinates of ``Phi_p^T c``, shape (r, n)."""
        return self.backend.solve_triangular(self.lower, coordinates + 0.0, transposed=True)

    def distance(self, rows: UnitRows, combination: Array) -> Array:
        """Squared distance (n,) of features from the span, from residuals written out."""
        n_rows, width = len(rows.state), rows.state.shape[1] * rows.query.shape[1]
        out = self.backend.empty((n_rows,))
        step = max(1, _EXPLICIT_BUDGET // max(width, len(self.lower) * rows.query.shape[1]))
        for start in range(0, n_rows, step):
            at = slice(start, start + step)
            outside = cubic_features(rows.state[at], rows.query[at, None])
            outside -= self._features(combination[:, at])
            squares = (outside**2).sum(1)
            for _ in range(_MAX_CORRECTIONS):
                inner = predict_block(self.rows.state, self.rows.query[:, None], outside)[:, 0]
                again = self.backend.solve_triangular(self.lower, inner)
                outside -= self._features(self.combination(again))
                before, squares = squares, (outside**2).sum(1)
                if not ((squares > COVERED**2) & (squares < 0.5 * before)).any():
                    break
            out[at] = squares
        return out

    def _features(self, combination: Array) -> Array:
        """``c^T Phi_p``, shape (n, p)."""
        return adjoint_block(self.rows.state, self.rows.query[:, None], combination[:, None])


@dataclass(frozen=True)
class PivotedCholesky:
    """``K = L L^T`` of unit rows, up to a tolerance on the diagonal.

    Attributes
    ----------
    pivots : ndarray of shape (r,)
        Rows that span the others, in order.
    basis : Basis
        At the pivots.
    pieces : list of (rows, factor)
        ``L^T`` at the rows, ``(r', n')`` with ``r' <= r``: what follows is zero. Empty unless
        wanted.
    complete : bool
        Whether the tolerance was reached.
    """

    pivots: np.ndarray
    basis: Basis
    pieces: list[tuple[np.ndarray, Array]]
    complete: bool


@dataclass(frozen=True)
class Part:
    """Rows whose queries use some coordinates that no other part uses.

    Attributes
    ----------
    rows : ndarray of shape (n',)
        Of the design.
    pairs, coordinates : ndarrays of int
        Entries of the packed state and of the query that occur.
    factor : PivotedCholesky
        Of those entries; pivots count within ``rows``.
    """

    rows: np.ndarray
    pairs: np.ndarray
    coordinates: np.ndarray
    factor: PivotedCholesky

    @property
    def pivots(self) -> np.ndarray:
        """Rows of the design."""
        pivots: np.ndarray = self.rows[self.factor.pivots]
        return pivots

    def entries(self, rows: UnitRows, backend: Backend) -> tuple[Array, UnitRows]:
        """Other rows whose queries use the part's coordinates, and what the part sees of them."""
        query = backend.take(rows.query, backend.index(self.coordinates))
        touched = backend.index(np.flatnonzero(backend.to_numpy((query != 0.0).any(1))))
        state = backend.take(rows.state[touched], backend.index(self.pairs))
        return touched, UnitRows(state, query[touched], rows.norm[touched])


def unit_rows(design: Design) -> UnitRows:
    """All rows of a design."""
    backend = design.backend
    state = backend.empty((design.n_rows, n_pairs(design.token_dim)))
    query = backend.empty((design.n_rows, design.token_dim))
    norm = backend.empty((design.n_rows, 1))
    for block in design.blocks("states"):
        rows = _unit(*_flat(block), backend)
        lead = block.query.shape[:2]
        block.scatter(rows.state.reshape(*lead, -1), state)
        block.scatter(rows.query.reshape(*lead, -1), query)
        block.scatter(rows.norm.reshape(*lead, 1), norm)
    return UnitRows(state, query, norm[:, 0])


def _flat(block: Block) -> tuple[Array, Array]:
    """State (n, P) and query (n, d) of every slot of a block."""
    n_states, n_queries, token_dim = block.query.shape
    state = block.state
    if n_queries > 1:
        state = (state[:, None] + block.backend.zeros((1, n_queries, 1))).reshape(
            n_states * n_queries, -1
        )
    return state, block.query.reshape(-1, token_dim)


def _unit(state: Array, query: Array, backend: Backend) -> UnitRows:
    """Divide states and queries by their norms; zeros stay."""
    rows, columns = pair_indices(query.shape[1])
    # Squares of entries may underflow; the trace, which bounds the norm of S from above and
    # sqrt(d) times it from below, does not.
    diagonal = backend.index(np.flatnonzero(rows == columns))
    state, state_norm = _normalised(state, backend.take(state, diagonal).sum(1))
    query, query_norm = _normalised(query, abs(query).sum(1))
    present = 1.0 * ((state_norm > 0.0) & (query_norm > 0.0))
    return UnitRows(
        state * present[:, None], query * present[:, None], state_norm * query_norm * present
    )


def _normalised(vectors: Array, scale: Array) -> tuple[Array, Array]:
    """Unit vectors and their former norms; ``scale`` is of the order of the norms."""
    zero = scale == 0.0
    vectors = vectors / (scale + 1.0 * zero)[:, None]
    norm = (vectors**2).sum(1) ** 0.5
    vectors /= (norm + 1.0 * zero)[:, None]
    return vectors, norm * scale


def factor_parts(
    rows: UnitRows,
    backend: Backend,
    *,
    tol: float,
    block: int = 64,
    max_rank: int | None = None,
    keep_rows: bool = False,
    verbose: bool = False,
) -> list[Part]:
    """Pivoted Cholesky of every independent part of the kernel.

    Parameters
    ----------
    rows : UnitRows
    backend : Backend
    tol, block, max_rank, verbose
        As for :meth:`Span.from_design`.
    keep_rows : bool
        Whether to keep ``L`` at all rows.
    """
    parts = []
    left = len(rows.state) if max_rank is None else max_rank
    with tqdm(desc="pivots", unit="pivot", disable=not verbose) as bar:
        for members, coordinates in _independent(backend.to_numpy(rows.query)):
            chosen = rows.take(backend.index(members))
            pairs = np.flatnonzero(backend.to_numpy(abs(chosen.state).sum(0)))
            entries = UnitRows(
                backend.take(chosen.state, backend.index(pairs)),
                backend.take(chosen.query, backend.index(coordinates)),
                chosen.norm,
            )
            factor = pivoted_cholesky(
                entries, backend, tol=tol, block=block, max_rank=left, keep_rows=keep_rows, bar=bar
            )
            left -= len(factor.pivots)
            parts.append(Part(members, pairs, coordinates, factor))
    return parts


def _independent(query: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Groups of rows whose queries share coordinates, and these; zero queries in no group."""
    used = (query != 0.0).astype(np.float64)
    _, label = connected_components(used.T @ used)
    lead = label[used.argmax(1)]
    lead[~used.any(1)] = -1
    for group in np.unique(lead[lead >= 0]):
        yield np.flatnonzero(lead == group), np.flatnonzero(label == group)


def pivoted_cholesky(
    rows: UnitRows,
    backend: Backend,
    *,
    tol: float,
    block: int = 64,
    max_rank: int | None = None,
    start: tuple[Array, Array] | None = None,
    keep_rows: bool = False,
    bar: tqdm | None = None,
) -> PivotedCholesky:
    """Blocked pivoted Cholesky of the kernel of unit rows.

    Parameters
    ----------
    rows : UnitRows
    backend : Backend
    tol : float
        Stop when no diagonal entry of what is left is above.
    block : int
        Pivots taken at a time; 1 takes the largest residual every time.
    max_rank : int, optional
        Stop after so many pivots.
    start : (factor, residual), optional
        ``L^T`` (r0, n) of a factorisation to continue, and the diagonal (n,) of what it left.
    keep_rows : bool
        Whether to keep ``L`` at all rows.
    bar : tqdm, optional
        To be advanced by pivots.
    """
    everything = rows
    n_rows = len(rows.state)
    if start is None:
        factor, left = backend.empty((0, n_rows)), 0.0 * rows.norm + (rows.norm > 0.0)
    else:
        factor, left = start
    first = rank = len(factor)
    last = first + min(n_rows, rows.state.shape[1] * rows.query.shape[1] - first)
    stop = last if max_rank is None else min(last, first + max_rank)
    active = np.arange(n_rows)  # rows carried along
    pivots: list[np.ndarray] = []
    panels: list[Array] = []  # rows of L at the pivots
    pieces: list[tuple[np.ndarray, Array]] = []
    while True:
        residual = backend.to_numpy(left)
        outside = np.flatnonzero(residual > tol)
        if len(outside) == 0 or rank == stop:
            break
        if len(outside) <= (1.0 - _FINISHED) * len(active):
            if keep_rows:
                done = np.flatnonzero(residual <= tol)
                pieces.append((active[done], backend.take(factor[:rank], backend.index(done))))
            kept = backend.index(outside)
            factor, left = backend.take(factor[:rank], kept), left[kept]
            rows, active, residual = rows.take(kept), active[outside], residual[outside]
            outside = np.arange(len(outside))
        # Factor the rows of largest residual among themselves.
        n_candidates = min(_CANDIDATES * block, len(outside)) if block > 1 else 1
        order = np.argpartition(-residual[outside], n_candidates - 1)[:n_candidates]
        candidates = outside[order]
        at = backend.index(candidates)
        own, above = rows.take(at), backend.take(factor[:rank], at)
        largest = float(residual.max())
        if start is None and rank and largest <= _DOUBTFUL:
            basis = _basis(everything, pivots, panels, backend)
            distance = basis.distance(own, basis.combination(above))
            rounding = np.flatnonzero(backend.to_numpy(distance) <= tol)
            if len(rounding):
                left[backend.index(candidates[rounding])] = 0.0
                continue
        schur = backend.to_numpy(own.kernel(own) - above.mT @ above)
        small, best = _best_pivots(schur, max(tol, _SMALLEST * largest))
        best = best[: min(block, stop - rank)]
        if len(best) == 0:  # what was subtracted step by step differs by rounding
            left[at] = backend.asarray(schur.diagonal())
            continue
        # Extend L by their columns.
        chosen = backend.index(best)
        own, above = own.take(chosen), backend.take(above, chosen)
        corner = small[: len(best), : len(best)]
        inverse = backend.asarray(lapack.dtrtri(corner, lower=1)[0])
        new = inverse @ (own.kernel(rows) - above.mT @ factor[:rank])
        left = left - (new**2).sum(0)
        left[backend.index(candidates[best])] = 0.0
        wider = rank + len(best)
        if wider > len(factor):
            larger = backend.empty((min(last, max(wider, 2 * rank)), len(active)))
            larger[:rank] = factor[:rank]
            factor = larger
        factor[rank:wider] = new
        pivots.append(active[candidates[best]])
        panel = backend.zeros((len(best), wider - first))
        panel[:, : rank - first] = above[first:].mT
        panel[:, rank - first :] = backend.asarray(corner)
        panels.append(panel)
        rank = wider
        if bar is not None:
            bar.update(len(best))
    if keep_rows:
        pieces.append((active, factor[:rank]))
    complete = len(outside) == 0 or stop == last
    basis = _basis(everything, pivots, panels, backend)
    return PivotedCholesky(_joined(pivots), basis, pieces, complete)


def _joined(pivots: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype=np.intp), *pivots])


def _basis(
    rows: UnitRows, pivots: list[np.ndarray], panels: list[Array], backend: Backend
) -> Basis:
    """The pivots so far; ``panels`` are rows of their Cholesky factor, left of the diagonal."""
    chosen = _joined(pivots)
    lower = backend.zeros((len(chosen), len(chosen)))
    first = 0
    for panel in panels:
        lower[first : first + len(panel), : panel.shape[1]] = panel
        first += len(panel)
    return Basis(rows.take(backend.index(chosen)), lower, backend)


def _best_pivots(schur: np.ndarray, smallest: float) -> tuple[np.ndarray, np.ndarray]:
    """Lower Cholesky factor at the pivots above ``smallest``, and these in order."""
    if not schur.diagonal().max() > smallest:  # LAPACK takes the first pivot whatever its size
        return schur, np.empty(0, dtype=np.intp)
    small, order, rank, _ = lapack.dpstrf(schur, tol=smallest, lower=1)
    return np.tril(small), order[:rank] - 1
