"""Arrays on disk: read in slices, in order, as often as needed, and never whole."""

from __future__ import annotations

import copy
import pickle
import sys

import h5py
import numpy as np
import pandas as pd
import pytest
import reference
import scipy.sparse
import zarr

from sklearn_mhla import MHLARegressor, Moments, _design, _stored
from sklearn_mhla._stored import StoredArray, is_stored
from sklearn_mhla._tokens import check_sequences
from sklearn_mhla.preprocessing import TokenScaler

KINDS = ["memory map", "hdf5", "hdf5 contiguous", "zarr"]


class Recorder:
    """An array on disk reduced to what is promised to be enough; remembers what was read."""

    def __init__(self, values, chunk=1):
        self._values = values
        self.shape, self.dtype, self.chunks = values.shape, values.dtype, (chunk, *values.shape[1:])
        self.read = []

    def __getitem__(self, chosen):
        assert isinstance(chosen, slice)
        assert chosen.step is None
        assert 0 <= chosen.start < chosen.stop <= len(self._values)
        self.read.append((chosen.start, chosen.stop))
        return self._values[chosen]


@pytest.fixture
def store(tmp_path):
    """Put an array on disk and open it in one of the ways."""
    opened = []

    def put(values, kind):
        path = tmp_path / f"array{len(opened)}"
        chunks = (7, *values.shape[1:])
        if kind == "memory map":
            np.save(path, values)
            array = np.load(f"{path}.npy", mmap_mode="r")
        elif kind == "zarr":
            array = zarr.create_array(path, shape=values.shape, dtype=values.dtype, chunks=chunks)
            array[:] = values
        else:
            file = h5py.File(path, "w")
            array = file.create_dataset(
                "X", data=values, chunks=None if "contiguous" in kind else chunks
            )
        opened.append(getattr(array, "file", None))
        return array

    yield put
    for file in opened:
        if file is not None:
            file.close()


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of a few rows, so that small arrays have many."""
    monkeypatch.setattr(_stored, "_BLOCK_VALUES", 150)
    monkeypatch.setattr(_stored, "_GAP", 2)
    monkeypatch.setattr(_design, "_STATE_BUDGET", 0)
    monkeypatch.setattr(_design, "_MIN_ROWS", 6)


def example(n_samples=50):
    X = reference.make_sequences(0.3, n_samples)
    random = np.random.default_rng(4)
    weights = random.uniform(0.1, 3.0, n_samples)
    weights[5:9] = weights[30] = 0.0
    return X, random.standard_normal((n_samples, 2)), weights


# Reading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int16, np.uint8, np.bool_])
def test_rows_are_those_of_the_array(store, small_blocks, kind, flat, dtype):
    values = (10.0 * reference.make_sequences(5.0, 50)).astype(dtype)
    stored = StoredArray(store(values.reshape(50, -1) if flat else values, kind), 5)
    assert stored.shape == (50, 5, 3)
    random = np.random.default_rng(0)
    part = stored.take(np.arange(3, 50, 2)).take(np.arange(20)[::-1])
    rows = np.arange(3, 50, 2)[:20][::-1]
    for _ in range(20):
        start, stop = np.sort(random.integers(0, 51, 2))
        several = random.integers(0, 20, 6)
        for chosen in (slice(start, stop), several, np.sort(several)):
            if isinstance(chosen, slice) and start == stop:
                continue
            assert np.array_equal(stored[chosen], values[chosen])
            assert stored[chosen].dtype == np.float64
            if len(rows[chosen]):
                assert np.array_equal(part[chosen], values[rows[chosen]])
    assert np.array_equal(np.asarray(stored), values)
    assert np.array_equal(np.concatenate([block for _, block in part.blocks()]), values[rows])


@pytest.mark.parametrize("chunk", [1, 4, 10, 33])
def test_every_chunk_is_read_once_and_in_order(small_blocks, chunk):
    X, y, _ = example()
    source = Recorder(X, chunk)
    Moments.from_data(source, y)
    passes = []
    for start, stop in source.read:
        if start == 0:
            passes.append([])
        passes[-1].append((start, stop))
    assert len(passes) == 2  # one to check, one to sum
    for spans in passes:
        ends = [0, *(stop for _, stop in spans)]
        assert ends[-1] == 50
        assert [start for start, _ in spans] == ends[:-1]
        assert all(start % chunk == 0 for start, _ in spans)
        # No more at a time than a block or a chunk.
        assert max(stop - start for start, stop in spans) <= max(10, chunk)


def test_rows_of_weight_zero_do_not_make_chunks_be_read_again(small_blocks):
    X, y, weights = example()
    source = Recorder(X, 10)
    Moments.from_data(source, y, sample_weight=weights)
    # Checked, the largest of those that count, summed.
    assert sum(stop - start for start, stop in source.read) <= 3 * 50


def test_scattered_rows_are_read_by_themselves(small_blocks):
    X, _, _ = example()
    source = Recorder(X, 50)
    rows = StoredArray(source, 5).take(np.array([40, 3, 41, 20]))
    assert np.array_equal(np.asarray(rows), X[[40, 3, 41, 20]])
    assert source.read == [(3, 4), (20, 21), (40, 42)]


def test_what_is_stored_and_what_is_not(tmp_path, store):
    X, _, _ = example()
    flat = X.reshape(50, -1)
    for kind in KINDS:
        assert is_stored(store(X, kind))
        assert is_stored(store(flat, kind)[:] if kind == "memory map" else store(flat, kind))
        assert not is_stored(store(X[:, 0, 0].copy(), kind))
        assert not is_stored(store(X.astype(complex), kind))
    frame = pd.DataFrame({"dtype": [1.0], "shape": [2.0]})
    for other in (X, X.tolist(), frame, scipy.sparse.csr_array(flat), None, "text", 3.0):
        assert not is_stored(other)
    torch = pytest.importorskip("torch")
    assert not is_stored(torch.from_numpy(X))
    dask = pytest.importorskip("dask.array")
    assert not is_stored(dask.from_array(flat))


# Memory --------------------------------------------------------------------------------------


def resident(mapped):
    """Bytes of a mapped file that count as this process's memory."""
    address = mapped.ctypes.data
    inside = False
    with open("/proc/self/smaps", encoding="ascii") as lines:
        for line in lines:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                low, high = (int(bound, 16) for bound in first.split("-"))
                inside = low <= address < high
            elif inside and first == "Rss:":
                return 1024 * int(line.split()[1])
    raise AssertionError("not mapped")


needs_smaps = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@needs_smaps
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_memory_map_does_not_stay_in_memory(tmp_path, mode):
    values = np.random.default_rng(0).standard_normal((40_000, 5, 3))
    np.save(tmp_path / "X.npy", values)
    X = np.load(tmp_path / "X.npy", mmap_mode=mode)
    float(np.asarray(X).sum())
    assert resident(X) > 4_000_000  # what reading it plainly costs
    y = np.zeros(40_000)
    Moments.from_data(X, y)
    assert resident(X) < 500_000
    model = MHLARegressor()
    for start in range(0, 40_000, 1000):
        model.partial_fit(X[start : start + 1000], y[start : start + 1000])
    model.predict(X)
    assert resident(X) < 500_000
    assert np.array_equal(X, values)


def test_changes_of_a_private_map_are_kept(tmp_path):
    """Pages of mode "c" that were written to exist nowhere else."""
    X, y, _ = example()
    np.save(tmp_path / "X.npy", X)
    private = np.load(tmp_path / "X.npy", mmap_mode="c")
    private[:25] = 2.0 * X[:25]
    changed = np.array(private)
    model = MHLARegressor().fit(private, y)
    assert np.array_equal(private, changed)
    assert np.array_equal(model.coef_, MHLARegressor().fit(changed, y).coef_)
    assert np.array_equal(np.load(tmp_path / "X.npy"), X)


def test_changes_of_a_shared_map_are_kept(tmp_path):
    X, y, _ = example()
    np.save(tmp_path / "X.npy", X)
    shared = np.load(tmp_path / "X.npy", mmap_mode="r+")
    shared[:25] = 2.0 * X[:25]
    changed = np.array(shared)
    MHLARegressor().fit(shared, y)
    assert np.array_equal(shared, changed)
    shared.flush()
    assert np.array_equal(np.load(tmp_path / "X.npy"), changed)


@pytest.mark.parametrize(
    "view",
    [lambda X: X[::2], lambda X: X[::-1], lambda X: X[:, :, :2], lambda X: X.transpose(0, 2, 1)],
)
def test_views_of_a_memory_map(store, view):
    X, _, _ = example()
    computed = Moments.from_data(view(store(X, "memory map")))
    assert np.array_equal(computed.gram, Moments.from_data(view(X).copy()).gram)


# Models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("method", ["primal", "dual"])
@pytest.mark.parametrize("output", ["last", "sequence"])
def test_models_equal_those_in_memory(store, small_blocks, kind, flat, method, output):
    X, y, weights = example()
    if output == "sequence":
        y = y[:, None] + np.arange(5)[:, None]
    stored = store(X.reshape(50, -1) if flat else X, kind)
    model = MHLARegressor(method=method, output=output, n_tokens=5 if flat else None, alpha=0.1)
    expected = MHLARegressor(method=method, output=output, alpha=0.1).fit(X, y, weights)
    model.fit(stored, y, weights)
    assert np.array_equal(model.coef_, expected.coef_)
    assert np.array_equal(model.predict(stored), expected.predict(X))
    assert model.score(stored, y) == expected.score(X, y)
    assert model.n_features_in_ == (15 if flat else 3)
    with pytest.raises(ValueError, match="width"):
        model.set_params(n_tokens=3).predict(store(X[:, :, :2].copy(), kind))


@pytest.mark.parametrize("kind", KINDS)
def test_streams_and_moments_equal_those_in_memory(store, small_blocks, kind):
    X, y, weights = example()
    stored = store(X, kind)
    moments = Moments.from_data(stored, store(y, kind), sample_weight=weights)
    expected = Moments.from_data(X, y, sample_weight=weights)
    assert np.array_equal(moments.gram, expected.gram)
    assert np.array_equal(moments.products, expected.products)
    model = MHLARegressor(fit_intercept=True).partial_fit(stored, y, weights).partial_fit(X, y)
    twice = MHLARegressor(fit_intercept=True).partial_fit(X, y, weights).partial_fit(X, y)
    assert np.array_equal(model.coef_, twice.coef_)


@pytest.mark.parametrize("kind", KINDS)
def test_other_solvers_and_transformers(store, small_blocks, kind):
    X, y, _ = example()
    stored = store(X, kind)
    for parameters in (
        {"n_heads": 1, "method": "dual"},
        {"penalty": "nuclear", "alpha": 30.0, "tol": 1e-2},
        {"solver": "sgd", "max_iter": 2},
    ):
        model = MHLARegressor(random_state=0, **parameters)
        expected = copy.deepcopy(model).fit(X, y).predict(X)
        assert reference.relative_error(model.fit(stored, y).predict(X), expected) < 1e-9
    scaled = TokenScaler().fit_transform(stored)
    assert np.array_equal(scaled, TokenScaler().fit_transform(X))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", [0, 33, 49])
def test_bad_values_are_found_and_named(store, small_blocks, kind, bad, row):
    X, y, _ = example()
    X[row, 3, 1] = bad
    name = "NaN" if np.isnan(bad) else "infinity"
    with pytest.raises(ValueError, match=f"contains {name}, first at sequence {row}, token 3, fea"):
        MHLARegressor().fit(store(X, kind), y)
    with pytest.raises(ValueError, match=f"contains {name}, first at row {row}, column 10"):
        MHLARegressor(n_tokens=5).fit(store(X.reshape(50, 15), kind), y)


def test_shapes_are_checked_before_anything_is_read():
    X, y, _ = example()
    for shape, message in (((0, 5, 3), "0 sample"), ((4, 0, 3), "0 sample"), ((4, 0), "0 sample")):
        with pytest.raises(ValueError, match=message):
            check_sequences(Recorder(np.empty(shape)))
    source = Recorder(X.reshape(50, 15))
    with pytest.raises(ValueError, match="15 columns, which n_tokens=4 does not divide"):
        check_sequences(source, n_tokens=4)
    assert not source.read
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        MHLARegressor().fit(Recorder(X), y[:4])


def test_numbers_that_are_not_real_are_refused(store):
    X, y, _ = example()
    with pytest.raises(ValueError, match="Complex data not supported"):
        MHLARegressor().fit(store(X.astype(complex), "memory map"), y)


def test_stored_rows_can_be_pickled(store):
    """For processes of their own: without what has been read."""
    X, _, _ = example()
    stored = StoredArray(store(X, "zarr"), 5)
    stored[:10]
    assert len(pickle.dumps(stored)) < 5000
    assert np.array_equal(pickle.loads(pickle.dumps(stored))[:10], X[:10])


def test_progress_is_shown(store, capfd):
    X, y, _ = example()
    Moments.from_data(store(X, "hdf5"), y, verbose=1)
    assert "moments: 100%" in capfd.readouterr().err
