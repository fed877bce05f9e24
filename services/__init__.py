"""The services of Orchard. Each folder is one with the same set of files: see docs/architecture.md."""

__version__ = "0.1.0"
