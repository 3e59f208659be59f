"""The sub-commands of `antiphon`, a module each."""
