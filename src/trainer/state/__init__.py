"""Trees with the structure of a train state, such as its logical axes and its shardings.

docs/guides/state-sharding.md shows how to use the functions of these modules.
"""
