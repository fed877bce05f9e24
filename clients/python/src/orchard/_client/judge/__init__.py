"""Judges: verdicts of language models on what agents did, alone and in batches, with what they rest on and cost."""
