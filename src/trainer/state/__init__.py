"""Trees with the structure of a train state: its logical axes and its shardings.

The public names are importable from here; docs/guides/state-sharding.md shows their use.
"""
