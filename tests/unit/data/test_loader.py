"""Loads ahead in one thread."""

import itertools
import threading
import time
import traceback

import pytest

from trainer.data.loader import Loader


def numbers(log: list[int] | None = None):
    """Yields 0, 1, 2, ...; appends each number to `log` when it is requested, and -1 when the generator is closed."""
    try:
        for i in itertools.count():
            if log is not None:
                log.append(i)
            yield i
    finally:
        if log is not None:
            log.append(-1)


def test_items_come_in_order_up_to_the_count():
    with Loader(numbers(), 5) as loader:
        assert list(loader) == [0, 1, 2, 3, 4]


def test_it_loads_two_ahead_and_no_more_and_closes_the_iterator():
    log: list[int] = []
    with Loader(numbers(log)) as loader:
        assert next(loader) == 0
        for _ in range(1000):
            if len(log) == 3:
                break
            time.sleep(0.01)
        time.sleep(0.02)
        assert log == [0, 1, 2]
    assert log == [0, 1, 2, -1]


def test_an_error_surfaces_where_its_item_is_asked_for_with_its_traceback():
    def items():
        yield 0
        raise OSError("the disk is gone")

    with Loader(items(), 3) as loader:
        assert next(loader) == 0
        with pytest.raises(OSError, match="the disk is gone") as caught:
            next(loader)
    assert "items" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_closing_ends_the_thread_and_the_iteration():
    before = threading.active_count()
    loader = Loader(numbers())
    next(loader)
    assert threading.active_count() == before + 1
    loader.close()
    loader.close()
    assert threading.active_count() == before
    assert list(loader) == []


def test_it_measures_the_time_waited_and_not_the_time_loaded():
    def slow():
        while True:
            time.sleep(0.05)
            yield 1

    with Loader(slow()) as loader:
        next(loader)
        assert loader.waited >= 0.03
        time.sleep(0.2)  # by then the next two are ready
        before = loader.waited
        next(loader)
        assert loader.waited - before < 0.03
