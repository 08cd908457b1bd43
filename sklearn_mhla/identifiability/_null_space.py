"""Coverage from the null space: which inputs have features orthogonal to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.linalg import qr

from sklearn_mhla._backend import Array
from sklearn_mhla._design import Block, Design
from sklearn_mhla._features import predict_block
from sklearn_mhla._pivoted_cholesky import COVERED


@dataclass(frozen=True)
class NullSpace:
    """The directions of feature space that the data do not determine.

    The counterpart of :class:`~sklearn_mhla._span.Span` for moments, which no longer know the
    rows. A row costs ``p`` times the nullity.

    Attributes
    ----------
    basis : ndarray of shape (nullity, p)
        Orthonormal, isometric features of equilibrated tokens.
    """

    basis: np.ndarray

    def residual(self, design: Design) -> np.ndarray:
        """``1 - ||P phi||^2 / ||phi||^2`` of every row, ``P`` the projection on the span.

        Returns
        -------
        ndarray of shape (rows,)
            Between 0 and 1; 0 for a row without features.
        """
        out = design.backend.zeros((design.n_rows, 1))
        if len(self.basis):
            for block, outside in self._outside(design):
                block.scatter((outside**2).sum(2)[:, :, None].clip(0.0, 1.0), out)
        residual: np.ndarray = design.backend.to_numpy(out)[:, 0]
        return residual

    def covers(self, design: Design) -> np.ndarray:
        """Which rows are in the span, to a length of ``COVERED`` relative to their own.

        Returns
        -------
        ndarray of shape (rows,)
            Booleans.
        """
        covered: np.ndarray = self.residual(design) <= COVERED**2
        return covered

    def suggest(self, design: Design, k: int) -> np.ndarray:
        """At most ``k`` rows of a pool that enlarge the span most, in order.

        QR with column pivoting takes the row farthest from the span of those before, measured
        relative to its own length.
        """
        if not len(self.basis):
            return np.empty(0, dtype=np.intp)
        out = design.backend.zeros((design.n_rows, len(self.basis)))
        for block, outside in self._outside(design):
            block.scatter(outside, out)
        upper, order = qr(design.backend.to_numpy(out).T, mode="r", pivoting=True)
        n_new = int((upper.diagonal() ** 2 > COVERED**2).sum())
        chosen: np.ndarray = order[: min(k, n_new)]
        return chosen

    def _outside(self, design: Design) -> Iterator[tuple[Block, Array]]:
        """Blocks and the components of their unit features in the null space, (K, R, nullity)."""
        basis = design.backend.asarray(self.basis)
        for block in design.blocks("coverage"):
            read = predict_block(block.state, block.query, basis)
            norm = ((block.state**2).sum(1)[:, None] * (block.query**2).sum(2)) ** 0.5
            yield block, read / (norm + 1.0 * (norm == 0.0))[:, :, None]
