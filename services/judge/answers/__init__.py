"""From what a judge wrote to a score."""
