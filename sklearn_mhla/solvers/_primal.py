"""Normal equations: accumulate moments block by block, factor the ``p x p`` Gram matrix once.

With ``rows`` rows the moments take ``rows p^2 / 2`` multiply-adds (half a symmetric rank-k
update, see :mod:`sklearn_mhla._moments`), the factorisation ``p^3 / 3``, memory ``5 p^2 / 4``
numbers whatever the number of rows.
"""

from __future__ import annotations

from sklearn_mhla._backend import Array
from sklearn_mhla._moments import Moments
from sklearn_mhla.solvers._base import LeastSquaresProblem, ProblemSize, Solution, Solver, refine
from sklearn_mhla.solvers._factor import factorize


class PrimalSolver(Solver):
    """``(Phi_c^T W Phi_c + alpha I) coef^T = Phi_c^T W y_c``."""

    name = "primal"

    @staticmethod
    def memory(size: ProblemSize) -> int:
        """One ``p x p`` matrix, its packed form, and two coefficient arrays."""
        p = size.n_features
        return 8 * (p * p + p * p // 4 + 2 * p * size.n_outputs)

    def __init__(self, problem: LeastSquaresProblem, moments: Moments | None = None) -> None:
        self.problem = problem
        if moments is None:
            moments = Moments.from_design(problem.design, problem.targets, problem.weights)
        self.moments = moments
        self.mean = moments.mean() if problem.fit_intercept else None
        self.offset = 0.0 if self.mean is None else moments.weight * float((self.mean**2).sum())

    @property
    def trace(self) -> float:
        """Of the system: the sum of its eigenvalues."""
        return float(self.moments.diagonal().sum()) - self.offset

    def solve(self, alpha: float) -> Solution:
        """Minimise; ``alpha = 0`` gives the solution of minimum norm."""
        problem, moments, mean = self.problem, self.moments, self.mean
        factor = factorize(
            lambda: moments.gram_matrix(mean),
            alpha,
            min(problem.size.n_rows, problem.size.n_features),
            self.offset,
            problem.backend,
            moments.diagonal(),
        )

        def correct(residual: Array, coef: Array) -> Array:
            # Residuals have weighted mean zero, so the features need no centring here.
            gradient = problem.design.rmatvec(problem.weighted(residual)) - alpha * coef
            return factor.solve(gradient.mT).mT

        # Targets are centred already: Phi^T W y_c = Phi_c^T W y_c.
        coef = factor.solve(moments.cross.mT).mT
        coef, intercept, n_iter = refine(problem, coef, mean, factor.condition, correct)
        rank = min(factor.rank, problem.largest_rank)
        return Solution(coef, intercept, rank, factor.condition, n_iter)

    def metric(self, alpha: float) -> Array:
        """``Phi_c^T W Phi_c + alpha I``, both triangles."""
        return full_system(self.moments, self.mean, alpha)

    def minimum(self, coef: Array) -> float:
        """Half the penalised residual sum of squares at the minimiser ``coef``."""
        return 0.5 * max(
            0.0, self.problem.target_squares - float((coef * self.moments.cross).sum())
        )

    def intercept(self, coef: Array) -> Array:
        """Best intercept for given coefficients."""
        return self.problem.intercept(coef, self.mean)


def full_system(moments: Moments, mean: Array | None, alpha: float) -> Array:
    """Gram matrix of features minus ``mean``, plus ``alpha I``: both triangles."""
    matrix = moments.backend.tril(moments.gram_matrix(mean))
    diagonal = matrix.diagonal() + alpha
    full = matrix + matrix.mT
    full.reshape(-1)[:: len(full) + 1] = diagonal
    return full
