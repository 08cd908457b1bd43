"""The fewest heads that compute a function, from its coefficients."""

from __future__ import annotations

import numpy as np
import pytest
import reference

from sklearn_mhla import Heads, MHLARegressor, function_distance, minimal_heads
from sklearn_mhla._heads import coef_to_tensor, svd_heads
from sklearn_mhla._minimal_heads import head_lower_bound, least_nuclear_norm
from sklearn_mhla.datasets import make_linear_attention

GRID = [(d, m, h) for d in (4, 6, 8) for m in (1, 3, d) for h in (1, 2, 4)]


def unfolded(heads):
    """``sum_h vec(V_h) vec(Q_h)^T``, which mixing of the heads leaves as it is."""
    return np.einsum("haj,hkl->ajkl", heads.value, heads.key_query)


@pytest.mark.parametrize(("d", "n_outputs", "n_heads"), GRID)
def test_heads_of_a_teacher_come_back_from_a_fit(d, n_outputs, n_heads):
    for seed in range(5):
        X, y, teacher = make_linear_attention(
            2 * d * d * (d + 1), 12, d, n_outputs, n_heads, return_teacher=True, random_state=seed
        )
        model = MHLARegressor().fit(X, y)
        found = Heads(model.value_, model.key_query_)
        size = np.linalg.norm(teacher.coefficients())
        assert len(found.value) <= n_heads
        if n_outputs == d:
            assert len(found.value) == n_heads
        assert function_distance(found, teacher) <= 1e-8 * size
        assert function_distance(found, model) <= 1e-8 * size
        if n_outputs == d and n_heads <= d / 2:  # unique up to mixing
            assert reference.relative_error(unfolded(found), unfolded(teacher)) < 1e-8


@pytest.mark.parametrize(("d", "n_outputs", "n_heads"), [(4, 4, 4), (6, 6, 6)])
def test_as_many_heads_as_the_tokens_are_wide(d, n_outputs, n_heads):
    # The nuclear norm alone ends above the true number here; the search goes on from there.
    teacher = Heads(*reference.make_heads(n_heads, n_outputs, d))
    found = minimal_heads(teacher.coefficients(), d)
    assert len(found.value) == n_heads
    assert function_distance(found, teacher) <= 1e-9 * np.linalg.norm(teacher.coefficients())


@pytest.mark.parametrize("n_outputs", [1, 2, 4])
def test_a_generic_function_keeps_its_value_and_never_needs_more_heads_than_the_svd(n_outputs):
    coef = np.random.default_rng(0).standard_normal((n_outputs, 40))
    found = minimal_heads(coef, 4)
    assert head_lower_bound(coef_to_tensor(coef, 4)) <= len(found.value)
    assert len(found.value) <= len(svd_heads(coef, 4).value)
    assert reference.relative_error(found.coefficients(), coef) < 1e-9


@pytest.mark.parametrize("scale", [1e-120, 1.0, 1e120])
def test_scale_of_the_coefficients_does_not_matter(scale):
    teacher = Heads(*reference.make_heads(2, 3, 4))
    found = minimal_heads(teacher.coefficients() * scale, 4)
    assert len(found.value) == 2
    assert reference.relative_error(found.coefficients() / scale, teacher.coefficients()) < 1e-9


def test_zero_function_has_no_heads():
    found = minimal_heads(np.zeros((3, 40)), 4)
    assert found.value.shape == (0, 3, 4)
    assert found.key_query.shape == (0, 4, 4)


def test_one_coordinate():
    found = minimal_heads(np.array([[2.0], [-3.0]]), 1)
    assert len(found.value) == 1
    assert np.allclose(found.coefficients(), [[2.0], [-3.0]], rtol=1e-14, atol=0.0)


def test_wrong_width_is_named():
    with pytest.raises(ValueError, match=r"coef must have shape \(m, 40\) for token_dim=4"):
        minimal_heads(np.zeros((1, 39)), 4)


@pytest.mark.parametrize("n_heads", [1, 2, 3, 5])
def test_lower_bound_never_exceeds_a_known_model(n_heads):
    for seed in range(10):
        teacher = Heads(*reference.make_heads(n_heads, 2, 5, seed=seed))
        tensor = coef_to_tensor(teacher.coefficients(), 5)
        bound = head_lower_bound(tensor, seed)
        assert bound <= n_heads
        if n_heads <= 2:
            assert bound == n_heads


def test_least_nuclear_norm_keeps_the_function_and_is_optimal():
    tensor = coef_to_tensor(np.random.default_rng(1).standard_normal((2, 18)), 3)
    solution = least_nuclear_norm(tensor, max_iter=20_000)
    assert np.allclose(0.5 * (solution + solution.swapaxes(1, 2)), tensor, rtol=0, atol=1e-14)
    # First-order optimality: moving along antisymmetric tensors never lowers the norm.
    value = np.linalg.norm(solution.reshape(6, 9), "nuc")
    random = np.random.default_rng(2)
    for _ in range(50):
        direction = random.standard_normal(tensor.shape)
        direction = direction - direction.swapaxes(1, 2)
        moved = solution + 1e-4 * direction / np.linalg.norm(direction)
        assert np.linalg.norm(moved.reshape(6, 9), "nuc") >= value - 1e-12
    assert value <= np.linalg.norm(tensor.reshape(6, 9), "nuc")


def test_published_decomposition_on_request():
    X, y = make_linear_attention(200, 8, 4, 4, 1, random_state=0)
    minimal = MHLARegressor().fit(X, y)
    published = MHLARegressor(heads="svd").fit(X, y)
    assert minimal.n_heads_ == 1
    assert published.n_heads_ > 1
    assert function_distance(minimal, published) == 0.0
    assert function_distance((minimal.value_, minimal.key_query_), published) < 1e-9
