"""The cross-validated regressor against refits, against GridSearchCV, and by its laws."""

import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from reference import make_heads, make_ragged, make_sequences, predict_heads, relative_error
from sklearn.base import clone
from sklearn.metrics import make_scorer, mean_absolute_error, r2_score
from sklearn.model_selection import (
    GridSearchCV,
    GroupKFold,
    KFold,
    LeaveOneOut,
    RepeatedKFold,
    ShuffleSplit,
    TimeSeriesSplit,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from sklearn_mhla import MHLARegressor, MHLARegressorCV, _cross_validation
from sklearn_mhla._backend import NumpyBackend

ALPHAS = [1e-2, 1.0, 1e2, 1e4]
METHODS = ["primal", "dual"]


def dataset(n_samples=40, n_outputs=3, noise=30.0, seed=5):
    """Noisy targets, so that the best penalty is within the grid."""
    X = make_sequences(0.3, n_samples)
    y = predict_heads(*make_heads(2, n_outputs, 3), X)
    random = np.random.default_rng(seed)
    return X, y + noise * random.standard_normal(y.shape), random.uniform(0.1, 5.0, n_samples)


def left_out_predictions(X, y, weights, alpha, fit_intercept):
    """Predictions of N fits to N - 1 samples."""
    features = reference.feature_matrix(X)
    predicted = np.empty_like(y)
    for i in range(len(X)):
        rest = np.arange(len(X)) != i
        coef, intercept = reference.ridge(
            features[rest], y[rest], alpha, fit_intercept, weights[rest]
        )
        predicted[i] = features[i] @ coef.T + intercept
    return predicted


# Common checks -------------------------------------------------------------------------------

FOLDS = "integer weights repeat a sequence in every fit, but copies are left out one by one"


def expected_to_fail(estimator):
    """Choosing among many penalties is not invariant to repetitions."""
    chooses = estimator.alphas is None
    return {"check_sample_weight_equivalence_on_dense_data": FOLDS} if chooses else {}


@parametrize_with_checks(
    [
        MHLARegressorCV(),
        MHLARegressorCV(1.0, method="dual", fit_intercept=True),
        MHLARegressorCV([0.1, 10.0], cv=2, alpha_per_target=True, state="mean"),
        MHLARegressorCV(0.5, cv=3, method="dual", scoring="r2"),
    ],
    expected_failed_checks=expected_to_fail,
)
def test_common_checks(estimator, check):
    check(estimator)


def test_parameters_are_stored_untouched():
    given_values = {name: object() for name in MHLARegressorCV().get_params()}
    model = MHLARegressorCV(**given_values)
    assert vars(model) == given_values


def test_has_no_partial_fit():
    assert not hasattr(MHLARegressorCV(), "partial_fit")


# Leave-one-out -------------------------------------------------------------------------------


@pytest.mark.parametrize("n_samples", [10, 40])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_case_N03_leave_one_out_predictions(n_samples, method, fit_intercept):
    X, y, weights = dataset(n_samples, n_outputs=7)
    seen = []

    def scoring(estimator, predictions, targets, sample_weight):
        np.testing.assert_array_equal(targets, y)
        np.testing.assert_array_equal(sample_weight, weights)
        seen.append(estimator.predict(predictions))
        return 0.0

    MHLARegressorCV(0.3, scoring=scoring, method=method, fit_intercept=fit_intercept).fit(
        X, y, sample_weight=weights
    )
    expected = left_out_predictions(X, y, weights, 0.3, fit_intercept)
    assert relative_error(np.array(seen), expected[None]) < 1e-9


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("alpha_per_target", [True, False])
def test_leave_one_out_scores_and_choice(method, alpha_per_target):
    X, y, weights = dataset()
    y[:, 1] = predict_heads(*make_heads(2, 3, 3), X)[:, 1]  # no noise, so hardly any penalty
    model = MHLARegressorCV(
        ALPHAS, method=method, fit_intercept=True, alpha_per_target=alpha_per_target
    ).fit(X, y, sample_weight=weights)
    scores = np.array(
        [
            -np.average(
                (y - left_out_predictions(X, y, weights, alpha, True)) ** 2, axis=0, weights=weights
            )
            for alpha in ALPHAS
        ]
    )
    if not alpha_per_target:
        scores = scores.mean(1)
    np.testing.assert_allclose(model.cv_results_["mean_test_score"], scores, rtol=1e-8)
    best = scores.argmax(0)
    np.testing.assert_array_equal(model.alpha_, np.array(ALPHAS)[best])
    np.testing.assert_allclose(model.best_score_, scores.max(0), rtol=1e-8)
    np.testing.assert_array_equal(model.cv_results_["rank_test_score"].argmin(0), best)
    np.testing.assert_array_equal(model.alphas_, ALPHAS)
    assert set(model.cv_results_) == {
        "param_alpha",
        "param_n_heads",
        "mean_test_score",
        "rank_test_score",
    }
    for j, alpha in enumerate(np.broadcast_to(model.alpha_, 3)):
        single = MHLARegressor(alpha=alpha, method=method, fit_intercept=True)
        single.fit(X, y[:, j], sample_weight=weights)
        assert relative_error(model.coef_[j], single.coef_[0]) < 1e-9
        assert relative_error(model.predict(X)[:, j], single.predict(X)) < 1e-9
    if alpha_per_target:
        assert len(set(model.alpha_)) > 1
    else:
        assert isinstance(model.alpha_, float)
        assert isinstance(model.best_score_, float)


def test_leave_one_out_is_its_splitter():
    X, y, _ = dataset(15)
    closed = MHLARegressorCV(ALPHAS, fit_intercept=True).fit(X, y)
    split = MHLARegressorCV(ALPHAS, fit_intercept=True, cv=LeaveOneOut()).fit(X, y)
    for name in ("mean_test_score", "rank_test_score"):
        np.testing.assert_allclose(closed.cv_results_[name], split.cv_results_[name], rtol=1e-8)
    np.testing.assert_array_equal(closed.coef_, split.coef_)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("causal", [True, False])
def test_sequences_are_left_out_whole(method, causal):
    X, _, weights = dataset(12)
    y = np.random.default_rng(0).standard_normal((12, 5, 2))
    options = {"output": "sequence", "causal": causal, "method": method, "fit_intercept": True}
    closed = MHLARegressorCV(ALPHAS, **options).fit(X, y, sample_weight=weights)
    total = np.zeros(len(ALPHAS))
    for i in range(12):
        rest = np.arange(12) != i
        for k, alpha in enumerate(ALPHAS):
            model = MHLARegressor(alpha=alpha, **options)
            model.fit(X[rest], y[rest], sample_weight=weights[rest])
            total[k] += weights[i] * ((y[i] - model.predict(X[i : i + 1])[0]) ** 2).sum()
    expected = -total / (weights.sum() * 5 * 2)
    np.testing.assert_allclose(closed.cv_results_["mean_test_score"], expected, rtol=1e-8)
    assert closed.predict(X).shape == y.shape


def test_scorers_see_all_left_out_predictions_at_once():
    X, y, weights = dataset()
    model = MHLARegressorCV(ALPHAS, scoring="r2").fit(X, y, sample_weight=weights)
    expected = [
        r2_score(y, left_out_predictions(X, y, weights, alpha, False), sample_weight=weights)
        for alpha in ALPHAS
    ]
    np.testing.assert_allclose(model.cv_results_["mean_test_score"], expected, rtol=1e-8)


def test_metrics_that_take_no_weights():
    X, y, weights = dataset(n_outputs=1)
    model = MHLARegressorCV(ALPHAS, scoring="neg_max_error").fit(X, y[:, 0], weights)
    expected = [
        -np.abs(y - left_out_predictions(X, y, weights, alpha, False)).max() for alpha in ALPHAS
    ]
    np.testing.assert_allclose(model.cv_results_["mean_test_score"], expected, rtol=1e-8)


# Folds ---------------------------------------------------------------------------------------

SPLITTERS = [
    2,
    5,
    KFold(4, shuffle=True, random_state=0),
    ShuffleSplit(3, random_state=0),
    ShuffleSplit(10, random_state=0),
    RepeatedKFold(n_splits=3, n_repeats=2, random_state=0),
    TimeSeriesSplit(3),
    [(np.arange(5, 40), np.arange(5)), (np.arange(30), np.arange(20, 40))],
    [(np.r_[np.arange(20), np.arange(20)], np.arange(20, 40))],  # with replacement
    [(np.arange(40) < 25, np.arange(40) >= 25)],  # masks
]


@pytest.mark.parametrize("cv", SPLITTERS, ids=str)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_equals_grid_search(cv, method, fit_intercept):
    X, y, _ = dataset()
    y = y + 100.0
    options = {"method": method, "fit_intercept": fit_intercept}
    search = GridSearchCV(
        MHLARegressor(**options), {"alpha": ALPHAS}, cv=cv, scoring="neg_mean_squared_error"
    ).fit(X, y)
    model = MHLARegressorCV(ALPHAS, cv=cv, **options).fit(X, y)
    for name, expected in search.cv_results_.items():
        if name.endswith("_score"):
            np.testing.assert_allclose(model.cv_results_[name], expected, rtol=1e-7)
    assert model.alpha_ == search.best_params_["alpha"]
    assert model.best_score_ == pytest.approx(search.best_score_, rel=1e-7)
    assert relative_error(model.predict(X), search.predict(X)) < 1e-9


@pytest.mark.parametrize("method", METHODS)
def test_no_penalty_is_a_candidate_of_folds(method):
    X, y, _ = dataset(20)
    X[:, :, 2] = X[:, :, 1]  # minimum norm
    grid = [0.0, 1.0]
    search = GridSearchCV(
        MHLARegressor(method=method), {"alpha": grid}, cv=4, scoring="neg_mean_squared_error"
    ).fit(X, y)
    model = MHLARegressorCV(grid, cv=4, method=method).fit(X, y)
    np.testing.assert_allclose(
        model.cv_results_["mean_test_score"], search.cv_results_["mean_test_score"], rtol=1e-6
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scoring", [None, "r2", make_scorer(mean_absolute_error)])
def test_weights_count_in_fits_and_scores(method, scoring):
    X, y, weights = dataset()
    weights[::7] = 0.0
    model = MHLARegressorCV(ALPHAS, cv=4, method=method, scoring=scoring, fit_intercept=True)
    model.fit(X, y, sample_weight=weights)
    scores = np.empty((len(ALPHAS), 4))
    for k, (train, test) in enumerate(KFold(4).split(X)):
        for i, alpha in enumerate(ALPHAS):
            fold = MHLARegressor(alpha=alpha, fit_intercept=True)
            predicted = fold.fit(X[train], y[train], weights[train]).predict(X[test])
            if scoring is None:
                squares = ((y[test] - predicted) ** 2).mean(1)
                scores[i, k] = -np.average(squares, weights=weights[test])
            else:
                metric = r2_score if scoring == "r2" else mean_absolute_error
                scores[i, k] = metric(y[test], predicted, sample_weight=weights[test])
    for k in range(4):
        np.testing.assert_allclose(
            model.cv_results_[f"split{k}_test_score"], scores[:, k], rtol=1e-7
        )
    np.testing.assert_allclose(model.cv_results_["mean_test_score"], scores.mean(1), rtol=1e-7)
    np.testing.assert_allclose(model.cv_results_["std_test_score"], scores.std(1), rtol=1e-6)


def test_groups_reach_the_splitter():
    X, y, _ = dataset()
    groups = np.arange(40) % 7
    model = MHLARegressorCV(ALPHAS, cv=GroupKFold(3)).fit(X, y, groups=groups)
    splits = list(GroupKFold(3).split(X, y, groups))
    expected = MHLARegressorCV(ALPHAS, cv=splits).fit(X, y)
    np.testing.assert_array_equal(
        model.cv_results_["mean_test_score"], expected.cv_results_["mean_test_score"]
    )
    with pytest.raises(ValueError, match="groups"):
        MHLARegressorCV(cv=GroupKFold(3)).fit(X, y)


@pytest.mark.parametrize("method", METHODS)
def test_folds_of_sequences(method):
    lengths = np.array([3, 1, 6, 3, 2, 6, 1, 9, 4, 4])
    X = make_ragged(lengths, 2)
    random = np.random.default_rng(0)
    y = [random.standard_normal((length, 2)) for length in lengths]
    options = {"output": "sequence", "method": method, "fit_intercept": True}
    model = MHLARegressorCV(ALPHAS, cv=3, **options).fit(X, y)
    for k, (train, test) in enumerate(KFold(3).split(X)):
        for i, alpha in enumerate(ALPHAS):
            fold = MHLARegressor(alpha=alpha, **options).fit(
                [X[j] for j in train], [y[j] for j in train]
            )
            predicted = np.concatenate(fold.predict([X[j] for j in test]))
            error = np.concatenate([y[j] for j in test]) - predicted
            expected = -(error**2).mean()
            assert model.cv_results_[f"split{k}_test_score"][i] == pytest.approx(expected, rel=1e-8)


def test_a_fold_that_holds_nearly_all_of_the_gram_matrix():
    # Taking it off the total would leave rounding errors of 1e-16 * 1e18.
    X, y, _ = dataset()
    X[:10] *= 1e3
    model = MHLARegressorCV([1e-2], cv=4, method="primal").fit(X, y)
    fold = MHLARegressor(alpha=1e-2).fit(X[10:], y[10:])
    expected = -((fold.predict(X[:10]) - y[:10]) ** 2).mean()
    assert model.cv_results_["split0_test_score"][0] == pytest.approx(expected, rel=1e-9)


def test_penalties_in_groups(monkeypatch):
    X, y, _ = dataset()
    expected = MHLARegressorCV(cv=3).fit(X, y)
    monkeypatch.setattr(_cross_validation, "_BUDGET", 1)
    model = MHLARegressorCV(cv=3).fit(X, y)
    np.testing.assert_allclose(
        model.cv_results_["mean_test_score"], expected.cv_results_["mean_test_score"], rtol=1e-12
    )


def test_parts_that_do_not_fit_into_memory(monkeypatch):
    X, y, weights = dataset()
    options = {"cv": 3, "method": "primal", "fit_intercept": True}
    expected = MHLARegressorCV(**options).fit(X, y, weights)
    monkeypatch.setattr(_cross_validation._TrainingSets, "_parts_are_few", lambda self: False)
    model = MHLARegressorCV(**options).fit(X, y, weights)
    np.testing.assert_allclose(
        model.cv_results_["mean_test_score"], expected.cv_results_["mean_test_score"], rtol=1e-12
    )


# Number of heads -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_chooses_the_number_of_heads(method):
    X = make_sequences(0.0, 70, token_dim=3)
    y = predict_heads(*make_heads(1, 3, 3), X)
    y += 0.3 * y.std() * np.random.default_rng(0).standard_normal(y.shape)
    options = {"method": method, "random_state": 0}
    model = MHLARegressorCV([1e-2, 1.0], n_heads=[None, 1, 2, 9], cv=3, **options).fit(X, y)
    assert model.n_heads_ == 1
    results = model.cv_results_
    np.testing.assert_array_equal(results["param_n_heads"], np.repeat([None, 1, 2, 9], 2))
    np.testing.assert_array_equal(results["param_alpha"], np.tile([1e-2, 1.0], 4))
    # Nine heads are no limit.
    np.testing.assert_array_equal(results["mean_test_score"][:2], results["mean_test_score"][-2:])
    search = GridSearchCV(
        MHLARegressor(**options),
        {"n_heads": [None, 1, 2], "alpha": [1e-2, 1.0]},
        cv=3,
        scoring="neg_mean_squared_error",
    ).fit(X, y)
    theirs = {
        (p["n_heads"], p["alpha"]): score
        for p, score in zip(
            search.cv_results_["params"], search.cv_results_["mean_test_score"], strict=True
        )
    }
    for n_heads, alpha, score in zip(
        results["param_n_heads"][:6],
        results["param_alpha"],
        results["mean_test_score"],
        strict=False,
    ):
        assert score == pytest.approx(theirs[n_heads, alpha], rel=1e-3)
    best = MHLARegressor(1, alpha=model.alpha_, **options).fit(X, y)
    assert relative_error(model.coef_, best.coef_) < 1e-6
    assert model.gradient_norm_ < 1e-3
    assert model.loss_ == pytest.approx(best.loss_, rel=1e-6)


def test_few_heads_with_an_intercept():
    X, y, weights = dataset(60, noise=1.0)
    y += 50.0
    options = {"fit_intercept": True, "random_state": 0, "method": "primal", "tol": 1e-12}
    model = MHLARegressorCV(1.0, n_heads=1, cv=3, **options).fit(X, y, weights)
    for k, (train, test) in enumerate(KFold(3).split(X)):
        fold = MHLARegressor(1, alpha=1.0, **options).fit(X[train], y[train], weights[train])
        squares = ((fold.predict(X[test]) - y[test]) ** 2).mean(1)
        expected = -np.average(squares, weights=weights[test])
        assert model.cv_results_[f"split{k}_test_score"][0] == pytest.approx(expected, rel=1e-6)


# Default penalties ---------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_default_penalties_are_relative_to_the_mean_eigenvalue(method, fit_intercept):
    X, y, weights = dataset()
    features = reference.feature_matrix(X)
    if fit_intercept:
        features = features - np.average(features, axis=0, weights=weights)
    eigenvalues = np.linalg.eigvalsh(features.T @ (weights[:, None] * features))
    model = MHLARegressorCV(method=method, fit_intercept=fit_intercept).fit(X, y, weights)
    np.testing.assert_allclose(model.alphas_ / eigenvalues.mean(), np.logspace(-8, 2, 21))
    assert model.alphas_[0] < model.alpha_ < model.alphas_[-1]


@pytest.mark.parametrize("cv", [None, 4])
@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_units_do_not_matter(cv, factor):
    X, y, _ = dataset()
    model = MHLARegressorCV(cv=cv).fit(X, y)
    scaled = MHLARegressorCV(cv=cv).fit(factor * X, y)
    assert scaled.alpha_ == pytest.approx(model.alpha_ * factor**6)
    assert relative_error(scaled.predict(factor * X), model.predict(X)) < 1e-9
    np.testing.assert_allclose(
        scaled.cv_results_["mean_test_score"], model.cv_results_["mean_test_score"], rtol=1e-6
    )


@pytest.mark.parametrize("cv", [None, 3])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_features_that_say_nothing(cv, method, fit_intercept):
    y = np.arange(6.0)
    for X in (np.zeros((6, 2, 3)), np.ones((6, 2, 3))):
        model = MHLARegressorCV(cv=cv, method=method, fit_intercept=fit_intercept).fit(X, y)
        assert (model.alphas_ > 0.0).all()
        if fit_intercept:
            np.testing.assert_allclose(model.predict(X), 2.5)


@pytest.mark.parametrize("method", METHODS)
def test_default_penalties_of_constant_features(method):
    # Centring leaves rounding errors of either sign.
    for value in np.linspace(0.1, 0.9, 17):
        X = np.full((7, 2, 3), value)
        model = MHLARegressorCV(method=method, fit_intercept=True).fit(X, np.arange(7.0))
        squares = (reference.feature_matrix(X) ** 2).sum()
        np.testing.assert_allclose(model.alphas_, squares / 6 * np.logspace(-8, 2, 21))


def test_huge_and_tiny_targets():
    X, y, _ = dataset()
    expected = MHLARegressorCV().fit(X, y)
    for exponent in (-900, 900):
        model = MHLARegressorCV().fit(X, np.ldexp(y, exponent))
        assert model.alpha_ == expected.alpha_
        assert relative_error(np.ldexp(model.predict(X), -exponent), expected.predict(X)) < 1e-12


# Laws ----------------------------------------------------------------------------------------


@given(
    st.integers(2, 40),
    st.integers(1, 3),
    st.sampled_from(METHODS),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_order_of_the_rows_is_irrelevant(n_samples, token_dim, method, fit_intercept, seed):
    random = np.random.default_rng(seed)
    X = random.standard_normal((n_samples, 4, token_dim))
    y, weights = random.standard_normal((n_samples, 2)), random.uniform(0.1, 5.0, n_samples)
    order = random.permutation(n_samples)
    alphas = np.array([1e-3, 1.0, 1e3])
    model = MHLARegressorCV(alphas, method=method, fit_intercept=fit_intercept)
    scores = model.fit(X, y, weights).cv_results_["mean_test_score"]
    permuted = model.fit(X[order], y[order], weights[order]).cv_results_["mean_test_score"]
    np.testing.assert_allclose(permuted, scores, rtol=1e-8)


@given(
    st.integers(-40, 40),
    st.integers(-40, 40),
    st.sampled_from(METHODS),
    st.sampled_from([None, 3]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_powers_of_two_change_nothing(tokens, targets, method, cv, fit_intercept, seed):
    random = np.random.default_rng(seed)
    X, y = random.standard_normal((20, 4, 2)), random.standard_normal((20, 2))
    model = MHLARegressorCV(method=method, cv=cv, fit_intercept=fit_intercept).fit(X, y)
    scaled = clone(model).fit(np.ldexp(X, tokens), np.ldexp(y, targets))
    assert scaled.alpha_ == np.ldexp(model.alpha_, 6 * tokens)
    assert scaled.best_score_ == np.ldexp(model.best_score_, 2 * targets)
    computed = np.ldexp(scaled.predict(np.ldexp(X, tokens)), -targets)
    assert relative_error(computed, model.predict(X)) < 1e-12


@given(st.sampled_from(METHODS), st.floats(0.1, 10.0), st.integers(0, 2**32 - 1))
def test_weights_and_penalties_scale_together(method, factor, seed):
    random = np.random.default_rng(seed)
    X, y = random.standard_normal((20, 4, 2)), random.standard_normal((20, 2))
    weights = random.uniform(0.1, 5.0, 20)
    model = MHLARegressorCV(method=method, fit_intercept=True)
    expected = model.fit(X, y, weights).cv_results_
    scaled = model.fit(X, y, factor * weights).cv_results_
    np.testing.assert_allclose(scaled["mean_test_score"], expected["mean_test_score"], rtol=1e-6)
    np.testing.assert_allclose(scaled["param_alpha"], factor * expected["param_alpha"])


# Forms, copies, composition ------------------------------------------------------------------


@pytest.mark.parametrize("cv", [None, 3])
def test_all_forms_of_input(cv):
    X, y, weights = dataset()
    names = [f"token{t}_{axis}" for t in range(5) for axis in "xyz"]
    frame = pd.DataFrame(X.reshape(len(X), -1), columns=names)
    model = MHLARegressorCV(ALPHAS, cv=cv, n_tokens=5)
    expected = model.fit(X, y, weights).predict(X)
    for form in (list(X), X.reshape(len(X), -1), frame):
        np.testing.assert_allclose(model.fit(form, y, weights).predict(form), expected, rtol=1e-12)
    np.testing.assert_array_equal(model.feature_names_in_, names)


@pytest.mark.parametrize("cv", [None, KFold(3, shuffle=True, random_state=0)])
def test_memory_map(cv, tmp_path):
    X, y, _ = dataset()
    np.save(tmp_path / "X.npy", X)
    stored = np.load(tmp_path / "X.npy", mmap_mode="r")
    model = MHLARegressorCV(ALPHAS, cv=cv)
    expected = model.fit(X, y).coef_
    np.testing.assert_allclose(model.fit(stored, y).coef_, expected, rtol=1e-10)


def test_one_dimensional_targets():
    X, y, _ = dataset(n_outputs=1)
    model = MHLARegressorCV(ALPHAS, alpha_per_target=True).fit(X, y[:, 0])
    assert isinstance(model.alpha_, float)
    assert model.predict(X).shape == (40,)
    column = MHLARegressorCV(ALPHAS, alpha_per_target=True).fit(X, y)
    np.testing.assert_array_equal(column.alpha_, [model.alpha_])
    assert column.best_score_.shape == (1,)


def test_scorer_per_target():
    X, y, _ = dataset()
    model = MHLARegressorCV(ALPHAS, cv=4, scoring="r2", alpha_per_target=True).fit(X, y)
    for j in range(3):
        single = MHLARegressorCV(ALPHAS, cv=4, scoring="r2").fit(X, y[:, j])
        assert model.alpha_[j] == single.alpha_
        np.testing.assert_allclose(
            model.cv_results_["mean_test_score"][:, j],
            single.cv_results_["mean_test_score"],
            rtol=1e-8,
        )


def test_clone_and_pickle():
    X, y, _ = dataset()
    model = MHLARegressorCV(ALPHAS, cv=KFold(3), scoring="r2").fit(X, y)
    assert not hasattr(clone(model), "alpha_")
    loaded = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))
    np.testing.assert_array_equal(loaded.value_, model.value_)
    assert loaded.alpha_ == model.alpha_


def test_inside_pipeline_and_grid_search():
    X, y, _ = dataset()
    flat = X.reshape(len(X), -1)
    pipeline = make_pipeline(
        StandardScaler(),
        FunctionTransformer(lambda rows: rows.reshape(len(rows), 5, 3)),
        MHLARegressorCV(),
    )
    search = GridSearchCV(pipeline, {"mhlaregressorcv__state": ["sum", "mean"]}, cv=3).fit(flat, y)
    assert search.best_estimator_[-1].alpha_ > 0.0


def test_torch_input_gives_the_same():
    torch = pytest.importorskip("torch")
    X, y, _ = dataset()
    for cv in (None, 3):
        model = MHLARegressorCV(cv=cv).fit(torch.from_numpy(X), torch.from_numpy(y))
        expected = MHLARegressorCV(cv=cv).fit(X, y)
        assert model.alpha_ == expected.alpha_
        assert isinstance(model.predict(torch.from_numpy(X)), torch.Tensor)


def test_verbose(capsys):
    X, y, _ = dataset()
    for cv in (None, 3):
        model = MHLARegressorCV(cv=cv, verbose=1).fit(X, y)
        printed = capsys.readouterr().out
        assert "[MHLARegressorCV] method='primal'" in printed
        assert f"alpha={model.alpha_}" in printed


def test_a_fit_that_fails_leaves_the_earlier_one():
    X, y, _ = dataset()
    model = MHLARegressorCV().fit(X, y)
    expected = model.predict(X)
    with pytest.raises(ValueError, match="n_samples=1"):
        model.fit(X[:1], y[:1])
    np.testing.assert_array_equal(model.predict(X), expected)


# Refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"alphas": [1.0, -1.0]}, r"alphas\[1\] == -1"),
        ({"alphas": [1.0, 0.0]}, r"alphas\[1\] == 0, must be > 0 for leave-one-out"),
        ({"alphas": 0.0}, r"alphas\[0\] == 0"),
        ({"alphas": []}, "non-empty"),
        ({"alphas": [[1.0]]}, "1-D"),
        ({"alphas": ["a"]}, "alphas must be numbers"),
        ({"alphas": [np.inf]}, r"alphas\[0\] must be finite"),
        ({"alphas": [np.nan]}, r"alphas\[0\] must be finite"),
        ({"n_heads": []}, "n_heads is empty"),
        ({"n_heads": 0}, "n_heads == 0"),
        ({"n_heads": [1, 0], "cv": 2}, "n_heads == 0"),
        ({"n_heads": 1}, "cv=None leaves out one sequence.*n_heads=1.*cv=5"),
        ({"n_heads": [None, 2]}, "n_heads=2"),
        ({"n_heads": 2, "cv": 3, "alpha_per_target": True}, "alpha_per_target=True needs"),
        ({"cv": 1}, "n_splits"),
        ({"cv": 100}, "n_splits=100"),
        ({"cv": "many"}, "Expected `cv`"),
        ({"cv": []}, "no splits"),
        ({"cv": [(np.arange(3), [])]}, "Split 0 of cv has no test sequences"),
        ({"cv": [([], np.arange(3))]}, "Split 0 of cv has no training sequences"),
        ({"scoring": "best"}, "'best'"),
        ({"scoring": ["r2"]}, "scoring must be None"),
        ({"alpha_per_target": "yes"}, "alpha_per_target must be True or False"),
        ({"method": "cg"}, "method must be one of 'auto', 'primal', 'dual'"),
        ({"output": "all"}, "output must be one of"),
        ({"tol": -1.0}, "tol == -1"),
        ({"max_iter": 0}, "max_iter == 0"),
        ({"n_tokens": 0}, "n_tokens == 0"),
    ],
)
def test_invalid_parameters(params, message):
    X, y, _ = dataset()
    with pytest.raises(ValueError, match=message):
        MHLARegressorCV(**params).fit(X, y)


def test_splits_without_weight():
    X, y, weights = dataset()
    weights[:10] = 0.0
    with pytest.raises(ValueError, match="Split 0 of cv has no test sequences of positive weight"):
        MHLARegressorCV(cv=4).fit(X, y, weights)
    with pytest.raises(ValueError, match="at least two of positive weight"):
        MHLARegressorCV().fit(X, y, np.arange(40) == 3)


def test_scores_that_are_not_finite():
    X, y, _ = dataset(12)
    with pytest.raises(ValueError, match="No candidate has a finite score"):
        MHLARegressorCV(ALPHAS, scoring=lambda *_: np.nan).fit(X, y)
    scores = iter([np.nan, 1.0, 2.0, np.nan])
    with pytest.warns(UserWarning, match="not finite"):
        model = MHLARegressorCV(ALPHAS, scoring=lambda *_: next(scores)).fit(X, y)
    assert model.alpha_ == ALPHAS[2]
    np.testing.assert_array_equal(model.cv_results_["rank_test_score"], [3, 2, 1, 3])


@pytest.mark.parametrize("method", METHODS)
def test_too_little_memory(method, monkeypatch):
    X, y, _ = dataset()
    order = {"primal": 18, "dual": 40}[method]
    needed = 8 * 4 * order**2
    monkeypatch.setattr(NumpyBackend, "available_memory", lambda self: needed - 1)
    with pytest.raises(MemoryError, match=r"GridSearchCV|memory"):
        MHLARegressorCV(method=method).fit(X, y)


def test_no_warnings_on_ordinary_data():
    X, y, _ = dataset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MHLARegressorCV(fit_intercept=True).fit(X, y)
        MHLARegressorCV(fit_intercept=True, cv=5, method="dual").fit(X, y)
