"""The Jacobian test against Jacobians written out column by column and their singular values."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from sklearn_mhla import Heads
from sklearn_mhla._backend import NumpyBackend, TorchBackend
from sklearn_mhla._design import Design
from sklearn_mhla._tokens import check_sequences
from sklearn_mhla.identifiability._jacobian import local_identifiability, orthonormal_heads

D, M, H = 3, 2, 2


def gaussian(n_rows, n_tokens=5, d=D, seed=0):
    return np.random.default_rng(seed).standard_normal((n_rows, n_tokens, d))


def design(X, backend=None, **options):
    return Design(check_sequences(X), backend or NumpyBackend(), **options)


def teacher(n_heads=H, n_outputs=M, d=D, seed=2):
    return Heads(*reference.make_heads(n_heads, n_outputs, d, seed))


def columns(heads, output):
    """The Jacobian of ``output(V, Q)``, which is bilinear: no finite differences."""
    found = []
    for index in np.ndindex(heads.value.shape):
        unit = np.zeros_like(heads.value)
        unit[index] = 1.0
        found.append(output(unit, heads.key_query).ravel())
    for index in np.ndindex(heads.key_query.shape):
        unit = np.zeros_like(heads.key_query)
        unit[index] = 1.0
        found.append(output(heads.value, unit).ravel())
    return np.stack(found, axis=1)


def ranks(heads, X, **options):
    """Ranks of both Jacobians by their singular values, and their gaps."""
    features = reference.feature_matrix(X, **options)
    d = heads.value.shape[2]
    of_function = columns(heads, reference.function_coefficients)
    # Isometric features meet p / scale, from the published coefficients.
    scale = np.where(np.equal(*np.triu_indices(d)), 1.0, np.sqrt(2.0)).repeat(d)
    blocks = of_function.reshape(-1, len(scale), of_function.shape[1]) / scale[:, None]
    of_data = np.concatenate([features @ block for block in blocks])
    return tuple(np.linalg.matrix_rank(part, rtol=1e-10) for part in (of_data, of_function))


DATA = {
    "one row": gaussian(1),
    "few rows": gaussian(6),
    "one row short": gaussian(8),
    "enough rows": gaussian(14),
    "full rank": gaussian(40),
    "one token": gaussian(30, n_tokens=1),
    "duplicated rows": np.repeat(gaussian(4), 5, axis=0),
    "constant sequences": np.ones((8, 4, D)),
    "low-rank tokens": gaussian(30, d=2) @ np.random.default_rng(1).standard_normal((2, D)),
    "one-hot tokens": np.eye(D)[np.random.default_rng(3).integers(0, D, (40, 4))],
    "a zero coordinate": gaussian(30) * np.array([1.0, 0.0, 1.0]),
    "zero queries": gaussian(20) * np.array([1.0, 1.0, 1.0, 1.0, 0.0])[:, None],
    "zeros": np.zeros((5, 4, D)),
    "ragged": reference.make_ragged([1, 4, 2, 6, 3, 3, 5], D),
}


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize(("n_heads", "n_outputs"), [(1, 1), (1, 2), (2, 2), (2, 1), (3, 4)])
def test_ranks_are_those_of_explicit_jacobians(name, n_heads, n_outputs):
    X, heads = DATA[name], teacher(n_heads, n_outputs)
    found = local_identifiability(design(X), heads, random_state=0)
    expected = ranks(heads, X)
    assert (found.rank_data, found.rank_function) == expected
    assert bool(found) == (expected[0] == expected[1])
    assert found.is_regular
    assert not found.generic
    assert found.n_parameters == n_heads * (n_outputs * D + D * D)
    generic = local_identifiability(design(X), n_heads=n_heads, n_outputs=n_outputs, random_state=0)
    assert (generic.rank_data, generic.rank_function) == expected  # this teacher is generic
    assert generic.generic


@pytest.mark.parametrize("state", ["sum", "mean"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("X", [gaussian(4, 2), reference.make_ragged([1, 4, 2], D)])
def test_outputs_at_every_position(X, causal, state):
    options = {"output": "sequence", "causal": causal, "state": state}
    found = local_identifiability(design(X, **options), teacher(), random_state=0)
    assert (found.rank_data, found.rank_function) == ranks(teacher(), X, **options)


@pytest.mark.parametrize("n_rows", [6, 8, 9])
def test_null_directions_change_the_function_and_no_prediction(n_rows):
    X = gaussian(n_rows) * np.array([1.0, 1e3, 1e-2])
    found = local_identifiability(design(X), teacher(), random_state=0)
    assert len(found.directions.value) == found.rank_function - found.rank_data > 0
    at = found.heads
    elsewhere = gaussian(20, seed=5) * np.array([1.0, 1e3, 1e-2])
    expected = reference.predict_heads(*teacher(), elsewhere)
    assert reference.relative_error(reference.predict_heads(*at, elsewhere), expected) < 1e-12
    for value, key_query in zip(*found.directions, strict=True):
        moved = (np.concatenate([value, at.value]), np.concatenate([at.key_query, key_query]))
        change = reference.predict_heads(*moved, X)
        parts = [reference.predict_heads(value, at.key_query, X)]
        parts.append(reference.predict_heads(at.value, key_query, X))
        size = max(np.linalg.norm(part) for part in parts)
        assert np.linalg.norm(change) < 1e-11 * size
        assert np.linalg.norm(reference.predict_heads(*moved, elsewhere)) > 1e-3 * size


@pytest.mark.parametrize("n_rows", [14, 15])
def test_one_head_switches_at_fifteen_rows(n_rows):
    """With d = 6 and m = 4 there are 59 unknowns, and 4 outputs per row."""
    X = gaussian(n_rows, 64, 6)
    found = local_identifiability(design(X), n_heads=1, n_outputs=4, random_state=0)
    assert found.rank_function == 4 * 6 + 6 * 6 - 1
    assert found.rank_data == min(4 * n_rows, 59)
    assert bool(found) == (n_rows == 15)
    assert np.linalg.matrix_rank(reference.feature_matrix(X)) == n_rows


def test_four_heads_need_far_fewer_rows_than_features():
    found = local_identifiability(design(gaussian(50, 64, 6)), n_heads=4, n_outputs=6)
    assert found
    assert found.rank_function == 4 * (6 * 6 + 36) - 4 * 4


@pytest.mark.parametrize("n_rows", [5, 17, 18])
def test_without_a_limit_on_heads_the_test_is_the_rank_of_the_features(n_rows):
    X = gaussian(n_rows)
    found = local_identifiability(design(X), n_heads=M * D, n_outputs=M, random_state=0)
    assert found.rank_function == M * 18
    assert found.rank_data == M * np.linalg.matrix_rank(reference.feature_matrix(X))


@pytest.mark.parametrize("scale", [1e-90, 1e-4, 1e4, 1e90])
@pytest.mark.parametrize("n_rows", [8, 9, 14])
def test_units_of_the_tokens_change_nothing(n_rows, scale):
    X = gaussian(n_rows)
    before = local_identifiability(design(X), teacher(), random_state=0)
    heads = Heads(teacher().value, teacher().key_query / scale**2)
    after = local_identifiability(design(X * scale), heads, random_state=0)
    assert (after.rank_data, after.rank_function) == (before.rank_data, before.rank_function)


def test_units_of_each_coordinate_change_nothing():
    """Without standardised units the smallest singular value is lost in rounding."""
    units = np.array([1e-5, 1.0, 1e6])
    before = local_identifiability(design(gaussian(14)), n_heads=2, n_outputs=2, random_state=0)
    X = gaussian(14) * units
    after = local_identifiability(design(X), n_heads=2, n_outputs=2, random_state=0)
    assert before
    assert after
    assert after.singular_value > 1e-2 * before.singular_value


@given(st.integers(0, 1000), st.integers(4, 16))
def test_mixing_heads_changes_nothing(seed, n_rows):
    random = np.random.default_rng(seed)
    mixing = random.standard_normal((H, H)) + 2.0 * np.eye(H)
    value = np.einsum("gh,haj->gaj", np.linalg.inv(mixing).T, teacher().value)
    key_query = np.einsum("gh,hkl->gkl", mixing, teacher().key_query)
    X = gaussian(n_rows, seed=seed)
    before = local_identifiability(design(X), teacher(), random_state=0)
    after = local_identifiability(design(X), Heads(value, key_query), random_state=0)
    assert (after.rank_data, after.rank_function) == (before.rank_data, before.rank_function)
    assert after.singular_value == pytest.approx(before.singular_value, rel=1e-4, abs=1e-9)


@given(st.integers(0, 1000))
def test_a_small_singular_value_is_no_zero(seed):
    """A direction seen with 1e-7 of the largest: squares of it are lost in rounding."""
    X = gaussian(14, seed=seed)
    X[7:] = X[:7] + 1e-6 * X[7:]
    full = local_identifiability(design(X), teacher(), random_state=0)
    assert full
    assert full.singular_value < 1e-4
    X[7:] = X[:7]
    assert not local_identifiability(design(X), teacher(), random_state=0)


def test_equal_heads_are_a_singular_point():
    """Two equal heads are one: the functions near it are no manifold of full dimension."""
    one = teacher(1)
    two = Heads(np.repeat(one.value, 2, axis=0), np.repeat(one.key_query, 2, axis=0))
    found = local_identifiability(design(gaussian(60)), two, random_state=0)
    assert found.rank_function < found.rank_generic
    assert found.rank_data == found.rank_function
    assert not found.is_regular
    assert not found
    assert "singular point" in repr(found)


def test_single_precision():
    X = gaussian(14).astype(np.float32)
    assert local_identifiability(design(X), teacher(), random_state=0)


def test_torch():
    pytest.importorskip("torch")
    for n_rows in (8, 14):
        numpy = local_identifiability(design(gaussian(n_rows)), teacher(), random_state=0)
        torch = local_identifiability(
            design(gaussian(n_rows), TorchBackend("cpu")), teacher(), random_state=0
        )
        assert (torch.rank_data, torch.rank_function) == (numpy.rank_data, numpy.rank_function)
        assert torch.singular_value == pytest.approx(numpy.singular_value, abs=1e-10)


def test_orthonormal_heads_keep_the_tensor():
    heads = teacher(5, 1)  # more heads than m d = 3
    bases, sizes = orthonormal_heads(heads)
    tensor = np.einsum("haj,hkl->ajkl", *heads)
    assert len(sizes) == 3
    again = np.einsum("h,haj,hkl->ajkl", sizes, *bases)
    assert reference.relative_error(again, tensor) < 1e-13
    for part in bases:
        flat = part.reshape(3, -1)
        assert np.abs(flat @ flat.T - np.eye(3)).max() < 1e-13


def test_representations():
    generic = local_identifiability(design(gaussian(14)), n_heads=2, n_outputs=2, random_state=0)
    assert "almost all models of 2 heads: locally identifiable" in repr(generic)
    assert "not locally" in repr(local_identifiability(design(gaussian(3)), teacher()))


def test_numbers_are_needed_without_heads():
    with pytest.raises(ValueError, match="n_outputs=None"):
        local_identifiability(design(gaussian(3)), n_heads=1)
