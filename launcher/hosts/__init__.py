"""Which hosts a job may use, and which ranks run where."""
