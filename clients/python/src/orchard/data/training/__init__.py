"""From trajectories to what is trained on: conversations, loss masks, token sequences."""
