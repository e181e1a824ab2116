"""What a rank and the launcher that started it tell each other."""
