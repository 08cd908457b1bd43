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
from sklearn_mhla.solvers._few_heads import few_heads_memory, fit_few_heads
from sklearn_mhla.solvers._nuclear import NuclearSolver
from sklearn_mhla.solvers._primal import PrimalSolver
from sklearn_mhla.solvers._sgd import SGDOptions, SGDSolution, continue_sgd, fit_sgd
from sklearn_mhla.solvers._units import Units

SOLVERS: dict[str, type[Solver]] = {
    solver.name: solver for solver in (PrimalSolver, DualSolver, CGSolver)
}

__all__ = [
    "SOLVERS",
    "LeastSquaresProblem",
    "MomentProblem",
    "NuclearSolver",
    "PrimalSolver",
    "ProblemSize",
    "SGDOptions",
    "SGDSolution",
    "Solution",
    "Solver",
    "Units",
    "choose_solver",
    "continue_sgd",
    "fit_few_heads",
    "fit_sgd",
]


def choose_solver(
    method: str, size: ProblemSize, available: int, n_heads: int | None = None
) -> tuple[type[Solver], str]:
    """Pick a solver that fits into memory.

    Parameters
    ----------
    method : {"auto"} or a name in ``SOLVERS``
        "auto" prefers the smaller system, ``p x p`` (primal) against ``rows x rows`` (dual), and
        takes the other where only that one fits.
    size : ProblemSize
    available : int
        Bytes that may be used.
    n_heads : int, optional
        Heads of a restricted model, whose normal equations need room as well.

    Returns
    -------
    solver : type of Solver
    reason : str
        Why, in one sentence.

    Raises
    ------
    MemoryError
        If the wanted method cannot fit; says how much it needs and what to use instead.
    """
    needed = {
        name: solver.memory(size) if n_heads is None else few_heads_memory(name, size, n_heads)
        for name, solver in SOLVERS.items()
    }
    sizes = f"rows={size.n_rows}, p={size.n_features}"
    preferred = "primal" if size.n_features <= size.n_rows else "dual"
    if method != "auto":
        if needed[method] <= available:
            return SOLVERS[method], f"method={method!r} was asked for"
        raise MemoryError(_refusal(method, needed, available, sizes))
    if needed[preferred] <= available:
        relation = "<=" if preferred == "primal" else ">"
        return SOLVERS[preferred], f"p={size.n_features} {relation} rows={size.n_rows}"
    fallback = min(needed, key=needed.__getitem__)
    if needed[fallback] <= available:
        return SOLVERS[fallback], (
            f"{preferred} would need {_gigabytes(needed[preferred])} ({sizes}), "
            f"{_gigabytes(available)} are available"
        )
    raise MemoryError(_refusal(preferred, needed, available, sizes))


def _refusal(method: str, needed: dict[str, int], available: int, sizes: str) -> str:
    fitting = [name for name in needed if needed[name] <= available]
    if fitting:
        best = min(fitting, key=needed.__getitem__)
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
