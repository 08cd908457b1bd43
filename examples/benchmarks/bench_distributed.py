"""What do a second worker and a billion rows cost?

One process starts a Dask cluster of one worker and one of two (a process and a BLAS thread each)
and takes turns with the same moments; every partition is made by the task that sums it::

    python examples/benchmarks/bench_distributed.py

Printed are the least seconds of the turns, processor seconds of the workers, bytes that moved,
memory of a worker, and from the measured rate the arithmetic for 1e9 rows at d=16. Linux only.

On a machine that is busy with other work a second worker gets a second share of the processors.
The ratio of wall-clock times then says little; that of processor seconds (1 is perfect) still
holds.
"""

from __future__ import annotations

import argparse
import os
import resource
import time

import dask
import dask.array as da
import numpy as np
from distributed import Client, LocalCluster

from sklearn_mhla import Moments, distributed

TOKENS, WIDTH = 8, 16
PAIRS = WIDTH * (WIDTH + 1) // 2
# Multiply-adds of one row: S_a S_b for a <= b with q_l q_k for l <= k.
FLOPS_PER_ROW = 2 * (PAIRS * (PAIRS + 1) // 2) * PAIRS


def made(rows: int, block_info=None) -> np.ndarray:
    """Gaussian tokens, where they are needed."""
    seed = block_info[None]["chunk-location"][0]
    return np.random.default_rng(seed).standard_normal((rows, TOKENS, WIDTH))


def targets(X: np.ndarray) -> np.ndarray:
    """One output."""
    return X[:, 0, 0]


def collection(rows: int, n_partitions: int):
    """Sequences that exist nowhere yet."""
    chunks = ((rows,) * n_partitions, TOKENS, WIDTH)
    return da.map_blocks(made, rows, chunks=chunks, dtype=float, meta=np.empty((0, 0, 0)))


def state_of_worker(dask_worker) -> tuple[float, int, int]:
    """Processor seconds, peak resident bytes and bytes received so far."""
    received = sum(entry["total"] for entry in dask_worker.transfer_incoming_log)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return time.process_time(), peak, received


def turn(client: Client, X) -> tuple[float, float, int, int]:
    """Seconds, processor seconds, bytes received and largest peak of a worker."""
    before = client.run(state_of_worker)
    start = time.perf_counter()
    with client.as_current():
        distributed.moments(X, X.map_blocks(targets, drop_axis=(1, 2), dtype=float))
    seconds = time.perf_counter() - start
    after = client.run(state_of_worker)
    spent = sum(after[worker][0] - before[worker][0] for worker in after)
    received = sum(after[worker][2] - before[worker][2] for worker in after)
    return seconds, spent, received, max(peak for _, peak, _ in after.values())


def main() -> None:
    """Compare one worker with two."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2500, help="of one partition")
    parser.add_argument("--partitions", type=int, default=24)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    n_rows = arguments.rows * arguments.partitions
    X = collection(arguments.rows, arguments.partitions)
    options = {"threads_per_worker": 1, "processes": True, "dashboard_address": ":0"}
    options["env"] = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    options["worker_dashboard_address"] = None
    with (
        dask.config.set(scheduler="distributed"),
        LocalCluster(n_workers=1, **options) as one,
        LocalCluster(n_workers=2, **options) as two,
        Client(one, set_as_default=False) as first,
        Client(two, set_as_default=False) as second,
    ):
        warm = collection(10, 4)
        idle = max(turn(client, warm)[3] for client in (first, second))  # libraries loaded
        results = {1: [], 2: []}
        for _ in range(arguments.turns):
            results[1].append(turn(first, X))
            results[2].append(turn(second, X))
    least = {n: np.min(turns, axis=0) for n, turns in results.items()}
    load = os.getloadavg()[0]
    print(
        f"d={WIDTH}, T={TOKENS}, {arguments.partitions} partitions of {arguments.rows} rows; "
        f"{os.cpu_count()} cores, load {load:.0f}; minimum of {arguments.turns} turns"
    )
    for n, (seconds, spent, received, peak) in least.items():
        print(
            f"{n} worker(s): {seconds:6.2f} s, {spent:6.2f} processor s, "
            f"{received / 1e6:6.1f} MB moved, peak of a worker {(peak - idle) / 1e6:.0f} MB above "
            "that of an idle one"
        )
    print(f"wall clock, 1 worker / 2 workers: {least[1][0] / least[2][0]:.2f} (target 2)")
    print(f"processor time, 2 workers / 1 worker: {least[2][1] / least[1][1]:.2f} (target 1)")
    rate = n_rows * FLOPS_PER_ROW / least[1][1]
    one_row = Moments.from_data(np.ones((1, TOKENS, WIDTH)), np.ones(1))
    size = sum(value.nbytes for value in vars(one_row).values() if isinstance(value, np.ndarray))
    print(
        f"1e9 rows: {1e9 * FLOPS_PER_ROW:.2g} flops; {rate / 1e9:.1f} GFLOP/s a core, "
        f"{1e9 * FLOPS_PER_ROW / rate / 3600:.1f} core hours; {size / 1e6:.1f} MB per partition "
        f"(p^2/4 doubles: {2 * (PAIRS * WIDTH) ** 2 / 1e6:.1f} MB); "
        f"tokens {1e9 * TOKENS * WIDTH * 8 / 1e12:.1f} TB"
    )


if __name__ == "__main__":
    main()
