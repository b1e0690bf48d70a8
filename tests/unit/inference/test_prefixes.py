"""The prefix cache: which prefix a prompt reuses, and which one is evicted."""

import jax
import jax.numpy as jnp
import numpy as np

from trainer.inference.prefixes import PrefixCache
from trainer.inference.sampling import Sampling
from trainer.inference.state import Prefix, Sequences, settings

PLACES = 4


def prefix(*places, mark=0.0):
    """Returns a prefix with one cache per layer, of the lengths `places`, filled with `mark`."""
    one = jnp.zeros(1, jnp.int32)
    sequences = Sequences(one, one, one, one == 0, jnp.zeros((1, 2), jnp.uint32), settings(Sampling(), 1))
    return Prefix([jnp.full((1, 1, count, 2), mark) for count in places], sequences)


def places_of(cache):
    return [array.shape[2] for array in cache]


def row(*tokens):
    return np.array(tokens, np.int32)


def test_a_prefix_is_used_in_part_only_if_its_smallest_ring_holds_all_of_it():
    for places in ((PLACES,), (9, PLACES), (PLACES, 9)):
        fits, longer = (PrefixCache(10**6, places_of) for _ in range(2))
        fits.put(row(*range(PLACES)), prefix(*places))
        longer.put(row(*range(PLACES + 1)), prefix(*places))
        assert fits.get(row(0, 1, 2, 9, 9))[1] == 3
        assert longer.get(row(0, 1, 2, 9, 9)) == (None, 0), places
        assert longer.get(row(*range(PLACES + 1)))[1] == 0, "its last token runs again, so not all is shared"
        found, shared = longer.get(row(*range(PLACES + 1), 9))
        assert shared == found.sequences.positions[0] == PLACES + 1


def test_a_prefix_that_was_used_is_dropped_last():
    size = sum(array.nbytes for array in jax.tree.leaves(prefix(PLACES)))
    cache = PrefixCache(3 * size, places_of)
    for first in (10, 20, 30):
        cache.put(row(first, 1), prefix(PLACES, mark=first))
    cache.get(row(10, 1, 2))
    cache.put(row(20, 1), prefix(PLACES, mark=99))  # already cached: counts as used, and is not replaced
    dropped = []
    for new in (40, 50, 60):
        cache.put(row(new, 1), prefix(PLACES, mark=new))
        assert cache.size == 3 * size
        dropped.append([first for first in (10, 20, 30) if ((0, ""), row(first, 1).tobytes()) not in cache._found])
    assert dropped == [[30], [10, 30], [10, 20, 30]]
    found, shared = cache.get(row(50, 1, 2))
    assert shared == 2
    np.testing.assert_array_equal(found.cache[0], np.full((1, 1, PLACES, 2), 50))


def test_a_prefix_of_another_adapter_is_not_used():
    cache = PrefixCache(10**9, places_of)
    for adapter in (1, 2):
        cache.put(row(10, 1), prefix(PLACES, mark=adapter), adapter)
    assert cache.get(row(10, 1, 2)) == (None, 0)
    for adapter in (1, 2):
        found, shared = cache.get(row(10, 1, 2), adapter)
        assert shared == 2
        np.testing.assert_array_equal(found.cache[0], np.full((1, 1, PLACES, 2), adapter))
