"""The conventions of scikit-learn: common checks, model selection, names, routing, copies."""

import inspect
import pickle
import re
import warnings

import numpy as np
import pandas as pd
import polars as pl
import pytest
import sklearn
import skops.io
import threadpoolctl
from reference import make_heads, make_ragged, make_sequences, predict_heads
from sklearn import config_context
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor, make_column_selector
from sklearn.decomposition import PCA
from sklearn.model_selection import (
    GridSearchCV,
    KFold,
    cross_val_predict,
    cross_val_score,
    cross_validate,
    learning_curve,
)
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.utils import estimator_html_repr, get_tags
from sklearn.utils.estimator_checks import estimator_checks_generator, parametrize_with_checks
from sklearn.utils.fixes import parse_version

from sklearn_mhla import MHLARegressor, _model

COLUMNS = [f"token{t}_{axis}" for t in range(5) for axis in "xyz"]
FORMS = {
    "array": lambda X: X,
    "list": list,
    "flat": lambda X: X.reshape(len(X), -1),
}


def dataset(n_samples=60):
    """Noisy targets, so that scores and penalties matter."""
    X = make_sequences(0.3, n_samples)
    y = predict_heads(*make_heads(2, 1, 3), X)[:, 0]
    return X, y + 3.0 * np.random.default_rng(5).standard_normal(n_samples)


# Common checks -------------------------------------------------------------------------------

# Rows of the checks have up to 30 columns; each row is then a single token of that width.
UNUSUAL = [
    MHLARegressor(),
    MHLARegressor(method="dual"),
    MHLARegressor(method="dual", alpha=0.1, fit_intercept=True),
    MHLARegressor(alpha=1.0, fit_intercept=True),
    MHLARegressor(state="mean", fit_intercept=True),
    MHLARegressor(n_tokens=1, causal=False, alpha=1e-6, device="cpu"),
]


@parametrize_with_checks(UNUSUAL)
def test_common_checks(estimator, check):
    check(estimator)


def _check_name(check):
    return getattr(check, "func", check).__name__


@pytest.mark.parametrize(
    ("estimator", "check"),
    [
        pytest.param(estimator, check, id=_check_name(check))
        for estimator, check in estimator_checks_generator(MHLARegressor(method="primal"))
        # 30 columns are p = 13 950: a primal system of 1.9 GB. Weights have tests of their own.
        if _check_name(check) != "check_sample_weight_equivalence_on_dense_data"
    ],
)
def test_common_checks_primal(estimator, check):
    check(estimator)


def test_kind_and_tags():
    model = MHLARegressor()
    assert is_regressor(model)
    assert not is_classifier(model)
    tags = get_tags(model)
    assert tags.estimator_type == "regressor"
    assert tags.target_tags.required
    assert tags.target_tags.multi_output
    assert tags.target_tags.single_output
    assert tags.input_tags.two_d_array
    assert tags.input_tags.three_d_array
    assert not tags.input_tags.sparse
    assert not tags.input_tags.allow_nan
    assert not tags.input_tags.string


# Parameters and copies -----------------------------------------------------------------------


def test_case_S01_parameters_are_stored_untouched():
    given = {
        "n_heads": 2,
        "penalty": "nuclear",
        "solver": "convex",
        "method": ["not", "checked", "yet"],
        "alpha": np.array([0.1, 1.0]),
        "fit_intercept": True,
        "n_tokens": np.int64(3),
        "output": "sequence",
        "causal": False,
        "state": "mean",
        "heads": "svd",
        "max_iter": 7,
        "tol": 1e-3,
        "learning_rate": 0.5,
        "batch_size": 8,
        "early_stopping": True,
        "validation_fraction": 0.2,
        "n_iter_no_change": 3,
        "warm_start": True,
        "random_state": np.random.RandomState(0),
        "device": "cpu",
        "verbose": 2,
    }
    assert set(given) == set(MHLARegressor().get_params())
    model = MHLARegressor(**given)
    assert vars(model).keys() == given.keys()  # nothing else before fit
    for name, value in given.items():
        assert getattr(model, name) is value
        assert model.get_params()[name] is value
    copied = clone(model)
    np.testing.assert_array_equal(copied.alpha, given["alpha"])
    assert model.set_params(alpha=2.0) is model
    assert model.alpha == 2.0
    np.testing.assert_array_equal(copied.alpha, given["alpha"])
    with pytest.raises(ValueError, match="Invalid parameter 'layers'"):
        model.set_params(layers=3)
    with pytest.raises(TypeError):
        MHLARegressor(2, "convex")


def test_clone_forgets_the_fit():
    X, y = dataset()
    model = MHLARegressor(alpha=0.5, state="mean").fit(X, y)
    copied = clone(model)
    assert copied.get_params() == model.get_params()
    assert not hasattr(copied, "coef_")
    assert not hasattr(copied, "value_")
    np.testing.assert_array_equal(copied.fit(X, y).predict(X), model.predict(X))


def test_parameters_changed_before_fit_are_used():
    X, y = dataset()
    changed = MHLARegressor().set_params(alpha=10.0, fit_intercept=True, method="dual").fit(X, y)
    direct = MHLARegressor(alpha=10.0, fit_intercept=True, method="dual").fit(X, y)
    np.testing.assert_array_equal(changed.coef_, direct.coef_)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("form", [*FORMS, "frame"])
def test_pickle_and_skops_round_trip(form, heads_first, tmp_path):
    X, y = dataset()
    convert = FORMS.get(form, lambda X: pd.DataFrame(X.reshape(len(X), -1), columns=COLUMNS))
    model = MHLARegressor(alpha=0.5, fit_intercept=True, n_tokens=5).fit(convert(X), y)
    expected = model.predict(convert(X))
    if heads_first:
        assert model.n_heads_ >= 1
    loaded = [pickle.loads(pickle.dumps(model))]
    skops.io.dump(model, tmp_path / "model.skops")
    untrusted = skops.io.get_untrusted_types(file=tmp_path / "model.skops")
    assert all(name.startswith("sklearn_mhla.") for name in untrusted), untrusted
    loaded.append(skops.io.load(tmp_path / "model.skops", trusted=untrusted))
    for copy in loaded:
        assert copy.get_params() == model.get_params()
        np.testing.assert_array_equal(copy.predict(convert(X)), expected)
        np.testing.assert_array_equal(copy.value_, model.value_)
        np.testing.assert_array_equal(copy.key_query_, model.key_query_)
        assert copy.score(convert(X), y) == model.score(convert(X), y)
        assert hasattr(copy, "feature_names_in_") == (form == "frame")


# Model selection -----------------------------------------------------------------------------


def same_on_every_form(evaluate, rtol=1e-12):
    """``evaluate(X, n_tokens)`` gives the same numbers for all three forms; returns them."""
    X, _ = dataset()
    results = {form: np.asarray(evaluate(FORMS[form](X))) for form in FORMS}
    for form in ("list", "flat"):
        np.testing.assert_allclose(results[form], results["array"], rtol=rtol, atol=rtol)
    return results["array"]


@pytest.mark.parametrize("params", [{"alpha": 0.1}, {"method": "dual", "fit_intercept": True}])
def test_case_S02_cross_val_score(params):
    X, y = dataset()
    model = MHLARegressor(n_tokens=5, **params)
    scores = same_on_every_form(lambda X: cross_val_score(model, X, y, cv=4))
    # Against the folds written out.
    for score, (train, test) in zip(scores, KFold(4).split(X), strict=True):
        predictions = MHLARegressor(**params).fit(X[train], y[train]).predict(X[test])
        residual = ((y[test] - predictions) ** 2).sum()
        expected = 1.0 - residual / ((y[test] - y[test].mean()) ** 2).sum()
        assert score == pytest.approx(expected, abs=1e-10)
    assert len(set(scores)) == 4


def test_case_S02_grid_search():
    X, y = dataset()
    grid = {"alpha": [1e-3, 1.0, 1e6], "state": ["sum", "mean"], "fit_intercept": [True, False]}
    search = GridSearchCV(MHLARegressor(n_tokens=5), grid, cv=3)
    scores = same_on_every_form(lambda X: search.fit(X, y).cv_results_["mean_test_score"])
    assert len(scores) == 12
    assert search.best_params_["alpha"] < 1e6  # such a penalty leaves nothing but the mean
    same_on_every_form(lambda X: search.fit(X, y).predict(X))
    assert search.best_estimator_.predict(X).shape == (60,)


def test_case_S02_learning_curve():
    _, y = dataset()
    model = MHLARegressor(alpha=0.1, n_tokens=5)

    def curve(X):
        sizes, train, test = learning_curve(model, X, y, cv=3, train_sizes=[10, 25, 40])
        assert list(sizes) == [10, 25, 40]
        return np.concatenate([train, test])

    train, test = np.split(same_on_every_form(curve), 2)
    assert test[-1].mean() > test[0].mean()
    assert train.min() > 0.5


def test_case_S02_cross_val_predict_and_several_outputs():
    _, y = dataset()
    Y = np.column_stack([y, -2 * y, np.roll(y, 1)])
    model = MHLARegressor(alpha=0.1, n_tokens=5)
    predictions = same_on_every_form(lambda X: cross_val_predict(model, X, Y, cv=3))
    assert predictions.shape == (60, 3)
    np.testing.assert_allclose(predictions[:, 1], -2 * predictions[:, 0], rtol=1e-9, atol=1e-9)


def test_case_S02_pipeline():
    X, y = dataset()
    centre = X.mean((0, 1))

    def shift(X):
        if isinstance(X, list):
            return [sequence - centre for sequence in X]
        return X - (centre if X.ndim == 3 else np.tile(centre, 5))

    model = make_pipeline(FunctionTransformer(shift), MHLARegressor(alpha=0.1, n_tokens=5))
    scores = same_on_every_form(lambda X: cross_val_score(model, X, y, cv=3))
    direct = cross_val_score(MHLARegressor(alpha=0.1), X - centre, y, cv=3)
    np.testing.assert_allclose(scores, direct, rtol=1e-10)
    search = GridSearchCV(model, {"mhlaregressor__alpha": [0.1, 10.0]}, cv=3)
    same_on_every_form(lambda X: search.fit(X, y).cv_results_["mean_test_score"])


def test_pipeline_of_two_dimensional_steps():
    X, y = dataset()
    flat = X.reshape(60, 15)
    model = make_pipeline(StandardScaler(), PCA(6), MHLARegressor(n_tokens=2, alpha=0.1))
    model.fit(flat, y)
    reduced = PCA(6).fit_transform(StandardScaler().fit_transform(flat))
    by_hand = MHLARegressor(alpha=0.1).fit(reduced.reshape(60, 2, 3), y)
    np.testing.assert_allclose(
        model.predict(flat), by_hand.predict(reduced.reshape(60, 2, 3)), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_column_transformer_and_frame_output(library):
    # A frame with a column to be dropped and one to be scaled; names travel to the regressor.
    X, y = dataset()
    columns = {name: X.reshape(60, 15)[:, i] for i, name in enumerate(COLUMNS)}
    columns["comment"] = ["none"] * 60
    table = pd.DataFrame(columns) if library == "pandas" else pl.DataFrame(columns)
    select = ColumnTransformer(
        [
            ("first", StandardScaler(with_std=False), COLUMNS[:3]),
            ("rest", "passthrough", COLUMNS[3:]),
        ],
        verbose_feature_names_out=False,
    ).set_output(transform=library)
    model = Pipeline([("select", select), ("model", MHLARegressor(n_tokens=5, alpha=0.1))])
    model.fit(table, y)
    assert list(model[-1].feature_names_in_) == COLUMNS
    moved = X.copy()
    moved[:, 0] -= moved[:, 0].mean(0)
    expected = MHLARegressor(alpha=0.1).fit(moved, y).predict(moved)
    np.testing.assert_allclose(model.predict(table), expected, rtol=1e-10, atol=1e-10)
    if library == "pandas":
        numbers = make_column_selector(dtype_include="number")
        by_type = make_pipeline(
            ColumnTransformer([("keep", "passthrough", numbers)]),
            MHLARegressor(n_tokens=5, alpha=0.1),
        )
        scores = cross_val_score(by_type, table, y, cv=3)
        np.testing.assert_allclose(
            scores, cross_val_score(MHLARegressor(alpha=0.1), X, y, cv=3), rtol=1e-10
        )


def test_case_I02_ragged_list_in_grid_search():
    sequences = make_ragged([1 + i % 9 for i in range(90)], 3)
    y = predict_heads(*make_heads(2, 1, 3), sequences)[:, 0]
    padded = np.zeros((90, 9, 3))
    for i, sequence in enumerate(sequences):
        padded[i, 9 - len(sequence) :] = sequence
    search = GridSearchCV(MHLARegressor(), {"alpha": [1e-3, 1e3]}, cv=3)
    ragged = search.fit(sequences, y).cv_results_["mean_test_score"]
    dense = search.fit(padded, y).cv_results_["mean_test_score"]
    np.testing.assert_allclose(ragged, dense, rtol=1e-10)
    assert search.best_params_ == {"alpha": 1e-3}
    assert search.best_score_ > 0.99


def test_ragged_targets_in_cross_validation():
    sequences = make_ragged([2 + i % 4 for i in range(40)], 3)
    heads = make_heads(1, 1, 3)
    y = [predict_heads(*heads, [s], output="sequence")[:, 0] for s in sequences]
    scores = cross_val_score(MHLARegressor(output="sequence"), sequences, y, cv=4)
    np.testing.assert_allclose(scores, 1.0, atol=1e-10)


def test_transformed_target():
    X, y = dataset()
    model = TransformedTargetRegressor(
        MHLARegressor(fit_intercept=True), transformer=StandardScaler()
    )
    np.testing.assert_allclose(
        model.fit(X, y).predict(X),
        MHLARegressor(fit_intercept=True).fit(X, y).predict(X),
        rtol=1e-9,
        atol=1e-9,
    )


def test_parallel_cross_validation_gives_the_same_scores_and_leaves_threads_alone():
    X, y = dataset()
    model = MHLARegressor(fit_intercept=True)

    def threads():
        pools = threadpoolctl.threadpool_info()
        return sorted((pool["filepath"], pool["num_threads"]) for pool in pools)

    serial = cross_val_score(model, X, y, cv=4)
    before = threads()
    assert before
    parallel = cross_val_score(model, X, y, cv=4, n_jobs=2)
    np.testing.assert_allclose(parallel, serial, rtol=1e-12)
    model.fit(X, y).predict(X)
    assert threads() == before


# Names of columns ----------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_case_S04_feature_names(library):
    X, y = dataset()
    flat = X.reshape(60, 15)
    table = (
        pd.DataFrame(flat, columns=COLUMNS)
        if library == "pandas"
        else pl.DataFrame(flat, schema=COLUMNS)
    )
    reordered = table[COLUMNS[::-1]]
    model = MHLARegressor(n_tokens=5).fit(table, y)
    assert model.feature_names_in_.dtype == object
    assert list(model.feature_names_in_) == COLUMNS
    assert model.n_features_in_ == 15
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        expected = model.predict(table)
        model.score(table, y)
    assert not caught
    for call in (lambda: model.predict(flat), lambda: model.score(flat, y)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        assert len(caught) == 1
        assert "does not have valid feature names" in str(caught[0].message)
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(reordered)
    with pytest.raises(ValueError, match="feature names should match"):
        model.score(reordered, y)
    # Sequences carry no names, so there is nothing to compare.
    np.testing.assert_allclose(model.predict(X), expected, rtol=1e-12)


@pytest.mark.parametrize("form", ["array", "list"])
def test_case_S04_sequences_have_no_names(form):
    X, y = dataset()
    model = MHLARegressor(n_tokens=5).fit(pd.DataFrame(X.reshape(60, 15), columns=COLUMNS), y)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(FORMS[form](X), y)
        model.predict(FORMS[form](X))
    assert not caught
    assert not hasattr(model, "feature_names_in_")
    assert model.n_features_in_ == 3


def test_frame_whose_names_are_not_text_has_no_names():
    X, y = dataset()
    model = MHLARegressor(n_tokens=5).fit(pd.DataFrame(X.reshape(60, 15)), y)
    assert not hasattr(model, "feature_names_in_")
    assert model.predict(X.reshape(60, 15)).shape == (60,)


# Metadata routing ----------------------------------------------------------------------------


@pytest.fixture
def routing():
    with config_context(enable_metadata_routing=True):
        yield


def weighted_folds(X, y, weights, alpha, weighted_score, n_folds=3):
    """Scores of weighted fits, written out."""
    scores = []
    for train, test in KFold(n_folds).split(X):
        model = MHLARegressor(alpha=alpha).fit(X[train], y[train], weights[train])
        residual = (y[test] - model.predict(X[test])) ** 2
        w = weights[test] if weighted_score else np.ones(len(test))
        centre = (w * y[test]).sum() / w.sum()
        scores.append(1 - (w * residual).sum() / (w * (y[test] - centre) ** 2).sum())
    return scores


@pytest.mark.usefixtures("routing")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weighted_score", [False, True])
def test_weights_are_routed_through_grid_search(weighted_score, form):
    X, y = dataset()
    weights = np.arange(60) % 5 * 1.0
    model = MHLARegressor(n_tokens=5).set_fit_request(sample_weight=True)
    model.set_score_request(sample_weight=weighted_score)
    search = GridSearchCV(model, {"alpha": [0.01, 10.0]}, cv=3)
    search.fit(FORMS[form](X), y, sample_weight=weights)
    for i, alpha in enumerate([0.01, 10.0]):
        expected = np.mean(weighted_folds(X, y, weights, alpha, weighted_score))
        assert search.cv_results_["mean_test_score"][i] == pytest.approx(expected, abs=1e-9)
    refitted = MHLARegressor(**search.best_params_).fit(X, y, weights)
    np.testing.assert_allclose(search.predict(FORMS[form](X)), refitted.predict(X), rtol=1e-9)


@pytest.mark.usefixtures("routing")
def test_weights_are_routed_through_a_pipeline():
    X, y = dataset()
    weights = np.arange(60) % 5 * 1.0
    model = make_pipeline(
        FunctionTransformer(),
        MHLARegressor(alpha=1.0)
        .set_fit_request(sample_weight=True)
        .set_score_request(sample_weight=True),
    )
    model.fit(X, y, sample_weight=weights)
    direct = MHLARegressor(alpha=1.0).fit(X, y, weights)
    np.testing.assert_allclose(model.predict(X), direct.predict(X), rtol=1e-12)
    assert np.abs(direct.predict(X) - MHLARegressor(alpha=1.0).fit(X, y).predict(X)).max() > 1e-3
    routed = cross_validate(model, X, y, cv=3, params={"sample_weight": weights})
    expected = weighted_folds(X, y, weights, 1.0, weighted_score=True)
    np.testing.assert_allclose(routed["test_score"], expected, rtol=1e-9)


@pytest.mark.usefixtures("routing")
def test_weights_that_nobody_asked_for_are_an_error():
    X, y = dataset()
    with pytest.raises(ValueError, match="sample_weight"):
        GridSearchCV(MHLARegressor(), {"alpha": [1.0]}).fit(X, y, sample_weight=np.ones(60))


def test_weights_without_routing_follow_the_old_names():
    X, y = dataset()
    weights = np.arange(60) % 5 * 1.0
    model = make_pipeline(FunctionTransformer(), MHLARegressor())
    model.fit(X, y, mhlaregressor__sample_weight=weights)
    direct = MHLARegressor().fit(X, y, weights)
    np.testing.assert_allclose(model.predict(X), direct.predict(X), rtol=1e-12)


# Representations -----------------------------------------------------------------------------


def test_text_representation_shows_what_was_changed():
    assert repr(MHLARegressor(alpha=0.5, n_tokens=4)) == "MHLARegressor(alpha=0.5, n_tokens=4)"
    assert repr(MHLARegressor()) == "MHLARegressor()"


@pytest.mark.skipif(
    parse_version(sklearn.__version__) < parse_version("1.8"),
    reason="older versions of scikit-learn show no parameter descriptions",
)
def test_html_describes_every_parameter():
    page = estimator_html_repr(MHLARegressor(alpha=0.5))
    described = re.findall(r"param-doc-description\"[^>]*>\s*(\w+): (.*?)</span>", page, re.DOTALL)
    assert {name for name, _ in described} == set(MHLARegressor().get_params())
    for name, text in described:
        kind, _, description = text.partition("<br><br>")
        default = inspect.signature(MHLARegressor).parameters[name].default
        shown = (
            str(default).replace("e-0", "e-")
            if not isinstance(default, str)
            else f"&quot;{default}&quot;"
        )
        assert kind.endswith(f"default={shown}"), (name, kind)
        assert len(description) > 20


def test_html_of_a_fitted_model_computes_no_heads(monkeypatch):
    X, y = dataset()
    model = MHLARegressor(alpha=0.5).fit(X, y)

    def refuse(*args):
        raise AssertionError("a display must not start a large decomposition")

    monkeypatch.setattr(_model, "minimal_heads", refuse)
    page = estimator_html_repr(make_pipeline(FunctionTransformer(), model))
    assert "MHLARegressor" in page
    if parse_version(sklearn.__version__) >= parse_version("1.9"):
        for name in ("coef_", "intercept_", "rank_", "token_dim_"):
            assert re.search(rf">\s*{name}\s*<", page), name


def test_html_shows_heads_once_they_exist():
    X, y = dataset()
    model = MHLARegressor(alpha=0.5).fit(X, y)
    assert model.n_heads_ >= 1
    assert {"value_", "key_query_", "n_heads_"} <= set(dir(model))
    assert "MHLARegressor" in estimator_html_repr(model)
    assert "MHLARegressor" in estimator_html_repr(MHLARegressor().fit(0 * X, y))
