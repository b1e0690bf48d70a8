"""The train states of a run on disk: save, verify, restore, retention."""
