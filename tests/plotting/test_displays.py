"""Displays: what is drawn is what the model holds."""

from __future__ import annotations

import numpy as np
import pytest
import reference

from sklearn_mhla import MHLARegressor
from sklearn_mhla.plotting import AttentionDisplay, HeadsDisplay, LossCurveDisplay
from sklearn_mhla.preprocessing import PositionFeatures

plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def _close_figures():
    plt.switch_backend("Agg")
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def model():
    X = reference.make_sequences(0.0, 80, 4, 3)
    y = reference.predict_heads(*reference.make_heads(2, 2, 3), list(X))
    return MHLARegressor(n_heads=2, random_state=0).fit(X, y)


def test_heads_are_ordered_and_balanced(model):
    display = HeadsDisplay.from_estimator(model, feature_names=["a", "b", "c"])
    assert display.axes_.shape == (2, 2)
    drawn = []
    for row in display.axes_:
        value, key_query = (np.asarray(ax.images[0].get_array()) for ax in row)
        assert np.linalg.norm(value) == pytest.approx(np.linalg.norm(key_query))
        drawn.append((np.linalg.norm(value), value, key_query))
    assert drawn[0][0] >= drawn[1][0]
    # The balanced pictures are the same function.
    expected = model._heads.coefficients()
    value, key_query = (np.stack([part[i] for part in drawn]) for i in (1, 2))
    found = type(model._heads)(value, key_query).coefficients()
    np.testing.assert_allclose(found, expected, atol=1e-10 * np.abs(expected).max())
    labels = [label.get_text() for label in display.axes_[0, 1].get_xticklabels()]
    assert labels == ["a", "b", "c"]


def test_colours_are_centred_at_zero(model):
    for ax in HeadsDisplay.from_estimator(model).axes_.ravel():
        low, high = ax.images[0].get_clim()
        assert low == -high < 0.0


def test_many_features_are_labelled_sparsely():
    heads = HeadsDisplay(np.ones((1, 1, 60)), np.ones((1, 60, 60))).plot()
    assert len(heads.axes_[0, 1].get_xticks()) <= 24


def test_heads_of_zero():
    HeadsDisplay(np.zeros((1, 1, 3)), np.zeros((1, 3, 3))).plot()
    assert HeadsDisplay(np.zeros((0, 1, 3)), np.zeros((0, 3, 3))).plot().axes_.shape == (1, 2)


def test_max_heads_and_names(model):
    assert HeadsDisplay.from_estimator(model, max_heads=1).axes_.shape == (1, 2)
    with pytest.raises(ValueError, match="feature_names must have 3 names; got 2"):
        HeadsDisplay.from_estimator(model, feature_names=["a", "b"])
    with pytest.raises(ValueError, match="max_heads"):
        HeadsDisplay.from_estimator(model, max_heads=0)


def test_scores_give_the_prediction(model):
    """``y = sum_h sum_s score_hs V_h z_s``, whatever the order and scale of the heads."""
    tokens = reference.make_sequences(0.0, 1, 5, 3, seed=8)[0]
    display = AttentionDisplay.from_estimator(model, tokens, tokens[-1:])
    assert display.scores.shape == (2, 1, 5)
    value, key_query = model.value_, model.key_query_
    norms = np.linalg.norm(value, axis=(1, 2)) * np.linalg.norm(key_query, axis=(1, 2))
    total = np.zeros(2)
    for scores, h in zip(display.scores, np.argsort(-norms), strict=True):
        balance = np.sqrt(norms[h]) / np.linalg.norm(value[h])
        for s, token in enumerate(tokens):
            total += scores[0, s] * (balance * value[h]) @ token
    np.testing.assert_allclose(total, model.predict(tokens[None])[0], rtol=1e-9)


def test_kernel_of_positions():
    """A model that compares neighbours scores neighbours."""
    random = np.random.default_rng(0)
    X = random.standard_normal((600, 6, 1))
    Z = PositionFeatures("onehot", constant=False).fit_transform(X)
    shift = np.roll(np.eye(6), 1, axis=1)  # token t is read by the token after it
    y = np.stack([[z[:, 0] @ (shift[:, t]) for t in range(6)] for z in Z])
    fitted = MHLARegressor(output="sequence", causal=False).fit(Z, y)
    positions = np.hstack([np.zeros((6, 1)), np.eye(6)])
    display = AttentionDisplay.from_estimator(fitted, positions)
    assert display.scores.shape[1:] == (6, 6)
    kernel = np.abs(display.scores).sum(0)
    neighbours = kernel[(np.arange(1, 6), np.arange(5))].mean()
    assert neighbours > 3 * np.delete(kernel, 0, axis=1).mean()


def test_another_width_is_refused(model):
    with pytest.raises(ValueError, match="d=3"):
        AttentionDisplay.from_estimator(model, np.ones((4, 2)))


def test_loss_curves():
    pytest.importorskip("torch")
    X = reference.make_sequences(0.0, 60, 4, 3)
    y = X[:, -1, 0] * (X**2).sum((1, 2))
    options = {"solver": "sgd", "max_iter": 4, "random_state": 0, "early_stopping": True}
    fitted = MHLARegressor(**options).fit(X, y)
    display = LossCurveDisplay.from_estimator(fitted)
    training, held_out = (line.get_ydata() for line in display.ax_.lines)
    np.testing.assert_array_equal(training, fitted.loss_curve_)
    np.testing.assert_array_equal(held_out, fitted.validation_loss_curve_)
    with pytest.raises(ValueError, match="no loss_curve_"):
        LossCurveDisplay.from_estimator(MHLARegressor().fit(X, y))


def test_scikit_learn_draws_the_rest(model):
    from sklearn.metrics import PredictionErrorDisplay
    from sklearn.model_selection import LearningCurveDisplay

    X = reference.make_sequences(0.0, 40, 4, 3, seed=5)
    y = X[:, -1, 0] * (X**2).sum((1, 2))
    single = MHLARegressor(alpha=1.0).fit(X, y)
    PredictionErrorDisplay.from_estimator(single, X, y)
    LearningCurveDisplay.from_estimator(single, X, y, train_sizes=[0.5, 1.0], cv=2)


def test_without_matplotlib(model, monkeypatch):
    import builtins

    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        HeadsDisplay.from_estimator(model)
