"""Moments as an object: they add up, come apart, solve, and survive a file."""

from __future__ import annotations

import pickle
import re
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import LinAlgWarning

from sklearn_mhla import MHLARegressor, Moments
from sklearn_mhla._sums import ARRAYS

OPTIONS = [
    pytest.param({}, id="last"),
    pytest.param({"state": "mean"}, id="mean"),
    pytest.param({"output": "sequence"}, id="causal"),
    pytest.param({"output": "sequence", "causal": False}, id="shared"),
]


def example(n_samples=60, n_outputs=2, options=None, seed=0):
    """Tokens, targets and weights, one of them zero."""
    options = options or {}
    X = reference.make_sequences(0.3, n_samples, seed=seed)
    random = np.random.default_rng(seed + 10)
    shape = (n_samples, 5) if options.get("output") == "sequence" else (n_samples,)
    weights = random.uniform(0.1, 3.0, n_samples)
    weights[n_samples // 2] = 0.0
    return X, 1.0 + random.standard_normal((*shape, n_outputs)), weights


def statistics(moments):
    """What moments stand for, in the units of the data: independent of how they are kept."""
    mean = moments.mean()
    tokens = 2.0 ** (3 * moments.token_exponent)
    targets = 2.0**moments.target_exponent
    return {
        "second moment": moments.second_moment() * moments.weight,
        "features": mean * tokens,
        "cross": moments.cross * tokens * targets,
        "centred cross": moments.cross_matrix(mean) * tokens * targets,
        "mean": moments.target_mean() * targets,
        "squares": moments.squares(False) * targets**2,
        "centred squares": moments.squares(True) * targets**2,
        "weight": np.array(moments.weight),
        "rows": np.array(moments.n_rows),
    }


def agree(computed, expected, tolerance=1e-12):
    ours, theirs = statistics(computed), statistics(expected)
    for name, value in theirs.items():
        # Centring rounds relative to what it starts from.
        size = np.linalg.norm(theirs[name.removeprefix("centred ")])
        assert np.linalg.norm(ours[name] - value) <= tolerance * size, name


def identical(first, second):
    """Bit for bit the same."""
    return all(
        np.array_equal(getattr(first, name), getattr(second, name))
        for name in (*ARRAYS, "weight", "n_rows", "token_exponent", "target_exponent")
    )


# What they are -------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_second_moment_is_published_uncentred_and_divided_by_the_weight(options, weighted):
    X, y, weights = example(20, options=options)
    X *= 0.37
    moments = Moments.from_data(X, y, sample_weight=weights if weighted else None, **options)
    pairs = [pair for z in X for pair in reference.states_and_queries(z, **options)]
    features = np.array([reference.published_features(*pair) for pair in pairs])
    w = np.repeat(weights if weighted else np.ones(20), len(pairs) // 20)
    expected = (features.T * w) @ features / w.sum()
    computed = moments.second_moment()
    assert reference.relative_error(computed, expected) < 1e-14
    assert np.array_equal(computed, computed.T)
    assert (moments.token_dim, moments.n_features, moments.n_outputs) == (3, 18, 2)
    assert moments.n_rows == (w > 0).sum()
    assert moments.weight == pytest.approx(w.sum(), rel=1e-14)


def test_moments_of_inputs_alone():
    X, y, _ = example()
    alone = Moments.from_data(X)
    assert alone.n_outputs == 0
    assert np.array_equal(alone.second_moment(), Moments.from_data(X, y).second_moment())
    alone.update(X[:7])
    agree(alone, Moments.from_data(np.concatenate([X, X[:7]])))
    with pytest.raises(ValueError, match="no targets"):
        alone.solve()
    with pytest.raises(ValueError, match=r"y has 2 output\(s\), but these moments are of 0"):
        alone.update(X, y)


@given(st.integers(1, 4), st.integers(0, 2**32 - 1), st.booleans())
def test_integer_data_are_summed_exactly(token_dim, seed, weighted):
    random = np.random.default_rng(seed)
    X = random.integers(-9, 10, (12, 3, token_dim))
    y = random.integers(-1000, 1000, (12, 2))
    weights = random.integers(1, 5, 12) if weighted else np.ones(12, dtype=int)
    total = sum(
        Moments.from_data(X[i : i + 4], y[i : i + 4], sample_weight=weights[i : i + 4])
        for i in (0, 4, 8)
    )
    rows, columns = np.triu_indices(token_dim)
    state = np.einsum("ntj,ntk->njk", X, X)[:, rows, columns]
    H = (state[:, :, None] * X[:, -1][:, None, :]).reshape(12, -1).astype(object)
    w = weights.astype(object)
    weight = float(w.sum())
    exact = [[float(Fraction(int(v)) / Fraction(weight)) for v in row] for row in (H.T * w) @ H]
    assert np.array_equal(total.second_moment(), np.array(exact))
    # Off-diagonal entries carry a sqrt(2) in the isometric basis: look at the published one.
    units = 2.0 ** (3 * total.token_exponent + total.target_exponent)
    published = total.products[:-1] + total.target_shift[:, None] * total.products[-1]
    assert np.array_equal(published * units, ((y.T.astype(object) * w) @ H).astype(float))


# Sums ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("weighted", [False, True])
@given(st.lists(st.integers(1, 39), max_size=5), st.integers(0, 5), st.permutations(range(6)))
def test_any_batching_order_and_grouping(options, weighted, cuts, n_front, order):
    X, y, weights = example(40, options=options)
    X[::3] *= 0.01  # batches of different units
    y[1::7] *= 1e3
    weights = weights if weighted else np.ones(40)
    edges = sorted({0, 40, *cuts})
    parts = [slice(*pair) for pair in pairwise(edges)]
    parts = [part for part in parts if weights[part].any()]

    def of(part):
        return Moments.from_data(X[part], y[part], sample_weight=weights[part], **options)

    whole = of(slice(None))
    shuffled = [parts[i] for i in order if i < len(parts)]
    agree(sum(of(part) for part in shuffled), whole)
    front, back = shuffled[: n_front % len(parts)], shuffled[n_front % len(parts) :]
    grouped = sum(of(part) for part in back)
    agree(sum(of(part) for part in front) + grouped if front else grouped, whole)
    stream = of(shuffled[0])
    for part in shuffled[1:]:
        assert stream.update(X[part], y[part], weights[part]) is stream
    agree(stream, whole)


@pytest.mark.parametrize("options", OPTIONS)
@given(st.integers(1, 38), st.integers(-40, 40), st.booleans())
def test_subtracting_what_was_added(options, cut, power, weighted):
    X, y, weights = example(40, options=options)
    weights = weights + 0.1 if weighted else None

    def of(rows, scale=1.0):
        w = None if weights is None else weights[rows]
        return Moments.from_data(X[rows] * scale, y[rows] * scale, sample_weight=w, **options)

    first, second = of(slice(cut)), of(slice(cut, None))
    before = pickle.loads(pickle.dumps(first))
    whole = first + second
    # Rounding is relative to the whole.
    kept = statistics(whole - second)
    for name, value in statistics(first).items():
        size = np.linalg.norm(statistics(whole)[name.removeprefix("centred ")])
        assert np.linalg.norm(kept[name] - value) <= 1e-12 * max(size, np.linalg.norm(value)), name
    assert identical(first, before)  # operands are left alone
    # A part in much smaller units comes off again without a trace.
    small = of(slice(cut, None), 2.0 ** min(power, 0))
    agree((first + small).subtract(small), first, 1e-9)


def test_subtracting_everything_leaves_nothing():
    X, y, weights = example()
    moments = Moments.from_data(X, y, sample_weight=weights)
    nothing = moments - Moments.from_data(X[::-1], y[::-1], sample_weight=weights[::-1])
    assert (nothing.n_rows, nothing.weight) == (0, 0.0)
    with pytest.raises(ValueError, match="no rows"):
        nothing.solve()
    with pytest.raises(ValueError, match="no rows"):
        nothing.second_moment()
    agree(nothing + moments, moments)


def test_subtracting_what_cannot_be_a_part():
    X, y, _ = example()
    small, large = Moments.from_data(X[:5], y[:5]), Moments.from_data(X, y)
    with pytest.raises(ValueError, match=r"60 rows of weight 60 cannot be subtracted .* 5 rows"):
        small - large
    with pytest.raises(ValueError, match="weight"):
        small - Moments.from_data(X[:3], y[:3], sample_weight=[9.0, 9.0, 9.0])
    with pytest.raises(ValueError, match="not those of a part"):
        large - Moments.from_data(10.0 * X[:5], y[:5])


def test_weight_zero_leaves_no_trace():
    X, y, weights = example()
    X[30], y[30] = 1e60, 1e200  # its weight is zero
    kept = np.flatnonzero(weights)
    assert identical(
        Moments.from_data(X, y, sample_weight=weights),
        Moments.from_data(X[kept], y[kept], sample_weight=weights[kept]),
    )


@pytest.mark.parametrize("options", OPTIONS)
def test_integer_weights_are_repetitions(options):
    X, y, _ = example(options=options)
    weights = np.arange(60) % 4
    repeated = np.repeat(np.arange(60), weights)
    weighted = Moments.from_data(X, y, sample_weight=weights, **options)
    expected = Moments.from_data(X[repeated], y[repeated], **options)
    weighted.n_rows = expected.n_rows  # rows are counted, not weighed
    agree(weighted, expected)


@given(st.integers(-100, 100), st.integers(-200, 200))
def test_powers_of_two_are_exact(tokens, targets):
    X, y, weights = example()
    plain = Moments.from_data(X, y, sample_weight=weights)
    scaled = Moments.from_data(X * 2.0**tokens, y * 2.0**targets, sample_weight=weights)
    assert np.array_equal(plain.gram, scaled.gram)
    coef, intercept = plain.solve(0.25, fit_intercept=True)
    alpha = 0.25 * 2.0 ** (6 * tokens)
    scaled_coef, scaled_intercept = scaled.solve(alpha, fit_intercept=True)
    assert np.array_equal(scaled_coef, np.ldexp(coef, targets - 3 * tokens))
    assert np.array_equal(scaled_intercept, np.ldexp(intercept, targets))


def test_batches_in_other_units_are_converted_exactly():
    """A batch of zeros and one that is 2^40 times larger: as if all had come at once."""
    X, y, _ = example()
    X[:20], y[:20] = 0.0, 0.0
    X[40:] *= 2.0**40
    y[40:] *= 2.0**30
    stream = Moments.from_data(X[:20], y[:20])
    for start in range(20, 60, 10):
        stream.update(X[start : start + 10], y[start : start + 10])
    whole = Moments.from_data(X, y)
    assert (stream.token_exponent, stream.target_exponent) == (
        whole.token_exponent,
        whole.target_exponent,
    )
    agree(stream, whole, 1e-14)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda X, y: Moments.from_data(X[:, :, :2], y), "token width 3 here, 2 in the other"),
        (lambda X, y: Moments.from_data(X, y[:, :1]), "number of outputs 2 here, 1 in"),
        (lambda X, y: Moments.from_data(X, y, state="mean"), "state 'sum' here, 'mean'"),
        (
            lambda X, y: Moments.from_data(X, np.tile(y[:, None], (1, 5, 1)), output="sequence"),
            "output 'last' here, 'sequence'",
        ),
    ],
)
def test_other_kinds_are_refused(other, message):
    X, y, _ = example()
    moments = Moments.from_data(X, y)
    for combine in (moments.merge, moments.subtract):
        with pytest.raises(ValueError, match=message):
            combine(other(X, y))


def test_causal_matters_only_for_sequences():
    X, y, _ = example()
    assert (Moments.from_data(X, y) + Moments.from_data(X, y, causal=False)).n_rows == 120
    y = np.tile(y[:, None], (1, 5, 1))
    first = Moments.from_data(X, y, output="sequence")
    with pytest.raises(ValueError, match="causal True here, False"):
        first + Moments.from_data(X, y, output="sequence", causal=False)


def test_a_batch_that_does_not_fit_changes_nothing():
    X, y, _ = example()
    moments = Moments.from_data(X, y)
    before = pickle.loads(pickle.dumps(moments))
    bad = X.copy()
    bad[3, 1, 2] = np.nan
    for batch, message in (
        ((X[:, :, :2], y), "width d=3"),
        ((X, y[:, 0]), r"y has 1 output\(s\), but these moments are of 2"),
        ((X,), r"y has 0 output\(s\)"),
        ((bad, y), "NaN, first at sequence 3, token 1, feature 2"),
        ((X, y, -np.ones(60)), "must not be negative"),
    ):
        with pytest.raises(ValueError, match=message):
            moments.update(*batch)
    assert identical(moments, before)


def test_what_is_no_moments_is_refused():
    X, y, _ = example(5)
    moments = Moments.from_data(X, y)
    for wrong in (lambda: moments + 1, lambda: moments - 1, lambda: 1 + moments):
        with pytest.raises(TypeError, match="unsupported operand"):
            wrong()
    with pytest.raises(TypeError, match=r"Moments\.from_data"):
        Moments()
    with pytest.raises(ValueError, match="got output='first'"):
        Moments.from_data(X, y, output="first")
    assert repr(moments) == "Moments(n_rows=5, weight=5, token_dim=3, n_outputs=2)"


def test_forms_of_input_are_equal():
    X, y, _ = example(30)
    whole = Moments.from_data(X, y)
    assert identical(Moments.from_data(X.reshape(30, -1), y, n_tokens=5), whole)
    assert identical(Moments.from_data(list(X), y), whole)
    flat = Moments.from_data(X[:10].reshape(10, -1), y[:10], n_tokens=5)
    agree(flat.update(X[10:].reshape(20, -1), y[10:]), whole)


def test_moments_that_do_not_fit_are_refused(monkeypatch):
    from sklearn_mhla._backend import NumpyBackend

    monkeypatch.setattr(NumpyBackend, "available_memory", lambda self: 1000)
    with pytest.raises(MemoryError, match=r"need 0\.000605 GB.* 1e-06 GB are available"):
        Moments.from_data(np.ones((2, 1, 10)))


# Solutions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("alpha", [0.0, 1e-3, 10.0])
@pytest.mark.parametrize("fit_intercept", [False, True])
def test_solution_is_that_of_ridge(options, alpha, fit_intercept):
    X, y, weights = example(options=options)
    moments = Moments.from_data(X, y, sample_weight=weights, **options)
    coef, intercept = moments.solve(alpha, fit_intercept)
    features = reference.feature_matrix(X, **options)
    expected = reference.ridge(
        features,
        y.reshape(len(features), -1),
        alpha,
        fit_intercept,
        np.repeat(weights, len(features) // 60),
    )
    assert reference.relative_error(coef, expected[0]) < 1e-9
    assert np.abs(intercept - expected[1]).max() < 1e-9


def test_fewer_rows_than_features_give_the_solution_of_minimum_norm():
    X, y, _ = example(7)
    coef, _ = Moments.from_data(X, y).solve()
    assert reference.relative_error(coef, MHLARegressor(method="dual").fit(X, y).coef_) < 1e-9


@pytest.mark.parametrize("offset", [1e8, -1e12])
def test_a_large_offset_of_the_targets_costs_no_digits(offset):
    """Cross minus weight times means would keep 16 - 2 log10(offset) digits of the squares."""
    X, y, _ = example()
    shifted = y + offset
    rounded = shifted - offset  # what float64 holds of the targets, exactly
    model = MHLARegressor(method="primal", fit_intercept=True).fit(X, rounded)
    parts = [Moments.from_data(X[i : i + 6], shifted[i : i + 6]) for i in range(0, 60, 6)]
    assert len({tuple(part.target_shift) for part in parts}) > 1
    coef, intercept = sum(parts).solve(fit_intercept=True)
    assert reference.relative_error(coef, model.coef_) < 1e-11
    assert np.abs(intercept - offset - model.intercept_).max() < 1e-15 * abs(offset)
    assert sum(parts).squares(True) == pytest.approx(
        Moments.from_data(X, rounded).squares(True)
        * 4.0 ** (Moments.from_data(X, rounded).target_exponent - parts[0].target_exponent),
        rel=1e-9,
    )


def test_an_ill_conditioned_solution_warns_with_the_number():
    X, y, _ = example()
    X[:, :, 1] = X[:, :, 0] + 1e-3 * X[:, :, 1]
    singular = np.linalg.svd(reference.feature_matrix(X), compute_uv=False)
    moments = Moments.from_data(X, y)
    with pytest.warns(LinAlgWarning, match=r"condition number of .* relative errors of") as caught:
        moments.solve()
    # Balancing the diagonal lowers the condition number, rounding blurs it.
    found = float(re.search(r"number of (\S+):", str(caught[0].message))[1])
    assert 1e11 < found < 10.0 * (singular[0] / singular[-1]) ** 2
    moments.solve(alpha=1.0)  # silent


def test_constant_targets():
    X, _, _ = example()
    moments = Moments.from_data(X, np.full(60, 0.1))
    coef, intercept = moments.solve(fit_intercept=True)
    assert np.abs(coef).max() < 1e-16
    assert intercept == pytest.approx(0.1, rel=1e-15)


@pytest.mark.parametrize("alpha", [-1.0, np.nan, np.inf])
def test_alpha_is_checked(alpha):
    X, y, _ = example(5)
    with pytest.raises(ValueError, match="alpha must be finite and not negative"):
        Moments.from_data(X, y).solve(alpha)


def test_all_zero_input():
    moments = Moments.from_data(np.zeros((4, 2, 3)), np.zeros(4))
    coef, intercept = moments.solve(fit_intercept=True)
    assert not coef.any()
    assert not intercept.any()
    assert not moments.second_moment().any()


def test_second_moments_that_overflow_are_refused():
    with pytest.raises(ValueError, match="overflows"):
        Moments.from_data(np.full((2, 1, 2), 1e60)).second_moment()


# Files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("copy", ["file", "pickle"])
def test_save_and_load_bit_for_bit(tmp_path, options, copy):
    X, y, weights = example(options=options)
    moments = Moments.from_data(X, y + 1e5, sample_weight=weights, **options)
    if copy == "file":
        moments.save(tmp_path / "moments")
        loaded = Moments.load(tmp_path / "moments")
        assert [path.name for path in tmp_path.iterdir()] == ["moments"]
    else:
        loaded = pickle.loads(pickle.dumps(moments))
    assert identical(loaded, moments)
    for name in ("token_dim", "output", "causal", "state", "n_tokens", "n_outputs"):
        assert getattr(loaded, name) == getattr(moments, name)
        assert type(getattr(loaded, name)) is type(getattr(moments, name))
    agree(loaded.update(X, y, weights), moments.update(X, y, weights), 0.0)


def test_n_tokens_is_saved(tmp_path):
    X, y, _ = example()
    flat = X.reshape(60, -1)
    Moments.from_data(flat, y, n_tokens=5).save(str(tmp_path / "moments.npz"))
    loaded = Moments.load(str(tmp_path / "moments.npz"))
    assert loaded.update(flat, y).n_rows == 120


class Reveals:
    """Would show that a pickle was executed."""

    def __reduce__(self):
        return (pytest.fail, ("a pickle was executed",))


@pytest.mark.parametrize("content", ["empty", "text", "npy", "npz", "pickle", "objects", "cut"])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "file.npz"
    if content == "npz":
        np.savez(path, gram=np.ones(3))
    elif content == "npy":
        with open(path, "wb") as file:
            np.save(file, np.ones(3))
    elif content == "objects":
        np.savez(path, format=np.array([Reveals()], dtype=object))
    elif content == "cut":
        X, y, _ = example()
        Moments.from_data(X, y).save(path)
        path.write_bytes(path.read_bytes()[:2000])
    else:
        path.write_bytes(
            {"empty": b"", "text": b"moments", "pickle": pickle.dumps(Reveals())}[content]
        )
    with pytest.raises(ValueError, match=r"is not a file that Moments\.save wrote, or damaged"):
        Moments.load(path)


def test_a_later_version_and_damaged_fields_are_refused(tmp_path):
    X, y, _ = example()
    path = tmp_path / "moments.npz"
    Moments.from_data(X, y).save(path)
    content = dict(np.load(path))
    np.savez(path, **content | {"version": 2})
    with pytest.raises(ValueError, match=r"format version 2; .* reads up to 1"):
        Moments.load(path)
    np.savez(path, **content | {"gram": content["gram"][1:]})
    with pytest.raises(ValueError, match="damaged: gram has shape"):
        Moments.load(path)
    del content["weight"]
    np.savez(path, **content)
    with pytest.raises(ValueError, match=r"damaged: .*weight"):
        Moments.load(path)
    with pytest.raises(FileNotFoundError):
        Moments.load(tmp_path / "missing.npz")


# Devices -------------------------------------------------------------------------------------


def test_moments_on_every_device(device):
    X, y, weights = example()
    expected = Moments.from_data(X, y, sample_weight=weights)
    parts = [
        Moments.from_data(X[rows], y[rows], sample_weight=weights[rows], device=where)
        for rows, where in ((slice(20), device), (slice(20, None), "cpu"))
    ]
    for total in (parts[0] + parts[1], parts[1] + parts[0]):
        coef, _ = total.solve(0.1, fit_intercept=True)
        assert reference.relative_error(coef, expected.solve(0.1, True)[0]) < 1e-10
        loaded = pickle.loads(pickle.dumps(total))
        assert loaded.backend.name == "cpu"
    parts[0].update(X[20:], y[20:], weights[20:])
    agree(pickle.loads(pickle.dumps(parts[0])), expected)
