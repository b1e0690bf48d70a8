"""A config-driven trainer for language models in JAX and Flax. Importing it loads neither JAX nor Flax."""
