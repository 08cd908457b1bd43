"""Conjugate gradients against forming and factoring the moments, at d=32 with 40 000 rows.

Every contender is a process of its own that makes the data, then solves the same problem (4
outputs, noise, no penalty) once; memory is the growth of its peak from there on, for the moments
the bytes that its solver declares. Seconds are processor time of one thread, so that others on the
machine disturb them little::

    OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 python examples/benchmarks/bench_cg.py

The primal form would take minutes for its 5.7e12 multiply-adds, so moments are formed from every
tenth sequence and their time is multiplied by ten; the Cholesky factorisation is timed at half the
order and its time is multiplied by eight.
Conjugate gradients run with the preconditioner, without it, with tokens that are correlated, and
with states formed anew in every pass. ``floor`` is one pass of the two bare matrix products. The
gradient is relative to that of the zero model, in the Euclidean norm and from scratch.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np

from sklearn_mhla._backend import NumpyBackend
from sklearn_mhla._design import Design
from sklearn_mhla._sums import Sums
from sklearn_mhla._tokens import check_sequences
from sklearn_mhla.datasets import make_linear_attention
from sklearn_mhla.solvers import CGSolver, LeastSquaresProblem, PrimalSolver

ROWS, TOKENS, WIDTH, OUTPUTS = 40_000, 16, 32, 4
TOL = 1e-10


def problem(rows: int, correlated: bool = False) -> LeastSquaresProblem:
    """Noisy targets of four heads."""
    X, y = make_linear_attention(rows, TOKENS, WIDTH, OUTPUTS, 4, noise=0.1, random_state=0)
    if correlated:
        X = X @ np.linalg.cholesky(0.1 * np.eye(WIDTH) + 0.9).T
    return LeastSquaresProblem(Design(check_sequences(X), NumpyBackend()), y, None, False)


def peak() -> float:
    """Largest memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def moments(step: int = 10) -> dict[str, Any]:
    """Time and memory of the moments and of their factorisation."""
    part = problem(ROWS // step)
    start = time.process_time()
    Sums.from_design(part.design, part.targets, None)
    forming = (time.process_time() - start) * step
    half = part.size.n_features // 2
    matrix = np.eye(half) + 1.0 / half
    start = time.process_time()
    part.backend.cholesky(matrix)
    factoring = 8 * (time.process_time() - start)
    return {"seconds": forming + factoring, "megabytes": PrimalSolver.memory(part.size) / 1e6}


def conjugate_gradients(kind: str) -> dict[str, Any]:
    """Time, memory, iterations and the gradient that was reached."""
    whole = problem(ROWS, kind == "correlated")
    if kind == "forming":
        NumpyBackend.available_memory = lambda self: 0  # type: ignore[method-assign]
    before, start = peak(), time.process_time()
    solver = CGSolver(whole, tol=TOL)
    if kind == "plain":
        solver.kronecker = solver.kronecker.flat()
    solution = solver.solve(0.0)
    seconds, memory = time.process_time() - start, peak() - before
    residual, _ = whole.residual(solution.coef)
    gradient = np.linalg.norm(whole.design.rmatvec(residual))
    gradient /= np.linalg.norm(whole.design.rmatvec(whole.targets))
    return {
        "seconds": seconds,
        "megabytes": memory,
        "iterations": solution.n_iter,
        "gradient": float(gradient),
    }


def floor() -> dict[str, Any]:
    """The two products of one pass, bare, on packed states that exist already."""
    random = np.random.default_rng(0)
    state = random.standard_normal((ROWS, WIDTH * (WIDTH + 1) // 2))
    coef = random.standard_normal((state.shape[1], (OUTPUTS + 1) * WIDTH))

    def once() -> None:
        for first in range(0, ROWS, 256):
            block = state[first : first + 256]
            block.T @ (block @ coef)

    once()
    times = []
    for _ in range(5):
        start = time.process_time()
        once()
        times.append(time.process_time() - start)
    return {"seconds": min(times), "megabytes": 0.0}


CONTENDERS = {
    "moments and Cholesky": moments,
    "cg": lambda: conjugate_gradients("kronecker"),
    "cg, states formed in every pass": lambda: conjugate_gradients("forming"),
    "cg, no preconditioner": lambda: conjugate_gradients("plain"),
    "cg, tokens correlated 0.9": lambda: conjugate_gradients("correlated"),
    "floor of one iteration": floor,
}


def main() -> None:
    """Run every contender in its own process and print ratios to the first."""
    reference = None
    print(f"{'':34}{'seconds':>9}{'ratio':>8}{'MB':>7}{'iterations':>12}{'gradient':>10}")
    for name in CONTENDERS:
        command = [sys.executable, __file__, name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found = json.loads(done.stdout)
        reference = reference or found["seconds"]
        print(
            f"{name:34}{found['seconds']:9.2f}{found['seconds'] / reference:8.3f}"
            f"{found['megabytes']:7.0f}{found.get('iterations', ''):>12}"
            + (f"{found['gradient']:10.1e}" if "gradient" in found else ""),
            flush=True,
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(CONTENDERS[sys.argv[1]]()))
    else:
        main()
