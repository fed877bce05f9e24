"""`make bench`: what the platform does, measured through client and gateway into real sandboxes."""
