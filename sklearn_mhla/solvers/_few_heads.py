r"""The best model with a given number of heads: starts, metric and choice of the best run.

* **Rows plentiful** (``primal``): the loss depends on the data through the moments alone, so they
  are accumulated once and no row is touched again.
* **Rows scarce** (``dual``): sums over the rows; the unrestricted problem is underdetermined but
  supplies the start.

The first start is the unrestricted solution (of minimum norm) cut to its leading heads. It is
much closer than the singular vectors of ``sum_i y_i (x) S_i (x) q_i``, whose state has a large
mean. More starts follow until one fits exactly or the best value has been reached twice.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from sklearn_mhla._heads import Heads, coef_to_tensor, tensor_to_heads
from sklearn_mhla.solvers._base import LeastSquaresProblem, MomentProblem, ProblemSize
from sklearn_mhla.solvers._dual import DualSolver
from sklearn_mhla.solvers._head_equations import HeadLoss, MomentEquations, RowEquations
from sklearn_mhla.solvers._low_rank import HeadFit, best_values, levenberg_marquardt
from sklearn_mhla.solvers._primal import PrimalSolver

_MAX_STARTS = 8
# Relative difference of losses that counts as the same minimum.
_SAME = 1e-6


@dataclass(frozen=True)
class FewHeadsSolution:
    """The best of several runs.

    Attributes
    ----------
    heads : Heads
        In the units of the design (rescaled tokens).
    intercept : ndarray of shape (m,)
    loss : float
        Half the weighted residual sum of squares plus half the penalty.
    gradient_norm : float
        Relative gradient at the end.
    n_iter : int
        Steps of the best run.
    """

    heads: Heads
    intercept: np.ndarray
    loss: float
    gradient_norm: float
    n_iter: int


def few_heads_memory(method: str, size: ProblemSize, n_heads: int) -> int:
    """Bytes needed beyond the data, to leading order."""
    d, m, p = size.token_dim, size.n_outputs, size.n_features
    order = n_heads * d * d
    system = 3 * order * order + 2 * m * n_heads * d * order
    if method == "primal":
        return PrimalSolver.memory(size) + 8 * (system + p * p + n_heads * d * d * p)
    return DualSolver.memory(size) + 8 * system


def fit_few_heads(
    problem: LeastSquaresProblem | MomentProblem,
    n_heads: int,
    alpha: float,
    *,
    method: str,
    max_iter: int,
    tol: float,
    random: np.random.RandomState,
) -> FewHeadsSolution:
    """Minimise the penalised least-squares loss over models with ``n_heads`` heads.

    Parameters
    ----------
    problem : LeastSquaresProblem or MomentProblem
        The latter needs ``method="primal"``.
    n_heads : int
    alpha : float
        Penalty on the squared norm of the coefficients, as for unrestricted models.
    method : {"primal", "dual"}
    max_iter : int
        Steps of each run.
    tol : float
        Relative decrease of the loss below which a run has converged.
    random : RandomState
        For the restarts.

    Returns
    -------
    FewHeadsSolution

    Warns
    -----
    ConvergenceWarning
        If the best run did not converge; says by how much.
    """
    to_numpy = problem.backend.to_numpy
    loss: HeadLoss
    if method == "primal":
        solver = PrimalSolver(problem)
        coef = solver.solve(alpha).coef
        metric = to_numpy(solver.metric(alpha))
        loss = MomentEquations(metric, to_numpy(coef), problem.size.token_dim)
        unrestricted = solver.minimum(coef)
    else:
        assert isinstance(problem, LeastSquaresProblem)
        coef = DualSolver(problem).solve(alpha).coef
        loss = rows = RowEquations(problem, alpha)
        unrestricted = 0.0
    best = best_heads(
        loss,
        to_numpy(coef),
        problem.size.token_dim,
        n_heads,
        max_iter=max_iter,
        tol=tol,
        random=random,
    )
    if method == "primal":
        intercept = solver.intercept(problem.backend.asarray(best.heads.coefficients()))
    else:
        intercept = rows.residual(best.heads)[1]
    return FewHeadsSolution(
        best.heads,
        to_numpy(intercept),
        unrestricted + best.loss,
        best.gradient_norm,
        best.n_iter,
    )


def best_heads(
    loss: HeadLoss,
    coef: np.ndarray,
    token_dim: int,
    n_heads: int,
    *,
    max_iter: int,
    tol: float,
    random: np.random.RandomState,
    start: Heads | None = None,
) -> HeadFit:
    """The best of several runs, the first from ``start`` where one is known.

    Parameters
    ----------
    loss : HeadLoss
    coef : ndarray of shape (m, p)
        Unrestricted solution.
    token_dim : int
    n_heads, max_iter, tol, random
        As for :func:`fit_few_heads`.
    start : Heads, optional
        For example the solution for a similar penalty.

    Returns
    -------
    HeadFit

    Warns
    -----
    ConvergenceWarning
        If the best run did not converge; says by how much.
    """
    tensor = coef_to_tensor(coef, token_dim)
    zero = Heads(
        np.zeros((n_heads, len(tensor), token_dim)), np.zeros((n_heads, token_dim, token_dim))
    )
    scale = loss.loss(zero)
    starts = _starts(loss, tensor, n_heads, random)
    if start is not None:
        starts = itertools.chain([start], starts)
    best = _best_run(loss, starts, scale, max_iter, tol)
    if not best.converged:
        warnings.warn(
            f"The fit of {n_heads} heads stopped after {best.n_iter} steps with a relative "
            f"gradient of {best.gradient_norm:.1e}; the last steps still lowered the loss by more "
            f"than tol={tol:g} of its value. Raise max_iter or tol.",
            ConvergenceWarning,
            stacklevel=3,
        )
    return best


def _best_run(
    loss: HeadLoss, starts: Iterator[Heads], scale: float, max_iter: int, tol: float
) -> HeadFit:
    best: HeadFit | None = None
    for start in starts:
        run = levenberg_marquardt(loss, start, scale=scale, max_iter=max_iter, tol=tol)
        if best is None or run.loss < best.loss:
            again = best is not None and best.loss - run.loss <= _SAME * best.loss
            best = run
        else:
            again = run.loss - best.loss <= _SAME * best.loss
        if again or best.loss <= 1e-20 * scale:
            break
    assert best is not None
    return best


def _starts(
    loss: HeadLoss, tensor: np.ndarray, n_heads: int, random: np.random.RandomState
) -> Iterator[Heads]:
    """The leading heads of the unrestricted solution, then random key-query matrices."""
    yield best_values(loss, tensor_to_heads(tensor, n_heads))
    n_outputs, d = tensor.shape[:2]
    for _ in range(_MAX_STARTS - 1):
        key_query = random.standard_normal((n_heads, d, d)) / np.sqrt(d)
        yield best_values(loss, Heads(np.zeros((n_heads, n_outputs, d)), key_query))
