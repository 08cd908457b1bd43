"""
Do extra heads help?
====================

Figures 1 and 3 of Yau et al., "Learning Linear Attention in Polynomial Time" (arXiv 2410.10101),
anew. A teacher with one head of linear attention answers at every position of sequences of 100
Gaussian tokens. Students are linear attention with 1 to 16 heads, two layers of linear attention
with one head each (``--layers 2 4`` adds four), and a transformer block, all trained by Adam for as
many epochs; next to them least squares and the solver for one head, which have no epochs: a
horizontal line, and in the plot against time a point where they are done.

* **Data.** Teacher ``V`` (1, d) and ``Q`` (d, d) with entries from N(0, 1/d), tokens from
  N(0, 1/T). The target at position t is ``V S_t Q z_t`` with the prefix state
  ``S_t = z_1 z_1^T + ... + z_t z_t^T``. Seed s = 0, 1, 2 draws a teacher and 3 N sequences: N to
  train on, N held out after every epoch (the curves), N for the final errors (the table and the
  horizontal lines). The SGD solver of the package takes its held-out half of the first 2 N by its
  own draw.
* **Optimiser**, as published: Adam, gradient norm clipped at 5, batches of 32 sequences, learning
  rate from a thousandth linearly up to 1e-2 during the first tenth of the steps, then down to a
  hundredth along half a cosine. With ``--rates 0.01 0.001``, the published ones, every model is
  trained at both and the one with the lower mean error is shown. All students see tokens and
  targets of unit size. Unlike in the published code, heads are summed and not averaged, the first
  heads of the SGD solver are small, its final heads are those of the best epoch on the held-out
  half, and float64 is used throughout.
* **Prefix states for prefix targets.** The published script computes the features of its convex
  model from the state of the whole sequence and the targets from prefix states, so that no
  coefficients can fit. Here both are prefix states; a row of the table shows what the mismatch
  costs, by exact least squares.

Time is processor time of one thread, so that a busy machine does not distort it, and includes
measuring the held-out error after each epoch.

Run as ``python plot_extra_heads.py`` (60 epochs, about a minute) or, for the figure and the table
in the docs, ``python plot_extra_heads.py --full --cache /tmp/extra_heads --docs docs`` (500 epochs,
about 15 minutes of one core).
"""

import argparse
import math
import time
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from _pages import markdown_table, replace_table
from joblib import Memory

from sklearn_mhla import MHLARegressor
from sklearn_mhla.datasets import make_linear_attention

parser = argparse.ArgumentParser()
parser.add_argument("--full", action="store_true", help="500 epochs instead of 60")
parser.add_argument("--widths", type=int, nargs="+", default=[2, 4], help="widths d of tokens")
parser.add_argument("--sizes", type=int, nargs="+", default=[512], help="numbers N of sequences")
parser.add_argument("--layers", type=int, nargs="+", default=[2], help="numbers of layers")
parser.add_argument("--rates", type=float, nargs="+", default=[0.01], help="learning rates")
parser.add_argument("--docs", type=Path, help="folder of the docs, to store figure and table in")
parser.add_argument("--cache", type=Path, help="folder for finished runs, to go on from")
arguments = parser.parse_args()
memory = Memory(arguments.cache, verbose=0)

N_TOKENS, BATCH_SIZE, CLIP, WARM_UP = 100, 32, 5.0, 0.1
SEEDS = (0, 1, 2)
WIDTHS = arguments.widths
N_EPOCHS = 500 if arguments.full else 60
SIZES, RATES = arguments.sizes, arguments.rates

# %%
# Data
# ----


def draw(d, n, seed):
    """Sequences (3 n, T, d) and targets (3 n, T)."""
    X, y = make_linear_attention(3 * n, N_TOKENS, d, output="sequence", random_state=seed)
    return X / N_TOKENS**0.5, y / N_TOKENS**1.5  # a cubic function of the tokens


# %%
# Students written in torch
# -------------------------
# They take tokens of unit size. States are divided by T, which only changes units.


class LinearLayers(torch.nn.Module):
    """Layers of linear attention, one head each, with residual connections.

    ``z <- z + V_l S_l Q_l z`` in all layers but the last, whose output is ``v S Q z``.
    """

    def __init__(self, d, n_layers):
        super().__init__()
        self.key_query = torch.nn.Parameter(torch.randn(n_layers, d, d) / d**0.5)
        self.value = torch.nn.Parameter(torch.randn(n_layers - 1, d, d) / d**0.5)
        self.read_out = torch.nn.Parameter(torch.randn(d) / d**0.5)

    def forward(self, Z):
        for value, key_query in zip(self.value, self.key_query[:-1], strict=True):
            Z = Z + self._attend(Z, key_query) @ value.mT
        return self._attend(Z, self.key_query[-1]) @ self.read_out

    @staticmethod
    def _attend(Z, key_query):
        """``S_t Q z_t / T`` at every position."""
        state = (Z[..., :, None] * Z[..., None, :]).cumsum(1) / Z.shape[1]
        return (state @ (Z @ key_query.mT)[..., None])[..., 0]


class Transformer(torch.nn.Module):
    """Causal softmax attention and a ReLU network d-2d-d, with residuals and layer norms."""

    def __init__(self, d):
        super().__init__()
        self.block = torch.nn.TransformerEncoderLayer(
            d, nhead=1, dim_feedforward=2 * d, dropout=0.0, batch_first=True, norm_first=True
        )
        self.read_out = torch.nn.Linear(d, 1)

    def forward(self, Z):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(Z.shape[1], dtype=Z.dtype)
        return self.read_out(self.block(Z, src_mask=mask, is_causal=True))[..., 0]


STUDENTS = {f"{n} layers": partial(LinearLayers, n_layers=n) for n in arguments.layers}
STUDENTS["transformer"] = Transformer


def rate_factor(step, n_steps):
    """Learning rate over its largest value."""
    warm_up = WARM_UP * n_steps
    if step < warm_up:
        return 0.001 + 0.999 * step / warm_up
    return 0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * (step - warm_up) / (n_steps - warm_up)))


@memory.cache
def train_torch(name, d, n, seed, rate, n_epochs):
    """Held-out MSE and seconds since the start after every epoch, and the final MSE."""
    X, y = draw(d, n, seed)
    token_unit, target_unit = np.sqrt((X[:n] ** 2).mean()), np.sqrt((y[:n] ** 2).mean())
    X, y = torch.as_tensor(X / token_unit), torch.as_tensor(y / target_unit)
    torch.manual_seed(seed)
    model = STUDENTS[name](d).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    n_steps = n_epochs * -(-n // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, n_steps))

    def error(low, high):
        with torch.no_grad():
            pairs = zip(X[low:high].split(256), y[low:high].split(256), strict=True)
            return sum(((model(Z) - t) ** 2).sum().item() for Z, t in pairs) / y[low:high].numel()

    curve, seconds, start = [], [], time.process_time()
    for _ in range(n_epochs):
        for batch in torch.randperm(n).split(BATCH_SIZE):
            loss = 0.5 * ((model(X[batch]) - y[batch]) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            schedule.step()
        curve.append(error(n, 2 * n) * target_unit**2)
        seconds.append(time.process_time() - start)
    return np.array(curve), np.array(seconds), error(2 * n, 3 * n) * target_unit**2


# %%
# Students from the package
# -------------------------
# Early stopping with more patience than epochs measures the held-out error and never stops.


@memory.cache
def train_heads(n_heads, d, n, seed, rate, n_epochs):
    """The same for linear attention with ``n_heads`` heads."""
    X, y = draw(d, n, seed)
    model = MHLARegressor(
        n_heads,
        solver="sgd",
        output="sequence",
        learning_rate=rate,
        batch_size=BATCH_SIZE,
        max_iter=n_epochs,
        early_stopping=True,
        validation_fraction=0.5,
        n_iter_no_change=n_epochs,
        random_state=seed,
    )
    start = time.process_time()
    model.fit(X[: 2 * n], y[: 2 * n])
    seconds = time.process_time() - start
    curve = 2.0 * np.array(model.validation_loss_curve_)
    error = np.mean((model.predict(X[2 * n :]) - y[2 * n :]) ** 2)
    return curve, seconds * np.arange(1, len(curve) + 1) / len(curve), error


@memory.cache
def solve(options, d, n, seed):
    """Seconds and final MSE of a model without epochs."""
    X, y = draw(d, n, seed)
    model = MHLARegressor(output="sequence", random_state=seed, **options)
    model.fit(X[:2], y[:2])  # not to time first calls of libraries
    start = time.process_time()
    model.fit(X[:n], y[:n])
    seconds = time.process_time() - start
    return seconds, np.mean((model.predict(X[2 * n :]) - y[2 * n :]) ** 2)


# %%
# All runs
# --------

torch.set_num_threads(1)
SOLVERS = {
    "least squares": {},
    "one head, exact": {"n_heads": 1},
    "least squares, mismatched states": {"causal": False},
}
N_HEADS = (1, 2, 4, 8, 16)
trained = {f"{h} head{'s' * (h > 1)}": (train_heads, h) for h in N_HEADS}
trained |= {name: (train_torch, name) for name in STUDENTS}

results = {}
rows = []


def report(n, d, name, rate, errors, seconds, epochs=""):
    """Keep and print a row of the table."""
    spread = np.std(errors, ddof=1) / len(errors) ** 0.5
    error, deviation, worst = (f"{value:.1e}" for value in (np.mean(errors), spread, max(errors)))
    time_spent = f"{np.mean(seconds):.2g}"
    rows.append((n, d, name, rate, error, deviation, worst, epochs, time_spent))
    print(*rows[-1], sep="  ", flush=True)


for n in SIZES:
    for d in WIDTHS:
        powers = [np.mean(draw(d, n, seed)[1][2 * n :] ** 2) for seed in SEEDS]
        report(n, d, "zero", "", powers, [0.0])
        for name, options in SOLVERS.items():
            seconds, errors = zip(*(solve(options, d, n, seed) for seed in SEEDS), strict=True)
            results[n, d, name] = np.mean(seconds), np.mean(errors)
            report(n, d, name, "", errors, seconds)
        for name, (train, kind) in trained.items():
            runs = {
                rate: [train(kind, d, n, seed, rate, N_EPOCHS) for seed in SEEDS] for rate in RATES
            }
            rate = min(runs, key=lambda rate: np.mean([run[2] for run in runs[rate]]))
            curves, seconds, errors = (np.array(part) for part in zip(*runs[rate], strict=True))
            results[n, d, name] = curves, seconds.mean(0)
            reached = curves <= 1e-6 * np.array(powers)[:, None]
            first = np.where(reached.any(1), reached.argmax(1) + 1.0, np.inf)
            epochs = f"{np.median(first):.0f}".replace("inf", "never")
            report(n, d, name, f"{rate:g}", errors, seconds[:, -1], epochs)

# %%
# Held-out error against epochs and against time
# ----------------------------------------------
# Lines are means over three seeds, shades one standard error. Least squares with mismatched states
# is not drawn. "Epochs to 1e-6" in the table is the median over seeds of the epochs until the
# held-out error is 1e-6 of the error of the model that answers 0.

shades = plt.cm.viridis(np.linspace(0.0, 0.9, len(N_HEADS)))
others = [*plt.cm.autumn(np.linspace(0.0, 0.6, len(arguments.layers))), "C6"]
colors = dict(zip(trained, [*shades, *others], strict=True))
n = SIZES[0]
figure, axes = plt.subplots(
    len(WIDTHS), 2, figsize=(11, 4 * len(WIDTHS)), sharey="row", layout="constrained", squeeze=False
)
for d, (by_epoch, by_time) in zip(WIDTHS, axes, strict=True):
    for name in trained:
        curves, seconds = results[n, d, name]
        mean = curves.mean(0)
        spread = curves.std(0, ddof=1) / len(curves) ** 0.5
        style = "-" if "head" in name else "--" if "layers" in name else ":"
        for panel, x in (by_epoch, np.arange(1, N_EPOCHS + 1)), (by_time, seconds):
            panel.plot(x, mean, style, color=colors[name], linewidth=1.6, label=name)
            low = np.maximum(mean - spread, 1e-3 * mean)
            panel.fill_between(x, low, mean + spread, color=colors[name], alpha=0.15, linewidth=0)
    for name, color, marker in ("least squares", "k", "o"), ("one head, exact", "C0", "s"):
        seconds, error = results[n, d, name]
        label = f"{name} (no epochs)"
        by_epoch.axhline(error, color=color, linewidth=1.2, linestyle="-.", label=label)
        by_time.plot([seconds, 1e4], [error, error], color=color, linewidth=1.2, linestyle="-.")
        by_time.plot(seconds, error, marker, color=color)
    by_epoch.set(yscale="log", xlabel="epochs", ylabel=f"d = {d}: held-out MSE")
    by_time.set(xscale="log", xlabel="seconds (one thread)", xlim=(1e-3, None))
    by_time.set_xlim(right=2.0 * max(results[n, d, name][1][-1] for name in trained))
axes[0, 0].set_title(f"against epochs, N = {n}")
axes[0, 1].set_title(f"against time, N = {n}")
handles, labels = axes[0, 0].get_legend_handles_labels()
figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)

table = markdown_table(
    (
        "N",
        "d",
        "model",
        "rate",
        "final MSE",
        "standard error",
        "worst seed",
        "epochs to 1e-6",
        "seconds",
    ),
    rows,
)
if arguments.docs:
    figure.savefig(arguments.docs / "figures" / "extra_heads.png", dpi=120)
    replace_table(arguments.docs / "extra_heads.md", "extra heads", table)
else:
    plt.show()
