"""A digest of the package's source files that takes no time. unit/aot/test_sources.py tests the true one."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def digests():
    """Yields a list: its last item is the digest of `trainer.planning.journal`, which caches it."""
    from trainer.planning import journal

    found = ["one"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal.sources, "digest", lambda *how: found[-1])
        yield found
    journal._surroundings.cache_clear()
