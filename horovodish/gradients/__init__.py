"""How the gradients of a wrapped optimizer travel."""
