"""What happened when, and who was last."""
