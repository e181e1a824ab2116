"""What mpirun starts in place of each rank, on whichever host. It must not need anything of the other folders."""
