"""mpirun: which one belongs to mpi4py, what it is told, and what its messages mean."""
