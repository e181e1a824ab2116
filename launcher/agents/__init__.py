"""Agents: processes that are on the hosts already and start MPI's daemons there, where there is no ssh."""
