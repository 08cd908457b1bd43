"""The contract of the convex solvers, and what they share.

A solver is made from a :class:`LeastSquaresProblem`, factors it once (``__init__``) and answers
``solve(alpha)``. It declares the memory it needs (``memory``), so that a request that cannot
fit is refused before any work is done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from sklearn_mhla._backend import Array, Backend
from sklearn_mhla._design import Design
from sklearn_mhla._rounding import EPS
from sklearn_mhla._sums import Sums

# Refinement stops being worthwhile where a factorisation is already this accurate.
_ACCURATE = 1e-11
_MAX_REFINEMENTS = 10


@dataclass(frozen=True)
class ProblemSize:
    """What the choice of a method depends on.

    Attributes
    ----------
    n_rows, n_features, n_outputs, token_dim : int
        ``rows``, ``p``, ``m`` and ``d``.
    """

    n_rows: int
    n_features: int
    n_outputs: int
    token_dim: int


class Problem(ABC):
    """What rows and moments both know of a regression, and the solvers ask for.

    Attributes
    ----------
    backend : Backend
    fit_intercept : bool
    size : ProblemSize
        Rows, features, outputs and token width.
    moments : Sums
        Of all rows.
    target_mean : array of shape (m,)
        Zero without an intercept.
    target_squares : float
        ``sum_i w_i ||y_i||^2``, of centred targets if an intercept is fitted.
    """

    backend: Backend
    fit_intercept: bool
    target_mean: Array

    @property
    @abstractmethod
    def size(self) -> ProblemSize: ...

    @property
    @abstractmethod
    def moments(self) -> Sums: ...

    @property
    @abstractmethod
    def target_squares(self) -> float: ...

    def intercept(self, coef: Array, mean: Array | None) -> Array:
        """Best intercepts (..., m) for coefficients (..., m, p) and mean features (1, p)."""
        if mean is None:
            return self.target_mean
        return self.target_mean - (coef @ mean.mT)[..., 0]

    @property
    def largest_rank(self) -> int:
        """What the number of rows and of features leaves."""
        rows = self.size.n_rows - (1 if self.fit_intercept else 0)
        return min(rows, self.size.n_features)


class MomentProblem(Problem):
    """Regression of which only the moments are known.

    Parameters
    ----------
    moments : Sums
    fit_intercept : bool

    Raises
    ------
    ValueError
        If there are no rows or no targets.
    """

    def __init__(self, moments: Sums, fit_intercept: bool) -> None:
        if moments.n_rows == 0 or moments.n_outputs == 0:
            missing = "rows" if moments.n_rows == 0 else "targets"
            raise ValueError(f"These moments hold no {missing}; there is nothing to fit.")
        self._moments = moments
        self.backend = moments.backend
        self.fit_intercept = fit_intercept
        self.target_mean = moments.target_mean() * (1.0 if fit_intercept else 0.0)

    @property
    def size(self) -> ProblemSize:
        """Rows, features, outputs and token width."""
        moments = self._moments
        return ProblemSize(moments.n_rows, moments.n_features, moments.n_outputs, moments.token_dim)

    @property
    def moments(self) -> Sums:
        """The moments it was made of."""
        return self._moments

    @property
    def target_squares(self) -> float:
        """``sum_i w_i ||y_i||^2``, of centred targets if an intercept is fitted."""
        return float(self._moments.squares(self.fit_intercept).sum())


class LeastSquaresProblem(Problem):
    r"""Weighted ridge regression on cubic features.

    .. math:: \min_{W, b} \sum_i w_i \| y_i - b - W \phi_i \|^2 + \alpha \| W \|_F^2

    Parameters
    ----------
    design : Design
    targets : array of shape (rows, m)
    weights : array of shape (rows,) or None
        Positive.
    fit_intercept : bool
    target_exponent : int, default=0
        Targets are those of the user divided by ``2 ** target_exponent``.

    Attributes
    ----------
    targets : array of shape (rows, m)
        Minus ``target_mean`` if an intercept is fitted.
    weights : array of shape (rows, 1) or None
    """

    def __init__(
        self,
        design: Design,
        targets: Array,
        weights: Array | None,
        fit_intercept: bool,
        target_exponent: int = 0,
    ) -> None:
        self.design = design
        self.backend: Backend = design.backend
        self.weights = None if weights is None else weights[:, None]
        self.fit_intercept = fit_intercept
        self.target_exponent = target_exponent
        self.target_mean = self.mean(targets) if fit_intercept else targets[0] * 0.0
        self.targets = targets - self.target_mean if fit_intercept else targets

    @property
    def size(self) -> ProblemSize:
        """Rows, features, outputs and token width."""
        design = self.design
        return ProblemSize(
            design.n_rows, design.n_features, self.targets.shape[1], design.token_dim
        )

    @property
    def total_weight(self) -> float:
        """``sum_i w_i``."""
        return float(self.design.n_rows if self.weights is None else self.weights.sum())

    @property
    def target_squares(self) -> float:
        """``sum_i w_i ||y_i||^2``, of centred targets if an intercept is fitted."""
        return float((self.weighted(self.targets) * self.targets).sum())

    @cached_property
    def moments(self) -> Sums:
        """Moments of all rows, summed when first asked for."""
        return Sums.from_design(
            self.design,
            self.targets,
            self.weights,
            target_exponent=self.target_exponent,
            target_shift=self.target_mean,
        )

    def mean(self, values: Array) -> Array:
        """Weighted mean over rows of ``(rows, m)``."""
        if self.weights is None:
            return values.mean(0)
        return (values * self.weights).sum(0) / self.weights.sum()

    def weighted(self, values: Array) -> Array:
        """``w_i`` times row ``i``."""
        return values if self.weights is None else values * self.weights

    def residual(self, coef: Array) -> tuple[Array, Array]:
        """Residuals ``(rows, m)`` with the best intercept for ``coef``, and that intercept."""
        residual = self.targets - self.design.matvec(coef)
        if not self.fit_intercept:
            return residual, self.target_mean
        shift = self.mean(residual)
        residual -= shift
        return residual, shift + self.target_mean


@dataclass(frozen=True)
class Solution:
    """A solved problem.

    Attributes
    ----------
    coef : array of shape (m, p)
        In the basis of the design (rescaled tokens).
    intercept : array of shape (m,)
    rank : int
        Directions of feature space that the data determine; an upper bound where a penalty
        makes the system definite.
    condition : float
        Estimated condition number of the factored matrix.
    n_iter : int
        Steps of iterative refinement taken.
    """

    coef: Array
    intercept: Array
    rank: int
    condition: float
    n_iter: int


class Solver(ABC):
    """A convex solver: factor in ``__init__``, answer in ``solve``."""

    name: ClassVar[str]

    @staticmethod
    @abstractmethod
    def memory(size: ProblemSize) -> int:
        """Bytes needed beyond the data, to leading order."""

    @abstractmethod
    def __init__(self, problem: LeastSquaresProblem) -> None: ...

    @abstractmethod
    def solve(self, alpha: float) -> Solution:
        """Minimise; ``alpha = 0`` gives the solution of minimum norm."""


def refine(
    problem: LeastSquaresProblem,
    coef: Array,
    mean: Array | None,
    condition: float,
    correct: Callable[[Array, Array], Array],
) -> tuple[Array, Array, int]:
    """Iterative refinement with residuals taken from the rows themselves.

    Moments and kernels square the condition number of the features. Correcting with residuals
    that were computed without them (the corrected semi-normal equations; Bjorck, "Numerical
    Methods for Least Squares Problems", section 2.4.6) removes that loss as long as the factored
    matrix has a condition number below ``1 / eps``.

    Parameters
    ----------
    problem : LeastSquaresProblem
    coef : array of shape (m, p)
        First solution.
    mean : array of shape (1, p) or None
        Weighted mean of the features where an intercept is fitted.
    condition : float
        Of the factored matrix; nothing is done where it is harmless.
    correct : callable
        Maps ``(residual, coef)`` to a correction of ``coef``.

    Returns
    -------
    coef : array of shape (m, p)
    intercept : array of shape (m,)
    n_iter : int
    """
    intercept = problem.intercept(coef, mean)
    error = condition * EPS  # relative error of one solve, and of one step of refinement
    if error < _ACCURATE:
        return coef, intercept, 0
    previous = float("inf")
    for n_iter in range(_MAX_REFINEMENTS):
        residual, best_intercept = problem.residual(coef)
        step = correct(residual, coef)
        scale = float((coef**2).sum()) ** 0.5
        size = float((step**2).sum()) ** 0.5
        if not size < 0.5 * previous or scale == 0.0:  # converged as far as it can, or NaN
            return coef, intercept, n_iter
        coef, intercept = coef + step, best_intercept
        if mean is not None:
            intercept = intercept - (step @ mean.mT)[:, 0]
        if size * min(error, 1.0) <= EPS * scale:  # the next step would change nothing
            break
        previous = size
    return coef, intercept, n_iter + 1
