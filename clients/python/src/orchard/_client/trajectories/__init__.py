"""Trajectories: what agents did, kept, read, judged and grouped."""
