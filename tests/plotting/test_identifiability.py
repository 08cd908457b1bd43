"""Displays: what is drawn, not how it looks."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import reference

from sklearn_mhla import certify_identifiable
from sklearn_mhla.plotting import IdentifiabilityDisplay

plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def labelled(display):
    """Artists of the legend by label."""
    handles, labels = display.ax_.get_legend_handles_labels()
    return dict(zip(labels, handles, strict=True))


def test_spectrum_of_identifiable_inputs():
    certificate = certify_identifiable(reference.make_sequences(0.0, 60))
    display = IdentifiabilityDisplay.from_certificate(certificate)
    drawn = labelled(display)
    np.testing.assert_array_equal(drawn["eigenvalues"].get_ydata(), certificate.eigenvalues)
    np.testing.assert_array_equal(drawn["eigenvalues"].get_xdata(), np.arange(1, 19))
    level = certificate.tol * certificate.eigenvalues[0]
    assert drawn["level of rounding"].get_ydata()[0] == level
    assert drawn["proven lower bound"].get_ydata()[0] == certificate.lower_bound > 0.0
    assert display.ax_.get_yscale() == "log"
    assert display.ax_.get_title() == "identifiable: rank 18 of 18"
    assert display.figure_ is display.ax_.figure


@pytest.mark.parametrize("method", ["primal", "span"])
def test_spectrum_with_a_null_space(method):
    X = reference.make_sequences(0.0, 60, 1)
    display = IdentifiabilityDisplay.from_data(X, method=method)
    drawn = labelled(display)
    assert len(drawn["eigenvalues"].get_ydata()) == 10
    shaded = drawn["zero (8)"]
    assert (shaded.get_x(), shaded.get_x() + shaded.get_width()) == (10.5, 18.5)
    assert "proven lower bound" not in drawn


def test_spectrum_of_nothing():
    display = IdentifiabilityDisplay.from_data(np.zeros((4, 3, 2)))
    assert set(labelled(display)) == {"zero (6)"}


@pytest.mark.parametrize("output", ["last", "sequence"])
@pytest.mark.parametrize("form", [list, np.asarray])
def test_coverage_counts_every_input_once(form, output):
    X, new = reference.make_sequences(0.0, 7), reference.make_sequences(0.0, 5, seed=2)
    mixed = form(np.concatenate([X[:3], new]))
    display = IdentifiabilityDisplay.from_data(X[:3], mixed, kind="coverage", output=output)
    total = len(mixed) * (5 if output == "sequence" else 1)
    assert sum(bar.get_height() for bar in display.ax_.patches) == total
    covered = certify_identifiable(X[:3], output=output).covers(mixed)
    n_covered = int(np.concatenate([np.ravel(part) for part in covered]).sum())
    assert display.ax_.get_title() == f"{n_covered} of {total} inputs covered"
    (line,) = labelled(display).values()
    assert line.get_xdata()[0] == pytest.approx(2.5e-13)


def test_axes_of_the_user_and_drawing_again():
    X = reference.make_sequences(0.0, 10)
    _, (left, right) = plt.subplots(1, 2)
    display = IdentifiabilityDisplay.from_data(X, X, ax=left)
    assert display.ax_ is left
    assert display.plot(right, kind="coverage") is display
    assert display.ax_ is right
    assert not np.allclose(display.residual, 1.0)


def test_refusals():
    certificate = certify_identifiable(reference.make_sequences(0.0, 10))
    with pytest.raises(ValueError, match="kind must be one of 'spectrum', 'coverage'"):
        IdentifiabilityDisplay(certificate).plot(kind="pie")
    with pytest.raises(ValueError, match="needs inputs"):
        IdentifiabilityDisplay.from_certificate(certificate, kind="coverage")


def test_matplotlib_is_loaded_only_to_draw():
    script = (
        "import sys; import sklearn_mhla.plotting; assert 'matplotlib' not in sys.modules\n"
        "sys.modules['matplotlib'] = sys.modules['matplotlib.pyplot'] = None\n"
        "import numpy as np\n"
        "try: sklearn_mhla.plotting.IdentifiabilityDisplay.from_data(np.ones((3, 2, 2)))\n"
        "except ImportError as error: assert 'pip install matplotlib' in str(error)\n"
        "else: raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
