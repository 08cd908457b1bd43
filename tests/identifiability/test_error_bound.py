"""The bound on pairs of approximate minimisers: that it holds, and that it is attained."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from sklearn_mhla._backend import NumpyBackend
from sklearn_mhla._design import Design
from sklearn_mhla._tokens import check_sequences
from sklearn_mhla.identifiability._error_bound import SecondMoment, error_bound, leverage

D, M, P = 3, 2, 18


def gaussian(n_rows, seed=0, n_tokens=4):
    return np.random.default_rng(seed).standard_normal((n_rows, n_tokens, D))


def design(X):
    return Design(check_sequences(X), NumpyBackend())


def moment_of(features, exponent=0):
    return SecondMoment.from_matrix(features.T @ features / len(features), D, exponent)


def leverages(X_train, X_new):
    """By the package, from features of the tests, which are in the user's units."""
    return leverage(design(X_new), moment_of(reference.feature_matrix(X_train)))


def mean_square(residual):
    return float((residual**2).sum(1).mean())


def perturbed(coef, direction, features, targets, epsilon):
    """``coef + t direction`` with ``t > 0`` such that the mean squared error is epsilon."""
    residual, change = targets - features @ coef.T, features @ direction.T
    a, b = mean_square(change), -2.0 * float((residual * change).sum(1).mean())
    t = (-b + np.sqrt(b * b + 4.0 * a * (epsilon - mean_square(residual)))) / (2.0 * a)
    found = coef + t * direction
    assert mean_square(targets - features @ found.T) == pytest.approx(epsilon, rel=1e-9)
    return found


@pytest.mark.parametrize("n_rows", [1, 5, 17, 40])
def test_leverage_is_that_of_the_pseudo_inverse(n_rows):
    X = gaussian(n_rows)
    features = reference.feature_matrix(X)
    inverse = np.linalg.pinv(features.T @ features / n_rows, rcond=1e-11, hermitian=True)
    expected = np.einsum("ip,pq,iq->i", features, inverse, features)
    found = leverages(X, X)
    assert reference.relative_error(found, expected) < 1e-7
    assert found.mean() == pytest.approx(np.linalg.matrix_rank(features), rel=1e-9)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e3, 1e30])
def test_units_of_the_tokens_change_nothing(scale):
    """Training and new rows are divided by different powers of two."""
    X, new = gaussian(40), 100.0 * gaussian(6, seed=1)
    training = design(X * scale)
    features = reference.feature_matrix(np.ldexp(X * scale, -training.exponent))
    found = leverage(design(new * scale), moment_of(features, training.exponent))
    assert reference.relative_error(found, leverages(X, new)) < 1e-9


def test_units_of_each_coordinate_change_nothing():
    units = np.array([1e-4, 1.0, 1e4])
    X, new = gaussian(40), gaussian(6, seed=1)
    assert reference.relative_error(leverages(X * units, new * units), leverages(X, new)) < 1e-8
    few = leverages(X[:5] * units, np.concatenate([X[:5], new]) * units)
    assert np.isfinite(few[:5]).all()
    assert np.isinf(few[5:]).all()


def test_inputs_outside_the_span_have_no_bound():
    X = gaussian(10)
    X[:, :, 2] = 0.0
    new = gaussian(4, seed=1)
    inside = new.copy()
    inside[:, :, 2] = 0.0
    assert np.isinf(leverages(X, new)).all()
    assert np.isfinite(leverages(X, inside)).all()
    assert np.isinf(error_bound(leverages(X, new), 0.0)).all()
    assert not error_bound(leverages(X, inside), 0.0).any()


def test_an_input_barely_outside_is_outside():
    X = gaussian(5)
    new = X + 1e-4 * gaussian(5, seed=1)
    assert np.isinf(leverages(X, new)).all()


def test_zero_rows_and_zero_inputs():
    zeros = np.zeros((2, 4, D))
    assert not leverages(zeros, zeros).any()
    assert np.isinf(leverages(zeros, gaussian(2))).all()
    assert not leverages(gaussian(40), zeros).any()


@given(
    seed=st.integers(0, 10_000),
    n_rows=st.sampled_from([2, 9, 17, 18, 25, 60]),
    noise=st.sampled_from([0.0, 0.1, 3.0]),
    excess=st.sampled_from([1e-3, 1.0, 50.0]),
)
def test_the_bound_holds_on_random_pairs(seed, n_rows, noise, excess):
    """With and without the known minimum; new inputs are mixtures of rows, so covered."""
    random = np.random.default_rng(seed)
    features = random.standard_normal((n_rows, P))
    targets = features @ random.standard_normal((P, M))
    targets += noise * random.standard_normal((n_rows, M))
    best = np.linalg.lstsq(features, targets, rcond=None)[0].T
    minimum = mean_square(targets - features @ best.T)
    epsilon = minimum + excess
    moment = features.T @ features / n_rows
    inverse = np.linalg.pinv(moment, rcond=1e-10, hermitian=True)
    new = random.standard_normal((20, n_rows)) @ features
    lever = np.einsum("ip,pq,iq->i", new, inverse, new)
    for trial in range(3):
        directions = random.standard_normal((2, M, P))
        if trial == 2:  # along one input, as far apart as possible
            directions[0] = np.outer(random.standard_normal(M), inverse @ new[0])
            directions[1] = -directions[0]
        pair = [perturbed(best, each, features, targets, epsilon) for each in directions]
        gaps = ((new @ (pair[0] - pair[1]).T) ** 2).sum(1)
        assert (gaps <= error_bound(lever, epsilon) * (1 + 1e-6)).all()
        tight = error_bound(lever, epsilon, minimum * (1 - 1e-12))
        assert (gaps <= tight * (1 + 1e-6)).all()
        to_best = ((new @ (pair[0] - best).T) ** 2).sum(1)
        assert (to_best <= 0.25 * tight * (1 + 1e-6)).all()
        if trial == 2:
            assert gaps[0] == pytest.approx(tight[0], rel=1e-5)
            assert to_best[0] == pytest.approx(0.25 * tight[0], rel=1e-5)


@pytest.mark.parametrize("n_rows", [6, 40])
def test_the_bound_is_attained_by_models_of_sequences(n_rows):
    """Realisable targets: two models on opposite sides of the teacher."""
    X, new = gaussian(n_rows), gaussian(n_rows)[:4] * np.linspace(0.5, 2.0, 4)[:, None, None]
    features, at = reference.feature_matrix(X), reference.feature_matrix(new)
    lever = leverages(X, new)
    teacher = np.random.default_rng(3).standard_normal((M, P))
    inverse = np.linalg.pinv(features.T @ features / n_rows, rcond=1e-12, hermitian=True)
    for i in range(4):
        direction = np.outer([1.0, -2.0], inverse @ at[i])
        pair = [
            perturbed(teacher, sign * direction, features, features @ teacher.T, 0.3)
            for sign in (1.0, -1.0)
        ]
        gap = float((((pair[0] - pair[1]) @ at[i]) ** 2).sum())
        bound = float(error_bound(lever, 0.3)[i])
        assert 0.999 * bound <= gap <= 1.001 * bound


def test_leverage_is_never_above_the_published_form():
    X, new = gaussian(40), gaussian(20, seed=1)
    scale = np.where(np.equal(*np.triu_indices(D)), 1.0, np.sqrt(2.0)).repeat(D)
    features, at = reference.feature_matrix(X) / scale, reference.feature_matrix(new) / scale
    smallest = np.linalg.eigvalsh(features.T @ features / len(X))[0]
    assert (leverages(X, new) <= (at**2).sum(1) / smallest * (1 + 1e-9)).all()


def test_without_the_square_and_the_constant_the_bound_fails():
    """``sqrt(eps / lambda_min) |H|``, squared, is a quarter of what two models can differ by."""
    lever = np.array([2.0])
    features = np.eye(2)  # G = I / 2, so the leverage of the first unit vector is 2
    teacher, epsilon = np.zeros((1, 2)), 0.1
    pair = [
        perturbed(teacher, sign * np.array([[1.0, 0.0]]), features, np.zeros((2, 1)), epsilon)
        for sign in (1.0, -1.0)
    ]
    gap = float((pair[0] - pair[1])[0, 0] ** 2)
    assert gap > epsilon * lever[0]
    assert gap == pytest.approx(float(error_bound(lever, epsilon)[0]), rel=1e-12)


@pytest.mark.parametrize(("epsilon", "minimum"), [(-1.0, 0.0), (1.0, 2.0), (np.nan, 0.0), (1, -1)])
def test_errors_must_be_possible(epsilon, minimum):
    with pytest.raises(ValueError, match="epsilon must be finite"):
        error_bound(np.ones(2), epsilon, minimum)
