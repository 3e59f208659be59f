"""A voice client of the Realtime protocol: `antiphon talk`, and a library for tests."""
