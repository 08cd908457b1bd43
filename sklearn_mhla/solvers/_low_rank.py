r"""Models with a fixed number of heads: Levenberg-Marquardt on the heads themselves.

The loss restricted to ``H`` heads is not convex, but it has about ``H (m d + d^2)`` unknowns where
the unrestricted problem has ``m p``: with fewer rows than ``p`` only the former is determined.
Two things make it easy in practice: a start from the unrestricted solution (of minimum norm
where rows are scarce), whose leading singular vectors are already close, and steps that use
the full Gauss-Newton matrix, which converge quadratically when the data are fitted exactly.

The Gauss-Newton matrix is singular along the symmetries of the heads (mixing by an invertible
``H x H`` matrix, antisymmetric parts that the state does not see). Damping that vanishes with the
residual keeps the steps well defined and the convergence fast (Nocedal and Wright, "Numerical
Optimization", section 10.3; damping update of Madsen, Nielsen and Tingleff, "Methods for
Non-Linear Least Squares Problems", section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import LinAlgError, cho_factor, cho_solve, eigh

from sklearn_mhla._heads import Heads
from sklearn_mhla.solvers._head_equations import HeadLoss, NormalEquations

_EPS = float(np.finfo(np.float64).eps)
_MAX_REJECTIONS = 12


@dataclass(frozen=True)
class HeadFit:
    """Result of a minimisation over heads.

    Attributes
    ----------
    heads : Heads
    loss : float
        Final value.
    gradient_norm : float
        Relative to the Jacobian and the targets, between 0 and 1.
    n_iter : int
    converged : bool
    """

    heads: Heads
    loss: float
    gradient_norm: float
    n_iter: int
    converged: bool


def levenberg_marquardt(
    loss: HeadLoss, start: Heads, *, scale: float, max_iter: int = 100, tol: float = 1e-8
) -> HeadFit:
    """Minimise a head loss from one start.

    Parameters
    ----------
    loss : HeadLoss
    start : Heads
    scale : float
        Loss of the zero model; a fit counts as exact below ``16 eps^2`` times this.
    max_iter : int
    tol : float
        Converged when a step promises and brings a decrease of less than ``tol`` times the loss.

    Returns
    -------
    HeadFit
    """
    heads = start
    equations = loss.equations(heads)
    damping = 1e-3 * equations.largest()
    growth = 2.0
    converged = equations.loss <= 16.0 * _EPS**2 * scale
    n_iter = 0
    while not converged and n_iter < max_iter:
        n_iter += 1
        for _ in range(_MAX_REJECTIONS):
            candidate, promised = _damped_step(equations, heads, damping)
            actual = equations.loss - loss.loss(candidate)
            gain = actual / promised if promised > 0.0 else -1.0
            if gain > 0.0 or promised <= tol * equations.loss:
                break
            damping, growth = damping * growth, growth * 2.0
        else:
            break  # no decrease can be resolved in floating point
        converged = promised <= tol * equations.loss and actual <= tol * equations.loss
        if gain > 0.0:
            heads = candidate
            equations = loss.equations(heads)
            damping *= 0.1 if gain > 0.9 else max(1.0 / 3.0, 1.0 - (2.0 * gain - 1.0) ** 3)
            damping = max(damping, _EPS * equations.largest())
            growth = 2.0
            converged = converged or equations.loss <= 16.0 * _EPS**2 * scale
    return HeadFit(heads, equations.loss, equations.relative_gradient(scale), n_iter, converged)


def alternating_least_squares(
    loss: HeadLoss, start: Heads, *, scale: float, max_iter: int = 100, tol: float = 1e-8
) -> HeadFit:
    """Minimise over the values and over the key-query matrices in turn.

    Each half step is a linear least-squares problem solved exactly, so the loss never rises;
    convergence is linear. Parameters and result are those of :func:`levenberg_marquardt`.
    """
    heads = start
    equations = loss.equations(heads)
    converged = False
    n_iter = 0
    while not converged and n_iter < max_iter:
        n_iter += 1
        before = equations.loss
        heads = best_values(loss, heads, equations)
        equations = loss.equations(heads)
        step = -_pseudo_solve(equations.query_matrix, equations.query_gradient[:, None])[:, 0]
        heads = Heads(heads.value, heads.key_query + step.reshape(heads.key_query.shape))
        equations = loss.equations(heads)
        exact = equations.loss <= 16.0 * _EPS**2 * scale
        converged = exact or before - equations.loss <= tol * before
    return HeadFit(heads, equations.loss, equations.relative_gradient(scale), n_iter, converged)


def best_values(loss: HeadLoss, heads: Heads, equations: NormalEquations | None = None) -> Heads:
    """Replace the value matrices by the best ones for the given key-query matrices."""
    equations = loss.equations(heads) if equations is None else equations
    step = -_pseudo_solve(equations.value_matrix, equations.value_gradient.T).T
    return Heads(heads.value + _as_value(step, heads), heads.key_query)


def _damped_step(equations: NormalEquations, heads: Heads, damping: float) -> tuple[Heads, float]:
    """Heads after a Levenberg-Marquardt step, and the decrease that the model promises.

    The ``V`` block is the same small matrix for every output, so it is eliminated first; what is
    factored is the Schur complement of the ``Q`` block.
    """
    inner = cho_factor(equations.value_matrix + damping * np.eye(len(equations.value_matrix)))
    schur = equations.query_matrix + damping * np.eye(len(equations.query_matrix))
    rhs = -equations.query_gradient
    eliminated = []
    for mixed, gradient in zip(equations.mixed, equations.value_gradient, strict=True):
        solved = cho_solve(inner, mixed, check_finite=False)
        schur -= mixed.T @ solved
        rhs = rhs + solved.T @ gradient
        eliminated.append(solved)
    # Rounding may leave the complement slightly indefinite along the symmetries.
    query_step = cho_solve(_shifted_cholesky(schur, damping), rhs, check_finite=False)
    value_step = -cho_solve(inner, equations.value_gradient.T).T
    value_step -= np.stack([solved @ query_step for solved in eliminated])
    slope = float((value_step * equations.value_gradient).sum())
    slope += float(query_step @ equations.query_gradient)
    length = float((value_step**2).sum() + query_step @ query_step)
    moved = Heads(
        heads.value + _as_value(value_step, heads),
        heads.key_query + query_step.reshape(heads.key_query.shape),
    )
    return moved, -0.5 * slope + 0.5 * damping * length


def _shifted_cholesky(matrix: np.ndarray, shift: float) -> tuple[np.ndarray, bool]:
    """Cholesky factor of a matrix that is positive definite up to rounding."""
    while True:
        try:
            factor: tuple[np.ndarray, bool] = cho_factor(matrix, lower=True, check_finite=False)
            return factor
        except LinAlgError:
            matrix = matrix + shift * np.eye(len(matrix))
            shift *= 4.0


def _pseudo_solve(matrix: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    """Minimum-norm solution with a positive semidefinite matrix."""
    eigenvalues, vectors = eigh(matrix, check_finite=False)
    kept = eigenvalues > 1e-13 * max(eigenvalues[-1], 0.0)
    basis = vectors[:, kept]
    solution: np.ndarray = basis @ ((basis.T @ rhs) / eigenvalues[kept, None])
    return solution


def _as_value(step: np.ndarray, heads: Heads) -> np.ndarray:
    """A step (m, H d) in the layout of the value matrices (H, m, d)."""
    n_heads, n_outputs, d = heads.value.shape
    return step.reshape(n_outputs, n_heads, d).swapaxes(0, 1)
