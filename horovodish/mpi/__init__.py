"""mpi4py, the communicators made with it, and how the ranks of a job and of a host find each other."""
