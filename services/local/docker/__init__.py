"""The docker runtime: each sandbox is a container of a Docker-compatible engine on this machine."""
