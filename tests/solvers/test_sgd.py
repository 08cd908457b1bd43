"""Stochastic gradients: the loss they minimise, their options, and how they fail."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
import warnings

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.utils.estimator_checks import parametrize_with_checks

from sklearn_mhla import MHLARegressor, function_distance
from sklearn_mhla._backend import TorchBackend, one_torch_thread
from sklearn_mhla._design import Design
from sklearn_mhla._targets import check_targets
from sklearn_mhla._tokens import (
    check_sequences,
)
from sklearn_mhla.datasets import make_linear_attention
from sklearn_mhla.solvers import LeastSquaresProblem
from sklearn_mhla.solvers._mini_batches import Samples, StandardUnits
from sklearn_mhla.solvers._sgd import _Model, _schedule

LAYOUTS = {
    "last": {"n_tokens": 5},
    "last, ragged": {"n_tokens": (1, 6)},
    "causal": {"n_tokens": 5, "output": "sequence"},
    "causal, ragged": {"n_tokens": (1, 6), "output": "sequence"},
    "whole state": {"n_tokens": 5, "output": "sequence", "causal": False},
    "whole state, ragged": {"n_tokens": (1, 6), "output": "sequence", "causal": False},
    "mean, ragged": {"n_tokens": (1, 6), "output": "sequence", "state": "mean"},
}


def sgd(**options):
    return MHLARegressor(solver="sgd", **{"random_state": 0, **options})


def teacher_data(n_samples=500, seed=0, **options):
    options = {"n_tokens": 8, "n_features": 3, **options}
    return make_linear_attention(n_samples, random_state=seed, **options)


def rows_of(X, output="last", causal=True, state="sum"):
    """Pairs (S, q) of all rows."""
    pairs = []
    for tokens in X:
        n_tokens = len(tokens)
        for t in range(n_tokens) if output == "sequence" else [n_tokens - 1]:
            seen = tokens[: t + 1] if causal or output == "last" else tokens
            pairs.append((seen.T @ seen / (len(seen) if state == "mean" else 1), tokens[t]))
    return pairs


def mean_loss(value, key_query, bias, X, y, weights, alpha, **options):
    """The objective per unit of weight, row by row, and its penalty from the full tensor."""
    total = total_weight = 0.0
    for (state, query), target, weight in zip(rows_of(X, **options), y, weights, strict=True):
        output = bias + sum(v @ state @ q @ query for v, q in zip(value, key_query, strict=True))
        total += weight * ((target - output) ** 2).sum()
        total_weight += weight
    tensor = np.einsum("haj,hkl->ajkl", value, key_query)
    symmetric = (tensor + tensor.swapaxes(1, 2)) / 2
    return (total + alpha * (symmetric**2).sum()) / (2 * total_weight)


def as_problem(X, y, weights=None, fit_intercept=True, **options):
    output = options.get("output", "last")
    sequences = check_sequences(X)
    targets, _ = check_targets(y, sequences, output)
    backend = TorchBackend("cpu")
    design = Design(sequences, backend, **options)
    if weights is not None:
        weights = backend.asarray(weights)
    return LeastSquaresProblem(design, backend.asarray(targets), weights, fit_intercept), targets


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pieces", [False, True])
def test_one_full_batch_has_the_loss_and_gradient_of_the_definition(layout, pieces, monkeypatch):
    if pieces:  # states do not fit: three sequences at a time
        monkeypatch.setattr(Samples, "_sequences_that_fit", lambda *_: 3)
    options = dict(LAYOUTS[layout])
    n_tokens = options.pop("n_tokens")
    X, y = teacher_data(7, n_tokens=n_tokens, n_outputs=2, **options)
    n_rows = len(rows_of(X, **options))
    random = np.random.default_rng(1)
    weights, alpha = random.uniform(0.5, 2.0, n_rows), 0.3
    with one_torch_thread():
        problem, targets = as_problem(X, y, weights, **options)
        units = StandardUnits.of(problem)
        samples = Samples(problem, units, np.arange(7))
        model = _Model(samples, alpha * 2.0 ** (-6 * problem.design.exponent), 2)
        model.begin(None, random)
        model.bias += 0.1
        flat = model.flat.numpy().copy()
        gradient, n_states, n_sequences = 0.0, 0, 0
        for batch, count in samples.batches(7):
            model._evaluate(batch, len(samples) / (samples.total_weight * count))
            # every batch carries the penalty: their mean is the gradient of the whole
            gradient = gradient + model.gradient.numpy() * count / len(samples)
            n_states, n_sequences = n_states + len(batch.state), n_sequences + count
        computed = model.mean_loss(samples) + model.penalty()
        solution = model.solution(computed, [], [])
    assert n_sequences == 7
    assert n_states == (n_rows if options.get("causal", True) and "output" in options else 7)

    scale = 2.0**-problem.design.exponent

    def loss(heads, bias):
        return mean_loss(
            heads.value * scale,
            heads.key_query * scale**2,
            bias,
            X,
            targets,
            weights,
            alpha,
            **options,
        )

    expected = loss(solution.heads, solution.intercept)
    assert computed * units.target**2 == pytest.approx(expected, rel=1e-10)
    assert solution.loss == pytest.approx(expected * weights.sum(), rel=1e-10)
    with one_torch_thread():
        for index in random.choice(len(flat), 8, replace=False):
            sides = []
            for step in (1e-5, -1e-5):
                model.flat.copy_(torch.from_numpy(flat))
                model.flat[int(index)] += step
                moved = model.solution(0.0, [], [])
                sides.append(loss(moved.heads, moved.intercept))
            slope = (sides[0] - sides[1]) / 2e-5 / units.target**2
            assert gradient[index] == pytest.approx(slope, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reaches_an_exact_target_in_every_layout(layout, device):
    options = dict(LAYOUTS[layout])
    n_tokens = options.pop("n_tokens")
    X, y = teacher_data(300, n_tokens=n_tokens, **options)
    model = sgd(max_iter=60, device=device, **options).fit(X[:200], y[:200])
    assert model.score(X[200:], y[200:]) > 0.99
    assert model.n_iter_ == len(model.loss_curve_) == 60
    assert model.loss_curve_[-1] < 0.01 * model.loss_curve_[0]


def test_converges_to_the_closed_form(device):
    X, y = teacher_data(200, noise=2.0)
    y = y + 5.0
    weights = np.random.default_rng(0).uniform(0.2, 2.0, 200)
    options = {"alpha": 20.0, "fit_intercept": True}
    exact = MHLARegressor(**options).fit(X, y, weights)
    # one batch: no noise, so it goes to the minimum itself
    model = sgd(max_iter=2000, batch_size=200, device=device, **options).fit(X, y, weights)
    assert np.linalg.norm(model.coef_ - exact.coef_) < 1e-5 * np.linalg.norm(exact.coef_)
    np.testing.assert_allclose(model.intercept_, exact.intercept_, rtol=1e-5)
    # and it is this penalty: half of it has another minimum
    half = MHLARegressor(alpha=10.0, fit_intercept=True).fit(X, y, weights)
    assert np.linalg.norm(half.coef_ - exact.coef_) > 1e-3 * np.linalg.norm(exact.coef_)


def test_two_heads_find_a_teacher_of_two_heads():
    X, y, teacher = teacher_data(
        1000, n_tokens=16, n_features=4, n_outputs=2, n_heads=2, return_teacher=True
    )
    model = sgd(n_heads=2).fit(X, y)
    assert model.value_.shape == (2, 2, 4)
    assert function_distance(model, teacher) < 1e-8
    assert model.loss_ == pytest.approx(0.5 * ((model.predict(X) - y) ** 2).sum(), abs=1e-20)


def test_as_many_heads_as_asked_for_and_by_default_enough_for_every_function():
    X, y = teacher_data(50)
    assert sgd(max_iter=1).fit(X, y).n_heads_ == 3
    assert sgd(max_iter=1, n_heads=16).fit(X, y).n_heads_ == 16


def test_units_of_coordinates_and_targets_do_not_matter():
    X, y = teacher_data(100)
    model = sgd(max_iter=3).fit(X, y)
    units = np.array([2.0**-20, 1.0, 2.0**9])  # powers of two: not a bit may change
    moved = sgd(max_iter=3).fit(X * units, y * 2.0**12)
    np.testing.assert_allclose(moved.predict(X * units), model.predict(X) * 2.0**12, rtol=1e-9)


def test_zero_coordinates_and_zero_targets():
    X, _ = teacher_data(60)
    X[:, :, 1] = 0.0
    model = sgd(max_iter=5, fit_intercept=True).fit(X, np.full(60, 3.0))
    np.testing.assert_allclose(model.predict(X), 3.0, atol=0.5)
    assert np.isfinite(sgd(max_iter=5).fit(np.zeros((6, 2, 3)), np.zeros(6)).coef_).all()


def test_s08_one_seed_gives_one_model_and_global_states_stay():
    X, y = teacher_data(120)
    numpy_state = np.random.get_state()  # noqa: NPY002
    torch_state = torch.random.get_rng_state()
    first, second = sgd(max_iter=4).fit(X, y), sgd(max_iter=4).fit(X, y)
    np.testing.assert_array_equal(first.coef_, second.coef_)
    first.to_torch()
    after_state = np.random.get_state()  # noqa: NPY002
    for before, after in zip(numpy_state, after_state, strict=True):
        np.testing.assert_array_equal(before, after)
    assert torch.equal(torch_state, torch.random.get_rng_state())
    other = sgd(max_iter=4, random_state=1).fit(X, y)
    assert not np.array_equal(first.coef_, other.coef_)
    scores = [cross_val_score(sgd(max_iter=4), X, y, cv=3, n_jobs=n_jobs) for n_jobs in (1, 2)]
    np.testing.assert_array_equal(*scores)


def test_s08_the_callers_threads_do_not_change_the_model():
    # sums over so many rows are split between threads, where there are several
    X, y = teacher_data(1000, n_tokens=100, output="sequence")
    model = sgd(max_iter=10, batch_size=1000, output="sequence", fit_intercept=True)
    before = torch.get_num_threads()
    coefs = []
    try:
        for n_threads in (1, 2):
            torch.set_num_threads(n_threads)
            coefs.append(model.fit(X, y).key_query_)
            assert torch.get_num_threads() == n_threads
    finally:
        torch.set_num_threads(before)
    np.testing.assert_array_equal(*coefs)


def test_t03_grid_search_after_torch_in_the_parent():
    torch.randn(300, 300) @ torch.randn(300, 300)  # starts torch's threads
    X, y = teacher_data(20000, n_features=8)
    before = torch.get_num_threads()
    scores = []
    for n_jobs in (1, 2):
        search = GridSearchCV(
            sgd(max_iter=1, batch_size=500), {"learning_rate": [1e-2, 3e-2]}, cv=2, n_jobs=n_jobs
        ).fit(X, y)
        scores.append(search.cv_results_["mean_test_score"])
    np.testing.assert_allclose(*scores, rtol=1e-12)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("learning_rate", [1e3, 1e200])
def test_t09_divergence_is_announced_and_nothing_is_nan(learning_rate, device):
    X, y = teacher_data(100)
    model = sgd(learning_rate=learning_rate, max_iter=20, device=device)
    with pytest.warns(ConvergenceWarning, match="Lower learning_rate"):
        model.fit(X, y)
    assert np.isfinite(model.predict(X)).all()
    assert np.isfinite(model.loss_curve_).all()


def test_t09_defaults_reach_an_exact_target():
    X, y = teacher_data(700, n_tokens=16, n_features=4)
    assert sgd().fit(X[:500], y[:500]).score(X[500:], y[500:]) > 0.999


def test_t09_partial_fit_that_diverges_raises_and_keeps_the_model():
    X, y = teacher_data(100)
    model = sgd().partial_fit(X, y)
    coef = model.coef_.copy()
    with pytest.raises(FloatingPointError, match="learning_rate=1e"):
        model.set_params(learning_rate=1e200).partial_fit(X, y)
    np.testing.assert_array_equal(model.coef_, coef)


def test_t04_without_torch_only_sgd_and_modules_fail():
    script = """
        import sys

        class NoTorch:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "torch":
                    raise ImportError("there is no torch")

        sys.meta_path.insert(0, NoTorch())
        import numpy as np
        import sklearn_mhla.interop
        from sklearn_mhla import MHLARegressor
        X = np.random.default_rng(0).standard_normal((40, 5, 2))
        model = MHLARegressor().fit(X, X[:, 0, 0])
        model.predict(X)
        for call in (
            lambda: MHLARegressor(solver="sgd").fit(X, X[:, 0, 0]),
            model.to_torch,
            lambda: MHLARegressor.from_torch(None),
            lambda: sklearn_mhla.interop.MultiHeadLinearAttention,
        ):
            try:
                call()
            except ImportError as error:
                assert "pip install torch" in str(error), error
            else:
                raise SystemExit(f"{call} did not raise")
        print("passed")
    """
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "passed\n", run.stderr


def test_importing_the_package_does_not_import_torch():
    script = "import sys, sklearn_mhla, sklearn_mhla.interop; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("solver", ["convex", "sgd"])
def test_t01_a_model_from_a_missing_device_warns_and_predicts(solver, monkeypatch):
    X, y = teacher_data(60)
    model = MHLARegressor(solver=solver, max_iter=5, random_state=0).fit(X, y)
    expected = model.predict(X)
    model.device = "cuda"
    loaded = pickle.loads(pickle.dumps(model))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="device='cuda', but torch finds no CUDA device"):
        predicted = loaded.predict(X)
    np.testing.assert_array_equal(predicted, expected)
    with pytest.warns(UserWarning, match="computing on the CPU"):
        assert loaded.score(X, y) <= 1.0
    with pytest.raises(ValueError, match="finds no CUDA device"):
        loaded.fit(X, y)


def test_t01_an_index_beyond_the_last_device(monkeypatch):
    X, y = teacher_data(60)
    model = MHLARegressor(device="cuda:3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="finds 1 CUDA device"):
        model.fit(X, y)
    with pytest.raises(ValueError, match="device must be"):
        model.set_params(device="cuda:x").fit(X, y)


@pytest.mark.parametrize("solver", ["convex", "sgd"])
def test_t07_tensors_in_and_out_on_their_device(solver, device):
    X, y = teacher_data(100)
    tensor = torch.tensor(X, device=device)
    options = {"solver": solver, "max_iter": 20, "random_state": 0}
    model = MHLARegressor(**options).fit(tensor, y)
    predicted = model.predict(tensor)
    assert predicted.device == tensor.device
    assert isinstance(model.coef_, np.ndarray)
    expected = MHLARegressor(**options).fit(X, y).predict(X)
    np.testing.assert_allclose(predicted.cpu().numpy(), expected, rtol=1e-6, atol=1e-6)


def test_t06_identical_columns_have_one_minimum_norm_solution(device):
    X, y = teacher_data(100)
    X[:, :, 1] = X[:, :, 0]
    y = X[:, 0, 0] * y
    coef = MHLARegressor(device=device).fit(X, y).coef_
    expected = MHLARegressor(method="dual").fit(X, y).coef_
    np.testing.assert_allclose(coef, expected, atol=1e-4 * abs(expected).max())


def test_early_stopping_holds_out_and_keeps_the_best():
    X, y = teacher_data(60, noise=5.0)  # 18 coefficients on 30 noisy sequences: overfits
    model = sgd(early_stopping=True, validation_fraction=0.5, n_iter_no_change=5)
    model.set_params(tol=1e-3, learning_rate=0.05).fit(X, y)
    curve = model.validation_loss_curve_
    assert model.n_iter_ == len(curve) == len(model.loss_curve_) < model.max_iter
    order = np.random.default_rng(np.random.RandomState(0).randint(2**31 - 1)).permutation(60)
    held_out = order[:30]
    loss = 0.5 * ((model.predict(X[held_out]) - y[held_out]) ** 2).mean()
    assert loss == pytest.approx(min(curve), rel=1e-9)
    assert curve[-1] > min(curve)
    with pytest.raises(ValueError, match="leaves nothing to train on"):
        sgd(early_stopping=True).fit(X[:1], y[:1])


def test_warm_start_goes_on_from_either_solver():
    X, y = teacher_data(200)
    exact = MHLARegressor(heads="svd").fit(X, y)
    exact.set_params(solver="sgd", warm_start=True, max_iter=1, learning_rate=1e-9)
    assert exact.fit(X, y).loss_ < 1e-10  # random heads would be far off after one epoch
    model = sgd(max_iter=30, warm_start=True).fit(X, y)
    first = model.loss_curve_[-1]
    assert model.fit(X, y).loss_curve_[0] < 2.0 * first
    assert model.set_params(warm_start=False).fit(X, y).loss_curve_[0] > 4.0 * first
    with pytest.raises(ValueError, match="Set n_heads=3"):
        model.set_params(warm_start=True, n_heads=2).fit(X, y)


def test_partial_fit_trains_and_survives_pickling():
    X, y = teacher_data(400)
    model = sgd()
    for start in range(0, 400, 100):
        model.partial_fit(X[start : start + 100], y[start : start + 100])
    assert model.n_iter_ == len(model.loss_curve_) == 4
    other = pickle.loads(pickle.dumps(model))
    # other batches have other powers of two inside; the units of the first stay
    model.partial_fit(X[:100] * 4.0, y[:100])
    other.partial_fit(X[:100] * 4.0, y[:100])
    np.testing.assert_array_equal(model.coef_, other.coef_)
    for _ in range(30):
        model.partial_fit(X, y)
    assert model.score(X, y) > 0.99


def test_partial_fit_carries_the_moments_of_adam():
    X, y = teacher_data(64)
    twice = sgd(batch_size=64).partial_fit(X, y).partial_fit(X, y)
    forgetful = sgd(batch_size=64).partial_fit(X, y)
    forgetful._optimizer["first"] *= 0.0
    forgetful.partial_fit(X, y)
    assert not np.allclose(twice.coef_, forgetful.coef_, rtol=1e-3)


def test_partial_fit_refuses_what_does_not_fit():
    X, y = teacher_data(50)
    model = sgd().partial_fit(X, y)
    with pytest.raises(ValueError, match="width d=3"):
        model.partial_fit(X[:, :, :2], y)
    with pytest.raises(ValueError, match="fitted on 1"):
        model.partial_fit(X, np.stack([y, y], 1))
    with pytest.raises(ValueError, match="n_heads"):
        model.set_params(n_heads=7).partial_fit(X, y)


def test_skops_needs_to_trust_nothing_but_this_package():
    sio = pytest.importorskip("skops.io")
    X, y = teacher_data(50)
    model = sgd(max_iter=2).fit(X, y)
    dumped = sio.dumps(model)
    untrusted = sio.get_untrusted_types(data=dumped)
    assert all(name.startswith("sklearn_mhla.") for name in untrusted)
    loaded = sio.loads(dumped, trusted=untrusted)
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))
    np.testing.assert_array_equal(loaded.partial_fit(X, y).coef_, model.partial_fit(X, y).coef_)


def test_sample_weight_zero_leaves_a_sequence_out():
    X, y = teacher_data(60)
    y[40:] = 1e6
    weights = np.repeat([2.0, 0.0], [40, 20])
    weighted = sgd(max_iter=3).fit(X, y, weights)
    np.testing.assert_allclose(weighted.coef_, sgd(max_iter=3).fit(X[:40], y[:40]).coef_, rtol=1e-9)


def test_states_that_do_not_fit_are_computed_piece_by_piece(monkeypatch):
    X, y = teacher_data(300, n_tokens=(1, 6), output="sequence")
    loads = []
    load = Samples._load
    monkeypatch.setattr(Samples, "_load", lambda self, at: loads.append(len(at)) or load(self, at))
    # a row has 6 entries of its state, 3 of its query, a target and a weight: 88 bytes
    monkeypatch.setattr(TorchBackend, "available_memory", lambda _: 2 * 64 * 3.6 * 88)
    model = sgd(output="sequence", max_iter=40).fit(X[:200], y[:200])
    assert model.score(X[200:], y[200:]) > 0.99
    assert len(loads) == 3 * 41  # every pass, and the evaluation at the end
    assert 60 < loads[0] < 75


def test_a_refit_forgets_what_another_solver_left():
    X, y = teacher_data(60)
    model = sgd(max_iter=2).fit(X, y)
    assert model.set_params(solver="convex").fit(X, y).method_ == "primal"
    assert not hasattr(model, "loss_curve_")
    assert not hasattr(model.set_params(solver="sgd").fit(X, y), "rank_")
    assert len(model.fit(X, y).loss_curve_) == 2


def test_verbose_shows_epochs_and_loss(capsys):
    X, y = teacher_data(50)
    sgd(max_iter=2).fit(X, y)
    assert capsys.readouterr() == ("", "")
    sgd(max_iter=2, verbose=1).fit(X, y)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "loss=" in shown


def test_schedule_rises_over_a_tenth_and_falls_to_a_hundredth():
    rates = [_schedule(step, 1000) for step in range(1000)]
    assert rates[0] == pytest.approx(1e-3)
    assert np.argmax(rates) == 100
    assert max(rates) == pytest.approx(1.0)
    assert (np.diff(rates[:101]) > 0).all()
    assert (np.diff(rates[100:]) < 0).all()
    assert rates[-1] == pytest.approx(1e-2, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 0.0),
        ("learning_rate", np.inf),
        ("batch_size", 0),
        ("n_iter_no_change", 0),
        ("validation_fraction", 1.0),
        ("max_iter", 0),
        ("solver", "adam"),
    ],
)
def test_invalid_parameters_are_named(name, value):
    X, y = teacher_data(20)
    with pytest.raises(ValueError, match=name):
        sgd().set_params(**{name: value}).fit(X, y)


NOT_SGD = {
    "check_sample_weight_equivalence_on_dense_data": "mini-batches of repeated rows differ",
}


@parametrize_with_checks(
    [MHLARegressor(solver="sgd", max_iter=3, random_state=0)],
    expected_failed_checks=lambda _: NOT_SGD,
    xfail_strict=True,
)
def test_scikit_learn_common_checks(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # three epochs
        check(clone(estimator))
