"""Data of a random linear-attention teacher."""

from __future__ import annotations

import numpy as np
import pytest
import reference

from sklearn_mhla import Heads, MHLARegressor
from sklearn_mhla.datasets import make_linear_attention

OPTIONS = [
    {"output": output, "causal": causal, "state": state}
    for output in ("last", "sequence")
    for causal in (True, False)
    for state in ("sum", "mean")
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("n_outputs", [1, 3])
@pytest.mark.parametrize("n_tokens", [1, 6, (1, 9), (4, 4)])
def test_targets_are_those_of_the_teacher(n_tokens, n_outputs, options):
    X, y, teacher = make_linear_attention(
        7, n_tokens, 3, n_outputs, 2, return_teacher=True, random_state=0, **options
    )
    expected = reference.predict_heads(*teacher, list(X), **options)
    if n_outputs == 1:
        expected = expected[:, 0]
    rows = y if options["output"] == "last" else np.concatenate(list(y))
    assert reference.relative_error(rows, expected) < 1e-13


@pytest.mark.parametrize("n_outputs", [1, 3])
@pytest.mark.parametrize("output", ["last", "sequence"])
def test_shapes(n_outputs, output):
    tail = () if n_outputs == 1 else (n_outputs,)
    X, y = make_linear_attention(7, 6, 2, n_outputs, output=output, random_state=0)
    assert isinstance(X, np.ndarray)
    assert X.shape == (7, 6, 2)
    assert y.shape == ((7,) if output == "last" else (7, 6)) + tail

    X, y = make_linear_attention(7, (2, 5), 2, n_outputs, output=output, random_state=0)
    assert isinstance(X, list)
    assert all(sequence.shape == (len(sequence), 2) for sequence in X)
    if output == "last":
        assert y.shape == (7, *tail)
    else:
        assert [part.shape for part in y] == [(len(sequence), *tail) for sequence in X]


def test_lengths_are_uniform_between_both_ends():
    X, _ = make_linear_attention(3000, (2, 4), 1, random_state=0)
    counts = np.bincount([len(sequence) for sequence in X], minlength=6)
    assert counts.sum() == counts[2:5].sum() == 3000
    # Binomial with mean 1000 and standard deviation 26.
    assert np.abs(counts[2:5] - 1000).max() < 5 * 26


def test_a_range_of_one_length_is_a_list_all_the_same():
    X, _ = make_linear_attention(3, (4, 4), 2, random_state=0)
    assert isinstance(X, list)
    assert [len(sequence) for sequence in X] == [4, 4, 4]


def test_the_same_seed_gives_the_same_data():
    first, second = (
        make_linear_attention(5, (2, 6), 2, 2, noise=0.1, return_teacher=True, random_state=3)
        for _ in range(2)
    )
    other = make_linear_attention(5, (2, 6), 2, 2, noise=0.1, return_teacher=True, random_state=4)
    assert np.array_equal(np.concatenate(first[0]), np.concatenate(second[0]))
    assert np.array_equal(first[1], second[1])
    assert np.array_equal(first[2].value, second[2].value)
    assert not np.array_equal(first[1], other[1])
    random = np.random.RandomState(3)
    passed = make_linear_attention(5, (2, 6), 2, 2, noise=0.1, random_state=random)
    assert np.array_equal(passed[1], first[1])
    again = make_linear_attention(5, (2, 6), 2, 2, noise=0.1, random_state=random)
    assert not np.array_equal(again[1], first[1])


def test_global_random_state_is_left_alone():
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    make_linear_attention(5, random_state=0)
    assert np.array_equal(np.random.get_state()[1], before)  # noqa: NPY002


def test_noise_has_the_standard_deviation_asked_for():
    clean = make_linear_attention(5000, 2, 2, 2, random_state=0)
    noisy = make_linear_attention(5000, 2, 2, 2, noise=0.3, random_state=0)
    assert np.array_equal(clean[0], noisy[0])
    difference = noisy[1] - clean[1]
    # 10 000 numbers: a standard error of 0.7 % for the deviation, 0.003 for the mean.
    assert difference.std() == pytest.approx(0.3, rel=0.035)
    assert abs(difference.mean()) < 0.015


def test_tokens_and_teacher_have_the_published_distribution():
    X, _, teacher = make_linear_attention(2000, 5, 4, 50, 100, return_teacher=True, random_state=0)
    # 40 000 tokens' coordinates; 20 000 and 1600 entries of variance 1/4.
    assert X.std() == pytest.approx(1.0, rel=0.02)
    assert abs(X.mean()) < 0.03
    assert teacher.value.std() == pytest.approx(0.5, rel=0.03)
    assert teacher.key_query.std() == pytest.approx(0.5, rel=0.09)


def test_teacher_is_returned_only_on_request():
    assert len(make_linear_attention(3, random_state=0)) == 2
    X, y, teacher = make_linear_attention(3, 4, 2, 5, 3, return_teacher=True, random_state=0)
    assert isinstance(teacher, Heads)
    assert teacher.value.shape == (3, 5, 2)
    assert teacher.key_query.shape == (3, 2, 2)
    assert (X.shape, y.shape) == ((3, 4, 2), (3, 5))


@pytest.mark.parametrize("options", OPTIONS)
def test_what_is_made_can_be_learnt(options):
    X, y, teacher = make_linear_attention(
        80, (3, 7), 3, 2, return_teacher=True, random_state=0, **options
    )
    model = MHLARegressor(**options).fit(X, y)
    size = np.linalg.norm(reference.function_coefficients(*teacher))
    found = (model.value_, model.key_query_)
    assert reference.function_distance(found, teacher) < 1e-10 * size


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_samples": 0},
        {"n_features": 0},
        {"n_outputs": 0},
        {"n_heads": -1},
        {"n_tokens": 0},
        {"n_tokens": (0, 3)},
        {"n_tokens": (5, 2)},
        {"noise": -0.1},
        {"noise": float("nan")},
        {"noise": float("inf")},
        {"output": "first"},
        {"state": "max"},
    ],
)
def test_numbers_out_of_range_are_named(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        make_linear_attention(random_state=0, **wrong)


@pytest.mark.parametrize("wrong", [{"n_samples": 2.5}, {"n_tokens": "4"}, {"noise": "a"}])
def test_wrong_types_are_named(wrong):
    (name,) = wrong
    with pytest.raises(TypeError, match=name):
        make_linear_attention(random_state=0, **wrong)
