"""The supervisor that mpirun starts in place of each rank, on any host. It must not import from the other folders."""
