"""Sessions of one turn: a request that opens, is answered piece by piece, and closes."""
