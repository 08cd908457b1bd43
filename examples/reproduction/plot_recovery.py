"""
Few heads from few rows: where recovery begins
==============================================

A model with H heads has ``H (m d + d^2)`` numbers, unrestricted coefficients are ``m p`` with
``p = d^2 (d + 1) / 2``. So far fewer rows determine the heads than determine the coefficients, and
this script finds out how many ``MHLARegressor(n_heads=H)`` needs, as it comes:

1. *Without noise.* How often does it recover a random teacher with H heads, against the number of
   scalar targets per number in the heads? Recovered means ``1 - R2 < 1e-10`` on 500 sequences it
   has not seen. Next to it, what least squares (of minimum norm) makes of the same rows.
2. *With noise* of 10 % and 50 % of the standard deviation of the targets, d=8, m=4, two heads:
   error of the noise-free targets of 500 new sequences, relative to their mean square, against the
   number of rows. Least squares, ridge, the nuclear norm and two heads without and with a ridge
   penalty. The penalty is the best on its grid for the test sequences themselves, so no honest way
   to choose it gets below these curves.

Heads that are mixed by an invertible H x H matrix compute the same function, so ``H^2`` of the
numbers are free and recovery is impossible below ``1 - H / (m d + d^2)`` targets per number.

Sequences have 64 standard normal tokens. Seed s draws a teacher, the rows and the test sequences
from one stream, seed s + 1000 the noise.

Run as ``python plot_recovery.py`` (4 seeds, 3 minutes) or, for the figure and the tables in
the docs, ``python plot_recovery.py --full --cache /tmp/recovery --docs docs`` (20 seeds).
"""

import argparse
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from _pages import markdown_table, replace_table
from joblib import Memory
from sklearn.exceptions import ConvergenceWarning

from sklearn_mhla import MHLARegressor, nuclear_norm_path
from sklearn_mhla.datasets import make_linear_attention

parser = argparse.ArgumentParser()
parser.add_argument("--full", action="store_true", help="20 seeds, 5 with noise")
parser.add_argument("--docs", type=Path, help="folder of the docs, to store figure and tables in")
parser.add_argument("--cache", type=Path, help="folder for finished runs, to go on from")
arguments = parser.parse_args()
memory = Memory(arguments.cache, verbose=0)
# Runs that fail, and say so, are what is counted here.
warnings.simplefilter("ignore", ConvergenceWarning)

N_TOKENS, N_TEST = 64, 500
SHAPES = ((8, 4), (6, 6))  # d, m
RATIOS = (0.8, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)
N_HEADS = (1, 2, 3, 4)
SEEDS, NOISY_SEEDS = (range(20), range(5)) if arguments.full else (range(4), range(2))

# %%
# Without noise
# -------------


def n_rows(d, m, n_heads, ratio):
    """Rows whose targets are ``ratio`` times the numbers in the heads."""
    return round(ratio * n_heads * (m * d + d * d) / m)


@memory.cache
def unexplained(d, m, n_heads, ratio, seed):
    """``1 - R2`` on new sequences: few heads, least squares."""
    n = n_rows(d, m, n_heads, ratio)
    X, y = make_linear_attention(n + N_TEST, N_TOKENS, d, m, n_heads, random_state=seed)
    centred = y[n:] - y[n:].mean(0)
    models = MHLARegressor(n_heads, random_state=seed), MHLARegressor()
    errors = [model.fit(X[:n], y[:n]).predict(X[n:]) - y[n:] for model in models]
    return [float((error**2).sum() / (centred**2).sum()) for error in errors]


success, r2 = {}, {}
for d, m in SHAPES:
    grid = np.array(
        [
            [[unexplained(d, m, h, ratio, seed) for seed in SEEDS] for ratio in RATIOS]
            for h in N_HEADS
        ]
    )
    success[d, m] = (grid[..., 0] < 1e-10).sum(-1)
    r2[d, m] = 1.0 - np.median(grid[..., 1], axis=-1)
    print(f"d={d}, m={m}: recovered from {len(SEEDS)}\n{success[d, m]}", flush=True)
    print(f"median R2 of least squares\n{r2[d, m].round(2)}")
    counts = (grid[..., 1] < 1e-10).sum(-1)
    print(f"recovered by least squares\n{counts}", flush=True)

# %%
# With noise
# ----------

NOISY = (8, 4, 2)  # d, m, H
LEVELS = (0.1, 0.5)
ROWS = (120, 192, 288, 400, 600, 1000)
METHODS = ("least squares", "ridge", "nuclear norm", "two heads", "two heads, ridge")


@memory.cache
def noisy_errors(level, n, seed):
    """Relative error of each method on noise-free targets of new sequences."""
    d, m, n_heads = NOISY
    X, y = make_linear_attention(n + N_TEST, N_TOKENS, d, m, n_heads, random_state=seed)
    noise = np.random.default_rng(seed + 1000).standard_normal((n, m))
    X, X_test, y, y_test = X[:n], X[n:], y[:n] + level * y[:n].std() * noise, y[n:]

    def error(model):
        return float(((model.predict(X_test) - y_test) ** 2).mean() / (y_test**2).mean())

    def errors(alphas, **options):
        return [error(MHLARegressor(alpha=alpha, **options).fit(X, y)) for alpha in alphas]

    heads = {"n_heads": n_heads, "max_iter": 60, "random_state": seed}
    path = nuclear_norm_path(X, y, n_alphas=13, estimator=MHLARegressor(tol=1e-4))
    carrier, nuclear = MHLARegressor().fit(X, y), []
    for carrier.coef_ in path.coefs:  # predicts with the coefficients of each solution in turn
        nuclear.append(error(carrier))
    return [
        *errors([0.0]),
        min(errors(np.logspace(1, 8, 15))),
        min(nuclear),
        *errors([0.0], **heads),
        min(errors(np.logspace(2, 5, 4), **heads)),
    ]


noisy = {}
for level in LEVELS:
    runs = [[noisy_errors(level, n, seed) for seed in NOISY_SEEDS] for n in ROWS]
    noisy[level] = np.array(runs)  # (rows, seeds, methods)
    print(f"noise {level}, median error: rows, {', '.join(METHODS)}")
    print(np.column_stack([ROWS, np.median(noisy[level], axis=1)]).round(4), flush=True)

# %%
# Phase diagrams and errors
# -------------------------
# Left: recovered teachers in percent. Middle: median R2 of least squares on the same rows. Right:
# median error over seeds with noise; shades from the lower to the upper quartile.

figure, axes = plt.subplots(2, 3, figsize=(17, 8), layout="constrained", width_ratios=(6, 6, 5))
for (d, m), (left, middle, _) in zip(SHAPES, axes, strict=True):
    percent = 100.0 * success[d, m] / len(SEEDS)
    fitted = r2[d, m]
    for panel, values, texts, limits, title in [
        (left, percent, np.char.mod("%.0f", percent), (0, 100), "H heads: recovered [%]"),
        (middle, fitted, np.char.mod("%.2f", fitted), (0.75, 1), "least squares: median $R^2$"),
    ]:
        panel.imshow(values, origin="lower", aspect="auto", cmap="viridis", clim=limits)
        for (i, j), value in np.ndenumerate(values):
            color = "w" if value < np.mean(limits) else "k"
            rows = n_rows(d, m, N_HEADS[i], RATIOS[j])
            panel.text(j, i + 0.08, texts[i, j], ha="center", color=color)
            panel.text(j, i - 0.25, f"{rows} rows", ha="center", color=color, fontsize=7)
        panel.set_xticks(range(len(RATIOS)), RATIOS)
        panel.set_yticks(range(len(N_HEADS)), N_HEADS)
        panel.set(
            xlabel="scalar targets per number in the heads",
            ylabel="heads H",
            title=f"{title}; d={d}, m={m}, p={d * d * (d + 1) // 2}",
        )
colors = dict(zip(METHODS, ("0.4", "C1", "C2", "C0", "C3"), strict=True))
d, m, n_heads = NOISY
for level, panel in zip(LEVELS, axes[:, 2], strict=True):
    low, middle, high = np.quantile(noisy[level], (0.25, 0.5, 0.75), axis=1)
    for i, method in enumerate(METHODS):
        color = colors[method]
        panel.plot(ROWS, middle[:, i], "o-", color=color, markersize=3, label=method)
        panel.fill_between(ROWS, low[:, i], high[:, i], color=color, alpha=0.15, linewidth=0)
    panel.set_xscale("log")
    panel.set_xticks(ROWS, ROWS)
    panel.set_xticks([], minor=True)
    panel.axvline(d * d * (d + 1) // 2, color="0.7", linewidth=1, linestyle=":")
    panel.set(
        yscale="log",
        xlabel="rows (dotted: as many as features)",
        ylabel="relative error",
        ylim=(1e-4 if level < 0.3 else 3e-3, 3.0),
        title=f"noise of {100 * level:.0f} %; d={d}, m={m}, H={n_heads}",
    )
axes[0, 2].legend(frameon=False, fontsize=8)

if arguments.docs:
    figure.savefig(arguments.docs / "figures" / "recovery.png", dpi=110)
    page = arguments.docs / "recovery.md"
    for d, m in SHAPES:
        table = markdown_table(
            ("H", *(f"{ratio:g}" for ratio in RATIOS)),
            [
                (h, *(f"{count} ({fit:.2f})" for count, fit in zip(counts, fits, strict=True)))
                for h, counts, fits in zip(N_HEADS, success[d, m], r2[d, m], strict=True)
            ],
        )
        replace_table(page, f"recovery d={d} m={m}", table)
    for level in LEVELS:
        medians = np.median(noisy[level], axis=1)
        table = markdown_table(
            ("rows", *METHODS),
            [
                (n, *(f"{value:.2g}" for value in line))
                for n, line in zip(ROWS, medians, strict=True)
            ],
        )
        replace_table(page, f"noise {level:g}", table)
else:
    plt.show()
