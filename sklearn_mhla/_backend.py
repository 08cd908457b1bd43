"""NumPy or torch: array creation, placement and dense linear algebra.

This is the only module that knows both libraries. Everything above it is written with
operators that NumPy >= 2 and torch share (``@ + * .mT .reshape`` and indexing) plus the few
operations below, so the CPU and the CUDA path are the same code. torch is imported only when
a tensor or a CUDA device shows up.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from scipy.linalg import blas, cho_solve, lapack, qr, solve_triangular, svd

# A float64 array of either library. NumPy's own annotation cannot describe both.
Array = Any


# Rows of a panel of the Cholesky factorisation: large, so that nearly all work is matrix products.
_PANEL = 4096


class NotPositiveDefiniteError(ArithmeticError):
    """Raised when a Cholesky factorisation meets a pivot that is not positive."""


class Backend(Protocol):
    """The operations that NumPy and torch spell differently. All arrays are float64."""

    name: str

    def asarray(self, values: Any) -> Array:
        """Contiguous float64 array on this backend's device; no copy where none is needed."""

    def to_numpy(self, array: Array) -> np.ndarray:
        """The same numbers as a NumPy array."""

    def empty(self, shape: tuple[int, ...]) -> Array:
        """Uninitialised float64 array."""

    def zeros(self, shape: tuple[int, ...]) -> Array:
        """Zero-filled float64 array."""

    def index(self, indices: Any) -> Array:
        """Integer indices in the form this backend indexes fastest with."""

    def take(self, array: Array, indices: Array) -> Array:
        """Columns ``array[..., indices]``."""

    def multiply(self, left: Array, right: Array, out: Array) -> Array:
        """Elementwise product written into ``out``."""

    def matmul(self, left: Array, right: Array, out: Array) -> Array:
        """Matrix product written into ``out``."""

    def tril(self, array: Array) -> Array:
        """Lower triangle, zeros above."""

    def cumulative_sum(self, array: Array, axis: int) -> Array:
        """Running sum along ``axis``, in place."""

    def add_product(self, total: Array, left: Array, right: Array) -> None:
        """``total += left @ right`` without a temporary; all three C-contiguous."""

    def cholesky(self, matrix: Array) -> Array:
        """Lower Cholesky factor, overwriting the C-contiguous ``matrix`` (lower triangle read)."""

    def cholesky_solve(self, factor: Array, rhs: Array) -> Array:
        """Solve ``L L^T x = rhs`` for lower triangular ``L``; its diagonal may be negative."""

    def solve_triangular(self, factor: Array, rhs: Array, transposed: bool = False) -> Array:
        """Solve ``L x = rhs``, or ``L^T x = rhs``; may overwrite ``rhs``. Both C-contiguous."""

    def inverse_one_norm(self, factor: Array) -> float:
        """Estimate of ``||A^-1||_1`` for the matrix that :meth:`cholesky` factored."""

    def range_eigh(self, matrix: Array, floor: float) -> tuple[Array, Array]:
        """Eigenvectors (n, r) and descending eigenvalues (r,) of the range of ``A``.

        ``A`` is positive semidefinite, C-contiguous, its lower triangle read; may overwrite it.
        Its entries are known up to ``floor``: what is left of them then need not be factored.
        """

    def triangle(self, matrix: Array) -> Array:
        """``R`` (k, n) of ``A = Q R`` for ``A`` (rows, n), ``k = min(rows, n)``."""

    def svd(self, matrix: Array) -> tuple[Array, Array, Array]:
        """``U``, descending singular values and ``V^T`` of a matrix, thin."""

    def eigh(self, matrix: Array) -> tuple[Array, Array]:
        """Ascending eigenvalues and eigenvectors of a symmetric lower triangle."""

    def solve(self, matrices: Array, rhs: Array) -> Array:
        """Solutions ``(k, n, m)`` of ``k`` systems of order ``n``."""

    def inverse_root_power_of_two(self, values: Array) -> Array:
        """Powers of two near ``1 / sqrt(values)``; 1 where a value is not positive."""

    def available_memory(self) -> int:
        """Bytes that an allocation may still use on this device."""


class NumpyBackend:
    """NumPy arrays, BLAS and LAPACK through SciPy."""

    name = "cpu"

    def asarray(self, values: Any) -> np.ndarray:
        return np.ascontiguousarray(to_numpy(values), dtype=np.float64)

    def to_numpy(self, array: np.ndarray) -> np.ndarray:
        return array

    def empty(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.empty(shape)

    def zeros(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.zeros(shape)

    def index(self, indices: Any) -> np.ndarray:
        return np.asarray(indices, dtype=np.intp)

    def take(self, array: np.ndarray, indices: np.ndarray) -> np.ndarray:
        return np.take(array, indices, axis=-1)

    def multiply(self, left: np.ndarray, right: np.ndarray, out: np.ndarray) -> np.ndarray:
        np.multiply(left, right, out=out)
        return out

    def matmul(self, left: np.ndarray, right: np.ndarray, out: np.ndarray) -> np.ndarray:
        np.matmul(left, right, out=out)
        return out

    def tril(self, array: np.ndarray) -> np.ndarray:
        return np.tril(array)

    def cumulative_sum(self, array: np.ndarray, axis: int) -> np.ndarray:
        np.add.accumulate(array, axis=axis, out=array)
        return array

    def add_product(self, total: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
        # NumPy and SciPy bring a BLAS each; their idle threads spin against each other's.
        total += left @ right

    def cholesky(self, matrix: np.ndarray) -> np.ndarray:
        # In panels: the threaded dpotrf of OpenBLAS crashes on orders of about 16 000.
        order = len(matrix)
        for start in range(0, order, _PANEL):
            stop = min(start + _PANEL, order)
            corner, below = matrix[start:stop, start:stop], matrix[stop:, start:stop]
            # The lower triangle in row order is the upper triangle in LAPACK's column order.
            whole = start == 0 and stop == order
            own = corner if whole else np.ascontiguousarray(corner)
            factor, info = lapack.dpotrf(own.T, lower=0, clean=0, overwrite_a=1)
            if info != 0:
                raise NotPositiveDefiniteError(f"pivot {start + info} is not positive")
            if whole:
                lower: np.ndarray = factor.T
                return lower
            corner[...] = factor.T
            below[...] = solve_triangular(
                factor, below.T, trans="T", lower=False, check_finite=False
            ).T
            for row in range(stop, order, _PANEL):
                rows = slice(row, min(row + _PANEL, order))
                left = matrix[rows, start:stop]
                matrix[rows, stop : rows.stop] -= left @ matrix[stop : rows.stop, start:stop].T
        return matrix

    def cholesky_solve(self, factor: np.ndarray, rhs: np.ndarray) -> np.ndarray:
        solution: np.ndarray = cho_solve((factor.T, False), rhs, check_finite=False)
        return np.ascontiguousarray(solution)

    def solve_triangular(
        self, factor: np.ndarray, rhs: np.ndarray, transposed: bool = False
    ) -> np.ndarray:
        # L x = b read in column order: x^T L^T = b^T, so that nothing is copied.
        solution = blas.dtrsm(1.0, factor.T, rhs.T, side=1, trans_a=transposed, overwrite_b=1)
        return np.asarray(solution).T

    def inverse_one_norm(self, factor: np.ndarray) -> float:
        # LAPACK divides its estimate by the norm it is given.
        reciprocal = float(lapack.dpocon(factor.T, 1.0, uplo="U")[0])
        return 1.0 / reciprocal if reciprocal > 0.0 else float("inf")

    def range_eigh(self, matrix: np.ndarray, floor: float) -> tuple[np.ndarray, np.ndarray]:
        # LAPACK takes the first pivot whatever its size.
        if not matrix.diagonal().max() > floor:
            return np.empty((len(matrix), 0)), np.empty(0)
        # Pivoted Cholesky stops at the rank: n r^2 operations, where an eigendecomposition
        # takes about 9 n^3 whatever the rank. A = L L^T with L = Q R = (Q U) s V^T.
        factor, pivots, rank, _ = lapack.dpstrf(matrix.T, tol=floor, lower=0, overwrite_a=1)
        columns = np.empty((len(matrix), rank), order="F")
        columns[pivots - 1] = np.tril(factor.T[:, :rank])
        basis, upper = qr(columns, mode="economic", overwrite_a=True, check_finite=False)
        left, singular, _ = svd(upper, check_finite=False)
        return basis @ left, singular**2

    def triangle(self, matrix: np.ndarray) -> np.ndarray:
        return np.asarray(np.linalg.qr(matrix, mode="r"))

    def svd(self, matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        left, singular, right = svd(matrix, full_matrices=False, check_finite=False)
        return left, singular, right

    def eigh(self, matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        eigenvalues, eigenvectors = np.linalg.eigh(matrix, UPLO="L")
        return eigenvalues, eigenvectors

    def solve(self, matrices: np.ndarray, rhs: np.ndarray) -> np.ndarray:
        return np.linalg.solve(matrices, rhs)

    def inverse_root_power_of_two(self, values: np.ndarray) -> np.ndarray:
        exponent = np.frexp(np.where(values > 0.0, values, 0.5))[1]
        powers: np.ndarray = np.ldexp(1.0, -(exponent // 2))
        return powers

    def available_memory(self) -> int:
        return _free_ram()


class TorchBackend:
    """torch tensors on one device; the same operations as :class:`NumpyBackend`."""

    def __init__(self, device: Any) -> None:
        self.torch = import_torch("this computation")
        self.device = self.torch.device(device)
        self.name = str(self.device)

    def asarray(self, values: Any) -> Array:
        tensor = values if is_tensor(values) else self.torch.from_numpy(_writable(values))
        return tensor.detach().to(self.device, self.torch.float64).contiguous()

    def to_numpy(self, array: Array) -> np.ndarray:
        numbers: np.ndarray = to_numpy(array)
        return numbers

    def empty(self, shape: tuple[int, ...]) -> Array:
        return self.torch.empty(shape, dtype=self.torch.float64, device=self.device)

    def zeros(self, shape: tuple[int, ...]) -> Array:
        return self.torch.zeros(shape, dtype=self.torch.float64, device=self.device)

    def index(self, indices: Any) -> Array:
        return self.torch.tensor(indices, dtype=self.torch.int64, device=self.device)

    def take(self, array: Array, indices: Array) -> Array:
        return array.index_select(-1, indices)

    def multiply(self, left: Array, right: Array, out: Array) -> Array:
        return self.torch.mul(left, right, out=out)

    def matmul(self, left: Array, right: Array, out: Array) -> Array:
        return out.copy_(left @ right)

    def tril(self, array: Array) -> Array:
        return array.tril()

    def cumulative_sum(self, array: Array, axis: int) -> Array:
        return array.cumsum_(axis)

    def add_product(self, total: Array, left: Array, right: Array) -> None:
        total.addmm_(left, right)

    def cholesky(self, matrix: Array) -> Array:
        factor, info = self.torch.linalg.cholesky_ex(matrix)
        if int(info) != 0:
            raise NotPositiveDefiniteError(f"pivot {int(info)} is not positive")
        return factor

    def cholesky_solve(self, factor: Array, rhs: Array) -> Array:
        return self.torch.cholesky_solve(rhs, factor)

    def solve_triangular(self, factor: Array, rhs: Array, transposed: bool = False) -> Array:
        matrix = factor.mT if transposed else factor
        return self.torch.linalg.solve_triangular(matrix, rhs, upper=transposed)

    def inverse_one_norm(self, factor: Array) -> float:
        # torch has no LAPACK pocon; Hager's estimator (Higham, "Accuracy and Stability of
        # Numerical Algorithms", section 15.2) needs a few solves.
        size = factor.shape[0]
        trial = self.zeros((size, 1)) + 1.0 / size
        estimate = 0.0
        for _ in range(5):
            image = self.cholesky_solve(factor, trial)
            value = float(image.abs().sum())
            if not value > estimate:
                break
            estimate = value
            slope = self.cholesky_solve(factor, image.sign()).abs().reshape(-1)
            trial = self.zeros((size, 1))
            trial[int(slope.argmax())] = 1.0
        return estimate

    def range_eigh(self, matrix: Array, floor: float) -> tuple[Array, Array]:
        # torch has no pivoted Cholesky.
        eigenvalues, eigenvectors = self.torch.linalg.eigh(matrix)
        kept = slice(int((eigenvalues <= 0.0).sum()), None)
        return eigenvectors[:, kept].flip(1), eigenvalues[kept].flip(0)

    def triangle(self, matrix: Array) -> Array:
        return self.torch.linalg.qr(matrix, mode="r")[1]

    def svd(self, matrix: Array) -> tuple[Array, Array, Array]:
        left, singular, right = self.torch.linalg.svd(matrix, full_matrices=False)
        return left, singular, right

    def eigh(self, matrix: Array) -> tuple[Array, Array]:
        eigenvalues, eigenvectors = self.torch.linalg.eigh(matrix)
        return eigenvalues, eigenvectors

    def solve(self, matrices: Array, rhs: Array) -> Array:
        return self.torch.linalg.solve(matrices, rhs)

    def inverse_root_power_of_two(self, values: Array) -> Array:
        exponent = self.torch.frexp(self.torch.where(values > 0.0, values, 0.5))[1]
        powers = self.torch.div(exponent, 2, rounding_mode="floor").to(values.dtype)
        return self.torch.exp2(-powers)

    def available_memory(self) -> int:
        if self.device.type == "cuda":
            return int(self.torch.cuda.mem_get_info(self.device)[0])
        return _free_ram()


def backend_for(
    device: str | None,
    input_device: str | None,
    *,
    torch_on_cpu: bool = False,
    fall_back: bool = False,
) -> Backend:
    """Choose where to compute.

    Parameters
    ----------
    device : str or None
        The estimator's ``device``; None follows the input.
    input_device : str or None
        Device of the input if it was a torch tensor, else None.
    torch_on_cpu : bool
        Use torch on the CPU as well.
    fall_back : bool
        Warn and use the CPU where the CUDA device is missing, rather than raise.
    """
    chosen = device if device is not None else (input_device or "cpu")
    if chosen != "cpu":
        if not isinstance(chosen, str) or re.fullmatch(r"cuda(:\d+)?", chosen) is None:
            raise ValueError(
                f"device must be None, 'cpu', 'cuda' or 'cuda:<index>'; got {device!r}."
            )
        missing = _missing_device(chosen, fall_back)
        if missing is None:
            return TorchBackend(chosen)
        if not fall_back:
            raise ValueError(
                f"device={chosen!r} was asked for, but {missing}; use device='cpu' or device=None."
            )
        warnings.warn(
            f"The model has device={chosen!r}, but {missing}; computing on the CPU instead. "
            "set_params(device=None) silences this warning.",
            UserWarning,
            stacklevel=4,
        )
    return TorchBackend("cpu") if torch_on_cpu else NumpyBackend()


def _missing_device(chosen: str, torch_may_be_missing: bool) -> str | None:
    """Why a CUDA device cannot be used; None if it can."""
    try:
        torch = import_torch(f"device={chosen!r}")
    except ImportError:
        if torch_may_be_missing:
            return "torch is not installed"
        raise
    if not torch.cuda.is_available():
        return "torch finds no CUDA device on this machine"
    n_devices = torch.cuda.device_count()
    if int(chosen.partition(":")[2] or 0) >= n_devices:
        return f"torch finds {n_devices} CUDA device(s) on this machine"
    return None


@contextmanager
def one_torch_thread() -> Iterator[Any]:
    """One thread for torch, the caller's number afterwards; yields torch.

    Sums over several threads depend on their number, and training amplifies the last bit. With
    one thread a seed gives the same model in any process, and a step of small products is no
    slower.
    """
    torch = import_torch("solver='sgd'")
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            yield torch
    finally:
        torch.set_num_threads(n_threads)


def import_torch(purpose: str) -> Any:
    """Import torch on demand, with an error that says what to install."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"{purpose} needs torch, which could not be imported. Install it with "
            "`pip install torch`."
        ) from error
    return torch


def is_tensor(values: Any) -> bool:
    """Whether ``values`` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(values, torch.Tensor)


def is_dask(values: Any) -> bool:
    """Whether ``values`` is a Dask collection, without importing Dask."""
    dask = sys.modules.get("dask.base")
    return dask is not None and bool(dask.is_dask_collection(values))


def tensor_device(values: Any) -> str | None:
    """Device of a torch tensor as text, None for anything else."""
    return str(values.device) if is_tensor(values) else None


def to_numpy(values: Any) -> Any:
    """A torch tensor as a NumPy array (shared memory on the CPU); anything else unchanged."""
    if not is_tensor(values):
        return values
    tensor = values.detach().cpu()
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4:
        tensor = tensor.float()  # NumPy has no bfloat16
    return tensor.numpy()


def as_input_kind(array: np.ndarray, input_device: str | None) -> Array:
    """Results leave in the library and on the device their input came from."""
    if input_device is None:
        return array
    return import_torch("tensor output").from_numpy(array).to(input_device)


def _writable(values: Any) -> np.ndarray:
    """Torch warns about read-only memory that it never writes; hand it a private copy."""
    array = np.ascontiguousarray(values, dtype=np.float64)
    return array if array.flags.writeable else array.copy()


def _free_ram() -> int:
    """Memory that this process may still use, in bytes: of the machine and of its container."""
    free = _free_physical()
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as most:
            limit = int(most.read())
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as used:
            return min(free, limit - int(used.read()))
    except (OSError, ValueError):  # no limit
        return free


def _free_physical() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return 8 * 2**30
