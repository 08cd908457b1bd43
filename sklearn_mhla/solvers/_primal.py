"""Normal equations: accumulate moments block by block, factor the ``p x p`` Gram matrix once.

With ``rows`` rows the moments take ``rows p^2 / 2`` multiply-adds (half a symmetric rank-k
update, see :mod:`sklearn_mhla._gram`), the factorisation ``p^3 / 3``, memory ``5 p^2 / 4``
numbers whatever the number of rows.
"""

from __future__ import annotations

import warnings

from scipy.linalg import LinAlgWarning

from sklearn_mhla._backend import Array
from sklearn_mhla._rounding import EPS, rank_tolerance
from sklearn_mhla.solvers._base import (
    LeastSquaresProblem,
    MomentProblem,
    ProblemSize,
    Solution,
    Solver,
    refine,
)
from sklearn_mhla.solvers._factor import factorize
from sklearn_mhla.solvers._orthogonal import hides_directions, solve_by_rows

_TOLERATED = 1e-4  # relative error of coefficients that is worth a warning


class PrimalSolver(Solver):
    """``(Phi_c^T W Phi_c + alpha I) coef^T = Phi_c^T W y_c``."""

    name = "primal"

    @staticmethod
    def memory(size: ProblemSize) -> int:
        """One ``p x p`` matrix, its packed form, and two coefficient arrays."""
        p = size.n_features
        return 8 * (p * p + p * p // 4 + 2 * p * size.n_outputs)

    def __init__(self, problem: LeastSquaresProblem | MomentProblem) -> None:
        self.problem = problem
        self.moments = problem.moments
        self.mean = self.moments.mean() if problem.fit_intercept else None
        self.cross = self.moments.cross_matrix(self.mean)
        weight = self.moments.weight
        self.offset = 0.0 if self.mean is None else weight * float((self.mean**2).sum())

    @property
    def trace(self) -> float:
        """Of the system: the sum of its eigenvalues."""
        return float(self.moments.diagonal().sum()) - self.offset

    def solve(self, alpha: float) -> Solution:
        """Minimise; ``alpha = 0`` gives the solution of minimum norm."""
        problem, moments, mean = self.problem, self.moments, self.mean
        smaller = min(problem.size.n_rows, problem.size.n_features)
        factor = factorize(
            lambda: moments.gram_matrix(mean),
            alpha,
            smaller,
            self.offset,
            problem.backend,
            moments.bounds(),
        )
        # Targets are centred already: Phi^T W y_c = Phi_c^T W y_c.
        coef = factor.solve(self.cross.mT).mT
        rank = min(factor.rank, problem.largest_rank)
        if isinstance(problem, MomentProblem):  # no rows to refine with
            if factor.condition * EPS > _TOLERATED:
                warnings.warn(
                    f"The Gram matrix has a condition number of {factor.condition:.1e}: "
                    "coefficients from moments alone may have relative errors of "
                    f"{factor.condition * EPS:.0e}. Scale the tokens, use alpha > 0, or fit "
                    "all rows at once, which refines the solution.",
                    LinAlgWarning,
                    stacklevel=4,
                )
            intercept = problem.intercept(coef, mean)
            return Solution(coef, intercept, rank, factor.condition, 0)

        def square(vector: Array) -> Array:
            image = problem.design.matvec(vector.mT)
            if mean is not None:
                image -= problem.mean(image)
            return problem.design.rmatvec(problem.weighted(image)).mT

        tolerance, p = rank_tolerance(smaller), problem.size.n_features
        if hides_directions(factor, alpha, tolerance, self.offset, square, p, problem.backend):
            return solve_by_rows(problem, alpha, mean, tolerance, self.offset, moments.bounds())

        def correct(residual: Array, coef: Array) -> Array:
            # Residuals have weighted mean zero, so the features need no centring here.
            gradient = problem.design.rmatvec(problem.weighted(residual)) - alpha * coef
            return factor.solve(gradient.mT).mT

        coef, intercept, n_iter = refine(problem, coef, mean, factor.condition, correct)
        return Solution(coef, intercept, rank, factor.condition, n_iter)

    def metric(self, alpha: float) -> Array:
        """``Phi_c^T W Phi_c + alpha I``, both triangles."""
        matrix = self.problem.backend.tril(self.moments.gram_matrix(self.mean))
        diagonal = matrix.diagonal() + alpha
        full = matrix + matrix.mT
        full.reshape(-1)[:: len(full) + 1] = diagonal
        return full

    def minimum(self, coef: Array) -> float:
        """Half the penalised residual sum of squares at the minimiser ``coef``."""
        return 0.5 * max(0.0, self.problem.target_squares - float((coef * self.cross).sum()))

    def intercept(self, coef: Array) -> Array:
        """Best intercept for given coefficients."""
        return self.problem.intercept(coef, self.mean)
