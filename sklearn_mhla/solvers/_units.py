"""The powers of two by which tokens and targets are divided before solving.

Multiplying by a power of two is exact, so solutions do not depend on the units of the data, and
nothing that float64 can represent at the end overflows on the way.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np

from sklearn_mhla._heads import Heads


@dataclass(frozen=True)
class Units:
    """Tokens were divided by ``2 ** tokens`` and targets by ``2 ** targets``.

    Features are then smaller by ``2 ** (3 tokens)``.
    """

    tokens: int
    targets: int

    def alpha(self, alpha: float) -> float:
        """Penalty for the rescaled problem that means the same."""
        try:
            return math.ldexp(float(alpha), -6 * self.tokens)
        except OverflowError:  # tokens so small that any penalty leaves only the intercept
            return math.sqrt(sys.float_info.max)

    def nuclear_alpha(self, alpha: float) -> float:
        """Nuclear-norm penalty, which is of degree one in coefficients and targets."""
        try:
            return math.ldexp(float(alpha), -3 * self.tokens - self.targets)
        except OverflowError:
            return math.sqrt(sys.float_info.max)

    def coef(self, coef: np.ndarray) -> np.ndarray:
        """Coefficients in the user's units.

        Raises
        ------
        ValueError
            If float64 cannot hold them.
        """
        with np.errstate(over="ignore"):
            scaled: np.ndarray = np.ldexp(coef, self.targets - 3 * self.tokens)
        if not np.isfinite(scaled).all():
            raise ValueError(
                "The coefficients, of the size of y divided by the cube of X, overflow float64. "
                "Rescale X or y."
            )
        return scaled

    def rescaled_coef(self, coef: np.ndarray) -> np.ndarray:
        """Coefficients of the rescaled problem: the inverse of :meth:`coef`."""
        rescaled: np.ndarray = np.ldexp(coef, 3 * self.tokens - self.targets)
        return rescaled

    def heads(self, heads: Heads) -> Heads:
        """Heads in the user's units."""
        return Heads(
            np.ldexp(heads.value, self.targets - self.tokens),
            np.ldexp(heads.key_query, -2 * self.tokens),
        )

    def rescaled_heads(self, heads: Heads) -> Heads:
        """Heads of the rescaled problem: the inverse of :meth:`heads`."""
        return Heads(
            np.ldexp(heads.value, self.tokens - self.targets),
            np.ldexp(heads.key_query, 2 * self.tokens),
        )

    def intercept(self, intercept: np.ndarray) -> np.ndarray:
        """Intercept in the user's units."""
        scaled: np.ndarray = np.ldexp(intercept, self.targets)
        return scaled

    def loss(self, loss: float) -> float:
        """Sum of squares in the user's units."""
        return float(np.ldexp(loss, 2 * self.targets))
