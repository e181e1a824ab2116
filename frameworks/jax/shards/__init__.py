"""Optimizers whose state the ranks share: each rank steps its elements of every parameter."""
