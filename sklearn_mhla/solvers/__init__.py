"""Registry of the convex solvers, the automatic choice among them, and the baseline."""

from __future__ import annotations

from sklearn_mhla.solvers._base import (
    LeastSquaresProblem,
    MomentProblem,
    ProblemSize,
    Solution,
    Solver,
)
from sklearn_mhla.solvers._cg import CGSolver
from sklearn_mhla.solvers._dual import DualSolver
from sklearn_mhla.solvers._few_heads import best_heads, few_heads_memory, fit_few_heads
from sklearn_mhla.solvers._leave_one_out import leave_one_out
from sklearn_mhla.solvers._nuclear import NuclearSolver
from sklearn_mhla.solvers._path import RidgePath
from sklearn_mhla.solvers._pivoted import PivotedSolver, pivoted_if_low_rank
from sklearn_mhla.solvers._primal import PrimalSolver
from sklearn_mhla.solvers._sgd import SGDOptions, SGDSolution, continue_sgd, fit_sgd
from sklearn_mhla.solvers._units import Units

SOLVERS: dict[str, type[Solver]] = {
    solver.name: solver for solver in (PrimalSolver, DualSolver, PivotedSolver, CGSolver)
}

__all__ = [
    "SOLVERS",
    "CGSolver",
    "DualSolver",
    "LeastSquaresProblem",
    "MomentProblem",
    "NuclearSolver",
    "PivotedSolver",
    "PrimalSolver",
    "ProblemSize",
    "RidgePath",
    "SGDOptions",
    "SGDSolution",
    "Solution",
    "Solver",
    "Units",
    "best_heads",
    "choose_solver",
    "continue_sgd",
    "fit_few_heads",
    "fit_sgd",
    "leave_one_out",
    "pivoted_if_low_rank",
]


def choose_solver(
    method: str,
    size: ProblemSize,
    available: int,
    n_heads: int | None = None,
    *,
    iterative: bool = True,
) -> tuple[type[Solver], str]:
    """Pick a solver that fits into memory.

    Parameters
    ----------
    method : {"auto"} or a name in ``SOLVERS``
        "auto" prefers the smaller system, ``p x p`` (primal) against ``rows x rows`` (dual), and
        takes the other where only that one fits, conjugate gradients (cg) where neither does.
    size : ProblemSize
    available : int
        Bytes that may be used.
    n_heads : int, optional
        Heads of a restricted model, whose normal equations need room as well.
    iterative : bool, default=True
        Whether conjugate gradients will do. They give coefficients for one ``alpha``, no
        factorisation, and only for an unrestricted model.

    Returns
    -------
    solver : type of Solver
    reason : str
        Why, in one sentence.

    Raises
    ------
    ValueError
        If ``method="cg"`` is asked for a model that it cannot fit.
    MemoryError
        If the wanted method cannot fit; says how much it needs and what to use instead.
    """
    needed = {
        name: solver.memory(size) if n_heads is None else few_heads_memory(name, size, n_heads)
        for name, solver in SOLVERS.items()
        if name != "cg" or (n_heads is None and iterative)
    }
    if method == "cg" and "cg" not in needed:
        found = f"; got n_heads={n_heads}" if n_heads is not None else ""
        raise ValueError(
            "method='cg' fits models without a limit on heads and with penalty='l2'"
            f"{found}. Use method='auto', 'primal' or 'dual'."
        )
    if method != PivotedSolver.name:
        del needed[PivotedSolver.name]  # grows with the rank, which is not known yet
    sizes = f"rows={size.n_rows}, p={size.n_features}"
    preferred = "primal" if size.n_features <= size.n_rows else "dual"
    if method != "auto":
        if needed[method] <= available:
            return SOLVERS[method], f"method={method!r} was asked for"
        raise MemoryError(_refusal(method, needed, available, sizes))
    if needed[preferred] <= available:
        relation = "<=" if preferred == "primal" else ">"
        return SOLVERS[preferred], f"p={size.n_features} {relation} rows={size.n_rows}"
    fitting = _fitting(needed, available)
    if fitting is not None:
        return SOLVERS[fitting], (
            f"{preferred} would need {_gigabytes(needed[preferred])} ({sizes}), "
            f"{_gigabytes(available)} are available"
        )
    raise MemoryError(_refusal(preferred, needed, available, sizes))


def _fitting(needed: dict[str, int], available: int) -> str | None:
    """The smallest method that fits; conjugate gradients only where no direct one does."""
    names = [name for name in needed if needed[name] <= available]
    return min(names, key=lambda name: (name == "cg", needed[name]), default=None)


def _refusal(method: str, needed: dict[str, int], available: int, sizes: str) -> str:
    best = _fitting(needed, available)
    if best is not None:
        advice = f"Use method={best!r}, which needs {_gigabytes(needed[best])}."
    else:
        others = ", ".join(
            f"method={name!r} needs {_gigabytes(value)}"
            for name, value in needed.items()
            if name != method
        )
        advice = (
            f"No method fits ({others}); reduce the width of the tokens (for example by "
            "PCA over tokens) or the number of rows."
        )
    return (
        f"method={method!r} needs {_gigabytes(needed[method])} of memory at {sizes}, but only "
        f"{_gigabytes(available)} are available. {advice}"
    )


def _gigabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.3g} GB"
