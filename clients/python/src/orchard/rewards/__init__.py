"""Rewards and the algorithms around them: pure functions, no service needed."""
