"""What a proof of identifiability costs, how close its bound is, and how far exact ranks go.

One process. Each pair of functions is timed in turn, several times; the minimum of each counts::

    python examples/benchmarks/bench_proof.py

Bounds are compared with the smallest eigenvalue in floating point, from a QR factorisation of the
explicit features with columns scaled to unit length, which is accurate whatever their units.
Exact ranks need python-flint.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from scipy.linalg import solve_triangular

from sklearn_mhla import MHLARegressor, Moments
from sklearn_mhla._backend import NumpyBackend
from sklearn_mhla._design import Design
from sklearn_mhla._tokens import check_sequences
from sklearn_mhla.identifiability._exact import exact_rank
from sklearn_mhla.identifiability._proof import LowerBound, sums_lower_bound


def published_features(X: np.ndarray) -> np.ndarray:
    """All rows of ``H``, straight from their definition."""
    rows, columns = np.triu_indices(X.shape[2])
    states = (X.mT @ X)[:, rows, columns]
    return (states[:, :, None] * X[:, -1][:, None, :]).reshape(len(X), -1)


def smallest_eigenvalue(features: np.ndarray) -> float:
    """``1 / ||D R^-1||_2^2 / rows`` with ``features D = Q R``."""
    scaling = 1.0 / np.linalg.norm(features, axis=0)
    upper = np.linalg.qr(features * scaling, mode="r")
    inverse = solve_triangular(upper, np.eye(len(upper)))
    return float(np.linalg.norm(scaling[:, None] * inverse, 2) ** -2 / len(features))


def fastest(*functions: Callable[[], object], repeat: int = 3) -> list[float]:
    """Shortest time of each, called in turn."""
    times = [float("inf")] * len(functions)
    for _ in range(repeat):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function()
            times[i] = min(times[i], time.perf_counter() - start)
    return times


def bench_bound(name: str, X: np.ndarray) -> None:
    """Ratio of bound to eigenvalue and of the time of the proof to that of a fit."""
    moments = Moments.from_data(X)

    def proof() -> LowerBound:
        return sums_lower_bound(moments, longest=X.shape[1])

    y = np.random.default_rng(1).standard_normal((len(X), X.shape[2]))
    model = MHLARegressor(method="primal", alpha=1e-3)
    seconds, fit = fastest(proof, lambda: model.fit(X, y))
    eigenvalue = smallest_eigenvalue(published_features(X))
    below = 1.0 - proof().value / eigenvalue
    print(
        f"| {name} | {X.shape[2]} | {len(X)} | {X.shape[1]} | {moments.n_features} | "
        f"{eigenvalue:.2g} | {below:.1e} | {seconds:.3f} | {seconds / fit:.2f} |",
        flush=True,
    )


def bench_rank(name: str, X: np.ndarray) -> None:
    """Time of one exact rank."""
    design = Design(check_sequences(X), NumpyBackend())
    start = time.perf_counter()
    rank = exact_rank(design)
    seconds = time.perf_counter() - start
    print(
        f"| {name} | {X.shape[2]} | {len(X)} | {design.n_features} | {rank} | {seconds:.2f} |",
        flush=True,
    )


def main() -> None:
    """Print both tables."""
    random = np.random.default_rng(0)

    def gaussian(*shape: int) -> np.ndarray:
        return random.standard_normal(shape)

    print("| tokens | d | rows | T | p | eigenvalue | 1 - bound / eigenvalue | s | / fit |")
    print("|---|---|---|---|---|---|---|---|---|")
    bench_bound("Gaussian", gaussian(1000, 8, 2))
    bench_bound("Gaussian", gaussian(2000, 8, 4))
    bench_bound("Gaussian", gaussian(5000, 8, 8))
    bench_bound("Gaussian", gaussian(200_000, 8, 8))
    bench_bound("Gaussian", gaussian(5000, 500, 8))
    bench_bound("one column times 1e-6", gaussian(5000, 8, 8) * [1e-6, *[1.0] * 7])
    bench_bound("mean 10", gaussian(5000, 8, 8) + 10.0)
    bench_bound("columns equal up to 0.1", gaussian(5000, 8, 8) @ nearly_equal(8, 0.1))
    bench_bound("columns equal up to 0.01", gaussian(5000, 8, 8) @ nearly_equal(8, 0.01))
    bench_bound("Gaussian", gaussian(20_000, 16, 16))

    def digits(*shape: int) -> np.ndarray:
        return random.integers(-9, 10, shape)

    print("\n| tokens | d | rows | p | rank | s |")
    print("|---|---|---|---|---|---|")
    bench_rank("integers", digits(5000, 6, 8))
    bench_rank("integers", digits(5000, 6, 12))
    bench_rank("integers", digits(20_000, 6, 16))
    bench_rank("integers, T = 1", digits(5000, 1, 8))
    bench_rank("integers, T = 1", digits(5000, 1, 12))
    bench_rank("integers, T = 1", digits(5000, 1, 16))
    bench_rank("integers of rank 8", digits(5000, 6, 8) @ digits(8, 12))
    bench_rank("one-hot", np.eye(12)[random.integers(0, 12, (5000, 6))])
    bench_rank("Gaussian floats, T = 1", gaussian(1000, 1, 8))
    bench_rank("Gaussian floats, T = 1", gaussian(2000, 1, 12))


def nearly_equal(token_dim: int, distance: float) -> np.ndarray:
    """A matrix that makes the last coordinate almost the first."""
    mixing = np.eye(token_dim)
    mixing[0, -1], mixing[-1, -1] = 1.0, distance
    return mixing


if __name__ == "__main__":
    main()
