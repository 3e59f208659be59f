"""Small faults in the machines, each of which the simulation has to see."""
