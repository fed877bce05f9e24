"""The judge service (README.md)."""
