"""Rubrics, verdicts, what judges answered and what it took, in PostgreSQL (schema `judge`)."""
