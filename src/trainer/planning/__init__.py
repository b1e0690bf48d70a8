"""Finds the fastest configuration that fits the devices, by compiling candidates. `search.plan` runs a whole search."""
