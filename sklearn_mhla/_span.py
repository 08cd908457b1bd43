r"""The span of training features: which predictions do the data determine?

Those at inputs whose features lie in the span of the training features, whatever the rank of the
whole. :mod:`sklearn_mhla._pivoted_cholesky` gives an orthonormal basis of the span.

Accuracy. ``1 - ||P phi||^2 / ||phi||^2`` is a difference of numbers near one, computed from
rounded inner products: where ``phi`` is near ``Phi_p^T c``, its error is a few ``eps ||c||^2``.
Whether a row is in the span, to :data:`COVERED` of its norm, is read off it only where that error
is small enough. Rows in doubt take a second pass, in which ``phi - Phi_p^T c`` is written out,
corrected and measured: an upper bound on the distance from the span whatever the error of ``c``.
"""

from __future__ import annotations

import numpy as np

from sklearn_mhla._backend import Array, Backend
from sklearn_mhla._design import Design
from sklearn_mhla._pivoted_cholesky import (
    COVERED,
    Part,
    UnitRows,
    factor_parts,
    pivoted_cholesky,
    unit_rows,
)
from sklearn_mhla._rounding import EPS, rank_tolerance

# Rounding of a squared residual is below this times ||c||^2; a half of it has been seen.
_NOISE = 8.0 * EPS
# Rows whose coverage is computed at a time.
_CHUNK_ROWS = 4096


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
            in the span of others. None: :func:`rank_tolerance` of the smaller side of the
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
        tol = rank_tolerance(min(design.n_rows, design.n_features)) if tol is None else tol
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
        per_sequence = design.sequences.lengths if design.output == "sequence" else 1
        group = np.cumsum(np.broadcast_to(per_sequence, len(design.sequences))) // _CHUNK_ROWS
        chunks = (np.flatnonzero(group == number) for number in np.unique(group))
        residuals = [self._residual(unit_rows(design.take(chunk))) for chunk in chunks]
        return np.concatenate([self.backend.to_numpy(residual) for residual in residuals])

    def covers(self, design: Design) -> np.ndarray:
        """Which rows are in the span, to a length of :data:`COVERED` relative to their own.

        Parameters
        ----------
        design : Design

        Returns
        -------
        ndarray of shape (rows,)
            Booleans.
        """
        covered: np.ndarray = self.residual(design) <= COVERED**2
        return covered

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
        inside = self.backend.zeros((self.rank, len(rows.state)))
        first = 0
        for part in self.parts:
            touched, own = part.entries(rows, self.backend)
            last = first + len(part.pivots)
            inside[first:last, touched] = part.factor.basis.coordinates(own)
            first = last
        outside = self.backend.asarray(self.residual(design))
        outside *= outside > COVERED**2
        factor = pivoted_cholesky(
            rows, self.backend, tol=COVERED**2, block=1, max_rank=k, start=(inside, outside)
        )
        return factor.pivots

    def _residual(self, rows: UnitRows) -> Array:
        """Squared relative residual (n,)."""
        noise = 0.0 * rows.norm
        outside = noise + (rows.norm > 0.0)
        for part in self.parts:
            touched, own = part.entries(rows, self.backend)
            coordinates = part.factor.basis.coordinates(own)
            outside[touched] -= (coordinates**2).sum(0)
            noise[touched] += (part.factor.basis.combination(coordinates) ** 2).sum(0)
        close = abs(outside - COVERED**2) <= _NOISE * noise
        doubtful = self.backend.index(np.flatnonzero(self.backend.to_numpy(close)))
        if len(doubtful):
            outside[doubtful] = self._distance(rows.take(doubtful))
        return outside.clip(0.0, 1.0)

    def _distance(self, rows: UnitRows) -> Array:
        """The same from residuals written out."""
        total, unseen = 0.0 * rows.norm, np.ones(rows.query.shape[1])
        for part in self.parts:
            touched, own = part.entries(rows, self.backend)
            basis = part.factor.basis
            total[touched] += basis.distance(own, basis.combination(basis.coordinates(own)))
            other = self.backend.asarray(~np.isin(np.arange(rows.state.shape[1]), part.pairs))
            total[touched] += (rows.state[touched] ** 2 @ other) * (own.query**2).sum(1)
            unseen[part.coordinates] = 0.0
        return total + (rows.query**2) @ self.backend.asarray(unseen)
