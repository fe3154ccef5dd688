"""What kernels of both Triton dialects share: the score tile, compiled user functions, tile plans, a call's records."""
