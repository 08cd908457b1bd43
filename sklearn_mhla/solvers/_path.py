r"""Ridge solutions for many penalties from one eigendecomposition.

With ``A = Q diag(lambda) Q^T`` every :math:`(A + \alpha I)^{-1}` is
``Q diag(1 / (lambda + alpha)) Q^T``: after ``9 n^3`` operations, once, another penalty costs two
products with ``Q``. ``A`` is the centred Gram matrix of the features (primal) or the centred
kernel of the rows (dual).

Moments of a training set are sums of moments of parts of the data, so a path in the primal form
is made from moments alone and looks at no row. They are added, never subtracted: taking a fold
off the total would cancel where a few large rows hold most of the sum. The kernel of a training
set is computed anew, which costs ``rows^2 (P + d) / 2`` operations, little beside those of its
eigendecomposition.
"""

from __future__ import annotations

from dataclasses import dataclass

from sklearn_mhla._backend import Array, Backend
from sklearn_mhla._rounding import rank_tolerance
from sklearn_mhla.solvers._dual import DualSolver
from sklearn_mhla.solvers._head_equations import HeadLoss, MomentEquations, RowEquations
from sklearn_mhla.solvers._primal import PrimalSolver


@dataclass(frozen=True)
class Spectrum:
    """``A = Q diag(lambda) Q^T``.

    Attributes
    ----------
    basis : array of shape (n, n)
    eigenvalues : array of shape (n,)
        Not negative.
    floor : float
        Size of the rounding errors in them.
    """

    basis: Array
    eigenvalues: Array
    floor: float

    @classmethod
    def of(cls, matrix: Array, size: int, offset: float, backend: Backend) -> Spectrum:
        """Decompose.

        Parameters
        ----------
        matrix : array of shape (n, n)
            Lower triangle of a positive semidefinite matrix.
        size : int
            Smaller side of the design.
        offset : float
            Norm of what was subtracted by centring.
        backend : Backend
        """
        eigenvalues, basis = backend.eigh(matrix)
        eigenvalues = eigenvalues * (eigenvalues > 0.0)
        floor = rank_tolerance(size) * (float(eigenvalues[-1]) + offset)
        return cls(basis, eigenvalues, floor)

    def inverse(self, alphas: Array) -> Array:
        """``1 / (lambda + alpha)``, shape (n, n_alphas); zero where that is rounding error.

        Right-hand sides lie in the range of ``A``: leaving out what is not in it gives the
        solution of minimum norm.
        """
        shifted = self.eigenvalues[:, None] + alphas
        kept = 1.0 * (shifted > self.floor)
        return kept / (shifted + (1.0 - kept))

    def solutions(self, rhs: Array, alphas: Array) -> Array:
        """``(A + alpha I)^-1 rhs`` for ``rhs`` of shape (n, m): shape (n, n_alphas, m)."""
        scaled = self.inverse(alphas)[:, :, None] * (self.basis.mT @ rhs)[:, None, :]
        size, n_alphas, n_outputs = scaled.shape
        flat = self.basis @ scaled.reshape(size, n_alphas * n_outputs)
        return flat.reshape(size, n_alphas, n_outputs)


class RidgePath:
    """Solutions of one problem for many penalties.

    Parameters
    ----------
    solver : PrimalSolver or DualSolver
        Of the problem, which in the primal form may consist of moments alone.
    """

    def __init__(self, solver: PrimalSolver | DualSolver) -> None:
        self.solver = solver
        size = solver.problem.size
        if isinstance(solver, PrimalSolver):
            self.rhs = solver.cross.mT
            matrix = solver.moments.gram_matrix(solver.mean)
        else:
            self.rhs = solver.root * solver.problem.targets
            matrix = solver.kernel()
        smaller = min(size.n_rows, size.n_features)
        self.spectrum = Spectrum.of(matrix, smaller, solver.offset, solver.problem.backend)

    def coefficients(self, alphas: Array) -> Array:
        """Solutions of shape (n_alphas, m, p)."""
        solutions = self.spectrum.solutions(self.rhs, alphas)
        if isinstance(self.solver, PrimalSolver):
            return solutions.swapaxes(0, 1).mT
        n_rows, n_alphas, n_outputs = solutions.shape
        coef = self.solver.coefficients(solutions.reshape(n_rows, n_alphas * n_outputs))
        return coef.reshape(n_alphas, n_outputs, coef.shape[1])

    def head_loss(self, coef: Array, alpha: float) -> HeadLoss:
        """The loss of models with few heads, given the solution for ``alpha``."""
        if isinstance(self.solver, DualSolver):
            return RowEquations(self.solver.problem, alpha)
        to_numpy = self.solver.problem.backend.to_numpy
        metric = to_numpy(self.solver.metric(alpha))
        return MomentEquations(metric, to_numpy(coef), self.solver.problem.size.token_dim)
