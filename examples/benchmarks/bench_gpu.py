"""Fits on one GPU: time, share of its float64 rate, ratio to the CPU. Unattended, under 4 minutes.

Run it on a machine with one CUDA device::

    python examples/benchmarks/bench_gpu.py

Lines: moments at d=32 with 1e6 rows, which stream through the device in blocks; the dual form at
d=64 with 20 000 rows; conjugate gradients at d=64 with 200 000 rows, a fixed number of iterations.
"Share" is the multiply-adds that cannot be avoided, divided by the time and by the rate of a
float64 matrix product of the device, measured first. The CPU does the same work on a part of the
rows and is scaled up; the part is printed. Coefficients of a smaller problem are compared as well.
``--device cpu --small`` goes through the same code where there is no GPU.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning

from sklearn_mhla import MHLARegressor

N_OUTPUTS, N_TOKENS, CG_ITERATIONS = 4, 4, 20


def synchronize(device: str) -> None:
    """Wait until the device is done."""
    if device != "cpu":
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], device: str) -> float:
    """Time once, after the device is idle."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def matmul_rate(device: str) -> float:
    """Multiply-adds per second of a float64 matrix product."""
    size = 6144 if device != "cpu" else 1536
    a = torch.randn((size, size), dtype=torch.float64, device=device)
    a @ a
    return size**3 / min(seconds(lambda: a @ a, device) for _ in range(3))


def make(n_rows: int, token_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Gaussian tokens in single precision, as such data are kept."""
    random = np.random.default_rng(0)
    X = random.standard_normal((n_rows, N_TOKENS, token_dim), dtype=np.float32)
    return X, random.standard_normal((n_rows, N_OUTPUTS))


def line(
    name: str,
    options: dict[str, object],
    size: tuple[int, int],
    work: Callable[[int, int], float],
    device: str,
    rate: float,
    cpu_rows: int,
) -> None:
    """Fit on the device and a part on the CPU; print time, share and ratio."""
    n_rows, d = size
    X, y = make(n_rows, d)
    MHLARegressor(device=device, **options).fit(X[:400, :, :8], y[:400])
    fitted = MHLARegressor(device=device, **options)
    taken = seconds(lambda: fitted.fit(X, y), device)
    share = work(n_rows, d) / taken / rate
    cpu_rows = min(cpu_rows, n_rows)
    on_cpu = MHLARegressor(device="cpu", **options)
    cpu = seconds(lambda: on_cpu.fit(X[:cpu_rows], y[:cpu_rows]), "cpu")
    ratio = cpu * work(n_rows, d) / work(cpu_rows, d) / taken
    print(
        f"{name:34} {n_rows:8d} rows  {taken:8.2f} s  share {share:5.2f}  "
        f"{ratio:7.1f} x the CPU (from {cpu_rows} rows)",
        flush=True,
    )


def agreement(device: str) -> None:
    """Largest difference of coefficients from those of the CPU, all methods."""
    X, y = make(3000, 10)
    for method in ("primal", "dual", "cg"):
        options = {"method": method, "alpha": 1.0, "tol": 1e-12, "max_iter": 2000}
        here, there = (MHLARegressor(device=k, **options).fit(X, y) for k in (device, "cpu"))
        gap = np.abs(here.coef_ - there.coef_).max() / np.abs(there.coef_).max()
        print(f"{method}: coefficients agree with the CPU's to {gap:.1e}")


def main(device: str, small: bool) -> None:
    """Print all lines."""
    name = torch.cuda.get_device_name() if device != "cpu" else "CPU"
    rate = matmul_rate(device)
    print(f"{name}, torch {torch.__version__}: {2 * rate / 1e12:.2f} TFlop/s in float64\n")

    def pairs(d: int) -> int:
        return d * (d + 1) // 2

    rows, widths = ((1_000_000, 20_000, 200_000), (32, 64)) if not small else ((900,) * 3, (8, 12))
    warnings.simplefilter("ignore", ConvergenceWarning)  # the iterations are cut on purpose
    line(
        f"moments, d={widths[0]}",
        {"method": "primal", "alpha": 1.0},
        (rows[0], widths[0]),
        # Products of state pairs with query pairs, and the Cholesky factorisation.
        lambda n, d: n * pairs(pairs(d)) * pairs(d) + (pairs(d) * d) ** 3 / 3,
        device,
        rate,
        4000,
    )
    line(
        f"dual, d={widths[1]}",
        {"method": "dual", "alpha": 1.0},
        (rows[1], widths[1]),
        lambda n, d: n * n * (pairs(d) + d) / 2 + n**3 / 3,
        device,
        rate,
        4000,
    )
    line(
        f"cg, d={widths[1]}, {CG_ITERATIONS} iterations",
        {"method": "cg", "alpha": 1.0, "max_iter": CG_ITERATIONS, "tol": 0.0},
        (rows[2], widths[1]),
        lambda n, d: 2.0 * CG_ITERATIONS * n * N_OUTPUTS * pairs(d) * d,
        device,
        rate,
        2000,
    )
    print()
    agreement(device)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes that only test the code")
    arguments = parser.parse_args()
    main(arguments.device, arguments.small)
