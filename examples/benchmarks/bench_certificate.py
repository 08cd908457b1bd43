"""What does a certificate cost?

Two questions, each contender in a process of its own, which makes the data, warms up on a few rows
and then reports the shortest of its times and the growth of its peak memory::

    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python examples/benchmarks/bench_certificate.py

* 20 000 Gaussian sequences of width 16: a certificate against a fit to the same rows. The verdict
  alone, and with the proof that it holds in exact arithmetic.
* Histories of Turing machines, p = 37 926 features: the certificate with the coverage of 500 rows
  of new machines, against a dense eigendecomposition of the kernel of the same rows, the textbook
  way to rank and span. 4800 rows, with ``--full`` 9600.

All contenders use the same number of BLAS threads, one with the line above.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.linalg import eigh

from sklearn_mhla import IdentifiabilityCertificate, MHLARegressor, certify_identifiable
from sklearn_mhla.datasets import make_linear_attention, make_turing_machine

CELLS = 4
STEPS = 8


def many_rows(n_rows: int) -> tuple[Any, Any, Any]:
    """Sequences of 16 tokens of width 16, 16 outputs."""
    return *make_linear_attention(n_rows, 16, 16, 16, 4, noise=0.1, random_state=0), None


def low_rank(n_rows: int) -> tuple[Any, Any, Any]:
    """Histories of random machines, and some of other machines."""
    X, y = make_turing_machine(n_rows // (2 * STEPS), CELLS, n_steps=STEPS, random_state=0)
    new, _ = make_turing_machine(100, CELLS, n_steps=STEPS, random_state=1)
    return X, y, new[:500]


def fit(X: Any, y: Any, new: Any) -> str:
    """Least squares by the moments."""
    return MHLARegressor(method="primal").fit(X, y).method_


def verdict(X: Any, y: Any, new: Any) -> str:
    """Rank, extreme eigenvalues and verdict."""
    return describe(certify_identifiable(X))


def proof(X: Any, y: Any, new: Any) -> str:
    """The same and a proven bound of the smallest eigenvalue."""
    certificate = certify_identifiable(X)
    return f"{describe(certificate)}, proven {certificate.proven}"


def coverage(X: Any, y: Any, new: Any) -> str:
    """Verdict, and which new rows are covered."""
    certificate = certify_identifiable(X)
    return f"{describe(certificate)}, covers {certificate.covers(new).sum()} of {len(new)}"


def describe(certificate: IdentifiabilityCertificate) -> str:
    """In a few words."""
    return f"{certificate.verdict}, rank {certificate.rank} of {certificate.n_features}"


def packed(X: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """States, packed isometrically, and queries of unit length: straight from the definition."""
    rows, columns = np.triu_indices(X[0].shape[1])
    states = np.array([(Z.T @ Z)[rows, columns] for Z in X])
    states *= np.where(rows == columns, 1.0, np.sqrt(2.0))
    queries = np.array([Z[-1] for Z in X])
    return tuple(part / np.linalg.norm(part, axis=1, keepdims=True) for part in (states, queries))


def dense(X: Any, y: Any, new: Any) -> str:
    """Eigenvectors of the kernel of all rows, and the residual of the new ones."""
    states, queries = packed(X)
    kernel = states @ states.T
    kernel *= queries @ queries.T
    values, vectors = eigh(kernel, overwrite_a=True, check_finite=False)
    kept = values > 1e-12 * values[-1]
    new_states, new_queries = packed(new)
    cross = (states @ new_states.T) * (queries @ new_queries.T)
    read = (vectors[:, kept].T @ cross) / np.sqrt(values[kept])[:, None]
    covered = 1.0 - np.square(read).sum(0) < 1e-9
    return f"rank {kept.sum()}, covers {covered.sum()} of {len(new)}"


CONTENDERS: dict[str, tuple[Callable, int]] = {
    "fit": (fit, 5),
    "verdict": (verdict, 5),
    "proof": (proof, 3),
    "coverage": (coverage, 3),
    "dense": (dense, 1),
}
DATA = {"gaussian": many_rows, "turing": low_rank}


def measure(name: str, data: str, n_rows: int) -> None:
    """Print seconds, MB and the result of one contender."""
    run, repeat = CONTENDERS[name]
    few = DATA[data](320)
    run(*few)  # load what is loaded lazily
    everything = DATA[data](n_rows)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        found = run(*everything)
        seconds.append(time.perf_counter() - start)
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(min(seconds), growth, found, sep="\t")


def compare(data: str, n_rows: int, names: tuple[str, ...], base: str) -> None:
    """One line per contender, with ratios to one of them."""
    measured = {}
    for name in (base, *names):
        command = [sys.executable, __file__, name, data, str(n_rows)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds, growth, found = done.stdout.strip().split("\t")
        measured[name] = float(seconds), float(growth)
        times, memory = (a / b for a, b in zip(measured[name], measured[base], strict=True))
        print(
            f"{data}, {n_rows} rows: {name:9} {float(seconds):8.2f} s ({times:.3f} x {base})  "
            f"{float(growth):6.0f} MB ({memory:.2f} x)   {found}",
            flush=True,
        )


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if argument != "--full"]
    if arguments:
        measure(arguments[0], arguments[1], int(arguments[2]))
    else:
        compare("gaussian", 20_000, ("verdict", "proof"), "fit")
        compare("turing", 9600 if "--full" in sys.argv else 4800, ("coverage",), "dense")
