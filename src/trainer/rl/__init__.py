"""Reinforcement learning: prompts, rollouts, groups and rewards, as a source of batches."""
