r"""The span of training features, by pivoted Cholesky of a kernel that is never formed.

Which predictions do the data determine? Those at inputs whose features lie in the span of the
training features, whatever the rank of the whole. With

.. math:: K_{ij} = \langle S_i, S_j \rangle_F \, \langle q_i, q_j \rangle

of rows scaled to unit norm, ``r`` pivots with ``K = L L^T`` give an orthonormal basis
``B = L_p^{-1} \Phi_p`` of the span (Higham, "Accuracy and Stability of Numerical Algorithms",
section 10.3). It costs ``rows r (r + P + d)`` multiply-adds, ``P = d (d + 1) / 2``, whatever the
number of features. Three properties of the lift are used:

* Pivots are taken in blocks: the rows of largest residual are factored among themselves by
  LAPACK, and the best of them extend ``L`` by matrix products.
* Rows that are already in the span are put aside.
* Queries that share no coordinate are orthogonal, so the kernel falls into independent blocks
  (one for every symbol when queries are one-hot), and pairs of coordinates that never occur
  together in a state drop out.

Tolerance. Residuals are squares, ``1 - ||P phi||^2 / ||phi||^2``, and rounding leaves a few
``eps`` of them, so that a direction is told from rounding if its length is above
``sqrt(tol)``, 1e-7 to 3e-7 of that of its row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.linalg import lapack
from scipy.sparse.csgraph import connected_components
from tqdm import tqdm

from sklearn_mhla._backend import Array, Backend
from sklearn_mhla._design import Block, Design
from sklearn_mhla._features import n_pairs, pair_indices

_EPS = float(np.finfo(np.float64).eps)
# Candidates per pivot of a block, and how far below the largest residual a pivot may be: rounding
# of a column of L is relative to the root of its pivot.
_CANDIDATES = 4
_SMALLEST = 0.05
# Rows in the span are put aside once they are this share of those carried along.
_FINISHED = 0.2


def span_tolerance(size: int) -> float:
    """Squared relative residual below which a direction counts as rounding.

    Parameters
    ----------
    size : int
        Upper bound on the rank: the smaller side of the design.
    """
    return _EPS * max(64.0, 4.0 * math.sqrt(size))


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
class PivotedCholesky:
    """``K = L L^T`` of unit rows, up to a tolerance on the diagonal.

    Attributes
    ----------
    pivots : ndarray of shape (r,)
        Rows that span the others, in order.
    lower : array of shape (r, r)
        ``L`` at the pivots.
    pieces : list of (rows, factor)
        ``L^T`` at the rows, ``(r', n')`` with ``r' <= r``: what follows is zero. Empty unless
        wanted.
    complete : bool
        Whether the tolerance was reached.
    """

    pivots: np.ndarray
    lower: Array
    pieces: list[tuple[np.ndarray, Array]]
    complete: bool


@dataclass(frozen=True)
class Part:
    """Rows whose queries use some coordinates that no other part uses.

    Attributes
    ----------
    rows : ndarray of shape (n',)
        Of the design.
    pairs, coordinates : arrays of int
        Entries of the packed state and of the query that occur.
    basis : UnitRows
        At the pivots, of those entries.
    factor : PivotedCholesky
        Counts within ``rows``.
    """

    rows: np.ndarray
    pairs: Array
    coordinates: Array
    basis: UnitRows
    factor: PivotedCholesky

    @property
    def pivots(self) -> np.ndarray:
        """Rows of the design."""
        pivots: np.ndarray = self.rows[self.factor.pivots]
        return pivots


class Span:
    """Span of the features of some rows.

    Parameters
    ----------
    parts : list of Part
    n_features : int
    tol : float
        Squared relative residual below which a row counts as in the span.
    backend : Backend

    Attributes
    ----------
    rank : int
    pivots : ndarray of shape (rank,)
        Rows of the design whose features are a basis.
    complete : bool
        False if ``max_rank`` stopped the search: the span is then a part of that of the rows.
    """

    def __init__(self, parts: list[Part], n_features: int, tol: float, backend: Backend) -> None:
        self.parts = parts
        self.n_features = n_features
        self.tol = tol
        self.backend = backend
        self.pivots = np.concatenate([np.empty(0, dtype=np.intp)] + [p.pivots for p in parts])
        self.rank = len(self.pivots)
        self.complete = all(part.factor.complete for part in parts)

    @classmethod
    def from_design(
        cls,
        design: Design,
        *,
        tol: float | None = None,
        weights: Array | None = None,
        block: int = 64,
        max_rank: int | None = None,
        verbose: bool = False,
    ) -> Span:
        """Find the span of the rows of a design.

        Parameters
        ----------
        design : Design
        tol : float, optional
            Squared residual, relative to the squared norm of the row, below which a row counts as
            in the span of others. None: :func:`span_tolerance` of the smaller side of the
            design, which does not grow with the number of rows beyond ``p``.
        weights : array of shape (rows,), optional
            Rows of weight zero are left out; positive weights do not change a span.
        block : int
            Pivots taken at a time.
        max_rank : int, optional
            Stop there.
        verbose : bool
            Show progress.
        """
        tol = span_tolerance(min(design.n_rows, design.n_features)) if tol is None else tol
        rows = unit_rows(design)
        if weights is not None:
            rows.query[design.backend.to_numpy(weights).reshape(-1) == 0.0] = 0.0
        parts = factor_parts(
            rows, design.backend, tol=tol, block=block, max_rank=max_rank, verbose=verbose
        )
        return cls(parts, design.n_features, tol, design.backend)

    def residual(self, design: Design) -> np.ndarray:
        """How far the features of each row are outside the span.

        Parameters
        ----------
        design : Design
            On the same backend and with tokens of the same width.

        Returns
        -------
        ndarray of shape (rows,)
            ``1 - ||P phi||^2 / ||phi||^2``, between 0 and 1; 0 for a row without features.
        """
        out = self.backend.empty((design.n_rows, 1))
        for block in design.blocks("coverage"):
            rows = _unit(*_flat(block), self.backend)
            outside = self._outside(rows, self._coordinates(rows))
            block.scatter(outside.reshape(*block.query.shape[:2], 1), out)
        residual: np.ndarray = self.backend.to_numpy(out)[:, 0]
        return residual

    def suggest(self, design: Design, k: int) -> np.ndarray:
        """Rows of a pool that would enlarge the span most.

        The pivoted factorisation goes on into the pool: the row farthest outside the span is
        taken, the others are measured against the enlarged span, and so on.

        Parameters
        ----------
        design : Design
            The pool.
        k : int
            How many rows to choose at most.

        Returns
        -------
        ndarray of shape (k',)
            In order; fewer than ``k`` if then the whole pool is in the span.
        """
        rows = unit_rows(design)
        inside = self._coordinates(rows)
        factor = pivoted_cholesky(
            rows,
            self.backend,
            tol=self.tol,
            block=1,
            max_rank=k,
            start=(inside, self._outside(rows, inside)),
        )
        return factor.pivots

    def _coordinates(self, rows: UnitRows) -> Array:
        """Features in an orthonormal basis of the span, shape (rank, n)."""
        out = self.backend.zeros((self.rank, len(rows.state)))
        first = 0
        for part in self.parts:
            rank = len(part.pivots)
            state = self.backend.take(rows.state, part.pairs)
            query = self.backend.take(rows.query, part.coordinates)
            products = part.basis.kernel(UnitRows(state, query, rows.norm))
            out[first : first + rank] = self.backend.solve_triangular(part.factor.lower, products)
            first += rank
        return out

    def _outside(self, rows: UnitRows, inside: Array) -> Array:
        """Squared relative residual (n,) of rows with the given coordinates."""
        return ((rows.norm > 0.0) * 1.0 - (inside**2).sum(0)).clip(0.0, 1.0)


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
            chosen = backend.index(members)
            state = rows.state[chosen]
            pairs = backend.index(np.flatnonzero(backend.to_numpy(abs(state).sum(0))))
            coordinates = backend.index(coordinates)
            entries = UnitRows(
                backend.take(state, pairs),
                backend.take(rows.query[chosen], coordinates),
                rows.norm[chosen],
            )
            factor = pivoted_cholesky(
                entries, backend, tol=tol, block=block, max_rank=left, keep_rows=keep_rows, bar=bar
            )
            left -= len(factor.pivots)
            basis = entries.take(backend.index(factor.pivots))
            parts.append(Part(members, pairs, coordinates, basis, factor))
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
    n_rows = len(rows.state)
    limit = min(n_rows, rows.state.shape[1] * rows.query.shape[1])
    limit = limit if max_rank is None else min(max_rank, limit)
    if start is None:
        factor, left = backend.empty((min(4 * block, limit), n_rows)), 1.0 * (rows.norm > 0.0)
        n_before = 0
    else:
        factor, left = start
        n_before = len(factor)
    active = np.arange(n_rows)  # which rows are carried along
    rank = n_before
    pivots: list[np.ndarray] = []
    panels: list[Array] = []  # rows of L at the pivots
    pieces: list[tuple[np.ndarray, Array]] = []
    complete = False
    while True:
        residual = backend.to_numpy(left)
        largest = float(residual.max()) if len(residual) else 0.0
        if not largest > tol:
            complete = True
            break
        if rank - n_before == limit:
            complete = max_rank is None or limit < max_rank
            break
        outside = np.flatnonzero(residual > tol)
        if len(outside) <= (1.0 - _FINISHED) * len(active):
            if keep_rows:
                done = np.flatnonzero(residual <= tol)
                pieces.append((active[done], backend.take(factor[:rank], backend.index(done))))
            kept = backend.index(outside)
            factor, left = backend.take(factor[:rank], kept), left[kept]
            rows, active, residual = rows.take(kept), active[outside], residual[outside]
            outside = np.arange(len(outside))
        # Factor the candidates among themselves.
        n_candidates = min(_CANDIDATES * block, len(outside)) if block > 1 else 1
        order = np.argpartition(-residual[outside], n_candidates - 1)[:n_candidates]
        candidates = outside[order]
        at = backend.index(candidates)
        own, above = rows.take(at), backend.take(factor[:rank], at)
        schur = backend.to_numpy(own.kernel(own) - above.mT @ above)
        small, best, n_new = _best_pivots(schur, max(tol, _SMALLEST * largest))
        n_new = min(n_new, block, limit - (rank - n_before))
        if n_new == 0:  # what was subtracted step by step differs by rounding
            left[at] = backend.asarray(schur.diagonal())
            continue
        chosen = backend.index(best[:n_new])
        own, above = own.take(chosen), above[:, chosen]
        # Extend L by the pivots' columns.
        inverse = backend.asarray(lapack.dtrtri(small[:n_new, :n_new], lower=1)[0])
        new = inverse @ (own.kernel(rows) - above.mT @ factor[:rank])
        left = left - (new**2).sum(0)
        left[backend.index(candidates[best[:n_new]])] = 0.0
        if rank + n_new > len(factor):
            larger = backend.empty((max(rank + n_new, 2 * rank), len(active)))
            larger[:rank] = factor[:rank]
            factor = larger
        factor[rank : rank + n_new] = new
        pivots.append(active[candidates[best[:n_new]]])
        panel = backend.zeros((n_new, rank + n_new))
        panel[:, :rank] = above.mT
        panel[:, rank:] = backend.asarray(small[:n_new, :n_new])
        panels.append(panel)
        rank += n_new
        if bar is not None:
            bar.update(n_new)
    if keep_rows:
        pieces.append((active, factor[:rank]))
    lower = backend.zeros((rank, rank))
    at_row = n_before
    for panel in panels:
        lower[at_row : at_row + len(panel), : panel.shape[1]] = panel
        at_row += len(panel)
    found = np.concatenate([np.empty(0, dtype=np.intp), *pivots])
    return PivotedCholesky(found, lower, pieces, complete)


def _best_pivots(schur: np.ndarray, smallest: float) -> tuple[np.ndarray, np.ndarray, int]:
    """Cholesky factor of a small matrix with pivots above ``smallest``, their order and number."""
    if not schur.diagonal().max() > smallest:  # LAPACK takes the first pivot whatever its size
        return schur, np.arange(len(schur)), 0
    small, order, rank, _ = lapack.dpstrf(schur, tol=smallest, lower=1)
    return np.tril(small), order - 1, int(rank)
