"""Witnesses, each checked with the model written out entry by entry."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from sklearn.utils import check_random_state

from sklearn_mhla import Heads, function_distance
from sklearn_mhla._backend import NumpyBackend, TorchBackend
from sklearn_mhla._design import Design
from sklearn_mhla._tokens import check_sequences
from sklearn_mhla.identifiability._jacobian import LocalIdentifiability, local_identifiability
from sklearn_mhla.identifiability._standardized import StandardizedDesign
from sklearn_mhla.identifiability._witness import _Baseline, class_witness, find_witness

D, M = 3, 2


def gaussian(n_rows, n_tokens=5, d=D, seed=0):
    return np.random.default_rng(seed).standard_normal((n_rows, n_tokens, d))


def design(X, backend=None, **options):
    return Design(check_sequences(X), backend or NumpyBackend(), **options)


def teacher(n_heads=1, n_outputs=M, d=D, seed=2):
    return Heads(*reference.make_heads(n_heads, n_outputs, d, seed))


def check(witness, X, n_heads, **options):
    """What a witness claims, recomputed."""
    assert witness
    first, second = (
        reference.predict_heads(*model, X, **options) for model in (witness.heads, witness.other)
    )
    assert np.linalg.norm(first - second) <= 1e-9 * np.linalg.norm(first)
    for model in (witness.heads, witness.other):
        assert len(model.value) <= n_heads
    state = options.get("state", "sum")
    outputs = np.concatenate(
        [
            reference.predict_heads(*model, witness.X, state=state)
            for model in (witness.heads, witness.other)
        ]
    )
    assert reference.relative_error(witness.outputs, outputs) < 1e-10
    assert np.linalg.norm(outputs[0] - outputs[1]) >= 1e-3 * np.linalg.norm(outputs[0])
    assert witness.disagreement <= 1e-9
    assert witness.distance >= 1e-3


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("n_heads", [1, 2])
def test_one_row_short(n_heads, seed):
    """The published setting d = 6, m = 4: 59 unknowns with one head, 116 with two."""
    X = gaussian(14 * n_heads, 20, 6, seed)
    heads = teacher(n_heads, 4, 6, seed)
    witness = find_witness(design(X), heads, n_heads, random_state=seed)
    check(witness, X, n_heads)
    assert witness.origin == "null direction"
    assert function_distance(witness.heads, heads) < 1e-10
    assert witness.loss == 0.0
    assert "null direction" in repr(witness)


@pytest.mark.parametrize(("n_heads", "n_rows"), [(1, 15), (1, 30), (2, 32)])
def test_none_where_the_model_is_identifiable(n_heads, n_rows):
    X = gaussian(n_rows, 20, 6)
    found = find_witness(
        design(X), teacher(n_heads, 4, 6), n_heads, n_starts=4, max_iter=50, random_state=0
    )
    assert not found
    assert found.local
    assert found.n_starts == 4
    assert 0 < found.n_iter <= 200
    assert found.largest_distance < 1e-6
    assert "No witness in 4 runs" in repr(found)
    assert "locally identifiable" in repr(found)


def test_the_same_function_is_found_again_where_rows_abound():
    found = find_witness(design(gaussian(60)), teacher(2), 2, n_starts=20, random_state=0)
    assert not found
    assert found.n_agreeing > 0


def test_locally_identifiable_is_not_identifiable():
    """As many outputs as unknowns: isolated solutions, of which there are several."""
    X, heads = gaussian(29, 16, 6), teacher(2, 4, 6)
    for seed in range(4):
        witness = find_witness(design(X), heads, 2, n_starts=20, random_state=seed)
        if witness:
            break
    check(witness, X, 2)
    assert witness.origin == "restart"


@pytest.mark.parametrize("n_heads", [None, 6, 9])
@pytest.mark.parametrize("n_rows", [1, 5, 17, 18, 40])
def test_without_a_limit_on_heads_a_null_vector_decides(n_rows, n_heads):
    X = gaussian(n_rows)
    found = find_witness(design(X), teacher(4), n_heads, random_state=0)
    assert bool(found) == (np.linalg.matrix_rank(reference.feature_matrix(X)) < 18)
    if found:
        check(found, X, 6)
        assert found.origin == "null vector"
    else:
        assert "full rank" in repr(found)


def test_rank_deficient_with_many_rows():
    X = np.eye(D)[np.random.default_rng(0).integers(0, D, (60, 4))]
    check(find_witness(design(X), teacher(2), None, random_state=0), X, 6)
    check(find_witness(design(X), teacher(1), 1, random_state=0), X, 1)


@pytest.mark.parametrize("n_heads", [1, None])
def test_targets_of_a_teacher(n_heads):
    X = gaussian(4)
    targets = reference.predict_heads(*teacher(), X)
    witness = find_witness(design(X), targets, n_heads, random_state=0)
    check(witness, X, 6 if n_heads is None else n_heads)
    first = reference.predict_heads(*witness.heads, X)
    assert reference.relative_error(first, targets) < 1e-8
    assert witness.loss < 1e-16


def test_targets_that_no_model_fits():
    """The loss is reported: the pair are minimisers as far as it is the least."""
    X = np.repeat(gaussian(3), 3, axis=0)
    targets = np.random.default_rng(1).standard_normal((9, M))
    for n_heads in (1, None):
        witness = find_witness(design(X), targets, n_heads, random_state=0)
        check(witness, X, 6 if n_heads is None else n_heads)
        residual = reference.predict_heads(*witness.other, X) - targets
        assert witness.loss == pytest.approx((residual**2).sum() / (targets**2).sum(), rel=1e-8)
        assert witness.loss > 0.1


@pytest.mark.parametrize("state", ["sum", "mean"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("X", [gaussian(2, 2), reference.make_ragged([2, 1, 1], D)])
@pytest.mark.parametrize("n_heads", [1, None])
def test_outputs_at_every_position(n_heads, X, causal, state):
    options = {"output": "sequence", "causal": causal, "state": state}
    witness = find_witness(design(X, **options), teacher(), n_heads, random_state=0)
    check(witness, X, 6 if n_heads is None else n_heads, **options)


def test_single_tokens():
    """Functions that agree on all single tokens: the input that tells them apart has two."""
    X = gaussian(200, n_tokens=1)
    witness = find_witness(design(X), teacher(1), 1, random_state=0)
    if witness:  # one head is determined by its values on single tokens, up to a swap
        check(witness, X, 1)
    witness = find_witness(design(X), teacher(3), 3, random_state=0)
    check(witness, X, 3)
    assert witness.X.shape[1] == 2


def test_zero_inputs():
    """No row depends on the model."""
    X = np.zeros((3, 4, D))
    for n_heads in (1, None):
        assert find_witness(design(X), teacher(), n_heads, random_state=0)


@pytest.mark.parametrize("scale", [1e-80, 1e-4, 1e4, 1e80])
def test_units_of_the_tokens(scale):
    X = gaussian(4) * scale
    for n_heads in (1, None):
        targets = 1e3 * reference.predict_heads(*teacher(), gaussian(4))
        witness = find_witness(design(X), targets, n_heads, random_state=0)
        assert witness
        assert 1e-2 * scale < np.abs(witness.X).max() < 1e2 * scale
        assert find_witness(design(gaussian(4)), targets * scale, n_heads, random_state=0)


def test_units_of_each_coordinate():
    X = gaussian(4) * np.array([1e-4, 1.0, 1e4])
    assert find_witness(design(X), teacher(), 1, random_state=0)
    enough = gaussian(12) * np.array([1e-4, 1.0, 1e4])
    assert not find_witness(design(enough), teacher(), 1, n_starts=3, random_state=0)


def test_a_teacher_with_fewer_heads_than_allowed():
    X = gaussian(8)
    assert not find_witness(design(gaussian(14)), teacher(1), 1, n_starts=2, random_state=0)
    check(find_witness(design(X), teacher(1), 2, random_state=0), X, 2)


def test_models_that_disagree_or_are_equal_are_no_witness():
    """The verification, given candidates that are wrong."""
    standard = StandardizedDesign(design(gaussian(40)))
    first = teacher(2)
    baseline = _Baseline.of_teacher(standard, first)
    random = check_random_state(0)
    scaled = Heads(-2.0 * baseline.first.value, -0.5 * baseline.first.key_query)
    comparison = baseline.compare(scaled)
    assert comparison.disagreement < 1e-14
    assert comparison.distance < 1e-14
    assert baseline.witness(scaled, comparison, "restart", random) is None
    other = Heads(1.0001 * baseline.first.value, baseline.first.key_query)
    comparison = baseline.compare(other)
    assert comparison.disagreement == pytest.approx(1e-4, rel=1e-3)
    assert baseline.witness(other, comparison, "restart", random) is None


@pytest.mark.parametrize("n_outputs", [1, 2])
@pytest.mark.parametrize("n_heads", [2, 3])
@pytest.mark.parametrize("n_rows", [1, 12, 17, 18, 30])
def test_half_as_many_heads_as_dimensions_need_full_rank(n_rows, n_heads, n_outputs):
    """One row short of it two models agree, where almost every teacher is locally identifiable."""
    X = gaussian(n_rows)
    found = class_witness(design(X), n_heads, n_outputs, random_state=0)
    assert bool(found) == (n_rows < 18)
    if found:
        check(found, X, 2)
        assert found.heads.value.shape[1] == n_outputs
        if n_rows == 17 and n_outputs == 2 and n_heads == 2:
            assert local_identifiability(design(X), n_heads=2, n_outputs=2, random_state=0)
    else:
        assert "full rank" in repr(found)


def test_fewer_heads_are_no_difference_of_any_two():
    with pytest.raises(ValueError, match=r"at least d / 2 = 1\.5"):
        class_witness(design(gaussian(3)), 1)


def test_reproducible():
    X = gaussian(4)
    one, two = (find_witness(design(X), teacher(), 1, random_state=3) for _ in range(2))
    np.testing.assert_array_equal(one.other.value, two.other.value)
    np.testing.assert_array_equal(one.X, two.X)


def test_torch():
    pytest.importorskip("torch")
    X = gaussian(4)
    for n_heads in (1, None):
        witness = find_witness(design(X, TorchBackend("cpu")), teacher(), n_heads, random_state=0)
        check(witness, X, 6 if n_heads is None else n_heads)


def test_verbose(capsys):
    find_witness(design(gaussian(4)), teacher(), 1, random_state=0, verbose=1)
    assert "[find_witness] null direction" in capsys.readouterr().out


def test_the_report_carries_the_jacobian_test():
    X = gaussian(14) * 1e3
    found = find_witness(design(X), teacher(), 1, n_starts=2, random_state=0)
    assert isinstance(found.local, LocalIdentifiability)
    expected = reference.predict_heads(*teacher(), X)
    again = reference.predict_heads(*found.local.heads, X)
    assert reference.relative_error(again, expected) < 1e-12


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (np.ones(4), "a row for each row"),
        (np.ones((3, M)), "a row for each row"),
        (np.full((4, M), np.nan), "finite"),
        (np.zeros((4, M)), "zero on every row"),
        (teacher(d=4), "tokens of width 3"),
        (teacher(2), "has 2 heads"),
    ],
)
def test_impossible_targets(targets, message):
    with pytest.raises(ValueError, match=message):
        find_witness(design(gaussian(4)), targets, 1)
