"""Coefficients and heads: two descriptions of one function."""

from __future__ import annotations

import numpy as np
import pytest
import reference

from sklearn_mhla import Heads, MHLARegressor, function_distance
from sklearn_mhla._heads import coef_to_tensor, heads_to_coef, svd_heads

# Products and sums of a few dozen numbers of order one.
ROUNDING = 1e-13
SHAPES = [  # n_heads, n_outputs, token_dim
    (1, 1, 1),
    (1, 5, 1),
    (1, 1, 4),
    (2, 3, 4),
    (3, 4, 2),
    (30, 2, 3),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_coefficients_predict_what_the_heads_predict(shape):
    heads = Heads(*reference.make_heads(*shape))
    coef = heads.coefficients()
    assert np.array_equal(coef, heads_to_coef(heads.value, heads.key_query))
    for sequence in reference.make_sequences(0.0, 4, 5, shape[2]):
        ((state, query),) = reference.states_and_queries(sequence)
        expected = reference.heads_output(heads.value, heads.key_query, state, query)
        predicted = coef @ reference.isometric_features(state, query)
        assert reference.relative_error(predicted, expected) < ROUNDING


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_coefficients_are_the_symmetric_part_in_the_isometric_basis(shape):
    value, key_query = reference.make_heads(*shape)
    j, k = np.triu_indices(shape[2])
    scale = np.repeat(np.where(j == k, 1.0, np.sqrt(0.5)), shape[2])
    expected = reference.function_coefficients(value, key_query) * scale
    assert reference.relative_error(heads_to_coef(value, key_query), expected) < ROUNDING


@pytest.mark.parametrize("shape", SHAPES)
def test_tensor_is_the_symmetrised_sum_of_heads(shape):
    value, key_query = reference.make_heads(*shape)
    n_heads, n_outputs, d = shape
    expected = np.zeros((n_outputs, d, d, d))
    for h in range(n_heads):
        for a, j, k, p in np.ndindex(n_outputs, d, d, d):
            expected[a, j, k, p] += value[h, a, j] * key_query[h, k, p] / 2
            expected[a, j, k, p] += value[h, a, k] * key_query[h, j, p] / 2
    tensor = coef_to_tensor(heads_to_coef(value, key_query), d)
    assert reference.relative_error(tensor, expected) < ROUNDING


@pytest.mark.parametrize(("n_outputs", "token_dim"), [(1, 1), (5, 1), (1, 4), (3, 4), (7, 2)])
@pytest.mark.parametrize("scale", [1.0, 1e-120, 1e120])
def test_coefficients_to_heads_and_back(n_outputs, token_dim, scale):
    p = token_dim**2 * (token_dim + 1) // 2
    coef = scale * np.random.default_rng(0).standard_normal((n_outputs, p))
    heads = svd_heads(coef, token_dim)
    n_heads = len(heads.value)
    assert 1 <= n_heads <= min(n_outputs * token_dim, token_dim**2)
    assert heads.value.shape == (n_heads, n_outputs, token_dim)
    assert heads.key_query.shape == (n_heads, token_dim, token_dim)
    assert reference.relative_error(heads.coefficients() / scale, coef / scale) < ROUNDING


def test_heads_below_rounding_level_are_left_out():
    """A rank-one symmetric tensor has one head; the SVD's other values are rounding."""
    v, q = np.array([1.0, -2.0, 0.5]), np.array([0.3, 1.0, -1.0])
    coef = heads_to_coef(v.reshape(1, 1, 3), np.outer(v, q)[None])
    assert len(svd_heads(coef, 3).value) == 1


def test_zero_function_has_no_heads():
    heads = svd_heads(np.zeros((2, 18)), 3)
    assert heads.value.shape == (0, 2, 3)
    assert heads.key_query.shape == (0, 3, 3)
    assert not heads.coefficients().any()
    assert heads.coefficients().shape == (2, 18)


@pytest.mark.parametrize("method", ["primal", "dual"])
@pytest.mark.parametrize("state", ["sum", "mean"])
@pytest.mark.parametrize(("n_outputs", "token_dim"), [(1, 1), (1, 3), (4, 3), (12, 2)])
@pytest.mark.parametrize("scale", [1.0, 1e40, 1e-40])
def test_fitted_heads_reproduce_predict(method, state, n_outputs, token_dim, scale):
    X = scale * reference.make_sequences(0.2, 40, 5, token_dim)
    y = np.random.default_rng(0).standard_normal((40, n_outputs))
    model = MHLARegressor(method=method, state=state, fit_intercept=True).fit(X, y)
    assert len(model.value_) == len(model.key_query_) == model.n_heads_
    assert model.n_heads_ <= min(n_outputs * token_dim, token_dim**2)
    outputs = reference.predict_heads(model.value_, model.key_query_, X, state=state)
    error = reference.relative_error(outputs + model.intercept_, model.predict(X))
    assert error < 1e-10  # the promise; measured near 1e-15


def test_heads_of_a_refit_are_those_of_the_new_fit():
    X = reference.make_sequences(0.2, 40)
    random = np.random.default_rng(0)
    model = MHLARegressor().fit(X, random.standard_normal(40))
    first = model.value_
    model.fit(X, random.standard_normal(40))
    assert not np.array_equal(model.value_, first)
    assert function_distance(model, (model.value_, model.key_query_)) < 1e-12


@pytest.mark.parametrize("attribute", ["value_", "key_query_", "n_heads_"])
def test_heads_need_a_fit(attribute):
    assert not hasattr(MHLARegressor(), attribute)
    with pytest.raises(AttributeError, match=f"no {attribute}; call fit"):
        getattr(MHLARegressor(), attribute)


@pytest.mark.parametrize("shape", SHAPES)
def test_function_distance_is_that_of_the_definition(shape):
    one, two = reference.make_heads(*shape, seed=0), reference.make_heads(*shape, seed=1)
    expected = reference.function_distance(one, two)
    assert expected > 0.1
    assert function_distance(one, two) == pytest.approx(expected, rel=ROUNDING)
    assert function_distance(Heads(*two), Heads(*one)) == pytest.approx(expected, rel=ROUNDING)
    assert function_distance(one, one) == 0.0


def test_function_distance_between_different_numbers_of_heads():
    value, key_query = reference.make_heads(3, 2, 3)
    twice = (np.concatenate([value, value]), np.concatenate([key_query, key_query]) / 2)
    nothing = (np.zeros((0, 2, 3)), np.zeros((0, 3, 3)))
    size = float(np.linalg.norm(reference.function_coefficients(value, key_query)))
    assert function_distance((value, key_query), twice) < ROUNDING * size
    assert function_distance((value, key_query), nothing) == pytest.approx(size, rel=ROUNDING)


def test_function_distance_does_not_see_symmetries_of_the_heads():
    """Mixing heads by an invertible matrix, and what is antisymmetric in (j, k), change nothing."""
    value, key_query = reference.make_heads(2, 2, 3)
    size = float(np.linalg.norm(reference.function_coefficients(value, key_query)))
    mix = np.array([[2.0, 1.0], [-1.0, 0.5]])
    mixed = (
        np.einsum("gh,haj->gaj", mix, value),
        np.einsum("hg,hkl->gkl", np.linalg.inv(mix), key_query),
    )
    assert function_distance((value, key_query), mixed) < 10 * ROUNDING * size
    # W[a, j, k, l] = e_j e'_k - e'_j e_k is invisible: S is symmetric.
    extra_value = np.zeros((2, 2, 3))
    extra_key_query = np.zeros((2, 3, 3))
    extra_value[0, :, 0], extra_key_query[0, 1] = 1.0, 1.0
    extra_value[1, :, 1], extra_key_query[1, 0] = -1.0, 1.0
    shifted = (np.concatenate([value, extra_value]), np.concatenate([key_query, extra_key_query]))
    assert function_distance((value, key_query), shifted) < ROUNDING * size


@pytest.mark.parametrize("method", ["primal", "dual"])
def test_function_distance_of_a_fitted_model(method):
    value, key_query = reference.make_heads(2, 3, 3)
    X = reference.make_sequences(0.0, 60)
    model = MHLARegressor(method=method).fit(X, reference.predict_heads(value, key_query, X))
    size = float(np.linalg.norm(reference.function_coefficients(value, key_query)))
    assert function_distance(model, (value, key_query)) < 1e-10 * size
    other = reference.make_heads(1, 3, 3, seed=9)
    expected = reference.function_distance((value, key_query), other)
    assert function_distance(other, model) == pytest.approx(expected, rel=1e-10)
    assert function_distance(model, model) == 0.0


def test_function_distance_names_models_that_cannot_be_compared():
    one = reference.make_heads(1, 2, 3)
    for other in (reference.make_heads(1, 1, 3), reference.make_heads(1, 2, 4)):
        with pytest.raises(ValueError, match="cannot be compared"):
            function_distance(one, other)


@pytest.mark.parametrize(
    "wrong",
    [
        MHLARegressor(),
        None,
        3.0,
        "ab",
        np.zeros((1, 2, 3)),
        (np.zeros((1, 2, 3)),),
        (np.zeros((1, 2, 3)), np.zeros((2, 3, 3))),
        (np.zeros((1, 2, 3)), np.zeros((1, 2, 3))),
        (np.zeros((2, 3)), np.zeros((2, 3, 3))),
        (1.0, 2.0),
        (np.zeros((1, 2, 3)), np.zeros((1, 3, 3)), np.zeros(3)),
    ],
)
def test_function_distance_names_what_is_not_a_model(wrong):
    right = reference.make_heads(1, 2, 3)
    with pytest.raises(ValueError, match="model_a must"):
        function_distance(wrong, right)
    with pytest.raises(ValueError, match="model_b must"):
        function_distance(right, wrong)
