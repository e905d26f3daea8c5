"""Tests of prefix trees: each path of spans forms a sequence, and common prefixes are computed once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from twinkle.processor import PackedBatch, PackedMedia, PrefixTree, PrefixTreeBuilder
from twinkle.processor.prefix_tree import MIN_SHARED_ROWS

PROMPT = list(range(100, 100 + 2 * MIN_SHARED_ROWS))


def packed(sequences, *, positions=None, media=(), experts=None):
    """Return a batch of one sequence per feature, without labels."""
    lengths = [len(sequence) for sequence in sequences]
    ends = np.cumsum(lengths)
    none = np.zeros(0, np.int64)
    return PackedBatch(
        input_ids_T=np.concatenate(sequences).astype(np.int64),
        position_ids_T=np.concatenate([np.arange(length) for length in lengths]) if positions is None else positions,
        sequence_bounds=tuple((int(end) - length, int(end)) for end, length in zip(ends, lengths, strict=True)),
        feature_lengths=tuple(lengths),
        last_rows_F=ends - 1,
        rows_R=none,
        labels_R=none,
        weights_R=none.astype(np.float32),
        features_R=none,
        offsets_R=none,
        streams={},
        media=media,
        routed_experts_TLA=experts,
    )


def shared_count(tree):
    """Return the number of rows of a batch that are not computed."""
    return len(tree.computed_T) - tree.row_count


def read(tree, index):
    """Return the computed rows of the sequence that ends with a span, from its first token."""
    span = tree.spans[index]
    own = list(range(span.begin_row, span.end_row))
    return own if span.parent is None else read(tree, span.parent) + own


def sequences_of(tree, batch):
    """Yield the computed rows of each sequence of a batch; check that they continue the rows of the parents."""
    span_of_row = np.repeat(np.arange(len(tree.spans)), [span.end_row - span.begin_row for span in tree.spans])
    for begin, end in batch.sequence_bounds:
        rows = tree.computed_T[begin:end].tolist()
        assert rows == read(tree, span_of_row[rows[-1]])[: len(rows)]
        yield rows


@st.composite
def related_sequences(draw):
    """Draw sequences that branch from one another at random positions."""
    sequences = [draw(st.lists(st.integers(0, 2), min_size=1, max_size=80))]
    for _ in range(draw(st.integers(0, 6))):
        origin = draw(st.sampled_from(sequences))
        begin = draw(st.integers(0, len(origin)))
        own = draw(st.lists(st.integers(0, 2), min_size=0 if begin else 1, max_size=40))
        sequences.append(origin[:begin] + own)
    return sequences


@given(related_sequences())
def test_spans_from_the_root_form_every_sequence(sequences):
    """The rows on the path from a root span to the end of a sequence have the sequence's tokens and positions."""
    batch = packed(sequences)
    tree = PrefixTree.of(batch)
    for rows, tokens in zip(sequences_of(tree, batch), sequences, strict=True):
        assert batch.input_ids_T[tree.rows_N][rows].tolist() == tokens
        assert batch.position_ids_T[tree.rows_N][rows].tolist() == list(range(len(tokens)))
    assert [span.begin_row for span in tree.spans[1:]] == [span.end_row for span in tree.spans[:-1]]
    assert tree.spans[-1].end_row == tree.row_count == batch.token_count - shared_count(tree)
    assert all(span.parent is None or span.parent < index for index, span in enumerate(tree.spans))


@given(related_sequences())
def test_builder_counts_the_rows_of_the_tree(sequences):
    """The counts that `add` returns add up to the number of rows of the tree."""
    batch = packed(sequences)
    builder = PrefixTreeBuilder(batch)
    assert sum(builder.add(*bounds) for bounds in batch.sequence_bounds) == builder.tree().row_count


def test_prompt_of_a_group_is_computed_once():
    """Samples of one prompt share its rows, and each sample has separate rows."""
    tree = PrefixTree.of(packed([[*PROMPT, 1, 2], [*PROMPT, 3], [*PROMPT, 1, 4, 5]]))
    assert tree.row_count == len(PROMPT) + 2 + 1 + 3
    assert [span.parent for span in tree.spans] == [None, 0, 0, 0]


def test_turns_of_a_conversation_form_a_deep_tree():
    """Each turn of a conversation continues the previous turn, so the conversation is computed once."""
    first, second = [*PROMPT, 1, 2], [*PROMPT, 1, 2, *PROMPT, 3]
    tree = PrefixTree.of(packed([first, second, [*second, 5], [*second, *PROMPT, 6]]))
    assert tree.row_count == len(second) + 1 + len(PROMPT) + 1
    assert [span.parent for span in tree.spans] == [None, 0, 1, 1]


def test_equal_sequences_are_computed_once():
    """A sequence that equals another sequence, or the beginning of one, needs no rows."""
    tree = PrefixTree.of(packed([[*PROMPT, 1], [*PROMPT, 1], PROMPT]))
    assert tree.row_count == len(PROMPT) + 1


def test_a_branch_before_other_branches_keeps_them_shared():
    """A sequence that branches shortly before an existing branch does not hide the rows after that branch."""
    short, long = [7] * 5, [8] * len(PROMPT)
    first = [*PROMPT, *short, *long]
    tree = PrefixTree.of(packed([first, [*PROMPT, *short, 1], [*PROMPT, 2], first]))
    assert tree.row_count == len(first) + 2
    again = tree.computed_T[-len(first) :]
    assert again.tolist() == tree.computed_T[: len(first)].tolist()


@given(related_sequences(), st.randoms())
def test_copies_need_few_rows_in_any_order(sequences, rng):
    """A copy of an earlier sequence needs fewer than `MIN_SHARED_ROWS` rows, even if others were added in between."""
    repeated = [sequence for sequence in sequences if sequence] * 2
    rng.shuffle(repeated)
    batch, seen = packed(repeated), list[list[int]]()
    builder = PrefixTreeBuilder(batch)
    for sequence, (begin, end) in zip(repeated, batch.sequence_bounds, strict=True):
        count = builder.add(begin, end)
        assert count < MIN_SHARED_ROWS or sequence not in seen
        seen.append(sequence)


def test_short_prefixes_are_not_shared():
    """A prefix with fewer rows than the minimum is computed for each sequence."""
    short = PROMPT[: MIN_SHARED_ROWS - 1]
    assert shared_count(PrefixTree.of(packed([[*short, 1], [*short, 2]]))) == 0


def test_rows_at_different_positions_are_not_shared():
    """Rows with equal tokens and different positions have different results, so they are not shared."""
    count = len(PROMPT)
    positions = np.concatenate([np.arange(count), np.arange(count) + 1])
    assert shared_count(PrefixTree.of(packed([PROMPT, PROMPT], positions=positions))) == 0


def test_positions_on_three_axes_are_compared():
    """Rows are equal only if their positions are equal on every axis."""
    count = len(PROMPT)
    equal = np.tile(np.arange(count), (3, 2))
    assert shared_count(PrefixTree.of(packed([PROMPT, PROMPT], positions=equal))) == count
    equal[2, -count:] += 1
    assert shared_count(PrefixTree.of(packed([PROMPT, PROMPT], positions=equal))) == 0


def test_rows_with_different_replayed_experts_are_not_shared():
    """Sequences share rows up to the first row with a different replayed expert."""
    count = len(PROMPT)
    experts = np.zeros((2 * count, 2, 1), np.int64)
    experts[2 * count - 3, 1, 0] = 1
    assert shared_count(PrefixTree.of(packed([PROMPT, PROMPT], experts=experts))) == count - 3


def test_sequences_with_media_are_not_shared():
    """Sequences with media share no rows, because equal placeholder tokens may represent different images."""
    count = len(PROMPT)
    image = PackedMedia(3, 5, 'image', np.zeros((1, 1), np.float32), (1, 1, 1))
    tree = PrefixTree.of(packed([PROMPT, PROMPT, PROMPT], media=(image,)))
    assert tree.row_count == 2 * count
    assert tree.computed_T[3:5].tolist() == [3, 4]


def test_unshared_tree_computes_every_row():
    """All rows of an unshared tree are computed, and no span has a parent."""
    batch = packed([PROMPT, PROMPT])
    tree = PrefixTree.unshared(batch)
    assert shared_count(tree) == 0
    assert [(span.begin_row, span.end_row, span.parent) for span in tree.spans] == [
        (begin, end, None) for begin, end in batch.sequence_bounds
    ]
