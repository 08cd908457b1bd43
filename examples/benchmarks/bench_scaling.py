"""How do time and memory grow with rows and with the width of the tokens?

Every fit is a process of its own, which makes its data, fits once on a small part to load what is
loaded lazily, then fits once and reports seconds of processor time and the growth of its peak
memory beyond the data. Slopes are of log time against log size, fitted over the upper half of the
sizes, where constants no longer matter::

    python examples/benchmarks/bench_scaling.py [--quick]

Expected: slope 1 in rows and flat memory; in the number of features, moments no worse than
``p^2`` per row (slope 2) while the rows dominate, dual no worse than ``d^2`` (slope 2/3 in p).
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

import numpy as np

from sklearn_mhla import MHLARegressor

N_TOKENS = 4


def measure(method: str, n_rows: int, token_dim: int) -> None:
    """Fit once; print seconds of processor time and MB of peak growth."""
    random = np.random.default_rng(0)
    X = random.standard_normal((n_rows, N_TOKENS, token_dim), dtype=np.float32)
    y = random.standard_normal((n_rows, 2))
    model = MHLARegressor(method=method, alpha=1.0)
    model.fit(X[:300, :, :4], y[:300])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    model.fit(X, y)
    seconds = time.process_time() - start
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(seconds, growth)


def child(method: str, n_rows: int, token_dim: int) -> tuple[float, float]:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, "--child", method, str(n_rows), str(token_dim)]
    seconds, growth = subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.split()
    return float(seconds), float(growth)


def series(title: str, method: str, sizes: list[tuple[int, int]], by: str) -> None:
    """Print one series and its slope."""
    print(f"\n{title}\n{'rows':>9} {'d':>4} {'p':>8} {'seconds':>9} {'peak MB':>8}")
    x, seconds = [], []
    for n_rows, d in sizes:
        p = d * d * (d + 1) // 2
        time_taken, growth = child(method, n_rows, d)
        print(f"{n_rows:9d} {d:4d} {p:8d} {time_taken:9.3f} {growth:8.0f}", flush=True)
        x.append(n_rows if by == "rows" else p)
        seconds.append(time_taken)
    upper = slice(len(x) // 2 - (len(x) > 3), None)
    slope = np.polyfit(np.log(x[upper]), np.log(seconds[upper]), 1)[0]
    print(f"slope against {by}: {slope:.2f}")


def main(quick: bool) -> None:
    """Run all series."""
    top = 5 if quick else 6
    rows = [int(r) for r in np.logspace(3, top, 2 * (top - 3) + 1)]
    series("moments, against rows", "primal", [(n, 12) for n in rows], "rows")
    widths = [4, 6, 8, 12, 16, 20] + ([] if quick else [24])
    series("moments, against width", "primal", [(20_000, d) for d in widths], "p")
    widths = [4, 8, 16, 32, 64, 96]
    series("dual, against width", "dual", [(1_500, d) for d in widths], "p")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="1e5 rows at most, d <= 20")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure(options.child[0], int(options.child[1]), int(options.child[2]))
    else:
        main(options.quick)
