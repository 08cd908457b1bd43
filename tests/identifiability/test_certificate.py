"""Certificates against explicit feature matrices."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pandas as pd
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from sklearn_mhla import (
    Heads,
    IdentifiabilityCertificate,
    MHLARegressor,
    Moments,
    certify_identifiable,
)
from sklearn_mhla.datasets import make_key_value

METHODS = ["primal", "span"]
KINDS = [
    {"output": output, "causal": causal, "state": state}
    for output in ("last", "sequence")
    for causal in (True, False)
    for state in ("sum", "mean")
]


def published(sequences, **options):
    """All rows of published features, (rows, p)."""
    rows = [
        reference.published_features(state, query)
        for sequence in sequences
        for state, query in reference.states_and_queries(np.asarray(sequence), **options)
    ]
    return np.array(rows)


def second_moment(features, weights=None):
    weights = np.ones(len(features)) if weights is None else weights
    return np.einsum("i,ij,ik->jk", weights, features, features) / weights.sum()


def outside(features, new, tolerance=1e-9):
    """``1 - |P phi|^2 / |phi|^2`` by a singular value decomposition."""
    _, singular, basis = np.linalg.svd(features, full_matrices=True)
    rank = int((singular > tolerance * singular[0]).sum())
    rest = new @ basis[rank:].T
    return (rest**2).sum(1) / (new**2).sum(1)


# Numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("lengths", [[4] * 30, list(range(1, 7)) * 5, [5, 2, 3]])
@pytest.mark.parametrize("method", METHODS)
def test_eigenvalues_are_those_of_the_published_second_moment(method, lengths, options, weighted):
    X = reference.make_ragged(lengths, 3)
    weights = np.random.default_rng(0).uniform(0.1, 4.0, len(X)) if weighted else None
    features = published(X, **options)
    row_weights = weights
    if weighted and options["output"] == "sequence":
        row_weights = np.repeat(weights, lengths)
    expected = np.linalg.eigvalsh(second_moment(features, row_weights))[::-1]
    certificate = certify_identifiable(X, method=method, sample_weight=weights, **options)
    assert certificate.n_rows == len(features)
    assert certificate.eigenvalues.shape == (18,)
    scale = expected[0]
    assert np.abs(certificate.eigenvalues - expected).max() < 1e-13 * scale
    assert certificate.max_eigenvalue == pytest.approx(scale, rel=1e-12)
    if certificate.rank == 18:
        assert certificate.min_eigenvalue == pytest.approx(expected[-1], rel=1e-10)
        assert certificate.condition_number == pytest.approx(scale / expected[-1], rel=1e-10)
    else:
        assert certificate.min_eigenvalue == certificate.eigenvalues[-1] == 0.0
        assert certificate.condition_number == math.inf


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("token_dim", [1, 2, 5, 6])
def test_extremes_beyond_and_below_the_dense_order(token_dim, method):
    X = reference.make_sequences(0.5, 400, 4, token_dim)
    singular = np.linalg.svd(published(X), compute_uv=False)
    certificate = certify_identifiable(X, method=method)
    assert certificate.max_eigenvalue == pytest.approx(singular[0] ** 2 / 400, rel=1e-12)
    assert certificate.min_eigenvalue == pytest.approx(singular[-1] ** 2 / 400, rel=1e-9)


def test_the_smallest_eigenvalue_is_accurate_in_any_units():
    # Lambda has condition 1e30 here: LAPACK would not find one digit of the smallest eigenvalue.
    X = reference.make_sequences(0.0, 200, 5, 2) * [1.0, 2.0**-20]
    certificate = certify_identifiable(X)
    # Of the six features, S_22 q_2 is by far the smallest: the Schur complement of the others is
    # the inverse of an entry of the inverse, computed in equal units.
    features = published(X * [1.0, 2.0**20])
    inverse = np.linalg.inv(second_moment(features))
    assert certificate.min_eigenvalue == pytest.approx(2.0**-120 / inverse[-1, -1], rel=1e-9)
    assert certificate.proven
    assert 0.9 * certificate.min_eigenvalue < certificate.lower_bound < certificate.min_eigenvalue


@pytest.mark.parametrize("k", [1, 5, None])
@pytest.mark.parametrize("options", KINDS[:1] + KINDS[-1:])
@pytest.mark.parametrize("data", ["few rows", "one token", "equal columns", "small column"])
@pytest.mark.parametrize("method", METHODS)
def test_null_space_vanishes_on_all_rows(method, data, options, k):
    X = {
        "few rows": lambda: reference.make_sequences(0.2, 2, 5),
        "one token": lambda: reference.make_sequences(0.0, 100, 1),
        "equal columns": lambda: reference.make_sequences(0.0, 100, 4)[..., [0, 1, 1]],
        "small column": lambda: reference.make_sequences(0.0, 2, 5) * [1.0, 1e-3, 1.0],
    }[data]()
    certificate = certify_identifiable(X, method=method, **options)
    vectors = certificate.null_space(k)
    assert vectors.shape == (certificate.nullity if k is None else k, 18)
    assert np.abs(vectors @ vectors.T - np.eye(len(vectors))).max() < 1e-13
    features = published(X, **options)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    assert np.abs(features @ vectors.T).max() < 1e-12


def test_null_space_limits():
    certificate = certify_identifiable(reference.make_sequences(0.0, 10))
    assert certificate.null_space(0).shape == (0, 18)
    with pytest.raises(ValueError, match="k=9, but the null space has dimension 8"):
        certificate.null_space(9)
    with pytest.raises(ValueError, match="k == -1"):
        certificate.null_space(-1)
    assert certify_identifiable(reference.make_sequences(0.0, 50)).null_space().shape == (0, 18)


# Cases from the field -------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_case_N07_one_token_and_single_precision(method):
    certificate = certify_identifiable(reference.make_sequences(0.0, 2000, 1), method=method)
    assert (certificate.rank, certificate.n_features) == (10, 18)
    assert certificate.min_eigenvalue >= 0.0
    assert (certificate.eigenvalues >= 0.0).all()
    assert certificate.verdict == "not identifiable"
    assert certificate.proven
    assert "single token" in certificate.reason

    X = reference.make_sequences(10.0, 20000).astype(np.float32)
    certificate = certify_identifiable(X, method=method)
    assert certificate.rank == 18
    assert certificate.min_eigenvalue == pytest.approx(4.875, abs=5e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n_samples", [12, 200])
def test_case_N08_scale_of_the_tokens(n_samples, method):
    X = reference.make_sequences(0.0, n_samples)
    one = certify_identifiable(X, method=method)
    for c in (1e-4, 1e-2, 1e4):
        other = certify_identifiable(c * X, method=method)
        assert (other.verdict, other.rank, other.reason) == (one.verdict, one.rank, one.reason)
        assert other.min_eigenvalue / c**6 == pytest.approx(one.min_eigenvalue, rel=1e-11)
        assert other.max_eigenvalue / c**6 == pytest.approx(one.max_eigenvalue, rel=1e-11)
        new = c * reference.make_sequences(0.0, 5, seed=2)
        np.testing.assert_allclose(other.residual(new), one.residual(new / c), atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_case_T06_all_zero(method):
    X = np.zeros((30, 4, 3))
    certificate = certify_identifiable(X, method=method)
    assert certificate.rank == 0
    assert certificate.min_eigenvalue == certificate.max_eigenvalue == 0.0
    assert not certificate.eigenvalues.any()
    assert certificate.null_space().shape == (18, 18)
    assert certificate.covers(X).all()
    other = reference.make_sequences(0.0, 2)
    assert not certificate.covers(other).any()
    np.testing.assert_array_equal(certificate.residual(other), 1.0)
    np.testing.assert_array_equal(certificate.error_bound(other, 0.1), np.inf)
    np.testing.assert_array_equal(certificate.error_bound(X[:1], 0.1), 0.0)
    assert len(certificate.suggest(other, 2)) == 2
    assert certificate.lower_bound == 0.0


# Laws -----------------------------------------------------------------------------------------


@given(
    counts=st.lists(st.integers(0, 3), min_size=8, max_size=30).filter(any),
    method=st.sampled_from(METHODS),
    output=st.sampled_from(["last", "sequence"]),
)
def test_integer_weights_are_repetitions(counts, method, output):
    X = reference.make_sequences(0.1, len(counts), 3, 2)
    weighted = certify_identifiable(X, sample_weight=counts, method=method, output=output)
    repeated = certify_identifiable(np.repeat(X, counts, axis=0), method=method, output=output)
    assert weighted.rank == repeated.rank
    assert weighted.n_rows == np.count_nonzero(counts) * (3 if output == "sequence" else 1)
    scale = repeated.max_eigenvalue
    np.testing.assert_allclose(weighted.eigenvalues, repeated.eigenvalues, atol=1e-13 * scale)


@given(seed=st.integers(0, 99), n_samples=st.integers(1, 60), scale=st.floats(1e-6, 1e6))
def test_tokens_mapped_to_other_tokens(seed, n_samples, scale):
    X = reference.make_sequences(0.0, n_samples, 3, 3, seed)
    invertible = np.linalg.qr(np.random.default_rng(seed).standard_normal((3, 3)))[0] * scale
    one, other = certify_identifiable(X), certify_identifiable(X @ invertible)
    assert one.rank == other.rank == min(n_samples, 18)
    new = reference.make_sequences(0.0, 4, 3, 3, 1000)
    np.testing.assert_array_equal(one.covers(new), other.covers(new @ invertible))


def test_more_rows_never_lower_the_rank_and_repeated_ones_do_not_change_it():
    X = reference.make_sequences(3.0, 300).astype(np.float32)
    once = certify_identifiable(X)
    often = certify_identifiable(np.tile(X, (100, 1, 1)))
    assert once.rank == often.rank == 18
    assert often.min_eigenvalue == pytest.approx(once.min_eigenvalue, rel=1e-8)
    assert often.tol == once.tol


# Forms of input -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n_samples", [11, 60])
def test_every_form_of_input_gives_the_same(n_samples, method):
    X = reference.make_sequences(0.0, n_samples)
    expected = certify_identifiable(X, method=method)
    flat = X.reshape(n_samples, -1)
    frame = pd.DataFrame(flat, columns=[f"c{i}" for i in range(15)])
    new = reference.make_sequences(0.0, 7, seed=3)
    for form, options, same_new in [
        (list(X), {}, list(new)),
        (flat, {"n_tokens": 5}, new.reshape(7, -1)),
        (frame, {"n_tokens": 5}, new),
    ]:
        found = certify_identifiable(form, method=method, **options)
        assert repr(found) == repr(expected)
        np.testing.assert_allclose(found.eigenvalues, expected.eigenvalues, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found.residual(same_new), expected.residual(new), atol=1e-13)


def test_torch_tensors_and_devices(device):
    torch = pytest.importorskip("torch")
    X = reference.make_sequences(0.0, 60)
    new = reference.make_sequences(0.0, 4, seed=2)
    for method in METHODS:
        for rows in (11, 60):
            expected = certify_identifiable(X[:rows], method=method)
            found = certify_identifiable(torch.from_numpy(X[:rows]).to(device), method=method)
            assert (found.rank, found.verdict) == (expected.rank, expected.verdict)
            np.testing.assert_allclose(found.eigenvalues, expected.eigenvalues, atol=1e-10)
            covered = found.residual(torch.from_numpy(new).to(device))
            np.testing.assert_allclose(covered, expected.residual(new), atol=1e-12)
            null_space = found.null_space()
            np.testing.assert_allclose(
                null_space.T @ null_space,
                expected.null_space().T @ expected.null_space(),
                atol=1e-10,
            )


@pytest.mark.parametrize("options", KINDS)
def test_moments_give_the_same_certificate(options):
    for n_samples in (3, 60):
        X = reference.make_ragged([4, 2, 6] * (n_samples // 3), 3)
        expected = certify_identifiable(X, method="primal", **options)
        moments = Moments.from_data(X[:2], **options) + Moments.from_data(X[2:], **options)
        found = certify_identifiable(moments)
        assert (found.verdict, found.rank, found.n_rows) == (
            expected.verdict,
            expected.rank,
            expected.n_rows,
        )
        scale = expected.max_eigenvalue
        np.testing.assert_allclose(found.eigenvalues, expected.eigenvalues, atol=1e-13 * scale)
        new = reference.make_ragged([3, 5], 3, seed=4)
        for ours, theirs in zip(found.residual(new), expected.residual(new), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-12)
        assert found.lower_bound == pytest.approx(expected.lower_bound, rel=1e-9)
        assert found.proven is expected.proven


def test_moments_that_go_on_do_not_change_a_certificate():
    X = reference.make_sequences(0.0, 60)
    moments = Moments.from_data(X[:10])
    certificate = certify_identifiable(moments)
    moments.update(X[10:])
    np.testing.assert_allclose(
        certificate.eigenvalues, certify_identifiable(X[:10]).eigenvalues, atol=1e-12
    )


def test_a_fitted_model_certifies_its_inputs():
    X = reference.make_sequences(0.0, 60)
    y = X[:, 0, :2]
    weights = np.random.default_rng(0).integers(0, 3, 60)
    model = MHLARegressor().fit(X, y, sample_weight=weights)
    expected = certify_identifiable(X, sample_weight=weights)
    found = model.certificate()
    assert repr(found) == repr(expected)
    assert found.lower_bound == expected.lower_bound > 0.0
    np.testing.assert_allclose(found.eigenvalues, expected.eigenvalues, rtol=1e-12)
    streamed = MHLARegressor().partial_fit(X[:20], y[:20], sample_weight=weights[:20])
    early = streamed.certificate()
    streamed.partial_fit(X[20:], y[20:], sample_weight=weights[20:])
    assert early.n_rows == np.count_nonzero(weights[:20])
    assert (streamed.certificate().rank, early.rank) == (18, min(18, early.n_rows))
    assert streamed.certificate().proven
    with pytest.raises(ValueError, match="certify_identifiable on the training inputs"):
        MHLARegressor(method="dual").fit(X, y).certificate()


def test_nothing_is_proved_of_differences():
    X = reference.make_sequences(0.0, 60)
    rest = Moments.from_data(X) - Moments.from_data(X[:20])
    certificate = certify_identifiable(rest)
    assert certificate.verdict == "identifiable"
    assert not certificate.proven
    expected = certify_identifiable(X[20:])
    np.testing.assert_allclose(certificate.eigenvalues, expected.eigenvalues, rtol=1e-10)


# Coverage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_residual_is_that_of_a_projection(method, options):
    X = reference.make_ragged([3, 5, 2, 4], 3)[: 4 if options["output"] == "last" else 2]
    new = reference.make_ragged([2, 6, 1], 3, seed=2) + X[:1]
    certificate = certify_identifiable(X, method=method, **options)
    found, covered = certificate.residual(new), certificate.covers(new)
    if options["output"] == "sequence":
        assert [part.shape for part in found] == [(len(member),) for member in new]
        found, covered = np.concatenate(found), np.concatenate(covered)
    expected = outside(
        reference.feature_matrix(X, **options), reference.feature_matrix(new, **options)
    )
    np.testing.assert_allclose(found, expected, atol=1e-12)
    np.testing.assert_array_equal(covered, expected < 1e-12)
    assert covered.any()
    assert not covered.all()
    assert certificate.covers(X[0][None]).all()  # 3-D input


def test_residuals_of_arrays_at_every_position_are_arrays():
    X = reference.make_sequences(0.0, 3, 4)
    certificate = certify_identifiable(X, output="sequence")
    assert certificate.residual(X).shape == certificate.covers(X).shape == (3, 4)
    assert certificate.covers(X).all()


@pytest.mark.parametrize("method", METHODS)
def test_coverage_does_not_depend_on_units(method):
    # The small column is 1e-9 of the features; it must count all the same.
    units = np.array([1.0, 1.0, 1e-3])
    X = reference.make_sequences(0.0, 60)
    X[..., 2] = X[..., 1]
    certificate = certify_identifiable(X * units, method=method)
    assert certificate.covers(X * units).all()
    assert not certificate.covers(reference.make_sequences(0.0, 20, seed=3) * units).any()


@pytest.mark.parametrize("method", METHODS)
def test_covered_predictions_agree_for_all_minimisers(method):
    X, y, teacher = make_key_value(400, 4, 3, return_teacher=True, random_state=0)
    new = make_key_value(50, 4, 3, random_state=1)[0]
    certificate = certify_identifiable(X, method=method)
    assert certificate.verdict == "not identifiable"
    assert certificate.covers(new).all()
    found = MHLARegressor().fit(X, y).predict(new)
    expected = reference.predict_heads(teacher.value, teacher.key_query, new.astype(float))
    assert np.abs(found - expected).max() < 1e-10
    nonsense = reference.make_sequences(0.0, 5, 5, 7)
    assert not certificate.covers(nonsense).any()


@pytest.mark.parametrize("method", METHODS)
def test_suggestions_enlarge_the_span_greedily(method):
    X = reference.make_sequences(0.0, 8)
    pool = np.r_[X[:3], reference.make_sequences(0.0, 12, seed=4), 2.0 * X[:2]]
    certificate = certify_identifiable(X, method=method)
    chosen = certificate.suggest(pool, 4)
    assert len(set(chosen)) == 4
    assert certify_identifiable(np.r_[X, pool[chosen]]).rank == 8 + 4
    # Each is the farthest from the span of all before.
    features = reference.feature_matrix(X)
    candidates = reference.feature_matrix(pool)
    for row in chosen:
        distance = outside(features, candidates)
        assert distance[row] > distance.max() - 1e-9
        features = np.r_[features, candidates[[row]]]
    assert len(certificate.suggest(pool, 100)) == 10  # 18 - 8
    assert len(certificate.suggest(X, 5)) == 0
    assert len(certificate.suggest(pool, 0)) == 0
    assert len(certify_identifiable(reference.make_sequences(0.0, 60)).suggest(pool, 3)) == 0


# Error bound ----------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["full rank", "few rows", "one token"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_error_bound_is_four_epsilon_leverages(method, weighted, data):
    n_samples, n_tokens = {"full rank": (60, 4), "few rows": (9, 4), "one token": (60, 1)}[data]
    X = reference.make_sequences(0.0, n_samples, n_tokens) * [1.0, 2.0, 0.5]
    weights = np.random.default_rng(1).uniform(0.1, 3.0, n_samples) if weighted else None
    certificate = certify_identifiable(X, method=method, sample_weight=weights)
    new = np.r_[X[:5], 3.0 * X[:2], reference.make_sequences(0.0, 3, n_tokens, seed=6)]
    moment = second_moment(published(X), weights)
    features = published(new)
    expected = (
        4.0
        * 0.1
        * np.einsum(
            "ij,jk,ik->i", features, np.linalg.pinv(moment, rcond=1e-11, hermitian=True), features
        )
    )
    if data == "few rows":
        expected[-3:] = np.inf
    np.testing.assert_allclose(certificate.error_bound(new, 0.1), expected, rtol=1e-9)
    half = certificate.error_bound(new, 0.1, minimum=0.05)
    np.testing.assert_allclose(half, 0.5 * expected, rtol=1e-9)


def test_error_bound_holds_for_pairs_of_models():
    random = np.random.default_rng(0)
    X = reference.make_sequences(0.0, 25)
    features, new = published(X), reference.make_sequences(0.0, 50, seed=2)
    y = random.standard_normal(25)
    best = np.linalg.lstsq(features, y, rcond=None)[0]
    certificate = certify_identifiable(X)
    for _ in range(50):
        pair = best + random.standard_normal((2, 18)) * 10.0 ** random.uniform(-4, 0, (2, 1))
        epsilon = ((features @ pair.T - y[:, None]) ** 2).mean(0).max()
        apart = (published(new) @ (pair[0] - pair[1])) ** 2
        assert (apart <= certificate.error_bound(new, epsilon)).all()


# Verdicts with few heads ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "n_heads", "n_outputs", "verdict"),
    [
        (200, None, None, "identifiable"),
        (200, 1, None, "identifiable"),
        (200, 1, 4, "identifiable"),
        (14, None, None, "not identifiable"),
        (14, 36, None, "not identifiable"),  # d^2 heads write every function, whatever m
        (14, 24, 4, "not identifiable"),  # m d
        (14, 6, 1, "not identifiable"),
        (14, 24, None, "undecided"),  # few if there are many outputs
        (14, 1, None, "undecided"),
        (14, 3, None, "undecided"),
        (14, 1, 4, "not identifiable"),
        (15, 1, 4, "locally identifiable"),
        (50, 4, 6, "locally identifiable"),
        (100, 23, 4, "not identifiable"),
    ],
)
def test_table_of_verdicts(rows, n_heads, n_outputs, verdict):
    X = reference.make_sequences(0.0, rows, 8, 6)
    certificate = certify_identifiable(X, n_heads=n_heads, n_outputs=n_outputs)
    assert certificate.rank == min(rows, 126)
    assert certificate.verdict == verdict
    assert bool(certificate) is (verdict == "identifiable")
    unrestricted = n_heads is None or n_heads >= min(6 * (n_outputs or 6), 36)
    assert certificate.proven is (verdict == "identifiable" or unrestricted)
    exceptions = verdict == "locally identifiable" and 2 * n_heads >= 6
    assert ("exceptions exist" in certificate.reason) is exceptions


def test_a_jacobian_test_that_would_take_long_is_left_out():
    X = reference.make_sequences(0.0, 20, 3, 16)
    certificate = certify_identifiable(X, n_heads=100, n_outputs=16)
    assert certificate.verdict == "undecided"
    assert "too large" in certificate.reason
    assert certificate.local_identifiability(n_heads=1, n_outputs=1).rank_function > 0


def test_local_identifiability_of_a_fitted_model():
    X = reference.make_sequences(0.0, 40, 6, 4)
    y = reference.predict_heads(*reference.make_heads(1, 2, 4), X)
    model = MHLARegressor(n_heads=1, random_state=0).fit(X, y)
    certificate = certify_identifiable(X[:30], n_heads=1, n_outputs=2)
    for given_model in (model, (model.value_, model.key_query_), None):
        assert certificate.local_identifiability(given_model)
    assert not certify_identifiable(X[:3]).local_identifiability(model)


def test_witness_for_inputs_that_do_not_identify_and_none_for_others():
    X = reference.make_sequences(0.0, 15, 8, 6)
    heads = reference.make_heads(1, 4, 6)
    y = reference.predict_heads(*heads, X)
    certificate = certify_identifiable(X[:14], n_heads=1, n_outputs=4)
    for targets in (y[:14], Heads(*heads)):
        witness = certificate.find_witness(targets, max_iter=2000, random_state=0)
        assert witness
        first, other = (
            reference.predict_heads(*model, X[:14]) for model in (witness.heads, witness.other)
        )
        assert reference.relative_error(first, other) < 1e-8
        apart = reference.predict_heads(*witness.heads, witness.X) - reference.predict_heads(
            *witness.other, witness.X
        )
        assert np.abs(apart).max() > 1e-3
    certificate = certify_identifiable(X, n_heads=1, n_outputs=4)
    assert not certificate.find_witness(y, n_starts=2, max_iter=2000, random_state=0)


def test_witness_leaves_out_rows_of_weight_zero():
    X = reference.make_sequences(0.0, 20, 5, 3)
    y = reference.predict_heads(*reference.make_heads(1, 1, 3), X)[:, 0]
    weights = (np.arange(20) % 4 == 0).astype(float)
    y[weights == 0.0] = 1e6
    certificate = certify_identifiable(X, sample_weight=weights)
    witness = certificate.find_witness(y, random_state=0)
    assert witness
    np.testing.assert_allclose(
        reference.predict_heads(*witness.heads, X[weights > 0.0])[:, 0], y[weights > 0.0], rtol=1e-8
    )


# The object -----------------------------------------------------------------------------------


def test_representations():
    for X in (reference.make_sequences(0.0, 60), reference.make_sequences(0.0, 6)):
        certificate = certify_identifiable(X)
        text, page = repr(certificate), certificate._repr_html_()
        assert text.startswith(f"IdentifiabilityCertificate: {certificate.verdict}\n")
        for shown in (certificate.reason, f"{certificate.rank} of 18", str(len(X))):
            assert shown in text
            assert shown in page
        assert page.count("<tr>") == page.count("</tr>") >= 4


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n_samples", [11, 60])
def test_pickled_without_inputs(n_samples, method):
    X = np.random.default_rng(0).standard_normal((n_samples, 2000, 3))
    certificate = certify_identifiable(X, method=method)
    null_space = certificate.null_space()
    content = pickle.dumps(certificate)
    assert len(content) < 0.2 * X.nbytes
    loaded = pickle.loads(content)
    assert isinstance(loaded, IdentifiabilityCertificate)
    assert repr(loaded) == repr(certificate)
    new = reference.make_sequences(0.0, 4)
    np.testing.assert_array_equal(loaded.covers(new), certificate.covers(new))
    np.testing.assert_allclose(loaded.null_space(), null_space, atol=1e-12)
    np.testing.assert_array_equal(loaded.suggest(new, 2), certificate.suggest(new, 2))
    for call in (
        lambda: loaded.find_witness(np.ones(n_samples)),
        lambda: loaded.local_identifiability(n_heads=1, n_outputs=1),
    ):
        with pytest.raises(ValueError, match="needs the training inputs"):
            call()
    if method == "span":
        with pytest.raises(ValueError, match="pickled, which leaves out the inputs"):
            _ = loaded.eigenvalues
    else:
        np.testing.assert_array_equal(loaded.eigenvalues, certificate.eigenvalues)


def test_inputs_are_left_alone():
    X = reference.make_sequences(0.0, 30)
    before = X.copy()
    X.setflags(write=False)
    certificate = certify_identifiable(X)
    certificate.covers(X)
    assert certificate.eigenvalues.all()
    np.testing.assert_array_equal(X, before)


def test_tolerance_is_the_user_s():
    X = reference.make_sequences(0.0, 200)
    X[..., 1] = X[..., 0] + 0.03 * X[..., 1]
    for method in METHODS:
        assert certify_identifiable(X, method=method).rank == 18
        coarse = certify_identifiable(X, method=method, tol=5e-3)
        # 6 if the two columns were equal; residuals of single rows vary.
        assert coarse.rank == 6 if method == "primal" else 6 <= coarse.rank < 12
        assert coarse.tol == 5e-3


def test_auto_takes_the_smaller_side(capsys):
    X = reference.make_sequences(0.0, 18)
    assert certify_identifiable(X, verbose=1).method == "primal"
    assert "p=18 <= rows=18" in capsys.readouterr().out
    assert certify_identifiable(X[:17]).method == "span"


@pytest.mark.parametrize("output", ["last", "sequence"])
@pytest.mark.parametrize("problem", ["sizes", "weights", "offset"])
def test_auto_sees_what_is_lost_in_moments(problem, output, capsys):
    """Squares of features as small as 1e-16 of others, and yet linearly independent."""
    random = np.random.default_rng(0)
    X, weights = random.standard_normal((20 if output == "sequence" else 80, 4, 3)), None
    if problem == "sizes":  # of one sequence in five tiny; the others are too few for full rank
        X[np.arange(len(X)) % 5 > 0] *= 1e-4
    elif problem == "weights":
        weights = np.where(np.arange(len(X)) % 20, 1e-250, 1e250)
    else:
        X += 100.0
    options = {"output": output, "sample_weight": weights}
    assert certify_identifiable(X, method="primal", **options).rank < 18
    certificate = certify_identifiable(X, verbose=1, **options)
    assert "higher rank than their moments" in capsys.readouterr().out
    assert certificate.method == "span"
    assert (certificate.verdict, certificate.rank) == ("identifiable", 18)
    assert np.all(certificate.covers(X))
    assert not certificate.proven or problem == "sizes"
    # Exact arithmetic agrees.
    flint = pytest.importorskip("flint")
    assert flint
    exact = certify_identifiable(X, method="exact", **options)
    assert exact.rank == 18
    assert np.all(exact.covers(X))


def test_auto_stays_with_moments_that_are_right():
    X = reference.make_sequences(0.0, 90)
    X[..., 1] = X[..., 0]
    certificate = certify_identifiable(X)
    assert (certificate.method, certificate.rank) == ("primal", 6)


def test_weights_whose_sum_overflows():
    X = reference.make_sequences(0.0, 40)
    certificate = certify_identifiable(X, sample_weight=np.full(40, 1e308))
    assert certificate.min_eigenvalue == pytest.approx(
        certify_identifiable(X).min_eigenvalue, rel=1e-12
    )
    assert certificate.proven


def test_auto_takes_what_fits(monkeypatch):
    from sklearn_mhla._backend import NumpyBackend

    X = reference.make_sequences(0.0, 40)
    monkeypatch.setattr(NumpyBackend, "available_memory", lambda self: 5000)
    certificate = certify_identifiable(X)
    assert (certificate.method, certificate.rank) == ("span", 18)
    with pytest.raises(MemoryError, match="method='span'"):
        certify_identifiable(X, method="primal")
    with pytest.raises(MemoryError, match="All eigenvalues"):
        _ = certificate.eigenvalues


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        ({"method": "dual"}, ValueError, "method must be one of 'auto', 'primal', 'span', 'exact'"),
        ({"output": "first"}, ValueError, "output"),
        ({"state": "max"}, ValueError, "state"),
        ({"n_heads": 0}, ValueError, "n_heads"),
        ({"n_heads": 1.5}, TypeError, "n_heads"),
        ({"n_outputs": 0}, ValueError, "n_outputs"),
        ({"n_tokens": 0}, ValueError, "n_tokens"),
        ({"tol": 0.0}, ValueError, "tol"),
        ({"tol": 1.0}, ValueError, "tol"),
        ({"tol": np.nan}, ValueError, "tol"),
        ({"causal": "no"}, ValueError, "causal"),
        ({"tol": "small"}, TypeError, "tol"),
        ({"device": "tpu"}, ValueError, "device"),
        ({"sample_weight": [1.0]}, ValueError, "sample_weight"),
    ],
)
def test_wrong_parameters_are_named(wrong, error, match):
    with pytest.raises(error, match=match):
        certify_identifiable(reference.make_sequences(0.0, 20), **wrong)


@pytest.mark.parametrize(
    ("model", "match"),
    [
        ("heads", "got str"),
        (3, "got int"),
        (np.ones((1, 1, 3)), "got ndarray"),
        ((np.ones((1, 1, 2)), np.ones((1, 2, 2))), r"\(n_heads, m, 3\)"),
        ((np.ones((2, 1, 3)), np.ones((1, 3, 3))), r"\(n_heads, 3, 3\)"),
    ],
)
def test_wrong_models_are_named(model, match):
    certificate = certify_identifiable(reference.make_sequences(0.0, 10))
    with pytest.raises(ValueError, match=match):
        certificate.local_identifiability(model)


def test_wrong_inputs_are_named():
    X = reference.make_sequences(0.0, 20)
    with pytest.raises(ValueError, match="NaN"):
        certify_identifiable(np.full((3, 2), np.nan))
    certificate = certify_identifiable(X)
    with pytest.raises(ValueError, match="d=3"):
        certificate.covers(np.ones((2, 3, 5)))
    with pytest.raises(ValueError, match="epsilon"):
        certificate.error_bound(X, -1.0)
    with pytest.raises(ValueError, match="k == -1"):
        certificate.suggest(X, -1)
    for wrong in ({"method": "span"}, {"sample_weight": np.ones(20)}):
        with pytest.raises(ValueError, match="Moments are sums already"):
            certify_identifiable(Moments.from_data(X), **wrong)
    empty = Moments.from_data(X) - Moments.from_data(X)
    with pytest.raises(ValueError, match="no rows"):
        certify_identifiable(empty)


def test_moments_of_flat_rows_know_how_these_are_read():
    X = reference.make_sequences(0.0, 40, 3, 2).reshape(40, 6)
    certificate = certify_identifiable(Moments.from_data(X, n_tokens=3))
    assert certificate.covers(X).all()


def test_many_rows_of_low_rank_are_not_summed(monkeypatch):
    """One-hot tokens, more rows than features: the span is chosen, with the same certificate."""
    monkeypatch.setattr("sklearn_mhla.identifiability._certify._WORTH_A_LOOK", 100)
    random = np.random.default_rng(0)
    X = np.eye(8)[random.integers(3, size=(600, 3))]  # p = 288, three symbols
    low = certify_identifiable(X)
    assert low.method == "span"
    expected = certify_identifiable(X, method="primal")
    assert (low.rank, low.verdict) == (expected.rank, expected.verdict)
    full = certify_identifiable(random.standard_normal((600, 3, 8)))
    assert (full.method, full.rank) == ("primal", 288)
