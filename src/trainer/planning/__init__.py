"""Which configuration fits the devices and is fastest, by the real compiler. `search.plan` is the function."""
