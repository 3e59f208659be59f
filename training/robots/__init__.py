"""The table-top policy: a simulator, scripted experts, training (docs/training-robots.md)."""
