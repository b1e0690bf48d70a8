"""One file per capability: the properties and checks of its keys, and the settings under which they have no effect."""
