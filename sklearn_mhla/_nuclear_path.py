"""Solutions of the nuclear-norm problem for a sequence of penalties."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.utils import Bunch

from sklearn_mhla._backend import backend_for
from sklearn_mhla._fitting import problem_of, size_of
from sklearn_mhla._parameters import check_parameters
from sklearn_mhla._regressor import MHLARegressor
from sklearn_mhla.solvers import NuclearSolver, choose_solver


def nuclear_norm_path(
    X: Any,
    y: Any,
    *,
    alphas: Any = None,
    n_alphas: int = 20,
    eps: float = 1e-3,
    sample_weight: Any = None,
    estimator: MHLARegressor | None = None,
) -> Bunch:
    """Number of heads, error and coefficients against the strength of the nuclear norm.

    The solutions are computed from the strongest penalty to the weakest, each starting from the
    one before; moments (or the kernel) and their eigendecomposition are computed once.

    Parameters
    ----------
    X : array-like or list of arrays
        Sequences in any form that :class:`MHLARegressor` accepts.
    y : array-like
        Targets.
    alphas : array-like of shape (n_alphas,), default=None
        Penalties, positive. None takes ``n_alphas`` of them, evenly on a logarithmic scale, from
        the least for which all heads vanish down to ``eps`` times that.
    n_alphas : int, default=20
        Number of penalties if ``alphas`` is None.
    eps : float, default=1e-3
        Ratio of the weakest to the strongest penalty if ``alphas`` is None.
    sample_weight : array-like of shape (n_samples,), default=None
        Weight of each sequence, not negative.
    estimator : MHLARegressor, default=None
        Supplies the options (``method``, ``fit_intercept``, ``n_tokens``, ``output``, ``tol``
        and so on); its ``alpha`` is not used.

    Returns
    -------
    Bunch
        ``alphas`` (n_alphas,), descending; ``coefs`` (n_alphas, n_outputs, p) packed as ``coef_``;
        ``intercepts`` (n_alphas, n_outputs); ``n_heads`` (n_alphas,); ``dual_gaps`` (n_alphas,).

    Raises
    ------
    ValueError
        If data or penalties are invalid.

    Examples
    --------
    >>> from sklearn_mhla import nuclear_norm_path
    >>> from sklearn_mhla.datasets import make_linear_attention
    >>> X, y = make_linear_attention(200, 10, 4, 4, n_heads=2, random_state=0)
    >>> path = nuclear_norm_path(X, y, n_alphas=3, eps=0.1)
    >>> path.n_heads.tolist()
    [0, 2, 2]
    """
    base = MHLARegressor() if estimator is None else estimator
    model = clone(base).set_params(penalty="nuclear", alpha=1.0, n_heads=None, solver="convex")
    check_parameters(model)
    rows, _ = model._validated(X, y, sample_weight)
    if alphas is not None:
        alphas = np.sort(np.asarray(alphas, dtype=np.float64).reshape(-1))[::-1]
        if len(alphas) == 0 or not (np.isfinite(alphas).all() and alphas[-1] > 0.0):
            raise ValueError("alphas must hold at least one penalty, all positive and finite.")
    backend = backend_for(model.device, rows.sequences.device)
    method = choose_solver(model.method, size_of(rows), backend.available_memory())[0].name
    problem, units = problem_of(model, backend, rows)
    solver = NuclearSolver(problem, method)
    if alphas is None:
        largest = solver.largest_penalty() / units.nuclear_alpha(1.0)
        alphas = largest * np.logspace(0.0, np.log10(eps), n_alphas)
    path = Bunch(alphas=alphas, coefs=[], intercepts=[], n_heads=[], dual_gaps=[])
    for alpha in alphas:
        solution = solver.solve(
            units.nuclear_alpha(alpha), max_iter=10 * model.max_iter, tol=model.tol
        )
        path.coefs.append(units.coef(solution.heads.coefficients()))
        path.intercepts.append(units.intercept(solution.intercept))
        path.n_heads.append(len(solution.heads.value))
        path.dual_gaps.append(solution.gap)
    return Bunch(**{name: np.array(values) for name, values in path.items()})
