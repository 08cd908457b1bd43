"""The implicit design matrix: every block and both products against explicit features."""

from __future__ import annotations

import numpy as np
import pytest
import reference

from sklearn_mhla import _design
from sklearn_mhla._backend import NumpyBackend
from sklearn_mhla._design import Design
from sklearn_mhla._features import cubic_features
from sklearn_mhla._tokens import check_sequences

BACKEND = NumpyBackend()
# Sums of at most a few hundred numbers of order one.
ROUNDING = 1e-13

OUTPUTS = [
    pytest.param({"output": "last", "state": "sum"}, id="last-sum"),
    pytest.param({"output": "last", "state": "mean"}, id="last-mean"),
    pytest.param({"output": "sequence", "causal": True, "state": "sum"}, id="causal-sum"),
    pytest.param({"output": "sequence", "causal": True, "state": "mean"}, id="causal-mean"),
    pytest.param({"output": "sequence", "causal": False, "state": "sum"}, id="shared-sum"),
    pytest.param({"output": "sequence", "causal": False, "state": "mean"}, id="shared-mean"),
]

INPUTS = {
    "one row of one token": lambda: reference.make_sequences(0.0, 1, 1, 3),
    "one row": lambda: reference.make_sequences(0.0, 1, 6, 3),
    "one token": lambda: reference.make_sequences(0.0, 8, 1, 3),
    "width one": lambda: reference.make_sequences(0.0, 8, 4, 1),
    "array": lambda: reference.make_sequences(0.5, 12, 5, 4),
    "float32": lambda: reference.make_sequences(0.5, 12, 5, 3).astype(np.float32),
    "integers": lambda: np.random.default_rng(0).integers(-4, 5, (9, 4, 3)),
    "zeros": lambda: np.zeros((5, 4, 3)),
    "one-hot": lambda: np.eye(5)[np.random.default_rng(0).integers(0, 5, (9, 4))],
    "ragged one-hot": lambda: [np.eye(5)[[0]], np.eye(5)[[1, 3, 3]], np.eye(5)[[2, 3]]],
    "not contiguous": lambda: reference.make_sequences(0.5, 24, 10, 3)[::2, ::-2],
    "list of equal lengths": lambda: list(reference.make_sequences(0.5, 7, 5, 3)),
    "ragged 1 to 9": lambda: reference.make_ragged([9, 1, 5, 2, 8, 3, 7, 4, 6, 1, 9], 3),
    "ragged, one long": lambda: reference.make_ragged([1, 2, 60, 1], 2),
    "scale 1e50": lambda: 1e50 * reference.make_sequences(0.0, 6, 4, 2),
    "scale 1e-50": lambda: 1e-50 * reference.make_sequences(0.0, 6, 4, 2),
}


def materialised(design):
    """All rows of the design, put where the blocks say they belong; each exactly once."""
    rows = np.full((design.n_rows, design.n_features), np.nan)
    filled = np.zeros(design.n_rows, dtype=int)
    for block in design.blocks():
        features = cubic_features(block.state, block.query)
        if block.present is not None:
            assert not features[~block.present.reshape(-1)].any()  # padding must not count
            features = features[block.present.reshape(-1)]
        rows[block.rows] = features
        filled[block.rows] += 1
    assert (filled == 1).all()
    return rows


def check(X, options, **design_options):
    """Compare a design with explicit features; returns the design."""
    design = Design(check_sequences(X), BACKEND, **options, **design_options)
    features = reference.feature_matrix(X, **options)
    assert (design.n_rows, design.n_features) == features.shape
    expected = features * 2.0 ** (-3 * design.exponent)
    assert reference.relative_error(materialised(design), expected) < ROUNDING

    random = np.random.default_rng(0)
    for n_outputs in (1, 3):
        coef = random.standard_normal((n_outputs, design.n_features))
        dual = random.standard_normal((design.n_rows, n_outputs))
        assert reference.relative_error(design.matvec(coef), expected @ coef.T) < ROUNDING
        assert reference.relative_error(design.rmatvec(dual), dual.T @ expected) < ROUNDING
        few = coef.reshape(n_outputs, -1, design.token_dim)  # coefficients at few pairs only
        few[:, : -(-2 * few.shape[1] // 3)] = 0.0
        assert reference.relative_error(design.matvec(coef), expected @ coef.T) < ROUNDING
    return design


@pytest.mark.parametrize("options", OUTPUTS)
@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("name", INPUTS)
def test_rows_and_products_equal_explicit_features(name, rescale, options):
    check(INPUTS[name](), options, rescale=rescale)


@pytest.mark.parametrize("options", OUTPUTS)
def test_predictions_of_heads_equal_loops_over_entries(options):
    value, key_query = reference.make_heads(2, 2, 3)
    X = reference.make_ragged([2, 1, 4], 3)
    # y = sum_jkl W_jkl S_jk q_l with W = sum_h V_h Q_h, spelled in the isometric packing.
    upper = np.triu_indices(3)
    scale = np.where(upper[0] == upper[1], 1.0, np.sqrt(0.5))[None, :, None]
    p_theta = reference.function_coefficients(value, key_query)
    coef = (p_theta.reshape(2, 6, 3) * scale).reshape(2, 18)
    predicted = Design(check_sequences(X), BACKEND, rescale=False, **options).matvec(coef)
    expected = reference.predict_heads(value, key_query, X, **options)
    assert reference.relative_error(predicted, expected) < ROUNDING


@pytest.mark.parametrize("options", OUTPUTS)
@pytest.mark.parametrize("ragged", [False, True])
def test_more_sequences_than_a_block(monkeypatch, options, ragged):
    """Small budgets cut the same data into many blocks of uneven size."""
    monkeypatch.setattr(_design, "_STATE_BUDGET", 0)
    monkeypatch.setattr(_design, "_MIN_ROWS", 7)
    random = np.random.default_rng(0)
    X = (
        reference.make_ragged(random.integers(1, 10, 45), 3)
        if ragged
        else reference.make_sequences(0.0, 45, 6, 3)
    )
    design = check(X, options)
    assert len(list(design.blocks())) >= 45 / 7


@pytest.mark.parametrize("options", OUTPUTS)
def test_token_budget_of_one_sequence(monkeypatch, options):
    monkeypatch.setattr(_design, "_TOKEN_BUDGET", 10)
    X = reference.make_ragged([9, 1, 5, 2, 8, 3], 3)
    design = check(X, options)
    assert len(list(design.blocks())) >= 4


@pytest.mark.parametrize("options", OUTPUTS[:2])
def test_more_sequences_than_the_default_block_holds(options):
    X = reference.make_sequences(0.0, 2 * 8192 + 5, 2, 1)
    design = check(X, options)
    assert len(list(design.blocks())) == 3


@pytest.mark.parametrize("state", ["sum", "mean"])
@pytest.mark.parametrize("neighbours", [[], [3, 1]])
def test_the_state_is_carried_through_a_very_long_causal_sequence(state, neighbours):
    """20 000 tokens are cut into pieces of 8192; prefix states must go on across the cuts."""
    X = reference.make_ragged([20_000, *neighbours], 2)
    design = Design(check_sequences(X), BACKEND, output="sequence", causal=True, state=state)
    computed = materialised(design) * 2.0 ** (3 * design.exponent)
    for t in [0, 1, 8190, 8191, 8192, 8193, 16_383, 16_384, 19_999]:
        seen = X[0][: t + 1]
        matrix = seen.T @ seen / (t + 1 if state == "mean" else 1)
        expected = reference.isometric_features(matrix, X[0][t])
        # Running sums of 20 000 squares lose up to 20 000 eps = 4e-12 at the very worst.
        assert reference.relative_error(computed[t], expected) < 1e-12
    if neighbours:
        expected = reference.feature_matrix(X[1:], "sequence", True, state)
        assert reference.relative_error(computed[20_000:], expected) < ROUNDING
    coef = np.random.default_rng(0).standard_normal((2, design.n_features))
    expected = materialised(design) @ coef.T
    assert reference.relative_error(design.matvec(coef), expected) < ROUNDING


def test_zero_tokens_in_front_are_exact_and_behind_destroy_the_query():
    X = reference.make_ragged([1, 4, 2], 3)
    padded = np.zeros((3, 6, 3))
    for row, sequence in zip(padded, X, strict=True):
        row[-len(sequence) :] = sequence
    ragged = materialised(Design(check_sequences(X), BACKEND))
    front = materialised(Design(check_sequences(padded), BACKEND))
    assert reference.relative_error(front, ragged) < ROUNDING
    behind = materialised(Design(check_sequences(padded[:, ::-1].copy()), BACKEND))
    assert not behind[:2].any()


@pytest.mark.parametrize("options", OUTPUTS)
@pytest.mark.parametrize(
    ("largest", "exponent"), [(1.0, 1), (0.5, 0), (0.75, 0), (-3.0, 2), (1e50, 167), (1e-50, -166)]
)
def test_rescaling_is_an_exact_power_of_two(largest, exponent, options):
    X = reference.make_sequences(0.0, 6, 4, 3)
    X *= largest / np.abs(X).max()
    X.flat[np.abs(X).argmax()] = largest
    sequences = check_sequences(X)
    scaled = Design(sequences, BACKEND, **options)
    plain = Design(sequences, BACKEND, rescale=False, **options)
    assert (scaled.exponent, plain.exponent) == (exponent, 0)
    # Powers of two commute with every rounding (nothing here leaves the normal range).
    expected = np.ldexp(materialised(plain), -3 * exponent)
    assert np.array_equal(materialised(scaled), expected)


def test_all_zero_tokens_are_not_rescaled():
    design = Design(check_sequences(np.zeros((2, 3, 2))), BACKEND)
    assert design.exponent == 0
    assert not materialised(design).any()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"output": "last"}, 1),
        ({"output": "sequence"}, 1),
        ({"output": "sequence", "causal": False}, 5),
    ],
)
def test_queries_per_state(options, expected):
    X = reference.make_ragged([2, 5, 1], 3)
    assert Design(check_sequences(X), BACKEND, **options).queries_per_state == expected


@pytest.mark.parametrize("options", OUTPUTS)
@pytest.mark.parametrize("ragged", [False, True])
def test_scatter_and_gather_are_inverse(options, ragged):
    X = reference.make_ragged([3, 1, 4], 2) if ragged else reference.make_sequences(0, 3, 4, 2)
    design = Design(check_sequences(X), BACKEND, **options)
    values = np.random.default_rng(0).standard_normal((design.n_rows, 2))
    out = np.zeros_like(values)
    for block in design.blocks():
        placed = block.gather(values)
        assert placed.shape == (*block.query.shape[:2], 2)
        block.scatter(placed, out)
    assert np.array_equal(out, values)


@pytest.mark.parametrize("options", OUTPUTS)
@pytest.mark.parametrize("rescale", [True, False])
def test_the_caller_s_tokens_are_left_alone(options, rescale):
    X = reference.make_sequences(3.0, 6, 4, 3)
    before = X.copy()
    design = Design(check_sequences(X), BACKEND, rescale=rescale, **options)
    design.matvec(np.ones((2, design.n_features)))
    design.rmatvec(np.ones((design.n_rows, 2)))
    assert np.array_equal(X, before)


def test_progress_is_shown_only_when_asked_for(capsys):
    sequences = check_sequences(reference.make_sequences(0.0, 6, 4, 3))
    list(Design(sequences, BACKEND).blocks("quiet"))
    assert capsys.readouterr().err == ""
    list(Design(sequences, BACKEND, verbose=True).blocks("loud"))
    assert "loud" in capsys.readouterr().err


@pytest.mark.parametrize("options", OUTPUTS)
@pytest.mark.parametrize("chosen", [[0], [2, 3], [4, 1, 3], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("ragged", [True, False])
def test_rows_of_chosen_sequences(options, chosen, ragged):
    lengths = [3, 1, 4, 2, 3] if ragged else [3] * 5
    sequences = check_sequences(reference.make_ragged(lengths, 2))
    design = Design(sequences, BACKEND, **options)
    chosen = np.array(chosen)
    coef = np.random.default_rng(0).standard_normal((2, design.n_features))
    of_chosen = design.take(chosen).matvec(coef)
    np.testing.assert_allclose(of_chosen, design.matvec(coef)[design.rows_of(chosen)])


def test_neighbours_are_not_copied():
    X = reference.make_sequences(0.0, 6)
    sequences = check_sequences(X)
    assert np.shares_memory(sequences.take(np.array([2, 3, 4])).data, sequences.data)
    np.testing.assert_array_equal(sequences.take(np.array([4, 3])).data, X[[4, 3]])
    assert len(sequences.take(np.array([], dtype=int))) == 0
