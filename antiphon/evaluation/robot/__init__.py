"""The program of one robot. It runs by its path, in an environment that has nothing of ours:
only numpy, pip's openpi-client and the simulation."""
