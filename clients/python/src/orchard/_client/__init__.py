"""The SDK's implementation. Import from `orchard`; everything below here may change without notice."""
