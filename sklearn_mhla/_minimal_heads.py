r"""The fewest heads that compute a given function.

Least squares returns the coefficient tensor symmetrised in ``(j, k)``; its unfolding has full
rank even when the function needs one head, because the antisymmetric part, which no state sees,
has been set to zero. Three steps bring the heads back, from the coefficients alone:

1. choose the antisymmetric part so that the unfolding has the least nuclear norm, a convex problem
   solved by Douglas-Rachford splitting (Lions and Mercier 1979; the proximal operator of the
   nuclear norm shrinks singular values, Cai, Candes and Shen 2010);
2. fit ``H`` heads to the coefficients for decreasing ``H`` while the fit stays exact;
3. polish by Levenberg-Marquardt, to rounding error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy.linalg import svd
from sklearn.utils import check_random_state

from sklearn_mhla._features import n_cubic_features
from sklearn_mhla._heads import Heads, coef_to_tensor, tensor_to_heads
from sklearn_mhla.solvers._head_equations import CoefficientEquations
from sklearn_mhla.solvers._low_rank import best_values, levenberg_marquardt

# A fit of heads to coefficients counts as exact below this relative error of the coefficients.
_EXACT = 1e-9
_RANDOM_STARTS = 4
_DIRECTIONS = 64
# Multiply-adds that the splitting and the search may spend each: seconds.
_WORK = 4e10


def minimal_heads(coef: np.ndarray, token_dim: int, *, random_state: Any = 0) -> Heads:
    """Few heads with the same coefficients.

    Parameters
    ----------
    coef : ndarray of shape (m, p)
        Isometrically packed coefficients, as in ``MHLARegressor.coef_``.
    token_dim : int
        Width ``d`` of the tokens; ``p = d^2 (d + 1) / 2``.
    random_state : int, RandomState instance or None, default=0
        Seed of the restarts that look for fewer heads.

    Returns
    -------
    Heads
        Their coefficients differ from ``coef`` by at most 1e-9 relative. No model with fewer
        heads was found; that none exists is proved where the number equals
        ``head_lower_bound``, as it does for generic models with at most ``d / 2`` heads.

    Raises
    ------
    ValueError
        If ``coef`` does not have ``token_dim^2 (token_dim + 1) / 2`` columns.

    Notes
    -----
    One step of the splitting is the singular value decomposition of an ``(m d) x (d^2)`` matrix.
    One step of the fit factors a matrix of order ``H d^2``. Both are bounded to seconds of work;
    where that does not suffice, the result has more heads, up to those of the singular value
    decomposition.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn_mhla import Heads, minimal_heads
    >>> random = np.random.default_rng(0)
    >>> teacher = Heads(random.standard_normal((2, 4, 4)), random.standard_normal((2, 4, 4)))
    >>> len(minimal_heads(teacher.coefficients(), token_dim=4).value)
    2
    """
    coef = np.asarray(coef, dtype=np.float64)
    expected = n_cubic_features(token_dim)
    if coef.ndim != 2 or coef.shape[1] != expected:
        raise ValueError(
            f"coef must have shape (m, {expected}) for token_dim={token_dim}; got {coef.shape}."
        )
    size = float(np.linalg.norm(coef))
    if size == 0.0:
        return tensor_to_heads(coef_to_tensor(coef, token_dim), 0)
    target = coef_to_tensor(coef / size, token_dim)  # unit norm: tolerances are relative
    random = check_random_state(random_state)
    fewest = head_lower_bound(target, random)
    best = tensor_to_heads(target)
    relaxed = least_nuclear_norm(target, max_iter=_splitting_steps(target))
    n_heads = min(len(best.value), _rank(relaxed, 1e-4))
    work = _WORK
    while n_heads >= fewest:
        found, work = _fit_exactly(target, relaxed, best, n_heads, random, work)
        if found is None:
            break
        best, n_heads = found, n_heads - 1
    root = math.sqrt(size)
    return Heads(best.value * root, best.key_query * root)


def head_lower_bound(tensor: np.ndarray, random_state: Any = 0) -> int:
    """Heads that any model with these coefficients needs at least.

    For every output direction ``c`` and query ``w`` the symmetric matrix
    ``sum_{al} c_a C[a,:,:,l] w_l`` is the symmetric part of ``sum_h (V_h^T c) (Q_h w)^T``. The
    symmetric part of a rank-one matrix has at most one positive and one negative eigenvalue,
    so ``H`` heads give at most ``H`` of either sign. The bound is the largest count over random
    directions; it is attained by generic models with ``H <= d / 2``.

    Parameters
    ----------
    tensor : ndarray of shape (m, d, d, d)
        Coefficient tensor, symmetric in its two middle axes.
    random_state : int, RandomState instance or None, default=0

    Returns
    -------
    int
    """
    random = check_random_state(random_state)
    n_outputs, d = tensor.shape[:2]
    outputs = random.standard_normal((_DIRECTIONS, n_outputs))
    queries = random.standard_normal((_DIRECTIONS, d))
    seen = np.einsum("na,ajkl,nl->njk", outputs, tensor, queries, optimize=True)
    eigenvalues = np.linalg.eigvalsh(seen)
    floor = 1e-8 * abs(eigenvalues).max()
    counts = (eigenvalues > floor).sum(1), (eigenvalues < -floor).sum(1)
    return int(np.max(counts))


def least_nuclear_norm(
    target: np.ndarray, *, max_iter: int = 500, tol: float = 1e-12
) -> np.ndarray:
    """The tensor of least nuclear norm that has a given symmetric part.

    Douglas-Rachford splitting of ``||unfold(X)||_*`` and the constraint
    ``(X + X^T) / 2 = target``, where the transpose swaps the two middle axes. The shrinkage
    threshold is the mean singular value of the target.

    Parameters
    ----------
    target : ndarray of shape (m, d, d, d)
    max_iter : int, default=500
    tol : float, default=1e-12
        Stop when an iteration moves by less than this times the norm of the target.

    Returns
    -------
    ndarray of shape (m, d, d, d)
        Satisfies the constraint exactly.
    """
    n_outputs, d = target.shape[:2]
    shape = (n_outputs * d, d * d)
    threshold = svd(target.reshape(shape), compute_uv=False).mean()
    stop = tol * np.linalg.norm(target)
    auxiliary = target.copy()
    for _ in range(max_iter):
        feasible = target + 0.5 * (auxiliary - auxiliary.swapaxes(1, 2))
        reflected = (2.0 * feasible - auxiliary).reshape(shape)
        left, singular, right = svd(reflected, full_matrices=False, check_finite=False)
        shrunk = (left * np.maximum(singular - threshold, 0.0)) @ right
        move = shrunk.reshape(target.shape) - feasible
        auxiliary += move
        if np.linalg.norm(move) <= stop:
            break
    solution: np.ndarray = target + 0.5 * (auxiliary - auxiliary.swapaxes(1, 2))
    return solution


def _fit_exactly(
    target: np.ndarray, relaxed: np.ndarray, best: Heads, n_heads: int, random: Any, work: float
) -> tuple[Heads | None, float]:
    """``n_heads`` heads with the target's coefficients, or None, and the work that is left."""
    metric = CoefficientEquations(target)
    scale = 0.5 * float((target**2).sum())
    n_outputs, d = target.shape[:2]
    order = float(n_heads * d * d)  # of the Schur complement that a step forms and factors
    per_step = order**3 / 3.0 + n_outputs * n_heads * d * order**2
    for start in _starts(metric, relaxed, best, n_heads, random):
        steps = min(100, int(work / per_step))
        if steps == 0:  # take the start only if it is exact as it stands
            fit_heads, loss = start, metric.loss(start)
        else:
            fit = levenberg_marquardt(metric, start, scale=scale, max_iter=steps)
            fit_heads, loss = fit.heads, fit.loss
            work -= fit.n_iter * per_step
        if loss <= _EXACT**2 * scale:
            return fit_heads, work
        if steps == 0:
            break
    return None, work


def _starts(
    metric: CoefficientEquations, relaxed: np.ndarray, best: Heads, n_heads: int, random: Any
) -> Iterator[Heads]:
    """Truncations of the relaxed solution and of the last heads, then random ones."""
    yield tensor_to_heads(relaxed, n_heads)
    yield tensor_to_heads(np.einsum("haj,hkl->ajkl", *best, optimize=True), n_heads)
    n_outputs, d = relaxed.shape[:2]
    for _ in range(_RANDOM_STARTS):
        key_query = random.standard_normal((n_heads, d, d))
        yield best_values(metric, Heads(np.zeros((n_heads, n_outputs, d)), key_query))


def _splitting_steps(tensor: np.ndarray) -> int:
    """Iterations that the work allows: a singular value decomposition each."""
    n_outputs, d = tensor.shape[:2]
    rows, columns = n_outputs * d, d * d
    return int(np.clip(_WORK / (10.0 * rows * columns * min(rows, columns)), 20, 500))


def _rank(tensor: np.ndarray, tolerance: float) -> int:
    """Rank of the ``(m d) x (d^2)`` unfolding, relative to its largest singular value."""
    n_outputs, d = tensor.shape[:2]
    singular = svd(tensor.reshape(n_outputs * d, d * d), compute_uv=False)
    return int((singular > tolerance * singular[0]).sum())
