"""Recipes that train what the repository ships; not part of the distribution."""
