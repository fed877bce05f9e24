"""TCP connections into the sandbox and out of it, carried over calls of the gateway."""
