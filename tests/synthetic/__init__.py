"""Stand-ins for tests: nothing here is a model, and nothing outside tests imports it."""
