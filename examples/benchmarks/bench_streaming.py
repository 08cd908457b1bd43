"""How much memory and time do data on disk take?

Every line is a process of its own, which opens its file, fits and reports by how much its peak
resident memory, mapped files included, exceeds what it held before. Linux only::

    python examples/benchmarks/bench_streaming.py

``partial_fit`` gets batches of 10 000 sequences of a memory map; ``fit`` gets the memory map, the
HDF5 data set or the zarr array whole. The first three lines differ in the number of rows only: time
is to be proportional to it and memory the same. ``M01`` is a fit of 100 000 rows in memory at
d=20, whose feature matrix would take 3.4 GB.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from sklearn_mhla import MHLARegressor

BATCH = 10_000


def write(path: Path, n_rows: int, n_tokens: int, token_dim: int, kind: str = "npy") -> None:
    """Write Gaussian tokens block by block."""
    shape, random = (n_rows, n_tokens, token_dim), np.random.default_rng(0)
    if kind == "npy":
        X = np.lib.format.open_memmap(path, mode="w+", dtype=np.float64, shape=shape)
    elif kind == "hdf5":
        import h5py

        X = h5py.File(path, "w").create_dataset("X", shape=shape, chunks=(4000, *shape[1:]))
    else:
        import zarr

        X = zarr.create_array(path, shape=shape, dtype="float64", chunks=(4000, *shape[1:]))
    for start in range(0, n_rows, BATCH):
        stop = min(start + BATCH, n_rows)
        X[start:stop] = random.standard_normal((stop - start, *shape[1:]))


def open_stored(path: Path, kind: str):
    """Open what was written, without reading it."""
    if kind == "npy":
        return np.load(path, mmap_mode="r")
    if kind == "hdf5":
        import h5py

        return h5py.File(path, "r")["X"]
    import zarr

    return zarr.open_array(path, mode="r")


def memory(field: str) -> int:
    """Resident memory now (VmRSS) or at its peak (VmHWM), in bytes."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def measure(task: str, kind: str, path: Path) -> None:
    """Fit once in this process and print seconds and growth."""
    X = open_stored(path, kind)
    y = np.random.default_rng(1).standard_normal(X.shape[0])
    if task == "M01":
        X = np.array(X)
    model = MHLARegressor(alpha=1.0, method="primal")
    MHLARegressor(method="primal").fit(np.ones((9, 1, 2)), np.ones(9))  # libraries loaded
    before, start = memory("VmRSS:"), time.perf_counter()
    if task == "partial_fit":
        for first in range(0, len(X), BATCH):
            model.partial_fit(X[first : first + BATCH], y[first : first + BATCH])
    else:
        model.fit(X, y)
    assert np.isfinite(model.coef_).all()
    print(time.perf_counter() - start, memory("VmHWM:") - before)


def main() -> None:
    """Run every case in a process of its own."""
    print(
        f"{'':34} {'rows':>9} {'d':>3} {'T':>3} {'file':>9} {'seconds':>8} {'growth':>9}   target"
    )
    cases = [
        ("partial_fit", "npy", 1_000, 4, 16),
        ("partial_fit", "npy", 30_000, 4, 16),
        ("partial_fit", "npy", 1_000_000, 4, 16),
        ("fit", "npy", 100_000, 4, 16),
        ("fit", "hdf5", 100_000, 4, 16),
        ("fit", "zarr", 100_000, 4, 16),
        ("M01", "npy", 100_000, 5, 20),
    ]
    for task, kind, n_rows, n_tokens, token_dim in cases:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"X.{kind}"
            size = (n_rows, n_tokens, token_dim)
            for command in (["write", kind, path, *size], [task, kind, path]):
                done = subprocess.run(
                    [sys.executable, __file__, *map(str, command)],
                    check=True,
                    capture_output=True,
                    text=True,
                )
        seconds, growth = map(float, done.stdout.split())
        print(
            f"{task + ' from ' + kind:22} {n_rows:9} {token_dim:3} {n_tokens:3} "
            f"{8 * n_rows * n_tokens * token_dim / 1e6:6.0f} MB {seconds:8.1f} "
            f"{growth / 1e6:6.0f} MB  1000 MB",
            flush=True,
        )


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    elif sys.argv[1] == "write":
        write(Path(sys.argv[3]), *map(int, sys.argv[4:]), kind=sys.argv[2])
    else:
        measure(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
