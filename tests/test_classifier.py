"""The classifier against least squares on coded targets written out, and scikit-learn's checks."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import reference
from sklearn.base import is_classifier
from sklearn.linear_model import RidgeClassifier
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.utils.estimator_checks import parametrize_with_checks

from sklearn_mhla import MHLAClassifier
from sklearn_mhla.rollout import generate


def make_classes(n_samples=240, n_classes=3, n_tokens=4, seed=0):
    """Labels that are the largest of a few linear-attention outputs."""
    X = reference.make_sequences(0.0, n_samples, n_tokens, 3, seed=seed)
    outputs = reference.predict_heads(*reference.make_heads(2, n_classes, 3), list(X))
    return X, np.array(["a", "b", "c", "d"])[outputs.argmax(1)]


@parametrize_with_checks(
    [
        MHLAClassifier(),
        MHLAClassifier(alpha=1.0, class_weight="balanced"),
        MHLAClassifier(solver="sgd", n_heads=2, max_iter=5, random_state=0),
    ],
    expected_failed_checks=lambda estimator: (
        {
            "check_sample_weight_equivalence_on_dense_data": "mini-batches differ when a row is "
            "repeated"
        }
        if estimator.solver == "sgd"
        else {}
    ),
    xfail_strict=True,
)
def test_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("alpha", [0.0, 2.0])
@pytest.mark.parametrize("n_classes", [2, 3, 4])
def test_least_squares_on_coded_targets(n_classes, alpha, intercept):
    X, y = make_classes(n_classes=n_classes)
    model = MHLAClassifier(alpha=alpha, fit_intercept=intercept).fit(X, y)
    assert list(model.classes_) == ["a", "b", "c", "d"][:n_classes]
    if n_classes == 2:
        targets = np.array([[1.0 if label == "b" else -1.0] for label in y])
    else:
        targets = np.array([[float(label == c) for c in model.classes_] for label in y])
    coef, constant = reference.ridge(reference.feature_matrix(X), targets, alpha, intercept)
    np.testing.assert_allclose(model.coef_, coef, rtol=1e-7, atol=1e-9)
    fresh, labels = make_classes(n_classes=n_classes, seed=5)
    outputs = reference.feature_matrix(fresh) @ coef.T + constant
    decided = model.decision_function(fresh)
    np.testing.assert_allclose(decided.reshape(len(fresh), -1), outputs, rtol=1e-6, atol=1e-8)
    code = outputs.argmax(1) if n_classes > 2 else (outputs[:, 0] > 0).astype(int)
    np.testing.assert_array_equal(model.predict(fresh), model.classes_[code])
    assert model.score(fresh, labels) == np.mean(model.predict(fresh) == labels) > 0.6


def test_agrees_with_ridge_classifier():
    """With an intercept the code does not matter."""
    X, y = make_classes()
    Phi = reference.feature_matrix(X)
    other = RidgeClassifier(alpha=3.0).fit(Phi, y)
    fresh, _ = make_classes(seed=6)
    predicted = MHLAClassifier(alpha=3.0).fit(X, y).predict(fresh)
    np.testing.assert_array_equal(predicted, other.predict(reference.feature_matrix(fresh)))


def test_class_weights():
    X, y = make_classes()
    weights = {"a": 1.0, "b": 5.0, "c": 0.5}
    by_dict = MHLAClassifier(alpha=1.0, class_weight=weights).fit(X, y)
    by_sample = MHLAClassifier(alpha=1.0).fit(X, y, [weights[label] for label in y])
    np.testing.assert_allclose(by_dict.coef_, by_sample.coef_, rtol=1e-9)
    balanced = MHLAClassifier(alpha=1.0, class_weight="balanced").fit(X, y)
    counts = {label: np.sum(y == label) for label in "abc"}
    expected = [len(y) / (3 * counts[label]) for label in y]
    by_hand = MHLAClassifier(alpha=1.0).fit(X, y, expected)
    np.testing.assert_allclose(balanced.coef_, by_hand.coef_, rtol=1e-9)


def test_partial_fit():
    """First call without classes, an unseen label, a batch without a class, and the end result."""
    X, y = make_classes()
    model = MHLAClassifier(alpha=0.5)
    with pytest.raises(ValueError, match="classes must be passed to the first call"):
        model.partial_fit(X, y)
    order = np.argsort(y, kind="stable")  # batches miss classes
    for batch in np.array_split(order, 5):
        model.partial_fit(X[batch], y[batch], classes=["c", "a", "b"])
    with pytest.raises(ValueError, match="the label z, which is not among"):
        model.partial_fit(X[:3], np.array(["a", "z", "b"]))
    with pytest.raises(ValueError, match="those of the first call"):
        model.partial_fit(X[:3], y[:3], classes=["a", "b"])
    whole = MHLAClassifier(alpha=0.5).fit(X, y)
    np.testing.assert_allclose(model.coef_, whole.coef_, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(model.intercept_, whole.intercept_, rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(model.predict(X), whole.predict(X))
    with pytest.raises(AttributeError) as error:
        MHLAClassifier(class_weight="balanced").partial_fit(X, y, classes=["a", "b", "c"])
    assert "needs all labels at once" in str(error.value.__cause__)
    with pytest.raises(ValueError, match="at least 2"):
        MHLAClassifier().partial_fit(X, y, classes=["a"])


@pytest.mark.parametrize("causal", [True, False])
def test_one_label_per_token(causal):
    ragged = reference.make_ragged(list(range(1, 9)) * 12, 3)
    value, key_query = reference.make_heads(1, 3, 3)
    y = []
    for part in ragged:
        outputs = reference.predict_heads(value, key_query, [part], "sequence", causal)
        y.append(outputs.argmax(1))
    model = MHLAClassifier(output="sequence", causal=causal).fit(ragged[:80], y[:80])
    predicted = model.predict(ragged[80:])
    assert [len(part) for part in predicted] == [len(part) for part in ragged[80:]]
    right = np.concatenate(predicted) == np.concatenate(y[80:])
    assert model.score(ragged[80:], y[80:]) == pytest.approx(np.mean(right))
    assert np.mean(right) > 0.6  # of three classes
    cube = reference.make_sequences(0.0, 10, 5, 3)
    labels = model.predict(cube)
    assert labels.shape == (10, 5)
    weights = np.arange(10.0)
    right = labels == labels[::-1]
    by_position = (right.mean(1) * weights).sum() / weights.sum()
    assert model.score(cube, labels[::-1], weights) == pytest.approx(by_position)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        model.score(cube, labels[:, :4])
    with pytest.raises(ValueError, match="class_weight needs output='last'"):
        MHLAClassifier(output="sequence", class_weight="balanced").fit(cube, labels)
    with pytest.raises(ValueError, match="one label per token"):
        MHLAClassifier(output="sequence").fit(cube, np.zeros((10, 5, 2)))


def test_look_ups_are_exact_without_an_intercept():
    """A context of (key, value) pairs and a query: the classes of keys never seen together."""
    random = np.random.default_rng(0)

    def tables(n):
        values = random.integers(4, size=(n, 3))
        asked = random.integers(3, size=n)
        X = np.zeros((n, 4, 7))
        X[:, np.arange(3), np.arange(3)] = 1.0
        for i in range(n):
            X[i, np.arange(3), 3 + values[i]] = 1.0
            X[i, 3, asked[i]] = 1.0
        return X, values[np.arange(n), asked]

    X, y = tables(400)
    model = MHLAClassifier(fit_intercept=False).fit(X, y)
    fresh, labels = tables(200)
    assert model.score(fresh, labels) == 1.0
    np.testing.assert_allclose(model.decision_function(fresh), np.eye(4)[labels], atol=1e-9)


def test_model_selection_and_pickles():
    X, y = make_classes()
    flat = cross_val_score(MHLAClassifier(alpha=1.0, n_tokens=4), X.reshape(len(X), -1), y, cv=3)
    np.testing.assert_allclose(cross_val_score(MHLAClassifier(alpha=1.0), X, y, cv=3), flat)
    search = GridSearchCV(MHLAClassifier(), {"alpha": [0.1, 10.0]}, cv=3).fit(X, y)
    copy = pickle.loads(pickle.dumps(search.best_estimator_))
    np.testing.assert_array_equal(copy.predict(X), search.predict(X))
    assert is_classifier(copy)
    assert copy.n_heads_ == len(copy.value_) == len(copy.key_query_)
    assert {"coef_", "intercept_", "token_dim_"} <= set(dir(copy))
    with pytest.raises(AttributeError, match="nonsense_"):
        _ = copy.nonsense_


def test_sgd():
    pytest.importorskip("torch")
    X, y = make_classes()
    model = MHLAClassifier(solver="sgd", max_iter=30, random_state=0, warm_start=True).fit(X, y)
    before = model.regressor_.loss_
    assert len(model.loss_curve_) == 30
    model.set_params(max_iter=5).fit(X, y)
    assert model.regressor_.loss_ < 1.2 * before
    assert model.score(X, y) > 0.7


def test_generation_from_classes():
    """A classifier whose classes are its tokens continues a sequence of one-hot tokens."""
    random = np.random.default_rng(0)
    symbols = random.integers(3, size=(200, 6))
    following = (symbols[:, -1] + 1) % 3
    model = MHLAClassifier().fit(np.eye(3)[symbols], following)
    tokens = generate(model, np.eye(3)[symbols[:5]], 4)
    expected = (symbols[:5, -1:] + np.arange(1, 5)) % 3
    np.testing.assert_array_equal(tokens.argmax(2), expected)


def test_errors():
    X, y = make_classes()
    with pytest.raises(ValueError, match="y has 1 class, a;"):
        MHLAClassifier().fit(X, np.full(len(X), "a"))
    with pytest.raises(ValueError, match="Unknown label type"):
        MHLAClassifier().fit(X, np.linspace(0, 1, len(X)))
    with pytest.raises(ValueError, match="alpha"):
        MHLAClassifier(alpha=-1.0).fit(X, y)
    with pytest.raises(AttributeError):
        _ = MHLAClassifier().coef_
