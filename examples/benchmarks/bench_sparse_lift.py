"""Learning to run Turing machines: how fast is a fit of low rank, and how exact?

Random machines, random tapes, histories of eight steps; tested on other machines and histories of
forty steps. Tokens are made of one-hot blocks, so the lift has tens of thousands of features of
which the rows span a few thousand. Times the fit, the certificate of coverage, and, on part of
the rows, the span against a dense eigendecomposition of their kernel and the kernel form::

    python examples/benchmarks/bench_sparse_lift.py [rows for the comparison, 0 for none]
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable

import numpy as np
from scipy.linalg import eigh

from sklearn_mhla import MHLARegressor
from sklearn_mhla._backend import NumpyBackend
from sklearn_mhla._design import Design
from sklearn_mhla._pivoted_cholesky import unit_rows
from sklearn_mhla._span import Span
from sklearn_mhla._tokens import check_sequences
from sklearn_mhla.datasets import make_turing_machine


def timed(function: Callable) -> tuple[float, object]:
    """Seconds and result."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def bench_fit(cells: int, states: int, symbols: int, machines: int) -> None:
    """One size of machine: seconds, rank, coverage and errors on new machines."""
    X, y = make_turing_machine(machines, cells, states, symbols, 8, random_state=0)
    new, truth = make_turing_machine(100, cells, states, symbols, 40, random_state=1)
    seconds, model = timed(lambda: MHLARegressor().fit(X, y))
    design = Design(check_sequences(X), NumpyBackend())
    certified, covered = timed(
        lambda: Span.from_design(design).covers(Design(check_sequences(new), NumpyBackend()))
    )
    error = np.abs(model.predict(new) - truth).max(1)
    outside = error[~covered].max() if not covered.all() else 0.0
    d = X[0].shape[1]
    print(
        f"({cells}, {states}, {symbols})  d={d}  p={d * d * (d + 1) // 2}  rows={len(X)}  "
        f"{model.method_}: fit {seconds:.1f} s, rank {model.rank_};  span and coverage of "
        f"{len(new)} rows {certified:.1f} s, {100 * covered.mean():.2f} % covered;  largest error "
        f"{error[covered].max():.0e} covered, {outside:.0e} not",
        flush=True,
    )


def bench_alternatives(n_rows: int) -> None:
    """The same rows by the forms that see all of their kernel."""
    X, y = make_turing_machine(n_rows // 16, 4, 2, 2, 8, random_state=0)
    design = Design(check_sequences(X), NumpyBackend())
    peak = peak_memory()
    ours, span = timed(lambda: Span.from_design(design))
    ours_memory = peak_memory() - peak
    pivoted, _ = timed(lambda: MHLARegressor(method="pivoted").fit(X, y))

    def dense() -> int:
        rows = unit_rows(design)
        values = eigh(rows.kernel(rows), overwrite_a=True, check_finite=False)[0]
        return int((values > 1e-12 * values[-1]).sum())

    whole, rank = timed(dense)
    dense_memory = peak_memory() - peak
    dual, _ = timed(lambda: MHLARegressor(method="dual").fit(X, y))
    print(
        f"{len(X)} rows, span of rank {span.rank}: {ours:.2f} s, +{ours_memory:.0f} MB;  dense "
        f"eigendecomposition of rank {rank}: {whole:.1f} s, +{dense_memory:.0f} MB;  ratio "
        f"{whole / ours:.0f}"
    )
    print(f"fit: pivoted {pivoted:.2f} s, dual {dual:.1f} s, ratio {dual / pivoted:.1f}")


def peak_memory() -> float:
    """Of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


if __name__ == "__main__":
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 4800
    if rows:  # first: peaks only rise
        bench_alternatives(rows)
    bench_fit(3, 2, 2, 447)
    bench_fit(4, 2, 2, 625)
    bench_fit(5, 2, 2, 1250)
