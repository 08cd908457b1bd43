"""
One layer of linear attention that runs any Turing machine
==========================================================

A token sequence describes a Turing machine (one token per rule), its tape (one token per cell) and
the computation so far (two tokens per step). :class:`~sklearn_mhla.MHLARegressor` learns to
predict the next token from random machines on random tapes, eight steps each. It is then given
machines that it has never seen, on every tape, from every cell and in every state, and writes
fifty steps of their computation, feeding on its own output.

Which of these tokens are right can be known beforehand. The training inputs do not determine
all coefficients of the model, but the prediction at an input is the same for every minimiser of
the training error if the features of this input lie in the span of the training features
(:meth:`~sklearn_mhla.identifiability.IdentifiabilityCertificate.covers`). One of these minimisers
executes every machine exactly (Yau et al., "Learning Linear Attention in Polynomial Time",
arXiv 2410.10101, section 3; :class:`~sklearn_mhla.datasets.TuringMachineEncoding` for these
tokens). So the token predicted at a covered input is right. It follows by induction over the tokens
of a computation that a token is right if its input and those of all tokens before it were
covered: then each input consists of right tokens. Such tokens are called guaranteed here. Nothing
but inputs is needed to know which they are.

The example takes about a minute. ``5,2,2,1600`` as an argument runs another size (cells, states,
symbols, number of training machines), ``--table FILE`` and ``--figure FILE`` save.
"""

import argparse
import itertools
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from sklearn_mhla import MHLARegressor, certify_identifiable
from sklearn_mhla.datasets import TuringMachine, TuringMachineEncoding, make_turing_machine
from sklearn_mhla.rollout import generate

TRAINING_STEPS, TEST_STEPS = 8, 50

# %%
# Machines
# --------
# Two states and two symbols, on a tape with two ends: a move beyond an end leaves the head where it
# is. A machine has halted when it changes nothing any more; what a table does not list changes
# nothing.

NAMED = {
    # Adds one to a binary number. Starts at the last digit and carries to the left.
    "increment": {
        ("carry", 1): ("carry", 0, "L"),
        ("carry", 0): ("done", 1, "N"),
    },
    # Doubles a binary number, whose first digit is lost. Starts there; a one is moved by writing it
    # to the left and erasing it where it was.
    "doubling": {
        ("search", 0): ("search", 0, "R"),
        ("search", 1): ("carry", 1, "L"),
        ("carry", 0): ("carry", 1, "R"),
        ("carry", 1): ("search", 0, "N"),
    },
    # Strokes, a gap, strokes: moves the gap behind the last stroke. Starts at the gap.
    "unary addition": {
        ("fill", 0): ("fill", 1, "R"),
        ("fill", 1): ("look", 0, "R"),
        ("look", 1): ("fill", 1, "L"),
    },
    # Erases from left to right; the state in the end is the parity of the ones.
    "parity": {
        ("even", 0): ("even", 0, "R"),
        ("even", 1): ("odd", 0, "R"),
        ("odd", 0): ("odd", 0, "R"),
        ("odd", 1): ("even", 0, "R"),
    },
    # Complements cell after cell to the right, and the last one for ever.
    "bit flip": {
        ("go", 0): ("go", 1, "R"),
        ("go", 1): ("go", 0, "R"),
    },
    # The first example of Turing (1936), section 3, without blanks in between: prints 0 1 0 1 ...
    "Turing's first": {
        ("zero", 0): ("one", 0, "R"),
        ("zero", 1): ("one", 0, "R"),
        ("one", 0): ("zero", 1, "R"),
        ("one", 1): ("zero", 1, "R"),
    },
    # Radó's champion of two states: writes four ones on a blank tape. Starts at the third of four
    # cells.
    "busy beaver": {
        ("A", 0): ("B", 1, "R"),
        ("A", 1): ("B", 1, "L"),
        ("B", 0): ("A", 1, "L"),
    },
    # Writes every possible tape and ends at the blank one. Starts there, at the last cell.
    "all tapes": {
        ("set", 0): ("set", 1, "L"),
        ("set", 1): ("clear", 0, "L"),
        ("clear", 0): ("clear", 0, "R"),
        ("clear", 1): ("set", 0, "L"),
    },
}
NAMED = {name: TuringMachine.from_table(table) for name, table in NAMED.items()}

# %%
# Learning
# --------


def training_rows(encoding, n_machines):
    """Histories and next tokens of random machines, none of them one of the named."""
    X, y = make_turing_machine(
        n_machines,
        encoding.n_cells,
        encoding.n_states,
        encoding.n_symbols,
        TRAINING_STEPS,
        random_state=0,
    )
    rules = slice(encoding.n_states * encoding.n_symbols)
    blank = [0] * encoding.n_cells
    named = {encoding.prompt(machine, blank)[rules].tobytes() for machine in NAMED.values()}
    unseen = np.array([history[rules].tobytes() not in named for history in X])
    return list(itertools.compress(X, unseen)), y[unseen]


# %%
# Testing
# -------
# Every machine is started on every tape, at every cell and in every state. The rollout rounds every
# output to -1, 0 or 1 and appends it. The certificate looks at the inputs that the model met on its
# way, and only then the simulator is asked what was right.


def all_starts(encoding, machine, at_a_time=64):
    """Every tape, head and state, in batches."""
    tapes = itertools.product(range(encoding.n_symbols), repeat=encoding.n_cells)
    starts = list(itertools.product(tapes, range(encoding.n_cells), range(machine.n_states)))
    return [starts[first : first + at_a_time] for first in range(0, len(starts), at_a_time)]


def execute(model, certificate, encoding, machine, starts):
    """Which tokens of each start are guaranteed, which wrong, how far outputs were rounded."""
    prompts = np.array([encoding.prompt(machine, *start) for start in starts])
    n_tokens, rounding = 2 * TEST_STEPS, []

    def decode(outputs):
        tokens = np.rint(outputs).clip(-1, 1)  # where nothing is learned, tokens would grow
        rounding.append(np.abs(outputs - tokens).max(axis=1))
        return tokens

    generated = generate(model, prompts, n_tokens, decode)
    histories = np.concatenate([prompts, generated], axis=1)
    ends = range(prompts.shape[1], histories.shape[1])
    covered = certificate.covers([history[:end] for history in histories for end in ends])
    guaranteed = np.logical_and.accumulate(covered.reshape(-1, n_tokens), axis=1)

    simulated = [
        encoding.history(machine, tape, TEST_STEPS, head, state) for tape, head, state in starts
    ]
    wrong = (histories != simulated)[:, -n_tokens:].any(axis=2)
    return guaranteed, wrong, np.array(rounding).T


# %%
# All sizes
# ---------
# Of the tokens of all machines from all starts: how many are guaranteed, how many of these and of
# the others are wrong, and by how much the outputs behind guaranteed tokens were rounded at most.

parser = argparse.ArgumentParser()
parser.add_argument("sizes", nargs="*", metavar="cells,states,symbols,machines")
parser.add_argument("--table")
parser.add_argument("--figure")
options = parser.parse_args()

columns = (
    "cells, states, symbols",
    "machines",
    "rows",
    "d",
    "p",
    "rank",
    "fit, CPU [s]",
    "tokens",
    "guaranteed",
    "of these wrong",
    "of the others wrong",
    "rounded by",
)
table = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
print(*table, sep="\n")
models = {}
for size in options.sizes or ["3,2,2,100", "3,2,2,200", "3,2,2,400", "4,2,2,200", "4,2,2,800"]:
    *shape, n_machines = map(int, size.split(","))
    encoding = TuringMachineEncoding(*shape)
    X, y = training_rows(encoding, n_machines)
    begin = time.process_time()
    model = MHLARegressor(method="pivoted").fit(X, y)
    seconds = time.process_time() - begin
    certificate = certify_identifiable(X, method="span")
    results = [
        execute(model, certificate, encoding, machine, starts)
        for machine in NAMED.values()
        for starts in all_starts(encoding, machine)
    ]
    guaranteed, wrong, rounding = map(np.concatenate, zip(*results, strict=True))
    values = (
        ", ".join(map(str, shape)),
        n_machines,
        len(X),
        encoding.token_dim,
        certificate.n_features,
        certificate.rank,
        f"{seconds:.1f}",
        guaranteed.size,
        f"{100 * guaranteed.mean():.2f} %",
        wrong[guaranteed].sum(),
        f"{wrong[~guaranteed].sum()} of {(~guaranteed).sum()}",
        f"{rounding[guaranteed].max(initial=0.0):.0e}",
    )
    table.append("| " + " | ".join(map(str, values)) + " |")
    print(table[-1], flush=True)
    models[tuple(shape)] = model

if options.table:
    Path(options.table).write_text("\n".join(table) + "\n")

# %%
# Tapes over time
# ---------------
# Four cells; time runs downwards, ones are dark, the dot is the head. The left tape of each pair
# was written by the model, the right one by the simulator.

STARTS = {
    "increment": ([0, 1, 1, 1], 3),
    "doubling": ([0, 0, 1, 1], 0),
    "unary addition": ([1, 0, 1, 1], 1),
    "parity": ([1, 1, 0, 1], 0),
    "bit flip": ([0, 1, 1, 0], 0),
    "Turing's first": ([0, 0, 0, 0], 0),
    "busy beaver": ([0, 0, 0, 0], 2),
    "all tapes": ([0, 0, 0, 0], 3),
}


def draw(axes, run, title):
    """Tape and head over time."""
    tapes = [configuration.tape for configuration in run]
    axes.imshow(tapes, cmap="Blues", vmin=0, vmax=1.3, aspect="auto", interpolation="none")
    heads = [configuration.head for configuration in run]
    axes.plot(heads, np.arange(len(run)), ".", color="C3", markersize=3)
    axes.set(xticks=[], yticks=[], title=title)
    axes.title.set_size("small")


if (4, 2, 2) in models:
    encoding = TuringMachineEncoding(4, 2, 2)
    figure = plt.figure(figsize=(12, 6), layout="constrained")
    parts = figure.subfigures(1, len(NAMED))
    for part, (name, machine) in zip(parts, NAMED.items(), strict=True):
        prompt = encoding.prompt(machine, *STARTS[name])
        tokens = generate(models[4, 2, 2], [prompt], 2 * TEST_STEPS, decode="round")[0]
        left, right = part.subplots(1, 2)
        draw(left, encoding.configurations(np.vstack([prompt, tokens])), "learned")
        draw(right, machine.run(*STARTS[name][:1], TEST_STEPS, STARTS[name][1]), "simulated")
        part.suptitle(name)
    if options.figure:
        figure.savefig(options.figure, dpi=150)
plt.show()
