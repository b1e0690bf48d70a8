"""The train states of a run on disk: saving, verification, restoring, retention."""
