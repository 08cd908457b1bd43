"""Dask collections give what the same data give in memory, however they are cut."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import reference
from sklearn.base import clone

from sklearn_mhla import MHLARegressor, MHLARegressorCV, Moments, certify_identifiable
from sklearn_mhla import distributed as on_dask

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")
pd = pytest.importorskip("pandas")
dd = pytest.importorskip("dask.dataframe")


@pytest.fixture(autouse=True)
def one_thread():
    """The machine's other cores are not for these tests."""
    with dask.config.set(scheduler="synchronous"):
        yield


def example(n_samples=240, n_tokens=3, token_dim=3, n_outputs=2, seed=0):
    random = np.random.default_rng(seed)
    X = random.standard_normal((n_samples, n_tokens, token_dim))
    y = 5.0 + random.standard_normal((n_samples, n_outputs))
    return X, y


def frames(n_samples=240, npartitions=5):
    """Flat sequences with names, and targets, in one data frame."""
    X, y = example(n_samples)
    table = pd.DataFrame(X.reshape(n_samples, -1), columns=[f"x{i}" for i in range(9)])
    table[["u", "v"]] = y
    return table, dd.from_pandas(table, npartitions=npartitions)


def names_of(table):
    return [name for name in table.columns if name.startswith("x")]


def assert_same_fit(computed, expected, tolerance=1e-10):
    assert computed.coef_.shape == expected.coef_.shape
    assert computed.intercept_.shape == expected.intercept_.shape
    assert reference.relative_error(computed.coef_, expected.coef_) < tolerance
    size = max(1.0, np.abs(expected.intercept_).max())
    assert np.abs(computed.intercept_ - expected.intercept_).max() < tolerance * size


# Every way of cutting ---------------------------------------------------------------------------


@pytest.mark.parametrize("fit_intercept", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.7])
@pytest.mark.parametrize("scalar", [False, True])
def test_array_as_in_memory(fit_intercept, alpha, scalar):
    X, y = example()
    y = y[:, 0] if scalar else y
    model = MHLARegressor(alpha=alpha, fit_intercept=fit_intercept)
    expected = clone(model).fit(X, y)
    computed = clone(model).fit(da.from_array(X, chunks=(70, 2, 2)), da.from_array(y, chunks=100))
    assert_same_fit(computed, expected)
    assert computed.method_ == "primal"
    assert computed.n_features_in_ == expected.n_features_in_ == 3
    assert computed.rank_ == expected.rank_
    predicted = computed.predict(da.from_array(X, chunks=(50, 3, 1)))
    assert predicted.shape == y.shape
    assert predicted.dtype == np.float64
    assert predicted.chunks[0] == (50, 50, 50, 50, 40)
    np.testing.assert_allclose(predicted.compute(), expected.predict(X), rtol=1e-9, atol=1e-9)


def test_array_of_a_frame_cut_by_columns_with_an_empty_partition():
    table, frame = frames()
    frame = frame.loc[(frame.index < 96) | (frame.index >= 144)]  # empties one partition of five
    kept = frame.compute()
    assert len(kept) == 192
    assert 0 in [len(frame.partitions[i]) for i in range(5)]
    whole = frame[names_of(table)].to_dask_array()
    X = da.concatenate([whole[:, :4], whole[:, 4:]], axis=1, allow_unknown_chunksizes=True)
    assert np.isnan(X.shape[0])
    assert len(X.chunks[1]) == 2
    model = MHLARegressor(n_tokens=3, fit_intercept=True)
    expected = clone(model).fit(kept[names_of(table)].to_numpy(), kept[["u", "v"]].to_numpy())
    computed = clone(model).fit(X, frame[["u", "v"]].to_dask_array())
    assert_same_fit(computed, expected)
    assert not hasattr(computed, "feature_names_in_")
    predicted = computed.predict(X)
    assert np.isnan(predicted.shape[0])
    assert predicted.shape[1] == 2
    assert len(predicted.chunks[0]) == 5
    np.testing.assert_allclose(
        predicted.compute(), expected.predict(kept[names_of(table)].to_numpy()), atol=1e-9
    )


@pytest.mark.parametrize("columns", ["u", ["u"], ["u", "v"]])
def test_data_frames(columns):
    table, frame = frames()
    model = MHLARegressor(n_tokens=3, alpha=0.1)
    expected = clone(model).fit(table[names_of(table)], table[columns])
    X = frame[names_of(table)]
    computed = clone(model).fit(X, frame[columns])
    assert_same_fit(computed, expected)
    assert list(computed.feature_names_in_) == list(expected.feature_names_in_)
    assert computed.n_features_in_ == 9
    predicted = computed.predict(X)
    assert predicted.ndim == np.ndim(table[columns])
    np.testing.assert_allclose(predicted.compute(), expected.predict(table[names_of(table)]))
    in_memory = expected.score(table[names_of(table)], table[columns])
    assert computed.score(X, frame[columns]) == pytest.approx(in_memory, abs=1e-12)
    with pytest.raises(ValueError, match="feature names"):
        computed.predict(X.rename(columns={"x0": "other"}))
    with pytest.raises(ValueError, match="feature names"):
        computed.partial_fit(X[X.columns[::-1]], frame[columns])


def test_frames_of_nullable_integers():
    table = pd.DataFrame({"a": [1, 2, 3, 4], "b": [2, 0, 1, 5]}, dtype="Int64")
    target = pd.Series([1.0, 2.0, 3.0, 5.0])
    computed = MHLARegressor(alpha=1.0).fit(
        dd.from_pandas(table, npartitions=2), dd.from_pandas(target, npartitions=2)
    )
    assert_same_fit(computed, MHLARegressor(alpha=1.0).fit(table, target))
    table.loc[3, "b"] = pd.NA
    with pytest.raises(ValueError, match=r"Partition 1.*X"):
        MHLARegressor().fit(
            dd.from_pandas(table, npartitions=2), dd.from_pandas(target, npartitions=2)
        )


def test_frames_cut_at_different_divisions():
    table, frame = frames(npartitions=5)
    y = dd.from_pandas(table["u"], npartitions=3)
    assert y.divisions != frame.divisions
    model = MHLARegressor(n_tokens=3)
    expected = clone(model).fit(table[names_of(table)], table["u"])
    assert_same_fit(clone(model).fit(frame[names_of(table)], y), expected)


@pytest.mark.parametrize("method", ["auto", "primal"])
def test_targets_and_weights_in_memory(method):
    X, y = example()
    weights = np.random.default_rng(1).integers(0, 3, len(X)).astype(float)
    model = MHLARegressor(method=method, fit_intercept=True)
    expected = clone(model).fit(X, y, weights)
    blocks = da.from_array(X, chunks=(37, 3, 3))
    assert_same_fit(clone(model).fit(blocks, y, weights), expected)
    assert_same_fit(clone(model).fit(blocks, y.tolist(), da.from_array(weights, 60)), expected)
    assert_same_fit(clone(model).fit(blocks, y, 2.0), clone(model).fit(X, y, 2.0))


def test_partition_without_weight_is_left_out():
    X, y = example()
    weights = np.ones(len(X))
    weights[60:120] = 0.0
    blocks, halves = da.from_array(X, chunks=(60, 3, 3)), da.from_array(weights, chunks=60)
    computed = on_dask.moments(blocks, y, sample_weight=halves)
    assert computed.n_rows == 180
    expected = MHLARegressor(fit_intercept=True).fit(X, y, weights)
    model = MHLARegressor(fit_intercept=True).fit(blocks, y, halves)
    assert_same_fit(model, expected)
    in_memory = expected.score(X, y, weights)
    assert model.score(blocks, y, halves) == pytest.approx(in_memory, abs=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("state", ["sum", "mean"])
@pytest.mark.parametrize("width", [0, 2])
def test_output_at_every_token(causal, state, width):
    X, _ = example()
    random = np.random.default_rng(2)
    y = random.standard_normal((240, 3, width) if width else (240, 3))
    weights = random.uniform(0.5, 2.0, 240)
    model = MHLARegressor(output="sequence", causal=causal, state=state, fit_intercept=True)
    expected = clone(model).fit(X, y, weights)
    blocks = da.from_array(X, chunks=(100, 2, 3))
    computed = clone(model).fit(blocks, da.from_array(y, chunks=(60, 1, *y.shape[2:])), weights)
    assert_same_fit(computed, expected)
    predicted = computed.predict(blocks)
    assert predicted.shape == y.shape
    np.testing.assert_allclose(predicted.compute(), expected.predict(X), atol=1e-9)
    in_memory = expected.score(X, y, weights)
    assert computed.score(blocks, y, weights) == pytest.approx(in_memory, abs=1e-12)
    flat = clone(model).set_params(n_tokens=3)
    flat.fit(blocks.reshape(240, 9), y, weights)
    assert_same_fit(flat, expected)
    assert flat.predict(blocks.reshape(240, 9)).shape == y.shape


@pytest.mark.parametrize("options", [{"n_heads": 2}, {"penalty": "nuclear", "alpha": 300.0}])
def test_few_heads_and_nuclear_norm(options):
    from sklearn_mhla.datasets import make_linear_attention

    X, y = make_linear_attention(
        n_samples=120, n_tokens=4, n_features=3, n_outputs=3, n_heads=2, random_state=0
    )
    model = MHLARegressor(method="primal", random_state=0, **options)
    expected = clone(model).fit(X, y)
    computed = clone(model).fit(da.from_array(X, chunks=(40, 4, 3)), y)
    # Iterative: as close as their stopping rule asks for.
    assert reference.relative_error(computed.coef_, expected.coef_) < 1e-5
    assert computed.n_heads_ == expected.n_heads_


@pytest.mark.parametrize("scale", [1e-60, 1e60])
def test_units(scale):
    X, y = example()
    model = MHLARegressor(fit_intercept=True)
    expected = clone(model).fit(X, y)
    computed = clone(model).fit(da.from_array(scale * X, chunks=(60, 3, 3)), scale * y)
    assert reference.relative_error(computed.coef_ * scale**2, expected.coef_) < 1e-10


def test_partitions_of_different_units_and_means():
    X, y = example()
    X[:60] *= 1e-6
    y[60:120] += 1e7
    y[120:180] *= 1e-6
    model = MHLARegressor(fit_intercept=True)
    expected = clone(model).fit(X, y)
    computed = clone(model).fit(da.from_array(X, chunks=(60, 3, 3)), y)
    assert_same_fit(computed, expected, 1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.bool_])
def test_types(dtype):
    X = (np.random.default_rng(0).uniform(0.0, 3.0, (60, 2, 2))).astype(dtype)
    y = np.arange(60.0)
    expected = MHLARegressor(alpha=1.0).fit(X, y)
    assert_same_fit(MHLARegressor(alpha=1.0).fit(da.from_array(X, 25), y), expected)


def test_one_row_in_all():
    X, y = np.array([[[1.0, 2.0]]]), np.array([3.0])
    chunks = ((0, 1, 0), 1, 2)
    model = MHLARegressor().fit(da.from_array(X, chunks=chunks), y)
    assert_same_fit(model, MHLARegressor().fit(X, y))
    assert model.predict(da.from_array(X, chunks=chunks)).compute() == pytest.approx([3.0])


# Number of partitions ---------------------------------------------------------------------------


def test_any_number_of_partitions_and_repeated_runs():
    X, y = example(640, n_outputs=1)
    fits = []
    for n_partitions in (1, 7, 64):
        chunks = -(-len(X) // n_partitions)
        blocks = da.from_array(X, chunks=(chunks, 3, 3))
        assert blocks.numblocks[0] in (n_partitions, n_partitions - 1)
        runs = []
        for scheduler in ("synchronous", "threads", "threads"):
            with dask.config.set(scheduler=scheduler):
                runs.append(MHLARegressor(fit_intercept=True).fit(blocks, y).coef_)
        for run in runs[1:]:
            assert reference.relative_error(run, runs[0]) < 1e-12
        fits.append(runs[0])
    expected = MHLARegressor(fit_intercept=True, method="primal").fit(X, y).coef_
    for coef in fits:
        assert reference.relative_error(coef, expected) < 1e-9


def test_moments_are_those_of_all_rows():
    X, y = example(130)
    expected = Moments.from_data(X, y)
    total = on_dask.moments(da.from_array(X, chunks=(1, 3, 3)), y)  # two levels of the tree
    assert total.n_rows == 130
    for part in (total, Moments.from_data(da.from_array(X, chunks=(50, 3, 3)), y)):
        np.testing.assert_allclose(part.second_moment(), expected.second_moment(), rtol=1e-12)
        np.testing.assert_allclose(part.solve(0.1, True)[0], expected.solve(0.1, True)[0])
    total.update(da.from_array(X, chunks=(70, 3, 3)), y)
    assert total.n_rows == 260
    np.testing.assert_allclose(total.second_moment(), expected.second_moment(), rtol=1e-12)
    with pytest.raises(ValueError, match="number of outputs"):
        total.update(da.from_array(X, chunks=70), y[:, 0])


def test_size_that_the_scheduler_sees():
    from dask.sizeof import sizeof

    small, large = (Moments.from_data(np.ones((2, 1, d)), np.ones(2)) for d in (2, 16))
    for part, p in ((small, 6), (large, 2176)):
        assert 2 * p**2 < sizeof(part) < 4 * p**2 + 2000
    assert sizeof(large) > 8 * large.gram.size


def test_merging_leaves_its_parts_alone():
    X, y = example(40)
    parts = [Moments.from_data(X[i : i + 10], y[i : i + 10]) for i in range(0, 40, 10)]
    before = [(part.gram.copy(), part.target_shift.copy(), part.n_rows) for part in parts]
    assert on_dask._merge([None, *parts]).n_rows == 40
    assert on_dask._merge([None, None]) is None
    for part, (gram, shift, n_rows) in zip(parts, before, strict=True):
        assert (part.gram == gram).all()
        assert (part.target_shift == shift).all()
        assert part.n_rows == n_rows


@pytest.mark.parametrize("n_partitions", [1, 2])
def test_results_that_a_scheduler_keeps_are_not_added_to(n_partitions):
    from dask.callbacks import Callback

    X, y = example(40)
    kept = []
    with Callback(posttask=lambda key, result, *_: kept.append(result)):
        model = MHLARegressor().fit(da.from_array(X, chunks=(40 // n_partitions, 3, 3)), y)
    kept = [result for result in kept if isinstance(result, Moments)]
    assert len(kept) == n_partitions + (n_partitions > 1)
    before = [result.gram.copy() for result in kept]
    model.partial_fit(X, y)
    for result, gram in zip(kept, before, strict=True):
        assert (result.gram == gram).all()


# partial_fit and certificates -------------------------------------------------------------------


def test_partial_fit_goes_on_from_either():
    X, y = example()
    expected = MHLARegressor(fit_intercept=True).fit(X, y)
    first, rest = da.from_array(X[:100], chunks=(30, 3, 3)), da.from_array(X[100:], 60)
    start = MHLARegressor(fit_intercept=True)
    assert_same_fit(start.fit(first, y[:100]).partial_fit(rest, y[100:]), expected)
    start = MHLARegressor(fit_intercept=True)
    assert_same_fit(start.fit(first, y[:100]).partial_fit(X[100:], y[100:]), expected)
    start = MHLARegressor(fit_intercept=True)
    assert_same_fit(start.partial_fit(X[:100], y[:100]).partial_fit(rest, y[100:]), expected)
    assert start.predict(rest).compute() == pytest.approx(expected.predict(X[100:]), abs=1e-9)
    with pytest.raises(ValueError, match=r"y has 1 output\(s\)"):
        start.partial_fit(rest, y[100:, 0])
    with pytest.raises(ValueError, match="width"):
        start.partial_fit(rest[:, :, :2], y[100:])
    with pytest.raises(ValueError, match="state='mean', but the rows so far"):
        start.set_params(state="mean").partial_fit(rest, y[100:])
    assert start.set_params(state="sum").partial_fit(rest, y[100:])._moments.n_rows == 380


@pytest.mark.parametrize("n_samples", [10, 240])
def test_certificate(n_samples):
    X, _ = example(n_samples)
    weights = np.linspace(0.0, 1.0, n_samples)
    expected = certify_identifiable(X, method="primal", sample_weight=weights)
    computed = certify_identifiable(da.from_array(X, chunks=(7, 3, 3)), sample_weight=weights)
    assert computed.verdict == expected.verdict
    assert computed.rank == expected.rank == min(n_samples - 1, 18)
    np.testing.assert_allclose(computed.eigenvalues, expected.eigenvalues, rtol=1e-9, atol=1e-12)
    flat = certify_identifiable(da.from_array(X.reshape(n_samples, 9), chunks=7), n_tokens=3)
    assert flat.covers(X.reshape(n_samples, 9)).all()
    model = MHLARegressor(method="primal", alpha=1.0).fit(da.from_array(X, 7), np.ones(n_samples))
    assert model.certificate().rank == min(n_samples, 18)


# Errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dual", "pivoted"])
def test_methods_that_need_rows(method):
    X = da.ones((10, 2, 2), chunks=5)
    with pytest.raises(ValueError, match=f"method.*{method}"):
        MHLARegressor(method=method).fit(X, np.ones(10))
    with pytest.raises(ValueError, match="method must be 'auto' or 'primal'; got method='span'"):
        certify_identifiable(X, method="span")
    with pytest.raises(ValueError, match="solver='sgd' needs the rows"):
        MHLARegressor(solver="sgd").fit(X, np.ones(10))
    with pytest.raises(ValueError, match="solver='sgd' needs the rows"):
        MHLARegressor(solver="sgd").partial_fit(X, np.ones(10))


def never(*args, **kwargs):
    raise AssertionError("computed before it was checked")


def test_shapes_are_checked_before_anything_is_computed():
    X = da.map_blocks(never, chunks=((5, 5), (6,)), dtype=float, meta=np.empty((0, 0)))
    y = da.ones(10, chunks=5)
    with pytest.raises(ValueError, match="n_tokens=4 does not divide"):
        MHLARegressor(n_tokens=4).fit(X, y)
    with pytest.raises(ValueError, match="X has 10 sequences, y has 9 rows"):
        MHLARegressor().fit(X, y[:9])
    with pytest.raises(ValueError, match="X has 10 sequences, sample_weight has 4 rows"):
        MHLARegressor().fit(X, y, np.ones(4))
    with pytest.raises(ValueError, match="requires y to be passed"):
        MHLARegressor().fit(X, None)
    with pytest.raises(ValueError, match="y has 3 dimensions"):
        MHLARegressor().fit(X, da.ones((10, 2, 2)))
    with pytest.raises(ValueError, match="one target per token"):
        MHLARegressor(output="sequence", n_tokens=3).fit(X, da.ones((10, 2)))
    with pytest.raises(ValueError, match="4 dimensions"):
        MHLARegressor().fit(da.ones((4, 2, 2, 2)), da.ones(4))
    with pytest.raises(ValueError, match=r"Dask array or data frame; got dask\.delayed"):
        MHLARegressor().fit(dask.delayed(np.ones((10, 6))), y)
    with pytest.raises(ValueError, match="output must be"):
        on_dask.moments(X, output="middle")
    fitted = MHLARegressor().fit(np.ones((4, 5)), np.ones(4))
    with pytest.raises(ValueError, match="6 features, but MHLARegressor is expecting 5"):
        fitted.predict(X)
    MHLARegressor().fit(np.ones((4, 6)), np.ones(4)).predict(X)  # is lazy


def test_partitions_of_unknown_size_that_do_not_match():
    table, frame = frames(npartitions=5)
    X = frame[names_of(table)].to_dask_array()
    model = MHLARegressor(n_tokens=3)
    with pytest.raises(ValueError, match="y is in memory, but the numbers of rows"):
        model.fit(X, table["u"])
    with pytest.raises(ValueError, match=r"X has 5 partition\(s\), y has 3"):
        model.fit(X, da.from_array(table["u"].to_numpy(), chunks=80))
    uneven = da.from_array(table["u"].to_numpy(), chunks=((48, 48, 47, 49, 48),))
    with pytest.raises(ValueError, match=r"Partition [23]: .*X has 48 sequences, y has 4[79] rows"):
        model.fit(X, uneven)
    emptied = frame.loc[frame.index >= 48]  # of its first partition
    for chunks, row in ((X, emptied["u"]), (emptied[names_of(table)], frame["u"])):
        with pytest.raises(ValueError, match=r"Partition 0: .*X has \d+ sequences, y has \d+ rows"):
            model.fit(chunks, row)
    wide = frame[["u", "v"]].to_dask_array()
    mask = wide[:, wide.min(axis=0) > -np.inf]
    with pytest.raises(ValueError, match=r"y has shape .* only the number of samples"):
        model.fit(X, mask)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_values_are_found_where_they_are(bad):
    X, y = example()
    good = MHLARegressor().fit(X, y)
    X[130, 1, 2] = bad
    blocks = da.from_array(X, chunks=(60, 3, 3))
    where = r"Partition 2: .*sequence 10, token 1, feature 2"
    with pytest.raises(ValueError, match=where):
        MHLARegressor().fit(blocks, y)
    with pytest.raises(ValueError, match=where):
        good.predict(blocks).compute()
    with pytest.raises(ValueError, match=where):
        good.score(blocks, y)
    X, y = example()
    weights = np.ones(240)
    weights[70] = -1.0
    with pytest.raises(ValueError, match="Partition 1: sample_weight must not be negative"):
        MHLARegressor().fit(da.from_array(X, chunks=(60, 3, 3)), y, weights)


def test_nothing_left():
    X, y = example(20)
    blocks = da.from_array(X, chunks=(10, 3, 3))
    with pytest.raises(ValueError, match="nothing to sum: none of the 2 partition"):
        MHLARegressor().fit(blocks, y, np.zeros(20))
    with pytest.raises(ValueError, match="nothing to score"):
        MHLARegressor().fit(blocks, y).score(blocks, y, np.zeros(20))


def test_failed_fit_leaves_the_model_alone():
    X, y = example()
    model = MHLARegressor().fit(X, y)
    before = model.coef_.copy()
    with pytest.raises(ValueError, match="NaN"):
        model.fit(da.full((20, 3, 3), np.nan, chunks=10), np.ones(20))
    assert (model.coef_ == before).all()


def test_constant_targets_are_scored_as_in_memory():
    X, y = example()
    y[:, 1] = 4.0
    model = MHLARegressor().fit(X, y)
    blocks = da.from_array(X, chunks=(100, 3, 3))
    assert model.score(blocks, y) == pytest.approx(model.score(X, y), abs=1e-12)


def test_large_mean_does_not_spoil_the_score():
    X, y = example()
    model = MHLARegressor(fit_intercept=True).fit(X, y + 1e8)
    computed = model.score(da.from_array(X, chunks=(7, 3, 3)), y + 1e8)
    assert computed == pytest.approx(model.score(X, y + 1e8), abs=1e-6)


def test_cross_validated_models_predict_and_score():
    X, y = example(60)
    model = MHLARegressorCV().fit(X, y)
    blocks = da.from_array(X, chunks=(25, 3, 3))
    np.testing.assert_allclose(model.predict(blocks).compute(), model.predict(X), atol=1e-12)
    assert model.score(blocks, y) == pytest.approx(model.score(X, y), abs=1e-12)


def test_standard_deviations_are_refused():
    X, y = example(60)
    model = MHLARegressor().fit(da.from_array(X, chunks=(25, 3, 3)), y)
    with pytest.raises(ValueError, match="return_std does not take Dask collections"):
        model.predict(da.from_array(X), return_std=True)
    assert np.isfinite(model.predict(X, return_std=True)[1]).all()


def test_predictions_carry_no_moments():
    X, y = example()
    model = MHLARegressor().partial_fit(X, y)
    light = on_dask._without_moments(model)
    assert "_moments" not in vars(light)
    assert "_moments" in vars(model)
    assert (light.predict(X) == model.predict(X)).all()


def test_import_of_the_package_does_not_import_dask():
    code = "import sys, sklearn_mhla, sklearn_mhla.distributed; assert 'dask' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# A cluster of two processes ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster():
    """Two worker processes on loopback."""
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            dashboard_address=":0",  # any free port
            worker_dashboard_address=None,
            silence_logs=50,  # a killed worker is reported as an error
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def client(cluster):
    """The cluster in place of the scheduler in this process."""
    with dask.config.set(scheduler="distributed"):
        yield cluster


def test_cluster(client):
    X, y = example()
    model = MHLARegressor(fit_intercept=True)
    expected = clone(model).fit(X, y)
    blocks = da.from_array(X, chunks=(30, 3, 3))
    runs = [clone(model).fit(blocks, y) for _ in range(2)]
    for run in runs:
        assert_same_fit(run, expected)
    assert reference.relative_error(runs[0].coef_, runs[1].coef_) < 1e-12
    np.testing.assert_allclose(runs[0].predict(blocks).compute(), expected.predict(X), atol=1e-9)
    assert runs[0].score(blocks, y) == pytest.approx(expected.score(X, y), abs=1e-12)
    # What was received may be read-only; adding to it must work all the same.
    assert_same_fit(runs[0].partial_fit(blocks, y), expected)
    assert runs[0]._moments.n_rows == 480
    assert certify_identifiable(blocks).rank == 18


def test_cluster_with_frames(client):
    table, frame = frames()
    computed = MHLARegressor(n_tokens=3).fit(frame[names_of(table)], frame["u"])
    expected = MHLARegressor(n_tokens=3).fit(table[names_of(table)], table["u"])
    assert_same_fit(computed, expected)


def test_errors_come_back_from_workers(client):
    X = np.ones((20, 2, 2))
    X[12] = np.nan
    with pytest.raises(ValueError, match=r"Partition 1: .*NaN"):
        MHLARegressor().fit(da.from_array(X, chunks=10), np.ones(20))


def made(block_info=None):
    """Some sequences, made where they are needed."""
    start, stop = block_info[None]["array-location"][0]
    return example(n_samples=400)[0][start:stop]


def test_nothing_but_moments_moves(client):
    X, _ = example(n_samples=400)
    blocks = da.map_blocks(made, chunks=((20,) * 20, 3, 3), dtype=float, meta=np.empty((0, 0, 0)))
    logs = client.run(lambda dask_worker: len(dask_worker.transfer_incoming_log))
    computed = MHLARegressor().fit(blocks, blocks[:, -1, :2])
    assert_same_fit(computed, MHLARegressor().fit(X, X[:, -1, :2]))
    received = client.run(lambda dask_worker: list(dask_worker.transfer_incoming_log))
    keys = [
        str(key)
        for worker, entries in received.items()
        for entry in entries[logs[worker] :]
        for key in entry["keys"]
    ]
    assert all(key.startswith(("('moments_of-", "_merge-")) for key in keys), keys


def test_collections_in_the_memory_of_workers(client):
    X, y = example()
    blocks = da.from_array(X, chunks=(30, 3, 3)).persist()
    model = MHLARegressor().fit(blocks, da.from_array(y, chunks=50).persist())
    assert_same_fit(model, MHLARegressor().fit(X, y))
    np.testing.assert_allclose(model.predict(blocks).compute(), model.predict(X), atol=1e-9)
    table, frame = frames()
    frame = frame.persist()
    computed = MHLARegressor(n_tokens=3).fit(frame[names_of(table)], frame["u"])
    expected = MHLARegressor(n_tokens=3).fit(table[names_of(table)], table["u"])
    assert_same_fit(computed, expected)


def deadly(block, marker, block_info=None):
    """Ends its own process in the third block, the first time that anyone comes there."""
    if block_info[0]["chunk-location"][0] == 2:
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return block
        os._exit(1)
    return block


def test_a_worker_dies_during_the_fit(client, tmp_path):
    X, y = example()
    marker = tmp_path / "died"
    blocks = da.from_array(X, chunks=(30, 3, 3)).map_blocks(deadly, str(marker), dtype=float)
    before = set(client.run(os.getpid).values())
    computed = MHLARegressor(fit_intercept=True).fit(blocks, y)
    assert marker.exists()
    client.wait_for_workers(2, timeout=60)
    assert len(before & set(client.run(os.getpid).values())) == 1
    assert computed._moments.n_rows == len(X)
    assert_same_fit(computed, MHLARegressor(fit_intercept=True).fit(X, y))
