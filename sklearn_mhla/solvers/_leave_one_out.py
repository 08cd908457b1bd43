r"""Leave-one-out errors for many penalties from one eigendecomposition.

Let ``H`` be the hat matrix of the weighted problem, ``fitted = H y`` with rows multiplied by
``sqrt(w_i)``. A fit without the rows of a set ``F`` has on them the errors

.. math:: (I - H_{FF})^{-1} (y - H y)_F

(the shortcut formula for linear smoothers; for single rows: Hastie, Tibshirani and Friedman, "The
Elements of Statistical Learning", section 7.10). An intercept is one more column, which the
penalty spares: :math:`H = u u^T + H_c` with ``u = sqrt(w / sum w)`` and ``H_c`` that of
the centred features. What is left out is one sequence: a row, or all rows of its tokens.

* **Primal**, ``Phi_c^T W Phi_c = Q diag(lambda) Q^T``: with ``t = Q^T (phi - mean)``,
  :math:`H_{c,ij} = \sqrt{w_i w_j} \sum_k t_{ik} t_{jk} / (\lambda_k + \alpha)`. The rotation costs
  ``rows p^2`` multiply-adds, twice the moments, whatever the number of penalties.
* **Dual**, ``K_c = Q diag(lambda) Q^T``: :math:`I - H = \alpha (K_c + \alpha I)^{-1} - u u^T`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sklearn_mhla._backend import Array
from sklearn_mhla._design import Design
from sklearn_mhla._features import cubic_features
from sklearn_mhla.solvers._base import LeastSquaresProblem
from sklearn_mhla.solvers._dual import DualSolver
from sklearn_mhla.solvers._path import RidgePath
from sklearn_mhla.solvers._primal import PrimalSolver

_ROWS = 1024

Errors = tuple[np.ndarray, Array]


def leave_one_out(
    problem: LeastSquaresProblem, solver: PrimalSolver | DualSolver, alphas: Array
) -> Iterator[Errors]:
    """Targets minus the predictions of fits without the sequence that they belong to.

    Parameters
    ----------
    problem : LeastSquaresProblem
        With at least two sequences.
    solver : PrimalSolver or DualSolver
        Of that problem.
    alphas : array of shape (n_alphas,)
        Positive.

    Yields
    ------
    rows : ndarray of shape (k,)
        Rows of the problem.
    errors : array of shape (k, n_alphas, m)
    """
    design = problem.design
    by_row = design.n_rows == len(design.sequences)
    hat: _PrimalHat | _DualHat
    if isinstance(solver, PrimalSolver):
        hat = _PrimalHat(problem, solver, alphas)
    else:
        hat = _DualHat(problem, solver, alphas)
    for chosen in _chunks(design):
        rows = design.rows_of(chosen)
        yield rows, hat.row_errors(chosen, rows) if by_row else hat.sequence_errors(chosen, rows)


class _PrimalHat:
    def __init__(self, problem: LeastSquaresProblem, solver: PrimalSolver, alphas: Array) -> None:
        self.problem, self.alphas = problem, alphas
        path = RidgePath(solver)
        self.mean, self.basis = solver.mean, path.spectrum.basis
        self.inverse = path.spectrum.inverse(alphas)
        projected = self.basis.mT @ path.rhs
        solution = self.inverse[:, :, None] * projected[:, None, :]
        self.solution = solution.reshape(len(solution), -1)

    def row_errors(self, chosen: np.ndarray, rows: np.ndarray) -> Array:
        rotated = self._rotated(chosen)
        weights, share = _weights(self.problem, rows)
        errors = self._fit_errors(rotated, rows)
        squares = rotated * rotated
        kernel = weights * squares.sum(1)[:, None]
        rest = share - weights * (squares @ self.inverse)
        return errors / _at_least(rest, share, kernel, self.alphas)[:, :, None]

    def sequence_errors(self, chosen: np.ndarray, rows: np.ndarray) -> Array:
        rotated = self._rotated(chosen)
        errors = self._fit_errors(rotated, rows)
        weights, share = _weights(self.problem, rows)
        parts = (rotated * weights**0.5).reshape(len(chosen), -1, rotated.shape[1])
        length = parts.shape[1]
        identity = self.problem.backend.asarray(np.eye(length))
        constant = (1.0 - share).reshape(len(chosen), length, 1)
        out = self.problem.backend.empty(errors.shape)
        for k in range(len(self.alphas)):
            rest = identity - (parts * self.inverse[:, k]) @ parts.mT - constant
            right = errors[:, k].reshape(len(chosen), length, -1)
            # One weight for the whole sequence: its root cancels.
            out[:, k] = self.problem.backend.solve(rest, right).reshape(len(rows), -1)
        return out

    def _fit_errors(self, rotated: Array, rows: np.ndarray) -> Array:
        """Targets minus fitted values, shape (k, n_alphas, m)."""
        fitted = (rotated @ self.solution).reshape(len(rows), len(self.alphas), -1)
        return self.problem.targets[rows][:, None, :] - fitted

    def _rotated(self, chosen: np.ndarray) -> Array:
        """``Q^T (phi - mean)`` of all rows of the chosen sequences, in their order."""
        design = self.problem.design.take(chosen, verbose=False)
        features = self.problem.backend.empty((design.n_rows, design.n_features))
        for block in design.blocks():
            block.scatter(cubic_features(block.state, block.query), features)
        if self.mean is not None:
            features -= self.mean
        return features @ self.basis


class _DualHat:
    def __init__(self, problem: LeastSquaresProblem, solver: DualSolver, alphas: Array) -> None:
        self.problem, self.alphas, self.root = problem, alphas, solver.root
        path = RidgePath(solver)
        self.basis, values = path.spectrum.basis, path.spectrum.eigenvalues
        # Here directions outside the range of K_c count: rounding errors in their eigenvalues
        # must not, even beside a tiny alpha.
        self.values = values * (values > path.spectrum.floor)
        self.inverse = 1.0 / (self.values[:, None] + alphas)
        projected = self.basis.mT @ path.rhs
        self.solution = self.inverse[:, :, None] * projected[:, None, :]
        self.solution = self.solution.reshape(len(values), -1)
        # The kernel gives u an eigenvalue; this is what it contributes.
        self.of_ones = self.problem.backend.zeros((len(alphas),))
        self.value_of_ones = 0.0
        if self.problem.fit_intercept:
            overlap = (self.root.mT @ self.basis)[0] ** 2 / solver.weight
            self.of_ones = overlap @ self.inverse
            self.value_of_ones = overlap @ self.values

    def row_errors(self, chosen: np.ndarray, rows: np.ndarray) -> Array:
        basis = self.basis[rows]
        _, share = _weights(self.problem, rows)
        squares = basis * basis
        rest = self.alphas * (squares @ self.inverse - (1.0 - share) * self.of_ones)
        kernel = squares @ self.values[:, None] - (1.0 - share) * self.value_of_ones
        errors = self.alphas[:, None] * self._duals(basis, rows)
        return errors / _at_least(rest, share, kernel, self.alphas)[:, :, None]

    def sequence_errors(self, chosen: np.ndarray, rows: np.ndarray) -> Array:
        basis = self.basis[rows]
        duals = self._duals(basis, rows)
        parts = basis.reshape(len(chosen), -1, basis.shape[1])
        length = parts.shape[1]
        _, share = _weights(self.problem, rows)
        constant = (1.0 - share).reshape(len(chosen), length, 1)
        out = self.problem.backend.empty(duals.shape)
        for k in range(len(self.alphas)):
            matrix = (parts * self.inverse[:, k]) @ parts.mT - constant * self.of_ones[k]
            right = duals[:, k].reshape(len(chosen), length, -1)
            out[:, k] = self.problem.backend.solve(matrix, right).reshape(len(rows), -1)
        return out

    def _duals(self, basis: Array, rows: np.ndarray) -> Array:
        """``(K_c + alpha I)^-1 y`` divided by ``sqrt(w)``, shape (k, n_alphas, m)."""
        duals = (basis @ self.solution).reshape(len(rows), len(self.alphas), -1)
        return duals / self.root[rows][:, :, None]


def _weights(problem: LeastSquaresProblem, rows: np.ndarray) -> tuple[Array, Array]:
    """Weights (k, 1), and ``1 - u_i^2``: one minus the leverage that an intercept gives."""
    if problem.weights is None:
        weights = problem.backend.zeros((len(rows), 1)) + 1.0
    else:
        weights = problem.weights[rows]
    leverage = weights / problem.total_weight if problem.fit_intercept else 0.0 * weights
    return weights, 1.0 - leverage


def _at_least(rest: Array, share: Array, kernel: Array, alphas: Array) -> Array:
    """``1 - H_ii``, kept from falling below its lower bound by rounding.

    With ``c_k >= 0`` the squares of row ``i`` in the eigenbasis, ``sum c_k = s = 1 - u_i^2`` and
    ``sum c_k lambda_k = K_c,ii``, Jensen's inequality gives
    ``sum c_k alpha / (lambda_k + alpha) >= alpha s^2 / (alpha s + K_c,ii)``.
    """
    bound = alphas * share**2 / (alphas * share + kernel)
    return rest * (rest >= bound) + bound * (rest < bound)


def _chunks(design: Design) -> Iterator[np.ndarray]:
    """Sequences of equal length, as many as have about ``_ROWS`` rows."""
    lengths = design.sequences.lengths
    if design.output == "last":
        lengths = np.ones_like(lengths)
    order = np.argsort(lengths, kind="stable")
    for length, first, count in zip(
        *np.unique(lengths[order], return_index=True, return_counts=True), strict=True
    ):
        step = max(1, _ROWS // int(length))
        for start in range(first, first + count, step):
            yield order[start : min(start + step, first + count)]
