"""A design matrix in units in which every coordinate of the tokens has about the same size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from sklearn_mhla._design import Block, Design
from sklearn_mhla._features import pair_indices
from sklearn_mhla._heads import Heads


class StandardizedDesign(Design):
    """Tokens times powers of two that bring the mean of every ``S_jj`` into [0.5, 2).

    The model class is closed under invertible maps of the tokens, and multiplying by a power of
    two is exact; ranks and distances measured in these units do not depend on those of the user.

    Parameters
    ----------
    design : Design
        Rescaled or not.

    Attributes
    ----------
    units : ndarray of shape (d,)
        What the coordinates of the design's tokens are multiplied by.
    """

    def __init__(self, design: Design) -> None:
        vars(self).update(vars(design))
        left, right = pair_indices(design.token_dim)
        diagonal = design.backend.index(np.flatnonzero(left == right))
        total = design.backend.zeros((design.token_dim,))
        for block in design.blocks():
            total += design.backend.take(block.state, diagonal).mean(0) * (
                len(block.state) / design.n_rows
            )
        self._units = design.backend.inverse_root_power_of_two(total)
        self._pair_units = (
            self._units[design.backend.index(left)] * self._units[design.backend.index(right)]
        )
        self.units = np.asarray(design.backend.to_numpy(self._units))

    def blocks(self, description: str | None = None, isometric: bool = True) -> Iterator[Block]:
        """All rows, block by block; see :meth:`Design.blocks`."""
        for block in super().blocks(description, isometric):
            yield replace(
                block, state=block.state * self._pair_units, query=block.query * self._units
            )

    def from_user(self, heads: Heads) -> Heads:
        """The same function of standardised tokens; leading axes of both parts are free.

        ``V S Q q = (V A^-1) (A S A) (A^-1 Q A^-1) (A q)`` for diagonal ``A``.
        """
        scale = np.ldexp(self.units, -self.exponent)
        return Heads(heads.value / scale, heads.key_query / scale[:, None] / scale)

    def to_user(self, heads: Heads) -> Heads:
        """The same function of the user's tokens: the inverse of :meth:`from_user`."""
        scale = np.ldexp(self.units, -self.exponent)
        return Heads(heads.value * scale, heads.key_query * scale[:, None] * scale)
