"""The trajectory service (README.md)."""
