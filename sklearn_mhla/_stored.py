"""Arrays that stay where they are stored: memory maps, and chunked files read in slices.

Rows are read a block at a time, in the order of the file, and converted to float64 on the way; what
has been read of a memory map is handed back to the operating system. The memory that this
takes depends neither on the number of rows nor on how the file is cut into chunks, as long as one
chunk fits.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy.sparse import issparse

_BLOCK_VALUES = 2**20  # 8 MiB in float64
_GAP = 64  # rows that are rather read in vain than skipped
_AROUND = 2**21  # bytes on both sides that the kernel may map along with those that are touched


def is_stored(X: Any) -> bool:
    """Whether X is a memory map, or an object with ``shape``, ``dtype`` and slices on request.

    The latter is what h5py's datasets and zarr's arrays are. Arrays in memory, of whatever
    library, data frames and Dask collections are not.
    """
    if len(getattr(X, "shape", ())) not in (2, 3):
        return False
    if getattr(getattr(X, "dtype", None), "kind", "") not in tuple("buif"):
        return False
    if isinstance(X, np.ndarray):
        return isinstance(X, np.memmap)
    in_memory = ("__array_interface__", "__dlpack__", "__dask_graph__", "columns")
    return (
        hasattr(X, "__getitem__")
        and not issparse(X)
        and not any(hasattr(X, name) for name in in_memory)
    )


class StoredArray:
    """Sequences ``(n, T, d)`` whose numbers are read when they are asked for.

    Parameters
    ----------
    source : object with ``shape``, ``dtype`` and ``source[start:stop]``
        Of shape (n, T d) or (n, T, d).
    n_tokens : int
        ``T``.
    rows : ndarray of shape (n,), optional
        Rows of the source to use; None stands for all.
    """

    def __init__(self, source: Any, n_tokens: int, rows: np.ndarray | None = None) -> None:
        self._source = source
        self._rows = rows
        n_rows = source.shape[0] if rows is None else len(rows)
        self.shape = (n_rows, n_tokens, math.prod(source.shape[1:]) // n_tokens)
        per_chunk = int((getattr(source, "chunks", None) or (1,))[0])
        wanted = max(1, _BLOCK_VALUES // math.prod(self.shape[1:]))
        # A chunk is decompressed whole: whole chunks at a time, each of them once.
        self._step = max(1, wanted // per_chunk) * per_chunk
        self._cached: tuple[int, np.ndarray] = (0, np.empty((0, *self.shape[1:])))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, chosen: slice | np.ndarray) -> np.ndarray:
        """The chosen sequences in float64."""
        if self._rows is None and isinstance(chosen, slice):
            start, stop, _ = chosen.indices(len(self))
            return self._span(start, stop)
        wanted = np.arange(len(self))[chosen] if self._rows is None else self._rows[chosen]
        distinct, inverse = np.unique(wanted, return_inverse=True)
        runs = np.split(distinct, np.flatnonzero(np.diff(distinct) > _GAP) + 1)
        parts = [self._span(int(run[0]), int(run[-1]) + 1)[run - run[0]] for run in runs]
        return np.concatenate(parts)[inverse]

    def take(self, indices: np.ndarray) -> StoredArray:
        """The chosen sequences, still unread."""
        rows = indices if self._rows is None else self._rows[indices]
        return StoredArray(self._source, self.shape[1], rows)

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """First row and numbers of blocks that together are all rows."""
        for start in range(0, len(self), self._step):
            yield start, self[start : start + self._step]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All of them at once, for what has to hold them in memory."""
        return np.asarray(self[:], dtype=dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_cached": (0, np.empty((0, *self.shape[1:])))}

    def _span(self, start: int, stop: int) -> np.ndarray:
        """Rows of the source from ``start`` to ``stop``."""
        first, block = self._cached
        end = first + len(block)
        if first <= start and stop <= end:
            return block[start - first : stop - first]
        few = self._rows is not None and stop - start <= _GAP
        if few or isinstance(self._source, np.memmap):
            return self._read(start, stop)
        # Whole chunks, and none twice: what is left of the last ones, and those that follow.
        upto = -(-stop // self._step) * self._step
        if first <= start < end:
            block = np.concatenate([block[start - first :], self._read(end, upto)])
        else:
            block = self._read(start // self._step * self._step, upto)
        first = min(upto, self._source.shape[0]) - len(block)
        self._cached = first, block
        return block[start - first : stop - first]

    def _read(self, start: int, stop: int) -> np.ndarray:
        part = self._source[start : min(stop, self._source.shape[0])]
        numbers = np.array(part, dtype=np.float64, order="C").reshape(-1, *self.shape[1:])
        if isinstance(part, np.memmap):
            _let_go(part)
        return numbers


def _let_go(part: np.memmap) -> None:
    """Give the pages of a part of a file back; they count as this process's memory otherwise."""
    mapping: Any = part
    while mapping is not None and not isinstance(mapping, mmap.mmap):
        mapping = getattr(mapping, "base", None)
    # Only of mappings that share the file: private pages may hold changes that are nowhere else.
    shared = getattr(part, "mode", None) in ("r", "r+", "w+")
    if mapping is None or not shared or not hasattr(mmap, "MADV_DONTNEED"):
        return
    origin = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    low, high = np.lib.array_utils.byte_bounds(part)
    start = max(low - origin - _AROUND, 0) // mmap.PAGESIZE * mmap.PAGESIZE
    stop = min(high - origin + _AROUND, len(mapping))
    mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)
