"""Documents to rows of equal length."""

from collections.abc import Sequence

import numpy as np


def pack(documents: Sequence[Sequence[int]], eot: int, length: int) -> dict[str, np.ndarray]:
    """Packs documents (token ids) into rows: `inputs`, `targets` and `segmentation`, each [rows, length].

    A document t1..tn becomes the inputs [eot, t1, .., tn] with the targets [t1, .., tn, eot]. It is shifted before
    it is packed: every token is a target once, and no target lies in another document. The pairs are laid end to end
    and cut into rows; a document that a cut divides goes on as a new segment of the next row. Segment ids count from 1
    in each row, and the last row is padded with zeros. The dtype is uint16 where every id fits, else int32.
    """
    lengths = np.array([len(document) + 1 for document in documents])
    tokens = int(lengths.sum())
    rows = -(-tokens // length)
    flat = np.fromiter((t for document in documents for t in (eot, *document)), np.int32, tokens)
    arrays = {name: np.zeros((rows, length), np.int32) for name in ("inputs", "targets", "segmentation")}
    segments = arrays["segmentation"]
    arrays["inputs"].flat[:tokens] = flat
    # The first input of the next document is eot, which is the last target of this one.
    arrays["targets"].flat[:tokens] = np.append(flat[1:], eot)
    segments.flat[:tokens] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    segments -= np.where(segments != 0, segments[:, :1] - 1, 0)
    fits = max(int(values.max()) for values in arrays.values()) < 1 << 16
    dtype: type = np.uint16 if fits else np.int32
    return {name: values.astype(dtype) for name, values in arrays.items()}
