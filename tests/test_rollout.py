"""Generation against the loop that predicts the whole sequence again at every step."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from sklearn_mhla import MHLAClassifier, MHLARegressor
from sklearn_mhla.datasets import TuringMachineEncoding, make_turing_machine
from sklearn_mhla.rollout import generate


def fitted(token_dim=3, seed=0, **options):
    """A model with outputs as wide as its tokens, small enough not to explode."""
    X = reference.make_sequences(0.0, 80, 4, token_dim, seed=seed)
    Y = 0.05 * np.stack([np.roll(x[-1], 1) * (x**2).sum() for x in X])
    return MHLARegressor(**options).fit(X, Y)


def naive(model, prompt, n_steps, decode=lambda token: token):
    """Append, predict everything again, append."""
    tokens = [np.array(token) for token in prompt]
    for _ in range(n_steps):
        tokens.append(decode(model.predict([np.array(tokens)])[0]))
    return np.array(tokens[len(prompt) :])


@settings(max_examples=20)
@given(
    st.sampled_from(["sum", "mean"]),
    st.booleans(),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.integers(1, 6),
)
def test_equals_predicting_the_whole_sequence_again(state, intercept, lengths, n_steps):
    model = fitted(state=state, fit_intercept=intercept)
    prompts = reference.make_ragged(lengths, 3)
    prompts = [0.5 * prompt for prompt in prompts]
    out = generate(model, prompts, n_steps)
    assert out.shape == (len(prompts), n_steps, 3)
    for prompt, tokens in zip(prompts, out, strict=True):
        np.testing.assert_allclose(tokens, naive(model, prompt, n_steps), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("unused", [[], [1], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_pairs_without_coefficients(unused, device):
    model = fitted(device=device)
    coef = model.coef_.reshape(3, 6, 3)
    rows, columns = np.triu_indices(3)
    coef[:, np.isin(rows, unused) | np.isin(columns, unused)] = 0.0
    model.coef_ = coef.reshape(3, 18)
    assert (coef == 0.0).all() == (len(unused) == 3)
    prompts = [0.5 * prompt for prompt in reference.make_ragged([3, 1, 4], 3)]
    out = generate(model, prompts, 4)
    for prompt, tokens in zip(prompts, out, strict=True):
        np.testing.assert_allclose(tokens, naive(model, prompt, 4), rtol=1e-8, atol=1e-12)


def test_forms_of_input_and_decoders():
    model = fitted()
    X = reference.make_sequences(0.0, 5, 4, 3, seed=3)
    by_array = generate(model, X, 3, "onehot")
    assert (by_array.sum(2) == 1.0).all()
    np.testing.assert_array_equal(generate(model, list(X), 3, "onehot"), by_array)
    flat = fitted(n_tokens=4)
    np.testing.assert_array_equal(generate(flat, X.reshape(5, 12), 3, "onehot"), by_array)
    for prompt, tokens in zip(X, generate(model, X, 3, "round"), strict=True):
        np.testing.assert_array_equal(tokens, naive(model, prompt, 3, np.rint))


def test_decode_may_change_the_width():
    X = reference.make_sequences(0.0, 60)
    model = MHLARegressor().fit(X, X[:, :, 0].sum(1))
    out = generate(model, X[:4], 2, lambda outputs: np.tanh(np.tile(outputs, (1, 3))))
    assert out.shape == (4, 2, 3)
    with pytest.raises(ValueError, match="1 outputs, its tokens have width 3"):
        generate(model, X[:4], 2)
    with pytest.raises(ValueError, match=r"shape \(4, 3\); got \(4, 1\)"):
        generate(model, X[:4], 2, lambda outputs: outputs)


def test_stop():
    model = fitted()
    X = reference.make_sequences(0.0, 12, 4, 3, seed=3)
    whole = generate(model, X, 6)

    def small(tokens):
        return np.abs(tokens).max(axis=1) < 0.2

    parts = generate(model, X, 6, stop=small)
    for part, tokens in zip(parts, whole, strict=True):
        at = np.flatnonzero(small(tokens))
        expected = tokens if len(at) == 0 else tokens[: at[0] + 1]
        np.testing.assert_array_equal(part, expected)
    assert {len(part) for part in parts} != {6}
    assert all(len(p) == 1 for p in generate(model, X, 6, stop=lambda t: np.ones(len(t), bool)))


def test_what_callables_do_to_their_argument_does_not_matter():
    model = fitted()
    X = reference.make_sequences(0.0, 5, 4, 3, seed=3)
    expected = generate(model, X, 4)

    def spoil(tokens):
        tokens.fill(9.0)
        return np.zeros(len(tokens), bool)

    np.testing.assert_array_equal(generate(model, X, 4, stop=spoil), expected)

    def round_in_place(outputs):
        outputs[:] = np.rint(outputs)
        return outputs

    np.testing.assert_array_equal(
        generate(model, X, 4, round_in_place), generate(model, X, 4, "round")
    )


def test_rounded_tokens_have_no_negative_zeros():
    tokens = generate(fitted(), reference.make_sequences(0.0, 5, 4, 3, seed=3), 4, "round")
    assert (tokens == 0.0).any()
    assert not np.signbit(tokens[tokens == 0.0]).any()


def test_columns_of_a_frame_are_compared():
    pd = pytest.importorskip("pandas")
    X = reference.make_sequences(0.0, 80, 4, 3)
    frame = pd.DataFrame(X.reshape(80, 12), columns=[f"c{i}" for i in range(12)])
    model = MHLARegressor(n_tokens=4).fit(frame, 0.05 * X[:, -1])
    np.testing.assert_array_equal(generate(model, frame, 2), generate(model, X, 2))
    with pytest.raises(ValueError, match="feature names"):
        generate(model, frame[frame.columns[::-1]], 2)


@pytest.mark.parametrize("n_classes", [2, 3])
def test_classifiers_continue_with_the_class_they_predict(n_classes):
    random = np.random.default_rng(0)
    symbols = random.integers(n_classes, size=(100, 4))
    tokens = np.eye(n_classes)
    model = MHLAClassifier().fit(tokens[symbols], np.array(list("abc"))[symbols[:, -1] - 1])
    for decode in (None, "onehot"):
        out = generate(model, tokens[symbols[:5]], 4, decode)
        for prompt, appended in zip(symbols, out, strict=False):
            history = [tokens[symbol] for symbol in prompt]
            for token in appended:
                predicted = model.predict([np.array(history)])[0]
                np.testing.assert_array_equal(token, tokens[list(model.classes_).index(predicted)])
                history.append(token)
    wide = MHLAClassifier().fit(np.ones((4, 2, 5)) * [[1.0], [2.0]], [0, 1, 1, 0])
    with pytest.raises(ValueError, match="2 outputs, its tokens have width 5"):
        generate(wide, np.ones((1, 2, 5)), 1)


@pytest.mark.parametrize("state", ["sum", "mean"])
def test_torch_modules(state):
    torch = pytest.importorskip("torch")
    model = fitted(state=state)
    X = 0.5 * reference.make_sequences(0.0, 4, 4, 3, seed=3)
    expected = generate(model, X, 4)
    np.testing.assert_allclose(generate(model.to_torch(), X, 4), expected, rtol=1e-8)
    out = generate(model, torch.from_numpy(X), 4)
    assert isinstance(out, torch.Tensor)
    np.testing.assert_array_equal(out.numpy(), expected)


def test_turing_machine_runs_longer_than_it_was_trained():
    size = {"n_cells": 2, "n_states": 1, "n_symbols": 2}
    X, y = make_turing_machine(200, **size, n_steps=4, random_state=0)
    model = MHLARegressor().fit(X, y)
    encoding = TuringMachineEncoding(**size)
    _, _, runs = make_turing_machine(20, **size, n_steps=1, return_runs=True, random_state=1)
    prompts = [encoding.prompt(run.machine, run.tape.tolist(), run.head, run.state) for run in runs]
    out = generate(model, prompts, 60, "round")
    for run, prompt, tokens in zip(runs, prompts, out, strict=True):
        simulated = run.machine.run(run.tape, 30, run.head, run.state)
        assert encoding.configurations(np.vstack([prompt, tokens])) == simulated


def test_errors():
    model = fitted()
    X = reference.make_sequences(0.0, 4)
    with pytest.raises(ValueError, match="n_steps"):
        generate(model, X, 0)
    with pytest.raises(ValueError, match="decode must be"):
        generate(model, X, 2, "argmax")
    with pytest.raises(ValueError, match="decode must be"):
        generate(model, X, 2, ["round"])
    with pytest.raises(ValueError, match="stop must be None or callable"):
        generate(model, X, 2, stop=3)
    for stopped in (True, [True], np.ones((4, 1), bool), None):
        with pytest.raises(ValueError, match=r"one boolean per sequence, shape \(4,\)"):
            generate(model, X, 2, stop=lambda tokens, stopped=stopped: stopped)
    with pytest.raises(ValueError, match="d=3"):
        generate(model, X[:, :, :2], 2)
    with pytest.raises(FloatingPointError, match="at step"):
        generate(model, 1e30 * X, 20)
    from sklearn.linear_model import LinearRegression

    other = LinearRegression().fit([[0.0], [1.0]], [0.0, 1.0])
    with pytest.raises(ValueError, match="LinearRegression"):
        generate(other, X, 2)
