"""The messages between a rank and the launcher that started it."""
