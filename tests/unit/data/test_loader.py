"""Loading ahead in one thread."""

import threading
import traceback

import pytest

from trainer.data.loader import Loader


def test_batches_come_in_order_from_the_start_step():
    with Loader(lambda step: step * 10, start=3, stop=8) as loader:
        assert list(loader) == [30, 40, 50, 60, 70]


def test_it_loads_two_ahead_and_no_more():
    loaded, third = [], threading.Event()

    def load(step: int) -> int:
        loaded.append(step)
        if step == 2:
            third.set()
        return step

    with Loader(load) as loader:
        assert next(loader) == 0
        assert third.wait(timeout=10)
    assert loaded == [0, 1, 2]


def test_an_error_surfaces_where_its_step_is_asked_for_with_its_traceback():
    def load(step: int) -> int:
        if step == 1:
            raise OSError("the disk is gone")
        return step

    with Loader(load) as loader:
        assert next(loader) == 0
        with pytest.raises(OSError, match="the disk is gone") as caught:
            next(loader)
    assert "load" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_closing_ends_the_thread_and_the_iteration():
    before = threading.active_count()
    loader = Loader(lambda step: step)
    next(loader)
    assert threading.active_count() == before + 1
    loader.close()
    loader.close()
    assert threading.active_count() == before
    assert list(loader) == []
