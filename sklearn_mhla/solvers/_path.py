r"""Ridge solutions for many penalties from one eigendecomposition.

With ``A = Q diag(lambda) Q^T`` every :math:`(A + \alpha I)^{-1}` is
``Q diag(1 / (lambda + alpha)) Q^T``: after ``9 n^3`` operations, once, another penalty costs two
products with ``Q``. ``A`` is the centred Gram matrix of the features (:class:`PrimalPath`) or the
centred kernel of the rows (:class:`DualPath`).

Moments of a training set are sums of moments of parts of the data, so a path in the primal form
is made from moments alone and looks at no row. They are added, never subtracted: taking a fold
off the total would cancel where a few large rows hold most of the sum. The kernel of a training
set is computed anew, which costs ``rows^2 (P + d) / 2`` operations, little beside those of its
eigendecomposition.
"""

from __future__ import annotations

from dataclasses import dataclass

from sklearn_mhla._backend import Array, Backend
from sklearn_mhla._moments import Moments
from sklearn_mhla.solvers._dual import DualSolver
from sklearn_mhla.solvers._factor import rank_tolerance
from sklearn_mhla.solvers._head_equations import HeadLoss, MomentEquations, RowEquations
from sklearn_mhla.solvers._primal import full_system


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


class PrimalPath:
    """Solutions from moments.

    Parameters
    ----------
    moments : Moments
    target_mean : array of shape (m,) or None
        Weighted mean of the targets that the moments were computed from, where an intercept is
        fitted.
    n_rows : int
        Rows behind the moments.
    """

    def __init__(self, moments: Moments, target_mean: Array | None, n_rows: int) -> None:
        self.moments = moments
        self.target_mean = target_mean
        self.mean = None if target_mean is None else moments.mean()
        self.rhs = moments.cross.mT
        offset = 0.0
        if self.mean is not None and target_mean is not None:
            self.rhs = self.rhs - moments.feature_sum[:, None] * target_mean
            offset = moments.weight * float((self.mean**2).sum())
        matrix = moments.gram_matrix(self.mean)
        self.spectrum = Spectrum.of(matrix, min(n_rows, len(matrix)), offset, moments.backend)

    def coefficients(self, alphas: Array) -> Array:
        """Solutions of shape (n_alphas, m, p)."""
        return self.spectrum.solutions(self.rhs, alphas).swapaxes(0, 1).mT

    def intercept(self, coef: Array) -> Array:
        """Best intercepts (..., m) for coefficients (..., m, p), relative to the targets."""
        if self.mean is None or self.target_mean is None:
            return 0.0 * coef[..., 0]
        return self.target_mean - (coef @ self.mean.mT)[..., 0]

    def head_loss(self, coef: Array, alpha: float) -> HeadLoss:
        """The loss of models with few heads, given the solution for ``alpha``."""
        to_numpy = self.moments.backend.to_numpy
        metric = full_system(self.moments, self.mean, alpha)
        return MomentEquations(to_numpy(metric), to_numpy(coef), self.moments.token_dim)


class DualPath:
    """Solutions from the kernel of the rows.

    Parameters
    ----------
    solver : DualSolver
    """

    def __init__(self, solver: DualSolver) -> None:
        self.solver = solver
        self.problem = solver.problem
        self.rhs = solver.root * self.problem.targets
        size = min(self.problem.size.n_rows, self.problem.size.n_features)
        self.spectrum = Spectrum.of(solver.kernel(), size, solver.offset, self.problem.backend)

    def coefficients(self, alphas: Array) -> Array:
        """Solutions of shape (n_alphas, m, p)."""
        dual = self.spectrum.solutions(self.rhs, alphas)
        n_rows, n_alphas, n_outputs = dual.shape
        coef = self.solver.coefficients(dual.reshape(n_rows, n_alphas * n_outputs))
        return coef.reshape(n_alphas, n_outputs, coef.shape[1])

    def intercept(self, coef: Array) -> Array:
        """Best intercepts (..., m) for coefficients (..., m, p)."""
        if self.solver.mean is None:
            return self.problem.target_mean + 0.0 * coef[..., 0]
        return self.problem.target_mean - (coef @ self.solver.mean.mT)[..., 0]

    def head_loss(self, coef: Array, alpha: float) -> HeadLoss:
        """The loss of models with few heads; ``coef`` is not needed."""
        return RowEquations(self.problem, alpha)
