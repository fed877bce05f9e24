"""The command line `orchard`."""
