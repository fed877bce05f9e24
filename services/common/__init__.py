"""What every service shares. Imports no service."""
