"""
Which predictions do the data determine?
========================================

A classical test of identifiability asks whether the data determine the *model*. With one-hot
tokens they never do: many features are zero in every sequence that can occur. The question that
matters is whether they determine the *prediction* at an input, and a certificate answers it input
by input.

Here a sequence holds the transition table of a finite automaton with 4 states and 2 symbols, as
8 pairs of a joint key (state, symbol) and the next state, and asks for one entry. The model has to
learn to look it up in tables that it has never seen.
"""

import matplotlib.pyplot as plt
import numpy as np

from sklearn_mhla import MHLARegressor, certify_identifiable
from sklearn_mhla.datasets import make_key_value


def automata(n_samples, seed):
    """Tables with a query, and the one-hot next state."""
    return make_key_value(n_samples, n_keys=8, n_values=4, random_state=seed)


# %%
# Not identifiable, and always right
# ----------------------------------
# 300 random automata determine 200 of 936 directions of feature space. All other automata lie in
# these: every prediction is determined, and right.

X, y = automata(300, seed=0)
X_new, y_new = automata(1000, seed=1)
certificate = certify_identifiable(X)
print(certificate)
print(f"covered: {certificate.covers(X_new).mean():.1%} of 1000 new automata")
print(f"largest error: {np.abs(MHLARegressor().fit(X, y).predict(X_new) - y_new).max():.1e}")

# %%
# Which automata to label next
# ----------------------------
# The certificate needs no targets, so it can say which inputs are worth labelling:
# ``suggest`` chooses from a pool those that enlarge the span most. Each of them adds a
# dimension, whereas random ones often repeat what is known.


def performance(X, y):
    """Share of new automata that are covered, and share of right answers."""
    right = MHLARegressor().fit(X, y).predict(X_new).argmax(1) == y_new.argmax(1)
    return certify_identifiable(X).covers(X_new).mean(), right.mean()


pool, answers = automata(2000, seed=2)
start = 50
order = certify_identifiable(pool[:start]).suggest(pool, len(pool))
orders = {
    "random": np.arange(len(pool)),
    "suggested": np.concatenate([np.arange(start), order]),
}
sizes = (50, 100, 125, 150, 175, 190, 200, 225, 250, 275, 300, 350)

figure, (coverage, accuracy) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for name, chosen in orders.items():
    used = [size for size in sizes if size <= len(chosen)]
    curves = np.array([performance(pool[chosen[:size]], answers[chosen[:size]]) for size in used])
    for size, (covered, right) in zip(used, curves, strict=True):
        print(f"{name}: {size} automata, {covered:.1%} covered, {right:.1%} right")
    coverage.plot(used, curves[:, 0], "o-", ms=3, label=name)
    accuracy.plot(used, curves[:, 1], "o-", ms=3, label=name)
for axes, label in [(coverage, "share of new automata covered"), (accuracy, "share right")]:
    axes.set(xlabel="labelled automata", ylabel=label, ylim=(-0.02, 1.02))
coverage.legend()
plt.show()

# %%
# ``suggest`` stops by itself once the pool is covered: 200 automata are enough, the rank of all
# inputs of this kind. Of the random ones even 350 leave one direction undetermined, and 3 % of the
# automata with it. Accuracy runs ahead of coverage: a prediction that is not determined may still
# be right, but nothing in the data guarantees it.
