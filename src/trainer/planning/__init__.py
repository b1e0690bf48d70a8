"""Finds the fastest configuration that fits the devices, by compiling candidates. Start with `search.plan`."""
