"""Embedded real stores of the one-machine platform: how PostgreSQL and Valkey are made, started and found ready."""
