"""What does choosing a penalty cost, in fits?

One process, ratios only: the searches and the yardsticks run in turn, several times, and the least
time of each counts. Run it on a quiet machine::

    python examples/benchmarks/bench_cv.py

20 000 sequences of 12 tokens of width 12 (p = 936), 3 outputs, 25 penalties; then a problem in the
dual form, and the choice of the number of heads. Yardsticks: one fit of ``MHLARegressor``, and
``GridSearchCV`` over the same grid, which runs once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.model_selection import GridSearchCV

from sklearn_mhla import MHLARegressor, MHLARegressorCV
from sklearn_mhla.datasets import make_linear_attention

ALPHAS = np.logspace(-3.0, 5.0, 25)


def seconds(function: Callable[[], Any]) -> float:
    """Time one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def least(functions: dict[str, Callable[[], Any]], repeat: int = 5) -> dict[str, float]:
    """Least times of functions that are called in turn."""
    rounds = [{name: seconds(call) for name, call in functions.items()} for _ in range(repeat)]
    return {name: min(times[name] for times in rounds) for name in functions}


def report(name: str, ours: float, yardstick: float, target: str = "") -> None:
    """Print one ratio."""
    ratio = ours / yardstick
    print(f"{name:58} {ours:8.3f} s {yardstick:8.3f} s {ratio:8.3f}   {target}", flush=True)


def bench(title: str, X: np.ndarray, y: np.ndarray, targets: tuple[str, str, str]) -> None:
    """Compare searches over penalties with fits."""
    folds = MHLARegressorCV(ALPHAS, cv=5, fit_intercept=True)
    times = least(
        {
            "fit": lambda: MHLARegressor(alpha=1.0, fit_intercept=True).fit(X, y),
            "leave-one-out": lambda: MHLARegressorCV(ALPHAS, fit_intercept=True).fit(X, y),
            "5 folds": lambda: folds.fit(X, y),
        }
    )
    grid = GridSearchCV(
        MHLARegressor(fit_intercept=True),
        {"alpha": ALPHAS},
        cv=5,
        scoring="neg_mean_squared_error",
    )
    searched = seconds(lambda: grid.fit(X, y))
    report(f"{title}: leave-one-out / one fit", times["leave-one-out"], times["fit"], targets[0])
    report(f"{title}: 5 folds / one fit", times["5 folds"], times["fit"], targets[1])
    report(f"{title}: 5 folds / GridSearchCV", times["5 folds"], searched, targets[2])
    scores = folds.cv_results_["mean_test_score"] / grid.cv_results_["mean_test_score"]
    print(f"    largest relative difference of mean scores: {abs(scores - 1.0).max():.1e}")


def bench_heads() -> None:
    """Compare the choice of the number of heads with GridSearchCV."""
    X, y = make_linear_attention(1000, 8, 5, 2, 2, noise=0.1, random_state=0)
    grid = {"n_heads": [1, 2, 3, None], "alpha": ALPHAS[::4]}
    model = MHLARegressorCV(grid["alpha"], n_heads=grid["n_heads"], cv=5, random_state=0)
    search = GridSearchCV(
        MHLARegressor(random_state=0), grid, cv=5, scoring="neg_mean_squared_error"
    )
    ours, theirs = seconds(lambda: model.fit(X, y)), seconds(lambda: search.fit(X, y))
    report("heads, d=5, 1000 rows: 5 folds / GridSearchCV", ours, theirs)
    print(f"    chosen heads: {model.n_heads_}, by GridSearchCV {search.best_params_['n_heads']}")


if __name__ == "__main__":
    print(f"{'':58} {'ours':>10} {'yardstick':>10} {'ratio':>8}   at most")
    X, y = make_linear_attention(20_000, 12, 12, 3, 2, noise=0.1, random_state=0)
    bench("primal, d=12, 20000 rows", X, y, ("4", "5", "0.05"))
    X, y = make_linear_attention(800, 12, 24, 3, 2, noise=0.1, random_state=0)
    bench("dual, d=24, 800 rows", X, y, ("", "", ""))
    bench_heads()
