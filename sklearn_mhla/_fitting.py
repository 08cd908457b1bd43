"""From an estimator's parameters and validated rows to its fitted attributes.

Functions here read parameters of an estimator (``model``) and set nothing on it: they return the
attributes to store, so that a fit that fails leaves an earlier one as it was.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from sklearn.utils import check_random_state

from sklearn_mhla._backend import Backend, backend_for, one_torch_thread
from sklearn_mhla._design import Design
from sklearn_mhla._features import n_cubic_features
from sklearn_mhla._heads import Heads
from sklearn_mhla._parameters import sgd_options
from sklearn_mhla._sums import Sums
from sklearn_mhla._tokens import Rows, Sequences
from sklearn_mhla.solvers import (
    CGSolver,
    LeastSquaresProblem,
    MomentProblem,
    NuclearSolver,
    PivotedSolver,
    PrimalSolver,
    ProblemSize,
    Solver,
    Units,
    choose_solver,
    continue_sgd,
    fit_few_heads,
    fit_sgd,
    pivoted_if_low_rank,
)


def fit_convex(model: Any, rows: Rows) -> dict[str, Any]:
    """Attributes of a convex fit: unrestricted, with few heads, or with the nuclear norm."""
    backend = backend_for(model.device, rows.sequences.device)
    size = size_of(rows)
    restricted = _is_restricted(model, size)
    solver, reason = choose_solver(
        model.method,
        size,
        backend.available_memory(),
        model.n_heads if restricted else None,
        iterative=model.penalty == "l2",
    )
    problem, units = problem_of(model, backend, rows, bool(model.verbose))
    low_rank = None
    if model.method == "auto" and not restricted and model.penalty == "l2":
        low_rank = pivoted_if_low_rank(problem)
    if low_rank is not None:
        solver, reason = PivotedSolver, f"rank={low_rank.rank} is low"
    if model.verbose:
        print(f"[{type(model).__name__}] method={solver.name!r}: {reason}")
    attributes = _solve(model, problem, units, solver, low_rank)
    if solver is PrimalSolver:  # partial_fit may go on from here
        attributes["_moments"] = problem.moments
    return attributes


def add_to_moments(model: Any, rows: Rows, moments: Sums | None) -> Sums:
    """Moments so far and of a batch; in place where there are some.

    Raises
    ------
    ValueError
        If an option that they depend on has changed.
    MemoryError
        If a fit from the moments could not fit into memory.
    """
    backend = backend_for(model.device, rows.sequences.device)
    if moments is None:
        check_memory(model, rows, backend)
        options = {"output": model.output, "causal": model.causal, "state": model.state}
        return Sums.from_rows(rows, backend, verbose=bool(model.verbose), **options)
    check_same_options(model, moments)
    return moments.add_rows(rows, backend, bool(model.verbose))


def check_memory(model: Any, rows: Rows, backend: Backend) -> None:
    """Raise a MemoryError if moments of such rows, and a fit from them, cannot fit."""
    size = size_of(rows)
    n_heads = model.n_heads if _is_restricted(model, size) else None
    choose_solver("primal", size, backend.available_memory(), n_heads)


def check_same_options(model: Any, moments: Sums) -> None:
    """Raise a ValueError if an option has changed that the moments so far depend on."""
    for name in ("output", "causal", "state"):
        if getattr(moments, name) != getattr(model, name):
            raise ValueError(
                f"{name}={getattr(model, name)!r}, but the rows so far were summed with "
                f"{name}={getattr(moments, name)!r}; fit starts anew."
            )


def fit_moments(model: Any, moments: Sums) -> dict[str, Any]:
    """Attributes of a convex fit that knows nothing but the moments."""
    units = Units(moments.token_exponent, moments.target_exponent)
    problem = MomentProblem(moments, model.fit_intercept)
    return _solve(model, problem, units, PrimalSolver)


def _solve(
    model: Any,
    problem: LeastSquaresProblem | MomentProblem,
    units: Units,
    solver: Any,
    factored: Solver | None = None,
) -> dict[str, Any]:
    if model.penalty == "nuclear":
        return _fit_nuclear(model, problem, units, solver.name)
    n_heads = int(model.n_heads) if _is_restricted(model, problem.size) else None
    if solver is CGSolver and isinstance(problem, LeastSquaresProblem):
        factored = _conjugate_gradients(model, problem, units)
    return fit_l2(model, problem, units, solver, n_heads, units.alpha(model.alpha), factored)


def _conjugate_gradients(model: Any, problem: LeastSquaresProblem, units: Units) -> CGSolver:
    """The iterative solver with the parameters of the model and, if it is warm, its start."""
    start = None
    if model.warm_start and hasattr(model, "coef_"):
        wanted = (problem.size.n_outputs, problem.size.n_features)
        if model.coef_.shape != wanted:
            raise ValueError(
                f"The model so far has coef_ of shape {model.coef_.shape}, these data need "
                f"{wanted} (outputs, features). Fit with warm_start=False to start anew."
            )
        start = problem.backend.asarray(units.rescaled_coef(model.coef_))
    return CGSolver(
        problem,
        tol=1e-4 * model.tol,
        max_iter=10 * model.max_iter,
        start=start,
        verbose=bool(model.verbose),
    )


def fit_l2(
    model: Any,
    problem: LeastSquaresProblem | MomentProblem,
    units: Units,
    solver: Any,
    n_heads: int | None,
    alpha: float,
    factored: Solver | None = None,
) -> dict[str, Any]:
    """Attributes of a fit with the l2 penalty ``alpha``, which is in the units of the problem.

    ``factored`` is the solver of the problem where one has been made already.
    """
    to_numpy = problem.backend.to_numpy
    if n_heads is None:
        solution = (factored or solver(problem)).solve(alpha)
        return {
            "coef_": units.coef(to_numpy(solution.coef)),
            "intercept_": units.intercept(to_numpy(solution.intercept)),
            "_heads": None,
            "method_": solver.name,
            "n_iter_": solution.n_iter,
            "rank_": solution.rank,
            "_ridge": (alpha, problem.fit_intercept),
        }
    restricted = fit_few_heads(
        problem,
        n_heads,
        alpha,
        method=solver.name,
        max_iter=model.max_iter,
        tol=model.tol,
        random=check_random_state(model.random_state),
    )
    return attributes_of(restricted.heads, restricted.intercept, units) | {
        "method_": solver.name,
        "n_iter_": restricted.n_iter,
        "loss_": units.loss(restricted.loss),
        "gradient_norm_": restricted.gradient_norm,
    }


def _fit_nuclear(
    model: Any, problem: LeastSquaresProblem | MomentProblem, units: Units, method: str
) -> dict[str, Any]:
    solution = NuclearSolver(problem, method).solve(
        units.nuclear_alpha(model.alpha), max_iter=10 * model.max_iter, tol=model.tol
    )
    return attributes_of(solution.heads, solution.intercept, units) | {
        "method_": method,
        "n_iter_": solution.n_iter,
        "loss_": units.loss(solution.loss),
        "dual_gap_": solution.gap,
    }


def fit_sgd_model(model: Any, rows: Rows, partial: bool = False) -> dict[str, Any]:
    """Attributes of a fit by stochastic gradients, or after one more pass (``partial``)."""
    optimizer = getattr(model, "_optimizer", None) if partial else None
    going_on = partial and hasattr(model, "coef_")
    with one_torch_thread():
        backend = backend_for(model.device, rows.sequences.device, torch_on_cpu=True)
        problem, units = problem_of(model, backend, rows)
        options = sgd_options(model, most_heads(problem.size))
        start = None
        if going_on or (model.warm_start and hasattr(model, "coef_")):
            start = _model_so_far(model, problem, units, options.n_heads)
        alpha = units.alpha(model.alpha)
        if partial:
            solution = continue_sgd(problem, alpha, options, optimizer, start)
        else:
            solution = fit_sgd(problem, alpha, options, start)
    curve = (getattr(model, "loss_curve_", []) if going_on else []) + solution.loss_curve
    return attributes_of(solution.heads, solution.intercept, units) | {
        "_optimizer": solution.optimizer,
        "method_": "sgd",
        "n_iter_": len(curve),
        "loss_": solution.loss,
        "loss_curve_": curve,
        "validation_loss_curve_": solution.validation_curve,
    }


def _model_so_far(
    model: Any, problem: LeastSquaresProblem, units: Units, n_heads: int
) -> tuple[Heads, np.ndarray]:
    """Heads and intercept to go on from, in the units of the problem."""
    heads = model._computed_heads("value_")
    wanted = (n_heads, problem.size.n_outputs, problem.size.token_dim)
    if heads.value.shape != wanted:
        raise ValueError(
            f"The model so far has value_ of shape {heads.value.shape}, these data and "
            f"parameters need {wanted} (heads, outputs, token width). Set "
            f"n_heads={len(heads.value)} to train it further; fit with warm_start=False starts "
            "anew."
        )
    intercept = np.ldexp(model.intercept_, -units.targets)
    return units.rescaled_heads(heads), intercept if model.fit_intercept else 0.0 * intercept


def attributes_of(heads: Heads, intercept: np.ndarray, units: Units) -> dict[str, Any]:
    """Attributes of a model that was fitted as heads."""
    return {
        "coef_": units.coef(heads.coefficients()),
        "intercept_": units.intercept(np.asarray(intercept)),
        "_heads": units.heads(heads),
    }


def size_of(rows: Rows) -> ProblemSize:
    """Rows, features, outputs and token width."""
    return ProblemSize(
        n_rows=len(rows.targets),
        n_features=n_cubic_features(rows.sequences.token_dim),
        n_outputs=rows.targets.shape[1],
        token_dim=rows.sequences.token_dim,
    )


def problem_of(
    model: Any, backend: Backend, rows: Rows, verbose: bool = False
) -> tuple[LeastSquaresProblem, Units]:
    """The problem in rescaled tokens and targets, and the units it is in."""
    design = design_of(model, rows.sequences, backend, verbose=verbose)
    units = Units(design.exponent, math.frexp(np.abs(rows.targets).max())[1])
    problem = LeastSquaresProblem(
        design,
        backend.asarray(np.ldexp(rows.targets, -units.targets)),
        None if rows.weights is None else backend.asarray(rows.weights),
        model.fit_intercept,
        units.targets,
    )
    return problem, units


def design_of(
    model: Any,
    sequences: Sequences,
    backend: Backend,
    *,
    rescale: bool = True,
    verbose: bool = False,
) -> Design:
    """The implicit design matrix that the parameters ask for."""
    return Design(
        sequences,
        backend,
        output=model.output,
        causal=model.causal,
        state=model.state,
        rescale=rescale,
        verbose=verbose,
    )


def _is_restricted(model: Any, size: ProblemSize) -> bool:
    """Whether the number of heads leaves out a part of the model class."""
    return model.n_heads is not None and model.n_heads < most_heads(size)


def most_heads(size: ProblemSize) -> int:
    """With that many heads every function of the model class can be written."""
    return min(size.n_outputs * size.token_dim, size.token_dim**2)
