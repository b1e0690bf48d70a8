"""Describes prepared data for people: a summary of a folder that trainer.prepare made, and one of its rows."""

import itertools
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.dump import to_flow
from trainer.config.errors import UserError
from trainer.config.prepared import keys_in
from trainer.config.words import counted, visible
from trainer.data.cache import read_meta
from trainer.data.documents import Location
from trainer.data.prepare import Rows
from trainer.data.prepared import Prepared, read_place, tokenizer_of
from trainer.data.readers import LINE, Line
from trainer.data.rows import origins
from trainer.data.tokenizer import Tokenizer

_WIDTH = 120
_SHOWN = ("max_target_length", "packing", "grain_packing_type", "use_sft", "use_dpo", "prepare_part_mib")


def summary(place: Path) -> Iterator[str]:
    """Yields lines about the prepared data in a folder. Raises UserError if the folder is damaged."""
    prepared, _ = read_place(place)
    keys = keys_in(place)
    yield f"prepared data  {visible(str(place))}"
    yield f"source         {visible(prepared.name)}"
    yield f"keys           {' '.join(f'{name}={to_flow(keys[name])}' for name in _SHOWN)}"
    for label, weight, rows in zip(prepared.labels, prepared.weights, prepared.train, strict=True):
        share = f"{weight / sum(prepared.weights):.1%} of the rows, " if len(prepared.train) > 1 else ""
        yield f"training       {visible(label)}: {share}{_about(rows, prepared.noun)}"
    if prepared.evaluation:
        yield f"evaluation     {_about(prepared.evaluation, prepared.noun)}"


def _about(rows: Rows, noun: str) -> str:
    parts = rows.meta.get("parts", 1)
    documents, tokens = counted(rows.meta["documents"], visible(noun)), counted(rows.meta["tokens"], "trained token")
    return f"{counted(rows.source.size, 'row')} in {counted(parts, 'part')}, {documents}, {tokens}"


def row(place: Path, number: int, held_out: bool, marks: tuple[str, str]) -> Iterator[str]:
    """Yields lines about one row of prepared data: for each segment, the location of its document, its text, and its
    ids.

    Args:
      number: the row, counted from 0 through all components of a mixture in order.
      held_out: whether to show an evaluation row instead of a training row.
      marks: the texts to print before and after trained tokens.

    Raises:
      UserError: there is no such row, or the data are damaged.
    """
    prepared, has_tokenizer = read_place(place)
    tokenizer = tokenizer_of(place, prepared, keys_in(place)) if has_tokenizer else None
    rows, index = _find(prepared, number, held_out)
    (batch,) = [{name: array[0] for name, array in rows.source.rows(np.array([index])).items()}]
    folder, at = rows.source.place(index)
    found, names = origins(folder, at), read_meta(folder).get("names", [])
    used = int((batch["inputs_segmentation"] != 0).sum())
    trained = int((batch["targets_segmentation"] != 0).sum())
    length = len(batch["inputs"])
    yield f"row {number}: {counted(used, 'position')} used of {length:,}, {counted(trained, 'token')} trained"
    for i in range(int(batch["inputs_segmentation"].max())):
        (here,) = np.nonzero(batch["inputs_segmentation"] == i + 1)
        yield ""
        yield f"segment {i + 1}, positions {here[0]} to {here[-1]}: {visible(_origin(found, names, i, len(here)))}"
        # A segment has one more token than it has targets: its first input, which is never trained.
        ids = [int(batch["inputs"][here[0]]), *batch["targets"][here].tolist()]
        is_trained = [False, *(batch["targets_segmentation"][here] != 0).tolist()]
        if tokenizer:
            yield _text(ids, is_trained, tokenizer, marks)
        yield textwrap.fill("ids " + " ".join(map(str, ids)), _WIDTH)


def _find(prepared: Prepared, number: int, held_out: bool) -> tuple[Rows, int]:
    """Returns the component that contains row `number`, and the row's index in the component."""
    components = [*prepared.train] if not held_out else [prepared.evaluation] if prepared.evaluation else []
    total, left = sum(rows.source.size for rows in components), number
    for rows in components:
        if 0 <= left < rows.source.size:
            return rows, left
        left -= rows.source.size
    kind = "evaluation" if held_out else "training"
    raise UserError(f"there is no {kind} row {number}: there are {counted(total, 'row')}, numbered from 0")


def _origin(found: np.ndarray | None, names: list[Any], i: int, pairs: int) -> str:
    if found is None or i >= len(found):
        return "the location of its document is not stored, because an earlier version prepared the data"
    file, number, start, after = map(int, found[i])
    if not (0 <= file < len(names) and isinstance(names[file], list) and [*map(type, names[file])] == [str, str]):
        return "the location of its document is damaged"
    name, unit = names[file]
    place = Line(name, number, unit) if unit == LINE else Location(name, number, unit)
    behind = f", sequence {after + 1} of the record" if after else ""
    return f"{place}{behind}, its tokens {start} to {start + pairs}"


def _text(ids: list[int], is_trained: list[bool], tokenizer: Tokenizer, marks: tuple[str, str]) -> str:
    names: Mapping[int, str] = {token: name for name, token in tokenizer.special_tokens.items()}
    parts = []
    for trained, group in itertools.groupby(zip(is_trained, ids, strict=True), lambda pair: pair[0]):
        data = b"".join(names[i].encode() if i in names else tokenizer.token_bytes(i) for _, i in group)
        text = visible(data.decode(errors="replace"))
        parts.append(f"{marks[0]}{text}{marks[1]}" if trained else text)
    return "".join(parts)
