"""Packing documents into rows, and resuming after any row."""

import itertools

import numpy as np
import pytest

from trainer.data.batches import positions
from trainer.data.documents import Counts, Document, Encoder, Record
from trainer.data.packing import GROUP, Packing
from trainer.data.tokenizer import ByteTokenizer

EOT = 256
KINDS = [
    Packing(8),
    Packing(8, "first_fit"),
    Packing(8, "best_fit"),
    Packing(8, "first_fit", max_segments=2),
    Packing(8, max_segments=2),
    Packing(8, together=False),
    Packing(8, "first_fit", truncate=True),
    Packing(8, together=False, truncate=True),
    Packing(12, align=4),
    Packing(12, "first_fit", align=4),
    Packing(12, "best_fit", align=4),
    Packing(12, "first_fit", max_segments=2, truncate=True, align=4),
]


def documents_of(*texts: list[int]) -> list[tuple[int, Document]]:
    """Returns numbered documents between special tokens."""
    return [(i, Document(np.array([EOT, *text, EOT], np.int32), None)) for i, text in enumerate(texts)]


def packed(packing: Packing, *texts: list[int]) -> dict[str, list]:
    rows = [packed.row for packed in packing.rows(documents_of(*texts), Counts())]
    return {name: [row[name].tolist() for row in rows] for name in rows[0]}


def many(count: int = 400) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, rng.integers(1, 25)).tolist() for _ in range(count)]


def test_concatenated_documents_are_shifted_before_they_are_cut():
    rows = packed(Packing(4), [1, 2, 3], [4], [5, 6, 7, 8, 9])
    assert rows["inputs"] == [[EOT, 1, 2, 3], [EOT, 4, EOT, 5], [6, 7, 8, 9]]
    assert rows["targets"] == [[1, 2, 3, EOT], [4, EOT, 5, 6], [7, 8, 9, EOT]]
    assert rows["segmentation"] == [[1, 1, 1, 1], [1, 1, 2, 2], [1, 1, 1, 1]]
    assert positions(np.array(rows["segmentation"])).tolist() == [[0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 2, 3]]


def test_the_last_row_is_padded():
    rows = packed(Packing(4), [1, 2], [3, 4])
    assert rows["segmentation"] == [[1, 1, 1, 2], [1, 1, 0, 0]]
    assert rows["inputs"] == [[EOT, 1, 2, EOT], [3, 4, 0, 0]]
    assert rows["targets"] == [[1, 2, EOT, 3], [4, EOT, 0, 0]]
    assert rows["loss"] == [[1, 1, 1, 1], [1, 1, 0, 0]]


def test_first_fit_takes_the_first_row_with_room_and_best_fit_the_fullest():
    texts = [1], [2, 2, 2], [3, 3], [4]  # 2, 4, 3 and 2 pairs, in rows of 6
    first = packed(Packing(6, "first_fit"), *texts)
    assert first["segmentation"] == [[1, 1, 2, 2, 2, 2], [1, 1, 1, 2, 2, 0]]
    texts = [1, 1, 1], [2, 2], [3, 3, 3], [4]  # 4, 3, 4 and 2 pairs in rows of 6; the first three fill 4, 3 and 4
    first, best = (packed(Packing(6, kind), *texts) for kind in ("first_fit", "best_fit"))
    assert first["segmentation"] == [[1, 1, 1, 1, 2, 2], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]]
    texts = [1, 1], [2, 2, 2], [3]  # 3, 4 and 2 pairs
    assert packed(Packing(6, "first_fit"), *texts)["segmentation"] == [[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 0, 0]]
    assert packed(Packing(6, "best_fit"), *texts)["segmentation"] == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 2, 2]]
    assert best["segmentation"][1] == [1, 1, 1, 0, 0, 0]


def test_a_limit_of_segments_and_one_document_a_row():
    texts = [1], [2], [3]
    assert packed(Packing(6, "first_fit", max_segments=2), *texts)["segmentation"] == [
        [1, 1, 2, 2, 0, 0],
        [1, 1, 0, 0, 0, 0],
    ]
    assert packed(Packing(6, together=False), *texts)["segmentation"] == [[1, 1, 0, 0, 0, 0]] * 3


def test_concatenated_documents_end_a_row_that_has_the_most():
    found = packed(Packing(6, max_segments=2), [1], [2], [3], [4, 5, 6, 7])["segmentation"]
    assert found == [[1, 1, 2, 2, 0, 0], [1, 1, 2, 2, 2, 2], [1, 0, 0, 0, 0, 0]]
    bounded, free = Packing(6, max_segments=2).identity, Packing(6).identity
    assert bounded["kind"] != free["kind"]  # rows prepared without the limit are not reused


def test_a_long_document_goes_on_in_another_row_or_is_cut_and_counted():
    long = [*range(10)]  # 11 pairs
    counts = Counts()
    rows = [packed.row for packed in Packing(4, "first_fit").rows(documents_of(long, [5]), counts)]
    assert [row["targets"].tolist() for row in rows] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, EOT, 0], [5, EOT, 0, 0]]
    assert (counts.split, counts.cut) == (1, 0)
    counts = Counts()
    rows = [packed.row for packed in Packing(4, "first_fit", truncate=True).rows(documents_of(long, [5]), counts)]
    assert [row["targets"].tolist() for row in rows] == [[0, 1, 2, 3], [5, EOT, 0, 0]]
    assert (counts.split, counts.cut, counts.cut_tokens) == (0, 1, 7)
    counts.documents = 2
    assert counts.notes() == ["1 of 2 documents are too long and lose 7 tokens (use_truncation=true)"]


def test_aligned_segments_have_padding_between_them():
    texts = [1], [2, 2, 2], [3], [4]  # 2, 4, 2 and 2 pairs
    rows = packed(Packing(6, align=3), *texts)
    assert rows["segmentation"] == [[1, 1, 0, 2, 2, 2], [1, 0, 0, 2, 2, 0], [1, 1, 0, 0, 0, 0]]
    assert rows["inputs"] == [[EOT, 1, 0, EOT, 2, 2], [2, 0, 0, EOT, 3, 0], [EOT, 4, 0, 0, 0, 0]]
    assert positions(np.array(rows["segmentation"]))[:2].tolist() == [[0, 1, 0, 0, 1, 2], [0, 0, 0, 0, 1, 0]]
    for kind in ("first_fit", "best_fit"):
        assert packed(Packing(6, kind, align=3), *texts)["segmentation"] == [
            [1, 1, 0, 2, 2, 0],
            [1, 1, 1, 1, 0, 0],
            [1, 1, 0, 0, 0, 0],
        ]


def test_rows_prepared_before_segments_could_be_aligned_stay_valid():
    fields = {"length": 8, "kind": "best_fit", "together": True, "max_segments": -1, "truncate": False}
    assert Packing(8, "best_fit").identity == fields
    assert Packing(8, "best_fit", align=4).identity == fields | {"align": 4}


@pytest.mark.parametrize("packing", KINDS, ids=str)
def test_every_pair_is_in_some_row_once_and_segments_are_whole(packing: Packing):
    texts = many()
    found: list[tuple[int, int]] = []
    for row, *_ in packing.rows(documents_of(*texts), Counts()):
        segments, used = row["segmentation"], row["segmentation"] != 0
        assert (row["loss"] == used).all()
        assert not row["inputs"][~used].any()
        assert not row["targets"][~used].any()
        # Each segment begins at the first allowed position.
        numbers, begins, sizes = np.unique(segments[used], return_index=True, return_counts=True)
        assert numbers.tolist() == [*range(1, len(numbers) + 1)]
        ends = -(-sizes // packing.align) * packing.align
        assert np.flatnonzero(used)[begins].tolist() == [0, *np.cumsum(ends)[:-1]]
        assert segments.max() <= (
            1 if not packing.together else packing.max_segments if packing.max_segments > 0 else 99
        )
        for segment in range(1, segments.max() + 1):
            here = segments == segment
            assert (row["inputs"][here][1:] == row["targets"][here][:-1]).all()
        found += zip(row["inputs"][used].tolist(), row["targets"][used].tolist(), strict=True)
    expected = []
    for text in texts:
        tokens = [EOT, *text, EOT]
        pairs = list(itertools.pairwise(tokens))
        expected += pairs[: packing.length] if packing.truncate else pairs
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("packing", KINDS, ids=str)
def test_packing_goes_on_behind_every_row(packing: Packing):
    texts = many()
    documents = documents_of(*texts)
    whole = list(packing.rows(documents, Counts()))
    assert len(whole) > 2 * GROUP
    for i, (_, resume, _) in enumerate(whole[:-1]):
        again = packing.rows(documents[resume.mark :], Counts(), resume.skip)
        for _ in range(resume.rows):
            next(again)
        for found, expected in zip(again, whole[i + 1 : i + 4], strict=False):
            assert found[1:] == expected[1:]
            assert all((found.row[name] == expected.row[name]).all() for name in found.row)


def encoder(**changes) -> Encoder:
    settings = {"columns": ("prompt", "completion"), "tokenize": True, "completion_only": True, "vocab_size": 300}
    return Encoder(**{"tokenizer": ByteTokenizer()} | settings | changes)


def test_only_the_completion_bears_loss():
    (document,) = encoder().encode([Record("here", ("ab", "cd"))], Counts())
    assert document is not None
    assert document.tokens.tolist() == [256, 97, 98, 99, 100, 256]
    assert document.loss is not None
    assert document.loss.tolist() == [False, False, True, True, True]  # for the targets a b c d and the end
    (document,) = encoder(completion_only=False).encode([Record("here", ("ab", "cd"))], Counts())
    assert document is not None
    assert document.loss is None
    (document,) = encoder(tokenizer=ByteTokenizer(add_bos=False, add_eos=False)).encode(
        [Record("here", ("ab", "cd"))], Counts()
    )
    assert document is not None
    assert document.loss is not None
    assert (document.tokens.tolist(), document.loss.tolist()) == ([97, 98, 99, 100], [False, True, True])


def test_masks_are_packed_with_their_tokens():
    documents = encoder().encode([Record("a", ("ab", "c")), Record("b", ("d", "efg"))], Counts())
    rows = [packed.row for packed in Packing(6).rows(enumerate(d for d in documents if d is not None), Counts())]
    assert [row["loss"].tolist() for row in rows] == [[0, 0, 1, 1, 0, 1], [1, 1, 1, 0, 0, 0]]
    assert [row["segmentation"].tolist() for row in rows] == [[1, 1, 1, 1, 2, 2], [1, 1, 1, 0, 0, 0]]


def test_documents_without_text_are_skipped_and_counted():
    counts = Counts()
    records = [Record("a", ("", "")), Record("b", ("", "x")), Record("c", (None, b""))]
    assert [document is None for document in encoder().encode(records, counts)] == [True, False, True]
    assert (counts.documents, counts.empty, counts.bytes) == (1, 2, 1)
    assert counts.notes() == ["2 of 3 documents have no text and are skipped"]


def test_a_document_is_without_loss_if_no_row_holds_a_token_that_bears_loss():
    """Concatenated documents are never cut off, whatever use_truncation is."""
    late = np.array([0, 0, 0, 0, 0, 1], bool)
    for packing, expected in ((Packing(4, truncate=True), 0), (Packing(4, together=False, truncate=True), 1)):
        counts = Counts()
        list(packing.rows([(0, Document(np.arange(7, dtype=np.int32), late))], counts))
        assert counts.without_loss == expected


def of_two(first: int, second: int) -> Document:
    """Returns a document of `first` pairs, followed by one of `second` pairs."""
    behind = Document(np.arange(100, 101 + second, dtype=np.int32), None)
    return Document(np.arange(first + 1, dtype=np.int32), None, (behind,))


@pytest.mark.parametrize("align", [1, 4])
@pytest.mark.parametrize("kind", ["first_fit", "best_fit"])
@pytest.mark.parametrize("limits", [{}, {"max_segments": 2}, {"together": False}], ids=str)
def test_documents_behind_another_stay_with_it(kind: str, limits: dict, align: int):
    rng = np.random.default_rng(0)
    sizes = [(int(a), int(b)) for a, b in rng.integers(1, 9, (400, 2))]
    packing, documents = Packing(16, kind, align=align, **limits), [*enumerate(of_two(*pair) for pair in sizes)]
    whole, found = list(packing.rows(documents, Counts())), []
    for row, _, origins in whole:
        numbers, begins, counts = np.unique(row["segmentation"], return_index=True, return_counts=True)
        begins, counts = begins[numbers > 0], counts[numbers > 0]
        assert len(counts) % 2 == 0
        assert [origin[1:] for origin in origins] == [(0, 0), (0, 1)] * (len(counts) // 2)
        assert [sizes[origin.mark][origin.after] for origin in origins] == counts.tolist()
        assert len(counts) <= 2 * limits.get("max_segments", 99 if limits.get("together", True) else 1)
        assert (begins % align == 0).all()
        assert (row["inputs"][begins] == [0, 100] * (len(counts) // 2)).all()
        found += zip(counts[::2].tolist(), counts[1::2].tolist(), strict=True)
    assert sorted(found) == sorted(sizes)
    for i, (_, resume, _) in enumerate(whole[:-1]):
        again = packing.rows(documents[resume.mark :], Counts(), resume.skip)
        for _ in range(resume.rows):
            next(again)
        row = next(again).row
        assert all((row[name] == whole[i + 1][0][name]).all() for name in row)


def test_the_places_of_documents_that_stay_together():
    assert of_two(5, 3).places() == 8
    assert of_two(5, 3).places(align=4) == 11
    assert of_two(4, 3).places(align=4) == 7
    for packing in (Packing(7, "first_fit"), Packing(16)):
        with pytest.raises(AssertionError, match="with followers"):
            list(packing.rows([(0, of_two(5, 3))], Counts()))
