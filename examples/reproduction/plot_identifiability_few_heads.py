"""
How many rows determine a model with few heads?
===============================================

For Gaussian sequences and teachers with ``H`` heads of width ``d = 6``, three numbers of rows:

* where the second moment of the features has full rank (the published condition): ``p`` rows;
* where the Jacobian test says that the teacher is locally identifiable;
* where the few-head solver recovers the teacher, in a share of 20 seeds.

The second is found by bisection on nested sets of rows. For the third, a teacher counts as
recovered if the relative function distance is below 1e-6. Around the switch of the Jacobian test
the script also searches witnesses: other models with as many heads that agree with the teacher on
all rows. It takes about a minute with 4 seeds and few numbers of rows; with ``--full`` it uses 20
seeds (10 for witnesses) and writes ``docs/figures/identifiability_few_heads.png`` and its table.
"""

import sys
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from sklearn.exceptions import ConvergenceWarning

from sklearn_mhla import MHLARegressor, function_distance
from sklearn_mhla._backend import NumpyBackend
from sklearn_mhla._design import Design
from sklearn_mhla._heads import Heads
from sklearn_mhla._tokens import check_sequences
from sklearn_mhla.datasets import make_linear_attention
from sklearn_mhla.identifiability._jacobian import local_identifiability
from sklearn_mhla.identifiability._witness import find_witness

D, N_TOKENS = 6, 32
P = D * D * (D + 1) // 2
RECOVERED = 1e-6


def design(X):
    """The implicit features of an array of sequences."""
    return Design(check_sequences(X), NumpyBackend())


# %%
# Where the Jacobian test switches
# --------------------------------


def rows_of_jacobian_test(n_outputs, n_heads):
    """Fewest rows that make almost all teachers locally identifiable, and the unknowns."""
    X = np.random.default_rng(0).standard_normal((P, N_TOKENS, D))
    sizes = {"n_heads": n_heads, "n_outputs": n_outputs, "random_state": 0}
    unknowns = local_identifiability(design(X), **sizes).rank_function
    no, yes = 0, P
    while yes - no > 1:
        middle = (no + yes) // 2
        if local_identifiability(design(X[:middle]), **sizes):
            yes = middle
        else:
            no = middle
    return yes, unknowns


# %%
# Where the solver recovers the teacher
# -------------------------------------


def data(n_rows, n_outputs, n_heads, seed):
    """Rows, targets and teacher of one trial."""
    return make_linear_attention(
        n_rows, N_TOKENS, D, n_outputs, n_heads, return_teacher=True, random_state=seed
    )


def is_recovered(n_rows, n_outputs, n_heads, seed):
    """Whether a fit to one teacher computes the teacher's function."""
    X, y, teacher = data(n_rows, n_outputs, n_heads, seed)
    model = MHLARegressor(n_heads=n_heads, max_iter=60, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(X, y)
    zero = Heads(0.0 * teacher.value, teacher.key_query)
    return function_distance(model, teacher) < RECOVERED * function_distance(teacher, zero)


# %%
# Witnesses around the switch
# ---------------------------


def share_of_witnesses(n_rows, n_outputs, n_heads, n_seeds):
    """Share of teachers for which another model is found that agrees on all rows."""
    found = 0
    for seed in range(n_seeds):
        X, _, teacher = data(n_rows, n_outputs, n_heads, seed)
        found += bool(find_witness(design(X), teacher, n_heads, max_iter=60, random_state=seed))
    return found / n_seeds


# %%
# One panel per number of outputs
# -------------------------------
# Solid: share of teachers recovered. Dotted: the Jacobian test switches. Black: the rank of the
# second moment becomes full.

full = "--full" in sys.argv
n_seeds, n_searches = (20, 10) if full else (4, 4)
figure, panels = plt.subplots(1, 3, figsize=(11, 3.6), sharey=True, layout="constrained")
table = ["m,H,unknowns,jacobian_rows,rows,recovered,witness"]
for panel, n_outputs in zip(panels, (1, 4, 6), strict=True):
    for color, n_heads in enumerate((1, 2, 4)):
        switch, unknowns = rows_of_jacobian_test(n_outputs, n_heads)
        print(f"m={n_outputs} H={n_heads}: {unknowns} unknowns, Jacobian test from {switch} rows")
        factors = (1.1, 1.25, 1.4, 1.55, 1.7, 2.0, 2.5) if full else (1.5, 2.0)
        near = {switch - 1, switch, switch + 1}
        tried = sorted({min(P, round(switch * factor)) for factor in factors} | near)
        shares = []
        for n_rows in tried:
            success = [is_recovered(n_rows, n_outputs, n_heads, seed) for seed in range(n_seeds)]
            shares.append(np.mean(success))
            witness = ""
            if n_rows in near:
                witness = f"{share_of_witnesses(n_rows, n_outputs, n_heads, n_searches):.2f}"
            table.append(
                f"{n_outputs},{n_heads},{unknowns},{switch},{n_rows},{shares[-1]:.2f},{witness}"
            )
            print(table[-1], flush=True)
        panel.plot(tried, shares, "o-", ms=3, color=f"C{color}", label=f"H = {n_heads}")
        panel.axvline(switch, color=f"C{color}", ls=":")
    panel.axvline(P, color="k", lw=1)
    panel.set(title=f"m = {n_outputs}", xlabel="rows", xlim=(0, P + 8))
panels[0].set_ylabel("share of teachers recovered")
panels[0].legend()

# %%
if full:
    folder = Path("docs/figures")
    figure.savefig(folder / "identifiability_few_heads.png", dpi=150)
    (folder / "identifiability_few_heads.csv").write_text("\n".join(table) + "\n")
plt.show()
