"""`horovodish.run()`: a Python function on ranks."""
