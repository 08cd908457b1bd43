"""The estimator: parameters, shapes, fitted attributes, errors, and what it costs."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pandas as pd
import pytest
import torch
from reference import (
    feature_matrix,
    function_coefficients,
    make_heads,
    make_ragged,
    make_sequences,
    predict_heads,
)
from sklearn.exceptions import NotFittedError

from sklearn_mhla import (
    Heads,
    MHLARegressor,
    _fitting,
    _model,
    function_distance,
    minimal_heads,
)
from sklearn_mhla._backend import NumpyBackend
from sklearn_mhla.solvers import ProblemSize, choose_solver


def run_python(code):
    """Run a program in an interpreter of its own, warnings being errors there too."""
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def noisy(n_samples=40, n_outputs=1, **params):
    """Sequences and targets that no model fits exactly: shape (n, m), m squeezed if 1."""
    X = make_sequences(0.5, n_samples)
    Y = predict_heads(*make_heads(2, n_outputs, 3), X, **params)
    Y = Y + np.random.default_rng(4).standard_normal(Y.shape)
    return X, Y[:, 0] if n_outputs == 1 else Y


def r_squared(targets, predictions, weights):
    """Mean over outputs of one minus residual over total sum of squares."""
    scores = []
    for target, prediction in zip(targets.T, predictions.T, strict=True):
        mean = (weights * target).sum() / weights.sum()
        total = (weights * (target - mean) ** 2).sum()
        scores.append(1.0 - (weights * (target - prediction) ** 2).sum() / total)
    return float(np.mean(scores))


# Parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"solver": "exact"}, ValueError, r"solver must be one of 'convex', 'sgd'; got 'exact'"),
        ({"method": "lu"}, ValueError, r"method must be one of 'auto', .*got 'lu'"),
        ({"method": None}, ValueError, r"method must be one of .*got None"),
        ({"output": "all"}, ValueError, r"output must be one of 'last', 'sequence'; got 'all'"),
        ({"state": "max"}, ValueError, r"state must be one of 'sum', 'mean'; got 'max'"),
        ({"alpha": -1e-9}, ValueError, r"alpha == -1e-09, must be >= 0"),
        ({"alpha": np.nan}, ValueError, r"alpha must be finite; got nan"),
        ({"alpha": np.inf}, ValueError, r"alpha must be finite; got inf"),
        ({"alpha": "1"}, TypeError, r"alpha must be an instance of float, not str"),
        ({"alpha": None}, TypeError, r"alpha must be an instance of float, not NoneType"),
        ({"alpha": np.ones(2)}, TypeError, r"alpha must be an instance of float"),
        ({"n_tokens": 0}, ValueError, r"n_tokens == 0, must be >= 1"),
        ({"n_tokens": 5.0}, TypeError, r"n_tokens must be an instance of int, not float"),
        ({"fit_intercept": "no"}, ValueError, r"fit_intercept must be True or False; got 'no'"),
        ({"causal": None}, ValueError, r"causal must be True or False; got None"),
        ({"verbose": -1}, ValueError, r"verbose == -1, must be >= 0"),
        ({"verbose": "loud"}, TypeError, r"verbose must be an instance of int, not str"),
        ({"device": "tpu"}, ValueError, r"device must be None, 'cpu', 'cuda'.*got 'tpu'"),
        ({"device": 0}, ValueError, r"device must be None.*got 0"),
    ],
)
def test_bad_parameters_are_named(params, error, message, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("work was started before the parameters were checked")

    monkeypatch.setattr(_fitting, "Design", refuse)
    X, y = noisy()
    with pytest.raises(error, match=message):
        MHLARegressor(**params).fit(X, y)


@pytest.mark.parametrize(
    "params", [{"alpha": np.float32(0.5)}, {"alpha": 1}, {"n_tokens": np.int64(5)}]
)
def test_numpy_scalars_are_parameters_too(params):
    X, y = noisy()
    plain = {name: value.item() for name, value in params.items() if hasattr(value, "item")}
    expected = MHLARegressor(**(plain or params)).fit(X, y).predict(X)
    np.testing.assert_array_equal(MHLARegressor(**params).fit(X, y).predict(X), expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_missing_cuda_device_is_explained():
    X, y = noisy()
    with pytest.raises(ValueError, match=r"device='cuda:1' .*no CUDA device.*device='cpu'"):
        MHLARegressor(device="cuda:1").fit(X, y)


def test_fit_does_not_touch_parameters():
    X, y = noisy()
    alpha = np.float64(0.25)
    model = MHLARegressor(alpha=alpha, method="dual", fit_intercept=True)
    before = model.get_params()
    model.fit(X, y)
    assert model.get_params() == before
    assert model.alpha is alpha


# Shapes --------------------------------------------------------------------------------------


def test_case_I04_predictions_have_the_shape_of_y():
    X, y = noisy()
    flat = MHLARegressor(fit_intercept=True).fit(X, y)
    column = MHLARegressor(fit_intercept=True).fit(X, y[:, None])
    three = MHLARegressor(fit_intercept=True).fit(X, y[:, None] * [1.0, 2.0, -1.0])
    assert flat.predict(X).shape == (40,)
    assert column.predict(X).shape == (40, 1)
    assert three.predict(X).shape == (40, 3)
    np.testing.assert_allclose(column.predict(X)[:, 0], flat.predict(X), rtol=1e-12)
    np.testing.assert_allclose(
        three.predict(X), flat.predict(X)[:, None] * [1.0, 2.0, -1.0], rtol=1e-10, atol=1e-12
    )
    for model, shape in ((flat, (1,)), (column, (1, 1)), (three, (1, 3))):
        assert model.predict(X[:1]).shape == shape
        assert model.predict([X[0]]).shape == shape
        np.testing.assert_allclose(model.predict(X[:1]), model.predict(X)[:1], rtol=1e-12)


@pytest.mark.parametrize("fit_intercept", [False, True])
def test_one_sample_is_reproduced(fit_intercept):
    X, y = noisy(1)
    model = MHLARegressor(fit_intercept=fit_intercept).fit(X, y)
    assert model.predict(X).shape == (1,)
    np.testing.assert_allclose(model.predict(X), y, rtol=1e-10)


def test_case_I03_token_width_is_checked_at_predict():
    X, y = noisy(50)
    model = MHLARegressor().fit(X, y)
    with pytest.raises(ValueError, match=r"tokens of width 5.*fitted on tokens of width d=3"):
        model.predict(make_sequences(0, 50, 3, 5))
    with pytest.raises(ValueError, match=r"tokens of width 4.*d=3"):
        model.predict([np.ones((2, 4))])
    with pytest.raises(ValueError, match=r"tokens of width 5.*d=3"):
        model.score(make_sequences(0, 50, 3, 5), y)
    assert model.predict(make_sequences(0, 50, 9)).shape == (50,)

    rows = MHLARegressor(n_tokens=5).fit(X.reshape(50, 15), y)
    for wrong in (14, 18):
        with pytest.raises(ValueError, match=rf"X has {wrong} features.*expecting 15"):
            rows.predict(np.ones((50, wrong)))
    assert rows.predict(make_sequences(0, 50, 9)).shape == (50,)


def test_flat_row_read_with_other_n_tokens_is_explained():
    X, y = noisy()
    model = MHLARegressor(n_tokens=5).fit(X.reshape(40, 15), y)
    model.set_params(n_tokens=None)
    with pytest.raises(ValueError, match=r"width 15.*d=3.*one token unless n_tokens is set"):
        model.predict(X.reshape(40, 15))


# Outputs at every position -------------------------------------------------------------------

SEQUENCE_FORMS = {
    "array": (lambda X: X, lambda Y: Y),
    "flat": (lambda X: X.reshape(len(X), -1), lambda Y: Y),
    "list": (list, list),
    "list, nested targets": (list, lambda Y: Y.tolist()),
    "list, one target array": (list, lambda Y: Y),
    "array, list of targets": (lambda X: X, list),
    "frame": (lambda X: pd.DataFrame(X.reshape(len(X), -1)), lambda Y: Y),
    "tensor": (torch.tensor, torch.tensor),
}


@pytest.mark.parametrize("form", SEQUENCE_FORMS)
@pytest.mark.parametrize("n_outputs", [0, 1, 2], ids=["(n, T)", "(n, T, 1)", "(n, T, 2)"])
@pytest.mark.parametrize("causal", [True, False])
def test_outputs_at_every_position(causal, n_outputs, form):
    X = make_sequences(0.2, 20)
    value, key_query = make_heads(2, max(n_outputs, 1), 3)
    rows = predict_heads(value, key_query, X, output="sequence", causal=causal)
    Y = rows.reshape(20, 5, -1)
    Y = Y if n_outputs else Y[:, :, 0]
    convert_x, convert_y = SEQUENCE_FORMS[form]
    model = MHLARegressor(output="sequence", causal=causal, n_tokens=5)
    model.fit(convert_x(X[:15]), convert_y(Y[:15]))
    predictions = model.predict(convert_x(X[15:]))
    if form.startswith("list"):
        assert isinstance(predictions, list)
        assert all(part.shape == Y[0].shape for part in predictions)
    else:
        assert predictions.shape == Y[15:].shape
    np.testing.assert_allclose(np.asarray(predictions), Y[15:], rtol=1e-9, atol=1e-9)
    assert model.score(convert_x(X[15:]), convert_y(Y[15:])) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_outputs_at_every_position_of_ragged_sequences(causal):
    sequences = make_ragged([1, 4, 2, 7, 3, 3, 5] * 4, 3)
    heads = make_heads(2, 2, 3)
    Y = [predict_heads(*heads, [s], output="sequence", causal=causal) for s in sequences]
    model = MHLARegressor(output="sequence", causal=causal).fit(sequences[:20], Y[:20])
    for predicted, expected in zip(model.predict(sequences[20:]), Y[20:], strict=True):
        np.testing.assert_allclose(predicted, expected, rtol=1e-9, atol=1e-9)
    scalar = MHLARegressor(output="sequence", causal=causal)
    scalar.fit(sequences, [part[:, 1] for part in Y])
    assert [part.shape for part in scalar.predict(sequences)] == [(len(s),) for s in sequences]


@pytest.mark.parametrize("form", ["array", "flat", "list"])
def test_sequence_score_weighs_every_position_of_a_sequence(form):
    X = make_sequences(0.2, 20)
    Y = predict_heads(*make_heads(2, 2, 3), X, output="sequence").reshape(20, 5, 2)
    Y = Y + np.random.default_rng(0).standard_normal(Y.shape)
    weights = np.arange(20) % 4 + 0.5
    convert_x, convert_y = SEQUENCE_FORMS[form]
    model = MHLARegressor(output="sequence", n_tokens=5, alpha=1.0)
    model.fit(convert_x(X), convert_y(Y), weights)
    predictions = np.asarray(model.predict(convert_x(X))).reshape(100, 2)
    expected = r_squared(Y.reshape(100, 2), predictions, np.repeat(weights, 5))
    score = model.score(convert_x(X), convert_y(Y), sample_weight=weights)
    assert score == pytest.approx(expected, abs=1e-12)
    assert abs(score - model.score(convert_x(X), convert_y(Y))) > 1e-4


def test_score_by_hand():
    X, Y = noisy(n_outputs=3)
    weights = np.arange(40) % 3 * 1.0
    model = MHLARegressor(alpha=2.0).fit(X, Y)
    assert isinstance(model.score(X, Y), float)
    assert model.score(X, Y) == pytest.approx(r_squared(Y, model.predict(X), np.ones(40)))
    assert model.score(X, Y, weights) == pytest.approx(r_squared(Y, model.predict(X), weights))
    with pytest.raises(ValueError, match="X has 40 sequences, y has 39"):
        model.score(X, Y[:39])
    with pytest.raises(ValueError, match="y contains NaN"):
        model.score(X, np.full_like(Y, np.nan))
    with pytest.raises(ValueError, match="sample_weight"):
        model.score(X, Y, -weights)


# What is fitted ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["primal", "dual"])
def test_mean_state_divides_by_the_length(method):
    sequences = make_ragged([1, 4, 2, 7, 3, 30] * 6, 3)
    y = predict_heads(*make_heads(2, 1, 3), sequences, state="mean")[:, 0]
    model = MHLARegressor(state="mean", method=method).fit(sequences, y)
    np.testing.assert_allclose(model.predict(sequences), y, rtol=1e-9, atol=1e-9)
    assert MHLARegressor(method=method).fit(sequences, y).score(sequences, y) < 0.99
    # Repeating every sequence as a whole changes neither the mean state nor the query.
    twice = [np.concatenate([sequence, sequence]) for sequence in sequences]
    np.testing.assert_allclose(model.predict(twice), y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", ["primal", "dual"])
def test_intercept(method):
    X, Y = noisy(n_outputs=2)
    shift = np.array([100.0, -3.0])
    model = MHLARegressor(fit_intercept=True, method=method, alpha=0.5).fit(X, Y)
    moved = MHLARegressor(fit_intercept=True, method=method, alpha=0.5).fit(X, Y + shift)
    assert model.intercept_.shape == (2,)
    np.testing.assert_allclose(moved.intercept_, model.intercept_ + shift, atol=1e-9)
    np.testing.assert_allclose(moved.coef_, model.coef_, atol=1e-10)
    # Residuals of least squares with a free constant sum to zero.
    np.testing.assert_allclose((Y - model.predict(X)).sum(0), 0.0, atol=1e-9)
    without = MHLARegressor(method=method, alpha=0.5).fit(X, Y)
    np.testing.assert_array_equal(without.intercept_, np.zeros(2))
    np.testing.assert_allclose(model.predict(np.zeros((1, 5, 3)))[0], model.intercept_)


@pytest.mark.parametrize("method", ["primal", "dual"])
def test_coefficients_are_those_of_the_documented_features(method):
    X, Y = noisy(n_outputs=2)
    model = MHLARegressor(method=method, fit_intercept=True).fit(X, Y)
    assert model.coef_.shape == (2, 18)
    assert model.coef_.dtype == model.intercept_.dtype == np.float64
    by_hand = feature_matrix(X) @ model.coef_.T + model.intercept_
    np.testing.assert_allclose(model.predict(X), by_hand, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("method", ["primal", "dual"])
def test_rank_counts_the_directions_in_the_data(method):
    X, y = noisy(30)
    assert MHLARegressor(method=method).fit(X, y).rank_ == 18
    assert MHLARegressor(method=method).fit(X[:7], y[:7]).rank_ == 7
    # A single token is a cube: symmetric in three indices, 10 of the 18 directions.
    assert MHLARegressor(method=method).fit(X[:, -1:], y).rank_ == 10
    # Two equal coordinates leave those of width 2.
    twin = X[:, :, [0, 1, 1]]
    assert MHLARegressor(method=method).fit(twin, y).rank_ == 6
    assert MHLARegressor(method=method).fit(0 * X, y).rank_ == 0


def test_fitted_attributes():
    X, y = noisy()
    model = MHLARegressor().fit(X, y)
    assert model.method_ == "primal"
    assert MHLARegressor().fit(X[:17], y[:17]).method_ == "dual"
    assert MHLARegressor().fit(X[:18], y[:18]).method_ == "primal"
    assert model.token_dim_ == 3
    assert model.n_features_in_ == 3
    rows = MHLARegressor(n_tokens=5).fit(X.reshape(40, 15), y)
    assert (rows.token_dim_, rows.n_features_in_) == (3, 15)
    for name in ("n_iter_", "rank_", "token_dim_", "n_heads_"):
        assert type(getattr(model, name)) is int


def test_n_iter_counts_refinement():
    X, y = noisy(200)
    assert MHLARegressor(alpha=1e3).fit(X, y).n_iter_ == 0
    # Tokens far from zero: the features are nearly constant and need refinement.
    assert MHLARegressor().fit(X + 30.0, y).n_iter_ >= 1


def test_heads_compute_the_fitted_function():
    X, Y = noisy(n_outputs=2)
    model = MHLARegressor().fit(X, Y)
    assert model.value_.shape == (model.n_heads_, 2, 3)
    assert model.key_query_.shape == (model.n_heads_, 3, 3)
    assert model.n_heads_ <= 6
    outputs = predict_heads(model.value_, model.key_query_, X)
    np.testing.assert_allclose(outputs, model.predict(X), rtol=1e-9, atol=1e-9)
    assert function_distance(model, Heads(model.value_, model.key_query_)) < 1e-10


def test_noise_free_teacher_is_recovered_as_a_function():
    X = make_sequences(0, 60)
    teacher = make_heads(2, 2, 3)
    model = MHLARegressor().fit(X, predict_heads(*teacher, X))
    recovered = function_coefficients(model.value_, model.key_query_)
    np.testing.assert_allclose(recovered, function_coefficients(*teacher), atol=1e-9)


def test_heads_are_computed_once_and_only_when_asked_for(monkeypatch):
    calls = []

    def counting(*args):
        calls.append(args)
        return minimal_heads(*args)

    monkeypatch.setattr(_model, "minimal_heads", counting)
    X, y = noisy()
    model = MHLARegressor().fit(X, y)
    model.predict(X)
    model.score(X, y)
    assert not calls
    first = model.value_
    assert model.n_heads_ == len(model.key_query_) == len(first)
    assert len(calls) == 1
    model.fit(X, y[::-1])
    assert len(calls) == 1
    assert not np.allclose(model.value_, first)  # of the new fit
    assert len(calls) == 2


def test_refit_forgets_the_first_fit():
    X, Y = noisy(n_outputs=2)
    other = make_sequences(0, 30, 4, 2)
    target = np.arange(30.0)
    table = pd.DataFrame(other.reshape(30, 8), columns=list("abcdefgh"))
    model = MHLARegressor(fit_intercept=True, n_tokens=4)
    model.fit(table, target)
    assert list(model.feature_names_in_) == list("abcdefgh")
    assert model.value_.shape[2] == 2
    model.fit(X, Y)
    fresh = MHLARegressor(fit_intercept=True, n_tokens=4).fit(X, Y)
    assert not hasattr(model, "feature_names_in_")
    assert vars(model).keys() == vars(fresh).keys()
    np.testing.assert_array_equal(model.predict(X), fresh.predict(X))
    np.testing.assert_array_equal(model.value_, fresh.value_)
    model.fit(other, target)
    assert model.predict(other).shape == (30,)


def test_not_fitted():
    X, y = noisy()
    model = MHLARegressor()
    for call in (lambda: model.predict(X), lambda: model.score(X, y)):
        with pytest.raises(NotFittedError, match="MHLARegressor instance is not fitted"):
            call()
    for name in ("value_", "key_query_", "n_heads_"):
        with pytest.raises(AttributeError, match=rf"not fitted yet, so it has no {name}"):
            getattr(model, name)
        assert not hasattr(model, name)


@pytest.mark.parametrize(
    ("method", "n_samples", "chosen", "why"),
    [
        ("auto", 40, "primal", "p=18 <= rows=40"),
        ("auto", 10, "dual", "p=18 > rows=10"),
        ("dual", 40, "dual", "method='dual' was asked for"),
        ("primal", 10, "primal", "method='primal' was asked for"),
    ],
)
def test_verbose_says_which_method_and_why(method, n_samples, chosen, why, capsys):
    X, y = noisy(n_samples)
    MHLARegressor(method=method, verbose=1).fit(X, y)
    shown = capsys.readouterr()
    assert shown.out == f"[MHLARegressor] method='{chosen}': {why}\n"
    assert f"{n_samples}/{n_samples}" in shown.err  # the progress bar ran to its end
    MHLARegressor(method=method).fit(X, y).predict(X)
    assert capsys.readouterr() == ("", "")


# Torch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_tensor_in_tensor_out(dtype):
    X = torch.tensor(make_sequences(0, 40) * 4).to(dtype)
    wide = X.double().numpy()
    y = noisy()[1]
    model = MHLARegressor().fit(X, torch.tensor(y))
    assert all(not torch.is_tensor(value) for value in vars(model).values())
    predictions = model.predict(X)
    assert torch.is_tensor(predictions)
    assert predictions.dtype == torch.float64
    assert not predictions.requires_grad
    expected = MHLARegressor().fit(wide, y).predict(wide)
    np.testing.assert_allclose(predictions.numpy(), expected, rtol=1e-13, atol=1e-13)
    # The type of the answer follows what is asked, not what was fitted.
    assert isinstance(model.predict(wide), np.ndarray)
    assert torch.is_tensor(MHLARegressor().fit(wide, y).predict(X))
    assert torch.is_tensor(model.predict(list(X)))
    assert isinstance(model.score(X, torch.tensor(y)), float)


def test_list_of_tensors_in_list_of_tensors_out():
    sequences = [torch.tensor(s) for s in make_ragged([2, 4, 3] * 8, 3)]
    y = [sequence.sum(1) for sequence in sequences]
    model = MHLARegressor(output="sequence", alpha=0.1).fit(sequences, y)
    predictions = model.predict(sequences)
    assert all(torch.is_tensor(part) for part in predictions)
    arrays = [sequence.numpy() for sequence in sequences]
    for part, expected in zip(predictions, model.predict(arrays), strict=True):
        np.testing.assert_array_equal(part.numpy(), expected)


@pytest.mark.parametrize("dtype", ["float32", "int16", "float64"])
def test_outputs_are_float64(dtype):
    X = (make_sequences(0, 40) * 4).astype(dtype)
    model = MHLARegressor(fit_intercept=True).fit(X, np.arange(40, dtype=np.float32))
    assert model.predict(X).dtype == np.float64
    assert model.value_.dtype == model.key_query_.dtype == np.float64


def test_case_T04_works_without_torch():
    run_python(
        """
        import sys

        class NoTorch:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "torch":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, NoTorch())
        import numpy as np
        from sklearn_mhla import MHLARegressor
        from sklearn_mhla.datasets import make_linear_attention

        X, y = make_linear_attention(60, n_tokens=5, n_features=3, random_state=0)
        for method in ("primal", "dual"):
            model = MHLARegressor(method=method).fit(X[:40], y[:40])
            assert model.score(X[40:], y[40:]) > 1 - 1e-10
        assert np.abs(model.predict(list(X)) - y).max() < 1e-8
        model.value_
        try:
            MHLARegressor(device="cuda").fit(X, y)
        except ImportError as error:
            assert "pip install torch" in str(error), error
            assert "device='cuda'" in str(error), error
        else:
            raise SystemExit("a CUDA device without torch")
        """
    )


def test_import_and_fit_leave_torch_alone():
    out = run_python(
        """
        import sys
        import sklearn_mhla
        from sklearn_mhla.datasets import make_linear_attention
        assert "torch" not in sys.modules, "by import"
        X, y = make_linear_attention(60, n_tokens=5, n_features=3, random_state=0)
        model = sklearn_mhla.MHLARegressor().fit(X, y)
        model.predict(X)
        assert "torch" not in sys.modules, "by fit"
        print("done")
        """
    )
    assert out == "done\n"


# Memory --------------------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's memory counters")
def test_case_M01_memory_does_not_grow_with_the_feature_matrix():
    # N=1e5, d=20: the feature matrix would take 3.36 GB, the p x p moment takes 141 MB.
    # VmHWM belongs to the process alone; ru_maxrss may start at the peak of its parent.
    out = run_python(
        """
        import numpy as np
        from sklearn_mhla import MHLARegressor

        def memory(field):
            with open("/proc/self/status", encoding="ascii") as lines:
                return next(int(l.split()[1]) * 1024 for l in lines if l.startswith(field))

        X = np.random.default_rng(0).standard_normal((100_000, 2, 20), dtype=np.float32)
        y = (X[:, :, 0].astype(np.float64) ** 2).sum(1) * X[:, -1, 1]
        MHLARegressor(method="primal").fit(X[:50, :, :3], y[:50])  # libraries loaded and warm
        before = memory("VmRSS:")
        model = MHLARegressor(method="primal", alpha=1.0).fit(X, y)
        after = memory("VmHWM:")
        assert model.coef_.shape == (1, 4200)
        assert model.score(X[:1000], y[:1000]) > 0.9999
        print(after - before)
        """
    )
    print(f"{int(out) / 1e6:.0f} MB")  # shown if the next line fails
    assert 141e6 < int(out) < 1e9


def test_case_M02_auto_takes_primal_while_p_is_smaller():
    plenty = 10**12
    below = ProblemSize(n_rows=80_000, n_features=75_843, n_outputs=1, token_dim=53)
    above = ProblemSize(n_rows=80_000, n_features=80_190, n_outputs=1, token_dim=54)
    assert choose_solver("auto", below, plenty)[0].name == "primal"
    assert choose_solver("auto", above, plenty)[0].name == "dual"


def test_case_M02_dual_that_cannot_fit_is_refused_before_any_work(monkeypatch):
    monkeypatch.setattr(NumpyBackend, "available_memory", lambda self: 16 * 10**9)
    X = np.random.default_rng(0).standard_normal((80_000, 1, 3))
    y = X[:, 0, 0]
    model = MHLARegressor().fit(X, y)
    assert model.method_ == "primal"
    predictions = model.predict(X[:10])

    def refuse(*args, **kwargs):
        raise AssertionError("work was started before memory was checked")

    monkeypatch.setattr(_fitting, "Design", refuse)
    with pytest.raises(MemoryError, match=r"method='dual' needs 51\.2 GB.*only 16 GB") as caught:
        MHLARegressor(method="dual").fit(X, y)
    assert "rows=80000, p=18" in str(caught.value)
    assert "Use method='primal'" in str(caught.value)
    monkeypatch.undo()
    np.testing.assert_array_equal(model.predict(X[:10]), predictions)


def test_refusal_of_every_method_says_what_each_would_need(monkeypatch):
    monkeypatch.setattr(NumpyBackend, "available_memory", lambda self: 1000)
    X, y = noisy()
    with pytest.raises(MemoryError, match=r"(?s)method='primal' needs.*method='dual' needs.*width"):
        MHLARegressor().fit(X, y)


def test_auto_takes_the_method_that_fits(monkeypatch, capsys):
    # p=288 <= 290 rows, so primal is preferred: 1.25 p^2 numbers make 0.83 MB, rows^2 0.79 MB.
    X = make_sequences(0, 290, 5, 8)
    y = np.arange(290.0)
    monkeypatch.setattr(NumpyBackend, "available_memory", lambda self: 900_000)
    assert MHLARegressor(verbose=1).fit(X, y).method_ == "primal"
    assert "p=288 <= rows=290" in capsys.readouterr().out
    monkeypatch.setattr(NumpyBackend, "available_memory", lambda self: 800_000)
    assert MHLARegressor(alpha=1.0, verbose=1).fit(X, y).method_ == "dual"
    assert "primal would need" in capsys.readouterr().out


def test_singular_problems_that_do_not_fit_are_refused_with_the_way_out(monkeypatch):
    X = make_sequences(0, 290, 5, 8)
    monkeypatch.setattr(NumpyBackend, "available_memory", lambda self: 800_000)
    with pytest.raises(MemoryError, match=r"order 290 is singular.*alpha > 0"):
        MHLARegressor(method="dual").fit(X, np.arange(290.0))


def test_a_huge_sequence_of_weight_zero_does_not_count():
    X = make_sequences(0, 60, 5, 3)
    y = np.arange(60.0)
    kept = MHLARegressor().fit(X, y)
    for form in (lambda x: x, list):
        with_huge = form(np.concatenate([X, np.full((1, 5, 3), 1e55)]))
        model = MHLARegressor().fit(with_huge, np.append(y, 1.0), np.append(np.ones(60), 0.0))
        assert np.allclose(model.coef_, kept.coef_, rtol=1e-10)
