"""Conjugate gradients against orthogonal factorisations of explicit features."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import reference
from scipy.linalg import lstsq
from sklearn.exceptions import ConvergenceWarning

from sklearn_mhla import MHLARegressor
from sklearn_mhla._backend import NumpyBackend, TorchBackend
from sklearn_mhla._design import Design
from sklearn_mhla._tokens import check_sequences
from sklearn_mhla.solvers import CGSolver, LeastSquaresProblem

OPTIONS = [
    {"output": "last"},
    {"output": "last", "state": "mean"},
    {"output": "sequence"},
    {"output": "sequence", "causal": False},
    {"output": "sequence", "causal": False, "state": "mean"},
]
IDS = ["last", "last mean", "causal", "shared", "shared mean"]


def problem_of(X, y, weights=None, fit_intercept=False, backend=None, **options):
    backend = NumpyBackend() if backend is None else backend
    design = Design(check_sequences(X), backend, rescale=False, **options)
    return LeastSquaresProblem(
        design,
        backend.asarray(y),
        None if weights is None else backend.asarray(weights),
        fit_intercept,
    )


def one_token():
    """``S q`` has the 10 cubic monomials of d = 3, but states and queries have full rank."""
    return reference.make_sequences(0.0, 60, 1)


def constant_coordinate():
    """Singular only once an intercept is fitted."""
    X = reference.make_sequences(0.0, 60, 5, 3)
    X[:, :, 2] = 1.0
    return X


# X, rank of its features plain and centred (p = 18).
DESIGNS = {
    "one row": (lambda: reference.make_sequences(0.0, 1), 1, 0),
    "rows < p": (lambda: reference.make_sequences(0.0, 10), 10, 9),
    "rows = p": (lambda: reference.make_sequences(0.0, 18), 18, 17),
    "rows > p": (lambda: reference.make_sequences(0.0, 60), 18, 18),
    "offset": (lambda: reference.make_sequences(3.0, 60), 18, 18),
    "equal coordinates": (
        lambda: reference.make_sequences(0.0, 60, 5, 2)[:, :, [0, 1, 1]],
        6,
        6,
    ),
    "constant coordinate": (constant_coordinate, 18, 17),
    "tiled rows": (lambda: np.tile(reference.make_sequences(0.0, 7), (9, 1, 1)), 7, 6),
    "one token": (one_token, 10, 10),
    "all rows equal": (lambda: np.tile(reference.make_sequences(0.0, 1), (20, 1, 1)), 1, 0),
    "all zero": (lambda: np.zeros((6, 4, 3)), 0, 0),
}


@pytest.mark.parametrize("n_outputs", [1, 7])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("fit_intercept", [False, True], ids=["through 0", "intercept"])
@pytest.mark.parametrize("alpha", [0.0, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("name", DESIGNS)
def test_solution_is_that_of_an_orthogonal_factorisation(
    name, alpha, fit_intercept, weighted, n_outputs
):
    X = DESIGNS[name][0]()
    random = np.random.default_rng(7)
    y = 1.0 + random.standard_normal((len(X), n_outputs))
    weights = random.uniform(0.1, 5.0, len(X)) if weighted else None
    solution = CGSolver(problem_of(X, y, weights, fit_intercept)).solve(alpha)
    features = reference.feature_matrix(X)
    coef, intercept = reference.ridge(features, y, alpha, fit_intercept, weights)
    # What rounding of the gradient leaves outside the row space is divided by alpha alone.
    size = np.linalg.norm(features, 2) * np.linalg.norm(y)
    allowed = 1e-8 * np.linalg.norm(coef) + 1e-13 * np.linalg.norm(y) / (
        1.0 + np.linalg.norm(features, 2)
    )
    if alpha > 0.0:
        allowed += 1e-14 * size / alpha
    assert np.linalg.norm(solution.coef - coef) <= allowed
    predicted = features @ solution.coef.T + solution.intercept
    expected = features @ coef.T + intercept
    assert np.linalg.norm(predicted - expected) < 1e-10 * np.linalg.norm(y)
    assert solution.rank >= DESIGNS[name][1 + fit_intercept]
    if not fit_intercept:
        assert not solution.intercept.any()


@pytest.mark.parametrize("name", ["rows < p", "tiled rows", "one token", "equal coordinates"])
def test_minimum_norm_means_nothing_outside_the_row_space(name):
    X = DESIGNS[name][0]()
    y = np.random.default_rng(7).standard_normal((len(X), 2))
    coef = CGSolver(problem_of(X, y)).solve(0.0).coef
    features = reference.feature_matrix(X)
    expected = lstsq(features, y, cond=1e-9)[0].T
    assert reference.relative_error(coef, expected) < 1e-8
    _, singular, right = np.linalg.svd(features)
    rank = int((singular > 1e-9 * singular[0]).sum())
    assert np.linalg.norm(coef @ right[rank:].T) < 1e-10 * np.linalg.norm(coef)


def test_with_the_preconditioner_alone_it_would_not_be_of_minimum_norm():
    """What the random target is for."""
    X = one_token() * np.array([1.0, 3.0, 0.3])
    y = np.random.default_rng(7).standard_normal((60, 2))
    expected = lstsq(reference.feature_matrix(X), y, cond=1e-9)[0].T
    solver = CGSolver(problem_of(X, y))
    assert reference.relative_error(solver.solve(0.0).coef, expected) < 1e-8
    coef, _ = solver._iterate(solver.problem.targets, 0.0, solver.kronecker)
    assert reference.relative_error(coef.swapaxes(0, 1).reshape(2, 18), expected) > 1e-2


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("fit_intercept", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.3])
@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda options: "-".join(map(str, options.values()))
)
def test_every_kind_of_row_on_both_backends(options, alpha, fit_intercept, backend):
    if backend == "torch":
        pytest.importorskip("torch")
    X = reference.make_ragged([9, 1, 5, 2, 8, 3, 7, 4, 6, 1] * 3, 3)
    features = reference.feature_matrix(X, **options)
    random = np.random.default_rng(7)
    y = random.standard_normal((len(features), 2))
    weights = random.uniform(0.1, 5.0, len(features))
    chosen = NumpyBackend() if backend == "numpy" else TorchBackend("cpu")
    problem = problem_of(X, y, weights, fit_intercept, chosen, **options)
    solution = CGSolver(problem).solve(alpha)
    coef, intercept = reference.ridge(features, y, alpha, fit_intercept, weights)
    assert reference.relative_error(chosen.to_numpy(solution.coef), coef) < 1e-9
    assert np.linalg.norm(chosen.to_numpy(solution.intercept) - intercept) < 1e-9 * np.linalg.norm(
        y
    )


@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda options: "-".join(map(str, options.values()))
)
@pytest.mark.parametrize("n_bytes", [0, 2000, 10**9])
def test_what_is_kept_of_the_states_does_not_change_them(options, n_bytes, monkeypatch):
    from sklearn_mhla import _design

    monkeypatch.setattr(_design, "_MIN_ROWS", 2)
    monkeypatch.setattr(_design, "_STATE_BUDGET", 40)
    X = reference.make_ragged([9, 1, 5, 2, 8, 3], 3)
    design = Design(check_sequences(X), NumpyBackend(), **options)
    kept = design.keep(n_bytes)
    assert bool(kept._kept) == (n_bytes > 0)
    assert not design._kept
    coef = np.random.default_rng(7).standard_normal((2, 18))
    for _ in range(2):
        assert np.array_equal(kept.matvec(coef), design.matvec(coef))
    numbers = sum(b.state.size + b.query.size for group in kept._kept for b in group)
    # Absent queries of padded sequences are kept with the others.
    assert 8 * numbers <= 2 * n_bytes


def test_states_are_formed_once(monkeypatch):
    X = reference.make_sequences(0.0, 60)
    calls = []
    formed = Design._formed

    def counted(self, *arguments):
        calls.append(1)
        return formed(self, *arguments)

    monkeypatch.setattr(Design, "_formed", counted)
    y = np.random.default_rng(7).standard_normal((60, 1))
    solution = CGSolver(problem_of(X, y)).solve(0.0)
    assert solution.n_iter > 5
    assert len(calls) == 1
    monkeypatch.setattr(NumpyBackend, "available_memory", lambda self: 0)
    calls.clear()
    again = CGSolver(problem_of(X, y)).solve(0.0)
    assert len(calls) > again.n_iter
    assert np.array_equal(again.coef, solution.coef)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
def test_preconditioner_is_the_product_of_second_moments(options, weighted):
    """It changes no solution, only the number of iterations, so it has a test of its own."""
    X = reference.make_ragged([9, 1, 5, 2, 8, 3] * 3, 3)
    pairs = [pair for sequence in X for pair in reference.states_and_queries(sequence, **options)]
    weights = np.random.default_rng(7).uniform(0.1, 5.0, len(pairs))
    inverse = CGSolver(
        problem_of(X, np.zeros((len(pairs), 1)), weights if weighted else None, **options)
    ).kronecker
    weights = weights if weighted else np.ones(len(pairs))
    by_state = by_query = 0.0
    for weight, (state, query) in zip(weights, pairs, strict=True):
        # Features of a query of one coordinate are the packed state.
        packed = reference.isometric_features(state, [1.0, 0.0, 0.0])[::3]
        by_state = by_state + weight * np.outer(packed, packed)
        by_query = by_query + weight * np.outer(query, query)
    basis = np.kron(inverse.state_basis, inverse.query_basis)
    computed = basis * inverse.eigenvalues.reshape(-1) @ basis.T
    assert reference.relative_error(computed, np.kron(by_state, by_query) / weights.sum()) < 1e-12


@pytest.mark.parametrize("tol", [1e-3, 1e-6, 1e-10])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_the_gradient_is_as_small_as_asked(tol, alpha):
    """In the metric of the second moments of states and queries, built here entry by entry."""
    X = reference.make_sequences(0.5, 100)
    y = np.random.default_rng(7).standard_normal((100, 3))
    problem = problem_of(X, y)
    coef = CGSolver(problem, tol=tol).solve(alpha).coef
    features = reference.feature_matrix(X)
    pairs = [reference.states_and_queries(sequence)[0] for sequence in X]
    queries = np.array([query for _, query in pairs])
    upper = np.triu_indices(3)
    scale = np.where(upper[0] == upper[1], 1.0, np.sqrt(2.0))
    packed = np.array([state[upper] * scale for state, _ in pairs])
    metric = np.kron(packed.T @ packed, queries.T @ queries) / 100 + alpha * np.eye(18)

    def size(gradient):
        return np.sqrt(np.diag(gradient.T @ np.linalg.solve(metric, gradient)))

    gradient = features.T @ (y - features @ coef.T) - alpha * coef.T
    relative = size(gradient) / size(features.T @ y)
    assert (relative <= tol).all()
    assert relative.max() > 1e-5 * tol  # no more was done than asked for


def test_units_of_coordinates_and_their_dependence_cost_no_iterations():
    """An invertible map of the tokens maps preconditioner and features alike."""
    X = reference.make_sequences(0.0, 400, 5, 4)
    y = np.random.default_rng(7).standard_normal((400, 2))
    mixing = np.eye(4) + 0.9 * (np.ones((4, 4)) - np.eye(4))
    plain, mixed = (
        CGSolver(problem_of(tokens, y), tol=1e-10)
        for tokens in (X, X @ mixing * np.array([1.0, 1e-2, 1.0, 10.0]))
    )
    n_iter = plain.solve(0.0).n_iter
    assert abs(mixed.solve(0.0).n_iter - n_iter) <= 2
    problem = mixed.problem
    with pytest.warns(ConvergenceWarning):
        CGSolver(problem, tol=1e-10, max_iter=3 * n_iter)._iterate(
            problem.targets, 0.0, mixed.kronecker.flat()
        )


@pytest.mark.parametrize("kind", ["exact", "noisy"])
@pytest.mark.parametrize("fit_intercept", [False, True])
def test_nearly_dependent_coordinates(kind, fit_intercept):
    """Features of condition 1e10: as accurate as orthogonal factorisations of them."""
    random = np.random.default_rng(0)
    X = random.standard_normal((200, 5, 3))
    X[:, :, 1] = X[:, :, 0] + 1.2e-3 * X[:, :, 1]
    features = reference.feature_matrix(X)
    assert np.linalg.cond(features) > 5e9
    y = features @ random.standard_normal((18, 2))
    if kind == "noisy":
        y += random.standard_normal(y.shape)
    columns = np.c_[features, np.ones(200)] if fit_intercept else features
    expected = lstsq(columns, y)[0].T
    model = MHLARegressor(method="cg", tol=0.0, fit_intercept=fit_intercept).fit(X, y)
    assert reference.relative_error(model.coef_, expected[:, :18]) < 1e-5
    assert reference.relative_error(model.predict(X), columns @ expected.T) < 1e-5


def test_too_few_iterations_warn_with_the_gradient_reached():
    X = reference.make_sequences(0.0, 60)
    y = np.random.default_rng(7).standard_normal((60, 2))
    model = MHLARegressor(method="cg", max_iter=1)  # ten iterations
    message = r"after 10 iterations with a relative gradient of .*e-0.* for 2 of 2 outputs; 1.0e-10"
    with pytest.warns(ConvergenceWarning, match=message):
        model.fit(X, y)
    assert model.n_iter_ == 10
    assert np.isfinite(model.coef_).all()


@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_warm_start_needs_no_iterations_at_the_solution(scale):
    X = reference.make_sequences(0.0, 60)
    y = np.random.default_rng(7).standard_normal((60, 2))
    start = MHLARegressor(method="primal").fit(scale * X, y)
    model = copy.deepcopy(start).set_params(method="cg", warm_start=True)
    model.fit(scale * X, y)
    assert model.n_iter_ == 0
    assert reference.relative_error(model.coef_, start.coef_) < 1e-12
    # From elsewhere it arrives at the same solution, in fewer steps if it is near.
    cold = MHLARegressor(method="cg").fit(scale * X, y)
    model.fit(scale * X, y + 1e-6 * np.sin(y))
    assert 0 < model.n_iter_ < cold.n_iter_
    model.fit(scale * X, y)
    assert reference.relative_error(model.coef_, start.coef_) < 1e-8


def test_warm_start_of_another_shape_is_refused():
    X = reference.make_sequences(0.0, 60)
    y = np.random.default_rng(7).standard_normal((60, 2))
    model = MHLARegressor(method="cg", warm_start=True).fit(X, y)
    before = model.coef_
    with pytest.raises(ValueError, match=r"coef_ of shape \(2, 18\).*\(1, 18\).*warm_start=False"):
        model.fit(X, y[:, 0])
    assert model.coef_ is before


@pytest.mark.parametrize("options", [{"n_heads": 1}, {"penalty": "nuclear", "alpha": 1.0}])
def test_restricted_models_are_refused(options):
    X = reference.make_sequences(0.0, 60)
    with pytest.raises(ValueError, match="method='cg' fits models without a limit on heads"):
        MHLARegressor(method="cg", **options).fit(X, np.zeros((60, 2)))


def test_as_many_heads_as_make_no_restriction_are_accepted():
    X = reference.make_sequences(0.0, 60)
    y = np.random.default_rng(7).standard_normal(60)
    model = MHLARegressor(3, method="cg").fit(X, y)
    assert model.method_ == "cg"


def test_auto_takes_it_when_neither_system_fits(monkeypatch, capsys):
    X = reference.make_sequences(0.0, 700, 5, 8)  # p = 288: 0.83 MB and 3.9 MB
    y = np.random.default_rng(7).standard_normal(700)
    expected = MHLARegressor(method="primal").fit(X, y)
    monkeypatch.setattr(NumpyBackend, "available_memory", lambda self: 600_000)
    model = MHLARegressor(verbose=1).fit(X, y)
    assert model.method_ == "cg"
    assert reference.relative_error(model.coef_, expected.coef_) < 1e-8
    assert model.rank_ == 288
    captured = capsys.readouterr()
    assert "primal would need" in captured.out
    assert f"{model.n_iter_}it" in captured.err


@pytest.mark.parametrize("fit_intercept", [False, True])
def test_zero_targets_give_zero(fit_intercept):
    X = reference.make_sequences(3.0, 60)
    solution = CGSolver(problem_of(X, np.zeros((60, 2)), None, fit_intercept)).solve(0.0)
    assert not solution.coef.any()
    assert not solution.intercept.any()


@pytest.mark.parametrize("fit_intercept", [False, True])
def test_the_caller_s_arrays_are_left_alone(fit_intercept):
    X = reference.make_sequences(1.0, 30)
    random = np.random.default_rng(7)
    y, weights = random.standard_normal((30, 2)), random.uniform(0.1, 5.0, 30)
    before = X.copy(), y.copy(), weights.copy()
    MHLARegressor(method="cg", fit_intercept=fit_intercept).fit(X, y, sample_weight=weights)
    for array, original in zip((X, y, weights), before, strict=True):
        assert np.array_equal(array, original)
