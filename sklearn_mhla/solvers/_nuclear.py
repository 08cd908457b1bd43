r"""Few heads by a convex penalty: the nuclear norm of the unfolded coefficient tensor.

.. math:: \min_W \tfrac12 \sum_i w_i \| y_i - b - \langle sym(W), S_i \otimes q_i \rangle \|^2
          + \lambda \, \| unfold(W) \|_*

over all tensors ``W`` (m, d, d, d), unfolded to ``(m d) x (d^2)``; the part of ``W`` that is
antisymmetric in its middle axes costs nothing in the data and is free to lower the norm. The rank
of the minimiser is its number of heads. The problem is convex: the result does not depend on a
start, and a duality gap bounds the distance to the optimum.

Solved by the alternating direction method of multipliers (Boyd et al., "Distributed Optimization
and Statistical Learning via ADMM", 2011, sections 3.1-3.4): a ridge problem, solved with one
eigendecomposition for every penalty parameter, and the shrinkage of singular values in turn.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from scipy.linalg import eigh, svd
from sklearn.exceptions import ConvergenceWarning

from sklearn_mhla._heads import Heads, coef_to_tensor, tensor_to_coef, tensor_to_heads
from sklearn_mhla.solvers._base import LeastSquaresProblem, MomentProblem
from sklearn_mhla.solvers._dual import DualSolver
from sklearn_mhla.solvers._primal import PrimalSolver

_OVER_RELAXATION = 1.6
_CHECK_EVERY = 10
_BALANCE_UNTIL = 400  # a penalty parameter that keeps changing need not converge
_TINY = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True)
class NuclearSolution:
    """A minimiser of the penalised problem.

    Attributes
    ----------
    heads : Heads
        In the units of the design (rescaled tokens).
    intercept : ndarray of shape (m,)
    loss : float
        Value of the objective.
    gap : float
        Duality gap over the loss of the zero model: an upper bound on how far the loss is from
        the minimum.
    n_iter : int
    """

    heads: Heads
    intercept: np.ndarray
    loss: float
    gap: float
    n_iter: int


class _Quadratic(ABC):
    """``1/2 ||y||^2 - <cross, c> + 1/2 <c, c G>`` for coefficients ``c`` (m, p)."""

    cross: np.ndarray
    target_squares: float

    @abstractmethod
    def apply(self, coef: np.ndarray) -> np.ndarray:
        """``c G``."""

    @abstractmethod
    def resolve(self, rhs: np.ndarray, rho: float) -> np.ndarray:
        """``rhs (G + rho I)^-1``."""

    @abstractmethod
    def intercept(self, coef: np.ndarray) -> np.ndarray:
        """Best intercept for given coefficients."""


class _MomentQuadratic(_Quadratic):
    """From the moments, with an eigendecomposition of the ``p x p`` Gram matrix."""

    def __init__(self, problem: LeastSquaresProblem | MomentProblem) -> None:
        self._solver = PrimalSolver(problem)
        self._to_numpy, self._asarray = problem.backend.to_numpy, problem.backend.asarray
        self._gram = self._to_numpy(self._solver.metric(0.0))
        self._eigenvalues, self._vectors = eigh(self._gram, check_finite=False)
        self.cross = self._to_numpy(self._solver.cross)
        self.target_squares = problem.target_squares
        self.scale = float(self._eigenvalues.mean())

    def apply(self, coef: np.ndarray) -> np.ndarray:
        image: np.ndarray = coef @ self._gram
        return image

    def resolve(self, rhs: np.ndarray, rho: float) -> np.ndarray:
        shifted = np.maximum(self._eigenvalues, 0.0) + rho
        solution: np.ndarray = ((rhs @ self._vectors) / shifted) @ self._vectors.T
        return solution

    def intercept(self, coef: np.ndarray) -> np.ndarray:
        return self._to_numpy(self._solver.intercept(self._asarray(coef)))


class _KernelQuadratic(_Quadratic):
    """From the rows, with an eigendecomposition of the ``rows x rows`` kernel.

    ``(Phi^T Phi + rho I)^-1 = (I - Phi^T (K + rho I)^-1 Phi) / rho`` needs two products with the
    implicit design matrix.
    """

    def __init__(self, problem: LeastSquaresProblem) -> None:
        self._solver = DualSolver(problem)
        self._to_numpy, self._asarray = problem.backend.to_numpy, problem.backend.asarray
        kernel = np.tril(self._to_numpy(self._solver.kernel()))
        self._eigenvalues, self._vectors = eigh(kernel, check_finite=False, overwrite_a=True)
        rooted = self._solver.root * problem.targets
        self.cross = self._to_numpy(self._solver.coefficients(rooted))
        self.target_squares = problem.target_squares
        self.scale = float(self._eigenvalues.sum()) / problem.design.n_features

    def apply(self, coef: np.ndarray) -> np.ndarray:
        image = self._solver.predictions(self._asarray(coef))
        return self._to_numpy(self._solver.coefficients(image))

    def resolve(self, rhs: np.ndarray, rho: float) -> np.ndarray:
        image = self._to_numpy(self._solver.predictions(self._asarray(rhs)))
        shifted = np.maximum(self._eigenvalues, 0.0) + rho
        inner = self._vectors @ ((self._vectors.T @ image) / shifted[:, None])
        lifted = self._to_numpy(self._solver.coefficients(self._asarray(inner)))
        solution: np.ndarray = (rhs - lifted) / rho
        return solution

    def intercept(self, coef: np.ndarray) -> np.ndarray:
        return self._to_numpy(self._solver.intercept(self._asarray(coef)))


class NuclearSolver:
    """Solve for decreasing penalties, each from the solution before.

    Parameters
    ----------
    problem : LeastSquaresProblem or MomentProblem
        The latter needs ``method="primal"``.
    method : {"primal", "dual"}
        Whether to work on the moments or on the rows.
    """

    def __init__(self, problem: LeastSquaresProblem | MomentProblem, method: str) -> None:
        self._quadratic: _MomentQuadratic | _KernelQuadratic
        if method == "primal":
            self._quadratic = _MomentQuadratic(problem)
        else:
            assert isinstance(problem, LeastSquaresProblem)
            self._quadratic = _KernelQuadratic(problem)
        self._d = problem.size.token_dim
        self._low_rank = np.zeros((len(self._quadratic.cross), self._d, self._d, self._d))
        self._scaled_dual = self._low_rank.copy()
        self._rho = self._quadratic.scale

    def largest_penalty(self) -> float:
        """The least penalty whose solution is zero: the spectral norm of ``sum y S (x) q``."""
        return self._spectral_norm(self._quadratic.cross)

    def solve(self, penalty: float, *, max_iter: int, tol: float) -> NuclearSolution:
        """Minimise.

        Parameters
        ----------
        penalty : float
            ``lambda``, positive.
        max_iter : int
            Iterations of the alternating direction method.
        tol : float
            Duality gap, relative to the loss of the zero model, at which to stop.

        Returns
        -------
        NuclearSolution

        Warns
        -----
        ConvergenceWarning
            If the gap is larger than ``tol`` after ``max_iter`` iterations.
        """
        quadratic = self._quadratic
        low_rank, dual, rho = self._low_rank, self._scaled_dual, self._rho
        loss, gap = self._loss_and_gap(low_rank, penalty)
        n_iter = 0
        while gap > tol and n_iter < max_iter:
            n_iter += 1
            wanted = low_rank - dual
            coef = quadratic.resolve(quadratic.cross + rho * tensor_to_coef(wanted), rho)
            ridge = coef_to_tensor(coef, self._d) + 0.5 * (wanted - wanted.swapaxes(1, 2))
            relaxed = _OVER_RELAXATION * ridge + (1.0 - _OVER_RELAXATION) * low_rank
            previous, low_rank = low_rank, _shrink(relaxed + dual, penalty / rho)
            dual = dual + relaxed - low_rank
            if n_iter % _CHECK_EVERY == 0:
                loss, gap = self._loss_and_gap(low_rank, penalty)
                # Balance the two residuals (Boyd et al., section 3.4.1).
                primal = float(np.linalg.norm(ridge - low_rank))
                change = rho * float(np.linalg.norm(low_rank - previous))
                factor = 2.0 if primal > 4.0 * change else 0.5 if change > 4.0 * primal else 1.0
                if n_iter <= _BALANCE_UNTIL:
                    rho, dual = rho * factor, dual / factor
        loss, gap = self._loss_and_gap(low_rank, penalty)
        if gap > tol:
            warnings.warn(
                f"The nuclear-norm fit stopped after {n_iter} iterations with a relative duality "
                f"gap of {gap:.1e}, above tol={tol:g}. Raise max_iter or tol.",
                ConvergenceWarning,
                stacklevel=4,
            )
        self._low_rank, self._scaled_dual, self._rho = low_rank, dual, rho
        heads = tensor_to_heads(low_rank)
        return NuclearSolution(
            heads, quadratic.intercept(tensor_to_coef(low_rank)), loss, gap, n_iter
        )

    def _loss_and_gap(self, tensor: np.ndarray, penalty: float) -> tuple[float, float]:
        """Objective, and duality gap over the loss of the zero model.

        The dual function at ``theta = s r`` for the residual ``r`` is
        ``s <y, r> - s^2 ||r||^2 / 2``; ``theta`` is feasible while
        ``s || sum r S (x) q || <= lambda`` in the spectral norm of the unfolding.
        """
        quadratic = self._quadratic
        coef = tensor_to_coef(tensor)
        image = quadratic.apply(coef)
        fitted, curved = float((quadratic.cross * coef).sum()), float((image * coef).sum())
        squares = max(quadratic.target_squares - 2.0 * fitted + curved, 0.0)
        norm = float(_singular_values(tensor).sum())
        loss = 0.5 * squares + penalty * norm
        slope = quadratic.target_squares - fitted
        bound = penalty / max(self._spectral_norm(quadratic.cross - image), _TINY)
        step = min(bound, slope / max(squares, _TINY))
        dual = step * slope - 0.5 * step**2 * squares
        zero = 0.5 * quadratic.target_squares
        return loss, max(loss - dual, 0.0) / zero if zero > 0.0 else 0.0

    def _spectral_norm(self, coef: np.ndarray) -> float:
        return float(_singular_values(coef_to_tensor(coef, self._d))[0])


def _singular_values(tensor: np.ndarray) -> np.ndarray:
    n_outputs, d = tensor.shape[:2]
    values: np.ndarray = svd(
        tensor.reshape(n_outputs * d, d * d), compute_uv=False, check_finite=False
    )
    return values


def _shrink(tensor: np.ndarray, threshold: float) -> np.ndarray:
    """Proximal operator of ``threshold`` times the nuclear norm of the unfolding."""
    n_outputs, d = tensor.shape[:2]
    left, singular, right = svd(
        tensor.reshape(n_outputs * d, d * d), full_matrices=False, check_finite=False
    )
    kept = singular > threshold
    shrunk: np.ndarray = (left[:, kept] * (singular[kept] - threshold)) @ right[kept]
    return shrunk.reshape(tensor.shape)
