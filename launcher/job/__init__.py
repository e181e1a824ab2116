"""One run, from the start of mpirun to its exit status."""
