"""Ports: those of a sandbox on this machine, and endpoints of the platform inside a sandbox."""
