"""
How many heads?
===============

With H heads the loss is not convex, and whether training finds its minimum depends on the start.
Here teachers with 1, 2, 4 and 8 heads (d=4, m=4) are fitted with H' = 1 ... d^2 = 16 heads from
random starts, by three methods on the same data:

* **SGD**: ``MHLARegressor(solver="sgd")``, 500 epochs of Adam, 16 steps each, learning rate 0.01;
* **alternating least squares** over values and key-query matrices, at most 1000 rounds;
* **Levenberg-Marquardt** (damped Gauss-Newton), at most 200 steps.

The last two work on the moments and get one start per run, without the start from the
unrestricted solution and the restarts that ``MHLARegressor(n_heads=H')`` uses: key-query matrices
with entries from N(0, 1/d) and the best values for them. Four teachers with five starts each are 20
runs. Data: 512 sequences of 16 standard normal tokens without noise, seed = teacher.

A run has succeeded if its loss, relative to that of the zero model, is at most 1e-6 above the best
that any run of any method found for its teacher (for SGD also: 1e-3). Where the best is not zero,
as with fewer heads than the function needs, 1 % of it is allowed as well.

Run as ``python plot_how_many_heads.py`` (6 runs each, about 2 minutes) or, for the figure and the
tables in the docs, ``python plot_how_many_heads.py --full --cache /tmp/how_many --docs docs``.
"""

import argparse
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from _pages import markdown_table, replace_table
from joblib import Memory
from sklearn.exceptions import ConvergenceWarning

from sklearn_mhla import Heads, MHLARegressor
from sklearn_mhla._features import pair_indices, pair_scale
from sklearn_mhla.datasets import make_linear_attention
from sklearn_mhla.solvers._head_equations import MomentEquations
from sklearn_mhla.solvers._low_rank import (
    alternating_least_squares,
    best_values,
    levenberg_marquardt,
)

parser = argparse.ArgumentParser()
parser.add_argument("--full", action="store_true", help="20 runs, more H'")
parser.add_argument("--docs", type=Path, help="folder of the docs, to store figure and tables in")
parser.add_argument("--cache", type=Path, help="folder for finished runs, to go on from")
arguments = parser.parse_args()
memory = Memory(arguments.cache, verbose=0)
warnings.simplefilter("ignore", ConvergenceWarning)

WIDTH, N_OUTPUTS, N_SEQUENCES, N_TOKENS = 4, 4, 512, 16
TRUE_HEADS = (1, 2, 4, 8)
FITTED = (1, 2, 3, 4, 6, 7, 8, 12, 16) if arguments.full else (1, 2, 4, 8, 16)
TEACHERS, STARTS = (range(4), range(5)) if arguments.full else (range(2), range(3))
N_EPOCHS, N_ROUNDS, N_STEPS = 500, 1000, 200

# %%
# The loss, from the moments
# --------------------------
# Without noise the unrestricted minimum is the teacher itself and its loss is zero.


def teacher_loss(true_heads, teacher):
    """Sequences, targets, loss as a function of heads, and the loss of the zero model."""
    X, y, heads = make_linear_attention(
        N_SEQUENCES,
        N_TOKENS,
        WIDTH,
        N_OUTPUTS,
        true_heads,
        return_teacher=True,
        random_state=teacher,
    )
    rows, columns = pair_indices(WIDTH)
    packed = (X.mT @ X)[:, rows, columns] * pair_scale(WIDTH)
    features = (packed[:, :, None] * X[:, -1, None]).reshape(N_SEQUENCES, -1)
    gram = features.T @ features
    equations = MomentEquations(gram, heads.coefficients(), WIDTH)
    return X, y, equations, 0.5 * float((y**2).sum())


# %%
# Runs
# ----


def random_start(loss, n_heads, seed):
    """Random key-query matrices and the best values for them."""
    random = np.random.default_rng(seed)
    key_query = random.standard_normal((n_heads, WIDTH, WIDTH)) / WIDTH**0.5
    return best_values(loss, Heads(np.zeros((n_heads, N_OUTPUTS, WIDTH)), key_query))


@memory.cache
def final_losses(true_heads, n_heads, teacher, start):
    """Relative losses of SGD, alternating least squares and Levenberg-Marquardt."""
    X, y, loss, scale = teacher_loss(true_heads, teacher)
    model = MHLARegressor(n_heads, solver="sgd", max_iter=N_EPOCHS, random_state=start).fit(X, y)
    first = random_start(loss, n_heads, start)
    alternating = first
    for _ in range(N_ROUNDS // 50):  # in pieces, to stop when far below the threshold
        fit = alternating_least_squares(loss, alternating, scale=scale, max_iter=50)
        alternating = fit.heads
        if fit.converged or fit.loss < 1e-9 * scale:
            break
    damped = levenberg_marquardt(loss, first, scale=scale, max_iter=N_STEPS).heads
    found = Heads(model.value_, model.key_query_), alternating, damped
    return [loss.loss(heads) / scale for heads in found]


METHODS = ("SGD, 1e-3", "SGD, 1e-6", "alternating least squares", "Levenberg-Marquardt")
n_runs = len(TEACHERS) * len(STARTS)
successes, best_losses = {}, {}
for true_heads in TRUE_HEADS:
    for n_heads in FITTED:
        losses = np.array(
            [
                [final_losses(true_heads, n_heads, teacher, start) for start in STARTS]
                for teacher in TEACHERS
            ]
        )  # (teachers, starts, methods)
        best = losses.min((1, 2), keepdims=True)
        excess = losses - 1.01 * best
        strict, loose = ((excess <= limit).sum((0, 1)).tolist() for limit in (1e-6, 1e-3))
        successes[true_heads, n_heads] = loose[:1] + strict
        best_losses[true_heads, n_heads] = float(np.median(best))
        print(
            true_heads,
            n_heads,
            successes[true_heads, n_heads],
            f"{np.median(best):.1e}",
            flush=True,
        )


def benign_from(true_heads, method):
    """The fewest fitted heads from which on every run succeeded."""
    failures = [h for h in FITTED if successes[true_heads, h][method] < n_runs]
    later = [h for h in FITTED if not failures or h > failures[-1]]
    return later[0] if later else None


# %%
# Success against the number of fitted heads
# ------------------------------------------

figure, axes = plt.subplots(2, 2, figsize=(11, 7), sharex=True, sharey=True, layout="constrained")
styles = ("C1:o", "C1-s", "C2-D", "C0-^")
sizes = (11, 8, 5.5, 3)  # one inside the other where methods agree
for true_heads, panel in zip(TRUE_HEADS, axes.flat, strict=True):
    for i, (method, style) in enumerate(zip(METHODS, styles, strict=True)):
        rate = [100.0 * successes[true_heads, h][i] / n_runs for h in FITTED]
        panel.plot(FITTED, rate, style, fillstyle="none", markersize=sizes[i], label=method)
    panel.axvline(true_heads, color="0.6", linewidth=1, linestyle="--")
    panel.set(xscale="log", title=f"H = {true_heads} (dashed)", ylim=(-5, 105))
    panel.set_xticks(FITTED, FITTED, minor=False)
    panel.set_xticks([], minor=True)
for panel in axes[1]:
    panel.set_xlabel("fitted heads H'")
for panel in axes[:, 0]:
    panel.set_ylabel("successful runs [%]")
handles, labels = axes[0, 0].get_legend_handles_labels()
figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)

summary = markdown_table(
    ("true H", *METHODS),
    [(h, *(benign_from(h, i) or "never" for i in range(len(METHODS)))) for h in TRUE_HEADS],
)
print(summary)
if arguments.docs:
    figure.savefig(arguments.docs / "figures" / "how_many_heads.png", dpi=120)
    page = arguments.docs / "how_many_heads.md"
    replace_table(page, "benign", summary)
    for true_heads in TRUE_HEADS:
        cells = [(h, *successes[true_heads, h], best_losses[true_heads, h]) for h in FITTED]
        table = markdown_table(
            ("fitted H'", *METHODS, "best loss"),
            [(*cell[:-1], f"{cell[-1]:.1g}") for cell in cells],
        )
        replace_table(page, f"H={true_heads}", table)
else:
    plt.show()
