"""The output of a run: the console, the run directory, the metrics files. Importing it does not load JAX."""
