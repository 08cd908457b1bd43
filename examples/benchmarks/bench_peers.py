"""Ours beside what else solves the same least-squares problem.

The peers get the cubic features written down (their cost is counted), or their kernel. Every line
is a process of its own, which makes the data, then reports seconds, growth of the peak memory, and
the error on fresh rows of a noise-free teacher plus a little noise, relative to predicting the
mean. Peers that are not installed are left out::

    python examples/benchmarks/bench_peers.py [--rows 8000] [--width 12]
"""

from __future__ import annotations

import argparse
import importlib.util
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from sklearn_mhla.datasets import make_linear_attention
from sklearn_mhla.preprocessing import LinearAttentionFeatures

ALPHA = 1.0
Fit = Callable[[np.ndarray, np.ndarray], Callable[[np.ndarray], np.ndarray]]


def features(X: np.ndarray) -> np.ndarray:
    """The cubic features, written down."""
    written: np.ndarray = LinearAttentionFeatures().fit(X[:1]).transform(X)
    return written


def kernel(X: np.ndarray, Z: np.ndarray) -> np.ndarray:
    """Inner products of features of two sets of sequences."""
    states = [np.einsum("ntj,ntk->njk", A, A).reshape(len(A), -1) for A in (X, Z)]
    product: np.ndarray = (states[0] @ states[1].T) * (X[:, -1] @ Z[:, -1].T)
    return product


def ours(X, y):
    from sklearn_mhla import MHLARegressor

    return MHLARegressor(alpha=ALPHA).fit(X, y).predict


def ridge(X, y):
    from sklearn.linear_model import Ridge

    model = Ridge(alpha=ALPHA, fit_intercept=False, solver="cholesky").fit(features(X), y)
    return lambda Z: model.predict(features(Z))


def kernel_ridge(X, y):
    from sklearn.kernel_ridge import KernelRidge

    model = KernelRidge(alpha=ALPHA, kernel="precomputed").fit(kernel(X, X), y)
    return lambda Z: model.predict(kernel(Z, X))


def himalaya(X, y):
    from himalaya.backend import set_backend
    from himalaya.kernel_ridge import KernelRidge

    set_backend("torch")
    model = KernelRidge(alpha=ALPHA, kernel="precomputed", solver="eigenvalues")
    model.fit(kernel(X, X), y)
    return lambda Z: np.asarray(model.predict(kernel(Z, X)))


def torch_lstsq(X, y):
    import torch

    Phi = torch.from_numpy(features(X))
    p = Phi.shape[1]
    stacked = torch.cat([Phi, ALPHA**0.5 * torch.eye(p, dtype=Phi.dtype)])
    targets = torch.cat([torch.from_numpy(y), torch.zeros((p, y.shape[1]), dtype=Phi.dtype)])
    coef = torch.linalg.lstsq(stacked, targets).solution.numpy()
    return lambda Z: features(Z) @ coef


PEERS: dict[str, tuple[Fit, str]] = {
    "sklearn_mhla": (ours, "sklearn_mhla"),
    "features, Ridge": (ridge, "sklearn"),
    "kernel, KernelRidge": (kernel_ridge, "sklearn"),
    "kernel, himalaya": (himalaya, "himalaya"),
    "features, torch lstsq": (torch_lstsq, "torch"),
}


def measure(name: str, n_rows: int, width: int) -> None:
    """Fit once; print seconds, MB of peak growth and relative error."""
    X, y = make_linear_attention(n_rows + 1000, 8, width, 4, 3, noise=0.1, random_state=0)
    train, fresh = slice(0, n_rows), slice(n_rows, None)
    fit = PEERS[name][0]
    fit(X[:60, :, :3], y[:60])  # load what is loaded lazily
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    predict = fit(X[train], y[train])
    seconds = time.perf_counter() - start
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    residual = y[fresh] - predict(X[fresh])
    print(seconds, growth, (residual**2).sum() / ((y[fresh] - y[fresh].mean(0)) ** 2).sum())


def main(n_rows: int, width: int) -> None:
    """Print the table."""
    p = width * width * (width + 1) // 2
    print(f"{n_rows} rows, d={width}, p={p}, 4 outputs, alpha={ALPHA}\n")
    print("| | seconds | of ours | peak MB | relative error |\n|---|---|---|---|---|")
    first = None
    for name, (_, module) in PEERS.items():
        if importlib.util.find_spec(module) is None:
            print(f"| {name} | not installed | | | |")
            continue
        command = [sys.executable, __file__, "--child", name]
        command += ["--rows", str(n_rows), "--width", str(width)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds, growth, error = map(float, done.stdout.split())
        first = first or seconds
        ratio = seconds / first
        print(f"| {name} | {seconds:.2f} | {ratio:.1f} | {growth:.0f} | {error:.2e} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--width", type=int, default=12)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure(options.child, options.rows, options.width)
    else:
        main(options.rows, options.width)
