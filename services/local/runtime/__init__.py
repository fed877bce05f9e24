"""The process runtime: sandboxes as processes in namespaces of their own, on one machine, without a container
engine.
"""
