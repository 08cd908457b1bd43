"""The transformer: scikit-learn's conventions, and what it does on failure."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pandas as pd
import polars as pl
import pytest
import reference
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, KFold, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.utils import get_tags
from sklearn.utils.estimator_checks import parametrize_with_checks

from sklearn_mhla import IdentifiabilityCertifier, MHLARegressor, certify_identifiable
from sklearn_mhla.identifiability import IdentifiabilityWarning, NotIdentifiableError

FEW, MANY = reference.make_sequences(0.0, 12), reference.make_sequences(0.0, 60)
FORMS = {
    "array": lambda X: X,
    "list": list,
    "flat": lambda X: X.reshape(len(X), -1),
    "pandas": lambda X: pd.DataFrame(X.reshape(len(X), -1), columns=list("abcdefghijklmno")),
    "polars": lambda X: pl.DataFrame(X.reshape(len(X), -1), schema=list("abcdefghijklmno")),
}


@parametrize_with_checks(
    [
        IdentifiabilityCertifier(on_failure="ignore"),
        IdentifiabilityCertifier(on_failure="ignore", method="span", state="mean", n_heads=1),
    ]
)
def test_common_checks(estimator, check):
    check(estimator)


@pytest.mark.parametrize("form", FORMS)
def test_inputs_pass_through_as_they_are(form):
    X, new = FORMS[form](MANY), FORMS[form](FEW)
    certifier = IdentifiabilityCertifier(n_tokens=5)
    assert certifier.fit(X) is certifier
    assert certifier.transform(X) is X
    assert certifier.transform(new) is new
    assert certifier.fit_transform(X) is X
    assert repr(certifier.certificate_) == repr(certify_identifiable(MANY))


def test_on_failure():
    IdentifiabilityCertifier(on_failure="raise").fit(MANY)
    with pytest.warns(IdentifiabilityWarning, match=r"'not identifiable'.*12 rows"):
        certifier = IdentifiabilityCertifier().fit(FEW)
    assert certifier.certificate_.rank == 12
    certifier = IdentifiabilityCertifier(on_failure="raise")
    with pytest.raises(NotIdentifiableError, match="12 rows cannot determine 18"):
        certifier.fit(FEW)
    assert issubclass(NotIdentifiableError, ValueError)
    assert certifier.certificate_.rank == 12  # to look at
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not IdentifiabilityCertifier(on_failure="ignore").fit(FEW).certificate_
    with pytest.raises(ValueError, match=r"on_failure must be one of 'warn', 'raise', 'ignore'"):
        IdentifiabilityCertifier(on_failure="stop").fit(MANY)


@pytest.mark.parametrize("n_outputs", [0, 2])
def test_the_number_of_outputs_comes_from_the_targets(n_outputs):
    X = reference.make_sequences(0.0, 30, 6, 4)
    y = np.ones((30, n_outputs)) if n_outputs else np.ones(30)
    found = IdentifiabilityCertifier(3, on_failure="ignore").fit(X, y).certificate_
    expected = certify_identifiable(X, n_heads=3, n_outputs=max(1, n_outputs))
    assert repr(found) == repr(expected)
    unknown = IdentifiabilityCertifier(3, on_failure="ignore").fit(X).certificate_
    assert "give n_outputs" in unknown.reason
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        IdentifiabilityCertifier(3).fit(X, y[:5])


def test_options_and_weights_reach_the_certificate():
    options = {"output": "sequence", "causal": False, "state": "mean", "method": "span"}
    weights = np.arange(12) % 2
    certifier = IdentifiabilityCertifier(on_failure="ignore", tol=1e-9, device="cpu", **options)
    found = certifier.fit(FEW, sample_weight=weights).certificate_
    expected = certify_identifiable(FEW, tol=1e-9, sample_weight=weights, **options)
    assert repr(found) == repr(expected)
    assert found.n_rows == 30
    assert found.tol == 1e-9
    np.testing.assert_allclose(found.eigenvalues, expected.eigenvalues)


@pytest.mark.parametrize("form", FORMS)
def test_every_training_fold_is_certified(form):
    X = FORMS[form](MANY)
    y = reference.predict_heads(*reference.make_heads(1, 1, 3), MANY)[:, 0]
    model = make_pipeline(
        IdentifiabilityCertifier(n_tokens=5), MHLARegressor(n_tokens=5, alpha=0.1)
    )
    found = cross_validate(model, X, y, cv=KFold(4), return_estimator=True)
    assert (found["test_score"] > 0.99).all()
    for fitted, (train, _) in zip(found["estimator"], KFold(4).split(MANY), strict=True):
        certificate = fitted[0].certificate_
        assert certificate.n_rows == len(train) == 45
        expected = certify_identifiable(MANY[train])
        np.testing.assert_allclose(certificate.eigenvalues, expected.eigenvalues, rtol=1e-12)


def test_grid_search_warns_of_folds_that_do_not_identify():
    X, y = reference.make_sequences(0.0, 24), np.arange(24.0)
    model = make_pipeline(IdentifiabilityCertifier(), MHLARegressor(alpha=1.0))
    search = GridSearchCV(model, {"mhlaregressor__alpha": [0.1, 1.0]}, cv=4)
    search.fit(X, y)  # folds of 18 rows are enough
    search.set_params(cv=3)
    with pytest.warns(IdentifiabilityWarning, match="16 rows"):
        search.fit(X, y)
    search.set_params(estimator__identifiabilitycertifier__on_failure="raise", error_score="raise")
    with pytest.raises(NotIdentifiableError, match="16 rows"):
        search.fit(X, y)


def test_names_of_columns():
    frame = FORMS["pandas"](MANY)
    certifier = IdentifiabilityCertifier(n_tokens=5).fit(frame)
    np.testing.assert_array_equal(certifier.get_feature_names_out(), frame.columns)
    np.testing.assert_array_equal(certifier.feature_names_in_, frame.columns)
    with pytest.raises(ValueError, match="feature names"):
        certifier.transform(frame[frame.columns[::-1]])
    certifier.fit(FORMS["flat"](MANY))
    assert certifier.get_feature_names_out()[:2].tolist() == ["x0", "x1"]
    assert not hasattr(certifier, "feature_names_in_")
    assert not hasattr(certifier.fit(MANY), "get_feature_names_out")


def test_set_output():
    y = np.ones(60)
    for form in FORMS:
        model = make_pipeline(IdentifiabilityCertifier(n_tokens=5), MHLARegressor(n_tokens=5))
        model.set_output(transform="pandas").fit(FORMS[form](MANY), y)
        passed = model[:1].transform(FORMS[form](MANY))
        if form in ("array", "list"):
            assert isinstance(passed, np.ndarray if form == "array" else list)
        else:
            assert isinstance(passed, pd.DataFrame)


def test_refusals():
    certifier = IdentifiabilityCertifier().fit(MANY)
    with pytest.raises(ValueError, match="d=3"):
        certifier.transform(np.ones((2, 3, 5)))
    with pytest.raises(ValueError, match="NaN"):
        certifier.transform(np.full((2, 5, 3), np.nan))
    with pytest.raises(ValueError, match="method"):
        IdentifiabilityCertifier(method="dual").fit(MANY)


def test_tags_copies_and_pickles():
    tags = get_tags(IdentifiabilityCertifier())
    assert tags.input_tags.three_d_array
    assert not tags.target_tags.required
    certifier = IdentifiabilityCertifier(2, on_failure="ignore", tol=1e-9).fit(FEW)
    assert clone(certifier).get_params() == certifier.get_params()
    loaded = pickle.loads(pickle.dumps(certifier))
    np.testing.assert_array_equal(
        loaded.certificate_.covers(MANY), certifier.certificate_.covers(MANY)
    )
