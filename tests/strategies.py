"""Every Hypothesis strategy of the suite: random and nasty inputs, all small."""

import numpy as np
from hypothesis import strategies as st

from reference.laws import SamplingLaw, warp


@st.composite
def logits(draw, max_rows=5, max_vocab=7):
    """Logits [U, V], float32 values: ordinary, saturated, tied, partly forbidden; V may be 1."""
    rows, vocab = draw(st.integers(1, max_rows)), draw(st.integers(1, max_vocab))
    entry = st.one_of(
        st.floats(-5, 5, width=32),
        st.sampled_from([0.0, 1.0, -80.0, 60.0]),  # ties and saturation
        st.just(-np.inf),
    )
    table = np.array(draw(st.lists(st.lists(entry, min_size=vocab, max_size=vocab), min_size=rows, max_size=rows)))
    table[~np.isfinite(table).any(axis=1), 0] = 0.0
    return table.astype(np.float32).astype(np.float64)


@st.composite
def families(draw, max_rows=6, max_vocab=6):
    """Rows [U, V] and weights [U]: softmax rows, point masses, duplicates; weights may be zero or uneven."""
    rows = warp(draw(logits(max_rows, max_vocab)))
    if draw(st.booleans()):
        rows = rows[draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=max_rows))]
    weights = draw(
        st.one_of(
            st.lists(st.integers(0, 5), min_size=len(rows), max_size=len(rows)),
            st.lists(st.floats(0, 1), min_size=len(rows), max_size=len(rows)),
        ).filter(lambda w: sum(w) > 1e-3)
    )
    return rows, np.array(weights, dtype=np.float64)


def laws():
    """Sampling laws, with every filter off, on, and at its edges."""
    return st.builds(
        SamplingLaw,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        top_k=st.sampled_from([0, 1, 2, 3, 100]),
        top_p=st.sampled_from([0.0, 1e-8, 0.5, 0.8, 0.95, 1.0]),
    )


@st.composite
def chains(draw, max_vocab=4):
    """A Markov chain of order 0 to 2 with some zero entries, and perhaps a stop id."""
    vocab, order = draw(st.integers(2, max_vocab)), draw(st.integers(0, 2))
    table = np.array(
        draw(st.lists(st.integers(0, 4), min_size=vocab ** (order + 1), max_size=vocab ** (order + 1))),
        dtype=np.float64,
    ).reshape((vocab,) * (order + 1))
    table[table.sum(axis=-1) == 0] = 1
    stop_ids = draw(st.sampled_from([(), (vocab - 1,)]))
    return table / table.sum(axis=-1, keepdims=True), stop_ids


seeds = st.integers(0, 2**32 - 1)
