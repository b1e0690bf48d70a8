"""One file per capability, with its keys, their checks, and the settings under which they have no effect."""
