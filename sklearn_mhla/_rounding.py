"""What counts as rounding: one rule for the rank of everything."""

from __future__ import annotations

import math

import numpy as np

EPS = float(np.finfo(np.float64).eps)


def rank_tolerance(size: int) -> float:
    """Relative level below which a direction counts as absent from the data.

    Rounding leaves a few ``eps`` times the largest eigenvalue where exact arithmetic has
    zeros; factorisations of a matrix of order ``n`` add errors that grow like ``sqrt(n)``. The
    tolerance depends on the smaller side of the design and so does not grow with the number of
    rows beyond ``p``: more rows carry more information, not more noise.
    """
    return EPS * max(64.0, 4.0 * math.sqrt(size))
