"""How close are fit and predict to the matrix products they cannot avoid?

One process, ratios only. Every row times ours and its yardstick in turn, several times, and takes
the median of each. Run it on a quiet machine::

    python examples/benchmarks/bench_fit.py

Yardsticks: building the feature matrix and ``Ridge(solver="cholesky")`` on it; the bare blocked
``X.T @ X`` on the same rows of features, already built; for the dual, the two Gram products and
the Cholesky factorisation done bare; for predict, the bare products, states and states times
coefficients; importing scikit-learn. Memory is the growth of the peak of a process of its own that
loads the data and fits once.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.linalg import cho_factor
from sklearn.linear_model import Ridge

from sklearn_mhla import MHLARegressor
from sklearn_mhla.datasets import make_linear_attention


def packed_states(X: np.ndarray) -> np.ndarray:
    """Upper triangles of all states, straight from their definition with NumPy."""
    rows, columns = np.triu_indices(X.shape[2])
    return (X.mT @ X)[:, rows, columns] * np.where(rows == columns, 1.0, np.sqrt(2.0))


def feature_matrix(X: np.ndarray) -> np.ndarray:
    """All cubic features."""
    return (packed_states(X)[:, :, None] * X[:, -1][:, None, :]).reshape(len(X), -1)


def compare(name: str, ours: Callable, bare: Callable, target: str, repeat: int = 5) -> None:
    """Print the ratio of the median times of two functions called in turn."""
    times: dict[Callable, list[float]] = {ours: [], bare: []}
    for _ in range(repeat):
        for function, measured in times.items():
            start = time.perf_counter()
            function()
            measured.append(time.perf_counter() - start)
    a, b = statistics.median(times[ours]), statistics.median(times[bare])
    print(f"{name:56} {a:8.3f} s  {b:8.3f} s  {a / b:6.2f}   {target}", flush=True)


def primal_data() -> tuple[np.ndarray, np.ndarray]:
    """20 000 sequences of 16 tokens of width 16, 16 outputs."""
    X, y = make_linear_attention(20_000, 16, 16, 16, 4, noise=0.1, random_state=0)
    return X, y


def fit_primal(X: np.ndarray, y: np.ndarray) -> MHLARegressor:
    """Fit ours."""
    return MHLARegressor(method="primal", alpha=1e-3).fit(X, y)


def fit_ridge(X: np.ndarray, y: np.ndarray) -> Ridge:
    """Fit scikit-learn's ridge on the feature matrix."""
    return Ridge(alpha=1e-3, fit_intercept=False, solver="cholesky").fit(feature_matrix(X), y)


def bench_memory() -> None:
    """Compare peak memory; runs first, as a child starts with the peak of its parent."""
    with tempfile.TemporaryDirectory() as folder:

        def child(task: str) -> float:
            command = [sys.executable, __file__, task, folder]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            return float(done.stdout)

        child("data")
        ours, theirs = child("ours"), child("ridge")
    name = "peak memory of that fit / features, Ridge"
    print(f"{name:56} {ours:7.0f} MB  {theirs:7.0f} MB  {ours / theirs:6.2f}   0.25", flush=True)


def bench_primal() -> None:
    """Time many rows: moments and one factorisation."""
    X, y = primal_data()
    name = "fit, d=m=T=16, 20000 rows"
    compare(f"{name} / features, Ridge", lambda: fit_primal(X, y), lambda: fit_ridge(X, y), "0.33")
    features = feature_matrix(X)

    def bare(step: int = 4096) -> None:
        total = np.zeros((features.shape[1],) * 2)
        for start in range(0, len(features), step):
            block = features[start : start + step]
            total += block.T @ block

    compare(f"{name} / bare blocked X.T @ X", lambda: fit_primal(X, y), bare, "1.6")


def bench_dual() -> None:
    """Time few rows: kernel and one factorisation."""
    X, y = make_linear_attention(6_000, 64, 64, 8, 1, noise=0.1, random_state=0)
    model = MHLARegressor(method="dual", alpha=1.0)
    states, queries = packed_states(X), np.ascontiguousarray(X[:, -1])

    def bare() -> None:
        kernel = states @ states.T
        kernel *= queries @ queries.T
        kernel[np.diag_indices(len(kernel))] += 1.0
        cho_factor(kernel, overwrite_a=True, check_finite=False)

    name = "fit, d=T=64, m=8, 6000 rows / Grams, Cholesky"
    compare(name, lambda: model.fit(X, y), bare, "1.4", 3)


def bench_predict() -> None:
    """Time prediction."""
    X, y = make_linear_attention(100_000, 16, 16, 16, 4, random_state=0)
    model = fit_primal(X[:5000], y[:5000])
    states = packed_states(X)
    by_pair = model.coef_.reshape(16, states.shape[1], 16).swapaxes(0, 1)
    coefficients = by_pair.reshape(states.shape[1], -1)

    def bare(step: int = 1024) -> None:
        for start in range(0, len(X), step):
            block = X[start : start + step]
            np.matmul(block.mT, block)
            np.matmul(states[start : start + step], coefficients)

    compare("predict, d=m=T=16, 100000 rows / bare", lambda: model.predict(X), bare, "2.0")


def bench_import() -> None:
    """Time a fresh interpreter."""

    def run(statement: str) -> None:
        subprocess.run([sys.executable, "-c", statement], check=True)

    compare(
        "import scikit-learn and sklearn_mhla / scikit-learn",
        lambda: run("import sklearn.base, sklearn_mhla"),
        lambda: run("import sklearn.base"),
        "+0.1 s",
        11,
    )


def measure_memory(task: str, folder: str) -> None:
    """Print by how many MB one fit raises the peak memory of this process."""
    files = Path(folder) / "X.npy", Path(folder) / "y.npy"
    if task == "data":
        for file, array in zip(files, primal_data(), strict=True):
            np.save(file, array)
        print(0.0)
        return
    X, y = (np.load(file) for file in files)
    fit = {"ours": fit_primal, "ridge": fit_ridge}[task]
    fit(X[:50, :, :2], y[:50])  # load what is loaded lazily
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fit(X, y)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure_memory(*sys.argv[1:])
    else:
        print(f"{'':56} {'ours':>10}  {'yardstick':>10}  {'ratio':>6}   at most")
        bench_memory()
        bench_primal()
        bench_dual()
        bench_predict()
        bench_import()
