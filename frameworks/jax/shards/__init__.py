"""Optimizers whose state the ranks share: each rank steps its part of the parameters."""
