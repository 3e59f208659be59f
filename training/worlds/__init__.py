"""A world that can be played on a processor: its environment, its training, its measures."""
