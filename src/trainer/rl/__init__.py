"""A source of batches for training on the model's own completions: prompts, sampling, rewards and packing."""
