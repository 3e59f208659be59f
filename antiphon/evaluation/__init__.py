"""Policies judged in closed loop, against a gateway that runs."""
