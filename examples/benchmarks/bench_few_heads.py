"""Few heads exactly, against stochastic gradients and against least squares.

Two tables, one process::

    python examples/benchmarks/bench_few_heads.py          # about a minute
    python examples/benchmarks/bench_few_heads.py --large  # d = 64 as well

1. The published experiment on extra heads (Yau et al., arXiv 2410.10101, Figure 1): a teacher with
   one head, a target at every position from the prefix state, 2048 sequences of 100 tokens. The
   few-head solver against 500 epochs of Adam.
2. Fewer rows than features: one head from about three targets per unknown, next to least squares
   and to the best ridge on the same rows.

Errors are mean squares on data drawn independently of the training data (seed 1 against seed 0),
relative to the mean square of the targets.
"""

from __future__ import annotations

import resource
import sys
import time

import numpy as np

from sklearn_mhla import MHLARegressor
from sklearn_mhla.datasets import make_linear_attention


def held_out_error(model: MHLARegressor, X: np.ndarray, y: np.ndarray) -> float:
    """Mean squared error over mean square of the targets."""
    return float(np.mean((model.predict(X) - y) ** 2) / np.mean(y**2))


def timed_fit(model: MHLARegressor, X: np.ndarray, y: np.ndarray) -> tuple[MHLARegressor, float]:
    """The fitted model and the seconds it took."""
    start = time.perf_counter()
    model.fit(X, y)
    return model, time.perf_counter() - start


def teacher_data(seed: int, n_samples: int, **options: int | str) -> tuple[np.ndarray, np.ndarray]:
    """One teacher for all seeds; other sequences for every seed."""
    X, _, teacher = make_linear_attention(1, return_teacher=True, random_state=7, **options)
    tokens = np.random.default_rng(seed).standard_normal((n_samples, *X.shape[1:]))
    state = tokens.mT @ tokens
    if options.get("output") == "sequence":
        state = np.einsum("ntj,ntk->ntjk", tokens, tokens).cumsum(axis=1)
        read = np.einsum("ntjk,hkl,ntl->nthj", state, teacher.key_query, tokens, optimize=True)
        return tokens, np.einsum("haj,nthj->nta", teacher.value, read)
    read = np.einsum("njk,hkl,nl->nhj", state, teacher.key_query, tokens[:, -1], optimize=True)
    return tokens, np.einsum("haj,nhj->na", teacher.value, read)


def bench_against_gradients() -> None:
    """Print time and error of both solvers, and their ratios."""
    options = {"n_tokens": 100, "n_features": 4, "n_outputs": 1, "n_heads": 1}
    X, y = teacher_data(0, 2048, output="sequence", **options)
    X_test, y_test = teacher_data(1, 512, output="sequence", **options)
    common = {"n_heads": 1, "output": "sequence", "random_state": 0}
    exact, exact_seconds = timed_fit(MHLARegressor(**common), X, y)
    exact_error = held_out_error(exact, X_test, y_test)
    sgd, sgd_seconds = timed_fit(MHLARegressor(solver="sgd", max_iter=500, **common), X, y)
    sgd_error = held_out_error(sgd, X_test, y_test)
    print("d=4, 2048 sequences of 100 tokens, a target at every position, one head")
    print(f"{'':34} {'seconds':>9} {'held-out error':>15}")
    print(f"{'n_heads=1, from the moments':34} {exact_seconds:9.2f} {exact_error:15.1e}")
    print(f"{'n_heads=1, 500 epochs of Adam':34} {sgd_seconds:9.2f} {sgd_error:15.1e}")
    print(
        f"{sgd_seconds / exact_seconds:.0f} times faster (target 50), "
        f"{sgd_error / exact_error:.0e} times more accurate (target 1e4)\n"
    )


def bench_few_rows(d: int, n_samples: int) -> None:
    """Print one block of the second table."""
    options = {"n_tokens": 64, "n_features": d, "n_outputs": 4, "n_heads": 1}
    X, y = teacher_data(0, n_samples, **options)
    X_test, y_test = teacher_data(1, 500, **options)
    models = {
        "one head": [MHLARegressor(1, random_state=0)],
        "least squares": [MHLARegressor()],
        "best ridge of 7": [MHLARegressor(alpha=alpha) for alpha in np.logspace(0, 6, 7)],
    }
    for name, candidates in models.items():
        fits = [timed_fit(model, X, y) for model in candidates]
        error = min(held_out_error(model, X_test, y_test) for model, _ in fits)
        seconds = fits[0][1]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(
            f"d={d:<3} rows={n_samples:<5} p={d * d * (d + 1) // 2:<7} {name:16} {seconds:8.2f} "
            f"{error:15.1e} {peak:9.2f}",
            flush=True,
        )


if __name__ == "__main__":
    bench_against_gradients()
    print(f"{'m=4, T=64':43} {'seconds':>8} {'held-out error':>15} {'peak GB':>9}")
    bench_few_rows(16, 240)
    bench_few_rows(32, 900)
    if "--large" in sys.argv:
        bench_few_rows(64, 3500)
