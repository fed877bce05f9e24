"""The services of Orchard. Each folder is one service with the same set of files; docs/architecture.md explains them."""

__version__ = "0.1.0"
