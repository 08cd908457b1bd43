r"""Kernel form: a ``rows x rows`` system whose kernel is a product of two small Gram matrices.

.. math:: K_{ij} = \langle S_i, S_j \rangle_F \, \langle q_i, q_j \rangle

costs ``rows^2 (P + d) / 2`` multiply-adds with ``P = d (d + 1) / 2``, not ``rows^2 p``, and
coefficients are read off the dual weights as ``Phi^T u`` without forming a feature.
"""

from __future__ import annotations

from collections.abc import Iterator

from sklearn_mhla._backend import Array
from sklearn_mhla._design import Design
from sklearn_mhla._features import adjoint_block, n_pairs, predict_block
from sklearn_mhla._rounding import rank_tolerance
from sklearn_mhla.solvers._base import LeastSquaresProblem, ProblemSize, Solution, Solver, refine
from sklearn_mhla.solvers._factor import factorize
from sklearn_mhla.solvers._orthogonal import (
    hides_directions,
    pseudo_inverse,
    solve_by_rows,
    triangle_of_rows,
)

_PANEL_ROWS = 512
# Reading coefficients off dual weights loses eps times the condition number of the features,
# which is below 1e-2 for every direction that counts; predictions need it three times.
_CORRECTIONS = 2


class DualSolver(Solver):
    """``(K_c + alpha I) a = W^(1/2) y_c``, then ``coef = Phi_c^T W^(1/2) a``."""

    name = "dual"

    @staticmethod
    def memory(size: ProblemSize) -> int:
        """The kernel, the packed states and queries, and two coefficient arrays."""
        state = size.token_dim * (size.token_dim + 3) // 2
        per_row = size.n_rows + state + 3 * size.n_outputs
        return 8 * (size.n_rows * per_row + 2 * size.n_features * size.n_outputs)

    def __init__(self, problem: LeastSquaresProblem) -> None:
        self.problem = problem
        backend = problem.backend
        state, query = _rows(problem.design)
        if problem.weights is None:
            self.root = backend.zeros((len(state), 1)) + 1.0
        else:
            self.root = problem.weights**0.5
            query *= self.root
        self.state, self.query = state, query
        self.weight = float((self.root**2).sum())
        self.mean = self._adjoint(self.root) / self.weight if problem.fit_intercept else None
        self.offset = 0.0 if self.mean is None else self.weight * float((self.mean**2).sum())
        self.diagonal = (state**2).sum(1) * (query**2).sum(1)

    @property
    def trace(self) -> float:
        """Of the centred kernel: the sum of its eigenvalues."""
        return float(self.diagonal.sum()) - self.offset

    def solve(self, alpha: float) -> Solution:
        """Minimise; ``alpha = 0`` gives the solution of minimum norm."""
        problem, mean = self.problem, self.mean
        smaller = min(problem.size.n_rows, problem.size.n_features)
        factor = factorize(
            self.kernel,
            alpha,
            smaller,
            self.offset,
            problem.backend,
            self.diagonal,
        )
        tolerance, rows, backend = rank_tolerance(smaller), len(self.root), problem.backend
        if hides_directions(factor, alpha, tolerance, self.offset, self._square, rows, backend):
            if problem.size.n_features <= rows:
                return solve_by_rows(problem, alpha, mean, tolerance, self.offset, None)
            triangle = triangle_of_rows(self._centred_columns(), rows, backend)
            inverse = pseudo_inverse(
                triangle, alpha, tolerance, self.offset, backend, self.diagonal
            )
            missing = targets = self.root * problem.targets
            dual, coef = 0.0, 0.0
            for _ in range(_CORRECTIONS + 1):
                step = inverse.solve_square(missing)
                dual, coef = dual + step, coef + self.coefficients(step)
                missing = targets - self.predictions(coef) - alpha * dual
            intercept = problem.intercept(coef, mean)
            return Solution(coef, intercept, inverse.rank, inverse.condition, _CORRECTIONS)
        dual = factor.solve(self.root * problem.targets)
        coef = self.coefficients(dual)

        def correct(residual: Array, _: Array) -> Array:
            nonlocal dual
            if alpha == 0.0 and factor.rank < len(self.root):
                # Least squares: the residual is orthogonal to the range of K only once the
                # solution is right. One factor K projects what is left of it exactly.
                image = self.predictions(self.coefficients(self.root * residual))
                step = factor.solve(factor.solve(image))
            else:
                step = factor.solve(self.root * residual - alpha * dual)
            dual = dual + step
            return self.coefficients(step)

        coef, intercept, n_iter = refine(problem, coef, mean, factor.condition, correct)
        # The weighted ones were given an eigenvalue; they are no direction of the features.
        rank = factor.rank - (1 if mean is not None and factor.rank else 0)
        rank = min(rank, problem.largest_rank)
        return Solution(coef, intercept, rank, factor.condition, n_iter)

    def _square(self, vector: Array) -> Array:
        """``K_c v`` from the rows, (rows, 1) to (rows, 1)."""
        return self.predictions(self.coefficients(vector))

    def _centred_columns(self) -> Iterator[Array]:
        """Rows of ``Phi_c^T W^(1/2)``, some features at a time."""
        token_dim = self.query.shape[1]
        step = max(1, len(self.root) // token_dim)
        for start in range(0, self.state.shape[1], step):
            features = self.state[:, start : start + step, None] * self.query[:, None, :]
            columns = features.reshape(len(features), -1)
            if self.mean is not None:
                at = start * token_dim
                columns = columns - self.root * self.mean[:, at : at + columns.shape[1]]
            yield columns.mT

    def kernel(self) -> Array:
        """Lower triangle of the weighted kernel, centred where an intercept is fitted.

        With ``r = sqrt(w)``, ``mu`` the mean feature and ``kappa = Phi mu`` the centred kernel
        is ``r_i r_j (K_ij - kappa_i - kappa_j + |mu|^2) = r_i r_j K_ij - v_i r_j - r_i v_j`` with
        ``v = r kappa - r |mu|^2 / 2``. Then ``r`` is a null vector; targets and residuals are
        orthogonal to it, so giving it the eigenvalue ``level W`` changes no solution and keeps
        Cholesky usable.
        """
        state, query, root = self.state, self.query, self.root
        kernel = self.problem.backend.empty((len(state), len(state)))
        for rows, upto in _panels(len(state)):
            panel = kernel[rows, upto]
            self.problem.backend.matmul(state[rows], state[upto].mT, out=panel)
            panel *= query[rows] @ query[upto].mT
        if self.mean is not None:
            level = float(kernel.diagonal().mean()) / self.weight
            read = predict_block(state, query[:, None, :], self.mean)[:, 0]
            shift = read - root * (0.5 * (float((self.mean**2).sum()) + level))
            for rows, upto in _panels(len(state)):
                panel = kernel[rows, upto]
                panel -= shift[rows] * root[upto].mT
                panel -= root[rows] * shift[upto].mT
        return kernel

    def predictions(self, coef: Array) -> Array:
        """``W^(1/2) Phi_c coef^T``, shape (rows, m)."""
        predicted = predict_block(self.state, self.query[:, None, :], coef)[:, 0]
        return predicted if self.mean is None else predicted - self.root * (coef @ self.mean.mT).mT

    def intercept(self, coef: Array) -> Array:
        """Best intercept for given coefficients."""
        return self.problem.intercept(coef, self.mean)

    def coefficients(self, dual: Array) -> Array:
        """``Phi_c^T W^(1/2) a``, shape (m, p)."""
        if self.mean is not None:
            dual = dual - self.root * ((self.root * dual).sum(0) / self.weight)
        return self._adjoint(dual)

    def _adjoint(self, dual: Array) -> Array:
        """``dual.T @ Phi`` of the weighted, uncentred rows."""
        total = 0.0
        for start in range(0, len(dual), 8 * _PANEL_ROWS):
            rows = slice(start, start + 8 * _PANEL_ROWS)
            total = total + adjoint_block(
                self.state[rows], self.query[rows, None, :], dual[rows, None, :]
            )
        return total


def _panels(n_rows: int) -> Iterator[tuple[slice, slice]]:
    """Row panels of the lower triangle: rows, and the columns up to the diagonal block."""
    for start in range(0, n_rows, _PANEL_ROWS):
        stop = min(start + _PANEL_ROWS, n_rows)
        yield slice(start, stop), slice(0, stop)


def _rows(design: Design) -> tuple[Array, Array]:
    """Packed states and queries of every row of the design."""
    backend = design.backend
    state = backend.empty((design.n_rows, n_pairs(design.token_dim)))
    query = backend.empty((design.n_rows, design.token_dim))
    for block in design.blocks("states"):
        n_states, n_queries = block.query.shape[:2]
        shared = block.state[:, None] + backend.zeros((1, n_queries, 1))
        block.scatter(shared.reshape(n_states, n_queries, -1), state)
        block.scatter(block.query, query)
    return state, query
