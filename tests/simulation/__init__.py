"""A deterministic simulation of gateways, workers and clients on virtual time."""
