"""Changes and drops records before they are encoded: normalization, a user's function, and length limits."""

import functools
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.data.documents import Counts, Record
from trainer.data.functions import failure, load_function, source_hash
from trainer.data.text import decoded


@dataclass(frozen=True)
class Filters:
    """The filters of a corpus.

    Attributes:
      normalization: the Unicode form of all text, NFC or NFKC; "" changes nothing.
      function: the import path of a user's function; "" for none. The function gets a dict of the record's columns, and
        returns True to keep the record, False or None to drop it, or a dict of columns that replaces the one it got.
      shortest, longest: limits on the number of characters, or token ids, in all columns together; 0: no limit.
      duplicates: whether to keep only the first of equal records (see `data.duplicates`).
    """

    normalization: str = ""
    function: str = ""
    shortest: int = 0
    longest: int = 0
    duplicates: bool = False

    @property
    def identity(self) -> str:
        """Text that is equal for filters with equal results; "" for filters that change nothing."""
        if self == Filters():
            return ""
        source = [source_hash(self._called)] if self.function else []
        return repr([*asdict(self).items(), *source])

    def apply(self, record: Record, columns: tuple[str, ...], counts: Counts) -> Record | None:
        """Returns the record to encode. If the record is dropped, returns None and adds it to `counts`.

        Raises:
          UserError: the user's function fails, or returns an invalid value.
        """
        if self.normalization:
            form: Any = self.normalization
            normalized = functools.partial(unicodedata.normalize, form)
            record = record._replace(values=tuple(_of_text(value, normalized) for value in record.values))
        if self.function:
            values = self._call(dict(zip(columns, record.values, strict=True)), columns, record)
            if values is None:
                _drop(record, counts, f"document_filter={self.function} drops them")
                return None
            record = record._replace(values=values)
        if self.shortest or self.longest:
            length = sum(map(_length, record.values))
            if length < self.shortest:
                _drop(record, counts, f"they have fewer than document_min_length={self.shortest} characters")
                return None
            if self.longest and length > self.longest:
                _drop(record, counts, f"they have more than document_max_length={self.longest} characters")
                return None
        return record

    @functools.cached_property
    def _called(self) -> Callable[..., Any]:
        try:
            return load_function(self.function)
        except ImportError as error:
            raise UserError(f"document_filter={self.function}: {error}") from error

    def _call(self, named: dict[str, Any], columns: tuple[str, ...], record: Record) -> tuple[Any, ...] | None:
        where = f"{record.where}: document_filter={self.function}"
        texts = {name: _of_text(value, lambda text: text) for name, value in named.items()}
        function = self._called
        try:
            found = function(dict(texts))
        except Exception as error:  # a user's function can raise any exception
            raise UserError(f"{where} failed: {failure(error)}") from error
        if found is None or (isinstance(found, bool | np.bool_) and not found):
            return None
        found = texts if isinstance(found, bool | np.bool_) else found
        if not isinstance(found, Mapping) or not {*columns} <= found.keys():
            raise UserError(
                f"{where} returned {type(found).__name__}, not True, False, None or a dict with {', '.join(columns)}"
            )
        return tuple(found[name] for name in columns)

    def __getstate__(self) -> dict[str, Any]:
        return asdict(self)


def filters_of(config: Config) -> Filters:
    """Returns the filters that `config` selects."""
    return Filters(
        config.document_normalization,
        config.document_filter,
        config.document_min_length,
        config.document_max_length,
        config.drop_duplicates,
    )


def _drop(record: Record, counts: Counts, why: str) -> None:
    counts.notice(why, lambda: f"{counts.what} are dropped, because {why}; the first: {record.where}")


def _of_text(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a value with `change` applied to every text in it. Bytes become text if they are UTF-8."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, bytes):
        try:
            value = decoded(value)[0]
        except UnicodeDecodeError:
            return value  # the encoder reports the error
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _of_text(item, change) for name, item in value.items()}
    return [_of_text(item, change) for item in value] if isinstance(value, list | tuple) else value


def _length(value: Any) -> int:
    """Returns the number of characters in all text of a value, plus the number of its integers."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, str):
        return len(value)
    if isinstance(value, bytes):
        return len(value.decode(errors="replace"))
    if isinstance(value, Mapping):
        return sum(map(_length, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_length, value))
    return int(isinstance(value, int))
